"""Checkers of queues, dead letters and timers: S1 S3 S4 L7 E2 T1 D1 D2, by replaying a model.

The model follows each item through the applied operations. Some operations do not report their
effects one by one, for example a claim that expires during another claim, or an item that dies of
it. The model treats such an effect as possible from the moment it is legal. The next audit or claim
determines which one happened.

Worlds fill and empty the queues of a universe inside their commits. Such an item is known from its
first claim or audit on, and may be withdrawn. `check_intents` checks whether it should exist. This
module checks that only the current claim settles an item and accepts its receipt (E2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from tests.simulation.lease_events import expand
from tests.simulation.model_worlds import FAILED_EVENTS_QUEUE
from tests.simulation.violation import Violation

FAILED_COMPENSATIONS_QUEUE = "/undo-failed"

Plain = dict[str, Any]

# Timers that wait for a wall clock time, not for store time: see check_intents.
CALENDAR_TIMERS = "/timers/calendar"


@dataclass(slots=True)
class _Item:
    payload: bytes
    not_before_ns: int
    state: str = "waiting"  # ready or delayed | claimed | done | dead | gone (purged, redriven)
    number: int = 0
    owner: str = ""
    expires_ns: int = 0
    failures: int = 0
    expiries: int = 0
    purgeable: bool = False
    # The time it was scheduled for, or the time of the put if it was due at once. 0 if unknown.
    due_ns: int = 0

    @property
    def is_timer(self) -> bool:
        return self.not_before_ns > 0


@dataclass(slots=True)
class _QueueReplay:
    """Replays the queue operations of one life of the store."""

    budgets: dict[str, Plain]
    items: dict[str, dict[int, _Item]] = field(default_factory=dict)
    last_seq: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    purged: dict[str, int] = field(default_factory=dict)
    found: list[Violation] = field(default_factory=list)

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            for queue, rows in event.value["queues"].items():
                if _is_failure_queue(queue):
                    self._check_indexes(event, queue, rows)
                else:
                    self._audit(event, queue, rows)
        elif (
            event.applied
            and event.op in _STEPS
            and not _is_failure_queue(event.args.get("queue", ""))
        ):
            _STEPS[event.op](self, event)

    def _add_violation(self, number: str, what: str, event: HistoryEvent) -> None:
        self.found.append(Violation(number, what, event))

    # -- puts
    # ----------------------------------------------------------------------------------------

    def _put(self, event: HistoryEvent) -> None:
        self._new(event, [event.value], [event.args["payload"]], event.args.get("not_before_ns", 0))

    def _put_many(self, event: HistoryEvent) -> None:
        args = event.args
        self._new(event, event.value, args["payloads"], args.get("not_before_ns", 0))

    def _redrive(self, event: HistoryEvent) -> None:
        queue = event.args["queue"]
        items = self.items.setdefault(queue, {})
        payloads = []
        for seq in event.args["seqs"]:
            item = items.get(seq)
            if item is None or not self._may_be_dead(queue, item, event.at_ns):
                self._add_violation("S1", f"{queue}/{seq}: redriven but not dead", event)
                payloads.append(b"")
                continue
            item.state = "gone"
            payloads.append(item.payload)
        self._new(event, event.value, payloads, 0)

    def _new(
        self, event: HistoryEvent, seqs: list[int], payloads: list[bytes], not_before: int
    ) -> None:
        queue = event.args["queue"]
        items = self.items.setdefault(queue, {})
        for seq, payload in zip(seqs, payloads, strict=True):
            if seq <= self.last_seq.get(queue, 0):
                self._add_violation(
                    "D2", f"{queue}/{seq}: a sequence number was given twice", event
                )
            self.last_seq[queue] = max(seq, self.last_seq.get(queue, 0))
            items[seq] = _Item(payload, not_before, due_ns=not_before or event.at_ns)

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self, event: HistoryEvent) -> None:
        self._claimed(event, event.value)

    def _claim_with_timers(self, event: HistoryEvent) -> None:
        self._check_timer_order(event, event.value["timers"])
        self._claimed(event, event.value["items"] + event.value["timers"])

    def _check_timer_order(self, event: HistoryEvent, timers: list[Plain]) -> None:
        """Check that timers claimed for the first time are ordered by due time, then by number."""
        items = self.items.get(event.args["request"].get("timers", ""), {})
        first_claims = [
            (items[timer["seq"]].due_ns, timer["seq"]) for timer in timers if timer["number"] == 1
        ]
        if not first_claims:
            return
        if first_claims != sorted(first_claims):
            self._add_violation(
                "T1",
                f"timers {first_claims}: claimed in another order than that of their times",
                event,
            )
        taken = {seq for _, seq in first_claims}
        for seq, item in items.items():
            waits = item.state == "waiting" and item.number == 0 and seq not in taken
            if waits and item.due_ns and (item.due_ns, seq) < max(first_claims):
                self._add_violation(
                    "T1", f"timer {seq}: due before {max(first_claims)}, but skipped", event
                )

    def _claimed(self, event: HistoryEvent, claims: list[Plain]) -> None:
        now = event.at_ns
        for claim in claims:
            queue = claim["queue"]
            name = f"{queue}/{claim['seq']}"
            item = self.items.setdefault(queue, {}).get(claim["seq"])
            if item is None and _is_world_queue(queue):
                item = self.items[queue][claim["seq"]] = _Item(claim["payload"], 0)
            if item is None or item.state in ("done", "dead", "gone"):
                state = "unknown" if item is None else item.state
                self._add_violation("S1", f"{name}: claimed but {state}", event)
                continue
            if now < item.not_before_ns and not queue.endswith(CALENDAR_TIMERS):
                self._add_violation(
                    "T1", f"{name}: claimed {item.not_before_ns - now} ns early", event
                )
            if item.state == "claimed":
                if now < item.expires_ns:
                    self._add_violation("D2", f"{name}: claimed while {item.owner} holds it", event)
                item.expiries += 1
            if claim["number"] != item.number + 1:
                self._add_violation(
                    "L7", f"{name}: claim {claim['number']} after {item.number}", event
                )
            if (claim["failures"], claim["expiries"]) != (item.failures, item.expiries):
                self._add_violation("S3", f"{name}: counts {claim['failures']}, {claim['expiries']} instead "
                          f"of {item.failures}, {item.expiries}", event)  # fmt: skip
            self._within_budget(queue, claim, event)
            if not claim["blob"] and claim["payload"] != item.payload:
                self._add_violation("D1", f"{name}: claimed with another payload", event)
            item.state, item.number, item.owner = "claimed", claim["number"], claim["owner"]
            item.expires_ns = claim["expires_ns"]
            item.failures, item.expiries = claim["failures"], claim["expiries"]

    def _claimed_item(self, event: HistoryEvent, token: Plain) -> _Item | None:
        """Return the item of a claim token, after checking that the token is valid."""
        name = f"{token['queue']}/{token['seq']}"
        item = self.items.get(token["queue"], {}).get(token["seq"])
        if item is None or item.state != "claimed":
            state = "unknown" if item is None else item.state
            number = "T1" if item is not None and item.is_timer and state == "done" else "S1"
            number = "E2" if _is_world_queue(token["queue"]) else number
            self._add_violation(number, f"{name}: {event.op} of an item that is {state}", event)
            return None
        number = "E2" if _is_world_queue(token["queue"]) else "L7"
        if (token["number"], token["owner"]) != (item.number, item.owner):
            self._add_violation(number, f"{name}: {event.op} under claim {token['number']} of {token['owner']}, "
                      f"the current one is {item.number} of {item.owner}", event)  # fmt: skip
        elif event.at_ns >= item.expires_ns:
            self._add_violation(number, f"{name}: {event.op} after the claim expired", event)
        return item

    def _finish(self, event: HistoryEvent, token: Plain) -> None:
        item = self._claimed_item(event, token)
        if item is not None:
            item.state = "done"
            self.done[token["queue"]] = self.done.get(token["queue"], 0) + 1

    def _ack(self, event: HistoryEvent) -> None:
        for token in event.args["claims"]:
            self._finish(event, token)

    def _settle(self, event: HistoryEvent) -> None:
        acks, fails = event.args.get("acks", []), event.args.get("fails", [])
        for token, end in zip(acks, event.value[: len(acks)], strict=True):
            if end != "lost":
                self._finish(event, token)
        for failure, end in zip(fails, event.value[len(acks) :], strict=True):
            if end != "lost":
                self._failed(event, failure["claim"], end, failure)

    def _on_cycle_commit(self, event: HistoryEvent) -> None:
        """Settle the effects and timers that a committed cycle applied inline."""
        for applied in event.args["cycle"].get("carried", ()):
            if applied.get("alarm") is None:
                self._finish(event, applied["token"])
            else:
                self._on_timer_delivered(event, applied["alarm"])

    def _on_timer_delivered(self, event: HistoryEvent, timer: Plain) -> None:
        """Check a timer delivered by a fused commit: it was waiting, unclaimed and due."""
        queue, seq = timer["queue"], timer["seq"]
        item = self.items.setdefault(queue, {}).setdefault(seq, _Item(b"", 0))
        if item.state != "waiting":
            self._add_violation(
                "T1", f"{queue}/{seq}: delivered to its world, but it is {item.state}", event
            )
        elif event.at_ns < item.not_before_ns and not queue.endswith(CALENDAR_TIMERS):
            early_ns = item.not_before_ns - event.at_ns
            self._add_violation("T1", f"{queue}/{seq}: delivered {early_ns} ns early", event)
        item.state = "done"

    def _fail(self, event: HistoryEvent) -> None:
        self._failed(event, event.args["claim"], event.value, event.args)

    def _failed(self, event: HistoryEvent, token: Plain, end: str, failure: Plain) -> None:
        item = self._claimed_item(event, token)
        if item is None:
            return
        item.failures += 1
        retryable = failure.get("retryable", True)
        maximum = self.budgets.get(token["queue"], {}).get("failures_max")
        if maximum is not None:
            should_die = not retryable or item.failures >= maximum
            if should_die != (end == "dead"):
                self._add_violation("S3", f"{token['queue']}/{token['seq']}: {end} after failure "
                          f"{item.failures} of {maximum}", event)  # fmt: skip
        delay = failure.get("delay_ns", 0)
        item.state = "dead" if end == "dead" else "waiting"
        if delay and end != "dead":
            item.not_before_ns = event.at_ns + delay

    def _dead_letter(self, event: HistoryEvent) -> None:
        item = self._claimed_item(event, event.args["claim"])
        if item is not None:
            item.state = "dead"

    def _release(self, event: HistoryEvent) -> None:
        for token in event.args["claims"]:
            item = self._claimed_item(event, token)
            if item is not None:
                item.state = "waiting"

    def _extend(self, event: HistoryEvent) -> None:
        for token, expires_ns in zip(event.args["claims"], event.value, strict=True):
            if expires_ns is not None:
                item = self._claimed_item(event, token)
                if item is not None:
                    item.expires_ns = expires_ns

    def _release_unstarted(self, event: HistoryEvent) -> None:
        for token, released in zip(event.args["claims"], event.value, strict=True):
            if released:
                item = self._claimed_item(event, token)
                if item is not None:
                    item.state = "waiting"

    def _reap(self, event: HistoryEvent) -> None:
        """Check the number of reaped claims. The next claim or audit determines which ones they
        were."""
        queue = event.args["queue"]
        overdue = [
            item
            for item in self.items.get(queue, {}).values()
            if item.state == "claimed" and event.at_ns >= item.expires_ns
        ]
        if event.value > len(overdue):
            self._add_violation(
                "L7", f"{queue}: {event.value} reaped, {len(overdue)} are overdue", event
            )

    def _purge_dead(self, event: HistoryEvent) -> None:
        """Mark every item that could have died as purgeable. The result has only the number of
        purged items."""
        queue = event.args["queue"]
        self.purged[queue] = self.purged.get(queue, 0) + event.value
        for item in self.items.get(queue, {}).values():
            if self._may_be_dead(queue, item, event.at_ns):
                item.purgeable = True

    # -- against the rows ------------------------------------------------------------------------

    def _audit(self, event: HistoryEvent, queue: str, rows: Plain) -> None:
        items = self.items.setdefault(queue, {})
        alive, dead = rows["items"], rows["dead"]
        if _is_world_queue(queue):
            for seq, row in alive.items():
                if seq not in items and seq <= self.last_seq.get(queue, 0):
                    self._add_violation("D2", f"{queue}/{seq}: an old number reappeared", event)
                if seq not in items:
                    items[seq] = _Item(row["payload"], row["not_before_ns"])
            self.last_seq[queue] = rows["last_seq"]
        for seq, item in items.items():
            self._check_place(event, queue, seq, item, alive.get(seq), dead.get(seq))
        if self.purged.get(queue, 0) != 0:
            self._add_violation(
                "D2", f"{queue}: {self.purged[queue]} more were purged than are gone", event
            )
        for seq in [*alive, *dead]:
            if seq not in items:
                self._add_violation("D2", f"{queue}/{seq}: in the store, but never put", event)
        self._check_indexes(event, queue, rows)
        self._check_counts(event, queue, rows)

    def _check_place(
        self,
        event: HistoryEvent,
        queue: str,
        seq: int,
        item: _Item,
        row: Plain | None,
        dead: Plain | None,
    ) -> None:
        name, now = f"{queue}/{seq}", event.at_ns
        if row is not None and dead is not None:
            self._add_violation("D2", f"{name}: an item and a dead letter at once", event)
        if item.state in ("done", "gone"):
            if row is not None or dead is not None:
                number = "D1" if item.state == "done" else "D2"
                self._add_violation(number, f"{name}: {item.state}, but still stored", event)
            return
        if row is None and dead is None:
            if item.purgeable and self._may_be_dead(queue, item, now):
                item.state = "gone"
                self.purged[queue] -= 1
                return
            if _is_world_queue(queue):
                item.state = "gone"  # withdrawn or redriven; if wrongly, check_intents finds its intent missing
                return
            self._add_violation("D2", f"{name}: {item.state}, but not stored", event)
            return
        if dead is not None:
            if not self._may_be_dead(queue, item, now):
                self._add_violation("S1", f"{name}: dead, but it was {item.state}", event)
            self._check_dead_letter(event, name, item, dead)
            item.state = "dead"
            return
        assert row is not None
        if item.state == "dead":
            self._add_violation("D2", f"{name}: dead, but its item is still there", event)
        elif item.state == "claimed" and not row["expires_ns"]:
            if now < item.expires_ns:
                self._add_violation("D2", f"{name}: the claim is gone before its time", event)
            item.state, item.expiries = "waiting", item.expiries + 1
        elif (item.state == "claimed") != bool(row["expires_ns"]):
            self._add_violation(
                "D2", f"{name}: {item.state}, but the row has owner {row['owner'] or 'none'}", event
            )
        if (row["failures"], row["expiries"]) != (item.failures, item.expiries):
            self._add_violation("S3", f"{name}: counts {row['failures']}, {row['expiries']} instead of "
                      f"{item.failures}, {item.expiries}", event)  # fmt: skip
        self._within_budget(queue, row, event)

    def _check_dead_letter(self, event: HistoryEvent, name: str, item: _Item, dead: Plain) -> None:
        """Check that a dead letter keeps the payload, a code, the attempts and the time."""
        if not dead["blob"] and dead["payload"] != item.payload:
            self._add_violation("D1", f"{name}: the dead letter lost its payload", event)
        if not dead["code"] or not dead["died_ns"]:
            self._add_violation("D1", f"{name}: a dead letter without code or time", event)
        if dead["claims"] != item.number or dead["failures"] != item.failures:
            self._add_violation("D1", f"{name}: a dead letter with other attempts", event)

    def _check_indexes(self, event: HistoryEvent, queue: str, rows: Plain) -> None:
        """Check that each item is in exactly one of ready, delayed and claimed, and that the
        indexes hold no other rows."""
        places: dict[int, list[str]] = {}
        for name in ("ready", "delayed", "expiry"):
            for path in rows[name]:
                places.setdefault(path[-1], []).append(name)
        for seq, row in rows["items"].items():
            want = ["expiry"] if row["expires_ns"] else None
            found = places.pop(seq, [])
            if len(found) != 1 or (want and found != want) or (not want and found == ["expiry"]):
                self._add_violation(
                    "D2", f"{queue}/{seq}: in {' and '.join(found) or 'no index'}", event
                )
        for seq, found in places.items():
            self._add_violation(
                "D1", f"{queue}/{seq}: no item, but in {' and '.join(found)}", event
            )
        owners = sorted(path[-1] for path in rows["owners"])
        if owners != sorted(path[-1] for path in rows["expiry"]):
            self._add_violation("D1", f"{queue}: claims by owner and by expiry differ", event)
        if sorted(path[-1] for path in rows["died"]) != sorted(rows["dead"]):
            self._add_violation("D1", f"{queue}: dead letters by time and by seq differ", event)

    def _check_counts(self, event: HistoryEvent, queue: str, rows: Plain) -> None:
        recount = {
            "ready": len(rows["ready"]),
            "delayed": len(rows["delayed"]),
            "claimed": len(rows["expiry"]),
            "dead": len(rows["dead"]),
            "done": self.done.get(queue, 0),
        }
        if _is_world_queue(queue):
            recount["done"] = rows["counts"]["done"]  # withdrawn items are included
        if rows["counts"] != recount:
            self._add_violation(
                "S4", f"{queue}: counters {rows['counts']}, recount {recount}", event
            )

    # -- possible states
    # -----------------------------------------------------------------------------

    def _may_be_dead(self, queue: str, item: _Item, now: int) -> bool:
        if item.state in ("dead", "done", "gone"):
            return item.state == "dead"
        maximum = self.budgets.get(queue, {}).get("expiries_max", 1)
        return item.state == "claimed" and now >= item.expires_ns and item.expiries + 1 >= maximum

    def _within_budget(self, queue: str, counts: Plain, event: HistoryEvent) -> None:
        budget = self.budgets.get(queue, {})
        for name in ("failures", "expiries"):
            maximum = budget.get(f"{name}_max")
            if maximum is not None and counts[name] >= maximum:
                self._add_violation(
                    "S3", f"{queue}: alive with {counts[name]} {name} of {maximum}", event
                )


def _is_world_queue(queue: str) -> bool:
    """Whether worlds fill and empty the queue inside their commits: the queues of a universe."""
    return "/" in queue


def _is_failure_queue(queue: str) -> bool:
    """Whether it is the queue of events whose reducer raised (see check_worlds), or of failed compensations (see
    check_flows)."""
    return queue.endswith((FAILED_EVENTS_QUEUE, FAILED_COMPENSATIONS_QUEUE))


_STEPS: dict[str, Callable[[_QueueReplay, HistoryEvent], None]] = {
    "queue.put": _QueueReplay._put,
    "queue.put_many": _QueueReplay._put_many,
    "queue.redrive": _QueueReplay._redrive,
    "queue.claim": _QueueReplay._claim,
    "queue.ack": _QueueReplay._ack,
    "queue.finish_batch": _QueueReplay._settle,
    "queue.fail": _QueueReplay._fail,
    "queue.dead_letter": _QueueReplay._dead_letter,
    "queue.release": _QueueReplay._release,
    "queue.extend": _QueueReplay._extend,
    "queue.expire_overdue": _QueueReplay._reap,
    "queue.purge_dead": _QueueReplay._purge_dead,
    "claims.claim_batch": _QueueReplay._claim_with_timers,
    "claims.release_unstarted": _QueueReplay._release_unstarted,
    "commit": _QueueReplay._on_cycle_commit,
}


def findings(history: History) -> list[Violation]:
    found: list[Violation] = []
    for life in history.store_lives():
        replay = _QueueReplay(history.config("budgets", {}))
        for event in expand(life):
            replay.step(event)
        found += replay.found
    return found
