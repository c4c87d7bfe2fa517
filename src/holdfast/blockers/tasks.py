"""Why a task does not run: its wait state, the limits of its queue, the live workers, its lease, its end."""

from __future__ import annotations

from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.live_workers import list_live
from holdfast.store.api import Txn
from holdfast.tasks import queries
from holdfast.tasks.ids import parse_task_id
from holdfast.tasks.model import QueueLimits, get_counts, get_limits, keys_of, pack_int
from holdfast.tasks.queries import TaskRow
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState

# Open dependencies that an answer names.
NAMED_MAX = 10


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    row = queries.get_task(txn, universe, parse_task_id(id))
    return answer("task", str(row.id), row.where, blockers_of(txn, universe, row))


def explain_state(txn: Txn, universe: str, row: TaskRow) -> str:
    """Explain the state of a task in one sentence."""
    found = blockers_of(txn, universe, row)
    return "; ".join(one["text"] for one in found) or "it is completed"


def blockers_of(txn: Txn, universe: str, row: TaskRow) -> list[Blocker]:
    """The blockers of a task, and the reason of its end if it did not complete."""
    spec, status = row.spec, row.status
    names = {"task": str(row.id), "queue": spec.queue, "universe": universe}
    if row.where == "blocked":
        return [blocker("waits_for_tasks", _open_dependencies(txn, universe, row))]
    if row.where == "parked":
        per_key = get_limits(txn, keys_of(universe), spec.queue).per_key
        text = (
            f"{per_key} tasks with the limit key {row.body.limit!r} run already; "
            "the limit allows no more"
        )
        return [blocker("limit_key_full", text, names=names)]
    if row.where == "stray":
        workers = len(list_live(txn, universe, "task"))
        text = (
            f"waits for a worker that declares the task {spec.name!r} ({workers} live; "
            f"none that requested tasks of queue {spec.queue} declares it)"
        )
        return [blocker("no_worker_for_task", text)]
    if row.where == "delayed":
        if not status.attempt:
            text = "it waits for its start time"
            return [blocker("waits_for_start_time", text, until=row.not_before_ns)]
        text = f"it waits for its next attempt, {status.failures} of {spec.attempts} failed"
        text += f": {status.error.partition(chr(10))[0][:200]}" if status.error else ""
        return [blocker("waits_for_retry", text, until=row.not_before_ns)]
    if row.where in ("ready", "suspect"):
        return _waiting_blockers(txn, universe, row, names)
    if row.where == "leased":
        if txn.now_ns >= status.expires_ns:
            text = f"the lease of {status.worker} is overdue; the next lease request expires it"
            return [blocker("lease_overdue", text, status.expires_ns, names={"role": "task"})]
        text = f"{status.worker} holds its lease, attempt {status.attempt}"
        return [blocker("running", text, status.granted_ns, status.expires_ns)]
    if status.redriven_by:
        return []
    if row.where == "failed":
        text = f"it failed permanently, {status.failures} of {spec.attempts} attempts used"
        return [blocker("task_failed", text, status.ended_ns, names=names)]
    if row.where == "dead":
        return [
            blocker(
                "task_dead", f"it is dead, reason: {status.reason}", status.ended_ns, names=names
            )
        ]
    return []


def _waiting_blockers(
    txn: Txn, universe: str, row: TaskRow, names: dict[str, str]
) -> list[Blocker]:
    """The blockers of a task that could be granted."""
    queue = row.spec.queue
    keys = keys_of(universe)
    counts, limits = get_counts(txn, keys, queue), get_limits(txn, keys, queue)
    if limits.paused_ns:
        return [queue_paused(limits, names)]
    if limits.concurrency and counts.leased >= limits.concurrency:
        text = f"{counts.leased} tasks of its queue run already; the limit allows no more"
        return [blocker("queue_full", text, names=names)]
    workers = len(list_live(txn, universe, "task"))
    if not workers and not counts.leased:
        text = f"waits for a worker of queue {queue} (no live worker with the role `task`)"
        return [blocker("no_live_worker", text, row.body.created_ns, names={"role": "task"})]
    if row.where == "suspect":
        text = (
            "it is quarantined, because its leases expired: "
            "only a worker without other tasks gets it"
        )
        return [blocker("quarantined", text)]
    if not counts.leased:
        text = (
            f"waits for a worker of queue {queue} ({workers:,} live, none runs a task of the queue)"
        )
        return [blocker("waits_for_worker", text)]
    text = (
        "it is ready: workers get it after the tasks before it in its queue "
        f"({counts.ready:,} ready, {counts.leased:,} running)"
    )
    return [blocker("waits_in_queue", text)]


def queue_paused(limits: QueueLimits, names: dict[str, str]) -> Blocker:
    return blocker("queue_paused", "an operator paused its queue", limits.paused_ns, names=names)


def _open_dependencies(txn: Txn, universe: str, row: TaskRow) -> str:
    keys = keys_of(universe)
    open_ids: list[str] = []
    for seq in row.body.after:
        packed_seq = pack_int(seq)
        if get_status(txn, keys, packed_seq).state != TaskState.COMPLETED:
            open_ids.append(str(queries.id_of(txn, keys, seq, row.body)))
            if len(open_ids) == NAMED_MAX:
                break
    return f"it waits until these tasks complete: {', '.join(open_ids)}"
