"""What has come out of one request so far: written by the driver thread, read by everyone else.

One lock per request, held for microseconds. Waiters come in four kinds, {text, end} × {thread, coroutine}: one that waits
for the end is not woken for every token. Knows no engine and no thread; keeps nothing alive but its own text.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .sampling.beam_search import BeamSearchParams
from .sampling.params import SamplingParams
from .text.prompts import EncodedPrompt
from .text.sample_text import SampleText

if TYPE_CHECKING:
    from .handle import RequestHandle

Waker = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class SampleRecord:
    """One sample: its text in pieces, its token ids, and why it ended."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "pieces",
        "stop_reason",
        "text",
        "token_ids",
        "token_times",
    )

    def __init__(self, index: int, text: SampleText | None, wants_logprobs: bool):
        self.index = index
        self.text = text  # None without a tokenizer or with detokenize=False: token ids only
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.token_times = array("d")  # seconds on time.monotonic()
        self.logprobs: list[dict[int, float]] | None = [] if wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def push(self, token_id: int, logprobs: dict[int, float] | None, *, show: bool = True) -> str | None:
        """Take one token; returns the stop string that it completed. `show` False keeps its text out (EOS, stop ids)."""
        self.token_ids.append(token_id)
        self.token_times.append(time.monotonic())
        if self.logprobs is not None and self.cumulative_logprob is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id]
        if self.text is None or not show:
            return None
        piece, stop = self.text.push(token_id)
        if piece:
            self.pieces.append(piece)
        return stop

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """The sample has ended; what was held back of its text comes out, unless a stop string or a fault ended it."""
        text, self.text = self.text, None
        self.finish_reason, self.stop_reason = reason, stop_reason
        by_string = reason == "stop" and isinstance(stop_reason, str)
        if text is not None and reason != "error" and not by_string and (rest := text.finish()):
            self.pieces.append(rest)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self.pieces),
            token_ids=list(self.token_ids),
            token_times=list(self.token_times),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class BeamRecord(SampleRecord):
    """One beam. It may be another text after every step, so its text is made when somebody looks, and comes as one piece at
    the end."""

    __slots__ = ("make_text", "shows_end")

    def __init__(self, index: int, make_text: Callable[[], SampleText] | None, shows_end: bool):
        super().__init__(index, None, wants_logprobs=False)
        self.make_text = make_text
        self.shows_end = shows_end  # is the id that ends it part of the text?

    def show(self, token_ids: list[int], logprob: float) -> None:
        self.token_ids, self.cumulative_logprob = token_ids, logprob

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        super().finish(reason, stop_reason)
        self.pieces = [self.read(self.token_ids, reason)]

    def output(self) -> CompletionOutput:
        output = super().output()
        return output if self.pieces else replace(output, text=self.read(output.token_ids, self.finish_reason))

    def read(self, token_ids: list[int], reason: str | None) -> str:
        """These tokens as text, with why they ended, None: not yet. Where it is "stop", the last one says so."""
        if self.make_text is None:
            return ""
        text, shown = self.make_text(), len(token_ids) - (reason == "stop" and not self.shows_end)
        return "".join(text.push(token_id)[0] for token_id in token_ids[:shown]) + text.finish()


class RequestRecord:
    """All samples of one request, its status, and those who wait for it."""

    def __init__(
        self,
        request_id: int,
        prompt: EncodedPrompt,
        params: SamplingParams,
        make_text: Callable[[SamplingParams], SampleText] | None,
        priority: int = 0,
        deadline: float | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.deadline = deadline  # seconds from its arrival
        self.samples: list[SampleRecord] = [
            BeamRecord(i, partial(make_text, params) if make_text else None, params.include_stop_str_in_output)
            if isinstance(params, BeamSearchParams)
            else SampleRecord(i, make_text(params) if make_text else None, params.logprobs is not None)
            for i in range(params.n)
        ]
        self.status = "waiting"
        self.done = False
        self.error: BaseException | None = None
        self.metrics = RequestMetrics(arrival=time.monotonic())  # replaced by the core's own once it is added
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, float] | None] | None = None  # whole, with the first token
        self.handle: Callable[[], RequestHandle | None] = lambda: None  # a weak reference once there is a handle
        self.lock = threading.RLock()  # its conditions take it back whole when Ctrl-C ends a wait; a Lock's may not
        self.text_came = threading.Condition(self.lock)
        self.ended = threading.Condition(self.lock)
        self._text_wakers: list[Waker] = []
        self._end_wakers: list[Waker] = []

    # The driver's side; `lock` is held by the caller.

    def publish(self) -> None:
        """Wake those who wait for text."""
        self.text_came.notify_all()
        self._wake(self._text_wakers)

    def finish(self, status: str, error: BaseException | None = None, stop_reason: int | str | None = None) -> None:
        """The request is over: close samples that are still open, wake everyone. Only the first call counts."""
        if self.done:
            return
        for sample in self.samples:
            if sample.finish_reason is None:
                with contextlib.suppress(Exception):  # text that cannot be made must not keep a request from ending
                    sample.finish("error" if status == "failed" else "cancelled", stop_reason)
        self.status, self.error, self.done = status, error, True
        self.publish()
        self.ended.notify_all()
        self._wake(self._end_wakers)

    @staticmethod
    def _wake(wakers: list[Waker]) -> None:
        for loop, future in wakers:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_set, future)
        wakers.clear()

    # The readers' side.

    def output(self) -> RequestOutput:
        """A copy of everything so far."""
        with self.lock:
            return RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt.text,
                prompt_token_ids=list(self.prompt.token_ids),
                outputs=[sample.output() for sample in self.samples],
                finished=self.done,
                num_cached_tokens=self.num_cached_tokens,
                metrics=replace(self.metrics),
                prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
                error=None if self.error is None else str(self.error),
            )

    def pieces_from(self, sample: int, seen: int) -> tuple[list[str], bool]:
        """(pieces of a sample from number `seen` on, whether no more will come)."""
        with self.lock:
            record = self.samples[sample]
            return record.pieces[seen:], record.finish_reason is not None

    async def wait_async(self, ready: Callable[[], bool], *, for_end: bool) -> None:
        """Until `ready()` (called under the lock); wakes for every piece of text, or once at the end."""
        wakers = self._end_wakers if for_end else self._text_wakers
        loop = asyncio.get_running_loop()
        while True:
            with self.lock:
                if ready():
                    return
                waker = (loop, loop.create_future())
                wakers.append(waker)
            try:
                await waker[1]
            finally:
                with self.lock:
                    if waker in wakers:
                        wakers.remove(waker)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
