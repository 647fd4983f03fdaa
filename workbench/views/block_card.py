"""The inspector of a block: its state, who reads it and where, its slots with the text of their tokens, its last events.

The text in a block is known from the request that reads it; of a block without a reader from the request that computed it,
as long as the engine remembers that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from kvscope.engine.events import Event, EventKind
from kvscope.engine.outputs import RequestOutput
from kvscope.engine.snapshot import ROOT, BlockState, EngineSnapshot, RequestState

from ..markup import ICONS, ITEM, chip, esc, hue, one_stop, plural, size
from ..sentences import Context, sentence
from ..story import ICON_OF
from .base import Frame, label_of
from .block_tables import group_words

KEPT = 3  # events a block
MOST_SLOTS = 64  # drawn
_KINDS = frozenset({
    EventKind.ALLOCATED, EventKind.SHARED, EventKind.COPIED, EventKind.PUBLISHED, EventKind.EVICTED, EventKind.FREED,
    EventKind.NULLED,
})  # fmt: skip
_STATE_WORDS = {
    BlockState.EMPTY: "empty",
    BlockState.ACTIVE: "active",
    BlockState.SHARED: "shared",
    BlockState.PINNED: "pinned",
    BlockState.IN_FLIGHT: "a copy is in flight",
}
Texts = Callable[[int], RequestOutput | None]


class BlockEvents:
    """The last events of every block."""

    def __init__(self) -> None:
        self._context = Context()
        self._events: dict[int, deque[Event]] = {}

    def learn(self, events: Iterable[Event], snapshot: EngineSnapshot) -> None:
        self._context.learn(snapshot=snapshot)
        for event in events:
            if event.kind not in _KINDS:
                self._context.learn((event,))
            else:
                self._keep(event.block_id, event)
                if event.kind is EventKind.COPIED:
                    self._keep(int(event.numbers["source"]), event)

    def _keep(self, block: int, event: Event) -> None:
        self._events.setdefault(block, deque(maxlen=KEPT)).append(event)

    def html(self, block: int) -> str:
        rows = []
        for event in reversed(self._events.get(block, ())):
            headline, consequence = sentence(event, self._context)
            icon = ICONS[ICON_OF.get(event.kind, "quiet")]
            rows.append(
                f'<div class="e" data-step="{event.step}" data-e="{event.index}" {ITEM} role="button"><time>{event.step}</time><span class="ic">{icon}</span><span>{esc(headline)} '
                f"<em>{esc(consequence)}</em></span></div>"
            )
        return one_stop("log", "Events of this block", "".join(rows)) if rows else ""


def block_card(frame: Frame, block: int, texts: Texts, decode: Callable[[int], str], events: BlockEvents) -> str:
    """Everything about a block, as HTML."""
    snapshot = frame.snapshot
    if not 0 <= block < snapshot.num_blocks:
        return f'<p class="sum">The pool has blocks 0 to {snapshot.num_blocks - 1}.</p>'
    readers = [snapshot.requests[i] for i in frame.readers(block)]
    state = BlockState(int(snapshot.block_state[block]))
    names = " ".join(chip(label_of(r), r.id, frame.slots) for r in readers[:8]) or "none"
    more = f" and {len(readers) - 8} more" if len(readers) > 8 else ""
    generation, age = int(snapshot.generation[block]), snapshot.step - int(snapshot.last_used_step[block])
    rows = [
        ("State", esc(_state(frame, block, state))),
        ("Readers", names + more),
        ("Place", esc(_place_words(frame, block, readers))),
        (
            "Generation",
            f"{generation}" + (f" (this id was recycled {_times(generation - 1)})" if generation > 1 else ""),
        ),
        ("Last used", f"{plural(age, 'step')} ago" if age else "this step"),
    ]
    if snapshot.computed_for[block] >= 0:
        hits = int(snapshot.num_hits[block])
        rows.append(("In the cache", esc(f"computed for request {snapshot.computed_for[block]}, found {_times(hits)}")))
    if frame.info is not None:
        rows.append(("Memory", esc(f"{size(frame.info.block_bytes)}, {frame.info.dtype}")))
    facts = '<dl class="facts2">' + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"
    return facts + _slots(frame, block, readers, tokens_in(frame, block, texts), decode) + events.html(block)


def place_of(request: RequestState, block: int) -> tuple[int, int]:
    """(KV group, place in its table) of a block that the request reads."""
    for group, table in enumerate(request.block_tables):
        places = np.flatnonzero(table == block)
        if len(places):
            return group, int(places[0])
    raise ValueError(f"block {block} stands in no table of request {request.id}")


def tokens_in(frame: Frame, block: int, texts: Texts) -> list[int]:
    """Ids of the tokens in the written slots; empty where nobody knows them any more."""
    snapshot, readers = frame.snapshot, frame.readers(block)
    if len(readers):
        request = snapshot.requests[readers[0]]
        request_id, child, logical = request.id, request.child, place_of(request, block)[1]
    else:
        request_id, child, logical = int(snapshot.computed_for[block]), 0, _depth(snapshot.parent, block)
    output = texts(request_id) if request_id >= 0 and logical >= 0 else None
    if output is None:
        return []
    first = logical * int(snapshot.slots[block])
    last = first + int(snapshot.filled[block])
    if not len(readers) and len(output.outputs) > 1 and last > len(output.prompt_token_ids):
        return []  # which of its samples wrote them is not known
    written = output.outputs[child].token_ids if child < len(output.outputs) else []
    return [*output.prompt_token_ids, *written][first:last]


def _depth(parent: np.ndarray, block: int) -> int:
    """How many blocks of its text stand before a cached one; −1 where it is not in a chain."""
    depth = 0
    while parent[block] >= 0:
        block, depth = parent[block], depth + 1
    return depth if parent[block] == ROOT else -1


def _times(number: int) -> str:
    return ("never", "once", "twice")[number] if number < 3 else f"{number:,} times"


def _state(frame: Frame, block: int, state: BlockState) -> str:
    if state is not BlockState.CACHED:
        return "the null block: nobody's memory" if block == 0 else _STATE_WORDS[state]
    place = int(np.flatnonzero(frame.snapshot.eviction_order == block)[0]) + 1
    return f"cached, number {place:,} to be evicted"


def _place_words(frame: Frame, block: int, readers: list[RequestState]) -> str:
    if not readers:
        return "–"
    group, logical = place_of(readers[0], block)
    words = group_words(frame, group)
    return f"logical block {logical} of {label_of(readers[0])}" + (f", {words}" if words else "")


def _slots(
    frame: Frame, block: int, readers: list[RequestState], tokens: list[int], decode: Callable[[int], str]
) -> str:
    filled, block_size = int(frame.snapshot.filled[block]), int(frame.snapshot.slots[block])
    colour = hue(readers[0].id, frame.slots) if len(readers) == 1 else ""
    cells = []
    for slot in range(min(block_size, MOST_SLOTS)):
        if slot >= filled:
            cells.append(f'<div class="e" title="slot {slot}: unwritten"></div>')
            continue
        text = decode(tokens[slot]) if slot < len(tokens) else ""
        style = f' style="background:{colour}"' if colour else ' class="plain"'
        cells.append(f'<div{style} title="slot {slot}">{esc(text.strip() or text)}</div>')
    return f'<div class="slots">{"".join(cells)}</div>'
