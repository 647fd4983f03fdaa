"""The machine: cores, memory and GPUs as bars, the time of a step, and what the views themselves cost.

Sampled once a second by whoever draws, never by the engine's thread. CPU time of the views is that of the thread which
draws them: in a notebook the viewer's, in an app the server's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from bokeh.models import ColumnDataSource
from kvscope.engine.events import Event, EventKind

from ..machine import Gpu, Machine, Sample, find_nvml
from ..markup import duration, esc, size
from ..theme import LIGHT, Theme
from .base import Frame, replace_if_changed
from .html import HtmlView

_MOST_CORES = 4  # each with a bar of its own
_STEPS = 10  # the time of a step is a mean of so many


class Host(HtmlView):
    """`machine` is sampled; by default this one, with the GPUs that it has now."""

    title = "Machine"

    def __init__(self, theme: Theme = LIGHT, *, machine: Machine | None = None, **options):
        super().__init__(theme, **options)
        self._machine = Machine(find_nvml()) if machine is None else machine
        self._sample: Sample | None = None
        self._steps: deque[Event] = deque(maxlen=_STEPS)
        self._sampled_at = 0.0
        self.bars = ColumnDataSource({"name": [], "share": [], "text": []})
        self.sources = {"bars": self.bars}

    def reset(self) -> None:
        super().reset()
        self._steps.clear()

    def update(self, frame: Frame) -> None:
        self.frame = frame
        self._steps.extend(event for event in frame.events if event.kind is EventKind.STEP)
        if not self._pace.due(frame):
            return
        if self._sample is None or frame.now - self._sampled_at >= 1.0:
            self._sample, self._sampled_at = self._machine.sample(), frame.now
        rows = list(self._rows(self._sample, frame))
        data = {"name": [r[0] for r in rows], "share": [round(r[1], 3) for r in rows], "text": [r[2] for r in rows]}
        if replace_if_changed(self.bars, data) or not self.root.text:
            bars = "".join(
                f'<span>{esc(name)}</span><i class="meter"><i style="width:{100 * share:.0f}%"></i></i><b>{esc(text)}</b>'
                for name, share, text in rows
            )
            notes = "".join(f'<p class="sum">{note}</p>' for note in self._notes(self._sample))
            self.show(f'<div class="meters">{bars}</div>{notes}')

    def _rows(self, sample: Sample, frame: Frame) -> Iterator[tuple[str, float, str]]:
        """(name, share of the bar, text)."""
        cores = sample.cores
        if len(cores) <= _MOST_CORES:
            yield from ((f"Core {i}", busy / 100, f"{busy:.0f} %") for i, busy in enumerate(cores))
        else:
            mean = sum(cores) / len(cores)
            yield f"{len(cores)} cores", mean / 100, f"{mean:.0f} %"
        yield "This process", min(1.0, sample.process / 100 / max(1, len(cores))), f"{sample.process / 100:.1f} cores"
        yield "Its memory", sample.resident / sample.memory_total, size(sample.resident)
        used, total = sample.memory_used, sample.memory_total
        yield "All memory", used / total, f"{size(used)} of {size(total)}"
        if frame.info is not None:
            yield "KV pool", min(1.0, frame.info.pool_bytes / total), size(frame.info.pool_bytes)
        for i, gpu in enumerate(sample.gpus):
            yield from _gpu_rows(gpu, f"GPU {i}" if len(sample.gpus) > 1 else "GPU")

    def _notes(self, sample: Sample) -> Iterator[str]:
        seconds = [event.numbers.get("seconds", 0.0) for event in self._steps]
        if seconds:
            schedule = [event.numbers.get("schedule_seconds", 0.0) for event in self._steps]
            mean, scheduler = (duration(sum(part) / len(seconds)) for part in (seconds, schedule))
            yield f"One step: <b>{mean}</b>, of which scheduler {scheduler}."
        yield f"Views: <b>{sample.viewer:.1f} %</b> of one core."
        if sample.load is not None:
            yield f"Load over a minute: {sample.load:.1f} on {len(sample.cores)} cores."

    def summary(self) -> str:
        if self._sample is None:
            return "The machine has not been looked at yet."
        names = ", ".join(gpu.name for gpu in self._sample.gpus)
        return f"Read once a second. {names}." if names else "Read once a second. No GPU was found."

    def table(self) -> tuple[list[str], list[list[str]]]:
        data = self.bars.data
        rows = [[name, text] for name, text in zip(data["name"], data["text"], strict=True)]
        if self._sample is not None:
            rows.append(["Views", f"{self._sample.viewer:.1f} % of one core"])
        return ["What", "Now"], rows


def _gpu_rows(gpu: Gpu, name: str) -> Iterator[tuple[str, float, str]]:
    if gpu.utilisation is not None:
        yield name, gpu.utilisation / 100, f"{gpu.utilisation:.0f} %"
    if gpu.memory_used is not None and gpu.memory_total:
        share = gpu.memory_used / gpu.memory_total
        yield f"{name} memory", share, f"{size(gpu.memory_used)} of {size(gpu.memory_total)}"
    if gpu.power is not None:
        limit = f" of {gpu.power_limit:.0f} W" if gpu.power_limit else " W"
        yield (
            f"{name} power",
            min(1.0, gpu.power / gpu.power_limit) if gpu.power_limit else 0.0,
            f"{gpu.power:.0f}{limit}",
        )
    clocks = [f"{mhz:,} MHz" for mhz in (gpu.clock, gpu.memory_clock) if mhz is not None]
    if clocks:
        yield f"{name} clocks", 0.0, ", memory ".join(clocks)
    if gpu.temperature is not None:
        yield f"{name} heat", min(1.0, gpu.temperature / 100), f"{gpu.temperature} °C"
