// All curves of a metric in one chart. Each is drawn from the least and the greatest value in each column of pixels.

import uPlot from "./uplot/uPlot.esm.js";
import { element, number, seconds, tooltip } from "./text.js";

const MAX_POINTS = 4000; // of a curve that are kept
const MAX_EXACT = 1500; // places on the x axis up to which every point is drawn
const MAX_LISTED = 12; // curves in the tooltip
const NEAR_PX = 40;
const COLUMNS = ["step", "value", "at", "trained"];

// Keeps the least and the greatest value of each of equal ranges of steps, as the server does.
function thinned(curve, most) {
  const { step, value } = curve;
  if (step.length <= most) return curve;
  const scale = most / 2 / (step.at(-1) - step[0] + 1);
  const kept = [];
  let [range, low, high] = [-1, 0, 0];
  const keep = () => kept.push(...(low === high ? [low] : low < high ? [low, high] : [high, low]));
  for (let i = 0; i < step.length; i++) {
    const own = Math.floor((step[i] - step[0]) * scale);
    if (own !== range) {
      if (range >= 0) keep();
      [range, low, high] = [own, i, i];
    } else if (value[i] < value[low]) low = i;
    else if (value[i] > value[high]) high = i;
  }
  keep();
  if (kept.at(-1) !== step.length - 1) kept.push(step.length - 1);
  return Object.fromEntries(COLUMNS.map((name) => [name, kept.map((i) => curve[name][i])]));
}

function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

