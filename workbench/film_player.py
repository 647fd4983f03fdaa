"""The page of a saved run and the script that plays its film: what answers the page's messages where there is no Python.

The film's cells become properties of Bokeh models again. To show a moment the player looks up which version of each cell holds
there and gives the document those that differ from what it shows, as one patch; so a step back costs what a step on costs. It
obeys the messages of the page's own script (see `bus`): buttons, keys, tabs and the track are those of the live page. What is
selected is lit in the pool and in the lists, over what the film holds.
"""

from __future__ import annotations

from .markup import esc
from .notebook import bokehjs_html
from .theme import FONT, THEMES

JS = r"""
(async () => {
const page = document.getElementById("kv-page"), said = document.getElementById("kv-said");
const copy = document.querySelector("[data-kvscope-twin]");
copy.hidden = true;                                          // it speaks where this script does not get to its end
try {
  const packed = Uint8Array.from(atob(document.getElementById("kv-run").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  await play(await new Response(stream).json());
} catch (error) {
  copy.hidden = false;
  said.textContent = `This browser cannot play the recording (${error.message}). Its last step stands here as text.`;
  throw error;
}

async function play(run) {
  const {steps, events} = run, last = steps.length - 1;
  await Bokeh.embed.embed_items({run: run.document}, [{docid: "run", roots: {[run.root]: page}, root_ids: [run.root]}]);
  const shown = Bokeh.documents.find((known) => known.get_model_by_id(run.root));
  const cells = run.cells.map(([model, attr, column, axes, strips]) => ({model, attr, column, axes, strips, versions: null, version: -1}));
  const picks = {tab: "watch", tables: "false", playing: "false", speed: "", filter: "all", label: "owner", dark: String(run.dark)};
  const pick = (axis) => axis.startsWith("table:") && picks.tables === "true" ? "true" : picks[axis] ?? "false";
  const focus = () => page.firstElementChild.focus({preventScroll: true});  // so that the keys are the page's
  let at = -1, timer = 0;

  // -- film ----------------------------------------------------------------------------------------------------------

  const value = (cell, versions, version) => {
    const near = cell.versions === versions && cell.version < version ? cell.version : -1;
    let from = version;
    while (from > near && versions[from].length > 1) from--;
    let now = from === near ? cell.value : versions[from][0];
    for (let i = from + 1; i <= version; i++) {
      const [drop, keep, changed, tail] = versions[i];
      now = now.slice(drop, drop + keep).concat(tail);
      for (let j = 0; j < changed.length; j += 2) now[changed[j]] = changed[j + 1];
    }
    return now;
  };
  const versionAt = (starts) => {
    let low = 0, high = starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= at) low = middle; else high = middle;
    }
    return low;
  };
  const draw = () => {
    const patch = new Map();
    for (const cell of cells) {
      const [starts, versions] = cell.strips[cell.axes.map(pick).join("|")], version = versionAt(starts);
      if (cell.versions === versions && cell.version === version) continue;
      cell.value = value(cell, versions, version);
      Object.assign(cell, {versions, version});
      const key = `${cell.model} ${cell.attr}`, model = {id: cell.model};
      if (cell.column === null) patch.set(key, {kind: "ModelChanged", model, attr: cell.attr, new: cell.value});
      else {
        if (!patch.has(key)) patch.set(key, {kind: "ColumnDataChanged", model, attr: "data", data: {type: "map", entries: []}, cols: []});
        patch.get(key).data.entries.push([cell.column, cell.value]);
        patch.get(key).cols.push(cell.column);
      }
    }
    if (patch.size) shown.apply_json_patch({events: [...patch.values()]});
    light();
    document.body.className = picks.dark === "true" ? "dark" : "";
  };

  // -- the selection ---------------------------------------------------------------------------------------------------

  let chosen = null;
  const sheet = shown.get_model_by_id(run.sheet), plain = sheet.css, filmed = new Map();
  for (const cell of cells) filmed.set(`${cell.model} ${cell.column}`, cell);
  const reads = (id) => { const [starts, versions] = run.reads[id] ?? [[0], [[[]]]]; return value({}, versions, versionAt(starts)); };
  const living = () => Object.keys(run.reads).map(Number).filter((id) => reads(id).length);
  const pools = run.pools.map(({columns, chosen: ring, dimmed}) => ({
    columns, ring: shown.get_model_by_id(ring),
    dimmed: dimmed.map(([id, column, by]) => {
      const source = shown.get_model_by_id(id);
      return {column, by, source, codes: Array.from(source.data[column]), cell: filmed.get(`${id} ${column}`), seen: undefined};
    }),
  }));
  const light = () => {
    const block = chosen?.kind === "block" ? [chosen.id] : [];
    const requests = block.length ? living().filter((id) => reads(id).includes(chosen.id)) : chosen ? [chosen.id] : [];
    const lit = new Set([...block, ...requests.flatMap(reads)]), ringed = block.length ? block : [...lit];
    for (const {columns, ring, dimmed} of pools) {
      for (const part of dimmed) {
        const {column, by, source, cell} = part, {data} = source;
        if (cell && cell.value !== part.seen) {              // the film has just written it
          part.seen = cell.value;
          part.codes = Array.from(data[column]);
        }
        const place = (row) => data.x ? Math.floor(data.y[row]) * columns + Math.floor(data.x[row]) : row;
        const now = part.codes.map((code, row) => chosen && !lit.has(place(row)) && (column !== "alpha" || code) ? code + by : code);
        if (now.some((code, row) => code !== data[column][row])) source.data = {...data, [column]: now};
      }
      if (ring.data.x.length || ringed.length) ring.data = {x: ringed.map((id) => id % columns), y: ringed.map((id) => Math.floor(id / columns))};
    }
    const rows = requests.map((id) => `[data-r="${id}"]`).join() || "[none]";
    sheet.css = !chosen ? plain : `${plain}
      [data-r]:not(${rows}){opacity:.45} .row:is(${rows}){border-color:var(--accent);background:var(--accent-soft)}`;
  };
  const choose = (kind, id) => {
    chosen = chosen?.kind === kind && chosen.id === id ? null : {kind, id};
    light();
    if (chosen) said.textContent = `${kind === "block" ? "Block" : "Request"} ${id} is highlighted in the pool and in the lists; Esc clears it.`;
  };
  const beside = (by) => {
    const all = living(), from = chosen?.kind === "request" ? all.indexOf(chosen.id) : -1;
    if (all.length) choose("request", all[from < 0 ? (by > 0 ? 0 : all.length - 1) : (from + by + all.length) % all.length]);
  };

  // -- the player ----------------------------------------------------------------------------------------------------

  const show = (moment) => { at = Math.min(last, Math.max(0, moment)); draw(); };
  const stop = () => { clearInterval(timer); picks.playing = "false"; };
  const go = (moment) => { stop(); show(moment); };
  const goTo = (step) => {
    const after = steps.findIndex((known) => known >= step);
    if (after < 0) return go(last);
    go(after > 0 && step - steps[after - 1] < steps[after] - step ? after - 1 : after);
  };
  const start = () => {
    let from = at === last ? 0 : at, begun = performance.now();
    picks.playing = "true";
    show(from);
    timer = setInterval(() => {
      const passed = (performance.now() - begun) / 1000 * (Number(picks.speed) || run.played);
      let next = from;
      while (next < last && steps[next + 1] - steps[from] <= passed) next++;
      if (next === last) return go(last);
      if (next !== at) show(next);
    }, 40);
  };
  const seek = (kind, by) => {
    const found = by > 0 ? events[kind].find((moment) => moment > at) : events[kind].findLast((moment) => moment < at);
    if (found !== undefined) go(found);
    else said.textContent = `The recording ${by > 0 ? "ends before" : "begins after"} ${run.ends[kind]}.`;
  };
  const flip = (axis) => { picks[axis] = picks[axis] === "true" ? "false" : "true"; draw(); };
  const set = (axis) => (name) => { picks[axis] = name; draw(); };
  const acts = {
    toggle: () => { if (picks.playing === "true") { stop(); draw(); } else start(); },
    step: () => go(at + 1), back: () => go(at - 1), first: () => go(0), now: () => go(last),
    next_event: () => seek("event", 1), previous_event: () => seek("event", -1),
    tables: () => flip("tables"), theme: () => flip("dark"),
    clear: () => { chosen = null; light(); }, previous: () => beside(-1), next: () => beside(1),
  };
  const obey = {
    do: (what) => (acts[what] ?? refuse)(), goto: goTo, visit: goTo, until: (kind) => seek(kind, 1), table: (name) => flip(`table:${name}`),
    speed: (speed) => {
      picks.speed = speed;
      if (picks.playing === "true") { stop(); start(); } else draw();
    },
    tab: set("tab"), filter: set("filter"), label: set("label"), select: choose,
    hello: focus, width: () => {}, period: () => {}, resync: () => {},
  };
  const refuse = () => { said.textContent = "That needs a live workbench; this is a recording."; };
  const bus = shown.get_model_by_id(run.bus);
  bus.properties.tags.change.connect(() => {
    const [, kind, ...values] = bus.tags;
    said.textContent = "";
    (obey[kind] ?? refuse)(...values);
  });
  const asked = () => Number(/^#step=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
  addEventListener("hashchange", () => { if (!Number.isNaN(asked())) goTo(asked()); });
  if (Number.isNaN(asked())) show(last); else goTo(asked());
  page.className = "";
  focus();
}
})();
"""


def page_html(title: str, copy: str, packed: str, theme: str) -> str:
    """The whole file. `copy`: the last state as plain HTML; `packed`: the film, as gzipped JSON in base64."""
    grounds = "".join(
        f"body{'.dark' if name == 'dark' else ''}{{background:{colours.bg};color:{colours.ink}}}"
        for name, colours in THEMES.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{esc(title)}</title><link rel="icon" href="data:,"><style>body{{margin:0;font:15px/1.45 {FONT}}}{grounds}'
        ".wait{visibility:hidden}#kv-said{position:fixed;left:14px;bottom:10px;margin:0;padding:6px 12px;border-radius:6px;"
        "background:#14202B;color:#FFFFFF;z-index:9}#kv-said:empty{display:none}</style></head>\n"
        f'<body{" class=dark" if theme == "dark" else ""}><main id="kv-page" class="wait"></main>'
        f'<p id="kv-said" role="status"></p>\n{copy}\n{bokehjs_html()}\n'
        f'<script type="text/plain" id="kv-run">{packed}</script>\n<script>{JS}</script></body></html>\n'
    )
