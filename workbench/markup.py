"""Small pieces of HTML that several parts of the page share: escaped text, chips, tables, counts, icons."""

from __future__ import annotations

import html
from collections.abc import Sequence
from decimal import Decimal

from .theme import OWNER_HUES, OwnerSlots


def esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def amount(value: float) -> str:
    """12,345, 859, 2.43, 0.00012: three digits that count, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{Decimal(f'{value:.3g}'):f}"


def size(num_bytes: float) -> str:
    """128 B, 720 KiB, 2.11 MiB, 1.4 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{amount(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{amount(num_bytes)} GiB"


def duration(seconds: float) -> str:
    """4.2 ms, 859 ms, 2.43 s, 14.7 s, 2 min 5 s."""
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s"


def chip(label: str, request_id: int, slots: OwnerSlots) -> str:
    """The colour key of a request: its hue with its number; a dark bar where the hue is used a second time."""
    bar = " two" if slots.barred(request_id) else ""
    return f'<span class="chip{bar}" style="background:{hue(request_id, slots)}">{esc(label)}</span>'


def hue(request_id: int, slots: OwnerSlots) -> str:
    return f"var(--o{slots.slot(request_id) % len(OWNER_HUES) + 1})"


ITEM = 'tabindex="-1"'  # of each item of a list that is one stop


def one_stop(css: str, label: str, items: str, *, across: bool = False) -> str:
    """A list that Tab stops at once: the arrow keys go from item to item, those to the side too where it runs `across`."""
    way = "across" if across else "down"
    first = items.replace(ITEM, 'tabindex="0"', 1)
    return f'<div class="{css}" data-list="{way}" role="group" aria-label="{esc(label)}">{first}</div>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A plain table that a screen reader can walk."""
    head = "".join(f'<th scope="col">{esc(h)}</th>' for h in headers)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{esc(cell)}</th>' if i == 0 else f"<td>{esc(cell)}</td>" for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    caption = f"<caption>{esc(caption)}</caption>" if caption else ""
    return f'<table class="tw">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def panel_head(title: str, summary: str, *, view: str = "", as_table: bool = False, tools: str = "") -> str:
    """Title, tools and one sentence: the top of every panel."""
    button = ""
    if view:
        button = (
            f'<button type="button" class="quiet" data-table="{view}" aria-pressed="{str(as_table).lower()}">'
            "Table</button>"
        )
    sentence = f'<p class="sum">{esc(summary)}</p>' if summary else ""
    return f'<div class="ph"><h2>{esc(title)}</h2><div class="tools">{tools}{button}</div>{sentence}</div>'


def _icon(body: str) -> str:
    return (
        '<svg width="20" height="20" viewBox="0 0 20 20" aria-hidden="true" '
        f'style="display:inline-block;vertical-align:-4px">{body}</svg>'
    )


_HATCH = (
    '<path d="M3 8l5-5M3 13l10-10M4 17l13-13M9 17l8-8M14 17l3-3" stroke="var(--hatch)" stroke-width="1.6" fill="none"/>'
)
ICONS = {
    "evict": _icon(
        '<circle cx="10" cy="10" r="9" fill="var(--warn)"/><path d="M6.5 6.5l7 7M13.5 6.5l-7 7" '
        'stroke="var(--panel)" stroke-width="2.4" stroke-linecap="round"/>'
    ),
    "preempt": _icon(
        '<circle cx="10" cy="10" r="9" fill="var(--warn)"/><path d="M7.5 6v8M12.5 6v8" stroke="var(--panel)" '
        'stroke-width="2.6" stroke-linecap="round"/>'
    ),
    "copy": _icon(
        '<rect x="2" y="2" width="11" height="11" rx="2" fill="none" stroke="var(--ink)" stroke-width="2"/>'
        '<rect x="7" y="7" width="11" height="11" rx="2" fill="var(--ink)"/>'
    ),
    "fork": _icon(
        '<path d="M3 10h5M8 10c3 0 3-6 7-6M8 10c3 0 3 6 7 6" stroke="var(--ink)" stroke-width="2" fill="none"/>'
        '<circle cx="16" cy="4" r="2.6" fill="var(--ink)"/><circle cx="16" cy="16" r="2.6" fill="var(--ink)"/>'
        '<circle cx="3.4" cy="10" r="2.6" fill="var(--ink)"/>'
    ),
    "hit": _icon(
        '<rect x="2" y="2" width="16" height="16" rx="3" fill="var(--cached)" stroke="var(--ink)" '
        f'stroke-width="1.8"/>{_HATCH}<path d="M6 10.5l3 3 5.5-7" stroke="var(--ok)" stroke-width="3" fill="none" '
        'stroke-linecap="round"/>'
    ),
    "miss": _icon(
        '<rect x="2.5" y="2.5" width="15" height="15" rx="3" fill="none" stroke="var(--ink)" stroke-width="2" '
        'stroke-dasharray="3.4 2.6"/><path d="M7 7l6 6M13 7l-6 6" stroke="var(--ink)" stroke-width="1.8" '
        'stroke-linecap="round"/>'
    ),
    "finish": _icon('<rect x="4" y="4" width="12" height="12" rx="1.5" fill="var(--ink)"/>'),
    "resume": _icon('<path d="M5 3l12 7-12 7z" fill="var(--ink)"/>'),
    "refuse": _icon(
        '<circle cx="10" cy="10" r="8" fill="none" stroke="var(--warn)" stroke-width="2.2"/>'
        '<path d="M4.5 15.5l11-11" stroke="var(--warn)" stroke-width="2.2"/>'
    ),
    "quiet": _icon('<circle cx="10" cy="10" r="4" fill="var(--line2)"/>'),
}
