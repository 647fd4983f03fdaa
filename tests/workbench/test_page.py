"""The page without a browser: what each tick changes, what a selection, a tab, a theme and a table button do."""

import itertools
import re

import pytest
from bokeh.document import Document
from bokeh.models import Column, Div
from fake_frames import FakeEngine
from kvscope.engine.events import Event, EventKind
from kvscope.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvscope.workbench import stylesheet
from kvscope.workbench.bus import JS
from kvscope.workbench.controls import Commands
from kvscope.workbench.layout import SETTLE_SECONDS, Screen
from kvscope.workbench.selection import Choices
from kvscope.workbench.story import HOLD_SECONDS, StoryLine
from kvscope.workbench.theme import DARK, LIGHT, OwnerSlots
from kvscope.workbench.tick import Tick
from kvscope.workbench.views import DRAWN
from kvscope.workbench.views.base import Frame, Selection
from kvscope.workbench.views.header import Status
from kvscope.workbench.views.requests import Requests


class FakeHandle:
    def __init__(self, request_id):
        self.request_id = request_id

    def partial(self):
        text = f"<b>text of {self.request_id}</b> & more"
        logprobs = [{7: -0.1, 8: -3.0}, {7: -2.5, 8: -0.2}]
        completion = CompletionOutput(0, text, [7, 7], logprobs=logprobs)
        return RequestOutput(self.request_id, "p", [1, 2, 3], [completion], False, 0, RequestMetrics(0.0, 1.0))


class Engine(FakeEngine):
    info = None

    def handles(self):
        return {r: FakeHandle(r) for r in range(1, 17)}

    def decode_token(self, token_id):
        return f"<{token_id}>"


class Page:
    """A screen on a fake engine; `tick(steps)` steps and draws."""

    def __init__(self, **options):
        self.engine, self.choices, self.messages = Engine(), Choices(), []
        self.slots, self.now = OwnerSlots(), 100.0
        self.screen = Screen(self.choices, lambda screen, *message: self.messages.append(message), **options)
        self.status = Status()

    def tick(self, steps=1, seconds=1.0, **options):
        for _ in range(steps):
            self.engine.step()
        self.now += seconds
        tick = Tick(self.engine, self.choices.selection, self.slots)
        tick.now = self.now
        return self.screen.update(tick, self.status, **options)

    def texts(self, part=None):
        return [div.text for div in (part or self.screen.root).select({"type": Div})]

    def shown(self):
        """All HTML that can be seen."""
        seen, todo = [], [self.screen.root]
        while todo:
            model = todo.pop()
            if "kv-off" in model.css_classes or not model.visible:
                continue
            if isinstance(model, Div):
                seen.append(model.text)
            if isinstance(model, Column):
                todo += model.children
        return "\n".join(seen)


def test_the_first_tick_shows_facts_numbers_and_requests():
    page = Page()
    page.tick(93)
    html = page.shown()
    assert "LIVE" in html and "128 blocks × 16 tokens" in html
    assert re.search(r"step <b>93</b>", html)
    for name in ("running", "waiting", "preempted", "tokens/s", "blocks in use"):
        assert f"<span>{name}</span>" in html
    assert 'data-r="10"' in html


def test_text_of_a_model_is_never_html():
    page = Page()
    page.tick(93)
    page.choices.selection = Selection("request", 2)
    page.tick()
    html = page.shown()
    assert "&lt;b&gt;text of 2&lt;/b&gt; &amp; more" in html
    assert "<b>text" not in html and "<7>" not in html
    assert "&lt;7&gt;" in html, "tokens are decoded where their probability is known"


def test_a_tick_without_news_changes_nothing_but_the_pulse():
    page = Page()
    page.engine.state = "paused"
    page.tick(40)
    page.tick(0, SETTLE_SECONDS / 2)
    page.tick(0, SETTLE_SECONDS)
    document, changes = Document(), []
    document.add_root(page.screen.root)
    document.on_change(changes.append)
    assert page.tick(0, 0.1) is False
    assert changes == []
    page.tick(0, 1.1)
    assert [event.model for event in changes] == [page.screen.pulse]


def test_the_pulse_counts_every_tick_that_was_drawn():
    page = Page()
    counts = []
    for _ in range(5):
        page.tick()
        counts.append(page.screen.pulse.tags[0])
    assert counts == list(range(counts[0], counts[0] + 5))


def test_a_hidden_tab_is_not_drawn_and_catches_up_when_it_is_seen():
    page = Page()
    page.tick(60)
    log = page.screen.view("event_log")
    before = log.root.text
    page.tick(40)
    assert log.root.text == before
    page.choices.tab = "explain"
    page.tick()
    panel = next(p for p in page.screen.panels if "explain" in p.tabs and p.name == "event_log")
    assert "was evicted" in panel.view.root.text or "missed the cache" in panel.view.root.text
    assert panel.reader.next_index == page.engine.events.next_index
    assert "Block tables" in page.shown() and "KV block pool" not in page.shown()


