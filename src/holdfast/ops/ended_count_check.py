"""The counts of ended work per minute, recomputed from tasks and flows: for `verify` and `rebuild`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holdfast import codec
from holdfast.durable import ended_counts
from holdfast.durable.difference import Difference
from holdfast.durable.ended_counts import (
    FLOW,
    KEPT_MINUTES,
    MINUTE_NS,
    OTHER_QUEUES,
    OUTCOMES,
    TASK,
    EndedRow,
)
from holdfast.flows import model as flow_rows
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks import model as task_rows
from holdfast.tasks.states import TaskState

# A minute, a kind and a queue.
Place = tuple[int, str, str]
_OPEN_TASKS = (TaskState.WAITING, TaskState.LEASED)


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """The counts of a minute are those of the stored work plus the removed work."""
    stored = _stored(txn, universe)
    expected = _expected(txn, universe, stored, ended_counts.since_ns(txn, universe))
    first_minute = txn.now_ns // MINUTE_NS - KEPT_MINUTES
    for place in sorted(stored.keys() | expected.keys()):
        minute, kind, queue = place
        row = stored.get(place, EndedRow())
        for at, outcome in enumerate(OUTCOMES):
            right = expected[place][at] + row.removed[at]
            if minute >= first_minute and row.ended[at] != right:
                what = f"{kind}s {outcome} in {queue or 'other queues'}, minute {minute}"
                yield Difference("statistic", universe, what, row.ended[at], right)


def rebuild(txn: Txn, universe: str) -> None:
    """Count the stored work again. Lost rows lose the number of removed work."""
    stored = _stored(txn, universe)
    since_ns = ended_counts.since_ns(txn, universe)
    first_minute = txn.now_ns // MINUTE_NS - KEPT_MINUTES
    for place, counts in _expected(txn, universe, stored, since_ns).items():
        removed = stored.get(place, EndedRow()).removed
        completed, failed, dead, cancelled = (
            count + gone for count, gone in zip(counts, removed, strict=True)
        )
        right = EndedRow((completed, failed, dead, cancelled), removed)
        if place[0] >= first_minute and right != stored.get(place):
            key = ended_counts.row_prefix(universe) + tuples.pack(place)
            txn.put(key, codec.pack(right))


def _expected(
    txn: Txn, universe: str, stored: dict[Place, EndedRow], since_ns: int | None
) -> dict[Place, list[int]]:
    """Count the stored ended work. A queue without a row is counted with the other queues, if these have one."""
    counts: dict[Place, list[int]] = defaultdict(lambda: [0] * len(OUTCOMES))
    for kind, queue, ended_ns, outcome in _ended_work(txn, universe):
        if since_ns is None or ended_ns < since_ns:
            continue
        place, others = ((ended_ns // MINUTE_NS, kind, name) for name in (queue, OTHER_QUEUES))
        of = place if place in stored or others not in stored else others
        counts[of][OUTCOMES.index(outcome)] += 1
    return {place: counts[place] for place in counts.keys() | stored.keys()}


def _ended_work(txn: Txn, universe: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield the kind, the queue, the end and the outcome of each ended task and flow."""
    tasks = task_consistency.load_tasks(txn, task_rows.keys_of(universe))
    for task in tasks.values():
        state = TaskState(task.status.state)
        if state not in _OPEN_TASKS and not task.spec.owner:
            yield TASK, task.spec.queue, task.status.ended_ns, state.name.lower()
    keys = flow_rows.keys_of(universe)
    for key, row in iter_rows(txn, keys.heads):
        head = flow_rows.decode_head(row)
        body = txn.get(keys.bodies + key[len(keys.heads) :])
        if head.state in ENDED and body is not None:
            queue = flow_rows.decode_body(body).spec.queue
            yield FLOW, queue, head.ended_ns, FlowState(head.state).name.lower()


def _stored(txn: Txn, universe: str) -> dict[Place, EndedRow]:
    prefix = ended_counts.row_prefix(universe)
    found: dict[Place, EndedRow] = {}
    for key, row in iter_rows(txn, prefix):
        minute, kind, queue = tuples.unpack(key[len(prefix) :])
        assert isinstance(minute, int)
        found[minute, str(kind), str(queue)] = ended_counts.decode_row(row)
    return found
