"""Fair turns between limit keys: the ready index of tasks with a limit key.

    f  <queue> <kind> <-priority> <rank> <seq>    ready, in the order of the turns
    fp <seq>                                      the key of that row
    fg <queue> <kind> <-priority> <limit>         the rank of the last task of a limit key
    ft <queue> <kind> <-priority>                 the rank that grants have reached
    fn <queue>                                    the number of tasks here, so that other queues cost no search

The rank of a task is one above the rank of the last task of its limit key, and above the reached rank. So a limit key
with 100,000 tasks delays a single task of another limit key by one task for each other key. A task that returns
(retried, throttled, delayed) gets the next rank of a second count: it runs before the backlog of its limit key,
but not before waiting tasks of other keys. The order between these tasks and tasks without a limit key is by age.
"""

from __future__ import annotations

from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import TaskKeys, TaskSpec, pack_int, pack_text, queue_index

_RETURNED = tuples.pack(("back",))


def _lane_of(spec: TaskSpec) -> bytes:
    return queue_index(spec.queue, spec.kind, spec.priority)


def add(
    txn: Txn, keys: TaskKeys, spec: TaskSpec, limit: str, packed_seq: bytes, *, returned: bool
) -> None:
    """Add a ready task. `returned`: it was in the queue before."""
    lane = _lane_of(spec)
    group = keys.fair_groups + lane + pack_text(limit) + (_RETURNED if returned else b"")
    rank = max(txn.count(group), txn.count(keys.fair_reached + lane)) + 1
    key = keys.fair + lane + pack_int(rank) + packed_seq
    txn.put(group, schema.encode_int(rank))
    txn.put(key, packed_seq)
    txn.put(keys.fair_places + packed_seq, key)
    txn.add(keys.fair_counts + pack_text(spec.queue), 1)


def remove(txn: Txn, keys: TaskKeys, spec: TaskSpec, limit: str, packed_seq: bytes) -> int:
    """Remove a task, and return its rank; 0 if it is not here."""
    key = txn.get(keys.fair_places + packed_seq)
    if key is None:
        return 0
    txn.delete(key)
    txn.delete(keys.fair_places + packed_seq)
    count = keys.fair_counts + pack_text(spec.queue)
    if txn.count(count) > 1:
        txn.add(count, -1)
    else:
        txn.delete(count)
    rank = rank_of(key)
    group = keys.fair_groups + _lane_of(spec) + pack_text(limit)
    for last in (group, group + _RETURNED):
        if txn.count(last) == rank:
            txn.delete(last)
    return rank


def grant(txn: Txn, keys: TaskKeys, spec: TaskSpec, limit: str, packed_seq: bytes) -> None:
    """Remove a granted task and advance the reached rank."""
    rank = remove(txn, keys, spec, limit, packed_seq)
    reached = keys.fair_reached + _lane_of(spec)
    if rank > txn.count(reached):
        txn.put(reached, schema.encode_int(rank))


def count_of(txn: Txn, keys: TaskKeys, queue: str) -> int:
    """Return the number of ready tasks with a limit key in a queue."""
    return txn.count(keys.fair_counts + pack_text(queue))


def has_place(txn: Txn, keys: TaskKeys, packed_seq: bytes) -> bool:
    return txn.get(keys.fair_places + packed_seq) is not None


def rank_of(key: bytes) -> int:
    rank = tuples.unpack(key)[-2]
    assert isinstance(rank, int)
    return rank
