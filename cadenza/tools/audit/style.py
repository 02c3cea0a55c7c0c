"""The style sheet of an audit's page: light and dark, a desk's width and a phone's."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2128; --soft: #5b6572; --line: #d7dce2; --tile: #f4f6f8;
  --products: #2f6db3; --attention: #7b57b8; --memory: #d97b1f; --optimizer: #4f9a51;
  --communication: #b8446a; --other: #8a8f96; --in: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161b; --ink: #e6e9ed; --soft: #98a2ae; --line: #333b45; --tile: #1b2129;
    --products: #6ea8e8; --attention: #ac8eea; --memory: #f0a04b; --optimizer: #7cc47e;
    --communication: #e57b9d; --other: #a3a9b1; --in: #10141a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
.about { color: var(--soft); margin: 6px 0 22px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 12px; }
.tiles div { background: var(--tile); border-radius: 8px; padding: 14px 16px; }
.tiles b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 0.86rem; line-height: 1.35; display: block; }
figure { margin: 0; }
figcaption, figcaption p { color: var(--soft); font-size: 0.88rem; margin: 6px 0 0; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
svg text.figure { font-weight: 600; font-variant-numeric: tabular-nums; }
svg text.in { fill: var(--in); font-size: 11px; }
svg text.tick { fill: var(--soft); font-size: 11px; }
.axis, .grid { stroke: var(--line); stroke-width: 1; }
.roof { stroke: var(--ink); stroke-width: 1.5; }
.k-products { fill: var(--products); background: var(--products); }
.k-attention { fill: var(--attention); background: var(--attention); }
.k-memory { fill: var(--memory); background: var(--memory); }
.k-optimizer { fill: var(--optimizer); background: var(--optimizer); }
.k-communication { fill: var(--communication); background: var(--communication); }
.k-other { fill: var(--other); background: var(--other); }
circle { stroke-width: 1.5; }
.p-eager, .p-compiled { fill-opacity: 0; }
.p-cadenza { fill-opacity: 0.55; }
.s-products { fill: var(--products); stroke: var(--products); }
.s-attention { fill: var(--attention); stroke: var(--attention); }
.s-memory { fill: var(--memory); stroke: var(--memory); }
.s-other { fill: var(--other); stroke: var(--other); }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 4px 0 0;
}
.legend i {
  display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
}
.legend i.p-eager, .legend i.p-compiled { border: 2px solid var(--ink); border-radius: 50%; }
.legend i.p-cadenza { background: var(--ink); border-radius: 50%; }
.wide { display: block; }
.narrow { display: none; }
@media (max-width: 760px) {
  .wide { display: none; }
  .narrow { display: block; }
  main { padding: 20px 18px 36px; }
}
details { margin-top: 12px; }
summary { cursor: pointer; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.84rem; margin: 10px 0; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
td:nth-child(2), th:nth-child(2), td:first-child, th:first-child { text-align: left; }
li { margin: 4px 0; overflow-wrap: anywhere; }
.legend li { margin: 0; }
footer { color: var(--soft); font-size: 0.84rem; margin-top: 32px; }
"""
