"""The list of live requests, which is also the colour key: chip, what it does now, its newest words, blocks held.

A request with several samples is one row. Finished ones collapse to a count. A click on a row selects the request in
every view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from bokeh.models import Div
from kvscope.engine.events import EventKind
from kvscope.engine.outputs import RequestOutput
from kvscope.engine.snapshot import RequestState

from ..markup import ITEM, chip, esc, one_stop, plural
from ..theme import LIGHT, Theme
from .base import ENDED, Frame, View, capped

_ENDS = (EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED, EventKind.REFUSED)
_TAIL = 60  # characters of the newest text in a row
_TEXT_EVERY = 0.25  # seconds between refreshes of the text while the engine runs


class Requests(View):
    title = "Requests"

    def __init__(
        self,
        theme: Theme = LIGHT,
        *,
        texts: Callable[[int], RequestOutput | None] = lambda request_id: None,
        stylesheets: Sequence = (),
        **callbacks,
    ):
        super().__init__(theme, **callbacks)
        self.root = Div(stylesheets=list(stylesheets), sizing_mode="stretch_width", margin=0, disable_math=True)
        self._texts = texts
        self.reset()

    def reset(self) -> None:
        self._tails: dict[int, str] = {}
        self._tails_at = -1.0
        self._last_id = 0
        self.num_finished = 0

    def update(self, frame: Frame) -> None:
        self.frame = frame
        groups = live_requests(frame)
        live = {group[0].id for group in groups}
        # Ids only grow and none is used twice, so this holds however many events were skipped. Events may be newer than the
        # snapshot: a request that has only just arrived is not in it, and has not finished.
        ended = (event.request_id for event in frame.events if event.kind in _ENDS)
        self._last_id = max(self._last_id, *live, *ended, 0)
        counters = frame.snapshot.counters
        known = counters.get("vllm:num_requests_running", len(live)) + counters.get("vllm:num_requests_waiting", 0)
        self.num_finished = max(self.num_finished, self._last_id - max(int(known), len(live)))
        if frame.now - self._tails_at >= _TEXT_EVERY or not frame.running:
            self._tails_at = frame.now
            self._tails = {request_id: self._tail(request_id) for request_id in live}
        rows = "".join(self._row(frame, group) for group in groups)
        done = f'<p class="sum" style="margin:6px 5px 0">{plural(self.num_finished, "request")} finished</p>'
        rows = one_stop("reqs", self.title, rows) if rows else ""
        text = rows + (done if self.num_finished else "")
        if self.root.text != text:
            self.root.text = text

    def _tail(self, request_id: int) -> str:
        output = self._texts(request_id)
        if output is None or not output.outputs:
            return ""
        text = " ".join(output.outputs[0].text[-2 * _TAIL :].split())
        return f"… {text[-_TAIL:].partition(' ')[2] or text[-_TAIL:]}" if len(text) > _TAIL else text

    def _row(self, frame: Frame, group: list[RequestState]) -> str:
        first = group[0]
        chosen = frame.selection is not None and frame.selection.kind == "request" and frame.selection.id == first.id
        dimmed = bool(frame.selection) and first.id not in frame.selected_requests
        bad = " w" if first.status == "preempted" else ""
        words = self._tails.get(first.id, "") or first.label
        text = f'<span class="tx">{esc(words)}</span>' if words else ""
        why = f' title="{esc(first.blocked_because)}"' if first.blocked_because else ""
        return (
            f'<div class="row{" on" if chosen else ""}{" dim" if dimmed else ""}" data-r="{first.id}" {ITEM} '
            f'role="button"{why}>{chip(str(first.id), first.id, frame.slots)}<span class="st{bad}">{phase(group)}</span>'
            f'<span class="num">{_held(group)}</span>{text}</div>'
        )

    def restyle(self, theme: Theme) -> None:
        self.theme = theme

    def summary(self) -> str:
        if self.frame is None:
            return "No requests yet."
        counts = [phase(group).split()[0].rstrip(",") for group in live_requests(self.frame)]
        parts = [f"{counts.count(name)} in {name}" for name in ("decode", "prefill", "recompute") if name in counts]
        parts += [f"{counts.count(name)} {name}" for name in ("waiting", "preempted") if name in counts]
        parts += [f"{counts.count('swapped')} swapped out"] if "swapped" in counts else []
        finished = f"{plural(self.num_finished, 'request')} finished"
        return (
            f"{', '.join(parts)}; {finished}."
            if parts
            else f"No request is running; {finished}."
            if self.num_finished
            else "No requests yet."
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Request", "State", "Tokens", "Blocks", "Why"]
        if self.frame is None:
            return headers, []
        rows = []
        for group in live_requests(self.frame):
            tokens = sum(r.num_output_tokens for r in group) + group[0].num_prompt_tokens
            rows.append([str(group[0].id), phase(group), f"{tokens:,}", str(_blocks(group)), group[0].blocked_because])
        return headers, capped(rows)


def live_requests(frame: Frame) -> list[list[RequestState]]:
    """The live requests in order of arrival, each as the list of its samples."""
    groups = [list(group) for _, group in groupby(frame.snapshot.requests, key=lambda r: r.id)]
    return [group for group in groups if any(r.status not in ENDED for r in group)]


def phase(group: list[RequestState]) -> str:
    """What a request does now: decode, prefill 64/222, recompute 12/90, waiting, preempted or swapped out."""
    live = [r for r in group if r.status not in ENDED]
    if not live:
        return group[0].status
    first = live[0]
    if first.status != "running":
        return "swapped out" if first.host_tables else first.status
    goal = first.num_prompt_tokens + first.num_output_tokens
    if first.num_output_tokens == 0:
        return f"prefill {first.num_computed_tokens}/{first.num_prompt_tokens}"
    if first.num_computed_tokens < goal - 1:
        return f"recompute {first.num_computed_tokens}/{goal}"
    return f"decode, {len(live)} of {first.num_samples}" if first.num_samples > 1 else "decode"


def _blocks(group: list[RequestState]) -> int:
    return len({b for r in group for table in r.block_tables for b in table.tolist() if b > 0})


def _held(group: list[RequestState]) -> str:
    if group[0].status == "waiting":
        return "in queue"
    if group[0].host_tables:
        return "on the host"
    return plural(_blocks(group), "block")
