"""The page's CSS, written once in CSS pixels at normal size; room size multiplies every length, breakpoints included.

Bokeh draws each part in a shadow root of its own, so that nothing of the notebook leaks in; custom properties do cross
that border, so the colours are set once, on the outermost element, and every part reads them. Layout depends on the
width of the cell (a container query), not of the window.
"""

from __future__ import annotations

import re

from .theme import FONT, Theme

NARROW, WIDE = 900, 1440  # breakpoints of the cell's width
OFF = ":host(.kv-off){display:none!important}"  # css_classes=["kv-off"] hides a part, whatever its grid says

_LENGTH = re.compile(r"(?<![\w.#-])(\d+(?:\.\d+)?)px")


def scaled(css: str, scale: float) -> str:
    """Every length in px times `scale`; hairlines up to 1.5 px stay what they are."""
    if scale == 1:
        return css

    def grow(match: re.Match) -> str:
        size = float(match[1])
        return match[0] if size <= 1.5 else f"{size * scale:.4g}px"

    return _LENGTH.sub(grow, css)


def page(theme: Theme) -> str:
    """For the outermost element: the colours, the container that widths refer to, and the frame around everything."""
    return scaled(
        f""":host{{{theme.css_variables()};--cellline:rgba({"16,22,28,.42" if theme.name == "light" else "255,255,255,.30"});
 color-scheme:{theme.name};container-type:inline-size;container-name:kv;display:block!important;width:100%;
 background:var(--bg);color:var(--ink);padding:10px 14px 12px;box-sizing:border-box;border-radius:9px;outline:none}}
:host(:focus-visible){{box-shadow:inset 0 0 0 2px var(--accent)}}""",
        theme.scale,
    )


def parts(theme: Theme) -> str:
    """For every part that is written as HTML."""
    return scaled(_PARTS, theme.scale)


def grids(theme: Theme) -> dict[str, str]:
    """For the containers, by name."""
    return {name: scaled(css, theme.scale) + OFF for name, css in _GRIDS.items()}


def place(order: int, *, at: str = "") -> str:
    """Where a panel stands in the one-column layout, and which widths hide it ("wide" or "narrow")."""
    css = f"@container kv (max-width:{NARROW - 1}px){{:host{{order:{order}}}}}"
    if at == "wide":
        css += f"@container kv (max-width:{WIDE - 1}px){{:host{{display:none!important}}}}"
    if at == "narrow":
        css += f"@container kv (min-width:{WIDE}px){{:host{{display:none!important}}}}"
    return css


_COLUMN = f""":host{{display:grid!important;gap:12px;grid-template-columns:minmax(0,1fr);align-content:start;min-width:0;width:auto}}
@container kv (max-width:{NARROW - 1}px){{:host{{display:contents!important}}}}"""

