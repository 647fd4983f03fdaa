"""Workshops on a real tiny engine: each idea is told in the state that it speaks of, and going back shows that state again."""

import pytest
from kvscope.engine import Engine
from kvscope.engine.snapshot import BlockState
from kvscope.workbench import Workbench
from kvscope.workbench.workshop import WORKSHOPS
from kvscope.workbench.workshop_html import workshop_html


@pytest.fixture
def wb(tiny_folder):
    options = {"num_blocks": 40, "dtype": "float32", "num_threads": 1, "watermark": 0.0}
    with Engine(str(tiny_folder), **options) as engine, Workbench(engine) as wb:
        yield wb


def walk(wb, name):
    """(idea, snapshot) of each, in order."""
    workshop = wb.workshop(name)
    for _ in WORKSHOPS[name]:
        assert workshop.wait(60) and not workshop.place.busy
        assert wb.choices.note[0] != "warn", wb.choices.note
        yield workshop, wb.engine.snapshot()
        workshop.next()
    assert workshop.number == len(WORKSHOPS[name]), "there is nothing behind the last"


def states(snapshot):
    return {BlockState(state) for state in snapshot.block_state[1:].tolist()}


def test_paging(wb):
    seen = list(walk(wb, "paging"))
    empty, prompt, grown, _, over = (snapshot for _, snapshot in seen)
    assert states(empty) == {BlockState.EMPTY} and wb.choices.room
    assert prompt.step == 1 and prompt.num_used_blocks == -(-prompt.requests[0].num_prompt_tokens // 16)
    assert grown.num_used_blocks == prompt.num_used_blocks + 1
    assert over.num_used_blocks == 0 and BlockState.CACHED in states(over)


def test_sharing(wb):
    forked, _, copied, later, ended = (snapshot for _, snapshot in walk(wb, "sharing"))
    assert BlockState.SHARED in states(forked) and forked.ref_count.max() == 4
    assert copied.step == forked.step + 1 and wb.engine.metrics()["kvscope:blocks_copied_total"] == 3
    assert len({int(r.block_tables[0][-1]) for r in later.requests}) == 4
    assert len(ended.requests) < 4


def test_prefix_cache(wb):
    first, cached, hit, _ = (snapshot for _, snapshot in walk(wb, "prefix-cache"))
    assert first.requests[0].num_cached_tokens == 0 and BlockState.CACHED in states(cached)
    assert hit.requests[-1].num_cached_tokens >= 64 and wb.choices.tab == "measure"


def test_preemption(wb):
    asked, preempted, resumed, _ = (snapshot for _, snapshot in walk(wb, "preemption"))
    assert len(asked.requests) == 16 and any(r.status == "preempted" for r in preempted.requests)
    assert wb.choices.selection is None and resumed.step > preempted.step


def test_one_goes_back_to_an_idea_as_it_was(wb):
    workshop = wb.workshop("sharing")
    for _ in range(2):
        assert workshop.wait(60)
        workshop.next()
    assert workshop.wait(60) and workshop.number == 3
    now = wb.engine.snapshot().step
    assert wb.looking_at is None and wb.choices.selection.kind == "block"
    workshop.previous()
    assert workshop.wait(60) and wb.looking_at == now - 1 and wb.choices.tab == "explain"
    workshop.next()
    assert workshop.wait(60) and wb.looking_at is None and wb.engine.snapshot().step == now
    wb._commands.run("do", "idea_previous")
    assert workshop.wait(60) and workshop.number == 2
    wb._commands.run("do", "idea_end")
    assert wb.current_workshop is None and not wb.choices.room and wb._status().idea is None


def test_what_cannot_be_told_is_said_and_blocks_nothing(wb):
    workshop = wb.workshop("sharing")
    assert workshop.wait(60)
    wb.engine.handles()[1].cancel()
    workshop.next()
    assert workshop.wait(60)
    workshop.next()
    assert workshop.wait(60) and wb.choices.note == ("warn", wb.choices.note[1])
    assert "could not go on" in wb.choices.note[1]
    with pytest.raises(ValueError, match="paging, sharing"):
        wb.workshop("cooking")


def test_the_page_has_the_sentence_and_its_buttons(wb):
    assert wb.workshop("paging").wait(60)
    html = workshop_html(wb._status().idea)
    assert "pool of equal blocks" in html and "1 of 5" in html and 'data-do="idea_next"' in html
    assert 'data-do="idea_previous" disabled' in html and workshop_html(None) == ""
    assert "on its way" in workshop_html(wb._status().idea._replace(busy=True))