def test_only_the_widths_that_show_a_panel_draw_it():
    page = Page()
    page.tick(93)
    wide = [p for p in page.screen.panels if p.widths == frozenset({"wide"})]
    assert wide and all(p.reader.next_index == 0 for p in wide)
    page.screen._received([1.5, "width", "wide"])
    page.tick()
    assert all(p.reader.next_index == page.engine.events.next_index for p in wide)


def test_a_message_that_arrives_twice_counts_once():
    page = Page()
    page.screen._received([5.0, "do", "toggle"])
    page.screen._received([5.0, "do", "toggle"])
    page.screen._received([6.0, "do", "toggle"])
    assert page.messages == [("do", "toggle")] * 2


def test_a_fast_engine_does_not_make_a_tick_dearer():
    page = Page()
    page.tick(30)
    page.tick(1, 0.1)
    read = page.engine.events.next_index
    for number in range(5000):
        page.engine.log(EventKind.ALLOCATED, request_id=40, block_id=1 + number % 100)
    tick = Tick(page.engine, None, page.slots)
    frame, next_index = tick.frame(read)
    assert (len(frame.events), frame.lost, next_index) == (1000, 4000, page.engine.events.next_index)
    assert len(tick.frame(read, 20_000)[0].events) == 5000
    page.tick(1, 0.1)
    assert "requests finished" in page.shown()


def test_a_browser_that_paints_slowly_is_sent_fewer_ticks_but_answered_at_once():
    page = Page()
    page.tick()
    page.screen._received([1.0, "period", 0.7])
    assert not page.screen.due(page.now + 0.6) and page.screen.due(page.now + 0.7)
    page.screen.hurry()
    assert page.screen.due(page.now + 0.1)
    page.screen._received([2.0, "period", 1e9])
    assert page.screen.period == 2.0, "never so slow that the page looks stale"


def test_a_selection_is_said_in_every_part():
    page = Page()
    page.tick(93)
    page.choices.selection = Selection("request", 6)
    page.tick()
    html = page.shown()
    assert "Request 6 is highlighted in every view. Clear" in html
    assert re.search(r'class="row on" data-r="6"', html)
    assert "First token" in html
    page.choices.selection = Selection("block", 1)
    page.tick()
    html = page.shown()
    assert "Block 1: 16 of 16 slots written." in html and html.count('title="slot ') == 16
    page.choices.selection = Selection("block", 10_000)
    page.tick()
    assert "The pool has blocks 0 to 127." in page.shown()


def test_tables_replace_drawings_and_carry_scopes():
    page = Page()
    page.tick(93)
    page.choices.all_tables = True
    page.tick()
    html = page.shown()
    assert html.count('<table class="tw">') == 4  # pool, requests, timeline, output
    assert '<th scope="col">Owner</th>' in html
    page.choices.all_tables = False
    page.choices.tables = {"requests"}
    page.tick()
    assert page.shown().count('<table class="tw">') == 1


def test_the_theme_and_the_room_change_in_place():
    page = Page()
    page.tick(93)
    models = {m.id for m in page.screen.root.select({})}
    page.choices.dark = page.choices.room = True
    page.tick()
    assert {m.id for m in page.screen.root.select({})} == models
    css = page.screen._sheets["page"].css
    assert DARK.bg in css and LIGHT.bg not in css
    assert "min-width:1125px" in page.screen._sheets["watch"].css  # 900 at room size


def test_hairlines_stay_and_lengths_grow():
    assert stylesheet.scaled("a{border:1px solid;padding:4px 10.5px;color:#123px}", 1.25) == (
        "a{border:1px solid;padding:5px 13.12px;color:#123px}"
    )


def test_a_view_alone_is_a_page_of_its_own():
    page = Page(only="block_map")
    page.tick(93)
    assert [p.name for p in page.screen.panels] == ["block_map"]
    assert "KV block pool" in page.shown() and "Submit" not in page.shown()


@pytest.mark.parametrize("name", DRAWN)
def test_every_drawn_view_stands_alone_and_has_a_text_twin(name):
    page = Page(only=name)
    page.tick(60)
    page.tick(1)
    view = page.screen.panels[0].view
    assert view.title in page.shown() and page.screen.view(name) is view and all(view.sources.values())
    page.choices.tables = {name}
    page.tick(1)
    assert '<table class="tw">' in page.shown() and view.table()[0][0] in page.shown()


