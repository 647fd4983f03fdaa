"""`kvscope bench views`: what watching costs beside an engine at full speed, and what of it reaches the page.

For each size of the pool an engine of its own, with so many requests at once that it never rests, and the whole page on it as
a notebook shows it: the real viewer thread, its 2 % of CPU time, the real messages. Where a Chromium and playwright are on the
machine a page in it draws every message, and a frame counts when it has been painted; else it counts when it is sent. Only the
wire between the two, a comm or a websocket, is left out.

The cost is CPU time of threads, so that work beside it does not count: of each event that is noted, of the recording, of the
snapshots (all three on the engine's thread), and of the viewer's thread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .selection import TABS

if TYPE_CHECKING:
    from kvscope.engine.events import Event

    from .bench_page import Page
    from .workbench import Workbench

HEADERS = ["blocks", "what", "value", "most", "limit", "unit"]
SHARE_LIMIT = 2.0  # % of the time of steps
_NONE = "–"
_PARTS = ("events", "recording", "snapshots")  # of the engine's thread
# Bytes a frame at most, whatever the pool; the map's bound depends on it.
_BOUNDS = {"story": 500, "output": 500, "event_log": 1_000, "timeline": 1_000, "block_tables": 4_000,
           "prefix_tree": 6_000, "eviction_queue": 6_000, "throughput": 500, "batch": 500, "memory": 500, "ledger": 6_000,
           "latency": 6_000, "queue": 6_000, "prefix_hits": 500, "host": 6_000}  # fmt: skip
_MAP_BOUNDS = ((512, 3_000), (4_096, 15_000), (16_384, 20_000))  # up to so many blocks


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    """Add `views` to the benchmarks of the command line."""
    from kvscope.engine.bench import DTYPES, add_command, at_least

    views = add_command(benchmarks, "views", "what the page costs beside an engine at full speed, frame by frame")
    views.add_argument("--model", default="default", help="default, a Hugging Face id, a folder or a .gguf file")
    views.add_argument("--dtype", choices=DTYPES, default="auto")
    views.add_argument("--blocks", type=at_least(2), nargs="+", default=[128, 1024, 16384], help="sizes of the pool")
    views.add_argument("--requests", type=at_least(1), default=16, help="at work or waiting at any time (default 16)")
    views.add_argument("--seconds", type=at_least(2), default=20, help="of each size, after half as many to warm up")
    views.add_argument("--tab", choices=TABS, default="watch", help="which tab is open (default watch)")
    views.add_argument("--seed", type=int, default=0, help="of the requests' texts and lengths")
    views.add_argument("--no-browser", action="store_true", help="count what is sent, though there is a browser")
    views.add_argument("--json", help="also write the figures to this file")
    views.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvscope.engine.bench.machine import facts
    from kvscope.engine.bench.report import print_table

    from .bench_page import chromium

    rows: list[list] = []
    with chromium(wanted=not options.no_browser) as browser:
        for blocks in options.blocks:
            measured, info = measure(options, blocks, browser)
            rows += [[blocks, *row] for row in table(measured, blocks)]
        seen = "sent (no browser)" if browser is None else f"painted by Chromium {browser.version}"
    workload = (
        f"{options.requests} requests at a time of mixed traffic, seed {options.seed}; tab {options.tab} at 1,600 px, "
        f"{options.seconds} s of each pool"
    )
    notes = {"frames": f"those {seen}", "views": _versions()}
    print_table("kvscope bench views", facts(info, workload) | notes, HEADERS, rows, options.json)
    return 0


@dataclass
class Measured:
    """Of the steady part of one run. `frames`: bytes of each frame by view; `paints`: milliseconds of each, in a browser."""

    seconds: float = 0.0
    steps: int = 0
    in_steps: float = 0.0  # share of the time
    cpu: dict[str, float] = field(default_factory=dict)  # seconds by part
    frames: list[dict[str, int]] = field(default_factory=list)
    paints: list[float] = field(default_factory=list)
    views: list[str] = field(default_factory=list)  # those that can be seen, in reading order


def measure(options: argparse.Namespace, blocks: int, browser: Any = None) -> tuple[Measured, Any]:
    """One run of an engine with so many blocks, and its EngineInfo. `browser`: playwright's, or None."""
    from kvscope.engine.core import EngineCore
    from kvscope.engine.events import EventLog
    from kvscope.engine.recording.tape import Tape

    from .bench_page import Page
    from .workbench import Workbench

    functions = ((EventLog, "append"), (Tape, "mark"), (EngineCore, "snapshot"))
    with contextlib.ExitStack() as stack:
        clocks = {part: stack.enter_context(_clocked(*of)) for part, of in zip(_PARTS, functions, strict=True)}
        wb = stack.enter_context(
            Workbench(
                options.model, dtype=options.dtype, num_blocks=blocks, max_num_seqs=options.requests, seed=options.seed
            )
        )
        wb.choices.tab = options.tab
        wb._feed(partial(_keep_busy, wb, options.requests, _texts(options.seed), []))
        page = stack.enter_context(Page.of(wb, browser))
        for _ in page.until(time.monotonic() + options.seconds / 2):
            pass
        result = Measured(views=page.views)
        before = _Reading.of(wb, page, clocks)
        for text, painted in page.until(time.monotonic() + options.seconds):
            result.frames.append(page.bytes_of(text))
            result.paints += [] if painted is None else [painted]
        after = _Reading.of(wb, page, clocks)
        result.seconds, result.steps = after.at - before.at, after.steps - before.steps
        result.in_steps = _in_steps(wb.engine.events.since(before.index)[0], before.at, after.at)
        result.cpu = {part: after.cpu[part] - before.cpu[part] for part in after.cpu}
        return result, wb.engine.info


