"""Runs: the same seed is the same run, on any store; random seeds and every crash point are clean."""

import threading
from collections.abc import Iterator

import pytest

from holdfast.sim import exhaustive
from holdfast.sim.run import replay, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.swarm import run_many


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    before = threading.active_count()
    with Threads() as pool:
        yield pool
    assert threading.active_count() == before


@pytest.mark.parametrize("seed", range(1000, 1005))
def test_a_seed_run_twice_has_one_history(seed: int, threads: Threads) -> None:
    first, second = (run_seed(seed, threads=threads) for _ in range(2))
    assert first.history_hash == second.history_hash
    assert first.state_hash == second.state_hash


@pytest.mark.parametrize("seed", range(1010, 1018))
def test_a_seed_ends_alike_on_memory_and_on_lmdb(seed: int, threads: Threads) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


def test_a_replayed_tape_is_the_same_run(threads: Threads) -> None:
    recorded = run_seed(1020, threads=threads)
    again = replay(recorded.tape, threads=threads)
    assert again.history_hash == recorded.history_hash


@pytest.mark.slow
def test_random_seeds_break_nothing() -> None:
    total = run_many(range(5000, 5060), jobs=1)
    assert total.seeds == 60
    assert total.failed == [], "see it again: holdfast sim --seed " + str(total.failed[0][0])


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_no_single_crash_point_breaks_the_small_scenario(threads: Threads) -> None:
    calm, boundaries = exhaustive.run_forced({}, threads=threads)
    assert calm.violations == []
    assert boundaries > 50
    broken = []
    for forced in exhaustive.singles(boundaries):
        result, _ = exhaustive.run_forced(forced, threads=threads)
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []


def test_pairs_of_crashes_are_spread_over_all_commits() -> None:
    found = list(exhaustive.pairs(40, pairs_max=500))
    assert 300 <= len(found) <= 600
    assert {min(pair) for pair in found} >= set(range(1, 35))
    assert {frozenset(pair.values()) for pair in found if len(set(pair.values())) == 2}
    assert all(len(pair) == 2 for pair in found)
