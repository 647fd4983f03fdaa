"""Other engines in processes of their own: the protocol, what becomes of those that fail, and that sleepers sleep."""

import importlib
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest
from kvscope.engine import Engine
from kvscope.engine.bench import PEERS
from kvscope.engine.bench.contender import Arrival
from kvscope.engine.bench.peer_adapters.open_loop import open_loop
from kvscope.engine.bench.peer_process import ADAPTERS, PeerFailed, PeerProcess, Settings
from kvscope.engine.bench.trace import greedy
from test_bench import parsed

SETTINGS = Settings(
    model="folder",
    dtype="float32",
    quantization=None,
    threads=1,
    cache_tokens=10,
    cache_bytes=10,
    max_num_seqs=4,
    max_model_len=10,
    folder=".",
)
TOY = """
import os, sys, threading

class Peer:
    def __init__(self, **settings):
        self.about = f"a toy with {settings['threads']} thread, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
        print("loading: 100 %")  # as libraries do

    def generate(self, prompts, new_tokens):
        if new_tokens == 13:
            raise ValueError("13 tokens are bad luck")
        if new_tokens == 14:
            print("Segmentation fault", file=sys.stderr)
            os._exit(3)
        if new_tokens == 15:
            return [[1]] * len(prompts)
        if new_tokens == 16:
            threading.Event().wait()
        if new_tokens == 17:
            threading.Thread(target=spin, daemon=True).start()
        return [[prompt[0]] * new_tokens for prompt in prompts]

    def serve(self, jobs):
        return [[at + 0.01 * i for i in range(new)] for at, prompt, new in jobs]

def spin():
    while True:
        pass
"""


@pytest.fixture
def toy(tmp_path):
    """`toy(seconds=)` starts the toy peer under the real child."""
    shutil.copy(ADAPTERS / "child.py", tmp_path)
    (tmp_path / "toy_peer.py").write_text(TOY)
    started = []

    def start(**options):
        started.append(PeerProcess("toy", sys.executable, SETTINGS, script=tmp_path / "child.py", **options))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_a_peer_generates_and_serves_what_it_was_asked_for(toy):
    process = toy()
    assert process.about == "a toy with 1 thread, OMP_NUM_THREADS=1"
    made = process.generate([[4, 5], [6, 7]], 3)
    assert made.tokens == [[4, 4, 4], [6, 6, 6]] and made.seconds > 0
    assert process.serve([Arrival(0.0, [1], 2), Arrival(1.0, [1], 1)]) == [[0.0, 0.01], [1.0]]


@pytest.mark.parametrize(
    ("new_tokens", "sentence"),
    [
        (13, "toy could not generate: ValueError: 13 tokens are bad luck"),
        (14, "toy ended with status 3 while it should generate; its last words: Segmentation fault"),
        (15, "toy gave 2 tokens for 2 prompts where 30 for 2 were asked for, so a ratio would be false"),
    ],
)
def test_a_fault_of_a_peer_is_one_sentence(toy, new_tokens, sentence):
    process = toy()
    with pytest.raises(PeerFailed) as fault:
        process.generate([[4], [5]], new_tokens)
    assert str(fault.value) == sentence
    if new_tokens != 14:
        assert process.generate([[4]], 2).tokens == [[4, 4]]  # it is still there


def test_a_peer_that_gives_no_answer_is_ended(toy):
    process = toy(seconds=30)
    process._seconds = 0.2
    with pytest.raises(PeerFailed, match="toy should generate and gave no answer within 0 s, so it was ended"):
        process.generate([[4]], 16)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no way to stop a process")
def test_a_peer_that_is_not_its_turn_uses_no_cpu(toy):
    process = toy()
    process.generate([[4]], 17)  # leaves a thread that spins
    child = psutil.Process(process._process.pid)
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    before = child.cpu_times().user
    time.sleep(0.3)
    assert child.cpu_times().user == before
    assert process.generate([[5]], 1).tokens == [[5]]


def test_an_interpreter_that_is_none_and_a_package_that_is_not_there_are_sentences():
    with pytest.raises(PeerFailed, match="vllm could not be started with /no/python: No such file"):
        PeerProcess("vllm", "/no/python", SETTINGS)
    with pytest.raises(
        PeerFailed, match=r"openvino ended with status 1 while it should load.*No module named 'openvino'"
    ):
        PeerProcess("openvino", sys.executable, SETTINGS)


def test_an_answer_that_is_none_is_a_sentence(tmp_path):
    (tmp_path / "child.py").write_text("input(); print('Welcome to the shell!', flush=True); input()")
    with pytest.raises(PeerFailed, match="vllm should load and answered 'Welcome to the shell!', which is no JSON"):
        PeerProcess("vllm", sys.executable, SETTINGS, script=tmp_path / "child.py")


def test_a_peer_takes_part_once(tiny_folder, tmp_path):
    options, _ = parsed(tiny_folder, tmp_path, "peers", "--peer=vllm=/a/python", "--peer=vllm=/b/python")
    with pytest.raises(ValueError, match="peer='vllm' is given 2 times"):
        options.run(options)


