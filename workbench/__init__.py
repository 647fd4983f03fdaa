"""kvscope.workbench: the views, their recording and the command line. Loaded on first use.

Importing it inside a notebook also teaches IPython to show a request handle as a widget.
"""

import importlib

from .handles import register as _register_handles

_HOMES = {"Workbench": ".workbench"}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'kvscope.workbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__


_register_handles()
