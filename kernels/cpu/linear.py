"""linear(x, W, b) = x Wᵀ + b over weights packed once for the CPU.

**Packing.** A tile (see `linear_tile`) multiplies rows of x by COLUMNS outputs and reads, at each step, one word of each
output: a float32, or two neighbouring bfloat16. So the weight [N, K] is cut into panels of COLUMNS outputs, and inside
a panel the words of one step lie side by side:

    weight   [N, K]                      row n:  w[n,0] w[n,1] | w[n,2] w[n,3] | …          (| : words, here bfloat16)
    packed   [N / COLUMNS][words][COLUMNS]       panel 0, word 0: w[0,0:2] w[1,0:2] … w[31,0:2];  word 1: w[0,2:4] …

Of int8 a word holds four. N and K are padded with zeros. A product then reads a panel, and all panels of a thread, as one stream. It is the only
copy of the weight; `PackedLinear.rows` gives rows back for an embedding that is tied to the output head.

**Product.** The work is the grid of row blocks × panels, in that order, cut into one run of equal length per thread. A
row block fits well into the L2 cache, so that with many rows (prefill) x is read from there while a panel streams by;
with few (decode) there is one block, and every thread streams its own share of the weight. Of the tiles of a panel only
the first would wait for memory; so all of them together prefetch the next panel.

**Epilogues.** What follows a product is done while its sums are at hand: they are stored, or added to the residual stream
(`linear_add`), or gate an MLP (`linear_silu_mul`). For the last, each panel holds LANES columns of gate and the same of up.

**int8.** `reference.quantize_weight` says what the weight becomes, and `linear_groups` turns x into int8 too, where that
is asked for and the CPU multiplies bytes. Otherwise the tile widens the weight's bytes in registers.

Rows do not meet: the result of a row is the same, bit for bit, whatever rows stand beside it and however many threads
there are. float32 accumulates in float32; bfloat16 products are exact in float32 and accumulate there; products of two int8 add
up exactly to the sum of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, prange, uint32

from ..huge_pages import empty
from ..reference import check_quantization, quantize_weight
from .compiler import CPU, array_at, inline, kernel, num_threads
from .elementwise import widen
from .linear_groups import num_parts, quantize_rows, rounded_rows
from .linear_steps import COLUMNS, GROUP, GROUP_BYTES, KINDS, LANES
from .linear_tile import copy_lanes, make_tile, round_lanes
from .scalars import silu, store_row

ROW_BYTES = 4 * COLUMNS  # of a panel: one word of each of its outputs; also of COLUMNS float32
AHEAD = 4096  # bytes of weight to prefetch: about the latency of memory times the bandwidth of a core
BLOCK_BYTES = 256 * 1024  # of x in a row block

STORE, ADD, SILU_MUL = 0, 1, 2  # epilogues

# ------------------------------------------------------------------------------------------------------ the product


@inline
def finish(rows, sums, values, epilogue, width, out, out_stride, as_bf16, columns):
    """Write a tile's sums, float32 [rows, COLUMNS] at address `sums`, to `out`, `columns` of `width`, through the epilogue.
    values: the address of room for as many."""
    source, stride = sums, ROW_BYTES
    if epilogue == SILU_MUL:  # in one loop over all rows: over a row alone LLVM would not use its vectors
        source, stride, n = values, 4 * LANES, rows * LANES
        for r in range(rows):
            copy_lanes(sums + r * ROW_BYTES, values + r * stride)
            copy_lanes(sums + r * ROW_BYTES + stride, values + 4 * n + r * stride)
        gate, up = array_at(values, n, float32), array_at(values + 4 * n, n, float32)
        for i in range(n):
            gate[i] = silu(gate[i]) * up[i]
    size = 2 if as_bf16 else 4
    for r in range(rows):
        row, to = source + r * stride, out + r * out_stride
        if epilogue == ADD:
            here, stream = array_at(row, columns, float32), array_at(to, columns, float32)
            for c in range(columns):
                here[c] += stream[c]
        if columns < width:
            store_row(to, as_bf16, array_at(row, columns, float32), columns)
            continue
        for c in range(0, width, LANES):
            if as_bf16:
                round_lanes(row + 4 * c, to + size * c)
            else:
                copy_lanes(row + 4 * c, to + size * c)


def _make_product(kind: str, group: str):
    """The product kernel of one kind of tile."""
    tile = make_tile(kind)
    step_bytes, most_rows = KINDS[kind].w_bytes, KINDS[kind].rows
    quantizes = kind == "i8_dot"

    @kernel(f"void({', '.join(['int64'] * 18)})", parallel=True, group=group, name=f"linear_{kind}")
    def product(
        x, x_stride, x_bf16, records, quantizers, w, scale, bias, bias_step, out, out_stride, as_bf16, epilogue, m, n, steps,
        num_blocks, num_parts,
    ):  # fmt: skip
        """out [m, n] (rows `out_stride` bytes apart) = epilogue(x [m, k] w · scale + bias). bias_step: bytes from panel to
        panel, 0 for no bias.

        Where x is quantized, `records` has room for its groups, and `quantizers` threads fill it.
        """
        x_at, row_bytes, x_step = x, x_stride, x_stride
        if quantizes:
            x_at, row_bytes, x_step = records, GROUP_BYTES, m * GROUP_BYTES
            if quantizers == 1:
                quantize_rows(0, m, x, x_stride, x_bf16, records, m, steps)
            else:
                for part in prange(quantizers):
                    begin, end = part * m // quantizers, (part + 1) * m // quantizers
                    quantize_rows(begin, end, x, x_stride, x_bf16, records, m, steps)
        width = LANES if epilogue == SILU_MUL else COLUMNS
        panels = (n + width - 1) // width
        tasks = num_blocks * panels
        panel_bytes = steps * step_bytes
        size = 2 if as_bf16 else 4
        sums_are_out = as_bf16 == 0 and (epilogue == STORE or (epilogue == ADD and bias_step == 0))
        for part in prange(num_parts):
            room = np.empty((2, most_rows, COLUMNS), np.float32)
            begin, end = part * tasks // num_parts, (part + 1) * tasks // num_parts
            for task in range(begin, end):
                sums = room.ctypes.data  # here, not before the loop: Numba frees an array after its last use
                block, panel = task // panels, task % panels
                first = block * m // num_blocks
                rows = (block + 1) * m // num_blocks - first
                columns = min(width, n - panel * width)
                direct = sums_are_out and columns == COLUMNS  # then the tile writes into out by itself
                this, factors = w + panel * panel_bytes, scale + panel * ROW_BYTES
                tiles = (rows + most_rows - 1) // most_rows
                share = step_bytes // tiles  # bytes of the next panel that each step of each tile prefetches
                for t in range(tiles):  # as equal as can be: 32 rows are 10 + 11 + 11, not 12 + 12 + 8
                    start = first + t * rows // tiles
                    height = first + (t + 1) * rows // tiles - start
                    tile_x = x_at + start * row_bytes
                    to = out + start * out_stride + panel * width * size
                    if tiles == 1 or (task == begin and t == 0):
                        ahead, ahead_step = this + AHEAD, step_bytes
                    elif task + 1 < end:
                        ahead, ahead_step = w + (panel + 1) % panels * panel_bytes + t * steps * share, share
                    else:
                        ahead, ahead_step = this, 0
                    init, init_stride = bias + panel * bias_step, 0
                    if direct and epilogue == ADD:
                        init, init_stride = to, out_stride
                    at, stride = (to, out_stride) if direct else (sums, ROW_BYTES)
                    tile(height, tile_x, x_step, this, steps, init, init_stride, factors, at, stride, ahead, ahead_step)
                    if not direct:
                        values = sums + most_rows * ROW_BYTES
                        finish(height, sums, values, epilogue, width, to, out_stride, as_bf16, columns)

    return product


_BF16_KIND = "bf16_dot" if CPU.avx512_bf16 else "bf16"
_PRODUCTS = {
    "f32": _make_product("f32", "float32"),
    _BF16_KIND: _make_product(_BF16_KIND, "bfloat16"),
    "i8": _make_product("i8", "int8"),
}
if CPU.avx512_bf16:
    _PRODUCTS["i8_bf16"] = _make_product("i8_bf16", "int8")
if CPU.avx512_vnni:
    _PRODUCTS["i8_dot"] = _make_product("i8_dot", "int8")
_NO_BIAS = torch.zeros(COLUMNS, dtype=torch.float32)


def _kind(dtype: torch.dtype, quantization: str | None) -> str:
    """The fastest tile that this CPU has."""
    if quantization == "int8-dynamic" and CPU.avx512_vnni:
        return "i8_dot"
    if quantization is None:
        return "f32" if dtype == torch.float32 else _BF16_KIND
    return "i8_bf16" if (dtype, quantization) == (torch.bfloat16, "int8") and CPU.avx512_bf16 else "i8"


# --------------------------------------------------------------------------------------------- packing and unpacking


@kernel("void(int64, int64, int64, int64, int64)", parallel=True)
def pack_words(packed, weight, n, words, num_parts):
    """packed [panels][words][COLUMNS] from weight [n][words], both of 32-bit words; absent outputs are zero."""
    panels = (n + COLUMNS - 1) // COLUMNS
    to = array_at(packed, (panels, words, COLUMNS), uint32)
    source = array_at(weight, (n, words), uint32)
    for part in prange(num_parts):
        for panel in range(part * panels // num_parts, (part + 1) * panels // num_parts):
            columns = min(COLUMNS, n - panel * COLUMNS)
            for word in range(words):
                for c in range(columns):
                    to[panel, word, c] = source[panel * COLUMNS + c, word]
                for c in range(columns, COLUMNS):
                    to[panel, word, c] = 0


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)", parallel=True)
def unpack_rows(rows, ids, count, packed, n, words, num_parts):
    """rows [count][words] = the weight rows `ids`. Returns how many ids are not in 0 … n − 1; their rows are left."""
    panels = (n + COLUMNS - 1) // COLUMNS
    to = array_at(rows, (count, words), uint32)
    index = array_at(ids, count, np.int64)
    source = array_at(packed, (panels, words, COLUMNS), uint32)
    wrong = 0
    for part in prange(num_parts):
        for i in range(part * count // num_parts, (part + 1) * count // num_parts):
            row = index[i]
            if row < 0 or row >= n:
                wrong += 1
                continue
            for word in range(words):
                to[i, word] = source[row // COLUMNS, word, row % COLUMNS]
    return wrong


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [N, K] in panels, and its bias. Made by `pack_linear`; the order of `data` depends on the CPU."""

    data: torch.Tensor  # int32 [N / COLUMNS, words, COLUMNS]
    scale: torch.Tensor | None  # float32 [N, padded to COLUMNS] of an int8 weight
    bias: torch.Tensor | None  # float32 [N, padded to COLUMNS]
    out_features: int  # N
    in_features: int  # K
    dtype: torch.dtype  # of x
    quantization: str | None
    gated: bool = False  # half of the rows of the weight are gates: out_features is I of its 2·I

    @property
    def num_bytes(self) -> int:
        """Memory held: the packed weight with its padding, its scales, and the bias."""
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.bias) if tensor is not None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as an embedding looks them up: ids int64 [n] -> [n, K] in `dtype`.

        Raises IndexError when an id is not in 0 … N − 1.
        """
        ids = ids.to(torch.int64).contiguous()
        words = self.data.shape[1]
        rows = torch.empty(len(ids), words, dtype=torch.int32)
        parts = min(num_threads(), 1 + len(ids) // 16)
        n = self.out_features
        if unpack_rows(rows.data_ptr(), ids.data_ptr(), len(ids), self.data.data_ptr(), n, words, parts):
            raise IndexError(f"ids must lie in 0 to {n - 1}, not {ids.min().item()} to {ids.max().item()}")
        if self.scale is None:
            return rows.view(self.dtype)[:, : self.in_features]
        return (rows.view(torch.int8)[:, : self.in_features] * self.scale[ids, None]).to(self.dtype)


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    quantization: str | None = None,
    *,
    gated: bool = False,
) -> PackedLinear:
    """Packs a weight [N, K] (any float dtype, converted to `dtype` or quantized) and a bias [N] (or None); keeps neither.
    `gated`: N is 2·I, gate above up, for `linear_silu_mul`.

    Raises ValueError for a dtype other than float32 and bfloat16, for an unknown quantization, and for shapes that do
    not fit.
    """
    check_quantization(quantization)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: CPU linears are packed as torch.float32 or torch.bfloat16")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, not [N, K] with both at least 1")
    n, k = weight.shape
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, not [{n}] as the weight's rows")
    if gated and n % 2:
        raise ValueError(f"weight has {n} rows, which cannot be as many gates as ups")
    weight, scale = weight.detach().to("cpu"), None
    if quantization is None:
        weight = weight.to(dtype)
    else:
        weight, scale = quantize_weight(weight)
    if bias is not None:
        bias = bias.detach().to("cpu", dtype).float()
    if gated:
        weight, scale, bias = (None if each is None else _in_turns(each) for each in (weight, scale, bias))
    step = GROUP if quantization == "int8-dynamic" else 4 // weight.itemsize
    if k % step:
        weight = F.pad(weight, (0, -k % step))
    weight = weight.contiguous()
    words = weight.shape[1] * weight.itemsize // 4
    panels = -(-len(weight) // COLUMNS)
    data = empty((panels, words, COLUMNS), torch.int32)
    pack_words(data.data_ptr(), weight.data_ptr(), len(weight), words, num_threads())
    missing = (0, panels * COLUMNS - len(weight))
    scale, bias = (None if each is None else F.pad(each, missing) for each in (scale, bias))
    return PackedLinear(data, scale, bias, n // 2 if gated else n, k, dtype, quantization, gated)


def _in_turns(rows: torch.Tensor) -> torch.Tensor:
    """[2·I, …] as LANES of the first half, LANES of the second, and so on; each half padded with zeros to whole LANES."""
    halves = rows.unflatten(0, (2, -1))
    missing = -halves.shape[1] % LANES
    if missing:
        halves = torch.cat([halves, halves.new_zeros(2, missing, *rows.shape[1:])], 1)
    return halves.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)


def _num_blocks(rows: int, row_bytes: int, most_rows: int, panels: int) -> int:
    """Into how many equal row blocks to cut x: each within BLOCK_BYTES, but a tile high; tasks enough to share evenly."""
    by_cache = -(-rows * row_bytes // BLOCK_BYTES)
    by_threads = min(-(-4 * num_threads() // panels), rows // (4 * most_rows))
    return max(1, min(max(by_cache, by_threads), rows // most_rows))


def linear(x: torch.Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, K] of the weight's dtype -> [T, N] in `out_dtype`: float32 or bfloat16, x's own by default.

    Raises ValueError when x does not fit the weight, or out_dtype is neither.
    """
    out_dtype = out_dtype or x.dtype
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out_dtype={out_dtype}: a CPU linear gives torch.float32 or torch.bfloat16")
    out = torch.empty(len(x), packed.out_features, dtype=out_dtype)
    _multiply(x, packed, out, STORE)
    return out


