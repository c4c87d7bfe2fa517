"""Worlds under faults: random seeds, equal runs on memory and LMDB, every crash point, failover."""

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.sim import settings
from holdfast.sim.faults import Fault
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import Workload
from tests.sim.fault_plans import FAULT_PLANS, FaultPlanner
from tests.simulation import crash_points
from tests.simulation.seed_run import SeedResult, run_seed

# Document 004's chaos rows 1 to 3: after the lease, after the drain, after the append. Drain, append
# and cursor are one commit here, so the second is "before" it, the third "after" it.
CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)
FAULTED_OPS = (
    "hosting_lease.acquire",
    "cycle.commit",
    "cycle.commit_and_release",
    "compact",
    "lease.renew",
    "place",
    "leader_lease.acquire",
)


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.fixture
def worlds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.WORLDS,))


@pytest.mark.slow
@pytest.mark.usefixtures("worlds_only")
def test_world_seeds_break_no_invariant(threads: SimThreadPool) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(9000, 9040):
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    assert seen["world: cycle fenced"]
    assert seen["world: granted anew"]
    assert seen["authority: taken over"]


@pytest.mark.slow
@pytest.mark.usefixtures("worlds_only")
def test_world_seeds_with_mixed_code_versions_break_no_invariant(
    threads: SimThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MIXED_VERSIONS_MILLE", 1000)
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(9200, 9230):
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    assert seen["world: stopped before an unknown item"]
    assert seen["world: unknown item given up"]
    assert seen["world: key of an item that waits"]
    assert seen["world: stopped for the code of an entry"]


@pytest.mark.usefixtures("worlds_only")
@pytest.mark.parametrize("seed", range(9100, 9104))
def test_world_seed_has_the_same_run_on_memory_and_lmdb(seed: int, threads: SimThreadPool) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


def test_worlds_and_primitives_share_a_store(
    threads: SimThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.BOTH,))
    result = run_seed(9200, threads=threads)
    assert result.violations == []
    assert {"cycle.commit", "host_cycle"} <= {event.op for event in result.history if event.applied}


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("plan", FAULT_PLANS)
def test_no_single_crash_point_breaks_the_worlds_scenario(
    plan: FaultPlanner, threads: SimThreadPool
) -> None:
    fault_free, boundaries = crash_points.run_with_faults({}, threads=threads, scenario="worlds")
    assert fault_free.violations == []
    assert boundaries > 60
    broken, hit = [], Counter[str]()
    for forced in plan(boundaries, CRASHES):
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="worlds")
        hit.update(_ops_hit_by_fault(result))
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []
    assert {"hosting_lease.acquire", "cycle.commit", "place", "leader_lease.acquire"} <= set(hit)


def _ops_hit_by_fault(result: SeedResult) -> list[str]:
    """Operations whose commit the fault hit, so that the caller does not know the outcome."""
    return [
        event.op
        for event in result.history
        if event.result == "unknown" and event.op in FAULTED_OPS
    ]


def test_world_failover_resumes_without_lost_or_repeated_messages(threads: SimThreadPool) -> None:
    """A worker crashes after the commit of the first cycle without its answer. Another worker handles the
    rest. Every entry equals the model (J3); no message is lost, repeated or reordered (I1 to I4).
    """
    failovers = []
    for boundary in range(1, 40):
        forced = {boundary: Fault.CRASH_AFTER}
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="worlds")
        cycles = [event for event in result.history if event.op == "cycle.commit" and event.applied]
        hosts = {(event.actor, event.incarnation) for event in cycles}
        if cycles[0].result == "unknown" and len(hosts) > 1:
            failovers.append(result)
    assert failovers, "no crash struck the first cycle"
    assert [result.violations for result in failovers] == [[]] * len(failovers)
