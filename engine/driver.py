"""The one thread that runs an engine's core, and the queue through which everyone else talks to it.

    submit, cancel, pause, …  ──▶ command queue ──▶ driver thread: commands, then one step, then its text ──▶ records
                                                    sleeps in the queue while there is nothing to do

* Only this thread calls the core, so the core needs no lock. What others need at once (refusing a bad request, the id of
  a new one) is decided in their thread from what never changes and from counters.
* After a step its tokens become text, stop strings are decided before the next schedule, and waiters are woken.
* The thread holds no reference to the `Engine` and none to handles beyond a weak one: a forgotten engine is collected,
  and its finalizer calls `request_close`, which takes no lock because a finalizer may run anywhere.
* A fault inside a step ends the requests in it (the core does that); a fault in making text ends that request alone.
* While somebody holds its tape, every state in which the core stands still before a step or a sleep is marked there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from kvscope.kernels.cpu import compiler

from .breakpoint import Armed, Breakpoint
from .delivery import deliver, deliver_ends
from .events import Cause, Event, EventKind
from .handle import EngineClosed, describe, wait
from .outputs import StepOutput
from .record import RequestRecord
from .recording.tape import Tape
from .registry import RequestRegistry
from .request import RequestRefused
from .snapshot import EngineSnapshot
from .text.sample_text import SampleText
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from .config import EngineConfig
    from .core import EngineCore
    from .info import EngineFacts
    from .sampling.params import SamplingParams
    from .text.detokenizer import Decoder
    from .text.prompts import EncodedPrompt

T = TypeVar("T")
Answers: TypeAlias = "queue.SimpleQueue[tuple[Any, BaseException | None]]"
_numbers = itertools.count(1)
_open: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """Runs `core` from `start()` to `close()`. `decoder` None: no tokenizer, so no text."""

    def __init__(self, core: EngineCore, decoder: Decoder | None):
        self._core: EngineCore | None = core
        self._decoder = decoder
        self.events = core.events
        self.paused = False
        self._paused_by = 0  # thread that called pause()
        self.steps_per_second: float | None = None  # at most; None: as fast as it can
        self._armed: Armed | None = None  # where to pause by itself
        self._tape: Callable[[], Tape | None] = lambda: None  # a weak reference once somebody has asked for it
        self._commands: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.registry = RequestRegistry()
        self._lock = self.registry.lock  # also guards what is taken: ids, the inbox, the queue's order
        self._last_id = 0
        self._inbox = 0  # submitted requests that the core has not seen yet
        self._inbox_tokens = 0
        self._closing = False  # the thread is to end, and nothing is taken any more
        self._why_closed = "this engine is closed; make a new one with Engine(...)"
        self._last_snapshot: EngineSnapshot | None = None
        self._last_metrics: dict[str, float] = {}
        self._last_metrics_text = ""
        self._thread = threading.Thread(target=self._run, name=f"kvscope-engine-{next(_numbers)}", daemon=True)

    def start(self) -> None:
        _open.add(self)
        self._thread.start()

    # --- any thread: requests ---------------------------------------------------------------------------------------

    def submit(
        self, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0, deadline: float | None = None
    ) -> RequestRecord:
        """Take a request at once; the core sees it before its next step. Raises RequestRefused, EngineClosed."""
        compiler.release_threads()  # of whatever the caller computed before: now the engine's thread needs the CPUs
        wants_text = self._decoder is not None and params.detokenize
        make_text = partial(SampleText, self._decoder) if wants_text else None
        with self._lock:
            core = self._require_open()
            self._last_id += 1
            record = RequestRecord(self._last_id, prompt, params, make_text, priority, deadline)
            refusal = self._refusal(core, record)
            if refusal is None:
                self._commands.put(partial(self._add, record))
                self._inbox += 1
                self._inbox_tokens += len(prompt.token_ids)
                self.registry.live[record.request_id] = record
            else:  # by the time that the core hears of it, it might have had room
                self._commands.put(partial(self._refuse, record.request_id, refusal))
        if refusal is not None:
            raise refusal
        return record

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All that the calling thread submits inside is seen by the same step."""
        with self._lock:
            self._commands.put(self._wait_for_the_others)
            yield

    def _wait_for_the_others(self) -> None:
        with self._lock:
            pass

    def cancel(self, request_id: int) -> None:
        with contextlib.suppress(EngineClosed):
            self._post(partial(self._cancel, request_id))

    def decode(self, token_ids: list[int]) -> str:
        return "" if self._decoder is None else self._decoder.decode(token_ids)

    @property
    def token_text(self) -> Callable[[int], str]:
        """One token as it reads inside a text; its number in brackets where there is no tokenizer. Holds no engine."""
        return "[{}]".format if self._decoder is None else self._decoder.token_text

    # --- any thread: control ----------------------------------------------------------------------------------------

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function(core)` between two steps and return what it returns; waits for one step at most."""
        answers: Answers = queue.SimpleQueue()  # a future's lock may stay taken when Ctrl-C ends the wait
        self._post(partial(self._answer, answers, function))
        while True:
            with contextlib.suppress(queue.Empty):  # in slices, so that Ctrl-C is seen on every platform
                result, error = answers.get(timeout=1.0)
                break
        if error is not None:
            raise error
        return result

    def pause(self) -> None:
        """Returns when no step is running any more."""
        self._paused_by = threading.get_ident()
        self.call(lambda core: self._set_paused(core, True))

    def resume(self) -> None:
        self.call(lambda core: self._set_paused(core, False))

    def step(self) -> StepOutput:
        if not self.paused:
            raise RuntimeError("step() needs a paused engine, and this one is running; call pause() first")
        return self.call(self._step)

    def run_until(self, goal: Breakpoint, max_steps: int) -> Armed:
        """Go on, and pause after the step that reaches `goal`. It has an outcome when that has ended in whatever way."""
        return self.call(lambda core: self._arm(core, goal, max_steps))

    def wait_until(self, armed: Armed, hooks: list[Callable[[], None]]) -> Event:
        """The event that a breakpoint waited for, or its error raised. Ctrl-C pauses the engine where it is."""
        try:
            wait(armed.lock, armed.ended, lambda: armed.outcome is not None, None, hooks)
        except BaseException:
            if self._armed is armed:
                self.pause()
            raise
        if isinstance(armed.outcome, Exception):
            raise armed.outcome
        assert armed.outcome is not None
        return armed.outcome

    def wait_idle(self, timeout: float | None, hooks: list[Callable[[], None]]) -> bool:
        if self.registry.live:
            self.require_running("wait_idle()")
        registry = self.registry
        return wait(registry.lock, registry.idle, lambda: not registry.live, timeout, hooks)

    def snapshot(self) -> EngineSnapshot:
        with contextlib.suppress(EngineClosed):
            return self.call(self._snapshot)
        assert self._last_snapshot is not None
        return self._last_snapshot

    def record(self, info: EngineFacts, config: EngineConfig) -> Tape:
        """What the core does from now on; the same tape for all who ask while one holds it. Raises EngineClosed."""
        return self.call(lambda core: self._record(core, info, config))

    def metrics(self) -> dict[str, float]:
        with contextlib.suppress(EngineClosed):
            return self.call(lambda core: core.metrics())
        return dict(self._last_metrics)

    def metrics_text(self) -> str:
        with contextlib.suppress(EngineClosed):
            return self.call(lambda core: core.metrics_text())
        return self._last_metrics_text

    @property
    def state(self) -> str:
        return "stopped" if self._closing else "paused" if self.paused else "running"

    def require_running(self, what: str, *, begun: bool = False) -> None:
        """Refuse to wait for a paused engine, which would wait for ever. One that somebody else paused in the middle of
        an iteration (`begun`) is waited for: whoever paused it can resume it."""
        if self.paused and (not begun or self._paused_by == threading.get_ident()):
            raise RuntimeError(f"{what} would wait for ever: the engine is paused; call resume() or step()")

    def require_open(self) -> None:
        with self._lock:
            self._require_open()

    # --- any thread: the end ----------------------------------------------------------------------------------------

    def request_close(self) -> None:
        """Tell the thread to end after its step; returns at once, takes no lock, may be called from a finalizer."""
        self._closing = True
        self._commands.put(_nothing)

    def close(self) -> None:
        """End the thread, release everyone who waits, free the KV pool. Any number of times."""
        self.request_close()
        if self._thread is not threading.current_thread():
            while self._thread.is_alive():
                self._thread.join(timeout=1.0)

    # --- the driver thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        core, fault = self._core, None
        assert core is not None
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._turn(core)
        except BaseException as error:  # not a request's fault: the core itself can no longer be trusted
            fault = error
        self._shut_down(core, fault)

    def _turn(self, core: EngineCore) -> None:
        """Sleep until told something; or steps, each followed by everything that was told meanwhile, while there is work."""
        if self.paused or not core.has_work:
            compiler.release_threads()
            self._mark()
            self._commands.get()()
            self._run_commands()
            return
        with undisturbed():
            while core.has_work and not self.paused and not self._closing:
                begun = time.monotonic()
                self._step(core)
                self._stop_where_asked(core)
                self._run_commands()
                self._rest(begun)
        self._stop_where_asked(core)  # of a request that was cancelled in between

    def _run_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._closing:
                self._commands.get_nowait()()

    def _add(self, record: RequestRecord) -> None:
        core = self._core
        if core is None:  # closed meanwhile: the record was ended with the others
            return
        try:
            core.add_request(
                record.prompt.token_ids,
                record.params,
                arrival=record.metrics.arrival,
                label=record.prompt.label,
                priority=record.priority,
                deadline=record.deadline,
                request_id=record.request_id,  # Ctrl-C in submit() may have spent an id that the core never saw
            )
            with record.lock:
                record.metrics = core.get(record.request_id).metrics
        except RequestRefused as refusal:  # the event and the counter are the core's
            if refusal.cause is Cause.DEADLINE:  # it passed while a step kept the core busy
                self.registry.end(record, "cancelled", stop_reason="deadline")
            else:
                self.registry.end(record, "failed", refusal)
        finally:
            with self._lock:
                self._inbox -= 1
                self._inbox_tokens -= len(record.prompt.token_ids)

    def _refuse(self, request_id: int, refusal: RequestRefused) -> None:
        if self._core is not None:
            self._core.refuse(request_id, refusal)

    def _cancel(self, request_id: int) -> None:
        record = self.registry.live.get(request_id)
        if record is not None and self._core is not None:
            self._core.cancel(request_id)
            self.registry.end(record, "cancelled")

    def _step(self, core: EngineCore) -> StepOutput:
        self._mark()
        try:
            output = core.step()
        except BaseException:  # Ctrl-C in a step: the core has ended its requests and goes on
            deliver_ends(core, self.registry, list(self.registry.live))
            raise
        deliver(core, self.registry, output)
        self._mark()
        return output

    def _mark(self) -> None:
        if (tape := self._tape()) is not None:
            tape.mark(self.state)

    def _record(self, core: EngineCore, info: EngineFacts, config: EngineConfig) -> Tape:
        tape = self._tape()
        if tape is None or tape.fault is not None:
            decode = (lambda token_ids: "") if self._decoder is None else self._decoder.decode
            texts = {"decode": decode, "decode_token": self.token_text}
            tape = Tape(core, self.registry, state=self.state, info=info, config=config, **texts)
            self._tape = weakref.ref(tape)
        return tape

    def _rest(self, begun: float) -> None:
        """At a set pace, wait for what is left of the step's time; whatever is told meanwhile is done at once."""
        while self.steps_per_second and not self.paused and not self._closing:
            left = begun + 1 / self.steps_per_second - time.monotonic()
            if left <= 0:
                return
            compiler.release_threads()
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=left)()

    def _arm(self, core: EngineCore, goal: Breakpoint, max_steps: int) -> Armed:
        armed = Armed(goal, core, max_steps)
        self._disarm(RuntimeError("another breakpoint took the place of this one"))
        self._armed = armed
        self._set_paused(core, False)
        return armed

    def _disarm(self, error: Exception) -> None:
        armed, self._armed = self._armed, None
        if armed is not None:
            armed.end(error)

    def _stop_where_asked(self, core: EngineCore) -> None:
        if self._armed is not None and (why := self._armed.look(core)):
            self._armed = None
            self._set_paused(core, True, Cause.BREAKPOINT, why)

    def _set_paused(self, core: EngineCore, paused: bool, cause: Cause = Cause.USER, why: str = "") -> None:
        if paused:
            self._disarm(RuntimeError(f"the engine was paused at step {core.journal.step}, before its breakpoint"))
        if paused != self.paused:
            self.paused = paused
            kind = EventKind.PAUSED if paused else EventKind.CONTINUED
            self.events.append(core.journal.step, time.monotonic(), kind, cause=cause, text=why)

    def _snapshot(self, core: EngineCore) -> EngineSnapshot:
        self._mark()  # what somebody has seen can be seen again
        return core.snapshot(self.state)

    def _shut_down(self, core: EngineCore, fault: BaseException | None) -> None:
        """Nothing new is taken; live requests end and whoever waits for them is told why."""
        with self._lock:
            self._closing = True
            live = list(self.registry.live.values())
        if fault is not None:
            self._why_closed = (
                f"this engine stopped because of a fault, {describe(fault)}; make a new one with Engine(...)"
            )
        for record in live:
            if fault is None:
                core.cancel(record.request_id, Cause.CLOSED)
                sentence = f"the engine was closed before request {record.request_id} was finished"
                self.registry.end(record, "cancelled", EngineClosed(sentence))
            else:
                self.registry.end(record, "failed", fault)
        self._disarm(EngineClosed(self._why_closed))
        self._last_snapshot = self._snapshot(core)
        self._last_metrics, self._last_metrics_text = core.metrics(), core.metrics_text()
        if (tape := self._tape()) is not None:
            tape.end()
        core.runner.storage.close()
        self._core = None
        with contextlib.suppress(queue.Empty):
            while True:  # commands that came too late: whoever waits for an answer gets EngineClosed
                self._commands.get_nowait()()

    # --- plumbing ---------------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Any]) -> None:
        with self._lock:
            self._require_open()
            self._commands.put(command)

    def _answer(self, answers: Answers, function: Callable[[EngineCore], Any]) -> None:
        try:
            if self._core is None:
                raise EngineClosed(self._why_closed)
            answers.put((function(self._core), None))
        except BaseException as error:
            answers.put((None, error))

    def _require_open(self) -> EngineCore:
        if self._closing or self._core is None:
            raise EngineClosed(self._why_closed)
        return self._core

    def _refusal(self, core: EngineCore, record: RequestRecord) -> RequestRefused | None:
        """What the core will say to this request, found without the core's thread. A request that moves from the inbox
        to the line meanwhile may count twice, never not at all: the inbox is read first."""
        inbox, inbox_tokens = self._inbox, self._inbox_tokens
        try:
            core.door.check(record.prompt.token_ids, record.params, priority=record.priority, deadline=record.deadline)
            core.door.check_queue(
                core.scheduler.waiting,
                len(record.prompt.token_ids),
                time.monotonic(),
                coming=inbox,
                coming_tokens=inbox_tokens,
            )
        except RequestRefused as refusal:
            return refusal
        return None


def _nothing() -> None:
    """The command that only wakes the thread."""


@atexit.register
def _close_all() -> None:
    """Let steps end before torch is taken down under them."""
    for driver in list(_open):
        driver.close()
