// Groups of errors: what failed with the same error, and actions on a whole group.

import { get } from "./api.js";
import { count, facts, h, path, section, when } from "./dom.js";
import { PagedList } from "./list.js";
import { buttons, filters, heading, loaded } from "./parts.js";
import { address, setFilters } from "./router.js";
import { jobAction } from "./page-work.js";

const KINDS = ["task", "flow", "dead"];

function subjectAddress(kind, subject) {
  if (kind === "dead") return address("dead", [subject.queue, subject.seq]);
  return address(kind === "flow" ? "flows" : "tasks", [subject.id]);
}

function subjectName(subject) {
  return subject.id ?? `${subject.queue} ${subject.seq}`;
}

export function errorsPage(parts, given) {
  return parts.length >= 2 ? groupPage(parts[0], parts[1]) : groupListPage(given);
}

function groupListPage(given) {
  let values = { ...given };
  const list = new PagedList({
    label: "Groups of errors",
    columns: [
      { label: "Error", width: "minmax(8rem, 4fr)", show: (item) => item.text },
      { label: "Kind", width: "4rem", show: (item) => item.kind },
      { label: "Number", width: "5rem", number: true, show: (item) => count(item.count) },
      { label: "Newest", width: "8rem", wide: true, show: (item) => when(item.newest_ns) },
      { label: "Oldest", width: "8rem", wide: true, show: (item) => when(item.oldest_ns) },
    ],
    href: (item) => address("errors", [item.kind, item.group]),
    fetch: (cursor, limit, signal) => get("errors", { kind: values.kind, cursor, limit }, signal),
    empty: "nothing has failed",
  });
  const form = filters([{ name: "kind", label: "Kind", options: KINDS }], values, (next) => {
    values = next;
    setFilters(values);
    list.load();
  });
  list.load();
  const timer = setInterval(() => list.refresh(), 3_000);
  return {
    title: "Errors", node: h("div", {}, heading("Errors"), form, list.node), refresh: () => list.refresh(),
    close: () => {
      clearInterval(timer);
      list.close();
    },
  };
}

function groupPage(kind, group) {
  const route = `errors/${path(kind, group)}`;
  const subjects = new PagedList({
    label: "Subjects with this error",
    columns: [
      { label: "Subject", width: "minmax(8rem, 2fr)", show: (item) => subjectName(item) },
      { label: "When", width: "9rem", show: (item) => when(item.at_ns) },
    ],
    href: (item) => subjectAddress(kind, item),
    fetch: (cursor, limit, signal) => get(`${route}/subjects`, { cursor, limit }, signal),
    empty: "no subject is left in this group",
  });
  subjects.load();
  const details = loaded(() => get(route), (found) => [
    h("pre", {}, found.text),
    facts([["Kind", found.kind], ["Number", count(found.count)], ["Oldest", when(found.oldest_ns)], ["Newest", when(found.newest_ns)]]),
  ]);
  const selection = { kind, group };
  return {
    title: "Group of errors",
    node: h("div", {}, heading("Group of errors"), details, buttons(
      jobAction("Redrive group", "errors.redrive", selection, ["errors", "redrive", kind, group], false),
      kind === "dead" ? jobAction("Drop group", "errors.drop", selection, ["errors", "drop", kind, group], true) : null),
    section("Subjects", subjects.node)),
    refresh: () => subjects.refresh(), close: () => subjects.close(),
  };
}
