"""Stop strings: find the first one in text that arrives in pieces, and never show a part of one.

In: pieces of text. Out: text that may be shown, and the stop string that matched. What may still become a stop string
is held back: exactly the longest suffix that is a proper prefix of some stop string, no fixed number of characters.

The first match is the one that ends first, and among those that end together the longest: what one would find by
reading character by character, so it does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one sample. After a match nothing more comes out."""

    def __init__(self, stop: Sequence[str], include: bool = False):
        self.stop = tuple(stop)
        self.include = include  # the matched string stays at the end of the text
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that is complete or None)."""
        if not self.stop:
            return piece, None
        text = self._held + piece
        if found := self._first(text):
            start, end, matched = found
            self._held = ""
            return text[: end if self.include else start], matched
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def would_match(self, piece: str) -> bool:
        """Whether `push(piece)` would complete a stop string; changes nothing."""
        return self._first(self._held + piece) is not None

    def flush(self) -> str:
        """The text that was held back and never completed a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that ends first, the longest of those."""
        found = [(start + len(s), start, s) for s in self.stop if (start := text.find(s)) >= 0]
        if not found:
            return None
        end, start, matched = min(found)
        return start, end, matched


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
