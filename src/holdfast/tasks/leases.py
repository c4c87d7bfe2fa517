"""Task leases: grant, extend, expire. `LeaseGranted`, `LeaseExtended`, `LeaseExpired`, and
`TaskDead` for a task with too many expiries.

Overdue leases expire before any grant. An operation expires a bounded number of them. If more
remain, it grants nothing, sets `LeaseResult.overdue`, and the worker repeats the request at once. A
task with expired leases may be the one that kills its workers, together with the tasks leased
beside it. The last lease of such a task is therefore granted alone (`model.is_quarantined`), so no
task becomes DEAD because of another task.

`lease_or_park` is the lease request of an idle worker (long poll): the writer holds it
(`store.parked_requests`) and grants tasks in the commit that submits them. It asks only for idle
executor slots and prefetches nothing. A worker that is suspended while its request is parked
therefore delays no more tasks than it can start.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NothingToDo
from holdfast.store import tuples
from holdfast.store.api import Row, Txn, operation
from holdfast.tasks import dependents, fair_turns, status_fold
from holdfast.tasks.events import LeasesExpired, LeasesExtended, TasksDead
from holdfast.tasks.grants import LEASE_BYTES_MAX, GrantBuilder, TaskGrant
from holdfast.tasks.model import (
    EXECUTOR_KINDS,
    TaskBodyRow,
    TaskKeys,
    TaskSpec,
    TaskStatusRow,
    dangling_row,
    decode_body,
    decode_int_at,
    get_spec,
    int_end,
    keys_of,
    pack_int,
    pack_text,
    unpack_seq,
)
from holdfast.tasks.owner_callbacks import callbacks_of
from holdfast.tasks.row_ranges import (
    ExpiryBatch,
    decode_range,
    encode_range,
    get_status,
    index_prefix_of,
    load_expiry_batch,
)
from holdfast.tasks.states import TaskState
from holdfast.tasks.unit_of_work import UnitOfWork

# Tasks whose overdue leases one operation expires before it grants.
EXPIRED_MAX = 2_000
# Delayed tasks that one operation promotes beyond the requested number of grants.
PROMOTED_EXTRA = 256
LEASE_BATCH_MAX = 1_000
# Tasks that one operation throttles or marks unroutable. The next operation continues.
SKIPPED_MAX = 1_000
# An index row may hold many tasks: the size of the first page of rows, and of a page of bodies.
ROWS_FIRST = 16
BODIES_PAGE = 250
# Tasks with a limit key that are granted before the age of the other tasks is compared again.
TURNS_MAX = 16
# A parked request ignores due times later than this, because its worker polls more often.
SOON_NS = 5 * S
EXPIRIES_EXHAUSTED = "expiries_exhausted"


class LeaseResult(Record, frozen=True):
    """The result of a lease request. `suspects` means that quarantined tasks wait for an exclusive
    grant.

    `revocations` counts all revoked leases. When it changes, a worker checks its own leases.
    `overdue` means that overdue leases remain: nothing was granted, and the worker repeats the
    request at once.
    """

    grants: list[TaskGrant]
    suspects: bool = False
    revocations: int = 0
    overdue: bool = False


class GrantRequest(Record, frozen=True):
    """A worker's request: at most `limit` tasks by priority and age, from the queues in their order.

    `free_slots` bounds the tasks of each executor kind. `names` restricts the tasks to these names.
    With `alone` a quarantined task may be granted, and then it is the only grant.
    """

    worker: str
    queues: list[str]
    limit: int
    alone: bool = False
    free_slots: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@operation("tasks.lease")
def lease(txn: Txn, universe: str, request: GrantRequest) -> LeaseResult:
    """Grant the tasks of a request."""
    unit = UnitOfWork(txn, universe)
    granted = grant_tasks(unit, request)
    unit.close()
    return granted


@operation("tasks.lease_or_park")
def lease_or_park(txn: Txn, universe: str, request: GrantRequest, due_ns: int) -> LeaseResult:
    """Lease tasks, or stay parked while there is nothing to grant.

    The request also returns when a due time that the worker does not know is near. The worker polls
    at `due_ns` (0: it knows none), and within `SOON_NS` in any case.
    """
    next_ns = next_due_ns(txn, universe)
    soon_ns = txn.now_ns + SOON_NS
    due = next_ns is not None and next_ns < (min(soon_ns, due_ns) if due_ns else soon_ns)
    unit = UnitOfWork(txn, universe)
    if not due and not any(_may_grant(unit, queue) for queue in request.queues):
        raise NothingToDo(what="task", worker=request.worker)
    swept = next_ns is None or next_ns > txn.now_ns
    granted = grant_tasks(unit, request, swept=swept)
    if not due and not granted.grants and not granted.suspects and not unit.skipped:
        raise NothingToDo(what="task", worker=request.worker)
    unit.close()
    return granted


def _may_grant(unit: UnitOfWork, queue: str) -> bool:
    """Whether the counters show a task to grant, in a queue that is not paused. This keeps the retry of many
    parked requests cheap.
    """
    count = unit.counts.current
    waits = count(queue, "ready") or count(queue, "suspect") or count(queue, "stray")
    return bool(waits) and not unit.limits(queue).paused_ns


def grant_tasks(unit: UnitOfWork, request: GrantRequest, *, swept: bool = False) -> LeaseResult:
    """Grant tasks within a unit of work. `swept` means the caller found nothing overdue or due."""
    check_name("worker", request.worker)
    check_limit(request.limit)
    limit = min(request.limit, LEASE_BATCH_MAX)
    for queue in request.queues:
        check_name("queue", queue)
    granter = _Granter(unit, request, limit)
    if not swept:
        _expire_leases(unit, EXPIRED_MAX)
        if _next_overdue(unit):
            revocations = unit.txn.count(unit.keys.revocations)
            return LeaseResult([], False, revocations, overdue=True)
        unit.promote_due(limit + PROMOTED_EXTRA)
        dependents.release(unit)
    unit.unthrottle()
    for queue in request.queues:
        unit.restore_routable(queue, granter.task_names, limit)
    if request.alone and limit:
        granter.grant_quarantined()
    if not granter.grants:
        granter.grant_ready()
    suspects = False
    if not request.alone:
        # A queue at its concurrency limit has no capacity for a quarantined task either.
        suspects = any(
            unit.counts.current(queue, "suspect") and _queue_capacity(unit, queue, 1)
            for queue in request.queues
        )
    return LeaseResult(granter.grants, suspects, unit.txn.count(unit.keys.revocations))


class _Granter:
    """Collects the grants of one request, within its limit and its free slots."""

    __slots__ = ("_limit", "_request", "_slots_left", "_unit", "grants", "task_names")

    def __init__(self, unit: UnitOfWork, request: GrantRequest, limit: int) -> None:
        self._unit = unit
        self._request = request
        self._limit = limit
        self._slots_left = list(request.free_slots) or [limit] * len(EXECUTOR_KINDS)
        if len(self._slots_left) != len(EXECUTOR_KINDS):
            raise Invalid(
                what="free slots",
                found=list(request.free_slots),
                why="give one number for each executor kind, or an empty list",
            )
        self.task_names = frozenset(request.names)
        self.grants: list[TaskGrant] = []

    def grant_quarantined(self) -> None:
        """Grant one quarantined task."""
        for queue, kind in product(self._request.queues, EXECUTOR_KINDS):
            self._grant_from(queue, kind, 1, quarantined=True)
            if self.grants:
                return

    def grant_ready(self) -> None:
        slots_left, grants = self._slots_left, self.grants
        unit = self._unit
        for queue in self._request.queues:
            # Grants add no task to the turns, so the count is read once.
            has_turns = fair_turns.count_of(unit.txn, unit.keys, queue) > 0
            for kind, room, first_only in self._split_capacity(queue, has_turns):
                granted_before = len(grants)
                self._grant_in_turn(queue, kind, room, has_turns, first_only=first_only)
                slots_left[kind] -= len(grants) - granted_before

    def _split_capacity(self, queue: str, has_turns: bool) -> Iterator[tuple[int, int, bool]]:
        """Yield (executor kind, number of tasks, only the first task) in grant order.

        Kinds are independent while the capacity covers all free slots. Otherwise priority and age
        decide, task by task.
        """
        unit, slots_left, grants = self._unit, self._slots_left, self.grants
        kinds = [kind for kind in EXECUTOR_KINDS if slots_left[kind] > 0]
        count = unit.counts.current
        size, skipped_before = 0, unit.skipped
        while kinds and size < LEASE_BYTES_MAX:
            total = sum(slots_left[kind] for kind in kinds)
            room = _queue_capacity(unit, queue, min(self._limit - len(grants), total))
            if room <= 0:
                return
            if room >= total or len(kinds) == 1:
                for kind in kinds:
                    if count(queue, "ready"):
                        yield kind, min(room, slots_left[kind]), False
                return
            firsts = {
                kind: first
                for kind in kinds
                if (first := _head_position(unit, queue, kind, has_turns))
            }
            kinds = sorted(firsts, key=lambda kind: firsts[kind])
            if len(kinds) > 1:
                granted_before, skipped = len(grants), unit.skipped
                yield kinds[0], 1, True
                size += sum(len(grant.args) for grant in grants[granted_before:])
                if unit.skipped - skipped_before >= SKIPPED_MAX:
                    unit.notify_queue(queue)
                    return
                # A skipped task makes way for the next one of any kind.
                if (len(grants) == granted_before and unit.skipped == skipped) or not slots_left[
                    kinds[0]
                ]:
                    del kinds[0]

    def _grant_in_turn(
        self, queue: str, kind: int, room: int, has_turns: bool, *, first_only: bool
    ) -> None:
        """Grant ready tasks. Tasks with a limit key have fair turns. Priority and age decide between the task with
        the next turn and the first task without a key."""
        unit, grants = self._unit, self.grants
        of_kind = pack_text(queue) + pack_int(kind)
        while room > 0 and unit.skipped < SKIPPED_MAX:
            turn = _first_in_turn(unit, of_kind) if has_turns else None
            if turn is None:
                self._grant_from(queue, kind, room, quarantined=False, first_only=first_only)
                return
            plain = _first_plain(unit, of_kind)
            granted_before, skipped_before = len(grants), unit.skipped
            if plain is None or turn < plain:
                lane, limit = unit.keys.fair + of_kind + turn.priority, min(room, TURNS_MAX)
            else:
                lane, limit = unit.keys.ready + of_kind + plain.priority, room
                if plain.priority == turn.priority:
                    limit = min(room, unpack_seq(turn.packed_seq) - unpack_seq(plain.packed_seq))
            limit = room if plain is None else limit
            self._grant_from(
                queue, kind, limit, quarantined=False, first_only=first_only, lane=lane
            )
            room -= len(grants) - granted_before
            if first_only or (len(grants) == granted_before and unit.skipped == skipped_before):
                return

    def _grant_from(
        self,
        queue: str,
        kind: int,
        limit: int,
        *,
        quarantined: bool,
        first_only: bool = False,
        lane: bytes = b"",
    ) -> None:
        """Grant tasks from one queue index, or from one priority of it (`lane`). With `first_only`,
        consider only its first task."""
        unit, task_names = self._unit, self.task_names
        txn, keys = unit.txn, unit.keys
        limit = _queue_capacity(unit, queue, limit)
        if limit <= 0:
            return
        per_key = unit.limits(queue).per_key
        wait_state = "suspect" if quarantined else "ready"
        index_prefix = lane or (
            (keys.quarantined if quarantined else keys.ready) + pack_text(queue) + pack_int(kind)
        )
        builder = GrantBuilder(unit, self._request.worker, queue, wait_state, self.grants)
        skipped = 0
        start, more, page_size = index_prefix, True, min(limit, ROWS_FIRST)
        while (
            more
            and builder.has_room(limit)
            and skipped < SKIPPED_MAX
            and not (first_only and skipped)
        ):
            page = txn.scan(start, tuples.prefix_end(index_prefix), page_size)
            more = len(page) == page_size
            for key, row, first, last in _decode_ranges(txn, keys, page):
                if not builder.has_room(limit) or skipped >= SKIPPED_MAX:
                    break
                bodies = _head_bodies(
                    txn, keys, row, first, last, limit - builder.count, builder.size
                )
                spec = get_spec(txn, keys, bodies[0].spec)
                if task_names and spec.name not in task_names:
                    count = min(last + 1 - first, SKIPPED_MAX - skipped)
                    _shrink_range(txn, key, row, first, last, count)
                    for seq in range(first, first + count):
                        unit.set_unroutable(pack_int(seq), bodies[0], spec, wait_state)
                    skipped += count
                elif bodies[0].limit and not unit.acquire_limit_slot(
                    spec, bodies[0].limit, per_key
                ):
                    unit.throttle(key, row, bodies[0], spec, wait_state)
                    skipped += 1
                else:
                    _shrink_range(txn, key, row, first, last, len(bodies))
                    if bodies[0].limit and not quarantined:
                        fair_turns.grant(txn, keys, spec, bodies[0].limit, pack_int(first))
                    builder.add(first, bodies, spec, fresh=first < last)
            if more:
                start, page_size = page[-1][0] + b"\x00", limit - builder.count
        if skipped >= SKIPPED_MAX:
            unit.notify_queue(queue)
        builder.save()


class _Head(NamedTuple):
    """The first task of an index: its packed priority and its packed seq, which sort by priority and age."""

    priority: bytes
    packed_seq: bytes


def _head_position(unit: UnitOfWork, queue: str, kind: int, has_turns: bool) -> _Head | None:
    """Return the first ready task of a kind, by priority and age, or None."""
    of_kind = pack_text(queue) + pack_int(kind)
    plain = _first_plain(unit, of_kind)
    if not has_turns:
        return plain
    heads = (plain, _first_in_turn(unit, of_kind))
    return min((head for head in heads if head is not None), default=None)


def _first_plain(unit: UnitOfWork, of_kind: bytes) -> _Head | None:
    """Return the first ready task without a limit key."""
    prefix = unit.keys.ready + of_kind
    head = unit.txn.scan(prefix, tuples.prefix_end(prefix), 1)
    if not head:
        return None
    position = head[0][0][len(prefix) :]
    end = int_end(position, 0)
    return _Head(position[:end], position[end:])


def _first_in_turn(unit: UnitOfWork, of_kind: bytes) -> _Head | None:
    """Return the task with a limit key that has the next turn."""
    prefix = unit.keys.fair + of_kind
    head = unit.txn.scan(prefix, tuples.prefix_end(prefix), 1)
    if not head:
        return None
    key, packed_seq = head[0]
    return _Head(key[len(prefix) : int_end(key, len(prefix))], packed_seq)


def _decode_ranges(
    txn: Txn, keys: TaskKeys, page: list[Row]
) -> list[tuple[bytes, bytes, int, int]]:
    """Decode index rows into (key, row, first, last), and prefetch the rows of single tasks."""
    rows = [(key, row, *decode_range(row)) for key, row in page]
    txn.prefetch(
        prefix + row
        for _, row, first, last in rows
        if first == last
        for prefix in (keys.bodies, keys.statuses)
    )
    return rows


def _shrink_range(txn: Txn, key: bytes, row: bytes, first: int, last: int, count: int) -> None:
    """Remove the first `count` tasks from an index row."""
    txn.delete(key)
    if first + count <= last:
        txn.put(
            index_prefix_of(key, row) + pack_int(first + count), encode_range(first + count, last)
        )


def _head_bodies(
    txn: Txn, keys: TaskKeys, row: bytes, first: int, last: int, limit: int, size: int
) -> list[TaskBodyRow]:
    """Read the bodies of the first tasks of an index row, within the limits of one grant."""
    if first == last:
        body_row = txn.get(keys.bodies + row)
        if body_row is None:
            raise dangling_row(row)
        return [decode_body(body_row)]
    bodies: list[TaskBodyRow] = []
    last = min(last, first + limit - 1)
    at, end = keys.bodies + pack_int(first), tuples.prefix_end(keys.bodies)
    while first + len(bodies) <= last and size < LEASE_BYTES_MAX:
        page = txn.scan(at, end, min(last + 1 - first - len(bodies), BODIES_PAGE))
        if not page or page[-1][0] != keys.bodies + pack_int(first + len(bodies) + len(page) - 1):
            raise dangling_row(pack_int(first + len(bodies)))
        at = page[-1][0] + b"\x00"
        for _, body_row in page:
            if size >= LEASE_BYTES_MAX:
                break
            body = decode_body(body_row)
            size += len(body.args)
            bodies.append(body)
    return bodies


def _queue_capacity(unit: UnitOfWork, queue: str, wanted: int) -> int:
    """Return how many tasks the queue may grant, up to `wanted`: none while it is paused, else the free part of its
    concurrency limit."""
    limits = unit.limits(queue)
    if limits.paused_ns:
        return 0
    concurrency_max = limits.concurrency
    if not concurrency_max:
        return wanted
    return max(min(wanted, concurrency_max - unit.counts.current(queue, "leased")), 0)


def expire_and_promote(unit: UnitOfWork, limit: int) -> int:
    """Expire overdue leases, promote due tasks, release dependents."""
    done = _expire_leases(unit, limit)
    done += unit.promote_due(limit)
    done += dependents.release(unit)
    return done


def _expire_leases(unit: UnitOfWork, limit: int) -> int:
    txn, keys, now_ns = unit.txn, unit.keys, unit.now_ns
    seen = 0
    while seen < limit and (overdue := _next_overdue(unit)):
        key, row = overdue[0]
        batch = codec.unpack_as(ExpiryBatch, row)
        range_lease = unit.leases.get(batch.lease)
        tasks = (
            batch.listed_tasks if range_lease is None else batch.listed_tasks + range_lease.tasks()
        )
        txn.delete(key)
        seen += len(tasks) + 1
        txn.prefetch(
            prefix + pack_int(seq) for seq in tasks for prefix in (keys.bodies, keys.statuses)
        )
        expired: list[tuple[int, bytes, TaskStatusRow]] = []
        for seq in tasks:
            packed_seq = pack_int(seq)
            status = unit.status(packed_seq)
            if status.state != TaskState.LEASED or status.lease != batch.lease:
                continue
            if status.expires_ns > now_ns:
                unit.leases.schedule_expiry(status.expires_ns, batch.lease, batch.worker, [seq])
            else:
                expired.append((seq, packed_seq, status))
        if expired:
            unit.log.append(LeasesExpired(batch.lease, [seq for seq, _, _ in expired]))
            for seq, packed_seq, status in expired:
                _expire_task(unit, seq, packed_seq, status)
    return seen


def _next_overdue(unit: UnitOfWork) -> list[Row]:
    """Return the expiry row that is overdue for the longest time, or an empty list."""
    expiries = unit.keys.expiries
    return unit.txn.scan(expiries, expiries + pack_int(unit.now_ns + 1), 1)


def _expire_task(unit: UnitOfWork, seq: int, packed_seq: bytes, prior: TaskStatusRow) -> None:
    """Requeue a task after a lease expiry, or mark it dead."""
    body, spec = unit.body_and_spec(packed_seq)
    after = status_fold.apply_expiry(prior)
    unit.on_lease_end(spec, body.limit)
    if after.expiries >= spec.expiries_max:
        mark_dead(unit, seq, packed_seq, spec, after, EXPIRIES_EXHAUSTED)
        return
    unit.write_status(packed_seq, after)
    unit.enqueue(packed_seq, body, spec, after)


def mark_dead(
    unit: UnitOfWork, seq: int, packed_seq: bytes, spec: TaskSpec, prior: TaskStatusRow, reason: str
) -> None:
    unit.log.append(TasksDead([seq], reason))
    unit.write_status(packed_seq, status_fold.apply_death(prior, reason, unit.now_ns))
    unit.finish(seq, spec, "dead", awaited=prior.awaited)
    if spec.owner:
        body, _ = unit.body_and_spec(packed_seq)
        callbacks_of(spec.owner).on_dead(unit, body.args, seq, reason)


class HeldLease(Record, frozen=True):
    """A lease that a worker holds. `progressed` reports progress since the last extension."""

    seq: int
    lease: int
    progressed: bool = False


@operation("tasks.extend")
def extend(txn: Txn, universe: str, generation: int, holds: list[HeldLease]) -> list[int]:
    """Extend leases by their full duration. Returns the new expiry of each, 0 for a lost lease.

    Without progress a lease is not extended past its execution window. It stays valid until it
    expires.
    """
    check_limit(len(holds), "holds")
    unit = UnitOfWork(txn, universe)
    now_ns = unit.now_ns
    answers: list[int] = []
    record = LeasesExtended([], [], [], [])
    for hold in holds:
        packed_seq = pack_int(hold.seq)
        unit.leases.get(hold.lease)
        status = unit.status(packed_seq)
        if generation != txn.generation or not is_live(status, hold.lease, now_ns):
            answers.append(0)
            continue
        _, spec = unit.body_and_spec(packed_seq)
        since_ns = now_ns if hold.progressed else status.progress_ns
        until_ns = min(now_ns + spec.lease_ns, since_ns + spec.window_ns)
        if until_ns <= status.expires_ns and not hold.progressed:
            answers.append(status.expires_ns)
            continue
        until_ns = max(until_ns, status.expires_ns)
        unit.write_status(
            packed_seq, status_fold.apply_extension(status, until_ns, hold.progressed, now_ns)
        )
        record.tasks.append(hold.seq)
        record.leases.append(hold.lease)
        record.expires_ns.append(until_ns)
        record.progressed.append(hold.progressed)
        answers.append(until_ns)
    if record.tasks:
        unit.log.append(record)
    unit.close()
    return answers


def is_live(status: TaskStatusRow, lease: int, now_ns: int) -> bool:
    return status.state == TaskState.LEASED and status.lease == lease and now_ns < status.expires_ns


# -- reads -------------------------------------------------------------------------------------


def next_due_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time of the next due task or lease expiry, or None."""
    keys = keys_of(universe)
    if txn.scan(keys.pending_releases, tuples.prefix_end(keys.pending_releases), 1):
        return 0  # dependents to release
    times = [
        decode_int_at(key, len(prefix))
        for prefix in (keys.delayed, keys.expiries)
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1)
    ]
    return min(times, default=None)


def leases_of_worker(txn: Txn, universe: str, worker: str) -> list[tuple[int, int]]:
    """Return (seq, lease) of all tasks leased by a worker, for recovery after a lost reply. It
    reads every expiry row.
    """
    keys = keys_of(universe)
    candidates = []
    for key, row in txn.scan(keys.expiries, tuples.prefix_end(keys.expiries)):
        batch, tasks = load_expiry_batch(txn, keys, key, row)
        if batch.worker == worker:
            candidates += [(seq, batch.lease) for seq in tasks]
    return [candidate for candidate in candidates if is_current_lease(txn, universe, *candidate)]


def is_current_lease(txn: Txn, universe: str, seq: int, lease: int) -> bool:
    """Whether a lease is the task's current one. It may be overdue: only a commit judges expiry."""
    keys = keys_of(universe)
    status = get_status(txn, keys, pack_int(seq))
    return status.state == TaskState.LEASED and status.lease == lease
