"""Rotary position embeddings: the tables of cosines and sines, for every published way of stretching them.

`RotaryTable(parameters, …)` takes the rope parameters of a config and gives `upto(n)`: float32 [≥ n, rot_dim], row p =
cos | sin of p · inv_freq, the table that the `rotary` kernel reads. Products and cosines are float32, as transformers
computes them, so that the tables agree to the bit. A kind of scaling that is not in the table below is an error: a
dropped scaling is exact at position 0 and nonsense far out, and no short prompt shows it.

| rope_type | inverse frequencies | source |
|---|---|---|
| default | theta^(−2i/d) | Su et al. 2021 |
| linear | the same / factor | position interpolation, Chen et al. 2023 |
| dynamic | theta grows with the sequence once it is longer than trained for | NTK-aware scaling |
| yarn | fast dimensions kept, slow ones interpolated, a ramp between; cos and sin scaled | Peng et al. 2023 |
| llama3 | by wavelength: short ones kept, long ones / factor, a blend between | Llama 3.1 |
| longrope | a divisor per dimension, one list for short and one for long sequences; cos and sin scaled | Ding et al. 2024 |

dynamic and longrope choose frequencies by the length of the whole sequence. Past that border, keys already in the
cache were turned with other frequencies than new ones, so the text would depend on how a prompt was cut into chunks.
`longest_sequence` ends there, so such models are served up to that border, where their output depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Frequencies = tuple[torch.Tensor, float]  # float32 [rot_dim / 2], and the factor on cos and sin
Parameters = Mapping[str, Any]


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _default(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    return 1.0 / (p["rope_theta"] ** _exponents(dim)), 1.0


def _linear(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    inv_freq, _ = _default(p, dim, max_position, seq_len)
    return inv_freq / p["factor"], 1.0


def _dynamic(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    factor, length = p["factor"], max(seq_len, max_position)
    theta = p["rope_theta"] * ((factor * length / max_position) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / (theta ** _exponents(dim)), 1.0


def _yarn(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    theta, trained = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p["factor"] or max_position / trained

    def temperature(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scaling = p.get("attention_factor")
    if scaling is None:
        both = p.get("mscale") and p.get("mscale_all_dim")
        scaling = temperature(p["mscale"]) / temperature(p["mscale_all_dim"]) if both else temperature()

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - slow
    wavelengths = theta ** _exponents(dim)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inv_freq, float(scaling)


def _llama3(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    inv_freq, _ = _default(p, dim, max_position, seq_len)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    trained = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, scaled), 1.0


def _longrope(p: Parameters, dim: int, max_position: int, seq_len: int) -> Frequencies:
    trained = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_position / trained
    scaling = p.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    name = "long_factor" if seq_len > trained else "short_factor"
    divisors = torch.tensor(p[name], dtype=torch.float32)
    if len(divisors) != dim // 2:
        raise ValueError(f"{name} of rope type 'longrope' has {len(divisors)} entries; rotating {dim} needs {dim // 2}")
    return 1.0 / (divisors * p["rope_theta"] ** _exponents(dim)), float(scaling)


ROPE_TYPES: dict[str, tuple[Callable[..., Frequencies], tuple[str, ...]]] = {  # and the keys that each one needs
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "yarn": (_yarn, ("factor", "original_max_position_embeddings")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "longrope": (_longrope, ("short_factor", "long_factor", "original_max_position_embeddings")),
}


def rope_type_of(parameters: Parameters) -> str:
    """The kind of scaling that a config asks for under `rope_type` or, in older files, `type`."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind!r}: the known rotary embeddings are {', '.join(ROPE_TYPES)}")
    for key in ("rope_theta", *ROPE_TYPES[kind][1]):
        if key not in parameters:
            raise ValueError(f"rope type {kind!r} needs {key!r}; the config gives {', '.join(sorted(parameters))}")
    return kind


def longest_sequence(parameters: Parameters, max_position: int) -> int:
    """The longest sequence, in tokens, that the embedding serves with one set of frequencies.

    linear and yarn reach `factor` times as far as the model was trained; the config of a linear one names the trained
    length, that of a yarn one may name either.
    """
    kind = rope_type_of(parameters)
    trained = parameters.get("original_max_position_embeddings") or max_position
    if kind == "linear":
        return int(max_position * parameters["factor"])
    if kind == "yarn":
        return max(max_position, int(trained * (parameters["factor"] or 1)))
    if kind == "longrope":
        return min(max_position, trained)
    return max_position


class RotaryTable:
    """cos | sin for positions 0, 1, 2, …, grown by doubling when a longer sequence comes.

    parameters    rope_type (or type), rope_theta and what the kind needs
    rot_dim       how many elements of a head are rotated, even
    max_position  max_position_embeddings of the config: what dynamic and longrope count from
    seq_len       the length of sequence to choose frequencies for (dynamic and longrope)
    """

    FIRST_ROWS = 1024

    def __init__(
        self,
        parameters: Parameters,
        *,
        rot_dim: int,
        max_position: int,
        seq_len: int = 0,
        device: torch.device | str = "cpu",
    ):
        if rot_dim < 2 or rot_dim % 2:
            raise ValueError(f"rot_dim={rot_dim}: a rotary embedding turns pairs, so an even number of elements")
        self.kind = rope_type_of(parameters)
        frequencies = ROPE_TYPES[self.kind][0]
        self.inv_freq, self.scaling = frequencies(parameters, rot_dim, max_position, seq_len)
        self._device = device
        self._table = self._rows(0, 0)

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        angles = torch.arange(start, stop, dtype=torch.float32)[:, None] * self.inv_freq  # [rows, rot_dim / 2]
        table = torch.cat((angles.cos() * self.scaling, angles.sin() * self.scaling), dim=-1)
        return table.to(self._device)

    def upto(self, num_positions: int) -> torch.Tensor:
        """At least `num_positions` rows: float32 [rows, rot_dim]. Safe to call from several engines' threads."""
        table = self._table
        if len(table) < num_positions:
            rows = max(num_positions, 2 * len(table), self.FIRST_ROWS)
            table = torch.cat((table, self._rows(len(table), rows)))
            self._table = table  # a second thread may compute the same rows; either table is right
        return table
