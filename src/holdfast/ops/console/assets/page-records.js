// Jobs, the last replay report, and the audit log.

import { get } from "./api.js";
import { badge, count, facts, h, link, path, section, table, when } from "./dom.js";
import { PagedList } from "./list.js";
import { action, buttons, heading, loaded, tree } from "./parts.js";
import { address, worldParts } from "./router.js";

export function jobsPage(parts, { id = "" }) {
  const all = loaded(() => get("jobs", { limit: 200 }), ({ items }) => items.length ? items.map((job) => h("article", { class: `card${job.id === id ? " chosen" : ""}`, "aria-label": `Job ${job.id}` },
    h("h2", {}, `${job.id}: ${job.action} `, badge(job.state)),
    facts([
      ["Selection", Object.entries(job.selection).map(([name, value]) => `${name} ${value}`).join(", ")], ["By", job.actor],
      ["Processed", count(job.processed)], ["Refused", count(job.refused)], ["At most, each second", job.rate_per_s],
      ["Created", when(job.created_ns)], ["Ended", job.ended_ns && when(job.ended_ns)], ["Error", job.error],
    ]),
    job.refusals.length ? h("details", {}, h("summary", {}, "Last refusals"), h("ul", {}, job.refusals.map((one) => h("li", {}, `${one.subject}: ${one.why}`)))) : null,
    job.state === "running" ? buttons(
      action({
        label: "Change pace", route: () => `jobs/${path(job.id)}/pace`, fields: [{ name: "rate", label: "At most, each second", type: "number", value: job.rate_per_s }],
        command: (values) => ["jobs", "pace", job.id, values.rate || "RATE"],
        body: (values) => ({ rate_per_s: Number(values.rate) }), done: () => all.refresh(),
      }),
      action({ label: "Cancel job", danger: true, route: () => `jobs/${path(job.id)}/cancel`, command: () => ["jobs", "cancel", job.id], text: "Subjects that were processed stay so.", done: () => all.refresh() })) : null))
    : h("p", { class: "quiet" }, "there are no jobs"));
  const refresh = () => document.querySelector("dialog[open]") ?? all.refresh();
  const timer = setInterval(refresh, 1_000);
  return { title: "Jobs", node: h("div", {}, heading("Jobs"), all), refresh, close: () => clearInterval(timer) };
}

export function deployPage() {
  const command = "holdfast verify --app MODULE:APP --save";
  const report = loaded(async () => (await get("verify/reports")).items[0] ?? null, (found) => found === null
    ? h("p", {}, "There is no report yet. Run ", h("code", {}, command), " with the new code before you deploy it.")
    : [
      h("p", { class: `verdict ${found.sound ? "good" : "bad"}` }, found.sound ? "No difference: this code replays what is stored." : "This code differs from what is stored."),
      facts([
        ["Checked", when(found.at_ns)], ["Application", found.app ?? "none: stored data only"], ["Build", found.build], ["Universe", found.universe ?? "all"],
        ["Worlds", count(found.worlds)], ["Entries replayed", count(found.steps)], ["Compared", count(found.compared)], ["Not compared", count(found.not_compared)],
        ["Flows", count(found.flows)], ["Flows that would park", count(found.parks_count)],
      ]),
      section(`Worlds that differ (${count(found.findings_count)})`, table("Worlds that differ", [
        { label: "World", show: (row) => row.world?.includes("/") ? link(address("worlds", worldParts(row.world), { at: row.height || "" }), row.world) : row.world ?? "–" },
        { label: "Height", number: true, show: (row) => row.height ? count(row.height) : "–" },
        { label: "Code", show: (row) => row.code },
        { label: "First difference", show: (row) => row.text },
      ], found.findings, "none")),
      section(`Flows that differ (${count(found.flow_findings_count)})`, table("Flows that differ", [
        { label: "Flow", show: (row) => link(address("flows", [row.flow]), `${row.name} ${row.key || row.flow}`) },
        { label: "State", show: (row) => badge(row.state) },
        { label: "Would park", show: (row) => row.parks ? "yes" : row.parks === null ? "unknown" : "no" },
        { label: "Step", show: (row) => row.step },
        { label: "Code", show: (row) => row.code },
        { label: "First difference", show: (row) => row.text || (row.removed?.length ? `no longer asks for ${row.removed.join(", ")}` : "") },
      ], found.flow_findings, "none")),
      section(`Findings in stored data (${count(found.differences_count)})`, found.differences.length ? tree(found.differences) : h("p", { class: "quiet" }, "none")),
      h("p", { class: "quiet" }, "A new report: ", h("code", {}, command)),
    ]);
  return { title: "Deploy", node: h("div", {}, heading("Deploy"), report) };
}

export function auditPage() {
  const list = new PagedList({
    label: "Audit",
    columns: [
      { label: "Number", width: "5rem", show: (item) => item.number },
      { label: "When", width: "8rem", show: (item) => when(item.at_ns) },
      { label: "Who", show: (item) => item.actor },
      { label: "Action", show: (item) => item.action },
      { label: "Subject", width: "minmax(0, 2fr)", show: (item) => item.subject },
      { label: "Detail", width: "minmax(0, 2fr)", wide: true, show: (item) => item.detail },
    ],
    fetch: (cursor, limit, signal) => get("audit", { cursor, limit }, signal),
    empty: "no action of an operator yet",
  });
  list.load();
  const timer = setInterval(() => list.refresh(), 2_000);
  return {
    title: "Audit", node: h("div", {}, heading("Audit"), list.node), refresh: () => list.refresh(),
    close: () => {
      clearInterval(timer);
      list.close();
    },
  };
}
