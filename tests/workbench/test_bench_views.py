"""`kvscope bench views` on a tiny model: every row is filled, parts add up to their sums, and nothing stays changed."""

from __future__ import annotations

import argparse
import json
import threading

import pytest
from kvscope.engine.core import EngineCore
from kvscope.engine.events import EventLog
from kvscope.engine.recording.tape import Tape
from kvscope.workbench.bench_views import HEADERS, Measured, _keep_busy, table
from kvscope.workbench.cli import main


@pytest.fixture
def written(tiny_folder, tmp_path, capsys):
    methods = EventLog.append, Tape.mark, EngineCore.snapshot
    file = tmp_path / "views.json"
    command = ["bench", "views", "--model", str(tiny_folder), "--blocks", "128", "--seconds", "2", "--requests", "4"]
    assert main([*command, "--dtype", "float32", "--no-browser", "--json", str(file)]) == 0
    assert (EventLog.append, Tape.mark, EngineCore.snapshot) == methods
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvscope-viewer")]
    return json.loads(file.read_text()), capsys.readouterr().out


def test_the_table_is_filled_and_adds_up(written):
    figures, printed = written
    rows = {row["what"]: row for row in figures["rows"]}
    assert all(list(row) == HEADERS and row["blocks"] == 128 for row in figures["rows"])
    assert rows["frames a second"]["value"] > 0 and rows["a step"]["value"] > 0
    assert 0 < rows["time in steps"]["value"] < 100.5
    for kind in ("bytes: ", "CPU: "):
        parts = [row["value"] for name, row in rows.items() if name.startswith(kind) and name != f"{kind}all"]
        assert len(parts) >= 4 and sum(parts) == pytest.approx(rows[f"{kind}all"]["value"])
    assert {name for name in rows if name.startswith("bytes: ")} == {
        "bytes: header", "bytes: story", "bytes: requests", "bytes: block_map", "bytes: timeline", "bytes: output", "bytes: event_log",
        "bytes: page", "bytes: all",
    }  # fmt: skip
    for name in (
        "bytes: header",
        "bytes: story",
        "bytes: block_map",
        "CPU: events",
        "CPU: recording",
        "CPU: snapshots",
        "CPU: views",
    ):
        assert rows[name]["value"] > 0, name
    assert "machine" in figures and "ceilings" not in figures
    assert "sent (no browser)" in printed and "| bytes: block_map |".replace(" ", "") in printed.replace(" ", "")


def test_a_row_says_the_number_that_was_measured_and_its_limit():
    measured = Measured(seconds=2.0, steps=100, in_steps=0.75, cpu={"events": 0.01, "views": 0.03}, views=["block_map"],
                        frames=[{"block_map": 100, "page": 50}, {"block_map": 300, "page": 50}], paints=[4.0, 8.0])  # fmt: skip
    rows = {what: (value, most, limit) for what, value, most, limit, _ in table(measured, 16_384)}
    assert rows["frames a second"] == (1.0, "–", "≥ 4")
    assert rows["a step"][0] == 20 and rows["time in steps"][0] == 75
    assert rows["bytes: block_map"] == (200, 300, "≤ 20,000") and rows["bytes: all"][:2] == (250, 350)
    assert rows["CPU: all"][0] == pytest.approx(2.0)
    assert rows["viewer, draw and send"][0] == pytest.approx(15)
    assert rows["browser, apply and paint"][:2] == (6, 8)


def test_as_many_requests_are_kept_at_work_as_were_asked_for():
    class Handle:
        done = False

    class Engine:
        tokenizer = None

        def submit(self, *arguments, **options):
            return Handle()

    handles: list[Handle] = []
    texts = iter([("Why?", {"max_tokens": 4})] * 9)
    wb = argparse.Namespace(engine=Engine())
    _keep_busy(wb, 4, texts, handles)
    assert len(handles) == 4
    handles[1].done = handles[2].done = True
    _keep_busy(wb, 4, texts, handles)
    assert len(handles) == 4 and not any(handle.done for handle in handles)
    assert len(list(texts)) == 3
