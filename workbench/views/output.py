"""Newest output and inspector in one panel: what is written now, or everything about the selected request or block.

Nothing selected: the newest running request, streaming. A request: its state with the reason, prompt and cached tokens,
blocks, time to first token, its block table, its text. A block: what `block_card` says. Where log-probabilities were asked
for, unlikely tokens are dotted, and of the token that was clicked, or else the newest, the alternatives are shown as bars, with
the step in which it was chosen and where its keys and values lie.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from bokeh.models import Div
from kvscope.engine.events import EventKind
from kvscope.engine.outputs import CompletionOutput, RequestOutput
from kvscope.engine.snapshot import RequestState

from ..markup import ITEM, duration, esc, hue, one_stop, panel_head, plural, table
from ..theme import LIGHT, Theme, sample_letter
from .base import Frame, View, capped, label_of
from .block_card import BlockEvents, block_card
from .block_tables import group_words
from .requests import live_requests, phase

_UNLIKELY = 0.40
_STEPS = 4096  # whose times are kept
_EVERY = 0.2  # seconds between refreshes while the engine runs


class Output(View):
    """`texts(request_id)` gives what a request has written; `decode(token_id)` one token's text. The panel's head is
    part of the HTML, because its title follows the selection."""

    title = "Newest output"

    def __init__(
        self,
        theme: Theme = LIGHT,
        *,
        texts: Callable[[int], RequestOutput | None] = lambda request_id: None,
        decode: Callable[[int], str] = str,
        arrives: Callable[[int], int | None] = lambda request_id: None,
        shown: int = 420,
        stylesheets: Sequence = (),
        **callbacks,
    ):
        super().__init__(theme, **callbacks)
        self.root = Div(stylesheets=list(stylesheets), sizing_mode="stretch_width", margin=0, disable_math=True)
        self._texts, self._decode, self._arrives = texts, decode, arrives
        self._shown = shown  # characters of the text that stay on screen
        self.sample = 0
        self.token: tuple[int, int, int] | None = None  # (request id, sample, index) that was clicked
        self.as_table = False
        self.reset()

    def reset(self) -> None:
        self._drawn: tuple | None = None
        self._drawn_at = -1.0
        self._output: RequestOutput | None = None
        self._newest = 0
        self._events = BlockEvents()
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)  # (time, number)

    # -- what to show -------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        self.frame = frame
        self._events.learn(frame.events, frame.snapshot)
        for event in frame.events:
            if event.kind is EventKind.ADMITTED:
                self._newest = max(self._newest, event.request_id)
            elif event.kind is EventKind.STEP:
                self._steps.append((event.time, event.step))
        asked = (frame.selection, self.sample, self.token, self.as_table, frame.running)
        if frame.running and asked == self._drawn and frame.now - self._drawn_at < _EVERY:
            return
        self._drawn, self._drawn_at = asked, frame.now
        html = self.card(frame)
        if self.root.text != html:
            self.root.text = html

    def card(self, frame: Frame) -> str:
        """All of the panel, for what is selected in `frame`, whose events it has been given."""
        self.frame = frame
        request_id = self._request(frame)
        self._output = self._texts(request_id) if request_id else None
        headers, rows = self.table() if self.as_table else ([], [])
        body = f'<div class="scroll">{table(headers, rows)}</div>' if self.as_table else self._body(frame, request_id)
        head = panel_head(self._title(frame), self.summary(), view="output", as_table=self.as_table)
        return head + body

    def _request(self, frame: Frame) -> int:
        if frame.selection is not None:
            if frame.selection.kind == "request":
                return frame.selection.id
            return min(frame.selected_requests, default=0)
        writing = [g[0].id for g in live_requests(frame) if g[0].status == "running" and g[0].num_output_tokens > 4]
        return max(writing, default=self._newest)

    def _title(self, frame: Frame) -> str:
        return f"{frame.selection.kind.title()} {frame.selection.id}" if frame.selection else self.title

    def _completion(self) -> CompletionOutput | None:
        outputs = self._output.outputs if self._output else []
        return outputs[min(self.sample, len(outputs) - 1)] if outputs else None

    def _body(self, frame: Frame, request_id: int) -> str:
        if frame.selection is not None and frame.selection.kind == "block":
            return block_card(frame, frame.selection.id, self._texts, self._decode, self._events)
        if not request_id:
            return '<p class="sum">Text appears here while the model writes it.</p>'
        group = next((g for g in live_requests(frame) if g[0].id == request_id), [])
        if self._output is None and not group:
            step = self._arrives(request_id)
            there = (
                f'<a href="#" data-step="{step}" style="color:var(--accent)">step {step:,}</a>'
                if step is not None
                else ""
            )
            said = f"arrives at {there}" if there else "is not known at this step"
            return f'<p class="sum">Request {request_id} {said}.</p>'
        html = ""
        if frame.selection is not None:
            html += self._facts(frame, group)
        samples = self._output.outputs if self._output else []
        if len(samples) > 1:
            html += self._sample_buttons(request_id, len(samples))
        if frame.selection is not None and group:
            html += self._mini_table(frame, group)
        return html + self._text(group)

    # -- a request ----------------------------------------------------------------------------------------------------

    def _sample_buttons(self, request_id: int, count: int) -> str:
        chosen = min(self.sample, count - 1)
        buttons = "".join(
            f'<button type="button" data-sample="{i}" aria-pressed="{str(i == chosen).lower()}">'
            f"{request_id}{sample_letter(i)}</button>"
            for i in range(count)
        )
        return f'<div class="seg" style="margin-bottom:6px">{buttons}</div>'

    def _facts(self, frame: Frame, group: list[RequestState]) -> str:
        output = self._output
        state = phase(group) if group else _ended(output)
        if group and group[0].blocked_because and group[0].status != "running":
            state = f"{state}: {group[0].blocked_because}"
        prompt = len(output.prompt_token_ids) if output else group[0].num_prompt_tokens
        cached = group[0].num_cached_tokens if group else output.num_cached_tokens
        blocks = {b for r in group for t in r.block_tables for b in t.tolist() if b > 0}
        ttft = output.metrics.ttft if output else None
        rows = [
            ("State", state),
            ("Prompt", f"{plural(prompt, 'token')}, {cached} from the cache"),
            ("Blocks", f"{len(blocks)}"),
            ("First token", f"after {duration(ttft)}" if ttft is not None else "not yet"),
        ]
        if output is not None and output.error:
            rows.append(("Error", output.error))
        return '<dl class="facts2">' + "".join(f"<dt>{k}</dt><dd>{esc(v)}</dd>" for k, v in rows) + "</dl>"

    def _mini_table(self, frame: Frame, group: list[RequestState]) -> str:
        """The block table of the shown sample, one a KV group."""
        sequence = group[min(self.sample, len(group) - 1)]
        bar = "two" if frame.slots.barred(sequence.id) else ""
        html = ""
        for number, blocks in enumerate(sequence.block_tables):
            cells = []
            for block in blocks.tolist():
                if not block:
                    cells.append('<span class="null" title="out of the window">null</span>')
                    continue
                kind = "shared" if frame.snapshot.ref_count[block] > 1 else bar
                cells.append(
                    f'<button type="button" {ITEM} class="{kind}" style="background:{hue(sequence.id, frame.slots)}" '
                    f'data-b="{block}">{block}</button>'
                )
            if cells:
                words = group_words(frame, number) or "in reading order"
                html += f'<p class="sum" style="margin:2px 0 4px">Block table of {label_of(sequence)}, {words}</p>'
                html += one_stop("mini", f"Block table of {label_of(sequence)}, {words}", "".join(cells), across=True)
        return html

    def _text(self, group: list[RequestState]) -> str:
        completion = self._completion()
        writing = bool(group) and group[0].status == "running"
        caret = '<span class="caret"></span>' if writing and group[0].num_output_tokens else ""
        if completion is None or not completion.token_ids:
            why = "The prompt is still being computed." if writing else "Not started yet."
            return f'<div class="out"><span class="pr">{why}</span></div>'
        if completion.logprobs:
            tokens = one_stop("out", "Tokens", f"{self._marked(completion)}{caret}", across=True)
            return tokens + self._alternatives(completion, group)
        text = completion.text
        cut = "… " if len(text) > self._shown else ""
        return f'<div class="out">{cut}{esc(text[-self._shown :].lstrip())}{caret}</div>'

    def _marked(self, completion: CompletionOutput) -> str:
        """The newest tokens; an unlikely one is dotted, the one that is explained below is framed."""
        first, shown = max(0, len(completion.token_ids) - self._shown // 5), self._explained(completion)
        pieces = []
        for i in range(first, len(completion.token_ids)):
            token = completion.token_ids[i]
            p = math.exp(completion.logprobs[i].get(token, 0.0)) if i < len(completion.logprobs) else 1.0
            kind = "now" if i == shown else "lo" if p < _UNLIKELY else ""
            place = f"{self._output.request_id}:{completion.index}:{i}"
            text = self._decode(token)
            name = "" if text.strip() else ' aria-label="blank"'
            pieces.append(f'<span class="{kind}" data-token="{place}" {ITEM} role="button"{name}>{esc(text)}</span>')
        return ("… " if first else "") + "".join(pieces)

    def _explained(self, completion: CompletionOutput) -> int:
        """Which token is explained: the one that was clicked, if it is of this text, else the newest."""
        newest = len(completion.token_ids) - 1
        if self.token is None or self.token[:2] != (self._output.request_id, completion.index):
            return newest
        return min(self.token[2], newest)

    def _alternatives(self, completion: CompletionOutput, group: list[RequestState]) -> str:
        index = self._explained(completion)
        chosen = completion.token_ids[index]
        known = completion.logprobs[index] if index < len(completion.logprobs) else {}
        ranked = sorted(known.items(), key=lambda item: -item[1])[:5]
        if len(ranked) < 2:
            return ""
        rows = "".join(
            f"<code{_bold(token == chosen)}>{esc(self._decode(token).strip() or self._decode(token))}</code>"
            f'<span class="bar{" taken" if token == chosen else ""}" style="width:{max(1, 100 * math.exp(lp)):.0f}%">'
            f"</span><span>{math.exp(lp):.2f}</span>"
            for token, lp in ranked
        )
        place = len(self._output.prompt_token_ids) + index
        step = self._step_of(completion, index)
        there = f'<a href="#" data-step="{step}" style="color:var(--accent)">step {step}</a>'
        at = f" at {there}" if step is not None else ""
        return (
            f'<div class="alts"><span class="hd">Token {place + 1}{at}{self._stored(place, group)}</span>{rows}</div>'
            f'<p class="sum" style="margin:7px 0 0"><span style="border-bottom:2px dotted var(--waste)">dotted</span>: '
            f"less likely than {_UNLIKELY:.2f}; click a token to see what else it might have been</p>"
        )

    def _step_of(self, completion: CompletionOutput, index: int) -> int | None:
        """The step that chose a token: the last one that had been computed when it came."""
        if index >= len(completion.token_times):
            return None
        before = bisect_right(self._steps, (completion.token_times[index], math.inf))
        return self._steps[before - 1][1] if before else None

    def _sequence(self, group: list[RequestState]) -> RequestState | None:
        """The shown sample, while it lives."""
        return next((r for r in group if r.child == min(self.sample, len(self._output.outputs) - 1)), None)

    def _stored(self, position: int, group: list[RequestState]) -> str:
        """Where the keys and values of the token at `position` lie; nothing while they are not computed yet."""
        sequence = self._sequence(group)
        if sequence is None or position >= sequence.num_computed_tokens:
            return ", stored with the next step" if sequence is not None else ""
        places, slots = [], []
        for number, blocks in enumerate(sequence.block_tables):
            logical, slot = divmod(position, self.frame.snapshot.block_size_of(number))
            block, words = int(blocks[logical]), group_words(self.frame, number)
            link = f'<a href="#" data-b="{block}" style="color:var(--accent)">{block}</a>' if block else "null"
            places.append(f"block {link}" + (f" ({words})" if words else ""))
            slots.append(slot)
        return f", stored in {' and '.join(places)}, {_slot_words(slots)}"

    @property
    def text(self) -> str:
        """All that the shown sample has written."""
        completion = self._completion()
        return completion.text if completion is not None else ""

    # -- twins --------------------------------------------------------------------------------------------------------

    def restyle(self, theme: Theme) -> None:
        self.theme = theme

    def summary(self) -> str:
        frame = self.frame
        if frame is not None and frame.selection is not None and frame.selection.kind == "block":
            block = frame.selection.id
            if 0 <= block < frame.snapshot.num_blocks:
                return f"Block {block}: {frame.snapshot.filled[block]} of {frame.snapshot.slots[block]} slots written."
        completion = self._completion()
        if completion is None:
            return "Nothing has been written yet."
        many = len(self._output.outputs) > 1
        sample = f", sample {self._output.request_id}{sample_letter(completion.index)}" if many else ""
        return f"Request {self._output.request_id}{sample}, {plural(len(completion.token_ids), 'token')} so far."

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["#", "Token", "Probability", "Step", "Block", "Slot"]
        completion = self._completion()
        if completion is None:
            return headers, []
        group = next((g for g in live_requests(self.frame) if g[0].id == self._output.request_id), [])
        sequence, rows = self._sequence(group), []
        for i in range(max(0, len(completion.token_ids) - 100), len(completion.token_ids)):
            token = completion.token_ids[i]
            known = completion.logprobs[i] if completion.logprobs and i < len(completion.logprobs) else {}
            p = f"{math.exp(known[token]):.2f}" if token in known else "–"
            step, blocks, slot = self._step_of(completion, i), "–", "–"
            position = len(self._output.prompt_token_ids) + i
            if sequence is not None and position < sequence.num_computed_tokens:
                places = [
                    (table, *divmod(position, self.frame.snapshot.block_size_of(group)))
                    for group, table in enumerate(sequence.block_tables)
                ]
                blocks = " ".join(str(table[logical] or "null") for table, logical, _ in places)
                slot = " ".join(map(str, dict.fromkeys(slot for *_, slot in places)))
            rows.append([str(i), self._decode(token), p, "–" if step is None else str(step), blocks, slot])
        return headers, capped(rows)


def _slot_words(slots: list[int]) -> str:
    """Where blocks hold different numbers of tokens, a slot in each."""
    some = dict.fromkeys(slots)
    return f"slot {slots[0]}" if len(some) == 1 else f"slots {' and '.join(map(str, slots))}"


def _bold(yes: bool) -> str:
    return ' style="font-weight:700"' if yes else ""


def _ended(output: RequestOutput | None) -> str:
    if output is None or not output.outputs:
        return "not known"
    return f"finished: {output.outputs[0].finish_reason}" if output.finished else "waiting"
