"""The workload on PostgreSQL: the workloads of worlds, effects and tasks, with the goals of Holdfast there.

The parts are those of the three workloads. Names that occur twice are changed. Each group of parts gets a
separate database. A system without a feature (a queue has no ordered messages) skips the part. `inserts`
is the reference, measured in every turn: one INSERT and its commit per transaction, on one connection and
on several.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bench.peers import effect_workload, task_workload, workload
from bench.peers.effect_workload import EffectAmount
from bench.peers.suite import Goal
from bench.peers.task_workload import TaskAmount
from bench.peers.workload import Amount

RAW_CONNECTIONS = (1, 8)

MEASURES = {
    "batch": "messages/s",
    "senders": "messages/s",
    "total": "messages/s",
    "hot": "messages/s",
    "message_p95": "ms",
    "chains_64": "steps/s",
    "chains_500": "steps/s",
    "step_p95": "ms",
    "timer_p95": "ms",
    "single": "tasks/s",
    "batched": "tasks/s",
    "drain_10k": "tasks/s",
    "drain_200k": "tasks/s",
    "end_to_end": "tasks/s",
    "end_to_end_batched": "tasks/s",
    "task_p95": "ms",
}
# Measures that are also shown as multiples of the inserts on one connection, in the same turn.
AGAINST_RAW = ("batch", "senders", "chains_64", "single", "batched", "drain_10k", "end_to_end")
EXTRA = {
    "ran_p95": "ms",
    **{f"insert_{count}": "inserts/s" for count in RAW_CONNECTIONS},
    **{f"{name}_raw": "× insert_1" for name in AGAINST_RAW},
    "message_p50": "ms",
    "ask_p95": "ms",
    "step_p50": "ms",
    "step_p99": "ms",
    "whole_p95": "ms",
    "timer_p50": "ms",
    "timer_p99": "ms",
    "few_worlds_p95": "ms",
    "chains_64_async": "steps/s",
    "chains_500_async": "steps/s",
    "chains_new": "steps/s",
    "single_threads": "tasks/s",
    "task_p50": "ms",
    "flat": "×",
    "idle": "% of a core",
    **{name: unit for name, unit in effect_workload.EXTRA.items() if "_us_" in name},
    **{name: unit for name, unit in task_workload.EXTRA.items() if "_us" in name},
    "raw": "fdatasync/s",
}
WHAT = {
    **{name: workload.WHAT[name] for name in ("batch", "senders", "hot")},
    "message_p95": workload.WHAT["p95"],
    **{name: effect_workload.WHAT[name] for name in ("chains_64", "chains_500")},
    "step_p95": effect_workload.WHAT["step_p95"],
    "timer_p95": effect_workload.WHAT["timer_p95"],
    **{name: what for name, what in task_workload.WHAT.items() if name != "p95"},
    "task_p95": task_workload.WHAT["p95"],
}
PARTS = {
    "inserts": (),
    "messages": ("batch", "senders", "total"),
    "hot": ("hot",),
    "message_latency": ("message_p95",),
    "chains": ("chains_64", "chains_500"),
    "steps": ("step_p95",),
    "timers": ("timer_p95",),
    "enqueue": ("single", "batched"),
    "drain": ("drain_10k",),
    "end_to_end": ("end_to_end", "end_to_end_batched"),
    "task_latency": ("task_p95",),
    "idle": (),
    "backlog": ("drain_200k",),
}
# Part that runs before each group.
GOALS = tuple(
    Goal(name, "total" if name in ("batch", "senders", "hot") else name, below=1, best=True)
    if unit == "ms"
    else Goal(name, "total" if name in ("batch", "senders", "hot") else name, at_least=1, best=True)
    for name, unit in MEASURES.items()
    if name != "total"
)


@dataclass(frozen=True)
class PgAmount:
    worlds: Amount = field(default_factory=lambda: Amount(per_key=50, hot=5_000))
    # A busy server needs more time to set two thousand timers.
    effects: EffectAmount = field(default_factory=lambda: EffectAmount(lead_s=20.0))
    tasks: TaskAmount = field(default_factory=TaskAmount)

    def scaled(self, by: float) -> PgAmount:
        return replace(
            self,
            worlds=self.worlds.scaled(by),
            effects=self.effects.scaled(by),
            tasks=self.tasks.scaled(by),
        )

    def __str__(self) -> str:
        return f"{self.worlds}; {self.effects}; {self.tasks}"
