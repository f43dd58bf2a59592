"""The style sheet and the script of the page."""

STYLE = """
:root { --ink: #1b1f24; --quiet: #5a6470; --paper: #fff; --line: #d9dee4; --mark: #fff4d6;
  --each: #f6f8fa; --bad: #b42318; --link: #0060a8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --quiet: #9aa5b1;
  --paper: #14171b; --line: #30363d; --mark: #3a3217; --each: #1b1f25; --bad: #ff8a7a;
  --link: #6cb6ff } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 64px }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line) }
.quiet { color: var(--quiet); margin: 2px 0 10px; overflow-wrap: anywhere }
code, pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--each);
  border: 1px solid var(--line); border-radius: 4px; padding: 8px 10px; margin: 8px 0 }
dl { display: grid; grid-template-columns: minmax(90px, max-content) minmax(0, 1fr);
  gap: 3px 18px; margin: 0 }
dt { color: var(--quiet); overflow-wrap: anywhere } dd { margin: 0; overflow-wrap: anywhere }
.warning { background: var(--mark); padding: 6px 10px; border-radius: 4px; margin: 10px 0 0 }
.box { overflow: auto; max-height: 75vh; border: 1px solid var(--line); border-radius: 4px }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; width: 100% }
th, td { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line) }
th { position: sticky; top: 0; background: var(--paper); padding: 0 }
th button { all: unset; cursor: pointer; display: block; padding: 6px 10px; font-weight: 600 }
th button:focus-visible { outline: 2px solid var(--link); outline-offset: -2px }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
.num { text-align: right; font-variant-numeric: tabular-nums }
tbody tr { cursor: pointer } tbody tr:hover, tr.picked { background: var(--mark) }
tr.each { background: var(--each); color: var(--quiet) } tr.bad td { color: var(--bad) }
input { font: inherit; color: inherit; background: var(--paper); padding: 5px 9px;
  border: 1px solid var(--line); border-radius: 4px; width: 260px; max-width: 100% }
details { border-bottom: 1px solid var(--line); padding: 5px 0 }
summary { cursor: pointer; overflow-wrap: anywhere }
.tools { margin: 8px 0 }
"""

SCRIPT = """
(function () {
  document.querySelectorAll("table.rows").forEach(function (table) {
    var body = table.tBodies[0], section = table.closest("section");
    var find = function (name) { return section.querySelector("." + name); };
    var lines = Array.from(body.rows), box = find("filter");
    var shown = find("shown"), out = find("command");
    var texts = new Map(lines.map(function (r) { return [r, r.textContent.toLowerCase()]; }));
    var heads = table.querySelectorAll("th");
    var apply = function () {
      var words = box.value.toLowerCase().split(/\\s+/), n = 0;
      lines.forEach(function (r) {
        r.hidden = !words.every(function (w) { return texts.get(r).includes(w); });
        n += !r.hidden;
      });
      shown.textContent = n + " of " + lines.length + " rows";
    };
    box.addEventListener("input", apply); apply();
    heads.forEach(function (th, i) {
      th.addEventListener("click", function () {
        var up = th.getAttribute("aria-sort") !== "ascending";
        heads.forEach(function (o) { o.setAttribute("aria-sort", "none"); });
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        lines.sort(function (a, b) {
          var x = a.cells[i], y = b.cells[i], p = x.textContent, q = y.textContent;
          if (!p || !q) return (p ? 0 : 1) - (q ? 0 : 1);
          var d = x.dataset.v && y.dataset.v ? x.dataset.v - y.dataset.v : p.localeCompare(q);
          return up ? d : -d;
        });
        body.append.apply(body, lines);
      });
    });
    body.addEventListener("click", function (e) {
      var line = e.target.closest("tr");
      lines.forEach(function (r) { r.classList.toggle("picked", r === line); });
      if (line) out.textContent = line.dataset.command;
    });
  });
  var ink = function () {
    var css = getComputedStyle(document.documentElement);
    document.querySelectorAll(".js-plotly-plot").forEach(function (plot) {
      Plotly.relayout(plot, { "font.color": css.getPropertyValue("--ink").trim() });
    });
  };
  ink();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ink);
})();
"""
