"""`RequestHandle`: a request as its user holds it: text as it comes, the result, cancel.

    handle = engine.submit("Once upon a time", SamplingParams(max_tokens=64))
    for piece in handle: ...            # or: async for piece in handle
    output = handle.result()            # or: output = await handle

A handle keeps its engine open until its request is over, so `Engine("default").submit("hi").result()` works; the engine
does not keep the handle. Any thread and any number of readers may use one; each iteration starts at the beginning.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from .outputs import RequestOutput
from .record import RequestRecord

if TYPE_CHECKING:
    from .driver import Driver
    from .engine import Engine
    from .sampling.params import SamplingParams

HOOK_SECONDS = 0.1  # how often a waiting thread calls `engine.while_waiting`
_WAKE_SECONDS = 1.0  # a wait without end is cut into these, so that Ctrl-C is seen on every platform


class RequestFailed(RuntimeError):
    """A fault inside a step ended the request; the fault itself is `__cause__`."""


class EngineClosed(RuntimeError):
    """The engine was closed, so this cannot be done any more."""


class RequestHandle:
    """Made by `Engine.submit`."""

    def __init__(self, record: RequestRecord, driver: Driver, engine: Engine | None):
        self._record = record
        self._driver = driver
        self._engine = engine  # dropped by the driver when the request is over

    @property
    def request_id(self) -> int:
        return self._record.request_id

    @property
    def prompt_text(self) -> str:
        """The prompt as text (a chat as its template wrote it); token ids are decoded, "" without a tokenizer."""
        text = self._record.prompt.text
        return self._driver.decode(self._record.prompt.token_ids) if text is None else text

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._record.prompt.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self._record.params

    @property
    def status(self) -> str:
        """ "waiting" | "running" | "preempted" | "finished" | "cancelled" | "failed"."""
        return self._record.status

    @property
    def done(self) -> bool:
        """Whether the request is over, in whatever way."""
        return self._record.done

    def partial(self) -> RequestOutput:
        """A copy of what has come so far; never waits, never raises for a failed request."""
        return self._record.output()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. A cancelled request gives what it had, with finish_reason "cancelled".

        Raises TimeoutError after `timeout` seconds, RequestFailed when a fault ended the request, EngineClosed when the
        engine was closed before its end, RuntimeError when the engine is paused.
        """
        record = self._record
        if not record.done:
            self._driver.require_running("result()")
        if not wait(record.lock, record.ended, lambda: record.done, timeout, self._hooks()):
            raise TimeoutError(
                f"request {record.request_id} is still {record.status} after {timeout} s, with "
                f"{len(record.samples[0].token_ids)} tokens; it goes on"
            )
        return self._outcome()

    def cancel(self) -> None:
        """End the request within one step and give its blocks back. Any time, any number of times, from any thread."""
        if not self._record.done:
            self._driver.cancel(self._record.request_id)

    def sample(self, index: int) -> SampleStream:
        """Sample `index` of n as a stream of its own: `for piece in handle.sample(2)`, `async for` too."""
        if not 0 <= index < self._record.params.n:
            raise IndexError(f"sample {index}: request {self.request_id} has samples 0 to {self._record.params.n - 1}")
        return SampleStream(self, index)

    def __iter__(self) -> Iterator[str]:
        """Text of sample 0 as it comes. Ends early, without an error, when the request is cancelled."""
        return iter(self.sample(0))

    def __aiter__(self) -> AsyncIterator[str]:
        return aiter(self.sample(0))

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """The result, without blocking the running event loop. Cancelling the waiting task leaves the request alone."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> RequestOutput:
        if not self._record.done:
            self._driver.require_running("await")
        await self._record.wait_async(lambda: self._record.done, for_end=True)
        return self._outcome()

    def _outcome(self) -> RequestOutput:
        self._raise_if_failed()
        return self._record.output()

    def _raise_if_failed(self) -> None:
        error = self._record.error
        if isinstance(error, EngineClosed):
            raise EngineClosed(str(error))
        if error is not None:
            raise RequestFailed(f"request {self.request_id} failed: {describe(error)}") from error

    def _hooks(self) -> list[Callable[[], None]]:
        engine = self._engine
        return [] if engine is None else engine.while_waiting

    def __repr__(self) -> str:
        record = self._record
        tokens = sum(len(sample.token_ids) for sample in record.samples)
        text = "".join(record.samples[0].pieces)
        shown = text if len(text) <= 48 else text[:47] + "…"
        return f"<RequestHandle {record.request_id}: {record.status}, {tokens} tokens, {shown!r}>"


class SampleStream:
    """One sample of a request as it comes; every iteration starts at the beginning."""

    def __init__(self, handle: RequestHandle, index: int):
        self._handle = handle
        self._index = index

    def __iter__(self) -> Iterator[str]:
        record = self._handle._record
        for step in self._walk():
            if isinstance(step, str):
                yield step
            else:
                wait(record.lock, record.text_came, step, None, self._handle._hooks())

    async def __aiter__(self) -> AsyncIterator[str]:
        for step in self._walk():
            if isinstance(step, str):
                yield step
            else:
                await self._handle._record.wait_async(step, for_end=False)

    def _walk(self) -> Iterator[str | Callable[[], bool]]:
        """Text that has come and, where there is none, what to wait for (a condition to call under the record's lock)."""
        handle, seen = self._handle, 0
        sample = handle._record.samples[self._index]

        def more() -> bool:
            return len(sample.pieces) > seen or sample.finish_reason is not None

        while True:
            pieces, over = handle._record.pieces_from(self._index, seen)
            if pieces:
                seen += len(pieces)
                yield "".join(pieces)
            elif over:
                return handle._raise_if_failed()
            else:
                handle._driver.require_running("iterating", begun=seen > 0)
                yield more


def wait(
    lock: threading.Lock,
    condition: threading.Condition,
    ready: Callable[[], bool],
    timeout: float | None,
    hooks: list[Callable[[], None]],
) -> bool:
    """Block until `ready()` (called under `lock`, the condition's own); False after `timeout` seconds.

    The lock itself is entered: Ctrl-C may come between a condition's taking it and the with block, and nobody would
    ever give it back.

    While it waits, this thread calls `hooks` about ten times a second: a notebook host that repaints from the main
    thread only (Colab) is kept moving by them.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    next_hooks = time.monotonic() + HOOK_SECONDS
    while True:
        now = time.monotonic()
        left = _WAKE_SECONDS if deadline is None else min(_WAKE_SECONDS, deadline - now)
        if hooks:
            left = min(left, next_hooks - now)
        with lock:
            if condition.wait_for(ready, max(0.0, left)):
                return True
        now = time.monotonic()
        if hooks and now >= next_hooks:
            _call(hooks)
            next_hooks = time.monotonic() + HOOK_SECONDS
        if deadline is not None and now >= deadline:
            return False


def _call(hooks: list[Callable[[], None]]) -> None:
    """A view that fails must not end somebody's wait: its hook is dropped, with a warning."""
    for hook in tuple(hooks):
        try:
            hook()
        except Exception as error:
            warnings.warn(f"{hook!r} failed while waiting and is not called again: {describe(error)}", stacklevel=4)
            if hook in hooks:
                hooks.remove(hook)


def describe(error: BaseException) -> str:
    """An exception as words: its message, and its kind where the message does not say it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