def test_every_peer_has_its_adapter():
    assert {f"{name.replace('.', '_')}_peer.py" for name in PEERS} == {path.name for path in ADAPTERS.glob("*_peer.py")}


def test_an_engine_that_is_stepped_gets_each_job_at_its_time_and_its_tokens_have_theirs():
    running, seen = {}, []

    def submit(i, prompt, new_tokens):
        seen.append((i, prompt))
        running[i] = new_tokens

    def step():
        time.sleep(0.01)
        came = {}
        for i in list(running):
            running[i] -= 1
            came[i] = (1, running[i] == 0)
            if not running[i]:
                del running[i]
        return came

    times = open_loop([(0.0, [1], 3), (0.015, [2], 2), (0.3, [3], 1)], submit, step)
    assert seen == [(0, [1]), (1, [2]), (2, [3])] and [len(each) for each in times] == [3, 2, 1]
    assert times[0][0] < times[1][0] < times[1][1] < 0.3 <= times[2][0]


FAKE = """#!{python}
import json, sys
name = sys.argv[2]
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "load":
        answer = {{"about": f"a fake in {{request['dtype']}}"}}
    elif request["do"] == "serve":
        if name == "openvino":
            sys.exit("terminate called after throwing an instance of ov::Exception")
        answer = {{"times": [[at + 0.5 * (i + 1) for i in range(new)] for at, _, new in request["jobs"]]}}
    else:
        short = name == "llama.cpp"
        tokens = [[0] * (request["new_tokens"] - short) for _ in request["prompts"]]
        answer = {{"tokens": tokens, "seconds": 10.0 * request["new_tokens"]}}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="the fakes pose as interpreters, by their first line")
def test_those_who_fail_are_told_of_and_the_others_go_on(tiny_folder, tmp_path, capsys):
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    peers = [f"--peer={name}={fake}" for name in ("vllm", "openvino", "llama.cpp")]
    sizes = ["--batch", "2", "--prompt", "8", "--new", "3", "--prefill", "3x10", "--requests", "4", "--rate", "100"]
    lengths = ["--prompt-range", "4-12", "--new-range", "2-5", "--load", "decode", "prefill", "mixed"]
    options, file = parsed(tiny_folder, tmp_path, "peers", *peers, *sizes, *lengths)
    assert options.run(options) == 1  # somebody failed
    figures = file()
    rows = {(row["load"], row["engine"]): row for row in figures["rows"]}
    assert set(rows) == {("decode", "kvscope"), ("decode", "vllm"), ("decode", "openvino"), ("prefill", "kvscope"),
                         ("prefill", "vllm"), ("prefill", "openvino"), ("mixed", "kvscope"), ("mixed", "vllm")}  # fmt: skip
    assert rows["decode", "vllm"]["tok/s"] == pytest.approx(2 / 10.0)  # (30 − 10) / 2 seconds a step, two rows
    assert (
        rows["prefill", "vllm"]["tok/s"] == pytest.approx(3.0)
        and rows["prefill", "kvscope"]["first tokens as ours"] == "3 of 3"
    )
    assert rows["mixed", "vllm"]["ITL p99 ms"] == pytest.approx(500) and rows["mixed", "vllm"]["kvscope / it"] > 1
    assert figures["vllm"] == "a fake in float32"
    assert figures["openvino"].startswith(
        "a fake in float32; FAILED: openvino ended with status 1 while it should serve"
    )
    assert "FAILED: llama.cpp gave 0 tokens for 2 prompts where 2 for 2 were asked for" in figures["llama.cpp"]
    assert "| " in capsys.readouterr().out


def test_transformers_takes_part_in_a_process_of_its_own(tiny_folder, tmp_path):
    peers = [f"--peer=transformers={sys.executable}", "--load", "prefill", "mixed", "--prefill", "2x10"]
    sizes = ["--requests", "3", "--rate", "100", "--prompt-range", "4-12", "--new-range", "2-5", "--max-num-seqs", "3"]
    options, file = parsed(tiny_folder, tmp_path, "peers", *peers, *sizes)
    assert options.run(options) == 0
    rows = {(row["load"], row["engine"]): row for row in file()["rows"]}
    assert rows["prefill", "transformers"]["first tokens as ours"] == "2 of 2"
    assert rows["mixed", "transformers"]["ITL p99 ms"] > 0 and "continuous batching" in file()["transformers"]


@pytest.mark.filterwarnings("ignore:.*holds no tokenizer")
def test_what_llama_cpp_reads_is_the_same_model(tiny_folder, tmp_path, monkeypatch):
    """Written as GGUF and read back by our own loader: the same tokens, so names, types and the order of rotary pairs are right."""
    monkeypatch.syspath_prepend(ADAPTERS)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_: str(tmp_path / "cache"))
    path = importlib.import_module("llama_gguf").converted(Path(tiny_folder), "F32", tmp_path)
    prompts = [[5, 6, 7, 8], [9] * 20]
    texts = []
    for model in (tiny_folder, path):
        with Engine(str(model), dtype="float32", num_blocks=32) as engine:
            texts.append([output.outputs[0].token_ids for output in engine.generate(prompts, greedy(12))])
    assert texts[0] == texts[1]
