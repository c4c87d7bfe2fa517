"""Derived rows of a universe, built again from what they are derived from, while nothing else runs.

    catalog      names and counters, from the world records
    assignment   the index by worker, from the assignments; hints, from the inboxes
    lease        fences and the index by worker, from the lease log
    authority    the lease of the universe, from its log
    queue        indexes, from items, claims and dead letters; counters, from the indexes
    dispatch     indexes and counters, from the requests
    task         statuses, from the log of tasks; places and keys, from bodies and statuses; counters

The place of the store is held alone (`store.places`). Logs are verified first: one that is broken is
`LogBroken`, and nothing is written. The rows are built in memory and counted again there; what still
differs is `NotRebuilt`, and nothing is written either. Else all of it is one commit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.authority import authority
from holdfast.config import WriterLimits
from holdfast.durable import inbox, item, journal
from holdfast.durable import lease as leases
from holdfast.errors import NotFound, StoreCorrupt
from holdfast.ops import copying, indexes, inventory, recount, unreadable
from holdfast.ops.recount import Difference
from holdfast.store import places, schema, tuples
from holdfast.store.schema import Space
from holdfast.store.txn import ApplyTxn
from holdfast.tasks import recount as tasks_recount
from holdfast.tasks import rows as task_rows
from holdfast.tasks import verify as tasks_verify
from holdfast.tasks.runs import SEQ_END, held_between
from holdfast.tasks.states import State
from holdfast.world import catalog
from holdfast.world.catalog import Status, subject_of
from holdfast.world.need import Need

SHOWN_MAX = 5
# A writer that nobody needs any more has this long to end.
GRACE_S = 5.0


class LogBroken(StoreCorrupt):
    code = "log_broken"
    hint = "rows cannot be rebuilt from a log that does not verify: restore a backup"


class NotRebuilt(StoreCorrupt):
    code = "not_rebuilt"
    hint = "these rows cannot be told from any log, and nothing was written: restore a backup"


class Rebuilt(NamedTuple):
    """What differed before, and how many rows were written or removed; none in a dry run."""

    differences: list[Difference]
    rows: int
    written: bool


def rebuild(url: str, universe: str, *, dry_run: bool = False) -> Rebuilt:
    """Rebuild the derived rows of a universe. StoreBusy while anything else has the store open."""
    patience_s = WriterLimits().linger_s + GRACE_S
    with contextlib.closing(places.source(url, patience_s=patience_s)) as place:
        if not dry_run:
            copying.refuse_holders(place)
        meta = place.meta()
        if meta is None:
            raise NotFound(what="store", url=url)
        with place.reading() as base:
            txn = ApplyTxn(base, now_ns=place.now_ns(), generation=meta.generation)
            if universe not in _universes(txn):
                raise NotFound(what="universe", universe=universe)
            _verify_logs(txn, universe)
            before = _differences(txn, universe)
            if before:
                _build(txn, universe, len(before))
            left = _differences(txn, universe)
            if left:
                shown = [f"{one.kind} {one.where}: {one.what}" for one in left[:SHOWN_MAX]]
                raise NotRebuilt(universe=universe, differences=len(left), first=shown)
            changes = {key: row for key, row in txn.writes.items() if base.get(key) != row}
        if changes and not dry_run:
            place.change(changes)
        return Rebuilt(before, len(changes), bool(changes) and not dry_run)


# -- inside --------------------------------------------------------------------------------------


def _universes(txn: ApplyTxn) -> set[str]:
    return {*inventory.universes(txn), *inventory.names_after(txn, (int(Space.TASK),))}


def _verify_logs(txn: ApplyTxn, universe: str) -> None:
    for what, subject in (
        ("authority", authority.resource(universe)),
        ("tasks", task_rows.keys_of(universe).subject),
    ):
        try:
            journal.verify(txn, subject)
        except StoreCorrupt as error:
            raise LogBroken(**{**error.fields, "log": what}) from None
        except codec.UNREADABLE as error:
            raise LogBroken(log=what, subject=subject, why=str(error)) from None
    replay = tasks_verify.Replay(txn, universe)
    for found in replay.run():
        raise LogBroken(log="tasks", height=found.height, why=f"{found.field}: {found.found}")


def _differences(txn: ApplyTxn, universe: str) -> list[Difference]:
    found = recount.recount(txn)
    mine = (universe, f"{universe}/")
    return [one for one in found if one.where == mine[0] or one.where.startswith(mine[1])]


def _build(txn: ApplyTxn, universe: str, differences: int) -> None:
    try:
        for part in (_catalog, _assignments, _leases, _queues, indexes.rebuild_dispatches, _tasks):
            part(txn, universe)
    except unreadable.ERRORS as error:
        first = [unreadable.told(error)]
        raise NotRebuilt(universe=universe, differences=differences, first=first) from None


def _catalog(txn: ApplyTxn, universe: str) -> None:
    names: dict[bytes, bytes] = {}
    counted: Counter[str] = Counter()
    for record in recount.records_of(txn, universe):
        counted[record.status.value] += 1
        if record.status is not Status.DELETED:
            key = schema.prefix(Space.WORLD, universe, "n", record.type, record.name)
            names[key] = record.world_id.encode()
    indexes.replace_rows(txn, schema.prefix(Space.WORLD, universe, "n"), names)
    for status in Status:
        key = schema.prefix(Space.WORLD, universe, "c", status.value)
        if txn.count(key) != counted[status.value]:
            txn.put(key, schema.int_bytes(counted[status.value]))


def _assignments(txn: ApplyTxn, universe: str) -> None:
    index: dict[bytes, bytes] = {}
    for record in recount.records_of(txn, universe):
        found = catalog.assignment(txn, universe, record.world_id)
        if found is not None:
            worker = found.desired_worker_id or ""
            index[schema.prefix(Space.WORLD, universe, "b", worker, record.world_id)] = b""
        deleted = record.status is Status.DELETED
        if deleted or not inbox.depth(txn, subject_of(universe, record.world_id)):
            continue
        stopped = record.unknown
        if stopped is not None and stopped.waits:
            # It waits for a worker that knows its next item, and is listed by that.
            need = Need(record.type, stopped.side, stopped.type, stopped.version)
            listed = stopped.row_key(universe, record.type, record.world_id)
            txn.put(listed, codec.pack(need))
        else:
            catalog.hint(txn, universe, record.world_id)
    indexes.replace_rows(txn, schema.prefix(Space.WORLD, universe, "b"), index)


def _leases(txn: ApplyTxn, universe: str) -> None:
    mine = f"{universe}/"
    for resource, told in recount.logged_leases(txn).items():
        if not resource.startswith(mine):
            continue
        fence, expiry = (schema.prefix(Space.LEASE, kind, resource) for kind in ("fence", "expiry"))
        there = txn.get(fence)
        if there is None and told.fence.state is leases.State.FREE:
            continue
        if there is None or codec.unpack_as(leases.Fence, there) != told.fence:
            txn.put(fence, codec.pack(told.fence))
            txn.put(expiry, schema.int_bytes(told.expires_ns))
    right = {
        (fence.worker, resource)
        for resource, fence in recount.fences(txn)
        if fence.state is leases.State.HELD
    }
    for worker, resource in recount.pairs(txn, schema.prefix(Space.LEASE, "by")) | right:
        if resource.startswith(mine):
            key = schema.prefix(Space.LEASE, "by", worker, resource)
            if (worker, resource) in right:
                txn.put(key, b"")
            else:
                txn.delete(key)


def _queues(txn: ApplyTxn, universe: str) -> None:
    for name in inventory.names_after(txn, (int(Space.QUEUE),)):
        if not name.startswith(f"{universe}/"):
            continue
        indexes.rebuild_queue(txn, name)
        keys = item.keys_of(name)
        ready, delayed, claimed, dead = (
            sum(1 for _ in inventory.rows_of(txn, prefix))
            for prefix in (keys.ready, keys.delayed, keys.claims, keys.dead)
        )
        was = item.counts_of(txn, keys)
        right = replace(was, ready=ready, delayed=delayed, claimed=claimed, dead=dead)
        if right != was:
            txn.put(keys.counts, codec.pack(right))


def _tasks(txn: ApplyTxn, universe: str) -> None:
    keys = task_rows.keys_of(universe)
    replay = tasks_verify.Replay(txn, universe)
    for _ in replay.run():
        pass
    held = held_between(txn, keys, 0, SEQ_END)
    for key, _ in list(inventory.rows_of(txn, keys.bodies)):
        packed = key[len(keys.bodies) :]
        wanted = replay.tasks.get(task_rows.seq_of(packed))
        row = txn.get(keys.statuses + packed)
        seq = task_rows.seq_of(packed)
        was = held.get(seq, task_rows.FRESH) if row is None else task_rows.decode_status(row)
        if wanted is None:
            continue
        if row is None and wanted.state == State.COMPLETED:
            # Its result went with its status.
            continue
        fields = {name: getattr(wanted, name) for name in tasks_verify.FIELDS}
        right = replace(was, **fields)
        if right != was:
            txn.put(keys.statuses + packed, codec.pack(right))
    indexes.rebuild_places(txn, universe)
    indexes.rebuild_keys(txn, universe)
    _task_counts(txn, universe)


def _task_counts(txn: ApplyTxn, universe: str) -> None:
    keys = task_rows.keys_of(universe)
    counted, running = tasks_recount.counted(txn, keys)
    queues = {str(tuples.unpack(key)[-1]) for key, _ in inventory.rows_of(txn, keys.counts)}
    for queue in queues | set(counted):
        right = task_rows.Counts(
            **{name: counted[queue][name] for name in task_rows.Counts.__struct_fields__}
        )
        if task_rows.counts_of(txn, keys, queue) != right:
            txn.put(keys.counts + task_rows.packed_text(queue), codec.pack(right))
    told = recount.pairs(txn, keys.running)
    for pair in {*told, *running}:
        key = keys.running + tuples.pack(pair)
        if txn.count(key) != running[pair]:
            txn.put(key, schema.int_bytes(running[pair]))
