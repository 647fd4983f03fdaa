"""`Workbench.submit` and `ask` take what `Engine.submit` takes, and fields of params by name beside it."""

import pytest
from kvscope.engine import Engine, EventKind
from kvscope.workbench import Workbench

SHORT = {"max_tokens": 2, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine(tiny_folder):
    with Engine(
        str(tiny_folder), num_blocks=64, dtype="float32", scheduling_policy="priority", max_num_seqs=1
    ) as engine:
        yield engine


def test_priority_deadline_and_chat_options_reach_the_engine(engine):
    wb = Workbench(engine)
    try:
        engine.pause()
        later, sooner = wb.submit("hello", priority=2, **SHORT), wb.ask("hello", priority=1, **SHORT)
        late = wb.ask("hello", priority=3, deadline=1e-6, **SHORT)
        talk = wb.ask(["hello", "well"], continue_final_message=True, add_generation_prompt=False, **SHORT)
        first = engine.events.next_index
        engine.resume()
        assert late.result().outputs[0].stop_reason == "deadline"
        assert all(len(handle.result().outputs[0].token_ids) == 2 for handle in (later, sooner, talk))
        finished = [e.request_id for e in engine.events.since(first)[0] if e.kind is EventKind.FINISHED]
        assert finished.index(sooner.request_id) < finished.index(later.request_id)
        assert talk.result().prompt.endswith("well"), "the last message is left open"
        with pytest.raises(ValueError, match="tools= is for chat messages"):
            wb.submit("hello", tools=[], **SHORT)
        with pytest.raises(TypeError, match="no_such_option"):
            wb.ask("hello", no_such_option=1)
    finally:
        wb.close()
