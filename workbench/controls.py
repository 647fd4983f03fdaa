"""The submit form, and what the buttons, keys and forms of a workbench's page do beside what all pages do (`page_commands`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .arrivals import MIXES, SHAPES
from .markup import esc, panel_head, plural
from .page_commands import PageCommands, sentence_of
from .scenarios import SCENARIOS, ScenarioRun
from .selection import TABS
from .time_commands import TimeCommands
from .views.base import ENDED
from .views.event_log import FILTERS

if TYPE_CHECKING:
    from .workbench import Workbench

DEFAULT_PROMPT = "What is a block table? Explain it with one small example."
_FIELDS: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
    # name, label, value at the start, how its text is read
    ("n", "Samples n", "1", int),
    ("temperature", "Temperature", "0.8", float),
    ("max_tokens", "Max tokens", "96", int),
    ("top_p", "Top p", "1.0", float),
    ("top_k", "Top k", "0", int),
    ("seed", "Seed", "", int),
    ("beam_width", "Beam width", "", int),
)
_BEAM_FIELDS = frozenset(
    {"beam_width", "temperature", "max_tokens"}
)  # a beam search draws nothing: no others concern it
_RATES = ("0.2", "20", "0.2", "2")  # of the slider, in requests a second: least, most, step, at the start


def form_html() -> str:
    """The whole form; it is sent once and never replaced, so that nothing that is being typed is lost. It is no <form>:
    a submit event does not leave its shadow root, and unheard it would leave the page."""
    options = "".join(f'<option value="{name}">{esc(s.title)}</option>' for name, s in SCENARIOS.items())
    fields = "".join(
        f'<label>{label}<input name="{name}" value="{value}" inputmode="decimal" autocomplete="off"></label>'
        for name, label, value, _ in _FIELDS
    )
    return (
        f"{panel_head('Submit', '')}"
        '<div class="form" data-form role="form" aria-label="Submit"><label>Scenario<select name="scenario"><option value="">My own prompt</option>'
        f'{options}</select></label><label>Prompt<textarea name="prompt" rows="2" data-prompt>{esc(DEFAULT_PROMPT)}'
        "</textarea></label><details data-details><summary><span><b>Sampling</b> and length</span></summary>"
        f'<div class="nums">{fields}</div></details>{_traffic_fields()}<div class="send"><button class="primary" type="button" '
        'data-send title="Ctrl Enter in the prompt">Submit request</button><button type="button" data-send="traffic" '
        'title="Requests that keep arriving">Start traffic</button></div></div>'
    )


def _traffic_fields() -> str:
    least, most, step, start = _RATES
    shapes = "".join(
        f'<option value="{name}">{esc(words.split(":")[0].title())}</option>' for name, words in SHAPES.items()
    )
    mixes = "".join(f"<option>{name}</option>" for name in MIXES)
    return (
        '<details data-details><summary><span><b>Traffic</b>: rate, shape, prompts</span></summary><div class="nums two">'
        f'<label class="wide">Requests a second<span class="slide"><input type="range" name="rate" data-rate min="{least}" '
        f'max="{most}" step="{step}" value="{start}"><output>{start}</output></span></label>'
        f'<label>Shape<select name="shape">{shapes}</select></label>'
        f'<label>Prompts<select name="mix">{mixes}</select></label></div></details>'
    )


def traffic_html(sentence: str, running: bool) -> str:
    """What traffic does, with the button that ends it; "" without any."""
    if not sentence:
        return ""
    stop = '<button type="button" data-do="stop_traffic">Stop traffic</button>' if running else ""
    return f'<div class="note traffic"><span>{esc(sentence)}</span>{stop}</div>'


def read_form(values: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """(prompt, sampling options) of a submitted form. Raises ValueError with a sentence for a field that is no number."""
    prompt = str(values.get("prompt", ""))
    if not prompt.strip():
        raise ValueError("The prompt is empty; write one or choose a scenario.")
    options: dict[str, Any] = {}
    for name, label, _, read in _FIELDS:
        text = str(values.get(name, "")).strip()
        if not text:
            continue
        try:
            options[name] = read(text)
        except ValueError:
            kind = "a whole number" if read is int else "a number"
            raise ValueError(f"{label}={text!r}: must be {kind}.") from None
    if "beam_width" in options:
        options = {name: options[name] for name in options if name in _BEAM_FIELDS}
    return prompt, options


class Commands(PageCommands):
    """Obeys the messages of one workbench's page, with the same public methods that a notebook cell can call."""

    kinds = PageCommands.kinds | {
        "tab", "filter", "sample", "token", "submit", "traffic", "rate", "goto", "visit", "until", "speed",
    }  # fmt: skip

    def __init__(self, workbench: Workbench):
        super().__init__(workbench.choices)
        self._wb = workbench
        self._time = TimeCommands(workbench)
        self.acts |= self._time.acts | {
            "reset": self._reset,
            "stop_traffic": workbench.stop_traffic,
            "idea_next": lambda: self._workshop("next"),
            "idea_previous": lambda: self._workshop("previous"),
            "idea_end": lambda: workbench.workshop(None),
        }

    # -- messages -----------------------------------------------------------------------------------------------------

    def _workshop(self, where: str) -> None:
        if self._wb.current_workshop is not None:
            getattr(self._wb.current_workshop, where)()

    def _goto(self, step: float) -> None:
        self._time.goto(float(step))

    def _visit(self, step: float) -> None:
        self._time.visit(int(step))

    def _until(self, kind: str) -> None:
        self._time.until(kind)

    def _speed(self, value: str) -> None:
        self._time.speed(value)

    def _requests(self) -> list[int]:
        shown = self._wb.player.source().snapshot()
        return list(dict.fromkeys(r.id for r in shown.requests if r.status not in ENDED))

    def _reset(self) -> None:
        self._time.require_live()
        done = self._wb.engine.reset_prefix_cache()
        self._choices.note = (
            ("ok", "The prefix cache is empty.")
            if done is not False
            else ("warn", "The prefix cache was not emptied because requests are running.")
        )

    def _tab(self, name: str) -> None:
        if name in TABS:
            self._choices.tab = name

    def _filter(self, name: str) -> None:
        if name in FILTERS:
            self._choices.log_filter = name

    def _token(self, place: str) -> None:
        request_id, sample, index = map(int, place.split(":"))
        self._choices.token = (request_id, sample, index)

    def _sample(self, index: float) -> None:
        self._choices.sample = max(0, int(index))

    def _submit(self, values: dict[str, str]) -> None:
        self._time.require_live()
        scenario = str(values.get("scenario", ""))
        if scenario:
            run = self._wb.run(scenario)
            what, hint = _asked(run), f" {run.scenario.sentence}"
        else:
            prompt, options = read_form(values)
            what, hint = f"Request {self._wb.ask(prompt, **options).request_id} was submitted.", ""
        paused = " The engine is paused: press Run or Step." if self._wb.engine.state == "paused" else ""
        self._choices.note = ("ok", f"{what}{paused}{hint}")

    def _traffic(self, values: dict[str, str]) -> None:
        self._time.require_live()
        traffic = self._wb.traffic(rate=float(values["rate"]), shape=values["shape"], mix=values["mix"])
        paused = " The engine is paused: press Run." if self._wb.engine.state == "paused" else ""
        self._choices.note = (
            "ok",
            f"{SHAPES[traffic.shape].capitalize()}. Move the slider to change the rate.{paused}",
        )

    def _rate(self, value: float) -> None:
        self._wb.change_rate(float(value))


def _asked(run: ScenarioRun) -> str:
    """What became of a scenario so far."""
    first, last = run[0].request_id, run[-1].request_id
    told = f"Requests {first} to {last} were submitted." if last > first else f"Request {first} was submitted."
    if run.to_come:
        told += f" {plural(run.to_come, 'question')} more {'waits' if run.to_come == 1 else 'wait'} for the answer."
    return " ".join([told, *(f"{sentence_of(ValueError(refusal))}" for refusal in run.refusals[:1])])
