"""`kvscope bench plot FILE …`: draw the JSON files that the benchmarks wrote, each into a picture beside it.

A chart is a line in CHARTS: which columns name a group of bars, and which hold the bars' lengths; or, where a table has a row a
contender, which column names the bar and which holds its length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvscope.engine.bench import add_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Chart(NamedTuple):
    groups: tuple[str, ...]
    bars: tuple[str, ...]
    unit: str
    name: str = ""  # the column that names a bar, where a row is one bar
    named: str = "{}"  # what the bar is called, of what stands in that column
    of: tuple[str, str] = ("", "")  # a column and what stands in the rows that are drawn; else all are
    log: bool = False


CHARTS = {
    "latency": Chart(
        ("phase", "batch", "weights"), ("kvscope tok/s", "transformers tok/s", "floor tok/s"), "tokens a second"
    ),
    "throughput": Chart(("engine",), ("output tok/s",), "output tokens a second"),
    "serve": Chart(("asked for/s", "ms"), ("p50", "p95", "p99"), "milliseconds", log=True),
    "prefix": Chart(("workload", "engine"), ("seconds",), "seconds"),
    "sweep": Chart(
        ("dtype", "block size", "batch", "context"), ("ms a step", "floor ms"), "milliseconds a decode step"
    ),
    "kernels": Chart(("operation", "shape"), ("reference µs", "cpu µs", "torch µs"), "microseconds a call", log=True),
    "peers": Chart(("load", "shape"), ("tok/s",), "tokens a second", name="engine"),
    "gpu": Chart(("what", "shape"), ("µs",), "microseconds", log=True),
    "views": Chart(
        ("what",),
        ("value",),
        "bytes a frame, mean",
        name="blocks",
        named="{:,} blocks",
        of=("unit", "B/frame"),
        log=True,
    ),
}
TITLE = "kvscope bench "


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    """Add `plot` to the benchmarks of the command line."""
    plot = add_command(benchmarks, "plot", "draw the JSON files of benchmarks, each into an .svg beside it")
    plot.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what a benchmark wrote with --json")
    plot.add_argument("--format", choices=("svg", "png"), default="svg", help="of the pictures (default svg)")
    plot.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    for file in options.files:
        picture = file.with_suffix(f".{options.format}")
        draw(file).savefig(picture, facecolor="white")
        print(picture)
    return 0


def draw(file: Path) -> Figure:
    """The chart of one file. Raises ValueError for a file that no benchmark wrote."""
    from .figures import grouped_bars

    try:
        figures = json.loads(file.read_text())
        chart = CHARTS[figures["title"].removeprefix(TITLE)]
        groups = _groups(chart, figures["rows"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what a benchmark wrote with --json: {type(error).__name__} {error}") from error
    return grouped_bars(figures["title"], groups, x_label=chart.unit, log=chart.log)


def _groups(chart: Chart, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{group: {bar: length}}; what a table has no number for has no bar."""
    groups: dict[str, dict[str, float]] = {}
    column, wanted = chart.of
    for row in rows:
        if column and row[column] != wanted:
            continue
        group = groups.setdefault(", ".join(str(row[column]) for column in chart.groups), {})
        for bar in chart.bars:
            if isinstance(row[bar], int | float):
                group[chart.named.format(row[chart.name]) if chart.name else bar] = row[bar]
    return groups
