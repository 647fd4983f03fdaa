"""Measure through its data: what the views say agrees with the engine's own books."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_frames import FakeSource, frame_of, read_twice, seconds_of
from fake_model import greedy, make_core, run
from kvscope.engine import SamplingParams
from kvscope.engine.events import Event, EventKind
from kvscope.workbench.machine import Machine, find_nvml
from kvscope.workbench.theme import LIGHT
from kvscope.workbench.views.base import Frame, Selection
from kvscope.workbench.views.batch import Batch
from kvscope.workbench.views.dot_strip import MOST_DOTS, Dot, DotStrip, _stacked
from kvscope.workbench.views.host import Host
from kvscope.workbench.views.latency import Latency, percentiles
from kvscope.workbench.views.ledger import Ledger
from kvscope.workbench.views.prefix_hits import PrefixHits
from kvscope.workbench.views.queue import Queue


def slots_of(view):
    return dict(zip(view.parts.data["part"], view.parts.data["slots"], strict=True))


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_the_parts_of_the_ledger_add_up_to_the_pool_in_every_step():
    view, source = Ledger(), FakeSource()
    for _ in range(200):
        frame = source.frame()
        view.update(frame)
        assert sum(view.parts.data["slots"]) == 127 * 16
        parts, ref, filled = slots_of(view), frame.snapshot.ref_count[1:], frame.snapshot.filled[1:]
        assert parts["Tokens of running requests"] == filled[ref > 0].sum()
        assert parts["Too small to use (external)"] == parts["Reserved, not written yet"] == 0, "paging has neither"
    counted = sum(r.num_computed_tokens for r in frame.snapshot.requests) - parts["Tokens of running requests"]
    assert f"Sharing saves {counted:,} slots." in view.summary() and counted > 300
    assert view.table()[1][-1] == ["Saved by sharing", f"{counted:,}", "–"]


def test_a_reservation_shows_what_it_has_set_aside_and_what_rounding_has_cost():
    core = make_core(num_blocks=17, kv_allocator="orca-pow2", enable_prefix_caching=False, max_model_len=40)
    core.add_request([1] * 5, greedy(10))
    core.step()
    view = Ledger()
    view.update(frame_of(core))
    assert slots_of(view) == {
        "Tokens of running requests": 5, "Cached text, can be evicted": 0, "Reserved, not written yet": 16,
        "Unwritten slots (internal)": 0, "Empty blocks": 32, "Too small to use (external)": 11,
    }  # fmt: skip
    assert "16 are reserved and not written yet" in view.summary()


# --- latency ----------------------------------------------------------------------------------------------------------


def test_latencies_are_those_of_the_engine():
    core = make_core(max_num_seqs=2)
    for i in range(1, 6):
        core.add_request(
            [i] * 5, SamplingParams(n=1 + i % 2, max_tokens=1 + i, temperature=1.0, seed=i, ignore_eos=True)
        )
    for _ in range(3):
        core.step()
    view = Latency()
    view.update(frame_of(core))
    started = [i for i in range(1, 6) if core.get(i).metrics.first_token is not None]
    assert sorted(view.strips["ttft"].dots.data["label"]) == [str(i) for i in started], "also of those that still run"
    assert len(view.strips["tpot"].dots.data["label"]) < len(started) < 5
    run(core)
    view.reset()
    view.update(frame_of(core))
    for i in range(1, 6):
        metrics = core.get(i).metrics
        assert view.ttft[i] == metrics.ttft and view.tpot[i] == metrics.tpot
    name, counters = "vllm:inter_token_latency_seconds", core.metrics()
    assert sum(n for _, n in view.gaps) == counters[f"{name}_count"] > 10
    assert sum(g * n for g, n in view.gaps) == pytest.approx(counters[f"{name}_sum"])
    assert [row[0] for row in view.table()[1]] == ["5", "4", "3", "2", "1"]
    view.update(frame_of(core, Selection("request", 3)))
    dots = view.strips["ttft"].dots.data
    assert [n for n, d in zip(dots["label"], dots["dim"], strict=True) if not d] == ["3"]


def test_percentiles_are_values_that_were_measured():
    assert percentiles([], []) == (0.0, 0.0)
    assert percentiles([5.0], [1]) == (5.0, 5.0)
    assert percentiles([float(i) for i in range(1, 101)], [1] * 100) == (50.0, 95.0)
    assert percentiles([1.0, 9.0], [99, 1]) == (1.0, 1.0)


def test_chips_of_a_strip_never_overlap():
    places = np.random.default_rng(0).random(50).tolist()
    rows = _stacked(places)
    for row in set(rows):
        inside = sorted(x for x, r in zip(places, rows, strict=True) if r == row)
        assert min(np.diff(inside), default=1) >= 0.13
    assert _stacked([0.5, 0.5, 0.9]) == [0, 1, 0]


def test_too_many_requests_are_a_histogram():
    strip = DotStrip(LIGHT, "x")
    dots = [Dot(0.001 * i, i, 0, False) for i in range(1, MOST_DOTS + 2)]
    strip.update(dots[:-1], 0.03, 0.057)
    assert len(strip.dots.data["x"]) == MOST_DOTS and not strip.bars.data["top"]
    assert strip.marks.data["text"] == ["half: 30 ms", "95 %: 57 ms"]
    strip.update(dots, 0.031, 0.058)
    assert not strip.dots.data["x"] and max(strip.bars.data["top"]) > 0
    strip.update([], 0.0, 0.0)
    assert not strip.marks.data["text"]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_bars_are_the_tokens_of_each_step_under_the_budget():
    core = make_core(max_num_batched_tokens=8)
    core.add_request([1] * 12, greedy(4))
    core.add_request([2] * 3, greedy(4))
    run(core)
    view = Batch()
    view.update(frame_of(core))
    assert view.bars.data == {"step": [1, 2, 3, 4, 5], "decode": [0, 0, 2, 2, 2], "total": [8, 7, 2, 2, 2]}
    assert view.ends.data["name"] == ["decode", "prefill", "budget"] and view.ends.data["number"] == ["2", "0", "8"]
    assert view.figure.y_range.end > 8 and view.summary() == "Step 5 processed 2 tokens for 2 sequences."
    for _ in range(30):
        core.add_request([3] * 3, greedy(4))
        run(core)
    view.update(Frame(core.snapshot(), core.events.since(0)[0]))
    assert len(view.bars.data["step"]) <= 60


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_queue_stands_in_its_order_with_reasons_in_words():
    core = make_core(max_num_seqs=1, scheduling_policy="priority", num_blocks=9)
    core.add_request([1] * 5, greedy(9), priority=0)
    core.add_request([2] * 5, greedy(9), priority=7)
    core.add_request([3] * 5, greedy(9), priority=3, deadline=50.0)
    for _ in range(3):
        core.step()
    view = Queue()
    view.update(frame_of(core))
    html = view.line_up.text
    assert html.index('data-r="3"') < html.index('data-r="2"'), "the better priority goes first"
    assert "Blocked because it needs 1 seat and 0 of max_num_seqs are free." in html
    assert "Blocked because request 3 is ahead of it." in html and "priority 7" in html
    assert "deadline in 50 s" in html or "deadline in 49 s" in html
    assert view.summary() == "1 running, 2 waiting, 0 preempted or swapped out."
    rows = view.table()[1]
    assert [row[:2] for row in rows] == [["1", "3"], ["2", "2"]] and rows[0][3] == "3 steps"
    assert view.line.data["running"][-1] == 1 and view.line.data["waiting"][-1] == 2


def test_a_request_in_host_memory_says_so_in_the_queue():
    core = make_core(preemption_mode="swap", num_cpu_blocks=8)
    core.add_request([1] * 6, greedy(8))
    core.step()
    core.preempt(1)
    view = Queue()
    view.update(frame_of(core))
    assert "It was swapped out. Blocked because" in view.line_up.text
    assert view.summary().endswith("1 preempted or swapped out.")


# --- hits -------------------------------------------------------------------------------------------------------------


def test_hits_are_the_counters_of_the_engine():
    core = make_core()
    for prompt in ([1] * 9, [1] * 9, [2] * 9, [1] * 9):
        core.add_request(prompt, greedy(2))
        run(core)
    view, metrics = PrefixHits(), core.metrics()
    view.update(frame_of(core))
    found, asked = (int(metrics[f"vllm:prefix_cache_{name}_total"]) for name in ("hits", "queries"))
    assert view.summary() == f"{found} of {asked} prompt tokens came from the cache since the start."
    assert view.line.data["of tokens"][-1] == pytest.approx(100 * found / asked, abs=0.06)
    assert sorted(view.line.data["step"]) == view.line.data["step"]


# --- the machine ------------------------------------------------------------------------------------------------------


class FakeNvml:
    """Two GPUs, of which the second does not tell its power."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200" if handle else "NVIDIA L4"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=83, memory=20)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=6 << 30, total=24 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle:
            raise self.NVMLError("not supported")
        return 61_000

    nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetPowerUsage

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 2040 if kind == self.NVML_CLOCK_SM else 6251

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 64


