"""`kvscope bench`: every figure is a ratio taken in one run, against a floor and a peer on the same token ids.

One file a benchmark, each with `run(options)`; its options stand here, so that `--help` imports nothing heavy.
`report.py` prints the table and writes the JSON. Needs no screen and imports no Panel.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable


def add_parser(commands) -> None:
    """Add `bench` and its benchmarks to the command line."""
    bench = commands.add_parser("bench", help="measure speed against the floor and against transformers")
    benchmarks = bench.add_subparsers(required=True, metavar="benchmark")

    latency = _benchmark(benchmarks, "latency", "decode and prefill at fixed batch sizes")
    latency.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 4, 16, 32], help="decode batch sizes")
    latency.add_argument("--prompt", type=at_least(1), default=128, help="prompt tokens (default 128)")
    latency.add_argument("--new", type=at_least(2), default=64, help="new tokens (default 64)")

    throughput = _benchmark(benchmarks, "throughput", "mixed requests, all submitted at once")
    throughput.add_argument("--requests", type=at_least(1), default=32, help="how many (default 32)")
    throughput.add_argument("--max-num-seqs", type=at_least(1), default=32, help="sequences in one step (default 32)")
    throughput.add_argument("--seed", type=int, default=0, help="of the requests' lengths and tokens")

    prefix = _benchmark(benchmarks, "prefix", "what a prefix cache saves in a chat, and cache-aware order in a tree")
    prefix.add_argument("--users", type=at_least(1), default=8, help="who talk at once (default 8)")
    prefix.add_argument("--turns", type=at_least(1), default=8, help="of each conversation (default 8)")
    prefix.add_argument("--system", type=at_least(1), default=600, help="tokens of the shared prompt (default 600)")
    prefix.add_argument("--new", type=at_least(1), default=32, help="new tokens a turn (default 32)")

    gpu = benchmarks.add_parser("gpu", help="every Triton kernel against float64 and the ceilings, and decode steps")
    add_gpu_options(gpu)
    gpu.set_defaults(run=lambda options: importlib.import_module(".gpu", __name__).run(options))


def at_least(least: int) -> Callable[[str], int]:
    """What argparse calls to read a number that must not be smaller."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return int(text)

    return read


def add_gpu_options(parser) -> None:
    """Of `bench gpu`, which can also be run as a module by itself."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--json", help="also write the figures to this file")


def _benchmark(benchmarks, name: str, help: str):
    parser = benchmarks.add_parser(name, help=help)
    parser.add_argument("--model", default="default", help="default, a Hugging Face id, a folder or a .gguf file")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument(
        "--repeats", type=at_least(1), default=5, help="alternations; the median is printed (default 5)"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    parser.set_defaults(run=lambda options: importlib.import_module(f".{name}", __name__).run(options))
    return parser
