"""`explain`: why a subject of any kind does not move. A pure function of a snapshot.

Its cost does not depend on any backlog. Each answer reads rows of the subject, counters, and at most 1,000 rows each
of workers, open reservations, open dependencies, queues and world records that readiness lists.
"""

from __future__ import annotations

from holdfast.blockers import (
    effects,
    flows,
    queues,
    runs,
    schedules,
    tasks,
    timers,
    universes,
    workers,
    worlds,
)
from holdfast.blockers.answer import WhyAnswer
from holdfast.errors import Invalid
from holdfast.store.api import Txn

KINDS = (
    "world", "task", "flow", "effect", "timer", "run", "schedule", "queue", "worker", "universe",
)  # fmt: skip


def explain(txn: Txn, universe: str, kind: str, id: str, wall_ns: int) -> WhyAnswer:
    """Explain a subject of a universe. `wall_ns` is the wall clock, for schedules and calendar timers."""
    match kind:
        case "world":
            return worlds.explain(txn, universe, id)
        case "task":
            return tasks.explain(txn, universe, id)
        case "flow":
            return flows.explain(txn, universe, id)
        case "effect":
            return effects.explain(txn, universe, id)
        case "timer":
            return timers.explain(txn, universe, id, wall_ns)
        case "run":
            return runs.explain(txn, id)
        case "schedule":
            return schedules.explain(txn, universe, id, wall_ns)
        case "queue":
            return queues.explain(txn, universe, id)
        case "worker":
            return workers.explain(txn, universe, id)
        case "universe":
            return universes.explain(txn, id)
    raise Invalid(what="kind", found=kind[:40], expected=list(KINDS))
