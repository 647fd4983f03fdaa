"""A screen as an ipywidget, because widgets repaint from a thread while a cell blocks, and plain Panel objects do not.

One tick of changes is one message to the page. Replies of the page must reach Python while a cell blocks: JupyterLab
gives widget comms a subshell of their own, and ipykernel would send replies back to the shell that spoke last, the busy
one, so the widget asks for the subshell that the page chose. BokehJS travels inside the output: no CDN.

A page that opens later than the widget was made (a second view, a reload) starts from the state that the widget had
when its bundle was made; such a page finds out that it has missed a tick, and the bundle is made again.
"""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import bokeh
from bokeh.core.json_encoder import serialize_json
from bokeh.core.serialization import Serializer
from bokeh.document import Document
from bokeh.protocol.messages.patch_doc import patch_doc
from bokeh.resources import Resources
from jupyter_bokeh.widgets import BokehModel

if TYPE_CHECKING:
    from .layout import Screen

PATIENCE = 3.0  # seconds a fresh display waits for the page's hello before it starts without


def answer_where_the_page_asks(widget: Any) -> None:
    """Let the page's messages to `widget` run on the subshell that the page chose. ipykernel 7.4 sends them to the shell
    that published last instead: to the main one, where they would wait for the cell that blocks it."""
    comm = getattr(widget, "comm", None)
    if comm is not None and hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, chosen_by_the_page: chosen_by_the_page


class ScreenWidget(BokehModel):
    """`flush()` sends what has changed since the last one. All calls but the page's come from the documents' owner."""

    def __init__(self, screen: Screen, lock: threading.RLock):
        self._changes: list[Any] = []
        self._lock = lock
        self._made = time.monotonic()
        self._greeted = False
        self._done = False
        self._bus_id = screen.bus.id
        self._encoder: Serializer | None = None
        self._known: set[Any] = set()
        document = Document()
        document.add_root(screen.root)
        screen.add_script(document)
        super().__init__(screen.root)
        self._document.models.flush_synced()  # the bundle has them all
        answer_where_the_page_asks(self)

    @property
    def awake(self) -> bool:
        """Whether changes reach a page: it has said hello, or has had its time (it may be unable to say so)."""
        return self._greeted or time.monotonic() - self._made > PATIENCE

    def hello(self) -> None:
        """A page shows this widget now and hears every change from here on."""
        self._greeted = True

    def resync(self) -> None:
        """A page has missed a change: send the whole state to all pages."""
        self._changes.clear()
        self.render_bundle = self._model_to_traits(self._model)
        self._document.models.flush_synced()
        self._encoder = None

    def flush(self) -> None:
        if not self._changes:
            return
        changes, self._changes = self._changes, []
        header = patch_doc.create_header()
        for payload in (json.dumps(header), "{}", serialize_json({"events": self._encode(changes)})):
            self.send({"msg": "patch", "payload": payload})

    def _encode(self, changes: list[Any]) -> Any:
        """Bokeh's own message lists all models of the document every time, which costs more than the changes do. Here
        that list is made again only after a model was added. An encoder knows models by their address, so the models
        that it knows are kept as long as it is."""
        models = self._document.models
        if self._encoder is None:
            self._known = models.synced_references
            self._encoder = Serializer(references=self._known, deferred=False)
        encoded = self._encoder.encode(changes)
        if models._new_models:
            models.flush_synced(lambda model: not self._encoder.has_ref(model))
            self._encoder = None
        return encoded

    def close(self) -> None:
        """Any number of times: jupyter_bokeh's own fails the second time, which is when the widget is collected."""
        with self._lock:
            if not self._done:
                self._done = True
                super().close()

    # -- called by Bokeh and by the page ------------------------------------------------------------------------------

    def _document_patched(self, event) -> None:
        if event.setter is not self:
            self._changes.append(event)

    def _sync_model(self, model, content, buffers) -> None:
        """Only messages and events come from the page. Until its script runs it also echoes the changes that it was
        sent; obeyed, they would undo newer ones."""
        if content.get("kind") == "MessageSent" or content.get("model") == {"id": self._bus_id}:
            with self._lock:
                super()._sync_model(model, content, buffers)


@cache
def bokehjs_html() -> str:
    """BokehJS as a script that runs only where this version is not loaded yet."""
    scripts = Resources(mode="inline", components=["bokeh", "bokeh-widgets"], log_level="warn").js_raw
    code = "\n".join(scripts).replace("</script", "<\\/script")
    return f"<script>if (window.Bokeh?.version !== '{bokeh.__version__}') {{\n{code}\n}}</script>"


def kernel_shell() -> Any:
    """IPython's shell when it runs in a kernel that a notebook talks to; None in a terminal or plain Python."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


def current_cell() -> str:
    """The id of the cell that runs now; "" where the front end does not tell it."""
    shell = kernel_shell()
    parent = shell.get_parent() if shell is not None else {}
    return str((parent or {}).get("metadata", {}).get("cellId", ""))


def on_colab() -> bool:
    import sys

    return "google.colab" in sys.modules
