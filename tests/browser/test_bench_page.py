"""The page that `kvscope bench views` measures, in Chromium: what is counted is what it shows."""

from __future__ import annotations

import argparse
import time

from kvscope.engine import Engine, SamplingParams
from kvscope.workbench.bench_page import Page
from kvscope.workbench.bench_views import measure
from kvscope.workbench.workbench import Workbench


def test_a_frame_is_painted_and_shows_what_the_engine_did(tiny_folder, browser):
    with Engine(str(tiny_folder), num_blocks=128, dtype="float32", num_threads=1) as engine, Workbench(engine) as wb:
        engine.pause()
        engine.submit([3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True))
        with Page.of(wb, browser) as page:
            for _ in range(3):
                engine.step()
            step = page._tab.locator(".stepno", has_text="step 3")
            deadline, sizes = time.monotonic() + 60, []
            while not step.count() and time.monotonic() < deadline:
                for text, painted in page.until(time.monotonic() + 0.5):
                    sizes.append((sum(page.bytes_of(text).values()), len(text.encode())))
                    assert painted > 0
            assert step.count() == 1
            assert sizes and all(parts == whole for parts, whole in sizes)


def test_every_frame_that_counts_was_painted(tiny_folder, browser):
    options = argparse.Namespace(model=str(tiny_folder), dtype="float32", requests=4, seconds=3.0, tab="watch", seed=0)
    measured, info = measure(options, 1024, browser)
    assert info.num_blocks == 1024
    assert len(measured.frames) == len(measured.paints) > 0 and min(measured.paints) > 0
    assert measured.steps > 0 and all(spent > 0 for spent in measured.cpu.values())
