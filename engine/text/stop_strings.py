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
        prefixes = {s[:length] for s in self.stop for length in range(1, len(s))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))  # proper ones, the longest first
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
        if not text.endswith(self._prefixes):
            self._held = ""
            return text, None
        self._held = next(prefix for prefix in self._prefixes if text.endswith(prefix))
        return text[: len(text) - len(self._held)], None

    def would_match(self, piece: str) -> bool:
        """Whether `push(piece)` would complete a stop string; changes nothing."""
        return self._first(self._held + piece) is not None

    def flush(self) -> str:
        """The text that was held back and never completed a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that ends first, the longest of those."""
        best: tuple[int, int, str] | None = None  # (end, start, stop string)
        for stop in self.stop:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[0], best[2])
