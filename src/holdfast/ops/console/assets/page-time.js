// Schedules and timers.

import { get } from "./api.js";
import { badge, count, facts, h, link, path, section, table, when } from "./dom.js";
import { PagedList } from "./list.js";
import { action, buttons, heading, loaded, whyPanel } from "./parts.js";
import { address, go, worldParts } from "./router.js";
import { option } from "./page-system.js";

function scheduleActions(schedule, refresh) {
  const name = schedule.name;
  const verb = (label, word, options = {}) => action({
    label, route: () => `schedules/${path(name)}/${word}`, command: () => ["schedules", word, name], done: refresh, ...options,
  });
  return buttons(
    schedule.state === "paused" ? verb("Resume schedule", "resume", { text: "Occurrences of the pause are not started." }) : verb("Pause schedule", "pause"),
    verb("Run now", "run-now", { text: "Starts an extra occurrence. The overlap policy applies." }),
    verb("Backfill", "backfill", {
      text: "Starts the occurrences of a past time range that were not started.",
      fields: [
        { name: "from", label: "From", required: true, hint: "such as 2026-01-31T00:00" },
        { name: "to", label: "To", required: true },
        { name: "dry", label: "Only show the occurrences", type: "checkbox", value: true },
      ],
      body: (values) => ({ from: values.from, to: values.to, dry_run: values.dry }),
      command: (values) => ["schedules", "backfill", name, ...option("--from", values.from || "TIME"), ...option("--to", values.to || "TIME"), ...(values.dry ? ["--dry-run"] : [])],
      done: (answer) => {
        window.dispatchEvent(new CustomEvent("holdfast-backfill", { detail: answer }));
        refresh();
      },
    }),
    verb("Delete schedule", "delete", { danger: true, text: "Its tasks and flows continue.", done: () => go("schedules") }));
}

export function schedulesPage(parts) {
  return parts.length ? schedulePage(parts[0]) : scheduleListPage();
}

function scheduleListPage() {
  const all = loaded(() => get("schedules", { limit: 1_000 }), ({ items }) => table("Schedules", [
    { label: "Name", show: (row) => link(address("schedules", [row.name]), row.name) },
    { label: "State", show: (row) => badge(row.state) },
    { label: "Every", show: (row) => `${row.every} (${row.zone})` },
    { label: "Starts", show: (row) => `${row.kind} ${row.target}` },
    { label: "Next", show: (row) => when(row.next_ns) },
    { label: "Last", show: (row) => row.last_ns ? [when(row.last_ns), " ", row.last ?? ""] : "–" },
    { label: "Error", show: (row) => row.error },
  ], items, "there are no schedules"));
  const timer = setInterval(() => all.refresh(), 3_000);
  return { title: "Schedules", node: h("div", {}, heading("Schedules"), all), refresh: () => all.refresh(), close: () => clearInterval(timer) };
}

function schedulePage(name) {
  const backfilled = h("div", { role: "status" });
  const body = loaded(() => get(`schedules/${path(name)}`), (schedule) => [
    scheduleActions(schedule, () => body.refresh()),
    facts([
      ["State", badge(schedule.state)], ["Every", schedule.every], ["Zone", schedule.zone], ["Missed", schedule.missed], ["Overlap", schedule.overlap],
      ["Starts", `${schedule.kind} ${schedule.target}`], ["Source", schedule.source], ["Next", when(schedule.next_ns)], ["Last", when(schedule.last_ns)],
      ["Queued", count(schedule.queued)], ["Error", schedule.error],
    ]),
    section("Occurrences", table("Occurrences", [
      { label: "When", show: (row) => when(row.occurrence_ns) },
      { label: "State", show: (row) => badge(row.state) },
      { label: "Cause", show: (row) => row.cause },
      { label: "Reason", show: (row) => row.reason ?? "" },
      { label: "Started", show: (row) => row.target ? link(address(row.target.startsWith("f") ? "flows" : "tasks", [row.target]), row.target) : "–" },
    ], schedule.occurrences, "no occurrence yet")),
    section("Changes", table("Changes", [
      { label: "When", show: (row) => when(row.at_ns) },
      { label: "Action", show: (row) => row.action },
      { label: "Detail", show: (row) => row.detail },
    ], schedule.changes, "no change yet")),
  ]);
  const show = (event) => {
    const { occurrences, dry_run: dry } = event.detail;
    backfilled.replaceChildren(section(dry ? "The backfill would start" : "The backfill started", table("Backfill", [
      { label: "When", show: (row) => when(row.occurrence_ns) },
      { label: "State", show: (row) => badge(row.state) },
    ], occurrences, "nothing")));
  };
  window.addEventListener("holdfast-backfill", show);
  return {
    title: name, subject: `schedule/${name}`,
    node: h("div", {}, heading(name), section("Why", whyPanel("schedule", name)), backfilled, body),
    event(kind) {
      if (kind === "schedule" && !document.querySelector("dialog[open]")) body.refresh();
    },
    close: () => window.removeEventListener("holdfast-backfill", show),
  };
}

export function timersPage() {
  const list = new PagedList({
    label: "Timers",
    columns: [
      { label: "World", width: "minmax(8rem, 2fr)", show: (item) => item.world },
      { label: "Key", show: (item) => item.key },
      { label: "Event", show: (item) => item.event },
      { label: "Due", width: "9rem", show: (item) => when(item.due_ns) },
      { label: "Repeats", wide: true, show: (item) => item.cron ? `${item.cron} (${item.zone})` : "" },
    ],
    href: (item) => address("worlds", worldParts(item.world)),
    fetch: (cursor, limit, signal) => get("timers", { cursor, limit }, signal),
    empty: "no timer waits",
  });
  list.load();
  const timer = setInterval(() => list.refresh(), 5_000);
  return {
    title: "Timers", node: h("div", {}, heading("Timers"), list.node), refresh: () => list.refresh(),
    close: () => {
      clearInterval(timer);
      list.close();
    },
  };
}
