"""`wb.views`: each view of a workbench by name, drawn from the newest state whenever it is looked at.

wb.views.block_map                    # last line of a cell: this view alone, live
wb.views.block_map.source.data        # what it draws, without a browser
wb.views.requests.summary(), .table()
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .picture import save_picture
from .views import DRAWN

if TYPE_CHECKING:
    from .workbench import Workbench

NAMES = (*DRAWN, "requests", "output", "event_log")


class Views:
    def __init__(self, workbench: Workbench):
        self._workbench = workbench
        self._alone: dict[str, ViewAlone] = {}

    def __getattr__(self, name: str) -> ViewAlone:
        if name not in NAMES:
            raise AttributeError(f"no view {name!r}; the views are {', '.join(NAMES)}")
        if name not in self._alone:
            self._alone[name] = ViewAlone(self._workbench, name)
        return self._alone[name]

    def __dir__(self) -> list[str]:
        return list(NAMES)


class ViewAlone:
    """Everything else is the view's own: `source`, `root`, `summary()`, `table()`, `title`."""

    def __init__(self, workbench: Workbench, name: str):
        from .layout import Screen

        self._workbench, self._name = workbench, name
        self._screen = Screen(workbench.choices, lambda *message: None, only=name)

    def refresh(self) -> Any:
        """Draw the newest state; the view."""
        self._screen.update(self._workbench._tick_now(), self._workbench._status(), everything=True)
        return self._screen.panels[0].view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.refresh(), name)

    def save(self, path: str | PathLike[str], *, width: int = 1100) -> Path:
        """A picture of the newest state, `width` px wide: .png of any view, through a browser on this machine; .svg of those
        that draw themselves (the pool map). Raises ValueError, RuntimeError with a sentence."""
        from .layout import Screen

        screen = Screen(self._workbench.choices, lambda *message: None, only=self._name)
        screen.update(self._workbench._tick_now(), self._workbench._status(), everything=True)
        return save_picture(screen, path, width=width)

    def _ipython_display_(self) -> None:
        self._workbench.show(self._name)

    def __repr__(self) -> str:
        return f"<view {self._name}: {self.refresh().summary()}>"