_GRIDS = {
    "panel": """:host{display:block!important;background:var(--panel);border:1px solid var(--line);border-radius:9px;
 padding:10px 12px 12px;min-width:0;box-sizing:border-box;position:relative;width:auto}""",
    "player": f""":host{{display:grid!important;grid-template-columns:auto minmax(0,1fr) auto;gap:4px 14px;align-items:center;
 background:var(--panel);border:1px solid var(--line);border-radius:9px;padding:7px 12px;box-sizing:border-box;width:auto}}
@container kv (max-width:{NARROW - 1}px){{:host{{grid-template-columns:1fr auto}}}}""",
    "track": f":host{{min-width:0}}@container kv (max-width:{NARROW - 1}px){{:host{{grid-column:1/-1;order:3}}}}",
    "story": f""":host{{display:grid!important;grid-template-columns:minmax(0,1fr) auto;gap:8px 24px;align-items:center;
 padding:12px 4px 10px;box-sizing:border-box;width:auto}}
@container kv (max-width:{NARROW - 1}px){{:host{{grid-template-columns:1fr}}}}""",
    "column": _COLUMN,
    "column_wide": _COLUMN + f"@container kv (max-width:{WIDE - 1}px){{:host{{display:none!important}}}}",
    "watch": f""":host{{display:grid;gap:12px;grid-template-columns:minmax(0,1fr);align-items:start;width:auto}}
@container kv (min-width:{NARROW}px){{:host{{grid-template-columns:290px minmax(0,1fr)}}}}
@container kv (min-width:{WIDE}px){{:host{{grid-template-columns:320px minmax(0,1fr) 410px}}}}""",
    "explain": f""":host{{display:grid;gap:12px;grid-template-columns:minmax(0,1fr);align-items:start;width:auto}}
@container kv (min-width:{NARROW}px){{:host{{grid-template-columns:minmax(0,1fr) 320px}}}}
@container kv (min-width:{WIDE}px){{:host{{grid-template-columns:minmax(0,1fr) 440px}}}}""",
    "measure": f""":host{{display:grid;gap:12px;grid-template-columns:repeat(2,minmax(0,1fr));grid-auto-flow:dense;
 align-items:start;width:auto}}
@container kv (min-width:{NARROW}px){{:host{{grid-template-columns:repeat(3,minmax(0,1fr))}}}}
@container kv (min-width:{WIDE}px){{:host{{grid-template-columns:repeat(4,minmax(0,1fr))}}}}""",
    "span": ":host{grid-column:span 2}",
    "most_of_row": f":host{{grid-column:1/-1}}@container kv (min-width:{WIDE}px){{:host{{grid-column:span 3}}}}",
    "full_row": ":host{grid-column:1/-1}",
}

