"""`Workbench` on a real tiny engine: methods, displays, what closing leaves, and the widget's messages."""

import gc
import json
import threading
import time
import weakref

import pytest
from bokeh.protocol import Protocol
from kvscope.engine import Engine, SamplingParams
from kvscope.workbench import Workbench, handles, notebook
from kvscope.workbench import display as module


@pytest.fixture
def engine(tiny_folder):
    with Engine(str(tiny_folder), num_blocks=64, dtype="float32", num_threads=1) as engine:
        yield engine


class Outputs:
    """Stands for the notebook: the newest content of every output by its display id."""

    def __init__(self, monkeypatch):
        self.now, self.cell = {}, "cell-1"
        monkeypatch.setattr(notebook, "kernel_shell", lambda: self)
        monkeypatch.setattr(notebook, "current_cell", lambda: self.cell)
        monkeypatch.setattr("IPython.display.display", self.display)
        monkeypatch.setattr("IPython.display.update_display", self.display)
        monkeypatch.setattr(notebook, "PATIENCE", 0.0)

    def display(self, content, display_id=None):
        self.now[display_id] = getattr(content, "data", content)

    def of(self, ending):
        return [content for name, content in self.now.items() if name.endswith(ending)]

    def copies(self):
        return [c for c in self.now.values() if isinstance(c, str) and "saved copy of" in c]


@pytest.fixture
def outputs(monkeypatch):
    return Outputs(monkeypatch)


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def viewers():
    return [t for t in threading.enumerate() if t.name.startswith(("kvscope-viewer", "kvscope-handles"))]


def test_everything_on_the_page_is_a_method(engine):
    with Workbench(engine) as wb:
        wb.pause()
        handle = wb.submit("hello", max_tokens=3, ignore_eos=True)
        assert [out.step for out in wb.step(2)] == [1, 2]
        wb.select(handle.request_id)
        assert wb.views.requests.summary().startswith("1 in decode")
        assert "1" in wb.views.block_map.table()[1][0]
        wb.resume()
        assert handle.result().outputs[0].finish_reason == "length"
        many = wb.run("samples")
        assert many[0].prompt_text.startswith("<|im_start|>user\nWrite the first line"), "asked through the template"
        assert len(many) == 1 and many[0].params.n == 4
        many[0].cancel()
    assert engine.state == "running", "an engine that existed before stays open"


def test_bad_calls_say_what_is_wrong(engine):
    wb = Workbench(engine)
    with pytest.raises(TypeError, match="num_blocks"):
        Workbench(engine, num_blocks=3)
    with pytest.raises(TypeError, match="max_tokens"):
        wb.submit("x", SamplingParams(), max_tokens=3)
    with pytest.raises(ValueError, match="n=0"):
        wb.step(0)
    with pytest.raises(RuntimeError, match="pause"):
        wb.step()
    with pytest.raises(AttributeError, match="block_map"):
        _ = wb.views.nothing
    wb.close()
    assert wb.closed and wb.close() is None


def test_an_engine_made_here_is_closed_here(tiny_folder):
    wb = Workbench(str(tiny_folder), num_blocks=32, dtype="float32", num_threads=1)
    wb.close()
    assert wb.engine.state == "stopped"


def test_a_display_moves_and_closing_leaves_only_the_saved_copy(engine, outputs):
    wb = Workbench(engine)
    wb.show()
    assert len(outputs.of("-script")) == 1 and "Bokeh" in outputs.of("-script")[0]
    widget = outputs.of("-live")[0]
    sent = []
    widget.send = lambda content, buffers=None: sent.append(content)
    wb.submit("hello", max_tokens=30, ignore_eos=True).result()
    wait_for(lambda: any("step <b>30" in c["payload"] for c in sent))
    wait_for(lambda: "saved copy of step 30" in outputs.copies()[0])
    assert len(viewers()) == 1
    wb.close()
    assert viewers() == []
    assert outputs.of("-script") == [""] and outputs.of("-live") == [""]
    assert "saved copy of step 30" in outputs.copies()[0] and "Request 1" in outputs.copies()[0]
    assert engine.while_waiting == []


def test_a_slow_page_is_not_taken_for_an_engine_that_has_nothing_to_do(engine, outputs, monkeypatch):
    """A saved copy costs what fifty ticks do: made at every tick of a slow page, it would eat the share of all of them."""
    monkeypatch.setattr(module, "TWIN_SECONDS", 0.05)
    with Workbench(engine) as wb:
        wb.show()
        wb._screens[0].screen.period = 0.5
        made = []
        monkeypatch.setattr(wb, "_publish_twins", made.append)
        handle = wb.submit("hello", max_tokens=600, ignore_eos=True)
        wb.engine.steps_per_second = 300
        handle.result()
        assert made == []
        wait_for(lambda: made)


