"""Records that other rows repeat, or that their own key names: each compared with its second source.

    journal    the hash chain of a journal that belongs to no world and to no log of tasks
    blob       the hash that names a large value, from the value
    snapshot   the hash in a baseline, from the snapshot that it names
    catalog    universe and world id of a world record, from its key
    effect     what waits for a receipt, from its row and from the entry that wanted it
    task       the hash that names a spec, from the spec
    lease      the kind of each line in the lease log

`verify` checks journals of worlds, and the check of tasks reads the log of tasks: they are not read twice.
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
from holdfast.ops import inventory
from holdfast.ops.inventory import rows_of
from holdfast.store import blobs as stored_blobs
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.tasks import rows as task_rows
from holdfast.world import catalog, entry, publish
from holdfast.world.catalog import WorldRecord, subject_of

LEASE_KINDS = ("granted", "expired", "released", "forced")


class Unlike(NamedTuple):
    """A record that differs from its second source."""

    where: str
    what: str
    found: object
    expected: object


def journals(txn: Txn) -> Iterator[Unlike]:
    universes = set(inventory.names_after(txn, (int(Space.TASK),)))
    tasks = {task_rows.keys_of(universe).subject for universe in universes}
    for subject in inventory.names_after(txn, (int(Space.JOURNAL),)):
        if subject in tasks or _is_live_world(txn, subject):
            continue
        try:
            journal.verify(txn, subject)
        except HoldfastError as error:
            height = error.fields.get("height", 0)
            yield Unlike(subject, f"entry {height}", error.fields.get("why"), "an unbroken chain")


def baselines(txn: Txn) -> Iterator[Unlike]:
    for subject in inventory.names_after(txn, (int(Space.SNAPSHOT),)):
        base = snapshot.baseline(txn, subject)
        if base is None:
            continue
        saved = snapshot.hash_at(txn, subject, base.height)
        if saved is None:
            yield Unlike(subject, f"baseline at {base.height}", "no such snapshot", "a snapshot")
        elif saved != base.hash:
            yield Unlike(subject, "hash of the baseline", base.hash.hex(), saved.hex())


def blobs(txn: Txn) -> Iterator[Unlike]:
    for name in stored_blobs.unsound(txn):
        yield Unlike(name.hex(), "content", "another hash", "the hash that names it")


def world_records(txn: Txn, universe: str) -> Iterator[Unlike]:
    for key, row in rows_of(txn, schema.prefix(Space.WORLD, universe, "w")):
        world_id = str(tuples.unpack(key)[-1])
        record = codec.unpack_as(WorldRecord, row)
        named = (record.universe, record.world_id)
        if named != (universe, world_id):
            yield Unlike(f"{universe}/{world_id}", "record of", named, (universe, world_id))


def open_effects(txn: Txn, universe: str) -> Iterator[Unlike]:
    """Effects without a receipt: the row and the queued intent name each other, and the entry has its hash."""
    for key, row in rows_of(txn, schema.prefix(Space.WORLD, universe, "i")):
        name, pending = tuples.unpack(key)[-1], codec.unpack_as(publish.Pending, row)
        stored = txn.get(
            items.keys_of(pending.queue(universe)).items + tuples.pack_int(pending.seq)
        )
        if pending.dead or pending.lane or stored is None:
            continue
        where = f"{universe}/{pending.world_id}"
        intent = codec.unpack_as(Intent, queue.payload_of(txn, items.decode(stored)))
        told = (intent.intent_hash, intent.world_id, intent.effect_kind)
        if told != (name, pending.world_id, pending.effect_kind):
            yield Unlike(
                where,
                "an effect without a receipt",
                told[1:],
                (pending.world_id, pending.effect_kind),
            )
        elif intent.redrive_of is None:
            # An entry that is not kept, or is its parent's, says nothing.
            entries = _entry(txn, subject_of(universe, intent.world_id), intent.from_height)
            if any(intent.content() not in entry.decode(one.body).emitted for one in entries):
                what = f"the effect {intent.effect_kind} of entry {intent.from_height}"
                yield Unlike(where, what, "another hash", "the hash in the journal")


def _entry(txn: Txn, subject: str, height: int) -> list[journal.Entry]:
    head = journal.head(txn, subject)
    if not head.floor <= height <= head.height:
        return []
    return journal.read(txn, subject, height, height + 1, 1)


def specs(txn: Txn, universe: str) -> Iterator[Unlike]:
    for key, row in rows_of(txn, task_rows.keys_of(universe).specs):
        name = tuples.unpack(key)[-1]
        found = task_rows.name_of(codec.unpack_as(task_rows.Spec, row))
        if found != name:
            yield Unlike(universe, "hash of a spec", found, name)


def lease_log(txn: Txn) -> Iterator[Unlike]:
    prefix = schema.prefix(Space.LEASE_LOG)
    for key, row in rows_of(txn, prefix):
        n = tuples.unpack_last_int(key, len(prefix))
        event = codec.unpack_as(leases.LeaseEvent, row)
        if event.kind not in LEASE_KINDS:
            yield Unlike(event.resource, f"kind of line {n}", event.kind, " or ".join(LEASE_KINDS))


def _is_live_world(txn: Txn, subject: str) -> bool:
    universe, _, world_id = subject.rpartition("/")
    return bool(universe) and not catalog.gone(txn, universe, world_id)
