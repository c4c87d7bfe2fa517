// Now, queues and limits, money, workers.

import { get } from "./api.js";
import { badge, count, facts, h, link, path, plural, replace, section, table, when } from "./dom.js";
import { action, bar, buttons, endedHistogram, filters, heading, loaded, whyDetails } from "./parts.js";
import { address, setFilters } from "./router.js";
import { jobAction } from "./page-work.js";

const BAD_STATES = ["failed", "dead", "parked"];

export function queueParts(queue) {
  const tones = { ready: "waiting", delayed: "plain", blocked: "plain", suspect: "bad", parked: "bad", stray: "bad", leased: "busy", completed: "good", failed: "bad", dead: "bad" };
  return Object.entries(tones).map(([state, tone]) => ({
    label: state, count: Number(queue[state] ?? 0), tone,
    href: address("work", [], { kind: "tasks", queue: queue.queue, state }),
  }));
}

export function flowParts(flow) {
  const tones = { running: "busy", waiting: "waiting", parked: "bad", compensating: "busy", completed: "good", failed: "bad", cancelled: "plain", dead: "bad" };
  return Object.entries(tones).map(([state, tone]) => ({
    label: state, count: Number(flow[state] ?? 0), tone, href: address("work", [], { kind: "flows", state }),
  }));
}

export function effectParts(effect) {
  const tones = { ready: "waiting", delayed: "plain", claimed: "busy", done: "good", dead: "bad" };
  return Object.entries(tones).map(([state, tone]) => ({
    label: state, count: Number(effect[state] ?? 0), tone,
    href: state === "done" ? null : address("effects", [], { kind: effect.kind, state }),
  }));
}

function reasons(all) {
  return h("ul", { class: "blockers" }, all.map((one) => h("li", {},
    h("span", { class: "code" }, one.code), " ", one.text, " (since ", when(one.since_ns), ")")));
}

export function nowPage() {
  const ready = h("div", { "aria-live": "polite" }, h("p", { class: "quiet" }, "loading …"));
  const queues = h("div");
  const flows = h("div");
  const effects = h("div");
  const endings = h("div");
  const numbers = h("div");
  const ended = endedHistogram();
  const known = {};

  function draw() {
    const { readiness, counts } = known;
    if (readiness) {
      const worlds = readiness.worlds;
      replace(ready,
        h("p", { class: `verdict ${readiness.ready ? "good" : "bad"}` }, readiness.ready ? "Ready: work moves." : "Not ready."),
        reasons(readiness.reasons),
        readiness.warnings.length ? [h("h3", {}, "Warnings"), reasons(readiness.warnings)] : null,
        readiness.subjects_blocked ? h("p", {}, plural(readiness.subjects_blocked, "blocked subject")) : null,
        readiness.subjects.filter((one) => !one.ready).map((one) => h("div", {}, h("h3", {}, one.name || one.subject), reasons(one.reasons))));
      replace(numbers, facts([
        ["Leader", readiness.leader || "none"],
        ["Live workers", link(address("workers"), count(readiness.workers_live))],
        ["Worlds", link(address("worlds"), Object.entries(worlds).filter(([, n]) => n).map(([state, n]) => `${count(n)} ${state}`).join(", ") || "none")],
        ["Messages to replay", count(readiness.replay_pending)],
      ]));
    }
    if (counts) {
      const shown = (list, name, parts) => list.length
        ? list.map((one) => h("div", { class: "card" }, h("h3", {}, one[name]), bar(parts(one))))
        : h("p", { class: "quiet" }, "none");
      replace(queues, shown(counts.queues ?? [], "queue", queueParts));
      replace(flows, shown(counts.flows ?? [], "name", flowParts));
      replace(effects, shown(counts.effects ?? [], "kind", effectParts));
      const bad = [
        ...(counts.queues ?? []).flatMap((one) => queueParts(one).filter((part) => BAD_STATES.includes(part.label) && part.count).map((part) => ({ what: `queue ${one.queue}`, ...part }))),
        ...(counts.flows ?? []).flatMap((one) => flowParts(one).filter((part) => BAD_STATES.includes(part.label) && part.count).map((part) => ({ what: `flow ${one.name}`, ...part }))),
        ...(counts.effects ?? []).flatMap((one) => effectParts(one).filter((part) => BAD_STATES.includes(part.label) && part.count).map((part) => ({ what: `effect ${one.kind}`, ...part }))),
      ];
      replace(endings, table("What ended badly", [
        { label: "Where", show: (row) => row.what },
        { label: "State", show: (row) => badge(row.label) },
        { label: "Count", number: true, show: (row) => link(row.href, count(row.count)) },
      ], bad, "nothing ended badly"));
    }
  }

  const page = {
    title: "Now",
    node: h("div", {}, heading("Now"), ready, numbers,
      section("What ended badly", endings, h("p", {}, link(address("errors"), "Grouped by error"))), section("Ended", ended), section("Queues", queues), section("Flows", flows), section("Effects", effects)),
    event(name, document) {
      if (name === "readiness" || name === "counts") known[name] = document;
      draw();
    },
    refresh: () => ended.refresh(),
  };
  // Before the first event.
  Promise.all([get("readiness"), get("queues"), get("flows/counts"), get("effects/counts")]).then(([readiness, queueList, flowList, effectList]) => {
    known.readiness ??= readiness;
    known.counts ??= { queues: queueList.queues, flows: flowList.items, effects: effectList.items };
    draw();
  }).catch((error) => replace(ready, h("p", { class: "problem" }, error.message)));
  return page;
}

