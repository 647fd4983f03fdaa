"""Static figures for notebooks, drawn with matplotlib (it comes with `kvscope[lab]`) in the colours of the workbench.

A figure is saved in the notebook as SVG and needs no kernel to be read again. Each function returns the matplotlib figure, so
that whoever knows matplotlib can go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .markup import amount
from .theme import LIGHT, OWNER_HUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HATCHES = ("", "//", "..", "xx", "--")  # what differs in hue differs in texture too


def new_figure(title: str, *, height: float = 3.2, x_label: str = "", y_label: str = "") -> tuple[Figure, Axes]:
    """An empty figure of notebook width on a light ground, whatever the theme of the page around it."""
    import matplotlib.pyplot as plt
    from IPython import get_ipython
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    if get_ipython() is not None:
        set_matplotlib_formats("svg")
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained", facecolor=LIGHT.panel)
    axes.set_facecolor(LIGHT.panel)
    axes.set_title(title, loc="left", color=LIGHT.ink, fontsize=13)
    axes.set_xlabel(x_label, color=LIGHT.ink)
    axes.set_ylabel(y_label, color=LIGHT.ink)
    axes.tick_params(colors=LIGHT.ink, labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT.muted)
    plt.close(figure)  # it is shown once, as the value of its cell
    return figure, axes


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], *, x_label: str = "") -> Figure:
    """One horizontal bar per entry, from top to bottom, of parts whose values are written into them where there is room."""
    figure, axes = new_figure(title, height=1.2 + 0.55 * len(bars), x_label=x_label)
    left = dict.fromkeys(bars, 0.0)
    longest = max(sum(parts.values()) for parts in bars.values())
    for i, part in enumerate(next(iter(bars.values()))):
        values = [parts[part] for parts in bars.values()]
        axes.barh(list(bars), values, left=list(left.values()), color=OWNER_HUES[i], hatch=HATCHES[i % len(HATCHES)],
                  edgecolor=LIGHT.ink, linewidth=0.6, label=part)  # fmt: skip
        for bar, value in zip(bars, values, strict=True):
            if value > 0.05 * longest:
                words = {"ha": "center", "va": "center", "color": LIGHT.ink, "fontsize": 11}
                box = {"facecolor": OWNER_HUES[i], "edgecolor": "none", "pad": 1.5}
                axes.text(left[bar] + value / 2, bar, amount(value), bbox=box, **words)
            left[bar] += value
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=6, frameon=False, labelcolor=LIGHT.ink, fontsize=11)
    return figure


def grouped_bars(title: str, groups: Mapping[str, Mapping[str, float]], *, x_label: str, log: bool = False) -> Figure:
    """Horizontal bars, one for each name in a group, groups from top to bottom; a group may lack some of the names."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = new_figure(title, height=1.4 + len(groups) * (0.2 + 0.22 * len(names)), x_label=x_label)
    thick = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        at = [y + (i - (len(names) - 1) / 2) * thick for y, group in enumerate(groups.values()) if name in group]
        values = [group[name] for group in groups.values() if name in group]
        bars = axes.barh(at, values, height=thick, color=OWNER_HUES[i % len(OWNER_HUES)], hatch=HATCHES[i % len(HATCHES)],
                         edgecolor=LIGHT.ink, linewidth=0.6, label=name)  # fmt: skip
        axes.bar_label(bars, [amount(value) for value in values], padding=3, color=LIGHT.ink, fontsize=9)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if log:
        axes.set_xscale("log")
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=6, frameon=False, labelcolor=LIGHT.ink, fontsize=11)
    return figure


def lines(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """One line per series over common x, told apart by hue and by marker, with a legend. A series that ends early may be shorter."""
    figure, axes = new_figure(title, x_label=x_label, y_label=y_label)
    for i, (name, y) in enumerate(series.items()):
        axes.plot(x[: len(y)], y, label=name, linewidth=2.2, **_look(i))
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(color=LIGHT.line, linewidth=0.8)
    axes.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=11)
    return figure


def roofline(
    title: str,
    bytes_per_second: float,
    flops_per_second: float,
    points: Mapping[str, Sequence[tuple[float, float, str]]],
) -> Figure:
    """The two ceilings, and points (FLOPs a byte, FLOPs a second, what is written beside it) below them, by kind (Williams,
    Waterman and Patterson 2009)."""
    figure, axes = new_figure(title, height=4.2, x_label="FLOPs a byte moved", y_label="GFLOP/s")
    intensities = [point[0] for kind in points.values() for point in kind]
    ridge = flops_per_second / bytes_per_second
    x = [min(intensities) / 2, ridge, max(*intensities, ridge) * 2]
    roof = [min(flops_per_second, bytes_per_second * value) / 1e9 for value in x]
    axes.plot(x, roof, color=LIGHT.ink, linewidth=2.2, zorder=1)
    axes.annotate(f"{bytes_per_second / 1e9:.0f} GB/s", (x[0], roof[0]), textcoords="offset points", xytext=(14, 26),
                  color=LIGHT.ink, fontsize=11)  # fmt: skip
    axes.annotate(f"{flops_per_second / 1e9:,.0f} GFLOP/s", (ridge, roof[1]), textcoords="offset points", xytext=(8, -16),
                  color=LIGHT.ink, fontsize=11)  # fmt: skip
    for i, (kind, places) in enumerate(points.items()):
        axes.plot(
            [p[0] for p in places], [p[1] / 1e9 for p in places], label=kind, linestyle="none", markersize=9, **_look(i)
        )
        for at, speed, words in places:
            axes.annotate(
                words, (at, speed / 1e9), textcoords="offset points", xytext=(7, -12), color=LIGHT.ink, fontsize=9
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color=LIGHT.line, linewidth=0.8)
    axes.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=11, loc="lower right")
    return figure


def _look(i: int) -> dict[str, Any]:
    """Series i by hue and by marker."""
    return {
        "color": (*OWNER_HUES[:4], *OWNER_HUES[5:])[i],
        "marker": "osD^vPX"[i],
        "markeredgecolor": LIGHT.ink,
        "markeredgewidth": 0.6,
    }


def gantt(
    title: str, spans: Mapping[str, Sequence[tuple[float, float, str]]], *, x_label: str, until: float | None = None
) -> Figure:
    """A row per entry with its spans (start, end, what it did); each kind of doing has its hue and texture. `until` is the end
    of the axis, for charts that are to be compared."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(title, height=1.2 + 0.3 * len(spans), x_label=x_label)
    kinds = list(dict.fromkeys(kind for row in spans.values() for _, _, kind in row))
    looks = {
        kind: {"facecolor": OWNER_HUES[i], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": LIGHT.ink, "linewidth": 0.4}
        for i, kind in enumerate(kinds)
    }
    for name, row in spans.items():
        for start, end, kind in row:
            axes.barh(name, end - start, left=start, height=0.7, **looks[kind])
    axes.invert_yaxis()
    axes.set_xlim(0, until)
    keys = [Patch(label=kind, **look) for kind, look in looks.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, labelcolor=LIGHT.ink, fontsize=11)
    return figure
