// Tasks and flows: one list, and a page for each.

import { get, query, session } from "./api.js";
import { badge, count, duration, facts, h, link, path, plural, replace, section, when } from "./dom.js";
import { sendAction } from "./event-form.js";
import { PagedList } from "./list.js";
import { action, blockers, buttons, copyButton, endedHistogram, filters, heading, loaded, tree, whyPanel } from "./parts.js";
import { address, go, setFilters } from "./router.js";
import { option } from "./page-system.js";
import { leaseSpans, nowNs, timeline, took } from "./timeline.js";

const TASK_STATES = ["ready", "delayed", "blocked", "leased", "suspect", "parked", "stray", "completed", "failed", "dead"];
const FLOW_STATES = ["running", "waiting", "parked", "compensating", "completed", "failed", "cancelled", "dead"];

// The filters of the list as parameters of a request. `error` is `kind/group`, a time is a local one.
function parameters({ kind, error, since, until, ...others }) {
  return { ...others, error: error?.split("/")[1], since_ns: nanoseconds(since), until_ns: nanoseconds(until) };
}

function nanoseconds(time) {
  const ms = time ? Date.parse(time) : NaN;
  return Number.isNaN(ms) ? undefined : `${ms}000000`;
}

async function readTasks(values, cursor, limit, signal) {
  const page = await get("tasks", { ...parameters(values), cursor, limit }, signal);
  return { items: page.tasks.map((task) => ({ ...task, kind: "task", started_ns: task.created_ns })), next: page.cursor };
}

async function readFlows(values, cursor, limit, signal) {
  const page = await get("flows", { ...parameters(values), cursor, limit }, signal);
  return { items: page.items.map((flow) => ({ ...flow, kind: "flow" })), next: page.next };
}

// Merge the pages of two lists, newest first. What one list has below the end of the other's page waits in the cursor.
async function readBoth(values, cursor, limit, signal) {
  const at = cursor ? JSON.parse(cursor) : { tasks: "", flows: "", afterTasks: "", afterFlows: "" };
  const none = { items: [], next: null };
  const [tasks, flows] = await Promise.all([
    at.tasks === null ? none : readTasks(values, at.tasks, limit, signal),
    at.flows === null ? none : readFlows(values, at.flows, limit, signal),
  ]);
  // Ids, and not counts: new rows move the others.
  const left = tasks.items.slice(tasks.items.findIndex((one) => one.id === at.afterTasks) + 1);
  const right = flows.items.slice(flows.items.findIndex((one) => one.id === at.afterFlows) + 1);
  const items = [];
  let fromTasks = 0;
  let fromFlows = 0;
  // Stop where one page ends and more of its list follow.
  while (items.length < limit) {
    const task = left[fromTasks];
    const flow = right[fromFlows];
    if ((task === undefined && tasks.next !== null) || (flow === undefined && flows.next !== null)) break;
    if (task === undefined && flow === undefined) break;
    if (flow === undefined || (task !== undefined && task.started_ns >= flow.started_ns)) {
      items.push(task);
      fromTasks += 1;
    } else {
      items.push(flow);
      fromFlows += 1;
    }
  }
  const advance = (name, after, page, taken, all) => taken === all.length
    ? { [name]: page.next, [after]: "" }
    : { [name]: at[name], [after]: taken ? all[taken - 1].id : at[after] };
  const next = { ...advance("tasks", "afterTasks", tasks, fromTasks, left), ...advance("flows", "afterFlows", flows, fromFlows, right) };
  return { items, next: next.tasks === null && next.flows === null ? null : JSON.stringify(next) };
}

