// What can be done with jobs: forms that the server describes, with what they cost before anything is done.

import { element } from "./text.js";

const byId = (id) => document.getElementById(id);

async function send(path, content) {
  const options = content && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) };
  try {
    const answer = await fetch(new URL(`/page/${path}`, location.origin), options);
    return await answer.json();
  } catch {
    return { faults: ["the server does not answer"] };
  }
}

function labelled(title, input, help) {
  const id = `field-${title.toLowerCase().replaceAll(/\W+/g, "-")}`;
  input.id = id;
  input.setAttribute("aria-describedby", `${id}-help`);
  return element("div", { class: "field" }, element("label", { for: id, text: title }), input, element("small", { id: `${id}-help`, class: "quiet", text: help }));
}

export class Actions {
  constructor(page) {
    this.page = page;
    this.dialog = byId("dialog");
    this.body = byId("dialog-body");
    byId("dialog-close").addEventListener("click", () => this.dialog.close());
    byId("all-jobs").addEventListener("click", () => this.open(this.shownJobs()));
    byId("add-jobs").addEventListener("click", () => this.openAdding());
  }

  // The jobs of the table, by batch: none for all of one batch.
  shownJobs() {
    const { jobs } = this.page.state.timeline;
    const shown = jobs.filter(({ name }) => this.page.jobs.shown.has(name)).map(({ name }) => name);
    return shown.length === jobs.length && !this.page.state.is_whole_pool ? [] : shown;
  }

  show(title, ...content) {
    byId("dialog-title").textContent = title;
    this.body.replaceChildren(...content);
    if (!this.dialog.open) this.dialog.showModal();
  }

  async open(names) {
    const isWhole = this.page.state.is_whole_pool;
    const batches = new Set(names.map((name) => (isWhole ? name.split("/")[0] : "")));
    if (isWhole && batches.size !== 1) {
      this.show("Jobs of one batch", element("p", { text: "These are jobs of several batches. Choose one batch above, or filter by its name." }));
      return;
    }
    const batch = [...batches][0] ?? "";
    const jobs = isWhole ? names.map((name) => name.slice(batch.length + 1)) : names;
    const title = jobs.length === 1 ? jobs[0] : jobs.length ? `${jobs.length} jobs` : "All jobs of the batch";
    this.show(title, element("p", { class: "quiet", text: "loading what can be done" }));
    const forms = await send(`forms?${jobs.map((job) => `job=${encodeURIComponent(job)}`).join("&")}`);
    if (forms.faults) return this.show(title, this.outcome(forms));
    const place = element("div");
    const choose = (form, button) => {
      for (const each of button.parentNode.children) each.setAttribute("aria-pressed", String(each === button));
      place.replaceChildren(this.form(form, batch));
      place.querySelector("input, textarea, button")?.focus();
    };
    const buttons = forms.map((form) => element("button", { type: "button", "aria-pressed": "false", text: form.text, onclick: (event) => choose(form, event.target) }));
    this.show(title, element("div", { class: "choices", role: "group", "aria-label": "What to do" }, ...buttons), place);
    buttons[0]?.focus();
  }

  form({ text, form, fields, schema }, batch) {
    const hasPrice = schema.properties.mode?.enum?.includes("dry-run");
    const inputs = new Map();
    const rows = Object.entries(schema.properties).flatMap(([name, field]) => {
      const isGiven = name in fields && JSON.stringify(fields[name]) !== "{}";
      if (isGiven || name === "mode") return [];
      const input = this.input(field);
      inputs.set(name, [field, input]);
      const help = field.type === "object" ? "One KEY=VALUE a line, such as optimizer.lr=1e-4 or num_steps=500." : field.description;
      return [labelled(field.title, input, help)];
    });
    const answer = element("div", { role: "status", class: "answer" });
    const values = () => {
      const result = { ...fields };
      for (const [name, [field, input]] of inputs) {
        const value = field.type === "boolean" ? input.checked : input.value.trim();
        if (value !== "") result[name] = ["integer", "number"].includes(field.type) ? Number(value) : value;
      }
      return result;
    };
    const act = async (button, mode) => {
      button.disabled = true;
      answer.replaceChildren(element("p", { class: "quiet", text: "asking" }));
      const content = { form, batch, run: this.page.state.run, fields: { ...values(), ...(mode ? { mode } : {}) } };
      const got = await send("requests", content);
      answer.replaceChildren(this.outcome(got, mode === "dry-run"));
      button.disabled = false;
      return !got.faults;
    };
    const start = element("button", { type: "submit", class: "main", text: hasPrice ? "start it" : text });
    const made = element("form", {}, element("p", { class: "quiet", text: schema.description }), ...rows);
    if (hasPrice) {
      const price = element("button", { type: "button", text: "show what it costs", onclick: async (event) => (start.disabled = !(await act(event.target, "dry-run"))) });
      start.disabled = true;
      made.addEventListener("input", () => (start.disabled = true));
      made.append(price);
    }
    made.append(" ", start, answer);
    made.addEventListener("submit", (event) => {
      event.preventDefault();
      act(start, hasPrice ? "start" : null);
    });
    return made;
  }

  input(field) {
    if (field.type === "object") return element("textarea", { rows: 3, spellcheck: "false" });
    if (field.type === "boolean") return element("input", { type: "checkbox" });
    const isNumber = ["integer", "number"].includes(field.type);
    const input = element("input", { type: isNumber ? "number" : "text", step: field.type === "number" ? "any" : null, min: field.minimum ?? null, max: field.maximum ?? null });
    return input;
  }

  outcome(answers, isPrice = false) {
    if (answers.faults) return element("ul", { class: "faults" }, ...answers.faults.map((text) => element("li", { text })));
    const lines = answers.flatMap(({ message, jump, is_done: isDone }) => [
      element("li", { class: isDone ? "done" : "late", text: message }),
      ...(jump ? [element("li", { class: "late", text: jump })] : []),
    ]);
    return element("ul", { class: isPrice ? "price" : "done" }, ...lines);
  }

  openAdding() {
    const batch = element("input", { type: "text", required: "" });
    const text = element("textarea", { rows: 14, spellcheck: "false", required: "", class: "code" });
    const answer = element("div", { role: "status", class: "answer" });
    const button = element("button", { type: "submit", class: "main", text: "add the jobs" });
    const form = element(
      "form", {},
      labelled("Batch", batch, "The batch to which they belong, whether it runs already or not."),
      labelled("Jobs", text, "The text of a batch file, as YAML."),
      button, answer,
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      button.disabled = true;
      const got = await send("jobs", { batch: batch.value.trim(), text: text.value });
      button.disabled = false;
      const done = got.jobs && [{ message: `${got.jobs.join(", ")} of ${got.batch}: handed over, and measured first`, is_done: true }];
      answer.replaceChildren(this.outcome(got.faults ? got : done));
    });
    this.show("Add jobs to the pool", form);
    batch.focus();
  }
}
