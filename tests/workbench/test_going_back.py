"""Time travel through the views: after a jump each shows what it showed when it was there live."""

import re

import pytest
from bokeh.models import Div
from fake_frames import FakeEngine
from fake_recording import FakeRecording
from kvscope.engine import Engine as RealEngine
from kvscope.engine import EventKind, SamplingParams
from kvscope.workbench import Workbench
from kvscope.workbench.layout import SETTLE_SECONDS, Screen
from kvscope.workbench.player import Player
from kvscope.workbench.selection import Choices
from kvscope.workbench.theme import OwnerSlots
from kvscope.workbench.tick import Tick
from kvscope.workbench.views.base import Selection
from kvscope.workbench.views.header import Status
from kvscope.workbench.views.timeline import Timeline

STEPS = 200
PLACES = (7, 60, 93, 131, 158, 199)
NOT_RECORDED = {"host"}  # what the machine does now


class Engine(FakeEngine):
    info = None

    def handles(self):
        return {}

    def decode_token(self, token_id):
        return f"<{token_id}>"


class Room:
    """A screen of a fake engine with its recording and player."""

    def __init__(self):
        self.engine, self.choices, self.slots = Engine(), Choices(), OwnerSlots()
        self.engine.state = "paused"
        self.recording = FakeRecording(self.engine)
        self.player = Player(self.engine, lambda: self.recording)
        self.screen = Screen(self.choices, lambda screen, *message: None)
        self.now = 100.0

    def live(self, steps=1):
        for _ in range(steps):
            self.engine.step()
            self.recording.record()
            self.tick(everything=self.engine.step_number in (*PLACES, STEPS))

    def tick(self, *, everything=True):
        self.now += SETTLE_SECONDS * 2
        tick = Tick(self.player.source(), self.choices.selection, self.slots, origin=self.player.origin,
                    recording=self.recording)  # fmt: skip
        tick.now = self.now
        status = Status(at=self.player.at, newest=self.recording.last_step, engine=self.engine.state)
        self.screen.update(tick, status, everything=everything)

    def shown(self):
        """Everything that the views hold, by view: columns of sources, sentences, tables, HTML."""
        return {
            f"{n} {panel.name}": state_of(panel.view)
            for n, panel in enumerate(self.screen.panels)
            if panel.name not in NOT_RECORDED
        } | {
            "story": self.screen.header.summary(),
            "numbers": self.screen.header.table(),
        }


def in_window(timeline, data):
    """Drawn shapes that end within the steps shown; what has left them is dropped at the next change."""
    start, end = timeline.figure.x_range.start + 8, next(c for c in ("x1", "xs", "x") if c in data)
    ends = [max(x for x in cell if x == x) if isinstance(cell, list) and cell else cell for cell in data[end]]
    rows = zip(*(data[c] for c in sorted(data)), strict=True)
    return sorted(repr(row) for row, last in zip(rows, ends, strict=True) if last and last >= start)


def state_of(view):
    """Rows of a source in any order: it depends on when each was made, and so do the empty ones in between."""
    held = {}
    for name, source in view.sources.items():
        columns = sorted(source.data)
        first = next((c for c in ("x", "x0", "left", "step") if c in columns), columns[0])
        rows = zip(*(source.data[c] for c in columns), strict=True)
        held[name] = sorted(repr(row) for row in rows if repr(row[columns.index(first)]) != "nan")
        if isinstance(view, Timeline) and name not in ("rows", "now", "why"):
            held[name] = in_window(view, source.data)
    html = view.root.text if isinstance(view.root, Div) else ""
    return held | {"summary": view.summary(), "table": view.table(), "html": html}


@pytest.fixture(scope="module")
def lived():
    """What each place showed live, and the room at its newest step."""
    room, shown = Room(), {}
    for step in range(1, STEPS + 1):
        room.live()
        if step in PLACES:
            shown[step] = room.shown()
    return room, shown


def differences(before, now):
    return [
        f"{name}/{part}"
        for name in before
        for part in (before[name] if isinstance(before[name], dict) else [""])
        if (before[name][part] if part else before[name]) != (now[name][part] if part else now[name])
    ]


def test_the_past_is_what_it_was(lived):
    room, shown = lived
    for step in (199, 60, 158, 7, 131, 93):  # backwards and forwards
        room.player.goto(step)
        room.tick()
        assert differences(shown[step], room.shown()) == [], step
        assert room.screen.header.source.data["step"][-1] >= STEPS - 2, "the track shows all that was recorded"
    room.player.now()
    room.tick()
    newest = room.shown()
    fresh = Room()
    fresh.live(STEPS)
    assert differences(fresh.shown(), newest) == []


