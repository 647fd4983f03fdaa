"""The keyboard inside of lists and pools, a part of the page's script (see `bus`): each is one stop of Tab, the arrow keys go from
one item or block to the next, Enter does what a click does.

A list has data-list and items with a tabindex (`markup.one_stop` writes it). Its HTML is replaced while somebody walks through
it, and so is every button of the page: what has the focus is remembered by its data attributes and found again.

A pool is a figure with data-pool, its name. It says how to walk in the tags of its source "cursor", [blocks, columns, a word for each code of
its cells, whether a lens follows it]; the ring around the cursor is that source's row, which only this script writes. What the ring is around is told to a
screen reader and to the eye.
"""

JS = r"""
function roving(el, send, index) {
  const live = document.createElement("div");
  live.setAttribute("role", "status");
  live.style.cssText = "position:sticky;bottom:10px;z-index:9;width:fit-content;margin:-3em auto 0;padding:6px 12px;border-radius:6px;"
    + "background:var(--ink);color:var(--panel);font-family:system-ui,sans-serif;font-size:calc(14px*var(--scale,1));pointer-events:none";
  const say = (text) => {
    if (!live.isConnected) el.shadowRoot.append(live);
    live.textContent = text;
    live.style.visibility = text ? "visible" : "hidden";
  };

  // A move of the focus inside of one shadow root is told to nobody outside, so after a key or a tick one looks where it is.
  const innermost = () => { let at = document.activeElement; while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement; return at; };
  const outwards = (at) => { const path = []; for (; at && at !== el; at = at.parentNode ?? at.host) path.push(at); return at ? path : []; };
  let held = null;                                           // what has the focus, and how it is found when it was redrawn
  const look = () => {
    const at = innermost(), path = outwards(at);
    if (at === held?.at) return;
    if (held?.pool) { draw(held.pool, null); say(""); }
    const list = path.length ? at.closest("[data-list]") : null, all = list ? items(list) : [];
    const name = path.length && at.localName + [...at.attributes].filter((one) => one.name.startsWith("data-"))
      .map((one) => `[${one.name}="${CSS.escape(one.value)}"]`).join("");
    held = path.length ? {at, name, root: at.getRootNode(), list: list?.ariaLabel, place: all.indexOf(at), pool: poolOf(path)} : null;
    for (const each of all) each.tabIndex = each === at ? 0 : -1;
    if (held?.pool) enter(at, held.pool);
  };
  el.addEventListener("keyup", look);
  el.addEventListener("focusin", look);
  el.addEventListener("click", () => queueMicrotask(look));
  el.addEventListener("focusout", () => queueMicrotask(() => { if (held?.at.isConnected) look(); }));
  const redrawn = () => {
    if (!held || held.at.isConnected) return;
    const {name, root, list, place} = held, around = list ? root.querySelector(`[data-list][aria-label="${list}"]`) : root;
    const again = around?.querySelector(name) ?? (list && around && items(around)[Math.min(place, items(around).length - 1)]);
    if (document.activeElement === document.body) (again ?? el).focus({preventScroll: true});
    look();
  };

  // -- lists ---------------------------------------------------------------------------------------------------------

  const items = (list) => [...list.querySelectorAll("[tabindex]")];
  const middle = (node) => { const box = node.getClientRects()[0]; return [box.left + box.width / 2, box.top]; };
  const line = (all, at, by) => {                            // the nearest item in the line below (by 1) or above (−1)
    const [x, y] = middle(at), far = (node) => by * (middle(node)[1] - y);
    const there = all.filter((node) => far(node) > 4), near = Math.min(...there.map(far));
    const off = (node) => Math.abs(middle(node)[0] - x);
    return there.filter((node) => far(node) < near + 4).sort((a, b) => off(a) - off(b))[0];
  };
  const inList = (list, at, key) => {
    const all = items(list), from = all.indexOf(at);
    const side = {ArrowLeft: -1, ArrowRight: 1}[key], down = {ArrowUp: -1, ArrowDown: 1}[key];
    if (from < 0 || !(side && list.dataset.list === "across") && !down) return false;
    (side ? all[from + side] : line(all, at, down))?.focus();
    look();
    return true;
  };

  // -- pools ---------------------------------------------------------------------------------------------------------

  const places = new WeakMap();                              // of the cursor, by its source
  const poolOf = (path) => {
    const node = path.find((part) => part.dataset?.pool !== undefined);
    const figure = node && index.query_one((view) => view.el === node)?.model;
    const source = (name) => figure.renderers.find((part) => part.name === name)?.data_source;
    return figure && {node, cursor: source("cursor"), cells: source("cells"), chosen: source("chosen")};
  };
  const draw = ({cursor}, block) => {
    const [, columns] = cursor.tags, shown = block === null ? [] : [block];
    const data = {x: shown.map((one) => one % columns), y: shown.map((one) => Math.floor(one / columns))};
    cursor.setv({data}, {sync: false});                      // Python has no use for it
  };
  const tell = ({cursor, cells}, block) => {
    const data = cells.data, words = cursor.tags[2], code = (data.face ?? data.image[0])[block];
    const more = data.about && `, generation ${data.generation[block]}, read by ${data.about[block]}; ${data.filled[block]} slots written`;
    say(`Block ${block}: ${words[Math.min(code, words.length - 1)]}${data.about?.[block] ? more : ""}`);
  };
  let aimed = 0, aims = 0;                                   // the lens follows the cursor, ten times a second at most
  const aim = (block) => { aimed = block; aims ||= setTimeout(() => { aims = 0; send("lens", aimed); }, 100); };
  const stand = (pool, block) => { places.set(pool.cursor, block); draw(pool, block); tell(pool, block); if (pool.cursor.tags[3]) aim(block); };
  const dress = (at, node) => {
    at.setAttribute("role", "application");
    at.setAttribute("aria-label", `${node.dataset.pool}: arrow keys go from block to block, Enter selects`);
  };
  const enter = (at, pool) => {
    const [count, columns] = pool.cursor.tags, {x = [], y = []} = pool.chosen.data;
    dress(at, pool.node);
    if (at.matches(":focus-visible")) stand(pool, Math.min(count - 1, places.get(pool.cursor) ?? (x.length ? y[0] * columns + x[0] : 0)));
  };
  const inPool = (pool, key) => {
    const [count, columns] = pool.cursor.tags, at = places.get(pool.cursor) ?? 0;
    const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[key];
    if (key === "Enter") send("select", "block", at);
    else if (!by) return false;
    else if (at + by >= 0 && at + by < count) stand(pool, at + by);
    return true;
  };

  // Bokeh makes every figure a stop of Tab; those that are no pool answer no key.
  for (const {el: node, canvas_view} of index.query((one) => one.canvas_view?.events_el)) {
    if (!outwards(node).length) continue;
    if (node.dataset.pool === undefined) canvas_view.events_el.tabIndex = -1; else dress(canvas_view.events_el, node);
  }
  const key = (event) => {                                   // whether it was for a list or a pool
    if (event.shiftKey) return false;
    const path = event.composedPath(), list = path[0].closest("[data-list]"), pool = poolOf(path);
    return pool ? inPool(pool, event.key) : list ? inList(list, path[0], event.key) : false;
  };
  return {key, redrawn};
}
"""
