"""The page of a saved run and the script that plays its film: what answers the page's messages where there is no Python.

The film's cells become properties of Bokeh models again. To show a moment the player looks up which version of each cell holds
there and gives the document those that differ from what it shows, as one patch; so a step back costs what a step on costs. It
obeys the messages of the page's own script (see `bus`): buttons, keys, tabs and the track are those of the live page. What is
selected is lit in all views, over what the film holds, and the inspector says of it what `film_selection` kept.
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
      if (versions[i].length === 3) {
        const [before, after, middle] = versions[i];
        now = now.slice(0, before) + middle + now.slice(now.length - after);
        continue;
      }
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

  let chosen = null, sample = 0;
  const sheet = shown.get_model_by_id(run.sheet), plain = sheet.css, filmed = new Map();
  for (const cell of cells) filmed.set(`${cell.model} ${cell.column ?? cell.attr}`, cell);
  const strip = ([starts, versions]) => value({}, versions, versionAt(starts));
  const reads = (id) => run.reads[id] ? strip(run.reads[id]) : [];
  const living = () => Object.keys(run.reads).map(Number).filter((id) => reads(id).length);
  const sources = new Map(run.whose.map(([id, kind, ring, adds, ...ids]) => {
    const source = shown.get_model_by_id(id);
    const dimmed = Object.entries(adds).map(([column, by]) =>
      ({column, by, codes: Array.from(source.data[column]), cell: filmed.get(`${id} ${column}`), seen: undefined}));
    return [id, {source, kind, ring: shown.get_model_by_id(ring), dimmed, ids}];
  }));
  const texts = [...run.inspectors, run.options].map((id) => {
    const model = shown.get_model_by_id(id);
    return {id, model, first: model.text, cell: filmed.get(`${id} text`)};
  });
  const light = () => {
    const block = chosen?.kind === "block" ? [chosen.id] : [];
    const requests = block.length ? living().filter((id) => reads(id).includes(chosen.id)) : chosen ? [chosen.id] : [];
    const blocks = new Set([...block, ...requests.flatMap(reads)]), lit = {block: blocks, request: new Set(requests)};
    for (const {source, kind, ring, dimmed, ids} of sources.values()) {
      const {data} = source, whose = strip(ids), fresh = {};
      for (const part of dimmed) {
        const {column, by, cell} = part;
        if (cell && cell.value !== part.seen) {              // the film has just written it
          part.seen = cell.value;
          part.codes = Array.from(data[column]);
        }
        const dims = (code, row) => chosen && whose[row] >= 0 && !lit[kind].has(whose[row]) && (code || !["alpha", "bar", "hatch"].includes(column));
        const now = part.codes.map((code, row) => dims(code, row) ? code + by : code);
        if (now.some((code, row) => code !== data[column][row])) fresh[column] = now;
      }
      if (data.band) fresh.band = whose.map((id) => chosen && lit.request.has(id) ? 1 : 0);
      if (Object.keys(fresh).length) source.data = {...data, ...fresh};
      if (ring) {
        const rows = whose.flatMap((id, row) => chosen && (block.length ? id === chosen.id : blocks.has(id)) ? [row] : []);
        const at = (column) => rows.map((row) => data[column][row]);
        if (rows.length || ring.data.x.length)
          ring.data = {x: at("x"), y: at("y"), ...(ring.data.y1 && {y1: rows.map((row) => data.y[row] + data.height[row])})};
      }
    }
    for (const [id, reasons] of Object.entries(run.reasons)) {
      const [x, y, text] = chosen?.kind === "request" && reasons[chosen.id] ? strip(reasons[chosen.id]) : [];
      shown.get_model_by_id(id).data = text ? {x: [x], y: [y], text: [text]} : {x: [], y: [], text: []};
    }
    for (const {id, model, first, cell} of texts) {
      const filmedText = cell ? cell.value : first;
      const text = !chosen ? filmedText : id === run.options ? told(filmedText) : pick("table:output") === "true" ? filmedText : card();
      if (model.text !== text) model.text = text;
    }
    const rows = requests.map((id) => `[data-r="${id}"]`).join() || "[none]", of = chosen && `[data-of~="${chosen.kind[0]}${chosen.id}"]`;
    sheet.css = !chosen ? plain : `${plain}
      [data-r]:not(${rows}){opacity:.45} .row:is(${rows}){border-color:var(--accent);background:var(--accent-soft)}
      .e[data-of]:not(${of}){display:none}
      .log:has(>[data-of]):not(:has(>${of}))::after{content:"No event of ${chosen.kind} ${chosen.id} yet.";padding:8px 4px;color:var(--muted)}`;
  };
  const name = () => `${chosen.kind === "block" ? "Block" : "Request"} ${chosen.id}`;
  const told = (text) => text.replace(/<span class="hint">.*?<\/span>/, run.highlighted.replace("{}", name()));
  const card = () => {
    const key = (which) => `${chosen.kind} ${chosen.id} ${which}`, found = run.cards[key(sample)] ?? run.cards[key(0)];
    if (!found) return `<div class="ph"><h2>${name()}</h2></div><p class="sum">This file says no more about it.</p>`;
    const begin = chosen.kind === "request" ? found[0][1] ?? 0 : 0;
    return strip(found) || `<div class="ph"><h2>${name()}</h2></div><p class="sum">It arrives at step ${steps[begin]}.</p>`;
  };
  const choose = (kind, id) => {
    chosen = chosen?.kind === kind && chosen.id === id ? null : {kind, id};
    sample = 0;
    light();
  };
  const tapped = (figure, x, y) => {
    const {chips, rows} = run.taps[figure], below = (from) => ({ids: strip(sources.get(from).ids), ...sources.get(from).source.data});
    if (chips && x >= 0) {
      const {ids, x: left, y: top, height} = below(chips);
      const found = ids.findIndex((id, row) => id >= 0 && Math.floor(x) === left[row] && y >= top[row] && y < top[row] + height[row]);
      if (found >= 0) choose("block", ids[found]);
    } else if (rows) {
      const {ids, y: top} = below(rows), found = top.indexOf(Math.floor(y));
      if (found >= 0) choose("request", ids[found]);
    }
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
    tab: set("tab"), filter: set("filter"), label: set("label"), select: choose, tapped,
    sample: (index) => { if (!chosen) return refuse(); sample = index; light(); },
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
