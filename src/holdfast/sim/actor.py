"""Actors: simulated processes that run under the scheduler, crash and restart.

An `Actor` survives a crash of its process: it has a name and a client's own notes. An `Incarnation`
is one process of that actor. The memory of the process is the stack and the locals of `live`. A
crash discards it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.clock import MS, S
from holdfast.errors import HoldfastError
from holdfast.sim.actor_clock import ActorClock
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faulting_client import FaultingClient
from holdfast.sim.scheduler import Scheduler, SimThread
from holdfast.sim.settings import SimulationSettings
from holdfast.sim.sim_store import SimStore

if TYPE_CHECKING:
    from holdfast.sim.simulation import Simulation

# Delays before a dead process restarts.
RESTART_DELAYS_NS = (50 * MS, 200 * MS, 1 * S, 3 * S)
SKEWS_NS = (0, 700 * MS, -700 * MS, 3600 * S, -3600 * S)


class ProcessHalted(Exception):
    """The process ends itself. The simulation restarts it as a new incarnation."""


class Actor:
    """One role under a name. `live` is the body of a process. It may return; the actor is then
    restarted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnations = 0

    def run_process(self, incarnation: Incarnation) -> None:
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether the actor has no work left. Checked when the run should come to rest."""
        return True


class Incarnation:
    """One incarnation of an actor: its store client, its clock and its access to the scheduler."""

    def __init__(self, simulation: Simulation, actor: Actor, incarnation_id: str) -> None:
        self.simulation = simulation
        self.name = actor.name
        self.incarnation_id = incarnation_id
        self.settings: SimulationSettings = simulation.settings
        self.tape: ChoiceTape = simulation.tape
        self.scheduler: Scheduler = simulation.scheduler
        skew_ns = self.tape.pick(SKEWS_NS) if self.settings.skew else 0
        self.clock = ActorClock(
            simulation.clock,
            self.scheduler,
            f"{actor.name}/{incarnation_id}",
            skew_ns=skew_ns,
            faults_stopped=lambda: simulation.faults_stopped,
        )
        self.store = FaultingClient(simulation.store, actor.name, incarnation_id, self.clock)
        # The running calls that faults have hit too often (`call_protection`).
        self.protected_calls: list[str] = []

    @property
    def faults_stopped(self) -> bool:
        return self.simulation.faults_stopped or self.is_protected

    @property
    def is_protected(self) -> bool:
        """Whether this process has no faults."""
        return not self.store.faults_enabled

    @is_protected.setter
    def is_protected(self, protected: bool) -> None:
        self.store.faults_enabled = not protected

    @property
    def sim_store(self) -> SimStore:
        return self.simulation.store

    def sleep(self, ns: int) -> None:
        self.scheduler.sleep(ns)

    def spawn_thread(self, name: str, body: Callable[[], None]) -> None:
        """Spawn another thread of this process."""
        self.scheduler.spawn(f"{self.name} {name}", body, same_process_as=self.scheduler.current)

    def pause(self, *, ms: int = 100) -> None:
        """Sleep for about this time: 50 % to 150 % of it."""
        self.sleep((ms // 2 + self.tape.draw(ms + 1)) * MS)

    def record(self, op: str, **args: Any) -> None:
        self.simulation.history.add(
            self.store.now_ns(), op, args, actor=self.name, incarnation=self.incarnation_id
        )

    def count_coverage(self, point: str) -> None:
        """Count a coverage point ("sometimes assertion") that was reached."""
        self.simulation.coverage[point] += 1


def describe_error(error: BaseException) -> str:
    kind = error.code if isinstance(error, HoldfastError) else type(error).__name__
    return f"{kind}: {error}"


def is_alive(thread: SimThread | None) -> bool:
    return thread is not None and not thread.has_ended and not thread.killed
