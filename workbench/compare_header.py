"""The top of a comparison's page: what is compared, the player, and the story line of whichever side has the newest event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bokeh.models import Div

from .compare_side import PACES
from .markup import ICONS, esc, plural
from .scenarios import SCENARIOS
from .story import StoryLine
from .theme import LIGHT, Theme
from .tick import Reader
from .views.base import Frame, View
from .views.header import Header, Status, logo, options_html, write
from .views.player_html import banner, buttons, position

if TYPE_CHECKING:
    from .compare_side import Side
    from .selection import Choices


class _Told(View):
    """The story line of one side, read like a view."""

    def __init__(self, theme: Theme):
        super().__init__(theme)
        self.reset()

    def reset(self) -> None:
        self.line, self.changes = StoryLine(), 0

    def update(self, frame: Frame) -> None:
        before = self.line.text
        self.line.update(frame)
        self.changes += self.line.text != before


class CompareHeader(Header):
    """`update` takes side A's frame, `show` the tick of all sides."""

    def __init__(
        self, theme: Theme = LIGHT, sheets: dict[str, Any] | None = None, *, sides: Sequence[Side], **callbacks
    ):
        super().__init__(theme, sheets, **callbacks)
        self._sides = sides
        self._told = [_Told(theme) for _ in sides]
        self._readers = [Reader() for _ in sides]
        self._teller = 0
        self.form = Div(text=form_html(), stylesheets=self._html, sizing_mode="stretch_width", margin=0)
        self.scrubber.figure.visible = False  # sides are at different steps: there is no one track
        self.root.children = [self.head, self.player, self.banner, self.story, self.form, self.tabs]
        self.foot.text = _FOOT

    def show(self, choices: Choices, status: Status, tick: Any) -> None:
        if self.frame is None:
            return
        for i, (told, reader) in enumerate(zip(self._told, self._readers, strict=True)):
            before = told.changes
            told.update(reader.read(tick.sides[i], told))
            if told.changes > before:
                self._teller = i
        self.story_line = self._told[self._teller].line
        word = "stopped" if status.closed else self.frame.snapshot.state
        write(self.head, self._head(status))
        write(self.buttons, buttons(status, word))
        write(self.position, position(status, status.newest if status.at is None else status.at, word))
        write(self.banner, banner(status, choices.trace_open, word))
        write(self.say, self._say(status, word))
        write(self.kpis, "")
        write(self.tabs, options_html(choices, hint="every engine gets the same requests"))

    def _say(self, status: Status, word: str) -> str:
        line = self.story_line
        others = f" And {plural(line.others, 'other event')} in this step." if line.others else ""
        return (
            f'<div class="say" role="status" aria-live="{"polite" if word == "paused" else "off"}"><span class="ic">'
            f"{ICONS[line.icon]}</span><span>{esc(self._who)} {esc(line.text)}<small>{esc(line.consequence)}{others}</small>"
            "</span></div>"
        )

    @property
    def _who(self) -> str:
        return "" if self.story_line.quiet else f"Engine {self._sides[self._teller].letter}:"

    def _head(self, status: Status) -> str:
        """The sides by name; what they have in common is said once."""
        infos = [side.info for side in self._sides]
        facts = [
            (
                f"<b>{esc(info.model_name)}</b>",
                esc(info.dtype),
                f"{info.num_blocks:,} blocks × {info.block_words} tokens",
            )
            for info in infos
        ]
        same = [fact for fact, *others in zip(*facts, strict=True) if all(fact == other for other in others)]
        spans = list(same)
        for side, own in zip(self._sides, facts, strict=True):
            differs = [fact for fact in own if fact not in same]
            spans.append(f"<b>{side.letter}</b> {esc(side.name)}{': ' if differs else ''}{', '.join(differs)}")
        return (
            f'<div class="head"><span class="brand">{logo()}kvscope</span><span class="tag {status.source.lower()}">'
            f'{status.source}</span><span class="facts">{" ".join(f"<span>{span}</span>" for span in spans)}</span></div>'
        )

    def summary(self) -> str:
        return f"{self._who} {super().summary()}".strip()

    def table(self) -> tuple[list[str], list[list[str]]]:
        return ["What", "Now"], [[side.letter, plural(side.step, "step")] for side in self._sides]


def form_html() -> str:
    """Sent once: what is asked of every engine, and what is kept equal."""
    scenarios = "".join(f'<option value="{name}">{esc(s.title)}</option>' for name, s in SCENARIOS.items())
    paces = "".join(f"<option>{pace}</option>" for pace in PACES)
    return (
        '<div class="cmpform" data-form role="form" aria-label="Submit to every engine"><label>Scenario<select '
        f'name="scenario">{scenarios}</select></label><button class="primary" type="button" data-send>Submit to every engine'
        f"</button><label>In step by<select data-pace>{paces}</select></label></div>"
    )


_FOOT = (
    '<div class="foot"><span><kbd>Space</kbd> run or pause</span><span><kbd>←</kbd> <kbd>→</kbd> one turn back, one turn</span>'
    "<span><kbd>[</kbd> <kbd>]</kbd> previous or next request</span><span><kbd>T</kbd> tables</span><span><kbd>Esc</kbd> clear"
    "</span></div>"
)
