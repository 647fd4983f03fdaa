"""A recording at the end of one step, with the face of an engine that stands still there: what viewers read."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ..events import Event
from ..info import EngineFacts
from ..outputs import RequestOutput
from ..snapshot import EngineSnapshot
from .recording import Recording
from .texts import RequestTrack


class PastEvents:
    """The log as it was: `next_index`, and `since(index)` as EventLog's."""

    def __init__(self, recording: Recording, moment: int):
        self._recording, self._moment = recording, moment

    @cached_property
    def next_index(self) -> int:
        return self._bounds[1]

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """(index of the oldest event that is recorded, index behind the last one of the moment)."""
        first = last = None
        for span in self._recording.spans:
            if span.first > self._moment:
                break
            starts, counts = span.moments["first_event"], span.counts["events"]
            at = min(self._moment - span.first, len(span) - 1)
            first = int(starts[0]) if first is None else first
            last = int(starts[at]) + int(counts[at])
        return (0, 0) if first is None or last is None else (first, last)

    def since(self, index: int) -> tuple[list[Event], int, int]:
        """Events from `index` on up to the end of the step, the index to ask with next, and how many of them were not recorded
        any more. One who was further on gets none: going back, a view begins anew with since(0)."""
        oldest, end = self._bounds
        if index >= end:
            return [], end, 0
        start = max(index, oldest)
        found: list[Event] = []
        for span in self._recording.spans:
            if span.first > self._moment:
                break
            if not len(span) or int(span.moments["first_event"][-1]) + int(span.counts["events"][-1]) <= start:
                continue
            found += span.events(0, min(self._moment - span.first + 1, len(span)))
        return [event for event in found if event.index >= start], end, max(0, oldest - index)


class PastRequest:
    """What a handle tells, as it was then."""

    def __init__(self, track: RequestTrack, moment: int, recording: Recording):
        standing = track.standing_at(moment)
        assert standing is not None
        self._track, self._moment, self._recording = track, moment, recording
        self.request_id = track.request_id
        self.status, self.done = standing.status, standing.done

    @property
    def prompt_text(self) -> str:
        return self._recording.prompt_text(self._track)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._track.prompt_token_ids)

    def partial(self) -> RequestOutput:
        output = self._track.at(self._moment)
        assert output is not None
        return output


class Moment:
    """`recording` at the end of `step`. Nothing moves here: `state` is "paused", and so is that of `snapshot()`;
    `recording.state_at(step).state` says what it was. Raises ValueError for a step that was not recorded."""

    state = "paused"

    def __init__(self, recording: Recording, step: int):
        self.recording, self.step = recording, step
        self._moment = recording.moment_at(step)
        self.events = PastEvents(recording, self._moment)

    @property
    def info(self) -> EngineFacts | None:
        return self.recording.info

    @cached_property
    def _snapshot(self) -> EngineSnapshot:
        return replace(self.recording.moment_state(self._moment).snapshot(), state=self.state)

    def snapshot(self) -> EngineSnapshot:
        """The same one every time."""
        return self._snapshot

    def handles(self) -> dict[int, PastRequest]:
        """Requests that were submitted by then, by id."""
        tracks = sorted(self.recording.requests.items())
        return {
            request_id: PastRequest(track, self._moment, self.recording)
            for request_id, track in tracks
            if track.standing_at(self._moment) is not None
        }

    def decode_token(self, token_id: int) -> str:
        return self.recording.decode_token(token_id)

    def __repr__(self) -> str:
        return f"<Moment step {self.step} of {self.recording!r}>"
