"""Metrics of tasks without a peer, each with its target.

The turn is the same as beside the peers (`bench.peers.task_turn`), so that the figures are comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.peers.task_holdfast import running
from bench.peers.task_turn import TaskTurn
from bench.peers.task_workload import TaskAmount
from bench.place import Place
from bench.record import Record, Sample, Target, gather


def task_backlog(place: Place) -> Record:
    """The rate must not depend on the length of the backlog."""
    samples = _repeated(place, lambda turn, amount: turn.drain(amount) | turn.backlog(amount))
    units = {"flat": "×", "drain_10k": "tasks/s", "drain_200k": "tasks/s"}
    return Record(
        "task_backlog",
        "tasks done a second from a backlog of 200,000 against one of 10,000",
        gather(samples, units),
        (Target("flat", at_least=0.9),),
    )


def task_idle(place: Place) -> Record:
    samples = _repeated(place, lambda turn, amount: turn.idle(amount))
    return Record(
        "task_idle",
        "processor time of a task worker and the store's writer while there is nothing to do",
        gather(samples, {"idle": "% of a core"}),
        (Target("idle", below=1),),
    )


def task_cold(place: Place) -> Record:
    samples = _repeated(place, lambda turn, amount: turn.cold(amount))
    return Record(
        "task_cold",
        "from the start of a process that makes a store until its first task is done; and of a "
        "worker until it has done one that waits",
        gather(samples, {"cold": "ms", "worker_start": "ms"}),
        (Target("cold", below=500),),
    )


METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric for metric in (task_backlog, task_idle, task_cold)
}


def _repeated(place: Place, part: Callable[[TaskTurn, TaskAmount], Sample]) -> list[Sample]:
    """A part of the turn, repeated, each time on a new store."""
    sizes = place.sizes
    amount = replace(
        TaskAmount(), small=sizes.tasks_small, large=sizes.tasks_large, idle_s=sizes.idle_s
    )
    samples = []
    for _ in range(place.repeats):
        with running(place) as tasks:
            samples.append(part(TaskTurn(tasks), amount))
    return samples
