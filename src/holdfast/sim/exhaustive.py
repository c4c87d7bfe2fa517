"""Every crash point of a small scenario: at each commit in turn, before, after, and unknown.

Random seeds find what they stumble on; this finds all of one kind. The scenario is small enough to
try each commit with each fault, and a bounded share of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from holdfast.sim.faults import Fault
from holdfast.sim.ledger_shape import LedgerShape, Nature
from holdfast.sim.run import Result, verdict
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import HAS_LEDGER, Settings, Workload
from holdfast.sim.simulation import Simulation
from holdfast.sim.tape import Tape
from holdfast.sim.workloads import cast

SCENARIO_SEED = 7
SEEDS = {
    # One in which a pool dies after a call, timers fire, and a fork takes effects and timers over.
    "effects": 28,
    # One in which an effect and timers are carried, one timer is refused there, one is cancelled, and a fork
    # keeps some.
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

Forced = Mapping[int, Fault]


def spine() -> Settings:
    """One of everything, no chance faults, short."""
    return Settings(steps=160, hosts=2, operators=1, clerks=0, failures_max=2, expiries_max=2)


def worlds() -> Settings:
    """Two workers, an orchestrator, one world that is sent to: every boundary of a world worker."""
    return Settings(
        steps=450, workload=Workload.WORLDS, world_workers=2, orchestrators=1, senders=1, accounts=1
    )


def effects() -> Settings:
    """One world that wants much, two pools, two timer workers: every boundary of those."""
    return Settings(
        steps=420,
        workload=Workload.EFFECTS,
        world_workers=1,
        orchestrators=1,
        senders=1,
        accounts=1,
        pools=2,
        timer_workers=2,
    )


def household() -> Settings:
    """One process that hosts a world, does its effects and fires its timers: every boundary of it."""
    return Settings(
        steps=1000,
        workload=Workload.EFFECTS,
        world_workers=1,
        orchestrators=1,
        senders=1,
        accounts=1,
        pools=0,
        timer_workers=0,
        household=True,
    )


def tasks() -> Settings:
    """A submitter, two workers, somebody who cancels: every boundary of them."""
    return Settings(steps=260, workload=Workload.TASKS, senders=1, workers=1, operators=1)


def ledger() -> Settings:
    """Two services, two tasks, two pages of rows: every boundary of a ledger service."""
    natures = [Nature.FINE] * 12
    natures[1], natures[4], natures[5] = Nature.FLAKY, Nature.POISON, Nature.SKIPPED
    shape = LedgerShape(
        rows=12, page_rows=8, attempts_max=2, checkpoint_entries=6, lost_mille=40, natures=natures
    )
    return Settings(steps=300, workload=Workload.LEDGER, ledger=shape)


SCENARIOS: dict[str, Callable[[], Settings]] = {
    "spine": spine,
    "worlds": worlds,
    "effects": effects,
    "household": household,
    "tasks": tasks,
}
if HAS_LEDGER:
    SCENARIOS["ledger"] = ledger


def run_forced(
    forced: Forced, *, threads: Threads, backend: str = "memory", scenario: str = "spine"
) -> tuple[Result, int]:
    """A scenario with faults at these commits; also how many commits there were."""
    settings = SCENARIOS[scenario]()
    tape = Tape(SEEDS.get(scenario, SCENARIO_SEED))
    simulation = Simulation(tape, settings, cast(settings), threads, backend=backend, forced=forced)
    simulation.run()
    return verdict(simulation), simulation.plan.boundary


def singles(boundaries: int) -> Iterator[Forced]:
    for boundary in range(1, boundaries + 1):
        for fault in FAULTS:
            yield {boundary: fault}


def pairs(boundaries: int, pairs_max: int = PAIRS_MAX) -> Iterator[Forced]:
    """Evenly spread over all pairs of commits and faults, so that a bound cuts no corner off."""
    crashes = FAULTS[:4]
    total = boundaries * (boundaries - 1) // 2 * len(crashes) ** 2
    stride = max(1, total // pairs_max) | 1
    # An odd stride that shares no factor with the number of faults visits all their combinations.
    for n in range(0, total, stride):
        n, second = divmod(n, len(crashes))
        n, first = divmod(n, len(crashes))
        low, high = _pair(n)
        yield {low: crashes[first], high: crashes[second]}


def _pair(n: int) -> tuple[int, int]:
    """The n-th of (1, 2), (1, 3), (2, 3), (1, 4), …"""
    high = 2
    while n >= high - 1:
        n -= high - 1
        high += 1
    return n + 1, high
