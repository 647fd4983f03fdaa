"""The fixed top of the page: name and facts, player, banner, story line, five numbers, tabs.

All of it is HTML whose text is replaced only when it differs, plus one small figure: the share of blocks in use over the
recorded steps, with a tick for every eviction and a disc for every preemption. Buttons carry data attributes; what they
do is decided elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bokeh.models import Column, Div, InlineStyleSheet, Range1d
from kvscope.engine.events import EventKind

from ..markup import ICONS, esc, plural, size
from ..selection import TABS, Choices
from ..story import StoryLine
from ..theme import LIGHT, Theme
from .base import Frame, View, empty_source, plain_figure

_TAB_HINTS = {
    "watch": "requests, memory, time",
    "explain": "who maps to which block, and why",
    "measure": "numbers over time",
}
_TRACK_STEPS = 600
_RATE_STEPS = 10  # tokens/s is the mean of so many steps


@dataclass(frozen=True)
class Status:
    """What the header says besides the frame: filled by the workbench at every tick."""

    source: str = "LIVE"  # "LIVE" | "REPLAY": a recording never looks like a live engine
    error: str = ""  # a view failed: the sentence that says so
    traceback: str = ""
    closed: bool = False
    traffic: tuple[str, bool] = ("", False)  # what it does, in a sentence; whether more arrives


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
        self.foot = Div(text=_FOOT, stylesheets=self._html, sizing_mode="stretch_width", margin=0)
        self.buttons.sizing_mode = self.position.sizing_mode = self.kpis.sizing_mode = "inherit"
        self._build_track(sheets)
        self.player = Column(
            self.buttons, self._track, self.position, stylesheets=[sheets["player"]] if sheets else [], margin=0
        )
        self.story = Column(self.say, self.kpis, stylesheets=[sheets["story"]] if sheets else [], margin=0)
        self.root = Column(
            self.head, self.player, self.banner, self.story, self.tabs, sizing_mode="stretch_width", margin=0, spacing=0
        )
        self._tokens: deque[tuple[float, float]] = deque(maxlen=_RATE_STEPS)  # decode tokens, seconds
        self._last_step_time = 0.0
        self.story_line = StoryLine()
        self.rate = 0.0
        self._numbers: list[tuple[str, str, bool]] = []

    def _build_track(self, sheets: dict[str, InlineStyleSheet]) -> None:
        self.sources = {
            "use": empty_source("step", "used"),
            "evictions": empty_source("step"),
            "preemptions": empty_source("step"),
        }
        self._track = fig = plain_figure(
            self.theme, height=42, sizing_mode="stretch_width", y_range=Range1d(-0.34, 1.1), min_border=0,
            stylesheets=[sheets["track"]] if sheets else [],
            x_range=Range1d(0, 1),
        )  # fmt: skip
        fig.axis.visible = False
        self._area = fig.varea("step", 0, "used", source=self.sources["use"])
        self._base = fig.line("step", 0, source=self.sources["use"], line_width=1)
        self._ticks = fig.segment("step", 0, "step", -0.28, source=self.sources["evictions"], line_width=1.4)
        self._discs = fig.scatter("step", 0.95, source=self.sources["preemptions"], size=9)
        self._paint_track()

    def _paint_track(self) -> None:
        theme = self.theme
        self._track.height = theme.px(42)
        self._area.glyph.fill_color = theme.area
        self._base.glyph.line_color = theme.line2
        self._ticks.glyph.line_color = theme.warn
        self._discs.glyph.fill_color = self._discs.glyph.line_color = theme.warn

    # -- one frame ----------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        """Counts, rates, the occupancy track and the story; `show` writes what depends on choices and status."""
        self.frame = frame
        steps, used, evicted, preempted = [], [], [], []
        room = max(1, frame.snapshot.num_blocks - 1)
        for event in frame.events:
            if event.kind is EventKind.STEP:
                steps.append(event.step)
                used.append(event.numbers.get("used_blocks", 0) / room)
                self._tokens.append((event.numbers.get("decode_tokens", 0), event.numbers.get("seconds", 0)))
                self._last_step_time = event.time
            elif event.kind is EventKind.EVICTED:
                evicted.append(event.step)
            elif event.kind is EventKind.PREEMPTED:
                preempted.append(event.step)
        if steps:
            self.sources["use"].stream({"step": steps, "used": used}, rollover=_TRACK_STEPS)
            first = max(0, steps[-1] - _TRACK_STEPS)
            self._track.x_range.update(start=first, end=max(steps[-1], first + 1) + (steps[-1] - first) * 0.01)
        for name, marks in (("evictions", evicted), ("preemptions", preempted)):
            if marks:
                self.sources[name].stream({"step": sorted(set(marks))}, rollover=_TRACK_STEPS)
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

    def show(self, choices: Choices, status: Status) -> None:
        frame = self.frame
        if frame is None:
            return
        word = "stopped" if status.closed else frame.snapshot.state
        _write(self.head, _head(frame, status))
        _write(self.buttons, _buttons(word))
        _write(self.position, _position(frame.snapshot.step, word))
        _write(self.banner, _banner(status, choices.trace_open, word))
        _write(self.say, self._say(frame, word))
        _write(self.kpis, '<div class="kpis">' + "".join(_kpi(*n) for n in self._numbers) + "</div>")
        _write(self.tabs, _tabs(choices))

    def _say(self, frame: Frame, word: str) -> str:
        line = self.story_line
        more = ""
        if line.others:
            more = (
                f' <button type="button" class="more" data-tab="explain">and {plural(line.others, "other event")} '
                "in this step</button>"
            )
        live = "polite" if word == "paused" else "off"
        return (
            f'<div class="say" role="status" aria-live="{live}"><span class="ic">{_large(ICONS[line.icon])}</span>'
            f"<span>{esc(line.text)}<small>{esc(line.consequence)}{more}</small></span></div>"
        )

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        self._paint_track()

    # -- twins --------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        return f"{self.story_line.text} {self.story_line.consequence}".strip()

    def table(self) -> tuple[list[str], list[list[str]]]:
        return ["What", "Now"], [[name, number] for number, name, _ in self._numbers]


def _write(div: Div, text: str) -> None:
    if div.text != text:
        div.text = text


def _large(icon: str) -> str:
    return icon.replace('width="20" height="20"', 'width="24" height="24"', 1)


def _logo() -> str:
    fills = ["--o1", "--shared", "--o2", "--shared", "--o3", "", "--o4", "", "--o1"]
    cells = "".join(
        f'<rect x="{1 + i % 3 * 8}" y="{1 + i // 3 * 8}" width="6.4" height="6.4" rx="1.4" '
        + (f'fill="var({fill})"/>' if fill else 'fill="none" stroke="var(--line2)"/>')
        for i, fill in enumerate(fills)
    )
    return f'<svg width="24" height="24" viewBox="0 0 24 24" aria-hidden="true">{cells}</svg>'


def _head(frame: Frame, status: Status) -> str:
    info, snapshot = frame.info, frame.snapshot
    pool = f"<b>{snapshot.num_blocks:,} blocks × {snapshot.block_size} tokens</b>"
    facts = [pool]
    if info is not None:
        facts = [
            f"<b>{esc(info.model_name)}</b>",
            esc(_device(info)),
            esc(info.dtype),
            f"{pool}, {size(info.pool_bytes)}",
            f"weights: {esc(info.weights_source)}",
        ]
    tag = "replay" if status.source == "REPLAY" else "live"
    return (
        f'<div class="head"><span class="brand">{_logo()}kvscope</span><span class="tag {tag}">{status.source}</span>'
        f'<span class="facts">{" ".join(f"<span>{fact}</span>" for fact in facts)}</span>'
        '<span class="acts"><button type="button" data-do="reset" title="Empty the prefix cache">Reset cache</button>'
        "</span></div>"
    )


def _device(info) -> str:
    if info.device != "cpu":
        return str(info.device).upper()
    return f"CPU, {plural(info.num_threads, 'thread')}"


def _shape(path: str) -> str:
    return (
        f'<svg width="13" height="13" viewBox="0 0 13 13" aria-hidden="true"><path d="{path}" fill="currentColor"/>'
        "</svg>"
    )


_RUN, _PAUSE, _STEP = "M2 1l10 5.5L2 12z", "M2 1h3v11H2zM8 1h3v11H8z", "M4 1v11l7-5.5z"


def _buttons(word: str) -> str:
    off = " disabled" if word == "stopped" else ""
    running = word == "running"
    name, icon = ("Pause", _PAUSE) if running else ("Run", _RUN)
    return (
        f'<div class="btns"><button type="button" class="primary" data-do="toggle" title="Space"{off}>{_shape(icon)}'
        f'{name}</button><button type="button" data-do="step" title="→ one step"{off}>{_shape(_STEP)}Step</button>'
        "</div>"
    )


_STATES = {
    "running": '<span class="state" style="color:var(--ok)">● Running</span>',
    "paused": '<span class="state">❚❚ Paused</span>',
    "stopped": '<span class="state" style="color:var(--warn)">✕ Stopped</span>',
}


def _position(step: int, word: str) -> str:
    age = "" if word == "stopped" else ", <span data-age>updated 0.0 s ago</span>"
    return f'<div class="stepno">step <b>{step:,}</b><small>{_STATES[word]}{age}</small></div>'


def _banner(status: Status, trace_open: bool, word: str) -> str:
    stale = (
        '<div class="banner" data-stale hidden role="alert"><span><b></b> The notebook is busy with another cell, or its '
        "kernel has stopped. The engine keeps running; this view catches up as soon as it can.</span></div>"
    )
    if word == "stopped":
        return '<div class="banner" role="alert"><span><b>The engine is closed.</b> Its last state stays visible.</span></div>'
    if not status.error:
        return stale
    trace = f"<pre>{esc(status.traceback)}</pre>" if trace_open and status.traceback else ""
    button = (
        f'<span><button type="button" data-do="trace">{"Hide" if trace_open else "Show"} traceback</button></span>'
        if status.traceback
        else ""
    )
    return (
        f'{stale}<div class="banner" role="alert"><span><b>{esc(status.error)}</b> The engine keeps running, and all that '
        f"can still be drawn is drawn.</span>{button}{trace}</div>"
    )


def _kpi(number: str, name: str, hot: bool) -> str:
    return f'<div class="kpi{" hot" if hot else ""}"><b>{esc(number)}</b><span>{name}</span></div>'


def _tabs(choices: Choices) -> str:
    buttons = "".join(
        f'<button type="button" class="tab" role="tab" data-tab="{name}" aria-selected="{str(name == choices.tab).lower()}"'
        f' title="{place}">{name.title()}</button>'
        for place, name in enumerate(TABS, 1)
    )
    chosen = choices.selection
    if chosen is None:
        hint = f'<span class="hint">{_TAB_HINTS[choices.tab]}</span>'
    else:
        hint = (
            '<span class="hint keep"><button type="button" class="quiet" data-do="clear" style="color:var(--accent)" '
            f'title="Esc">{chosen.kind.title()} {chosen.id} is highlighted in every view. Clear</button></span>'
        )
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
    return (
        f'<div class="tabs" role="tablist">{buttons}{hint}<span class="spacer"></span><span class="opts">{options}'
        "</span></div>"
    )


_KEYS = (
    ("Space", "run or pause"),
    ("→", "one step"),
    ("[</kbd> <kbd>]", "previous or next request"),
    ("1</kbd>–<kbd>3", "Watch, Explain, Measure"),
    ("T", "all views as tables"),
    ("R", "room size"),
    ("D", "dark or light"),
    ("/", "write a prompt"),
    ("Ctrl</kbd> <kbd>Enter", "submit the prompt"),
    ("Esc", "clear the selection"),
)
_FOOT = (
    '<div class="foot">'
    + "".join(f"<span><kbd>{key}</kbd> {text}</span>" for key, text in (*_KEYS[:4], _KEYS[-1]))
    + '</div><div class="help" data-help hidden role="dialog" aria-label="Keys"><table>'
    + "".join(f"<tr><td><kbd>{key}</kbd></td><td>{text}</td></tr>" for key, text in _KEYS)
    + "</table></div>"
)
