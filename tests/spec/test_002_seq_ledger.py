"""Document 002, rule by rule, in its order.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import S
from holdfast.errors import Fenced, IllegalTransition
from holdfast.ledger.answers import Finished, Stop
from holdfast.ledger.board import Board
from holdfast.ledger.classes import RETRYABLE, ErrorClass, Policy, Verdict, decide
from holdfast.ledger.ledger import Ledger
from holdfast.ledger.records import Done, Part
from holdfast.ledger.states import LEDGER, LEGAL, TERMINAL, Event, State
from tests.ledger.histories import POLICIES, SIZES, STEPS, History, Step
from tests.ledger.rig import FAILED, LEASE_NS, OK, SKIPPED, Table
from tests.ledger.test_ledger import CONTEXT, PATHS, ROUTES, at_state, picture, recount

MODULES = ("holdfast.ledger.ledger", "holdfast.ledger.board")

TRANSIENT = int(ErrorClass.TRANSIENT)
INPUT = int(ErrorClass.INPUT)


# -- State Codes ---------------------------------------------------------------------------------


@pytest.mark.spec("002", "State Codes", "eight states, by these names, with codes 0 to 7")
@pytest.mark.parametrize(
    ("code", "name"),
    list(enumerate(
        ["UNSEEN", "DISPATCHED", "IN_FLIGHT", "TERMINAL_SUCCESS", "TERMINAL_SKIP",
         "TERMINAL_FAIL", "TERMINAL_CANCEL", "COMMITTED"]
    )),
)  # fmt: skip
def test_a_state_has_its_code(code: int, name: str) -> None:
    assert State(code).name == name
    assert len(State) == 8


# -- Transition Contract -------------------------------------------------------------------------


def arrive(prior: State, event: Event) -> State:
    """Where a range, a set and a single row get from a state by an event; they must agree."""
    found = set()
    for path in PATHS.values():
        ledger = at_state(prior)
        path(ledger, event)
        assert ledger.counts() == recount(ledger)
        found.add(ledger.state_of(2))
    [after] = found
    return after


CONTRACT = "Transition Contract"


@pytest.mark.spec("002", CONTRACT, "1: a row that was never seen can be dispatched")
def test_unseen_to_dispatched() -> None:
    assert arrive(State.UNSEEN, Event.DISPATCH) is State.DISPATCHED


@pytest.mark.spec("002", CONTRACT, "2: a dispatched row can be begun")
def test_dispatched_to_in_flight() -> None:
    assert arrive(State.DISPATCHED, Event.BEGIN) is State.IN_FLIGHT


@pytest.mark.spec("002", CONTRACT, "3: a row at work can succeed")
def test_in_flight_to_success() -> None:
    assert arrive(State.IN_FLIGHT, Event.SUCCEED) is State.TERMINAL_SUCCESS


@pytest.mark.spec("002", CONTRACT, "4: a row at work can be skipped")
def test_in_flight_to_skip() -> None:
    assert arrive(State.IN_FLIGHT, Event.SKIP) is State.TERMINAL_SKIP


@pytest.mark.spec("002", CONTRACT, "5: a row at work can fail")
def test_in_flight_to_fail() -> None:
    assert arrive(State.IN_FLIGHT, Event.FAIL) is State.TERMINAL_FAIL


@pytest.mark.spec("002", CONTRACT, "6: a dispatched row that was not begun can be cancelled")
def test_dispatched_to_cancel() -> None:
    assert arrive(State.DISPATCHED, Event.CANCEL) is State.TERMINAL_CANCEL
    table = Table(4)
    table.grant(rows=2)
    table.take(table.board.cancel(table.now_ns))
    assert table.states() == [6, 6, 6, 6], (
        "unseen rows are dispatched and cancelled in one decision"
    )


@pytest.mark.spec("002", CONTRACT, "7: a row at work is cancelled by force once the grace is over")
def test_in_flight_to_cancel() -> None:
    assert arrive(State.IN_FLIGHT, Event.CANCEL) is State.TERMINAL_CANCEL
    table = Table(2)
    table.begun(rows=2)
    table.take(table.board.cancel(table.now_ns))
    table.take(table.board.end_grace(table.board.grace_ends_ns - 1))
    assert table.states() == [2, 2]
    table.take(table.board.end_grace(table.board.grace_ends_ns))
    assert table.states() == [6, 6]


@pytest.mark.spec("002", CONTRACT, "8: a success can be committed")
def test_success_to_committed() -> None:
    assert arrive(State.TERMINAL_SUCCESS, Event.COMMIT) is State.COMMITTED


@pytest.mark.spec("002", CONTRACT, "9: a skipped row can be committed")
def test_skip_to_committed() -> None:
    assert arrive(State.TERMINAL_SKIP, Event.COMMIT) is State.COMMITTED


@pytest.mark.spec("002", CONTRACT, "10: a failed row can be committed")
def test_fail_to_committed() -> None:
    assert arrive(State.TERMINAL_FAIL, Event.COMMIT) is State.COMMITTED


@pytest.mark.spec("002", CONTRACT, "11: a cancelled row can be committed")
def test_cancel_to_committed() -> None:
    assert arrive(State.TERMINAL_CANCEL, Event.COMMIT) is State.COMMITTED


@pytest.mark.spec(
    "002", CONTRACT, "12: of the terminal states only a failure can be dispatched again"
)
def test_only_a_failure_is_dispatched_again() -> None:
    assert arrive(State.TERMINAL_FAIL, Event.RETRY) is State.DISPATCHED
    for state in TERMINAL - {State.TERMINAL_FAIL}:
        with pytest.raises(IllegalTransition):
            arrive(state, Event.RETRY)


@pytest.mark.spec("002", CONTRACT, "12: and only if its class may be retried")
@pytest.mark.parametrize("kind", [kind for kind in ErrorClass if kind])
def test_only_a_retryable_failure_is_dispatched_again(kind: ErrorClass) -> None:
    table = Table(1)
    table.finish(table.begun(), FAILED, kind)
    assert table.states() == [1 if kind in RETRYABLE else 5]


# -- Illegal Transition Policy -------------------------------------------------------------------

ILLEGAL = "Illegal Transition Policy"


@pytest.mark.spec("002", ILLEGAL, "1: what is not in the contract is illegal")
@pytest.mark.parametrize("attempted", State)
@pytest.mark.parametrize("prior", State)
def test_every_pair_that_is_not_listed_is_refused(prior: State, attempted: State) -> None:
    ledger = at_state(prior)
    if LEGAL[prior][attempted]:
        ledger.move_to(2, attempted, **CONTEXT)
        return
    before = picture(ledger)
    with pytest.raises(IllegalTransition):
        ledger.move_to(2, attempted, **CONTEXT)
    assert picture(ledger) == before


@pytest.mark.spec("002", ILLEGAL, "2: an illegal move ends the run there and then")
def test_an_illegal_move_halts_the_run() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, Done(5, 6, OK))
    assert table.ask() == Stop("halted")
    with pytest.raises(IllegalTransition):
        table.report(grant, Done(0, 1, OK))
    assert table.states() == [2, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.spec("002", ILLEGAL, "2: and stays ended when the log is read again")
def test_a_halted_run_is_halted_after_a_restart() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, Done(5, 6, OK))
    assert table.board.halted is not None
    for board in (
        Board.load(table.board.dump()),
        Board.replay([*table.log, table.board.halted]),
    ):
        assert board.claim("w", 1, now_ns=table.now_ns)[0] == Stop("halted")


@pytest.mark.spec("002", ILLEGAL, "3: it says seq, prior, attempted, owner and its time")
def test_an_illegal_move_says_all_about_itself() -> None:
    table = Table(8)
    grant = table.begun("worker-7", rows=2)
    table.now_ns = 1_700_000_000 * S
    with pytest.raises(IllegalTransition) as refusal:
        table.report(grant, Done(5, 6, OK))
    told = refusal.value
    assert (told.seq, told.prior, told.attempted) == (5, "UNSEEN", "TERMINAL_SUCCESS")
    assert (told.owner, told.wall_ns) == ("worker-7", 1_700_000_000 * S)
    for name in ("seq", "prior", "attempted", "owner", "wall_ns"):
        assert name in str(told)


# -- Atomicity -----------------------------------------------------------------------------------


@pytest.mark.spec("002", "Atomicity", "1: a row is judged and written in one, a batch whole or not")
@pytest.mark.parametrize("path", ["range", "set"])
def test_a_batch_moves_whole_or_not_at_all(path: str) -> None:
    ledger = at_state(State.IN_FLIGHT, rows=(2, 3))
    before = picture(ledger)
    with pytest.raises(IllegalTransition) as refusal:
        PATHS[path](ledger, Event.SUCCEED)
    assert refusal.value.seq == 4
    assert picture(ledger) == before


@pytest.mark.spec("002", "Atomicity", "2: a second end of the same try is fatal")
@pytest.mark.parametrize("second", [OK, SKIPPED, FAILED])
@pytest.mark.parametrize("first", [OK, SKIPPED, FAILED])
def test_a_second_terminal_is_fatal(first: int, second: int) -> None:
    table = Table(4)
    grant = table.begun(rows=2)
    table.report(grant, Done(0, 1, first, INPUT))
    with pytest.raises(IllegalTransition) as refusal:
        table.report(grant, Done(0, 1, second, INPUT))
    assert (refusal.value.prior, refusal.value.attempted) == (
        State(first).name,
        State(second).name,
    )
    assert table.board.halted is not None


@pytest.mark.spec("002", "Atomicity", "2: also when both are in one report")
def test_two_terminals_in_one_report_are_fatal() -> None:
    table = Table(4)
    grant = table.begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, Done(0, 2, OK), Done(1, 2, SKIPPED))
    assert table.states() == [2, 2, 0, 0]


@pytest.mark.spec(
    "002", "Atomicity", "2: as built, the same report sent again gets its first answer"
)
def test_a_report_sent_again_is_not_a_second_terminal() -> None:
    table = Table(4)
    grant = table.begun(rows=2)
    first = table.report(grant, Done(0, 1, OK))
    again = table.board.advance(grant.epoch, 1, b"1", done=[Done(0, 1, OK)], now_ns=table.now_ns)
    assert again == (first, [])
    assert table.board.halted is None


@pytest.mark.spec("002", "Atomicity", "3: committing again what is committed changes nothing")
def test_a_repeated_commit_is_idle() -> None:
    table = Table(4)
    table.finish(table.begun(rows=3))
    assert table.commit() == 3
    before = table.board.dump()
    assert table.board.commit(3, 2, table.now_ns) == (False, [])
    assert table.board.commit(1, 0, table.now_ns) == (False, [])
    assert table.board.dump() == before


@pytest.mark.spec("002", "Atomicity", "3: only there; a row that has not ended cannot be committed")
@pytest.mark.parametrize("prior", [State.UNSEEN, State.DISPATCHED, State.IN_FLIGHT])
def test_a_commit_of_a_row_that_has_not_ended_is_fatal(prior: State) -> None:
    table = Table(1)
    if prior is State.DISPATCHED:
        table.grant()
    if prior is State.IN_FLIGHT:
        table.begun()
    with pytest.raises(IllegalTransition) as refusal:
        table.board.commit(1, 0, table.now_ns)
    assert (refusal.value.prior, refusal.value.attempted) == (prior.name, "COMMITTED")


# -- Lease Ownership -----------------------------------------------------------------------------

OWNERSHIP = "Lease Ownership"


@pytest.mark.spec("002", OWNERSHIP, "every leased row has an owner token: the epoch of its grant")
def test_a_leased_row_knows_its_owner() -> None:
    table = Table(8)
    one, two = table.grant("a", rows=2), table.grant("b", rows=2)
    assert table.board.ledger.lease.tolist() == [
        one.epoch, one.epoch, two.epoch, two.epoch, 0, 0, 0, 0,
    ]  # fmt: skip
    assert [table.board.grants[epoch].owner for epoch in (one.epoch, two.epoch)] == ["a", "b"]
    table.report(one, begin=[(0, 2)])
    table.finish(one)
    assert table.board.ledger.owner_of(0) == 0


@pytest.mark.spec(
    "002", OWNERSHIP, "heartbeats and their time-out: kept for the grant, not the row"
)
def test_a_lease_ends_after_the_configured_time_without_a_heartbeat() -> None:
    table = Table(8, lease_ns=5 * S)
    grant = table.grant(rows=2)
    assert grant.expires_ns == table.now_ns + 5 * S
    assert table.board.expire(grant.expires_ns - 1) == ([], [])
    assert table.board.expire(grant.expires_ns)[0] == [grant.epoch]


@pytest.mark.spec("002", OWNERSHIP, "1: only the owner of a row can begin it")
def test_a_row_is_begun_by_its_owner_alone() -> None:
    ledger = Ledger(4)
    ledger.move(0, 4, Event.DISPATCH)
    ledger.own(0, 2, 1)
    for lo, hi, epoch in ((0, 2, 0), (0, 2, 2), (1, 3, 1), (2, 3, 1), (2, 3, 0)):
        with pytest.raises(IllegalTransition):
            ledger.move(lo, hi, Event.BEGIN, epoch=epoch)
        with pytest.raises(IllegalTransition):
            ledger.move_at(np.arange(lo, hi), Event.BEGIN, epoch=epoch)
    assert ledger.in_flight_count == 0
    table = Table(4)
    mine = table.grant("a", rows=2)
    table.grant("b", rows=2)
    with pytest.raises(IllegalTransition):
        table.report(mine, begin=[(2, 3)])


@pytest.mark.spec("002", OWNERSHIP, "2: a worker that makes progress keeps its lease")
def test_progress_is_a_heartbeat() -> None:
    table = Table(8)
    grant = table.begun(rows=4)
    for seq in range(3):
        table.now_ns += LEASE_NS - 1
        table.report(grant, Done(seq, seq + 1, OK))
    table.now_ns += LEASE_NS - 1
    table.board.heartbeat(grant.epoch, table.now_ns)
    assert table.board.expire(table.now_ns + LEASE_NS - 1) == ([], [])


@pytest.mark.spec(
    "002", OWNERSHIP, "3: rows of an expired lease are ready again while tries are left"
)
def test_an_expired_lease_makes_its_rows_ready_again() -> None:
    table = Table(4)
    table.grant(rows=4, begin=2)
    table.expire()
    assert table.states() == [1, 1, 1, 1]
    assert table.board.ledger.attempts.tolist() == [1, 1, 0, 0]


@pytest.mark.spec("002", OWNERSHIP, "3: and have failed when none is left")
def test_an_expired_lease_fails_rows_without_tries_left() -> None:
    table = Table(4, attempts_max=1)
    table.grant(rows=4, begin=2)
    table.expire()
    assert table.states() == [5, 5, 1, 1], "what was not begun costs no try"
    assert table.board.ledger.reason.tolist()[:2] == [ErrorClass.LEASE_EXPIRED] * 2


@pytest.mark.spec("002", OWNERSHIP, "3: the former owner is not heard any more")
def test_a_former_owner_is_fenced() -> None:
    table = Table(4)
    grant = table.begun(rows=2)
    table.expire()
    before = table.board.dump()
    with pytest.raises(Fenced):
        table.finish(grant)
    assert table.board.dump() == before


@pytest.mark.spec("002", OWNERSHIP, "4: what a reclaim decides follows from the log and the policy")
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS, later=st.integers(0, 10**9))
def test_a_reclaim_is_deterministic(
    size: int, policy: dict[str, Any], steps: list[Step], later: int
) -> None:
    history = History(size, **policy)
    history.run(steps)
    due_ns = history.now_ns + 3600 * S
    found = []
    for board, now_ns in (
        (history.board, due_ns),
        (Board.replay(history.log), due_ns + later),
        (Board.load(history.board.dump()), 2 * due_ns),
    ):
        board.expire(now_ns)
        found.append((picture(board.ledger), list(board.suspects), list(board.free)))
    assert found[0] == found[1] == found[2]


# -- Retry Guard ---------------------------------------------------------------------------------

RETRY = "Retry Guard"


@pytest.mark.spec("002", RETRY, "1: a row that is tried again is the same row")
def test_a_retry_keeps_its_seq() -> None:
    table = Table(4)
    grant = table.begun(rows=4)
    table.report(grant, Done(2, 3, FAILED, TRANSIENT))
    assert table.grant(rows=1).parts == [Part(2, 3, 2)]


@pytest.mark.spec("002", RETRY, "2: each retry counts one attempt")
def test_a_retry_is_counted() -> None:
    table = Table(1, attempts_max=4)
    for retries in range(3):
        assert table.board.ledger.attempts.tolist() == [retries]
        table.finish(table.begun(), FAILED, TRANSIENT)
    assert table.board.ledger.attempts.tolist() == [3]


@pytest.mark.spec("002", RETRY, "3: only these classes are retried")
def test_the_classes_that_are_retried() -> None:
    retried = {
        kind.name.lower()
        for kind in ErrorClass
        if decide(kind, attempts=0, retries_used=0, policy=Policy()) is Verdict.RETRY
    }
    assert retried == {"transient", "resource", "lease_expired"}
    assert {kind.name.lower() for kind in ErrorClass} - retried == {
        "none", "input", "schema", "corruption", "cancellation",
    }  # fmt: skip


@pytest.mark.spec("002", RETRY, "3: only while the row, and the run, have retries left")
def test_retries_end_with_their_budgets() -> None:
    table = Table(4, attempts_max=2, retries_max=3)
    table.finish(table.begun(rows=4), FAILED, TRANSIENT)
    assert table.states() == [1, 1, 1, 5], "the budget of the run was three"
    table.finish(table.begun(rows=4), FAILED, TRANSIENT)
    assert table.states() == [5, 5, 5, 5]


@pytest.mark.spec("002", RETRY, "4: a row whose tries are used up has failed")
def test_a_row_without_tries_left_has_failed() -> None:
    table = Table(1, attempts_max=3)
    tries = 0
    while table.ask() != Finished():
        table.take(table.board.drop_all(table.now_ns))
        table.finish(table.begun(), FAILED, TRANSIENT)
        tries += 1
    assert (tries, table.states()) == (3, [5])


@pytest.mark.spec(
    "002", RETRY, "4: as built, a failure that is tried again is never seen as an end"
)
def test_a_retried_failure_is_never_terminal() -> None:
    table = Table(2)
    grant = table.begun(rows=2)
    table.report(grant, Done(0, 1, FAILED, TRANSIENT))
    assert table.board.ledger.terminal_count == 0
    assert table.board.terminal_prefix() == 0
    with pytest.raises(IllegalTransition):
        table.board.commit(1, 0, table.now_ns)


# -- Constant-Time Counters ----------------------------------------------------------------------

COUNTERS = "Constant-Time Counters"


@pytest.mark.spec("002", COUNTERS, "four counters, by these names, kept with every write")
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS)
def test_counters_are_kept(size: int, policy: dict[str, Any], steps: list[Step]) -> None:
    history = History(size, **policy)
    history.run(steps)
    states = history.states()
    assert history.board.ledger.counters() == {
        "terminalCount": sum(3 <= state <= 6 for state in states),
        "inFlightCount": states.count(2),
        "dispatchedCount": states.count(1),
        "committedCount": states.count(7),
    }


class Guarded(np.ndarray):  # type: ignore[type-arg]
    """An array that counts how many of its elements are looked at."""

    looked = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(found, Guarded):
            Guarded.looked += 1
        return found

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Guarded.looked += max(np.size(each) for each in inputs)
        if "out" in options:
            options["out"] = tuple(np.asarray(each) for each in options["out"])
        plain = [np.asarray(each) if isinstance(each, Guarded) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **options)


@pytest.mark.spec(
    "002", COUNTERS, "work in the steady state does not depend on the size of the run"
)
def test_nothing_scans_the_ledger_while_it_works() -> None:
    looked = []
    for size in (2_000, 200_000):
        table = Table(size, page_rows=1000)
        ledger = table.board.ledger
        for name in ("state", "attempts", "reason", "lease"):
            setattr(ledger, name, getattr(ledger, name).view(Guarded))
        table.begun("dies", rows=10)
        table.take(table.board.drop("dies", table.now_ns))
        Guarded.looked = 0
        for _ in range(20):
            grant = table.begun(rows=10)
            table.report(grant, Done(grant.parts[0].lo, grant.parts[0].lo + 1, FAILED, TRANSIENT))
            table.take(table.board.drop("w", table.now_ns))
            table.commit()
            ledger.counters()
            table.expire()
        looked.append(Guarded.looked)
    assert looked[0] == looked[1] > 0


@pytest.mark.spec("002", COUNTERS, "a counter is read, not computed from the rows")
def test_counters_do_not_touch_the_arrays() -> None:
    ledger = Ledger(4)
    ledger.move(0, 2, Event.DISPATCH)
    ledger.state = ledger.state[:0]
    assert ledger.counters()["dispatchedCount"] == 2


# -- Acceptance ----------------------------------------------------------------------------------


@pytest.mark.spec("002", "Acceptance", "1: every legal move is walked, by range, by set and by row")
def test_all_twelve_moves_are_walked() -> None:
    walked = {(prior, arrive(prior, event)) for prior, event in LEDGER.table}
    assert len(walked) == 12
    assert set(ROUTES) == set(State)


@pytest.mark.spec("002", "Acceptance", "2: every illegal move that is injected is fatal")
@pytest.mark.parametrize("path", PATHS)
def test_every_illegal_event_is_fatal(path: str) -> None:
    refused = 0
    for prior, event, after in LEDGER.pairs():
        if after is None:
            ledger = at_state(prior)
            with pytest.raises(IllegalTransition):
                PATHS[path](ledger, event)
            refused += 1
    assert refused == 8 * 8 - 12


@pytest.mark.spec("002", "Acceptance", "3: reclaims and retries come out the same in a replay")
@settings(max_examples=100)
@given(size=SIZES, policy=POLICIES, steps=STEPS)
def test_a_replay_is_the_run(size: int, policy: dict[str, Any], steps: list[Step]) -> None:
    history = History(size, **policy)
    history.run(steps)
    assert Board.replay(history.log).dump() == history.board.dump()
