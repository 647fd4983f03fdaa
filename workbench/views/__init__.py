"""One view a file; each has sources, a root and `update(frame)`, and can stand alone in a cell. See base.py.

`VIEWS` is the table of the drawn ones: a new view is a new file and one line here.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "block_map": ("block_map", "BlockMap"),
    "block_tables": ("block_tables", "BlockTables"),
    "throughput": ("throughput", "Throughput"),
    "memory": ("memory", "KVUse"),
    "timeline": ("timeline", "Timeline"),
    "prefix_tree": ("prefix_tree", "PrefixTree"),
    "pool_inset": ("pool_inset", "PoolInset"),
    "eviction_queue": ("eviction_queue", "EvictionQueue"),
    "ledger": ("ledger", "Ledger"),
    "batch": ("batch", "Batch"),
    "latency": ("latency", "Latency"),
    "queue": ("queue", "Queue"),
    "prefix_hits": ("prefix_hits", "PrefixHits"),
    "host": ("host", "Host"),
}


def view_class(name: str) -> type:
    """The class of a drawn view, imported on first use."""
    module, class_name = _HOMES[name]
    return getattr(importlib.import_module(f".{module}", __name__), class_name)


DRAWN = tuple(_HOMES)
