// Worlds: the list, and one world with its state at any height, its journal and its lineage.

import { get } from "./api.js";
import { badge, count, facts, h, link, path, replace, section, short, table, when } from "./dom.js";
import { sendAction } from "./event-form.js";
import { PagedList } from "./list.js";
import { action, buttons, differences, filters, heading, loaded, tree, whyPanel } from "./parts.js";
import { address, go, setFilters, worldParts } from "./router.js";
import { jobAction } from "./page-work.js";
import { number, option } from "./page-system.js";

export function worldsPage(parts, given) {
  return parts.length >= 2 ? worldPage(parts[0], parts.slice(1).join("/"), given) : listPage(given);
}

function listPage(given) {
  let values = { ...given };
  let list = null;
  const holder = h("div");
  const jobs = h("div");

  function rebuild() {
    list?.close();
    list = new PagedList({
      label: "Worlds",
      columns: [
        { label: "Name", width: "minmax(8rem, 2fr)", show: (item) => item.name },
        { label: "Type", width: "minmax(5rem, 1fr)", show: (item) => item.type },
        { label: "Status", width: "7rem", show: (item) => badge(item.status) },
        { label: "Height", width: "6rem", number: true, show: (item) => count(item.height) },
        { label: "Unread", width: "6rem", number: true, wide: true, show: (item) => count(item.depth) },
        { label: "Worker", wide: true, show: (item) => item.holder ?? item.worker ?? "–" },
        { label: "Blocker", width: "minmax(0, 2fr)", wide: true, show: (item) => item.blocker?.text ?? "" },
      ],
      href: (item) => address("worlds", [item.type, item.name]),
      fetch: (cursor, limit, signal) => get("worlds", { type: values.type, cursor, limit }, signal),
      empty: values.type ? `no world has the type ${values.type}` : "there are no worlds",
    });
    replace(holder, list.node);
    list.load();
    replace(jobs, values.type ? buttons(
      ...["pause", "resume", "delete"].map((verb) => jobAction(`${verb[0].toUpperCase()}${verb.slice(1)} all ${values.type}`, `worlds.${verb}`, { type: values.type }, null, verb !== "resume"))) : null);
  }

  const form = filters([{ name: "type", label: "Type" }], values, (next) => {
    values = next;
    setFilters(values);
    rebuild();
  });
  const find = h("form", { class: "filters", onsubmit: (event) => {
    event.preventDefault();
    const [type, ...name] = find.elements.id.value.trim().split("/");
    if (name.length) go("worlds", [type, name.join("/")]);
  } }, h("label", {}, h("span", {}, "Find"), h("input", { name: "id", type: "search", placeholder: "Type/name" })), h("button", { type: "submit" }, "Open"));
  const create = action({
    label: "Create world", scope: "submit", route: () => "worlds",
    fields: [{ name: "type", label: "Type", value: values.type ?? "", required: true }, { name: "name", label: "Name", required: true }],
    body: (answers) => ({ type: answers.type, name: answers.name }),
    command: (answers) => ["worlds", "create", `${answers.type || "TYPE"}/${answers.name || "NAME"}`],
    done: (world) => go("worlds", [world.type, world.name]),
  });
  rebuild();
  return {
    title: "Worlds", polls: true, node: h("div", {}, heading("Worlds"), find, form, buttons(create), jobs, holder),
    refresh: () => list?.refresh(), close: () => list?.close(),
  };
}

