"""Lines of small pictures with their words, above a drawing: the key to its shapes."""

from __future__ import annotations

from collections.abc import Iterable

from ..theme import FONT, OWNER_HUES, Theme


def style(theme: Theme) -> str:
    """The look of every legend; once in each part that shows one."""
    return (
        f".kv-legend{{display:flex;flex-wrap:wrap;gap:4px 13px;align-items:center;margin:0 0 8px;"
        f"font:{theme.font(14)}/1.45 {FONT};color:{theme.ink}}}.kv-legend span{{display:inline-flex;gap:6px;"
        f"align-items:center;white-space:nowrap}}.kv-legend .lead{{color:{theme.muted}}}"
    )


def icon(theme: Theme, width: float, height: float, body: str) -> str:
    """`body`, drawn in a box of `width` by `height` px at normal size."""
    return f'<svg width="{theme.px(width)}" height="{theme.px(height)}" viewBox="0 0 {width:g} {height:g}">{body}</svg>'


def line(items: Iterable[str], lead: str = "") -> str:
    """One line of `items`, each a picture with its words."""
    before = f'<span class="lead">{lead}</span>' if lead else ""
    return f'<div class="kv-legend">{before}{"".join(f"<span>{item}</span>" for item in items)}</div>'


def phases(theme: Theme) -> str:
    """The shapes of the timeline, one for each phase of a request."""
    hue, middle = OWNER_HUES[0], 'y1="9" y2="9"'
    bars = "".join(
        f'<path d="M{x} 2v14" stroke="#10161C" stroke-width="1.2" opacity=".62"/>' for x in (5, 9, 13, 17, 21)
    )
    hatch = "".join(f'<path d="M{x} 8l5-6" stroke="{theme.hatch}" stroke-width="1.4"/>' for x in (3, 9, 15, 20))
    pictures = (
        (f'<line x1="10" x2="27" {middle} stroke="{theme.line2}" stroke-width="2.4" stroke-dasharray="0 5" '
         f'stroke-linecap="round"/><circle cx="6" cy="9" r="4" fill="{theme.panel}" stroke="{theme.line2}" '
         'stroke-width="2"/>', "waiting"),
        (f'<rect x="2" y="2" width="23" height="14" fill="{hue}"/>{bars}<rect x="2" y="2" width="23" height="6" '
         f'fill="{theme.cached}"/>{hatch}<rect x="2" y="2" width="23" height="14" fill="none" stroke="{theme.ink}" '
         'stroke-width="1.3"/>', "prefill (hatched: cached)"),
        (f'<rect x="1" y="4" width="26" height="11" fill="{hue}"/>', "decode"),
        (f'<line x1="12" x2="27" {middle} stroke="{theme.warn}" stroke-width="2.6" stroke-dasharray="5 3"/><circle cx="9" '
         f'cy="9" r="8" fill="{theme.warn}"/><path d="M6.5 5.5v7M11.5 5.5v7" stroke="{theme.panel}" stroke-width="2.4"/>',
         "preempted"),
        (f'<rect x="8" y="3" width="12" height="12" fill="{theme.ink}"/>', "finished"),
    )  # fmt: skip
    items = [icon(theme, 28, 18, body) + words for body, words in pictures]
    return f'<style>{style(theme)}</style><div aria-hidden="true">{line(items)}</div>'
