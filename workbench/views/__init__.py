"""One view a file; each has sources, a root and `update(frame)`, and can stand alone in a cell. See base.py.

`_CLASSES` is the table of the drawn ones: a new view is a new file, and one line here with its class.
"""

from __future__ import annotations

import importlib

_CLASSES = {
    "block_map": "BlockMap",
    "block_tables": "BlockTables",
    "throughput": "Throughput",
    "memory": "KVUse",
    "timeline": "Timeline",
    "prefix_tree": "PrefixTree",
    "pool_inset": "PoolInset",
    "eviction_queue": "EvictionQueue",
    "ledger": "Ledger",
    "batch": "Batch",
    "latency": "Latency",
    "queue": "Queue",
    "prefix_hits": "PrefixHits",
    "host": "Host",
}


def view_class(name: str) -> type:
    """The class of a drawn view, imported on first use."""
    return getattr(importlib.import_module(f".{name}", __name__), _CLASSES[name])


DRAWN = tuple(_CLASSES)
