"""An engine's event log as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

    steps      one track of slices, named by their prefill and decode tokens
    requests   a track each: waiting, prefill, decode, preempted or swapped out, one behind the other, and how it ended
    counters   blocks in use and cached; written slots; sequences running and waiting

Times are in microseconds since the first event. Where decode begins is known from the times of a request's tokens; of one that
ended too long ago for that, the slice is called running. Source: the Trace Event Format of Chromium, its JSON object form.
Needs the standard library, events and outputs only, live or recorded.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvscope.engine.events import Cause, Event, EventKind
from kvscope.engine.outputs import RequestOutput

_ENGINE, _REQUESTS, _STEPS = 1, 2, 1  # process ids; the thread of the steps
_ENDS = frozenset({EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED})
Clock = Callable[[float], float]


def save_trace(
    path: str | os.PathLike[str],
    events: Sequence[Event],
    outputs: Mapping[int, RequestOutput],
    *,
    title: str = "kvscope",
    lost: int = 0,
) -> Path:
    """Write the trace; the path. `outputs` by request id, for the times of tokens; `lost`: how many events there were before
    these, told in the file."""
    path = Path(path)
    document = {
        "traceEvents": trace_events(events, outputs, title=title),
        "displayTimeUnit": "ms",
        "otherData": {"producer": "kvscope", "events": len(events), "events lost before": lost},
    }
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    return path


def trace_events(
    events: Sequence[Event], outputs: Mapping[int, RequestOutput], *, title: str = "kvscope"
) -> list[dict[str, Any]]:
    """The entries of `traceEvents`: names first, then by time."""
    if not events:
        return list(_names(title, []))
    start = min(event.time - event.numbers.get("seconds", 0.0) for event in events)

    def clock(seconds: float) -> float:
        return round((seconds - start) * 1e6, 1)

    entries = [*_steps(events, clock), *_requests(events, outputs, clock)]
    entries.sort(key=lambda entry: entry["ts"])
    return [*_names(title, sorted({e.request_id for e in events if e.request_id >= 0})), *entries]


def _names(title: str, requests: Iterable[int]) -> Iterator[dict[str, Any]]:
    for pid, name in ((_ENGINE, title), (_REQUESTS, "requests")):
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": _ENGINE, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}}
    for number in requests:
        yield {"ph": "M", "pid": _REQUESTS, "tid": number, "name": "thread_name", "args": {"name": f"request {number}"}}


def _steps(events: Sequence[Event], clock: Clock) -> Iterator[dict[str, Any]]:
    """Slices and counters. A step's event is stamped a moment before its end, so its slice may not reach back into the one
    before it."""
    before = 0.0
    for event in events:
        if event.kind is not EventKind.STEP:
            continue
        n, end = event.numbers, clock(event.time)
        begin = min(end, max(before, clock(event.time - n["seconds"])))
        before = end
        prefill, decode = int(n["prefill_tokens"]), int(n["decode_tokens"])
        about = {
            "step": event.step, "prefill_tokens": prefill, "decode_tokens": decode, "sequences": int(n["sequences"]),
            "preempted": int(n["preempted"]), "schedule_us": round(n["schedule_seconds"] * 1e6, 1),
        }  # fmt: skip
        name = f"{prefill} prefill + {decode} decode"
        yield _slice(_ENGINE, _STEPS, "step", name, begin, end, about)
        for what, values in (
            ("blocks", {"used": n["used_blocks"], "cached": n["cached_blocks"]}),
            ("slots", {"written": n["used_slots"]}),
            ("sequences", {"running": n["running"], "waiting": n["waiting"]}),
        ):
            counts = {key: int(value) for key, value in values.items()}
            yield {"ph": "C", "pid": _ENGINE, "tid": 0, "ts": end, "name": what, "args": counts}


def _slice(pid: int, tid: int, cat: str, name: str, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    duration = round(max(0.0, end - begin), 1)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": duration, "name": name, "cat": cat, "args": about}


class _Track:
    """One request: its phase now and since when, and which of its samples live and are preempted."""

    def __init__(self, number: int, times: Sequence[float]):
        self.number, self.times = number, times
        self.phase, self.since = "", 0.0
        self.about: dict[str, Any] = {}
        self.live, self.preempted = {0}, set[int]()

    def close(self, now: float, clock: Clock) -> Iterator[dict[str, Any]]:
        """The slices of the phase that ends now; a running one in two, at the first token that came in it."""
        if not self.phase:
            return
        cut, first, second = now, self.phase, ""
        if self.phase == "running" and self.times:
            place = bisect_right(self.times, self.since)
            cut = self.times[place] if place < len(self.times) and self.times[place] < now else now
            first, second = "prefill", "decode" if cut < now else ""
        yield _slice(_REQUESTS, self.number, "request", first, clock(self.since), clock(cut), self.about)
        if second:
            yield _slice(_REQUESTS, self.number, "request", second, clock(cut), clock(now), {})
        self.phase, self.about = "", {}

    def enter(self, phase: str, now: float, about: Mapping[str, Any]) -> None:
        self.phase, self.since, self.about = phase, now, dict(about)


def _requests(events: Sequence[Event], outputs: Mapping[int, RequestOutput], clock: Clock) -> Iterator[dict[str, Any]]:
    tracks: dict[int, _Track] = {}
    for event in events:
        if event.request_id < 0:
            continue
        if event.request_id not in tracks:
            output = outputs.get(event.request_id)
            times = sorted(t for sample in output.outputs for t in sample.token_times) if output else []
            tracks[event.request_id] = _Track(event.request_id, times)
        yield from _follow(tracks[event.request_id], event, clock)
    for track in tracks.values():
        yield from track.close(events[-1].time, clock)


def _follow(track: _Track, event: Event, clock: Clock) -> Iterator[dict[str, Any]]:
    kind, now = event.kind, event.time
    if kind is EventKind.SUBMITTED:
        track.enter("waiting", now, {**event.numbers, "text": event.text})
    elif kind is EventKind.ADMITTED:
        yield from track.close(now, clock)
        track.enter("running", now, event.numbers)
    elif kind is EventKind.FORKED and event.cause is Cause.PARALLEL_SAMPLING:
        track.live = set(range(int(event.numbers["samples"])))
    elif kind is EventKind.PREEMPTED:
        track.preempted.add(event.child)
        if track.preempted >= track.live or track.phase == "":
            yield from track.close(now, clock)
            swapped = event.numbers.get("swapped_tokens")
            track.enter("swapped out" if swapped else "preempted", now, {**event.numbers, "because": str(event.cause)})
    elif kind is EventKind.RESUMED:
        track.preempted.discard(event.child)
        if track.phase != "running":
            yield from track.close(now, clock)
            track.enter("running", now, event.numbers)
    elif kind is EventKind.REFUSED:
        yield _mark(track.number, f"refused: {event.cause}", clock(now))
    elif kind in _ENDS:
        track.live.discard(event.child)
        if not track.live or kind is not EventKind.FINISHED:
            yield from track.close(now, clock)
            yield _mark(track.number, f"{kind}: {event.cause}", clock(now))


def _mark(number: int, name: str, at: float) -> dict[str, Any]:
    return {"ph": "i", "pid": _REQUESTS, "tid": number, "ts": at, "s": "t", "name": name, "cat": "request", "args": {}}
