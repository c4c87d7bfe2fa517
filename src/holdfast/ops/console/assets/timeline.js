// Rows over one time axis: the steps of a flow, the attempts of a task, and the leases under which they run.

import { badge, duration, facts, h, nowMs } from "./dom.js";

// A row is `{label, state, spans, took, details, more}`. A span is `{from, to, tone, title}` in nanoseconds.
export function timeline(rows, empty) {
  const times = rows.flatMap((row) => row.spans.flatMap((span) => [Number(span.from), Number(span.to)])).filter(Boolean);
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  const first = Math.min(...times);
  const length = Math.max(1, Math.max(...times) - first);
  return h("ol", { class: "waterfall" }, rows.map((row) => {
    const track = h("span", { class: "track", "aria-hidden": "true" });
    for (const span of row.spans) {
      const piece = h("span", { class: `piece ${span.tone}`, title: span.title });
      piece.style.left = `${(100 * (Number(span.from) - first)) / length}%`;
      piece.style.width = `${(100 * (Number(span.to) - Number(span.from))) / length}%`;
      track.append(piece);
    }
    return h("li", {}, h("details", {},
      h("summary", {}, h("span", { class: "step" }, h("span", {}, row.label), badge(row.state), h("span", { class: "quiet" }, row.note)),
        track, h("span", { class: "number" }, row.took ?? "–")),
      facts(row.details ?? []), row.more ?? null));
  }));
}

export function took(from, to) {
  return from && to ? duration((Number(to) - Number(from)) / 1e9) : "–";
}

export function nowNs() {
  return nowMs() * 1e6;
}

// The spans of a lease: the wait in the queue, the time under the lease, and the rest of the lease.
export function leaseSpans({ created_ns: created, granted_ns: granted, expires_ns: expires, ended_ns: ended }) {
  const until = Number(ended ?? nowNs());
  const begun = granted ? Number(granted) : until;
  const spans = [{ from: created, to: begun, tone: "waiting", title: "waits" }];
  if (granted) spans.push({ from: begun, to: Math.max(begun, until), tone: "busy", title: "runs" });
  if (expires && !ended && Number(expires) > until) spans.push({ from: until, to: expires, tone: "plain", title: "rest of the lease" });
  return spans;
}
