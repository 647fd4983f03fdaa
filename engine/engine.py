"""`Engine`: a served model as its users touch it: prompts in, handles and outputs out, pause, step, look inside.

It joins a tokenizer, an `EngineCore`, the `Driver` thread that runs it, and request handles. Everything may be called
from any thread, also while an event loop runs; nothing here starts an event loop or touches a widget.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from .assembly import assemble
from .breakpoint import MAX_STEPS, breakpoint_at
from .config import EngineConfig, EngineOptions, signature
from .driver import Driver
from .events import Event, EventLog
from .handle import RequestHandle
from .info import EngineInfo
from .outputs import RequestOutput, StepOutput
from .record import RequestRecord
from .recording.tape import Tape
from .sampling.params import SamplingParams
from .sampling.structured import GrammarCompiler
from .snapshot import EngineSnapshot
from .text.chat import ChatOptions, Messages
from .text.detokenizer import Decoder
from .text.prompts import EncodedPrompt, Prompt, PromptEncoder, as_list, is_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Serve `model`: "default", a Hugging Face id, a local folder, or a .gguf file.

    Keyword arguments are the fields of `EngineConfig`, which says what each does:

        engine = Engine("default", block_size=16, num_blocks=512, dtype="float32")
        engine.generate("Once upon a time", SamplingParams(max_tokens=32))

    An engine is a context manager; `close()` frees its memory at once, and one that nobody holds any more closes itself.
    A bad request raises when it is submitted and harms no other. Two engines of one process share equal weights.

    Attributes: `config` (every option as decided, `config.weights_source` too), `info` (facts for a header), `events`
    (an `EventLog`: `events.since(index)`), `tokenizer` (None where the model has none), `while_waiting` (callables that
    a blocking call runs about ten times a second in the thread that waits).
    """

    def __init__(self, model: str | os.PathLike[str] = "default", **options: Unpack[EngineOptions]):
        assembly = assemble(EngineConfig.from_options(model, dict(options)))
        self.config: EngineConfig = assembly.config
        self.info: EngineInfo = assembly.info
        self.tokenizer: PreTrainedTokenizerBase | None = assembly.tokenizer
        self.events: EventLog = assembly.core.events
        self.while_waiting: list[Callable[[], None]] = []
        self._decoder = None if assembly.tokenizer is None else Decoder(assembly.tokenizer)
        self._encoder = PromptEncoder(assembly.tokenizer, assembly.core.door.vocab_size)
        self._grammars = GrammarCompiler(assembly.tokenizer, assembly.core.door.vocab_size, assembly.core.eos_token_ids)
        self._driver = Driver(assembly.core, self._decoder)
        # Neither the thread nor the finalizer may hold the engine: it closes when nobody else does.
        self._finalizer = weakref.finalize(self, self._driver.request_close)
        self._finalizer.atexit = False  # the driver closes itself then, and waits for its step
        self._driver.start()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **chat: Unpack[ChatOptions],
    ) -> RequestHandle:
        """Queue a request and return its handle at once, whatever the engine is doing.

        `prompt`: a string, a list of token ids, or a list of chat messages {"role": …, "content": …}, rendered with the
        tokenizer's chat template. `params` default to `SamplingParams()`. For messages `chat` may say more (see
        `ChatOptions`): template=, tools=, documents=, add_generation_prompt=, continue_final_message=,
        chat_template_kwargs=.
        `priority`: the lowest number goes first, where an option of the engine says so; elsewhere it is refused. `deadline`: seconds from now; a request
        that is not over by then is cancelled, between two steps, and keeps the text that it has; its stop_reason is "deadline".
        Raises TypeError or ValueError with a sentence when the request is bad or can never be served, and
        RequestRefused (a ValueError) when the queue is full.
        """
        self._driver.require_open()
        params = self._prepared(_params(params))
        return self._submit(self._encoder.encode(prompt, **chat), params, priority, deadline)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Submit all prompts, to be seen by the same step, wait for all, return their outputs in the same order.

        One prompt is a list of one; one `SamplingParams` serves all prompts, a list must have one for each. All prompts
        are checked before any is submitted. When waiting ends early (Ctrl-C, a fault, a refusal), what this call
        submitted is cancelled and the engine stays usable. Raises RuntimeError on a paused engine.
        """
        self._driver.require_open()
        self._driver.require_running("generate()")
        batch = as_list(prompts)
        each = [self._prepared(one) for one in _params_of_each(params, len(batch))]
        encoded = [self._encoder.encode(prompt, **chat) for prompt in batch]
        handles: list[RequestHandle] = []
        try:
            with self._driver.together():
                for prompt, one in zip(encoded, each, strict=True):
                    handles.append(self._submit(prompt, one))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """`generate` for one conversation (a list of messages) or several, through the chat template.

        `chat` as in `submit`, for all of them. Raises ValueError where there is no chat template.
        """
        alone = is_conversation(conversations) or not isinstance(conversations, list | tuple)
        batch = [conversations] if alone else list(conversations)
        for conversation in batch:
            if not is_conversation(conversation):
                raise TypeError(
                    f"chat() got {conversation!r}: a conversation is a list of messages {{'role': …, 'content': …}}; "
                    f"generate() takes text and token ids"
                )
        return self.generate(batch, params, **chat)  # type: ignore[arg-type]

    def handles(self) -> dict[int, RequestHandle]:
        """Handles of live requests and of the last 256 that ended, by request id."""
        return {record.request_id: self._handle(record) for record in self._driver.registry.records()}

    # --- control ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop after the step that runs now; returns when it has ended. Requests can still be submitted and cancelled."""
        self._driver.pause()

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._driver.resume()

    def step(self) -> StepOutput:
        """Run one step of a paused engine. Raises RuntimeError while it is running."""
        return self._driver.step()

    def run_until(
        self,
        kind: str | None = None,
        *,
        request: int | None = None,
        step: int | None = None,
        max_steps: int = MAX_STEPS,
        wait: bool = True,
    ) -> Event | None:
        """Go on and pause by itself, after the step that brings what is named and before the next one:

            run_until("eviction")               # also "preemption", "copy", "finish", … or an EventKind
            run_until(request=3)                # the next change of request 3
            run_until("finish", request=3)      # its end
            run_until(step=120)

        Returns the event; with `wait` False returns None at once, and a PAUSED event tells the end. The engine is paused in
        the end, whatever happens. Raises ValueError for what is no breakpoint or lies behind, RuntimeError when nothing
        runs, no request is left, `max_steps` have passed or somebody pauses the engine before it is reached.
        """
        armed = self._driver.run_until(breakpoint_at(kind, request=request, step=step), max_steps)
        return self._driver.wait_until(armed, self.while_waiting) if wait else None

    @property
    def steps_per_second(self) -> float | None:
        """How many steps it makes in a second at most, so that people can follow. None: as fast as it can."""
        return self._driver.steps_per_second

    @steps_per_second.setter
    def steps_per_second(self, limit: float | None) -> None:
        if limit is not None and not 0 < limit <= 1000:
            raise ValueError(f"steps_per_second={limit!r}: must be above 0 and at most 1,000, or None for no limit")
        self._driver.steps_per_second = limit

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no request is left; returns True.

        Raises TimeoutError after `timeout` seconds, RuntimeError when the engine is paused with requests left.
        """
        self._driver.require_open()
        if not self._driver.wait_idle(timeout, self.while_waiting):
            raise TimeoutError(
                f"{len(self._driver.registry.live)} requests are not finished after {timeout} s; they go on"
            )
        self._driver.require_open()
        return True

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False when running requests still hold text that can be found; it stays."""
        return self._driver.call(lambda core: core.reset_prefix_cache())

    def close(self) -> None:
        """Cancel what runs, release whoever waits, free the KV pool and end the thread. Any number of times."""
        self._driver.close()
        self.while_waiting.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- looking inside ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "running" | "paused" | "stopped" (closed)."""
        return self._driver.state

    def snapshot(self) -> EngineSnapshot:
        """The engine between two steps, copied. Waits for one step at most; of a closed engine, its last state."""
        return self._driver.snapshot()

    def record(self) -> Tape:
        """Keep what the engine does from now on, in bounded memory, while somebody holds the tape:

            tape = engine.record()
            ...
            tape.recording().state_at(12)       # equal to what snapshot() was after step 12

        All who ask get the same tape, so that many viewers cost what one costs. Raises EngineClosed.
        """
        return self._driver.record(self.info.plain(), self.config)

    def metrics(self) -> dict[str, float]:
        """Counters, gauges and histograms by name, vLLM's where it has one. Of a closed engine, the last ones."""
        return self._driver.metrics()

    def metrics_text(self) -> str:
        """The same in Prometheus' text format."""
        return self._driver.metrics_text()

    def check_integrity(self) -> None:
        """Raise RuntimeError if any block, reference count, table or queue contradicts another."""
        self._driver.call(lambda core: core.check_integrity())

    def decode_token(self, token_id: int) -> str:
        """One token as it reads inside a text; its number in brackets where there is no tokenizer.

        Raises ValueError for an id that the model does not have.
        """
        if not 0 <= token_id < self._encoder.vocab_size:
            raise ValueError(f"token_id={token_id!r}: must be from 0 to {self._encoder.vocab_size - 1}")
        return self._driver.token_text(token_id)

    def __repr__(self) -> str:
        info = self.info
        return f"<Engine {info.model_name}: {self.state}, {info.precision} on {info.device}, {info.num_blocks} blocks of {info.block_words}>"

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _submit(
        self, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0, deadline: float | None = None
    ) -> RequestHandle:
        return self._handle(self._driver.submit(prompt, params, priority, deadline))

    def _handle(self, record: RequestRecord) -> RequestHandle:
        return self._driver.registry.handle(record, self._driver, self)

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """What needs a tokenizer is checked, and done once, here: the core knows token ids only."""
        if params.stop and self._decoder is None:
            raise ValueError(
                f"stop={params.stop!r}: this model has no tokenizer; use stop_token_ids, or set tokenizer="
            )
        if params.structured_outputs is not None:
            params = replace(params, structured_outputs=self._grammars.compile(params.structured_outputs))
        return self._encoder.with_word_ids(params)


Engine.__signature__ = signature()  # type: ignore[attr-defined]


def _params(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params={params!r}: must be SamplingParams(...) or None")
    return params


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [_params(params)] * num_prompts
    if not isinstance(params, Sequence):
        raise TypeError(f"params={params!r}: must be SamplingParams(...), a list with one for each prompt, or None")
    if len(params) != num_prompts:
        raise ValueError(f"params has {len(params)} entries: must be one for each of the {num_prompts} prompts")
    return [_params(one) for one in params]