def test_several_displays_follow_one_selection_and_the_oldest_gives_way(engine, outputs):
    wb = Workbench(engine)
    for number in range(module.MAX_SCREENS + 1):
        outputs.cell = f"cell-{number}"
        wb.show("block_map" if number else "")
    assert outputs.of("-live").count("") == 1
    wb.select(block=3)
    screens = [shown.screen for shown in wb._screens]
    wait_for(lambda: all(s.panels[0].view.frame.selection is not None for s in screens))
    wb.close()


def test_a_cell_that_is_run_again_ends_what_it_showed(tiny_folder, outputs):
    first = Workbench(str(tiny_folder), num_blocks=32, dtype="float32", num_threads=1)
    first.show()
    second = Workbench(str(tiny_folder), num_blocks=32, dtype="float32", num_threads=1)
    second.show()
    assert first.closed and first.engine.state == "stopped"
    assert not second.closed
    assert len(viewers()) == 1
    second.close()


def test_a_forgotten_workbench_ends_its_thread(engine, outputs):
    wb = Workbench(engine)
    wb.show()
    thread, gone = wb._viewer.thread, weakref.ref(wb)
    del wb
    outputs.now.clear()
    wait_for(lambda: gc.collect() >= 0 and gone() is None)
    thread.join(5)
    assert not thread.is_alive()


def test_a_view_that_fails_is_told_and_ends_no_thread(engine, outputs):
    wb = Workbench(engine)
    wb.show()
    broken = wb._screens[0].screen.view("requests")
    broken.update = lambda frame: 1 / 0
    wb.submit("hello", max_tokens=3)
    wait_for(lambda: "A view failed: division by zero" in wb._screens[0].screen.header.banner.text)
    assert wb._viewer.thread.is_alive()
    wb.close()


def test_one_tick_is_one_message_and_says_what_bokeh_says(engine, outputs):
    wb = Workbench(engine)
    wb.show()
    wb._viewer.stop(wait=True)
    widget, sent = outputs.of("-live")[0], []
    widget.send = lambda content, buffers=None: sent.append(content["payload"])
    wb.pause()
    wb.submit("hello", max_tokens=9, ignore_eos=True)
    wb.step(2)
    wb._screens[0].screen.update(wb._tick_now(), wb._status())
    changes = list(widget._changes)
    expected = json.loads(Protocol().create("PATCH-DOC", changes).content_json)["events"]
    widget.flush()
    assert len(sent) == 3 and json.loads(sent[0])["msgtype"] == "PATCH-DOC"
    assert len(json.loads(sent[2])["events"]) == len(expected) > 3
    assert [e.get("attr") for e in json.loads(sent[2])["events"]] == [e.get("attr") for e in expected]
    widget.flush()
    assert len(sent) == 3, "nothing new, nothing sent"
    wb.close()


def test_the_page_cannot_undo_what_it_was_sent(engine, outputs):
    wb = Workbench(engine)
    wb.show()
    widget, screen = outputs.of("-live")[0], wb._screens[0].screen
    before = list(screen.pulse.tags)
    echo = {
        "event": "jsevent",
        "kind": "ModelChanged",
        "model": {"id": screen.pulse.id},
        "attr": "tags",
        "new": [0, 1, "x"],
    }
    widget._sync_model(widget, echo, [])
    assert screen.pulse.tags[0] >= before[0] and screen.pulse.tags[2] == "open"
    asked = {"event": "jsevent", "kind": "ModelChanged", "model": {"id": screen.bus.id}, "attr": "tags"}
    widget._sync_model(widget, asked | {"new": [1.0, "tab", "explain"]}, [])
    wait_for(lambda: wb.choices.tab == "explain")
    old = widget.render_bundle
    widget._sync_model(widget, asked | {"new": [2.0, "resync"]}, [])
    wait_for(lambda: widget.render_bundle is not old)
    wb.close()


def test_a_handle_is_a_widget_until_its_request_is_over(engine, outputs):
    handle = engine.submit("<i>hello</i>", SamplingParams(max_tokens=400, ignore_eos=True))
    handles.show(handle)
    live = next(c for c in outputs.now.values() if not isinstance(c, str))
    assert live.children[1].children[1].description == "Cancel"
    live.children[1].children[1].click()
    wait_for(lambda: not viewers())
    assert handle.status == "cancelled"
    shown = [c for c in outputs.now.values() if isinstance(c, str)]
    assert len(shown) == 2 and "" in shown, "the widget and its folded copy have given way to plain HTML"
    assert "cancelled" in max(shown, key=len)
    handles.show(handle)
    assert "cancelled" in outputs.now[None]


def test_what_came_after_the_snapshot_of_a_tick_waits_for_the_next(engine):
    engine.pause()
    with Workbench(engine) as wb:
        tick = wb._tick_now()
        assert tick.snapshot.requests == ()
        wb.submit("hello", max_tokens=4)  # between two steps: its event is of the same step
        events = tick.frame(0)[0].events
        assert [event for event in events if event.request_id == 1] == []
        frame, _ = wb._tick_now().frame(tick.frame(0)[1])
        assert [event.request_id for event in frame.events if event.kind == "submitted"] == [1]
