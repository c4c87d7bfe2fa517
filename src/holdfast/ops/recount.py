"""Derived rows, counted and built again from what they are derived from, and compared.

    queue        the counters and the indexes, from the items and the dead letters
    catalog      the counters and names, from the world records
    assignment   the index by worker, from the assignments; hints, from the inboxes
    inbox        the rows, from the cursor and the last number given
    lease        the index by worker, from the fences; the fences, from the lease log
    authority    the lease of each universe, from its log
    dispatch     the counters and the index by state, from the requests
    task         statuses, from the log of tasks; places, counts and indexes, from bodies and statuses
    journal, snapshot, and records that name themselves: see `recount_records`

Each check yields what it finds as a `Difference`. All of them together see one snapshot, so that
what others do meanwhile is no difference. `done` of a queue is the one number that nothing else
tells: it is held to what the sequence allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.authority import authority, dispatch_recount
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, item
from holdfast.durable import lease as leases
from holdfast.durable.lease import Fence
from holdfast.ops import inventory, unreadable
from holdfast.ops import recount_records as records
from holdfast.ops.inventory import rows_of
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.tasks import recount as tasks_recount
from holdfast.tasks import rows as task_rows
from holdfast.tasks import verify as tasks_verify
from holdfast.world import catalog
from holdfast.world.catalog import Assignment, Status, WorldRecord, subject_of


class Difference(NamedTuple):
    """A derived row that is not what it should be: where, what is there, what should be."""

    kind: str
    where: str
    what: str
    found: str
    expected: str


def recount(txn: Txn) -> list[Difference]:
    """Every difference of every kind, in the order of the kinds."""
    found: list[Difference] = []
    for name in inventory.names_after(txn, (int(Space.QUEUE),)):
        found += _read("queue", name, _queue(txn, name))
    for universe in inventory.universes(txn):
        found += _read(
            "catalog", universe, _unlike("catalog", records.world_records(txn, universe))
        )
        found += _read("catalog", universe, _catalog(txn, universe))
        found += _read("effect", universe, _unlike("effect", records.open_effects(txn, universe)))
        found += _read("assignment", universe, _assignments(txn, universe))
        found += _read("authority", universe, _authority(txn, universe))
        found += _read("dispatch", universe, _dispatches(txn, universe))
    found += _read("lease", "all", _leases(txn))
    found += _read("lease", "log", _unlike("lease", records.lease_log(txn)))
    found += _read("journal", "all", _unlike("journal", records.journals(txn)))
    found += _read("blob", "all", _unlike("blob", records.blobs(txn)))
    found += _read("snapshot", "all", _unlike("snapshot", records.baselines(txn)))
    for universe in inventory.names_after(txn, (int(Space.TASK),)):
        found += _read("task", universe, _unlike("task", records.specs(txn, universe)))
        found += _read("task", universe, _tasks(txn, universe))
    return found


def _read(kind: str, where: str, differences: Iterator[Difference]) -> list[Difference]:
    """All of them, and one for a row that cannot be decoded: it ends this kind and no other."""
    found: list[Difference] = []
    try:
        for one in differences:
            found.append(one)
    except unreadable.ERRORS as error:
        found.append(_differs(kind, where, "a row", unreadable.told(error), "a record"))
    return found


# -- queues --------------------------------------------------------------------------------------


def _queue(txn: Txn, name: str) -> Iterator[Difference]:
    keys = item.keys_of(name)
    kept = item.counts_of(txn, keys)
    ready, delayed, by_expiry, by_owner, died = (
        {row for _, row in rows_of(txn, prefix)}
        for prefix in (keys.ready, keys.delayed, keys.claims, keys.owners, keys.died)
    )
    dead = {key[len(keys.dead) :] for key, _ in rows_of(txn, keys.dead)}
    held = {key[len(keys.holds) :] for key, _ in rows_of(txn, keys.holds)}
    for state, rows in (
        ("ready", ready),
        ("delayed", delayed),
        ("claimed", by_expiry),
        ("dead", dead),
    ):
        if getattr(kept, state) != len(rows):
            yield _differs("queue", name, f"counter {state}", getattr(kept, state), len(rows))
    if by_owner != by_expiry:
        yield _differs("queue", name, "claims by owner", len(by_owner), len(by_expiry))
    if held != by_expiry:
        yield _differs("queue", name, "claims", len(held), len(by_expiry))
    if died != dead:
        yield _differs("queue", name, "dead letters by time", len(died), len(dead))
    total = kept.ready + kept.delayed + kept.claimed + kept.dead + kept.done
    given = txn.count(keys.last_seq)
    if kept.done < 0 or total > given:
        yield _differs("queue", name, "counter done", kept.done, f"{given} items in all")
    seen = 0
    for key, _ in rows_of(txn, keys.items):
        packed_seq = key[len(keys.items) :]
        claimed = packed_seq in held
        there = (packed_seq in ready, packed_seq in delayed, packed_seq in by_expiry)
        if sum(there) != 1 or there[2] != claimed:
            index = "the index of claims" if claimed else "one index of those that wait"
            where = ", ".join(
                state
                for state, is_there in zip(("ready", "delayed", "claimed"), there, strict=True)
                if is_there
            )
            seq = item.seq_of(packed_seq)
            yield _differs("queue", name, f"item {seq} is indexed", where or "nowhere", index)
        seen += 1
    indexed = len(ready) + len(delayed) + len(by_expiry)
    if seen != indexed:
        yield _differs("queue", name, "indexed items", indexed, seen)


# -- worlds --------------------------------------------------------------------------------------


def _catalog(txn: Txn, universe: str) -> Iterator[Difference]:
    names = {
        row.decode(): tuples.unpack(key)[-2:]
        for key, row in rows_of(txn, schema.prefix(Space.WORLD, universe, "n"))
    }
    counted: Counter[str] = Counter()
    for record in records_of(txn, universe):
        counted[record.status.value] += 1
        where = _shown(record)
        named = names.pop(record.world_id, None)
        wanted = None if record.status is Status.DELETED else (record.type, record.name)
        if named != wanted:
            yield _differs("catalog", where, "name", named, wanted)
        yield from _inbox(txn, record)
    for world_id, named in names.items():
        yield _differs("catalog", f"{universe}/{world_id}", "name", named, "no such world")
    for status, kept in catalog.counts(txn, universe).items():
        if kept != counted[status]:
            yield _differs("catalog", universe, f"counter {status}", kept, counted[status])


def _inbox(txn: Txn, record: WorldRecord) -> Iterator[Difference]:
    subject = subject_of(record.universe, record.world_id)
    cursor, depth = inbox.cursor(txn, subject), inbox.depth(txn, subject)
    prefix = schema.prefix(Space.INBOX, subject, "e")
    rows = sum(1 for _ in rows_of(txn, prefix))
    if rows != depth:
        yield _differs("inbox", _shown(record), f"rows after {cursor}", rows, depth)
    for seq, wrong in inbox.damaged(txn, subject):
        yield _differs("inbox", _shown(record), f"ingress {seq}", wrong, "what was acknowledged")


def _assignments(txn: Txn, universe: str) -> Iterator[Difference]:
    index = pairs(txn, schema.prefix(Space.WORLD, universe, "b"))
    prefix = schema.prefix(Space.WORLD, universe, "a")
    workers: dict[str, Assignment] = {}
    for key, row in rows_of(txn, prefix):
        workers[str(tuples.unpack(key)[-1])] = codec.unpack_as(Assignment, row)
    wanted = {(found.desired_worker_id or "", world) for world, found in workers.items()}
    for worker, world in sorted(index - wanted):
        yield _differs(
            "assignment", f"{universe}/{world}", "indexed under", worker, "not assigned to it"
        )
    for worker, world in sorted(wanted - index):
        yield _differs("assignment", f"{universe}/{world}", "indexed under", None, worker)
    yield from _hints(txn, universe, workers)


def _hints(txn: Txn, universe: str, assigned: dict[str, Assignment]) -> Iterator[Difference]:
    """An active world with unread messages has a hint, with its worker or with nobody: else it sleeps.
    One that is paused or parked gets a new one when it is resumed."""
    prefix = schema.prefix(Space.READY, universe)
    hints = {tuples.unpack(key[len(prefix) :]) for key, _ in rows_of(txn, prefix)}
    for record in records_of(txn, universe):
        if record.status is Status.DELETED:
            continue
        if not inbox.depth(txn, subject_of(universe, record.world_id)):
            continue
        if record.unknown is not None and record.unknown.waits:
            # It waits for a worker that knows its next item, and is listed by that.
            listed = record.unknown.row_key(universe, record.type, record.world_id)
            if txn.get(listed) is None:
                yield _differs("unknown", _shown(record), "listed", None, record.unknown.type)
            continue
        if record.status is not Status.ACTIVE:
            continue
        found = assigned.get(record.world_id, Assignment())
        worker = found.desired_worker_id or catalog.NOBODY
        if (worker, -found.priority, record.world_id) not in hints:
            where = worker or "the orchestrator"
            yield _differs("assignment", _shown(record), "hint", None, f"one with {where}")


# -- leases --------------------------------------------------------------------------------------


def fences(txn: Txn) -> Iterator[tuple[str, Fence]]:
    """Every resource that was ever leased, and its fence."""
    for key, row in rows_of(txn, schema.prefix(Space.LEASE, "fence")):
        yield str(tuples.unpack(key)[-1]), codec.unpack_as(Fence, row)


def _leases(txn: Txn) -> Iterator[Difference]:
    index = pairs(txn, schema.prefix(Space.LEASE, "by"))
    logged = {resource: told.fence for resource, told in logged_leases(txn).items()}
    held = set()
    for resource, fence in fences(txn):
        if fence.state is leases.State.HELD:
            held.add((fence.worker, resource))
        told = logged.pop(resource, None)
        if told is not None and told != fence:
            yield _differs("lease", resource, "fence", _fence(fence), _fence(told))
    for worker, resource in sorted(index - held):
        yield _differs("lease", resource, "indexed under", worker, "not held by it")
    for worker, resource in sorted(held - index):
        yield _differs("lease", resource, "indexed under", None, worker)
    for resource, told in logged.items():
        if told.state is leases.State.FREE:
            # The rows of an erased world go before its lines in the log.
            continue
        yield _differs("lease", resource, "fence", None, _fence(told))


class Told(NamedTuple):
    """What the lease log says last about a resource."""

    fence: Fence
    expires_ns: int


def logged_leases(txn: Txn) -> dict[str, Told]:
    """What the log says last about each resource, as far down as it is kept."""
    found: dict[str, Told] = {}
    after = 0
    while page := leases.events(txn, after, SCAN_PAGE):
        for event in page:
            after = event.n
            if event.kind in ("granted", "expired"):
                state = leases.State.HELD if event.kind == "granted" else leases.State.STALE
                worker, incarnation = event.worker, event.incarnation
            else:
                state, worker, incarnation = leases.State.FREE, "", ""
            fence = Fence(state, worker, incarnation, event.generation, event.epoch)
            expires_ns = 0 if state is leases.State.FREE else event.expires_ns
            found[event.resource] = Told(fence, expires_ns)
    return found


def _authority(txn: Txn, universe: str) -> Iterator[Difference]:
    stored, rebuilt = authority.read(txn, universe), authority.rebuilt(txn, universe)
    if stored != rebuilt:
        yield _differs("authority", universe, "lease", stored.lease_id, rebuilt.lease_id)


def _dispatches(txn: Txn, universe: str) -> Iterator[Difference]:
    for one in dispatch_recount.differences(txn, universe):
        yield _differs("dispatch", universe, one.what, one.found, one.expected)


# -- tasks ---------------------------------------------------------------------------------------


def _tasks(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = task_rows.keys_of(universe)
    for differences in (tasks_verify.differences, tasks_recount.differences):
        for one in differences(txn, universe):
            where = universe
            if one.task:
                body = task_rows.body_of(txn, keys, tuples.pack_int(one.task))
                where += f"/{one.task}" if body is None else f"/{body.generation}-{one.task}"
            what = f"{one.field} at height {one.height}" if one.height else one.field
            yield _differs("task", where, what, one.found, one.expected)


# -- inside --------------------------------------------------------------------------------------


def pairs(txn: Txn, prefix: bytes) -> set[tuple[str, str]]:
    """The (worker, what it has) of an index."""
    return {
        (str(worker), str(has))
        for worker, has in (tuples.unpack(key)[-2:] for key, _ in rows_of(txn, prefix))
    }


def records_of(txn: Txn, universe: str) -> Iterator[WorldRecord]:
    after = ""
    while page := catalog.worlds(txn, universe, after, SCAN_PAGE):
        yield from page
        after = page[-1].world_id


def _shown(record: WorldRecord) -> str:
    return f"{record.universe}/{record.type}/{record.name}"


def _fence(fence: Fence) -> str:
    return f"{fence.state.value} {fence.worker or 'nobody'} {fence.generation}.{fence.epoch}"


def _unlike(kind: str, found: Iterator[records.Unlike]) -> Iterator[Difference]:
    for one in found:
        yield _differs(kind, one.where, one.what, one.found, one.expected)


def _differs(kind: str, where: str, what: str, found: object, expected: object) -> Difference:
    return Difference(kind, where, what, _text(found), _text(expected))


def _text(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bytes):
        return value.hex()
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
