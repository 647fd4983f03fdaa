"""`kvscope bench`: every figure is a ratio taken in one run, against a floor and a peer on the same token ids.

One file a benchmark, each with `run(options)`; its options stand here, so that `--help` imports nothing heavy.
`report.py` prints the table and writes the JSON. Needs no screen and imports no Panel.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from collections.abc import Callable

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8", "int8-dynamic")
PEERS = ("transformers", "vllm", "openvino", "llama.cpp")  # each has a file in peer_adapters


def add_parser(commands) -> argparse._SubParsersAction:
    """Add `bench` and its benchmarks to the command line; returns where more of them can be added."""
    bench = add_command(commands, "bench", "measure speed against the floor and against other engines")
    benchmarks = bench.add_subparsers(required=True, metavar="benchmark")

    latency = _benchmark(benchmarks, "latency", "decode and prefill at fixed batch sizes")
    _add_batches(latency)
    latency.add_argument("--quantization", choices=("none", *QUANTIZATIONS), nargs="+", default=["none"],
                         help="of our weights; several take turns in one run")  # fmt: skip
    latency.add_argument("--enforce-eager", action="store_true", help="beside ours, ours without replayed steps")

    throughput = _benchmark(benchmarks, "throughput", "mixed requests, all submitted at once")
    throughput.add_argument("--requests", type=at_least(1), default=32, help="how many (default 32)")
    throughput.add_argument("--max-num-seqs", type=at_least(1), default=32, help="sequences in one step (default 32)")
    throughput.add_argument("--seed", type=int, default=0, help="of the requests' lengths and tokens")
    _add_quantization(throughput)

    serve = _benchmark(benchmarks, "serve", "latencies of requests that come by themselves, at some rates", repeats=1)
    _add_load(serve)
    _add_quantization(serve)
    serve.add_argument(
        "--rate", type=positive, nargs="+", default=[2.0, 4.0], help="requests a second, inf for all at once"
    )
    serve.add_argument("--burstiness", type=positive, default=1.0, help="of their gaps: 1 Poisson, less is in bursts")
    serve.add_argument("--slo", type=objectives, default={}, help="what goodput asks for, such as ttft=500ms,tpot=50ms")

    prefix = _benchmark(benchmarks, "prefix", "what a prefix cache saves in a chat, and cache-aware order in a tree")
    prefix.add_argument("--users", type=at_least(1), default=8, help="who talk at once (default 8)")
    prefix.add_argument("--turns", type=at_least(1), default=8, help="of each conversation (default 8)")
    prefix.add_argument("--system", type=at_least(1), default=600, help="tokens of the shared prompt (default 600)")
    prefix.add_argument("--new", type=at_least(1), default=32, help="new tokens a turn (default 32)")

    sweep = _benchmark(benchmarks, "sweep", "a decode step over batch, context, dtype and block size", dtype=False)
    sweep.add_argument("--dtype", choices=DTYPES, nargs="+", default=["auto"], help="of weights and KV")
    sweep.add_argument("--block-size", type=at_least(1), nargs="+", default=[16], help="tokens a block (default 16)")
    sweep.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8, 32], help="sequences (default 1 8 32)")
    sweep.add_argument(
        "--context", type=at_least(1), nargs="+", default=[128, 1024], help="tokens of each (default 128 1024)"
    )
    sweep.add_argument("--new", type=at_least(2), default=16, help="steps of a run (default 16)")

    kernels = _benchmark(benchmarks, "kernels", "each operation on the CPU: reference, Numba, and torch alone")
    kernels.add_argument("--only", default="", help="operations whose name has these letters")
    kernels.add_argument("--rows", type=at_least(1), default=32, help="sequences of a decode step (default 32)")
    kernels.add_argument("--context", type=at_least(1), default=1000, help="tokens that each has cached (default 1000)")
    kernels.add_argument("--prompt", type=at_least(1), default=1024, help="tokens of a prefill step (default 1024)")

    peers = _benchmark(benchmarks, "peers", "other engines in their own environments, in turns with ours", repeats=3)
    peers.add_argument("--peer", type=peer, action="append", required=True, metavar="NAME=PYTHON",
                       help="transformers, vllm, openvino or llama.cpp, and an interpreter that can import it; repeatable")  # fmt: skip
    peers.add_argument("--load", choices=("decode", "prefill", "mixed"), nargs="+", default=["decode", "prefill"])
    _add_batches(peers)
    _add_quantization(peers)
    peers.add_argument("--prefill", type=batch_of, nargs="+", default=[(8, 128), (1, 1024)], metavar="PROMPTSxTOKENS")
    _add_load(peers)
    peers.add_argument("--rate", type=positive, default=8.0, help="requests a second of the mixed load (default 8)")
    peers.add_argument("--max-num-batched-tokens", type=at_least(1), default=1024, help="tokens of one of our steps")

    gpu = add_command(benchmarks, "gpu", "every Triton kernel against float64 and the ceilings, and decode steps")
    add_gpu_options(gpu)
    gpu.set_defaults(run=lambda options: importlib.import_module(".gpu", __name__).run(options))
    return benchmarks


def add_command(commands, name: str, says: str) -> argparse.ArgumentParser:
    """A command of the command line. Its own --help opens with what the list of commands says of it."""
    return commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")


def at_least(least: int) -> Callable[[str], int]:
    """What argparse calls to read a number that must not be smaller."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """A number above 0, perhaps inf."""
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")


def between(text: str) -> tuple[int, int]:
    """ "32-512": the ends of a range of lengths."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    ends = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must be a range such as 32-512, from 1 up")
    return ends


