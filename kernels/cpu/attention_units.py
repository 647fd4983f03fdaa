"""How the attention of a step is cut into units of work, and how one unit is done.

    row of few tokens (decode)    a unit is the row: a block of KV heads of each page read together
    row of many tokens (prefill)  a unit is one KV head and up to BLOCK query rows; the latest, which see most, first
    few rows, long context        a unit is one chunk of KEYS keys of a row; `finish_split` merges them at the end

In all three a row's keys are cut at the same places, the multiples of KEYS, and merged in the same order, so that a row's
result depends neither on the number of threads, nor on what else is in the batch, nor on how its prompt was cut into
steps. A unit begins where the first of its rows begins to see (`first_key`): its first chunk may be short, and what
only its other rows do not see adds nothing to them.
"""

from __future__ import annotations

from numba import float32, int32, int64

from .attention_panels import attend_panels
from .attention_plain import TILE, attend_plain, gather_panels
from .attention_rows import KEYS, P_STRIDE, S_STRIDE, merge, pack_rows, store_rows
from .compiler import array_at, inline
from .scalars import LOG2_E

FEW = 8  # query rows per KV head up to which a row's heads are attended together
BLOCK = 96  # query rows of one unit otherwise; a multiple of every tile
TOGETHER = 32  # query rows attended together, all heads
UNIT = 4  # numbers that describe a unit: row, first KV head, first query row, chunk (−1 for all)