def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> None:
    """residual float32 [T, N] += `linear(x, packed)`. Raises ValueError where the three do not fit."""
    shape = (len(x), packed.out_features)
    if residual.shape != shape or residual.dtype != torch.float32 or residual.stride(1) != 1:
        raise ValueError(
            f"residual is {residual.dtype} {list(residual.shape)}; this linear adds to float32 {list(shape)}"
        )
    _multiply(x, packed, residual, ADD)


def linear_silu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """silu(gate) · up [T, I] in x's dtype, where `linear` would give gate | up. Raises ValueError where x does not fit."""
    out = torch.empty(len(x), packed.out_features, dtype=x.dtype)
    _multiply(x, packed, out, SILU_MUL)
    return out


def _multiply(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, epilogue: int) -> None:
    if x.ndim != 2 or x.shape[1] != packed.in_features or x.dtype != packed.dtype or not x.is_cpu:
        takes = f"{packed.dtype} [tokens, {packed.in_features}] on the cpu"
        raise ValueError(f"x is {x.dtype} {list(x.shape)} on {x.device}; this linear takes {takes}")
    if packed.gated != (epilogue == SILU_MUL):
        raise ValueError(
            f"a weight packed with gated={packed.gated} serves {'linear_silu_mul' if packed.gated else 'linear'} alone"
        )
    m = len(x)
    if m == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    kind = _kind(packed.dtype, packed.quantization)
    panels, words = packed.data.shape[:2]
    steps = words // KINDS[kind].words
    x_bytes = steps * KINDS[kind].x_bytes
    records, quantizers = 0, 1
    if kind == "i8_dot":
        x = _padded(x, steps * GROUP)
        room = torch.empty(m * x_bytes, dtype=torch.uint8)
        records, quantizers = room.data_ptr(), num_parts(x.numel())
    else:
        if packed.quantization == "int8-dynamic":
            x = rounded_rows(x)
        elif x.dtype == torch.bfloat16 and kind not in ("bf16_dot", "i8_bf16"):
            x = widen(x)
        x = _padded(x, x_bytes // x.itemsize)
    bias, bias_step = (_NO_BIAS, 0) if packed.bias is None else (packed.bias, ROW_BYTES)
    _PRODUCTS[kind](
        x.data_ptr(), x.stride(0) * x.itemsize, x.dtype is torch.bfloat16, records, quantizers,
        packed.data.data_ptr(), 0 if packed.scale is None else packed.scale.data_ptr(), bias.data_ptr(), bias_step,
        out.data_ptr(), out.stride(0) * out.itemsize, out.dtype is torch.bfloat16, epilogue, m, packed.out_features, steps,
        _num_blocks(m, x_bytes, KINDS[kind].rows, panels), num_threads(),
    )  # fmt: skip


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x with zeros up to as many columns as the steps of a tile take."""
    return x if x.shape[1] == columns else F.pad(x, (0, columns - x.shape[1]))
