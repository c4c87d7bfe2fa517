"""Every crash point of small scenarios: each fault at each commit in turn.

Random seeds find bugs by chance. This search is exhaustive for one kind of bug. The scenarios are
small enough to try each commit with each fault, and a bounded share of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faults import Fault
from holdfast.sim.run_parameters import RowBehaviour, RunParameters
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import HAS_LEDGER, SimulationSettings, Workload
from holdfast.sim.simulation import Simulation
from tests.simulation.seed_run import SeedResult, check_simulation
from tests.simulation.workloads import create_actors

SCENARIO_SEED = 7
SCENARIO_SEEDS = {
    # In this seed a worker pool dies after a call, timers fire, and a fork inherits effects and
    # timers.
    "effects": 28,
    # In this seed fused commits settle an effect and timers, one timer is refused there, one is
    # cancelled, and a fork inherits some.
    "household": 11,
}
FAULTS = (
    Fault.CRASH_BEFORE,
    Fault.CRASH_AFTER,
    Fault.UNKNOWN_BEFORE,
    Fault.UNKNOWN_AFTER,
    Fault.LOST_AFTER,
    Fault.STALL,
    Fault.FULL,
)
PAIRS_MAX = 600

FaultsByCommit = Mapping[int, Fault]


def primitives() -> SimulationSettings:
    """One actor of each kind, no random faults, short."""
    return SimulationSettings(
        steps=160, hosts=2, operators=1, kv_clients=0, failures_max=2, expiries_max=2
    )


def worlds() -> SimulationSettings:
    """Two workers, an orchestrator, one world: every commit boundary of a world worker."""
    return SimulationSettings(
        steps=450, workload=Workload.WORLDS, world_workers=2, orchestrators=1, senders=1, accounts=1
    )


def effects() -> SimulationSettings:
    """One world with many effects, two effect pools, two timer workers: every commit boundary of
    those."""
    return SimulationSettings(
        steps=420,
        workload=Workload.EFFECTS,
        world_workers=1,
        orchestrators=1,
        senders=1,
        accounts=1,
        pools=2,
        timer_workers=2,
    )


def colocated() -> SimulationSettings:
    """One process that hosts a world, runs its effects and fires its timers: every commit boundary
    of it."""
    return SimulationSettings(
        steps=1000,
        workload=Workload.EFFECTS,
        world_workers=1,
        orchestrators=1,
        senders=1,
        accounts=1,
        pools=0,
        timer_workers=0,
        colocated=True,
    )


def tasks() -> SimulationSettings:
    """A submitter, two workers, an operator that cancels: every commit boundary of them."""
    return SimulationSettings(steps=260, workload=Workload.TASKS, senders=1, workers=1, operators=1)


def ledger() -> SimulationSettings:
    """Two services, two tasks, two pages of rows: every commit boundary of a ledger service."""
    behaviours = [RowBehaviour.FINE] * 12
    behaviours[1], behaviours[4], behaviours[5] = (
        RowBehaviour.FLAKY,
        RowBehaviour.POISON,
        RowBehaviour.SKIPPED,
    )
    parameters = RunParameters(
        rows=12,
        page_rows=8,
        attempts_max=2,
        checkpoint_entries=6,
        lost_answer_mille=40,
        behaviours=behaviours,
    )
    return SimulationSettings(steps=300, workload=Workload.LEDGER, ledger=parameters)


SCENARIOS: dict[str, Callable[[], SimulationSettings]] = {
    "spine": primitives,
    "worlds": worlds,
    "effects": effects,
    "household": colocated,
    "tasks": tasks,
}
if HAS_LEDGER:
    SCENARIOS["ledger"] = ledger


def run_with_faults(
    faults: FaultsByCommit,
    *,
    threads: SimThreadPool,
    backend: str = "memory",
    scenario: str = "spine",
) -> tuple[SeedResult, int]:
    """Run a scenario with faults at these commits. Also return its number of commits."""
    settings = SCENARIOS[scenario]()
    tape = ChoiceTape(SCENARIO_SEEDS.get(scenario, SCENARIO_SEED))
    simulation = Simulation(
        tape, settings, create_actors(settings), threads, backend=backend, faults_by_commit=faults
    )
    simulation.run()
    return check_simulation(simulation), simulation.fault_plan.boundary


def single_faults(boundaries: int, faults: Sequence[Fault] = FAULTS) -> Iterator[FaultsByCommit]:
    """Each fault at each commit."""
    for boundary in range(1, boundaries + 1):
        for fault in faults:
            yield {boundary: fault}


def rotated_faults(boundaries: int, faults: Sequence[Fault] = FAULTS) -> Iterator[FaultsByCommit]:
    """One fault at each commit, the faults in turn."""
    for boundary in range(1, boundaries + 1):
        yield {boundary: faults[boundary % len(faults)]}


def fault_pairs(boundaries: int, pairs_max: int = PAIRS_MAX) -> Iterator[FaultsByCommit]:
    """Sample pairs evenly over all pairs of commits and faults, so that the limit omits no
    region."""
    crashes = FAULTS[:4]
    total = boundaries * (boundaries - 1) // 2 * len(crashes) ** 2
    stride = max(1, total // pairs_max) | 1
    # An odd stride that shares no factor with the number of faults visits all their combinations.
    for n in range(0, total, stride):
        n, second = divmod(n, len(crashes))
        n, first = divmod(n, len(crashes))
        low, high = _nth_pair(n)
        yield {low: crashes[first], high: crashes[second]}


def _nth_pair(n: int) -> tuple[int, int]:
    """The n-th of (1, 2), (1, 3), (2, 3), (1, 4), …"""
    high = 2
    while n >= high - 1:
        n -= high - 1
        high += 1
    return n + 1, high
