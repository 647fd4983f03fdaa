"""Workshop mode: one idea at a time, in large type, each with the engine in the very state that it speaks of.

    workshop = wb.workshop("paging")     # Previous and Next stand on the page too
    workshop.next()

An idea asks real questions and runs the real engine to a real event, on a thread of its own, when one comes to it for the
first time; going back to it shows the recorded step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .scenarios import SCENARIOS, Scenario, Turn
from .views.base import Selection
from .workshop_html import Place

if TYPE_CHECKING:
    from kvscope.engine.events import Event

    from .workbench import Workbench


@dataclass(frozen=True)
class Idea:
    """`sentence` says what to look at. Before it is told: `ask` is submitted, then the engine runs `steps` steps, or until an
    event (a breakpoint's name, see `Engine.run_until`). `select` what the event is about: its "request" or its "block"."""

    sentence: str
    ask: Scenario | None = None
    until: str = ""
    steps: int = 0
    tab: str = "watch"
    select: str = ""


def _question(text: str, **sampling: Any) -> Scenario:
    return Scenario(text, "", (Turn(text, {"temperature": 0.0, **sampling}),))


_GUIDE = (
    "You are the guide of a small museum of clocks. Answer visitors in one short sentence, name the room in which the piece "
    "can be seen, and say so when you do not know. "
)

WORKSHOPS: dict[str, tuple[Idea, ...]] = {
    "paging": (
        Idea("The memory for keys and values is a pool of equal blocks. Each square has room for one block of tokens."),
        Idea("A prompt takes as many blocks as it fills, wherever they are. The dots in the last one are slots that nobody has "
             "written yet.", SCENARIOS["one-chat"], steps=1, select="request"),
        Idea("Each step writes one token. Only when the last block is full, as now, a new one is taken.", until="allocated",
             select="block"),
        Idea("A block table says which block holds which part of the text. The engine finds every token through it.",
             tab="explain"),
        Idea("The answer is finished. Its blocks are hatched: nobody reads them, but their text can still be found.",
             until="finish"),
    ),
    "sharing": (
        Idea("Four answers to one question are asked for. Its prompt is computed once.", SCENARIOS["samples"], until="fork",
             select="request"),
        Idea("The black blocks are read by all four: memory exists once, and a count says how many read it.", tab="explain"),
        Idea("One of the four had to write into a block that others still read, so it got a copy of its own.", until="copy",
             select="block"),
        Idea("Now each has a last block of its own, and all before it is still shared.", steps=4, tab="explain"),
        Idea("The first of them has ended. What the others read stays; what was its own is given back.", until="finish"),
    ),
    "prefix-cache": (
        Idea("A question with a long instruction before it: nothing of it is known yet.",
             _question(f"{_GUIDE}Where is the oldest clock?", max_tokens=24), until="cache miss", select="request"),
        Idea("It is answered. The text of its full blocks stays in memory: it is cached.", until="finish", tab="explain"),
        Idea("Another question begins with the same words. Their blocks are found, and their computation is skipped.",
             _question(f"{_GUIDE}Which clock is the loudest?", max_tokens=24), until="cache hit", select="request"),
        Idea("Only the rest of its prompt was computed. That is why its first token came sooner.", steps=3, tab="measure"),
    ),
    "preemption": (
        Idea("Sixteen long answers are asked for, and together they need more memory than there is.",
             SCENARIOS["memory-pressure"], steps=2),
        Idea("No block was free, so somebody had to give theirs back: the youngest is preempted.", until="preemption",
             select="request"),
        Idea("Somebody ended and made room. Whoever was preempted comes back and computes again what it lost.",
             until="resumed", select="request"),
        Idea("Nothing is lost but time: dashes in the timeline are the steps in which a request waited to come back.", steps=8),
    ),
}  # fmt: skip


class Workshop:
    """Made by `Workbench.workshop`. `number` is the idea's, from 1; `sentence` is what it says."""

    def __init__(self, workbench: Workbench, name: str):
        if name not in WORKSHOPS:
            raise ValueError(f"workshop={name!r}: must be one of {', '.join(WORKSHOPS)}")
        self.name, self.ideas = name, WORKSHOPS[name]
        self._wb = workbench
        self._lock = threading.Lock()
        self._seen: dict[
            int, tuple[int, Selection | None]
        ] = {}  # by idea: the step at which it was told, and the selection
        self._number = 0
        self._arrived = threading.Event()
        workbench.pause()
        self._enter(1)

    @property
    def number(self) -> int:
        return self._number

    @property
    def sentence(self) -> str:
        return self.ideas[self._number - 1].sentence

    @property
    def place(self) -> Place:
        return Place(self.sentence, self._number, len(self.ideas), not self._arrived.is_set())

    def next(self) -> None:
        """The next idea; returns at once, while the engine goes there. Nothing after the last, or while it is on its way."""
        if self._number < len(self.ideas) and self._arrived.is_set():
            self._enter(self._number + 1)

    def previous(self) -> None:
        """The idea before, as it was; nothing before the first."""
        if self._number > 1 and self._arrived.is_set():
            self._enter(self._number - 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the engine is where the idea wants it; False after `timeout` seconds."""
        return self._arrived.wait(timeout)

    def _enter(self, number: int) -> None:
        with self._lock:
            self._number = number
            self._arrived.clear()
            self._wb._feed(self._go)

    def _go(self) -> None:
        """On a feeder's thread: bring the engine where this idea speaks of, or show where that was."""
        wb, idea = self._wb, self.ideas[self._number - 1]
        try:
            if self._number not in self._seen:
                wb.now()
                event, snapshot = self._run(idea), wb.engine.snapshot()
                self._seen[self._number] = snapshot.step, _selected(idea, event, snapshot)
            step, selection = self._seen[self._number]
            if step and step < wb.engine.snapshot().step:
                wb.goto(step)
            else:
                wb.now()
            wb.choices.tab = idea.tab
            wb.select(selection)
        except (RuntimeError, ValueError) as error:  # a pool too small for it, a request that was cancelled
            wb.choices.note = ("warn", f"The workshop could not go on: {error}.")
        finally:
            self._arrived.set()

    def _run(self, idea: Idea) -> Event | None:
        wb, event = self._wb, None
        if idea.ask is not None:
            wb.run(idea.ask)
        if idea.until:
            event = wb.run_until(idea.until)
        if idea.steps:
            wb.step(idea.steps)
        return event


def _selected(idea: Idea, event: Any, snapshot: Any) -> Selection | None:
    """What the event is about; without one the newest request; of an idea that selects nothing, nothing."""
    if idea.select == "block" and event is not None and event.block_id >= 0:
        return Selection("block", event.block_id, event.generation)
    if not idea.select:
        return None
    if event is not None and event.request_id >= 0:
        return Selection("request", event.request_id)
    return Selection("request", snapshot.requests[-1].id) if snapshot.requests else None
