(function () {
  document.querySelectorAll(".rows table").forEach(function (table) {
    var body = table.tBodies[0], section = table.closest("section");
    var find = function (name) { return section.querySelector("." + name); };
    var lines = Array.from(body.rows), box = find("filter");
    var shown = find("shown"), out = find("command");
    var texts = new Map(lines.map(function (r) { return [r, r.textContent.toLowerCase()]; }));
    var heads = table.querySelectorAll("th");
    var apply = function () {
      var words = box.value.toLowerCase().split(/\s+/), n = 0;
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
    if (out) body.addEventListener("click", function (e) {
      var line = e.target.closest("tr");
      lines.forEach(function (r) { r.classList.toggle("picked", r === line); });
      if (line) out.textContent = line.dataset.command;
    });
  });
  document.querySelectorAll("button.whole").forEach(function (button) {
    var plot = button.closest("section").querySelector(".js-plotly-plot");
    var ranges = JSON.parse(button.dataset.ranges), place = 0;
    button.addEventListener("click", function () {
      place = 1 - place;
      Plotly.relayout(plot, { "xaxis.range": ranges[place].slice() });
      button.textContent = place ? "Show one block" : "Show all";
    });
  });
  var plots = Array.from(document.querySelectorAll(".js-plotly-plot"));
  var ink = function () {
    var css = getComputedStyle(document.documentElement);
    plots.forEach(function (plot) {
      Plotly.relayout(plot, { "font.color": css.getPropertyValue("--ink").trim() });
    });
  };
  var besides = plots.filter(function (plot) {
    var x = plot.layout.xaxis2 && plot.layout.xaxis.domain;
    return x && x[1] < 0.5;
  });
  if (matchMedia("(max-width: 640px)").matches) {
    besides.forEach(function (plot) {
      var height = 1.7 * plot.layout.height, whole = [0, 1];
      plot.style.height = plot.parentNode.style.height = height + "px";
      Plotly.relayout(plot, { height: height, "xaxis.domain": whole, "xaxis2.domain": whole,
        "yaxis.domain": [0.6, 1], "yaxis2.domain": [0, 0.4] });
    });
    plots.forEach(function (plot) {
      var title = plot.layout.xaxis && plot.layout.xaxis.title;
      if (title && title.text && (plot.layout.yaxis || {}).type === "category")
        Plotly.relayout(plot, { "xaxis.title.text": title.text.replace(/(.{8,}?) /g, "$1<br>") });
      var width = plot.closest(".plot").clientWidth;
      if (plot.layout.width > width) Plotly.relayout(plot, { width: width });
    });
  }
  ink();
  ["(prefers-color-scheme: dark)", "print"].forEach(function (media) {
    matchMedia(media).addEventListener("change", ink);
  });
})();
