"""Consistency checks of derived rows: each is recomputed from its source and compared.

    queue        the counters and the indexes, from the items and the dead letters
    catalog      the counters and names, from the world records
    assignment   the index by worker, from the assignments; hints, from the inboxes
    inbox        the rows, from the cursor and the last assigned seq
    lease        the index by worker, from the fences; the fences, from the lease log
    authority    the lease of each universe, from its log
    dispatch     the counters and the index by state, from the requests
    task         statuses, from the task log; wait states, counts and indexes, from bodies and statuses
    journal, snapshot and other redundant records: see `record_checks`

Each check yields `Difference` values. All checks read one snapshot, so concurrent commits cause no
differences. The counter `done` of a queue has no second source; it is only checked against the last seq.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.dispatch import consistency
from holdfast.durable import inbox, item
from holdfast.durable import lease as leases
from holdfast.durable.lease import LeaseFence
from holdfast.leadership import leader_lease
from holdfast.ops import catalog_queries, decode_errors
from holdfast.ops import record_checks as records
from holdfast.ops.catalog_queries import rows_of
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.tasks import consistency as tasks_recount
from holdfast.tasks import model as task_rows
from holdfast.tasks import replay_check as tasks_verify
from holdfast.world import catalog
from holdfast.world.catalog import Assignment, WorldRecord, WorldStatus, subject_of


class StoreDifference(NamedTuple):
    """A derived row that differs from its source: its location, the stored value, the expected value."""

    kind: str
    where: str
    what: str
    found: str
    expected: str


def find_differences(txn: Txn) -> list[StoreDifference]:
    """Run all checks and return their differences, grouped by kind."""
    differences: list[StoreDifference] = []
    for name in catalog_queries.names_after(txn, (int(Space.QUEUE),)):
        differences += _collect("queue", name, _check_queue(txn, name))
    for universe in catalog_queries.universes(txn):
        differences += _collect(
            "catalog", universe, _as_differences("catalog", records.world_records(txn, universe))
        )
        differences += _collect("catalog", universe, _check_catalog(txn, universe))
        differences += _collect(
            "effect", universe, _as_differences("effect", records.open_effects(txn, universe))
        )
        differences += _collect("assignment", universe, _check_assignments(txn, universe))
        differences += _collect("authority", universe, _check_leader_lease(txn, universe))
        differences += _collect("dispatch", universe, _check_dispatches(txn, universe))
    differences += _collect("lease", "all", _check_leases(txn))
    differences += _collect("lease", "log", _as_differences("lease", records.lease_log(txn)))
    differences += _collect("journal", "all", _as_differences("journal", records.journals(txn)))
    differences += _collect("blob", "all", _as_differences("blob", records.blobs(txn)))
    differences += _collect("snapshot", "all", _as_differences("snapshot", records.baselines(txn)))
    for universe in catalog_queries.names_after(txn, (int(Space.TASK),)):
        differences += _collect(
            "task", universe, _as_differences("task", records.specs(txn, universe))
        )
        differences += _collect("task", universe, _check_tasks(txn, universe))
    return differences


def _collect(
    kind: str, location: str, differences: Iterator[StoreDifference]
) -> list[StoreDifference]:
    """Collect the differences of one check. A row that cannot be decoded adds one and ends only this check."""
    collected: list[StoreDifference] = []
    try:
        for difference in differences:
            collected.append(difference)
    except decode_errors.DECODE_ERRORS as error:
        collected.append(
            _difference(kind, location, "a row", decode_errors.error_text(error), "a record")
        )
    return collected


# -- queues --------------------------------------------------------------------------------------


def _check_queue(txn: Txn, name: str) -> Iterator[StoreDifference]:
    keys = item.keys_of(name)
    counts = item.counts_of(txn, keys)
    ready, delayed, by_expiry, by_owner, died = (
        {row for _, row in rows_of(txn, prefix)}
        for prefix in (keys.ready, keys.delayed, keys.by_expiry, keys.by_owner, keys.dead_by_time)
    )
    dead = {key[len(keys.dead) :] for key, _ in rows_of(txn, keys.dead)}
    claim_rows = {key[len(keys.claim_rows) :] for key, _ in rows_of(txn, keys.claim_rows)}
    for state, rows in (
        ("ready", ready),
        ("delayed", delayed),
        ("claimed", by_expiry),
        ("dead", dead),
    ):
        if getattr(counts, state) != len(rows):
            yield _difference("queue", name, f"counter {state}", getattr(counts, state), len(rows))
    if by_owner != by_expiry:
        yield _difference("queue", name, "claims by owner", len(by_owner), len(by_expiry))
    if claim_rows != by_expiry:
        yield _difference("queue", name, "claims", len(claim_rows), len(by_expiry))
    if died != dead:
        yield _difference("queue", name, "dead letters by time", len(died), len(dead))
    total = counts.ready + counts.delayed + counts.claimed + counts.dead + counts.done
    last_seq = txn.count(keys.last_seq)
    if counts.done < 0 or total > last_seq:
        yield _difference("queue", name, "counter done", counts.done, f"{last_seq} items in all")
    items = 0
    for key, _ in rows_of(txn, keys.items):
        packed_seq = key[len(keys.items) :]
        claimed = packed_seq in claim_rows
        indexed_in = (packed_seq in ready, packed_seq in delayed, packed_seq in by_expiry)
        if sum(indexed_in) != 1 or indexed_in[2] != claimed:
            index = "the index of claims" if claimed else "one index of waiting items"
            where = ", ".join(
                state
                for state, is_there in zip(("ready", "delayed", "claimed"), indexed_in, strict=True)
                if is_there
            )
            seq = item.seq_of(packed_seq)
            yield _difference("queue", name, f"item {seq} is indexed", where or "nowhere", index)
        items += 1
    indexed = len(ready) + len(delayed) + len(by_expiry)
    if items != indexed:
        yield _difference("queue", name, "indexed items", indexed, items)


# -- worlds --------------------------------------------------------------------------------------


def _check_catalog(txn: Txn, universe: str) -> Iterator[StoreDifference]:
    names = {
        row.decode(): tuples.unpack(key)[-2:]
        for key, row in rows_of(txn, schema.key_prefix(Space.WORLD, universe, "n"))
    }
    counted: Counter[str] = Counter()
    for record in records_of(txn, universe):
        counted[record.status.value] += 1
        location = _world_path(record)
        named = names.pop(record.world_id, None)
        expected_name = None if record.status is WorldStatus.DELETED else (record.type, record.name)
        if named != expected_name:
            yield _difference("catalog", location, "name", named, expected_name)
        yield from _check_inbox(txn, record)
    for world_id, named in names.items():
        yield _difference("catalog", f"{universe}/{world_id}", "name", named, "no such world")
    for status, count in catalog.count_by_status(txn, universe).items():
        if count != counted[status]:
            yield _difference("catalog", universe, f"counter {status}", count, counted[status])


def _check_inbox(txn: Txn, record: WorldRecord) -> Iterator[StoreDifference]:
    subject = subject_of(record.universe, record.world_id)
    cursor, depth = inbox.cursor(txn, subject), inbox.depth(txn, subject)
    prefix = schema.key_prefix(Space.INBOX, subject, "e")
    rows = sum(1 for _ in rows_of(txn, prefix))
    if rows != depth:
        yield _difference("inbox", _world_path(record), f"rows after {cursor}", rows, depth)
    for seq, wrong in inbox.iter_damaged(txn, subject):
        yield _difference(
            "inbox", _world_path(record), f"ingress {seq}", wrong, "the acknowledged ingress"
        )


def _check_assignments(txn: Txn, universe: str) -> Iterator[StoreDifference]:
    index = worker_pairs(txn, schema.key_prefix(Space.WORLD, universe, "b"))
    prefix = schema.key_prefix(Space.WORLD, universe, "a")
    workers: dict[str, Assignment] = {}
    for key, row in rows_of(txn, prefix):
        workers[str(tuples.unpack(key)[-1])] = codec.unpack_as(Assignment, row)
    expected = {
        (assignment.desired_worker_id or "", world) for world, assignment in workers.items()
    }
    for worker, world in sorted(index - expected):
        yield _difference(
            "assignment", f"{universe}/{world}", "indexed under", worker, "not assigned to it"
        )
    for worker, world in sorted(expected - index):
        yield _difference("assignment", f"{universe}/{world}", "indexed under", None, worker)
    yield from _check_hints(txn, universe, workers)


def _check_hints(
    txn: Txn, universe: str, assigned: dict[str, Assignment]
) -> Iterator[StoreDifference]:
    """Check that an active world with unread messages has a runnable hint, for its worker or unassigned.
    Without one it would never run. A paused or parked world gets a new hint when it is resumed."""
    prefix = schema.key_prefix(Space.READY, universe)
    hints = {tuples.unpack(key[len(prefix) :]) for key, _ in rows_of(txn, prefix)}
    for record in records_of(txn, universe):
        if record.status is WorldStatus.DELETED:
            continue
        if not inbox.depth(txn, subject_of(universe, record.world_id)):
            continue
        if record.unknown is not None and record.unknown.waits:
            # The world waits for a worker that can handle its next item, and is indexed by that need.
            need_key = record.unknown.row_key(universe, record.type, record.world_id)
            if txn.get(need_key) is None:
                yield _difference(
                    "unknown", _world_path(record), "listed", None, record.unknown.type
                )
            continue
        if record.status is not WorldStatus.ACTIVE:
            continue
        assignment = assigned.get(record.world_id, Assignment())
        worker = assignment.desired_worker_id or catalog.UNASSIGNED
        if (worker, -assignment.priority, record.world_id) not in hints:
            expected_worker = worker or "the orchestrator"
            yield _difference(
                "assignment", _world_path(record), "hint", None, f"one with {expected_worker}"
            )


# -- leases --------------------------------------------------------------------------------------


def fences(txn: Txn) -> Iterator[tuple[str, LeaseFence]]:
    """Yield every resource that was ever leased, with its fence."""
    for key, row in rows_of(txn, schema.key_prefix(Space.LEASE, "fence")):
        yield str(tuples.unpack(key)[-1]), codec.unpack_as(LeaseFence, row)


def _check_leases(txn: Txn) -> Iterator[StoreDifference]:
    index = worker_pairs(txn, schema.key_prefix(Space.LEASE, "by"))
    logged = {resource: logged_fence.fence for resource, logged_fence in logged_leases(txn).items()}
    expected = set()
    for resource, fence in fences(txn):
        if fence.state is leases.LeaseState.HELD:
            expected.add((fence.worker, resource))
        logged_fence = logged.pop(resource, None)
        if logged_fence is not None and logged_fence != fence:
            yield _difference(
                "lease", resource, "fence", _fence_text(fence), _fence_text(logged_fence)
            )
    for worker, resource in sorted(index - expected):
        yield _difference("lease", resource, "indexed under", worker, "not held by it")
    for worker, resource in sorted(expected - index):
        yield _difference("lease", resource, "indexed under", None, worker)
    for resource, logged_fence in logged.items():
        if logged_fence.state is leases.LeaseState.FREE:
            # The purge of a world deletes its rows before its entries in the lease log.
            continue
        yield _difference("lease", resource, "fence", None, _fence_text(logged_fence))


class LoggedLease(NamedTuple):
    """The fence and expiry of a resource, from its last entry in the lease log."""

    fence: LeaseFence
    expires_ns: int


def logged_leases(txn: Txn) -> dict[str, LoggedLease]:
    """Return the last logged state of each resource, from the retained part of the lease log."""
    last_logged: dict[str, LoggedLease] = {}
    after = 0
    while page := leases.events(txn, after, SCAN_PAGE):
        for event in page:
            after = event.n
            if event.kind in ("granted", "expired"):
                state = (
                    leases.LeaseState.HELD if event.kind == "granted" else leases.LeaseState.STALE
                )
                worker, incarnation = event.worker, event.incarnation
            else:
                state, worker, incarnation = leases.LeaseState.FREE, "", ""
            fence = LeaseFence(state, worker, incarnation, event.generation, event.epoch)
            expires_ns = 0 if state is leases.LeaseState.FREE else event.expires_ns
            last_logged[event.resource] = LoggedLease(fence, expires_ns)
    return last_logged


def _check_leader_lease(txn: Txn, universe: str) -> Iterator[StoreDifference]:
    stored, rebuilt = leader_lease.read(txn, universe), leader_lease.rebuild(txn, universe)
    if stored != rebuilt:
        yield _difference("authority", universe, "lease", stored.lease_id, rebuilt.lease_id)


def _check_dispatches(txn: Txn, universe: str) -> Iterator[StoreDifference]:
    for difference in consistency.differences(txn, universe):
        yield _difference(
            "dispatch", universe, difference.what, difference.found, difference.expected
        )


# -- tasks ---------------------------------------------------------------------------------------


def _check_tasks(txn: Txn, universe: str) -> Iterator[StoreDifference]:
    keys = task_rows.keys_of(universe)
    for differences in (tasks_verify.find_differences, tasks_recount.find_differences):
        for difference in differences(txn, universe):
            location = universe
            if difference.task:
                body = task_rows.get_body(txn, keys, tuples.pack_int(difference.task))
                location += (
                    f"/{difference.task}"
                    if body is None
                    else f"/{body.generation}-{difference.task}"
                )
            what = (
                f"{difference.field} at height {difference.height}"
                if difference.height
                else difference.field
            )
            yield _difference("task", location, what, difference.found, difference.expected)


# -- inside --------------------------------------------------------------------------------------


def worker_pairs(txn: Txn, prefix: bytes) -> set[tuple[str, str]]:
    """Return the (worker, resource) pairs of an index."""
    return {
        (str(worker), str(resource))
        for worker, resource in (tuples.unpack(key)[-2:] for key, _ in rows_of(txn, prefix))
    }


def records_of(txn: Txn, universe: str) -> Iterator[WorldRecord]:
    after = ""
    while page := catalog.list_worlds(txn, universe, after, SCAN_PAGE):
        yield from page
        after = page[-1].world_id


def _world_path(record: WorldRecord) -> str:
    return f"{record.universe}/{record.type}/{record.name}"


def _fence_text(fence: LeaseFence) -> str:
    return f"{fence.state.value} {fence.worker or 'nobody'} {fence.generation}.{fence.epoch}"


def _as_differences(
    kind: str, mismatches: Iterator[records.RecordMismatch]
) -> Iterator[StoreDifference]:
    for mismatch in mismatches:
        yield _difference(kind, mismatch.where, mismatch.what, mismatch.found, mismatch.expected)


def _difference(
    kind: str, location: str, what: str, stored: object, expected: object
) -> StoreDifference:
    return StoreDifference(kind, location, what, _text(stored), _text(expected))


def _text(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bytes):
        return value.hex()
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
