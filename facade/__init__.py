"""kvscope: a Jupyter-native workbench for LLM serving.

`kvscope.Engine` serves a model, `kvscope.Workbench` shows it. Names are loaded when they are first used, so that
`import kvscope` costs nothing and a recording replays without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvscope.engine import BeamSearchParams, Engine, EngineConfig, SamplingParams, StructuredOutputsParams
    from kvscope.workbench import Workbench

__version__ = "0.1.0"

_HOMES = {
    "BeamSearchParams": "kvscope.engine",
    "Engine": "kvscope.engine",
    "EngineConfig": "kvscope.engine",
    "SamplingParams": "kvscope.engine",
    "StructuredOutputsParams": "kvscope.engine",
    "Workbench": "kvscope.workbench",
}

__all__ = [
    "BeamSearchParams",
    "Engine",
    "EngineConfig",
    "SamplingParams",
    "StructuredOutputsParams",
    "Workbench",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvscope' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
