"""`make soak`: ten minutes of traffic in a notebook's kernel with the workbench open; memory stays where it was.

The kernel is a real one. Nobody draws the page, but everything is sent to it, which is the half that runs beside the engine.
"""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient import NotebookClient

MINUTES = 10
GROWTH_MB = 20  # once the ring of events is full: until then it grows, as it should

OPEN = """
from kvscope import Workbench
wb = Workbench("default", num_blocks=128)
wb
"""

TRAFFIC = f"""
import json, random, threading, time
import psutil

draw, memory, handles = random.Random(0), [], []
process, started = psutil.Process(), time.monotonic()
while (now := time.monotonic() - started) < {60 * MINUTES}:
    live = [handle for handle in handles if not handle.done]
    while len(live) < 12:
        words = " ".join(draw.choice(["cache", "block", "river", "token", "step"]) for _ in range(draw.randint(4, 120)))
        samples = draw.choice([1, 1, 1, 2, 4])
        live.append(wb.submit(words, n=samples, temperature=0.8, max_tokens=draw.randint(8, 120), ignore_eos=True))
    if draw.random() < 0.2:
        draw.choice(live).cancel()
    handles = live
    memory.append((now, process.memory_info().rss / 1e6, wb.engine.events.next_index / wb.engine.config.event_capacity))
    time.sleep(0.25)
wb.engine.wait_idle()
wb.engine.check_integrity()
counters = wb.engine.metrics()
"""

CLOSE = """
wb.close()
time.sleep(1.0)
left = [thread.name for thread in threading.enumerate() if "kvscope" in thread.name.lower()]
print(json.dumps({"memory": memory, "threads": left, "steps": counters["kvscope:steps_total"]}))
"""


@pytest.mark.full
def test_memory_stays_where_it_was_over_ten_minutes_of_traffic(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (OPEN, TRAFFIC, CLOSE)])
    options = {
        "timeout": 60 * MINUTES + 300,
        "kernel_name": "python3",
        "resources": {"metadata": {"path": str(tmp_path)}},
    }
    NotebookClient(notebook, **options).execute()
    report = json.loads(notebook.cells[-1].outputs[-1]["text"])
    minutes = [max(m for s, m, _ in report["memory"] if 60 * i <= s < 60 * (i + 1)) for i in range(MINUTES)]
    print(f"{report['steps']:.0f} steps; most memory in each minute: {', '.join(f'{m:.0f}' for m in minutes)} MB")
    settled = [megabytes for _, megabytes, rings in report["memory"] if rings > 1]
    growth = max(settled[-40:]) - max(settled[:40])
    print(f"growth since the ring of events was full: {growth:.1f} MB, limit {GROWTH_MB} MB")
    assert growth < GROWTH_MB
    assert report["threads"] == []