export function workPage(_, given) {
  let values = { ...given };
  let list = null;
  const holder = h("div");
  const jobs = h("div");

  function rebuild() {
    list?.close();
    const { kind } = values;
    const read = kind === "tasks" ? readTasks : kind === "flows" ? readFlows : readBoth;
    list = new PagedList({
      label: "Tasks and flows",
      columns: [
        { label: "Name", width: "minmax(8rem, 2fr)", show: (item) => item.name },
        { label: "Kind", width: "4rem", wide: true, show: (item) => item.kind },
        { label: "State", width: "8rem", show: (item) => badge(item.kind === "task" ? item.where : item.state) },
        { label: "Key or id", width: "minmax(5rem, 1fr)", show: (item) => item.key ?? item.id },
        { label: "Queue", wide: true, show: (item) => item.queue },
        { label: "Started", width: "8rem", wide: true, show: (item) => when(item.started_ns) },
        { label: "Error", width: "minmax(0, 2fr)", wide: true, show: (item) => item.error ?? "" },
      ],
      href: (item) => address(item.kind === "task" ? "tasks" : "flows", [item.id]),
      fetch: (cursor, limit, signal) => read(values, cursor, limit, signal),
      empty: "no task or flow has these properties",
    });
    replace(holder, list.node);
    list.load();
    replace(jobs, selectionActions(values));
  }

  const form = filters([
    { name: "kind", label: "Kind", options: ["tasks", "flows"] },
    { name: "state", label: "State", options: [...new Set([...TASK_STATES, ...FLOW_STATES])] },
    { name: "queue", label: "Queue (tasks)" },
    { name: "name", label: "Name" },
    { name: "key", label: "Key" },
    { name: "tag", label: "Tag" },
    { name: "since", label: "Created from", type: "datetime-local" },
    { name: "until", label: "Created before", type: "datetime-local" },
    { name: "error", label: "Error", options: [] },
  ], values, (next) => {
    values = withIndex(next, values);
    for (const field of form.querySelectorAll("[name]")) field.value = values[field.name] ?? "";
    setFilters(values);
    rebuild();
  });
  fillErrors(form.elements.error, values.error);
  const find = h("form", { class: "filters", onsubmit: (event) => {
    event.preventDefault();
    const text = find.elements.text.value.trim();
    if (text) findSubject(text, find.elements.problem, found);
  } }, h("label", {}, h("span", {}, "Find"), h("input", { name: "text", type: "search", placeholder: "id or key of a task or flow, name of a world" })),
  h("button", { type: "submit" }, "Open"), h("output", { name: "problem", class: "problem" }));
  const found = h("ul", { class: "links" });
  const ended = endedHistogram();
  const page = {
    title: "Work",
    node: h("div", {}, heading("Work"), section("Ended", ended), find, found, form, jobs, holder),
    refresh: () => {
      list?.refresh();
      ended.refresh();
    },
    close: () => list?.close(),
  };
  rebuild();
  return page;
}

// The filters with an index beside the one that was changed last: a key and an error have no other filter.
function withIndex(next, before) {
  const changed = Object.keys(next).filter((name) => next[name] !== before[name]);
  for (const alone of ["error", "key"]) {
    if (!next[alone]) continue;
    if (changed.includes(alone)) next = { [alone]: next[alone], ...(alone === "key" && next.kind ? { kind: next.kind } : {}) };
    else if (changed.some((name) => name !== "kind")) next = Object.fromEntries(Object.entries(next).filter(([name]) => name !== alone));
  }
  if (next.error) return { ...next, kind: next.error.startsWith("flow/") ? "flows" : "tasks" };
  if (next.queue) return { ...next, kind: "tasks" };
  if (next.state && !next.kind) {
    const task = TASK_STATES.includes(next.state);
    if (task !== FLOW_STATES.includes(next.state)) return { ...next, kind: task ? "tasks" : "flows" };
  }
  return next;
}

// The groups of errors of tasks and flows as the options of a filter.
async function fillErrors(select, chosen) {
  try {
    const pages = await Promise.all(["task", "flow"].map((kind) => get("errors", { kind, limit: 200 })));
    for (const one of pages.flatMap((page) => page.items)) {
      select.append(h("option", { value: `${one.kind}/${one.group}` }, `${one.kind}: ${one.text.slice(0, 80)} (${count(one.count)})`));
    }
    select.value = chosen ?? "";
  } catch (error) {
    select.title = error.message;
  }
}

// Open the subject with an id, a key or a name. Several of them are listed.
async function findSubject(text, problem, list) {
  problem.value = "";
  replace(list);
  const target = (one) => one.kind === "world" ? ["worlds", [one.name, one.key]] : [`${one.kind}s`, [one.id]];
  try {
    const { items } = await get("find", { text });
    if (items.length === 1) go(...target(items[0]));
    else if (!items.length) problem.value = `no task, flow or world has the id, key or name ${text}`;
    else replace(list, items.map((one) => h("li", {}, link(address(...target(one)), `${one.kind} ${one.name} ${one.key ?? one.id}`), " ", badge(one.state))));
  } catch (error) {
    problem.value = error.message;
  }
}

