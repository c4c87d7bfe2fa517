"""Consistency checks of worlds: each row is recomputed from its source and compared.

catalog      the counters and names, from the world records; universe and world id, from the key
inbox        the rows, from the cursor and the last assigned seq
assignment   the index by worker, from the assignments; hints, from the inboxes
unknown      the index of worlds that wait for other code, from the world records
effect       each effect without a receipt, from its row and from the journal entry that emitted it; the index of tags
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, journal, queue, tags
from holdfast.durable import item as items
from holdfast.durable.consistency import check_inbox, worker_pairs
from holdfast.durable.difference import Difference
from holdfast.messages import Intent
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.store.schema import Space
from holdfast.world import catalog, intents, journal_entry
from holdfast.world.catalog import Assignment, WorldRecord, WorldStatus, subject_of


def check_world_records(txn: Txn, universe: str) -> Iterator[Difference]:
    for key, row in iter_rows(txn, schema.key_prefix(Space.WORLD, universe, "w")):
        world_id = str(tuples.unpack(key)[-1])
        record = codec.unpack_as(WorldRecord, row)
        named = (record.universe, record.world_id)
        if named != (universe, world_id):
            yield Difference(
                "catalog", f"{universe}/{world_id}", "record of", named, (universe, world_id)
            )


def check_catalog(txn: Txn, universe: str) -> Iterator[Difference]:
    names = {
        row.decode(): tuples.unpack(key)[-2:]
        for key, row in iter_rows(txn, schema.key_prefix(Space.WORLD, universe, "n"))
    }
    counted: Counter[str] = Counter()
    for record in iter_records(txn, universe):
        counted[record.status.value] += 1
        location = _world_path(record)
        named = names.pop(record.world_id, None)
        expected_name = None if record.status is WorldStatus.DELETED else (record.type, record.name)
        if named != expected_name:
            yield Difference("catalog", location, "name", named, expected_name)
        yield from check_inbox(txn, subject_of(universe, record.world_id), location)
    for world_id, named in names.items():
        yield Difference("catalog", f"{universe}/{world_id}", "name", named, "no such world")
    for status, count in catalog.count_by_status(txn, universe).items():
        if count != counted[status]:
            yield Difference("catalog", universe, f"counter {status}", count, counted[status])


def check_assignments(txn: Txn, universe: str) -> Iterator[Difference]:
    index = worker_pairs(txn, schema.key_prefix(Space.WORLD, universe, "b"))
    prefix = schema.key_prefix(Space.WORLD, universe, "a")
    workers: dict[str, Assignment] = {}
    for key, row in iter_rows(txn, prefix):
        workers[str(tuples.unpack(key)[-1])] = codec.unpack_as(Assignment, row)
    expected = {
        (assignment.desired_worker_id or "", world) for world, assignment in workers.items()
    }
    for worker, world in sorted(index - expected):
        yield Difference(
            "assignment", f"{universe}/{world}", "indexed under", worker, "not assigned to it"
        )
    for worker, world in sorted(expected - index):
        yield Difference("assignment", f"{universe}/{world}", "indexed under", None, worker)
    yield from _check_hints(txn, universe, workers)


def _check_hints(txn: Txn, universe: str, assigned: dict[str, Assignment]) -> Iterator[Difference]:
    """Check that an active world with unread messages has a runnable hint, for its worker or unassigned.
    Without one it would never run. A paused or parked world gets a new hint when it is resumed."""
    prefix = schema.key_prefix(Space.READY, universe)
    hints = {tuples.unpack(key[len(prefix) :]) for key, _ in iter_rows(txn, prefix)}
    for record in iter_records(txn, universe):
        if record.status is WorldStatus.DELETED:
            continue
        if not inbox.depth(txn, subject_of(universe, record.world_id)):
            continue
        if record.unknown is not None and record.unknown.waits:
            # The world waits for a worker that can handle its next item, and is indexed by that need.
            need_key = record.unknown.row_key(universe, record.type, record.world_id)
            if txn.get(need_key) is None:
                yield Difference(
                    "unknown", _world_path(record), "listed", None, record.unknown.type
                )
            continue
        if record.status is not WorldStatus.ACTIVE:
            continue
        assignment = assigned.get(record.world_id, Assignment())
        worker = assignment.desired_worker_id or catalog.UNASSIGNED
        if (worker, -assignment.priority, record.world_id) not in hints:
            expected_worker = worker or "the orchestrator"
            yield Difference(
                "assignment", _world_path(record), "hint", None, f"one with {expected_worker}"
            )


def check_open_effects(txn: Txn, universe: str) -> Iterator[Difference]:
    """Check effects without a receipt: the row matches the queued intent, and the journal has its hash."""
    for key, row in iter_rows(txn, schema.key_prefix(Space.WORLD, universe, "i")):
        name, pending = tuples.unpack(key)[-1], codec.unpack_as(intents.PendingEffect, row)
        stored = txn.get(
            items.keys_of(pending.queue(universe)).items + tuples.pack_int(pending.seq)
        )
        if pending.starts_flow or pending.dead or pending.lane or stored is None:
            continue
        location = f"{universe}/{pending.world_id}"
        intent = codec.unpack_as(Intent, queue.payload_of(txn, items.decode_item(stored)))
        stored_intent = (intent.intent_hash, intent.world_id, intent.effect_kind)
        if stored_intent != (name, pending.world_id, pending.effect_kind):
            yield Difference(
                "effect",
                location,
                "an effect without a receipt",
                stored_intent[1:],
                (pending.world_id, pending.effect_kind),
            )
        elif intent.redrive_of is None:
            # An entry that was pruned, or belongs to the fork parent, cannot be compared.
            entries = _entry_at(txn, subject_of(universe, intent.world_id), intent.from_height)
            if any(
                intent.replay_digest() not in journal_entry.decode(stored_entry.body).emitted
                for stored_entry in entries
            ):
                what = f"the effect {intent.effect_kind} of entry {intent.from_height}"
                yield Difference(
                    "effect", location, what, "another hash", "the hash in the journal"
                )


def check_effect_tags(txn: Txn, universe: str) -> Iterator[Difference]:
    """Compare the index of tags with the effects. An effect of an older version is not listed."""
    prefix = intents.tag_prefix(universe)
    found = {key for key, _ in iter_rows(txn, prefix)}
    expected = {}
    for key, row in iter_rows(txn, schema.key_prefix(Space.WORLD, universe, "i")):
        pending = codec.unpack_as(intents.PendingEffect, row)
        if pending.listed:
            packed = tuples.pack((tuples.unpack(key)[-1],))
            expected[prefix + tags.pack_tag(pending.tag) + packed] = pending
    for key in sorted(found ^ expected.keys()):
        world = expected[key].world_id if key in expected else "no effect"
        yield Difference(
            "effect", f"{universe}/{world}", "listed by its tag", key in found, key in expected
        )


def _entry_at(txn: Txn, subject: str, height: int) -> list[journal.ChainedEntry]:
    head = journal.head(txn, subject)
    if not head.floor <= height <= head.height:
        return []
    return journal.read(txn, subject, height, height + 1, 1)


def iter_records(txn: Txn, universe: str) -> Iterator[WorldRecord]:
    after = ""
    while page := catalog.list_worlds(txn, universe, after, SCAN_PAGE):
        yield from page
        after = page[-1].world_id


def _world_path(record: WorldRecord) -> str:
    return f"{record.universe}/{record.type}/{record.name}"
