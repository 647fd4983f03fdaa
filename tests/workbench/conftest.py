"""What the workbench tests share."""

import pytest
from bokeh.document import Document
from bokeh.protocol import Protocol


class Wire:
    """A document with one view, and what its changes weigh on the way to a browser."""

    def __init__(self, view):
        self.events = []
        self.document = Document()
        self.document.add_root(view.root)
        self.document.on_change(self.events.append)

    def size(self) -> int:
        """Bytes of the changes since the last call, as one message with its buffers."""
        if not self.events:
            return 0
        message = Protocol().create("PATCH-DOC", self.events)
        self.events.clear()
        return len(message.content_json) + sum(memoryview(buffer.data).nbytes for buffer in message._buffers)

    def sources_changed(self) -> list[str]:
        """Ids of the sources that changed since the last look, one entry a change."""
        changed = [getattr(e, "column_source", None) or getattr(e, "model", None) for e in self.events]
        return [model.id for model in changed if type(model).__name__ == "ColumnDataSource"]


@pytest.fixture
def wire():
    return Wire