function worldPage(type, name, given) {
  const id = `${type}/${name}`;
  const route = `worlds/${path(type, name)}`;
  const head = h("div");
  const actions = h("div");
  const details = h("div");
  const why = h("div");
  const state = h("div", { "aria-live": "polite" });
  const slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Height" });
  const heightInput = h("input", { type: "number", min: 0, "aria-label": "Height as a number", class: "height" });
  const jump = h("span", { class: "quiet" });
  let world = null;
  // null: the present state.
  let at = number(given.at);
  let actionsFor = null;
  let stateTurn = 0;
  let timer = null;

  async function showState() {
    stateTurn += 1;
    const mine = stateTurn;
    const height = at ?? world.height;
    slider.value = height;
    heightInput.value = height;
    jump.textContent = at === null ? "now" : `of ${count(world.height)}`;
    try {
      const shown = await get(`${route}/state`, at === null ? {} : { at });
      let changed = null;
      const isRaw = shown.raw_height !== null;
      if (!isRaw && height > Math.max(0, world.floor - 1)) {
        const before = await get(`${route}/state`, { at: height - 1 }).catch(() => null);
        if (before) changed = differences(before.state, shown.state);
      }
      if (mine !== stateTurn) return;
      const raw = isRaw ? h("p", { class: "quiet" }, `The server has no code of this application. These are the raw values of the snapshot after entry ${count(shown.raw_height)}.`) : null;
      replace(state, raw, tree(shown.state, 0, changed), changed ? h("p", { class: "quiet" }, changed.leaves.size ? "Marked: changed by this entry." : "This entry changed nothing.") : null);
    } catch (error) {
      if (mine === stateTurn) replace(state, h("p", { class: "problem" }, error.message));
    }
  }

  function choose(height) {
    at = height >= world.height ? null : Math.max(0, height);
    setFilters(at === null ? {} : { at });
    clearTimeout(timer);
    timer = setTimeout(showState, 120);
    slider.value = height;
    heightInput.value = height;
  }

  slider.addEventListener("input", () => choose(Number(slider.value)));
  heightInput.addEventListener("change", () => choose(Number(heightInput.value)));

  const journal = new PagedList({
    label: "Journal",
    columns: [
      { label: "Height", width: "5rem", number: true, show: (item) => item.height },
      { label: "Message", width: "minmax(8rem, 2fr)", show: (item) => h("span", { title: item.shown }, item.shown || item.type) },
      { label: "Outcome", width: "7rem", show: (item) => badge(item.outcome) },
      { label: "When", width: "8rem", wide: true, show: (item) => when(item.at_ns) },
      { label: "Intents", width: "5rem", number: true, wide: true, show: (item) => count(item.emitted) },
      { label: "Error", width: "minmax(0, 2fr)", wide: true, show: (item) => item.error.trim().split("\n").at(-1) },
    ],
    href: (item) => address("worlds", [type, name], { at: item.height }),
    fetch: (cursor, limit, signal) => get(`${route}/journal`, { cursor, limit }, signal),
    empty: "no message was handled yet",
  });

  function draw(document) {
    const former = world;
    world = document;
    replace(head, heading(id, badge(world.status)));
    if (former?.status !== world.status || former?.blocker?.code !== world.blocker?.code || former?.holder !== world.holder) replace(why, whyPanel("world", type, name));
    if (actionsFor !== world.status) {
      actionsFor = world.status;
      drawActions();
    }
    replace(details, facts([
      ["Id", world.world_id], ["Height", count(world.height)], ["Oldest entry", count(world.floor)], ["Unread messages", count(world.depth)],
      ["Assigned to", world.worker], ["Lease of", world.holder ?? "no worker"], ["Epoch of the lease", world.epoch],
      ["Lease ends", world.leased_until_ns && when(world.leased_until_ns)], ["Created", when(world.created_ns)],
    ]));
    slider.max = world.height;
    slider.min = Math.max(0, world.floor - 1);
    if (former === null) {
      showState();
      journal.load();
    } else if (former.height !== world.height) {
      if (at === null) showState();
      journal.refresh();
    }
  }

  function drawActions() {
    const paused = world.status === "paused" || world.status === "parked";
    const verb = (label, name, options = {}) => action({
      label, route: () => `${route}/${name}`, command: () => ["worlds", name, id], done: () => refresh(), ...options,
    });
    replace(actions, buttons(
      sendAction({
        route, command: (values, event) => ["worlds", "send", id, values.type || "TYPE", event, ...option("--key", values.key), "--app", "MODULE:APP"],
      }),
      action({
        label: "Fork world", route: () => `${route}/fork`, text: "A new world with the state after an entry.",
        fields: [
          { name: "name", label: "Name of the fork", required: true },
          { name: "at", label: "Height", type: "number", value: () => at ?? "", hint: "empty: the present state" },
          { name: "effects", label: "Open effects", options: ["drop", "fail", "reissue"] },
          { name: "timers", label: "Timers", options: ["drop", "keep"] },
        ],
        body: (values) => ({ name: values.name, at: number(values.at), effects: values.effects, timers: values.timers }),
        command: (values) => ["worlds", "fork", id, values.name || "NAME", ...option("--at", values.at), "--effects", values.effects, "--timers", values.timers],
        done: (fork) => go("worlds", [fork.type, fork.name]),
      }),
      paused ? verb("Resume world", "resume") : verb("Pause world", "pause", { text: "It accepts messages and does not handle them." }),
      action({
        label: "Pin world", route: () => `${route}/pin`, text: "The world stays on this worker, also while the worker is gone.",
        fields: [{ name: "worker", label: "Worker", value: () => world.worker ?? "", required: true }], body: (values) => ({ worker: values.worker }),
        command: (values) => ["worlds", "pin", id, values.worker || "WORKER"], done: () => refresh(),
      }),
      verb("Unpin world", "unpin"),
      verb("Delete world", "delete", { danger: true, text: "Its name is free at once. Its rows are removed after 7 days." }),
      verb("Purge world", "purge", {
        danger: true, text: "Erases its journal, snapshots and dead letters now. Only its id, a hash and the date remain.",
        fields: [{ name: "force", label: "Also with open effects or a lease", type: "checkbox" }],
        body: (values) => ({ force: values.force }), command: (values) => ["worlds", "purge", id, ...(values.force ? ["--force"] : [])],
        done: () => go("worlds"),
      })));
  }

  async function refresh() {
    draw(await get(route));
  }

  const lineage = loaded(() => Promise.all([get(`${route}/lineage`), readAll(`${route}/forks`)]), ([{ items }, forks]) => lineageTree(id, items, forks));
  const timers = loaded(() => get(`${route}/timers`, { limit: 1_000 }), ({ items, next }) => [table("Timers of this world", [
    { label: "Key", show: (row) => row.key },
    { label: "Event", show: (row) => row.event },
    { label: "Due", show: (row) => when(row.due_ns) },
    { label: "Repeats", show: (row) => row.cron ? `${row.cron} (${row.zone})` : "" },
  ], items, "no timer waits"), next ? h("p", { class: "quiet" }, "the first 1,000") : null]);
  const effects = loaded(() => readAll(`${route}/effects`), ({ items, more }) => [table("Open effects", [
    { label: "Effect", show: (row) => link(address("effects", [row.intent]), row.kind) },
    { label: "State", show: (row) => badge(row.state) },
    { label: "Tag", show: (row) => row.tag },
    { label: "Attempts", number: true, show: (row) => count(row.attempts) },
    { label: "When", show: (row) => when(row.time_ns) },
    { label: "Owner", show: (row) => row.owner ?? "" },
  ], items, "no effect is open or dead"), more ? h("p", { class: "quiet" }, "The universe has more effects than this page reads.") : null]);
  refresh().catch((error) => replace(head, heading(id), h("p", { class: "problem" }, error.message)));
  return {
    title: id, subject: `world/${id}`,
    node: h("div", {}, head, section("Why", why), actions, details,
      section("State", h("div", { class: "slider" }, slider, heightInput, jump), state),
      section("Journal", journal.node), section("Open effects", effects), section("Timers", timers), section("Lineage", lineage)),
    event(name, document) {
      if (name === "world") draw(document);
      if (name === "gone") replace(details, h("p", { class: "problem" }, "This world is deleted."));
    },
    refresh() {
      timers.refresh();
      effects.refresh();
    },
    close: () => journal.close(),
  };
}

