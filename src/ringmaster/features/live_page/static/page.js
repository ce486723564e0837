// The page: what the server sends, kept as the value that `ringmaster watch --json` prints, and drawn by the parts.

import { Actions } from "./actions.js";
import { CurvesPart } from "./curves.js";
import { JobsPart } from "./jobs.js";
import { PlanPart } from "./plan.js";
import { colourOf, element, members, seconds, setText } from "./text.js";

const byId = (id) => document.getElementById(id);
const TICK_MS = 1000;
const LEFT = ["running", "waiting", "paused"];
const MAX_LINES = 300; // of the log

export function patched(value, patch) {
  if (!patch) return value;
  const [kind, ...of] = patch;
  if (kind === "=") return of[0];
  if (kind === "{") {
    const result = { ...value };
    for (const key of of[1]) delete result[key];
    for (const [key, each] of Object.entries(of[0])) result[key] = patched(result[key], each);
    return result;
  }
  const result = value.slice();
  result.splice(of[0], of[1], ...of[2]);
  for (const [place, each] of Object.entries(of[3])) result[place] = patched(result[place], each);
  return result;
}

class Page {
  constructor() {
    this.state = null;
    this.selected = new Set();
    this.colours = new Map();
    this.plan = new PlanPart(byId("plan"), this);
    this.curves = new CurvesPart(byId("curves"), this);
    this.jobs = new JobsPart(byId("table"), this);
    this.actions = new Actions(this);
    byId("runs").addEventListener("change", (event) => this.choose(event.target.value));
    addEventListener("popstate", () => this.connect());
    setInterval(() => this.tick(), TICK_MS);
    this.connect();
  }

  get nowS() {
    const { now_s: nowS, is_over: isOver } = this.state.timeline;
    return isOver ? nowS : nowS + (performance.now() - this.receivedMs) / 1000;
  }

  // The name of a job for people: of a pool that shows one batch without its id, else with the batch's name.
  label(job) {
    const { batches, is_whole_pool: isWhole } = this.state;
    if (!isWhole) return job;
    const [id, own] = [job.slice(0, job.indexOf("/")), job.slice(job.indexOf("/") + 1)];
    const names = Object.values(batches).map(({ name }) => name);
    if (names.length === 1) return own;
    const { name } = batches[id] ?? {};
    return name && names.filter((each) => each === name).length === 1 ? `${name}/${own}` : job;
  }

  labels(span) {
    return [span.job, ...members(span)].map((job) => this.label(job)).join(", ");
  }

  choose(run) {
    history.pushState(null, "", run === this.newest ? location.pathname : `?run=${encodeURIComponent(run)}`);
    this.connect();
  }

  connect() {
    this.events?.close();
    const run = new URLSearchParams(location.search).get("run");
    const url = new URL(`/page/events${run === null ? "" : `?run=${encodeURIComponent(run)}`}`, location.origin);
    const events = (this.events = new EventSource(url));
    events.onopen = () => this.show("live", "live");
    events.onerror = () => this.show("lost", this.state?.timeline.is_over ? "ended" : "no connection, trying again");
    events.addEventListener("fault", (event) => this.fail(JSON.parse(event.data)));
    events.addEventListener("state", (event) => this.begin(JSON.parse(event.data)));
    events.addEventListener("change", (event) => this.change(JSON.parse(event.data)));
  }

  show(kind, text) {
    byId("connection").className = kind;
    setText(byId("connection"), text);
  }

  fail(text) {
    byId("fault").hidden = false;
    setText(byId("fault"), text);
  }

  begin({ state, base_s: baseS, curves }) {
    this.baseS = baseS;
    this.curves.begin(curves);
    byId("fault").hidden = true;
    byId("main").hidden = byId("run").hidden = false;
    this.take(state);
  }

  change({ patch, curves }) {
    this.curves.add(curves);
    this.take(patched(this.state, patch));
  }

