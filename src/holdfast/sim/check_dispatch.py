"""Checkers of dispatches: S1 S4 J5 I6 R1 R2 A5, by a model that follows the operations.

The model knows the table of document 000 by itself, which marks panes were given, and how far the leader
was told. Each audit shows whether the rows are what it says, and each look at readiness whether that is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from holdfast.sim.audit_dispatch import event_of, new_universe
from holdfast.sim.history import Event, History
from holdfast.sim.violation import Violation

Plain = dict[str, Any]
Found = Iterator[tuple[str, str]]

UNIVERSE = "u"
SUBJECT = f"{UNIVERSE}/dispatch"
LEADER = "leader"
STATES = ("pending", "notified", "delivered", "failed")
ENDS = ("delivered", "failed")
# What may happen to a request, by its state.
TABLE = {
    "pending": {
        "tried": "pending", "retried": "pending", "deferred": "pending", "notified": "notified",
        "failed": "failed",
    },
    "notified": {"delivered": "delivered", "failed": "failed"},
    "delivered": {},
    "failed": {},
}  # fmt: skip
# How long a mark is, in the text that it ends.
MARK = re.compile(r"\[hf:([0-9a-f]{12})\]")


def findings(history: History) -> Iterator[Violation]:
    if not any(event.op.startswith(("dispatch_log.", "replay.", "pane.")) for event in history):
        return
    for life in history.lives():
        replay = _Replay()
        for event in life:
            replay.step(event)
        yield from replay.found


class _Replay:
    """One life of the store, seen through its dispatches."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.records: dict[str, Plain] = {}
        self.log: list[Plain] = []
        # None: nobody is told.
        self.cursor: int | None = None
        self.seen: set[str] = set()
        self.deferral: list[Any] | None = None
        self.lease: Plain | None = None
        self.stale = False
        # By pane: how often each mark was submitted there.
        self.typed: Counter[tuple[str, str]] = Counter()
        self.marks: set[str] = set()

    def step(self, event: Event) -> None:
        if event.op == "audit":
            rows = event.value.get("dispatch", {}).get(UNIVERSE, new_universe())
            log = event.value["journals"].get(SUBJECT, {"entries": {}})
            wrong = self._rows(rows, log)
        elif event.op == "ready":
            wrong = self._ready(event.at_ns, event.args)
        elif event.op == "pane.submit":
            wrong = self._submitted(event.args["pane"], event.args["text"])
        elif event.op == "dispatch_log.move" and event.code == "invalid_transition":
            wrong = self._refused(event.args)
        elif event.applied and event.op in _STEPS and self._ours(event):
            wrong = _STEPS[event.op](self, event.args, event.value) or iter(())
        else:
            return
        self.found += [Violation(number, what, event) for number, what in wrong]

    def _ours(self, event: Event) -> bool:
        return event.args.get("universe") == UNIVERSE

    # -- requests --------------------------------------------------------------------------------

    def _request(self, args: Plain, value: Plain) -> Found:
        request_id = args["request_id"]
        if request_id not in self.records:
            self.records[request_id] = {
                "target": args["target"], "status": "pending", "tries": 0, "deferred": False,
                "events": 0,
            }  # fmt: skip
            self._logged(request_id)
        yield from self._answer(request_id, value)

    def _move(self, args: Plain, value: Plain) -> Found:
        request_id, what = args["request_id"], args["transition"]
        record = self.records[request_id]
        after = TABLE[record["status"]].get(what)
        if after is None:
            yield "S1", f"{request_id}: {record['status']} and {what}"
            return
        record["status"] = after
        record["tries"] += what == "tried"
        record["deferred"] = what == "deferred"
        self._logged(request_id)
        if what == "notified" and _mark(request_id) not in self.marks:
            yield "A5", f"{request_id}: notified, and nobody typed it"
        yield from self._answer(request_id, value)

    def _refused(self, args: Plain) -> Found:
        record = self.records.get(args["request_id"])
        if record is not None and args["transition"] in TABLE[record["status"]]:
            yield "S1", f"{args['request_id']}: {args['transition']} was legal, and refused"

    def _abandon(self, args: Plain, value: bool) -> Found:
        record = self.records.get(args["request_id"])
        pending = record is not None and record["status"] == "pending"
        if record is not None and pending:
            record["status"], record["deferred"] = "failed", False
            self._logged(args["request_id"])
        if pending != value:
            yield "S1", f"{args['request_id']}: abandoned is {value}"

    def _logged(self, request_id: str) -> None:
        record = self.records[request_id]
        event_id = f"{request_id}/{record['events']}"
        record["events"] += 1
        self.log.append(
            {"event_id": event_id, "status": record["status"], "target": record["target"]}
        )

    def _answer(self, request_id: str, value: Plain) -> Found:
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

    def _advance(self, args: Plain, value: Plain) -> Found:
        was, now = self.cursor, value["cursor"]
        if was is None or not was <= now <= len(self.log):
            yield "I6", f"the cursor went from {was} to {now}, of {len(self.log)}"
        for told in self.log[was or 0 : now]:
            if not _news(told) or told["event_id"] in self.seen:
                continue
            if _mark(told["event_id"]) not in self.marks:
                yield "I6", f"{told['event_id']}: passed, and the leader was not told"
        self.cursor = now
        self.seen.update(args["event_ids"])

    def _rewind(self, args: Plain, value: Plain) -> Found:
        if self.cursor is None or args["cursor"] > self.cursor:
            yield "I6", f"rewound from {self.cursor} to {args['cursor']}"
        self.cursor = args["cursor"]

    def _defer(self, args: Plain, value: Plain) -> None:
        self.deferral = [args["code"], args["text"]]

    def _clear(self, args: Plain, value: Plain) -> None:
        self.deferral = None

    def _submitted(self, pane: str, text: str) -> Found:
        marks = MARK.findall(text)
        if len(marks) != 1 or not text.endswith(f"[hf:{marks[0]}]"):
            yield "A5", f"{pane}: not one whole text: {text!r}"
        for mark in marks:
            self.typed[pane, mark] += 1
            self.marks.add(mark)
            if self.typed[pane, mark] > 1:
                yield "A5", f"{pane}: given twice: {text!r}"
            if any(_mark(event_id) == mark for event_id in self.seen):
                yield "I6", f"told again: {text!r}"

    # -- who leads -------------------------------------------------------------------------------

    def _held(self, args: Plain, value: Plain) -> None:
        self.lease, self.stale = value, False

    def _freed(self, args: Plain, value: Any) -> None:
        self.lease = None

    def _staled(self, args: Plain, value: bool) -> None:
        self.stale = self.stale or value

    # -- looks -----------------------------------------------------------------------------------

    def _ready(self, now_ns: int, told: Plain) -> Found:
        expected = list(self._blockers(now_ns))
        found = [tuple(one) for one in told["reasons"]]
        held_back = [one for one in expected if one[0] == "notification_deferred"]
        if [one for one in found if one[0] == "notification_deferred"] != held_back:
            yield "R2", f"held back: {held_back}, told: {found}"
        elif found != expected:
            yield "R1", f"blockers: {expected}, told: {found}"
        if told["ready"] != (not expected):
            yield "R1", f"ready is {told['ready']}, with {expected}"
        if told["backlog"] != self._counts():
            yield "S4", f"told {told['backlog']}, are {self._counts()}"

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

    def _rows(self, rows: Plain, log: Plain) -> Found:
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
            yield "S4", "the index by state is not that of the records"
        if rows["marks"] != {_mark(name): name for name in self.records}:
            yield "S4", "the marks are not those of the records"
        told = [event_of(body["body"]) for _, body in sorted(log["entries"].items())]
        if [one["event_id"] for one in told] != [one["event_id"] for one in self.log]:
            yield "J5", "the log does not tell what happened"
        if _folded(told) != {name: one["status"] for name, one in self.records.items()}:
            yield "J5", "the log folds to other records"
        state = rows["state"]
        cursor = None if state is None else state["cursor"]
        if cursor != self.cursor or set(rows["seen"]) != self.seen:
            yield "I6", f"cursor {cursor} and {len(rows['seen'])} ids, not {self.cursor}"
        if len(rows["order"]) != len(rows["seen"]):
            yield "I6", "ids by age are not the ids"


def _folded(told: list[Plain]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in told:
        was = found.get(one["request_id"])
        after = "pending" if was is None else TABLE[was].get(one["transition"], "illegal")
        found[one["request_id"]] = after
    return found


def _news(event: Plain) -> bool:
    return event["status"] in ENDS and event["target"] != LEADER


def _mark(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:12]


_STEPS: dict[str, Callable[[_Replay, Plain, Any], Found | None]] = {
    "dispatch_log.request": _Replay._request,
    "dispatch_log.move": _Replay._move,
    "dispatch_log.abandon": _Replay._abandon,
    "replay.follow": _Replay._follow,
    "replay.unfollow": _Replay._unfollow,
    "replay.advance": _Replay._advance,
    "replay.rewind": _Replay._rewind,
    "replay.defer_leader_notification": _Replay._defer,
    "replay.clear_deferred": _Replay._clear,
    "panes.set_leader": _Replay._follow,
    "panes.clear_leader": _Replay._unfollow,
    "authority.acquire": _Replay._held,
    "authority.renew": _Replay._held,
    "authority.release": _Replay._freed,
    "authority.force_release": _Replay._freed,
    "authority.mark_stale": _Replay._staled,
}
