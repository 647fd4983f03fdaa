"""linear(x, W, b) = x Wᵀ + b over weights packed once for the CPU.

**Packing.** A tile (see `linear_tile`) multiplies rows of x by COLUMNS outputs and reads, at each step, one word of each
output: a float32, or two neighbouring bfloat16. So the weight [N, K] is cut into panels of COLUMNS outputs, and inside
a panel the words of one step lie side by side:

    weight   [N, K]                      row n:  w[n,0] w[n,1] | w[n,2] w[n,3] | …          (| : words, here bfloat16)
    packed   [N / COLUMNS][words][COLUMNS]       panel 0, word 0: w[0,0:2] w[1,0:2] … w[31,0:2];  word 1: w[0,2:4] …

N and K are padded with zeros. A product then reads a panel, and all panels of a thread, as one stream. It is the only
copy of the weight; `PackedLinear.rows` gives rows back for an embedding that is tied to the output head.

**Product.** The work is the grid of row blocks × panels, in that order, cut into one run of equal length per thread. A
row block fits well into the L2 cache, so that with many rows (prefill) x is read from there while a panel streams by;
with few (decode) there is one block, and every thread streams its own share of the weight. Of the tiles of a panel only
the first would wait for memory; so all of them together prefetch the next panel.

Rows do not meet: the result of a row is the same, bit for bit, whatever rows stand beside it and however many threads
there are. float32 accumulates in float32; bfloat16 products are exact in float32 and accumulate there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, prange, uint32

from .compiler import CPU, array_at, kernel, num_threads
from .linear_tile import COLUMNS, MAX_ROWS, make_tile
from .scalars import store_row

PANEL_STEP = 4 * COLUMNS  # bytes of a panel that one step reads
AHEAD = 4096  # bytes of weight to prefetch: about the latency of memory times the bandwidth of a core
BLOCK_BYTES = 256 * 1024  # of x in a row block

# ------------------------------------------------------------------------------------------------------ the product


def _make_product(kind: str):
    """The product kernel of one kind of tile."""
    tile = make_tile(kind)

    @kernel(
        f"void({', '.join(['int64'] * 13)})",
        parallel=True,
        group="bfloat16" if kind.startswith("bf16") else "float32",
        name=f"linear_{kind}",
    )
    def product(x, x_stride, w, bias, bias_step, out, out_stride, as_bf16, m, n, steps, num_blocks, num_parts):
        """out [m, n] (rows `out_stride` bytes apart) = x [m, k] w + bias. bias_step: bytes from panel to panel."""
        panels = (n + COLUMNS - 1) // COLUMNS
        tasks = num_blocks * panels
        panel_bytes = steps * PANEL_STEP
        for part in prange(num_parts):
            sums = np.empty((MAX_ROWS, COLUMNS), np.float32)
            begin, end = part * tasks // num_parts, (part + 1) * tasks // num_parts
            for task in range(begin, end):
                block, panel = task // panels, task % panels
                first = block * m // num_blocks
                rows = (block + 1) * m // num_blocks - first
                columns = min(COLUMNS, n - panel * COLUMNS)
                whole = as_bf16 == 0 and columns == COLUMNS  # then the tile writes into out by itself
                this, init = w + panel * panel_bytes, bias + panel * bias_step
                tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
                share = PANEL_STEP // tiles  # bytes of the next panel that each step of each tile prefetches
                for t in range(tiles):  # as equal as can be: 32 rows are 10 + 11 + 11, not 12 + 12 + 8
                    start = first + t * rows // tiles
                    height = first + (t + 1) * rows // tiles - start
                    x_at, to = x + start * x_stride, out + start * out_stride + panel * COLUMNS * (2 if as_bf16 else 4)
                    if tiles == 1 or (task == begin and t == 0):
                        ahead, ahead_step = this + AHEAD, PANEL_STEP
                    elif task + 1 < end:
                        ahead, ahead_step = w + (panel + 1) % panels * panel_bytes + t * steps * share, share
                    else:
                        ahead, ahead_step = this, 0
                    at, stride = (to, out_stride) if whole else (sums.ctypes.data, PANEL_STEP)
                    tile(height, x_at, x_stride, this, PANEL_STEP, steps, init, 0, at, stride, ahead, ahead_step)
                    if not whole:
                        for r in range(height):
                            row = array_at(at + r * stride, columns, float32)
                            store_row(to + r * out_stride, as_bf16, row, columns)

    return product


_PRODUCTS = {
    torch.float32: _make_product("f32"),
    torch.bfloat16: _make_product("bf16_dot" if CPU.avx512_bf16 else "bf16"),
}
_NO_BIAS = torch.zeros(COLUMNS)

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
    bias: torch.Tensor | None  # float32 [N, padded to COLUMNS]
    out_features: int  # N
    in_features: int  # K
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory held: the packed weight with its padding, and the bias."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

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
        return rows.view(self.dtype)[:, : self.in_features]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """Packs a weight [N, K] (any float dtype, converted to `dtype`) and a bias [N] (or None); keeps neither.

    Raises ValueError for a dtype other than float32 and bfloat16, and for shapes that do not fit.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: CPU linears are packed as torch.float32 or torch.bfloat16")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, not [N, K] with both at least 1")
    n, k = weight.shape
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, not [{n}] as the weight's rows")
    weight = weight.detach().to("cpu", dtype)
    if k * dtype.itemsize % 4:
        weight = F.pad(weight, (0, 1))
    weight = weight.contiguous()
    words = weight.shape[1] * dtype.itemsize // 4
    panels = -(-n // COLUMNS)
    data = torch.empty(panels, words, COLUMNS, dtype=torch.int32)
    pack_words(data.data_ptr(), weight.data_ptr(), n, words, num_threads())
    if bias is not None:
        bias = F.pad(bias.detach().to("cpu", dtype).float(), (0, panels * COLUMNS - n))
    return PackedLinear(data, bias, n, k, dtype)


def _num_blocks(rows: int, row_bytes: int, panels: int) -> int:
    """Into how many equal row blocks to cut x: each within BLOCK_BYTES, but a tile high; tasks enough to share evenly."""
    by_cache = -(-rows * row_bytes // BLOCK_BYTES)
    by_threads = min(-(-4 * num_threads() // panels), rows // (4 * MAX_ROWS))
    return max(1, min(max(by_cache, by_threads), rows // MAX_ROWS))


def linear(x: torch.Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, K] of the weight's dtype -> [T, N] in `out_dtype`: float32 or bfloat16, x's own by default.

    Raises ValueError when x does not fit the weight, or out_dtype is neither.
    """
    out_dtype = out_dtype or x.dtype
    if x.ndim != 2 or x.shape[1] != packed.in_features or x.dtype != packed.dtype or not x.is_cpu:
        takes = f"{packed.dtype} [tokens, {packed.in_features}] on the cpu"
        raise ValueError(f"x is {x.dtype} {list(x.shape)} on {x.device}; this linear takes {takes}")
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out_dtype={out_dtype}: a CPU linear gives torch.float32 or torch.bfloat16")
    out = torch.empty(len(x), packed.out_features, dtype=out_dtype)
    if len(x) == 0:
        return out
    if packed.dtype == torch.bfloat16:
        x = x if CPU.avx512_bf16 else x.float()
        x = F.pad(x, (0, 1)) if packed.in_features % 2 else x
    if x.stride(1) != 1:
        x = x.contiguous()
    bias, bias_step = (_NO_BIAS, 0) if packed.bias is None else (packed.bias, PANEL_STEP)
    _PRODUCTS[packed.dtype](
        x.data_ptr(), x.stride(0) * x.itemsize, packed.data.data_ptr(), bias.data_ptr(), bias_step, out.data_ptr(),
        out.stride(0) * out.itemsize, out_dtype == torch.bfloat16, len(x), packed.out_features, packed.data.shape[1],
        _num_blocks(len(x), x.shape[1] * x.itemsize, packed.data.shape[0]), num_threads(),
    )  # fmt: skip
    return out
