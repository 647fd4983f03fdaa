"""Counter-based random numbers: a token's draw is a pure function of (request seed, child, token index).

No generator state lives anywhere, so a draw does not depend on the batch, on the order of requests or on how often a
request was preempted, and sample i of a request is the same whether n is 2 or 20.

The function chains the output mix of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants of Stafford's variant 13), each input entering as one step of its Weyl sequence:

    h = mix(seed + γ);  h = mix(h + (child + 1)·γ);  h = mix(h + (index + 1)·γ);  u = (h >> 11) · 2⁻⁵³  ∈ [0, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def mix(h: int) -> int:
    """SplitMix64's bijection of 64-bit integers."""
    h = ((h ^ (h >> 30)) * _M1) & _MASK
    h = ((h ^ (h >> 27)) * _M2) & _MASK
    return h ^ (h >> 31)


def request_seed(seed: int | None, engine_seed: int, request_id: int) -> int:
    """The request's own seed, or one made of the engine's seed and the request id; any integer, taken modulo 2⁶⁴."""
    if seed is not None:
        return seed & _MASK
    return mix((mix((engine_seed + _GAMMA) & _MASK) + request_id * _GAMMA) & _MASK)


def uniforms(seeds: Sequence[int], children: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """float64 [S] in [0, 1), one a row."""
    gamma = np.uint64(_GAMMA)
    h = _mix(np.array(seeds, dtype=np.uint64) + gamma)
    h = _mix(h + (np.array(children, dtype=np.uint64) + np.uint64(1)) * gamma)
    h = _mix(h + (np.array(indices, dtype=np.uint64) + np.uint64(1)) * gamma)
    return (h >> np.uint64(11)) * 2.0**-53


def _mix(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> np.uint64(30))) * np.uint64(_M1)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(_M2)
    return h ^ (h >> np.uint64(31))
