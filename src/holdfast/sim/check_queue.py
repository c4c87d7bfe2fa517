"""Checkers of queues, dead letters and timers: S1 S3 S4 L7 E2 T1 D1 D2, by replaying a model.

The model follows each item through the operations that were applied. What the operations do not
tell one by one (a claim that expires during somebody else's claim, an item that dies of it) it
takes as possible from the moment it is legal, and the next audit or claim shows which it was.

Queues of a universe are filled and emptied by worlds, inside their commits: an item is known from its
first claim or audit on, and may be withdrawn. Whether it should be there is `check_intents`' to say;
who may settle it is judged here, and a receipt is accepted by nobody else (E2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.sim.history import Event, History
from holdfast.sim.lease_events import expanded
from holdfast.sim.model_worlds import FAILURES
from holdfast.sim.violation import Violation

Plain = dict[str, Any]

# Timers that wait for a time on the wall, which is not store time: see check_intents.
BY_WALL = "/timers/calendar"


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
    # The time that it was put for; its own, if it was due then. 0 if that is not known.
    due_ns: int = 0

    @property
    def timer(self) -> bool:
        return self.not_before_ns > 0


@dataclass(slots=True)
class _Replay:
    """One life of the store, seen through its queue operations."""

    budgets: dict[str, Plain]
    items: dict[str, dict[int, _Item]] = field(default_factory=dict)
    last_seq: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    purged: dict[str, int] = field(default_factory=dict)
    found: list[Violation] = field(default_factory=list)

    def step(self, event: Event) -> None:
        if event.op == "audit":
            for queue, rows in event.value["queues"].items():
                if _of_failures(queue):
                    self._indexes(event, queue, rows)
                else:
                    self._audit(event, queue, rows)
        elif event.applied and event.op in _STEPS and not _of_failures(event.args.get("queue", "")):
            _STEPS[event.op](self, event)

    def _bad(self, number: str, what: str, event: Event) -> None:
        self.found.append(Violation(number, what, event))

    # -- in --------------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._new(event, [event.value], [event.args["payload"]], event.args.get("not_before_ns", 0))

    def _put_many(self, event: Event) -> None:
        args = event.args
        self._new(event, event.value, args["payloads"], args.get("not_before_ns", 0))

    def _redrive(self, event: Event) -> None:
        queue = event.args["queue"]
        items = self.items.setdefault(queue, {})
        payloads = []
        for seq in event.args["seqs"]:
            item = items.get(seq)
            if item is None or not self._may_be_dead(queue, item, event.at_ns):
                self._bad("S1", f"{queue}/{seq}: redriven but not dead", event)
                payloads.append(b"")
                continue
            item.state = "gone"
            payloads.append(item.payload)
        self._new(event, event.value, payloads, 0)

    def _new(self, event: Event, seqs: list[int], payloads: list[bytes], not_before: int) -> None:
        queue = event.args["queue"]
        items = self.items.setdefault(queue, {})
        for seq, payload in zip(seqs, payloads, strict=True):
            if seq <= self.last_seq.get(queue, 0):
                self._bad("D2", f"{queue}/{seq}: a sequence number was given twice", event)
            self.last_seq[queue] = max(seq, self.last_seq.get(queue, 0))
            items[seq] = _Item(payload, not_before, due_ns=not_before or event.at_ns)

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self, event: Event) -> None:
        self._claimed(event, event.value)

    def _take(self, event: Event) -> None:
        self._in_order(event, event.value["timers"])
        self._claimed(event, event.value["items"] + event.value["timers"])

    def _in_order(self, event: Event, timers: list[Plain]) -> None:
        """Timers that were never claimed before come by the time they are due, then by number."""
        items = self.items.get(event.args.get("timers", ""), {})
        fresh = [(items[one["seq"]].due_ns, one["seq"]) for one in timers if one["number"] == 1]
        if not fresh:
            return
        if fresh != sorted(fresh):
            self._bad(
                "T1", f"timers {fresh}: claimed in another order than that of their times", event
            )
        taken = {seq for _, seq in fresh}
        for seq, item in items.items():
            waits = item.state == "waiting" and item.number == 0 and seq not in taken
            if waits and item.due_ns and (item.due_ns, seq) < max(fresh):
                self._bad("T1", f"timer {seq}: due before {max(fresh)}, and was passed over", event)

    def _claimed(self, event: Event, claims: list[Plain]) -> None:
        now = event.at_ns
        for claim in claims:
            queue = claim["queue"]
            name = f"{queue}/{claim['seq']}"
            item = self.items.setdefault(queue, {}).get(claim["seq"])
            if item is None and _of_worlds(queue):
                item = self.items[queue][claim["seq"]] = _Item(claim["payload"], 0)
            if item is None or item.state in ("done", "dead", "gone"):
                state = "unknown" if item is None else item.state
                self._bad("S1", f"{name}: claimed but {state}", event)
                continue
            if now < item.not_before_ns and not queue.endswith(BY_WALL):
                self._bad("T1", f"{name}: claimed {item.not_before_ns - now} ns early", event)
            if item.state == "claimed":
                if now < item.expires_ns:
                    self._bad("D2", f"{name}: claimed while {item.owner} holds it", event)
                item.expiries += 1
            if claim["number"] != item.number + 1:
                self._bad("L7", f"{name}: claim {claim['number']} after {item.number}", event)
            if (claim["failures"], claim["expiries"]) != (item.failures, item.expiries):
                self._bad("S3", f"{name}: counts {claim['failures']}, {claim['expiries']} instead "
                          f"of {item.failures}, {item.expiries}", event)  # fmt: skip
            self._within_budget(queue, claim, event)
            if not claim["blob"] and claim["payload"] != item.payload:
                self._bad("D1", f"{name}: claimed with another payload", event)
            item.state, item.number, item.owner = "claimed", claim["number"], claim["owner"]
            item.expires_ns = claim["expires_ns"]
            item.failures, item.expiries = claim["failures"], claim["expiries"]

    def _held(self, event: Event, token: Plain) -> _Item | None:
        """The item that a token spoke for, after judging whether it did."""
        name = f"{token['queue']}/{token['seq']}"
        item = self.items.get(token["queue"], {}).get(token["seq"])
        if item is None or item.state != "claimed":
            state = "unknown" if item is None else item.state
            number = "T1" if item is not None and item.timer and state == "done" else "S1"
            number = "E2" if _of_worlds(token["queue"]) else number
            self._bad(number, f"{name}: {event.op} of an item that is {state}", event)
            return None
        number = "E2" if _of_worlds(token["queue"]) else "L7"
        if (token["number"], token["owner"]) != (item.number, item.owner):
            self._bad(number, f"{name}: {event.op} under claim {token['number']} of {token['owner']}, "
                      f"the current one is {item.number} of {item.owner}", event)  # fmt: skip
        elif event.at_ns >= item.expires_ns:
            self._bad(number, f"{name}: {event.op} after the claim expired", event)
        return item

    def _finish(self, event: Event, token: Plain) -> None:
        item = self._held(event, token)
        if item is not None:
            item.state = "done"
            self.done[token["queue"]] = self.done.get(token["queue"], 0) + 1

    def _ack(self, event: Event) -> None:
        for token in event.args["claims"]:
            self._finish(event, token)

    def _settle(self, event: Event) -> None:
        acks, fails = event.args.get("acks", []), event.args.get("fails", [])
        for token, end in zip(acks, event.value[: len(acks)], strict=True):
            if end != "lost":
                self._finish(event, token)
        for failure, end in zip(fails, event.value[len(acks) :], strict=True):
            if end != "lost":
                self._failed(event, failure["claim"], end, failure)

    def _carried(self, event: Event) -> None:
        """A cycle that is committed has settled what it carried."""
        for one in event.args["cycle"].get("carried", ()):
            if one.get("alarm") is None:
                self._finish(event, one["token"])
            else:
                self._rang(event, one["alarm"])

    def _rang(self, event: Event, alarm: Plain) -> None:
        """A timer is told in its world's commit: it waited until then, nobody had it, and it was due."""
        queue, seq = alarm["queue"], alarm["seq"]
        item = self.items.setdefault(queue, {}).setdefault(seq, _Item(b"", 0))
        if item.state != "waiting":
            self._bad("T1", f"{queue}/{seq}: told to its world, but it is {item.state}", event)
        elif event.at_ns < item.not_before_ns and not queue.endswith(BY_WALL):
            early_ns = item.not_before_ns - event.at_ns
            self._bad("T1", f"{queue}/{seq}: told {early_ns} ns early", event)
        item.state = "done"

    def _fail(self, event: Event) -> None:
        self._failed(event, event.args["claim"], event.value, event.args)

    def _failed(self, event: Event, token: Plain, end: str, failure: Plain) -> None:
        item = self._held(event, token)
        if item is None:
            return
        item.failures += 1
        retryable = failure.get("retryable", True)
        maximum = self.budgets.get(token["queue"], {}).get("failures_max")
        if maximum is not None:
            should_die = not retryable or item.failures >= maximum
            if should_die != (end == "dead"):
                self._bad("S3", f"{token['queue']}/{token['seq']}: {end} after failure "
                          f"{item.failures} of {maximum}", event)  # fmt: skip
        delay = failure.get("delay_ns", 0)
        item.state = "dead" if end == "dead" else "waiting"
        if delay and end != "dead":
            item.not_before_ns = event.at_ns + delay

    def _bury(self, event: Event) -> None:
        item = self._held(event, event.args["claim"])
        if item is not None:
            item.state = "dead"

    def _release(self, event: Event) -> None:
        for token in event.args["claims"]:
            item = self._held(event, token)
            if item is not None:
                item.state = "waiting"

    def _extend(self, event: Event) -> None:
        for token, expires_ns in zip(event.args["claims"], event.value, strict=True):
            if expires_ns is not None:
                item = self._held(event, token)
                if item is not None:
                    item.expires_ns = expires_ns

    def _give_back(self, event: Event) -> None:
        for token, released in zip(event.args["claims"], event.value, strict=True):
            if released:
                item = self._held(event, token)
                if item is not None:
                    item.state = "waiting"

    def _reap(self, event: Event) -> None:
        """How many, not which: the next claim or audit tells. More than are overdue is wrong."""
        queue = event.args["queue"]
        overdue = [
            item
            for item in self.items.get(queue, {}).values()
            if item.state == "claimed" and event.at_ns >= item.expires_ns
        ]
        if event.value > len(overdue):
            self._bad("L7", f"{queue}: {event.value} reaped, {len(overdue)} are overdue", event)

    def _purge_dead(self, event: Event) -> None:
        """How many, not which: whatever could have died before the time may be gone."""
        queue = event.args["queue"]
        self.purged[queue] = self.purged.get(queue, 0) + event.value
        for item in self.items.get(queue, {}).values():
            if self._may_be_dead(queue, item, event.at_ns):
                item.purgeable = True

    # -- against the rows ------------------------------------------------------------------------

    def _audit(self, event: Event, queue: str, rows: Plain) -> None:
        items = self.items.setdefault(queue, {})
        alive, dead = rows["items"], rows["dead"]
        if _of_worlds(queue):
            for seq, row in alive.items():
                if seq not in items and seq <= self.last_seq.get(queue, 0):
                    self._bad("D2", f"{queue}/{seq}: there again, or late", event)
                if seq not in items:
                    items[seq] = _Item(row["payload"], row["not_before_ns"])
            self.last_seq[queue] = rows["last_seq"]
        for seq, item in items.items():
            self._place(event, queue, seq, item, alive.get(seq), dead.get(seq))
        if self.purged.get(queue, 0) != 0:
            self._bad("D2", f"{queue}: {self.purged[queue]} more were purged than are gone", event)
        for seq in [*alive, *dead]:
            if seq not in items:
                self._bad("D2", f"{queue}/{seq}: in the store, but nobody put it", event)
        self._indexes(event, queue, rows)
        self._count(event, queue, rows)

    def _place(
        self, event: Event, queue: str, seq: int, item: _Item, row: Plain | None, dead: Plain | None
    ) -> None:
        name, now = f"{queue}/{seq}", event.at_ns
        if row is not None and dead is not None:
            self._bad("D2", f"{name}: an item and a dead letter at once", event)
        if item.state in ("done", "gone"):
            if row is not None or dead is not None:
                number = "D1" if item.state == "done" else "D2"
                self._bad(number, f"{name}: {item.state}, and still there", event)
            return
        if row is None and dead is None:
            if item.purgeable and self._may_be_dead(queue, item, now):
                item.state = "gone"
                self.purged[queue] -= 1
                return
            if _of_worlds(queue):
                item.state = "gone"  # withdrawn, or redriven: if wrongly, its intent is nowhere
                return
            self._bad("D2", f"{name}: {item.state}, and nowhere to be found", event)
            return
        if dead is not None:
            if not self._may_be_dead(queue, item, now):
                self._bad("S1", f"{name}: dead, but it was {item.state}", event)
            self._letter(event, name, item, dead)
            item.state = "dead"
            return
        assert row is not None
        if item.state == "dead":
            self._bad("D2", f"{name}: dead, but its item is still there", event)
        elif item.state == "claimed" and not row["expires_ns"]:
            if now < item.expires_ns:
                self._bad("D2", f"{name}: the claim is gone before its time", event)
            item.state, item.expiries = "waiting", item.expiries + 1
        elif (item.state == "claimed") != bool(row["expires_ns"]):
            self._bad(
                "D2", f"{name}: {item.state}, but the row says {row['owner'] or 'free'}", event
            )
        if (row["failures"], row["expiries"]) != (item.failures, item.expiries):
            self._bad("S3", f"{name}: counts {row['failures']}, {row['expiries']} instead of "
                      f"{item.failures}, {item.expiries}", event)  # fmt: skip
        self._within_budget(queue, row, event)

    def _letter(self, event: Event, name: str, item: _Item, dead: Plain) -> None:
        """A dead letter keeps the frame, a code, the attempts and the time."""
        if not dead["blob"] and dead["payload"] != item.payload:
            self._bad("D1", f"{name}: the dead letter lost its payload", event)
        if not dead["code"] or not dead["died_ns"]:
            self._bad("D1", f"{name}: a dead letter without code or time", event)
        if dead["claims"] != item.number or dead["failures"] != item.failures:
            self._bad("D1", f"{name}: a dead letter with other attempts", event)

    def _indexes(self, event: Event, queue: str, rows: Plain) -> None:
        """Each item is in exactly one of ready, delayed, claimed; nothing else is."""
        places: dict[int, list[str]] = {}
        for name in ("ready", "delayed", "expiry"):
            for path in rows[name]:
                places.setdefault(path[-1], []).append(name)
        for seq, row in rows["items"].items():
            want = ["expiry"] if row["expires_ns"] else None
            found = places.pop(seq, [])
            if len(found) != 1 or (want and found != want) or (not want and found == ["expiry"]):
                self._bad("D2", f"{queue}/{seq}: in {' and '.join(found) or 'no index'}", event)
        for seq, found in places.items():
            self._bad("D1", f"{queue}/{seq}: no item, but in {' and '.join(found)}", event)
        owners = sorted(path[-1] for path in rows["owners"])
        if owners != sorted(path[-1] for path in rows["expiry"]):
            self._bad("D1", f"{queue}: claims by owner and by expiry differ", event)
        if sorted(path[-1] for path in rows["died"]) != sorted(rows["dead"]):
            self._bad("D1", f"{queue}: dead letters by time and by seq differ", event)

    def _count(self, event: Event, queue: str, rows: Plain) -> None:
        recount = {
            "ready": len(rows["ready"]),
            "delayed": len(rows["delayed"]),
            "claimed": len(rows["expiry"]),
            "dead": len(rows["dead"]),
            "done": self.done.get(queue, 0),
        }
        if _of_worlds(queue):
            recount["done"] = rows["counts"]["done"]  # those withdrawn are among them
        if rows["counts"] != recount:
            self._bad("S4", f"{queue}: counters {rows['counts']}, recount {recount}", event)

    # -- what is possible ------------------------------------------------------------------------

    def _may_be_dead(self, queue: str, item: _Item, now: int) -> bool:
        if item.state in ("dead", "done", "gone"):
            return item.state == "dead"
        maximum = self.budgets.get(queue, {}).get("expiries_max", 1)
        return item.state == "claimed" and now >= item.expires_ns and item.expiries + 1 >= maximum

    def _within_budget(self, queue: str, counts: Plain, event: Event) -> None:
        budget = self.budgets.get(queue, {})
        for name in ("failures", "expiries"):
            maximum = budget.get(f"{name}_max")
            if maximum is not None and counts[name] >= maximum:
                self._bad("S3", f"{queue}: alive with {counts[name]} {name} of {maximum}", event)


def _of_worlds(queue: str) -> bool:
    """Queues of a universe are filled and emptied by worlds, inside their commits."""
    return "/" in queue


def _of_failures(queue: str) -> bool:
    """Events that a reducer raised on: see check_worlds."""
    return queue.endswith(FAILURES)


_STEPS: dict[str, Callable[[_Replay, Event], None]] = {
    "queue.put": _Replay._put,
    "queue.put_many": _Replay._put_many,
    "queue.redrive": _Replay._redrive,
    "queue.claim": _Replay._claim,
    "queue.ack": _Replay._ack,
    "queue.settle": _Replay._settle,
    "queue.fail": _Replay._fail,
    "queue.bury": _Replay._bury,
    "queue.release": _Replay._release,
    "queue.extend": _Replay._extend,
    "queue.reap": _Replay._reap,
    "queue.purge_dead": _Replay._purge_dead,
    "claims.take": _Replay._take,
    "claims.hand_back": _Replay._give_back,
    "commit": _Replay._carried,
}


def findings(history: History) -> list[Violation]:
    found: list[Violation] = []
    for life in history.lives():
        replay = _Replay(history.config("budgets", {}))
        for event in expanded(life):
            replay.step(event)
        found += replay.found
    return found
