"""`kvscope bench serve`: latencies of requests that come by themselves, at one or several rates (an open loop).

The client submits each request at its time through `Engine.submit` and sleeps otherwise; when every token came is read from the
outputs afterwards. So nothing runs beside the engine that a user would not bring along.
"""

from __future__ import annotations

import statistics

from ..latency import Objectives, highest_rate
from .contender import Kvscope
from .floor import workload_floor
from .load import PERCENTILES, Service, goodput, milliseconds, offered, open_load, percentiles, span
from .machine import alternate, facts
from .report import print_table

HEADERS = ["asked for/s", "offered/s", "served/s", "output tok/s", "share of floor", "goodput/s", "met", "ms",
           *(f"p{p}" for p in PERCENTILES)]  # fmt: skip
SHARE = 0.9  # of the requests meet all objectives at a rate that is called sustained


def run(options) -> int:
    held = min(options.requests, options.max_num_seqs)  # all of these find room, so that nobody is preempted
    blocks = 1 + held * -(-(options.prompt_range[1] + options.new_range[1]) // 16)
    ours = Kvscope(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        max_num_seqs=options.max_num_seqs,
        num_blocks=blocks,
    )
    info, objectives = ours.engine.info, Objectives(**options.slo)
    loads = {
        rate: open_load(
            options.requests, rate, options.prompt_range, options.new_range,
            vocab_size=info.spec.vocab_size, burstiness=options.burstiness, seed=options.seed,
        )
        for rate in options.rate
    }  # fmt: skip
    services: dict[float, list[Service]] = {rate: [] for rate in loads}

    def serve(rate: float) -> float:
        services[rate].append(Service(loads[rate], ours.serve(loads[rate])))
        return services[rate][-1].seconds

    _, ceilings = alternate({str(rate): lambda r=rate: serve(r) for rate in loads}, options.repeats, info.spec)
    ours.close()
    rows, met = [], {}
    for rate, load in loads.items():
        measured = services[rate][1:]  # the first one warms
        seconds = statistics.fmean(service.seconds for service in measured)
        sizes = [(len(arrival.prompt), arrival.num_new) for arrival in load]
        least = workload_floor(info.spec, ceilings, sizes, max_num_seqs=options.max_num_seqs)
        good, met[rate] = goodput(measured, objectives)
        head = [rate, offered(load), len(load) / seconds, measured[0].output_tokens / seconds, f"{least / seconds:.0%}",
                good, f"{met[rate]:.0%}"]  # fmt: skip
        rows += [[*head, name, *percentiles(values)] for name, values in milliseconds(measured).items()]
    workload = (
        f"{options.requests} requests, prompts of {span(options.prompt_range)} and {span(options.new_range)} new tokens, gaps of "
        f"a gamma distribution of shape {options.burstiness:g} (1: Poisson), seed {options.seed}, {options.repeats} runs a rate"
    )
    notes = {"kvscope": ours.about, "clock": "of a request: from when it was to arrive"}
    if options.slo:
        limits = ", ".join(f"{name} {1e3 * seconds:g} ms" for name, seconds in options.slo.items())
        notes["objectives"] = f"{limits}; at least {SHARE:.0%} met them up to {highest_rate(met, SHARE):g} requests/s"
    print_table("kvscope bench serve", facts(info, workload, ceilings) | notes, HEADERS, rows, options.json)
    return 0
