"""How the HTML report looks: light and dark, on a screen, a telephone and on paper."""

STYLE = """
:root { --paper:#fbfaf8; --card:#ffffff; --ink:#1d1d1f; --faint:#64646b; --rule:#e2e0db; --better:#00664b;
  --worse:#a83a00; --unsure:#6b5a00; --mind:#fff4d9; --mind-rule:#d9a400; --code:#f1efea; color-scheme:light dark; }
@media (prefers-color-scheme:dark) { :root { --paper:#151517; --card:#1e1e21; --ink:#ececee; --faint:#a3a3ab;
  --rule:#36363b; --better:#4ec9a0; --worse:#ff9a66; --unsure:#e0c050; --mind:#33290c; --mind-rule:#a88100;
  --code:#26262a; } }
body { margin:0; background:var(--paper); color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif; }
main { max-width:1080px; margin:0 auto; padding:2rem 1.5rem 4rem; }
h1 { font-size:2rem; line-height:1.15; margin:0 0 .25rem; overflow-wrap:anywhere; }
h2 { font-size:1.3rem; margin:2.6rem 0 .8rem; padding-top:.7rem; border-top:1px solid var(--rule); }
h3 { font-size:1rem; margin:0 0 .6rem; }
.kind { margin:0; text-transform:uppercase; letter-spacing:.12em; font-size:.75rem; color:var(--faint); }
.faint { color:var(--faint); }
.better { color:var(--better); font-weight:600; } .worse { color:var(--worse); font-weight:600; }
.unsure { color:var(--unsure); } .unfair, .unfair s { color:var(--faint); }
s { text-decoration-thickness:2px; text-decoration-color:var(--worse); }
.unseen { position:absolute; width:1px; height:1px; overflow:hidden; clip-path:inset(50%); white-space:nowrap; }
.swatch { display:inline-block; width:1.5em; height:0; vertical-align:middle; margin-right:.5em; }
.words { display:grid; grid-template-columns:minmax(7rem,max-content) 1fr; gap:.55rem 1.4rem; margin:0; }
.words dt { font-weight:600; overflow-wrap:anywhere; } .words dd { margin:0; }
.pairs { display:grid; grid-template-columns:max-content 1fr; gap:.2rem 1.2rem; font-size:.9rem; }
.pairs dt { color:var(--faint); } .pairs dd { margin:0; overflow-wrap:anywhere; }
.mind { background:var(--mind); border-left:4px solid var(--mind-rule); padding:.55rem .9rem; margin:.8rem 0;
  overflow-wrap:anywhere; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:.9rem; font-variant-numeric:tabular-nums; }
th, td { text-align:left; padding:.42rem .8rem .42rem 0; border-bottom:1px solid var(--rule); vertical-align:top; }
thead th { color:var(--faint); font-weight:600; border-bottom:2px solid var(--rule); vertical-align:bottom; }
tbody th { font-weight:600; white-space:nowrap; }
.right { text-align:right; white-space:nowrap; } thead .right { white-space:normal; }
td:not(.right) { min-width:9rem; }
td:last-child, th:last-child { padding-right:0; }
.notes { color:var(--faint); font-size:.87rem; margin:.6rem 0 0; padding-left:1.1rem; overflow-wrap:anywhere; }
.charts { display:grid; grid-template-columns:minmax(0,1fr); gap:1.6rem; }
figure { margin:0; max-width:860px; } figcaption { color:var(--faint); font-size:.87rem; margin-top:.5rem; max-width:70ch; }
.chart { background:#fff; border:1px solid var(--rule); border-radius:8px; padding:.6rem; overflow-x:auto; }
.chart svg { display:block; max-width:100%; height:auto; margin:0 auto; overflow:visible; }
details { border-bottom:1px solid var(--rule); padding:.5rem 0; } summary { cursor:pointer; font-weight:600; }
summary .faint, summary .worse { font-weight:400; margin-left:.6rem; }
.finding { margin:.5rem 0 .5rem 1.1rem; font-size:.92rem; overflow-wrap:anywhere; } .finding p { margin:.25rem 0; }
div.finding { border-left:3px solid var(--rule); padding-left:.8rem; } div.fails { border-color:var(--worse); }
pre { background:var(--code); padding:.7rem .9rem; border-radius:6px; overflow-x:auto; font-size:.87rem; }
code { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace; }
@media (max-width:640px) { main { padding:1.2rem .9rem 3rem; } .words { grid-template-columns:1fr; gap:.1rem; }
  .words dd { margin-bottom:.7rem; } .pairs { grid-template-columns:1fr; } .pairs dd { margin-bottom:.4rem; }
  .chart svg { min-width:560px; } }
@media print { body { background:#fff; color:#000; font-size:11pt; } main { max-width:none; padding:0; }
  figure, tr, .finding { break-inside:avoid; } .scroll, .chart, pre { overflow:visible; } pre { white-space:pre-wrap; }
  details::details-content { content-visibility:visible; display:block; } }
"""
