"""The page: which views stand where, and how one tick reaches them. One `Screen` is one place where it is shown.

A screen builds its own views, because a Bokeh model belongs to one document; the choices (selection, tab, theme) are
the workbench's and the same on all of its screens. A view that cannot be seen is not updated: it reads the events that
it missed when it is seen again. Whoever owns the document calls `update` under the workbench's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bokeh.document import Document
from bokeh.events import DocumentReady, Pan, Tap
from bokeh.models import Column, ColumnDataSource, CustomJS, Div, InlineStyleSheet

from . import stylesheet
from .bus import AIM, SLOWEST_PERIOD, script
from .controls import form_html, traffic_html
from .export import LIVE_AGAIN, twin_html
from .markup import esc
from .panel import Panel, classes, write
from .selection import Choices
from .theme import THEMES, Theme
from .tick import Reader, Tick
from .viewer import BEAT, PERIOD
from .views import view_class
from .views.base import View
from .views.event_log import EventLog
from .views.header import Header, Status
from .views.output import Output
from .views.requests import Requests

SETTLE_SECONDS = 1.2  # after the last change, until every view that redraws at its own pace has caught up
ROOM = 1.25
_MEASURE = (  # in reading order, and how many columns each takes
    ("throughput", "span"),
    ("batch", ""),
    ("memory", "span"),
    ("ledger", ""),
    ("latency", "most_of_row"),
    ("queue", ""),
    ("prefix_hits", ""),
    ("host", ""),
)


class Screen:
    """`only` names one view to show alone. `on_message(kind, *values)` gets what the page sends."""

    def __init__(
        self,
        choices: Choices,
        on_message: Callable[..., None],
        *,
        only: str = "",
        twin: str = "",
        on_select: Callable | None = None,
    ):
        self.choices = choices
        self._on_message = on_message
        self._on_select = on_select
        self._theme = self._wanted_theme()
        self._sheets = {
            "page": InlineStyleSheet(css=stylesheet.page(self._theme)),
            "parts": InlineStyleSheet(css=stylesheet.parts(self._theme)),
            **{name: InlineStyleSheet(css=css) for name, css in stylesheet.grids(self._theme).items()},
        }
        self._places: list[tuple[InlineStyleSheet, int, str]] = []
        self.width = "medium"
        self.period = PERIOD  # seconds between two ticks that its browser can follow
        self._updated_at = 0.0
        self._drawn_at = -math.inf  # as _updated_at, which a click sets back
        self.panels: list[Panel] = []
        self.header = self._make_header()
        self._header_reader = Reader()
        self.note, self.traffic = self._div(), self._div()
        self._tabs: dict[str, Column] = {}
        self._note_drawn = ("", "")
        self._tick: Tick | None = None  # while `update` runs
        self._asked: tuple | None = None
        self._told: Status | None = None
        self._settled_at = 0.0
        self._beat_at = 0.0
        self.bus, self.pulse = ColumnDataSource(), ColumnDataSource(tags=[0, self._theme.scale, "open", "live"])
        self.root = self._page() if not only else self._alone(only)
        self._last_number = 0.0
        self.bus.on_change("tags", lambda _attr, _old, new: self._received(new))
        self._twin = twin

    # -- building -----------------------------------------------------------------------------------------------------

    def add_script(self, document: Document) -> None:
        """The page's script runs when `document` is shown; whoever owns it adds `root` to it."""
        for event in (Tap, Pan):
            self.header.scrubber.figure.js_on_event(event, CustomJS(args={"bus": self.bus}, code=AIM))
        args = {"root": self.root, "bus": self.bus, "pulse": self.pulse, "tabs": dict(self._tabs)}
        document.js_on_event(DocumentReady, CustomJS(args=args, code=script(self._twin)))

    def _make_header(self) -> Header:
        return Header(self._theme, self._sheets)

    def _page(self) -> Column:
        wide, not_wide = frozenset({"wide"}), frozenset({"narrow", "medium"})
        form = Column(
            self._div(form_html()), self.note, self.traffic, stylesheets=[self._sheets["panel"], self._place(1)],
            margin=0, spacing=0,
        )  # fmt: skip
        watch = self._grid(
            "watch",
            self._column(
                form,
                self._panel("requests", self._requests(), order=3, tabs="watch"),
                self._panel("output", self._output(), order=5, at="narrow", widths=not_wide, tabs="watch"),
            ),
            self._column(
                self._panel("block_map", self._view("block_map"), order=2, tabs="watch"),
                self._panel("timeline", self._view("timeline"), order=4, tabs="watch"),
            ),
            self._column(
                self._panel("output", self._output(shown=900), widths=wide, tabs="watch"),
                self._panel("event_log", self._log(shown=8, with_filters=False), widths=wide, tabs="watch"),
                name="column_wide",
            ),
        )
        explain = self._grid(
            "explain",
            self._panel("block_tables", self._view("block_tables"), order=1, tabs="explain", grid="full_row"),
            self._column(
                self._panel("prefix_tree", self._view("prefix_tree"), order=2, tabs="explain"),
                self._panel("event_log", self._log(), order=5, tabs="explain"),
            ),
            self._column(
                self._panel("pool_inset", self._view("pool_inset"), order=3, tabs="explain"),
                self._panel("eviction_queue", self._view("eviction_queue"), order=3, tabs="explain"),
                self._panel("output", self._output(), order=4, tabs="explain"),
            ),
        )
        measure = self._grid(
            "measure",
            *(self._panel(name, self._view(name), tabs="measure", grid=grid) for name, grid in _MEASURE),
        )
        self._tabs = {"watch": watch, "explain": explain, "measure": measure}
        for name, body in self._tabs.items():
            body.css_classes = classes(name == self.choices.tab)
        return self._outer(self.header.root, *self._tabs.values(), self.header.foot)

    def _alone(self, name: str) -> Column:
        make = {"requests": self._requests, "output": self._output, "event_log": self._log}
        view = make[name]() if name in make else self._view(name)
        return self._outer(self._panel(name, view))

    def _outer(self, *children) -> Column:
        # The bus and the pulse hang on the root, so that they belong to the document.
        return Column(
            *children, stylesheets=[self._sheets["page"]], sizing_mode="stretch_width", margin=0, spacing=0,
            tags=[self.bus, self.pulse],
        )  # fmt: skip

    def _view(self, name: str) -> View:
        kind = view_class(name)
        services = {"texts": self._texts, "decode": self._decode, "stylesheets": [self._sheets["parts"]]}
        return kind(self._theme, on_select=self._on_select, **{need: services[need] for need in kind.needs})

    def _requests(self) -> Requests:
        return Requests(self._theme, texts=self._texts, stylesheets=[self._sheets["parts"]])

    def _output(self, shown: int = 420) -> Output:
        sheets = [self._sheets["parts"]]
        ask = {"texts": self._texts, "decode": self._decode, "arrives": self._arrival}
        return Output(self._theme, **ask, shown=shown, stylesheets=sheets)

    def _log(self, **options) -> EventLog:
        return EventLog(self._theme, stylesheets=[self._sheets["parts"]], **options)

    def _texts(self, request_id: int):
        return self._tick.output(request_id) if self._tick is not None else None

    def _arrival(self, request_id: int) -> int | None:
        return self._tick.arrival(request_id) if self._tick is not None else None

    def _decode(self, token_id: int) -> str:
        return self._tick.decode(token_id) if self._tick is not None else str(token_id)

    def _panel(
        self,
        name: str,
        view: View,
        *,
        order: int = 0,
        at: str = "",
        widths: frozenset[str] = Panel.widths,
        tabs: str = "",
        grid: str = "",
    ) -> Column:
        styles = [self._sheets["panel"], *([self._sheets[grid]] if grid else []), self._place(order, at)]
        bare = isinstance(view, Output)
        head, twin = (None, None) if bare else (self._div(), self._div())
        if twin is not None:
            twin.css_classes = classes(False)
        children = [view.root] if bare else [head, view.root, twin]
        root = Column(*children, stylesheets=styles, sizing_mode="stretch_width", margin=0, spacing=0)
        shown_in = frozenset({tabs}) if tabs else Panel.tabs
        self.panels.append(Panel(name, view, root, head, twin, widths, shown_in))
        return root

    def _place(self, order: int, at: str = "") -> InlineStyleSheet:
        sheet = InlineStyleSheet(css=stylesheet.scaled(stylesheet.place(order, at=at), self._theme.scale))
        self._places.append((sheet, order, at))
        return sheet

    def _column(self, *children, name: str = "column") -> Column:
        return Column(*children, stylesheets=[self._sheets[name]], margin=0, spacing=0)

    def _grid(self, name: str, *children) -> Column:
        return Column(*children, stylesheets=[self._sheets[name]], sizing_mode="stretch_width", margin=0, spacing=0)

    def _div(self, text: str = "") -> Div:
        return Div(
            text=text, stylesheets=[self._sheets["parts"]], sizing_mode="stretch_width", margin=0, disable_math=True
        )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _received(self, message: list) -> None:
        number, kind, *values = message
        if number == self._last_number:
            return  # jupyter_bokeh calls a callback twice, once for the change and once for the message
        self._last_number = number
        if kind == "width":
            self.width = values[0]
        if kind == "period":
            self.period = min(SLOWEST_PERIOD, max(PERIOD, float(values[0])))
        else:
            self._on_message(self, kind, *values)

    # -- one tick -----------------------------------------------------------------------------------------------------

    def update(self, tick: Tick, status: Status, *, everything: bool = False) -> bool:
        """Draw what is new; True when anything was. `everything` draws hidden views as well (for the saved copy)."""
        theme = self._wanted_theme()
        asked = (tick.asked, theme, repr(self.choices), self.width)
        if asked != self._asked:
            self._asked, self._settled_at = asked, tick.now + SETTLE_SECONDS
        still = tick.now > self._settled_at and not everything
        if still and status == self._told:
            if tick.now - self._beat_at >= BEAT:
                self.beat(tick.now, status.closed)
            return False
        self._tick, self._updated_at, self._told = tick, tick.now, status
        if theme != self._theme:
            self._restyle(theme)
        self.header.update(self._header_reader.read(tick, self.header))
        self.header.show(self.choices, status, tick)
        if not still:  # else only the head has news: the engine goes on while one looks at the past
            self._update_panels(tick, everything=everything)
        for name, body in self._tabs.items():
            if body.css_classes != classes(name == self.choices.tab):
                body.css_classes = classes(name == self.choices.tab)
        if self.choices.note != self._note_drawn:
            self._note_drawn = self.choices.note
            kind, sentence = self.choices.note
            self.note.text = f'<p class="note {kind}" role="status">{esc(sentence)}</p>' if sentence else ""
        write(self.traffic, traffic_html(*status.traffic))
        self._tick = None
        self.beat(tick.now, status.closed)
        return True

    def _update_panels(self, tick: Tick, *, everything: bool) -> None:
        force = everything or tick.snapshot.state != "running"
        for panel in self.panels:
            if everything or (self.choices.tab in panel.tabs and self.width in panel.widths):
                panel.update(tick, self.choices, force=force, drawn_at=self._drawn_at)
        self._drawn_at = tick.now

    def redraw(self, panel: Panel, tick: Tick) -> None:
        """Draw one panel as the choices are now."""
        self._tick = tick
        try:
            panel.update(tick, self.choices, force=True, drawn_at=self._drawn_at)
        finally:
            self._tick = None

    def saved_copy(self, tick: Tick, advice: str = LIVE_AGAIN) -> str:
        """Plain HTML of what `update` has drawn; each view once, however often it stands on the page."""
        self._tick = tick
        try:
            views = {panel.name: panel.view for panel in self.panels}.values()
            return twin_html(self._twin, self.header, views, advice)
        finally:
            self._tick = None

    def due(self, now: float) -> bool:
        """Whether its browser can take another tick; half a tick early counts, or the next one would come late."""
        return now - self._updated_at >= self.period - PERIOD / 2

    def hurry(self) -> None:
        """Somebody has clicked: the next tick comes at once."""
        self._updated_at = 0.0

    def beat(self, now: float, closed: bool) -> None:
        """Tell the page that Python lives."""
        self._beat_at = now
        past = self._told is not None and self._told.at is not None
        count = int(self.pulse.tags[0]) + 1
        self.pulse.tags = [count, self._theme.scale, "closed" if closed else "open", "past" if past else "live"]

    def _wanted_theme(self) -> Theme:
        return THEMES["dark" if self.choices.dark else "light"].scaled(ROOM if self.choices.room else 1.0)

    def _restyle(self, theme: Theme) -> None:
        self._theme = theme
        fresh = {"page": stylesheet.page(theme), "parts": stylesheet.parts(theme), **stylesheet.grids(theme)}
        for name, css in fresh.items():
            self._sheets[name].css = css
        for sheet, order, at in self._places:
            sheet.css = stylesheet.scaled(stylesheet.place(order, at=at), theme.scale)
        self.header.restyle(theme)
        for panel in self.panels:
            panel.view.restyle(theme)

    def view(self, name: str) -> View:
        """The first view of that name on this screen."""
        return next(panel.view for panel in self.panels if panel.name == name)
