"""Comparison of the rows of an audit with the model of a universe.

    an entry      equals the committed one and is chained to its predecessor
    a snapshot    is the model's state at its height
    a fork        has its lineage, and nothing that was sent to its parent
    a hint        marks every world with work as runnable, for its worker or the leader
    the leader    is the one that the leader lease log names

`check_intents` compares the intents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from holdfast.sim.history import HistoryEvent
from tests.simulation import model_app
from tests.simulation.model_worlds import FAILED_EVENTS_QUEUE, UniverseModel, WorldModel, message_id
from tests.simulation.violation import Violation

Plain = dict[str, Any]

# Prefix of the keys of redelivered failed events.
REDRIVEN = "redrive:"
LEADER_DECISION = ("kind", "owner", "incarnation", "lease_id", "generation", "epoch", "decided_ns",
            "leased_until_ns")  # fmt: skip
# Transitions of the leader lease: legal states before, and the state after.
_LEGAL_BEFORE = {
    "acquired": ("free", "stale"),
    "renewed": ("held",),
    "marked_stale": ("held",),
    "released": ("held", "stale"),
    "force_released": ("free", "held", "stale"),
}
_STATE_AFTER = {
    "acquired": "held",
    "renewed": "held",
    "marked_stale": "stale",
    "released": "free",
    "force_released": "free",
}


class WorldComparison:
    """Compares one audit with the model. Differences are in `found`."""

    def __init__(self, model: UniverseModel, event: HistoryEvent) -> None:
        self.model = model
        self.event = event
        self.found: list[Violation] = []

    def _add_violation(self, number: str, what: str) -> None:
        self.found.append(Violation(number, what, self.event))

    def compare(self) -> None:
        for universe, found in self.event.value.get("worlds", {}).items():
            rows = AuditRows(universe, self.event.value)
            for world_id, record in found["records"].items():
                subject = f"{universe}/{world_id}"
                world = self.model.world(subject)
                world.name = record["name"]
                self._check_lineage(subject, world, record)
                if world.may_be_erased(self.event.at_ns):
                    continue
                self._check_inbox(subject, world, rows)
                self._check_journal(subject, world, rows)
                self._check_snapshots(subject, world, rows)
                self._check_runnable(subject, world, record, found, rows)
            self._check_erased(universe, found, rows)
            self._check_leader_lease(universe, rows)
            self._check_indexes(universe, found)
            self._check_failed_events(universe, rows)

    def _check_erased(self, universe: str, found: Plain, rows: AuditRows) -> None:
        """Check that the record of a world is erased last, after all its other rows, and not
        early."""
        for subject, world in self.model.worlds.items():
            mine = subject.startswith(f"{universe}/") and world.world_id not in found["records"]
            if mine and world.may_be_erased(self.event.at_ns):
                if remaining := rows.remaining_spaces(subject, world.world_id, found):
                    self._add_violation("S4", f"{subject}: erased, and left: {remaining}")
            elif mine and world.bodies:
                self._add_violation(
                    "J2", f"{subject}: {world.height} entries, and the world is gone"
                )

    def _check_lineage(self, subject: str, world: WorldModel, record: Plain) -> None:
        if (record["lineage"] is not None) != world.forked:
            self._add_violation(
                "K1", f"{subject}: lineage {record['lineage']}, forked {world.forked}"
            )
        elif world.forked and record["lineage"]["forked_at_height"] != world.base:
            self._add_violation("K1", f"{subject}: the lineage names another height")

    def _check_inbox(self, subject: str, world: WorldModel, rows: AuditRows) -> None:
        inbox = rows.inbox(subject)
        cursor, last = inbox["cursor"], inbox["last_seq"]
        if cursor != world.cursor:
            self._add_violation(
                "I2", f"{subject}: the cursor is {cursor}, {world.cursor} journaled"
            )
        journaled = Counter(step["seq"] for step in world.steps)
        for seq, (_, body) in world.delivered.items():
            row = inbox["rows"].get(seq)
            lost = "I1" if seq in world.acknowledged else "I4"
            if journaled[seq] > 1:
                self._add_violation("I1", f"{subject}/{seq}: journaled {journaled[seq]} times")
            if seq <= cursor and not journaled[seq]:
                self._add_violation("I3", f"{subject}/{seq}: below the cursor, not in the journal")
            elif seq > cursor and row is None:
                self._add_violation(lost, f"{subject}/{seq}: delivered, and lost")
            elif row is not None and rows.ingress(row) != body:
                self._add_violation("I1", f"{subject}/{seq}: delivered with another body")
        for seq, row in inbox["rows"].items():
            if seq <= cursor:
                self._add_violation("I3", f"{subject}/{seq}: below the cursor, and still there")
            elif seq not in world.delivered and self._is_sender_event(rows, row):
                number = "K1" if world.forked else "I4"
                self._add_violation(number, f"{subject}/{seq}: in the inbox, but never delivered")
        if sorted(inbox["rows"]) != list(range(cursor + 1, last + 1)):
            self._add_violation("I3", f"{subject}: {sorted(inbox['rows'])} after {cursor}")
        self._check_duplicates(subject, world, rows)

    def _is_sender_event(self, rows: AuditRows, row: Plain) -> bool:
        """Whether it is a sender's event. Mail, timers and receipts belong to intents."""
        kind = rows.ingress(row)[0]
        return kind == "event" and not str(row["key"]).startswith(REDRIVEN)

    def _check_duplicates(self, subject: str, world: WorldModel, rows: AuditRows) -> None:
        """Check that each message, identified by its id, is present once, plus once for each
        redrive."""
        ids = Counter(message_id(step["ingress"]) for step in world.steps)
        for row in rows.inbox(subject)["rows"].values():
            ids[message_id(dict(zip(model_app.INGRESS, rows.ingress(row), strict=True)))] += 1
        for id, times in ids.items():
            if id and times > 1 + world.redriven[id]:
                self._add_violation("I1", f"{subject}: {id} is there {times} times")

    def _check_journal(self, subject: str, world: WorldModel, rows: AuditRows) -> None:
        head, entries, doubled = rows.journal(subject)
        if head is None:
            if world.bodies:
                self._add_violation("J2", f"{subject}: {world.height} entries, and no journal")
            return
        if head["height"] != world.height:
            self._add_violation(
                "J2", f"{subject}: the head is {head['height']}, not {world.height}"
            )
        # Rows below the floor are being removed. The remaining ones must equal the committed
        # entries.
        floor = head["floor"]
        above = sorted(height for height in entries if height >= floor)
        if above != list(range(floor, head["height"] + 1)) or doubled:
            self._add_violation("J2", f"{subject}: heights {sorted(entries)}, twice {doubled}")
            return
        last = head["below"]
        if floor - 1 in entries and entries[floor - 1]["hash"] != last:
            self._add_violation(
                "J2", f"{subject}: the hash below floor {floor} differs from its entry"
            )
        for height, entry in sorted(entries.items()):
            body, at = rows.body(entry), height - world.base - 1
            if not 0 <= at < len(world.bodies) or world.bodies[at] != body:
                self._add_violation(
                    "J2", f"{subject}: entry {height} differs from the committed one"
                )
            if height < floor:
                continue
            last = _chain_hash(last, height, entry)
            if last != entry["hash"]:
                self._add_violation("J2", f"{subject}: the chain is broken at {height}")
        if last != head["hash"]:
            self._add_violation("J2", f"{subject}: the head's hash is not the last entry's")

    def _check_snapshots(self, subject: str, world: WorldModel, rows: AuditRows) -> None:
        saved, baseline = rows.snapshots(subject)
        for height, row in saved.items():
            state = world.state_at(height)
            if state is None:
                self._add_violation("J3", f"{subject}: a snapshot at {height}, beyond the journal")
            elif rows.state(row) not in _possible_snapshots(world, height, state):
                number = "K1" if world.forked and height == world.base else "J3"
                text = f"{subject}: the snapshot at {height} is not the journal's state"
                self._add_violation(number, text)
        floor = (rows.journal(subject)[0] or {"floor": 1})["floor"]
        if baseline is not None and baseline["height"] not in saved:
            self._add_violation("J4", f"{subject}: the baseline {baseline['height']} is gone")
        if floor > 1 and (baseline is None or floor > baseline["height"] + 1):
            self._add_violation("J4", f"{subject}: cut off at {floor}, baseline {baseline}")
        if floor > 1 and floor - 1 not in saved:
            self._add_violation("J4", f"{subject}: cut off at {floor}, and no state to begin with")
        self._check_history_bound(subject, world, floor)

    def _check_history_bound(self, subject: str, world: WorldModel, floor: int) -> None:
        """Check that a journal was trimmed no further than its history bound allows."""
        keep, cut = self.model.history_bound, floor - world.base - 1
        if keep is None or not 0 < cut <= len(world.times):
            return
        if not keep or world.last_trim is None:
            self._add_violation("J4", f"{subject}: trimmed to {floor} without a bound")
            return
        height, now_ns = world.last_trim
        if floor - 1 > height - keep["entries"]:
            self._add_violation("J4", f"{subject}: cut off at {floor} when it was at {height}")
        if world.times[cut - 1] > now_ns - keep["ns"]:
            self._add_violation("J4", f"{subject}: cut off at {floor}, which was too young")

    def _check_runnable(
        self, subject: str, world: WorldModel, record: Plain, found: Plain, rows: AuditRows
    ) -> None:
        """Check that a world with work is marked runnable for its worker or the leader."""
        if record["status"] != "active" or not rows.inbox(subject)["rows"]:
            return
        unknown = record.get("unknown")
        if unknown is not None and unknown["waits"]:
            if world.world_id not in found["stopped"]:
                self._add_violation("R3", f"{subject}: waits for code, but is not listed")
            return
        assigned = found["assignments"].get(world.world_id)
        worker = "" if assigned is None else assigned["desired_worker_id"] or ""
        if [worker, world.world_id] not in found["hints"]:
            self._add_violation(
                "R3",
                f"{subject}: has work, but is not marked runnable for {worker or 'the leader'}",
            )

    def _check_indexes(self, universe: str, found: Plain) -> None:
        recount = Counter(record["status"] for record in found["records"].values())
        if {name: n for name, n in found["counts"].items() if n} != dict(recount):
            self._add_violation("S4", f"{universe}: counts {found['counts']}, recount {recount}")
        assigned = [[a["desired_worker_id"], w] for w, a in found["assignments"].items()]
        if sorted(found["by_worker"]) != sorted(assigned):
            self._add_violation("S4", f"{universe}: worlds by worker and assignments differ")
        named = {
            f"{record['type']}/{record['name']}": world_id
            for world_id, record in found["records"].items()
            if record["status"] != "deleted"
        }
        if named != found["names"]:
            self._add_violation("S4", f"{universe}: names and records differ")

    def _check_leader_lease(self, universe: str, rows: AuditRows) -> None:
        """Check the leader lease against its log."""
        subject = f"{universe}/authority"
        state: Plain = {"state": "free", "epoch": 0}
        for _, entry in sorted(rows.journal(subject)[1].items()):
            decision = model_app.read_record(LEADER_DECISION, entry["body"])
            kind = decision["kind"]
            if state["state"] not in _LEGAL_BEFORE[kind]:
                self._add_violation("J5", f"{subject}: {kind} while {state['state']}")
            if kind in ("acquired", "renewed"):
                state = {name: decision[name] for name in LEADER_DECISION[1:]}
            state["state"] = _STATE_AFTER[kind]
        lease = rows.lease(subject)
        right = [lease["state"], lease["epoch"]]
        found = [state["state"], state["epoch"]]
        if lease["state"] != "free":
            right += [lease["worker"], lease["incarnation"], lease["expires_ns"]]
            found += [state.get(name) for name in ("owner", "incarnation", "leased_until_ns")]
        if found != right:
            self._add_violation("J5", f"{subject}: the log implies {found}, the lease is {right}")

    def _check_failed_events(self, universe: str, rows: AuditRows) -> None:
        failed = Counter(
            (subject, step["seq"])
            for subject, world in self.model.worlds.items()
            if subject.startswith(f"{universe}/") and not world.may_be_erased(self.event.at_ns)
            for step in world.steps
            if step["outcome"] in ("failed", "unknown")
        )
        letters = {
            n: letter
            for n, letter in self.model.failed_events.items()
            if letter[0].startswith(f"{universe}/")
            and not self.model.world(letter[0]).may_be_erased(self.event.at_ns)
        }
        posted = Counter(
            (subject, seq)
            for n, (subject, seq, _) in letters.items()
            if n not in self.model.redriven
        )
        again = {letters[n][:2] for n in self.model.redriven if n in letters}
        for place in {*failed, *posted}:
            if place not in again and failed[place] != posted[place]:
                self._add_violation(
                    "D1", f"{place}: failed {failed[place]}, posted {posted[place]}"
                )
        dead = rows.queue(f"{universe}/{FAILED_EVENTS_QUEUE}")["dead"]
        for n in letters:
            if n not in self.model.redriven and n not in dead:
                self._add_violation("D1", f"{universe}: failed event {n} is gone")


class AuditRows:
    """Accessor to the rows of one audit, by subject."""

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

    def remaining_spaces(self, subject: str, world_id: str, found: Plain) -> list[str]:
        """Names of the key spaces that hold rows of a world, except its record."""
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
        return list(model_app.read_record(model_app.INGRESS, self.body(row)).values())


def _possible_snapshots(world: WorldModel, height: int, state: Plain) -> list[bytes]:
    """Possible bytes of a snapshot: as the code version of its entry writes them. Either version
    may have written the initial state of a fork."""
    if height > world.base:
        return [model_app.snapshot_bytes(state, world.code_at(height))]
    former = [] if state["news"] else [model_app.snapshot_bytes(state, model_app.FORMER)]
    return [model_app.snapshot_bytes(state), *former]


def _chain_hash(last: bytes, height: int, entry: Plain) -> bytes:
    at = height.to_bytes(8, "big") + entry["at_ns"].to_bytes(8, "big", signed=True)
    kind = b"\x01" if entry["blob"] else b"\x00"
    return hashlib.sha256(last + at + kind + (entry["blob"] or entry["body"])).digest()