function limitAction(queue, refresh) {
  return action({
    label: "Set limit", route: () => `queues/${path(queue.queue)}/limit`,
    text: "Concurrency is the number of tasks that run at once. An empty field removes the limit.",
    fields: [
      { name: "concurrency", label: "Concurrency", type: "number", value: queue.concurrency ?? "" },
      { name: "per_key", label: "For each limit key", type: "number", value: queue.per_key ?? "" },
    ],
    body: (values) => ({ concurrency: number(values.concurrency) ?? 0, per_key: number(values.per_key) ?? 0 }),
    command: (values) => ["tasks", "limit", queue.queue, ...option("--concurrency", values.concurrency || "0"), ...option("--per-key", values.per_key || "0")],
    done: refresh,
  });
}

export function number(text) {
  return text === "" || text === null || text === undefined ? null : Number(text);
}

export function option(name, value) {
  return value === "" || value === null || value === undefined ? [] : [name, String(value)];
}

// The limit keys that tasks of a queue wait for, when they are opened.
function limitKeys(queue) {
  const holder = h("div");
  const details = h("details", {}, h("summary", {}, "Which limit keys are full?"), holder);
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    replace(holder, loaded(() => get(`queues/${path(queue.queue)}/keys`), ({ items, next }) => [table("Limit keys", [
      { label: "Limit key", show: (row) => row.limit_key },
      { label: "Running", number: true, show: (row) => queue.per_key ? `${count(row.leased)} of ${count(queue.per_key)}` : count(row.leased) },
      { label: "Next task", show: (row) => link(address("tasks", [row.first]), row.first) },
    ], items, "no task waits for a limit key"), next ? h("p", { class: "quiet" }, "more keys follow") : null]));
  });
  return details;
}

export function queuesPage() {
  const queues = loaded(() => get("queues"), ({ queues: all }) => all.length ? all.map((one) => h("div", { class: "card" },
    h("h3", {}, one.queue, one.paused_ns ? [" ", badge("paused")] : null), bar(queueParts(one)),
    facts([["At once", one.concurrency ?? "no limit"], ["For each limit key", one.per_key ?? "no limit"]]),
    buttons(limitAction(one, () => queues.refresh()), one.paused_ns
      ? action({ label: "Resume queue", route: () => `queues/${path(one.queue)}/resume`, command: () => ["queues", "resume", one.queue], done: () => queues.refresh() })
      : action({ label: "Pause queue", route: () => `queues/${path(one.queue)}/pause`, command: () => ["queues", "pause", one.queue], text: "No task of it is granted. Running tasks continue.", done: () => queues.refresh() })),
    whyDetails("Why does it wait?", "queue", one.queue), one.parked ? limitKeys(one) : null)) : h("p", { class: "quiet" }, "no queue has tasks"), { keepsOpen: true });
  const limits = loaded(() => get("limits"), ({ limits: all }) => [
    table("Load limits", [
      { label: "Limit", show: (row) => row.limit },
      { label: "Most", number: true, show: (row) => count(row.limit_max) },
      { label: "Now", number: true, show: (row) => count(row.now) },
    ], all, "no load limit is set"),
    buttons(action({
      label: "Set load limit", route: () => "limits",
      text: "The server refuses work above a limit. 0 removes the limit.",
      fields: [{ name: "name", label: "Limit", value: "tasks", hint: "such as tasks, effects, timers, inbox or queue:NAME" }, { name: "most", label: "Most", type: "number", required: true }],
      body: (values) => ({ limits: { [values.name]: Number(values.most) } }),
      command: (values) => ["limits", "set", `${values.name}=${values.most}`],
      done: () => limits.refresh(),
    })),
  ]);
  return {
    title: "Queues and limits", polls: true,
    node: h("div", {}, heading("Queues and limits"), section("Queues", queues), section("Load limits", limits)),
    refresh: () => {
      if (!document.querySelector("dialog[open], details[open]")) queues.refresh();
      limits.refresh();
    },
  };
}

// The error of a call that the admission refused, as `effects.admission` writes it.
const OVER_BUDGET = /^(money|tokens) of .*: spent .*, reserved .*, limit /;

function scopeName(scope) {
  if (scope === "") return "the universe";
  if (scope === "*") return "each world";
  return /^[0-9a-f]{32}$/.test(scope) ? link(address("worlds", ["by-id", scope]), scope) : scope;
}

