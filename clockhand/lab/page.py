"""How the report looks and moves: its style sheet, its script, and the clock that a reader can turn.

One page, no network. Both languages are in it, one of them hidden; light or dark follows the reader's system; figures
take their colours from the variables below.
"""

import json
import math

STYLE = """
:root { --paper:#fdfdfc; --ink:#1f2328; --soft:#5b636e; --faint:#c9ced6; --card:#f4f5f3; --link:#1f5d99;
  --c1:#2f6fab; --c2:#c8553d; --c3:#3a8f5c; --c4:#8a5fb0; --c5:#b5852a; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper:#15181c; --ink:#e4e7ea; --soft:#9aa4b0; --faint:#3c444e;
  --card:#1d2126; --link:#83b8ec; --c1:#6aa9e0; --c2:#ec8a73; --c3:#6cc48f; --c4:#bd9ae0; --c5:#dcb262; } }
@media print { :root { --paper:#fff; --ink:#000; --soft:#444; --card:#fff; --link:#000; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
html[data-lang=en] .zh, html[data-lang=zh] .en { display: none; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 17px/1.6 Charter, "Iowan Old Style", Georgia, "Noto Serif CJK SC", "Songti SC", serif; }
main { max-width: 44rem; margin: 0 auto; padding: 1.5rem 1rem 6rem; }
h1, h2, h3, nav, table, button, .badge, .id, .caption, .meta, .clock, footer {
  font-family: system-ui, "Segoe UI", Roboto, "Noto Sans CJK SC", "PingFang SC", sans-serif; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: 1rem 0 .5rem; letter-spacing: -.02em; }
h2 { font-size: 1.45rem; margin: 4rem 0 1rem; border-top: 2px solid var(--ink); padding-top: .8rem; }
h3 { font-size: 1.12rem; margin: 2.6rem 0 .6rem; } h4 { font: 600 .98rem system-ui, sans-serif; margin: 1.8rem 0 .5rem; }
h3 .number, h4 .number { color: var(--soft); font-weight: 400; margin-right: .5em; font-variant-numeric: tabular-nums; }
a { color: var(--link); text-decoration-thickness: 1px; text-underline-offset: 2px; }
code { font: .86em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.lead { font-size: 1.12rem; } .meta, .caption, footer { color: var(--soft); font-size: .84rem; line-height: 1.5; }
button.lang { position: fixed; top: .7rem; right: .7rem; z-index: 2; border: 1px solid var(--faint); border-radius: 2rem;
  background: var(--paper); color: var(--ink); padding: .3rem .9rem; font-size: .85rem; cursor: pointer; }
nav { font-size: .84rem; line-height: 1.5; margin: 2rem 0; } nav summary { cursor: pointer; font-weight: 600; }
nav ol { list-style: none; margin: .3rem 0 .9rem; padding: 0; } nav li { padding-left: calc(var(--depth) * 1rem); }
nav a { text-decoration: none; color: inherit; display: block; padding: .1rem 0; } nav a:hover { color: var(--link); }
nav b { display: block; margin-top: .8rem; }
@media (max-width: 40rem) { h1 { margin-top: 2.6rem; font-size: 1.8rem; } td.badge { font-size: .76rem; } }
@media (min-width: 78rem) { main { margin-left: max(21rem, calc(50vw - 22rem)); }
  nav { position: fixed; left: 0; top: 0; bottom: 0; width: 19rem; overflow-y: auto; margin: 0; padding: 1.4rem 1rem 3rem 1.4rem;
  border-right: 1px solid var(--faint); } }
figure { margin: 1.6rem 0; } figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: system-ui, "Noto Sans CJK SC", "PingFang SC", sans-serif !important; }
.caption { margin-top: .5rem; }
article { background: var(--card); border-left: 3px solid var(--hue); border-radius: 0 .4rem .4rem 0; padding: .9rem 1.1rem 1rem;
  margin: 1.1rem 0; break-inside: avoid; }
article header { display: flex; flex-wrap: wrap; gap: .3rem .7rem; align-items: baseline; }
.id { font-weight: 700; font-size: .95rem; } .badge { color: var(--hue); font-size: .82rem; font-weight: 600; }
article p { margin: .5rem 0; } .sentence { font-style: italic; } html[data-lang=zh] .sentence { font-style: normal; font-weight: 600; }
.formula { font: .86rem/1.5 ui-monospace, Menlo, Consolas, "Noto Sans CJK SC", monospace; overflow-wrap: anywhere; white-space: pre-wrap; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; line-height: 1.4; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); } th, td { padding: .25rem .6rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; }
td.value { font-weight: 600; } td.value small { display: block; font-weight: 400; color: var(--soft); } td.key, .n { white-space: nowrap; } td.badge, th { overflow-wrap: normal; } td.odd { color: var(--c2); }
article details { margin-top: .5rem; font-size: .86rem; } article summary { cursor: pointer; color: var(--soft);
  font: .82rem system-ui, sans-serif; }
.counts { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; padding: 0; list-style: none; font-weight: 600; }
.holds { --hue: var(--c3); } .condition { --hue: var(--c1); } .refuted { --hue: var(--c2); } .explained { --hue: var(--c4); }
.undecided { --hue: var(--c5); } .unrun { --hue: var(--soft); }
.clock { margin: 1.6rem 0; } .faces { display: grid; grid-template-columns: repeat(8, 1fr); gap: .35rem; }
.faces svg { width: 100%; display: block; } .face { stroke: var(--faint); fill: none; stroke-width: 2; }
.query { stroke: var(--c1); stroke-width: 5; stroke-linecap: round; } .key { stroke: var(--c2); stroke-width: 5; stroke-linecap: round; }
.clock label { display: block; margin: .8rem 0 0; font-size: .9rem; } .clock input { width: 100%; accent-color: var(--c1); }
.clock output { font-weight: 700; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: .8em; height: .25em; vertical-align: middle; margin-right: .3em; background: var(--hue); }
@media print { button.lang, nav, .clock input { display: none; } article { border: 1px solid #bbb; border-left-width: 3px; }
  body { font-size: 10.5pt; } h2 { break-before: page; } details > *:not(summary) { display: block; } }
"""

