"""The inspector through its HTML: tokens that can be clicked, blocks with their text and their last events."""

import re

import pytest
from fake_model import greedy, make_core, run
from kvscope.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvscope.workbench.theme import OwnerSlots
from kvscope.workbench.views.base import Frame, Selection
from kvscope.workbench.views.output import Output


class Inspected:
    """An inspector on a core, whose requests' texts are what the core knows of them."""

    def __init__(self, core, **options):
        self.core, self.index, self.slots, self.times = core, 0, OwnerSlots(), {}
        self.view = Output(texts=self.texts, decode=lambda token: f"t{token} ", **options)

    def step(self):
        output = self.core.step()
        for request_id, tokens in output.new_tokens.items():
            now = self.core.events.since(0)[0][-1].time
            for child, _ in tokens:
                self.times.setdefault((request_id, child), []).append(now + 1e-6)

    def texts(self, request_id):
        request = self.core.get(request_id)
        outputs = [
            CompletionOutput(c.child, "text", list(c.output_token_ids), logprobs=[{t: -0.1, 96: -2.5} for t in c.output_token_ids],
                             token_times=self.times.get((request_id, c.child), []))
            for c in request.children
        ]  # fmt: skip
        return RequestOutput(request_id, None, list(request.prompt_token_ids), outputs, False, 0, RequestMetrics(0.0))

    def look(self, selection=None):
        events, self.index, lost = self.core.events.since(self.index)
        self.view.update(Frame(self.core.snapshot("paused"), events, lost, selection, None, 1.0, self.slots))
        return re.sub(r"\s+", " ", self.view.root.text)


def test_a_token_that_is_clicked_shows_its_step_block_and_slot():
    core = make_core()
    core.add_request([5, 6, 7], greedy(9))
    page = Inspected(core)
    for _ in range(6):
        page.step()
    newest = page.look(Selection("request", 1))
    assert "Token 9 at step 6, stored with the next step" in re.sub(r"<[^>]+>", "", newest)
    assert '<a href="#" data-step="6"' in newest
    page.view.token = (1, 0, 2)
    table = core.snapshot().requests[0].block_tables[0]
    html = page.look(Selection("request", 1))
    assert f'step 3</a>, stored in block <a href="#" data-b="{table[1]}"' in html and ", slot 1" in html
    assert re.search(r'<span class="now" data-token="1:0:2" [^>]*>', html)
    page.view.token = (7, 0, 2)
    assert "step 6</a>" in page.look(Selection("request", 1)), "what was clicked belongs to another text"
    headers, rows = page.view.table()
    assert headers == ["#", "Token", "Probability", "Step", "Block", "Slot"]
    assert rows[2][3:] == ["3", str(table[1]), "1"] and rows[5][3:] == ["6", "–", "–"]


def test_a_block_shows_its_tokens_its_place_and_its_last_three_events():
    core = make_core()
    core.add_request([5, 6, 7, 8, 9, 10], greedy(9))
    page = Inspected(core)
    page.step()
    first, second = core.snapshot().requests[0].block_tables[0].tolist()
    html = page.look(Selection("block", first))
    assert ">t5</div>" in html and ">t8</div>" in html and "logical block 0 of 1" in html
    assert "computed for request 1, found never" in html and html.count('<div class="e" data-step="1"') == 2
    html = page.look(Selection("block", second))
    assert ">t9</div>" in html and html.count('class="e" title=') == 2, "two slots are not written yet"
    run(core)
    html = page.look(Selection("block", first))
    place = core.snapshot().eviction_order.tolist().index(first) + 1
    assert f"cached, number {place} to be evicted" in html and ">t5</div>" in html, (
        "its text is known from who computed it"
    )
    assert html.count('<div class="e" data-step=') == 3 and "lost its last reader because request 1 finished" in html
    core.add_request([5, 6, 7, 8, 1], greedy(2))
    page.step()
    assert "found once" in page.look(Selection("block", first))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_blocks_of_every_kv_group_can_be_inspected(prefix_cache):
    core = make_core(windows=(0, 5), prefix_cache=prefix_cache)
    core.add_request(list(range(1, 15)), greedy(5))
    page = Inspected(core)
    for _ in range(3):
        page.step()
    tables = core.snapshot().requests[0].block_tables
    html = page.look(Selection("block", int(tables[1][-1])))
    assert f"logical block {len(tables[1]) - 1} of 1, KV group 1" in html
    html = page.look(Selection("request", 1))
    assert html.count('class="null"') == (tables[1] == 0).sum() > 0
    assert "Block table of 1, KV group 0" in html and "Block table of 1, KV group 1" in html
    page.view.token = (1, 0, 0)
    assert re.search(
        r"stored in block <a .*?</a> \(KV group 0\) and block <a .*?</a> \(KV group 1\), slot 2",
        page.look(Selection("request", 1)),
    )
    assert "the null block" in page.look(Selection("block", 0))
