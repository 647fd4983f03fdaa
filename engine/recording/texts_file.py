"""What requests wrote, as JSON and columns of numbers, and back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .archive import Damaged
from .texts import BeamTrack, RequestTrack, SampleTrack, Standing, common_length

if TYPE_CHECKING:
    from .recording import Recording

Logprobs = list[dict[int, float] | None]

# name: (dtype, columns); of all samples one after the other, in the order of the page's requests
_ARRAYS: dict[str, tuple[str, int]] = {
    "prompt": ("<i4", 0),  # token ids
    "token": ("<i4", 2),  # id, moment
    "token_time": ("<f8", 0),
    "piece": ("<i4", 2),  # characters, moment
    "tops": ("<i4", 0),  # of each token with log-probabilities, how many; −1 where there are none
    "top_token": ("<i4", 0),
    "top_logprob": ("<f8", 0),
}


def packed(recording: Recording) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """(a page a request, arrays). What came after the last moment of the recording stays out."""
    flat: dict[str, list] = {name: [] for name in _ARRAYS}
    pages = []
    last = recording.num_moments - 1
    for _, track in sorted(recording.requests.items()):
        standings = [list(standing) for standing in track.standings if standing.moment <= last]
        if not standings:
            continue
        flat["prompt"] += track.prompt_token_ids
        known = track.prompt_logprobs if standings[-1][Standing._fields.index("has_prompt_logprobs")] else None
        pages.append(
            {
                "id": track.request_id,
                "label": track.label,
                "prompt": track.prompt,
                "prompt_text": recording.prompt_text(track),
                "prompt_tokens": len(track.prompt_token_ids),
                "standings": standings,
                "prompt_logprobs": None if known is None else _pack_logprobs(known, flat),
                "samples": [_pack_sample(sample, last, flat) for sample in track.samples],
            }
        )
    arrays = {}
    for name, (dtype, columns) in _ARRAYS.items():
        held = np.array(flat[name], dtype)
        arrays[f"text/{name}"] = held.reshape(-1, columns) if columns else held
    return pages, arrays


def token_texts(recording: Recording) -> dict[str, str]:
    """How each token that occurs reads inside a text."""
    ids: set[int] = set()
    for track in recording.requests.values():
        ids.update(track.prompt_token_ids)
        for tops in track.prompt_logprobs or ():
            ids.update(tops or ())
        for sample in track.samples:
            if isinstance(sample, BeamTrack):
                for _, _, rest, _ in sample.changes:
                    ids.update(rest)
            else:
                ids.update(sample.token_ids)
                for tops in sample.logprobs or ():
                    ids.update(tops)
    return {str(token_id): recording.decode_token(token_id) for token_id in sorted(ids)}


def _pack_sample(sample: SampleTrack | BeamTrack, last: int, flat: dict[str, list]) -> dict[str, Any]:
    end = list(sample.end) if sample.end is not None and sample.end[0] <= last else None
    if isinstance(sample, BeamTrack):
        return {"index": sample.index, "end": end, "changes": _pack_changes(sample, last),
                "end_text": sample.at(last).text if end else ""}  # fmt: skip
    tokens = [list(pair) for pair in zip(sample.token_ids, sample.token_moments, strict=False) if pair[1] <= last]
    pieces = [pair for pair in zip(sample.pieces, sample.piece_moments, strict=False) if pair[1] <= last]
    flat["token"] += tokens
    flat["token_time"] += list(sample.token_times[: len(tokens)])
    flat["piece"] += [[len(piece), moment] for piece, moment in pieces]
    return {
        "index": sample.index,
        "end": end,
        "tokens": len(tokens),
        "pieces": len(pieces),
        "text": "".join(piece for piece, _ in pieces),
        "logprobs": None if sample.logprobs is None else _pack_logprobs(sample.logprobs[: len(tokens)], flat),
    }


def _pack_changes(beam: BeamTrack, last: int) -> list[list]:
    changes, before, token_ids = [], "", []
    for moment, same, rest, logprob in beam.changes:
        if moment > last:
            break
        token_ids[same:] = rest
        text = beam.text_of(token_ids, len(changes) + 1)
        stays = common_length(before, text)
        changes.append([moment, same, rest, logprob, stays, text[stays:]])
        before = text
    return changes


def _pack_logprobs(logprobs: Iterable[dict[int, float] | None], flat: dict[str, list]) -> int:
    """How many tokens have an entry."""
    count = 0
    for tops in logprobs:
        count += 1
        flat["tops"].append(-1 if tops is None else len(tops))
        flat["top_token"] += tops or ()
        flat["top_logprob"] += (tops or {}).values()
    return count


# --- and back -----------------------------------------------------------------------------------------------------------


def unpacked(
    page: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[dict[int, RequestTrack], Callable[[int], str]]:
    """(tracks by request id, how a token reads). Raises Damaged, or what bad pages raise."""
    take = _Taker(arrays)
    tracks = {}
    for held in page["requests"]:
        prompt, request_id = held["prompt"], int(held["id"])
        if not (prompt is None or isinstance(prompt, str)):
            raise Damaged("a prompt is no text")
        track = RequestTrack(request_id, prompt, take("prompt", held["prompt_tokens"]), str(held["label"]))
        track.prompt_text = str(held["prompt_text"])
        track.standings = [Standing(*standing) for standing in held["standings"]]
        moments = [standing.moment for standing in track.standings]
        if not moments or moments != sorted(moments) or not all(type(moment) is int for moment in moments):
            raise Damaged(f"request {request_id} is out of order")
        if held["prompt_logprobs"] is not None:
            track.prompt_logprobs = list(take.logprobs(held["prompt_logprobs"]))
        track.samples = [_unpack_sample(sample, take) for sample in held["samples"]]
        tracks[request_id] = track
    texts = {int(token_id): str(text) for token_id, text in page["tokens"].items()}
    return tracks, lambda token_id: texts.get(token_id, f"[{token_id}]")


def _unpack_sample(held: dict[str, Any], take: _Taker) -> SampleTrack | BeamTrack:
    end = held["end"]
    its_end = None if end is None else (int(end[0]), str(end[1]), end[2])
    if "changes" in held:
        beam = BeamTrack(int(held["index"]), None)
        for moment, same, rest, logprob, stays, text in held["changes"]:
            beam.changes.append((int(moment), int(same), [int(token_id) for token_id in rest], logprob))
            beam.texts.append((int(stays), str(text)))
        beam.end, beam.end_text = its_end, str(held["end_text"])
        return beam
    tokens, pieces = take("token", held["tokens"]), take("piece", held["pieces"])
    times, text = take("token_time", held["tokens"]), str(held["text"])
    if sum(length for length, _ in pieces) != len(text) or any(length < 0 for length, _ in pieces):
        raise Damaged("a text is longer or shorter than its pieces")
    ends = np.cumsum([0, *(length for length, _ in pieces)]).tolist()
    cut = [text[start:stop] for start, stop in pairwise(ends)]
    logprobs = None if held["logprobs"] is None else list(take.logprobs(held["logprobs"]))
    token_ids = [token_id for token_id, _ in tokens]
    if logprobs is not None and sum(i in (tops or ()) for i, tops in zip(token_ids, logprobs, strict=False)) < len(
        tokens
    ):
        raise Damaged("log-probabilities do not belong to the tokens")
    sample = SampleTrack(int(held["index"]), token_ids, times, cut, logprobs)
    sample.token_moments = array("i", [moment for _, moment in tokens])
    sample.piece_moments = array("i", [moment for _, moment in pieces])
    sample.end = its_end
    return sample


class _Taker:
    """Takes the next rows of an array, as lists of plain numbers."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = {}
        self._at = dict.fromkeys(_ARRAYS, 0)
        for name, (dtype, columns) in _ARRAYS.items():
            array = arrays.get(f"text/{name}")
            if array is None or array.dtype.str != dtype or array.shape[1:] != ((columns,) if columns else ()):
                raise Damaged(f"text/{name} is missing or has another shape")
            self._arrays[name] = array

    def __call__(self, name: str, count: int) -> list:
        start = self._at[name]
        if type(count) is not int or not 0 <= count <= len(self._arrays[name]) - start:
            raise Damaged(f"text/{name} is cut off")
        self._at[name] = start + count
        return self._arrays[name][start : start + count].tolist()

    def logprobs(self, count: int) -> Iterator[dict[int, float] | None]:
        for size in self("tops", count):
            if size < 0:
                yield None
            else:
                yield dict(zip(self("top_token", size), self("top_logprob", size), strict=True))
