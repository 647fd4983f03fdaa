"""How the CPU kernels are compiled, cached, called and warmed up.

A kernel is a Python function over addresses and sizes that Numba compiles once, for the signature written on it:

    @kernel("void(int64, int64, int64, float64)", parallel=True)
    def scale(out, x, n, factor): ...

    scale(out.data_ptr(), x.data_ptr(), x.numel(), 2.0)

Addresses travel as int64 because a call with eight integers costs 0.2 µs and one with eight arrays twice that;
`array_at(address, shape, dtype)` makes an array view of one inside a kernel, at no cost.

What this module promises:
- **A cache of our own.** Numba's sees edits in the file of the function only. Compiled kernels live in a folder named by
  a hash of every source here, the versions, and the target. The cache of the user's own functions stays as it is.
- **One signature a kernel.** Nothing is specialised behind one's back; arguments convert as in C.
- **Any thread may call.** Under the `omp` layer calls run side by side. `workqueue`, which Numba falls back to where
  there is no OpenMP, dies if two threads enter it; there one process-wide lock takes them in turn.
- **Threads by quota.** A container with two CPUs of sixty-four gets two threads, not sixty-four that spin.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache, cached_property
from pathlib import Path

import llvmlite
import numba
import platformdirs
from numba import carray, types
from numba.core import sigutils
from numba.core.caching import IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.ufunc import parallel as numba_parallel
from tqdm.auto import tqdm

from .machine import CPU, available_cpus

# --------------------------------------------------------------------------------------------------- the threads

_MOST_THREADS = numba.config.NUMBA_NUM_THREADS
_num_threads = min(available_cpus(), _MOST_THREADS)
_local = threading.local()  # .num_threads: what Numba was last told in this thread; .calls: see recording_calls


def num_threads() -> int:
    """Threads that a parallel kernel uses: one process-wide number, `available_cpus()` to begin with."""
    return _num_threads


def set_num_threads(n: int) -> None:
    """Sets `num_threads()`. Raises ValueError outside 1 … NUMBA_NUM_THREADS."""
    global _num_threads
    if not 1 <= n <= _MOST_THREADS:
        raise ValueError(f"num_threads={n} must lie between 1 and {_MOST_THREADS}, the CPUs that Numba sees")
    _num_threads = n


@cache
def threading_layer() -> str:
    """Starts Numba's threads, `omp` where the user chose none, and says which layer serves: omp, tbb or workqueue."""
    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    numba_parallel._launch_threads()
    return numba.threading_layer()


def release_threads() -> None:
    """Ends the helper threads that GNU OpenMP keeps for the calling thread. Call it when a thread will rest.

    Every thread that calls a parallel kernel, or a parallel operation of torch, keeps a team of helpers that spin for
    a moment between calls and so start at once. When all teams together outnumber the CPUs, OpenMP lets none of them
    spin: each parallel call then takes 35 µs more, in every thread, and a model makes hundreds of calls a step. So
    whoever loaded a model, and an engine without work, gives its team back; the next call makes a new one in 0.1 ms.
    """
    for pause in _pause_functions():
        pause(2)  # omp_pause_hard; refused, and harmless, inside a parallel region


@cache
def _pause_functions() -> list[Callable]:
    """`omp_pause_resource_all` of every libgomp that may serve this process: torch's, and the one Numba links.

    LLVM's and Intel's OpenMP are left alone: there the function ends the teams of all threads.
    """
    found = []
    with contextlib.suppress(ImportError, OSError, TypeError):
        from numba.np.ufunc import omppool

        for library in map(ctypes.CDLL, (None, omppool.__file__)):
            if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "__kmpc_fork_call"):
                found.append(library.omp_pause_resource_all)
    return found


# ---------------------------------------------------------------------------------------------------- the cache


@cache
def cache_folder() -> Path | None:
    """The folder of this version's compiled kernels, made if need be; None where no folder can be written."""
    target = cpu_target.target_context.codegen().magic_tuple()
    versions = numba.__version__, llvmlite.__version__, platform.python_version(), target, CPU
    root = Path(platformdirs.user_cache_dir("kvscope")) / "kernels"
    folder = root / _digest(Path(__file__).parent, repr(versions))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)
        for other in root.iterdir():  # what older versions left, and nothing has used for a month
            if time.time() - other.stat().st_mtime > 30 * 86400:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return None
    return folder


def _digest(folder: Path, versions: str) -> str:
    """Sixteen hex digits that change with any source in `folder` and with `versions`."""
    digest = hashlib.sha256(versions.encode())
    for source in sorted(folder.glob("*.py")):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


