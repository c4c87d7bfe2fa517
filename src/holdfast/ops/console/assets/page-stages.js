// Runs of stages: their progress, failed rows and errors.

import { get } from "./api.js";
import { badge, count, duration, facts, h, link, path, replace, section, table, when } from "./dom.js";
import { PagedList } from "./list.js";
import { action, bar, buttons, heading, loaded, tree, whyPanel } from "./parts.js";
import { columnPlot, linePlot, microseconds, shortCount } from "./plots.js";
import { address } from "./router.js";

function rowParts(run) {
  const tones = { succeeded: "good", in_flight: "busy", skipped: "plain", failed: "bad", cancelled: "plain" };
  const parts = Object.entries(tones).map(([state, tone]) => ({ label: state.replace("_", " "), count: Number(run[state]), tone }));
  const done = parts.reduce((sum, part) => sum + part.count, 0);
  return [...parts, { label: "open", count: Math.max(0, Number(run.size) - done), tone: "waiting" }];
}

export function stagesPage(parts) {
  return parts.length ? runPage(parts[0]) : runListPage();
}

function runListPage() {
  const list = new PagedList({
    label: "Stage runs",
    columns: [
      { label: "Stage", width: "minmax(8rem, 2fr)", show: (item) => item.name },
      { label: "State", width: "8rem", show: (item) => badge(item.status) },
      { label: "Rows", number: true, show: (item) => `${count(item.succeeded)} of ${count(item.size)}` },
      { label: "Failed", number: true, wide: true, show: (item) => count(item.failed) },
      { label: "Rows a second", number: true, wide: true, show: (item) => item.rate_per_s === null ? "–" : item.rate_per_s.toFixed(1) },
      { label: "Cost", number: true, wide: true, show: (item) => item.cost.toFixed(4) },
      { label: "Started", width: "8rem", wide: true, show: (item) => when(item.created_ns) },
    ],
    href: (item) => address("stages", [item.run_id]),
    fetch: (cursor, limit, signal) => get("runs", { cursor, limit }, signal),
    empty: "no stage has run",
  });
  list.load();
  const timer = setInterval(() => list.refresh(), 2_000);
  return {
    title: "Stages", node: h("div", {}, heading("Stages"), list.node), refresh: () => list.refresh(),
    close: () => {
      clearInterval(timer);
      list.close();
    },
  };
}

// The plots of the stage report.
function runPlots({ points, throughput, latency, failed_by_class: failedByClass }) {
  const figures = [];
  const seconds = (point) => point.t_ms / 1_000;
  if (points.length > 1) {
    const lines = [["done", "good", "succeeded"], ["skipped", "plain", "skipped"], ["failed", "bad", "failed"]]
      .filter(([, , name], at) => !at || points.some((point) => point[name]))
      .map(([label, tone, name]) => ({ label, tone, of: (point) => point[name] }));
    figures.push(linePlot("Rows over time", points, lines, { seconds, stacked: true }));
  }
  if (throughput.length) {
    const edges = throughput.flatMap((one) => [{ at: one.begin_s, rate: one.rows_per_s }, { at: one.end_s, rate: one.rows_per_s }]);
    figures.push(linePlot("Throughput", edges, [{ label: "rows/s", tone: "good", of: (edge) => edge.rate }], { seconds: (edge) => edge.at, note: "rows a second, from the first call on" }));
  }
  if (points.length > 1) {
    for (const [name, label, field, format] of [["In flight", "rows begun", "in_flight", shortCount], ["Cost over time", "", "cost", (value) => Number(value.toPrecision(3)).toString()]]) {
      if (points.some((point) => point[field])) figures.push(linePlot(name, points, [{ label, tone: "busy", of: (point) => point[field] }], { seconds, format }));
    }
  }
  if (latency.length) {
    const calls = latency.reduce((sum, one) => sum + Number(one.calls), 0);
    figures.push(columnPlot("Time of a call", latency.map((one) => ({
      label: microseconds(one.from_us), value: Number(one.calls), title: `${count(one.calls)} calls took ${microseconds(one.from_us)} to ${microseconds(2 * one.from_us)}`,
    })), { tone: "busy", note: `${count(calls)} calls` }));
  }
  const classes = Object.entries(failedByClass);
  if (classes.length) {
    figures.push(columnPlot("Failures by class", classes.map(([label, rows]) => ({ label, value: Number(rows), title: `${count(rows)} rows: ${label}` })), { tone: "bad", note: "rows that finally failed" }));
  }
  return figures.length ? h("div", { class: "plots" }, figures) : h("p", { class: "quiet" }, "no call was measured yet");
}

