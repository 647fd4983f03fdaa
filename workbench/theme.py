"""Colours, sizes and owner hues of the screen: every role once, in a light and a dark set.

A view takes a `Theme` and paints every surface from it; nothing is inherited from the notebook or the browser. Hue
means who: `OwnerSlots` gives each live request one of eight hues, the same in both themes, and request numbers are
always written beside the hue, so that no meaning rests on colour alone. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'

OWNER_HUES = ("#56B4E9", "#E69F00", "#3FA584", "#D872C4", "#F0E442", "#8289F3", "#A9E5D8", "#B98657")
ON_OWNER = "#10161C"  # text and inset bar on an owner hue, 5.7 to 13.8 : 1
SELECTED_HUE = OWNER_HUES[1]  # the one request that keeps a hue where colour shows the state

_SMALLEST_FONT = 11.0


@dataclass(frozen=True)
class Theme:
    """Every role of the screen as `#RRGGBB`, plus the two alphas that differ between themes and the room scale."""

    name: str
    bg: str
    panel: str
    sunk: str
    line: str  # grid
    line2: str  # control borders, at least 3 : 1
    ink: str
    muted: str
    accent: str  # selection, links, primary button; nothing else is this blue
    accent_soft: str
    warn: str  # evicted, preempted, errors
    warn_soft: str
    waste: str  # unwritten slots
    ok: str
    free: str
    free_line: str
    cached: str
    hatch: str
    shared: str
    shared_ink: str
    active: str  # active block where colour shows the state
    cached_image: str
    decode: str
    prefill: str
    third: str
    area: str
    cell_line: str  # outline over a face, drawn at cell_line_alpha
    cell_line_alpha: float
    dim_alpha: float  # what a selection does not concern
    scale: float = 1.0  # 1.25 is room size: fonts, chips and cells grow together

    def px(self, size: float) -> int:
        """`size` CSS pixels at this theme's scale."""
        return round(size * self.scale)

    def font(self, size: float) -> str:
        """A CSS font size; text below 11 px is refused because a room cannot read it."""
        if size < _SMALLEST_FONT:
            raise ValueError(f"font size {size}: text on screen must be at least {_SMALLEST_FONT:g} px")
        return f"{size * self.scale:.4g}px"

    def scaled(self, scale: float) -> Theme:
        return replace(self, scale=scale)

    def css_variables(self) -> str:
        """All colours as CSS custom properties, `accent_soft` as `--accent-soft`, owner hues as `--o1` to `--o8`."""
        roles = [
            f"--{f.name.replace('_', '-')}:{getattr(self, f.name)}" for f in fields(self) if f.name not in ("name",)
        ]
        hues = [f"--o{i}:{hue}" for i, hue in enumerate(OWNER_HUES, 1)]
        return ";".join([*roles, *hues, f"--on:{ON_OWNER}", f"--font:{FONT}", f"--mono:{MONO}"])


LIGHT = Theme(
    name="light", bg="#F3F5F7", panel="#FFFFFF", sunk="#F3F5F7", line="#CFD7DE", line2="#788794", ink="#14202B",
    muted="#4A5967", accent="#0B5CC0", accent_soft="#E3EEFB", warn="#B93E00", warn_soft="#FCEBE2", waste="#D55E00",
    ok="#0B6E4F", free="#FFFFFF", free_line="#C3CCD4", cached="#E9EDF0", hatch="#717F8C", shared="#1B2935",
    shared_ink="#FFFFFF", active="#5F98C6", cached_image="#C6CED5", decode="#0072B2", prefill="#A85A00",
    third="#5A6876", area="#CFE3F2", cell_line="#10161C", cell_line_alpha=0.42, dim_alpha=0.22,
)  # fmt: skip

DARK = Theme(
    name="dark", bg="#0D1318", panel="#151D24", sunk="#0F161C", line="#2E3A45", line2="#708292", ink="#EBF1F6",
    muted="#A9B8C5", accent="#7DBEFF", accent_soft="#17304A", warn="#FF9A66", warn_soft="#3A2117", waste="#FF8A4C",
    ok="#5FD3A8", free="#151D24", free_line="#3C4A56", cached="#222D37", hatch="#75879A", shared="#F2F6F9",
    shared_ink="#10161C", active="#528AB8", cached_image="#475664", decode="#6CB8EC", prefill="#F2B04E",
    third="#9DB0C0", area="#1D3A50", cell_line="#FFFFFF", cell_line_alpha=0.30, dim_alpha=0.34,
)  # fmt: skip

THEMES = {"light": LIGHT, "dark": DARK}


def contrast(foreground: str, background: str) -> float:
    """WCAG 2 contrast ratio of two `#RRGGBB` colours, 1 to 21."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(foreground), luminance(background)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def sample_letter(child: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    letters = ""
    child += 1
    while child:
        child, last = divmod(child - 1, 26)
        letters = chr(ord("a") + last) + letters
    return letters


def sequence_label(request_id: int, child: int = 0, *, forked: bool = False) -> str:
    """What a sequence is called on screen: 3 for a request, 3a to 3d once it has split into samples."""
    return f"{request_id}{sample_letter(child)}" if forked or child else str(request_id)


class OwnerSlots:
    """Which hue a request has. A request takes the lowest free slot at arrival and frees it when it ends.

    Slots 0 to 7 are the eight hues; from slot 8 on the hue repeats with a dark bar at the left edge of the chip. The
    slot of an ended request is remembered, so that going back in time shows it in the hue it had.
    """

    _REMEMBERED = 4096

    def __init__(self) -> None:
        self._slot: dict[int, int] = {}
        self._live: frozenset[int] = frozenset()

    def update(self, live_request_ids: Iterable[int]) -> None:
        """Tell which requests live now, in order of arrival."""
        arrived = list(dict.fromkeys(live_request_ids))
        live = frozenset(arrived)
        if live == self._live:
            return
        taken = {self._slot[r] for r in live if r in self._slot}
        for request_id in arrived:
            if request_id not in self._slot:
                slot = 0
                while slot in taken:
                    slot += 1
                taken.add(slot)
                self._slot[request_id] = slot
        self._live = live
        if len(self._slot) > self._REMEMBERED + len(live):
            ended = [r for r in self._slot if r not in live]
            for request_id in ended[: len(self._slot) - self._REMEMBERED]:
                del self._slot[request_id]

    def slot(self, request_id: int) -> int:
        """The slot of a request; one never seen takes the hue of its number."""
        return self._slot.get(request_id, max(0, request_id - 1) % len(OWNER_HUES))

    def hue(self, request_id: int) -> str:
        return OWNER_HUES[self.slot(request_id) % len(OWNER_HUES)]

    def barred(self, request_id: int) -> bool:
        """True where the hue repeats and the chip carries the dark inset bar."""
        return self.slot(request_id) >= len(OWNER_HUES)
