"""The command line: what it prints, and that a mistake is one sentence and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvscope.workbench.cli import main


def test_doctor_says_what_works_and_what_to_do_about_the_rest(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "Numba threads through omp" in printed and "default model" in printed
    for part in printed.strip().split("\n\n")[2:]:
        assert all(line[:3] in ("ok ", "-- ", "!! ") for line in part.splitlines()[1:])


def test_a_mistake_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["lab", str(tmp_path / "file")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvscope: folder=") and error.count("\n") == 1


@pytest.mark.parametrize("command", ["lab", "app", "doctor", "model", "bench"])
def test_help_imports_nothing_heavy(command):
    script = (
        "import sys; from kvscope.workbench.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'panel', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["lab"], "Open the notebooks in JupyterLab."),
        (["model", "path"], "Print the folder of a model, fetching it if need be."),
        (["bench", "plot"], "Draw the JSON files of benchmarks, each into an .svg beside it."),
    ],
)
def test_the_help_of_a_command_says_what_the_command_does(capsys, command, says):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--new", "1"], "argument --new: '1' must be a whole number of at least 2"),
        (["latency", "--repeats", "0"], "argument --repeats: '0' must be a whole number of at least 1"),
        (["latency", "--batch", "4", "-3"], "argument"),
        (["throughput", "--requests", "many"], "argument --requests: 'many' must be a whole number of at least 1"),
        (["throughput", "--max-num-seqs", "0"], "argument --max-num-seqs: '0' must be a whole number of at least 1"),
        (["latency", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_a_number_that_no_benchmark_can_use_is_one_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert words in capsys.readouterr().err.splitlines()[-1]
