"""All that the mouse does, by key presses alone: the pool's cursor, and lists that are one stop of Tab each."""

from __future__ import annotations

import pytest
from lab_pages import open_page, our_errors, served

PATIENCE = 30_000  # ms

# The innermost element with the focus, across shadow roots; in which list or pool it stands.
_FOCUS = """() => {
  let at = document.activeElement;
  while (at.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
  const list = at.closest("[data-list]")?.ariaLabel ?? "", pool = at.role === "application" ? at.ariaLabel : "";
  return {list, pool, r: at.dataset.r ?? "", token: at.dataset.token ?? "", e: at.dataset.e ?? "", b: at.dataset.b ?? "", step: at.dataset.step ?? "",
          on: at === document.body ? "body" : at.localName, outline: getComputedStyle(at).outlineStyle};
}"""


@pytest.fixture(scope="module")
def address(tiny_folder):
    """The address of a page on a paused engine with three requests that share the blocks of their prompt."""
    from kvscope.engine import Engine, SamplingParams

    engine = Engine(str(tiny_folder), num_blocks=64, dtype="float32", num_threads=1)
    engine.pause()
    tape = engine.record()
    for i in range(3):
        engine.submit([*range(3, 70), 80 + i], SamplingParams(max_tokens=200, logprobs=3, ignore_eos=True, seed=i))
        for _ in range(10):
            engine.step()
    with served(engine) as url:
        yield url
    del tape


class Keys:
    """A page that is driven by key presses, and nothing else."""

    def __init__(self, browser, url):
        self.watched = open_page(browser, width=1600)
        self.page = self.watched.page
        self.page.set_default_timeout(PATIENCE)
        self.page.goto(url)
        self.page.wait_for_selector("h2 >> text=KV block pool")
        self.page.wait_for_selector(".log .e")
        self.page.wait_for_timeout(1500)  # the figures are there

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)
        return self.focus()

    def focus(self):
        return self.page.evaluate(_FOCUS)

    def tab_to(self, **wanted):
        """Tab until the focus stands there; how many stops of each list came by."""
        stops = {}
        for _ in range(80):
            at = self.press("Tab")
            stops[at["list"]] = stops.get(at["list"], 0) + 1
            if all(at[name].startswith(value) for name, value in wanted.items()):
                return stops
        raise AssertionError(f"Tab does not reach {wanted}: {stops}")

    def says(self, text):
        self.page.wait_for_selector(f"[role=status] >> text={text}")

    def highlighted(self, what):
        self.page.wait_for_selector(f".tabs >> text={what} is highlighted")

    def nothing_highlighted(self):
        self.page.wait_for_selector(".tabs >> text=/highlighted/", state="detached")


@pytest.fixture
def keys(browser, address):
    keys = Keys(browser, address)
    yield keys
    assert our_errors(keys.watched) == []
    keys.page.context.close()


def cursor(keys):
    """The rows of the source that draws the pool's cursor."""
    return keys.page.evaluate("""() => Bokeh.documents.flatMap((doc) => [...doc._all_models.values()])
      .filter((model) => model.name === "cursor" && model.data_source)
      .flatMap(({data_source: {data}}) => data.x.map((x, i) => [x, data.y[i]]))""")


