"""`kvscope lab`: copy the notebooks to a folder, fetch the default model, open JupyterLab there."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def open_lab(folder: str | Path, *, port: int = 8888, browser: bool = True) -> int:
    """Returns JupyterLab's exit status. Raises ValueError where JupyterLab is not installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError('JupyterLab is not installed here: pip install "kvscope[lab]"')
    from kvscope.engine.models.hub import resolve

    target = copy_notebooks(folder)
    resolve("default")  # with its progress bar here, not inside a notebook's first cell
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={target}", f"--port={port}"]
    command.append(f"--LabApp.default_url=/lab/tree/{first_notebook(target)}")
    if not (browser and has_display()):
        command.append("--no-browser")
        print("kvscope: no browser is opened; JupyterLab prints its address below.", flush=True)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    if os.name == "posix":
        os.execv(command[0], command)  # this process becomes JupyterLab, so that whoever ends it ends JupyterLab
    return subprocess.run(command, check=False).returncode


def copy_notebooks(folder: str | Path) -> Path:
    """Copy the shipped notebooks into `folder`, never over a file that is there already; the folder's full path."""
    target = Path(folder).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder={str(folder)!r}: is a file; name a folder for the notebooks")
    target.mkdir(parents=True, exist_ok=True)
    for source in importlib.resources.files("kvscope.notebooks").iterdir():
        if source.name.endswith(".ipynb") and not (target / source.name).exists():
            (target / source.name).write_bytes(source.read_bytes())
    return target


def first_notebook(folder: Path) -> str:
    return min(path.name for path in folder.glob("*.ipynb"))


def has_display() -> bool:
    """Whether a browser window can be opened: always asked of X or Wayland on Linux, assumed elsewhere."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
