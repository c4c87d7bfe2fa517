"""Effects, timers and mail under faults: random seeds, every crash point, pools that die at calls."""

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.sim import exhaustive, outside, settings
from holdfast.sim.actor import Life
from holdfast.sim.faults import Fault
from holdfast.sim.outside import DIES_AFTER, DIES_BEFORE, WELL, Outside
from holdfast.sim.run import Result, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import Workload

CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)
# Document 004's chaos rows 4 and 5 are between these: claim, call, receipt. Row 6 has no between:
# a timer is taken and fired in one commit.
ROWS = ("claims.take", "queue.settle", "firing.fire_due", "cycle.commit", "rate.grant")
DEATHS_MIN = 200


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


@pytest.fixture(autouse=True)
def effects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.EFFECTS,))


@pytest.mark.slow
def test_random_seeds_of_effects_break_nothing(threads: Threads) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(11_000, 11_030):
        result = run_seed(seed, threads=threads)
        seen.update(result.sometimes)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    for what in (
        "effect: done at a later attempt",
        "effect: ended, cancelled",
        "effect: ended, expiries_exhausted",
        "effect: died after the call",
        "timer: event in a journal",
        "fork: effects reissued",
    ):
        assert seen[what], what


@pytest.mark.parametrize("seed", range(11_100, 11_103))
def test_a_seed_of_effects_ends_alike_on_memory_and_on_lmdb(seed: int, threads: Threads) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_no_single_crash_point_breaks_effects_and_timers(threads: Threads) -> None:
    calm, boundaries = exhaustive.run_forced({}, threads=threads, scenario="effects")
    assert calm.violations == []
    broken, hit = [], Counter[str]()
    for boundary in range(1, boundaries + 1):
        for fault in CRASHES:
            forced = {boundary: fault}
            result, _ = exhaustive.run_forced(forced, threads=threads, scenario="effects")
            hit.update(_victims(result))
            if result.violations:
                broken.append((boundary, fault, result.violations[0]))
    assert broken == []
    assert set(hit) == set(ROWS)


def _victims(result: Result) -> list[str]:
    """What was being committed where the fault struck: the caller never heard of it."""
    return [event.op for event in result.history if event.result == "unknown" and event.op in ROWS]


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("when", [DIES_BEFORE, DIES_AFTER])
def test_pools_that_die_at_calls_leave_one_receipt_each(
    when: int, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between claim and call, or between call and receipt, two hundred times: E1 and E3 hold,
    so each effect ends once, and each repeated call has the key of the first."""

    def fate(self: Outside, life: Life) -> int:
        return when if life.tape.chance(500) else WELL

    monkeypatch.setattr(outside.Outside, "fate", fate)
    died = "effect: died before the call" if when == DIES_BEFORE else "effect: died after the call"
    deaths, repeated, broken = 0, 0, {}
    for seed in range(12_000, 12_200):
        result = run_seed(seed, threads=threads)
        deaths += result.sometimes[died]
        calls = Counter(e.args["key"] for e in result.history if e.op == "effect.call")
        repeated += sum(times - 1 for times in calls.values())
        if result.violations:
            broken[seed] = result.violations[0]
        if deaths >= DEATHS_MIN:
            break
    assert broken == {}
    assert deaths >= DEATHS_MIN
    if when == DIES_AFTER:
        assert repeated > DEATHS_MIN / 4


def test_a_run_of_effects_makes_calls_of_both_kinds(threads: Threads) -> None:
    kinds = {
        event.args["kind"]
        for seed in range(3)
        for event in run_seed(seed, threads=threads).history
        if event.op == "effect.call"
    }
    assert kinds == {"fx.quote", "fx.pay"}
