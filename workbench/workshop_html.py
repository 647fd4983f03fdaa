"""The sentence of a workshop, with its buttons, as it stands over the page."""

from __future__ import annotations

from typing import NamedTuple

from .markup import esc


class Place(NamedTuple):
    """Where a workshop stands, for the page: the idea's number from 1, of how many, and whether the engine is on its way."""

    sentence: str
    number: int
    of: int
    busy: bool


def workshop_html(place: Place | None) -> str:
    """The sentence with its buttons; "" without a workshop."""
    if place is None:
        return ""
    back, on = (" disabled" if place.number == 1 else ""), (" disabled" if place.number == place.of else "")
    said = "The engine is on its way …" if place.busy else esc(place.sentence)
    return (
        f'<div class="idea" role="status"><p>{said}</p><div><small>{place.number} of {place.of}</small>'
        f'<button type="button" data-do="idea_previous"{back}>Previous</button>'
        f'<button type="button" class="primary" data-do="idea_next"{on}>Next</button>'
        '<button type="button" class="quiet" data-do="idea_end">End</button></div></div>'
    )