def test_the_pool_has_a_cursor(keys, shots):
    keys.tab_to(pool="KV block pool")
    keys.says("Block 0: pinned")
    keys.press("ArrowRight", "ArrowDown")
    keys.says("/Block 17: (active|empty)/")
    assert cursor(keys) == [[1, 1]]
    keys.press("ArrowUp", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowLeft", "ArrowLeft")
    assert cursor(keys) == [[0, 0]], "it stays inside of the pool"
    keys.press("ArrowRight")
    keys.says("/Block 1: shared, generation 1, read by 1, 2, 3; \\d+ slots written/")
    keys.press("Enter")
    keys.highlighted("Block 1")
    assert keys.focus()["pool"], "it goes on from where it is"
    keys.page.screenshot(path=shots / "keyboard-pool.png")
    keys.press("Escape")
    keys.nothing_highlighted()
    keys.press("ArrowDown", "Enter")
    keys.highlighted("Block 17")
    keys.press("Enter")
    keys.nothing_highlighted()
    assert not keys.press("Tab")["pool"], "one stop"
    assert cursor(keys) == []
    assert keys.press("Shift+Tab")["pool"]
    assert cursor(keys) == [[1, 1]]


def test_a_list_is_one_stop_and_keeps_the_focus_when_it_is_redrawn(keys):
    before = keys.tab_to(list="Requests")
    assert before["Requests"] == 1 and keys.focus()["r"] == "1"
    assert keys.press("ArrowDown")["r"] == "2"
    keys.press("Enter")
    keys.highlighted("Request 2")
    assert keys.focus()["r"] == "2"
    step = keys.page.locator(".stepno b").inner_text()
    keys.press("ArrowRight")  # sideways nothing stands, so it is the page's: a step, which redraws every row
    keys.page.wait_for_selector(f".stepno b >> text={int(step) + 1}")
    keys.page.wait_for_timeout(500)
    at = keys.focus()
    assert (at["list"], at["r"], at["outline"]) == ("Requests", "2", "solid")
    assert keys.press("ArrowDown", "ArrowDown", "ArrowDown")["r"] == "3", "the last"
    assert keys.press("Tab")["list"] != "Requests"
    keys.press("Escape", "Escape")  # out of the menu, and then the selection
    keys.nothing_highlighted()


def test_the_lines_of_the_log(keys):
    keys.tab_to(list="Event log")
    first = keys.focus()
    second = keys.press("ArrowDown")
    assert second["e"] and second["e"] != first["e"]
    keys.press("Enter")
    keys.page.wait_for_selector(f".stepno b >> text='{second['step']}'")
    keys.page.wait_for_selector(".log .e.on")
    keys.page.wait_for_timeout(500)
    assert keys.focus()["e"] == second["e"], "the log goes to that step now, and the line is still there"
    keys.press("End")
    keys.page.wait_for_selector(".tag >> text=LIVE")


def test_a_line_of_the_log_and_the_step_of_a_token_lead_to_their_step(keys):
    page = keys.page
    last = page.locator(".log .e").last
    step = last.get_attribute("data-step")
    last.click()
    page.wait_for_selector(f".stepno b >> text='{step}'")
    page.wait_for_selector(".banner.past")
    keys.nothing_highlighted()
    page.keyboard.press("End")
    page.wait_for_selector(".tag >> text=LIVE")
    page.locator(".reqs .row").first.click()
    page.locator("[data-token]:visible").nth(4).click()
    page.wait_for_selector(".alts a[data-step]:visible")
    step = page.locator(".alts a[data-step]:visible").inner_text().removeprefix("step ")
    page.click(".alts a[data-step]:visible")
    page.wait_for_selector(f".stepno b >> text='{step}'")
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    page.wait_for_selector(".tag >> text=LIVE")


def test_tokens_and_the_blocks_of_a_request(keys):
    keys.tab_to(list="Requests")
    keys.press("ArrowDown", "ArrowDown", "Enter")
    keys.highlighted("Request 3")
    stops = keys.tab_to(list="Tokens")
    assert stops["Block table of 3, in reading order"] == 1
    assert keys.focus()["token"] == "3:0:0"
    assert keys.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")["token"] == "3:0:2"
    keys.press("Enter")
    keys.page.wait_for_selector(".alts >> text=/Token 71 at step/")
    assert keys.focus()["token"] == "3:0:2"
    keys.press("ArrowDown", "ArrowUp")
    assert keys.focus()["token"] == "3:0:2", "a line down and up again"
    keys.press("Shift+Tab")
    block = keys.press("ArrowRight")["b"]
    keys.press("Enter")
    keys.highlighted(f"Block {block}")
    keys.press("Escape")
    keys.nothing_highlighted()
    assert keys.focus()["on"] != "body", "what was pressed is gone; the keys are still the page's"


def test_the_parts_of_a_step(keys):
    step = int(keys.page.locator(".stepno b").inner_text())
    keys.press("Tab", "s")  # the engine makes it, as the newest is looked at
    for number, part in enumerate(("schedule", "allocate", "copy"), 1):
        keys.page.wait_for_selector(f".stepno >> text=/step {step + 1}, {number} of 6: {part}/")
        keys.press("s")
    keys.press("Shift+S")
    keys.page.wait_for_selector(".stepno >> text=/3 of 6: copy/")
    keys.page.click(".btns >> text=Step", modifiers=["Shift"])
    keys.page.wait_for_selector(".stepno >> text=/4 of 6: forward/")
    keys.page.wait_for_selector(f".banner.past >> text=You look into step {step + 1}")
    keys.press("End")
    keys.page.wait_for_selector(".tag >> text=LIVE")