// Jobs on everything that the filters select.
function selectionActions({ kind, state, queue, name, tag, since, until, error }) {
  if (error) return errorActions(...error.split("/"));
  if (!state || !kind || name || tag || since || until) return null;
  const selection = kind === "tasks" && queue ? { state, queue } : { state };
  const names = kind === "tasks"
    ? { cancel: !["completed", "failed", "dead"].includes(state), redrive: ["failed", "dead"].includes(state) }
    : { cancel: ["running", "waiting", "parked"].includes(state), redrive: ["failed", "dead"].includes(state), resume: state === "parked" };
  const all = Object.entries(names).filter(([, fits]) => fits).map(([verb]) => jobAction(`${verb[0].toUpperCase()}${verb.slice(1)} all ${state} ${kind}`, `${kind}.${verb}`, selection,
    kind === "tasks" ? ["tasks", verb, "--all", "--state", state, ...option("--queue", queue)] : null, verb === "cancel"));
  return all.length ? buttons(all) : null;
}

function errorActions(kind, group) {
  return buttons([jobAction(`Redrive all ${kind}s with this error`, "errors.redrive", { kind, group }, ["errors", "redrive", kind, group])]);
}

export function jobAction(label, name, selection, command, danger) {
  return action({
    label, danger, route: () => "jobs",
    text: `A job applies this to ${Object.entries(selection).map(([key, value]) => `${key} ${value}`).join(", ")}, as selected now. It continues when this page is closed.`,
    fields: [
      { name: "rate", label: "At most, each second", type: "number", value: 100 },
      { name: "limit", label: "At most, in all", type: "number", hint: "empty: all" },
    ],
    body: (values) => ({ action: name, selection, rate_per_s: Number(values.rate || 100), ...(values.limit ? { limit: Number(values.limit) } : {}) }),
    command: (values) => command
      ? [...command, ...(name.endsWith(".cancel") ? [] : option("--rate", values.rate)), ...option("--limit", values.limit)]
      : ["jobs", "start", name, ...Object.entries(selection).map(([key, value]) => `${key}=${value}`), ...option("--rate", values.rate), ...option("--limit", values.limit)],
    done: (job) => go("jobs", [], { id: job.id }),
  });
}

export function taskPage([id = ""]) {
  const node = h("div");
  const why = h("div");
  const head = h("div");
  const actions = h("div");
  const details = h("div");
  let stateShown = null;
  let whyNode = null;

  function draw(task) {
    replace(head, heading(task.name, badge(task.where)));
    if (stateShown !== task.state + task.where + task.attempt) {
      stateShown = task.state + task.where + task.attempt;
      whyNode = whyPanel("task", id);
      replace(why, whyNode);
      const ended = ["COMPLETED", "FAILED", "DEAD"].includes(task.state);
      replace(actions, buttons(
        action({
          label: "Cancel task", danger: true, disabled: ended, route: () => `tasks/${path(id)}/cancel`,
          fields: [{ name: "reason", label: "Reason" }], body: (values) => (values.reason ? { reason: values.reason } : {}),
          command: (values) => ["tasks", "cancel", id, ...option("--reason", values.reason)],
        }),
        action({
          label: "Redrive task", disabled: !["FAILED", "DEAD"].includes(task.state), route: () => `tasks/${path(id)}/redrive`,
          text: "Submits the same task again, as a new task.", command: () => ["tasks", "redrive", id],
          done: (made) => go("tasks", [made.id]),
        }),
        copyButton(() => `rt.submit(${task.name}${task.args.map((one) => `, ${python(one)}`).join("")}${Object.entries(task.kwargs).map(([key, value]) => `, ${key}=${python(value)}`).join("")})`, "Copy as Python"),
        copyButton(() => curl("tasks", { name: task.name, args: task.args, kwargs: task.kwargs, options: { queue: task.queue } }), "Copy as curl")));
    }
    replace(details,
      facts([
        ["Id", task.id], ["Tag", task.tag], ["Queue", link(address("queues"), task.queue)], ["Key", task.key], ["Limit key", task.limit_key],
        ["Priority", task.priority], ["Attempts", `${task.attempt} of ${task.attempts}`], ["Failures", task.failures],
        ["Lost leases", `${task.expiries} of ${task.expiries_max}`],
        ["Worker", task.worker], ["Created", when(task.created_ns)], ["Not before", task.not_before_ns && when(task.not_before_ns)],
        ["Granted", task.granted_ns && when(task.granted_ns)], ["Lease ends", task.expires_ns && when(task.expires_ns)],
        ["Ended", task.ended_ns && when(task.ended_ns)],
        ["Ran for", task.ended_ns && task.granted_ns ? duration((task.ended_ns - task.granted_ns) / 1e9) : null],
        ["After", task.after.length ? task.after.map((one) => [link(address("tasks", [one]), one), " "]) : null],
        ["Redrive of", task.redrive_of && link(address("tasks", [task.redrive_of]), task.redrive_of)],
        ["Redriven by", task.redriven_by && link(address("tasks", [task.redriven_by]), task.redriven_by)],
        ["Reason", task.reason], ["Lease", task.lease], ["Trace", traceLink(task.trace_id)],
      ]),
      section("Time line", timeline([taskRow(task)], "")),
      task.error ? section("Error", h("pre", {}, task.error)) : null,
      section("Arguments", tree({ args: task.args, kwargs: task.kwargs })),
      task.progress !== null && task.progress !== undefined ? section("Progress", tree(task.progress)) : null,
      "result" in task ? section("Result", tree(task.result)) : null);
  }

  replace(node, head, section("Why", why), actions, details);
  const page = {
    title: `Task ${id}`, node, subject: `task/${id}`,
    event(name, document) {
      if (name === "task") draw(document);
      if (name === "gone") replace(details, h("p", { class: "problem" }, "This task is no longer stored."));
    },
    refresh: () => whyNode?.refresh(),
  };
  get(`tasks/${path(id)}`).then(draw).catch((error) => replace(head, heading(`Task ${id}`), h("p", { class: "problem" }, error.message)));
  return page;
}

