"""Actors: what runs under the scheduler, dies, and comes back as another incarnation.

An `Actor` is what survives a crash of its process (a client's own notes, a name); a `Life` is one
incarnation of it. The process's memory is the stack and the locals of `live`: gone when it dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.clock import MS, S
from holdfast.errors import HoldfastError
from holdfast.sim.clocks import ActorClock
from holdfast.sim.machine import SimStore
from holdfast.sim.scheduler import Scheduler, Task
from holdfast.sim.settings import Settings
from holdfast.sim.store import FaultingStore
from holdfast.sim.tape import Tape

if TYPE_CHECKING:
    from holdfast.sim.simulation import Simulation

# How long a dead process takes to come back.
RESTARTS_NS = (50 * MS, 200 * MS, 1 * S, 3 * S)
SKEWS_NS = (0, 700 * MS, -700 * MS, 3600 * S, -3600 * S)


class Halted(Exception):
    """The process ends itself; it comes back as another incarnation."""


class Actor:
    """One role under a name. `live` is the life of a process; it may return, and is restarted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnations = 0

    def live(self, life: Life) -> None:
        raise NotImplementedError

    def idle(self) -> bool:
        """Whether the actor owes nothing: asked when the run comes to rest."""
        return True


class Life:
    """One incarnation: its store, its clock, its way to yield."""

    def __init__(self, simulation: Simulation, actor: Actor, incarnation: str) -> None:
        self.simulation = simulation
        self.name = actor.name
        self.incarnation = incarnation
        self.settings: Settings = simulation.settings
        self.tape: Tape = simulation.tape
        self.scheduler: Scheduler = simulation.scheduler
        skew_ns = self.tape.pick(SKEWS_NS) if self.settings.skew else 0
        self.clock = ActorClock(
            simulation.clock,
            self.scheduler,
            f"{actor.name}/{incarnation}",
            skew_ns=skew_ns,
            calm=lambda: simulation.calm,
        )
        self.store = FaultingStore(simulation.store, actor.name, incarnation, self.clock)

    @property
    def calm(self) -> bool:
        return self.simulation.calm

    @property
    def shared(self) -> SimStore:
        return self.simulation.store

    def sleep(self, ns: int) -> None:
        self.scheduler.sleep(ns)

    def beside(self, name: str, body: Callable[[], None]) -> None:
        """Another thread of this process."""
        self.scheduler.spawn(f"{self.name} {name}", body, beside=self.scheduler.current)

    def rest(self, *, ms: int = 100) -> None:
        """A pause of about this length: half to three halves of it."""
        self.sleep((ms // 2 + self.tape.draw(ms + 1)) * MS)

    def note(self, op: str, **args: Any) -> None:
        self.simulation.history.add(
            self.store.now_ns(), op, args, actor=self.name, incarnation=self.incarnation
        )

    def seen(self, what: str) -> None:
        """Something that should happen at times, and did."""
        self.simulation.seen[what] += 1


def describe(error: BaseException) -> str:
    kind = error.code if isinstance(error, HoldfastError) else type(error).__name__
    return f"{kind}: {error}"


def alive(task: Task | None) -> bool:
    return task is not None and not task.dead and not task.killed
