// The table of jobs: sorted by a column, filtered, with what each does now and when it ends at the latest.

import { element, members, memory, number, rate, seconds, setText } from "./text.js";

const ORDER = { running: 0, failed: 1, waiting: 2, paused: 3, cancelled: 4, stopped: 5, done: 6 };
const MAX_METRICS = 4; // with a column

export class JobsPart {
  constructor(table, page) {
    this.table = table;
    this.page = page;
    this.sort = { column: "status", isDown: false };
    this.rows = new Map();
    this.filter = document.getElementById("filter");
    this.filter.addEventListener("input", () => page.draw());
    const body = table.tBodies[0];
    body.addEventListener("pointerover", (event) => page.point(event.target.closest("tr")?.dataset.job ?? null));
    body.addEventListener("pointerleave", () => page.point(null));
    body.addEventListener("focusin", (event) => page.point(event.target.closest("tr")?.dataset.job ?? null));
  }

  // The columns: the text of a cell, and the value by which it is sorted.
  columns() {
    const { timeline, batches, is_whole_pool: isWhole } = this.page.state;
    const nowS = this.page.nowS;
    const price = (job) => batches[isWhole ? job.name.split("/")[0] : Object.keys(batches)[0]]?.price_per_device_hour;
    const hours = this.deviceHours(timeline, nowS);
    const latest = (job) => job.predicted?.latest_s ?? job.predicted?.high_s ?? null;
    const ends = (job) => {
      if (job.predicted) return `${seconds(Math.max(0, job.predicted.end_s - nowS))}`;
      return job.ends_s === null ? "" : ["running", "waiting"].includes(job.status) ? seconds(Math.max(0, job.ends_s - nowS)) : `ended after ${seconds(job.ends_s)}`;
    };
    const last = (metric) => (job) => {
      if (metric === "train/loss" && job.figures.loss != null) return job.figures.loss;
      return this.known(job.name, "results")?.[metric.replace("eval/", "")] ?? this.page.curves.last(metric, job.name);
    };
    const metrics = this.metrics().slice(0, MAX_METRICS);
    const model = (job) => this.known(job.name, "models");
    const columns = [
      ["job", (job) => this.page.label(job.name), (job) => job.name],
      ["actions", () => "", () => null, "actions"],
      ["status", (job) => job.status, (job) => ORDER[job.status] ?? 9],
      ["progress", (job) => `${job.step}${job.num_steps ? `/${job.num_steps}` : ""}`, (job) => (job.num_steps ? job.step / job.num_steps : job.step), "progress"],
      ...metrics.map((metric) => [metric === "train/loss" ? "loss" : metric, (job) => number(last(metric)(job)), last(metric), "number"]),
      ["ends in", ends, (job) => job.predicted?.end_s ?? job.ends_s, "number"],
      ["latest in", (job) => (latest(job) === null || timeline.is_over ? "" : seconds(Math.max(0, latest(job) - nowS))), latest, "number"],
      ["samples/s", (job) => rate(job.figures.samples_per_s), (job) => job.figures.samples_per_s, "number"],
      ["tokens/s", (job) => rate(job.figures.tokens_per_s), (job) => job.figures.tokens_per_s, "number"],
      ["memory", (job) => memory(job.figures.peak_bytes, job.figures.predicted_bytes), (job) => job.figures.peak_bytes, "number"],
      ["trained by", (job) => (job.technique ? `${job.technique} ×${job.num_devices}` : ""), (job) => job.technique],
      ["device-h", (job) => number(hours.get(job.name), 3), (job) => hours.get(job.name), "number"],
      ["price", (job) => (price(job) ? number(hours.get(job.name) * price(job), 3) : ""), (job) => hours.get(job.name) * (price(job) ?? 0), "number"],
      ["model", (job) => model(job)?.uri.replace("models:/", "") ?? "", (job) => model(job)?.uri ?? null, "model"],
      ["message", (job) => job.message, (job) => job.message],
    ];
    const always = ["job", "actions", "status", "progress"];
    return columns.filter(([name, text]) => always.includes(name) || timeline.jobs.some((job) => text(job)));
  }

  // What is known of a job beside the timeline: its recorded model, or the results of its last evaluation.
  known(name, what) {
    const { batches, is_whole_pool: isWhole } = this.page.state;
    const [batch, own] = isWhole ? [name.split("/")[0], name.slice(name.indexOf("/") + 1)] : [Object.keys(batches)[0], name];
    return batches[batch]?.[what][own];
  }

  metrics() {
    const results = Object.values(this.page.state.batches).flatMap(({ results: each }) => Object.values(each).flatMap(Object.keys));
    return [...new Set([...this.page.curves.metrics(), ...results.map((metric) => `eval/${metric}`)])];
  }

  // What a gang trains together is divided evenly among its jobs.
  deviceHours(timeline, nowS) {
    const hours = new Map(timeline.jobs.map((job) => [job.name, 0]));
    for (const span of [...timeline.past, ...timeline.running]) {
      const spent = Math.max(0, Math.min(span.end_s, nowS) - span.start_s) * span.devices.length;
      for (const job of [span.job, ...members(span)]) hours.set(job, (hours.get(job) ?? 0) + spent / 3600 / (1 + members(span).length));
    }
    return hours;
  }

