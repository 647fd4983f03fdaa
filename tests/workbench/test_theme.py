"""Colours that a room can read, and hues that stay with their request."""

import pytest
from kvscope.workbench.theme import (
    DARK,
    LIGHT,
    ON_OWNER,
    OWNER_HUES,
    OwnerSlots,
    contrast,
    sample_letter,
    sequence_label,
)

TEXT_PAIRS = [
    ("ink", "bg"), ("ink", "panel"), ("muted", "bg"), ("muted", "panel"), ("muted", "sunk"), ("accent", "panel"),
    ("accent", "bg"), ("warn", "panel"), ("warn", "warn_soft"), ("warn", "cached"), ("ink", "accent_soft"),
    ("ink", "cached"), ("shared_ink", "shared"), ("ok", "panel"), ("decode", "panel"), ("prefill", "panel"),
    ("third", "panel"),
]  # fmt: skip


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
@pytest.mark.parametrize("text, ground", TEXT_PAIRS)
def test_text_is_readable(theme, text, ground):
    assert contrast(getattr(theme, text), getattr(theme, ground)) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_labels_on_hues_and_borders(theme):
    assert min(contrast(ON_OWNER, hue) for hue in OWNER_HUES) >= 5.7
    assert contrast(ON_OWNER, theme.active) >= 4.5
    assert contrast(theme.line2, theme.panel) >= 3.0


def test_contrast_of_black_on_white():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#777777") == 1


def test_text_below_11_px_is_refused_and_room_size_scales():
    assert LIGHT.font(11) == "11px"
    assert LIGHT.scaled(1.25).font(16) == "20px"
    with pytest.raises(ValueError, match="font size 10"):
        LIGHT.font(10)


def test_css_variables_name_every_role():
    css = DARK.css_variables()
    assert "--accent-soft:#17304A" in css and "--o8:#B98657" in css and "--dim-alpha:0.34" in css


def test_a_request_takes_the_lowest_free_slot_and_frees_it():
    slots = OwnerSlots()
    slots.update([1, 2, 3])
    slots.update([1, 3])
    slots.update([1, 3, 4])
    assert [slots.slot(r) for r in (1, 3, 4)] == [0, 2, 1]
    assert slots.hue(4) == slots.hue(2)


def test_the_ninth_request_repeats_a_hue_with_a_bar():
    slots = OwnerSlots()
    slots.update(range(1, 10))
    assert slots.hue(9) == slots.hue(1) and slots.barred(9) and not slots.barred(8)


def test_going_back_shows_an_ended_request_in_its_hue():
    slots = OwnerSlots()
    slots.update([1, 2])
    slots.update([2])
    slots.update([1, 2])
    assert slots.slot(1) == 0


def test_slots_forget_old_requests_but_never_live_ones():
    slots = OwnerSlots()
    for request_id in range(1, 10_000):
        slots.update([1, request_id])
    assert len(slots._slot) <= OwnerSlots._REMEMBERED + 3
    assert slots.slot(1) == 0 and slots.slot(9_999) == 1


def test_names_of_sequences():
    assert [sample_letter(i) for i in (0, 25, 26, 27)] == ["a", "z", "aa", "ab"]
    assert sequence_label(3) == "3" and sequence_label(3, 0, forked=True) == "3a" and sequence_label(3, 1) == "3b"