class _Reading(NamedTuple):
    """All that counts up, at one moment."""

    at: float
    steps: int
    index: int  # of the next event
    cpu: dict[str, float]

    @classmethod
    def of(cls, wb: Workbench, page: Page, clocks: dict[str, list[float]]) -> _Reading:
        index, steps = wb.engine.events.next_index, int(wb.engine.metrics()["kvscope:steps_total"])
        cpu = {part: clock[0] for part, clock in clocks.items()} | {"views": page.viewer.cpu_seconds}
        return cls(time.monotonic(), steps, index, cpu)


def _in_steps(events: list[Event], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end`, as far back as the log reaches, in which the engine was in a step."""
    begin = max(begin, events[0].time) if events else begin
    steps = [event for event in events if event.kind == "step" and begin < event.time <= end]
    return sum(min(event.numbers["seconds"], event.time - begin) for event in steps) / (end - begin)


def table(measured: Measured, blocks: int) -> list[list]:
    """Rows of HEADERS without the first column."""
    frames, seconds = measured.frames, measured.seconds
    rate = 8 if blocks <= 4_096 else 4 if blocks <= 16_384 else 2
    rows = [
        ["frames a second", len(frames) / seconds, _NONE, f"≥ {rate}", "/s"],
        ["a step", 1e3 * seconds / max(1, measured.steps), _NONE, _NONE, "ms"],
        ["time in steps", 100 * measured.in_steps, _NONE, _NONE, "%"],
    ]
    for view in (*measured.views, "page"):
        sizes = [frame.get(view, 0) for frame in frames] or [0]
        limit = _bound(view, blocks)
        rows.append(
            [f"bytes: {view}", sum(sizes) / len(sizes), max(sizes), f"≤ {limit:,}" if limit else _NONE, "B/frame"]
        )
    totals = [sum(frame.values()) for frame in frames] or [0]
    rows.append(["bytes: all", sum(totals) / len(totals), max(totals), _NONE, "B/frame"])
    shares = {part: 100 * spent / seconds for part, spent in measured.cpu.items()}
    rows += [[f"CPU: {part}", share, _NONE, _NONE, "% of step time"] for part, share in shares.items()]
    rows.append(["CPU: all", sum(shares.values()), _NONE, f"≤ {SHARE_LIMIT:g}", "% of step time"])
    rows.append(
        ["viewer, draw and send", 1e3 * measured.cpu["views"] / max(1, len(frames)), _NONE, _NONE, "CPU ms/frame"]
    )
    if measured.paints:
        paints = measured.paints
        rows.append(["browser, apply and paint", sum(paints) / len(paints), max(paints), _NONE, "ms/frame"])
    return rows


def _bound(view: str, blocks: int) -> int:
    """0: none is set."""
    if view in ("block_map", "pool_inset"):
        return next((bound for most, bound in _MAP_BOUNDS if blocks <= most), 80_000)
    return _BOUNDS.get(view, 0)


@contextlib.contextmanager
def _clocked(owner: type, name: str) -> Iterator[list[float]]:
    """Inside, calls of a method add their CPU seconds to the one number of the list; so does the clock itself, 1 µs a call."""
    method, spent = getattr(owner, name), [0.0]

    def clocked(*arguments: Any, **options: Any) -> Any:
        begun = time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            spent[0] += time.thread_time() - begun

    setattr(owner, name, clocked)
    try:
        yield spent
    finally:
        setattr(owner, name, method)


def _texts(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Questions without end, and how each is to be answered."""
    from .arrivals import drawn

    for number, arrival in enumerate(drawn("poisson", "mixed", max_tokens=128, burstiness=1.0, seed=seed)):
        sampling = {"max_tokens": arrival.max_tokens, "temperature": 0.8, "seed": seed + number, "ignore_eos": True}
        yield str(arrival.prompt), sampling


def _keep_busy(wb: Workbench, most: int, texts: Iterator, handles: list) -> float:
    """Ask again for each that is over; what the pool is too small for is left out. Seconds until the next look."""
    from .asking import ask

    handles[:] = [handle for handle in handles if not handle.done]
    for question, sampling in itertools.islice(texts, most - len(handles)):
        with contextlib.suppress(ValueError):
            handles.append(ask(wb.engine, question, sampling))
    return 0.02


def _versions() -> str:
    import bokeh
    import panel

    return f"Bokeh {bokeh.__version__}, Panel {panel.__version__}"
