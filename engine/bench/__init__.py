"""`kvscope bench`: every figure is a ratio taken in one run, against a floor and a peer on the same token ids.

One file a benchmark, each with `add_parser(commands)` and `run(options)`; `report.py` prints the table and writes
the JSON. Needs no screen and imports no Panel.
"""

from __future__ import annotations

from . import latency, throughput


def add_parser(commands) -> None:
    """Add `bench` and its benchmarks to the command line."""
    bench = commands.add_parser("bench", help="measure speed against the floor and against transformers")
    benchmarks = bench.add_subparsers(required=True, metavar="benchmark")
    for benchmark in (latency, throughput):
        parser = benchmark.add_parser(benchmarks)
        parser.add_argument("--model", default="default", help="default, a Hugging Face id, a folder or a .gguf file")
        parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
        parser.add_argument("--repeats", type=int, default=5, help="alternations; the median is printed (default 5)")
        parser.add_argument("--json", help="also write the figures to this file")
        parser.set_defaults(run=benchmark.run)