SCRIPT = """
const root = document.documentElement;
document.querySelector('button.lang').addEventListener('click', () => {
  root.dataset.lang = root.dataset.lang === 'en' ? 'zh' : 'en';
  root.lang = root.dataset.lang === 'en' ? 'en' : 'zh-CN';
});
// The contents are a column on a wide screen and folded away on a narrow one.
document.querySelector('nav details').open = matchMedia('(min-width: 78rem)').matches;
const theta = JSON.parse(document.getElementById('theta').textContent);
const position = document.getElementById('position'), distance = document.getElementById('distance');
const turn = (hand, angle) => hand.setAttribute('transform', `rotate(${(angle * 180 / Math.PI) % 360})`);
function show() {
  const m = +position.value, n = Math.max(0, m - distance.value);
  document.querySelectorAll('.query').forEach((hand, i) => turn(hand, m * theta[i]));
  document.querySelectorAll('.key').forEach((hand, i) => turn(hand, n * theta[i]));
  document.getElementById('m').textContent = m;
  document.getElementById('n').textContent = n;
  document.getElementById('d').textContent = m - n;
  const score = theta.reduce((sum, t) => sum + Math.cos((m - n) * t), 0) / theta.length;
  document.getElementById('score').textContent = score.toFixed(4);
}
position.addEventListener('input', show);
distance.addEventListener('input', show);
show();
"""


def clock_faces(theta: list[float]) -> str:
    """One clock a pair, two hands each: the query's and the key's. The script turns them."""
    faces = []
    for number, turn in enumerate(theta, 1):
        wavelength = 2 * math.pi / turn
        shown = f"{wavelength:,.0f}" if wavelength >= 100 else f"{wavelength:.1f}"
        faces.append(
            f'<svg viewBox="-50 -50 100 100" role="img"><title>{number}: λ = {shown}</title>'
            '<circle class="face" r="47"/><line class="key" y2="-30"/><line class="query" y2="-42"/></svg>'
        )
    return f'<div class="faces">{"".join(faces)}</div><script type="application/json" id="theta">{json.dumps(theta)}</script>'
