"""The one script of the page: it carries clicks, keys and form contents to Python and watches the clock.

Python never writes an event handler into the page. Whatever can be clicked says so in a data attribute; one listener
on the outermost element finds it through the shadow roots, whichever view drew it. Messages travel as the `tags` of one
model (`[number, kind, value]`), so that they arrive alike through a notebook's comm and an app's websocket.

| in the page | message |
|---|---|
| data-do="run", data-shift="walk" | ["do", "run"]; by a click with Shift ["do", "walk"] |
| data-tab, data-table, data-filter, data-sample, data-token | ["tab" …, its value] |
| data-r, data-b | ["select", "request" or "block", id] |
| a menu with data-label, data-pace, data-speed | ["label" …, its value]; ["until", kind] where that is what was chosen |
| a tap or a drag on the player's track | ["goto", step], or the nearest that is recorded |
| data-step | ["visit", step] |
| data-send inside data-form | [its value or "submit", {field: text}] |
| a slider with data-rate | ["rate", its value] |
| the keyboard's cursor in a pool with a lens | ["lens", block] |
| keys | the same messages as the buttons; inside of lists and pools see `roving` |
| page shown, or shown again | ["hello", {"dark": bool}] |
| a tick was missed | ["resync"] |
| painting takes long, or short again | ["period", seconds between ticks that leave the browser two thirds of its time] |
| the cell's width passes a breakpoint | ["width", "narrow", "medium" or "wide"] |

The clock: every tick of Python counts `pulse.tags` up by one, so that a page that has missed one (it was opened later, or
reloaded) knows it and asks for everything. The script writes how long ago that was, and shows the stale banner
after 3 s, so that a dead kernel is visible although it can no longer say so. While the page is alive the saved copy of
the same output is folded away; when the page has been stale for 15 s it is shown again.
"""

from __future__ import annotations

from .roving import JS as ROVING
from .stylesheet import NARROW, WIDE

STALE_SECONDS = 3
UNFOLD_SECONDS = 15
SLOWEST_PERIOD = 2.0  # seconds: below the stale banner's, however slow the browser