def test_step_by_step_backwards_and_a_selection(lived):
    room, _ = lived
    room.choices.selection = Selection("request", 6)
    room.player.goto(100)
    room.tick()
    at_100 = room.shown()
    for _ in range(5):
        room.player.back()
        room.tick()
    assert room.player.at == 95
    room.player.forward(5)
    room.tick()
    assert differences(at_100, room.shown()) == []
    room.choices.selection = None


def test_of_a_request_that_is_not_there_yet_the_inspector_says_when_it_arrives(lived):
    room, _ = lived
    room.player.goto(5)
    for number, said in ((16, r'Request 16 arrives at <a href="#" data-step="(\d+)"'), (99, "Request 99 is not known")):
        room.choices.selection = Selection("request", number)
        room.tick()
        found = re.search(said, room.screen.view("output").root.text)
        assert found, said
        if number == 16:
            events = room.engine.events.since(0)[0]
            assert int(found[1]) == next(e.step for e in events if e.kind == "submitted" and e.request_id == 16)
    room.choices.selection = None


def test_the_page_says_where_one_looks(lived):
    room, _ = lived
    header = room.screen.header
    room.player.goto(93)
    room.tick()
    assert ">REPLAY<" in header.head.text and "step <b>93</b> of 200" in header.position.text
    assert re.search(
        r"You look at step 93; the newest is 200\..*The engine is paused\..*Go to the newest step", header.banner.text
    )
    assert room.screen.pulse.tags[3] == "past"
    assert list(header.scrubber.here.data["step"]) == [93]
    room.player.now()
    room.tick()
    assert ">LIVE<" in header.head.text and "Go to the newest step" not in header.banner.text
    assert "Reset cache" in header.head.text
    assert room.screen.pulse.tags[3] == "live" and list(header.scrubber.here.data["step"]) == [STEPS]


def test_the_engine_goes_on_and_only_the_head_is_redrawn():
    room = Room()
    room.live(40)
    room.engine.state = "running"
    room.player.goto(20)
    room.tick()
    drawn = room.shown()
    drawings = []
    for panel in room.screen.panels:
        panel.view.update = lambda frame, name=panel.name: drawings.append(name)
    for _ in range(10):
        room.engine.step()
        room.recording.record()
        room.now += 1.5 * SETTLE_SECONDS
        tick = Tick(room.player.source(), None, room.slots, recording=room.recording)
        tick.now = room.now
        assert room.screen.update(tick, Status(at=20, newest=room.recording.last_step))
    assert drawings == []
    assert "the newest is 50." in room.screen.header.banner.text
    assert differences(drawn, room.shown()) == []


def test_a_real_engine_with_its_own_recording(tiny_folder):
    """Prefix hits, forks, copies, preemptions and evictions on a real engine; places live, then by `goto`."""
    with RealEngine(str(tiny_folder), num_blocks=48, dtype="float32", num_threads=1) as engine, Workbench(engine) as wb:
        engine.pause()
        for i in range(9):
            prompt = "You are a careful teaching assistant. " * 3 + f"Question {i}: what is a page of it?"
            params = SamplingParams(
                max_tokens=60 + 10 * i, ignore_eos=True, n=1 + (i % 4 == 2), temperature=0.9, seed=i
            )
            engine.submit(prompt, params)
        screen = Screen(wb.choices, lambda screen, *message: None)

        def shown():
            screen.update(wb._tick_now(), wb._status(), everything=True)
            views = {
                f"{n} {p.name}": state_of(p.view) for n, p in enumerate(screen.panels) if p.name not in NOT_RECORDED
            }
            return views | {"story": screen.header.summary(), "numbers": screen.header.table()}

        live = {}
        for step in range(1, 151):
            wb.step()
            if step in (2, 19, 40, 75, 110, 150):
                live[step] = shown()
            else:
                screen.update(wb._tick_now(), wb._status())
        kinds = {event.kind for event in engine.events.since(0)[0]}
        assert {EventKind.PREEMPTED, EventKind.EVICTED, EventKind.COPIED, EventKind.CACHE_HIT} <= kinds
        for step in (40, 2, 110, 75, 19):
            wb.goto(step)
            assert differences(live[step], shown()) == [], step
        wb.now()
        assert differences(live[150], shown()) == []
