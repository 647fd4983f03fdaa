"""`kvscope doctor`: versions, host, what works here, and what to do about the rest. Plain text, one fact a line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil

_PACKAGES = [
    "kvscope",
    "torch",
    "triton",
    "transformers",
    "numba",
    "numpy",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "panel",
    "bokeh",
    "ipywidgets",
    "jupyter_bokeh",
    "jupyterlab",
    "notebook",
    "ipykernel",
]


def report() -> str:
    """The whole report as text."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name:<16} {_version(name)}" for name in _PACKAGES]
    lines += ["", *(f"{'ok' if ok else 'no':<3} {text}" for ok, text in _checks())]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _checks():
    """(does it work, a sentence that says so or says what to do) for each thing a user may miss."""
    import torch
    from kvscope.engine.models.hub import installed
    from kvscope.kernels.cpu import compiler
    from kvscope.kernels.cpu.machine import CPU

    yield (
        CPU.avx512_bf16,
        f"bfloat16 dot products on this CPU ({CPU.name})"
        if CPU.avx512_bf16
        else f"no bfloat16 dot products on this CPU ({CPU.name}): the portable kernels run, in float32",
    )
    threading = compiler.threading_layer()
    yield threading == "omp", f"Numba threads through {threading}"
    cuda = torch.cuda.is_available()
    yield cuda, torch.cuda.get_device_name() if cuda else "GPU: there is none, everything runs on the CPU"
    yield (
        importlib.util.find_spec("jupyter_bokeh") is not None,
        "jupyter_bokeh carries the views into notebooks (without it: pip install jupyter_bokeh)",
    )
    yield (
        importlib.util.find_spec("jupyterlab") is not None,
        'JupyterLab opens with `kvscope lab` (without it: pip install "kvscope[lab]")',
    )
    yield shutil.which("chromium") is not None, "Chromium, which only the tests need"
    folder = installed("default")
    yield (
        folder is not None,
        f"default model in {folder}" if folder else "default model not fetched yet: kvscope model fetch default",
    )
