"""The saved copy of a screen: plain HTML of the last state, for a notebook that is opened without its kernel.

Story, numbers, the pool as SVG, and every view's sentence and table. It needs no script and no style from elsewhere; it
says at which step it was taken, so that it is never mistaken for a live engine. While the live page is open it is folded
to one line (the page's script does that); without the page it stands open.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from .markup import esc, table
from .theme import FONT, LIGHT
from .views.base import View
from .views.header import Header
from .views.output import Output

LIVE_AGAIN = "Run this cell again for the live view."
_ROWS = 60  # of a table in the saved copy


def twin_html(twin: str, header: Header, views: Iterable[View], advice: str = LIVE_AGAIN) -> str:
    """`twin` ties the copy to its live page; `advice` says what to do to see more."""
    frame = header.frame
    step = f"step {frame.snapshot.step:,}" if frame is not None else "the start"
    taken = time.strftime("%Y-%m-%d %H:%M")
    _, numbers = header.table()
    figures = "".join(
        f'<span style="margin-right:22px"><b style="font-size:22px">{esc(number)}</b> {esc(name)}</span>'
        for name, number in numbers
    )
    model = f"{frame.info.model_name}, weights from {frame.info.weights_source}. " if frame and frame.info else ""
    sections = "".join(_section(view) for view in views)
    style = f"font:15px/1.45 {FONT};color:{LIGHT.ink};background:{LIGHT.bg};padding:10px 14px;border-radius:9px"
    return (
        f'<details open data-kvscope-twin="{twin}" style="{esc(style)}"><summary style="color:{LIGHT.muted}">kvscope: '
        f"saved copy of {step}, {taken}</summary>"
        f'<div style="font-size:20px;margin:8px 0 0">{esc(header.story_line.text)}</div>'
        f'<div style="color:{LIGHT.muted}">{esc(header.story_line.consequence)}</div>'
        f'<div style="margin:8px 0">{figures}</div><div style="color:{LIGHT.muted}">{esc(model)}'
        f"{esc(advice)}</div>{sections}</details>"
    )


def _section(view: View) -> str:
    headers, rows = view.table()
    left_out = len(rows) - _ROWS
    rows = [row[: len(headers)] for row in rows[:_ROWS]]
    if left_out > 0:
        rows.append([f"and {left_out:,} more", *[""] * (len(headers) - 1)])
    picture = f"<div>{view.svg()}</div>" if hasattr(view, "svg") else ""
    if isinstance(view, Output):  # people come back for the text, not for a list of tokens
        body = f'<div style="white-space:pre-wrap">{esc(view.text)}</div>'
    else:
        body = _plain(table(headers, rows)) if rows else ""
    # Not an <h4>: JupyterLab would list it in the notebook's table of contents.
    heading = f"margin:14px 0 2px;font-weight:650;color:{LIGHT.ink}"
    return (
        f'<div role="heading" aria-level="4" style="{heading}">{esc(view.title)}</div><div style="color:{LIGHT.muted}">'
        f"{esc(view.summary())}</div>{picture}{body}"
    )


def _plain(html: str) -> str:
    """The table with its looks written into the tags: a saved copy brings no stylesheet."""
    cell = f"text-align:left;padding:2px 10px 2px 0;vertical-align:top;color:{LIGHT.ink};font-weight:400"
    return (
        html.replace('<table class="tw">', '<table style="border-collapse:collapse;background:none">')
        .replace('<th scope="col">', f'<th scope="col" style="{cell};border-bottom:1.5px solid {LIGHT.line2}">')
        .replace('<th scope="row">', f'<th scope="row" style="{cell}">')
        .replace("<td>", f'<td style="{cell}">')
    )
