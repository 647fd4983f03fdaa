"""A recording as a file, and back: the columns of its spans one under the other, the rest as JSON.

The base becomes the first moment, as what would make it out of an engine in which nothing has happened; so a file has one
kind of content only. Reading checks every number that is used as an index, then rolls through the whole recording once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..info import EngineFacts
from . import archive, texts_file
from .archive import Damaged
from .check import check
from .delta import BLOCK, CAUSES, KINDS, STATES, STATUSES, TABLES, Delta, Met, empty_blocks
from .recording import Recording
from .span import MOMENT, SPAN, Span
from .state import Facts, State
from .words import Words

KIND = "kvscope recording"
VERSION = 1
MAX_BLOCKS = 1 << 22


def write(recording: Recording, path: Path) -> Path:
    """Everything that `recording` holds, in one file. The engine may go on meanwhile."""
    words, spans = Words(), list(recording.spans)
    if recording.base.is_known:
        event = int(spans[0].moments["first_event"][0]) if spans else 0
        spans.insert(0, Span.of(recording.base.moment, [_delta_of(recording.base, event)], words))
    arrays: dict[str, np.ndarray] = {}
    for name in MOMENT:
        arrays[f"moment/{name}"] = np.concatenate([span.moments[name] for span in spans])
    for name in TABLES:
        tables = [span.tables[name] for span in spans]
        if name == "events":
            tables = _renumbered(spans, words)
        arrays[f"table/{name}"] = np.concatenate(tables)
        arrays[f"count/{name}"] = np.concatenate([span.counts[name] for span in spans])
    rows = np.concatenate([span.rows for span in spans])
    facts = asdict(recording.base.facts)
    arrays |= {f"block/{name}": np.ascontiguousarray(rows[name]) for name in _columns(recording.base.facts)}
    requests, text_arrays = texts_file.packed(recording)
    info = None if recording.info is None else asdict(recording.info)
    for held in (facts, info):
        if held and not held["block_sizes"]:
            del held["block_sizes"]
    page = {
        "kind": KIND,
        "version": VERSION,
        "first_moment": spans[0].first,
        "facts": facts,
        "info": info,
        "config": recording.config,
        "codes": {"kinds": KINDS, "causes": CAUSES, "states": STATES, "statuses": STATUSES},
        "shapes": words.shapes,
        "met": [[moment, *met.as_list()] for span in spans for moment, met in span.met],
        "texts": [text for span in spans for text in span.texts],
        "requests": requests,
        "tokens": texts_file.token_texts(recording),
    }
    archive.write(path, page, arrays | text_arrays)
    return path


def read(path: Path) -> Recording:
    """Raises ValueError with a sentence for whatever is wrong with the file, and FileNotFoundError."""
    try:
        page, arrays = archive.read(path, KIND)
    except Damaged as error:
        raise ValueError(f"{path}: this recording is damaged: {error}") from None
    version = page.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"{path}: is a recording of format {version}, and this kvscope reads format {VERSION}")
    try:
        return _recording(page, arrays)
    except Damaged as error:
        raise ValueError(f"{path}: this recording is damaged: {error}") from None
    except Exception as error:  # whatever else a page may hold that nobody has written
        raise ValueError(f"{path}: this recording is damaged: {type(error).__name__}: {error}") from None


# --- writing ------------------------------------------------------------------------------------------------------------


def _columns(facts: Facts) -> list[str]:
    """Those of BLOCK that a file holds: whose a block is matters where KV groups have blocks of different sizes."""
    return [name for name in BLOCK.names or () if name != "group" or facts.block_sizes]


def _delta_of(state: State, first_event: int) -> Delta:
    """What makes this state out of an engine in which nothing has happened."""
    facts = state.facts
    delta = Delta(state.step, state.time, STATES[state.state])
    used = np.flatnonzero(state.blocks != empty_blocks(facts.num_blocks))
    delta.blocks, delta.block_rows = used.tolist(), state.blocks[used]
    delta.leader, delta.first_event = state.leader, first_event
    delta.has_line, delta.line = True, list(state.line)
    delta.counters, delta.counter_values = list(range(len(state.counters))), state.counters.tolist()
    delta.totals = state.totals
    for no, sequence in state.sequences.items():
        delta.met.append(sequence.met)
        delta.progress += (no, sequence.computed, sequence.tokens)
        delta.standing += sequence.standing
        if sequence.first_token is not None:
            delta.firsts.append(no)
            delta.first_times.append(sequence.first_token)
        for g, table in enumerate(sequence.tables):
            for position, block in enumerate(table):
                delta.edits += (no, g, position, block)
    return delta


def _renumbered(spans: list[Span], words: Words) -> list[np.ndarray]:
    """The events of all spans, with one list of texts and one of shapes."""
    tables, num_texts = [], 0
    shape, text = TABLES["events"][1].index("shape"), TABLES["events"][1].index("text")
    for span in spans:
        table = span.tables["events"].copy()
        number_of = np.array([words.number_of(its) for its in span.words.shapes], np.int32)
        if len(table):
            table[:, shape] = number_of[table[:, shape]]
            table[table[:, text] >= 0, text] += num_texts
        num_texts += len(span.texts)
        tables.append(table)
    return tables


# --- reading ------------------------------------------------------------------------------------------------------------


def _recording(page: dict[str, Any], arrays: dict[str, np.ndarray]) -> Recording:
    facts = _facts(page["facts"])
    words = Words([(tuple(map(str, names)), tuple(map(bool, whole))) for names, whole in page["shapes"]])
    met = [(int(moment), Met(*rest)) for moment, *rest in page["met"]]
    first, texts = page["first_moment"], [str(text) for text in page["texts"]]
    for name, (dtype, columns) in TABLES.items():
        _require(arrays, f"table/{name}", dtype, len(columns))
        _require(arrays, f"count/{name}", "<i4")
    for name, dtype in MOMENT.items():
        _require(arrays, f"moment/{name}", dtype)
    rows = np.zeros(len(arrays["table/blocks"]), BLOCK)
    for name in _columns(facts):
        _require(arrays, f"block/{name}", BLOCK[name].str)
        rows[name] = arrays[f"block/{name}"]
    _translate(arrays, page["codes"])
    check(facts, arrays, rows, [moment for moment, _ in met], words, len(texts), first)
    base = State(facts)
    base.moment = first - 1
    spans = _spans(arrays, rows, met, texts, words, first)
    requests, decode_token = texts_file.unpacked(page, arrays)
    info = None if page["info"] is None else _info(page["info"])
    recording = Recording(
        base=base, spans=spans, deltas=(), words=words, requests=requests, info=info, config=dict(page["config"]),
        decode=lambda token_ids: "".join(map(decode_token, token_ids)), decode_token=decode_token,
    )  # fmt: skip
    recording.moment_state(recording.num_moments - 1).snapshot()  # all of it can be rolled through
    return recording


def _facts(held: dict[str, Any]) -> Facts:
    from ..kvcache.eviction import STRATEGIES

    facts = Facts(**{field.name: held[field.name] for field in fields(Facts) if field.name in held})
    sizes = (facts.block_size, facts.num_blocks, facts.num_groups, facts.num_host_blocks)
    if any(type(size) is not int for size in sizes) or facts.eviction_policy not in STRATEGIES:
        raise Damaged("its facts are none of an engine")
    if not (facts.block_size > 0 and 2 <= facts.num_blocks <= MAX_BLOCKS and 1 <= facts.num_groups <= 64):
        raise Damaged(f"it claims {facts.num_blocks} blocks of {facts.block_size} tokens in {facts.num_groups} groups")
    counters, whole = tuple(map(str, facts.counters)), tuple(map(bool, facts.whole))
    if len(counters) != len(whole):
        raise Damaged("its counters have no kinds")
    block_sizes = tuple(facts.block_sizes)
    if block_sizes and not (
        len(block_sizes) == facts.num_groups
        and all(type(size) is int and size > 0 for size in block_sizes)
        and math.lcm(*block_sizes) == facts.block_size
    ):
        raise Damaged(f"its {facts.num_groups} groups cannot have blocks of {block_sizes} tokens")
    return Facts(*sizes, facts.eviction_policy, counters, whole, block_sizes)


def _info(held: dict[str, Any]) -> EngineFacts:
    values = {"block_sizes": ()} | held
    return EngineFacts(
        **{f.name: values[f.name] for f in fields(EngineFacts)} | {"block_sizes": tuple(values["block_sizes"])}
    )


def _require(arrays: dict[str, np.ndarray], name: str, dtype: str, columns: int = 0) -> None:
    array = arrays.get(name)
    if array is None or array.dtype.str != np.dtype(dtype).str or array.shape[1:] != ((columns,) if columns else ()):
        raise Damaged(f"{name} is missing or has another shape")


def _translate(arrays: dict[str, np.ndarray], codes: dict[str, list[str]]) -> None:
    """From the codes of the file to those of this version: words may have been added in between."""
    kinds, causes, states, statuses = (
        np.array([own.index(word) if word in own else -1 for word in codes[name]], np.int32)
        for name, own in (("kinds", KINDS), ("causes", CAUSES), ("states", STATES), ("statuses", STATUSES))
    )
    events, standing = arrays["table/events"], arrays["table/standing"]
    names, why = TABLES["events"][1], TABLES["standing"][1].index("why")
    for table, column, own in (
        (events, names.index("kind"), kinds),
        (events, names.index("cause"), causes),
        (standing, TABLES["standing"][1].index("status"), statuses),
    ):
        table[:, column] = own[table[:, column]]
    told = standing[:, why] >= 0
    standing[told, why] = causes[standing[told, why]]
    arrays["moment/state"] = states[arrays["moment/state"]].astype(np.uint8)
    unknown = (events[:, [names.index("kind"), names.index("cause")]] < 0).any() or (standing[told, why] < 0).any()
    if unknown:
        raise Damaged("it tells of events that this version does not know")


def _spans(
    arrays: dict[str, np.ndarray],
    rows: np.ndarray,
    met: list[tuple[int, Met]],
    texts: list[str],
    words: Words,
    first: int,
) -> tuple[Span, ...]:
    ends = {name: np.concatenate([[0], np.cumsum(arrays[f"count/{name}"], dtype=np.int64)]) for name in TABLES}
    spans = []
    for start in range(0, len(arrays["moment/step"]), SPAN):
        stop = min(start + SPAN, len(arrays["moment/step"]))
        cut = {name: slice(end[start], end[stop]) for name, end in ends.items()}
        spans.append(
            Span(
                first + start,
                {name: arrays[f"moment/{name}"][start:stop] for name in MOMENT},
                {name: arrays[f"table/{name}"][cut[name]] for name in TABLES},
                {name: arrays[f"count/{name}"][start:stop] for name in TABLES},
                rows[cut["blocks"]],
                [pair for pair in met if first + start <= pair[0] < first + stop],
                texts,
                words,
            )
        )
    return tuple(spans)
