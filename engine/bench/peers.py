"""`kvscope bench peers`: ours and other engines, each in its own environment, in turns (A B C A B C …) on the same token ids.

--load decode    batches of equal prompts; a run with n new tokens minus a run with one is n − 1 decode steps
--load prefill   many short prompts and one long one, one new token
--load mixed     requests of all lengths that come by themselves (an open loop)

A peer that dies, refuses, or does other work than asked loses its rows from there on and is told of in a sentence; the others go
on. Text may differ in rounding, so how many first tokens are ours too is printed: weights that were read wrong show there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..models.base import ModelSpec
from .contender import Contender, Kvscope, decode_seconds, equal_prompts
from .floor import decode_floor, prefill_floor, workload_floor
from .load import Service, milliseconds, open_load, percentiles, span
from .machine import Ceilings, alternate, facts
from .peer_process import PeerFailed, PeerProcess, Settings
from .report import print_table

HEADERS = ["load", "shape", "engine", "tok/s", "kvscope / it", "share of floor", "first tokens as ours", "ITL p50 ms",
           "ITL p99 ms", "TTFT p99 ms"]  # fmt: skip
NONE = "–"
ROUNDING = 128  # tokens: the largest block of any engine here, so that the same cache holds the same requests


class Match:
    """The contenders, ours first, what became of them, and the rows that they have earned."""

    def __init__(self, contenders: Sequence[Contender], spec: ModelSpec, repeats: int):
        self.contenders = contenders
        self.spec = spec
        self.repeats = repeats
        self.faults: dict[str, str] = {}
        self.rows: list[list[Any]] = []
        self.ceilings = Ceilings(0.0, 0.0)  # of the latest play

    def play(self, run: Callable[[Contender], float]) -> dict[str, float]:
        """Median seconds of `run`, in turns, by name of those who lasted to the end."""
        runs = {each.name: partial(self._turn, run, each) for each in self.contenders if each.name not in self.faults}
        seconds, self.ceilings = alternate(runs, self.repeats, self.spec)
        return {name: value for name, value in seconds.items() if name not in self.faults}

    def _turn(self, run: Callable[[Contender], float], contender: Contender) -> float:
        if contender.name not in self.faults:
            try:
                return run(contender)
            except PeerFailed as fault:
                self.faults[contender.name] = str(fault)
        return float("nan")

    def add(
        self,
        load: str,
        shape: str,
        tokens: int,
        seconds: dict[str, float],
        least: float,
        tell: Callable[[str], list[Any]],
    ) -> None:
        """A row for each; `tell(name)` gives its last four columns."""
        ours = seconds[Kvscope.name]
        for name, taken in seconds.items():
            self.rows.append([load, shape, name, tokens / taken, taken / ours, f"{least / taken:.0%}", *tell(name)])


def run(options) -> int:
    names = [name for name, _ in options.peer]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"peer={twice[0]!r} is given {names.count(twice[0])} times: a row is told by its name, so once"
        )
    held = [rows for load in options.load for rows in _held(load, options)]
    blocks = 1 + max(batch * -(-tokens // ROUNDING) for batch, tokens in held) * (ROUNDING // 16)
    ours = Kvscope(
        options.model, dtype=options.dtype, quantization=options.quantization, num_blocks=blocks, max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens, max_model_len=max(tokens for _, tokens in held),
    )  # fmt: skip
    info = ours.engine.info
    settings = Settings.like(ours.engine)
    contenders: list[Contender] = [ours]
    notes = {ours.name: ours.about}
    try:
        for name, python in options.peer:
            try:
                contenders.append(PeerProcess(name, python, settings))
                notes[name] = contenders[-1].about
            except PeerFailed as fault:
                notes[name] = f"FAILED: {fault}"
        match = Match(contenders, info.spec, options.repeats)
        for load in options.load:
            LOADS[load](match, options)
    finally:
        for contender in contenders:
            contender.close()
    notes |= {name: f"{notes[name]}; FAILED: {fault}" for name, fault in match.faults.items()}
    loads = {
        "decode": f"decode of {options.new} new tokens",
        "prefill": "prefill",
        "mixed": f"{options.requests} requests at {options.rate:g} a second (Poisson), prompts of {span(options.prompt_range)} and "
        f"{span(options.new_range)} new tokens",
    }
    workload = f"{'; '.join(loads[load] for load in options.load)}; median of {options.repeats} turns, others stopped meanwhile"
    print_table("kvscope bench peers", facts(info, workload, match.ceilings) | notes, HEADERS, match.rows, options.json)
    return int(any("FAILED" in note for note in notes.values()))


def _held(load: str, options) -> list[tuple[int, int]]:
    """(requests at once, the most tokens of each) of a load."""
    if load == "decode":
        return [(batch, options.prompt + options.new) for batch in options.batch]
    if load == "prefill":
        return [(batch, prompt + 1) for batch, prompt in options.prefill]
    return [(min(options.requests, options.max_num_seqs), options.prompt_range[1] + options.new_range[1])]


def _decode(match: Match, options) -> None:
    prompts = equal_prompts(max(options.batch), options.prompt, match.spec.vocab_size)
    for batch in options.batch:
        seconds = match.play(lambda contender, p=prompts[:batch]: decode_seconds(contender, p, options.new))
        least = decode_floor(match.spec, match.ceilings, batch=batch, context=options.prompt + options.new // 2)
        match.add("decode", f"{batch} × {options.prompt}", batch, seconds, least, lambda name: [NONE] * 4)


def _prefill(match: Match, options) -> None:
    for batch, length in options.prefill:
        prompts = equal_prompts(batch, length, match.spec.vocab_size)
        firsts: dict[str, list[int]] = {}

        def compute(contender: Contender, prompts=prompts, firsts=firsts) -> float:
            made = contender.generate(prompts, 1)
            firsts[contender.name] = [ids[0] for ids in made.tokens]
            return made.seconds

        def tell(name: str, firsts=firsts) -> list[Any]:
            same = sum(a == b for a, b in zip(firsts[name], firsts[Kvscope.name], strict=True))
            return [f"{same} of {len(firsts[name])}", NONE, NONE, NONE]

        seconds = match.play(compute)
        least = prefill_floor(match.spec, match.ceilings, batch=batch, prompt=length)
        match.add("prefill", f"{batch} × {length}", batch * length, seconds, least, tell)


def _mixed(match: Match, options) -> None:
    load = open_load(
        options.requests,
        options.rate,
        options.prompt_range,
        options.new_range,
        vocab_size=match.spec.vocab_size,
        seed=options.seed,
    )
    services: dict[str, list[Service]] = {each.name: [] for each in match.contenders}

    def serve(contender: Contender) -> float:
        services[contender.name].append(Service(load, contender.serve(load)))
        return services[contender.name][-1].seconds

    def tell(name: str) -> list[Any]:
        times = milliseconds(services[name][1:])  # the first one warms
        p50, _, p99 = percentiles(times["ITL"])
        return [NONE, p50, p99, percentiles(times["TTFT"])[-1]]

    seconds = match.play(serve)
    sizes = [(len(arrival.prompt), arrival.num_new) for arrival in load]
    least = workload_floor(match.spec, match.ceilings, sizes, max_num_seqs=options.max_num_seqs)
    match.add("mixed", f"{len(load)} requests", sum(new for _, new in sizes), seconds, least, tell)


LOADS: dict[str, Callable[[Match, Any], None]] = {"decode": _decode, "prefill": _prefill, "mixed": _mixed}