export class CurvesPart {
  constructor(box, page) {
    this.box = box;
    this.page = page;
    this.curves = {};
    this.controls = Object.fromEntries(["metric", "over", "log", "smoothing", "reset"].map((id) => [id, document.getElementById(id)]));
    for (const id of ["metric", "over", "log"]) this.controls[id].addEventListener("change", () => this.reset());
    this.controls.smoothing.addEventListener("input", () => this.draw());
    this.controls.reset.addEventListener("click", () => this.reset());
    this.caption = document.getElementById("at-cursor");
    this.empty = document.getElementById("no-curves");
    new ResizeObserver(() => this.page.state && this.draw()).observe(box);
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.reset());
  }

  begin(curves) {
    this.curves = {};
    this.add(curves);
    this.reset();
  }

  add(curves) {
    for (const [metric, ofJobs] of Object.entries(curves)) {
      for (const [job, { after = -1, ...columns }] of Object.entries(ofJobs)) {
        const all = (this.curves[metric] ??= {});
        const curve = (all[job] ??= { step: [], value: [], at: [], trained: [] });
        let length = curve.step.length;
        while (length && curve.step[length - 1] > after) length -= 1;
        for (const name of COLUMNS) {
          curve[name].length = length;
          for (const item of columns[name]) curve[name].push(item);
        }
        if (curve.step.length > 2 * MAX_POINTS) all[job] = thinned(curve, MAX_POINTS);
      }
    }
  }

  metrics() {
    const first = ["train/loss", "eval/loss"];
    const place = (metric) => (first.includes(metric) ? first.indexOf(metric) : first.length);
    return Object.keys(this.curves).sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  }

  last(metric, job) {
    return this.curves[metric]?.[job]?.value.at(-1) ?? null;
  }

  reset() {
    this.range = null;
    this.controls.reset.hidden = true;
    this.chart?.destroy();
    this.chart = null;
    this.jobs = null;
    if (this.page.state) this.draw();
  }

  // The visible curves of the chosen metric, as drawn: by job, its places on the x axis and its (smoothed) values.
  visible() {
    const over = this.controls.over.value;
    const weight = Number(this.controls.smoothing.value);
    const isLog = this.controls.log.checked;
    return this.page.state.timeline.jobs.flatMap(({ name }) => {
      const curve = this.curves[this.controls.metric.value]?.[name];
      if (!curve?.step.length || (this.page.jobs.shown && !this.page.jobs.shown.has(name))) return [];
      let smooth = curve.value;
      if (weight) {
        let [sum, total] = [0, 0];
        smooth = curve.value.map((value) => {
          sum = weight * sum + value;
          total = weight * total + 1;
          return sum / total;
        });
      }
      return [{ name, xs: curve[over], ys: isLog ? smooth.map((value) => (value > 0 ? value : null)) : smooth }];
    });
  }

  // The data of uPlot, whose curves share their places: all of them or, of many, the extremes in each column of pixels.
  data(curves) {
    const places = new Set();
    for (const { xs } of curves) {
      for (const x of xs) places.add(x);
      if (places.size > MAX_EXACT) break;
    }
    if (places.size <= MAX_EXACT) {
      const xs = [...places].sort((a, b) => a - b);
      const index = new Map(xs.map((x, i) => [x, i]));
      return [xs, ...curves.map((curve) => {
        const row = new Array(xs.length).fill(null);
        curve.xs.forEach((x, i) => (row[index.get(x)] = curve.ys[i]));
        return row;
      })];
    }
    const [low, high] = this.range ?? [
      curves.reduce((least, { xs }) => Math.min(least, xs[0]), Infinity),
      curves.reduce((most, { xs }) => Math.max(most, xs.at(-1)), -Infinity),
    ];
    const num = Math.max(100, Math.round(this.box.clientWidth / 2));
    const wide = (high - low) / num || 1;
    const xs = Array.from({ length: 2 * num + 2 }, (_, i) => low + (Math.floor(i / 2) + (i % 2 ? 0.75 : 0.25)) * wide);
    return [xs, ...curves.map((curve) => this.extremes(curve, low, wide, num))];
  }

  extremes({ xs, ys }, low, wide, num) {
    const row = new Array(2 * num + 2).fill(null);
    let [column, least, most] = [-1, 0, 0];
    const put = () => {
      row[2 * column] = ys[Math.min(least, most)];
      row[2 * column + 1] = ys[Math.max(least, most)];
    };
    for (let i = 0; i < xs.length; i++) {
      const own = Math.floor((xs[i] - low) / wide);
      if (own < 0 || own > num || ys[i] === null) continue;
      if (own !== column) {
        if (column >= 0) put();
        [column, least, most] = [own, i, i];
      } else if (ys[i] < ys[least]) least = i;
      else if (ys[i] > ys[most]) most = i;
    }
    if (column >= 0) put();
    return row;
  }

  draw() {
    this.listMetrics();
    const curves = (this.drawn = this.visible());
    this.caption.hidden = !curves.length;
    this.empty.hidden = Boolean(curves.length);
    if (!curves.length) {
      const isWhole = this.page.state.timeline.jobs.every(({ step }) => !step);
      this.empty.textContent = isWhole ? "no step has been reported yet" : "no job that is shown has reported this metric; MLflow keeps the curves of earlier batches";
      this.chart?.destroy();
      this.chart = this.jobs = null;
      return;
    }
    const data = this.data(curves);
    const jobs = curves.map(({ name }) => name).join("\n");
    const width = Math.max(280, this.box.clientWidth);
    if (this.chart && jobs === this.jobs) {
      if (this.chart.width !== width) this.chart.setSize({ width, height: this.chart.height });
      this.chart.setData(data, false);
      this.scale(data);
    } else {
      this.chart?.destroy();
      this.jobs = jobs;
      this.chart = new uPlot(this.options(curves, width), data, this.box);
      this.scale(data);
    }
    this.mark(this.page.pointed);
    const metric = this.controls.metric.value;
    this.box.setAttribute("aria-label", `Chart of ${metric} of ${curves.length} jobs over ${this.controls.over.selectedOptions[0].text}. Arrow keys move the cursor.`);
  }

  scale(data) {
    const xs = data[0];
    const [min, max] = this.range ?? [xs[0], xs.at(-1)];
    this.isScaling = true;
    this.chart.batch(() => {
      this.chart.setScale("x", { min, max: max > min ? max : min + 1 });
    });
    this.isScaling = false;
  }

  options(curves, width) {
    const css = getComputedStyle(document.documentElement);
    const [ink, grid] = ["--quiet", "--line"].map((name) => css.getPropertyValue(name).trim());
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const isTime = this.controls.over.value !== "step";
    const many = curves.length > 30;
    return {
      width,
      height: 320,
      legend: { show: false },
      scales: {
        x: { time: false, auto: false },
        y: { distr: this.controls.log.checked ? 3 : 1 },
      },
      axes: [
        { ...axis, values: (_, values) => values.map((x) => (x === null ? "" : isTime ? seconds(x) : x.toLocaleString("en"))), space: 70 },
        { ...axis, size: 64, values: (_, values) => values.map((y) => (y === null ? "" : number(y, 3))) },
      ],
      cursor: { points: { show: false }, y: false, drag: { x: true, y: false }, focus: { prox: -1 } },
      focus: { alpha: 0.18 },
      series: [
        {},
        ...curves.map(({ name }) => ({
          label: name,
          stroke: this.page.colours.get(name),
          width: many ? 1 : 1.75,
          spanGaps: true,
          points: { show: (_, index, from, to) => to - from < 2 || this.drawn[index - 1].xs.length === 1 },
        })),
      ],
      hooks: {
        setScale: [(chart, key) => key === "x" && !this.isScaling && this.zoom(chart)],
        setCursor: [(chart) => this.hover(chart)],
      },
    };
  }

  zoom(chart) {
    const { min, max } = chart.scales.x;
    if (min === undefined || !this.chart || chart.status === 0) return;
    const full = [chart.data[0][0], chart.data[0].at(-1)];
    this.range = min <= full[0] && max >= full[1] && !this.range ? null : [min, max];
    this.controls.reset.hidden = !this.range;
    queueMicrotask(() => this.draw());
  }

  // Lists the values at the cursor: of all curves or, of many, of those that are near it.
  hover(chart) {
    const { left, top } = chart.cursor;
    if (left === undefined || left < 0 || !this.drawn?.length) return this.leave();
    const x = chart.posToVal(left, "x");
    const found = this.drawn.flatMap(({ name, xs, ys }) => {
      const i = nearest(xs, x);
      if (ys[i] === null || xs[i] === undefined) return [];
      const isOutside = x > xs.at(-1) || x < xs[0];
      if (isOutside && Math.abs(chart.valToPos(xs[i], "x") - left) > NEAR_PX) return [];
      return [{ name, x: xs[i], y: ys[i], px: Math.abs(chart.valToPos(ys[i], "y") - top) }];
    });
    if (!found.length) return this.leave();
    found.sort((a, b) => a.px - b.px);
    const [first] = found;
    const listed = found.slice(0, MAX_LISTED).sort((a, b) => b.y - a.y);
    const isTime = this.controls.over.value !== "step";
    const where = isTime ? `after ${seconds(x)}` : `step ${first.x}`;
    const lines = listed.map(({ name, y }) => {
      const dot = element("span", { class: "dot" });
      dot.style.background = this.page.colours.get(name);
      return element("div", { class: name === first.name ? "row near" : "row" }, dot, element("span", { text: this.page.label(name) }), element("b", { text: number(y) }));
    });
    const more = found.length > listed.length ? [element("div", { class: "quiet", text: `and ${found.length - listed.length} more` })] : [];
    const rect = chart.over.getBoundingClientRect();
    tooltip.show([element("div", { class: "quiet", text: where }), ...lines, ...more], rect.left + left, rect.top + top);
    this.caption.textContent = `${where}: ${this.page.label(first.name)} ${number(first.y)}`;
    this.page.point(first.px < NEAR_PX || found.length === 1 ? first.name : null);
  }

  leave() {
    if (!this.isOver && tooltip.box.hidden) return;
    tooltip.hide();
    this.page.point(null);
  }

  key(event) {
    const step = { ArrowLeft: -8, ArrowRight: 8, Home: -1e6, End: 1e6 }[event.key];
    if (!step || !this.chart) return;
    event.preventDefault();
    const { clientWidth, clientHeight } = this.chart.over;
    const left = Math.min(clientWidth - 1, Math.max(0, (this.chart.cursor.left ?? 0) + step));
    this.chart.setCursor({ left, top: clientHeight / 2 });
  }

  mark(job) {
    if (!this.chart) return;
    const index = this.drawn.findIndex(({ name }) => name === job);
    if (index === this.markedIndex && this.chart === this.markedChart) return;
    [this.markedIndex, this.markedChart] = [index, this.chart];
    this.chart.setSeries(index < 0 ? null : index + 1, { focus: true });
  }

  listMetrics() {
    const metrics = this.metrics();
    const select = this.controls.metric;
    if (select.options.length === metrics.length && metrics.every((metric, i) => select.options[i].value === metric)) return;
    const chosen = select.value;
    select.replaceChildren(...metrics.map((metric) => element("option", { value: metric, text: metric })));
    if (metrics.includes(chosen)) select.value = chosen;
  }
}
