"""Effects, timers and mail under faults: random seeds, every crash point, pools that crash at calls."""

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.sim import settings
from holdfast.sim.actor import Incarnation
from holdfast.sim.faults import Fault
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import Workload
from tests.sim.fault_plans import FAULT_PLANS, FaultPlanner
from tests.simulation import crash_points, external_service
from tests.simulation.external_service import DIES_AFTER, DIES_BEFORE, SUCCEEDS, ExternalService
from tests.simulation.seed_run import SeedResult, run_seed

CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)
# Document 004's chaos rows 4 and 5 are the faults between claim, call and receipt. Row 6 has no such point:
# one commit removes and fires a timer.
FAULTED_OPS = (
    "claims.claim_batch",
    "queue.finish_batch",
    "timers.deliver_due",
    "cycle.commit",
    "rate.grant",
)
# Crashes of pools: few in `make test`, many in `make sim`.
DEATHS = (50, pytest.param(200, marks=pytest.mark.deep))


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def effects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.EFFECTS,))


@pytest.mark.slow
def test_effect_seeds_break_no_invariant(threads: SimThreadPool) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(11_000, 11_030):
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    for point in (
        "effect: done at a later attempt",
        "effect: ended, cancelled",
        "effect: ended, expiries_exhausted",
        "effect: died after the call",
        "timer: event in a journal",
        "fork: effects reissued",
    ):
        assert seen[point], point


@pytest.mark.parametrize("seed", range(11_100, 11_103))
def test_effect_seed_has_the_same_run_on_memory_and_lmdb(seed: int, threads: SimThreadPool) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("plan", FAULT_PLANS)
def test_no_single_crash_point_breaks_the_effects_scenario(
    plan: FaultPlanner, threads: SimThreadPool
) -> None:
    fault_free, boundaries = crash_points.run_with_faults({}, threads=threads, scenario="effects")
    assert fault_free.violations == []
    broken, hit = [], Counter[str]()
    for forced in plan(boundaries, CRASHES):
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="effects")
        hit.update(_ops_hit_by_fault(result))
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []
    assert set(hit) == set(FAULTED_OPS)


def _ops_hit_by_fault(result: SeedResult) -> list[str]:
    """Operations whose commit the fault hit, so that the caller does not know the outcome."""
    return [
        event.op
        for event in result.history
        if event.result == "unknown" and event.op in FAULTED_OPS
    ]


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("deaths_min", DEATHS)
@pytest.mark.parametrize("when", [DIES_BEFORE, DIES_AFTER])
def test_effect_pools_that_crash_at_calls_leave_one_receipt_each(
    when: int, deaths_min: int, threads: SimThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools crash many times between claim and call, or between call and receipt. E1 and E3 hold:
    each effect ends once, and each repeated call has the key of the first."""

    def draw_outcome(self: ExternalService, life: Incarnation) -> int:
        return when if life.tape.chance(500) else SUCCEEDS

    monkeypatch.setattr(external_service.ExternalService, "draw_outcome", draw_outcome)
    died = "effect: died before the call" if when == DIES_BEFORE else "effect: died after the call"
    deaths, repeated, broken = 0, 0, {}
    for seed in range(12_000, 12_200):
        result = run_seed(seed, threads=threads)
        deaths += result.coverage[died]
        calls = Counter(e.args["key"] for e in result.history if e.op == "effect.call")
        repeated += sum(times - 1 for times in calls.values())
        if result.violations:
            broken[seed] = result.violations[0]
        if deaths >= deaths_min:
            break
    assert broken == {}
    assert deaths >= deaths_min
    if when == DIES_AFTER:
        assert repeated > deaths_min / 4


def test_effect_seeds_call_both_effect_kinds(threads: SimThreadPool) -> None:
    kinds = {
        event.args["kind"]
        for seed in range(3)
        for event in run_seed(seed, threads=threads).history
        if event.op == "effect.call"
    }
    assert kinds == {"fx.quote", "fx.pay"}
