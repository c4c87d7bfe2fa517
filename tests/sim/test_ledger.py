"""The run ledger under faults: random seeds, equal runs on memory and LMDB, every crash point."""

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.ledger.events import FinishedRange
from holdfast.ledger.replies import RowGrant
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.states import RowState
from holdfast.sim import settings
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faults import Fault
from holdfast.sim.history import HistoryEvent
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import Workload
from tests.sim.fault_plans import FAULT_PLANS, FaultPlanner
from tests.simulation import crash_points
from tests.simulation.seed_run import SeedResult, run_seed

CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER, Fault.STALL)


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


@pytest.fixture
def ledger_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "WORKLOADS", (Workload.LEDGER,))


@pytest.mark.slow
@pytest.mark.usefixtures("ledger_only")
def test_ledger_seeds_break_no_invariant(threads: SimThreadPool) -> None:
    broken = {}
    seen: Counter[str] = Counter()
    for seed in range(9300, 9340):
        result = run_seed(seed, threads=threads)
        seen.update(result.coverage)
        if result.violations:
            broken[seed] = result.violations[0]
    assert broken == {}
    assert seen["ledger: append fenced"]
    assert seen["ledger: opened by a new driver"]
    assert seen["ledger: reconciled with the sink"]
    assert seen["ledger: row killed its task"]
    assert seen["ledger: zombie stopped"]


@pytest.mark.usefixtures("ledger_only")
@pytest.mark.parametrize("seed", range(9400, 9404))
def test_ledger_seed_has_the_same_run_on_memory_and_lmdb(seed: int, threads: SimThreadPool) -> None:
    memory = run_seed(seed, "memory", threads=threads)
    lmdb = run_seed(seed, "lmdb", threads=threads)
    assert memory.history_hash == lmdb.history_hash
    assert memory.state_hash == lmdb.state_hash
    assert lmdb.violations == []


@pytest.mark.usefixtures("ledger_only")
def test_cancel_before_a_begin_report_does_not_halt_the_run(threads: SimThreadPool) -> None:
    """Regression: a report that began rows already ended by a cancel halted the run. This seed reaches
    the case: with the old rule planted it still fails.
    """
    assert run_seed(30, threads=threads).violations == []
    with_old_rule = run_seed(
        30, mutant="ledger report: halts on rows that a cancellation ended", threads=threads
    )
    assert with_old_rule.checkers == ["S2"]


def test_advance_refuses_rows_ended_by_cancel_without_halting() -> None:
    board, _ = RunScheduler.open(4, RunPolicy(), now_ns=1)
    grant, _ = board.claim("t", 4, now_ns=2, begin=1)
    assert isinstance(grant, RowGrant)
    board.cancel(3)
    done = [FinishedRange(0, 1, int(RowState.TERMINAL_SUCCESS))]
    reply, _ = board.report(grant.epoch, 1, b"d", done=done, begin=[(1, 2)], now_ns=4)
    assert (reply.rows_held, reply.begun, reply.stop) == (0, False, "cancelling")
    assert board.halted is None
    assert board.ended == [1, 0, 0, 3]


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("plan", FAULT_PLANS)
def test_no_single_crash_point_breaks_the_ledger_scenario(
    plan: FaultPlanner, threads: SimThreadPool
) -> None:
    fault_free, boundaries = crash_points.run_with_faults({}, threads=threads, scenario="ledger")
    assert fault_free.violations == []
    assert boundaries > 40
    assert {"opened", "leased", "advanced", "ripened", "reclaimed", "committed"} <= set(
        count_log_kinds(fault_free)
    )
    broken, hit = [], Counter[str]()
    for forced in plan(boundaries, CRASHES):
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="ledger")
        hit.update(event.op for event in result.history if event.result == "unknown")
        if result.violations:
            broken.append((forced, result.violations[0]))
    assert broken == []
    assert {"_write", "lease.acquire", "create_run", "move_run"} <= set(hit)


def test_every_ledger_row_is_committed_once_after_a_service_crash(threads: SimThreadPool) -> None:
    """Every row of each run ends, and the sink has the successful rows in order. One row is skipped, the
    row that kills its task fails, the flaky row succeeds or exhausts its attempts."""
    for boundary in range(4, 40, 3):
        forced = {boundary: Fault.CRASH_AFTER}
        result, _ = crash_points.run_with_faults(forced, threads=threads, scenario="ledger")
        assert result.violations == []
        for run in {event.args["run"] for event in result.history if event.op == "ledger.over"}:
            rows = [
                row[0]
                for event in _events_of(result, "sink.commit", run)
                for row in event.args["rows"]
            ]
            assert rows == sorted(set(rows))
            assert not {4, 5} & set(rows)


def test_ledger_row_is_called_again_only_after_a_retry_or_lost_grant(
    threads: SimThreadPool,
) -> None:
    """A row is called again only if its call failed, or its grant was lost after it began."""
    for seed in (9500, 9501, 9502):
        result = run_seed(_ledger_seed(seed), threads=threads)
        begins = Counter[tuple[str, int]]()
        for event in result.history:
            if event.op == "ledger.call":
                begins[event.args["run"], event.args["seq"]] += 1
        repeated_calls = sum(begins.values()) - len(begins)
        lost = sum(_count_rows_lost(event) for event in result.history if event.op == "_write")
        assert repeated_calls <= lost


# -- helpers -------------------------------------------------------------------------------------


def count_log_kinds(result: SeedResult) -> Counter[str]:
    """Count the log entries of all runs by kind."""
    return Counter(
        msgspec.msgpack.decode(body)[0]
        for event in result.history
        if event.op == "_write" and event.applied
        for body in event.args["bodies"]
    )


def _events_of(result: SeedResult, op: str, run: str) -> list[HistoryEvent]:
    return [event for event in result.history if event.op == op and event.args["run"] == run]


def _ledger_seed(seed: int) -> int:
    """The first seed from `seed` with the ledger workload."""
    while settings.draw_settings(ChoiceTape(seed)).workload != Workload.LEDGER:
        seed += 1
    return seed


def _count_rows_lost(event: HistoryEvent) -> int:
    """Number of rows that this commit retries: failed rows, and begun rows of a lost grant."""
    if not event.applied:
        return 0
    count = 0
    for body in event.args["bodies"]:
        kind, _, *rest = msgspec.msgpack.decode(body)
        if kind == "advanced":
            count += sum(hi - lo for lo, hi, *_ in rest[4])
        elif kind == "reclaimed":
            count += sum(hi - lo for lo, hi in rest[2])
    return count
