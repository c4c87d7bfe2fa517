"""Run of one seed or choice tape: simulate, then check the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.sim.actor import Actor
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.history import History
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import SimulationSettings, draw_settings
from holdfast.sim.simulation import Simulation
from tests.simulation import mutants
from tests.simulation.checkers import check_all
from tests.simulation.coverage import count_coverage
from tests.simulation.violation import Violation
from tests.simulation.workload_dispatch import dispatch_actors, draw_dispatch_settings
from tests.simulation.workload_flows import (
    as_flow_settings,
    draw_flow_settings,
    flow_actors,
    has_flows,
)
from tests.simulation.workloads import create_actors, fault_injectors


@dataclass
class SeedResult:
    seed: int | None
    history_hash: str
    state_hash: str
    # The state hash without rows private to an engine. Equal on all stores.
    content_hash: str
    violations: list[Violation]
    steps: int
    tape: list[int] = field(repr=False)
    history: History = field(repr=False)
    counted_by_actors: Counter[str] = field(repr=False)

    @cached_property
    def coverage(self) -> Counter[str]:
        """The conditions that occurred. Most callers do not need them."""
        return count_coverage(self.history, self.counted_by_actors)

    @property
    def checkers(self) -> list[str]:
        """The numbers of the violated invariants, in the order of the registry."""
        return list(dict.fromkeys(violation.number for violation in self.violations))


def run_seed(
    seed: int,
    backend: str = "memory",
    mutant: str | None = None,
    *,
    threads: SimThreadPool | None = None,
) -> SeedResult:
    return run_tape(ChoiceTape(seed), backend, mutant, threads=threads)


def replay_tape(
    recorded: Sequence[int],
    backend: str = "memory",
    mutant: str | None = None,
    *,
    threads: SimThreadPool | None = None,
) -> SeedResult:
    return run_tape(ChoiceTape.replay(recorded), backend, mutant, threads=threads)


def run_tape(
    tape: ChoiceTape, backend: str, mutant: str | None, *, threads: SimThreadPool | None = None
) -> SeedResult:
    planted = mutants.MUTANTS[mutant].planted() if mutant else nullcontext()
    with SimThreadPool() if threads is None else nullcontext(threads) as pool, planted:
        settings, actors = _draw_run(tape, mutant)
        simulation = Simulation(tape, settings, actors, pool, backend=backend)
        simulation.run()
    return check_simulation(simulation)


def _draw_run(tape: ChoiceTape, mutant: str | None) -> tuple[SimulationSettings, list[Actor]]:
    if mutants.is_flow_bug(mutant):
        settings = draw_flow_settings(tape)
        return settings, [*flow_actors(settings), *fault_injectors(settings)]
    if not mutants.is_dispatch_bug(mutant):
        settings = draw_settings(tape)
        if mutant is None and has_flows(settings):
            as_flow_settings(settings)
            return settings, [*flow_actors(settings), *fault_injectors(settings)]
        return settings, create_actors(settings)
    settings = draw_dispatch_settings(tape)
    return settings, [*dispatch_actors(settings), *fault_injectors(settings)]


def check_simulation(simulation: Simulation) -> SeedResult:
    history = simulation.history
    violations = [
        Violation("ACTOR", f"{name} died of {error}") for name, error in simulation.errors
    ]
    violations += check_all(history)
    return SeedResult(
        seed=simulation.tape.seed,
        history_hash=history.hash(),
        state_hash=simulation.state_hash,
        content_hash=simulation.content_hash,
        violations=violations,
        steps=simulation.scheduler.steps,
        tape=simulation.tape.choices,
        history=history,
        counted_by_actors=simulation.coverage,
    )
