"""Who takes part in a run."""

from __future__ import annotations

from holdfast.sim import workload_tasks as tasks
from holdfast.sim.actor import Actor
from holdfast.sim.nemesis import Fate, Operator
from holdfast.sim.settings import Settings, Workload
from holdfast.sim.workload_clients import Clerk, Producer
from holdfast.sim.workload_queue import Putter, Reaper, RunnerWorker, Worker
from holdfast.sim.workload_world import Host
from holdfast.sim.workload_worlds import worlds


def cast(settings: Settings) -> list[Actor]:
    """The actors of a run, in the order they start."""
    about = settings.workload
    actors: list[Actor] = []
    if about in (Workload.SPINE, Workload.BOTH):
        actors += _spine(settings)
    if about in (Workload.WORLDS, Workload.EFFECTS, Workload.BOTH):
        actors += worlds(settings)
    if about == Workload.TASKS:
        actors += tasks.actors(settings)
    if about == Workload.LEDGER:
        # Here, because it needs NumPy and the others do not.
        from holdfast.sim.workload_ledger import ledger

        actors += ledger(settings)
    return [*actors, *([Fate("fate")] if settings.nemesis else [])]


def _spine(settings: Settings) -> list[Actor]:
    return [
        *(Host(f"host{n}") for n in range(settings.hosts)),
        *(Producer(f"producer{n}") for n in range(settings.producers)),
        *(Putter(f"putter{n}") for n in range(settings.putters)),
        *(Worker(f"worker{n}") for n in range(settings.workers)),
        *(RunnerWorker(f"runner{n}", ("q", "fx")[n % 2]) for n in range(settings.runners)),
        *(Operator(f"operator{n}") for n in range(settings.operators)),
        *(Reaper(f"reaper{n}") for n in range(settings.operators)),
        *(Clerk(f"clerk{n}") for n in range(settings.clerks)),
    ]
