"""Tasks under faults: random seeds, equal runs on memory and LMDB, every crash point."""

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.sim import settings
from holdfast.sim.faults import Fault
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import Workload
from tests.sim.fault_plans import FAULT_PLANS, FaultPlanner
from tests.simulation import crash_points
from tests.simulation.coverage import COVERAGE_POINTS
from tests.simulation.seed_run import run_seed

CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.TASKS,))


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_task_seeds_break_no_invariant_and_cover_all_points(threads: SimThreadPool) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(12_000, 12_060):
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    expected_points = {name for name in COVERAGE_POINTS if name.startswith("task: ")}
    assert {name for name in expected_points if not seen[name]} == set()


@pytest.mark.parametrize("seed", range(12_200, 12_206))
def test_task_seed_has_the_same_run_on_memory_and_lmdb(seed: int, threads: SimThreadPool) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("plan", FAULT_PLANS)
def test_no_single_crash_point_breaks_the_tasks_scenario(
    plan: FaultPlanner, threads: SimThreadPool
) -> None:
    fault_free, boundaries = crash_points.run_with_faults({}, threads=threads, scenario="tasks")
    assert fault_free.violations == []
    assert boundaries > 40
    broken, hit = [], Counter[str]()
    for forced in plan(boundaries, CRASHES):
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="tasks")
        hit.update(event.op for event in result.history if event.result == "unknown")
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []
    assert {"tasks.submit", "tasks.report_and_lease", "tasks.cancel", "tasks.maintain"} <= set(hit)