function runPage(id) {
  const head = h("div");
  const details = h("div");
  const failed = new PagedList({
    label: "Failed rows",
    columns: [
      { label: "Row", width: "6rem", show: (item) => item.seq },
      { label: "Key", show: (item) => item.key },
      { label: "Attempts", width: "6rem", number: true, wide: true, show: (item) => count(item.attempts) },
      { label: "Class", show: (item) => item.error_class },
      { label: "Error", width: "minmax(0, 3fr)", show: (item) => item.error },
    ],
    fetch: (cursor, limit, signal) => get(`runs/${path(id)}/failed`, { cursor, limit }, signal),
    empty: "no row has failed",
  });
  failed.load();
  const plots = loaded(() => get(`runs/${path(id)}/plots`), runPlots);
  let former = null;
  const actions = h("div");
  const settings = h("div");
  function draw(run) {
    replace(settings, section("Output", tree(run.output)), section("Configuration", tree(run.config)));
    replace(head, heading(run.name, badge(run.status)));
    if (former !== run.status + run.live) {
      former = run.status + run.live;
      replace(actions, buttons(
        action({ label: "Retry failed rows", disabled: !run.failed, route: () => `runs/${path(id)}/retry`, text: "When the stage runs next, it tries them again.", command: () => ["runs", "retry", id] }),
        action({ label: "Cancel run", danger: true, disabled: !run.live, route: () => `runs/${path(id)}/cancel`, text: "Starts no further rows and ends the run.", command: () => ["runs", "cancel", id] })));
      failed.refresh();
    }
    const calls = Number(run.calls);
    replace(details, bar(rowParts(run)), facts([
      ["Run", run.run_id], ["Started", when(run.created_ns)], ["Updated", when(run.updated_ns)], ["Finished", run.finished_ns ? when(run.finished_ns) : null],
      ["Rows a second", run.rate_per_s === null ? null : run.rate_per_s.toFixed(1)], ["Calls", count(calls)], ["Reused", count(run.reused)],
      ["Retries", count(run.retries)], ["Cost", run.cost.toFixed(4)], ["Time of calls", duration(Number(run.calls_ns) / 1e9)],
      ["Retry requested", run.retry_requested_ns ? when(run.retry_requested_ns) : null], ["Cancel requested", run.cancel_requested_ns ? when(run.cancel_requested_ns) : null],
      ["Halted", run.halted], ["Retry of", run.retry_of && link(address("stages", [run.retry_of]), run.retry_of)],
    ]),
    section("Errors", table("Errors", [
      { label: "Class", show: (row) => row.class },
      { label: "Error", show: (row) => row.error },
      { label: "Attempts", number: true, show: (row) => count(row.count) },
      { label: "Rows", number: true, show: (row) => count(row.rows) },
    ], run.errors, "no errors")),
    run.next?.length ? section("Next", h("ul", {}, run.next.map((one) => h("li", {}, one)))) : null);
  }
  get(`runs/${path(id)}`).then(draw).catch((error) => replace(head, heading("Stage run"), h("p", { class: "problem" }, error.message)));
  return {
    title: "Stage run", subject: `run/${id}`,
    node: h("div", {}, head, section("Why", whyPanel("run", id)), actions, details, section("Plots", plots), section("Failed rows", failed.node), settings),
    event(name, document) {
      if (name !== "run") return;
      draw(document);
      plots.refresh();
    },
    close: () => failed.close(),
  };
}
