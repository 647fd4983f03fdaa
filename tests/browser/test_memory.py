"""What a person with 2 GB has: the default model with the workbench open, in one kernel."""

from __future__ import annotations

import pytest
from lab_pages import Lab, our_errors

LIMIT = {"bfloat16": 1.4e9, "float32": 1.6e9}  # bytes

OPEN = """
from kvscope.workbench import Workbench
wb = Workbench("default", dtype={dtype!r})
wb
"""
MEASURE = """
import os, psutil
wb.engine.generate(["What is a block table?", "Tell me a story about a lighthouse."])
print("RSS", psutil.Process().memory_info().rss, wb.engine.info.dtype)
wb.close()
"""


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_kernel_stays_small(lab: Lab, dtype):
    from kvscope.engine.models.hub import resolve

    resolve("default", progress=False)
    params = "\nfrom kvscope.engine import SamplingParams\n"
    measure = MEASURE.replace('"])', '"], SamplingParams(max_tokens=64))')
    book = lab.notebook(f"memory_{dtype}.ipynb", OPEN.format(dtype=dtype), params + measure)
    watched = lab.open(book)
    lab.run_all(watched)
    watched.page.wait_for_selector("pre >> text=/RSS \\d/", timeout=120_000)
    _, rss, held = watched.page.locator("pre >> text=/RSS \\d/").first.inner_text().split()
    print(f"kernel process with the default model in {held} and the workbench open: {int(rss) / 1e9:.2f} GB")
    assert int(rss) <= LIMIT[held]
    assert our_errors(watched) == []
