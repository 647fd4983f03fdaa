"""Which requests an engine has: those that live, and the latest that are over.

Any thread may add a request and look; only the driver thread ends one. Handles are kept alive by their users alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from .handle import RequestHandle
from .record import RequestRecord

if TYPE_CHECKING:
    from .driver import Driver
    from .engine import Engine

NUM_FINISHED_KEPT = 256  # requests that are over and still listed


class RequestRegistry:
    """`lock` guards the two tables; `idle` is notified when no request lives any more."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # as a record's: Ctrl-C may end a wait for `idle`
        self.idle = threading.Condition(self.lock)
        self.live: dict[int, RequestRecord] = {}
        self._finished: OrderedDict[int, RequestRecord] = OrderedDict()

    def records(self) -> list[RequestRecord]:
        """Live requests and the latest that are over, by id."""
        with self.lock:
            return sorted([*self._finished.values(), *self.live.values()], key=lambda record: record.request_id)

    def get(self, request_id: int) -> RequestRecord | None:
        """A live request, or one of the latest that are over."""
        with self.lock:
            return self.live.get(request_id) or self._finished.get(request_id)

    def handle(self, record: RequestRecord, driver: Driver, engine: Engine) -> RequestHandle:
        """The one handle of a request; it keeps `engine` open until the request is over."""
        with record.lock:
            handle = record.handle()
            if handle is None:
                handle = RequestHandle(record, driver, None if record.done else engine)
                record.handle = weakref.ref(handle)
            return handle

    def end(
        self,
        record: RequestRecord,
        status: str,
        error: BaseException | None = None,
        *,
        stop_reason: int | str | None = None,
    ) -> None:
        """The request is over: "finished" | "cancelled" | "failed". Wakes whoever waits for it, or for all. `stop_reason` is
        what cut off the samples that still ran."""
        with record.lock:
            record.finish(status, error, stop_reason)
            handle = record.handle()
        with self.lock:
            if self.live.pop(record.request_id, None) is not None:
                self._finished[record.request_id] = record
                while len(self._finished) > NUM_FINISHED_KEPT:
                    self._finished.popitem(last=False)
            if not self.live:
                self.idle.notify_all()
        if handle is not None:
            handle._engine = None  # may be the engine's last reference: it then closes itself, without waiting here
