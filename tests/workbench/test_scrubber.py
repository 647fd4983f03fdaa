"""The player's track: all that was recorded, in few points and few bytes."""

import numpy as np
from fake_frames import FakeEngine
from fake_recording import FakeRecording
from kvscope.engine.events import EventKind
from kvscope.workbench.recorder import Series
from kvscope.workbench.theme import DARK, LIGHT
from kvscope.workbench.views.scrubber import POINTS, Scrubber


class Long:
    """A recording of `n` steps of which every `every`-th evicts."""

    def __init__(self, n, first=1, every=50):
        steps = np.arange(first, first + n, dtype=np.int32)
        hit = (steps % every == 0).astype(np.int64)
        self.series = Series(steps, steps * 0.01, steps % 128, hit, hit, 0 * hit, 0 * hit)


def test_it_shows_every_step_of_a_short_run_and_its_marks():
    engine = FakeEngine()
    recording, track = FakeRecording(engine), Scrubber(LIGHT)
    track.update(None, 128, 0)
    for step in range(1, 171):
        engine.step()
        recording.record()
        track.update(recording, 128, step)
    drawn = track.use.data
    assert drawn["step"] == list(range(1, 171))
    assert drawn["used"] == [round(100 * recording._snapshots[s].num_used_blocks / 127) for s in drawn["step"]]
    evicted = {s for s, foot in zip(drawn["step"], drawn["evicted"], strict=True) if foot < 0}
    assert evicted == set(recording.steps_with(EventKind.EVICTED).tolist())
    preempted = recording.steps_with(EventKind.PREEMPTED)
    for step in preempted.tolist():
        assert any(abs(step - mark) <= 4 for mark in track.losses.data["step"])
    fresh = Scrubber(LIGHT)
    fresh.update(recording, 128, 170)
    assert {n: dict(s.data) for n, s in fresh.sources.items()} == {n: dict(s.data) for n, s in track.sources.items()}


def test_a_long_run_is_thinned_and_keeps_its_marks():
    track = Scrubber(LIGHT)
    for n in range(100, 40_000, 700):
        track.update(Long(n), 128, n)
        steps = track.use.data["step"]
        assert len(steps) <= POINTS and steps == sorted(set(steps))
        assert n - steps[-1] < max(2, n / 150) or n < 400, "the newest steps are there"
        assert track.figure.x_range.start <= 1 and n <= track.figure.x_range.end <= 1.04 * n + 25
    feet = np.array(track.use.data["evicted"])
    assert (feet < 0).sum() > 200, "an eviction between two points is told by the second"
    assert len(track.losses.data["step"]) <= POINTS


def test_a_tick_weighs_half_a_kilobyte(wire):
    track = Scrubber(LIGHT)

    class Root:
        root = track.figure

    track.update(Long(2000), 128, 2000)
    line = wire(Root)
    sizes = []
    for n in range(2005, 2300, 5):
        track.update(Long(n, every=3), 128, n)
        sizes.append(line.size())
    assert np.mean(sizes) <= 500 and np.median(sizes) <= 500, sizes
    track.update(Long(2295, every=3), 128, 2295)
    line.size()
    track.update(Long(2295, every=3), 128, 1000)
    assert 0 < line.size() <= 400, "looking elsewhere moves the line only"
    track.update(Long(2295, every=3), 128, 1000)
    assert line.size() == 0


def test_another_recording_and_a_recording_that_forgets():
    track = Scrubber(LIGHT)
    track.update(Long(500), 128, 500)
    track.update(Long(80), 128, 80, origin=1)
    assert track.use.data["step"] == list(range(1, 81)) and track.figure.x_range.end < 90
    track.update(Long(3000), 128, 3000, origin=2)
    track.update(Long(3000, first=2000), 128, 4999, origin=2)
    assert 1900 < track.figure.x_range.start <= 2000 and track.figure.x_range.end >= 4999


def test_it_is_restyled_in_place():
    track = Scrubber(LIGHT)
    track.paint(DARK.scaled(1.25))
    assert track.figure.height == round(42 * 1.25)
    assert track._area.glyph.fill_color == DARK.area and track._ticks.glyph.line_color == DARK.warn