def test_a_view_that_failed_says_why_and_a_closed_engine_says_so():
    page = Page()
    page.status = Status(error="A view failed: boom.", traceback="Traceback …\nZeroDivisionError")
    page.tick(30)
    assert "A view failed: boom." in page.shown() and "ZeroDivisionError" not in page.shown()
    page.choices.trace_open = True
    page.tick()
    assert "ZeroDivisionError" in page.shown()
    page.engine.state = "stopped"
    page.tick()
    assert "The engine is closed." in page.shown()
    assert 'data-do="toggle" title="Space" disabled' in page.shown()


def test_the_saved_copy_has_everything_and_needs_nothing():
    page = Page(twin="kvscope-1")
    page.tick(93, everything=True)
    tick = Tick(page.engine, None, page.slots)
    html = page.screen.saved_copy(tick)
    for title in ("KV block pool", "Block tables", "Throughput", "Timeline", "Requests", "Event log", "Newest output"):
        assert f">{title}</div>" in html, title
    assert "saved copy of step 93" in html and "<svg" in html and 'data-kvscope-twin="kvscope-1"' in html
    for foreign in ("<script", "http://", "https://cdn", "var(--", "<h4"):
        assert foreign not in html.replace("http://www.w3.org", ""), foreign
    assert "&lt;b&gt;text of" in html


def test_a_panel_without_anything_to_draw_says_so_and_shows_no_bare_axis():
    page = Page()
    for tab, names in (("watch", ["timeline"]), ("explain", ["block_tables"]), ("measure", ["throughput", "memory"])):
        page.choices.tab = tab
        page.tick(0)
        views = [page.screen.view(name) for name in names]
        assert not any(view.root.visible for view in views)
        assert all(view.summary() in page.shown() for view in views)
        assert all(re.search("yet|No sequence", view.summary()) for view in views)
    page.tick(40)
    assert all(view.root.visible for view in views)
    page.choices.all_tables = True
    page.tick()
    assert not any(view.root.visible for view in views)


def test_a_page_that_opens_on_a_paused_engine_tells_the_newest_step():
    engine, line = Engine(), StoryLine()
    for _ in range(108):
        engine.step()
    engine.state = "paused"
    events, _, _ = engine.events.since(0)
    quiet = [e for e in events if e.step < 108] + [Event(10**6, 108, 0.0, EventKind.STEP, numbers={"decode_tokens": 3})]
    line.update(Frame(engine.snapshot(), quiet))
    assert line.text.startswith("Step 108 computed 3 tokens")


def test_a_request_that_arrives_after_the_snapshot_has_not_finished():
    engine, view = Engine(), Requests()
    for _ in range(20):
        engine.step()
    snapshot = engine.snapshot()
    count = Requests()
    count.update(Frame(snapshot))
    view.update(Frame(snapshot, [Event(10**6, 20, 0.0, EventKind.SUBMITTED, request_id=99)]))
    assert view.num_finished == count.num_finished


def test_the_log_says_what_it_has_nothing_of():
    page = Page()
    page.choices.tab = "explain"
    page.tick(0)
    assert "No event yet." in page.shown()
    page.choices.log_filter, page.choices.selection = "copied", Selection("request", 1)
    page.tick(3)
    assert "No event of the kind “Copied” of request 1 yet." in page.shown()


def test_everything_that_can_be_clicked_has_somebody_who_obeys():
    page = Page()
    page.tick(93)
    page.choices.tab = "explain"
    page.choices.selection = Selection("request", 3)
    page.tick()
    html = "\n".join(page.texts())
    actions = set(re.findall(r'data-do="(\w+)"', html))
    assert {"toggle", "step", "clear", "tables", "room", "theme", "help", "reset"} <= actions
    sent = set(re.findall(r'send\("(\w+)"', JS))
    assert sent - {"resync", "width", "period", "pace"} <= Commands.kinds  # "pace" is of a comparison alone


@pytest.mark.parametrize("running", [True, False])
def test_the_story_is_kept_long_enough_to_be_read(running):
    engine, line, told = Engine(), StoryLine(), []
    engine.state = "running" if running else "paused"
    index, slots = 0, OwnerSlots()
    for number in range(120):
        engine.step()
        events, index, lost = engine.events.since(index)
        line.update(Frame(engine.snapshot(), events, lost, now=number * 0.1, slots=slots))
        told.append(line.text)
    changes = sum(a != b for a, b in itertools.pairwise(told))
    if running:
        assert changes <= 120 * 0.1 / HOLD_SECONDS + 1
    else:
        assert changes > 40, "paused, every step is told"
        last = max(e.step for e in engine.events.since(0)[0])
        assert any(e.step == last and e.kind is EventKind.STEP for e in engine.events.since(0)[0])
