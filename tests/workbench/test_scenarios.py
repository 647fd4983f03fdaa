"""Scenarios on a real tiny engine: names, order, and turns that wait for the answers before them."""

import threading
import time

import pytest
from kvscope.engine import Engine
from kvscope.workbench import Workbench
from kvscope.workbench.scenarios import SCENARIOS, Scenario, ScenarioRun, Turn


@pytest.fixture(scope="module")
def engine(tiny_folder):
    with Engine(str(tiny_folder), num_blocks=256, dtype="float32", num_threads=1, max_num_batched_tokens=256) as engine:
        yield engine


def feeders():
    return [t for t in threading.enumerate() if t.name.startswith("kvscope-feeder")]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_a_title_a_sentence_and_questions_that_wait_for_earlier_ones(name):
    scenario = SCENARIOS[name]
    assert scenario.title and scenario.sentence.endswith(".") and scenario.turns
    assert all(0 <= n < i for i, turn in enumerate(scenario.turns) for n in turn.after)


def test_the_names_that_people_know_stay():
    assert {"one-chat", "samples", "shared-prefix", "crowd"} <= SCENARIOS.keys()


def test_a_question_waits_for_the_answer_and_sends_it_along(engine):
    turns = tuple(Turn(q, {"max_tokens": 5, "ignore_eos": True}, (i - 1,) if i else ()) for i, q in enumerate("abc"))
    with Workbench(engine) as wb:
        wb.pause()
        run = wb.run(Scenario("t", "s.", turns))
        assert len(run) == 1 and run.to_come == 2, "nothing is asked before the answer is there"
        wb.resume()
        first, second, third = run.wait(30)
        assert run.to_come == 0 and len(run) == 3
    assert second.prompt == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{first.outputs[0].text.strip()}<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert third.prompt.count("<|im_start|>user") == 3 and second.outputs[0].text.strip() in third.prompt
    assert first.metrics.finished <= second.metrics.arrival and second.metrics.finished <= third.metrics.arrival


def test_the_likeliest_of_several_answers_is_continued(engine):
    sampling = {"max_tokens": 4, "ignore_eos": True, "logprobs": 0, "temperature": 1.0, "seed": 3}
    turns = (*(Turn(q, sampling) for q in ("one", "two", "three")), Turn("last", {"max_tokens": 2}, (0, 1, 2)))
    run = ScenarioRun(Scenario("t", "s.", turns), engine)
    outputs = run.wait(30)
    best = max(outputs[:3], key=lambda o: o.outputs[0].cumulative_logprob)
    assert best.outputs[0].text.strip() in outputs[3].prompt and outputs[3].prompt.count("assistant") == 2


def test_a_sample_is_continued_by_its_number(engine):
    turns = (Turn("x", {"n": 3, "max_tokens": 6, "ignore_eos": True}), Turn("y", {"max_tokens": 2}, (0,), sample=2))
    first, second = ScenarioRun(Scenario("t", "s.", turns), engine).wait(30)
    assert first.outputs[2].text.strip() in second.prompt


def test_what_follows_a_cancelled_question_is_dropped_and_closing_ends_the_thread(engine):
    wb = Workbench(engine)
    wb.pause()
    run = wb.run("multi-turn")
    run[0].cancel()
    while not run[0].done:
        time.sleep(0.01)
    assert run.wait(10)[0].outputs[0].finish_reason == "cancelled" and run.to_come == 0 and len(run) == 1
    waiting = wb.run("multi-turn")
    assert feeders()
    wb.close()
    assert feeders() == [] and waiting.to_come == 3
    waiting[0].cancel()
    engine.resume()


def test_a_question_that_has_no_room_is_told_and_the_others_are_asked(engine, tiny_folder):
    with Workbench(str(tiny_folder), num_blocks=32, dtype="float32", num_threads=1) as wb:
        wb.pause()
        run = wb.run("long-prompt")
        assert len(run) == 5 and "a prompt of" in run.refusals[0]
        with pytest.raises(ValueError, match="tokens"):
            wb.run(Scenario("t", "s.", (Turn("x" * 2000),)))


@pytest.mark.parametrize("num_blocks", [32, 200])
def test_pressure_follows_the_pool(tiny_folder, num_blocks):
    with Engine(str(tiny_folder), num_blocks=num_blocks, dtype="float32", num_threads=1) as engine:
        run = ScenarioRun(SCENARIOS["memory-pressure"], engine)
        engine.pause()
        run.advance()
        asked = sum(len(handle.prompt_token_ids) + handle.params.max_tokens for handle in run)
        assert 1.2 < asked / (16 * (num_blocks - 1)) < 2.5 and not run.refusals


@pytest.mark.parametrize("name", ["few-shot", "multi-turn", "tree-of-thought", "beam-search"])
def test_scenarios_of_each_kind_are_served_to_their_end(engine, name):
    outputs = ScenarioRun(SCENARIOS[name], engine).wait(60)
    assert len(outputs) == len(SCENARIOS[name].turns) and all(output.finished for output in outputs)
    engine.check_integrity()
