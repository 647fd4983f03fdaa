"""The block glyph: one small drawing for a KV block in the pool map, block tables, legends and the static twin.

    +-----------+   face (top 70 %): who reads the block. Owner hue, ink when shared, hatched when only cached
    | strip     |   strip: up to 8 owner hues of a shared block
    |   label   |   bar at the left edge: the hue repeats (slots 9 to 16)
    |.......ooo.|   foot (bottom 30 %): unwritten slots as dots, left to right in write order; a full block is solid
    +-----------+

Colour, outline and label of a block are looked up through small integer codes, so that views compare arrays of
integers from tick to tick and send only what differs. `block_svg` draws the same glyph as SVG text.
"""

from __future__ import annotations

from html import escape

import numpy as np
from kvscope.engine.snapshot import BlockState

from ..theme import ON_OWNER, OWNER_HUES, SELECTED_HUE, Theme
from .base import Frame

FOOT = 0.30  # share of the height
RADIUS = 5  # px, corners
MARKS = ("taken", "evicted", "copied", "locked")  # what one step can do to a block
MARK_WORDS = {"taken": "taken", "evicted": "evicted, then taken", "copied": "copied on write", "locked": "in flight"}
LABELS = ("owner", "id", "generation", "age")

# Plain integers: comparing an array with a member of an enum takes four times as long.
_EMPTY, _CACHED, _ACTIVE, _SHARED, _PINNED, _IN_FLIGHT = (int(state) for state in BlockState)

# Faces: 0 empty, 1 cached, 2 shared, 3 active where colour shows the state, 4 the selected request there, 5 pinned,
# then one per hue. Outline, ink and label height follow from the face, so a block is one small integer.
_ACTIVE_FACE, _SELECTED_FACE, _PINNED_FACE, _FIRST_HUE = 3, 4, 5, 6
FACE_WORDS = ("empty", "cached", "shared", "active", "active", "pinned", "active")  # the hues are all active
_FACE_OF_STATE = np.array([0, 1, _ACTIVE_FACE, 2, _PINNED_FACE, _ACTIVE_FACE], np.int8)
_OWNED = np.array([False, False, True, False, False, True])
_HUES = len(OWNER_HUES)
LABEL_RISE = (0, 0, -3.5, -3.5, -3.5, 0, *[-3.5] * _HUES)  # px by face: above the foot where there is one
OUTLINE_WIDTH = (1, 1, 1, 1, 1, 1.6, *[1] * _HUES)

# Labels: small codes are fixed words, then "×N" by reference count, then sequences.
_WORDS = ("", "·", "null", "pin", "next")
_DOT_LABEL, _NULL_LABEL, _PIN_LABEL, _NEXT_LABEL = 1, 2, 3, 4
_SHARED_LABEL = 1000
_SEQUENCE_LABEL = 1_000_000


def face_palette(theme: Theme) -> list[str]:
    return [theme.free, theme.cached, theme.shared, theme.active, SELECTED_HUE, theme.cached, *OWNER_HUES]


def outline_palette(theme: Theme) -> list[str]:
    """Outline by face; over an owner hue it is translucent."""
    over = f"{theme.cell_line}{round(255 * theme.cell_line_alpha):02X}"
    return [theme.free_line, theme.line2, over, over, over, theme.ink, *[over] * _HUES]


def label_palette(theme: Theme) -> list[str]:
    """Label colour by face."""
    return [theme.line2, theme.ink, theme.shared_ink, ON_OWNER, ON_OWNER, theme.ink, *[ON_OWNER] * _HUES]


def face_codes(frame: Frame, *, by_state: bool) -> np.ndarray:
    """Index into `face_palette` for each block, int8 [num_blocks]. `by_state`: hue only for the selected request."""
    snapshot = frame.snapshot
    face = _FACE_OF_STATE[snapshot.block_state]
    owned = _OWNED[snapshot.block_state] & (snapshot.owner >= 0)
    if not owned.any():
        return face
    owner = snapshot.owner[owned]
    if by_state:
        chosen = np.isin(frame.request_ids[owner], list(frame.selected_requests))
        face[owned] = np.where(chosen, _SELECTED_FACE, _ACTIVE_FACE)
    else:
        face[owned] = _FIRST_HUE + frame.owner_slots[owner] % _HUES
    return face


def barred(frame: Frame) -> np.ndarray:
    """bool [num_blocks]: blocks of a request whose hue repeats."""
    snapshot = frame.snapshot
    bar = np.zeros(snapshot.num_blocks, bool)
    owned = _OWNED[snapshot.block_state] & (snapshot.owner >= 0)
    bar[owned] = frame.owner_slots[snapshot.owner[owned]] >= len(OWNER_HUES)
    return bar