  take(state) {
    this.state = state;
    this.receivedMs = performance.now();
    const { jobs } = state.timeline;
    this.colours = new Map(jobs.map((job, index) => [job.name, colourOf(index, jobs.length)]));
    document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
    this.draw();
  }

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      this.drawHead();
      this.jobs.draw();
      this.plan.draw();
      this.curves.draw();
      this.drawNotes();
      this.drawNodes();
    });
  }

  tick() {
    if (!this.state || this.state.timeline.is_over || document.hidden) return;
    this.drawHead();
    this.plan.moveNow();
  }

  drawHead() {
    const { timeline, runs, run, batches, is_pool: isPool } = this.state;
    setText(byId("name"), timeline.name);
    this.newest = runs[0]?.id;
    const select = byId("runs");
    if (select.childElementCount !== runs.length || select.value !== run) {
      select.replaceChildren(...runs.map(({ id, name }) => element("option", { value: id, text: name })));
      select.value = run;
    }
    const known = Object.values(batches).slice(0, 4);
    const pages = known.flatMap(({ name, pages: own }) => Object.entries(own).map(([title, href]) => [known.length > 1 ? `${name} in ${title}` : title, href]));
    if (JSON.stringify(pages) !== this.pagesMark) {
      this.pagesMark = JSON.stringify(pages);
      byId("links").replaceChildren(...pages.map(([text, href]) => element("a", { href, target: "_blank", rel: "noopener", text })));
    }
    byId("add-jobs").hidden = !isPool;
    byId("all-jobs").hidden = timeline.is_over;
    this.drawSummary(timeline);
  }

  drawSummary(timeline) {
    const counts = {};
    for (const { status } of timeline.jobs) counts[status] = (counts[status] ?? 0) + 1;
    const total = timeline.jobs.length;
    const isLeft = ({ status }) => LEFT.includes(status);
    const ended = total - timeline.jobs.filter(isLeft).length;
    // What a job that has ended did not train was not needed.
    const numSteps = timeline.jobs.reduce((sum, job) => sum + job.step, 0);
    const allSteps = timeline.jobs.reduce((sum, job) => sum + (isLeft(job) ? Math.max(job.step, job.num_steps ?? 0) : job.step), 0);
    const share = ended === total ? 1 : allSteps ? numSteps / allSteps : 0;
    const nowS = this.nowS;
    const busy = timeline.running.reduce((sum, span) => sum + span.devices.length, 0);
    const devices = timeline.rows.reduce((sum, row) => sum + row[1], 0);
    const predicted = Object.values(timeline.predicted);
    const endsS = predicted.length ? Math.max(...predicted.map((end) => end.end_s)) : timeline.ends_s;
    const latestS = predicted.length ? Math.max(...predicted.map((end) => end.latest_s ?? end.high_s)) : null;
    const tiles = [
      ["jobs", `${ended} of ${total} ended`, Object.entries(counts).map(([status, many]) => `${many} ${status}`).join(", ")],
      ["steps", `${Math.floor(100 * share)} %`, `${numSteps.toLocaleString("en")} of ${allSteps.toLocaleString("en")}`],
      [timeline.is_over ? "took" : "running for", seconds(Math.max(0, timeline.is_over ? (timeline.ends_s ?? 0) : nowS)), `since ${new Date(1000 * timeline.zero_s).toLocaleTimeString()}`],
    ];
    if (!timeline.is_over && endsS !== null) {
      const left = Math.max(0, endsS - nowS);
      const latest = latestS === null ? "" : `latest in ${seconds(Math.max(0, latestS - nowS))}`;
      tiles.push(["ends in", seconds(left), latest || `at ${new Date(1000 * (timeline.zero_s + endsS)).toLocaleTimeString()}`]);
    }
    if (timeline.planned_end_s !== null) {
      const late = (endsS ?? 0) - timeline.planned_end_s;
      const how = Math.abs(late) < 0.05 * timeline.planned_end_s ? "as planned" : `${seconds(Math.abs(late))} ${late > 0 ? "later" : "sooner"}`;
      tiles.push(["first plan", seconds(timeline.planned_end_s), how]);
    }
    tiles.push(["devices", timeline.is_over ? String(devices) : `${busy} of ${devices} busy`, `${timeline.rows.length} ${timeline.rows.length === 1 ? "node" : "nodes"}`]);
    const summary = byId("summary");
    if (summary.childElementCount !== tiles.length) {
      summary.replaceChildren(...tiles.map(() => element("div", { class: "tile" }, element("h3"), element("strong"), element("span", { class: "quiet" }))));
    }
    tiles.forEach((texts, index) => texts.forEach((text, place) => setText(summary.children[index].children[place], text)));
    document.title = `${Math.floor(100 * share)} % ${timeline.name}`;
  }

  // What was decided and why, what was requested, and which segments began and ended: the newest first.
  drawNotes() {
    const { timeline, requests } = this.state;
    const ran = [...timeline.past, ...timeline.running];
    const where = (span) => `${span.devices.length} ${span.devices.length === 1 ? "device" : "devices"}`;
    const lines = [
      ...timeline.notes.map(({ at_s: atS, text }) => [atS, text.startsWith("planned") ? "plan" : / preempted(:|$)/.test(text) ? "end" : "fault", text]),
      ...requests.map(({ at_s: atS, text, status }) => [atS, status === "refused" ? "refused" : "request", text]),
      ...ran.map((span) => [span.start_s, "start", `${this.labels(span)}: ${span.technique} on ${where(span)}`]),
      ...timeline.past.filter(({ status }) => status === "done").map((span) => [span.end_s, "end", `${this.labels(span)}: segment done in ${seconds(span.end_s - span.start_s)}`]),
    ];
    const newest = lines.sort((a, b) => b[0] - a[0]).slice(0, MAX_LINES);
    const mark = `${lines.length} ${newest[0]}`;
    if (mark === this.notesMark) return;
    this.notesMark = mark;
    const items = newest.map(([atS, kind, text]) => element("li", {}, element("time", { text: seconds(Math.max(0, atS)) }), element("span", { class: `kind ${kind}`, text: kind }), element("span", { text })));
    byId("notes").replaceChildren(...items);
  }

  drawNodes() {
    const { nodes } = this.state.timeline;
    byId("nodes").hidden = !nodes.length;
    const rows = nodes.map((node) => {
      const health = node.health.map(([device, why]) => `device ${device} ${why}`).join("; ") || "well";
      return element("tr", {}, ...[node.name, node.num_devices, node.status, health].map((text) => element("td", { text })));
    });
    byId("nodes").querySelector("tbody").replaceChildren(...rows);
  }

  // A job that is pointed at or chosen is shown by all parts.
  point(job) {
    if (job === this.pointed) return;
    this.pointed = job;
    this.plan.mark(job);
    this.curves.mark(job);
    this.jobs.mark(job);
  }
}

globalThis.page = new Page();