def scratch_parts(dim: int) -> list[int]:
    """Where the parts of a thread's scratch begin, in bytes, for head size `dim`; the last number is its size."""
    width = -(-dim // 16) * 16
    sizes = (
        4 * dim * BLOCK,  # 0: q
        S_STRIDE * TOGETHER,  # 1: scores
        P_STRIDE * TOGETHER,  # 2: their softmax, bfloat16
        8 * (KEYS // 16 + 1),  # 3: addresses of panels
        64 + 4 * dim,  # 4: the last pair of an odd number of values
        4 * width * BLOCK,  # 5: o
        4 * BLOCK,  # 6: m
        4 * BLOCK,  # 7: denom
        4 * width * TOGETHER,  # 8: o, m, denom of a chunk that is yet to be merged
        4 * TOGETHER,  # 9
        4 * TOGETHER,  # 10
        4 * dim * KEYS,  # 11: k in float32
        4 * width * KEYS,  # 12: v in float32
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    return starts


@inline
def first_key(context, first, group, window):
    """The cache index at which query row `first` begins to read: a multiple of 16, so that panels stay whole."""
    return max(0, context + first // group + 1 - window) // 16 * 16 if window > 0 else 0


@inline
def num_chunks(begin, end):
    """How many chunks the keys `begin` to `end` lie in."""
    return (end + KEYS - 1) // KEYS - begin // KEYS


@inline
def plan(
    units, block_table, table_width, query_start_loc, seq_lens, rows, tokens, blocks, block_size, kv_heads, group, window,
    split,
):  # fmt: skip
    """Write the units [n, UNIT], large ones first. Returns n, or −1 − row for the first row that cannot be served."""
    unit = array_at(units, (1 << 40, UNIT), int64)
    starts, lengths = array_at(query_start_loc, rows + 1, int32), array_at(seq_lens, rows, int32)
    n = 0
    for row in range(rows):
        q_len, used = int64(starts[row + 1] - starts[row]), (int64(lengths[row]) + block_size - 1) // block_size
        if starts[row] < 0 or q_len < 0 or starts[row + 1] > tokens or lengths[row] < q_len or used > table_width:
            return -1 - row
        ids = array_at(block_table + 4 * table_width * row, used, int32)
        for i in range(used):
            if ids[i] < 0 or ids[i] >= blocks:
                return -1 - row
        if q_len * group > FEW:
            last = (q_len * group - 1) // BLOCK
            for i in range(last + 1):
                for head in range(kv_heads):
                    unit[n, 0], unit[n, 1], unit[n, 2], unit[n, 3] = row, head, (last - i) * BLOCK, -1
                    n += 1
    for row in range(rows):
        q_len, length = int64(starts[row + 1] - starts[row]), int64(lengths[row])
        query_rows = q_len * group
        if query_rows == 0 or query_rows > FEW:
            continue
        together = TOGETHER // ((query_rows + 3) // 4 * 4)
        chunks = num_chunks(first_key(length - q_len, 0, group, window), length) if split else 1
        for head in range(0, kv_heads, together):
            for chunk in range(chunks):
                unit[n, 0], unit[n, 1], unit[n, 2], unit[n, 3] = row, head, 0, chunk if chunks > 1 else -1
                n += 1
    return n


def make_unit(panels: bool):
    """The function that does one unit, over pages of order "vnni" (`panels`) or "nhd"."""

    def attend_unit(
        unit, q, q_stride, out, bf16, pages, page_stride, block_size, half_bytes, kv_heads, group, dim,
        block_table, table_width, starts, lengths, scale, window, softcap, mine, parts, states,
    ):  # fmt: skip
        """mine: this thread's scratch, `parts` as of `scratch_parts`. states: where split rows leave their chunks."""
        row, head, first, chunk = unit[0], unit[1], unit[2], unit[3]
        token, length = int64(starts[row]), int64(lengths[row])
        query_rows = int64(starts[row + 1]) - token
        context, query_rows = length - query_rows, query_rows * group
        few = query_rows <= FEW
        rows = query_rows if few else min(BLOCK, query_rows - first)
        padded = (rows + 3) // 4 * 4
        heads = min(kv_heads - head, TOGETHER // padded) if few else 1
        begin, end = first_key(context, first, group, window), context + (first + rows - 1) // group + 1
        width = (dim + 15) // 16 * 16
        o, m, denom = mine + parts[5], mine + parts[6], mine + parts[7]
        if chunk >= 0:
            start = (begin // KEYS + chunk) * KEYS
            begin, end = max(begin, start), min(end, start + KEYS)
            o, m, denom = split_state(states, row, chunk, block_size * table_width, kv_heads, width, head)
        turn = LOG2_E if softcap > float32(0.0) else LOG2_E * scale
        ids = array_at(block_table + 4 * table_width * row, table_width, int32)
        q_row = (2 if panels else 4) * dim  # bytes
        for h in range(heads):
            q_at = mine + parts[0] + h * padded * q_row
            pack_rows(q, q_stride, bf16, q_at, rows, padded, first, token, head + h, group, dim, panels)

        s, table = mine + parts[1], mine + parts[3]
        tile = padded if few else (12 if panels else TILE)
        for start in range(begin // KEYS * KEYS, end, KEYS):
            key = max(begin, start)
            count = min(start + KEYS, end) - key
            if panels:
                head_bytes = 2 * dim * block_size
                addresses = array_at(table, KEYS // 16 + 1, int64)
                for panel in range((count + 15) // 16):
                    at = key + 16 * panel
                    inside = at % block_size // 16 * 32 * dim + head * head_bytes
                    addresses[panel] = pages + ids[at // block_size] * page_stride + inside
                addresses[(count + 15) // 16] = addresses[0]
            for h in range(1 if panels else heads):
                if not panels:
                    gather_panels(
                        pages, page_stride, ids, block_size, half_bytes, (2 if bf16 else 4) * (head + h) * dim, dim, bf16,
                        key, count, mine + parts[11], mine + parts[12], table, mine + parts[4],
                    )  # fmt: skip
                done = 0
                while done < padded:
                    now = tile if padded - done >= tile else 4
                    seen = min(count, context + (first + done + now - 1) // group + 1 - key)
                    at = h * padded + done
                    if seen > 0:
                        fresh = key == begin
                        o_to = o + 4 * width * at if fresh else mine + parts[8]
                        m_to, denom_to = (m + 4 * at, denom + 4 * at) if fresh else (mine + parts[9], mine + parts[10])
                        if panels:
                            attend_panels(
                                mine + parts[0] + at * q_row, now, heads, dim, table, seen, 2 * dim * block_size, half_bytes,
                                s, mine + parts[2], mine + parts[4], o_to, m_to, denom_to, first + done, key, group, context,
                                window, softcap, scale,
                            )  # fmt: skip
                        else:
                            attend_plain(
                                mine + parts[0] + at * q_row, now, dim, table, mine + parts[11], mine + parts[12], seen,
                                s, o_to, m_to, denom_to, first + done, key, group, context, window, softcap, scale,
                            )  # fmt: skip
                        if not fresh:
                            merge(
                                now * heads if panels else now, width, turn, o + 4 * width * at, m + 4 * at, denom + 4 * at,
                                o_to, m_to, denom_to,
                            )  # fmt: skip
                    done += now
        if chunk < 0:
            for h in range(heads):
                at = h * padded
                store_rows(
                    out, bf16, o + 4 * width * at, denom + 4 * at, rows, width, first, token, head + h, kv_heads, group, dim,
                )  # fmt: skip

    attend_unit.__qualname__ += "_panels" if panels else "_plain"  # compiled functions are linked by this name
    return inline(attend_unit)


@inline
def split_state(states, row, chunk, most_keys, kv_heads, width, head):
    """Where chunk `chunk` of split row `row` keeps (o, m, denom) of KV head `head`: room for FEW query rows of each head."""
    chunks = (most_keys + KEYS - 1) // KEYS
    heads = FEW * kv_heads
    state = states + (row * chunks + chunk) * heads * 4 * (width + 2)
    m = state + 4 * width * heads
    denom = m + 4 * heads
    return state + 4 * width * FEW * head, m + 4 * FEW * head, denom + 4 * FEW * head


@inline
def finish_split(
    unit, out, bf16, block_size, kv_heads, group, dim, table_width, starts, lengths, scale, window, softcap, states
):
    """Merge the chunks of a split row's heads in order and store the result; called with the unit of chunk 0."""
    row, head = unit[0], unit[1]
    token, length = int64(starts[row]), int64(lengths[row])
    q_len = int64(starts[row + 1]) - token
    rows, width = q_len * group, (dim + 15) // 16 * 16
    padded = (rows + 3) // 4 * 4
    heads = min(kv_heads - head, TOGETHER // padded)
    turn = LOG2_E if softcap > float32(0.0) else LOG2_E * scale
    begin = first_key(length - q_len, 0, group, window)
    most_keys = block_size * table_width
    o, m, denom = split_state(states, row, 0, most_keys, kv_heads, width, head)
    for chunk in range(1, num_chunks(begin, length)):
        o_new, m_new, denom_new = split_state(states, row, chunk, most_keys, kv_heads, width, head)
        merge(heads * padded, width, turn, o, m, denom, o_new, m_new, denom_new)
    for h in range(heads):
        at = h * padded
        store_rows(out, bf16, o + 4 * width * at, denom + 4 * at, rows, width, 0, token, head + h, kv_heads, group, dim)
