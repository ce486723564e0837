// The plan over time: a row for each device, with what has run, what runs, what is to come and the first plan.

import { element, members, seconds, tooltip } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_SPANS = 4000; // the longest; more could not be told apart
const AXIS = 22;
const BAND = { tall: 46, gap: 10, most: 3 }; // prices and carbon over time, below the axis

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function ticks(endS, num) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800];
  const step = steps.find((each) => endS / each <= num) ?? steps.at(-1);
  return Array.from({ length: Math.floor(endS / step) + 1 }, (_, index) => index * step);
}

// The first of some texts that fits; else the end of the last one, by which names of trials differ.
function fitting(texts, most) {
  const last = texts.at(-1);
  return texts.find((text) => text.length <= most) ?? (most > 3 ? `…${last.slice(last.length - most + 1)}` : "");
}

function longest(spans) {
  return spans.length <= MAX_SPANS ? spans : [...spans].sort((a, b) => b.end_s - b.start_s - a.end_s + a.start_s).slice(0, MAX_SPANS);
}

export class PlanPart {
  constructor(box, page) {
    this.box = box;
    this.page = page;
    this.root = svg("svg", { role: "img" });
    box.append(this.root);
    new ResizeObserver(() => page.state && this.draw()).observe(box);
    box.addEventListener("pointermove", (event) => this.hover(event));
    box.addEventListener("pointerleave", () => this.leave());
  }

  draw() {
    const { timeline } = this.page.state;
    const spans = [...timeline.past, ...timeline.running, ...timeline.coming];
    this.endS = Math.max(timeline.ends_s ?? 0, timeline.planned_end_s ?? 0, timeline.is_over ? 0 : this.page.nowS, 0.1) * 1.01;
    const rows = timeline.rows.flatMap(([node, many]) => Array.from({ length: many }, (_, device) => [node, device]));
    const nodes = timeline.rows.length;
    const label = ([node, device]) => (nodes === 1 ? `device ${device}` : `${node}:${device}`);
    const margin = Math.min(180, 16 + 7 * Math.max(4, ...rows.map((row) => label(row).length)));
    const width = Math.max(320, this.box.clientWidth);
    const tall = rows.length <= 8 ? 36 : rows.length <= 24 ? 22 : 12;
    const strip = tall >= 22 && timeline.first.length ? Math.round(tall / 5) : 0;
    this.scale = (width - margin - 8) / this.endS;
    this.margin = margin;
    const x = (at) => margin + at * this.scale;
    const place = new Map(rows.map(([node, device], index) => [`${node} ${device}`, index * tall]));
    const height = rows.length * tall;
    const parts = [];
    for (const at of ticks(this.endS, Math.max(3, width / 110))) {
      parts.push(svg("line", { x1: x(at), x2: x(at), y1: 0, y2: height, class: "grid" }));
      const text = svg("text", { x: x(at), y: height + 15, class: "axis" });
      text.textContent = at === 0 ? "0" : seconds(at).replace(".0", "");
      parts.push(text);
    }
    rows.forEach((row, index) => {
      parts.push(svg("line", { x1: margin, x2: width - 8, y1: (index + 1) * tall, y2: (index + 1) * tall, class: "grid" }));
      if (tall < 12 && index % 2) return;
      const text = svg("text", { x: margin - 8, y: index * tall + tall / 2 + 4, class: "device" });
      text.textContent = label(row);
      parts.push(text);
    });
    const inner = tall - 4 - (strip ? strip + 2 : 0);
    this.spans = [];
    this.done = [];
    for (const span of longest(timeline.first)) {
      if (strip) this.boxes(span, place, (top) => [top + 2 + inner + 2, strip], "first", parts);
    }
    const band = (top, rows) => [top + 2, inner + (rows - 1) * tall];
    for (const span of longest(spans)) this.boxes(span, place, band, this.kind(span), parts, strip ? 0 : tall);
    timeline.bands.forEach((band, index) => this.band(band, { x, top: height + AXIS + index * (BAND.tall + BAND.gap), width, nodes }, parts));
    const below = timeline.bands.length * (BAND.tall + BAND.gap);
    this.now = timeline.is_over ? null : svg("line", { y1: 0, y2: below ? height + AXIS + below - BAND.gap : height + 4, class: "now" });
    if (this.now) parts.push(this.now);
    this.root.classList.toggle("dense", tall < 22);
    this.root.setAttribute("viewBox", `0 0 ${width} ${height + AXIS + below}`);
    this.root.setAttribute("height", height + AXIS + below);
    this.root.setAttribute("aria-label", this.words(timeline));
    if (!spans.length && !timeline.first.length) {
      const text = svg("text", { x: 8, y: 16 });
      text.textContent = "nothing is planned yet: jobs are measured first";
      parts.splice(0, parts.length, text);
    }
    this.root.replaceChildren(...parts);
    this.moveNow();
    this.mark(this.page.pointed);
  }

  kind(span) {
    if (span.status === "running") return "running";
    return span.status === "to come" ? "coming" : "past";
  }

