"""Small workloads with a name: what a person can start with one click, and a cell with `wb.run("shared-prefix")`.

One file a scenario; a new one is a new file with `SCENARIO` and one name in the table. Each says in a sentence what to
look at. Those that go on from answers really wait for them (`run`).
"""

from __future__ import annotations

import importlib

from .run import ScenarioRun
from .turns import Scenario, Turn

__all__ = ["SCENARIOS", "Scenario", "ScenarioRun", "Turn", "scenario"]

_NAMES = (
    "one-chat", "samples", "shared-prefix", "crowd", "few-shot", "multi-turn", "tree-of-thought", "beam-search",
    "memory-pressure", "long-prompt", "static-against-continuous",
)  # fmt: skip
SCENARIOS: dict[str, Scenario] = {
    name: importlib.import_module(f".{name.replace('-', '_')}", __name__).SCENARIO for name in _NAMES
}


def scenario(name: str | Scenario) -> Scenario:
    """The scenario of that name. Raises ValueError that lists the names."""
    if isinstance(name, Scenario):
        return name
    if name not in SCENARIOS:
        raise ValueError(f"scenario={name!r}: must be one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
