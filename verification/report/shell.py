"""The frame of every page: one file that loads nothing and is readable without scripts.

The policy in its head forbids the browser whatever a page could load.
"""

from enginecast.verification.report.html import Child, Html, tag


def document(title: str, *body: Child) -> str:
    """A whole page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    page = tag("html", head, tag("body", *body, tag("script", Html(SCRIPT))), lang="en")
    return f"<!doctype html>\n{page}\n"


STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f7f8fa; --ink: #1b1f24; --quiet: #5c6570;
  --line: #d9dee4; --good: #1a7f4b; --good-back: #edf8f1; --bad: #c02626; --bad-back: #fdf0f0;
  --lost: #d6179b; --accent: #2f6fce; --new: #dff3e4; --new-line: #2c9250; --gone: #fbe3e3;
  --gone-line: #c94f4f; --edited: #fdf3d8; --edited-line: #c4901c; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1c2026; --ink: #e4e8ec;
  --quiet: #98a2ae; --line: #343b44; --good: #56c98a; --good-back: #14291e; --bad: #ff8080;
  --bad-back: #331a1a; --lost: #ff54c8; --accent: #7fb0f5; --new: #15351f; --gone: #3d1d1d;
  --edited: #3a2f12; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink);
  background: var(--back); max-width: 78rem; margin: 0 auto; padding: 1.5rem 1rem 4rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .75rem; font-weight: 650; }
h1 small { font-weight: 400; color: var(--quiet); font-size: 1rem; display: block; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; padding-top: .6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1rem 0 .4rem; }
p { margin: .4rem 0; max-width: 62rem; } .quiet, figcaption span, small { color: var(--quiet); }
code, pre, .mono { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
a { color: var(--accent); }
nav { font-size: .875rem; margin: 1rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
.verdict { padding: .75rem 1rem; border-left: 5px solid var(--good); background: var(--good-back);
  border-radius: 0 6px 6px 0; margin: 0; max-width: none; }
.verdict.rejected { border-color: var(--bad); background: var(--bad-back); }
.verdict.note { border-color: var(--edited-line); background: var(--edited); }
.verdict.note + * { margin-top: 1rem; }
.verdict b { font-size: 1.05rem; } .verdict ul { margin: .4rem 0 0; padding-left: 1.1rem; }
.verdict li { margin: .2rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .5rem;
  margin: .75rem 0 0; }
.facts div { background: var(--card); border-radius: 6px; padding: .5rem .75rem; }
.facts dt { font-size: .8rem; color: var(--quiet); } .facts dd { margin: 0; font-weight: 600; }
.facts dd small { font-weight: 400; display: block; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; color: var(--quiet); }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child { overflow-wrap: anywhere; white-space: normal; min-width: 10rem; } td.wide {
  min-width: 15rem; white-space: pre-line; overflow-wrap: anywhere; }
td.bar { min-width: 6rem; } td.bar i { display: block; height: .7rem; margin-top: .35rem;
  border-radius: 2px; background: var(--accent); min-width: 1px; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; }
th button::after { content: "↕"; opacity: .35; padding-left: .25rem; }
th[aria-sort=ascending] button::after { content: "↑"; opacity: 1; }
th[aria-sort=descending] button::after { content: "↓"; opacity: 1; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); font-weight: 600; }
.lost-text { color: var(--lost); font-weight: 600; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: 0 .75rem; }
details[open] { padding-bottom: .75rem; } details details { background: var(--card); }
td details, td details[open] { border: 0; margin: 0; padding: 0; background: none; }
td summary { padding: 0; } summary { cursor: pointer; padding: .4rem 0; } summary span {
  color: var(--quiet); }
.legend { font-size: .8rem; color: var(--quiet); display: flex; flex-wrap: wrap; gap: .25rem 1.1rem;
  max-width: none; } .entry { white-space: nowrap; max-width: 100%; }
.ramp i { display: inline-block; width: .8rem; height: .7rem; vertical-align: -.05rem; }
.key { display: inline-block; width: .8rem; height: .7rem; margin-right: .35rem;
  vertical-align: -.05rem; }
.key.lost { background: var(--lost); } .key.beyond { background: #7a1f0e; }
.key.equal { border: 1px dashed var(--quiet); } .key.new, .key.gone, .key.edited {
  border: 1px solid var(--new-line); background: var(--new); border-radius: 2px; }
.key.gone { border-color: var(--gone-line); background: var(--gone); }
.key.edited { border-color: var(--edited-line); background: var(--edited); }
.key.floor { height: 0; border-top: 2px dashed var(--ink); vertical-align: .2rem; }
.strip { margin: .9rem 0 1.2rem; } .strip figcaption { font-size: .875rem; margin-bottom: .55rem; }
.plot { position: relative; padding-left: 3rem; } .plot svg { display: block; width: 100%;
  height: 5.5rem; background: var(--card); }
.plot .lost { fill: var(--lost); } .plot .beyond { fill: #7a1f0e; } .plot .none {
  fill: transparent; }
.plot rect:hover { stroke: var(--ink); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.plot line { vector-effect: non-scaling-stroke; } .grid { stroke: var(--line); }
.plot .floor { stroke: var(--ink); stroke-dasharray: 5 4; stroke-width: 1.3; }
.ticks { position: absolute; left: 0; top: 0; bottom: 0; width: 2.6rem; }
.ticks span { position: absolute; right: 0; transform: translateY(50%); font-size: .7rem;
  color: var(--quiet); font-variant-numeric: tabular-nums; }
.blocks { display: flex; padding-left: 3rem; font-size: .72rem; color: var(--quiet); }
.blocks span { flex-basis: 0 !important; min-width: 0; overflow: hidden; white-space: nowrap;
  min-height: 1.1rem; }
.blocks .label { border-left: 1px solid var(--quiet); padding-left: 2px; }
pre { margin: .5rem 0; overflow-x: auto; background: var(--card); border-radius: 6px;
  padding: .5rem 0; max-height: 32rem; }
pre span { display: block; padding: 0 .75rem; width: max-content; min-width: 100%; }
pre .add { background: var(--new); } pre .del { background: var(--gone); } pre .hunk {
  color: var(--quiet); }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.sides > div { min-width: 0; } @media (max-width: 60rem) { .sides { grid-template-columns: 1fr; } }
.graph { display: block; margin: 0 auto; font: 11px ui-monospace, Menlo, Consolas, monospace; }
.graph text { text-anchor: middle; fill: var(--quiet); } .graph .op { fill: var(--ink);
  font-weight: 600; }
.graph rect { fill: var(--card); stroke: var(--line); } .graph > path, .leaves { fill: none;
  stroke: var(--quiet);
  stroke-opacity: .65; } .graph .input rect { fill: none; stroke: none; }
.graph .input .op { fill: var(--quiet); font-weight: 400; }
.graph .new rect { fill: var(--new); stroke: var(--new-line); }
.graph .gone rect { fill: var(--gone); stroke: var(--gone-line); }
.graph .edited rect { fill: var(--edited); stroke: var(--edited-line); }
.picture { width: 100%; font: 11px system-ui, sans-serif; display: block; height: auto; }
.picture text { fill: var(--quiet); } .picture .name { fill: var(--ink); }
.picture .before { fill: var(--line); } .picture .after { fill: var(--accent); }
.picture .kept { fill: #9aa5b1; } .picture .dot { fill: #d9772f; } .picture .gain {
  fill: var(--good); }
dl.made { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem;
  font-size: .875rem; margin: 0; }
dl.made dt { color: var(--quiet); } dl.made dd { margin: 0; min-width: 0; }
@media (max-width: 36rem) { dl.made { grid-template-columns: 1fr; } dl.made dd {
  margin-bottom: .4rem; } }
@media print { body { max-width: none; padding: 0; } .scroll, pre { overflow: visible;
  max-height: none; }
  figure, tr, .graph { break-inside: avoid; } nav, th button::after { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

SCRIPT = """
"use strict";
const number = (cell) => {
  if (cell === undefined) return -Infinity;
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim();
  if (text === "" || text === "-") return -Infinity;
  if (text.startsWith("not finite") || text.startsWith("no finite")) return Infinity;
  if (text === "equal") return -1;
  const found = parseFloat(text.replace(/,/g, ""));
  return Number.isNaN(found) ? text : found;
};
const compare = (one, other) => {
  if (typeof one === typeof other) return one < other ? -1 : one > other ? 1 : 0;
  return typeof one === "number" ? -1 : 1;
};
for (const head of document.querySelectorAll("table thead th")) {
  if (head.textContent === "") continue;
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const table = head.closest("table"), column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const way = down ? -1 : 1;
    rows.sort((a, b) => way * compare(number(a.cells[column]), number(b.cells[column])));
    table.tBodies[0].append(...rows);
  });
}
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
const unfold = () => {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = place; each; each = each.parentElement) {
    if (each.tagName === "DETAILS") each.open = true;
  }
  if (place) place.scrollIntoView();
};
addEventListener("hashchange", unfold);
unfold();
"""
