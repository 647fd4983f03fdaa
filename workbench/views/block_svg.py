"""The pool map as one SVG: what stays in a saved notebook, and in any page without a kernel.

The same glyphs as on screen, from the same frame, a few hundred bytes a cell; above 512 blocks one small square a
block, equal neighbours of a row drawn as one.
"""

from __future__ import annotations

from html import escape

import numpy as np
from kvscope.engine.snapshot import BlockState

from ..theme import FONT, LIGHT, OWNER_HUES, Theme
from . import glyph
from .base import Frame

_PITCH, _CELL, _GUTTER = 44, 40, 40  # px


def svg(frame: Frame, theme: Theme = LIGHT) -> str:
    """The pool of `frame` as an SVG element with its summary as alt text."""
    draw = _cells if frame.snapshot.num_blocks <= 512 else _squares
    width, height, body = draw(frame, theme)
    font = FONT.replace('"', "'")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width:100%;height:auto" font-family="{font}"><title>{escape(summary(frame))}</title>'
        f'{glyph.svg_patterns(theme)}<rect width="{width}" height="{height}" fill="{theme.panel}"/>{body}</svg>'
    )


def summary(frame: Frame) -> str:
    """Blocks in use, shared, cached and empty, in two sentences."""
    count = glyph.count_states(frame)
    used = count["active"] + count["shared"]
    shared = f", {count['shared']:,} of them shared" if count["shared"] else ""
    return (
        f"{used:,} of {frame.snapshot.num_blocks - 1:,} blocks {'is' if used == 1 else 'are'} in use{shared}. "
        f"{count['cached']:,} {'holds' if count['cached'] == 1 else 'hold'} cached text that may be evicted, "
        f"{count['empty']:,} {'is' if count['empty'] == 1 else 'are'} empty."
    )


def _cells(frame: Frame, theme: Theme) -> tuple[int, int, str]:
    snapshot = frame.snapshot
    names = dict(zip(glyph.sequence_codes(frame).tolist(), frame.labels, strict=True))
    labels = glyph.label_codes(frame, "owner").tolist()
    faces, bars = glyph.face_codes(frame, by_state=False).tolist(), glyph.barred(frame).tolist()
    palette = glyph.face_palette(theme)
    rows = -(-snapshot.num_blocks // 16)
    parts = [
        f'<text x="{_GUTTER - 8}" y="{6 + row * _PITCH + _CELL // 2 + 5}" text-anchor="end" font-size="13" '
        f'fill="{theme.muted}">{row * 16}</text>'
        for row in range(rows)
    ]
    for block in range(snapshot.num_blocks):
        state, strip = int(snapshot.block_state[block]), ()
        if state == BlockState.SHARED:
            slots = frame.owner_slots[frame.readers(block)] % len(OWNER_HUES)
            strip = tuple(OWNER_HUES[slot] for slot in dict.fromkeys(slots.tolist()))[:8]
        text = glyph.label_text(labels[block], "owner", names)
        idle = min(1.0, (snapshot.step - int(snapshot.last_used_step[block])) / 60)
        parts.append(
            glyph.block_svg(
                theme, state, x=_GUTTER + block % 16 * _PITCH, y=6 + block // 16 * _PITCH, size=_CELL,
                hue=palette[faces[block]], written=int(snapshot.written[block]) / snapshot.block_size, strip=strip,
                label=text, bar=bars[block], idle=max(0.0, idle), font_size=15 if len(text) < 3 else 13.5,
            )
        )  # fmt: skip
    return _GUTTER + 16 * _PITCH + 4, 10 + rows * _PITCH, "".join(parts)


def _squares(frame: Frame, theme: Theme) -> tuple[int, int, str]:
    columns = 64 if frame.snapshot.num_blocks <= 4096 else 256
    side = 704 / columns
    colours = (theme.free, theme.cached_image, theme.active, theme.shared, theme.ink, theme.active)
    rows = -(-frame.snapshot.num_blocks // columns)
    state = np.full(rows * columns, -1, np.int16)
    state[: frame.snapshot.num_blocks] = frame.snapshot.block_state
    parts = []
    for row, cells in enumerate(state.reshape(rows, columns)):
        edges = np.flatnonzero(np.diff(cells)) + 1
        for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), columns], strict=True):
            if cells[start] >= 0:
                parts.append(
                    f'<rect x="{start * side:g}" y="{row * side:g}" width="{(stop - start) * side:g}" '
                    f'height="{side:g}" fill="{colours[cells[start]]}"/>'
                )
    return 704, round(rows * side), "".join(parts)
