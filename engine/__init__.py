"""kvscope.engine: models, KV cache, scheduling, sampling, events and metrics. Knows no screen.

Everything that users call is named here and loaded on first use: events, snapshots and recordings need numpy only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .core import EngineCore
    from .engine import Engine
    from .events import Cause, Event, EventKind, EventLog
    from .handle import EngineClosed, RequestFailed, RequestHandle
    from .info import EngineInfo
    from .outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutput
    from .request import RequestRefused
    from .sampling.beam_search import BeamSearchParams
    from .sampling.params import SamplingParams
    from .sampling.structured import StructuredOutputsParams
    from .snapshot import BlockState, EngineSnapshot, RequestState

_HOMES = {
    "BeamSearchParams": ".sampling.beam_search",
    "BlockState": ".snapshot",
    "Cause": ".events",
    "CompletionOutput": ".outputs",
    "Engine": ".engine",
    "EngineClosed": ".handle",
    "EngineConfig": ".config",
    "EngineCore": ".core",
    "EngineInfo": ".info",
    "EngineSnapshot": ".snapshot",
    "Event": ".events",
    "EventKind": ".events",
    "EventLog": ".events",
    "RequestFailed": ".handle",
    "RequestHandle": ".handle",
    "RequestMetrics": ".outputs",
    "RequestOutput": ".outputs",
    "RequestRefused": ".request",
    "RequestState": ".snapshot",
    "SamplingParams": ".sampling.params",
    "StepOutput": ".outputs",
    "StructuredOutputsParams": ".sampling.structured",
}

__all__ = [
    "BeamSearchParams",
    "BlockState",
    "Cause",
    "CompletionOutput",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineCore",
    "EngineInfo",
    "EngineSnapshot",
    "Event",
    "EventKind",
    "EventLog",
    "RequestFailed",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefused",
    "RequestState",
    "SamplingParams",
    "StepOutput",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'kvscope.engine' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
