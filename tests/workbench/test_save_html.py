"""A run as one HTML file: what it holds is what the screen shows, and nothing in it asks for a network."""

import base64
import gzip
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bokeh.document import Document
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscope.engine.breakpoint import NAMES
from kvscope.workbench import Workbench, filming, save_html
from kvscope.workbench.film import Strip
from kvscope.workbench.filming import _between
from kvscope.workbench.layout import Screen
from kvscope.workbench.recorder import Recording
from kvscope.workbench.selection import Choices
from kvscope.workbench.theme import OwnerSlots
from kvscope.workbench.tick import Tick
from kvscope.workbench.views.header import Status
from kvscope.workbench.workbench import _title

FIRST, LAST = 96, 100  # steps of the demo with copies, evictions and a preemption nearby


@pytest.fixture(scope="module")
def demo():
    return Recording.load("demo")


@pytest.fixture(scope="module")
def page(demo, tmp_path_factory):
    """The text of a file of a few steps."""
    path = tmp_path_factory.mktemp("html") / "run.html"
    assert Workbench.replay(demo).save_html(path, first=FIRST, last=LAST, theme="dark") == path
    assert [each.name for each in path.parent.iterdir()] == ["run.html"], "nothing half written is left"
    return path.read_text()


def run_of(page):
    return json.loads(gzip.decompress(base64.b64decode(re.search(r'id="kv-run">([^<]+)<', page)[1])))


def held(at, versions, moment):
    """The value of a strip at a moment, as the player finds it."""
    version = max(i for i, start in enumerate(at) if start <= moment)
    whole = max(i for i in range(version + 1) if len(versions[i]) == 1)
    value = versions[whole][0]
    for change in versions[whole + 1 : version + 1]:
        if len(change) == 3:
            before, after, middle = change
            value = value[:before] + middle + value[len(value) - after :]
            continue
        drop, keep, changed, tail = change
        value = value[drop : drop + keep] + tail
        for row, new in zip(changed[::2], changed[1::2], strict=True):
            value[row] = new
    return value


columns = st.lists(
    st.one_of(st.lists(st.integers(0, 3), max_size=8), st.text("ab\U0001f600", max_size=12)), min_size=1, max_size=50
)


@settings(max_examples=40, deadline=None)
@given(columns, st.data())
def test_a_strip_gives_back_every_version(values, data):
    strip, moment, expected = Strip(), 0, {}
    for value in values:
        strip.add(moment, value)
        expected[moment] = value
        moment += data.draw(st.integers(1, 3))
    for at, value in expected.items():
        assert held(strip.at, strip.versions, at) == value


def test_a_column_that_grows_or_rolls_over_is_kept_as_what_is_new():
    strip = Strip()
    strip.add(0, list(range(600)))
    strip.add(1, list(range(2, 602)))
    strip.add(2, [*range(2, 300), -1, *range(301, 602)])
    assert strip.versions[1:] == [[2, 598, [], [600, 601]], [0, 600, [298, -1], []]]


def test_a_text_is_kept_as_what_is_new():
    strip = Strip()
    for moment, text in enumerate(
        ("idle for 9 steps", "idle for 10 steps", "idle for 10 steps, and more", "\U0001f600", "\U0001f601")
    ):
        strip.add(moment, text)
    assert strip.versions[1:] == [[9, 6, "10"], [17, 0, ", and more"], ["\U0001f600"], ["\U0001f601"]]


@pytest.mark.parametrize(("theme", "tables"), [("light", False), ("dark", True)])
def test_the_film_is_what_a_screen_shows_that_goes_there_at_once(demo, page, theme, tables):
    """Every property of every model at one moment, drawn by a screen that was in none of the moments before."""
    run, moment = run_of(page), 3
    shown = by_kind(run["document"])
    picks = {"dark": str(theme == "dark").lower(), "tables": str(tables).lower(), "filter": "all", "label": "owner"}
    picks |= {"tab": "watch", "playing": "false", "speed": ""}
    where = {model: attributes for _, model, attributes in _models(run["document"])}
    for model, attr, column, axes, strips in run["cells"]:
        value = held(*strips["|".join(picks.get(axis, picks["tables"]) for axis in axes)], moment)
        if column is None:
            where[model][attr] = value
        else:
            entries = where[model]["data"]["entries"]
            entries[[name for name, _ in entries].index(column)][1] = value

    screen = Screen(Choices(dark=theme == "dark", all_tables=tables), lambda *message: None)
    screen.panels = [panel for panel in screen.panels if panel.name != "host"]
    for panel in screen.panels:
        if panel.name == "event_log":
            panel.view.names_readers, panel.view.shown = True, filming._LINES
    document = Document()
    document.add_root(screen.root)
    status = Status(at=run["steps"][moment], newest=LAST, engine="", file=_title(demo), closed=True, has_parts=False)
    track = SimpleNamespace(series=_between(demo.series, FIRST, LAST))
    slots = OwnerSlots()
    for step in run["steps"][:moment]:
        Tick(demo.at(step), None, slots).frame(0)  # hues are given as requests arrive
    screen.update(Tick(demo.at(run["steps"][moment]), None, slots, recording=track), status, everything=True)
    screen.header.foot.text = next(div["text"] for div in shown["Div"] if 'class="foot"' in div.get("text", ""))
    fresh = by_kind(json.loads(json.dumps(document.to_json(deferred=False))))
    assert shown.keys() - fresh.keys() == {"CustomJS"}
    compared = 0
    for kind in fresh.keys() - {"InlineStyleSheet", "Column"}:
        for ours, theirs in zip(shown[kind], fresh[kind], strict=True):
            theirs = dict(columns_of(theirs))
            for name, value in columns_of(ours):
                if (
                    name in theirs
                ):  # else a table that is not shown, which the film has and a fresh screen has not drawn
                    assert value == theirs[name], f"{kind}.{name}"
            compared += 1
    assert compared > 500


