"""Checkers of dispatch requests: S1 S4 J5 I6 R1 R2 A5, with a model that follows the operations.

The model has its own copy of the transition table of document 000. It tracks the marks typed into
panes and the position up to which the leader was notified. Each audit compares the rows with the
model, and each readiness event compares readiness with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder_dispatch import decode_event, empty_universe
from tests.simulation.violation import Violation

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]

UNIVERSE = "u"
SUBJECT = f"{UNIVERSE}/dispatch"
LEADER = "leader"
STATES = ("pending", "notified", "delivered", "failed")
FINAL_STATES = ("delivered", "failed")
# Legal transitions of a request, by its state.
TABLE = {
    "pending": {
        "tried": "pending", "retried": "pending", "deferred": "pending", "notified": "notified",
        "failed": "failed",
    },
    "notified": {"delivered": "delivered", "failed": "failed"},
    "delivered": {},
    "failed": {},
}  # fmt: skip
# The mark at the end of a typed text.
MARK = re.compile(r"\[hf:([0-9a-f]{12})\]")


def findings(history: History) -> Iterator[Violation]:
    if not any(event.op.startswith(("dispatch.", "notifications.", "pane.")) for event in history):
        return
    for life in history.store_lives():
        replay = _DispatchReplay()
        for event in life:
            replay.step(event)
        yield from replay.found


class _DispatchReplay:
    """Replays the dispatch events of one life of the store."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.records: dict[str, Plain] = {}
        self.log: list[Plain] = []
        # None: no leader pane is set.
        self.cursor: int | None = None
        self.seen: set[str] = set()
        self.deferral: list[Any] | None = None
        self.lease: Plain | None = None
        self.stale = False
        # Submissions of each mark, by pane.
        self.submissions: Counter[tuple[str, str]] = Counter()
        self.marks: set[str] = set()

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            rows = event.value.get("dispatch", {}).get(UNIVERSE, empty_universe())
            log = event.value["journals"].get(SUBJECT, {"entries": {}})
            wrong = self._check_rows(rows, log)
        elif event.op == "ready":
            wrong = self._check_readiness(event.at_ns, event.args)
        elif event.op == "pane.submit":
            wrong = self._on_text_submitted(event.args["pane"], event.args["text"])
        elif event.op == "dispatch.move" and event.code == "invalid_transition":
            wrong = self._refused(event.args)
        elif event.applied and event.op in _STEPS and self._is_ours(event):
            wrong = _STEPS[event.op](self, event.args, event.value) or iter(())
        else:
            return
        self.found += [Violation(number, what, event) for number, what in wrong]

    def _is_ours(self, event: HistoryEvent) -> bool:
        return event.args.get("universe") == UNIVERSE

    # -- requests --------------------------------------------------------------------------------

    def _request(self, args: Plain, value: Plain) -> Findings:
        request_id = args["request_id"]
        if request_id not in self.records:
            self.records[request_id] = {
                "target": args["target"], "status": "pending", "tries": 0, "deferred": False,
                "events": 0,
            }  # fmt: skip
            self._append_log(request_id)
        yield from self._check_answer(request_id, value)

    def _move(self, args: Plain, value: Plain) -> Findings:
        request_id, what = args["request_id"], args["transition"]
        record = self.records[request_id]
        after = TABLE[record["status"]].get(what)
        if after is None:
            yield "S1", f"{request_id}: {record['status']} and {what}"
            return
        record["status"] = after
        record["tries"] += what == "tried"
        record["deferred"] = what == "deferred"
        self._append_log(request_id)
        if what == "notified" and _mark(request_id) not in self.marks:
            yield "A5", f"{request_id}: notified, but its text was never typed"
        yield from self._check_answer(request_id, value)

    def _refused(self, args: Plain) -> Findings:
        record = self.records.get(args["request_id"])
        if record is not None and args["transition"] in TABLE[record["status"]]:
            yield "S1", f"{args['request_id']}: {args['transition']} refused although legal"

    def _abandon(self, args: Plain, value: bool) -> Findings:
        record = self.records.get(args["request_id"])
        pending = record is not None and record["status"] == "pending"
        if record is not None and pending:
            record["status"], record["deferred"] = "failed", False
            self._append_log(args["request_id"])
        if pending != value:
            yield "S1", f"{args['request_id']}: abandoned is {value}"

    def _append_log(self, request_id: str) -> None:
        record = self.records[request_id]
        event_id = f"{request_id}/{record['events']}"
        record["events"] += 1
        self.log.append(
            {"event_id": event_id, "status": record["status"], "target": record["target"]}
        )

    def _check_answer(self, request_id: str, value: Plain) -> Findings:
        record = self.records[request_id]
        if any(value[name] != record[name] for name in ("status", "tries", "deferred", "target")):
            yield "S1", f"{request_id}: answered {value}, is {record}"

    # -- the leader ------------------------------------------------------------------------------

    def _follow(self, args: Plain, value: Plain) -> None:
        if self.cursor is None:
            self.cursor = len(self.log)

    def _unfollow(self, args: Plain, value: bool) -> None:
        self.cursor, self.deferral = None, None
        self.seen.clear()

    def _advance(self, args: Plain, value: Plain) -> Findings:
        before, after = self.cursor, value["cursor"]
        if before is None or not before <= after <= len(self.log):
            yield "I6", f"the cursor went from {before} to {after}, of {len(self.log)}"
        for told in self.log[before or 0 : after]:
            if not _is_notified(told) or told["event_id"] in self.seen:
                continue
            if _mark(told["event_id"]) not in self.marks:
                yield "I6", f"{told['event_id']}: the cursor passed it without a notification"
        self.cursor = after
        self.seen.update(args["event_ids"])

    def _rewind(self, args: Plain, value: Plain) -> Findings:
        if self.cursor is None or args["cursor"] > self.cursor:
            yield "I6", f"rewound from {self.cursor} to {args['cursor']}"
        self.cursor = args["cursor"]

    def _defer(self, args: Plain, value: Plain) -> None:
        self.deferral = [args["code"], args["text"]]

    def _clear(self, args: Plain, value: Plain) -> None:
        self.deferral = None

    def _on_text_submitted(self, pane: str, text: str) -> Findings:
        marks = MARK.findall(text)
        if len(marks) != 1 or not text.endswith(f"[hf:{marks[0]}]"):
            yield "A5", f"{pane}: incomplete text: {text!r}"
        for mark in marks:
            self.submissions[pane, mark] += 1
            self.marks.add(mark)
            if self.submissions[pane, mark] > 1:
                yield "A5", f"{pane}: submitted twice: {text!r}"
            if any(_mark(event_id) == mark for event_id in self.seen):
                yield "I6", f"notified again: {text!r}"

    # -- the leader lease
    # ----------------------------------------------------------------------------

    def _lease_held(self, args: Plain, value: Plain) -> None:
        self.lease, self.stale = value, False

    def _lease_released(self, args: Plain, value: Any) -> None:
        self.lease = None

    def _lease_marked_stale(self, args: Plain, value: bool) -> None:
        self.stale = self.stale or value

    # -- readiness
    # -----------------------------------------------------------------------------------

    def _check_readiness(self, now_ns: int, readiness: Plain) -> Findings:
        expected = list(self._blockers(now_ns))
        blockers = [tuple(one) for one in readiness["reasons"]]
        deferred = [one for one in expected if one[0] == "notification_deferred"]
        if [one for one in blockers if one[0] == "notification_deferred"] != deferred:
            yield "R2", f"deferred: {deferred}, reported: {blockers}"
        elif blockers != expected:
            yield "R1", f"blockers: {expected}, reported: {blockers}"
        if readiness["ready"] != (not expected):
            yield "R1", f"ready is {readiness['ready']}, with {expected}"
        if readiness["backlog"] != self._counts():
            yield "S4", f"reported {readiness['backlog']}, expected {self._counts()}"

    def _blockers(self, now_ns: int) -> Iterator[tuple[str, str]]:
        if self.lease is None:
            yield "authority_missing", "authority_missing"
        elif self.stale:
            yield "authority_stale", "authority_stale"
        elif now_ns >= self.lease["expires_ns"]:
            yield "authority_expired", "authority_expired"
        if self.cursor is not None and self.cursor < len(self.log):
            yield "replay_pending", "replay_pending"
        if self.deferral is not None:
            yield "notification_deferred", self.deferral[0]
        if self._counts()["deferred"]:
            yield "notification_deferred", "leader_missing"

    def _counts(self) -> Plain:
        counted = Counter(record["status"] for record in self.records.values())
        deferred = sum(record["deferred"] for record in self.records.values())
        return {**{state: counted[state] for state in STATES}, "deferred": deferred}

    # -- rows ------------------------------------------------------------------------------------

    def _check_rows(self, rows: Plain, log: Plain) -> Findings:
        kept = {
            request_id: {name: row[name] for name in ("target", "status", "tries", "deferred", "events")}
            for request_id, row in rows["records"].items()
        }  # fmt: skip
        if kept != self.records:
            yield "S1", f"records are {kept}, not {self.records}"
        counts = {**{state: rows["counts"].get(state, 0) for state in STATES}}
        if {**counts, "deferred": rows["deferred"]} != self._counts():
            yield "S4", f"counters are {counts}, not {self._counts()}"
        places = sorted((status, request_id) for status, _, request_id in rows["places"])
        if places != sorted((one["status"], name) for name, one in self.records.items()):
            yield "S4", "the index by state differs from the records"
        if rows["marks"] != {_mark(name): name for name in self.records}:
            yield "S4", "the marks differ from the records"
        logged = [decode_event(body["body"]) for _, body in sorted(log["entries"].items())]
        if [one["event_id"] for one in logged] != [one["event_id"] for one in self.log]:
            yield "J5", "the log differs from the applied operations"
        if _fold(logged) != {name: one["status"] for name, one in self.records.items()}:
            yield "J5", "the log folds to other records"
        state = rows["state"]
        cursor = None if state is None else state["cursor"]
        if cursor != self.cursor or set(rows["seen"]) != self.seen:
            yield "I6", f"cursor {cursor} and {len(rows['seen'])} ids, not {self.cursor}"
        if len(rows["order"]) != len(rows["seen"]):
            yield "I6", "ids by age and ids differ"


