"""axe-core on the app page: no fault that it calls serious or critical, on any tab, in both themes, with a run in it.

axe looks into shadow roots. What it cannot decide (text over a picture) it reports apart; that is not counted here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_pages import open_page, our_errors, served

AXE = Path(__file__).parent / "axe" / "axe.min.js"
TABS = ("watch", "explain", "measure")
SERIOUS = ("serious", "critical")
PATIENCE = 30_000  # ms

_FAULTS = """async (impacts) => {
  const result = await axe.run(document, {resultTypes: ["violations"]});
  const where = (node) => `${node.target.flat().join(" ")}: ${node.html.slice(0, 160)} (${node.any.map((c) => c.message).join("; ")})`;
  return result.violations.filter((rule) => impacts.includes(rule.impact))
    .map((rule) => `${rule.impact} ${rule.id}, ${rule.help}\\n  ` + rule.nodes.slice(0, 6).map(where).join("\\n  "));
}"""


@pytest.fixture(scope="module")
def address(tiny_folder):
    """The address of a page on an engine that is paused in the middle of work: requests that run, share, wait and are over."""
    from kvscope.engine import Engine, SamplingParams

    engine = Engine(str(tiny_folder), num_blocks=64, dtype="float32", num_threads=1, max_num_seqs=6)
    engine.pause()
    for i, (n, longest) in enumerate(((1, 4), (1, 60), (3, 60), (1, 60), (2, 60), (1, 60))):
        engine.submit(
            [*range(3, 70), 80 + i], SamplingParams(n=n, max_tokens=longest, logprobs=3, ignore_eos=True, seed=i)
        )
        for _ in range(3):
            engine.step()
    with served(engine) as url:
        yield url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_any_tab(address, browser, scheme):
    watched = open_page(browser, width=1600, color_scheme=scheme)
    page = watched.page
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.wait_for_selector("h2 >> text=KV block pool")
    page.wait_for_selector(f".tabs >> text={'Dark' if scheme == 'light' else 'Light'}")
    page.add_script_tag(path=AXE)
    faults = []
    for tab in TABS:
        page.click(f"[data-tab={tab}]")
        page.wait_for_selector(f"[data-tab={tab}][aria-selected=true]")
        page.wait_for_timeout(1500)  # views that are drawn once a second
        faults += [f"{tab}: {fault}" for fault in page.evaluate(_FAULTS, SERIOUS)]
    assert our_errors(watched) == []
    assert not faults, "\n".join(faults)
    page.context.close()
