"""Metrics of waiting: the wake-up latency, and the cost of an idle process."""

from __future__ import annotations

import time

from bench.place import Place, writer_pid
from bench.record import Record, Sample, Target, gather
from bench.workers import Worker, WorkerGroup, cpu_ns

# Long enough for the waiter to sleep again before the next notification.
SETTLE_S = 0.005
WAIT_S = 10.0


def wake_up(place: Place) -> Record:
    """From the notify call until the other process runs again, including the durable commit."""
    samples = []
    with (
        place.store("wake") as path,
        WorkerGroup("waiter", 1, path) as waiters,
        WorkerGroup("notifier", 1, path) as notifiers,
    ):
        [waiter], [notifier] = waiters.members, notifiers.members
        for _ in range(place.repeats):
            samples.append(
                _percentiles([_wake(waiter, notifier) for _ in range(place.sizes.wakes)])
            )
    units = {"p95_ms": "ms", "p50_ms": "ms", "max_ms": "ms", "after_commit_p95_ms": "ms"}
    return Record(
        "wake_up",
        "another process notifies, a waiting one runs: call to wake-up, the commit included",
        gather(samples, units),
        (Target("p95_ms", below=2),),
        {"wakes": place.sizes.wakes},
    )


def idle(place: Place) -> Record:
    """An idle runner with an empty queue, and the writer process that serves it."""
    seconds = max(place.slice_s, 0.2)
    samples = []
    with place.store("idle") as path, WorkerGroup("idler", 1, path) as group:
        pid = writer_pid(path)
        for _ in range(place.repeats):
            began, used_ns = time.perf_counter(), cpu_ns(pid)
            [answer] = group.go(seconds=seconds)
            took_ns = (time.perf_counter() - began) * 1e9
            samples.append(
                {
                    "client": 100 * answer["share"],
                    "writer": 100 * (cpu_ns(pid) - used_ns) / took_ns,
                }
            )
    return Record(
        "idle",
        "a runner with nothing to do, and its store's writer",
        gather(samples, {"client": "% of a core", "writer": "% of a core"}),
        (Target("client", below=1), Target("writer", below=1)),
    )


def _wake(waiter: Worker, notifier: Worker) -> tuple[float, float]:
    waiter.go(timeout_s=WAIT_S)
    notifier.go(after_s=SETTLE_S)
    notified, woken = notifier.answer(), waiter.answer()
    return (
        (woken["woke_ns"] - notified["called_ns"]) / 1e6,
        (woken["woke_ns"] - notified["answered_ns"]) / 1e6,
    )


def _percentiles(wakes: list[tuple[float, float]]) -> Sample:
    whole, after = sorted(wake[0] for wake in wakes), sorted(wake[1] for wake in wakes)
    at_95 = len(wakes) * 95 // 100
    return {
        "p50_ms": whole[len(whole) // 2],
        "p95_ms": whole[at_95],
        "max_ms": whole[-1],
        # Below zero if the waiter runs before the notifier receives its answer.
        "after_commit_p95_ms": after[at_95],
    }
