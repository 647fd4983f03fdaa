"""The one thing that is selected, shared by every view of a workbench; and the rest of what a viewer has chosen.

A selection is None, a request or a block. Choosing it again, Clear and Esc drop it; it survives steps and tab changes.
No view owns it: views report a choice, the next tick shows it everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .views.base import Selection

TABS = ("watch", "explain", "measure")


def parse(target: Selection | int | str | None, *, block: int | None = None) -> Selection | None:
    """`select(3)`, `select("3b")` (its request), `select(block=41)`, `select(None)`.

    Raises ValueError for anything else."""
    if block is not None:
        if target is not None:
            raise ValueError(f"select({target!r}, block={block!r}): name a request or a block, not both")
        if not isinstance(block, int) or isinstance(block, bool) or block < 0:
            raise ValueError(f"block={block!r}: must be a block id, 0 or more")
        return Selection("block", block)
    if target is None or isinstance(target, Selection):
        return target
    digits = str(target).rstrip("abcdefghijklmnopqrstuvwxyz")
    if isinstance(target, int | str) and not isinstance(target, bool) and digits.isdigit():
        return Selection("request", int(digits))
    raise ValueError(f"select({target!r}): must be a request id (3 or '3b'), block=<id>, or None")


@dataclass
class Choices:
    """What the people at the screen have chosen. Plain data: read at every tick, written by commands and methods."""

    selection: Selection | None = None
    tab: str = "watch"
    tables: set[str] = field(default_factory=set)  # views shown as their text twin
    all_tables: bool = False
    dark: bool = False
    room: bool = False
    theme_chosen: bool = False  # by the button; from then on the notebook's theme is not followed
    log_filter: str = "all"
    label: str = "owner"  # what the cells of the pool map say
    lens: int = 0  # block that the keyboard's cursor in a large pool map is at
    token: tuple[int, int, int] | None = None  # (request id, sample, index) whose alternatives the output panel shows
    sample: int = 0  # which sample of the selected request the output panel shows
    note: tuple[str, str] = ("", "")  # ("ok" | "warn", sentence) under the submit form
    trace_open: bool = False

    def select(self, selection: Selection | None) -> None:
        self.selection, self.sample = selection, 0

    def toggle(self, selection: Selection | None) -> None:
        """Select, or drop the selection when it is chosen again."""
        same = (
            selection is not None
            and self.selection is not None
            and (selection.kind, selection.id) == (self.selection.kind, self.selection.id)
        )
        self.select(None if same else selection)

    def move(self, request_ids: Sequence[int], by: int) -> None:
        """Previous or next request, around the ends; the first (or last) one when no request is selected."""
        if not request_ids:
            return
        if self.selection is not None and self.selection.kind == "request" and self.selection.id in request_ids:
            place = (request_ids.index(self.selection.id) + by) % len(request_ids)
        else:
            place = 0 if by > 0 else -1
        self.select(Selection("request", request_ids[place]))

    def shows_table(self, view: str) -> bool:
        return self.all_tables or view in self.tables
