"""Imports run one way: workbench → engine → kernels; and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"kernels": {"engine", "workbench"}, "engine": {"workbench"}, "workbench": set(), "facade": set()}


def imported_layers(path: Path) -> set[str]:
    """The kvscope packages that a file imports. Relative imports stay inside a package; that is checked on the way."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert node.level < len(path.relative_to(ROOT).parts), f"{path}: a relative import leaves its package"
                continue
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("kvscope.") and name.count(".") >= 1}
    return found


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_run_one_way(layer):
    for path in (ROOT / layer).rglob("*.py"):
        assert not imported_layers(path) & FORBIDDEN[layer], path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvscope", ("torch", "numba", "panel", "bokeh", "transformers")),
        ("kvscope.engine.events", ("torch", "numba", "panel", "bokeh", "transformers")),
        ("kvscope.engine.snapshot", ("torch", "numba", "panel", "bokeh", "transformers")),
        ("kvscope.engine.recording.moment", ("torch", "numba", "panel", "bokeh", "transformers")),
        ("kvscope.engine.recording.file", ("torch", "numba", "panel", "bokeh", "transformers")),
        ("kvscope.workbench.sentences", ("torch", "numba", "transformers")),
        ("kvscope.workbench.workbench", ("torch", "numba", "transformers")),
        ("kvscope.engine.core", ("panel", "bokeh", "ipywidgets", "IPython")),
        ("kvscope.engine.engine", ("panel", "bokeh", "ipywidgets", "IPython")),
    ],
)
def test_heavy_imports_wait_until_they_are_needed(module, absent):
    script = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_transformers_is_not_fooled_by_the_folder_kernels():
    script = "import transformers; from transformers import AutoTokenizer, AutoModelForCausalLM; print('fine')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "fine" in done.stdout, done.stderr
