// Parts that several pages share: actions with their dialog, values as trees, blockers, filters.

import { get, may, newKey, place, post } from "./api.js";
import { append, h, newId, nowMs, replace, when } from "./dom.js";

const SHOWN_BYTES = 64 * 1024;
const OPEN_DEPTH = 2;
const ITEMS = 200;

// A message that screen readers announce, at the end of the page.
export function announce(text) {
  const line = document.getElementById("announcements");
  if (line) line.textContent = text;
}

function commandLine(words) {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`)).join(" ");
}

// A button that asks in a dialog before it sends a request. `fields` are `{name, label, value, type, options, required}`;
// `body(values)`, `route(values)` and `command(values)` build the request and the equal command. `prepare` runs before the
// dialog opens, then `fields` may be a function. `more(values)` returns further fields, again after a change of a field that
// `decides` them.
export function action({ label, scope = "operate", route, body = () => ({}), command = null, fields = [], more = null, prepare = null, text = "", danger = false, done = null, disabled = false }) {
  const allowed = may(scope) && !disabled;
  const button = h("button", {
    type: "button", class: danger ? "danger" : null, disabled: !allowed,
    title: may(scope) ? null : `needs a token with the scope ${scope}`,
  }, label);
  button.addEventListener("click", async () => {
    if (document.querySelector("dialog[open]")) return;
    const { hash } = window.location;
    await prepare?.();
    if (hash === window.location.hash && button.isConnected) openDialog();
  });

  function openDialog() {
    const key = newKey();
    const inputs = new Map();
    const problem = h("p", { class: "problem", role: "alert" });
    const shownCommand = h("code", { class: "command" });
    const values = () => Object.fromEntries([...inputs].map(([name, input]) => [name, input.type === "checkbox" ? input.checked : input.value]));
    const fieldRow = (field) => {
      const input = fieldInput(field);
      inputs.set(field.name, input);
      return h("label", {}, h("span", {}, field.label), input, field.hint ? h("small", {}, field.hint) : null);
    };
    const first = typeof fields === "function" ? fields() : fields;
    const rows = first.map(fieldRow);
    const further = h("div");
    let furtherNames = [];
    const addFurther = () => {
      furtherNames.forEach((name) => inputs.delete(name));
      const added = more(values());
      furtherNames = added.map((field) => field.name);
      replace(further, added.map(fieldRow));
    };
    if (more) {
      addFurther();
      first.filter((field) => field.decides).forEach((field) => inputs.get(field.name).addEventListener("change", addFurther));
    }
    const titleId = newId("dialog");
    const go = h("button", { type: "submit", class: danger ? "danger" : "primary" }, label);
    const form = h("form", { method: "dialog" },
      h("h2", { id: titleId }, label),
      text ? h("p", {}, text) : null,
      rows, further,
      command ? h("div", { class: "equal" }, h("span", {}, "The same command:"), shownCommand, copyButton(() => shownCommand.textContent)) : null,
      problem,
      h("div", { class: "buttons" }, h("button", { type: "button", value: "no", onclick: () => dialog.close() }, "Back"), go));
    const dialog = h("dialog", { "aria-labelledby": titleId }, form);
    const update = () => {
      if (command) shownCommand.textContent = commandLine(["holdfast", ...command(values()), ...(place.universe ? ["--universe", place.universe] : [])]);
    };
    form.addEventListener("input", update);
    form.addEventListener("change", update);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      problem.textContent = "";
      try {
        const answer = await post(route(values()), body(values()), key);
        dialog.close();
        announce(`${label}: done`);
        await done?.(answer);
      } catch (error) {
        problem.textContent = error.message;
        go.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      button.focus();
    });
    document.body.append(dialog);
    update();
    dialog.showModal();
    (inputs.values().next().value ?? go).focus();
  }
  return button;
}

// `value` and `options` may be functions: they are read when the dialog opens.
function fieldInput(field) {
  const { name, type = "text", required = false } = field;
  const value = typeof field.value === "function" ? field.value() : field.value ?? "";
  const options = typeof field.options === "function" ? field.options() : field.options;
  if (options) {
    const select = h("select", { name }, options.map((one) => h("option", { value: one }, one)));
    select.value = value || options[0];
    return select;
  }
  if (type === "json") return h("textarea", { name, rows: 4, spellcheck: "false", value, required });
  const input = h("input", { name, type, required, step: type === "number" ? "any" : null });
  if (type === "checkbox") input.checked = Boolean(value);
  else input.value = value;
  return input;
}

export function copyButton(text, label = "Copy") {
  return h("button", {
    type: "button", class: "small", onclick: async () => {
      await navigator.clipboard?.writeText(text());
      announce("copied");
    },
  }, label);
}

// The first 64 KiB of a text in UTF-8; null if it is not longer.
function firstPart(text) {
  if (text.length * 3 <= SHOWN_BYTES) return null;
  const bytes = new TextEncoder().encode(text);
  // As a stream, the decoder leaves out a character that the cut divides.
  return bytes.length <= SHOWN_BYTES ? null : new TextDecoder().decode(bytes.subarray(0, SHOWN_BYTES), { stream: true });
}

// A value as a tree of elements, with a download if it has more than 64 KiB. Texts above 64 KiB are shown in part.
export function tree(value, depth = 0, changed = null, at = "") {
  const mark = changed?.leaves.has(at) ? "changed" : null;
  if (value === null || typeof value !== "object") {
    const kind = value === null ? "null" : typeof value;
    let text = kind === "string" ? JSON.stringify(value) : String(value);
    const part = firstPart(text);
    if (part !== null) text = `${part}…`;
    return h("span", { class: ["value", kind, mark].filter(Boolean).join(" ") }, text,
      part === null ? null : [" ", downloadButton(value)]);
  }
  const isList = Array.isArray(value);
  const entries = isList ? value.map((item, index) => [index, item]) : Object.entries(value);
  const size = isList ? `[${entries.length}]` : `{${entries.length}}`;
  if (!entries.length) return h("span", { class: "value" }, isList ? "[]" : "{}");
  const items = h("ul", { class: "tree" });
  const add = (from) => {
    for (const [name, item] of entries.slice(from, from + ITEMS)) {
      items.append(h("li", {}, h("span", { class: "name" }, `${name}: `), tree(item, depth + 1, changed, `${at}/${name}`)));
    }
    if (from + ITEMS < entries.length) {
      const more = h("li", {}, h("button", { type: "button", class: "small", onclick: () => { more.remove(); add(from + ITEMS); } },
        `${entries.length - from - ITEMS} more`));
      items.append(more);
    }
  };
  const details = h("details", { class: mark }, h("summary", {}, size), items);
  let filled = false;
  const fill = () => {
    if (!filled) add(0);
    filled = true;
  };
  details.addEventListener("toggle", () => details.open && fill());
  if (depth < OPEN_DEPTH || changed?.above.has(at)) {
    details.open = true;
    fill();
  }
  if (depth) return details;
  const text = JSON.stringify(value);
  return firstPart(text) === null ? details : h("div", {}, details, downloadButton(value, "Download all"));
}

function downloadButton(value, label = "Download") {
  const isText = typeof value === "string";
  return h("button", {
    type: "button", class: "small", onclick: () => {
      const url = URL.createObjectURL(new Blob([isText ? value : JSON.stringify(value)], { type: "application/octet-stream" }));
      h("a", { href: url, download: isText ? "value.txt" : "value.json" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 1_000);
    },
  }, label);
}

// The places that differ between two values, as paths, and the places above them.
export function differences(before, after, at = "", found = { leaves: new Set(), above: new Set() }) {
  const isTree = (value) => value !== null && typeof value === "object";
  if (!isTree(before) || !isTree(after) || Array.isArray(before) !== Array.isArray(after)) {
    if (String(before) !== String(after) || typeof before !== typeof after || isTree(before) !== isTree(after)) {
      found.leaves.add(at);
      for (let place = at; place; place = place.slice(0, place.lastIndexOf("/"))) found.above.add(place);
      found.above.add("");
    }
    return found;
  }
  for (const name of new Set([...Object.keys(before), ...Object.keys(after)])) {
    differences(before[name], after[name], `${at}/${name}`, found);
  }
  return found;
}

// A text with its parts in backquotes as code.
function withCode(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

// The answer of `why`: whether the subject moves, its blockers, and what to do.
export function blockers(answer) {
  if (!answer.blockers.length) {
    return h("p", { class: "quiet" }, answer.moving === false ? "nothing blocks it" : "nothing blocks it: it moves");
  }
  return h("ul", { class: "blockers" }, answer.blockers.map((one) => h("li", {},
    h("span", { class: "code" }, one.code), " ", one.text,
    one.since ? [" (since ", when(one.since), one.until ? [", until ", when(one.until)] : null, ")"] : null,
    one.action ? h("div", { class: "todo" }, withCode(one.action)) : null)));
}

// A part of a page that loads a document and shows it, or the error. With `keepsOpen` it does not replace opened details.
export function loaded(load, show, { keepsOpen = false } = {}) {
  const node = h("div", { "aria-busy": "true" }, h("p", { class: "quiet" }, "loading …"));
  const refresh = async () => {
    try {
      const document = await load();
      if (keepsOpen && node.querySelector("details[open]")) return;
      replace(node, show(document));
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(node, h("p", { class: error.status === 404 ? "quiet" : "problem" }, error.message));
    }
    node.removeAttribute("aria-busy");
  };
  node.refresh = refresh;
  refresh();
  return node;
}

export function whyPanel(kind, ...id) {
  const route = ["why", kind, ...id].map(encodeURIComponent).join("/");
  return loaded(() => get(route), (answer) => blockers(answer));
}

// Blockers that are read when the reader opens them.
export function whyDetails(title, kind, ...id) {
  const details = h("details", {}, h("summary", {}, title));
  details.addEventListener("toggle", () => details.open && details.append(whyPanel(kind, ...id)), { once: true });
  return details;
}

// A form of filters; `change` gets the values that are set. It keeps the address of the page true.
export function filters(fields, values, change) {
  const form = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() });
  append(form, fields.map((field) => {
    const input = field.options
      ? h("select", { name: field.name }, ["", ...field.options].map((one) => h("option", { value: one }, one || "all")))
      : h("input", { name: field.name, type: field.type ?? "search", placeholder: field.placeholder ?? "" });
    input.value = values[field.name] ?? "";
    return h("label", {}, h("span", {}, field.label), input);
  }));
  form.addEventListener("change", () => {
    change(Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== "")));
  });
  return form;
}

// A bar of parts with their counts; a link for each part.
export function bar(parts) {
  const total = parts.reduce((sum, part) => sum + part.count, 0);
  const shown = parts.filter((part) => part.count > 0);
  const stripe = h("div", { class: "bar", "aria-hidden": "true" }, shown.map((part) => {
    const piece = h("span", { class: part.tone });
    piece.style.flexGrow = Math.max(part.count, total / 100);
    return piece;
  }));
  const legend = h("ul", { class: "legend" }, shown.map((part) => h("li", { class: part.tone },
    part.href ? h("a", { href: part.href }, `${part.label} ${part.count.toLocaleString("en")}`) : `${part.label} ${part.count.toLocaleString("en")}`)));
  return h("div", {}, stripe, shown.length ? legend : h("p", { class: "quiet" }, "nothing"));
}

const OUTCOMES = { completed: "good", failed: "bad", dead: "bad", cancelled: "plain" };

async function readEnded(queue) {
  const rows = [];
  let cursor = "";
  for (let pages = 0; pages < 5; pages += 1) {
    const page = await get("ended", { queue, cursor, limit: 1_000 });
    rows.push(...page.items);
    if (page.next === null) break;
    cursor = page.next;
  }
  return rows;
}

// The work that ended in each minute of the last hour, by outcome.
export function endedHistogram(queue = "") {
  return loaded(() => readEnded(queue), (rows) => {
    const minutes = new Map();
    const sums = Object.fromEntries(Object.keys(OUTCOMES).map((name) => [name, 0]));
    for (const row of rows) {
      const at = Math.round(Number(row.minute_ns) / 60e9);
      const ends = minutes.get(at) ?? { completed: 0, failed: 0, dead: 0, cancelled: 0 };
      for (const name of Object.keys(OUTCOMES)) {
        ends[name] += Number(row[name]);
        sums[name] += Number(row[name]);
      }
      minutes.set(at, ends);
    }
    const total = (ends) => Object.values(ends).reduce((sum, one) => sum + one, 0);
    const most = Math.max(1, ...[...minutes.values()].map(total));
    const last = Math.floor(nowMs() / 60_000);
    const label = Object.entries(sums).map(([name, number]) => `${number.toLocaleString("en")} ${name}`).join(", ");
    const columns = h("div", { class: "histogram", role: "img", "aria-label": `Ended in the last hour: ${label}` });
    for (let at = last - 59; at <= last; at += 1) {
      const column = h("span", { class: "minute" });
      const ends = minutes.get(at);
      if (ends) {
        for (const [name, tone] of Object.entries(OUTCOMES)) {
          if (!ends[name]) continue;
          const piece = h("span", { class: tone });
          piece.style.height = `${(100 * ends[name]) / most}%`;
          column.append(piece);
        }
      }
      columns.append(column);
    }
    return [columns, h("p", { class: "quiet" }, `last hour: ${label}; most in a minute: ${most.toLocaleString("en")}`)];
  });
}

export function heading(title, ...badges) {
  return h("div", { class: "heading" }, h("h1", { tabindex: -1 }, title), badges);
}

export function buttons(...all) {
  return h("div", { class: "actions" }, all);
}
