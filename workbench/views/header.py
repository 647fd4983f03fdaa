"""The fixed top of the page: name and facts, player, banner, story line, five numbers, tabs.

All of it is HTML whose text is replaced only when it differs, plus the player's track (see scrubber.py). Buttons carry
data attributes; what they do is decided elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bokeh.models import Column, Div, InlineStyleSheet
from kvscope.engine.events import EventKind

from ..markup import ICONS, esc, plural, size
from ..selection import TABS, Choices
from ..story import StoryLine
from ..sub_step import PARTS
from ..theme import LIGHT, Theme
from ..workshop_html import Place, workshop_html
from .base import Frame, View
from .player_html import banner, buttons, position
from .scrubber import Scrubber

if TYPE_CHECKING:
    from ..tick import Tick

_TAB_HINTS = {
    "watch": "requests, memory, time",
    "explain": "who maps to which block, and why",
    "measure": "numbers over time",
}
_RATE_STEPS = 10  # tokens/s is the mean of so many steps


@dataclass(frozen=True)
class Status:
    """What the header says besides the frame: filled by the workbench at every tick."""

    at: int | None = None  # the step that is looked at; None: live
    unit: str = "step"  # what Step and Back move by
    has_parts: bool = True  # whether one can go into a step
    part: int = len(PARTS)  # how many of the parts of that step are done; all but inside of a step
    newest: int = 0  # the newest recorded step
    engine: str = "running"  # what the engine does meanwhile: "running" | "paused" | "stopped"; "": there is none
    file: str = ""  # a recording is shown in the place of the engine: what it is called
    playing: bool = False  # recorded steps pass by themselves
    speed: float | None = None  # steps a second; None: as fast as it can
    error: str = ""  # a view failed: the sentence that says so
    traceback: str = ""
    closed: bool = False
    traffic: tuple[str, bool] = ("", False)  # what it does, in a sentence; whether more arrives
    idea: Place | None = None  # where a workshop stands

    @property
    def source(self) -> str:
        """A recording never looks like a live engine."""
        return "LIVE" if self.at is None and not self.file else "REPLAY"


class Header(View):
    """`root` is the top; `tabs` and `foot` are shown by the page where they belong."""

    title = "Overview"

    def __init__(self, theme: Theme = LIGHT, sheets: dict[str, InlineStyleSheet] | None = None, **callbacks):
        super().__init__(theme, **callbacks)
        sheets = sheets or {}
        self._html = [sheets["parts"]] if sheets else []
        self.head, self.buttons, self.position, self.banner, self.say, self.kpis, self.tabs = (
            Div(stylesheets=self._html, sizing_mode="stretch_width", margin=0) for _ in range(7)
        )
        self.foot = Div(text=foot_html(), stylesheets=self._html, sizing_mode="stretch_width", margin=0)
        self.buttons.sizing_mode = self.position.sizing_mode = self.kpis.sizing_mode = "inherit"
        self.scrubber = Scrubber(theme, sheets.get("track"))
        self.sources = self.scrubber.sources
        self.player = Column(
            self.buttons,
            self.scrubber.figure,
            self.position,
            stylesheets=[sheets["player"]] if sheets else [],
            margin=0,
        )
        self.story = Column(self.say, self.kpis, stylesheets=[sheets["story"]] if sheets else [], margin=0)
        self.root = Column(
            self.head, self.player, self.banner, self.story, self.tabs, sizing_mode="stretch_width", margin=0, spacing=0
        )
        self._numbers: list[tuple[str, str, bool]] = []
        self.reset()

    def reset(self) -> None:
        self._tokens: deque[tuple[float, float]] = deque(maxlen=_RATE_STEPS)  # decode tokens, seconds
        self._last_step_time = 0.0
        self.story_line = StoryLine()
        self.rate = 0.0

    # -- one frame ----------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        """Counts, rates and the story; `show` writes what depends on choices and status."""
        self.frame = frame
        for event in frame.events:
            if event.kind is EventKind.STEP:
                self._tokens.append((event.numbers.get("decode_tokens", 0), event.numbers.get("seconds", 0)))
                self._last_step_time = event.time
        seconds = sum(s for _, s in self._tokens)
        idle = frame.running and frame.now - self._last_step_time > 2
        self.rate = 0.0 if idle or not seconds else sum(t for t, _ in self._tokens) / seconds
        self.story_line.update(frame)
        self._numbers = self._count(frame)

    def _count(self, frame: Frame) -> list[tuple[str, str, bool]]:
        status = {r.id: r.status for r in frame.snapshot.requests}
        counts = {name: sum(s == name for s in status.values()) for name in ("running", "waiting", "preempted")}
        share = frame.snapshot.num_used_blocks / max(1, frame.snapshot.num_blocks - 1)
        return [
            (f"{counts['running']}", "running", False),
            (f"{counts['waiting']}", "waiting", False),
            (f"{counts['preempted']}", "preempted", counts["preempted"] > 0),
            (f"{self.rate:,.0f}", "tokens/s", False),
            (f"{share:.0%}".replace("%", " %"), "blocks in use", share > 0.97),
        ]

    def show(self, choices: Choices, status: Status, tick: Tick) -> None:
        frame = self.frame
        if frame is None:
            return
        self.scrubber.update(tick.recording, frame.snapshot.num_blocks, frame.snapshot.step, tick.origin)
        word = "stopped" if status.closed else frame.snapshot.state
        write(self.head, _head(frame, status))
        write(self.buttons, buttons(status, word))
        write(self.position, position(status, frame.snapshot.step, word))
        write(self.banner, workshop_html(status.idea) + banner(status, choices.trace_open, word))
        write(self.say, self._say(status, word))
        write(self.kpis, '<div class="kpis">' + "".join(_kpi(*n) for n in self._numbers) + "</div>")
        write(self.tabs, _tabs(choices))

    def _say(self, status: Status, word: str) -> str:
        line = self.story_line
        more, after = "", esc(line.consequence)
        if line.quiet and status.source == "LIVE":
            demo = "play the recorded demo"
            after = after.replace(demo, f'<button type="button" class="more" data-do="demo">{demo}</button>')
        if line.others:
            more = (
                f' <button type="button" class="more" data-tab="explain">and {plural(line.others, "other event")} '
                "in this step</button>"
            )
        live = "polite" if word == "paused" else "off"
        return (
            f'<div class="say" role="status" aria-live="{live}"><span class="ic">{_large(ICONS[line.icon])}</span>'
            f"<span>{esc(line.text)}<small>{after}{more}</small></span></div>"
        )

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        self.scrubber.paint(theme)

    # -- twins --------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        return f"{self.story_line.text} {self.story_line.consequence}".strip()

    def table(self) -> tuple[list[str], list[list[str]]]:
        return ["What", "Now"], [[name, number] for number, name, _ in self._numbers]


def write(div: Div, text: str) -> None:
    if div.text != text:
        div.text = text


def _large(icon: str) -> str:
    return icon.replace('width="20" height="20"', 'width="24" height="24"', 1)


def logo() -> str:
    fills = ["--o1", "--shared", "--o2", "--shared", "--o3", "", "--o4", "", "--o1"]
    cells = "".join(
        f'<rect x="{1 + i % 3 * 8}" y="{1 + i // 3 * 8}" width="6.4" height="6.4" rx="1.4" '
        + (f'fill="var({fill})"/>' if fill else 'fill="none" stroke="var(--line2)"/>')
        for i, fill in enumerate(fills)
    )
    return f'<svg width="24" height="24" viewBox="0 0 24 24" aria-hidden="true">{cells}</svg>'


_RESET = '<button type="button" data-do="reset" title="Empty the prefix cache">Reset cache</button>'


def _head(frame: Frame, status: Status) -> str:
    info, snapshot = frame.info, frame.snapshot
    pool = f"<b>{snapshot.num_blocks:,} blocks × {snapshot.block_words} tokens</b>"
    facts = [pool]
    if info is not None:
        facts = [
            f"<b>{esc(info.model_name)}</b>",
            esc(_device(info)),
            esc(info.precision),
            f"{pool}, {size(info.pool_bytes)}",
            f"weights: {esc(info.weights_source)}",
        ]
    tag = status.source.lower()
    return (
        f'<div class="head"><span class="brand">{logo()}kvscope</span><span class="tag {tag}">{status.source}</span>'
        f'<span class="facts">{" ".join(f"<span>{fact}</span>" for fact in facts)}</span>'
        f'<span class="acts">{_RESET if status.engine else ""}</span></div>'
    )


def _device(info) -> str:
    if info.device != "cpu":
        return str(info.device).upper()
    return f"CPU, {plural(info.num_threads, 'thread')}"


def _kpi(number: str, name: str, hot: bool) -> str:
    return f'<div class="kpi{" hot" if hot else ""}"><b>{esc(number)}</b><span>{name}</span></div>'


def _tabs(choices: Choices) -> str:
    buttons = "".join(
        f'<button type="button" class="tab" role="tab" data-tab="{name}" aria-selected="{str(name == choices.tab).lower()}"'
        f' title="{place}">{name.title()}</button>'
        for place, name in enumerate(TABS, 1)
    )
    # A tablist may hold nothing but tabs, so it ends before the hint.
    tabs = f'<span role="tablist" style="display:contents">{buttons}</span>'
    return options_html(choices, _TAB_HINTS[choices.tab], before=tabs)


def options_html(choices: Choices, hint: str, *, before: str = "") -> str:
    """What the whole page can be told: `before` (its tabs), then what is selected, or a hint, then how it looks."""
    chosen = choices.selection
    if chosen is None:
        said = f'<span class="hint">{hint}</span>'
    else:
        said = highlighted_html(f"{chosen.kind.title()} {chosen.id}")
    options = "".join(
        f'<button type="button" class="quiet" data-do="{name}" aria-pressed="{str(on).lower()}" title="{key}">{text}'
        "</button>"
        for name, text, on, key in (
            ("tables", "Tables", choices.all_tables, "T: every view as a table"),
            ("room", "Room size", choices.room, "R: larger, for a projector"),
            ("theme", "Light" if choices.dark else "Dark", False, "D"),
            ("help", "Keys", False, "?"),
        )
    )
    return f'<div class="tabs">{before}{said}<span class="spacer"></span><span class="opts">{options}</span></div>'


def highlighted_html(what: str) -> str:
    """What is selected, and the button that drops it."""
    return (
        '<span class="hint keep"><button type="button" class="quiet" data-do="clear" style="color:var(--accent)" '
        f'title="Esc">{what} is highlighted in every view. Clear</button></span>'
    )


KEYS = (
    ("Space", "run or pause"),
    ("←</kbd> <kbd>→", "back, step"),
    ("S</kbd>, <kbd>Shift</kbd> + <kbd>S", "into the parts of a step and back, as Shift and a click on Step"),
    ("Shift</kbd> + <kbd>←</kbd> <kbd>→", "previous, next event"),
    ("Home</kbd> <kbd>End", "first, newest step"),
    ("[</kbd> <kbd>]", "previous, next request"),
    ("Tab", "into lists and the pool; arrows walk there, Enter selects"),
    ("1</kbd>–<kbd>3", "Watch, Explain, Measure"),
    ("T", "all views as tables"),
    ("R", "room size"),
    ("D", "dark or light"),
    ("/", "write a prompt"),
    ("Ctrl</kbd> <kbd>Enter", "submit the prompt"),
    ("Esc", "clear the selection"),
)
_IN_FOOT = (*KEYS[:2], *KEYS[3:6], KEYS[-1])


def foot_html(keys: Sequence[tuple[str, str]] = KEYS) -> str:
    """The line of the keys at the foot of the page, and the table of all of them that "?" shows."""
    line = "".join(f"<span><kbd>{key}</kbd> {text}</span>" for key, text in keys if (key, text) in _IN_FOOT)
    rows = "".join(f"<tr><td><kbd>{key}</kbd></td><td>{text}</td></tr>" for key, text in keys)
    return (
        f'<div class="foot">{line}</div><div class="help" data-help hidden role="dialog" aria-label="Keys"><table>{rows}'
        "</table></div>"
    )