def batch_of(text: str) -> tuple[int, int]:
    """ "8x128": prompts, and tokens of each."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be prompts x tokens, such as 8x128")
    return int(found[1]), int(found[2])


def objectives(text: str) -> dict[str, float]:
    """ "ttft=500ms,tpot=0.05": seconds by the names of `latency.Objectives`."""
    limits = {}
    for part in text.split(","):
        found = re.fullmatch(r"(ttft|tpot|e2e)=(\d+(?:\.\d*)?)(ms|s)?", part.strip())
        if not found:
            raise argparse.ArgumentTypeError(f"{part!r} must be ttft, tpot or e2e, =, and a time such as 500ms or 0.5")
        limits[found[1]] = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
    return limits


def peer(text: str) -> tuple[str, str]:
    """ "vllm=/path/to/python": name and interpreter."""
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=PYTHON with NAME one of {', '.join(PEERS)}")
    return name, python


def add_gpu_options(parser) -> None:
    """Of `bench gpu`, which can also be run as a module by itself."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--json", help="also write the figures to this file")


def _add_batches(parser) -> None:
    """Decode of equal prompts."""
    parser.add_argument(
        "--batch", type=at_least(1), nargs="+", default=[1, 4, 16, 32], help="decode batch sizes (default 1 4 16 32)"
    )
    parser.add_argument("--prompt", type=at_least(1), default=128, help="prompt tokens (default 128)")
    parser.add_argument("--new", type=at_least(2), default=64, help="new tokens (default 64)")


def _add_quantization(parser) -> None:
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="of our weights; peers then have int8 weights too"
    )


def _add_load(parser) -> None:
    """Requests that come by themselves."""
    parser.add_argument("--requests", type=at_least(1), default=48, help="how many (default 48)")
    parser.add_argument("--prompt-range", type=between, default=(32, 512), help="prompt tokens (default 32-512)")
    parser.add_argument("--new-range", type=between, default=(16, 256), help="new tokens (default 16-256)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests' moments, lengths and tokens")
    parser.add_argument("--max-num-seqs", type=at_least(1), default=64, help="sequences in one step (default 64)")


def _benchmark(benchmarks, name: str, says: str, *, repeats: int = 5, dtype: bool = True):
    parser = add_command(benchmarks, name, says)
    parser.add_argument("--model", default="default", help="default, a Hugging Face id, a folder or a .gguf file")
    if dtype:
        parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument(
        "--repeats", type=at_least(1), default=repeats, help=f"alternations; the median is printed (default {repeats})"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    parser.set_defaults(run=lambda options: importlib.import_module(f".{name}", __name__).run(options))
    return parser
