// Draws the history with uPlot, and adds a point with every sample.
"use strict";
(() => {
  const section = document.querySelector("[data-series]");
  if (!section || !window.uPlot) return;
  const figures = [...section.querySelectorAll("[data-chart]")];
  // After a start the chart begins with the first sample, unless that is too recent for a line.
  const LEAST_RANGE_S = 60;
  const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
  let drawn = [];
  let series = null;

  function text(value, unit) {
    if (value === null || value === undefined) return "—";
    if (unit === "/s") return `${number.format(value < 10 ? Math.round(value * 10) / 10 : Math.round(value))}/s`;
    if (unit !== "s") return number.format(Math.round(value));
    if (value === 0) return "0";
    if (value < 1) return `${number.format(Math.round(value * 1e4) / 10)} ms`;
    if (value < 120) return `${number.format(Math.round(value * 10) / 10)} s`;
    return value < 7200 ? `${number.format(Math.round(value / 6) / 10)} min` : `${number.format(Math.round(value / 360) / 10)} h`;
  }

  function brief(value, unit) {
    if (unit === "s") return text(value, unit);
    for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return number.format(value / size) + letter;
    }
    return number.format(value);
  }

  const color = (element, name) => getComputedStyle(element).getPropertyValue(name) || "#888";

  function draw(figure) {
    const plot = figure.querySelector(".plot");
    const swatches = [...figure.querySelectorAll("[data-column]")];
    const values = swatches.map((swatch) => (series[swatch.dataset.column] ||= series.t.map(() => null)));
    if (!values.some((each) => each.some((value) => value !== null))) {
      const said = document.createElement("p");
      said.className = "empty";
      said.textContent = plot.dataset.empty;
      plot.replaceChildren(said);
      return null;
    }
    const unit = figure.dataset.unit;
    const soft = color(section.querySelector(".range") || section, "color");
    const line = color(figure, "border-top-color");
    const range = figure.querySelector(".range span");
    const newest = (self, at) => swatches
      .map((swatch, index) => `${swatch.textContent} ${text(self.data[index + 1][at], unit)}`)
      .join(", ");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    plot.textContent = "";
    const chart = new uPlot({
      width: plot.clientWidth,
      height: plot.clientHeight,
      cursor: { y: false, sync: { key: "nsq" }, points: { size: 6 } },
      tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
      scales: { x: { range: (self, first, last) => [Math.max(last - series.range_s, Math.min(first, last - LEAST_RANGE_S)), last] }, y: { range: (self, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, size: 24, space: 70, values: "{HH}:{mm}", incrs: [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400] },
        { ...axis, size: 48, space: 22, values: (self, ticks) => ticks.map((tick) => brief(tick, unit)) },
      ],
      series: [{}, ...swatches.map((swatch) => ({
        stroke: getComputedStyle(swatch, "::before").backgroundColor,
        width: 1.5,
        points: { show: false },
      }))],
      hooks: {
        setCursor: [(self) => {
          const at = self.cursor.idx;
          const isOver = at !== null && at !== undefined && self.cursor.left >= 0;
          const time = isOver ? `${new Date(self.data[0][at] * 1000).toISOString().slice(11, 19)} UTC` : "now";
          range.textContent = `${time}: ${newest(self, isOver ? at : self.data[0].length - 1)}`;
        }],
      },
    }, [series.t, ...values], plot);
    const say = () => { if (!(chart.cursor.left >= 0)) range.textContent = `now: ${newest(chart, chart.data[0].length - 1)}`; };
    say();
    return { chart, plot, values, say };
  }

  function drawAll() {
    drawn.forEach((each) => each && each.chart.destroy());
    drawn = figures.map(draw);
  }

  async function load() {
    const answer = await fetch(section.dataset.series);
    if (!answer.ok) return;
    series = await answer.json();
    drawAll();
  }

  function add(point) {
    if (!series) return;
    const last = series.t[series.t.length - 1];
    // The page was hidden, or the clock was set back.
    if (Math.abs(point.t - last) > 60) return load();
    if (point.t <= last) return;
    const since = point.t - series.range_s;
    let drop = 0;
    while (drop < series.t.length && series.t[drop] < since) drop += 1;
    for (const [name, values] of Object.entries(series)) {
      if (!Array.isArray(values)) continue;
      values.splice(0, drop);
      values.push(name === "t" ? point.t : point[name] ?? null);
    }
    if (drawn.some((each) => each === null)) drawn = figures.map((figure, index) => drawn[index] || draw(figure));
    drawn.forEach((each) => each && each.chart.setData([series.t, ...each.values]));
    drawn.forEach((each) => each && each.say());
  }

  document.addEventListener("nsq:point", (event) => add(event.detail));
  document.addEventListener("nsq:theme", () => series && drawAll());
  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => drawn.forEach((each) => each && each.chart.setSize({ width: each.plot.clientWidth, height: each.plot.clientHeight })), 100);
  });
  load();
})();
