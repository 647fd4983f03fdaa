"""A workbench and its recording: looking back while the engine goes on, files, replays without an engine and without torch."""

import subprocess
import sys
from collections import Counter

import pytest
from kvscope.engine import Engine, SamplingParams
from kvscope.engine.recording.recording import DEMO
from kvscope.workbench import Workbench, cli
from kvscope.workbench.recorder import Recording, Replay
from snapshots import assert_same

LONG = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def engine(tiny_folder):
    with Engine(str(tiny_folder), num_blocks=64, dtype="float32", kernels="reference", num_threads=1) as engine:
        yield engine


@pytest.fixture
def saved(engine, tmp_path):
    """(path, step -> live snapshot) of a short run of two requests."""
    live = {}
    with Workbench(engine) as wb:
        wb.pause()
        wb.submit("the cat sat on the mat", **LONG)
        wb.submit("a dog", n=2, logprobs=2, **LONG)
        while engine.snapshot().requests:
            live[engine.snapshot().step] = engine.snapshot()
            wb.step()
        return wb.save(tmp_path / "run.kvscope"), live


def test_one_looks_back_while_the_engine_goes_on(engine):
    with Workbench(engine) as wb:
        wb.pause()
        handle, live = wb.submit("the cat sat on the mat", **LONG), {}
        for step in range(1, 7):
            wb.step()
            live[step] = engine.snapshot()
        assert wb.looking_at is None and wb.back() == 5 and wb.back(2) == 3
        assert wb.looking_at == 3 and not wb.is_replay
        assert_same(wb.state_at(3), live[3])
        assert wb.views.requests.refresh().frame.snapshot.step == 3
        wb.resume()
        handle.result()
        assert wb.views.requests.refresh().frame.snapshot.step == 3, "one still looks at the past"
        assert wb.state_at(engine.snapshot().step).requests == ()
        wb.now()
        assert wb.looking_at is None and wb.views.requests.refresh().frame.snapshot.step == engine.snapshot().step
        with pytest.raises(ValueError, match="recorded are steps 0 to"):
            wb.goto(10_000)


def test_workbenches_on_one_engine_share_what_is_recorded_and_a_closed_one_keeps_it(engine):
    first, second = Workbench(engine), Workbench(engine)
    engine.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    first.close()
    engine.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    assert first.recording.last_step == 4 and second.state_at(8).step == 8
    with pytest.raises(ValueError, match="recorded are steps 0 to 4"):
        first.state_at(8)
    second.close()
    assert engine._driver._tape() is None, "nobody holds the tape any more"


def test_a_workbench_on_a_closed_engine_says_that_nothing_was_recorded(engine):
    engine.close()
    with Workbench(engine) as wb, pytest.raises(RuntimeError, match="nothing was recorded"):
        _ = wb.recording


def test_a_replay_shows_every_step_and_works_at_none(saved):
    path, live = saved
    with Workbench.replay(path) as wb:
        assert wb.is_replay and wb.looking_at == wb.recording.last_step == max(live) + 1
        for step in (0, 1, 17, max(live)):
            wb.goto(step)
            assert_same(wb.state_at(step), live[step])
            frame = wb.views.block_map.refresh().frame
            assert frame.snapshot.step == step and frame.info.num_blocks == 64
        screen = wb._make_screen(lambda *message: None)
        screen.update(wb._tick_now(), wb._status())
        assert ">REPLAY<" in screen.header.head.text and "Reset cache" not in screen.header.head.text
        assert "Request 2" in wb.views.output.summary()
        assert any("arrived" in line for line in wb.explain())
        for act in (
            lambda: wb.submit("x"),
            wb.pause,
            wb.resume,
            wb.step,
            lambda: wb.run("crowd"),
            wb.engine.generate,
            wb.traffic,
        ):
            with pytest.raises(RuntimeError, match="needs an engine, and this is a recording of one"):
                act()
        assert wb.back(3) == max(live) - 3
        wb.now()
        assert wb.looking_at == max(live) + 1
        with pytest.raises(AttributeError, match="nothing"):
            _ = wb.engine.nothing


def test_a_replay_can_be_saved_again(saved, tmp_path):
    path, live = saved
    with Workbench.replay(path) as wb:
        again = Recording.load(wb.save(tmp_path / "again.kvscope"))
    assert_same(again.state_at(9), live[9])
    assert again.outputs_at(9) == Recording.load(path).outputs_at(9)


def test_the_demo_has_what_it_is_for():
    """Made by python -m kvscope.engine.recording.demo."""
    recording = Recording.load("demo")
    assert DEMO.stat().st_size < 300_000 and 250 <= recording.last_step <= 330
    kinds = Counter(event.kind for event in recording.events_until(recording.last_step))
    assert kinds["submitted"] == 16 and kinds["finished"] >= 16
    assert min(kinds[kind] for kind in ("cache_hit", "forked", "copied", "evicted", "preempted", "resumed")) >= 5
    outputs = recording.outputs_at(recording.last_step)
    assert all(output.finished and output.outputs[0].text for output in outputs.values())
    assert outputs[1].outputs[0].logprobs and recording.info.model_name.startswith("SmolLM2")
    assert recording.state_at(recording.last_step).requests == ()
    assert sum(recording.series.preemptions) == kinds["preempted"]


_WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numba", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
from kvscope.workbench import Workbench
wb = Workbench.replay(sys.argv[1])
wb.goto(9)
print(wb.state_at(9).num_used_blocks, wb.views.block_map.summary(), wb.views.output.summary())
print(len(wb.explain()), wb.engine.decode_token(97), bool(wb.__panel__()))
wb.close()
"""


def test_it_replays_where_torch_is_not_installed(saved):
    path, live = saved
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{live[9].num_used_blocks} ") and "blocks are in use" in done.stdout
    assert done.stdout.splitlines()[1].endswith("True")


def test_the_command_shows_a_file_and_says_what_is_none(saved, monkeypatch, capsys, tmp_path):
    from kvscope.workbench import app

    shown = []
    monkeypatch.setattr(app, "serve", lambda engine, **options: shown.append((engine, options)))
    assert cli.main(["replay", str(saved[0]), "--port", "0", "--no-browser"]) == 0
    assert cli.main(["replay", "--no-browser"]) == 0
    assert [type(engine) for engine, _ in shown] == [Replay, Replay] and shown[0][1]["port"] == 0
    assert shown[1][0].recording.last_step == Recording.load("demo").last_step
    assert cli.main(["replay", str(tmp_path / "nowhere")]) == 1
    assert "there is no such file" in capsys.readouterr().err
