"""Fused commits of timers and effects under faults: random seeds and every crash point."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from holdfast import failpoints
from holdfast.sim import settings
from holdfast.sim.faults import Fault
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import Workload
from tests.simulation import crash_points
from tests.simulation.crash_points import FAULTS
from tests.simulation.seed_run import SeedResult, run_seed

SEEDS = range(13_000, 13_040)
DEEP = [range(at, at + 100) for at in range(13_100, 14_100, 100)]
FUSED_COMMITS_MIN = 4

EXPECTED_COVERAGE = (
    "timer: told in its world's commit",
    "timer: told in its world's commit, by the calendar",
    "timer: told in its world's commit, whose answer was lost",
    "timer: several told in one commit of their world",
    "timer: not told in its world's commit, conflict",
    "timer: not told in its world's commit, fenced",
    "timer: worker fired",
    "effect: settled in its world's commit",
    "household: a step under way",
    "household stopped in good order",
)


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.fixture
def houses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.EFFECTS,))
    monkeypatch.setattr(settings, "COLOCATED_MILLE", 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("houses_only")
def test_fused_commit_seeds_break_no_invariant_and_cover_all_points(
    threads: SimThreadPool,
) -> None:
    seen = run_clean_seeds(SEEDS, threads)
    assert [point for point in EXPECTED_COVERAGE if not seen[point]] == []


@pytest.mark.deep
@pytest.mark.usefixtures("houses_only")
@pytest.mark.parametrize("seeds", DEEP, ids=str)
def test_fused_commit_deep_seeds_break_no_invariant(seeds: range, threads: SimThreadPool) -> None:
    seen = run_clean_seeds(seeds, threads)
    timeout_endings = ("taken back", "not answered in time")
    assert any(seen[f"household: a round of timers {end}"] for end in timeout_endings)


@pytest.mark.slow
def test_no_fault_at_a_fused_commit_breaks_an_invariant(threads: SimThreadPool) -> None:
    fused_commits = find_fused_commits(threads)
    assert len(fused_commits) >= FUSED_COMMITS_MIN
    broken = []
    for boundary in fused_commits:
        for fault in FAULTS:
            result, _ = run_colocated_scenario({boundary: fault}, threads)
            if result.violations:
                broken.append((boundary, fault, result.violations[0]))
    assert broken == []


@pytest.mark.slow
def test_colocated_scenario_fuses_timers_into_world_commits(threads: SimThreadPool) -> None:
    fault_free, _ = run_colocated_scenario({}, threads)
    assert fault_free.violations == []
    for point in (
        "timer: told in its world's commit",
        "timer: not told in its world's commit, conflict",
        "timer: cancelled",
        "effect: settled in its world's commit",
        "fork: timers kept",
    ):
        assert fault_free.coverage[point], point


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_no_single_crash_point_breaks_the_colocated_scenario(threads: SimThreadPool) -> None:
    _, boundaries = run_colocated_scenario({}, threads)
    broken = []
    for forced in crash_points.single_faults(boundaries):
        result, _ = run_colocated_scenario(forced, threads)
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []


def run_clean_seeds(seeds: Iterable[int], threads: SimThreadPool) -> Counter[str]:
    """Run seeds, assert that no invariant breaks and return the coverage counts."""
    broken = {}
    seen: Counter[str] = Counter()
    for seed in seeds:
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    return seen


def find_fused_commits(threads: SimThreadPool) -> list[int]:
    """Commit numbers of the fused commits in the fault-free run."""
    boundaries: list[int] = []

    def record(boundary: int, loss_prone: bool) -> None:
        if loss_prone:
            boundaries.append(boundary)

    with failpoints.on("sim.commit", calls=record):
        run_colocated_scenario({}, threads)
    return boundaries


def run_colocated_scenario(
    forced: dict[int, Fault], threads: SimThreadPool
) -> tuple[SeedResult, int]:
    return crash_points.run_with_faults(forced, threads=threads, scenario="household")
