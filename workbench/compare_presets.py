"""Comparisons with a name: `compare("paged/contiguous")`. Each is what the sides share and what they differ in."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """`sides`: (title, sentence, engine options) of each."""

    shared: dict[str, Any]
    sides: tuple[tuple[str, str, dict[str, Any]], ...]


_POOL = {"num_blocks": 128}

PRESETS: dict[str, Preset] = {
    "paged/contiguous": Preset(
        {"num_blocks": 129, "max_model_len": 448, "watermark": 0.0},  # 128 blocks: a whole piece
        (
            ("Paged blocks", "Blocks are taken when a token needs one. Equal prefixes are shared.", {}),
            (
                "Contiguous reservation",
                "Every sequence reserves one piece for the longest text that it may become.",
                {"kv_allocator": "orca-max", "enable_prefix_caching": False},
            ),
        ),
    ),
    "static/continuous": Preset(
        {**_POOL, "max_num_seqs": 4},
        (
            ("Static batching", "Nobody joins a batch before all of it have ended.", {"scheduling_policy": "static"}),
            ("Continuous batching", "Who ends makes room for the next in line, in the very next step.", {}),
        ),
    ),
    "cache/no-cache": Preset(
        _POOL,
        (
            ("Prefix cache", "The common start of prompts is computed once.", {}),
            ("No cache", "Every prompt is computed from its first token.", {"enable_prefix_caching": False}),
        ),
    ),
    "hash/radix": Preset(
        _POOL,
        (
            ("Hash chain", "Finds full blocks by a hash over their tokens and the block before.", {}),
            ("Radix tree", "Finds the common start to the token; a hit may end inside a block.", {"prefix_cache": "radix"}),
        ),
    ),
    "block-sizes": Preset(
        {},
        (
            ("Blocks of 8 tokens", "Little is left unwritten at the end of a request.", {"block_size": 8, "num_blocks": 257}),
            ("Blocks of 64 tokens", "Half a block is left unwritten at the end, on average.",
             {"block_size": 64, "num_blocks": 33}),
        ),
    ),
    "dtypes": Preset(
        _POOL,
        (
            ("float32", "Exact; a block takes twice the bytes.", {"dtype": "float32"}),
            ("bfloat16", "Half the bytes, and half the memory to read in each step.", {"dtype": "bfloat16"}),
        ),
    ),
}  # fmt: skip