  // The values over time of one kind: a step line for each group of nodes with the same ones.
  band({ name, unit, lines }, { x, top, width, nodes }, parts) {
    const values = lines.flatMap(([, steps]) => steps.map(([, value]) => value));
    const largest = Math.max(...values, 0);
    const y = (value) => top + BAND.tall - ((BAND.tall - 18) * value) / (largest || 1);
    const right = x(this.endS);
    parts.push(svg("rect", { x: this.margin, y: top, width: width - 8 - this.margin, height: BAND.tall, class: "band" }));
    const text = svg("text", { x: this.margin + 6, y: top + 12, class: "unit" });
    text.textContent = `${name} ${unit}, up to ${largest.toPrecision(3)}`;
    lines.slice(0, BAND.most).forEach(([names, steps], index) => {
      const [[first, value], ...others] = steps;
      const path = [`M${x(Math.max(0, first))} ${y(value)}`, ...others.map(([at, each]) => `H${x(at)}V${y(each)}`), `H${right}`];
      const line = svg("path", { d: path.join(""), class: `series line${index}` });
      const title = svg("title", {});
      title.textContent = `${name} ${unit} on ${names.slice(0, 8).join(", ")}`;
      line.append(title);
      parts.push(line);
      if (nodes > 1 && lines.length > 1) {
        const which = svg("tspan", { class: `line${index}`, dx: 10 });
        which.textContent = names.length === 1 ? names[0] : `${names[0]} and ${names.length - 1} more`;
        text.append(which);
      }
    });
    if (lines.length > BAND.most) text.append(` and ${lines.length - BAND.most} other series`);
    parts.push(text);
  }

  // A box for each device or, where rows have the height `joined`, for devices that lie below each other.
  boxes(span, place, band, kind, parts, joined = 0) {
    const tops = span.devices.map(([node, device]) => place.get(`${node} ${device}`)).filter((top) => top !== undefined).sort((a, b) => a - b);
    const colour = this.page.colours.get(span.job) ?? "#888";
    const isFault = ["crashed", "invalid", "out_of_memory", "lost"].includes(span.status);
    const runs = tops.reduce((found, top) => {
      const last = found.at(-1);
      if (joined && last && last[0] + last[1] * joined === top) last[1] += 1;
      else found.push([top, 1]);
      return found;
    }, []);
    runs.forEach(([top, rows], index) => {
      const [y, height] = band(top, rows);
      const left = this.margin + span.start_s * this.scale;
      const wide = Math.max(1, (span.end_s - span.start_s) * this.scale);
      const box = svg("rect", { x: left, y, width: wide, height, rx: Math.min(3, wide / 2), class: `span ${kind}${isFault ? " fault" : ""}`, fill: kind === "first" ? "" : colour, stroke: colour });
      box.dataset.job = span.job;
      box.span = span;
      parts.push(box);
      if (kind === "running") {
        const done = svg("rect", { x: left, y, width: 0, height, rx: 3, class: "done", fill: colour });
        done.dataset.job = span.job;
        done.span = span;
        parts.push(done);
        this.done.push(done);
      }
      if (index === 0 && kind !== "first" && wide > 34 && height >= 12) {
        const name = `${this.page.label(span.job)}${members(span).length ? ` +${members(span).length}` : ""}`;
        const text = svg("text", { x: left + 6, y: y + height / 2 + 4, class: `label ${kind}` });
        text.textContent = fitting([`${name} · ${span.technique}`, name], Math.floor((wide - 10) / 6.8));
        text.dataset.job = span.job;
        parts.push(text);
      }
    });
  }

  moveNow() {
    if (!this.now) return;
    const nowS = this.page.nowS;
    const at = this.margin + Math.min(nowS, this.endS) * this.scale;
    this.now.setAttribute("x1", at);
    this.now.setAttribute("x2", at);
    for (const box of this.done) {
      const { start_s: startS, end_s: endS } = box.span;
      box.setAttribute("width", Math.max(1, Math.min(nowS, endS) - startS) * this.scale);
    }
    if (nowS > this.endS) this.page.draw();
  }

  hover(event) {
    const span = event.target.span;
    if (!span) return this.leave();
    const devices = span.devices.map(([node, device]) => `${node}:${device}`).join(", ");
    const lines = [
      element("b", { text: this.page.labels(span) }),
      element("div", { text: `${span.technique} on ${devices}` }),
      element("div", { text: `${seconds(span.start_s)} to ${seconds(span.end_s)} (${seconds(span.end_s - span.start_s)})` }),
      element("div", { text: `${span.status}${span.message ? `: ${span.message}` : ""}` }),
    ];
    tooltip.show(lines, event.clientX, event.clientY);
    this.page.point(span.job);
  }

  leave() {
    tooltip.hide();
    this.page.point(null);
  }

  mark(job) {
    this.root.classList.toggle("pointing", Boolean(job));
    for (const box of this.root.querySelectorAll("rect, .label")) {
      box.classList.toggle("pointed", job !== null && (box.dataset.job === job || members(box.span).includes(job)));
    }
  }

  words(timeline) {
    const what = (spans) => spans.map((span) => `${this.page.labels(span)} by ${span.technique} on ${span.devices.length} devices until ${seconds(span.end_s)}`).join("; ");
    const running = timeline.running.length ? `Running: ${what(timeline.running.slice(0, 20))}. ` : "";
    const coming = timeline.coming.length ? `To come: ${what(timeline.coming.slice(0, 20))}. ` : "";
    return `Plan: ${timeline.past.length} segments have ended. ${running}${coming}`;
  }
}