def label_codes(frame: Frame, kind: str) -> np.ndarray:
    """What stands in each cell, as codes for `label_text`, int64 [num_blocks]. `kind` is one of LABELS."""
    snapshot = frame.snapshot
    state = snapshot.block_state
    if kind == "id":
        return np.arange(snapshot.num_blocks)
    if kind == "generation":
        return np.where(state == _PINNED, 0, snapshot.generation).astype(np.int64)
    if kind == "age":
        idle = np.where(state == _CACHED, snapshot.step - snapshot.last_used_step, 0)
        return np.where((state == _EMPTY) | (state == _PINNED), -1, idle)
    codes = np.where(state == _EMPTY, _DOT_LABEL, 0).astype(np.int64)
    codes[state == _PINNED] = _PIN_LABEL
    codes[0] = _NULL_LABEL if state[0] == _PINNED else codes[0]
    if len(snapshot.eviction_order) and state[snapshot.eviction_order[0]] == _CACHED:
        codes[snapshot.eviction_order[0]] = _NEXT_LABEL
    shared = state == _SHARED
    codes[shared] = _SHARED_LABEL + snapshot.ref_count[shared]
    owned = _OWNED[state] & (snapshot.owner >= 0)
    codes[owned] = _SEQUENCE_LABEL + sequence_codes(frame)[snapshot.owner[owned]]
    return codes


def sequence_codes(frame: Frame) -> np.ndarray:
    """A number for each of `snapshot.requests` that stands for its label, int64 [requests]."""
    forked = (r.child + 1 if r.num_samples > 1 and r.num_output_tokens > 0 else 0 for r in frame.snapshot.requests)
    return frame.request_ids * 1000 + np.fromiter(forked, np.int64, len(frame.snapshot.requests))


def label_text(code: int, kind: str, names: dict[int, str]) -> str:
    """The text for one of `label_codes`; `names` maps `sequence_codes` to labels."""
    if kind == "id":
        return str(code)
    if kind == "generation":
        return f"g{code}" if code else ""
    if kind == "age":
        return "" if code < 0 else str(code)
    if code < len(_WORDS):
        return _WORDS[code]
    if code < _SEQUENCE_LABEL:
        return f"×{code - _SHARED_LABEL}"
    return names.get(code - _SEQUENCE_LABEL, "")


def count_states(frame: Frame) -> dict[str, int]:
    """Blocks in each state, and unwritten slots of blocks in use; the null block is not counted."""
    snapshot = frame.snapshot
    state = snapshot.block_state[1:]
    count = np.bincount(state, minlength=len(BlockState)).tolist()
    used = (state == _ACTIVE) | (state == _SHARED) | (state == _IN_FLIGHT)
    unwritten = int((snapshot.slots - snapshot.filled)[1:][used].sum())
    active = count[BlockState.ACTIVE] + count[BlockState.IN_FLIGHT]
    return {
        "empty": count[BlockState.EMPTY], "cached": count[BlockState.CACHED], "active": active,
        "shared": count[BlockState.SHARED], "unwritten": unwritten,
    }  # fmt: skip


# -- the same glyph as SVG -------------------------------------------------------------------------------------------


def svg_patterns(theme: Theme) -> str:
    """The hatch and the dots that `block_svg` refers to; once in each SVG."""
    return (
        f'<defs><pattern id="kv-hatch-{theme.name}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2.2" height="7" fill="{theme.hatch}"/></pattern>'
        f'<pattern id="kv-dots-{theme.name}" width="5.5" height="5.5" patternUnits="userSpaceOnUse">'
        f'<circle cx="1.6" cy="1.6" r="1.15" fill="{theme.waste}"/>'
        f'<circle cx="4.35" cy="4.35" r="1.15" fill="{theme.waste}"/></pattern></defs>'
    )