def _fold(events: list[Plain]) -> dict[str, str]:
    statuses: dict[str, str] = {}
    for event in events:
        before = statuses.get(event["request_id"])
        after = "pending" if before is None else TABLE[before].get(event["transition"], "illegal")
        statuses[event["request_id"]] = after
    return statuses


def _is_notified(event: Plain) -> bool:
    return event["status"] in FINAL_STATES and event["target"] != LEADER


def _mark(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:12]


_STEPS: dict[str, Callable[[_DispatchReplay, Plain, Any], Findings | None]] = {
    "dispatch.request": _DispatchReplay._request,
    "dispatch.move": _DispatchReplay._move,
    "dispatch.abandon": _DispatchReplay._abandon,
    "notifications.subscribe": _DispatchReplay._follow,
    "notifications.unsubscribe": _DispatchReplay._unfollow,
    "notifications.advance": _DispatchReplay._advance,
    "notifications.rewind": _DispatchReplay._rewind,
    "notifications.defer_leader_notification": _DispatchReplay._defer,
    "notifications.clear_deferred": _DispatchReplay._clear,
    "leader_pane.set_leader": _DispatchReplay._follow,
    "leader_pane.clear_leader": _DispatchReplay._unfollow,
    "leader_lease.acquire": _DispatchReplay._lease_held,
    "leader_lease.renew": _DispatchReplay._lease_held,
    "leader_lease.release": _DispatchReplay._lease_released,
    "leader_lease.force_release": _DispatchReplay._lease_released,
    "leader_lease.mark_stale": _DispatchReplay._lease_marked_stale,
}
