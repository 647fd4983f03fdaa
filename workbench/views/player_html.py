"""The player's buttons, the place in time beside the track, and the banners, as HTML.

What a button does is decided elsewhere; it carries a data attribute. In the past the same buttons move through what was
recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..markup import esc
from ..sub_step import PART_WORDS, PARTS

if TYPE_CHECKING:
    from .header import Status

SPEEDS = (None, 50.0, 20.0, 5.0, 1.0)  # steps a second
UNTIL = ("eviction", "preemption", "copy", "finish")

_RUN, _PAUSE = "M2 1l10 5.5L2 12z", "M2 1h3v11H2zM8 1h3v11H8z"
_STEP, _BACK = "M4 1v11l7-5.5z", "M9 1v11L2 6.5z"


def _shape(path: str) -> str:
    return (
        f'<svg width="13" height="13" viewBox="0 0 13 13" aria-hidden="true"><path d="{path}" fill="currentColor"/>'
        "</svg>"
    )


def _button(
    do: str, name: str, icon: str, title: str, *, shifted: str = "", primary: bool = False, off: bool = False
) -> str:
    """`shifted` is done instead by a click with Shift."""
    return (
        f'<button type="button"{" class=primary" if primary else ""} data-do="{do}" title="{title}"'
        f"{f' data-shift={shifted}' if shifted else ''}{' disabled' if off else ''}>{_shape(icon)}{name}</button>"
    )


def buttons(status: Status, word: str) -> str:
    """Back, Run or Pause, Step, and the menu of speeds and breakpoints. A closed engine's past can still be walked."""
    past = status.at is not None
    stopped = word == "stopped" and not past
    moves = status.playing if past else word == "running"
    back, on, unit = f"← one {status.unit} back", f"→ one {status.unit}", status.unit
    if status.has_parts:
        back, on = f"{back}; with Shift one part of it", f"{on}; with Shift, or S, one part of it"
    parts = ("sub_back", "sub_step") if status.has_parts else ("", "")
    return (
        '<div class="btns">'
        + _button("back", "Back", _BACK, back, shifted=parts[0], off=not status.newest)
        + _button("toggle", "Pause" if moves else "Run", _PAUSE if moves else _RUN, "Space", primary=True, off=stopped)
        + _button("step", unit.title(), _STEP, on, shifted=parts[1], off=stopped)
        + _menu(status.speed, unit, off=stopped)
        + "</div>"
    )


def _menu(speed: float | None, unit: str, *, off: bool) -> str:
    chosen, units = "" if speed is None else f"{speed:g}", f"{unit}s"
    speeds = "".join(
        f'<option value="{"" if s is None else f"{s:g}"}"{" selected" * (s == speed)}>'
        f"{'full speed' if s is None else f'{s:g} {unit if s == 1 else units}/s'}</option>"
        for s in dict.fromkeys((*SPEEDS, speed))
    )
    until = "".join(f'<option value="until {kind}">to next {kind}</option>' for kind in UNTIL)
    return (
        f'<select data-speed="{chosen}" aria-label="Speed, and run until"{" disabled" if off else ""}>{speeds}'
        f'<optgroup label="Run until">{until}</optgroup></select>'
    )


_STATES = {
    "running": '<span class="state" style="color:var(--ok)">● Running</span>',
    "paused": '<span class="state">❚❚ Paused</span>',
    "stopped": '<span class="state" style="color:var(--warn)">✕ Stopped</span>',
    "past": '<span class="state" style="color:var(--accent)">◀ Replay</span>',
    "playing": '<span class="state" style="color:var(--accent)">▶ Replay</span>',
}


def position(status: Status, step: int, word: str) -> str:
    """The step, of how many where it is not the newest, what moves, and how old the picture is."""
    past = status.at is not None
    state = ("playing" if status.playing else "past") if past else word
    age = "" if status.closed else ", <span data-age>updated 0.0 s ago</span>"
    inside = status.part < len(PARTS)
    of = f", {_part(status)}" if inside else f" of {status.newest:,}" if past else ""
    return f'<div class="stepno">{status.unit} <b>{step:,}</b>{of}<small>{_STATES[state]}{age}</small></div>'


def _part(status: Status) -> str:
    return f"{status.part} of {len(PARTS)}: {PARTS[status.part - 1]}"


_STALE = (
    '<div class="banner" data-stale hidden role="alert"><span><b></b> The notebook is busy with another cell, or its '
    "kernel has stopped. The engine keeps running; this view catches up as soon as it can.</span></div>"
)
_GOES_ON = {
    "running": "The engine goes on.",
    "paused": "The engine is paused.",
    "stopped": "The engine is closed.",
    "": "",
}


def banner(status: Status, trace_open: bool, word: str) -> str:
    """Where one looks at the past; what went wrong; and, hidden until the page finds it out, that nothing has come."""
    html = _replay(status)
    if word == "stopped" and status.at is None:
        return (
            html + '<div class="banner" role="alert"><span><b>The engine is closed.</b> Its last state stays visible.'
            "</span></div>"
        )
    html += _STALE
    if not status.error:
        return html
    trace = f"<pre>{esc(status.traceback)}</pre>" if trace_open and status.traceback else ""
    button = (
        f'<span><button type="button" data-do="trace">{"Hide" if trace_open else "Show"} traceback</button></span>'
        if status.traceback
        else ""
    )
    return (
        f'{html}<div class="banner" role="alert"><span><b>{esc(status.error)}</b> The engine keeps running, and all that '
        f"can still be drawn is drawn.</span>{button}{trace}</div>"
    )


def _replay(status: Status) -> str:
    if status.at is None:
        return ""
    if status.part < len(PARTS):
        said = f"<b>You look into step {status.at:,}, {_part(status)}.</b> {PART_WORDS[status.part - 1]}"
        act = '<button type="button" data-do="sub_back">Part back</button> <button type="button" data-do="sub_step">Next part</button>'
    elif status.file:
        said = f"<b>This is a recording:</b> {esc(status.file)}, step {status.at:,} of {status.newest:,}."
        leave = '<button type="button" data-do="leave">Back to the live engine</button>'
        act = leave if status.engine else ""
    else:
        said = f"<b>You look at {status.unit} {status.at:,}; the newest is {status.newest:,}.</b> {_GOES_ON[status.engine]}"
        act = f'<button type="button" class="primary" data-do="now" title="End">Go to the newest {status.unit}</button>'
    return f'<div class="banner past" role="status"><span>{said}</span><span>{act}</span></div>'
