"""What can be taken away from a workbench: a trace, tables, a picture."""

import json
import sys

import fake_model
import pytest
from kvscope.engine import Engine
from kvscope.workbench import Workbench
from kvscope.workbench.picture import browser
from kvscope.workbench.trace_export import trace_events


def slices(entries, pid):
    return [e for e in entries if e["ph"] == "X" and e["pid"] == pid]


@pytest.fixture(scope="module")
def wb(tiny_folder):
    with (
        Engine(str(tiny_folder), num_blocks=24, dtype="float32", num_threads=1, watermark=0.0) as engine,
        Workbench(engine) as wb,
    ):
        handles = [wb.submit(list(range(40)), max_tokens=90 + i, ignore_eos=True) for i in range(4)]
        handles.append(wb.submit([1, 2, 3], n=2, max_tokens=5, ignore_eos=True))
        for handle in handles:
            handle.result(60)
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
        yield wb


def test_the_trace_is_what_the_format_asks_for(wb, tmp_path):
    document = json.loads(wb.save_trace(tmp_path / "run.json").read_text())
    entries = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms" and document["otherData"]["events lost before"] == 0
    needed = {"X": {"ts", "dur", "pid", "tid", "name"}, "C": {"ts", "pid", "name", "args"}, "M": {"pid", "name", "args"},
              "i": {"ts", "pid", "tid", "s", "name"}}  # fmt: skip
    for entry in entries:
        assert needed[entry["ph"]] <= entry.keys()
        assert entry.get("ts", 0) >= 0 and entry.get("dur", 0) >= 0
    times = [entry["ts"] for entry in entries if "ts" in entry]
    assert times == sorted(times)
    for pid in (1, 2):
        ends = {}
        for entry in slices(entries, pid):
            assert entry["ts"] >= ends.get(entry["tid"], 0.0) - 0.2, "slices of one track do not overlap"
            ends[entry["tid"]] = entry["ts"] + entry["dur"]


def test_the_trace_says_what_the_engine_did(wb, tmp_path):
    entries = json.loads(wb.save_trace(tmp_path / "run.json").read_text())["traceEvents"]
    metrics, steps = wb.engine.metrics(), slices(entries, 1)
    assert len(steps) == metrics["kvscope:steps_total"]
    computed = sum(step["args"]["prefill_tokens"] + step["args"]["decode_tokens"] for step in steps)
    assert computed == metrics["kvscope:computed_tokens_total"]
    phases = {tid: [s["name"] for s in slices(entries, 2) if s["tid"] == tid] for tid in range(1, 6)}
    assert all(names[:3] == ["waiting", "prefill", "decode"] for names in phases.values())
    preempted = sum(names.count("preempted") for names in phases.values())
    assert 0 < preempted <= metrics["vllm:num_preemptions_total"]
    again = next(names for names in phases.values() if "preempted" in names)
    assert again[again.index("preempted") + 1] == "prefill", "what was lost is computed again"
    first = next(s for s in slices(entries, 2) if s["tid"] == 1 and s["name"] == "prefill")
    metrics_of = wb.engine.handles()[1].partial().metrics
    assert first["dur"] / 1e6 == pytest.approx(metrics_of.prefill_time, abs=0.1)
    assert sum(e["ph"] == "i" and e["name"] == "finished: length" for e in entries) == 5
    used = [e["args"]["used"] for e in entries if e["ph"] == "C" and e["name"] == "blocks"]
    assert used == [e.numbers["used_blocks"] for e in wb.engine.events.since(0)[0] if e.kind == "step"]


def test_a_request_whose_tokens_are_forgotten_was_running():
    core = fake_model.make_core()
    core.add_request([1, 2, 3], fake_model.greedy(4))
    fake_model.run(core)
    entries = trace_events(core.events.since(0)[0], {})
    assert [s["name"] for s in slices(entries, 2)] == ["waiting", "running"]
    assert trace_events([], {})[0]["ph"] == "M"


def test_tables_are_data_frames(wb):
    pytest.importorskip("pandas")
    requests, steps, blocks, events = (getattr(wb.tables, n)() for n in ("requests", "steps", "blocks", "events"))
    assert requests["output_tokens"].tolist() == [90, 91, 92, 93, 10] and (requests["ttft"] > 0).all()
    assert requests["samples"].tolist()[-1] == 2 and set(requests["status"]) == {"finished"}
    assert len(steps) == wb.engine.metrics()["kvscope:steps_total"] and steps["seconds"].sum() > 0
    assert len(blocks) == 24 and blocks["state"].tolist()[0] == "pinned"
    assert blocks["next_out"].dropna().astype(int).tolist() != [] and blocks["readers"].sum() <= 1
    assert len(events) == len(wb.engine.events) and (events["kind"] == "preempted").any()


def test_without_pandas_the_tables_say_so(wb, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        wb.tables.steps()


def test_a_picture_of_the_map_is_drawn_here(wb, tmp_path):
    svg = wb.views.block_map.save(tmp_path / "map.svg").read_text()
    assert svg.startswith("<svg") and "blocks" in svg
    with pytest.raises(ValueError, match="no SVG"):
        wb.views.timeline.save(tmp_path / "timeline.svg")
    with pytest.raises(ValueError, match=r"ends in .svg or .png"):
        wb.views.timeline.save(tmp_path / "timeline.jpg")


def test_without_a_browser_a_png_says_so(wb, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert browser() is None
    with pytest.raises(RuntimeError, match="needs a browser"):
        wb.views.timeline.save(tmp_path / "timeline.png")
