"""Which sentence the page tells now: one line, kept long enough to be read.

Paused: the most important thing of the newest step. Running: the most important thing since the line last changed, kept
for at least 1.5 s; a quiet step is told only when nothing has happened for a while.
"""

from __future__ import annotations

from kvscope.engine.events import Event, EventKind

from .sentences import Context, Story, story
from .views.base import Frame

HOLD_SECONDS = 1.5
_MEMORY = 2048  # events of untold steps that are kept

ICON_OF = {
    EventKind.EVICTED: "evict",
    EventKind.PREEMPTED: "preempt",
    EventKind.SWAPPED_OUT: "preempt",
    EventKind.SWAPPED_IN: "resume",
    EventKind.COPIED: "copy",
    EventKind.FORKED: "fork",
    EventKind.CACHE_HIT: "hit",
    EventKind.CACHE_MISS: "miss",
    EventKind.FINISHED: "finish",
    EventKind.CANCELLED: "finish",
    EventKind.RESUMED: "resume",
    EventKind.ADMITTED: "resume",
    EventKind.REFUSED: "refuse",
    EventKind.FAILED: "refuse",
}


class StoryLine:
    """`update` with every frame; then `text`, `consequence`, `others` and `icon` are what stands on the page."""

    def __init__(self) -> None:
        self._context = Context()
        self._untold: list[Event] = []
        self._changed = -HOLD_SECONDS
        self._told: Story | None = None
        self._was_running: bool | None = None

    def update(self, frame: Frame) -> None:
        if self._was_running is None:  # a page that opens on a paused engine tells its newest step, not its past
            self._was_running = frame.running
        self._context.learn(snapshot=frame.snapshot)
        self._untold += frame.events
        if len(self._untold) > _MEMORY:
            del self._untold[:-_MEMORY]
        if not self._untold:
            return
        stopped_now = self._was_running and not frame.running
        if frame.running and frame.now - self._changed < HOLD_SECONDS:
            return
        events = self._untold
        if not frame.running:
            newest = max(e.step for e in events)
            if not stopped_now or all(e.kind in (EventKind.PAUSED, EventKind.STEP) for e in events):
                events = [e for e in events if e.step == newest]
        told = story(events, self._context)
        if told is not None:
            # The line names one step; what else happened in that step is offered, not what the second brought.
            others = story([e for e in events if e.step == told.step], self._context)
            self._told = told._replace(others=others.others if others else 0)
            self._changed = frame.now
        self._untold.clear()
        self._was_running = frame.running

    @property
    def quiet(self) -> bool:
        """Nothing has happened yet."""
        return self._told is None

    @property
    def text(self) -> str:
        return self._told.headline if self._told else "Nothing is running yet."

    @property
    def consequence(self) -> str:
        return (
            self._told.consequence if self._told else "Choose a scenario and press Submit, or play the recorded demo."
        )

    @property
    def others(self) -> int:
        return self._told.others if self._told else 0

    @property
    def icon(self) -> str:
        return ICON_OF.get(self._told.kind, "quiet") if self._told else "quiet"
