"""What the timeline draws of each phase: the rows of its sources, in the order in which the phases began."""

from __future__ import annotations

from .block_cells import hatch_lines
from .phases import Span

_NAN = float("nan")  # one object, so that equal paths compare equal
_DOTS = ("waiting", "preempted", "finished")
_TOLD = ("dim", "request", "about")
COLUMNS = {
    "lanes": ("x0", "x1", "y0", "y1", "hue", *_TOLD),
    "prefills": ("x0", "x1", "y0", "y1", "hue", "part", *_TOLD),
    "lines": ("x0", "x1", "y", "kind", *_TOLD),
    "dots": ("x", "y", "kind", "dim"),
    "hatches": ("xs", "ys", "dim"),
}
_BLANK = {"request": -1, "x0": _NAN, "x": _NAN, "xs": [], "ys": [], "about": ""}
_SHAPES = {"decode": "lanes", "prefill": "prefill", "waiting": "line", "preempted": "line", "finished": "square"}


class Shapes:
    """`rows`: by source the rows so far. `open`: of spans that go on, (source, row, span, sample or None): their ends move."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict]] = {name: [] for name in COLUMNS}
        self.open: list[tuple[str, int, Span, int | None]] = []

    def add(self, span: Span, y: int, hue: int, told: dict) -> None:
        """One more span, in row `y`; `told` are the columns that say whose it is."""
        getattr(self, f"_add_{_SHAPES[span.phase]}")(span, y, hue, told)

    def _add_lanes(self, span: Span, y: int, hue: int, told: dict) -> None:
        lanes = sorted((span.lanes or {}).items())
        for (low, high), (child, last) in zip(lane_places(len(lanes)), lanes, strict=True):
            if span.open:
                self.open.append(("lanes", len(self.rows["lanes"]), span, child))
            self.rows["lanes"].append(
                {"x0": span.first - 1, "x1": last, "y0": y + low, "y1": y + high, "hue": hue, **told}
            )

    def _add_prefill(self, span: Span, y: int, hue: int, told: dict) -> None:
        top, bottom, x0 = y + 0.09, y + 0.87, span.first - 1
        if span.open:
            self.open.append(("prefills", len(self.rows["prefills"]), span, None))
        part = round(top + (bottom - top) * span.cached, 3)
        self.rows["prefills"].append(
            {"x0": x0, "x1": span.last, "y0": top, "y1": bottom, "hue": hue, "part": part, **told}
        )
        if span.cached:
            xs, ys = hatch_path(x0, x0 + 1, top, part)
            self.rows["hatches"].append({"xs": xs, "ys": ys, **told})

    def _add_line(self, span: Span, y: int, hue: int, told: dict) -> None:
        kind, middle = _DOTS.index(span.phase), y + 0.48
        if span.open:
            self.open.append(("lines", len(self.rows["lines"]), span, None))
        first = max(span.first, 1)  # a request that arrives before the first step waits in front of it
        self.rows["lines"].append({"x0": first - 0.7, "x1": span.last, "y": middle, "kind": kind, **told})
        self.rows["dots"].append({"x": first - 0.3, "y": middle, "kind": kind, **told})

    def _add_square(self, span: Span, y: int, hue: int, told: dict) -> None:
        self.rows["dots"].append({"x": span.last + 1.2, "y": y + 0.48, "kind": _DOTS.index("finished"), **told})


def padded(rows: list[dict], columns: tuple[str, ...]) -> dict[str, list]:
    """Columns of `rows`, with rows that are not drawn up to a multiple of 16, so that one more row is only a patch."""
    blank = {name: _BLANK.get(name, 0) for name in columns}
    rows = rows + [blank] * (-len(rows) % 16 or 16 * (not rows))
    return {name: [row[name] for row in rows] for name in columns}


def lane_places(count: int) -> list[tuple[float, float]]:
    """Top and bottom of each decode lane in a row from 0 to 1."""
    height = 0.61 / max(1, count)
    gap = 0.048 if count > 1 else 0.0
    return [(0.175 + i * height, 0.175 + (i + 1) * height - gap) for i in range(count)]


def hatch_path(x0: float, x1: float, top: float, bottom: float) -> tuple[list[float], list[float]]:
    """Diagonal lines over a box, as one multi-line with gaps."""
    xs: list[float] = []
    ys: list[float] = []
    for a, b, c, d in hatch_lines(3, 0.0, 1.0):
        xs += [round(x0 + a * (x1 - x0), 2), round(x0 + c * (x1 - x0), 2), _NAN]
        ys += [round(top + b * (bottom - top), 2), round(top + d * (bottom - top), 2), _NAN]
    return xs, ys
