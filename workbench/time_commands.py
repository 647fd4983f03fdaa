"""What the page's player asks for: run, pause, step, back, the scrubber, the speed menu, the demo.

The same keys and buttons work live and in the past: before the newest recorded step they walk through the recording, from
there on they move the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvscope.engine.breakpoint import NAMES

if TYPE_CHECKING:
    from .workbench import Workbench


class TimeCommands:
    """`acts`: what the page's `data-do` names stand for."""

    def __init__(self, workbench: Workbench):
        self._wb, self._player = workbench, workbench.player
        self.acts: dict[str, Callable[[], object]] = {
            "toggle": self._toggle,
            "step": self._step,
            "back": self._player.back,
            "sub_step": self._sub_step,
            "sub_back": lambda: self._player.sub_step(-1),
            "first": self._player.first,
            "now": self._player.now,
            "next_event": lambda: self.until("event"),
            "previous_event": lambda: self._player.seek(-1),
            "demo": workbench.play_demo,
            "leave": self._leave,
        }

    def require_live(self) -> None:
        """Raise where the person at the screen looks at the past: what they want to change is not what they see."""
        if self._player.at is not None:
            back = (
                "go back to the live engine first" if self._player.can_leave else "press End for the newest step first"
            )
            raise RuntimeError(f"you look at step {self._player.at:,} of a recording; {back}")

    def goto(self, step: float) -> None:
        """The scrubber; a step outside of what was recorded is its nearest one."""
        recording = self._player.recording
        if recording is None:
            return
        step = max(recording.first_step, round(step))
        if step >= recording.last_step:
            self._player.now()
        else:
            self._player.goto(step)

    def visit(self, step: int) -> None:
        """A step that a line of the page names; ValueError, naming the steps that there are, for one that was not recorded."""
        recording = self._player.recording
        if recording is None or step < recording.first_step:
            self._player.goto(step)
        self.goto(step)

    def until(self, kind: str) -> None:
        """Run to the next event of a kind; in the past, go to it."""
        if self._player.at is None:
            self._wb.engine.run_until(kind, wait=False)
        elif not self._player.seek(+1, NAMES[kind][1]):
            raise RuntimeError(f"the recording ends before {NAMES[kind][0]} again")

    def speed(self, value: str) -> None:
        """Steps a second at most, of the engine and of what is replayed; "" for no limit."""
        speed = float(value) if value else None
        if self._wb.player.has_engine:
            self._wb.engine.steps_per_second = speed
        self._player.speed = speed

    def _toggle(self) -> None:
        if self._player.playing:
            self._player.stop()
        elif self._player.at is not None:
            self._player.play(time.monotonic())
        elif self._wb.engine.state == "running":
            self._wb.pause()
        else:
            self._wb.resume()

    def _step(self) -> None:
        if self._player.at is not None:
            self._player.forward()
        else:
            self._wb.pause()
            self._wb.step()

    def _sub_step(self) -> None:
        """A part of a step on; where the next step is not there yet, the engine makes it."""
        if self._player.sub_step(1) or self._player.shows_file:
            return
        self._wb.pause()
        before = self._player.recording.last_step
        self._wb.step()
        self._wb.engine.snapshot()  # leaves its state on the tape
        if self._player.recording.last_step > before:
            self._player.goto(before)
            self._player.sub_step(1)

    def _leave(self) -> None:
        self._player.leave()
        self._wb.select(None)
