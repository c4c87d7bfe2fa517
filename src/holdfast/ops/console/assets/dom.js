// Elements, texts and times. Every text of a user goes through `textContent`, never through HTML.

// Return an element. Properties that begin with `on` are listeners; null, undefined and false omit an attribute.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

let counter = 0;

export function newId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

const FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const UNITS = [["d", 86_400], ["h", 3_600], ["min", 60], ["s", 1]];

export function duration(seconds) {
  const size = Math.abs(seconds);
  if (size < 0.001) return "0 s";
  if (size < 1) return `${Math.round(size * 1_000)} ms`;
  if (size < 10) return `${size.toFixed(1)} s`;
  for (const [at, [unit, length]] of UNITS.entries()) {
    if (size < length) continue;
    const whole = Math.floor(size / length);
    const next = UNITS[at + 1];
    const rest = next ? Math.floor((size % length) / next[1]) : 0;
    return rest ? `${whole} ${unit} ${rest} ${next[0]}` : `${whole} ${unit}`;
  }
  return "0 s";
}

// The clock of the server, as far as the browser knows it.
let skewMs = 0;

export function setServerTime(dateHeader) {
  const at = Date.parse(dateHeader ?? "");
  // The header has whole seconds.
  if (!Number.isNaN(at) && Math.abs(at - Date.now()) > 2_000) skewMs = at - Date.now();
}

export function nowMs() {
  return Date.now() + skewMs;
}

// A time in nanoseconds as an element with the distance from now; `updateTimes` keeps it true.
export function when(ns) {
  if (ns === null || ns === undefined || ns === 0) return "–";
  const ms = Number(ns) / 1e6;
  const element = h("time", { datetime: new Date(ms).toISOString(), title: FORMAT.format(ms), "data-ms": ms });
  element.textContent = distance(ms);
  return element;
}

function distance(ms) {
  const seconds = (ms - nowMs()) / 1_000;
  if (Math.abs(seconds) < 1) return "now";
  const text = duration(Math.abs(seconds) < 10 ? Math.round(seconds) : seconds);
  return seconds > 0 ? `in ${text}` : `${text} ago`;
}

export function updateTimes() {
  for (const element of document.querySelectorAll("time[data-ms]")) {
    const text = distance(Number(element.dataset.ms));
    if (element.textContent !== text) element.textContent = text;
  }
}

export function count(value) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

const TONES = {
  good: ["ok", "active", "completed", "succeeded", "done", "delivered", "live", "ready", "finished", "sound"],
  busy: ["running", "leased", "claimed", "notified", "compensating", "draining"],
  waiting: ["waiting", "delayed", "blocked", "pending", "queued", "paused", "ready_waiting", "undeclared"],
  bad: ["failed", "dead", "parked", "cancelled", "suspect", "stray", "gone", "stopped", "differs"],
};

export function badge(state) {
  const name = String(state).toLowerCase();
  const tone = Object.keys(TONES).find((one) => TONES[one].includes(name)) ?? "plain";
  return h("span", { class: `badge ${tone}` }, name.replaceAll("_", " "));
}

// A list of labels and values.
export function facts(pairs) {
  const shown = pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined && pair[1] !== "");
  return h("dl", { class: "facts" }, shown.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
}

export function section(title, ...children) {
  const id = newId("section");
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

export function table(caption, columns, rows, empty = "none") {
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}: table` },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((one) => h("th", { scope: "col", class: one.number ? "number" : null }, one.label)))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        columns.map((one) => h("td", { class: one.number ? "number" : null }, one.show(row))))))));
}

export function link(href, ...children) {
  return h("a", { href }, children);
}

// Percent-encode the parts of a path.
export function path(...parts) {
  return parts.map((part) => encodeURIComponent(part)).join("/");
}

export function short(text, length = 12) {
  return text && text.length > length ? h("span", { title: text, class: "code" }, `${text.slice(0, length)}…`) : text;
}
