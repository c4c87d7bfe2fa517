"""The counters of load limits, recomputed from the work itself: for `verify` and `rebuild`."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.durable import inbox, item, load_limits
from holdfast.durable.difference import Difference
from holdfast.durable.load_limits import BYTES, COUNTED, EFFECTS, TASKS, LoadLimits
from holdfast.flows import derived_rows, inbox_bytes
from holdfast.flows.states import ENDED
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks.model import keys_of
from holdfast.tasks.states import TaskState
from holdfast.tasks.unit_of_work import arguments_size

_UNFINISHED = (TaskState.WAITING, TaskState.LEASED)


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """Compare the counters of the limits that are set with the work that they count."""
    for name, expected in expected_counts(txn, universe).items():
        stored = load_limits.counted(txn, universe, name)
        if stored != expected:
            yield Difference("limit", universe, f"counter {name}", stored, expected)


def rebuild(txn: Txn, universe: str) -> None:
    for name, expected in expected_counts(txn, universe).items():
        txn.put(load_limits.counter_key(universe, name), schema.encode_int(expected))


def expected_counts(txn: Txn, universe: str) -> dict[str, int]:
    """Count the work of each limit that has a counter and is set."""
    limits = load_limits.find(txn, universe)
    if limits is None:
        return {}
    count = {TASKS: _waiting_tasks, EFFECTS: _open_effects, BYTES: _bytes_in_flight}
    return {name: count[name](txn, universe, limits) for name in COUNTED if getattr(limits, name)}


def _waiting_tasks(txn: Txn, universe: str, limits: LoadLimits) -> int:
    tasks = task_consistency.load_tasks(txn, keys_of(universe)).values()
    return sum(task.status.state == TaskState.WAITING for task in tasks)


def _open_effects(txn: Txn, universe: str, limits: LoadLimits) -> int:
    prefix = f"{universe}/effects/"
    queues = iter_names(txn, (int(schema.Space.QUEUE),))
    keys = [item.keys_of(queue) for queue in queues if queue.startswith(prefix)]
    return sum(item.counts_of(txn, one).open for one in keys)


def _bytes_in_flight(txn: Txn, universe: str, limits: LoadLimits) -> int:
    since_ns = limits.bytes_since_ns
    tasks = task_consistency.load_tasks(txn, keys_of(universe)).values()
    size = sum(
        arguments_size(txn, task.body)
        for task in tasks
        if task.status.state in _UNFINISHED and task.body.created_ns >= since_ns
    )
    worlds = iter_names(txn, (int(schema.Space.INBOX),))
    unread = [
        inbox.unread_bytes(txn, one, since_ns) for one in worlds if one.startswith(f"{universe}/")
    ]
    open_flows = (
        flow
        for flow in derived_rows.load_flows(txn, universe).flows.values()
        if flow.head.state not in ENDED
    )
    events = [inbox_bytes.sum_of(txn, flow.mail.values(), since_ns) for flow in open_flows]
    return size + sum(unread) + sum(events)
