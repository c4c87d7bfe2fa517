"""Looking at tasks: one with everything that is known of it, counts by queue, what can be granted.

Nothing here scans: a task is read by its number, and what is next by the first row of an index. Lists
are in `listing`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from holdfast.errors import NotFound
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks.ids import LeaseId, TaskId
from holdfast.tasks.rows import (
    KINDS,
    Body,
    Counts,
    Keys,
    Limits,
    Spec,
    Status,
    body_of,
    counts_of,
    int_at,
    keys_of,
    lane,
    limits_of,
    order,
    pack_int,
    packed_text,
    seq_of,
    spec_of,
)
from holdfast.tasks.runs import Leases, status_of
from holdfast.tasks.runs import find as find_in
from holdfast.tasks.states import State

QUEUES_MAX = 10_000


class TaskRow(NamedTuple):
    """A task as it is now. `where` is its state, or the place where it waits."""

    seq: int
    body: Body
    spec: Spec
    status: Status
    where: str

    @property
    def id(self) -> TaskId:
        return TaskId(self.body.generation, self.seq)

    @property
    def state(self) -> State:
        return State(self.status.state)

    @property
    def not_before_ns(self) -> int:
        return self.status.not_before_ns or self.body.not_before_ns


class Seen(NamedTuple):
    """One task with all that is known of it, and in words why it is where it is."""

    row: TaskRow
    why: str
    args: bytes
    # Of a task that is not COMPLETED, empty.
    result: bytes
    # What it last said of itself while it ran; empty for nothing.
    progress: bytes
    lease: LeaseId | None
    after: tuple[TaskId, ...]
    redrive_of: TaskId | None
    redriven_by: TaskId | None


def find(txn: Txn, universe: str, task: TaskId) -> TaskRow:
    row = row_of(txn, keys_of(universe), pack_int(task.seq))
    if row is None or row.body.generation != task.generation:
        raise NotFound(what="task", task=str(task), universe=universe)
    return row


def was_forgotten(txn: Txn, universe: str, task: TaskId) -> bool:
    """Whether a task that is not there was submitted in this store: only tasks that have ended are removed.
    A number of another generation may be from the time after the backup that was restored."""
    return task.generation == txn.generation and task.seq <= txn.count(keys_of(universe).seq)


def ids_of(txn: Txn, universe: str, seqs: list[int]) -> list[TaskId]:
    """The names of tasks that are there."""
    keys = keys_of(universe)
    found = []
    for seq in seqs:
        body = body_of(txn, keys, pack_int(seq))
        if body is None:
            raise NotFound(what="task", seq=seq, universe=universe)
        found.append(TaskId(body.generation, seq))
    return found


def see(txn: Txn, universe: str, task: TaskId) -> Seen:
    keys = keys_of(universe)
    row = find(txn, universe, task)
    body, status = row.body, row.status
    leased = status.state == State.LEASED
    return Seen(
        row,
        why(txn, universe, row),
        blobs.get(txn, body.blob) if body.blob else body.args,
        blobs.get(txn, status.blob) if status.blob else status.result,
        txn.get(keys.progress + pack_int(row.seq)) or b"",
        LeaseId(txn.generation, status.lease, row.seq) if leased else None,
        tuple(_name(txn, keys, seq, body) for seq in body.after),
        _name(txn, keys, body.redrive_of, body) if body.redrive_of else None,
        _name(txn, keys, status.redriven_by, body) if status.redriven_by else None,
    )


def why(txn: Txn, universe: str, row: TaskRow) -> str:
    """Why a task is where it is, for people."""
    keys, spec, status = keys_of(universe), row.spec, row.status
    limits = limits_of(txn, keys, spec.queue)
    if row.where == "blocked":
        open_ = [seq for seq in row.body.after if not _completed(txn, keys, seq)]
        names = ", ".join(str(_name(txn, keys, seq, row.body)) for seq in open_[:10])
        return f"others have to complete first: {names}"
    if row.where == "parked":
        return f"{limits.per_key} with the limit {row.body.limit!r} run already, as many as may"
    if row.where == "stray":
        return f"no worker that asked for its queue knows a task {spec.name!r}"
    if row.where == "delayed":
        return "its time has not come yet" if not status.attempt else "it is tried again later"
    if row.where in ("ready", "suspect"):
        leased = counts_of(txn, keys, spec.queue).leased
        if limits.concurrency and leased >= limits.concurrency:
            return f"{leased} of its queue run already, as many as may"
        if row.where == "suspect":
            return "its workers were lost, so it is given out by itself, to the next that asks for such"
        return "the next worker that asks for its queue gets it, after those before it"
    if row.where == "leased":
        if txn.now_ns >= status.expires_ns:
            return f"the lease of {status.worker} is over; the next who asks for work ends it"
        return f"{status.worker} has it, attempt {status.attempt}"
    if row.where == "failed":
        return f"it failed for good, {status.failures} of {spec.attempts} attempts used"
    if row.where == "dead":
        return f"it was given up: {status.reason}"
    return "it is done"


def given(txn: Txn, universe: str, lease: LeaseId) -> bool:
    """Whether a lease was ever granted, as far as anybody knows: a worker made none up."""
    keys = keys_of(universe)
    if lease.generation != txn.generation:
        return lease.generation < txn.generation
    return (
        lease.lease <= txn.count(keys.lease)
        and status_of(txn, keys, pack_int(lease.seq)).attempt > 0
    )


# -- queues ---------------------------------------------------------------------------------------


class QueueRow(NamedTuple):
    queue: str
    counts: Counts
    limits: Limits


def queues(txn: Txn, universe: str) -> list[QueueRow]:
    """Every queue that has a task, be it one that has ended and is kept, or limits; by name."""
    keys = keys_of(universe)
    found = {
        str(tuples.unpack(key[len(space) :])[0])
        for space in (keys.counts, keys.limits)
        for key, _ in txn.scan(space, tuples.after(space), QUEUES_MAX)
    }
    return [
        QueueRow(name, counts_of(txn, keys, name), limits_of(txn, keys, name))
        for name in sorted(found)
    ]


def offering(
    txn: Txn,
    universe: str,
    queues: Iterable[str],
    names: Collection[str] = (),
    kinds: Collection[int] = KINDS,
) -> list[str]:
    """Of these queues, those that have something to be granted to one who knows tasks of these names
    (without any: all) and has hands for these kinds."""
    keys = keys_of(universe)
    return [queue for queue in queues if _offers(txn, keys, queue, names, kinds)]


def _offers(
    txn: Txn, keys: Keys, name: str, names: Collection[str], kinds: Collection[int]
) -> bool:
    counts = counts_of(txn, keys, name)
    if not (counts.ready or counts.suspect or counts.stray):
        return False
    most = limits_of(txn, keys, name).concurrency
    if most and counts.leased >= most:
        return False
    queue = packed_text(name)
    lanes = [keys.ready + queue + pack_int(kind) for kind in kinds] if counts.ready else []
    if counts.suspect or any(txn.scan(space, tuples.after(space), 1) for space in lanes):
        return True
    if not counts.stray:
        return False
    aside = keys.strays + queue
    lo = aside
    while found := txn.scan(lo, tuples.after(aside), 1):
        task = tuples.unpack(found[0][0][len(aside) :])[0]
        if not names or task in names:
            return True
        lo = tuples.after(aside + tuples.pack((task,)))
    return False


def ended_of(txn: Txn, universe: str, seqs: Iterable[int]) -> list[int]:
    """Of these tasks, those that have ended, or are not there any more."""
    keys = keys_of(universe)
    leases = Leases(txn, keys)
    return [
        seq
        for seq in seqs
        if leases.status(pack_int(seq)).state not in (State.WAITING, State.LEASED)
        or body_of(txn, keys, pack_int(seq)) is None
    ]


def overdue_retention(txn: Txn, universe: str) -> bool:
    """Whether there are tasks that ended so long ago that they are to be forgotten."""
    first_ns = next_retention_ns(txn, universe)
    return first_ns is not None and first_ns <= txn.now_ns


def next_retention_ns(txn: Txn, universe: str) -> int | None:
    """When the first of the tasks that have ended is to be forgotten, by store time; None without any."""
    retained = keys_of(universe).retained
    first = txn.scan(retained, tuples.after(retained), 1)
    return int_at(first[0][0], len(retained)) if first else None


# -- inside ---------------------------------------------------------------------------------------


def row_of(txn: Txn, keys: Keys, packed_seq: bytes, leases: Leases | None = None) -> TaskRow | None:
    """A task; whoever looks at many has the same `leases` for all."""
    body = body_of(txn, keys, packed_seq)
    if body is None:
        return None
    spec = spec_of(txn, keys, body.spec)
    status = (leases or Leases(txn, keys)).status(packed_seq)
    where = State(status.state).name.lower()
    if status.state == State.WAITING:
        where = _place(txn, keys, packed_seq, body, spec, status)
    return TaskRow(seq_of(packed_seq), body, spec, status, where)


def _place(txn: Txn, keys: Keys, packed_seq: bytes, body: Body, spec: Spec, status: Status) -> str:
    here = order(spec, packed_seq)
    if find_in(txn, keys.ready + lane(spec.queue, spec.kind, spec.priority), packed_seq):
        return "ready"
    if txn.get(keys.suspects + here) is not None:
        return "suspect"
    if txn.get(keys.strays + tuples.pack((spec.queue, spec.name)) + here) is not None:
        return "stray"
    if status.waits:
        return "blocked"
    not_before_ns = status.not_before_ns or body.not_before_ns
    if txn.get(keys.delayed + pack_int(not_before_ns) + packed_seq) is not None:
        return "delayed"
    return "parked"


def _completed(txn: Txn, keys: Keys, seq: int) -> bool:
    return status_of(txn, keys, pack_int(seq)).state == State.COMPLETED


def _name(txn: Txn, keys: Keys, seq: int, by: Body) -> TaskId:
    """The name of a task that another one knows by its number; it may be gone."""
    body = body_of(txn, keys, pack_int(seq))
    return TaskId((body or by).generation, seq)
