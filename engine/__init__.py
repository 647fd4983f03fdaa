"""kvscope.engine: models, KV cache, scheduling, sampling, events and metrics. Knows no screen.

Everything that users call is named here and loaded on first use: events, snapshots and recordings need numpy only.
"""

import importlib

_HOMES = {
    "Engine": ".engine",
    "RequestHandle": ".engine",
    "EngineConfig": ".config",
    "EngineCore": ".core",
    "SamplingParams": ".sampling.params",
    "RequestRefused": ".request",
    "RequestOutput": ".outputs",
    "CompletionOutput": ".outputs",
    "RequestMetrics": ".outputs",
    "StepOutput": ".outputs",
    "EngineSnapshot": ".snapshot",
    "RequestState": ".snapshot",
    "Event": ".events",
    "EventKind": ".events",
    "EventLog": ".events",
    "Cause": ".events",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'kvscope.engine' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