// The wait of a task and its last attempt.
function taskRow(task) {
  return {
    label: task.attempt ? `attempt ${task.attempt}${task.worker ? ` on ${task.worker}` : ""}` : "no attempt yet",
    state: task.where, spans: leaseSpans(task),
    note: Number(task.failures) + Number(task.expiries) ? `${task.failures} failed, ${task.expiries} lost before` : "",
    took: took(task.granted_ns ?? task.created_ns, task.ended_ns ?? nowNs()),
    details: [
      ["Waited", took(task.created_ns, task.granted_ns ?? task.ended_ns ?? nowNs())], ["Ran", task.granted_ns ? took(task.granted_ns, task.ended_ns ?? nowNs()) : null],
      ["Worker", task.worker], ["Lease", task.lease], ["Lease ends", task.expires_ns && when(task.expires_ns)],
    ],
  };
}

export function python(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one)}`).join(", ")}}`;
  return typeof value === "string" ? JSON.stringify(value) : String(value);
}

export function jsonText(value) {
  return JSON.stringify(value, (_, one) => (typeof one === "bigint" ? JSON.rawJSON?.(String(one)) ?? Number(one) : one));
}

function curl(route, body) {
  const text = jsonText(body).replaceAll("'", "'\\''");
  return `curl -s '${window.location.origin}/v1/${route}${query({})}' -H 'Content-Type: application/json' -d '${text}'`;
}

