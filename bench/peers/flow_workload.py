"""The flow workload: its parts, the amounts for every system, and the goals of Holdfast.

chains      flows of STEPS sequential durable no-op steps, a fixed number of flows at once
steps       one flow every 20 ms: until its first step begins, and until the outcome of a step is durable
waking      sleeping flows that are due at the same time: until the code of the last one runs
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.effect_workload import IN_FLIGHT, SHARES, STEPS_PER_S
from bench.peers.flow_app import STEPS
from bench.peers.suite import Goal

MEASURES = {
    **{f"chains_{count}": "steps/s" for count in IN_FLIGHT},
    **{f"step_{name}": "ms" for name in SHARES},
    **{f"first_{name}": "ms" for name in SHARES},
    "whole_p95": "ms",
    "waking": "flows/s",
}
EXTRA = {
    **{
        f"{who}_us_{count}": "µs a step"
        for count in IN_FLIGHT
        for who in ("client", "worker", "writer")
    },
    "commits_1": "commits a step",
    **{f"commits_{count}": "commits a step" for count in IN_FLIGHT},
    "waking_ended": "flows/s",
    "tasks": "tasks/s",
    "tasks_ended": "tasks/s",
    "raw": "fdatasync/s",
}
WHAT = {
    **{
        f"chains_{count}": f"flows of {STEPS} no-op steps in sequence, {count} flows at once"
        for count in IN_FLIGHT
    },
    "step_p95": f"one step until its outcome is durable and its flow continues, {STEPS_PER_S} flows/s",
}
PARTS = {
    "chains": tuple(name for name in MEASURES if name.startswith("chains_")),
    "steps": tuple(name for name in MEASURES if name.startswith(("step_", "first_", "whole_"))),
    "waking": ("waking",),
}
GOALS = (
    *(Goal(f"chains_{count}", f"chains_{count}", at_least=5) for count in IN_FLIGHT),
    *(Goal(f"chains_{count}", f"chains_{count}", at_least=10, of="dbos") for count in IN_FLIGHT),
    Goal("step_p95", "step_p95", below=1.0),
)


@dataclass(frozen=True)
class FlowAmount:
    chain_s: float = 8.0
    steps: int = 500
    waking: int = 5_000
    # Time between the start of the first sleeping flow and its due time. All of them sleep within it.
    lead_s: float = 10.0

    def scaled(self, by: float) -> FlowAmount:
        """Reduce the amount for a small budget. Never increases it, never to zero."""
        by = min(by, 1.0)
        return replace(
            self,
            chain_s=max(self.chain_s * by, 0.5),
            steps=max(int(self.steps * by), 50),
            waking=max(int(self.waking * by), 100),
            lead_s=max(self.lead_s * by, 3.0),
        )

    def __str__(self) -> str:
        return f"chains {self.chain_s:g} s each, {self.steps} flows at a fixed pace, {self.waking:,} flows due at once"
