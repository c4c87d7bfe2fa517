"""Timers that a world hears in its own commit, under faults: in random runs, and at every crash point."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from holdfast.sim import exhaustive, settings
from holdfast.sim.exhaustive import FAULTS
from holdfast.sim.faults import Fault, Plan
from holdfast.sim.mutants_carrying import CARRYING
from holdfast.sim.run import Result, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import Workload
from holdfast.sim.swarm import first_kill

SEEDS = range(13_000, 13_040)
DEEP = [range(at, at + 100) for at in range(13_100, 14_100, 100)]
KILLED_BY = 1000
CARRYING_MIN = 4

SEEN = (
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
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


@pytest.fixture
def houses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.EFFECTS,))
    monkeypatch.setattr(settings, "HOUSEHOLD_MILLE", 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("houses_only")
def test_worlds_go_on_in_the_commits_that_settle_what_they_hear_and_nothing_breaks(
    threads: Threads,
) -> None:
    seen = sound(SEEDS, threads)
    assert [what for what in SEEN if not seen[what]] == []


@pytest.mark.deep
@pytest.mark.usefixtures("houses_only")
@pytest.mark.parametrize("seeds", DEEP, ids=str)
def test_nothing_breaks_in_many_runs_of_a_house(seeds: range, threads: Threads) -> None:
    seen = sound(seeds, threads)
    late = ("taken back", "not answered in time")
    assert any(seen[f"household: a round of timers {end}"] for end in late)


@pytest.mark.slow
def test_no_fault_at_a_commit_that_carries_breaks_a_house(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrying = commits_that_carry(threads, monkeypatch)
    assert len(carrying) >= CARRYING_MIN
    broken = []
    for boundary in carrying:
        for fault in FAULTS:
            result, _ = crashed({boundary: fault}, threads)
            if result.violations:
                broken.append((boundary, fault, result.violations[0]))
    assert broken == []


@pytest.mark.slow
def test_in_the_run_whose_crash_points_are_tried_timers_are_carried(threads: Threads) -> None:
    calm, _ = crashed({}, threads)
    assert calm.violations == []
    for what in (
        "timer: told in its world's commit",
        "timer: not told in its world's commit, conflict",
        "timer: cancelled",
        "effect: settled in its world's commit",
        "fork: timers kept",
    ):
        assert calm.sometimes[what], what


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_no_single_crash_point_breaks_a_house(threads: Threads) -> None:
    _, boundaries = crashed({}, threads)
    broken = []
    for forced in exhaustive.singles(boundaries):
        result, _ = crashed(forced, threads)
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CARRYING)
def test_every_bug_in_what_is_carried_is_caught(name: str) -> None:
    assert first_kill((name, KILLED_BY)).seed is not None


def sound(seeds: Iterable[int], threads: Threads) -> Counter[str]:
    """What was seen in runs in which nothing broke."""
    broken = {}
    seen: Counter[str] = Counter()
    for seed in seeds:
        result = run_seed(seed, threads=threads)
        seen.update(result.sometimes)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    return seen


def commits_that_carry(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Their numbers among the commits of the run without faults."""
    found: list[int] = []
    genuine = Plan.next

    def noted(self: Plan, *, doubtful: bool = False) -> Fault | None:
        fault = genuine(self, doubtful=doubtful)
        if doubtful:
            found.append(self.boundary)
        return fault

    with monkeypatch.context() as patched:
        patched.setattr(Plan, "next", noted)
        crashed({}, threads)
    return found


def crashed(forced: dict[int, Fault], threads: Threads) -> tuple[Result, int]:
    return exhaustive.run_forced(forced, threads=threads, scenario="household")
