"""The style sheet of the report, readable in light and in dark."""

HUES = 64

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--paper:#fbfbf9;--soft:#667085;--line:#d5d8de;--card:#fff;--key:#2f6fde}
@media (prefers-color-scheme:dark){
:root{--ink:#e7e9ee;--paper:#14171c;--soft:#98a2b3;--line:#343a44;--card:#1b1f26;--key:#7aa7ff}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#444;--line:#bbb;--card:#fff;--key:#235}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);background:var(--paper);
max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:25px;margin:0 0 12px}h2{font-size:19px;margin:0 0 4px}h3{font-size:15px;margin:20px 0 6px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:18px 20px;margin:18px 0}
p{margin:4px 0 10px}.note{color:var(--soft);font-size:13px}a{color:var(--key)}
nav{display:flex;flex-wrap:wrap;gap:6px 16px;margin-bottom:12px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13.5px;margin:6px 0}
th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child,.left td{text-align:left}
.left td+td{overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:10px 30px;margin:10px 0}.facts div{display:flex;flex-direction:column}
.facts b{font-size:17px;font-weight:600}.facts span{color:var(--soft);font-size:12.5px}
.two{display:flex;flex-wrap:wrap;gap:10px 30px;align-items:flex-start}figure{margin:0}
.two>div{flex:1 1 400px;min-width:0}
details{margin:12px 0 0}summary{cursor:pointer;color:var(--soft)}
svg{display:block;max-width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
.gap{width:100%;height:12px;border-radius:3px;max-width:none}
.gap .bound{fill:var(--key)}.gap .rest{fill:var(--line)}.gap .mark{fill:var(--ink)}
.scroll{overflow:auto;max-height:640px;border:1px solid var(--line);border-radius:6px;padding:4px}
.scroll svg{max-width:none}
.grid{stroke:var(--line);stroke-width:1}.axis{fill:var(--soft)!important}
.bar{stroke:var(--card);stroke-width:.6}.tail{opacity:.28;stroke:none}.x{fill:var(--soft)}
.in{fill:#fff!important;font-size:9px!important;pointer-events:none}
.box{fill:none;stroke:var(--line);stroke-width:1.5}.rank{fill:var(--card);stroke:var(--ink);stroke-width:1.3}
.wire{stroke-width:1.4;opacity:.75}.k0{stroke:#2f6fde}.k1{stroke:#d9822b}.k2{stroke:#2a9d63}.k3{stroke:#b0479c}
.k4{stroke:#8a7a3d}.k5{stroke:#777f8c}
.s0{stroke:#8a93a3;fill:#8a93a3}.s1{stroke:#2f6fde;fill:#2f6fde}.s2{stroke:#d9822b;fill:#d9822b}
polyline{fill:none!important;stroke-width:1.8}
"""
