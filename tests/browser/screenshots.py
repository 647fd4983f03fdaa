"""`python tests/browser/screenshots.py FOLDER`: pictures of the workbench on a real run of the default model.

Each tab and each of its views, in both themes and at three widths of the page, as `tab-theme-width.png` and
`tab-theme-width-view.png`. The run is the same every time: shared prompts, samples, evictions, a swapped request, a queue.
Ends with 1 when text on a page is cut off or below 11 px, with a line for each such text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab_pages import CHROMIUM, CHROMIUM_ARGS, free_port, open_page

TABS, THEMES, WIDTHS = ("watch", "explain", "measure"), ("light", "dark"), (760, 1100, 1600)
SMALLEST = 11  # px
PATIENCE = 180_000  # ms, for a page on a busy machine
NUM_BLOCKS = 64
SYSTEM = "You are a careful teaching assistant for a course on computer systems. Answer in plain words. "
COURSE = "Course page, week five. Paging, page tables, eviction and swapping are what we talk about this week. "
# (system prompt, question, samples, longest answer)
WORK = (
    (SYSTEM, "What is a page table?", 1, 150),
    (SYSTEM, "Why is memory cut into blocks?", 1, 40),
    (COURSE, "Write an exercise about paging.", 3, 90),
    (SYSTEM, "What is latency?", 1, 30),
    (COURSE, "Which of these topics is the hardest?", 1, 60),
    ("", "Write a poem of two lines about a queue.", 4, 60),
    (SYSTEM, "What is a scheduler?", 1, 120),
    (SYSTEM, "Explain swapping with an example.", 1, 120),
    (COURSE, "Summarise this week.", 1, 120),
    (SYSTEM, "When is a block shared?", 1, 120),
    ("", "Meeting notes, platform team: the cache was full twice today.", 1, 120),
    (SYSTEM, "What is a token?", 1, 120),
)

# Texts of our panels that are cut off, or too small; our own parts stand in shadow roots.
_FAULTS = """(smallest) => {
  const found = [];
  const look = (node) => {
    for (const el of node.querySelectorAll("*")) {
      if (el.shadowRoot) look(el.shadowRoot);
      const own = [...el.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own.length || !el.getClientRects().length || ["STYLE", "SCRIPT", "OPTION", "TEXTAREA"].includes(el.tagName)) continue;
      const style = getComputedStyle(el), text = own.map((n) => n.textContent.trim()).join(" ").slice(0, 60);
      if (el.closest("svg,[hidden]") || style.visibility === "hidden" || style.clipPath !== "none") continue;
      if (parseFloat(style.fontSize) < smallest) found.push(`${style.fontSize}: ${text}`);
      const clips = style.overflowX !== "visible" && style.textOverflow !== "ellipsis";
      if (clips && el.scrollWidth > el.clientWidth + 1 && style.overflowX !== "auto") found.push(`cut off: ${text}`);
      const box = el.getBoundingClientRect();
      if (box.right > document.documentElement.clientWidth + 1) found.push(`outside of the page: ${text}`);
    }
  };
  look(document);
  return found;
}"""

# The panel around a heading: the parent, across shadow roots, of the part that the heading stands in.
_PANEL = """(heading) => {
  const host = heading.getRootNode().host, box = (host.parentElement ?? host.getRootNode().host).getBoundingClientRect();
  return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height};
}"""


def run_engine():
    """An engine that is paused in the middle of `WORK`, and its tape: the player's track is in the pictures too."""
    from kvscope.engine import Engine, SamplingParams

    engine = Engine("default", num_blocks=NUM_BLOCKS, max_num_batched_tokens=64, max_num_seqs=12, seed=0,
                    preemption_mode="swap", num_cpu_blocks=48)  # fmt: skip
    engine.pause()
    tape = engine.record()
    for i, (system, question, n, longest) in enumerate(WORK):
        messages = [{"role": "system", "content": 2 * system}] if system else []
        params = SamplingParams(n=n, max_tokens=longest, temperature=0.8, seed=i, logprobs=4, ignore_eos=True)
        engine.submit([*messages, {"role": "user", "content": question}], params)
        for _ in range(6):
            engine.step()
    while engine.metrics()["kvscope:blocks_swapped_out_total"] == 0 and engine.metrics()["kvscope:steps_total"] < 200:
        engine.step()
    for _ in range(3):
        engine.step()
    return engine, tape


def take(url: str, browser, folder: Path) -> list[str]:
    """All pictures of the page at `url`; what is wrong with its texts."""
    faults = []
    for theme in THEMES:
        for width in WIDTHS:
            watched = open_page(browser, width=width, height=1400, color_scheme=theme)
            page = watched.page
            page.set_default_timeout(PATIENCE)
            page.goto(url)
            page.wait_for_selector("h2 >> text=KV block pool")
            page.wait_for_selector(f".tabs >> text={'Dark' if theme == 'light' else 'Light'}")
            for tab in TABS:
                page.click(f"[data-tab={tab}]")
                page.wait_for_selector(f"[data-tab={tab}][aria-selected=true]")
                page.wait_for_timeout(2500)  # views that are drawn once a second, and the browser's own painting
                name = f"{tab}-{theme}-{width}"
                page.screenshot(path=folder / f"{name}.png", full_page=True)
                faults += [f"{name}: {fault}" for fault in page.evaluate(_FAULTS, SMALLEST)]
                for heading in page.locator("h2:visible").all():
                    title = heading.inner_text().lower().replace(" ", "-")
                    clip = heading.evaluate(_PANEL)
                    page.screenshot(path=folder / f"{name}-{title}.png", full_page=True, clip=clip)
            page.context.close()
    return faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    from kvscope.workbench.app import serve
    from playwright.sync_api import sync_playwright

    held, port = run_engine(), free_port()
    engine = held[0]
    app = serve(engine, port=port, show=False, threaded=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
            faults = take(f"http://127.0.0.1:{port}", browser, folder)
            browser.close()
    finally:
        app.close()
        engine.close()
    print("\n".join([*dict.fromkeys(faults), f"{len(list(folder.glob('*.png')))} pictures in {folder}"]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