def block_svg(
    theme: Theme,
    state: int,
    *,
    x: float = 1,
    y: float = 1,
    size: float = 22,
    hue: str = OWNER_HUES[0],
    written: float = 1.0,
    strip: tuple[str, ...] = (),
    label: str = "",
    bar: bool = False,
    idle: float = 0.0,
    font_size: float = 15,
) -> str:
    """One glyph of `size` px at (x, y). `written` and `idle` are shares from 0 to 1; `strip` lists owner hues."""
    radius = min(RADIUS, size / 6)
    faces = (theme.free, theme.cached, hue, theme.shared, theme.cached, hue)
    lines = (theme.free_line, theme.line2, theme.cell_line, theme.cell_line, theme.ink, theme.cell_line)
    box = f'x="{x + 0.5:g}" y="{y + 0.5:g}" width="{size - 1:g}" height="{size - 1:g}" rx="{radius:.3g}"'
    opacity = theme.cell_line_alpha if faces[state] in (hue, theme.shared) else 1
    weight = ' stroke-width="1.6"' if state == BlockState.PINNED else ""
    stroke = f'stroke="{lines[state]}"{weight}' + (f' stroke-opacity="{opacity:g}"' if opacity < 1 else "")
    unwritten = state in (BlockState.ACTIVE, BlockState.SHARED, BlockState.IN_FLIGHT) and written < 1
    if state == BlockState.CACHED:
        hatch = f'fill="url(#kv-hatch-{theme.name})" fill-opacity="{1 - 0.65 * idle:.2g}"'
        parts = [f'<rect {box} fill="{faces[state]}"/><rect {box} {hatch} {stroke}/>']
    elif unwritten:
        foot, left = max(5, round(size * FOOT)), x + size * written
        bite = f'x="{left:.4g}" y="{y + size - foot:g}" width="{x + size - 0.5 - left:.4g}" height="{foot - 0.5:g}"'
        parts = [
            f'<rect {box} fill="{faces[state]}"/><rect {bite} fill="{theme.panel}"/>'
            f'<rect {bite} fill="url(#kv-dots-{theme.name})"/><rect {box} fill="none" {stroke}/>'
        ]
    else:
        parts = [f'<rect {box} fill="{faces[state]}" {stroke}/>']
    if state == BlockState.PINNED:
        parts.append(
            f'<path d="M{x:g} {y:g}h{size * 0.3:.3g}l{-size * 0.3:.3g} {size * 0.3:.3g}z" fill="{theme.ink}"/>'
        )
    if state == BlockState.SHARED and strip:
        width = (size - 2 * radius) / len(strip)
        for i, colour in enumerate(strip):
            left = x + radius + i * width
            parts.append(
                f'<rect x="{left:.4g}" y="{y + 3:g}" width="{max(1.5, width - 1):.3g}" '
                f'height="{5 if size > 30 else 3.5}" fill="{colour}"/>'
            )
    if bar:
        parts.append(
            f'<rect x="{x + 3:g}" y="{y + 4:g}" width="2.6" height="{size * 0.56:.3g}" rx="1" fill="{ON_OWNER}"/>'
        )
    text = label if state != BlockState.EMPTY else ""
    if state == BlockState.EMPTY:
        parts.append(f'<circle cx="{x + size / 2:g}" cy="{y + size / 2:g}" r="1.8" fill="{theme.line2}"/>')
    if text:
        upper = state in (BlockState.ACTIVE, BlockState.SHARED, BlockState.IN_FLIGHT)
        ink = (theme.line2, theme.ink, ON_OWNER, theme.shared_ink, theme.ink, ON_OWNER)[state]
        low = state == BlockState.SHARED and strip and size <= 30  # under a strip that leaves it no other room
        middle = y + size * (0.6 if low else 0.42 if upper else 0.5) + font_size * 0.36
        parts.append(
            f'<text x="{x + size / 2:g}" y="{middle:.4g}" font-size="{font_size:g}" fill="{ink}" font-weight="700" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
    return "".join(parts)


def mark_svg(theme: Theme, mark: str, *, x: float = 10, y: float = 10) -> str:
    """The badge of a step mark, 17 px across, centred at (x, y)."""
    colour = theme.warn if mark == "evicted" else theme.ink
    stroke = f'stroke="{theme.panel}" stroke-width="2.1" stroke-linecap="round" fill="none"'
    inner = {
        "taken": f'<path d="M-3.6 0h7.2M0 -3.6v7.2" {stroke}/>',
        "evicted": f'<path d="M-3 -3l6 6M3 -3l-6 6" {stroke}/>',
        "locked": f'<path d="M0 -4v4.4l3 1.8" {stroke}/>',
        "copied": (
            f'<rect x="-4.2" y="-4.2" width="5.6" height="5.6" rx="1" fill="none" stroke="{theme.panel}" '
            f'stroke-width="1.5"/><rect x="-1.6" y="-1.6" width="5.6" height="5.6" rx="1" fill="{theme.panel}"/>'
        ),
    }[mark]
    return (
        f'<g transform="translate({x:g} {y:g})"><circle r="8.6" fill="{theme.panel}"/>'
        f'<circle r="7.4" fill="{colour}"/>{inner}</g>'
    )
