// Effects by kind and state, and dead letters by queue.

import { get } from "./api.js";
import { badge, count, facts, h, link, path, replace, section, short, table, when } from "./dom.js";
import { PagedList } from "./list.js";
import { action, bar, buttons, filters, heading, loaded, tree, whyDetails, whyPanel } from "./parts.js";
import { address, go, setFilters, worldParts } from "./router.js";
import { effectParts } from "./page-system.js";
import { jobAction } from "./page-work.js";

const STATES = ["ready", "delayed", "claimed", "dead"];

function attempts(all) {
  return table("Attempts", [
    { label: "Attempt", number: true, show: (row) => row.attempt },
    { label: "Owner", show: (row) => row.owner },
    { label: "Began", show: (row) => when(row.began_ns) },
    { label: "End", show: (row) => row.end },
    { label: "Error", show: (row) => row.error ?? "" },
  ], all, "no attempt is recorded");
}

export function effectsPage(parts, given) {
  return parts.length ? effectPage(parts[0]) : effectListPage(given);
}

function effectListPage(given) {
  let values = { ...given };
  let list = null;
  const holder = h("div");
  const kinds = loaded(() => get("effects/counts"), ({ items }) => items.length
    ? items.map((one) => h("div", { class: "card" }, h("h3", {}, link(address("effects", [], { kind: one.kind, state: values.state || "ready" }), one.kind)), bar(effectParts(one))))
    : h("p", { class: "quiet" }, "no effect was requested"));

  function rebuild() {
    list?.close();
    list = null;
    if (!values.tag && !(values.kind && values.state)) {
      replace(holder, h("p", { class: "quiet" }, "Choose a kind and a state, or a tag, to list intents."));
      return;
    }
    const { kind, state, tag } = values;
    list = new PagedList({
      label: tag ? `effects with the tag ${tag}` : `${state} effects of ${kind}`,
      columns: [
        { label: "Intent", width: "minmax(7rem, 1fr)", show: (item) => short(item.intent, 16) },
        { label: "World", width: "minmax(6rem, 1fr)", show: (item) => item.world },
        { label: "Tag", wide: true, show: (item) => item.tag },
        { label: "Attempts", width: "6rem", number: true, wide: true, show: (item) => count(item.attempts) },
        { label: "When", width: "8rem", show: (item) => when(item.time_ns) },
        { label: "Owner", wide: true, show: (item) => item.owner ?? "" },
        { label: "Code", wide: true, show: (item) => item.code ?? "" },
      ],
      href: (item) => address("effects", [item.intent]),
      fetch: (cursor, limit, signal) => get("effects", tag ? { tag, state, cursor, limit } : { kind, state, cursor, limit }, signal),
      empty: tag ? `no effect has the tag ${tag}` : `no effect of ${kind} is ${state}`,
    });
    replace(holder, list.node, kind ? whyDetails("Why do they wait?", "queue", "effects", kind) : null);
    list.load();
  }

  const form = filters([{ name: "kind", label: "Kind" }, { name: "state", label: "State", options: STATES }, { name: "tag", label: "Tag" }], values, (next) => {
    values = next;
    setFilters(values);
    rebuild();
  });
  rebuild();
  return {
    title: "Effects", node: h("div", {}, heading("Effects"), section("Kinds", kinds), section("Intents", form, holder)),
    refresh: () => {
      kinds.refresh();
      list?.refresh();
    },
    close: () => list?.close(),
  };
}