export function moneyPage(_, given) {
  const budgets = loaded(() => get("budgets", { limit: 1_000 }), ({ items }) => table("Budgets", [
    { label: "Account", show: (row) => scopeName(row.scope) },
    { label: "Unit", show: (row) => row.unit },
    { label: "Spent", number: true, show: (row) => count(row.spent) },
    { label: "Reserved", number: true, show: (row) => count(row.reserved) },
    { label: "Limit", number: true, show: (row) => row.limit === null ? "no limit" : count(row.limit) },
    { label: "Left", number: true, show: (row) => row.remaining === null ? "–" : count(row.remaining) },
    { label: "Actions", show: (row) => action({
      label: "Change limit", route: () => "budgets/limit",
      fields: [{ name: "amount", label: `Limit in ${row.unit}`, type: "number", value: row.limit ?? "", hint: "empty: no limit" }],
      body: (values) => ({ unit: row.unit, scope: row.scope, amount: number(values.amount) }),
      command: (values) => ["budgets", "limit", row.unit, values.amount || "none", ...option("--scope", row.scope)],
      done: () => budgets.refresh(),
    }) },
  ], items, "no effect has spent money or has a budget"));
  const set = buttons(action({
    label: "Set a budget", route: () => "budgets/limit",
    text: "Money is in millionths of the currency. A call above the limit is refused.",
    fields: [
      { name: "scope", label: "Account", hint: "empty: the universe; *: each world; or the id of a world or flow" },
      { name: "unit", label: "Unit", options: ["money", "tokens"] },
      { name: "amount", label: "Limit", type: "number", required: true },
    ],
    body: (values) => ({ unit: values.unit, scope: values.scope, amount: number(values.amount) }),
    done: () => budgets.refresh(),
  }));
  const refused = loaded(async () => (await get("errors", { kind: "dead", limit: 1_000 })).items.filter((one) => OVER_BUDGET.test(one.text)), (groups) => table("Refused over budget", [
    { label: "Refused", show: (row) => link(address("errors", ["dead", row.group]), row.text) },
    { label: "Number", number: true, show: (row) => count(row.count) },
    { label: "Newest", show: (row) => when(row.newest_ns) },
    { label: "Actions", show: (row) => jobAction("Redrive refused calls", "errors.redrive", { kind: "dead", group: row.group }, ["errors", "redrive", "dead", row.group], false) },
  ], groups, "no call was refused over a budget"));
  let scope = given.scope ?? "";
  const days = loaded(() => get("budgets/days", { scope, limit: 1_000 }), ({ items }) => table("Spent by day", [
    { label: "Day", show: (row) => new Date(Number(row.day) * 86_400_000).toISOString().slice(0, 10) },
    { label: "Model", show: (row) => row.model ?? "without a model" },
    { label: "Unit", show: (row) => row.unit },
    { label: "Spent", number: true, show: (row) => count(row.spent) },
  ], items, "nothing was spent in the last seven days"));
  const form = filters([{ name: "scope", label: "Scope of the account", placeholder: "empty: the universe" }], { scope }, (values) => {
    scope = values.scope ?? "";
    setFilters({ scope });
    days.refresh();
  });
  return {
    title: "Money", polls: true,
    node: h("div", {}, heading("Money"), section("Budgets", budgets, set), section("Refused over budget", refused), section("Last seven days", form, days)),
    refresh() {
      if (document.querySelector("dialog[open]")) return;
      budgets.refresh();
      refused.refresh();
      days.refresh();
    },
  };
}

export function workersPage() {
  const workers = loaded(() => get("workers", { limit: 1_000 }), ({ items }) => table("Workers", [
    { label: "Worker", show: (row) => row.worker },
    { label: "State", show: (row) => badge(row.live ? (row.draining ? "draining" : "live") : "gone") },
    { label: "Roles", show: (row) => row.roles.join(", ") },
    { label: "Version", show: (row) => row.version ?? "–" },
    { label: "Hosts", number: true, show: (row) => row.hosts === row.assigned ? count(row.hosts) : `${count(row.hosts)} of ${count(row.assigned)}` },
    { label: "Tasks", number: true, show: (row) => count(row.leases) },
    { label: "Since", show: (row) => when(row.since_ns) },
    { label: "Heartbeat", show: (row) => when(row.heartbeat_ns) },
    { label: "Actions", show: (row) => row.draining
      ? action({ label: "Undrain", route: () => `workers/${path(row.worker)}/undrain`, command: () => ["workers", "undrain", row.worker], text: `${row.worker} takes new work again.`, done: () => workers.refresh() })
      : action({ label: "Drain", route: () => `workers/${path(row.worker)}/drain`, command: () => ["workers", "drain", row.worker], text: `${row.worker} finishes its work and takes no more.`, done: () => workers.refresh() }) },
  ], items, "no worker has registered"));
  const refresh = () => document.querySelector("dialog[open]") ?? workers.refresh();
  const timer = setInterval(refresh, 2_000);
  return { title: "Workers", node: h("div", {}, heading("Workers"), workers), refresh, close: () => clearInterval(timer) };
}
