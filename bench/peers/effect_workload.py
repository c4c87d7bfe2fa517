"""The effect workload: its parts, the amounts for every system, and the goals of Holdfast.

    chains      flows of STEPS sequential durable no-op steps, a fixed number of flows at once
    steps       one step every 20 ms: until its outcome is durable and the flow continues
    timers      TIMERS timers evenly spread over SPREAD_S: the lateness of each

The parts are timed in the same way on every system: rates over the same number of seconds, latency at the
same pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.effect_app import STEPS
from bench.peers.suite import Goal

IN_FLIGHT = (64, 500)
STEPS_PER_S = 50
LEAD_S = 4.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

MEASURES = {
    **{f"chains_{count}": "steps/s" for count in IN_FLIGHT},
    **{f"step_{name}": "ms" for name in SHARES},
    **{f"timer_{name}": "ms" for name in SHARES},
}
EXTRA = {
    **{f"chains_{count}_async": "steps/s" for count in IN_FLIGHT},
    "chains_new": "steps/s",
    "whole_p95": "ms",
    "delayed_p95": "ms",
    "few_worlds_p95": "ms",
    **{
        f"{who}_us_{count}": "µs a step"
        for count in IN_FLIGHT
        for who in ("client", "roles", "writer")
    },
    "raw": "fdatasync/s",
}
WHAT = {
    **{
        f"chains_{count}": f"flows of {STEPS} no-op effects in sequence, {count} flows at once"
        for count in IN_FLIGHT
    },
    "step_p95": f"dispatch to receipt journaled at {STEPS_PER_S}/s",
    "timer_p95": "lateness of 2,000 timers over 10 s",
}
PARTS = {
    "chains": tuple(name for name in MEASURES if name.startswith("chains_")),
    "steps": tuple(name for name in MEASURES if name.startswith("step_")),
    "timers": tuple(name for name in MEASURES if name.startswith("timer_")),
}
GOALS = (
    *(Goal(f"chains_{count}", f"chains_{count}", at_least=3) for count in IN_FLIGHT),
    Goal("timer_p95", "timer_p95", below=1, best=True),
)


@dataclass(frozen=True)
class EffectAmount:
    chain_s: float = 5.0
    steps: int = 250
    timers: int = 2000
    spread_s: float = 10.0
    # Time between the creation of the first timer and its due time. All timers are set within it.
    lead_s: float = LEAD_S

    def scaled(self, by: float) -> EffectAmount:
        """Reduce the amount for a small budget. Never increases it, never to zero. Timers keep their density."""
        by = min(by, 1.0)
        return replace(
            self,
            chain_s=max(self.chain_s * by, 0.5),
            steps=max(int(self.steps * by), 50),
            timers=max(int(self.timers * by), 100),
            spread_s=max(self.spread_s * by, self.spread_s * 100 / self.timers),
            lead_s=max(self.lead_s * by, min(self.lead_s, LEAD_S)),
        )

    def __str__(self) -> str:
        return (
            f"chains {self.chain_s:g} s each, {self.steps} steps, "
            f"{self.timers} timers over {self.spread_s:g} s"
        )