// The link to a trace in the tool of the operator, if the server has its URL.
function traceLink(id) {
  if (!id) return null;
  const template = session.trace_url ?? "";
  if (!/^https?:\/\//.test(template)) return h("code", {}, id);
  return h("a", { href: template.replaceAll("{trace_id}", encodeURIComponent(id)), target: "_blank", rel: "noreferrer" }, `trace ${id.slice(0, 8)}…`);
}

function costText(cost) {
  const amounts = cost.map((one) => {
    const format = (amount) => (one.unit === "money" ? (Number(amount) / 1e6).toFixed(4) : count(amount));
    return `${format(one.spent)} ${one.unit}${Number(one.reserved) ? ` and ${format(one.reserved)} reserved` : ""}`;
  });
  return amounts.join(", ") || null;
}

// The task under which a worker runs the flow, as a row of the waterfall.
function activationRow(activation) {
  return {
    label: activation.worker ? `run by ${activation.worker}` : "in the queue",
    state: activation.state,
    note: plural(Number(activation.attempt), "attempt"),
    spans: leaseSpans(activation),
    took: took(activation.granted_ns ?? activation.created_ns, nowNs()),
    details: [
      ["Task", link(address("tasks", [activation.task]), activation.task)], ["Worker", activation.worker], ["Lease", activation.lease],
      ["Lost leases", activation.expiries], ["Queued", when(activation.created_ns)], ["Granted", when(activation.granted_ns)], ["Lease ends", when(activation.expires_ns)],
    ],
  };
}

const WAITS = ["sleep", "receive"];
const CHILD_PAGES = { task: "tasks", flow: "flows", effect: "effects" };

function stepRow(one) {
  const isOpen = one.state === "open";
  const waits = WAITS.includes(one.kind) || ["hf.sleep", "hf.receive"].includes(one.name);
  const tone = one.state === "failed" ? "bad" : waits ? "waiting" : isOpen ? "busy" : "good";
  const began = one.began_ns ?? one.ended_ns;
  const until = one.ended_ns ?? nowNs();
  const spans = began ? [{ from: began, to: until, tone, title: isOpen ? "open" : one.state }] : [];
  const notes = [
    Number(one.attempts) > 1 ? plural(Number(one.attempts), "attempt") : null,
    one.types.length ? `waits for ${one.types.join(" or ")}` : null,
    one.child ? `waits for ${one.kind} ${one.child.slice(0, 16)}` : null,
  ];
  return {
    label: `${one.name}${one.occurrence > 1 ? `#${one.occurrence}` : ""}`, state: one.state, spans,
    note: [notes.filter(Boolean).join(", "), isOpen && one.due_ns ? [" until ", when(one.due_ns)] : null],
    took: took(began, isOpen ? nowNs() : one.ended_ns),
    details: [
      ["Position", one.position], ["Kind", one.kind], ["Attempts", one.attempts], ["Began", when(one.began_ns)], ["Ended", when(one.ended_ns)],
      ["Until", one.due_ns && when(one.due_ns)], ["Waits for", one.types.join(", ")],
      ["Child", one.child && link(address(CHILD_PAGES[one.kind] ?? "tasks", [one.child]), one.child)],
      ["Code", one.code], ["Error", one.error && `${one.error_type ?? ""}: ${one.error}`],
    ],
    more: one.value !== null && one.value !== undefined ? tree(one.value) : null,
  };
}

async function readSteps(id) {
  const items = [];
  let cursor = "";
  // A page shows the first thousands; the rest is reached by the command.
  for (let pages = 0; pages < 5; pages += 1) {
    const page = await get(`flows/${path(id)}/steps`, { cursor, limit: 1_000 });
    items.push(...page.items);
    if (page.next === null) return { items, more: false };
    cursor = page.next;
  }
  return { items, more: true };
}

export function flowPage([id = ""]) {
  const head = h("div");
  const why = h("div");
  const actions = h("div");
  const details = h("div");
  let actionsFor = null;
  let lastName = id;
  let stepNames = [];
  let awaited = [];
  let activation = null;
  const steps = loaded(() => readSteps(id), ({ items, more }) => {
    stepNames = items.map((one) => `${one.name}${one.occurrence > 1 ? `#${one.occurrence}` : ""}`);
    awaited = items.filter((one) => one.state === "open").flatMap((one) => one.types);
    return [timeline([...(activation ? [activationRow(activation)] : []), ...items.map(stepRow)], "no step is recorded"), more ? h("p", { class: "quiet" }, `more steps: holdfast flows steps ${id}`) : null];
  });

  function draw(flow) {
    lastName = flow.name;
    activation = flow.activation;
    replace(head, heading(`${flow.name} ${flow.key ?? flow.id}`, badge(flow.state)));
    replace(why, blockers({ blockers: flow.blockers }));
    if (actionsFor !== flow.state) {
      actionsFor = flow.state;
      drawActions(flow);
    }
    replace(details,
      facts([
        ["Id", flow.id], ["Tag", flow.tag], ["Key", flow.key], ["Queue", flow.queue], ["Run", flow.run], ["Failures", `${flow.failures} of ${flow.attempts} attempts`],
        ["Started", when(flow.started_ns)], ["Ended", flow.ended_ns && when(flow.ended_ns)],
        ["Took", flow.ended_ns ? duration((flow.ended_ns - flow.started_ns) / 1e9) : null],
        ["Times out", flow.timeout_ns && when(flow.timeout_ns)], ["Code", flow.code], ["Step", flow.step],
        ["Cost", costText(flow.cost)], ["Trace", traceLink(flow.trace_id)],
        ["Parent", flow.parent && (/^f\d/.test(flow.parent) ? link(address("flows", [flow.parent]), flow.parent) : flow.parent)],
        ["Fork of", flow.fork_of && [link(address("flows", [flow.fork_of]), flow.fork_of), flow.fork_at ? ` at ${flow.fork_at}` : ""]],
        ["Redrive of", flow.redrive_of && link(address("flows", [flow.redrive_of]), flow.redrive_of)],
        ["Redriven by", flow.redriven_by && link(address("flows", [flow.redriven_by]), flow.redriven_by)],
      ]),
      flow.error ? section("Error", h("pre", {}, `${flow.error_type ?? ""}: ${flow.error}`)) : null,
      section("Arguments", tree({ args: flow.args, kwargs: flow.kwargs })),
      flow.children.length ? section("Child flows", h("ul", {}, flow.children.map((one) => h("li", {}, link(address("flows", [one.id]), `${one.name} ${one.id}`), " ", badge(one.state))))) : null,
      Object.keys(flow.published).length ? section("Published values", tree(flow.published)) : null,
      flow.events.length ? section("Events that wait", tree(flow.events)) : null,
      "result" in flow ? section("Result", tree(flow.result)) : null);
  }

  function drawActions(flow) {
    const ended = ["COMPLETED", "FAILED", "CANCELLED", "DEAD"].includes(flow.state);
    replace(actions, buttons(
      sendAction({
        route: `flows/${path(id)}`, disabled: ended, awaited: () => awaited,
        command: (values, event) => ["flows", "send", id, values.type || "TYPE", event, ...option("--key", values.key), "--app", "MODULE:APP"],
      }),
      action({ label: "Cancel flow", danger: true, disabled: ended, route: () => `flows/${path(id)}/cancel`, text: "Its compensations run.", command: () => ["flows", "cancel", id] }),
      action({ label: "Resume flow", disabled: flow.state !== "PARKED", route: () => `flows/${path(id)}/resume`, command: () => ["flows", "resume", id] }),
      action({
        label: "Redrive flow", disabled: !["FAILED", "DEAD"].includes(flow.state), route: () => `flows/${path(id)}/redrive`,
        text: "Continues after the recorded steps. With compensations it starts again from the top, as a new flow.",
        command: () => ["flows", "redrive", id], done: (made) => go("flows", [made.flow]),
      }),
      action({
        label: "Fork flow", route: () => `flows/${path(id)}/fork`, text: "A new flow takes over the recorded steps before a step.",
        fields: [{ name: "key", label: "Key of the fork", required: true }, { name: "at", label: "Before the step", options: () => ["(end of the record)", ...stepNames] }],
        body: (values) => ({ key: values.key, ...(values.at.startsWith("(") ? {} : { at: values.at }) }),
        command: (values) => ["flows", "fork", id, values.key || "KEY", ...(values.at?.startsWith("(") ? [] : option("--at", values.at))],
        done: (made) => go("flows", [made.id]),
      }),
      copyButton(() => `rt.start(${flow.name}${flow.key ? `.options(key=${JSON.stringify(flow.key)})` : ""}${flow.args.map((one) => `, ${python(one)}`).join("")}${Object.entries(flow.kwargs).map(([key, value]) => `, ${key}=${python(value)}`).join("")})`, "Copy as Python"),
      copyButton(() => curl("flows", { name: flow.name, args: flow.args, kwargs: flow.kwargs, options: flow.key ? { key: flow.key } : {} }), "Copy as curl")));
  }

  const page = {
    get title() { return `Flow ${lastName}`; },
    node: h("div", {}, head, section("Why", why), actions, section("Steps", steps), details),
    subject: `flow/${id}`,
    event(name, document) {
      if (name !== "flow") return;
      draw(document);
      this.refresh();
    },
    refresh() {
      if (!steps.querySelector("details[open]")) steps.refresh();
    },
  };
  get(`flows/${path(id)}`).then((flow) => {
    draw(flow);
    steps.refresh().then(() => { actionsFor = null; draw(flow); });
  }).catch((error) => replace(head, heading(`Flow ${id}`), h("p", { class: "problem" }, error.message)));
  return page;
}