  shows(job) {
    const words = this.filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const text = `${job.name} ${job.status} ${job.technique} ${job.message}`.toLowerCase();
    return words.every((word) => text.includes(word));
  }

  draw() {
    const { jobs } = this.page.state.timeline;
    const columns = this.columns();
    this.drawHead(columns);
    const [, , value] = columns.find(([name]) => name === this.sort.column) ?? columns[0];
    const shown = jobs.filter((job) => this.shows(job)).map((job, index) => [job, value(job), index]);
    const isMissing = (each) => each === null || each === undefined || each === "" || Number.isNaN(each);
    shown.sort(([, one, first], [, other, second]) => {
      if (isMissing(one) || isMissing(other)) return isMissing(one) - isMissing(other) || first - second;
      const by = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
      return (this.sort.isDown ? -by : by) || first - second;
    });
    const body = this.table.tBodies[0];
    shown.forEach(([job], place) => {
      const row = this.row(job, columns);
      if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
    });
    while (body.rows.length > shown.length) body.lastChild.remove();
    this.shown = new Set(shown.map(([job]) => job.name));
    setText(document.getElementById("shown"), shown.length === jobs.length ? `${jobs.length}` : `${shown.length} of ${jobs.length}`);
  }

  drawHead(columns) {
    const head = this.table.tHead;
    const mark = JSON.stringify([columns.map(([name]) => name), this.sort]);
    if (mark === this.headMark) return;
    const focused = document.activeElement?.dataset?.column;
    this.headMark = mark;
    const cells = columns.map(([name, , , kind]) => {
      if (kind === "actions") return element("td", { class: kind });
      const isSorted = this.sort.column === name;
      const button = element("button", { type: "button", "data-column": name, text: name, onclick: () => this.sortBy(name) });
      return element("th", { scope: "col", class: kind, "aria-sort": isSorted ? (this.sort.isDown ? "descending" : "ascending") : "none" }, button);
    });
    head.replaceChildren(element("tr", {}, ...cells));
    if (focused) head.querySelector(`[data-column="${CSS.escape(focused)}"]`)?.focus();
    this.rows.clear();
    this.table.tBodies[0].replaceChildren();
  }

  sortBy(name) {
    this.sort = { column: name, isDown: this.sort.column === name && !this.sort.isDown };
    this.page.draw();
  }

  row(job, columns) {
    let row = this.rows.get(job.name);
    if (!row) {
      row = element("tr", { "data-job": job.name, tabindex: -1 });
      for (const [name, , , kind] of columns) {
        const cell = name === "job" ? this.nameCell(job) : element("td", { class: kind });
        if (kind === "progress") cell.append(element("progress", { max: 1, value: 0 }), element("span"));
        if (kind === "actions") cell.append(this.button(job));
        if (kind === "model") cell.append(element("a", { target: "_blank", rel: "noopener" }));
        if (name === "status") cell.append(element("span", { class: "status" }), element("span", { class: "phase" }));
        row.append(cell);
      }
      this.rows.set(job.name, row);
    }
    columns.forEach(([name, text, value, kind], place) => {
      const cell = row.cells[place];
      if (kind === "actions") return;
      const words = String(text(job) ?? "");
      if (kind === "progress") {
        cell.firstChild.value = job.status === "done" ? 1 : Math.min(1, job.num_steps ? value(job) : 0);
        cell.firstChild.setAttribute("aria-label", `steps of ${job.name}`);
      }
      if (name === "status") {
        cell.firstChild.className = `status ${job.status}`;
        setText(cell.firstChild, words);
        return setText(cell.lastChild, job.status === "running" ? job.figures.phase : "");
      }
      if (name === "message") cell.title = words;
      if (kind === "model" && words) this.linkModel(cell.firstChild, this.known(job.name, "models"));
      setText(cell.lastChild?.nodeType === 1 ? cell.lastChild : cell, words);
    });
    return row;
  }

  nameCell(job) {
    const dot = element("span", { class: "dot" });
    dot.style.background = this.page.colours.get(job.name);
    return element("th", { scope: "row" }, dot, element("span", { text: this.page.label(job.name), title: job.name }));
  }

  button(job) {
    const onclick = () => this.page.actions.open([job.name]);
    return element("button", { type: "button", class: "more", "aria-label": `change ${this.page.label(job.name)}`, title: "pause, cancel, clone, change", text: "⋯", onclick });
  }

  linkModel(link, { uri, page }) {
    if (page) link.href = page;
    else link.removeAttribute("href");
    link.title = page ? "its page in MLflow, with its family tree" : `its family tree: ringmaster lineage show ${uri}`;
  }

  mark(job) {
    this.marked?.classList.remove("pointed");
    this.marked = this.rows.get(job);
    this.marked?.classList.add("pointed");
  }
}
