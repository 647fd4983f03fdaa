"""`compare`: two to four engines, or recordings of them, on the same requests, side by side and in lock-step.

    cmp = compare("paged/contiguous")                        # a preset, see `PRESETS`
    cmp = compare({}, {"scheduling_policy": "static"}, max_num_seqs=4, num_blocks=128)
    cmp = compare(engine_a, engine_b)                        # or recordings, or the files of recordings
    cmp                                                      # last line of a cell: both pools, timelines, differences
    cmp.run("shared-prefix")                                 # the same requests on each; returns cmp.table()

Engines that are made here share their weights and are closed with the comparison. In each turn every engine makes at least one
step, and those that are behind go on until they have computed as many tokens as the one that was ahead: what differs is what
became of the same work. Engines take turns, so that each has the whole machine while it computes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvscope.engine.events import EventKind

from .compare_presets import PRESETS
from .compare_side import PACES, SideSlots, readable, side_of, workload_of
from .compare_tally import NOW, SO_FAR
from .display import Display
from .player import require_count
from .selection import Choices
from .tables import as_table
from .theme import OwnerSlots

MOST_SIDES = 4
_MOST_TURNS = 100_000  # that one can go back
_LETTERS = "ABCD"
_numbers = itertools.count(1)


def compare(
    *sides: Any, model: Any = "default", pace: str = "tokens", names: Sequence[str] = (), **shared: Any
) -> Comparison:
    """`sides`: the name of a preset alone; or 2 to 4 of: an Engine, a dict of engine options, a Recording, the file of one.

    `model` and `shared` are for the engines that are made here: what they have in common. `names` are titles. `pace`: what is
    kept equal, "tokens" computed, "time" spent computing, or "steps". Raises ValueError, TypeError with a sentence.
    """
    if pace not in PACES:
        raise ValueError(f"pace={pace!r}: must be one of {', '.join(PACES)}")
    titles = [(name, "") for name in names]
    if len(sides) == 1 and isinstance(sides[0], str):
        if sides[0] not in PRESETS:
            raise ValueError(
                f"compare({sides[0]!r}): must be one of {', '.join(PRESETS)}, or give 2 to {MOST_SIDES} sides"
            )
        preset = PRESETS[sides[0]]
        shared = {**preset.shared, **shared}
        titles = titles or [(title, sentence) for title, sentence, _ in preset.sides]
        sides = tuple(options for _, _, options in preset.sides)
    if not 2 <= len(sides) <= MOST_SIDES:
        raise ValueError(f"compare() got {len(sides)} sides: must be 2 to {MOST_SIDES}, or the name of a preset")
    if titles and len(titles) != len(sides):
        raise ValueError(f"names has {len(titles)} entries: must be one for each of the {len(sides)} sides")
    if shared and not any(isinstance(side, Mapping) for side in sides):
        raise TypeError(f"{', '.join(shared)}: options are for engines that compare() makes; these exist")
    return Comparison(sides, model=model, shared=shared, titles=titles, pace=pace)


class Comparison(Display):
    """Made by `compare`. `sides` are its engines and recordings; `turn` counts the turns so far."""

    def __init__(
        self, sides: Sequence[Any], *, model: Any, shared: dict[str, Any], titles: Sequence[tuple[str, str]], pace: str
    ):
        super().__init__()
        self._pace = pace
        self.choices = Choices()
        self.sides: list[Any] = []
        self._made: list[Any] = []
        self._history: deque[tuple[int, ...]] = deque(maxlen=_MOST_TURNS)  # steps of all sides after each turn
        self._turns = -1
        self._at: int | None = None  # the turn that is looked at; None: the newest
        self.speed: float | None = None  # turns a second; None: as fast as it can
        self._turning = threading.Lock()
        self._player: threading.Thread | None = None
        self._wanted = threading.Event()  # whether the player goes on
        self._fault: BaseException | None = None
        try:
            for i, given in enumerate(sides):
                if any(getattr(side, "engine", None) is given for side in self.sides):
                    raise ValueError(
                        f"side {_LETTERS[i]}: the same engine twice; compare two engines, or recordings of one"
                    )
                if isinstance(given, Mapping):
                    from kvscope.engine import Engine

                    options, given = given, Engine(model, **{**shared, **given})
                    self._made.append(given)
                    title = titles[i] if titles else (readable(options), "")
                else:
                    title = titles[i] if titles else None
                self.sides.append(side_of(given, _LETTERS[i], title, lambda: self.state))
        except BaseException:
            self._end_engines()
            raise
        common, live = OwnerSlots(), {}
        for side in self.sides:
            side.slots = SideSlots(common, live, side.letter)
        self._remember()
        from .compare_commands import CompareCommands

        self._commands = CompareCommands(self)

    # -- what a cell does ---------------------------------------------------------------------------------------------

    def submit(self, workload: Any, **sampling: Any) -> None:
        """Give every engine the same requests, and compute nothing yet. `workload`: the name of a scenario, a Scenario, or a
        list of questions (text), prompts (token ids) or `Job`s; `sampling`: fields of SamplingParams, for lists. What one engine
        refuses none is given: ValueError that names it."""
        self._require_open()
        work = workload_of(workload)
        with self._turning:
            given: list[Callable[[], None]] = []
            try:
                for side in self.sides:
                    given.append(side.submit(work, sampling, self.sides[0].info))
            except BaseException:
                for take_back in given:
                    take_back()
                raise

    def run(self, workload: Any = None, *, timeout: float | None = None, **sampling: Any) -> Any:
        """Submit `workload`, if any, and go on until nothing is left to do; returns `table()`.

        A Pause on the page ends the waiting early, and so does Ctrl-C. Raises TimeoutError after `timeout` seconds."""
        if workload is not None:
            self.submit(workload, **sampling)
        self.resume()
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self._wait(until)
        except BaseException:
            self.pause()
            raise
        return self.table()

    def step(self, n: int = 1) -> int:
        """`n` turns; the number of the newest. Raises RuntimeError while it runs by itself."""
        require_count(n, "turns")
        if self.state == "running":
            raise RuntimeError("step() needs a paused comparison, and this one is running; call pause() first")
        self._require_open()
        self._at = None
        for _ in range(n):
            self._turn()
        return self.turn

    def resume(self) -> None:
        """Go on in the background until nothing is left to do."""
        self._play()

    def pause(self) -> None:
        """Stop after the turn that runs now."""
        self._wanted.clear()
        player = self._player
        if player is not None and player is not threading.current_thread():
            player.join()

    def back(self, n: int = 1) -> int:
        """Look `n` turns back, as far as the engines' recordings reach; the turn that is looked at."""
        require_count(n, "turns")
        self.goto((self.turn if self._at is None else self._at) - n)
        return self.turn if self._at is None else self._at

    def goto(self, turn: int) -> None:
        """Look at all sides as they were after `turn`; the newest turn is where it goes on."""
        turn = min(self.turn, max(0, int(turn)))
        self._at = None if turn == self.turn else turn

    def table(self) -> Any:
        """A row a number: metric, each side's value, and each other side in times of A. A pandas DataFrame where pandas is
        installed, else a list of dicts. Times in seconds, shares from 0 to 1; None is not there yet."""
        rows = []
        for metric in (*NOW, *SO_FAR):
            values = {side.letter: metric.of(side.tally) for side in self.sides}
            first = values["A"]
            ratios = {
                f"{letter} / A": value / first if first and value is not None else None
                for letter, value in values.items()
                if letter != "A"
            }
            rows.append({"metric": metric.name, **values, **ratios})
        return as_table(rows)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "running" | "paused" | "stopped" (closed)."""
        if self._closed:
            return "stopped"
        return "running" if self._wanted.is_set() else "paused"

    @property
    def turn(self) -> int:
        """Turns so far; 0 before the first."""
        return self._turns

    def steps_at(self, turn: int) -> tuple[int, ...]:
        """The step of every side after `turn`, or after the oldest that is remembered."""
        return self._history[max(0, turn - self.turn - 1 + len(self._history))]

    @property
    def pace(self) -> str:
        return self._pace

    @pace.setter
    def pace(self, pace: str) -> None:
        if pace not in PACES:
            raise ValueError(f"pace={pace!r}: must be one of {', '.join(PACES)}")
        self._pace = pace

    @property
    def looking_at(self) -> int | None:
        """The turn at which all views stand; None: the newest."""
        return self._at

    # -- turns --------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Bring every side that has work at least to where the one ahead was; False when there is no work."""
        with self._turning:
            busy = [side for side in self.sides if side.has_work]
            if not busy:
                return False
            progress = PACES[self._pace]
            mark = max(progress(side.tally) for side in busy)
            for side in busy:
                while side.advance() and side.has_work and progress(side.tally) < mark:
                    pass
            self._remember()
            return True

    def _remember(self) -> None:
        self._history.append(tuple(side.step for side in self.sides))
        self._turns += 1

    def _play(self, turns: int | None = None, until: frozenset[EventKind] = frozenset()) -> None:
        """Make turns on a thread of their own: so many, or until an event of these kinds, or until there is nothing to do."""
        self._require_open()
        if self._wanted.is_set():
            return
        if self._player is not None:
            self._player.join()
        self._fault, self._at = None, None
        self._wanted.set()
        name = f"kvscope-compare-{next(_numbers)}"
        self._player = threading.Thread(target=self._run, args=(turns, until), name=name, daemon=True)
        self._player.start()

    def _run(self, turns: int | None, until: frozenset[EventKind]) -> None:
        try:
            seen = [side.events.next_index for side in self.sides]
            for done in itertools.count(1):
                begun = time.monotonic()
                if not self._turn() or done == turns:
                    break
                if until:
                    news = [side.events.since(index) for side, index in zip(self.sides, seen, strict=True)]
                    seen = [next_index for _, next_index, _ in news]
                    if any(event.kind in until for events, _, _ in news for event in events):
                        break
                rest = 0.0 if self.speed is None else 1 / self.speed - (time.monotonic() - begun)
                if not self._sleep(rest):
                    break
        except Exception as error:  # told on the page, and raised where somebody waits
            self._fault = error
            self._tell(error)
        finally:
            self._wanted.clear()

    def _sleep(self, seconds: float) -> bool:
        """Whether to go on after this pause."""
        until = time.monotonic() + seconds
        while self._wanted.is_set() and time.monotonic() < until:
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))
        return self._wanted.is_set()

    def _wait(self, until: float | None) -> None:
        """Until the player has stopped; where nothing else moves the views (Colab), this does."""
        player = self._player
        while player is not None and player.is_alive():
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"the comparison is at turn {self.turn} and not finished; it is paused now")
            player.join(0.1)
            if self._pump is not None:
                self._pump()
        if self._fault is not None:
            raise self._fault

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this comparison is closed; make a new one with compare(...)")

    # -- what it shows ------------------------------------------------------------------------------------------------

    def _make_screen(self, on_message: Callable[..., None], *, only: str = "", **options: Any) -> Any:
        from .compare_page import CompareScreen

        if only:
            raise ValueError(f"show({only!r}): the views of a comparison are one page; call show()")
        return CompareScreen(self.choices, on_message, sides=self.sides, **options)

    def _tick_now(self) -> Any:
        from .compare_page import CompareTick

        return CompareTick(self.sides, self.choices.selection, None if self._at is None else self.steps_at(self._at))

    def _status(self) -> Any:
        from .compare_page import status

        return status(self, self._error)

    def _engines(self) -> list[Any]:
        return []

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def _owns_engine(self) -> bool:  # type: ignore[override]
        return bool(self._made)

    def _end(self) -> None:
        self.pause()

    def _end_engines(self) -> None:
        for side in self.sides:
            side.release()
        for engine in self._made:
            engine.close()

    def __repr__(self) -> str:
        sides = "; ".join(f"{side.letter}: {side.name}, step {side.step}" for side in self.sides)
        return f"<Comparison, {self.state} at turn {self.turn}: {sides}>"
