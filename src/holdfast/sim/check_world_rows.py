"""The rows of an audit against the model of a universe: what is written is what should be.

an entry      is what was committed, chained to the one before
a snapshot    is the model's state at its height
a fork        has its lineage, and nothing that its parent was sent
a hint        lies where it is looked for, for every world that has work
who leads     is what the log of authority says

What became of intents is compared in `check_intents`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from holdfast.sim import check_app
from holdfast.sim.history import Event
from holdfast.sim.model_worlds import FAILURES, Model, World, id_of
from holdfast.sim.violation import Violation

Plain = dict[str, Any]

# Keys of failed events that were delivered again.
REDRIVEN = "redrive:"
DECISION = ("kind", "owner", "incarnation", "lease_id", "generation", "epoch", "decided_ns",
            "leased_until_ns")  # fmt: skip
# The authority's moves: what may come before, what is after.
_BEFORE = {
    "acquired": ("free", "stale"),
    "renewed": ("held",),
    "marked_stale": ("held",),
    "released": ("held", "stale"),
    "force_released": ("free", "held", "stale"),
}
_AFTER = {
    "acquired": "held",
    "renewed": "held",
    "marked_stale": "stale",
    "released": "free",
    "force_released": "free",
}


class Comparison:
    """One audit. What differs from the model is in `found`."""

    def __init__(self, model: Model, event: Event) -> None:
        self.model = model
        self.event = event
        self.found: list[Violation] = []

    def _bad(self, number: str, what: str) -> None:
        self.found.append(Violation(number, what, self.event))

    def compare(self) -> None:
        for universe, found in self.event.value.get("worlds", {}).items():
            rows = Rows(universe, self.event.value)
            for world_id, record in found["records"].items():
                subject = f"{universe}/{world_id}"
                world = self.model.world(subject)
                world.name = record["name"]
                self._lineage(subject, world, record)
                if world.erasable(self.event.at_ns):
                    continue
                self._inbox(subject, world, rows)
                self._journal(subject, world, rows)
                self._snapshots(subject, world, rows)
                self._hint(subject, world, record, found, rows)
            self._erased(universe, found, rows)
            self._authority(universe, rows)
            self._indexes(universe, found)
            self._failures(universe, rows)

    def _erased(self, universe: str, found: Plain, rows: Rows) -> None:
        """The record of a world goes last, after all of its rows, and not before its time."""
        for subject, world in self.model.worlds.items():
            mine = subject.startswith(f"{universe}/") and world.world_id not in found["records"]
            if mine and world.erasable(self.event.at_ns):
                if left := rows.left(subject, world.world_id, found):
                    self._bad("S4", f"{subject}: erased, and left: {left}")
            elif mine and world.bodies:
                self._bad("J2", f"{subject}: {world.height} entries, and the world is gone")

    def _lineage(self, subject: str, world: World, record: Plain) -> None:
        if (record["lineage"] is not None) != world.forked:
            self._bad("K1", f"{subject}: lineage {record['lineage']}, forked {world.forked}")
        elif world.forked and record["lineage"]["forked_at_height"] != world.base:
            self._bad("K1", f"{subject}: the lineage names another height")

    def _inbox(self, subject: str, world: World, rows: Rows) -> None:
        inbox = rows.inbox(subject)
        cursor, last = inbox["cursor"], inbox["last_seq"]
        if cursor != world.cursor:
            self._bad("I2", f"{subject}: the cursor is {cursor}, {world.cursor} journaled")
        journaled = Counter(step["seq"] for step in world.steps)
        for seq, (_, body) in world.delivered.items():
            row = inbox["rows"].get(seq)
            lost = "I1" if seq in world.known else "I4"
            if journaled[seq] > 1:
                self._bad("I1", f"{subject}/{seq}: journaled {journaled[seq]} times")
            if seq <= cursor and not journaled[seq]:
                self._bad("I3", f"{subject}/{seq}: below the cursor, not in the journal")
            elif seq > cursor and row is None:
                self._bad(lost, f"{subject}/{seq}: delivered, and lost")
            elif row is not None and rows.ingress(row) != body:
                self._bad("I1", f"{subject}/{seq}: delivered with another body")
        for seq, row in inbox["rows"].items():
            if seq <= cursor:
                self._bad("I3", f"{subject}/{seq}: below the cursor, and still there")
            elif seq not in world.delivered and self._unsent(rows, row):
                number = "K1" if world.forked else "I4"
                self._bad(number, f"{subject}/{seq}: there, but nobody delivered it")
        if sorted(inbox["rows"]) != list(range(cursor + 1, last + 1)):
            self._bad("I3", f"{subject}: {sorted(inbox['rows'])} after {cursor}")
        self._once(subject, world, rows)

    def _unsent(self, rows: Rows, row: Plain) -> bool:
        """Whether it is an event of a sender. Mail, timers and receipts belong to intents."""
        kind = rows.ingress(row)[0]
        return kind == "event" and not str(row["key"]).startswith(REDRIVEN)

    def _once(self, subject: str, world: World, rows: Rows) -> None:
        """Every message has a name of its own: it is here once, and once more for each redrive."""
        ids = Counter(id_of(step["ingress"]) for step in world.steps)
        for row in rows.inbox(subject)["rows"].values():
            ids[id_of(dict(zip(check_app.INGRESS, rows.ingress(row), strict=True)))] += 1
        for id, times in ids.items():
            if id and times > 1 + world.redriven[id]:
                self._bad("I1", f"{subject}: {id} is there {times} times")

    def _journal(self, subject: str, world: World, rows: Rows) -> None:
        head, entries, doubled = rows.journal(subject)
        if head is None:
            if world.bodies:
                self._bad("J2", f"{subject}: {world.height} entries, and no journal")
            return
        if head["height"] != world.height:
            self._bad("J2", f"{subject}: the head is {head['height']}, not {world.height}")
        # Below the floor rows are on their way out. What is left of them is what was committed.
        floor = head["floor"]
        above = sorted(height for height in entries if height >= floor)
        if above != list(range(floor, head["height"] + 1)) or doubled:
            self._bad("J2", f"{subject}: heights {sorted(entries)}, twice {doubled}")
            return
        last = head["below"]
        if floor - 1 in entries and entries[floor - 1]["hash"] != last:
            self._bad("J2", f"{subject}: the floor {floor} stands on another entry")
        for height, entry in sorted(entries.items()):
            body, at = rows.body(entry), height - world.base - 1
            if not 0 <= at < len(world.bodies) or world.bodies[at] != body:
                self._bad("J2", f"{subject}: entry {height} is not what was committed")
            if height < floor:
                continue
            last = _link(last, height, entry)
            if last != entry["hash"]:
                self._bad("J2", f"{subject}: the chain is broken at {height}")
        if last != head["hash"]:
            self._bad("J2", f"{subject}: the head's hash is not the last entry's")

    def _snapshots(self, subject: str, world: World, rows: Rows) -> None:
        saved, baseline = rows.snapshots(subject)
        for height, row in saved.items():
            state = world.state_at(height)
            if state is None:
                self._bad("J3", f"{subject}: a snapshot at {height}, beyond the journal")
            elif rows.state(row) not in _stored(world, height, state):
                number = "K1" if world.forked and height == world.base else "J3"
                text = f"{subject}: the snapshot at {height} is not the journal's state"
                self._bad(number, text)
        floor = (rows.journal(subject)[0] or {"floor": 1})["floor"]
        if baseline is not None and baseline["height"] not in saved:
            self._bad("J4", f"{subject}: the baseline {baseline['height']} is gone")
        if floor > 1 and (baseline is None or floor > baseline["height"] + 1):
            self._bad("J4", f"{subject}: cut off at {floor}, baseline {baseline}")
        if floor > 1 and floor - 1 not in saved:
            self._bad("J4", f"{subject}: cut off at {floor}, and no state to begin with")
        self._bound(subject, world, floor)

    def _bound(self, subject: str, world: World, floor: int) -> None:
        """A journal begins where it began, or above what its bound lets go of."""
        keep, cut = self.model.keep, floor - world.base - 1
        if keep is None or not 0 < cut <= len(world.times):
            return
        if not keep or world.trimmed is None:
            self._bad("J4", f"{subject}: cut off at {floor}, and nothing says so")
            return
        height, now_ns = world.trimmed
        if floor - 1 > height - keep["entries"]:
            self._bad("J4", f"{subject}: cut off at {floor} when it was at {height}")
        if world.times[cut - 1] > now_ns - keep["ns"]:
            self._bad("J4", f"{subject}: cut off at {floor}, which was too young")

    def _hint(self, subject: str, world: World, record: Plain, found: Plain, rows: Rows) -> None:
        """A world that has work is hinted to whoever looks for it: its worker, or the leader."""
        if record["status"] != "active" or not rows.inbox(subject)["rows"]:
            return
        unknown = record.get("unknown")
        if unknown is not None and unknown["waits"]:
            if world.world_id not in found["stopped"]:
                self._bad("R3", f"{subject}: waits for code, and is not listed")
            return
        assigned = found["assignments"].get(world.world_id)
        worker = "" if assigned is None else assigned["desired_worker_id"] or ""
        if [worker, world.world_id] not in found["hints"]:
            self._bad("R3", f"{subject}: has work, and no hint with {worker or 'nobody'}")

    def _indexes(self, universe: str, found: Plain) -> None:
        recount = Counter(record["status"] for record in found["records"].values())
        if {name: n for name, n in found["counts"].items() if n} != dict(recount):
            self._bad("S4", f"{universe}: counts {found['counts']}, recount {recount}")
        assigned = [[a["desired_worker_id"], w] for w, a in found["assignments"].items()]
        if sorted(found["by_worker"]) != sorted(assigned):
            self._bad("S4", f"{universe}: worlds by worker and assignments differ")
        named = {
            f"{record['type']}/{record['name']}": world_id
            for world_id, record in found["records"].items()
            if record["status"] != "deleted"
        }
        if named != found["names"]:
            self._bad("S4", f"{universe}: names and records differ")

    def _authority(self, universe: str, rows: Rows) -> None:
        """Who leads is what the log of decisions says."""
        subject = f"{universe}/authority"
        told: Plain = {"state": "free", "epoch": 0}
        for _, entry in sorted(rows.journal(subject)[1].items()):
            decision = check_app.read(DECISION, entry["body"])
            kind = decision["kind"]
            if told["state"] not in _BEFORE[kind]:
                self._bad("J5", f"{subject}: {kind} while {told['state']}")
            if kind in ("acquired", "renewed"):
                told = {name: decision[name] for name in DECISION[1:]}
            told["state"] = _AFTER[kind]
        lease = rows.lease(subject)
        right = [lease["state"], lease["epoch"]]
        found = [told["state"], told["epoch"]]
        if lease["state"] != "free":
            right += [lease["worker"], lease["incarnation"], lease["expires_ns"]]
            found += [told.get(name) for name in ("owner", "incarnation", "leased_until_ns")]
        if found != right:
            self._bad("J5", f"{subject}: the log says {found}, the lease {right}")

    def _failures(self, universe: str, rows: Rows) -> None:
        failed = Counter(
            (subject, step["seq"])
            for subject, world in self.model.worlds.items()
            if subject.startswith(f"{universe}/") and not world.erasable(self.event.at_ns)
            for step in world.steps
            if step["outcome"] in ("failed", "unknown")
        )
        letters = {
            n: letter
            for n, letter in self.model.letters.items()
            if letter[0].startswith(f"{universe}/")
            and not self.model.world(letter[0]).erasable(self.event.at_ns)
        }
        posted = Counter(
            (subject, seq)
            for n, (subject, seq, _) in letters.items()
            if n not in self.model.redriven
        )
        again = {letters[n][:2] for n in self.model.redriven if n in letters}
        for place in {*failed, *posted}:
            if place not in again and failed[place] != posted[place]:
                self._bad("D1", f"{place}: failed {failed[place]}, posted {posted[place]}")
        dead = rows.queue(f"{universe}/{FAILURES}")["dead"]
        for n in letters:
            if n not in self.model.redriven and n not in dead:
                self._bad("D1", f"{universe}: failed event {n} is gone")


class Rows:
    """One audit, by subject."""

    def __init__(self, universe: str, value: Plain) -> None:
        self._universe = f"{universe}/"
        self._value = value

    def inbox(self, subject: str) -> Plain:
        empty: Plain = {"rows": {}, "cursor": 0, "last_seq": 0}
        found: Plain = self._value["inboxes"].get(subject, empty)
        return found

    def journal(self, subject: str) -> tuple[Plain | None, dict[int, Plain], list[int]]:
        found = self._value["journals"].get(subject, {"head": None, "entries": {}})
        return found["head"], found["entries"], found.get("doubled", [])

    def snapshots(self, subject: str) -> tuple[dict[int, Plain], Plain | None]:
        found = self._value["snapshots"].get(subject, {"states": {}, "baseline": None})
        return found["states"], found["baseline"]

    def left(self, subject: str, world_id: str, found: Plain) -> list[str]:
        """Which rows there are of a world, its record aside."""
        spaces = ("journals", "inboxes", "snapshots", "leases")
        return [
            *(space for space in spaces if self._value[space].get(subject)),
            *("slots" for row in found.get("slots", ()) if row["world_id"] == world_id),
            *(
                "pending"
                for row in found.get("pending", {}).values()
                if row["world_id"] == world_id
            ),
        ]

    def lease(self, resource: str) -> Plain:
        found: Plain = self._value["leases"].get(resource, {"state": "free", "epoch": 0})
        return found

    def queue(self, name: str) -> Plain:
        found: Plain = self._value["queues"].get(name, {"items": {}, "dead": {}})
        return found

    def body(self, row: Plain, field: str = "body") -> bytes:
        found: bytes = (
            self._value["blobs"]["data"][row["blob"].hex()] if row["blob"] else row[field]
        )
        return found

    def state(self, row: Plain) -> bytes:
        found: bytes | None = row["state"]
        if found is None:
            found = self._value["blobs"]["data"][row["hash"].hex()]
        assert found is not None
        return found

    def ingress(self, row: Plain) -> list[Any]:
        return list(check_app.read(check_app.INGRESS, self.body(row)).values())


def _stored(world: World, height: int, state: Plain) -> list[bytes]:
    """The bytes that a snapshot may have: those of the code that made the entry. What a fork began with
    was written by either code."""
    if height > world.base:
        return [check_app.stored(state, world.code_at(height))]
    former = [] if state["news"] else [check_app.stored(state, check_app.FORMER)]
    return [check_app.stored(state), *former]


def _link(last: bytes, height: int, entry: Plain) -> bytes:
    at = height.to_bytes(8, "big") + entry["at_ns"].to_bytes(8, "big", signed=True)
    kind = b"\x01" if entry["blob"] else b"\x00"
    return hashlib.sha256(last + at + kind + (entry["blob"] or entry["body"])).digest()
