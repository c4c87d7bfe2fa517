"""Document 002, rule by rule, in document order.

Where the design differs from the document, the test checks the design and its rule text names the difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import S
from holdfast.errors import Fenced, IllegalTransition
from holdfast.ledger.events import FinishedRange, RowRange
from holdfast.ledger.replies import AllRowsFinal, NoMoreRows
from holdfast.ledger.run_policy import RETRYABLE, ErrorClass, RetryVerdict, RunPolicy, decide_retry
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.seq_ledger import SeqLedger
from holdfast.ledger.states import LEDGER, LEGAL, TERMINAL, RowEvent, RowState
from tests.ledger.scheduler_histories import POLICIES, SIZES, STEPS, HistoryStep, SchedulerHistory
from tests.ledger.scheduler_rig import FAILED, LEASE_NS, OK, SKIPPED, SchedulerRig
from tests.ledger.test_seq_ledger import (
    CONTEXT,
    MOVE_PATHS,
    ROUTES,
    ledger_in_state,
    ledger_snapshot,
    recount,
)

MODULES = ("holdfast.ledger.seq_ledger", "holdfast.ledger.run_scheduler")

TRANSIENT = int(ErrorClass.TRANSIENT)
INPUT = int(ErrorClass.INPUT)


# -- State Codes ---------------------------------------------------------------------------------


@pytest.mark.spec(
    "002", "State Codes", "the ledger has eight states with fixed names and the codes 0 to 7"
)
@pytest.mark.parametrize(
    ("code", "name"),
    list(enumerate(
        ["UNSEEN", "DISPATCHED", "IN_FLIGHT", "TERMINAL_SUCCESS", "TERMINAL_SKIP",
         "TERMINAL_FAIL", "TERMINAL_CANCEL", "COMMITTED"]
    )),
)  # fmt: skip
def test_ledger_state_has_its_code(code: int, name: str) -> None:
    assert RowState(code).name == name
    assert len(RowState) == 8


# -- Transition Contract -------------------------------------------------------------------------


def state_after(prior: RowState, event: RowEvent) -> RowState:
    """The state after an event. A range, a set and a single row must reach the same state."""
    states = set()
    for path in MOVE_PATHS.values():
        ledger = ledger_in_state(prior)
        path(ledger, event)
        assert ledger.counts() == recount(ledger)
        states.add(ledger.state_of(2))
    [after] = states
    return after


CONTRACT = "Transition Contract"


@pytest.mark.spec("002", CONTRACT, "1: an unseen row can be dispatched")
def test_unseen_to_dispatched() -> None:
    assert state_after(RowState.UNSEEN, RowEvent.DISPATCH) is RowState.DISPATCHED


@pytest.mark.spec("002", CONTRACT, "2: a dispatched row can be started")
def test_dispatched_to_in_flight() -> None:
    assert state_after(RowState.DISPATCHED, RowEvent.BEGIN) is RowState.IN_FLIGHT


@pytest.mark.spec("002", CONTRACT, "3: a row in flight can succeed")
def test_in_flight_to_success() -> None:
    assert state_after(RowState.IN_FLIGHT, RowEvent.SUCCEED) is RowState.TERMINAL_SUCCESS


@pytest.mark.spec("002", CONTRACT, "4: a row in flight can be skipped")
def test_in_flight_to_skip() -> None:
    assert state_after(RowState.IN_FLIGHT, RowEvent.SKIP) is RowState.TERMINAL_SKIP


@pytest.mark.spec("002", CONTRACT, "5: a row in flight can fail")
def test_in_flight_to_fail() -> None:
    assert state_after(RowState.IN_FLIGHT, RowEvent.FAIL) is RowState.TERMINAL_FAIL


@pytest.mark.spec("002", CONTRACT, "6: a dispatched row that was not started can be cancelled")
def test_dispatched_to_cancel() -> None:
    assert state_after(RowState.DISPATCHED, RowEvent.CANCEL) is RowState.TERMINAL_CANCEL
    table = SchedulerRig(4)
    table.grant(rows=2)
    table.log_decision(table.scheduler.cancel(table.now_ns))
    assert table.states() == [6, 6, 6, 6], (
        "unseen rows are dispatched and cancelled in one decision"
    )


@pytest.mark.spec(
    "002", CONTRACT, "7: a row in flight is cancelled by force after the grace period"
)
def test_in_flight_to_cancel() -> None:
    assert state_after(RowState.IN_FLIGHT, RowEvent.CANCEL) is RowState.TERMINAL_CANCEL
    table = SchedulerRig(2)
    table.grant_begun(rows=2)
    table.log_decision(table.scheduler.cancel(table.now_ns))
    table.log_decision(table.scheduler.end_cancel_grace(table.scheduler.grace_ends_ns - 1))
    assert table.states() == [2, 2]
    table.log_decision(table.scheduler.end_cancel_grace(table.scheduler.grace_ends_ns))
    assert table.states() == [6, 6]


@pytest.mark.spec("002", CONTRACT, "8: a successful row can be committed")
def test_success_to_committed() -> None:
    assert state_after(RowState.TERMINAL_SUCCESS, RowEvent.COMMIT) is RowState.COMMITTED


@pytest.mark.spec("002", CONTRACT, "9: a skipped row can be committed")
def test_skip_to_committed() -> None:
    assert state_after(RowState.TERMINAL_SKIP, RowEvent.COMMIT) is RowState.COMMITTED


@pytest.mark.spec("002", CONTRACT, "10: a failed row can be committed")
def test_fail_to_committed() -> None:
    assert state_after(RowState.TERMINAL_FAIL, RowEvent.COMMIT) is RowState.COMMITTED


@pytest.mark.spec("002", CONTRACT, "11: a cancelled row can be committed")
def test_cancel_to_committed() -> None:
    assert state_after(RowState.TERMINAL_CANCEL, RowEvent.COMMIT) is RowState.COMMITTED


@pytest.mark.spec(
    "002", CONTRACT, "12: of the terminal states only a failure can be dispatched again"
)
def test_only_failed_rows_can_be_dispatched_again() -> None:
    assert state_after(RowState.TERMINAL_FAIL, RowEvent.RETRY) is RowState.DISPATCHED
    for state in TERMINAL - {RowState.TERMINAL_FAIL}:
        with pytest.raises(IllegalTransition):
            state_after(state, RowEvent.RETRY)


@pytest.mark.spec(
    "002", CONTRACT, "12: a failed row is dispatched again only if its error class is retryable"
)
@pytest.mark.parametrize("kind", [kind for kind in ErrorClass if kind])
def test_only_retryable_failures_are_dispatched_again(kind: ErrorClass) -> None:
    table = SchedulerRig(1)
    table.finish(table.grant_begun(), FAILED, kind)
    assert table.states() == [1 if kind in RETRYABLE else 5]


# -- Illegal Transition Policy -------------------------------------------------------------------

ILLEGAL = "Illegal Transition Policy"


@pytest.mark.spec(
    "002",
    ILLEGAL,
    "1: a transition outside the contract raises IllegalTransition and changes nothing",
)
@pytest.mark.parametrize("attempted", RowState)
@pytest.mark.parametrize("prior", RowState)
def test_every_unlisted_transition_raises_illegal_transition(
    prior: RowState, attempted: RowState
) -> None:
    ledger = ledger_in_state(prior)
    if LEGAL[prior][attempted]:
        ledger.move_to(2, attempted, **CONTEXT)
        return
    before = ledger_snapshot(ledger)
    with pytest.raises(IllegalTransition):
        ledger.move_to(2, attempted, **CONTEXT)
    assert ledger_snapshot(ledger) == before


@pytest.mark.spec("002", ILLEGAL, "2: an illegal transition halts the run immediately")
def test_illegal_transition_halts_the_run() -> None:
    table = SchedulerRig(8)
    grant = table.grant_begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, FinishedRange(5, 6, OK))
    assert table.claim() == NoMoreRows("halted")
    with pytest.raises(IllegalTransition):
        table.report(grant, FinishedRange(0, 1, OK))
    assert table.states() == [2, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.spec("002", ILLEGAL, "2: a halted run stays halted after a restart from the log")
def test_halted_run_stays_halted_after_a_restart() -> None:
    table = SchedulerRig(8)
    grant = table.grant_begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, FinishedRange(5, 6, OK))
    assert table.scheduler.halted is not None
    for board in (
        RunScheduler.load(table.scheduler.dump()),
        RunScheduler.replay([*table.log, table.scheduler.halted]),
    ):
        assert board.claim("w", 1, now_ns=table.now_ns)[0] == NoMoreRows("halted")


@pytest.mark.spec(
    "002",
    ILLEGAL,
    "3: the error has the seq, the prior and attempted state, the owner and the time",
)
def test_illegal_transition_has_seq_states_owner_and_time() -> None:
    table = SchedulerRig(8)
    grant = table.grant_begun("worker-7", rows=2)
    table.now_ns = 1_700_000_000 * S
    with pytest.raises(IllegalTransition) as refusal:
        table.report(grant, FinishedRange(5, 6, OK))
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == (5, "UNSEEN", "TERMINAL_SUCCESS")
    assert (error.owner, error.wall_ns) == ("worker-7", 1_700_000_000 * S)
    for name in ("seq", "prior", "attempted", "owner", "wall_ns"):
        assert name in str(error)


# -- Atomicity -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "002",
    "Atomicity",
    "1: the ledger checks and writes a row in one operation, and a batch completely or not at all",
)
@pytest.mark.parametrize("path", ["range", "set"])
def test_batch_transition_is_all_or_nothing(path: str) -> None:
    ledger = ledger_in_state(RowState.IN_FLIGHT, rows=(2, 3))
    before = ledger_snapshot(ledger)
    with pytest.raises(IllegalTransition) as refusal:
        MOVE_PATHS[path](ledger, RowEvent.SUCCEED)
    assert refusal.value.seq == 4
    assert ledger_snapshot(ledger) == before


@pytest.mark.spec(
    "002", "Atomicity", "2: a second terminal report of the same attempt halts the run"
)
@pytest.mark.parametrize("second", [OK, SKIPPED, FAILED])
@pytest.mark.parametrize("first", [OK, SKIPPED, FAILED])
def test_second_terminal_report_of_a_row_halts_the_run(first: int, second: int) -> None:
    table = SchedulerRig(4)
    grant = table.grant_begun(rows=2)
    table.report(grant, FinishedRange(0, 1, first, INPUT))
    with pytest.raises(IllegalTransition) as refusal:
        table.report(grant, FinishedRange(0, 1, second, INPUT))
    assert (refusal.value.prior, refusal.value.attempted) == (
        RowState(first).name,
        RowState(second).name,
    )
    assert table.scheduler.halted is not None


@pytest.mark.spec(
    "002", "Atomicity", "2: two terminal outcomes for one row in the same report are illegal"
)
def test_two_terminals_of_a_row_in_one_report_are_illegal() -> None:
    table = SchedulerRig(4)
    grant = table.grant_begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, FinishedRange(0, 2, OK), FinishedRange(1, 2, SKIPPED))
    assert table.states() == [2, 2, 0, 0]


@pytest.mark.spec(
    "002", "Atomicity", "2: the scheduler answers a repeated report with its first reply (our rule)"
)
def test_repeated_report_gets_its_first_reply() -> None:
    table = SchedulerRig(4)
    grant = table.grant_begun(rows=2)
    first = table.report(grant, FinishedRange(0, 1, OK))
    again = table.scheduler.report(
        grant.epoch, 1, b"1", done=[FinishedRange(0, 1, OK)], now_ns=table.now_ns
    )
    assert again == (first, [])
    assert table.scheduler.halted is None


@pytest.mark.spec("002", "Atomicity", "3: a repeated commit changes nothing")
def test_repeated_commit_changes_nothing() -> None:
    table = SchedulerRig(4)
    table.finish(table.grant_begun(rows=3))
    assert table.commit() == 3
    before = table.scheduler.dump()
    assert table.scheduler.commit(3, 2, table.now_ns) == (False, [])
    assert table.scheduler.commit(1, 0, table.now_ns) == (False, [])
    assert table.scheduler.dump() == before


@pytest.mark.spec("002", "Atomicity", "3: a commit of a row without a terminal outcome is illegal")
@pytest.mark.parametrize("prior", [RowState.UNSEEN, RowState.DISPATCHED, RowState.IN_FLIGHT])
def test_commit_of_a_row_that_has_not_ended_is_illegal(prior: RowState) -> None:
    table = SchedulerRig(1)
    if prior is RowState.DISPATCHED:
        table.grant()
    if prior is RowState.IN_FLIGHT:
        table.grant_begun()
    with pytest.raises(IllegalTransition) as refusal:
        table.scheduler.commit(1, 0, table.now_ns)
    assert (refusal.value.prior, refusal.value.attempted) == (prior.name, "COMMITTED")


# -- Lease Ownership -----------------------------------------------------------------------------

OWNERSHIP = "Lease Ownership"


@pytest.mark.spec("002", OWNERSHIP, "each leased row stores its owner: the epoch of its grant")
def test_leased_row_stores_the_epoch_of_its_grant() -> None:
    table = SchedulerRig(8)
    first, second = table.grant("a", rows=2), table.grant("b", rows=2)
    assert table.scheduler.ledger.owner_epochs.tolist() == [
        first.epoch, first.epoch, second.epoch, second.epoch, 0, 0, 0, 0,
    ]  # fmt: skip
    assert [table.scheduler.grants[epoch].owner for epoch in (first.epoch, second.epoch)] == [
        "a",
        "b",
    ]
    table.report(first, begin=[(0, 2)])
    table.finish(first)
    assert table.scheduler.ledger.owner_epoch_of(0) == 0


@pytest.mark.spec(
    "002",
    OWNERSHIP,
    "the heartbeat and its timeout belong to the grant, and the lease expires without heartbeats",
)
def test_lease_expires_after_lease_ns_without_a_heartbeat() -> None:
    table = SchedulerRig(8, lease_ns=5 * S)
    grant = table.grant(rows=2)
    assert grant.expires_ns == table.now_ns + 5 * S
    assert table.scheduler.expire(grant.expires_ns - 1) == ([], [])
    assert table.scheduler.expire(grant.expires_ns)[0] == [grant.epoch]


@pytest.mark.spec("002", OWNERSHIP, "1: a row can be started only with the epoch of its owner")
def test_begin_requires_the_epoch_of_the_row() -> None:
    ledger = SeqLedger(4)
    ledger.move(0, 4, RowEvent.DISPATCH)
    ledger.assign(0, 2, 1)
    for lo, hi, epoch in ((0, 2, 0), (0, 2, 2), (1, 3, 1), (2, 3, 1), (2, 3, 0)):
        with pytest.raises(IllegalTransition):
            ledger.move(lo, hi, RowEvent.BEGIN, epoch=epoch)
        with pytest.raises(IllegalTransition):
            ledger.move_set(np.arange(lo, hi), RowEvent.BEGIN, epoch=epoch)
    assert ledger.in_flight_count == 0
    table = SchedulerRig(4)
    mine = table.grant("a", rows=2)
    table.grant("b", rows=2)
    with pytest.raises(IllegalTransition):
        table.report(mine, begin=[(2, 3)])


@pytest.mark.spec("002", OWNERSHIP, "2: reports and heartbeats of a worker extend its lease")
def test_report_and_heartbeat_extend_the_lease() -> None:
    table = SchedulerRig(8)
    grant = table.grant_begun(rows=4)
    for seq in range(3):
        table.now_ns += LEASE_NS - 1
        table.report(grant, FinishedRange(seq, seq + 1, OK))
    table.now_ns += LEASE_NS - 1
    table.scheduler.heartbeat(grant.epoch, table.now_ns)
    assert table.scheduler.expire(table.now_ns + LEASE_NS - 1) == ([], [])


@pytest.mark.spec(
    "002", OWNERSHIP, "3: rows of an expired lease with attempts left can be dispatched again"
)
def test_expired_lease_makes_its_rows_dispatchable_again() -> None:
    table = SchedulerRig(4)
    table.grant(rows=4, begin=2)
    table.expire_leases()
    assert table.states() == [1, 1, 1, 1]
    assert table.scheduler.ledger.attempts.tolist() == [1, 1, 0, 0]


@pytest.mark.spec("002", OWNERSHIP, "3: rows of an expired lease without attempts left are failed")
def test_expired_lease_fails_rows_without_attempts_left() -> None:
    table = SchedulerRig(4, attempts_max=1)
    table.grant(rows=4, begin=2)
    table.expire_leases()
    assert table.states() == [5, 5, 1, 1], "what was not begun costs no try"
    assert table.scheduler.ledger.reason.tolist()[:2] == [ErrorClass.LEASE_EXPIRED] * 2


@pytest.mark.spec("002", OWNERSHIP, "3: the scheduler fences reports of an expired lease")
def test_report_of_an_expired_lease_is_fenced() -> None:
    table = SchedulerRig(4)
    grant = table.grant_begun(rows=2)
    table.expire_leases()
    before = table.scheduler.dump()
    with pytest.raises(Fenced):
        table.finish(grant)
    assert table.scheduler.dump() == before


@pytest.mark.spec("002", OWNERSHIP, "4: a reclaim depends only on the log and the policy")
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS, later=st.integers(0, 10**9))
def test_lease_reclaim_is_deterministic(
    size: int, policy: dict[str, Any], steps: list[HistoryStep], later: int
) -> None:
    history = SchedulerHistory(size, **policy)
    history.run(steps)
    due_ns = history.now_ns + 3600 * S
    results = []
    for board, now_ns in (
        (history.scheduler, due_ns),
        (RunScheduler.replay(history.log), due_ns + later),
        (RunScheduler.load(history.scheduler.dump()), 2 * due_ns),
    ):
        board.expire(now_ns)
        results.append((ledger_snapshot(board.ledger), list(board.suspects), list(board.free)))
    assert results[0] == results[1] == results[2]


# -- Retry Guard ---------------------------------------------------------------------------------

RETRY = "Retry Guard"


@pytest.mark.spec("002", RETRY, "1: a retry keeps the seq of its row")
def test_retry_keeps_the_seq_of_the_row() -> None:
    table = SchedulerRig(4)
    grant = table.grant_begun(rows=4)
    table.report(grant, FinishedRange(2, 3, FAILED, TRANSIENT))
    assert table.grant(rows=1).ranges == [RowRange(2, 3, 2)]


@pytest.mark.spec("002", RETRY, "2: each retry counts one attempt")
def test_each_retry_counts_one_attempt() -> None:
    table = SchedulerRig(1, attempts_max=4)
    for retries in range(3):
        assert table.scheduler.ledger.attempts.tolist() == [retries]
        table.finish(table.grant_begun(), FAILED, TRANSIENT)
    assert table.scheduler.ledger.attempts.tolist() == [3]


@pytest.mark.spec(
    "002", RETRY, "3: only transient, resource and lease_expired failures are retried"
)
def test_retryable_error_classes() -> None:
    retried = {
        kind.name.lower()
        for kind in ErrorClass
        if decide_retry(kind, attempts=0, retries_used=0, policy=RunPolicy()) is RetryVerdict.RETRY
    }
    assert retried == {"transient", "resource", "lease_expired"}
    assert {kind.name.lower() for kind in ErrorClass} - retried == {
        "none", "input", "schema", "corruption", "cancellation",
    }  # fmt: skip


@pytest.mark.spec(
    "002", RETRY, "3: retries end when the budget of the row or of the run is exhausted"
)
def test_retries_end_with_the_row_and_run_budgets() -> None:
    table = SchedulerRig(4, attempts_max=2, retries_max=3)
    table.finish(table.grant_begun(rows=4), FAILED, TRANSIENT)
    assert table.states() == [1, 1, 1, 5], "the budget of the run was three"
    table.finish(table.grant_begun(rows=4), FAILED, TRANSIENT)
    assert table.states() == [5, 5, 5, 5]


@pytest.mark.spec("002", RETRY, "4: a row without attempts left is failed")
def test_row_without_attempts_left_is_failed() -> None:
    table = SchedulerRig(1, attempts_max=3)
    tries = 0
    while table.claim() != AllRowsFinal():
        table.log_decision(table.scheduler.reclaim_all(table.now_ns))
        table.finish(table.grant_begun(), FAILED, TRANSIENT)
        tries += 1
    assert (tries, table.states()) == (3, [5])


@pytest.mark.spec(
    "002", RETRY, "4: a failure that will be retried is never visible as terminal (our rule)"
)
def test_retried_failure_is_never_terminal() -> None:
    table = SchedulerRig(2)
    grant = table.grant_begun(rows=2)
    table.report(grant, FinishedRange(0, 1, FAILED, TRANSIENT))
    assert table.scheduler.ledger.terminal_count == 0
    assert table.scheduler.terminal_prefix() == 0
    with pytest.raises(IllegalTransition):
        table.scheduler.commit(1, 0, table.now_ns)


# -- Constant-Time Counters ----------------------------------------------------------------------

COUNTERS = "Constant-Time Counters"


@pytest.mark.spec(
    "002",
    COUNTERS,
    "the ledger updates its four counters with every write, and they match the row states",
)
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS)
def test_ledger_counters_match_the_row_states(
    size: int, policy: dict[str, Any], steps: list[HistoryStep]
) -> None:
    history = SchedulerHistory(size, **policy)
    history.run(steps)
    states = history.states()
    assert history.scheduler.ledger.counters() == {
        "terminalCount": sum(3 <= state <= 6 for state in states),
        "inFlightCount": states.count(2),
        "dispatchedCount": states.count(1),
        "committedCount": states.count(7),
    }


class CountingArray(np.ndarray):  # type: ignore[type-arg]
    """An array that counts the reads of its elements."""

    elements_read = 0

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if not isinstance(value, CountingArray):
            CountingArray.elements_read += 1
        return value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        CountingArray.elements_read += max(np.size(each) for each in inputs)
        if "out" in options:
            options["out"] = tuple(np.asarray(each) for each in options["out"])
        plain = [np.asarray(each) if isinstance(each, CountingArray) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **options)


@pytest.mark.spec(
    "002",
    COUNTERS,
    "the cost of a claim and a report does not depend on the number of rows of the run",
)
def test_claim_and_report_cost_is_independent_of_ledger_size() -> None:
    elements_read = []
    for size in (2_000, 200_000):
        table = SchedulerRig(size, page_rows=1000)
        ledger = table.scheduler.ledger
        for name in ("state", "attempts", "reason", "owner_epochs"):
            setattr(ledger, name, getattr(ledger, name).view(CountingArray))
        table.grant_begun("dies", rows=10)
        table.log_decision(table.scheduler.reclaim_owner("dies", table.now_ns))
        CountingArray.elements_read = 0
        for _ in range(20):
            grant = table.grant_begun(rows=10)
            table.report(
                grant, FinishedRange(grant.ranges[0].lo, grant.ranges[0].lo + 1, FAILED, TRANSIENT)
            )
            table.log_decision(table.scheduler.reclaim_owner("w", table.now_ns))
            table.commit()
            ledger.counters()
            table.expire_leases()
        elements_read.append(CountingArray.elements_read)
    assert elements_read[0] == elements_read[1] > 0


@pytest.mark.spec(
    "002",
    COUNTERS,
    "the counters are stored values: the ledger does not read the row states to return them",
)
def test_ledger_counters_do_not_read_the_arrays() -> None:
    ledger = SeqLedger(4)
    ledger.move(0, 2, RowEvent.DISPATCH)
    ledger.state = ledger.state[:0]
    assert ledger.counters()["dispatchedCount"] == 2


# -- Acceptance ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "002",
    "Acceptance",
    "1: the tests cover every legal transition for a range, for a set and for a single row",
)
def test_all_twelve_transitions_are_covered() -> None:
    walked = {(prior, state_after(prior, event)) for prior, event in LEDGER.table}
    assert len(walked) == 12
    assert set(ROUTES) == set(RowState)


@pytest.mark.spec("002", "Acceptance", "2: every illegal event raises IllegalTransition")
@pytest.mark.parametrize("path", MOVE_PATHS)
def test_every_illegal_event_raises_illegal_transition(path: str) -> None:
    refused = 0
    for prior, event, after in LEDGER.pairs():
        if after is None:
            ledger = ledger_in_state(prior)
            with pytest.raises(IllegalTransition):
                MOVE_PATHS[path](ledger, event)
            refused += 1
    assert refused == 8 * 8 - 12


@pytest.mark.spec(
    "002",
    "Acceptance",
    "3: a replay of the run log restores the scheduler with all reclaims and retries",
)
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS)
def test_replay_of_the_run_log_restores_the_scheduler(
    size: int, policy: dict[str, Any], steps: list[HistoryStep]
) -> None:
    history = SchedulerHistory(size, **policy)
    history.run(steps)
    assert RunScheduler.replay(history.log).dump() == history.scheduler.dump()
