"""The wheel, as a user gets it: in a fresh environment, beside files whose names look like ours, and type-checked.

`make test` lends the fresh environment the dependencies of the one that runs the tests (a path file, so nothing of
ours comes along); `make test-full` installs them all anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PUBLIC_SURFACE = """
from kvscope import Engine, EngineConfig, SamplingParams, Workbench
from kvscope.engine import EngineSnapshot, Event, RequestHandle, RequestOutput, StepOutput


def use(engine: Engine, workbench: Workbench) -> str:
    handle: RequestHandle = engine.submit("hello", SamplingParams(max_tokens=4))
    output: RequestOutput = handle.result(timeout=1.0)
    snapshot: EngineSnapshot = engine.snapshot()
    step: StepOutput = engine.step()
    events, next_index, lost = engine.events.since(0)
    first: Event = events[0]
    config: EngineConfig = engine.config
    counters: dict[str, float] = engine.metrics()
    for piece in handle:
        print(piece.upper())
    workbench.submit("hello")
    return output.outputs[0].text + str(first.index + next_index + lost + step.step + snapshot.num_blocks) + config.model + str(counters)
"""


def run(*command, cwd=None, **options) -> str:
    """Run a command without this environment's Python settings; its output, or an assertion that shows it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the files that git knows or would add, so that a stray build folder cannot hide a mistake."""
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def fresh_python(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; dependencies come from this one through a path file."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    return python


def test_the_wheel_carries_every_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (
        ("facade", ""),
        ("engine", "engine/"),
        ("kernels", "kernels/"),
        ("workbench", "workbench/"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"kvscope/{package}{path.relative_to(ROOT / folder).as_posix()}" in names
        assert f"kvscope/{package}py.typed" in names
    assert {f"kvscope/notebooks/{p.name}" for p in (ROOT / "notebooks").glob("*.ipynb")} <= names
    assert not any(name.startswith(("tests/", "kvscope/tests/")) for name in names)


def test_it_runs_beside_files_that_are_named_like_its_parts(fresh_python, tmp_path):
    for name in ("engine.py", "workbench.py", "kernels.py"):
        (tmp_path / name).write_text("X = 1\n")
    (tmp_path / "kvscope").mkdir()  # a clone of the same name must not shadow the installed package
    script = (
        "import engine, workbench, kernels, kvscope, kvscope.engine.core, kvscope.workbench.workbench;"
        "from kvscope.kernels import ops; from transformers import AutoTokenizer;"
        "assert engine.X == workbench.X == kernels.X == 1; print(kvscope.__version__, kvscope.__file__)"
    )
    printed = run(fresh_python, "-c", script, cwd=tmp_path)
    assert "site-packages" in printed
    assert "kvscope" in run(fresh_python, "-m", "kvscope", "--version", cwd=tmp_path)
    assert "doctor" in run(fresh_python.parent / "kvscope", "--help", cwd=tmp_path)


# Only our own types are judged; following torch and transformers would take minutes.
MYPY_CONFIG = """
[mypy]
strict = True
incremental = False
[mypy-torch.*,transformers.*,numba.*,llvmlite.*,numpy.*,panel.*,bokeh.*,ipywidgets.*,jupyter_bokeh.*,IPython.*,tokenizers.*]
follow_imports = skip
[mypy-kvscope.*]
follow_imports = silent
"""


def test_the_public_surface_type_checks(fresh_python, tmp_path):
    (tmp_path / "mypy.ini").write_text(MYPY_CONFIG)
    (tmp_path / "use.py").write_text(PUBLIC_SURFACE)
    (tmp_path / "wrong.py").write_text("from kvscope import SamplingParams\nSamplingParams(max_tokens='many')\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(fresh_python)]
    run(*command, "use.py", cwd=tmp_path)
    checked = subprocess.run([*command, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "[arg-type]" in checked.stdout, checked.stdout


def test_notebooks_are_copied_but_never_over_a_file(fresh_python, tmp_path):
    (tmp_path / "00_quickstart.ipynb").write_text("mine")
    script = (
        "from kvscope.workbench.lab import copy_notebooks, first_notebook; print(first_notebook(copy_notebooks('.')))"
    )
    assert "00_quickstart.ipynb" in run(fresh_python, "-c", script, cwd=tmp_path)
    assert (tmp_path / "00_quickstart.ipynb").read_text() == "mine"


@pytest.mark.full
def test_the_wheel_installs_with_all_its_dependencies(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "torch==2.13.0")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    run(python, "-c", "import kvscope.engine.core, kvscope.workbench.workbench", cwd=tmp_path)
