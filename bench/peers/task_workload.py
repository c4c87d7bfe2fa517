"""The task workload: its parts, the amounts for every system, and the goals of Holdfast.

    enqueue      tasks enqueued by many callers, and by one caller in batches, while no worker runs
    drain        a worker runs a backlog: 10,000 tasks, and 200,000
    end_to_end   both at once
    latency      one task every 20 ms: from before its enqueue call until it is durable and its function
                 has returned
    idle         processor time of worker and server while idle
    cold         from the start of a process until its first task is completed

A task only records its completion. The parts run in this order within a turn. The large backlog comes last,
because it is not always emptied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.suite import Goal

CALLERS = 64
BATCH = 1000
LATENCY_PER_S = 50
WHO = ("producer", "worker", "server")

MEASURES = {
    "single": "tasks/s",
    "batched": "tasks/s",
    "drain_10k": "tasks/s",
    "drain_200k": "tasks/s",
    "end_to_end": "tasks/s",
    "end_to_end_batched": "tasks/s",
    "p95": "ms",
}
EXTRA = {
    "single_threads": "tasks/s",
    "p50": "ms",
    "ran_p95": "ms",
    "flat": "×",
    "idle": "% of a core",
    "cold": "ms",
    "worker_start": "ms",
    **{f"{who}_us": "µs a task" for who in WHO},
    **{f"{who}_us_batched": "µs a task" for who in WHO},
    "raw": "fdatasync/s",
}
WHAT = {
    "single": f"enqueues by {CALLERS} callers, each waits until its task is durable",
    "batched": f"enqueues in batches of {BATCH:,}",
    "drain_10k": "tasks done from a backlog of 10,000",
    "drain_200k": "tasks done from a backlog of 200,000",
    "end_to_end": f"enqueued by {CALLERS} callers and done at the same time",
    "end_to_end_batched": f"enqueued in batches of {BATCH:,} and done at the same time",
    "p95": f"enqueue to done at {LATENCY_PER_S}/s",
}
PARTS = {
    "enqueue": ("single", "batched"),
    "drain": ("drain_10k",),
    "end_to_end": ("end_to_end", "end_to_end_batched"),
    "latency": ("p95",),
    "idle": (),
    "cold": (),
    "backlog": ("drain_200k",),
}
GOALS = tuple(
    Goal(name, name, below=0.5, best=True)
    if unit == "ms"
    else Goal(name, name, at_least=2, best=True)
    for name, unit in MEASURES.items()
)


@dataclass(frozen=True)
class TaskAmount:
    # Duration of the enqueue calls.
    seconds: float = 3.0
    # Tasks in batches. 0 if the system has no batches.
    batched: int = 50_000
    small: int = 10_000
    # 0 if the system cannot hold back a large backlog.
    large: int = 200_000
    # Maximum time to drain the large backlog.
    drain_s: float = 12.0
    paced: int = 250
    idle_s: float = 10.0

    def scaled(self, by: float) -> TaskAmount:
        """Reduce the amount for a small budget. Never increases it, never to zero. Backlogs keep their sizes."""
        by = min(by, 1.0)
        return replace(
            self,
            seconds=max(self.seconds * by, 0.5),
            batched=max(int(self.batched * by) // BATCH, 5) * BATCH if self.batched else 0,
            drain_s=max(self.drain_s * by, 3.0),
            paced=max(int(self.paced * by), 100),
            idle_s=max(self.idle_s * by, 2.0),
        )

    def __str__(self) -> str:
        return (
            f"callers {self.seconds:g} s, {self.batched:,} in batches, backlogs of {self.small:,} "
            f"and {self.large:,} (drained for {self.drain_s:g} s at most), {self.paced} paced, "
            f"{self.idle_s:g} s idle"
        )
