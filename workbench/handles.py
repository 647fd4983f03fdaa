"""A request handle as the last line of a cell: an ipywidget with streaming text, progress and a cancel button.

The engine knows no widget: `register` tells IPython what to do with the type by its name. One thread follows all handles
that are shown and ends with the last of them. A widget needs its kernel, so a saved copy stands below it, folded, and
when the request is over the widget gives way to plain HTML that needs nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from typing import Any

from .markup import esc, plural
from .theme import FONT, LIGHT, sample_letter
from .viewer import PERIOD, Pace

SAVED_EVERY = 2.0  # seconds between refreshes of the saved copy while the request runs
_TYPE = ("kvscope.engine.handle", "RequestHandle")


def register() -> None:
    """Have the IPython that runs now, if any, show handles as widgets. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        shell.display_formatter.ipython_display_formatter.for_type_by_name(*_TYPE, show)


def show(handle: Any) -> None:
    """Display `handle` in the cell that runs now."""
    from IPython.display import HTML, display

    if handle.done:
        display(HTML(_html(handle)))
        return
    card = _Card(handle)
    display(card.box, display_id=card.live_id)
    display(HTML(card.saved()), display_id=card.saved_id)
    _follower.follow(card)


class _Card:
    """The widget of one handle."""

    def __init__(self, handle: Any):
        import ipywidgets

        from .notebook import answer_where_the_page_asks

        self.handle = handle
        self.live_id, self.saved_id = (f"kvscope-{uuid.uuid4().hex[:8]}" for _ in range(2))
        self._saved_at = time.monotonic()
        self.text = ipywidgets.HTML(_html(handle))
        self.bar = ipywidgets.IntProgress(0, 0, self._goal(), layout={"width": "240px"})
        self.cancel = ipywidgets.Button(description="Cancel", tooltip=f"Cancel request {handle.request_id}")
        self.cancel.on_click(lambda _button: handle.cancel())
        self.box = ipywidgets.VBox([self.text, ipywidgets.HBox([self.bar, self.cancel])])
        answer_where_the_page_asks(self.cancel)

    def _goal(self) -> int:
        return (self.handle.params.max_tokens or 256) * self.handle.params.n

    def saved(self) -> str:
        return (
            f'<details><summary style="color:{LIGHT.muted}">request {self.handle.request_id}, saved copy</summary>'
            f"{_html(self.handle)}</details>"
        )

    def update(self) -> bool:
        """Show what has come; False when the request is over and the widget has given way to plain HTML."""
        from IPython.display import HTML, update_display

        if self.handle.done:
            update_display(HTML(_html(self.handle)), display_id=self.live_id)
            update_display(HTML(""), display_id=self.saved_id)
            for widget in (self.text, self.bar, self.cancel, *self.box.children, self.box):
                widget.close()
            return False
        html = _html(self.handle)
        if html != self.text.value:
            self.text.value = html
            done = sum(len(o.token_ids) for o in self.handle.partial().outputs)
            self.bar.value = min(done, self.bar.max)
        if time.monotonic() - self._saved_at > SAVED_EVERY:
            self._saved_at = time.monotonic()
            update_display(HTML(self.saved()), display_id=self.saved_id)
        return True


class _Follower:
    """One thread for all cards; it starts with the first and ends with the last."""

    def __init__(self) -> None:
        self._cards: list[_Card] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def follow(self, card: _Card) -> None:
        with self._lock:
            self._cards.append(card)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvscope-handles", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pace, wait = Pace(), PERIOD
        while True:
            time.sleep(wait)
            begun = time.thread_time()
            with self._lock:
                cards = list(self._cards)
            over = []
            for card in cards:
                alive = False
                with contextlib.suppress(Exception):  # one card that cannot be drawn must not stop the others
                    alive = card.update()
                if not alive:
                    over.append(card)
            wait = pace.spent(time.thread_time() - begun, time.monotonic())
            with self._lock:
                self._cards = [card for card in self._cards if card not in over]
                if not self._cards:
                    self._thread = None
                    return


_follower = _Follower()


def _html(handle: Any) -> str:
    """State, numbers and text of a request, with all looks written in: nothing is inherited from the notebook."""
    output = handle.partial()
    written = sum(len(o.token_ids) for o in output.outputs)
    ttft = f", first token after {output.metrics.ttft:.2f} s" if output.metrics.ttft is not None else ""
    error = f'<div style="color:{LIGHT.warn}">{esc(output.error)}</div>' if output.error else ""
    many = len(output.outputs) > 1
    texts = "".join(
        '<div style="white-space:pre-wrap;margin-top:4px">'
        + (f"<b>{output.request_id}{sample_letter(o.index)}</b> " if many else "")
        + f"{esc(o.text)}</div>"
        for o in output.outputs
    )
    style = f"font:15px/1.5 {FONT};color:{LIGHT.ink};background:{LIGHT.bg};padding:8px 12px;border-radius:9px"
    return (
        f'<div style="{esc(style)}"><b>Request {output.request_id}</b> <span style="color:{LIGHT.muted}">{handle.status}, '
        f"{plural(written, 'token')}, {output.num_cached_tokens} prompt tokens from the cache{ttft}</span>{error}{texts}"
        "</div>"
    )
