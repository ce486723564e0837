// Texts of numbers, as in the terminal, and elements of the page.

export function seconds(value, like = value) {
  const round = (number) => (Math.abs(number) < 10 ? number.toFixed(1) : Math.round(number).toString());
  if (like < 120) return `${round(value)} s`;
  if (like < 7200) return `${round(value / 60)} min`;
  return `${round(value / 3600)} h`;
}

export function number(value, digits = 4) {
  return value === null || value === undefined ? "" : String(Number(value.toPrecision(digits)));
}

export function rate(value) {
  if (value === null || value === undefined) return "";
  const [factor, unit] = value >= 0.9995e6 ? [1e6, "M"] : value >= 0.9995e3 ? [1e3, "k"] : [1, ""];
  return `${number(value / factor, 3)}${unit}`;
}

export function memory(held, predicted) {
  if (!held) return "";
  const known = predicted ? [held, predicted] : [held];
  const [unit, factor] = Math.max(...known) >= 999 * 2 ** 20 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  return `${known.map((bytes) => number(bytes / factor, 3)).join(" of ")} ${unit}`;
}

// The other jobs that the gang of a span trains.
export function members(span) {
  return span?.fellows ?? [];
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

const TEN = ["#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#38b2c6", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0"];

export function colourOf(index, many) {
  return many <= TEN.length ? TEN[index] : `hsl(${Math.round(index * 137.508) % 360} 62% 55%)`;
}

export const tooltip = {
  box: document.getElementById("tooltip"),
  show(lines, x, y) {
    this.box.replaceChildren(...lines);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? x - width - 12 : x + 16;
    this.box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, Math.min(y + 12, innerHeight - height - 4))}px)`;
  },
  hide() {
    this.box.hidden = true;
  },
};
