"""Killers: the stored seed of each planted bug still makes a checker report it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import HAS_LEDGER
from tests.processes import ROOT, Proc
from tests.simulation import killers, planted_session
from tests.simulation.checkers import CHECKERS, Checker
from tests.simulation.killers import Killer, SearchJob, checkers_that_report, search
from tests.simulation.mutants import MUTANTS

KILLERS = killers.load()
WITH_SEED = [name for name, killer in KILLERS.items() if killer.seed is not None]
WITH_TEST = [name for name, killer in KILLERS.items() if killer.test is not None]
SURVIVORS = [name for name in KILLERS if name not in WITH_SEED and name not in WITH_TEST]
# This number may only fall.
SURVIVORS_MAX = 0

# Without NumPy no seed draws the ledger workload, so a seed has another run.
assert HAS_LEDGER, "the stored seeds need NumPy: run `make setup`"


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.mark.parametrize("name", WITH_SEED)
def test_stored_seed_kills_planted_bug(name: str, threads: SimThreadPool) -> None:
    killer = KILLERS[name]
    assert killer.seed is not None
    checkers, _ = checkers_that_report(name, killer.seed, threads)
    missing = set(killer.checkers) - set(checkers)
    assert not missing, (
        f"seed {killer.seed} violates {checkers}, and {sorted(missing)} no longer. If the change is "
        "intended, run `make killers`, which searches another seed"
    )


def test_killers_have_one_entry_for_each_planted_bug() -> None:
    assert list(KILLERS) == list(MUTANTS)


def test_stored_checkers_are_registered_and_not_empty() -> None:
    for name in WITH_SEED:
        assert KILLERS[name].checkers, name
        assert set(KILLERS[name].checkers) <= CHECKERS.keys(), name


def test_each_checker_reports_a_planted_bug() -> None:
    reported = {number for name in WITH_SEED for number in KILLERS[name].checkers}
    assert reported == CHECKERS.keys()


def test_stored_seed_kills_nothing_without_its_checker(
    threads: SimThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "task expiry: ignores the extension of a lease"
    seed = KILLERS[name].seed
    assert seed is not None
    assert checkers_that_report(name, seed, threads)[0] == ["L5"]
    monkeypatch.setitem(CHECKERS, "L5", Checker("L5", "reports nothing", ()))
    assert checkers_that_report(name, seed, threads)[0] == []


def test_number_of_surviving_bugs_only_falls() -> None:
    assert len(SURVIVORS) == SURVIVORS_MAX, "lower SURVIVORS_MAX if it fell"


def test_search_replaces_a_seed_that_no_longer_kills() -> None:
    name = "inbox advance: does not move the cursor"
    # No planted bug violates an invariant in a run that cannot reach it.
    unreachable = KILLERS["task grant: is not logged"].seed
    found = search(SearchJob(name, Killer(unreachable, ["I2"]), seeds_max=40))
    assert found.killer.seed not in (None, unreachable)
    assert found.killer.checkers


def test_search_without_a_kill_returns_the_number_of_seeds_tried() -> None:
    found = search(SearchJob("inbox advance: does not move the cursor", Killer(), seeds_max=0))
    assert found.killer == Killer(seeds_tried=0)
    assert found.killer.to_json() == {"seeds_tried": 0}


@pytest.mark.deep
@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", WITH_TEST)
def test_named_test_fails_with_the_planted_bug_only(name: str) -> None:
    test = KILLERS[name].test
    assert test is not None
    assert _run_test(test, None) == 0
    assert _run_test(test, name) == 1


def _run_test(test: str, mutant: str | None) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", planted_session.__name__, test]
    env = {} if mutant is None else {planted_session.VARIABLE: mutant}
    with Proc.spawn(command, ready=None, env=env, cwd=ROOT) as process:
        return process.wait(160)
