"""The looks of the demo's page: light and dark, from a phone to a wide screen, without any download."""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#3f6284"/>'
    '<path d="M3 8h10" stroke="#fff" stroke-width="2"/>'
    '<path d="M5 5v6M11 5v6" stroke="#f4894f" stroke-width="2"/></svg>'
)

STYLE = """
body {
  --paper: #fcfcfa; --card: #ffffff; --ink: #1d2328; --muted: #5f6a73; --line: #dfe3e6;
  --bar: #7d9bb8; --noise: #c8501e; --problem: #a3261b; --wash: #fdf0ee; background: var(--paper); color: var(--ink);
}
body.body--dark {
  --q-primary: #93b4d1 !important;
  --paper: #14181b; --card: #1c2226; --ink: #e6e9eb; --muted: #9ba6ae; --line: #333c42;
  --bar: #52749a; --noise: #f4894f; --problem: #ff9d92; --wash: #33201e; background: var(--paper); color: var(--ink);
}
body .nicegui-content { padding: 0; }
.body--dark .q-btn.bg-primary { color: var(--paper) !important; }
main { width: 100%; max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; line-height: 1.5; }
header { margin-bottom: 1.5rem; }
[aria-level="1"] { font-size: 1.6rem; font-weight: 600; line-height: 1.25; letter-spacing: -.01em; }
[aria-level="2"] { font-size: 1.05rem; font-weight: 600; margin: 1.75rem 0 .5rem; }
.muted { color: var(--muted); font-size: .875rem; }
.columns { display: grid; grid-template-columns: minmax(0, 20rem) minmax(0, 1fr); gap: 2.5rem; align-items: start; }
@media (max-width: 760px) {
  main { padding-top: 1.25rem; }
  .columns { grid-template-columns: minmax(0, 1fr); gap: 1.75rem; }
  figure .q-img { max-width: 12rem; }
}
.asked { display: flex; flex-direction: column; gap: 1rem; }
.asked > * { width: 100%; }
.q-uploader { background: var(--card); border: 1.5px dashed var(--bar); border-radius: .5rem; }
.q-uploader__header { background: none; color: var(--ink); }
.q-uploader__title { font-weight: 500; }
.q-uploader__subtitle { display: none; }
.q-uploader__list { min-height: 2rem; padding: 0; }
figure { margin: 0; }
figure .q-img { width: 100%; border-radius: .5rem; border: 1px solid var(--line); image-rendering: pixelated; }
.sampling { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem; }
.sampling > :first-child { width: 100%; }
.asked > .q-btn-group, .sampling .q-btn-group { border: 1px solid var(--line); }
.sampling .q-btn { padding: .1rem .45rem; }
.q-textarea textarea { max-height: 18rem; }
.label {
  display: grid; grid-template-columns: minmax(0, 1fr) auto; column-gap: 1rem; margin-bottom: 1.1rem;
  font-variant-numeric: tabular-nums;
}
.label > :nth-child(n + 3) { grid-column: 1 / -1; }
.name { font-weight: 500; overflow-wrap: anywhere; }
.probability { font-weight: 600; }
.label svg {
  display: block; width: 100%; margin: .2rem 0 .1rem;
  background: linear-gradient(var(--line), var(--line)) 0 0 / 100% 16px no-repeat;
}
.label svg path { vector-effect: non-scaling-stroke; fill: none; }
rect.bar, i.bar { fill: var(--bar); background: var(--bar); }
rect.band, i.band { fill: var(--noise); background: var(--noise); opacity: .5; }
.mean { stroke: var(--noise); stroke-width: 2.5px; }
.ticks { stroke: var(--noise); stroke-width: 1px; opacity: .45; }
.tokens { display: flex; flex-wrap: wrap; gap: .25rem; margin: .3rem 0 0; }
.tokens ruby {
  padding: 0 .2rem; border-radius: .2rem; ruby-position: under; overflow-wrap: anywhere;
  background: color-mix(in srgb, var(--noise) calc(var(--doubt) * .5), transparent);
}
.tokens rt { padding-top: .3rem; font-size: .7rem; }
.axis { display: flex; justify-content: space-between; border-top: 1px solid var(--line); margin-top: -.25rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .75rem 0 0; }
.legend i { display: inline-block; width: 1.1rem; height: .6rem; margin-right: .4rem; }
.legend i.mean, .legend i.tick { width: 2px; height: .8rem; background: var(--noise); vertical-align: -.1rem; }
.legend i.tick { width: 1px; opacity: .6; }
.noise { margin-top: 1rem; }
.noise:empty { display: none; }
.problem { padding: .6rem .9rem; border-radius: .4rem; color: var(--problem); background: var(--wash); }
.problem { overflow-wrap: anywhere; margin-bottom: 1rem; }
.captions { margin: 0; padding: 0 0 0 1.4rem; list-style: decimal; }
.captions li { padding: .15rem 0; }
.captions li > div { display: inline; margin-right: .75rem; overflow-wrap: anywhere; }
"""
