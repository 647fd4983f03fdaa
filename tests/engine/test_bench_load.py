"""Open loads and the latencies of serving them; `kvscope bench serve` and `sweep` on a tiny model."""

import argparse
import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from kvscope.engine import Engine
from kvscope.engine.bench import batch_of, between, objectives, peer, positive
from kvscope.engine.bench.contender import Arrival, Kvscope
from kvscope.engine.bench.load import Service, goodput, milliseconds, offered, open_load, percentiles
from kvscope.engine.bench.sweep import step_seconds
from kvscope.engine.latency import Objectives
from test_bench import bench


def load(count, rate, **options):
    return open_load(count, rate, (3, 9), (1, 4), vocab_size=50, **options)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_that_was_asked_for_and_the_spread_of_their_burstiness(burstiness):
    arrivals = load(4000, 20.0, burstiness=burstiness)
    gaps = [after.at - before.at for before, after in pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.15) and offered(arrivals) == pytest.approx(1 / fmean(gaps))
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)  # a gamma distribution's
    assert min(gaps) >= 0


def test_a_load_is_the_same_for_the_same_seed_and_starts_at_once():
    arrivals = load(20, 5.0, seed=3)
    assert arrivals == load(20, 5.0, seed=3) != load(20, 5.0, seed=4)
    assert arrivals[0].at == 0.0
    assert all(3 <= len(a.prompt) <= 9 and 1 <= a.num_new <= 4 for a in arrivals)
    assert {a.at for a in load(20, math.inf)} == {0.0} and offered(load(20, math.inf)) == math.inf


def test_the_clock_starts_when_a_request_was_to_arrive():
    service = Service([Arrival(1.0, [1], 3), Arrival(2.0, [1], 1)], [[1.5, 1.75, 2.5], [2.25]])
    assert service.seconds == 2.5 and service.output_tokens == 4
    assert milliseconds([service]) == {"TTFT": [500, 250], "TPOT": [500], "ITL": [250, 750], "E2E": [1500, 250]}
    assert percentiles([1.0, 2.0, 3.0])[0] == 2.0 and math.isnan(percentiles([])[0])
    good, share = goodput([service, service], Objectives(ttft=0.3))
    assert share == 0.5 and good == pytest.approx(2 / 5)  # two of four in 2 × 2.5 s


def test_requests_are_sent_at_their_times_whether_or_not_earlier_ones_are_done(tiny_folder):
    ours = Kvscope(str(tiny_folder), dtype="float32", num_blocks=64)
    try:
        arrivals = [Arrival(0.0, [5] * 8, 40), Arrival(0.05, [6] * 8, 5), Arrival(0.5, [7] * 8, 3)]
        times = ours.serve(arrivals)
        assert [len(each) for each in times] == [40, 5, 3]
        for arrival, each in zip(arrivals, times, strict=True):
            assert arrival.at <= each[0] and each == sorted(each)
    finally:
        ours.close()


def test_the_serve_benchmark_says_what_was_offered_and_what_was_good(tiny_folder, tmp_path):
    lengths = ["--requests", "6", "--prompt-range", "4-12", "--new-range", "2-5"]
    figures = bench(tiny_folder, tmp_path, "serve", *lengths, "--rate", "50", "inf", "--slo", "ttft=1s,tpot=1000ms")
    assert [row["ms"] for row in figures["rows"]] == ["TTFT", "TPOT", "ITL", "E2E"] * 2
    first, last = figures["rows"][0], figures["rows"][-1]
    assert first["asked for/s"] == 50 and last["offered/s"] == math.inf
    for row in figures["rows"]:
        assert 0 < row["p50"] <= row["p95"] <= row["p99"] and row["output tok/s"] > 0
        assert 0 <= row["goodput/s"] <= row["served/s"] * 1.001
    assert "ttft 1000 ms, tpot 1000 ms" in figures["objectives"] and "no prefix cache" in figures["kvscope"]


def test_the_sweep_has_a_step_for_every_cell_and_its_floor_grows_with_the_work(tiny_folder, tmp_path):
    sizes = ["--batch", "1", "3", "--context", "20", "60", "--block-size", "4", "16", "--new", "4"]
    figures = bench(tiny_folder, tmp_path, "sweep", *sizes)
    cells = {(row["block size"], row["context"], row["batch"]): row for row in figures["rows"]}
    assert len(cells) == len(figures["rows"]) == 8
    for size in (4, 16):
        assert cells[size, 20, 1]["floor ms"] < cells[size, 60, 3]["floor ms"]
    for (_, _, batch), row in cells.items():
        assert row["tok/s"] == pytest.approx(1e3 * batch / row["ms a step"])


def test_a_run_whose_requests_never_decode_together_has_no_time_of_a_step(tiny_folder):
    texts = [[seed] * 60 for seed in (5, 6, 7)]
    with Engine(tiny_folder, dtype="float32", num_blocks=64, max_num_batched_tokens=16) as engine:
        assert math.isnan(step_seconds(engine, texts, 2))  # each prompt takes four steps, its tokens three
        assert step_seconds(engine, texts, 2) > 0  # they are cached now


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (positive, "0", "must be a number above 0"),
        (positive, "nan", "must be a number above 0"),
        (between, "9-3", "must be a range such as 32-512"),
        (batch_of, "8", "must be prompts x tokens, such as 8x128"),
        (objectives, "ttft=1,itl=2", "'itl=2' must be ttft, tpot or e2e"),
        (peer, "sglang=python", "with NAME one of transformers, vllm, openvino, llama.cpp"),
    ],
)
def test_an_option_that_no_benchmark_can_use_is_one_sentence(read, text, words):
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        read(text)


def test_options_are_read_as_they_are_meant():
    assert objectives("ttft=500ms, tpot=0.05,e2e=3s") == {"ttft": 0.5, "tpot": 0.05, "e2e": 3.0}
    assert between("32-512") == (32, 512) and batch_of("8x128") == (8, 128) and positive("inf") == math.inf
    assert peer("llama.cpp=/opt/a=b") == ("llama.cpp", "/opt/a=b")