def machine_frame(now=0.0, state="running", events=()):
    frame = FakeSource(state=state).frame()
    return Frame(frame.snapshot, events, now=now, slots=frame.slots)


def test_the_machine_is_read_once_a_second_with_its_gpus():
    view = Host(machine=Machine(FakeNvml()))
    step = Event(0, 1, 0.0, EventKind.STEP, numbers={"seconds": 0.2, "schedule_seconds": 0.001})
    view.update(machine_frame(0.0, events=[step]))
    first = view._sample
    bars = dict(zip(view.bars.data["name"], view.bars.data["text"], strict=True))
    assert bars["GPU 0"] == bars["GPU 1"] == "83 %" and bars["GPU 0 memory"] == "6 GiB of 24 GiB"
    assert bars["GPU 0 power"] == "61 of 61 W" and "GPU 1 power" not in bars, "what a GPU does not tell is left out"
    assert bars["GPU 0 clocks"] == "2,040 MHz, memory 6,251 MHz" and bars["GPU 1 heat"] == "64 °C"
    assert view.summary() == "Read once a second. NVIDIA L4, NVIDIA H200."
    assert (
        "One step: <b>200 ms</b>, of which scheduler 1.0 ms." in view.root.text
        and "%</b> of one core" in view.root.text
    )
    view.update(machine_frame(0.5))
    assert view._sample is first
    view.update(machine_frame(1.1))
    assert view._sample is not first