class _KernelCache(NullCache):
    """Numba's own files, one pair a kernel, in our folder; what cannot be read is compiled again.

    Numba's `FunctionCache` would miss every time: its key holds the intrinsics around which a kernel is made, and these
    are known by an id that every process draws anew.
    """

    def __init__(self, function: Callable, name: str, arguments: tuple):
        code = function.__code__
        body = f"{function.__module__} {name} {arguments} {code.co_code!r} {code.co_consts!r}"
        self._name = f"{name}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"

    @cached_property
    def _file(self) -> IndexDataCacheFile | None:
        folder = cache_folder()
        return None if folder is None else IndexDataCacheFile(str(folder), self._name, source_stamp=None)

    @property
    def cache_path(self) -> Path | None:
        return cache_folder()

    def holds_kernel(self) -> bool:
        folder = cache_folder()
        return folder is not None and (folder / f"{self._name}.1.nbc").exists()

    def load_overload(self, sig, target_context):
        if self._file is None:
            return None
        target_context.refresh()
        try:
            data = self._file.load(sig)
            return None if data is None else CompileResult._rebuild(target_context, *data)
        except Exception:  # cut short: a cache never stands in the way
            with contextlib.suppress(OSError):
                self._file.flush()
            return None

    def save_overload(self, sig, data):
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk costs the compile time, nothing else
                self._file.save(sig, data._reduce())


# --------------------------------------------------------------------------------------------------- the kernels


class Kernel:
    """A compiled function, called with plain integers and floats. Made by `kernel`."""

    def __init__(self, function: Callable, signature: str, name: str, group: str, parallel: bool):
        self.name = name
        self.group = group
        self.parallel = parallel
        # Compiled functions are linked by their qualified name: two that one maker made around different constants must
        # not share it, or a cached one may be served the code of the other.
        function.__qualname__ = name
        self._arguments, _ = sigutils.normalize_signature(signature)
        self._cache = _KernelCache(function, name, self._arguments)
        self.dispatcher = numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)
        self.dispatcher._cache = self._cache
        self._compiled = None
        self.__doc__ = function.__doc__

    def is_cached(self) -> bool:
        """True where the kernel is compiled already, in this process or in the cache folder."""
        return self._compiled is not None or self._cache.holds_kernel()

    def compile(self) -> float:
        """Compiles the kernel, or loads it from the cache. Returns the seconds it took."""
        start = time.perf_counter()
        with _COMPILE_LOCK:
            if self._compiled is None:
                if self.parallel:
                    threading_layer()
                self.dispatcher.compile(self._arguments)
                self.dispatcher.disable_compile()
                self._compiled = self.dispatcher
        return time.perf_counter() - start

    def __call__(self, *args):
        if self._compiled is None:
            self.compile()
        if (calls := getattr(_local, "calls", None)) is not None:
            calls.append((self, args))
        if not self.parallel:
            return self._compiled(*args)
        if getattr(_local, "num_threads", 0) != _num_threads:  # Numba keeps this number per thread
            numba.set_num_threads(_num_threads)
            _local.num_threads = _num_threads
        if threading_layer() != "workqueue":
            return self._compiled(*args)
        with _WORKQUEUE_LOCK:
            return self._compiled(*args)


@contextlib.contextmanager
def recording_calls(calls: list[tuple[Kernel, tuple]]) -> Iterator[None]:
    """Every call of a kernel by this thread is also appended to `calls`."""
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = None


_COMPILE_LOCK = threading.RLock()
_WORKQUEUE_LOCK = threading.Lock()
_KERNELS: list[Kernel] = []


def kernel(signature: str, *, parallel: bool = False, group: str = "common", name: str | None = None) -> Callable:
    """Makes a function a `Kernel`: compiled at its first call or at warm-up, without the GIL, cached on disk.

    `signature` is Numba's, such as "void(int64, int64, float64)". `parallel` allows `prange`; write it over
    `num_threads` parts that are passed as an argument, so that the number of threads is the caller's. `group` says which
    warm-up takes it along. `name` tells apart the kernels that one function makes around different intrinsics; name and
    module identify a kernel in the cache, so no two may share both. The function may use module-level names, `inline`
    functions and intrinsics; all of them must be defined in this package, whose sources name the cache.
    """

    def decorate(function: Callable) -> Kernel:
        made = Kernel(function, signature, name or function.__name__, group, parallel)
        _KERNELS.append(made)
        return made

    return decorate


def inline(function: Callable) -> Callable:
    """A helper that kernels call: typed where it is used, part of the kernel's code, never cached by itself."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def warm_up(
    groups: Collection[str] | None = None, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, float]:
    """Compiles or loads every kernel of the named groups (all by default). Returns the seconds of each.

    `progress(done, total, name)` is called before each kernel that is not cached, and once at the end if any was not.
    """
    chosen = [k for k in _KERNELS if groups is None or k.group in groups]
    missing = [k for k in chosen if not k.is_cached()]
    seconds = {}
    for k in sorted(chosen, key=missing.__contains__):
        if progress is not None and k in missing:
            progress(missing.index(k), len(missing), k.name)
        seconds[k.name] = k.compile()
    if progress is not None and missing:
        progress(len(missing), len(missing), "")
    return seconds


class ProgressBar:
    """A hook for `warm_up`: one bar, in a terminal or a notebook, where there is something to compile."""

    def __init__(self):
        self._bar = None

    def __call__(self, done: int, total: int, name: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="Compiling CPU kernels, once", unit="kernel")
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()
        if done == total:
            self._bar.close()


# ------------------------------------------------------------------------------------------------------ pointers


@intrinsic
def pointer(typingctx, address, dtype):
    """The int64 `address` as a pointer to `dtype`, such as `numba.float32`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen


@inline
def array_at(address, shape, dtype):
    """The C-ordered array of `shape` (an integer or a tuple) and `dtype` that starts at the int64 `address`."""
    return carray(pointer(address, dtype), shape)
