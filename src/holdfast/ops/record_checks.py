"""Consistency checks of redundant records: each record is compared with its second source.

    journal    the hash chain of each journal that is neither a world's nor the task log
    blob       the hash in the key of a large value, from the value
    snapshot   the hash in a baseline, from the snapshot that it names
    catalog    universe and world id of a world record, from its key
    effect     each effect without a receipt, from its row and from the journal entry that emitted it
    task       the hash in the key of a spec, from the spec
    lease      the kind of each entry in the lease log

`verify` checks the journals of worlds and the task checks read the task log, so both are skipped here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.durable import item as items
from holdfast.durable import journal, queue, snapshot
from holdfast.durable import lease as leases
from holdfast.errors import HoldfastError
from holdfast.messages import Intent
from holdfast.ops import catalog_queries
from holdfast.ops.catalog_queries import rows_of
from holdfast.store import blobs as stored_blobs
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.tasks import model as task_rows
from holdfast.world import catalog, intents, journal_entry
from holdfast.world.catalog import WorldRecord, subject_of

LEASE_KINDS = ("granted", "expired", "released", "forced")


class RecordMismatch(NamedTuple):
    """A record that differs from its second source."""

    where: str
    what: str
    found: object
    expected: object


def journals(txn: Txn) -> Iterator[RecordMismatch]:
    universes = set(catalog_queries.names_after(txn, (int(Space.TASK),)))
    tasks = {task_rows.keys_of(universe).subject for universe in universes}
    for subject in catalog_queries.names_after(txn, (int(Space.JOURNAL),)):
        if subject in tasks or _is_live_world(txn, subject):
            continue
        try:
            journal.verify(txn, subject)
        except HoldfastError as error:
            height = error.fields.get("height", 0)
            yield RecordMismatch(
                subject, f"entry {height}", error.fields.get("why"), "an unbroken chain"
            )


def baselines(txn: Txn) -> Iterator[RecordMismatch]:
    for subject in catalog_queries.names_after(txn, (int(Space.SNAPSHOT),)):
        base = snapshot.baseline(txn, subject)
        if base is None:
            continue
        saved = snapshot.hash_at(txn, subject, base.height)
        if saved is None:
            yield RecordMismatch(
                subject, f"baseline at {base.height}", "no such snapshot", "a snapshot"
            )
        elif saved != base.hash:
            yield RecordMismatch(subject, "hash of the baseline", base.hash.hex(), saved.hex())


def blobs(txn: Txn) -> Iterator[RecordMismatch]:
    for name in stored_blobs.corrupt_blobs(txn):
        yield RecordMismatch(name.hex(), "content", "another hash", "the hash that names it")


def world_records(txn: Txn, universe: str) -> Iterator[RecordMismatch]:
    for key, row in rows_of(txn, schema.key_prefix(Space.WORLD, universe, "w")):
        world_id = str(tuples.unpack(key)[-1])
        record = codec.unpack_as(WorldRecord, row)
        named = (record.universe, record.world_id)
        if named != (universe, world_id):
            yield RecordMismatch(f"{universe}/{world_id}", "record of", named, (universe, world_id))


def open_effects(txn: Txn, universe: str) -> Iterator[RecordMismatch]:
    """Check effects without a receipt: the row matches the queued intent, and the journal has its hash."""
    for key, row in rows_of(txn, schema.key_prefix(Space.WORLD, universe, "i")):
        name, pending = tuples.unpack(key)[-1], codec.unpack_as(intents.PendingEffect, row)
        stored = txn.get(
            items.keys_of(pending.queue(universe)).items + tuples.pack_int(pending.seq)
        )
        if pending.dead or pending.lane or stored is None:
            continue
        location = f"{universe}/{pending.world_id}"
        intent = codec.unpack_as(Intent, queue.payload_of(txn, items.decode_item(stored)))
        stored_intent = (intent.intent_hash, intent.world_id, intent.effect_kind)
        if stored_intent != (name, pending.world_id, pending.effect_kind):
            yield RecordMismatch(
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
                yield RecordMismatch(location, what, "another hash", "the hash in the journal")


def _entry_at(txn: Txn, subject: str, height: int) -> list[journal.ChainedEntry]:
    head = journal.head(txn, subject)
    if not head.floor <= height <= head.height:
        return []
    return journal.read(txn, subject, height, height + 1, 1)


def specs(txn: Txn, universe: str) -> Iterator[RecordMismatch]:
    for key, row in rows_of(txn, task_rows.keys_of(universe).specs):
        name = tuples.unpack(key)[-1]
        spec_hash = task_rows.spec_hash(codec.unpack_as(task_rows.TaskSpec, row))
        if spec_hash != name:
            yield RecordMismatch(universe, "hash of a spec", spec_hash, name)


def lease_log(txn: Txn) -> Iterator[RecordMismatch]:
    prefix = schema.key_prefix(Space.LEASE_LOG)
    for key, row in rows_of(txn, prefix):
        n = tuples.unpack_last_int(key, len(prefix))
        event = codec.unpack_as(leases.LeaseEvent, row)
        if event.kind not in LEASE_KINDS:
            yield RecordMismatch(
                event.resource, f"kind of line {n}", event.kind, " or ".join(LEASE_KINDS)
            )


def _is_live_world(txn: Txn, subject: str) -> bool:
    universe, _, world_id = subject.rpartition("/")
    return bool(universe) and not catalog.is_deleted(txn, universe, world_id)
