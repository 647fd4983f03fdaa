"""Rows as tables: pandas where it is installed, else what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """A DataFrame of these rows, or the rows themselves where there is no pandas."""
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(list(rows))
