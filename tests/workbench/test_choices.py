"""What a person chooses: the selection, the form, and the messages of the page."""

import pytest
from kvscope.workbench.asking import params_of
from kvscope.workbench.controls import Commands, form_html, read_form, traffic_html
from kvscope.workbench.scenarios import SCENARIOS, scenario
from kvscope.workbench.selection import Choices, parse
from kvscope.workbench.views.base import Selection


@pytest.mark.parametrize(
    ("target", "block", "expected"),
    [
        (3, None, Selection("request", 3)),
        ("3", None, Selection("request", 3)),
        ("12b", None, Selection("request", 12)),
        (None, 41, Selection("block", 41)),
        (None, None, None),
        (Selection("block", 7, 2), None, Selection("block", 7, 2)),
    ],
)
def test_what_select_understands(target, block, expected):
    assert parse(target, block=block) == expected


@pytest.mark.parametrize(
    ("target", "block", "says"),
    [
        ("b", None, "request id"),
        (True, None, "request id"),
        (3, 4, "not both"),
        (None, -1, "0 or more"),
        ("", None, "id"),
    ],
)
def test_what_select_refuses(target, block, says):
    with pytest.raises(ValueError, match=says):
        parse(target, block=block)


def test_choosing_again_drops_the_selection_and_moving_goes_around():
    choices = Choices()
    choices.toggle(Selection("request", 3))
    choices.toggle(Selection("request", 3))
    assert choices.selection is None
    for expected in (5, 6, 9, 5):
        choices.move([5, 6, 9], 1)
        assert choices.selection == Selection("request", expected)
    choices.move([5, 6, 9], -1)
    assert choices.selection.id == 9
    choices.move([], 1)
    assert choices.selection.id == 9


def test_the_form_is_read_field_by_field():
    prompt, options = read_form({"prompt": "hi", "n": "2", "temperature": "0.5", "seed": "", "max_tokens": " 7 "})
    assert (prompt, options) == ("hi", {"n": 2, "temperature": 0.5, "max_tokens": 7})


@pytest.mark.parametrize(
    ("values", "says"),
    [({"prompt": " "}, "empty"), ({"prompt": "x", "n": "two"}, "Samples n='two': must be a whole number")],
)
def test_a_bad_form_is_told_in_a_sentence(values, says):
    with pytest.raises(ValueError, match=says):
        read_form(values)


def test_the_form_offers_every_scenario_and_cannot_leave_the_page():
    html = form_html()
    assert "<form" not in html
    assert all(f'value="{name}"' in html for name in SCENARIOS)


def test_a_beam_search_in_the_form_leaves_out_what_does_not_concern_it():
    values = {"prompt": "hi", "n": "1", "temperature": "0.8", "max_tokens": "9", "top_p": "1.0", "beam_width": "3"}
    prompt, options = read_form(values)
    assert (prompt, options) == ("hi", {"temperature": 0.8, "max_tokens": 9, "beam_width": 3})
    assert params_of(options).temperature == 0.8, "a field that a beam search has"


def test_traffic_is_started_stopped_and_changed_from_the_page(commands):
    workbench, obey = commands
    workbench.shape = "bursts"
    obey.run("traffic", {"rate": "2.4", "shape": "bursts", "mix": "chats"})
    assert workbench.calls == [("traffic", ("rate", 2.4), ("shape", "bursts"), ("mix", "chats"))]
    assert workbench.choices.note[0] == "ok" and "slider" in workbench.choices.note[1]
    obey.run("rate", 6.0)
    obey.run("do", "stop_traffic")
    assert workbench.calls[1:] == [("change_rate", 6.0), ("stop_traffic",)]
    assert "Stop traffic" in traffic_html("Traffic: …", True) and "Stop" not in traffic_html("Traffic, ended", False)
    assert traffic_html("", False) == ""


def test_an_unknown_scenario_lists_the_known_ones():
    with pytest.raises(ValueError, match="shared-prefix"):
        scenario("shared_prefix")


class FakeWorkbench:
    """Writes down what is called."""

    def __init__(self):
        self.choices, self.calls = Choices(), []
        self.engine = self.player = self
        self.state = "running"
        self.at, self.playing = None, False

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, *args, *options.items()))
            return self

        return call

    request_id = 4

    def ask(self, prompt, **options):
        if "max_tokens" in options and options["max_tokens"] < 1:
            raise ValueError("max_tokens=0: must be 1 or more, or None")
        self.calls.append(("ask", prompt, options))
        return self


@pytest.fixture
def commands():
    workbench = FakeWorkbench()
    return workbench, Commands(workbench)


def test_buttons_call_the_same_methods_as_a_cell(commands):
    workbench, obey = commands
    obey.run("do", "toggle")
    obey.run("do", "step")
    workbench.state = "paused"
    obey.run("do", "toggle")
    assert [name for name, *_ in workbench.calls] == ["pause", "pause", "step", "resume"]


def test_choices_follow_the_messages(commands):
    workbench, obey = commands
    for message in (
        ("tab", "explain"), ("table", "block_map"), ("filter", "evicted"), ("sample", 2.0), ("label", "age"),
        ("do", "tables"), ("do", "room"), ("do", "theme"), ("select", "block", 7.0),
    ):  # fmt: skip
        obey.run(*message)
    choices = workbench.choices
    assert (choices.tab, choices.tables, choices.log_filter, choices.label) == (
        "explain",
        {"block_map"},
        "evicted",
        "age",
    )
    assert choices.all_tables and choices.room and choices.dark
    assert choices.selection == Selection("block", 7)
    obey.run("hello", {"dark": False})
    assert choices.dark, "the button was pressed: the notebook's theme is not followed any more"


@pytest.mark.parametrize(
    "message", [("tab", "nowhere"), ("filter", "x"), ("do", "x"), ("__class__",), ("width", "wide")]
)
def test_what_the_page_may_not_say_changes_nothing(commands, message):
    workbench, obey = commands
    before = repr(workbench.choices)
    obey.run(*message)
    assert repr(workbench.choices) == before
    assert workbench.calls == []


def test_a_refusal_is_told_under_the_form(commands):
    workbench, obey = commands
    obey.run("submit", {"prompt": "hi", "max_tokens": "0"})
    assert workbench.choices.note == ("warn", "max_tokens=0: must be 1 or more, or None.")
    obey.run("submit", {"prompt": "hi", "max_tokens": "3"})
    assert workbench.choices.note == ("ok", "Request 4 was submitted.")