function effectPage(intent) {
  const head = h("div");
  const details = h("div");
  const why = h("div");
  let former = "";
  function draw(effect) {
    replace(head, heading(effect.kind, badge(effect.state)));
    if (former !== effect.state) {
      former = effect.state;
      replace(why, whyPanel("effect", intent));
    }
    replace(details,
      buttons(action({
        label: "Redrive effect", disabled: effect.state !== "dead", route: () => `effects/${path(intent)}/redrive`,
        text: "Requests the same call again, as a new intent.", command: () => ["effects", "redrive", effect.kind, String(effect.seq)],
        done: (made) => go("effects", [made.redriven_as]),
      })),
      facts([
        ["Intent", effect.intent], ["World", effect.world.includes("/") ? link(address("worlds", worldParts(effect.world)), effect.world) : effect.world],
        ["Tag", effect.tag], ["Failures", effect.failures], ["Lost leases", effect.expiries], ["Owner", effect.owner],
        ["Not before", effect.not_before_ns && when(effect.not_before_ns)], ["Code", effect.code],
        ["Redrive of", effect.redrive_of && link(address("effects", [effect.redrive_of]), short(effect.redrive_of))],
      ]),
      effect.error ? section("Error", h("pre", {}, effect.error)) : null,
      section("Attempts", attempts(effect.attempts)));
  }
  get(`effects/${path(intent)}`).then(draw).catch((error) => replace(head, heading("Effect"), h("p", { class: "problem" }, error.message)));
  return {
    title: "Effect", subject: `effect/${intent}`, node: h("div", {}, head, section("Why", why), details),
    event(name, document) {
      if (name === "effect") draw(document);
    },
  };
}

export function deadPage(parts) {
  if (parts.length >= 2) return letterPage(parts[0], parts[1]);
  return parts.length ? letterListPage(parts[0]) : queueListPage();
}

function queueListPage() {
  const queues = loaded(() => get("dead", { limit: 1_000 }), ({ items }) => table("Queues with dead letters", [
    { label: "Queue", show: (row) => link(address("dead", [row.queue]), row.queue) },
    { label: "Dead letters", number: true, show: (row) => count(row.dead) },
  ], items, "there are no dead letters"));
  const timer = setInterval(() => queues.refresh(), 3_000);
  return { title: "Dead letters", node: h("div", {}, heading("Dead letters"), queues), refresh: () => queues.refresh(), close: () => clearInterval(timer) };
}

function letterListPage(queue) {
  const list = new PagedList({
    label: `dead letters of ${queue}`,
    columns: [
      { label: "Number", width: "5rem", show: (item) => item.seq },
      { label: "Code", width: "minmax(6rem, 1fr)", show: (item) => item.code },
      { label: "Error", width: "minmax(6rem, 3fr)", show: (item) => item.error.trim().split("\n").at(-1) },
      { label: "From", wide: true, show: (item) => item.event?.world ?? item.owner },
      { label: "Died", width: "8rem", wide: true, show: (item) => when(item.died_ns) },
      { label: "Failures", width: "5rem", number: true, wide: true, show: (item) => count(item.failures) },
    ],
    href: (item) => address("dead", [queue, item.seq]),
    fetch: (cursor, limit, signal) => get(`dead/${path(queue)}`, { cursor, limit }, signal),
    empty: "this queue has no dead letters",
  });
  list.load();
  const selection = { queue };
  return {
    title: `Dead letters of ${queue}`, polls: true,
    node: h("div", {}, heading(queue), buttons(
      jobAction("Redrive all", "dead.redrive", selection, ["dead", "redrive", queue, "--all"], false),
      jobAction("Drop all", "dead.drop", selection, ["dead", "drop", queue, "--all"], true)), list.node),
    refresh: () => list.refresh(), close: () => list.close(),
  };
}

function letterPage(queue, seq) {
  const route = `dead/${path(queue, seq)}`;
  const node = loaded(() => get(route), (letter) => [
    buttons(
      action({ label: "Redrive letter", route: () => `${route}/redrive`, command: () => ["dead", "redrive", queue, seq], done: () => go("dead", [queue]) }),
      action({ label: "Drop letter", danger: true, route: () => `${route}/drop`, text: "Deletes it permanently.", command: () => ["dead", "drop", queue, seq], done: () => go("dead", [queue]) })),
    facts([
      ["Code", letter.code], ["Died", when(letter.died_ns)], ["Enqueued", when(letter.enqueued_ns)], ["Failures", letter.failures],
      ["Lost leases", letter.expiries], ["Owner", letter.owner], ["Redrive of", letter.redrive_of], ["Priority", letter.priority],
    ]),
    section("Error", h("pre", {}, letter.error)),
    letter.event ? section("Event", tree(letter.event)) : null,
    letter.payload ? section("Payload", tree(letter.payload)) : null,
    section("Attempts", attempts(letter.attempts)),
  ]);
  return { title: `Dead letter ${seq}`, node: h("div", {}, heading(`${queue} ${seq}`), node) };
}
