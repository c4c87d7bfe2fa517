"""A seed, or a tape, and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from holdfast.sim import mutants
from holdfast.sim.checkers import check_all
from holdfast.sim.history import History
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import swarm
from holdfast.sim.simulation import Simulation
from holdfast.sim.sometimes import sightings
from holdfast.sim.tape import Tape
from holdfast.sim.violation import Violation
from holdfast.sim.workloads import cast


@dataclass
class Result:
    seed: int | None
    history_hash: str
    state_hash: str
    # The same without what an engine keeps for itself: alike on all stores.
    content_hash: str
    violations: list[Violation]
    sometimes: Counter[str]
    steps: int
    tape: list[int] = field(repr=False)
    history: History = field(repr=False)

    @property
    def checkers(self) -> list[str]:
        """The numbers that were violated, in the order of the registry."""
        return list(dict.fromkeys(violation.number for violation in self.violations))


def run_seed(
    seed: int,
    backend: str = "memory",
    mutant: str | None = None,
    *,
    threads: Threads | None = None,
) -> Result:
    return run_tape(Tape(seed), backend, mutant, threads=threads)


def replay(
    recorded: Sequence[int],
    backend: str = "memory",
    mutant: str | None = None,
    *,
    threads: Threads | None = None,
) -> Result:
    return run_tape(Tape.replay(recorded), backend, mutant, threads=threads)


def run_tape(
    tape: Tape, backend: str, mutant: str | None, *, threads: Threads | None = None
) -> Result:
    planted = mutants.MUTANTS[mutant].planted() if mutant else nullcontext()
    with Threads() if threads is None else nullcontext(threads) as pool, planted:
        settings = swarm(tape)
        simulation = Simulation(tape, settings, cast(settings), pool, backend=backend)
        simulation.run()
    return verdict(simulation)


def verdict(simulation: Simulation) -> Result:
    history = simulation.history
    violations = [
        Violation("ACTOR", f"{name} died of {error}") for name, error in simulation.errors
    ]
    violations += check_all(history)
    return Result(
        simulation.tape.seed,
        history.hash(),
        simulation.state_hash,
        simulation.content_hash,
        violations,
        sightings(history, simulation.seen),
        simulation.scheduler.steps,
        simulation.tape.drawn,
        history,
    )
