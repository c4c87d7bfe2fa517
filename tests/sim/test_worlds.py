"""Worlds under faults: random seeds, equal on every store, every crash point, failover."""

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.sim import exhaustive, settings
from holdfast.sim.faults import Fault
from holdfast.sim.run import Result, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import Workload

# Document 004's chaos rows 1 to 3: after the lease, after the drain, after the append. Drain, append
# and cursor are one commit here, so the second is "before" it, the third "after" it.
CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)
ROWS = (
    "tenure.acquire",
    "cycle.commit",
    "cycle.leave",
    "compact",
    "lease.renew",
    "place",
    "authority.acquire",
)


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


@pytest.fixture
def worlds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.WORLDS,))


@pytest.mark.slow
@pytest.mark.usefixtures("worlds_only")
def test_random_seeds_of_worlds_break_nothing(threads: Threads) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(9000, 9040):
        result = run_seed(seed, threads=threads)
        seen.update(result.sometimes)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    assert seen["world: cycle fenced"]
    assert seen["world: granted anew"]
    assert seen["authority: taken over"]


@pytest.mark.slow
@pytest.mark.usefixtures("worlds_only")
def test_two_versions_of_the_code_at_once_lose_nothing(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "VERSIONS_MILLE", 1000)
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(9200, 9230):
        result = run_seed(seed, threads=threads)
        seen.update(result.sometimes)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    assert seen["world: stopped before an unknown item"]
    assert seen["world: unknown item given up"]
    assert seen["world: key of an item that waits"]
    assert seen["world: stopped for the code of an entry"]


@pytest.mark.usefixtures("worlds_only")
@pytest.mark.parametrize("seed", range(9100, 9104))
def test_a_seed_of_worlds_ends_alike_on_memory_and_on_lmdb(seed: int, threads: Threads) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


def test_worlds_and_the_spine_share_a_store(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.BOTH,))
    result = run_seed(9200, threads=threads)
    assert result.violations == []
    assert {"cycle.commit", "host_cycle"} <= {event.op for event in result.history if event.applied}


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_no_single_crash_point_breaks_a_small_universe(threads: Threads) -> None:
    calm, boundaries = exhaustive.run_forced({}, threads=threads, scenario="worlds")
    assert calm.violations == []
    assert boundaries > 60
    broken, hit = [], Counter[str]()
    for boundary in range(1, boundaries + 1):
        for fault in CRASHES:
            result, _ = exhaustive.run_forced({boundary: fault}, threads=threads, scenario="worlds")
            hit.update(_victims(result))
            if result.violations:
                broken.append((boundary, fault, result.violations[0]))
    assert broken == []
    assert {"tenure.acquire", "cycle.commit", "place", "authority.acquire"} <= set(hit)


def _victims(result: Result) -> list[str]:
    """What was being committed where the fault struck: the caller never heard of it."""
    return [event.op for event in result.history if event.result == "unknown" and event.op in ROWS]


def test_a_world_that_fails_over_goes_on_where_it_was(threads: Threads) -> None:
    """A worker dies after the commit of the first cycle, and does not know it; another does the rest.
    Entry by entry the model agrees (J3), and no message is lost, doubled or out of order (I1 to I4).
    """
    failovers = []
    for boundary in range(1, 40):
        forced = {boundary: Fault.CRASH_AFTER}
        result, _ = exhaustive.run_forced(forced, threads=threads, scenario="worlds")
        cycles = [event for event in result.history if event.op == "cycle.commit" and event.applied]
        hosts = {(event.actor, event.incarnation) for event in cycles}
        if cycles[0].result == "unknown" and len(hosts) > 1:
            failovers.append(result)
    assert failovers, "no crash struck the first cycle"
    assert [found.violations for found in failovers] == [[]] * len(failovers)
