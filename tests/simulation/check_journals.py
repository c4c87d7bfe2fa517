"""Checkers of journals, inboxes, snapshots, keys, blobs and boot: J1 J2 J4 I1 to I5 D3 S4 B1.

The model is the expected history of a world: ingress in delivery order, the journal made of it, and
the state folded from that journal. `fold` reimplements the reducer of the simulated host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.sim.history import History, HistoryEvent
from tests.simulation.violation import Violation

Plain = dict[str, Any]

_decode = msgspec.msgpack.Decoder().decode


def fold(state: bytes, body: bytes) -> bytes:
    return hashlib.sha256(state + body).digest()


@dataclass(slots=True)
class _JournalModel:
    delivered: dict[int, Plain] = field(default_factory=dict)  # seq → key, body, acknowledged
    journal: list[tuple[int, bytes]] = field(default_factory=list)  # (ingress seq, entry body)
    states: list[bytes] = field(default_factory=lambda: [b""])
    cursor: int = 0
    # key → its first use
    keys: dict[str, Plain] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return len(self.journal)


class _JournalReplay:
    """Replays the journal and inbox operations of one life of the store."""

    def __init__(self, config: Plain) -> None:
        self.worlds: dict[str, _JournalModel] = {}
        self.found: list[Violation] = []
        self._retention_ns = config.get("retention_ns", 0)
        self._collected = False
        self.registers: dict[str, int] = {}
        self._applied: dict[tuple[str, str, int], int] = {}

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            self._audit(event)
        elif event.applied:
            self._check_applied_once(event)
            if event.op in _STEPS:
                _STEPS[event.op](self, event)

    def _check_applied_once(self, event: HistoryEvent) -> None:
        """Check that a resent transaction is applied once."""
        name = (event.actor, event.incarnation, event.txn_no)
        if event.txn_no and self._applied.setdefault(name, event.commit_no) != event.commit_no:
            self._add_violation("I4", f"{event.op}: one transaction applied twice", event)

    def _add_violation(self, number: str, what: str, event: HistoryEvent) -> None:
        self.found.append(Violation(number, what, event))

    def _world(self, name: str) -> _JournalModel:
        return self.worlds.setdefault(name, _JournalModel())

    # -- ingress ---------------------------------------------------------------------------------

    def _put(self, event: HistoryEvent) -> None:
        args = event.args
        issued = args.get("issued_ns")
        self._delivered(event, args["world"], args["key"], args["body"], event.value, issued)

    def _put_many(self, event: HistoryEvent) -> None:
        for (world, key, body), value in zip(event.args["items"], event.value, strict=True):
            self._delivered(event, world, key, body, value, None)

    def _delivered(
        self,
        event: HistoryEvent,
        name: str,
        key: str | None,
        body: bytes,
        value: Plain,
        issued: int | None,
    ) -> None:
        world, seq = self._world(name), value["seq"]
        if key is not None:
            self._check_key(event, name, world, key, body, value, issued)
        if not value["already"]:
            if seq in world.delivered:
                self._add_violation("I1", f"{name}/{seq}: a sequence number was given twice", event)
            world.delivered[seq] = {"key": key, "body": body}
        if event.result == "ok" and seq in world.delivered:
            world.delivered[seq]["acknowledged"] = True

    def _check_key(
        self,
        event: HistoryEvent,
        name: str,
        world: _JournalModel,
        key: str,
        body: bytes,
        value: Plain,
        issued: int | None,
    ) -> None:
        """Check that a key within its retention always refers to its first use."""
        first = world.keys.get(key)
        time_ns = event.at_ns if issued is None else issued
        if first is not None and event.at_ns - first["time_ns"] <= self._retention_ns:
            if first["body"] != body:
                self._add_violation("I5", f"{name}: key {key!r} was taken with another body", event)
            elif first["seq"] != value["seq"]:
                number = "D3" if self._collected else "I4"
                self._add_violation(
                    number, f"{name}: key {key!r} is {value['seq']}, was {first['seq']}", event
                )
            elif not value["already"]:
                self._add_violation(
                    "I4", f"{name}: key {key!r} delivered again under its seq", event
                )
        elif first is not None and issued is not None and not value["already"]:
            # A key issued by the runtime carries its time of issue. A late one is refused, never
            # treated as new.
            self._add_violation(
                "D3", f"{name}: key {key!r} expired, but was accepted as new", event
            )
        if first is None or not value["already"]:
            world.keys[key] = {"body": body, "seq": value["seq"], "time_ns": time_ns}

    def _collect(self, event: HistoryEvent) -> None:
        self._collected = self._collected or event.value > 0

    # -- the host --------------------------------------------------------------------------------

    def _cycle(self, event: HistoryEvent) -> None:
        args = event.args
        name = args["world"]
        world = self._world(name)
        if args["expected_head"] != world.height:
            self._add_violation(
                "J2", f"{name}: appended on {args['expected_head']}, at {world.height}", event
            )
        for seq, key, body in args["ingress"]:
            if seq != world.cursor + 1:
                self._add_violation(
                    "I2", f"{name}: ingress {seq} journaled after {world.cursor}", event
                )
            put = world.delivered.get(seq)
            if put is None or (put["key"], put["body"]) != (key, body):
                self._add_violation("I4", f"{name}/{seq}: journaled, but never delivered", event)
            entry = msgspec.msgpack.encode([seq, key, body])
            world.journal.append((seq, entry))
            world.states.append(fold(world.states[-1], entry))
            world.cursor = max(seq, world.cursor)

    def _append(self, event: HistoryEvent) -> None:
        """Check an append without a lease. Its expected head must still be current."""
        name = event.args["subject"]
        world = self._world(name)
        if event.value != world.height + 1:
            self._add_violation(
                "J2", f"{name}: entry {event.value} written on {world.height}", event
            )
        entry = event.args.get("body", b"")
        world.journal.append((0, entry))
        world.states.append(fold(world.states[-1], entry))

    def _register(self, event: HistoryEvent) -> None:
        name = event.args["subject"]
        number = self.registers.get(name, 0) + 1
        if event.value != number:
            self._add_violation(
                "J2", f"{name}: number {event.value} given instead of {number}", event
            )
        self.registers[name] = max(number, event.value)

    def _snapshot(self, event: HistoryEvent) -> None:
        name, height = event.args["world"], event.args["height"]
        world = self._world(name)
        if height > world.height or event.args["state"] != world.states[height]:
            self._add_violation(
                "J4", f"{name}: the snapshot at {height} differs from the journal", event
            )

    def _claimed(self, event: HistoryEvent) -> None:
        claims = event.value if isinstance(event.value, list) else event.value["items"]
        for claim in claims:
            if claim["queue"] == "fx" and not claim["blob"]:
                self._effect(event, claim["payload"])

    def _effect(self, event: HistoryEvent, payload: bytes) -> None:
        name, height = _decode(payload)[:2]
        if height > self._world(name).height:
            self._add_violation(
                "J1", f"{name}: an effect of entry {height}, which is not journaled", event
            )

    # -- against the rows ------------------------------------------------------------------------

    def _audit(self, event: HistoryEvent) -> None:
        rows = event.value
        for name in {*self.worlds, *rows["inboxes"], *rows["journals"]}:
            if "/" in name:
                continue  # a subject of a universe: see check_worlds
            world = self._world(name)
            inbox = rows["inboxes"].get(name, {"rows": {}, "cursor": 0, "last_seq": 0})
            journal = rows["journals"].get(name, {"head": None, "entries": {}})
            snapshots = rows["snapshots"].get(name, {"states": {}, "baseline": None})
            self._check_inbox(event, name, world, inbox)
            self._check_journal(event, name, world, journal, snapshots)
        for row in rows["queues"].get("fx", {"items": {}})["items"].values():
            if not row["blob"]:
                self._effect(event, row["payload"])
        self._check_counters(event, rows)

    def _check_inbox(
        self, event: HistoryEvent, name: str, world: _JournalModel, inbox: Plain
    ) -> None:
        cursor = inbox["cursor"]
        if cursor != world.cursor:
            self._add_violation(
                "I2", f"{name}: the cursor is {cursor}, {world.cursor} was consumed", event
            )
        if cursor > inbox["last_seq"]:
            self._add_violation("I2", f"{name}: the cursor is above the last number given", event)
        journaled = [seq for seq, _ in world.journal]
        times = {seq: journaled.count(seq) for seq in set(journaled)}
        for seq, put in world.delivered.items():
            row = inbox["rows"].get(seq)
            known = put.get("acknowledged")
            if seq <= cursor:
                if times.get(seq, 0) == 0:
                    self._add_violation(
                        "I3", f"{name}/{seq}: below the cursor, not in the journal", event
                    )
                elif times[seq] > 1:
                    self._add_violation(
                        "I1" if known else "I4", f"{name}/{seq}: journaled twice", event
                    )
                if row is not None:
                    self._add_violation(
                        "I3", f"{name}/{seq}: below the cursor, and still there", event
                    )
            elif row is None:
                self._add_violation(
                    "I1" if known else "I4", f"{name}/{seq}: delivered, and lost", event
                )
            elif not row["blob"] and row["body"] != put["body"]:
                self._add_violation("I1", f"{name}/{seq}: delivered with another body", event)
        for seq in inbox["rows"]:
            if seq not in world.delivered:
                self._add_violation("I4", f"{name}/{seq}: in the inbox, but never delivered", event)

    def _check_journal(
        self, event: HistoryEvent, name: str, world: _JournalModel, journal: Plain, snapshots: Plain
    ) -> None:
        head = journal["head"] or {"height": 0, "floor": 1, "checkpoint": 0}
        if head["height"] != world.height:
            self._add_violation(
                "J2", f"{name}: the head is {head['height']}, not {world.height}", event
            )
        kept = journal["entries"]
        if sorted(kept) != list(range(head["floor"], head["height"] + 1)):
            self._add_violation(
                "J2", f"{name}: heights {sorted(kept)}, floor {head['floor']}", event
            )
        if journal.get("doubled"):
            self._add_violation(
                "J2", f"{name}: heights {journal['doubled']} are there twice", event
            )
        for height, entry in kept.items():
            if not entry["blob"] and height <= world.height:
                if entry["body"] != world.journal[height - 1][1]:
                    self._add_violation(
                        "J2", f"{name}: entry {height} differs from the appended one", event
                    )
        base = snapshots["baseline"]
        below = 0 if base is None else base["height"]
        if head["floor"] > below + 1:
            self._add_violation(
                "J4", f"{name}: truncated to {head['floor']}, the baseline is {below}", event
            )
        if base is not None:
            saved = snapshots["states"].get(below)
            if saved is None:
                self._add_violation("J4", f"{name}: the baseline {below} is gone", event)
            elif (
                below <= world.height
                and base["hash"] != hashlib.sha256(world.states[below]).digest()
            ):
                self._add_violation("J4", f"{name}: the baseline is not the journal's state", event)

    def _check_counters(self, event: HistoryEvent, rows: Plain) -> None:
        """Check reference counts, indexes and inbox depths against a recount."""
        refs = dict.fromkeys(rows["blobs"]["data"], 0)
        for name in _blob_names(rows):
            if name not in refs:
                self._add_violation("S4", f"blob {name[:8]} is referred to, and gone", event)
            refs[name] = refs.get(name, 0) + 1
        if refs != rows["blobs"]["refs"]:
            self._add_violation(
                "S4", f"blob references {rows['blobs']['refs']}, recount {refs}", event
            )
        if sorted(rows["blobs"]["idle"]) != sorted(name for name, n in refs.items() if n == 0):
            self._add_violation("S4", "idle blobs and blobs without a reference differ", event)
        for resource, lease in rows["leases"].items():
            held = [lease["worker"]] if lease["state"] == "held" else []
            if lease.get("by", []) != held:
                self._add_violation(
                    "S4", f"{resource}: indexed for {lease.get('by')}, held by {held}", event
                )
        # A deleted world may be partly erased: see check_world_rows.
        deleted = {
            f"{universe}/{world_id}"
            for universe, found in rows.get("worlds", {}).items()
            for world_id, record in found["records"].items()
            if record["status"] == "deleted"
        }
        for name, inbox in rows["inboxes"].items():
            if name not in deleted and inbox["last_seq"] - inbox["cursor"] != len(inbox["rows"]):
                self._add_violation(
                    "S4", f"{name}: the depth differs from the number of rows", event
                )
        for name, scope in rows["dedupe"].items():
            if sorted(key for _, key in scope["times"]) != sorted(scope["keys"]):
                self._add_violation("S4", f"{name}: keys by time and by name differ", event)


_STEPS: dict[str, Callable[[_JournalReplay, HistoryEvent], None]] = {
    "inbox.put": _JournalReplay._put,
    "inbox.put_many": _JournalReplay._put_many,
    "dedupe.expire": _JournalReplay._collect,
    "host_cycle": _JournalReplay._cycle,
    "save_snapshot": _JournalReplay._snapshot,
    "open_append": _JournalReplay._append,
    "open_register": _JournalReplay._register,
    "queue.claim": _JournalReplay._claimed,
    "claims.claim_batch": _JournalReplay._claimed,
}


def findings(history: History) -> list[Violation]:
    found: list[Violation] = []
    for life in history.store_lives():
        replay = _JournalReplay(history.events[0].args if history.events else {})
        for event in life:
            replay.step(event)
        found += replay.found
    return found


def _blob_names(rows: Plain) -> Iterator[str]:
    for queue in rows["queues"].values():
        for row in [*queue["items"].values(), *queue["dead"].values()]:
            if row["blob"]:
                yield row["blob"].hex()
    for journal in rows["journals"].values():
        for entry in journal["entries"].values():
            if entry["blob"]:
                yield entry["blob"].hex()
    for inbox in rows["inboxes"].values():
        for row in inbox["rows"].values():
            if row["blob"]:
                yield row["blob"].hex()
    for subject in rows["snapshots"].values():
        for saved in subject["states"].values():
            if saved["state"] is None:
                yield saved["hash"].hex()
    for tasks in rows.get("tasks", {}).values():
        for row in [*tasks["bodies"].values(), *tasks["statuses"].values()]:
            if row["blob"]:
                yield row["blob"].hex()
