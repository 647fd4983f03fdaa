"""What requests have written, moment by moment: the lists that their records hold anyway, and when each entry came.

Tokens and pieces of text are only ever added to, so one number an entry (the moment with which it was there) tells every
earlier state. A beam is another text after every step: of each change the tokens behind those that stayed are kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from ..record import BeamRecord, RequestRecord, SampleRecord
    from ..registry import RequestRegistry

KEPT = 256  # requests that ended before the first recorded step, as an engine keeps them
TOKEN_BYTES = 120  # of a token of a request that is over: its id, time, piece of text and moments

End = tuple[int, str, "int | str | None"]  # moment, finish_reason, stop_reason


class Standing(NamedTuple):
    """What a record says of its request beside the texts, from `moment` on."""

    moment: int
    status: str
    done: bool
    error: str | None
    num_cached_tokens: int
    has_prompt_logprobs: bool
    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float | None
    num_output_tokens: int
    num_preemptions: int


class SampleTrack:
    """One sample. The lists are those of its record; `token_moments` and `piece_moments` have an entry for each."""

    __slots__ = ("end", "index", "logprobs", "piece_moments", "pieces", "token_ids", "token_moments", "token_times")

    def __init__(
        self, index: int, token_ids: list[int], token_times: Sequence[float], pieces: list[str],
        logprobs: list[dict[int, float]] | None,
    ):  # fmt: skip
        self.index = index
        self.token_ids, self.token_times, self.pieces, self.logprobs = token_ids, token_times, pieces, logprobs
        self.token_moments, self.piece_moments = array("i"), array("i")
        self.end: End | None = None

    def follow(self, sample: SampleRecord, moment: int) -> None:
        for entries, moments in ((self.token_ids, self.token_moments), (self.pieces, self.piece_moments)):
            for _ in range(len(entries) - len(moments)):
                moments.append(moment)
        if self.end is None and sample.finish_reason is not None:
            self.end = (moment, sample.finish_reason, sample.stop_reason)

    def at(self, moment: int) -> CompletionOutput:
        count = bisect_right(self.token_moments, moment)
        token_ids, logprobs, cumulative = self.token_ids[:count], None, None
        if self.logprobs is not None:
            logprobs, cumulative = self.logprobs[:count], 0.0
            for token_id, tops in zip(token_ids, logprobs, strict=True):
                cumulative += tops[token_id]
        reason, stop = _end_at(self.end, moment)
        return CompletionOutput(
            index=self.index,
            text="".join(self.pieces[: bisect_right(self.piece_moments, moment)]),
            token_ids=token_ids,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            token_times=list(self.token_times[:count]),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class BeamTrack:
    """One beam. `changes`: (moment, tokens that stayed, tokens behind them, log-probability). `read(token_ids, stopped)` makes
    the text, which nobody has made before somebody looks; of a file `texts` holds it: (characters that stayed, text behind
    them) for each change, and `end_text` is that of the end."""

    __slots__ = ("_last", "changes", "end", "end_text", "index", "read", "texts")

    def __init__(self, index: int, read: Callable[[list[int], bool], str] | None):
        self.index, self.read = index, read
        self.changes: list[tuple[int, int, list[int], float | None]] = []
        self.texts: list[tuple[int, str]] = []
        self.end: End | None = None
        self.end_text = ""
        self._last: list[int] = []

    def follow(self, beam: BeamRecord, moment: int) -> None:
        if beam.token_ids is not self._last:
            old, new = self._last, beam.token_ids
            same = len(old) if new[: len(old)] == old else common_length(old, new)
            self.changes.append((moment, same, new[same:], beam.cumulative_logprob))
            self._last = new
        if self.end is None and beam.finish_reason is not None:
            self.end = (moment, beam.finish_reason, beam.stop_reason)

    def at(self, moment: int) -> CompletionOutput:
        count = bisect_right(self.changes, moment, key=lambda change: change[0])
        token_ids: list[int] = []
        for _, same, rest, _ in self.changes[:count]:
            token_ids[same:] = rest
        reason, stop = _end_at(self.end, moment)
        return CompletionOutput(
            index=self.index,
            text=self.text_of(token_ids, count, reason),
            token_ids=token_ids,
            cumulative_logprob=self.changes[count - 1][3] if count else None,
            finish_reason=reason,
            stop_reason=stop,
        )

    def text_of(self, token_ids: list[int], count: int, reason: str | None = None) -> str:
        """After `count` changes, which gave these tokens; `reason`: why it ended."""
        if self.read is not None:
            return self.read(token_ids, reason == "stop")
        if reason is not None:
            return self.end_text
        text = ""
        for same, rest in self.texts[:count]:
            text = text[:same] + rest
        return text

    @property
    def num_tokens(self) -> int:
        return sum(len(rest) + 4 for _, _, rest, _ in self.changes)


class RequestTrack:
    """One request."""

    __slots__ = (
        "_record",
        "label",
        "prompt",
        "prompt_logprobs",
        "prompt_text",
        "prompt_token_ids",
        "request_id",
        "samples",
        "standings",
    )

    def __init__(self, request_id: int, prompt: str | None, prompt_token_ids: list[int], label: str):
        self.request_id = request_id
        self.prompt_text = prompt  # None: its token ids are to be decoded
        self.prompt, self.prompt_token_ids, self.label = prompt, prompt_token_ids, label
        self.samples: list[SampleTrack | BeamTrack] = []
        self.standings: list[Standing] = []
        self.prompt_logprobs: list[dict[int, float] | None] | None = None  # all of them, once they are there
        self._record: RequestRecord | None = None

    @classmethod
    def of(cls, record: RequestRecord) -> RequestTrack:
        from ..record import BeamRecord

        prompt = record.prompt
        track = cls(record.request_id, prompt.text, prompt.token_ids, prompt.label)
        track._record = record
        for sample in record.samples:
            if isinstance(sample, BeamRecord):
                track.samples.append(BeamTrack(sample.index, sample.read))
            else:
                lists = sample.token_ids, sample.token_times, sample.pieces, sample.logprobs
                track.samples.append(SampleTrack(sample.index, *lists))
        return track

    def follow(self, moment: int) -> None:
        record = self._record
        assert record is not None
        with record.lock:
            for track, sample in zip(self.samples, record.samples, strict=True):
                track.follow(sample, moment)  # type: ignore[arg-type]
            times = record.metrics
            if record.prompt_logprobs is not None:
                self.prompt_logprobs = record.prompt_logprobs
            standing = (
                record.status, record.done, None if record.error is None else str(record.error),
                record.num_cached_tokens, record.prompt_logprobs is not None, times.arrival, times.scheduled,
                times.first_token, times.finished, times.num_output_tokens, times.num_preemptions,
            )  # fmt: skip
            if not self.standings or self.standings[-1][1:] != standing:
                self.standings.append(Standing(moment, *standing))
            if record.done:
                self._record = None  # nothing more will come

    @property
    def is_over(self) -> bool:
        return self.standings[-1].done

    @property
    def last_moment(self) -> int:
        """When it last changed."""
        return self.standings[-1].moment

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + sum(sample.num_tokens for sample in self.samples)

    def standing_at(self, moment: int) -> Standing | None:
        """None before it was submitted."""
        place = bisect_right(self.standings, moment, key=lambda standing: standing.moment)
        return self.standings[place - 1] if place else None

    def at(self, moment: int) -> RequestOutput | None:
        standing = self.standing_at(moment)
        if standing is None:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample.at(moment) for sample in self.samples],
            finished=standing.done,
            num_cached_tokens=standing.num_cached_tokens,
            metrics=RequestMetrics(
                arrival=standing.arrival,
                scheduled=standing.scheduled,
                first_token=standing.first_token,
                finished=standing.finished,
                num_output_tokens=standing.num_output_tokens,
                num_preemptions=standing.num_preemptions,
            ),
            prompt_logprobs=list(self.prompt_logprobs or ()) if standing.has_prompt_logprobs else None,
            error=standing.error,
        )


class Texts:
    """Of all requests of one engine. Called by its thread."""

    def __init__(self) -> None:
        self._tracks: dict[int, RequestTrack] = {}

    def follow(self, registry: RequestRegistry, request_ids: Iterable[int], moment: int) -> int:
        """What these requests have written since the last moment. Returns the bytes of those that are over now."""
        ended = 0
        for request_id in request_ids:
            track = self._tracks.get(request_id)
            if track is None:
                record = registry.get(request_id)
                if record is None:  # refused, or none of a request
                    continue
                track = self._tracks[request_id] = RequestTrack.of(record)
            elif track.is_over:
                continue
            track.follow(moment)
            if track.is_over:
                ended += TOKEN_BYTES * track.num_tokens
        return ended

    def forget(self, moment: int) -> None:
        """Nobody asks for what was before this moment any more: requests that were over by then go, but for the latest."""
        over = [track for track in self._tracks.values() if track.is_over and track.last_moment <= moment]
        for track in sorted(over, key=lambda track: track.last_moment)[:-KEPT]:
            del self._tracks[track.request_id]

    def view(self) -> dict[int, RequestTrack]:
        """By request id, in order of arrival."""
        return dict(self._tracks)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading entries two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _end_at(end: End | None, moment: int) -> tuple[str | None, int | str | None]:
    return (None, None) if end is None or end[0] > moment else end[1:]
