"""What happened as tables: `wb.tables.requests()`, `.steps()`, `.blocks()`, `.events()`, each a pandas DataFrame.

pandas is optional: without it the tables say so. Times are in seconds; those on time.monotonic() are called `time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvscope.engine.events import EventKind
from kvscope.engine.snapshot import BlockState


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """A DataFrame of these rows, or the rows themselves where there is no pandas."""
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(list(rows))


class Tables:
    """Of one engine, or of a recording in its place: as far back as its event log and its handles reach."""

    def __init__(self, engine: Any):
        self._engine = engine

    def requests(self) -> Any:
        """A row a request: how long it waited and ran, what was cached, what it wrote. Times that have not come are None."""
        return _frame([_request(handle) for _, handle in sorted(self._engine.handles().items())])

    def steps(self) -> Any:
        """A row a step: tokens, sequences, blocks and seconds, the numbers of its STEP event."""
        events = (event for event in self._engine.events.since(0)[0] if event.kind is EventKind.STEP)
        return _frame([{"step": event.step, "time": event.time, **event.numbers} for event in events])

    def blocks(self) -> Any:
        """A row a block of the newest state; `next_out` is its place in the order of eviction, from 1."""
        snapshot = self._engine.snapshot()
        places = {block: i for i, block in enumerate(snapshot.eviction_order.tolist(), 1)}
        rows = []
        for block in range(snapshot.num_blocks):
            owner = int(snapshot.owner[block])
            request = snapshot.requests[owner] if owner >= 0 else None
            rows.append({
                "block": block, "state": BlockState(snapshot.block_state[block]).name.lower(),
                "request": None if request is None else request.id, "sample": None if request is None else request.child,
                "readers": int(snapshot.ref_count[block]), "written": int(snapshot.filled[block]),
                "generation": int(snapshot.generation[block]), "last_used_step": int(snapshot.last_used_step[block]),
                "next_out": places.get(block),
            })  # fmt: skip
        return _frame(rows)

    def events(self) -> Any:
        """A row an event; `numbers` is a dict, as `kvscope.engine.events` lists them by kind."""
        rows = (event._asdict() for event in self._engine.events.since(0)[0])
        return _frame([{**row, "kind": str(row["kind"]), "cause": str(row["cause"])} for row in rows])

    def __repr__(self) -> str:
        return "<tables: requests(), steps(), blocks(), events()>"


def _frame(rows: list[dict[str, Any]]) -> Any:
    table = as_table(rows)
    if isinstance(table, list):
        raise ImportError("tables need pandas, which is not installed: pip install pandas")
    return table


def _request(handle: Any) -> dict[str, Any]:
    output = handle.partial()
    times, first = output.metrics, output.outputs[0]
    return {
        "request": output.request_id, "status": handle.status, "samples": len(output.outputs),
        "prompt_tokens": len(output.prompt_token_ids), "cached_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(sample.token_ids) for sample in output.outputs), "finish_reason": first.finish_reason,
        "preemptions": times.num_preemptions, "queue_time": times.queue_time, "ttft": times.ttft, "tpot": times.tpot,
        "e2e": times.e2e, "prompt": handle.prompt_text, "text": first.text,
    }  # fmt: skip