def columns_of(attributes):
    """(name, value) of all properties; of a source its rows, in any order."""
    said = plain(attributes)
    entries = said.pop("data", {}).get("entries", ())
    yield "columns", [name for name, _ in entries]
    yield "rows", sorted(repr(row) for row in zip(*(column for _, column in entries), strict=True))
    yield from said.items()


def by_kind(document):
    """The attributes of all models of a document by their type, in the order in which they were made."""
    found = {}
    for name, _, attributes in sorted(_models(document), key=lambda each: int(each[1][1:])):
        found.setdefault(name, []).append(attributes)
    return found


def _models(part):
    if isinstance(part, dict):
        if part.get("type") == "object" and "id" in part:
            yield part["name"], part["id"], part.setdefault("attributes", {})
        part = list(part.values())
    if isinstance(part, list | tuple):
        for inner in part:
            yield from _models(inner)


_BESIDE = ("stylesheets", "js_event_callbacks", "subscribed_events", "tags")


def plain(part):
    """Without other models, without what a file adds to every part, and without the commonest defaults."""
    if isinstance(part, dict):
        if "id" in part:
            return None
        said = {key: plain(value) for key, value in part.items() if key not in _BESIDE}
        return {key: value for key, value in said.items() if value not in (True, [], None, "")}
    return [plain(inner) for inner in part] if isinstance(part, list | tuple) else part


def test_it_needs_nothing_from_elsewhere(page):
    beside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.S)
    assert not re.search(r" src=|<link[^>]* href=\"(?!data:)|@import|url\((?!#)", beside)
    assert page.count("<script") == page.count("</script>") == 3, "BokehJS, the film, the player"
    assert len(page) < 3e6, "most of it is BokehJS"


def test_it_says_what_it_is_where_scripts_are_blocked(page):
    text = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert f"saved copy of step {LAST}" in text and "This is a recording: nothing runs here." in text
    assert "KV block pool" in text and "<svg" in text and "Run this cell again" not in text


def test_the_film_of_a_run(page, demo):
    run = run_of(page)
    assert run["steps"] == list(range(FIRST, LAST + 1)) and run["dark"] is True
    text = json.dumps(run["document"])
    assert ">REPLAY<" in text and "LIVE" not in text and "data-send" in text
    for kind, moments in run["events"].items():
        there = demo.steps_with(*NAMES[kind][1])
        assert [run["steps"][moment] for moment in moments] == [s for s in there.tolist() if FIRST <= s <= LAST]
    assert '"attributes"' not in json.dumps(run["cells"]), "a cell is a property, and not what stands under it"
    axes = {axis for *_, axes, _ in run["cells"] for axis in axes}
    assert {"dark", "playing", "speed", "tab", "tables", "filter", "label", "table:block_map", "table:timeline"} <= axes
    positions = next(
        strips for *_, axes, strips in run["cells"] if axes == ["playing"] and "step <b>96" in strips["false"][1][0][0]
    )
    for moment, step in enumerate(run["steps"]):
        assert f"step <b>{step}</b> of {LAST}" in held(*positions["false"], moment)
        assert "▶ Replay" in held(*positions["true"], moment)


def test_a_long_recording_is_sampled_and_says_so(demo, monkeypatch):
    monkeypatch.setattr(save_html, "MOST_MOMENTS", 5)
    steps = save_html._steps(demo, 10, 50)
    assert steps == [10, 20, 30, 40, 50]


def test_bad_options_are_a_sentence(demo, tmp_path):
    wb = Workbench.replay(demo)
    out = tmp_path / "run.html"
    for options, words in (
        ({"first": -1}, f"first=-1: must be a recorded step, 0 to {demo.last_step}"),
        ({"last": 900}, f"last=900: must be a recorded step, 0 to {demo.last_step}"),
        ({"last": 1.5}, "last=1.5: must be"),
        ({"first": 9, "last": 3}, "first=9: must not be after last=3"),
        ({"theme": "blue"}, "theme='blue': must be one of light, dark"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            wb.save_html(out, **options)
    with pytest.raises(ValueError, match="cannot be written, because there is no folder"):
        wb.save_html(tmp_path / "none" / "run.html")
    with pytest.raises(ValueError, match="cannot be written, because it is a folder"):
        wb.save_html(tmp_path)
    assert not out.exists()


def test_it_needs_no_torch(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvscope.workbench import Workbench\n"
        f"Workbench.replay('demo').save_html({str(tmp_path / 'run.html')!r}, first=40, last=41)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.html").stat().st_size > 1e6


@pytest.mark.full
def test_a_run_of_300_steps_stays_below_10_mb(demo, tmp_path):
    path = Workbench.replay(demo).save_html(tmp_path / "run.html")
    assert demo.last_step >= 280
    assert path.stat().st_size < 10e6