const PAGES_MAX = 10;

// The items of the first pages of a list. `more`: the list continues.
async function readAll(route) {
  const items = [];
  let cursor = "";
  for (let pages = 0; pages < PAGES_MAX; pages += 1) {
    const page = await get(route, { cursor, limit: 200 });
    items.push(...page.items);
    if (page.next === null) return { items, more: false };
    cursor = page.next;
  }
  return { items, more: true };
}

// Ancestors, this world, and its forks, each below its parent.
function lineageTree(id, ancestors, forks) {
  const worldLink = (name) => name.includes("/") ? link(address("worlds", worldParts(name)), name) : name;
  const below = forks.items.length || forks.more ? h("ul", {}, forks.items.map((one) => h("li", {}, worldLink(`${one.type}/${one.name}`), ` at height ${one.forked_at_height}`)),
    forks.more ? h("li", { class: "quiet" }, "more forks than this page reads") : null) : null;
  if (!ancestors.length && !below) return h("p", { class: "quiet" }, "not a fork, and it has no forks");
  // The height and the snapshot of an ancestor are those at which its child was forked.
  const [parent] = ancestors;
  let node = h("li", {}, h("b", {}, id), parent ? [` from height ${parent.forked_at_height}, snapshot `, short(parent.parent_snapshot_hash)] : null, below);
  ancestors.forEach((one, at) => {
    const above = ancestors[at + 1];
    node = h("li", {}, worldLink(one.parent), above ? ` from height ${above.forked_at_height}` : null, h("ul", {}, node));
  });
  return h("ul", { class: "lineage" }, node);
}
