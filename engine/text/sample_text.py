"""The text of one sample while it is generated: detokenizer first, stop strings behind it.

In: token ids, one at a time. Out: text that may be shown, and the stop string that ended the sample. Token ids stay the
caller's: a stop string ends the sample at the token whose text completes it.
"""

from __future__ import annotations

from ..sampling.params import SamplingParams
from .detokenizer import REPLACEMENT, Decoder, Detokenizer
from .stop_strings import StopStrings


class SampleText:
    def __init__(self, decoder: Decoder, params: SamplingParams):
        self._detokenizer = Detokenizer(decoder, params.skip_special_tokens, params.spaces_between_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._num_unstoppable = params.min_tokens  # tokens whose text no stop string may begin in

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that this token completed or None)."""
        text = self._detokenizer.push(token_id)
        if self._num_unstoppable:
            self._num_unstoppable -= 1
            return text, None
        if self._stops.stop and self._detokenizer.in_byte_run:
            # The run is held because a later byte may spoil it. If the sample ended here it would read so: a stop
            # string in it counts at this token, not at the one that ends the run.
            pending = self._detokenizer.pending()
            if REPLACEMENT not in pending and self._stops.would_match(text + pending):
                text += self._detokenizer.flush()
        return self._stops.push(text)

    def finish(self) -> str:
        """The rest, once the sample ended without a stop string."""
        shown, _ = self._stops.push(self._detokenizer.flush())
        return shown + self._stops.flush()
