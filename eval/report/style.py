"""The style sheet of a report: light and dark mode, phones to wide screens, no downloads."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #1d2328; --muted: #5f6a73; --line: #dfe3e6;
  --series-0: #52708c; --series-1: #c8501e; --series-2: #2f8558; --series-3: #7b4fb3;
  --series-4: #b0387f; --series-5: #94720a; --series-6: #1b8a99; --series-7: #6b6257;
  --right: #1d7a46; --homoglyph: #8a5a00; --bar: #e8edf1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181b; --card: #1c2226; --ink: #e6e9eb; --muted: #9ba6ae; --line: #333c42;
    --series-0: #93b4d1; --series-1: #f4894f; --series-2: #63c08f; --series-3: #b594e6;
    --series-4: #ec82bb; --series-5: #d9b84a; --series-6: #5cc7d6; --series-7: #b8aea2;
    --right: #5fcb8d; --homoglyph: #e0b04c; --bar: #2b343a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { margin: 0 0 1.25rem; max-width: 52rem; font-size: 1.6rem; line-height: 1.3; letter-spacing: -.015em; }
h2 { display: inline; margin: 0; font-size: 1.3rem; line-height: 1.3; letter-spacing: -.01em; }
h3 { margin: 0 0 .5rem; font-size: .95rem; font-weight: 600; }
p { margin: 0 0 1rem; max-width: 44rem; }
.subject { margin: 0 0 .5rem; color: var(--series-1); font-weight: 600; }
.note, figcaption, .legend { color: var(--muted); font-size: .875rem; }
nav { position: sticky; top: 0; z-index: 1; margin: 1.5rem 0 0; padding: .6rem 0; background: var(--paper); }
nav { border-bottom: 1px solid var(--line); font-size: .9rem; display: flex; overflow-x: auto; gap: .25rem 1.25rem; }
nav a { flex: none; }
@media (min-width: 60rem) { nav { flex-wrap: wrap; font-size: .85rem; } }
a { color: var(--series-0); text-underline-offset: .2em; }
section { padding: 1.25rem 0; border-bottom: 1px solid var(--line); }
.section > :last-child { margin-bottom: 0; }
.anchor { scroll-margin-top: 6rem; padding-top: .35rem; }
.facts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .9rem 1.5rem; margin: 1.5rem 0 0;
}
.facts dt { color: var(--muted); font-size: .8rem; }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
details { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
details.section { margin: 0; border: 0; background: none; }
.section > summary { padding: 0; }
summary { cursor: pointer; padding: .6rem .9rem; font-weight: 600; font-size: .95rem; }
pre {
  margin: 0; padding: .25rem .9rem .9rem; overflow-x: auto;
  font: .8rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
.scroll { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; width: 100%; max-width: 46rem; font-variant-numeric: tabular-nums; }
table.figures { width: auto; min-width: min(100%, 36rem); max-width: none; }
.figures thead th { white-space: normal; vertical-align: bottom; }
.figures :is(tbody th, thead td) { min-width: 9rem; position: sticky; left: 0; background: var(--paper); }
.figures tr.group th { white-space: nowrap; }
.figures tr.group span { position: sticky; left: 0; }
caption { text-align: left; padding-bottom: .5rem; color: var(--muted); font-size: .875rem; }
th, td { padding: .35rem .75rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
thead :is(th, td) { border-bottom: 1px solid var(--ink); font-size: .875rem; font-weight: 600; }
tbody th { font-weight: 400; }
tbody tr.group th { padding-top: 1rem; font-weight: 600; border-bottom: 1px solid var(--line); }
td.chance { color: var(--muted); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.75rem 2.5rem; }
.columns { margin: 0 0 1rem; align-items: start; }
figure { margin: 0; min-width: 0; }
header figure { margin-bottom: 1rem; }
.plot svg { display: block; width: 100%; max-width: 34rem; height: auto; overflow: visible; }
.plot svg { stroke-linejoin: round; font-family: inherit; font-variant-numeric: tabular-nums; }
.plot figcaption { margin-top: .4rem; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0 0 .9rem; padding: 0; list-style: none; }
.legend .swatch { display: inline-block; width: 1.4rem; height: 0; margin-right: .45rem; vertical-align: .25em; }
.legend .swatch { border-top: 3px solid var(--colour); }
img { display: block; background: #fff; border-radius: .3rem; object-fit: contain; }
.legend .dashed { border-top-style: dashed; }
.legend .dotted { border-top-style: dotted; }
.folded :is(tbody th, thead td) { background: var(--card); }
.folded > div { padding: .25rem .9rem .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18.5rem), 1fr)); gap: 1rem; }
.cards, .rows { margin: 0 0 1rem; }
.card { padding: .8rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card); }
.card header { display: flex; gap: .8rem; align-items: center; min-height: 4.5rem; margin-bottom: .6rem; }
.card header img { flex: none; width: 4.5rem; height: 4.5rem; border: 1px solid var(--line); }
.masks { grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
.masks header { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); align-items: start; }
.masks header img { width: 100%; height: auto; }
.masks figure { margin: 0; }
.masks figcaption { margin-top: .2rem; font-size: .75rem; text-align: center; }
.masks .legend { margin: 0 0 .4rem; gap: .1rem .9rem; font-size: .75rem; }
.masks .swatch { width: .8rem; border-top-width: .8rem; vertical-align: -.1em; }
.pair header img { width: 8rem; height: 8rem; }
.card h3 { margin: 0; font-size: .875rem; line-height: 1.35; overflow-wrap: anywhere; }
.candidates { margin: 0; padding: 0; list-style: none; font-size: .8rem; line-height: 1.3; }
.candidates li {
  display: grid; grid-template-columns: 1rem 1fr auto; gap: .4rem; align-items: baseline;
  margin-top: 2px; padding: .25rem .4rem; border-radius: .25rem; overflow-wrap: anywhere;
  background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share));
}
.candidates .share { color: var(--muted); font-variant-numeric: tabular-nums; white-space: nowrap; }
.tokens { display: flex; flex-wrap: wrap; gap: .25rem; margin: 0 0 .4rem; }
.tokens ruby {
  padding: 0 .2rem; border-radius: .2rem; ruby-position: under;
  background: color-mix(in srgb, var(--series-1) calc(var(--doubt) * .7), transparent);
}
.tokens rt { color: var(--muted); font-size: .65rem; font-variant-numeric: tabular-nums; }
.card .note { margin: 0; font-size: .8rem; }
.right { color: var(--right); font-weight: 600; }
.homoglyph { color: var(--homoglyph); font-weight: 600; }
.row { padding: .8rem 0; border-top: 1px solid var(--line); }
.row { display: grid; grid-template-columns: minmax(0, 16rem) 1fr; gap: .5rem 1.5rem; align-items: center; }
.row:first-child { border-top: 0; }
.row h3 { margin: 0; font-size: .9rem; overflow-wrap: anywhere; }
.images { display: grid; grid-template-columns: repeat(5, minmax(0, 4.5rem)); gap: .6rem; }
.images img { width: 100%; aspect-ratio: 1; border: 1px solid var(--line); }
.images .right img, .images .homoglyph img { border: 2px solid currentColor; }
.images figcaption { margin-top: .15rem; text-align: center; font-size: .75rem; line-height: 1.3; color: inherit; }
.strip { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.5rem, 1fr)); gap: .9rem .75rem; }
.strip { margin: 0 0 1.25rem; }
.strip img { width: 4.5rem; height: 4.5rem; border: 1px solid var(--line); }
.strip figcaption { margin-top: .3rem; font-size: .75rem; line-height: 1.3; overflow-wrap: anywhere; }
.strip figcaption b { display: block; color: var(--ink); font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  main { padding: 1.75rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  th, td { padding: .35rem .45rem; font-size: .875rem; }
  .figures :is(tbody th, thead td) { min-width: 6.5rem; }
  .row { grid-template-columns: 1fr; }
}
@media print {
  main { max-width: none; padding: 0; }
  section, .card, .row, figure { break-inside: avoid; }
  nav { display: none; }
  details::details-content { display: block; content-visibility: visible; }
}
"""
