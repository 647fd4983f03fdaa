"""kvscope.workbench: the views, their recording and the command line. Loaded on first use.

Importing it inside a notebook also teaches IPython to show a request handle as a widget.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .handles import register as _register_handles

if TYPE_CHECKING:
    from .comparison import compare
    from .workbench import Workbench

_HOMES = {"Workbench": ".workbench", "compare": ".comparison"}

__all__ = ["Workbench", "compare"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'kvscope.workbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__


_register_handles()