_PARTS = (
    OFF + f":host{{font:15px/1.45 {FONT};color:var(--ink);width:auto;min-width:0}}"
    """
*{box-sizing:border-box}
.bk-clearfix{display:block!important;width:100%}
button,select,input,textarea{font:inherit;color:var(--ink);background:var(--panel);border:1px solid var(--line2);border-radius:6px;margin:0}
button{padding:4px 11px;cursor:pointer;white-space:nowrap} button:hover{border-color:var(--ink)}
button:focus-visible,select:focus-visible,input:focus-visible,textarea:focus-visible,.row:focus-visible,summary:focus-visible{outline:3px solid var(--accent);outline-offset:1px}
button.primary{background:var(--accent);border-color:var(--accent);color:var(--panel);font-weight:600}
button.quiet{border-color:transparent;background:transparent;color:var(--muted);padding:3px 8px;font-size:13.5px}
button.quiet:hover{color:var(--ink);border-color:var(--line2)} button.quiet[aria-pressed=true]{color:var(--accent);border-color:var(--accent)}
button svg{vertical-align:-2px;margin-right:5px} button:disabled{opacity:.55;cursor:default}
select,input,textarea{padding:4px 8px;width:100%} textarea{resize:vertical;line-height:1.35;display:block}
.head{display:flex;align-items:center;gap:6px 16px;flex-wrap:wrap;padding-bottom:8px}
.brand{font-size:19px;font-weight:700;letter-spacing:-.2px;display:flex;align-items:center;gap:8px}
.tag{font-size:12.5px;font-weight:700;letter-spacing:.3px;border:1.5px solid currentColor;border-radius:4px;padding:0 6px;line-height:19px;color:var(--ok)}
.tag.replay{color:var(--accent)}
.facts{color:var(--muted);font-size:14.5px;line-height:1.35;flex:1 1 420px;min-width:0} .facts b{color:var(--ink);font-weight:600} .facts span{white-space:nowrap}
.facts span:not(:last-child)::after{content:"·";margin:0 4px 0 7px;color:var(--line2)}
.spacer{flex:1} .acts button{margin-left:5px;padding:3px 10px}
.btns{display:flex;gap:6px;align-items:center} .btns select{width:116px;padding:4px 6px}
.stepno{font-size:15px;white-space:nowrap;text-align:right;line-height:1.25;min-width:176px} .stepno b{font-size:19px;font-variant-numeric:tabular-nums}
.stepno small{display:block;color:var(--muted);font-size:13px}
.state{display:inline-flex;align-items:center;gap:6px;font-weight:600}
.say{font-size:20px;line-height:1.28;min-height:76px;text-wrap:pretty;display:grid;grid-template-columns:24px 1fr;gap:11px;align-items:start}
.say .ic{padding-top:1px} .say small{display:block;font-size:15px;line-height:1.4;color:var(--muted);margin-top:3px}
.say .more{font-size:14.5px;color:var(--accent);background:none;border:0;padding:0;margin-left:2px}
.kpis{display:flex;gap:22px} .kpi{min-width:64px}
.kpi b{display:block;font-size:27px;line-height:1.05;font-weight:650;letter-spacing:-.5px;font-variant-numeric:tabular-nums}
.kpi span{font-size:13.5px;color:var(--muted);white-space:nowrap} .kpi.hot b{color:var(--warn)}
.tabs{display:flex;gap:4px;border-bottom:1px solid var(--line);margin-bottom:12px;flex-wrap:wrap}
.tabs button.tab{border:0;background:none;border-bottom:3px solid transparent;border-radius:0;padding:5px 14px 6px;font-size:16px;color:var(--muted)}
.tabs button.tab[aria-selected=true]{color:var(--ink);font-weight:650;border-color:var(--accent)}
.tabs .hint{align-self:center;color:var(--muted);font-size:13.5px;margin-left:8px} .tabs .opts{align-self:center}
.ph{display:flex;gap:4px 10px;align-items:baseline;margin-bottom:7px;flex-wrap:wrap}
.ph h2{font-size:16px;margin:0;font-weight:650;white-space:nowrap;line-height:1.45}
.ph .tools{display:flex;gap:9px;margin-left:auto;align-items:center;margin-top:-3px}
.sum{color:var(--muted);font-size:14px;flex:1 0 100%;margin:0;line-height:1.35}
.menu{display:flex;gap:6px;align-items:center;font-size:13.5px;color:var(--muted)} .menu select{width:auto;padding:1px 4px}
.form{display:grid;gap:7px;margin:0} .form label{font-size:13.5px;color:var(--muted);display:grid;gap:2px}
.nums{display:grid;grid-template-columns:repeat(3,1fr);gap:7px;margin-top:7px} .nums input{padding:2px 7px}
.nums.two{grid-template-columns:repeat(2,minmax(0,1fr))} .nums .wide{grid-column:1/-1}
.slide{display:flex;gap:9px;align-items:center} .slide input{padding:0;accent-color:var(--accent)} .slide output{min-width:34px;text-align:right;color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.traffic{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:4px 10px;align-items:center;border-top:1px solid var(--line);padding-top:8px}
.send{display:flex;gap:7px;flex-wrap:wrap} .send .primary{flex:1}
details>summary{cursor:pointer;font-size:14px;color:var(--muted);list-style:none;display:flex;gap:6px}
details>summary::before{content:"▸";color:var(--muted)} details[open]>summary::before{content:"▾"} details>summary b{color:var(--ink);font-weight:600}
.note{font-size:14px;line-height:1.35;margin:8px 0 0;color:var(--muted)} .note.warn{color:var(--warn)}
.seg{display:inline-flex;border:1px solid var(--line2);border-radius:6px;overflow:hidden;flex-wrap:wrap}
.seg button{border:0;border-radius:0;padding:1px 9px;font-size:13.5px;color:var(--muted)} .seg button+button{border-left:1px solid var(--line)}
.seg button[aria-pressed=true]{background:var(--accent-soft);color:var(--ink);font-weight:600}
.reqs{display:grid;gap:1px;grid-template-columns:minmax(0,1fr)}
.row{display:grid;grid-template-columns:34px minmax(0,1fr) auto;gap:0 8px;align-items:center;padding:2px 5px;border-radius:6px;cursor:pointer;border:1.5px solid transparent;font-size:14.5px;min-height:29px}
.row:hover{background:var(--sunk)} .row.on{border-color:var(--accent);background:var(--accent-soft)} .row.dim{opacity:.45}
.row .st{white-space:nowrap;overflow:hidden;text-overflow:ellipsis} .row .st.w{color:var(--warn);font-weight:600}
.row .num{color:var(--muted);font-variant-numeric:tabular-nums;white-space:nowrap;font-size:13.5px}
.row .tx{grid-column:2/-1;color:var(--muted);font-size:13px;line-height:1.3;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.chip{display:inline-flex;align-items:center;justify-content:center;height:22px;min-width:30px;padding:0 6px;border-radius:4px;font-weight:700;font-size:14px;color:var(--on);border:1px solid var(--cellline);position:relative}
.chip.two::before{content:"";position:absolute;left:2px;top:4px;bottom:4px;width:2.6px;border-radius:1px;background:var(--on)}
.out{font-size:15.5px;line-height:1.75;white-space:pre-wrap;overflow-wrap:anywhere} .out .pr{color:var(--muted)}
.out .lo{border-bottom:2px dotted var(--waste)} .out .now{background:var(--accent-soft);outline:2px solid var(--accent);border-radius:3px}
.caret{display:inline-block;width:8px;height:16px;background:var(--ink);vertical-align:-2px;margin-left:2px}
.facts2{display:grid;grid-template-columns:auto 1fr;gap:1px 12px;font-size:14px;margin:0 0 8px} .facts2 dt{color:var(--muted)} .facts2 dd{margin:0}
.alts{display:grid;grid-template-columns:auto 1fr auto;gap:2px 8px;font-size:13.5px;align-items:center;margin-top:8px;border-top:1px solid var(--line);padding-top:8px}
.alts .bar{height:10px;background:var(--line2);border-radius:2px} .alts .bar.taken{background:var(--decode)}
.alts code{font-family:var(--mono);font-size:13px;white-space:pre} .alts .hd{grid-column:1/-1;color:var(--muted)}
.mini{display:flex;flex-wrap:wrap;gap:4px;margin:2px 0 8px}
.mini button{min-width:31px;height:26px;padding:0 4px;border-radius:4px;font-weight:700;font-size:13px;color:var(--on);border:1px solid var(--cellline);position:relative}
.mini button.two::before{content:"";position:absolute;left:2px;top:4px;bottom:4px;width:2.6px;border-radius:1px;background:var(--on)}
.mini .null{font-size:12.5px;color:var(--muted);border:1.6px solid var(--line2);border-radius:4px;height:26px;line-height:23px;padding:0 4px;background:var(--cached)}
.out [data-token]{cursor:pointer} .out [data-token]:hover{background:var(--sunk)}
.mini button.shared{background:var(--shared)!important;color:var(--shared-ink)}
.slots{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:3px;margin:8px 0}
.slots div{border:1px solid var(--cellline);border-radius:3px;font-size:12.5px;height:26px;line-height:24px;text-align:center;overflow:hidden;white-space:nowrap;color:var(--on)}
.slots div.plain{background:var(--cached)!important;color:var(--ink)}
.slots div.e{background:radial-gradient(var(--waste) 1px,transparent 1.4px) 0 0/6px 6px;border-style:dashed;border-color:var(--waste)}
.log{display:grid;gap:0;font-size:15px;max-height:560px;overflow:auto}
.log .e{display:grid;grid-template-columns:46px 24px 1fr;gap:6px;padding:5px 4px;border-top:1px solid var(--line);line-height:1.4}
.log .e:first-child{border-top:0} .log .e.on{background:var(--accent-soft)} .e[data-step]{cursor:pointer} .e[data-step]:hover time{color:var(--accent);text-decoration:underline}
.log time{color:var(--muted);font-variant-numeric:tabular-nums;font-size:14px} .log .ic{padding-top:1px} .log em{font-style:normal;color:var(--muted)}
.line{display:grid;gap:0} .line .row{grid-template-columns:auto minmax(0,1fr);align-items:start;line-height:1.35;padding:4px 5px}
.line em{font-style:normal;color:var(--muted)}
.ledger{display:flex;height:30px;border:1px solid var(--line2);margin:2px 0 10px} .ledger i{min-width:1px;height:100%}
.parts{display:grid;grid-template-columns:18px minmax(0,1fr) auto auto;gap:3px 8px;align-items:center;font-size:14px}
.parts i{height:14px;border:1px solid var(--line2)} .parts b,.parts .num{text-align:right;font-variant-numeric:tabular-nums} .parts .num{color:var(--muted);min-width:52px}
.tok{background:var(--decode)} .emp{background:var(--free)}
.cac{background:repeating-linear-gradient(135deg,var(--hatch) 0 1.5px,var(--cached) 1.5px 6px)}
.res{background:repeating-linear-gradient(90deg,var(--line2) 0 1.5px,var(--panel) 1.5px 4.5px)}
.una{background:radial-gradient(var(--waste) 1.3px,transparent 1.7px) 0 0/5px 5px}
.ext{background:repeating-linear-gradient(45deg,var(--waste) 0 1.2px,transparent 1.2px 6px),repeating-linear-gradient(135deg,var(--waste) 0 1.2px,transparent 1.2px 6px)}
.meters{display:grid;grid-template-columns:auto minmax(40px,1fr) auto;gap:6px 10px;align-items:center;font-size:14px;margin-bottom:8px}
.meters span{color:var(--muted)} .meters b{text-align:right;font-variant-numeric:tabular-nums}
.meter{display:block;height:20px;border:1px solid var(--line2)} .meter i{display:block;height:100%;background:var(--third)}
.filters{display:flex;gap:4px;flex-wrap:wrap;margin-bottom:4px} .filters button{padding:1px 9px;font-size:13.5px;border-color:var(--line)}
.filters button[aria-pressed=true]{border-color:var(--accent);background:var(--accent-soft)}
.scroll{overflow:auto;max-height:420px}
table.tw{border-collapse:collapse;font-size:14px;width:100%} .tw th{text-align:left;color:var(--muted);font-weight:600;border-bottom:1.5px solid var(--line2);padding:3px 10px 3px 0}
.tw td,.tw tbody th{border-bottom:1px solid var(--line);padding:3px 10px 3px 0;vertical-align:top;font-variant-numeric:tabular-nums;color:var(--ink);font-weight:400}
.banner{border:2px solid var(--warn);background:var(--warn-soft);border-radius:9px;padding:8px 13px;margin:10px 0 0;font-size:16px;display:grid;grid-template-columns:1fr auto;gap:6px 16px;align-items:center}
.banner.past{border-color:var(--accent);background:var(--accent-soft)} .banner .primary{white-space:nowrap}
.banner pre{grid-column:1/-1;margin:0;font:13px/1.4 var(--mono);white-space:pre-wrap;max-height:260px;overflow:auto}
.idea{border:2px solid var(--accent);background:var(--accent-soft);border-radius:9px;padding:12px 16px;margin:10px 0 0;display:grid;grid-template-columns:minmax(0,1fr) auto;gap:8px 22px;align-items:center}
.idea p{margin:0;font-size:22px;line-height:1.32;text-wrap:pretty} .idea div{display:flex;gap:7px;align-items:center;flex-wrap:wrap} .idea small{font-size:14px;color:var(--muted)}
.foot{color:var(--muted);font-size:13.5px;padding:12px 4px 0;display:flex;gap:4px 18px;flex-wrap:wrap}
kbd{font:600 12.5px var(--mono);border:1px solid var(--line2);border-radius:4px;padding:0 5px;background:var(--panel)}
.help{position:absolute;bottom:44px;right:24px;background:var(--panel);border:2px solid var(--line2);border-radius:10px;padding:16px 20px;z-index:20;font-size:15px;color:var(--ink)}
.help td{padding:2px 12px 2px 0} [hidden]{display:none!important}
.sr{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
"""
    f"""@container kv (max-width:{NARROW - 1}px){{.facts{{order:3;flex-basis:100%}} .kpis{{gap:34px}} .say{{min-height:0}}
 .reqs{{grid-template-columns:repeat(2,minmax(0,1fr));gap:1px 14px}}
 .form{{grid-template-columns:1fr auto;align-items:end}} .form>*{{grid-column:1/-1}} .form>label:first-child{{grid-column:1}}
 .form>.send{{grid-column:2;grid-row:1}} .tabs .hint:not(.keep){{display:none}} }}
@container kv (min-width:{WIDE}px){{.say{{min-height:56px}}}}
@media (prefers-reduced-motion:no-preference){{.caret{{animation:b 1.1s steps(2,start) infinite}} @keyframes b{{to{{visibility:hidden}}}}}}"""
)
