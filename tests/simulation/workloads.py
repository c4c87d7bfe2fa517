"""The actors of a run, by workload."""

from __future__ import annotations

from holdfast.sim.actor import Actor
from holdfast.sim.fault_injector import FaultInjector, MaintenanceOperator
from holdfast.sim.settings import SimulationSettings, Workload
from tests.simulation import workload_tasks as tasks
from tests.simulation.workload_clients import InboxProducer, KeyValueClient
from tests.simulation.workload_hosts import HostActor
from tests.simulation.workload_queue import QueueOperator, QueueProducer, QueueWorker, RunnerActor
from tests.simulation.workload_worlds import world_actors


def create_actors(settings: SimulationSettings) -> list[Actor]:
    """Create the actors of a run, in starting order."""
    workload = settings.workload
    actors: list[Actor] = []
    if workload in (Workload.SPINE, Workload.BOTH):
        actors += _primitive_actors(settings)
    if workload in (Workload.WORLDS, Workload.EFFECTS, Workload.BOTH):
        actors += world_actors(settings)
    if workload == Workload.TASKS:
        actors += tasks.task_actors(settings)
    if workload == Workload.LEDGER:
        # Imported here, because it needs NumPy.
        from tests.simulation.workload_ledger import ledger_actors

        actors += ledger_actors(settings)
    return [*actors, *fault_injectors(settings)]


def fault_injectors(settings: SimulationSettings) -> list[Actor]:
    return [FaultInjector("fate")] if settings.environment_faults else []


def _primitive_actors(settings: SimulationSettings) -> list[Actor]:
    return [
        *(HostActor(f"host{n}") for n in range(settings.hosts)),
        *(InboxProducer(f"producer{n}") for n in range(settings.producers)),
        *(QueueProducer(f"putter{n}") for n in range(settings.putters)),
        *(QueueWorker(f"worker{n}") for n in range(settings.workers)),
        *(RunnerActor(f"runner{n}", ("q", "fx")[n % 2]) for n in range(settings.runners)),
        *(MaintenanceOperator(f"operator{n}") for n in range(settings.operators)),
        *(QueueOperator(f"reaper{n}") for n in range(settings.operators)),
        *(KeyValueClient(f"clerk{n}") for n in range(settings.kv_clients)),
    ]
