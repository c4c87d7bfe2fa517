"""The number of leases that the roles of a process hold, by kind."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.tasks.worker import TaskWorker
from holdfast.workers.world.worker import WorldWorker


def held_leases(roles: Iterable[object]) -> dict[str, int]:
    """Count the leases that these roles hold, by kind."""
    counts: dict[str, int] = {}
    for role in roles:
        if isinstance(role, WorldWorker):
            counts["worlds"] = len(role.hosted)
        elif isinstance(role, EffectWorkerPool):
            counts["effects"] = sum(runner.under_way for runner in role.runners)
        elif isinstance(role, TaskWorker):
            counts["tasks"] = role.leased_count
        elif isinstance(role, Orchestrator):
            counts["authority"] = int(role.is_leader)
    return counts
