"""Why a queue does not move: a task queue, or the queue of a kind of effects as `effects/KIND`."""

from __future__ import annotations

from holdfast.blockers import limits
from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.effects import ready_blocker
from holdfast.blockers.live_workers import list_live
from holdfast.durable import item as items
from holdfast.durable import queue as queues
from holdfast.errors import NotFound
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import (
    TaskCounts,
    get_counts,
    get_limits,
    keys_of,
    pack_text,
)
from holdfast.world.intents import effect_queue

_EFFECTS = "effects/"
# Names of tasks that no worker declares, in one text.
NAMED_MAX = 5


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    if id.startswith(_EFFECTS):
        return _explain_effects(txn, universe, id)
    keys = keys_of(universe)
    rows = (keys.counts + pack_text(id), keys.limits + pack_text(id))
    if all(txn.get(key) is None for key in rows):
        raise NotFound(what="queue", queue=id[:200], universe=universe)
    counts = get_counts(txn, keys, id)
    blockers = _task_blockers(txn, universe, id, counts)
    figures = limits.queue_figures(txn, universe, f"queue:{id}", counts.waiting)
    blockers += limits.reached(universe, figures)
    state = "active" if counts.waiting or counts.leased else "idle"
    if get_limits(txn, keys, id).paused_ns:
        state = "paused"
    return answer("queue", id, state, blockers)


def _task_blockers(txn: Txn, universe: str, queue: str, counts: TaskCounts) -> list[Blocker]:
    queue_limits = get_limits(txn, keys_of(universe), queue)
    names = {"queue": queue, "universe": universe}
    found: list[Blocker] = []
    if queue_limits.paused_ns:
        text = f"an operator paused it; {counts.leased:,} tasks still run"
        found.append(blocker("queue_paused", text, queue_limits.paused_ns, names=names))
    elif queue_limits.concurrency and counts.leased >= queue_limits.concurrency and counts.waiting:
        text = f"{counts.leased:,} tasks run already; the limit allows no more"
        found.append(blocker("queue_full", text, names=names))
    elif counts.ready + counts.suspect and not counts.leased:
        found.append(_unserved(txn, universe, queue, counts))
    if counts.parked:
        text = f"{counts.parked:,} tasks wait for a slot of their limit key ({queue_limits.per_key} each)"
        found.append(blocker("limit_key_full", text, names=names))
    if counts.stray:
        declared = ", ".join(_unroutable_names(txn, universe, queue))
        text = f"{counts.stray:,} tasks wait for a worker that declares them: {declared}"
        found.append(blocker("no_worker_for_task", text))
    if counts.suspect:
        text = f"{counts.suspect:,} tasks wait for a worker without other tasks"
        found.append(blocker("quarantined", text))
    if counts.delayed:
        text = f"{counts.delayed:,} tasks wait for their start time or their next attempt"
        found.append(blocker("waits_for_start_time", text))
    if counts.blocked:
        text = f"{counts.blocked:,} tasks wait for the end of other tasks"
        found.append(blocker("waits_for_tasks", text))
    return found


def _unserved(txn: Txn, universe: str, queue: str, counts: TaskCounts) -> Blocker:
    """The blocker of a queue with ready tasks, none of which runs."""
    ready = counts.ready + counts.suspect
    workers = len(list_live(txn, universe, "task"))
    if not workers:
        text = f"{ready:,} tasks are ready, and no live worker has the role `task`"
        return blocker("no_live_worker", text, names={"role": "task"})
    text = f"{ready:,} tasks are ready, {workers:,} workers are live, and none runs a task of it"
    return blocker("waits_for_worker", text)


def _unroutable_names(txn: Txn, universe: str, queue: str) -> list[str]:
    """Return names of tasks that no worker declares, by one seek each."""
    prefix = keys_of(universe).unroutable + pack_text(queue)
    lo = prefix
    names: list[str] = []
    while len(names) < NAMED_MAX and (rows := txn.scan(lo, tuples.prefix_end(prefix), 1)):
        name = tuples.unpack(rows[0][0][len(prefix) :])[0]
        names.append(str(name))
        lo = tuples.prefix_end(prefix + tuples.pack((name,)))
    return names


def _explain_effects(txn: Txn, universe: str, id: str) -> WhyAnswer:
    kind = id.removeprefix(_EFFECTS)
    queue = effect_queue(universe, kind)
    keys = items.keys_of(queue)
    if txn.get(keys.counts) is None:
        raise NotFound(what="queue", queue=id[:200], universe=universe)
    counts = queues.counts(txn, queue)
    found: list[Blocker] = []
    first = txn.scan(keys.ready, tuples.prefix_end(keys.ready), 1)
    for _, packed_seq in first:
        enqueued_ns = items.load_item(txn, keys, packed_seq).enqueued_ns
        found.append(ready_blocker(txn, queue, kind, enqueued_ns))
    if counts.delayed:
        text = f"{counts.delayed:,} effects wait for a budget or their next attempt"
        found.append(blocker("waits_for_retry", text))
    if counts.dead:
        text = f"{counts.dead:,} effects are dead letters"
        found.append(blocker("dead_letters", text, names={"queue": queue}))
    figures = limits.queue_figures(txn, universe, f"effect_kind:{kind}", counts.open)
    found += limits.reached(universe, figures)
    state = "active" if counts.ready or counts.delayed or counts.claimed else "idle"
    return answer("queue", id, state, found)