def test_a_machine_without_a_gpu_says_so():
    view = Host(machine=Machine(None))
    view.update(machine_frame())
    assert view.summary() == "Read once a second. No GPU was found." and "GPU" not in view.root.text
    sample = view._sample
    assert sample.resident > 10 << 20 and sample.memory_used <= sample.memory_total and sample.gpus == ()
    assert all(0 <= busy <= 100 for busy in sample.cores) and 0 <= max(view.bars.data["share"]) <= 1


@pytest.mark.parametrize("found", ["no module", "no driver", "no gpu"])
def test_whatever_is_missing_of_nvml_is_no_error(monkeypatch, found):
    class Error(Exception):
        pass

    def init():
        if found == "no driver":
            raise Error("driver not loaded")

    module = SimpleNamespace(NVMLError=Error, nvmlInit=init, nvmlDeviceGetCount=lambda: 0)
    monkeypatch.setitem(sys.modules, "pynvml",
                        None if found == "no module" else module)  # fmt: skip
    assert find_nvml() is None


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ledger, Latency, Batch, Queue, PrefixHits, Host])
def test_a_second_costs_little_and_time_may_go_back(kind, wire):
    view = kind()
    seconds, frame, source = seconds_of(view, wire(view))
    assert np.mean(seconds) < 6000 and max(seconds[1:]) < 10_000, seconds
    said, again = read_twice(view, frame, source, view.table)
    if kind is not Host:
        assert again == said, "all events at once say what was said step by step"
    assert kind().summary() and isinstance(kind().table()[1], list)