JS = r"""
const page = root.document;
if (!page.rowsLast) {
  // A change of layout is painted at once: also a text whose source has fewer rows now, and of which BokehJS makes the labels
  // later. So rows change last.
  const apply = page.apply_json_patch.bind(page), rows = ({kind}) => kind.startsWith("Column");
  page.apply_json_patch = (patch, ...more) =>
    apply({...patch, events: [...patch.events.filter((event) => !rows(event)), ...patch.events.filter(rows)]}, ...more);
  page.rowsLast = true;
}
if (twin) {
  // A message comes as three texts. A view that was made amid one would read every later one out of step: the first starts anew.
  const {Receiver} = Bokeh.require("protocol/receiver"), {consume} = Receiver.prototype;
  if (!Receiver.finds_step) {
    Receiver.prototype.consume = function(text) {
      if (typeof text === "string" && text.startsWith('{"msgid"')) this._current_consumer = this._HEADER;
      return consume.call(this, text);
    };
    Receiver.finds_step = true;
  }
  // jupyter_bokeh sends every change that it has just applied back to the kernel, where it would undo newer ones.
  const tell = page._trigger_on_change.bind(page);
  page._trigger_on_change = (event) => {
    if (event.kind === "MessageSent" || event.model === bus) tell(event);
  };
}
const all = window.__kvscope ??= {fold: new Map()};
for (const view of cb_context.index.find(root)) attach(view.el);

function attach(el) {
  if (el.dataset.kvscope) return;
  el.dataset.kvscope = twin;
  el.tabIndex = 0;
  el.setAttribute("data-lm-suppress-shortcuts", "true");   // JupyterLab's one-letter commands stay out of here
  let number = 0, beat = Date.now(), stale = false;
  const send = (...message) => {
    if (message[0] === "do") bus.aims = clearTimeout(bus.aims);   // whoever presses a key has let go of the track
    bus.tags = [Date.now() + (number++ % 1000) / 1000, ...message];
  };
  const inside = (selector, from = el) => {
    for (const child of from.querySelectorAll("*")) {
      if (child.matches(selector)) return child;
      const found = child.shadowRoot && inside(selector, child.shadowRoot);
      if (found) return found;
    }
    return from.shadowRoot ? inside(selector, from.shadowRoot) : null;
  };

  const dark = () => document.body.dataset.jpThemeLight !== undefined ? document.body.dataset.jpThemeLight === "false"
    : document.body.classList.contains("vscode-body") ? document.body.classList.contains("vscode-dark")
    : matchMedia("(prefers-color-scheme: dark)").matches;
  send("hello", {dark: dark()});

  let width = "";
  new ResizeObserver(() => {
    const now = el.clientWidth / (pulse.tags[1] || 1), name = now < NARROW ? "narrow" : now < WIDE ? "medium" : "wide";
    if (name === width || !now) return;
    width = name;
    send("width", name);
    if (name === "wide") inside("[data-form]")?.querySelectorAll("[data-details]").forEach((part) => { part.open = true; });
  }).observe(el);

  const show = (name) => {
    for (const [key, body] of Object.entries(tabs)) body.css_classes = key === name ? [] : ["kv-off"];
    send("tab", name);
  };
  const act = {
    help: () => { const help = inside("[data-help]"); if (help) help.hidden = !help.hidden; },
    prompt: () => inside("[data-prompt]")?.focus(),
  };
  const click = (event) => {
    for (const node of event.composedPath()) {
      if (node === el) return;
      const data = node.dataset;
      if (!data || node.disabled) continue;
      if (data.send !== undefined) return submit(node.closest("[data-form]"), data.send || "submit");
      if (data.do) {
        const what = (event.shiftKey && data.shift) || data.do;
        event.preventDefault();
        return act[what] ? act[what]() : send("do", what);
      }
      if (data.tab) return show(data.tab);
      if (data.table) return send("table", data.table);
      if (data.filter) return send("filter", data.filter);
      if (data.sample) return send("sample", Number(data.sample));
      if (data.token) return send("token", data.token);
      if (data.step) { event.preventDefault(); return send("visit", Number(data.step)); }
      if (data.b) { event.preventDefault(); return send("select", "block", Number(data.b)); }
      if (data.r) return send("select", "request", Number(data.r));
    }
  };
  el.addEventListener("click", (event) => {
    click(event);
    // The mouse leaves the focus to the page, and with it the keys; who clicks by key (detail 0) goes on from there.
    if (event.detail && !event.composedPath()[0].matches?.("input,textarea,select,summary,option")) el.focus({preventScroll: true});
  });
  el.addEventListener("input", (event) => {                  // of all form events the one that leaves a shadow root
    const at = event.composedPath()[0];
    if (at.dataset?.label !== undefined) send("label", at.value);
    if (at.dataset?.speed !== undefined) {
      if (!at.value.startsWith("until ")) return send("speed", at.value);
      send("until", at.value.slice(6));
      at.value = at.dataset.speed;                           // the menu says the speed again
    }
    if (at.dataset?.pace !== undefined) send("pace", at.value);
    if (at.dataset?.rate !== undefined) {
      at.nextElementSibling.textContent = at.value;
      send("rate", Number(at.value));
    }
  });
  const submit = (form, kind = "submit") => {
    const fields = [...form.querySelectorAll("[name]")].map((field) => [field.name, field.value]);
    send(kind, Object.fromEntries(fields));
  };
  const {key: walk, redrawn} = roving(el, send, cb_context.index);
  const keys = {" ": "toggle", ArrowRight: "step", ArrowLeft: "back", Home: "first", End: "now", "[": "previous",
                "]": "next", Escape: "clear", s: "sub_step", S: "sub_back", t: "tables", r: "room", d: "theme", "?": "help", "/": "prompt"};
  el.addEventListener("keydown", (event) => {
    const at = event.composedPath()[0];
    event.stopPropagation();
    if (at.matches?.("input,textarea,select")) {
      if (event.key === "Escape") el.focus();
      if (event.key === "Enter" && (at.matches("input") || event.ctrlKey || event.metaKey)) submit(at.closest("[data-form]"));
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if ((event.key === " " || event.key === "Enter") && at.matches?.("button,summary")) return;
    if (walk(event)) return event.preventDefault();
    if (event.key === "Enter" && at.matches?.("[role=button]")) return at.click();
    const tab = Object.keys(tabs)["123".indexOf(event.key)];
    if (tab && event.key.length === 1) show(tab);
    else if (event.shiftKey && event.key === "ArrowRight") send("do", "next_event");
    else if (event.shiftKey && event.key === "ArrowLeft") send("do", "previous_event");
    else if (keys[event.key]) act[keys[event.key]] ? act[keys[event.key]]() : send("do", keys[event.key]);
    else return;
    event.preventDefault();
  });

  const fold = (folded) => {
    if (!twin || all.fold.has(el) === folded) return;
    if (folded) {
      const style = document.createElement("style");
      style.textContent = `[data-kvscope-twin="${twin}"] > :not(summary){display:none!important}`;
      document.head.append(style);
      all.fold.set(el, style);
    } else { all.fold.get(el).remove(); all.fold.delete(el); }
  };
  fold(true);
  const closed = () => pulse.tags[2] === "closed";
  let count = pulse.tags[0], cost = 0, period = 0.1, told = 0;
  const measure = () => {                                    // from the last change of a tick to the end of its painting
    const begun = performance.now();
    requestAnimationFrame(() => setTimeout(() => {
      cost += 0.3 * (performance.now() - begun - cost);
      const wanted = Math.min(SLOWEST, Math.max(0.1, cost * 3 / 1000));
      if (Math.abs(wanted - period) < 0.3 * period || begun - told < 1000) return;
      told = begun;
      send("period", period = wanted);
    }));
  };
  pulse.properties.tags.change.connect(() => {
    beat = Date.now();
    if (pulse.tags[0] !== count + 1) send("resync");          // a change was sent before this page could listen
    count = pulse.tags[0];
    // What one sees in the past cannot be asked for more.
    for (const button of inside("[data-form]")?.querySelectorAll("[data-send]") ?? []) button.disabled = pulse.tags[3] === "past";
    redrawn();
    if (closed()) fold(false); else measure();
  });
  let gone = 0;
  const clock = setInterval(() => {
    if (!el.isConnected) {                                   // scrolled out of a long notebook, or gone for good
      if (++gone === 2) fold(false);
      if (gone > 7200) clearInterval(clock);
      return;
    }
    gone = 0;
    const age = (Date.now() - beat) / 1000;
    const label = inside("[data-age]");
    if (label && !closed()) label.textContent = age < 10 ? `updated ${age.toFixed(1)} s ago` : `updated ${Math.round(age)} s ago`;
    if ((age > STALE && !closed()) || stale) {
      stale = age > STALE;
      const banner = inside("[data-stale]");
      if (banner) {
        banner.hidden = !stale;
        banner.querySelector("b").textContent = `No update for ${Math.round(age)} s.`;
      }
    }
    fold(age < UNFOLD && !closed());
  }, 500);
}
"""


# On the player's track: a tap, or where a drag is, told ten times a second at most.
AIM = r"""
if (Number.isFinite(cb_obj.x)) {
  bus.aimed = Math.round(cb_obj.x);
  bus.aims ||= setTimeout(() => { bus.aims = 0; bus.tags = [Date.now() + 0.5, "goto", bus.aimed]; }, 100);
}
"""


def script(twin: str) -> str:
    """The script for one display; `twin` is the id that its saved copy carries ("" for none)."""
    values = (
        f'const twin = "{twin}", STALE = {STALE_SECONDS}, UNFOLD = {UNFOLD_SECONDS}, NARROW = {NARROW}, WIDE = {WIDE}, '
        f"SLOWEST = {SLOWEST_PERIOD};"
    )
    return values + ROVING + JS
