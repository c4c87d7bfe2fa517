"""Decisions, one by one: who gets which rows, what a report does, what a lost grant leaves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.errors import Fenced, IllegalTransition, Invalid, StoreCorrupt
from holdfast.ledger import records
from holdfast.ledger.answers import Finished, Grant, Stop, Wait
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.position import Dump
from holdfast.ledger.records import Done, Part
from holdfast.ledger.states import State
from tests.ledger.rig import FAILED, LEASE_NS, OK, SKIPPED, Table, spans

TRANSIENT = int(ErrorClass.TRANSIENT)
INPUT = int(ErrorClass.INPUT)


# -- claims --------------------------------------------------------------------------------------


def test_a_run_without_rows_is_finished() -> None:
    table = Table(0)
    assert table.ask() == Finished()
    assert table.board.finished
    assert table.board.terminal_prefix() == 0
    assert table.take(table.board.cancel(table.now_ns)) is False
    assert Board.load(table.board.dump()).dump() == table.board.dump()


def test_a_claim_takes_the_lowest_rows_and_never_crosses_a_page() -> None:
    table = Table(20, page_rows=8)
    assert spans(table.grant(rows=5)) == [(0, 5)]
    assert spans(table.grant(rows=5)) == [(5, 8)]
    assert spans(table.grant(rows=100)) == [(8, 16)]
    assert spans(table.grant(rows=100)) == [(16, 20)]
    assert isinstance(table.ask(), Wait)


def test_a_claim_stays_inside_the_rows_it_asks_for() -> None:
    table = Table(20, page_rows=8)
    assert spans(table.grant(lo=10, hi=13)) == [(10, 13)]
    assert isinstance(table.ask(lo=10, hi=13), Wait)
    assert spans(table.grant(lo=9, hi=15)) == [(9, 10), (13, 15)]
    assert table.states()[:10] == [0] * 9 + [1]


def test_the_first_rows_of_a_grant_can_be_begun_with_it() -> None:
    table = Table(20)
    grant = table.grant(rows=6, begin=4)
    assert grant.begun == 4
    assert table.states()[:7] == [2, 2, 2, 2, 1, 1, 0]


def test_rows_given_back_go_before_unseen_ones_and_are_filled_up() -> None:
    table = Table(20)
    table.grant("gone", rows=3)
    table.grant("stays", rows=4)
    table.take(table.board.drop("gone", table.now_ns))
    again = table.grant(rows=5)
    assert spans(again) == [(0, 3), (7, 9)]
    assert [part.attempt for part in again.parts] == [1, 1]


def test_every_grant_has_a_new_epoch() -> None:
    table = Table(20)
    epochs = [table.grant(rows=2).epoch for _ in range(5)]
    assert epochs == sorted(set(epochs))


def test_a_suspect_goes_alone_and_after_everything_else() -> None:
    table = Table(8)
    done = table.begun("steady", rows=1)
    table.begun("dies", rows=2)
    table.take(table.board.drop("dies", table.now_ns))
    assert spans(table.grant(rows=5)) == [(3, 8)], "the head is at work: suspects are not urgent"
    suspect = table.grant(rows=5, begin=5)
    assert (suspect.alone, suspect.begun, suspect.parts) == (True, 0, [Part(1, 2, 2)])
    table.finish(done)


def test_a_suspect_at_the_commit_head_goes_first() -> None:
    table = Table(8)
    table.begun("dies", rows=2)
    table.take(table.board.drop("dies", table.now_ns))
    assert table.grant(rows=5).parts == [Part(0, 1, 2)]
    assert table.grant(rows=5).parts == [Part(2, 7, 1)], "the head is being worked on"


def test_suspects_of_a_batch_go_in_slices_and_at_last_one_by_one() -> None:
    table = Table(32, batch_rows=16, page_rows=16)
    for slice_rows in (16, 4, 1):
        grant = table.begun("dies", rows=16, lo=0, hi=16)
        assert grant.rows == slice_rows
        table.take(table.board.drop("dies", table.now_ns))
    assert table.states()[:5] == [5, 1, 1, 1, 1]


def test_claims_are_made_of_whole_batches() -> None:
    table = Table(22, batch_rows=4, page_rows=16)
    assert spans(table.grant(rows=3)) == [(0, 4)]
    assert spans(table.grant(rows=7)) == [(4, 8)]
    assert spans(table.grant(rows=9, begin=1)) == [(8, 16)]
    assert table.states()[8:13] == [2, 2, 2, 2, 1]
    assert spans(table.grant(rows=100)) == [(16, 22)]


def test_unseen_rows_wait_while_they_are_too_far_ahead_of_the_commit() -> None:
    table = Table(100, ahead_rows_max=20)
    first = table.begun(rows=10)
    table.begun(rows=15)
    waits = table.ask()
    assert isinstance(waits, Wait)
    assert waits.why == "lag"
    assert waits.until_ns == table.board.next_due_ns(), "the head may be waiting for a time"
    table.finish(first)
    assert isinstance(table.ask(), Wait)
    table.commit()
    assert spans(table.grant()) == [(25, 35)]


def test_lag_does_not_keep_back_what_was_begun_before() -> None:
    table = Table(100, ahead_rows_max=5)
    table.begun("dies", rows=10)
    table.take(table.board.drop("dies", table.now_ns))
    assert table.grant().alone


def test_who_finds_nothing_is_told_why() -> None:
    table = Table(4, backoff_first_ns=S)
    grant = table.begun(rows=4)
    wait = table.ask()
    assert wait == Wait(grant.expires_ns, "busy")
    table.finish(grant, FAILED, TRANSIENT)
    wait = table.ask()
    assert isinstance(wait, Wait)
    assert wait.why == "backoff"
    table.now_ns = wait.until_ns
    again = table.begun(rows=4)
    assert [part.attempt for part in again.parts] == [2]
    table.finish(again)
    assert table.ask() == Finished()


def test_a_range_is_finished_before_the_run_is() -> None:
    table = Table(40, page_rows=8)
    table.finish(table.begun(rows=8, lo=8, hi=16))
    table.finish(table.begun(rows=8, lo=16, hi=20))
    assert table.ask(lo=8, hi=20) == Finished()
    assert isinstance(table.ask(lo=8, hi=21), Grant)
    assert not table.board.finished


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner": ""},
        {"rows": 0},
        {"rows": 1 << 30},
        {"begin": -1},
        {"lo": -1},
        {"hi": 9},
        {"lo": 5, "hi": 4},
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    table = Table(8)
    with pytest.raises(Invalid):
        table.ask(**wrong)  # type: ignore[arg-type]
    assert table.states() == [0] * 8


# -- reports -------------------------------------------------------------------------------------


def test_a_report_ends_rows_and_begins_others() -> None:
    table = Table(8)
    grant = table.grant(rows=6, begin=2)
    taken = table.report(grant, Done(0, 1, OK), Done(1, 2, SKIPPED), begin=[(4, 6)])
    assert (taken.held, taken.begun, taken.stop, taken.retried) == (4, True, "", [])
    assert table.states() == [3, 4, 1, 1, 2, 2, 0, 0]


def test_a_grant_whose_rows_are_all_reported_is_over() -> None:
    table = Table(8)
    grant = table.begun(rows=4)
    assert table.finish(grant).held == 0
    with pytest.raises(Fenced):
        table.report(grant, begin=[(0, 1)])
    assert table.board.next_due_ns() is None


def test_a_failure_that_may_be_retried_is_ready_again_in_the_same_decision() -> None:
    table = Table(8)
    grant = table.begun(rows=4)
    taken = table.report(grant, Done(1, 3, FAILED, TRANSIENT))
    assert [(again.lo, again.hi) for again in taken.retried] == [(1, 3)]
    assert taken.held == 2
    assert table.states()[:4] == [2, 1, 1, 2]
    assert table.board.ledger.attempts.tolist()[:4] == [0, 1, 1, 0]
    assert table.grant(rows=2).parts == [Part(1, 3, 2)]


def test_a_failure_that_may_not_be_retried_is_final() -> None:
    table = Table(8)
    grant = table.begun(rows=4)
    assert table.report(grant, Done(1, 3, FAILED, INPUT)).retried == []
    assert table.states()[:4] == [2, 5, 5, 2]
    assert table.board.ended == [0, 0, 2, 0]


def test_a_row_fails_for_good_when_its_tries_are_used_up() -> None:
    table = Table(1, attempts_max=3)
    for attempt in (1, 2, 3):
        grant = table.begun()
        assert grant.parts == [Part(0, 1, attempt)]
        table.finish(grant, FAILED, TRANSIENT)
    assert table.states() == [5]
    assert table.ask() == Finished()


def test_the_budget_of_the_run_is_given_to_the_lowest_rows() -> None:
    table = Table(8, retries_max=5)
    grant = table.begun(rows=8)
    taken = table.report(grant, Done(0, 3, FAILED, TRANSIENT), Done(4, 8, FAILED, TRANSIENT))
    assert [(again.lo, again.hi) for again in taken.retried] == [(0, 3), (4, 6)]
    assert table.states() == [1, 1, 1, 2, 1, 1, 5, 5]
    assert table.board.stats()["retries"] == 5


def test_a_failure_can_say_itself_how_long_to_wait() -> None:
    table = Table(1)
    grant = table.begun()
    table.report(grant, Done(0, 1, FAILED, TRANSIENT, delay_ns=3 * S))
    assert table.ask() == Wait(table.now_ns + 3 * S, "backoff")
    assert table.board.next_due_ns() == table.now_ns + 3 * S


def test_how_retries_were_added_does_not_show_in_a_checkpoint() -> None:
    table = Table(12)
    grant = table.begun(rows=12)
    for seq, delay_s in enumerate((9, 1, 8, 2, 7, 3, 12, 4, 11, 5, 10, 6)):
        table.report(grant, Done(seq, seq + 1, FAILED, TRANSIENT, delay_ns=delay_s * S))
    loaded = Board.load(table.board.dump())
    for _ in range(6):
        table.now_ns += S
        entries = table.board.claim("w", 1, now_ns=table.now_ns)[1]
        Board.replay(entries, loaded)
        assert loaded.dump() == table.board.dump()


def test_many_retries_whose_time_has_come_are_freed_some_at_a_time() -> None:
    table = Table(3000)
    grant = table.begun(rows=3000)
    done = [
        Done(seq, seq + 1, FAILED, TRANSIENT, delay_ns=S * (1 + seq % 2)) for seq in range(3000)
    ]
    table.report(grant, *done)
    table.now_ns += 3 * S
    freed = []
    for _ in range(3):
        before = len(table.board.resting)
        table.grant(rows=1)
        freed.append(before - len(table.board.resting))
    assert freed == [1024, 1024, 952]
    assert Board.replay(table.log).dump() == table.board.dump()


def test_a_repeated_request_gets_its_first_answer_and_changes_nothing() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    first, entries = table.board.advance(
        grant.epoch, 1, b"x", done=[Done(0, 1, FAILED, TRANSIENT)], now_ns=5 * S
    )
    assert len(entries) == 1
    before = table.board.dump()
    again = table.board.advance(
        grant.epoch, 1, b"x", done=[Done(0, 1, FAILED, TRANSIENT)], now_ns=9 * S
    )
    assert again == (first, [])
    assert table.board.dump() == before


def test_the_last_request_of_a_grant_can_be_repeated_after_it_is_over() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    first = table.finish(grant)
    board = Board.load(table.board.dump())
    assert board.advance(grant.epoch, 1, b"1", now_ns=table.now_ns) == (first, [])


def test_another_request_of_the_same_number_halts_the_run() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    table.report(grant, Done(0, 1, OK))
    with pytest.raises(IllegalTransition) as refusal:
        table.board.advance(grant.epoch, 1, b"other", done=[Done(0, 1, SKIPPED)], now_ns=7 * S)
    told = refusal.value
    assert (told.seq, told.prior, told.attempted) == (0, "TERMINAL_SUCCESS", "TERMINAL_SKIP")
    assert (told.owner, told.wall_ns) == ("w", 7 * S)
    assert table.board.halted is not None


@pytest.mark.parametrize("n", [0, 3])
def test_requests_come_in_order(n: int) -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    table.report(grant, Done(0, 1, OK))
    before = table.board.dump()
    with pytest.raises(Invalid):
        table.board.advance(grant.epoch, n, b"", done=[Done(1, 2, OK)], now_ns=table.now_ns)
    assert table.board.dump() == before


@pytest.mark.parametrize(
    ("done", "begin", "told"),
    [
        ([Done(0, 1, OK)], [], (0, "TERMINAL_SUCCESS", "TERMINAL_SUCCESS")),
        ([Done(1, 3, OK)], [], (2, "DISPATCHED", "TERMINAL_SUCCESS")),
        ([Done(1, 2, OK), Done(1, 2, FAILED)], [], (1, "TERMINAL_SUCCESS", "TERMINAL_FAIL")),
        ([Done(6, 7, OK)], [], (6, "IN_FLIGHT", "TERMINAL_SUCCESS")),
        ([Done(10, 11, OK)], [], (10, "UNSEEN", "TERMINAL_SUCCESS")),
        ([Done(1, 2, 7)], [], (1, "IN_FLIGHT", "COMMITTED")),
        ([Done(1, 2, 6)], [], (1, "IN_FLIGHT", "TERMINAL_CANCEL")),
        ([Done(1, 2, 0)], [], (1, "IN_FLIGHT", "UNSEEN")),
        ([Done(1, 2, 99)], [], (1, "IN_FLIGHT", "99")),
        ([], [(1, 2)], (1, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(2, 4), (3, 5)], (3, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(2, 6)], (5, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(9, 10)], (9, "UNSEEN", "IN_FLIGHT")),
    ],
)
def test_an_illegal_report_halts_the_run_and_moves_nothing(
    done: list[Done], begin: list[tuple[int, int]], told: tuple[int, str, str]
) -> None:
    table = Table(12)
    grant = table.grant(rows=5, begin=2)
    table.begun("other", rows=3)
    table.report(grant, Done(0, 1, OK))
    before = table.states()
    table.now_ns = 9 * S
    with pytest.raises(IllegalTransition) as refusal:
        table.report(grant, *done, begin=begin)
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == told
    assert (error.owner, error.wall_ns) == ("w", 9 * S)
    assert table.states() == before


def test_a_report_of_rows_that_do_not_exist_is_refused() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    for done in (Done(0, 9, OK), Done(-1, 1, OK), Done(1, 1, OK)):
        with pytest.raises(Invalid):
            table.report(grant, done)
    for done in (Done(0, 1, FAILED, 99), Done(0, 1, FAILED, TRANSIENT, delay_ns=1 << 62)):
        with pytest.raises(Invalid):
            table.report(grant, done)
    with pytest.raises(Invalid):
        table.report(grant, begin=[(1, 1)])
    assert table.board.halted is None


def test_after_a_halt_nothing_moves_and_everybody_is_told() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    with pytest.raises(IllegalTransition):
        table.report(grant, Done(4, 5, OK))
    halted = table.board.halted
    assert halted is not None
    before = table.board.dump()
    assert table.ask() == Stop("halted")
    for call in (
        lambda: table.report(grant, Done(0, 1, OK)),
        lambda: table.board.cancel(table.now_ns),
        lambda: table.board.commit(0, -1, table.now_ns),
        lambda: table.board.end_grace(table.now_ns),
    ):
        with pytest.raises(IllegalTransition) as refusal:
            call()
        assert refusal.value.seq == 4
    assert table.expire() == []
    assert table.board.dump() == before
    again = Board.replay([*table.log, halted])
    assert again.dump() == before


# -- lost grants ---------------------------------------------------------------------------------


def test_a_lost_grant_leaves_suspects_where_it_had_begun_and_free_rows_elsewhere() -> None:
    table = Table(8)
    table.grant("dies", rows=6, begin=2)
    table.expire()
    assert table.states() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert table.board.ledger.attempts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert table.board.ledger.reason.tolist()[:3] == [ErrorClass.LEASE_EXPIRED] * 2 + [0]
    assert table.board.stats()["suspects"] == 2
    assert table.board.ledger.lease.tolist() == [0] * 8


def test_of_grants_lost_together_the_oldest_has_the_budget() -> None:
    table = Table(8, retries_max=2)
    old, new = table.begun("a", rows=2), table.begun("b", rows=2)
    table.now_ns += S
    table.board.heartbeat(old.epoch, table.now_ns)
    assert table.board.next_due_ns() == new.expires_ns
    assert table.expire() == [old.epoch, new.epoch], "though the new one was overdue first"
    assert table.states()[:4] == [1, 1, 5, 5]


def test_what_a_lost_grant_reports_is_fenced_and_counted() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    table.expire()
    before = table.board.dump()
    with pytest.raises(Fenced):
        table.finish(grant)
    with pytest.raises(Fenced):
        table.board.heartbeat(grant.epoch, table.now_ns)
    with pytest.raises(Fenced):
        table.board.advance(99, 1, b"", now_ns=table.now_ns)
    assert table.board.fenced == 3
    assert table.board.dump() == before


def test_a_row_that_is_always_lost_fails_for_good() -> None:
    table = Table(1, attempts_max=3)
    for _ in range(3):
        table.begun()
        table.expire()
    assert table.states() == [5]
    assert table.board.ledger.reason.tolist() == [ErrorClass.LEASE_EXPIRED]
    assert table.ask() == Finished()


def test_losing_a_grant_that_began_nothing_costs_no_attempt() -> None:
    table = Table(4, attempts_max=1)
    for _ in range(5):
        table.grant(rows=4)
        table.expire()
    assert table.grant(rows=4).parts == [Part(0, 4, 1)]


def test_a_heartbeat_keeps_a_grant_alive() -> None:
    table = Table(8)
    grant = table.grant(rows=2)
    table.now_ns += LEASE_NS - 1
    until_ns = table.board.heartbeat(grant.epoch, table.now_ns)
    assert until_ns == table.now_ns + LEASE_NS
    assert table.board.expire(until_ns - 1) == ([], [])
    assert table.board.next_due_ns() == until_ns
    assert table.board.expire(until_ns)[0] == [grant.epoch]


def test_a_report_keeps_a_grant_alive_too() -> None:
    table = Table(8)
    grant = table.begun(rows=4)
    table.now_ns += LEASE_NS - 1
    table.report(grant, Done(0, 1, OK))
    assert table.board.expire(table.now_ns + LEASE_NS - 1) == ([], [])


def test_a_closed_connection_loses_only_its_own_grants() -> None:
    table = Table(20)
    mine = [table.grant("a", rows=2).epoch, table.grant("a", rows=2).epoch]
    other = table.grant("b", rows=2)
    assert table.take(table.board.drop("a", table.now_ns)) == mine
    assert list(table.board.grants) == [other.epoch]
    assert table.take(table.board.drop("a", table.now_ns)) == []
    assert table.take(table.board.drop("nobody", table.now_ns)) == []


def test_a_grant_can_be_given_back() -> None:
    table = Table(8)
    grant = table.grant(rows=4)
    assert table.take(table.board.drop_epoch(grant.epoch, table.now_ns)) == [grant.epoch]
    assert table.take(table.board.drop_epoch(grant.epoch, table.now_ns)) == []
    assert table.grant(rows=4).parts == grant.parts
    assert table.board.stats()["reclaims"] == 0, "nothing was lost"


def test_a_new_driver_takes_everything_back() -> None:
    table = Table(8)
    epochs = [table.begun(owner, rows=2).epoch for owner in "ab"]
    assert table.take(table.board.drop_all(table.now_ns)) == epochs
    assert table.board.grants == {}


def test_after_a_restart_grants_live_for_a_whole_lease_again() -> None:
    table = Table(8)
    grant = table.begun(rows=2)
    later_ns = table.now_ns + 100 * S
    for board in (Board.load(table.board.dump()), Board.replay(table.log)):
        board.renew(later_ns)
        assert board.expire(later_ns + LEASE_NS - 1) == ([], [])
        assert board.expire(later_ns + LEASE_NS)[0] == [grant.epoch]


def test_ended_grants_leave_nothing_behind_that_expires() -> None:
    table = Table(5000, page_rows=8)
    while isinstance(grant := table.ask(rows=8, begin=8), Grant):
        table.finish(grant)
    assert len(table.board._expiries) < 100
    assert table.board.next_due_ns() is None
    assert len(table.board.over) == 256


# -- cancellation --------------------------------------------------------------------------------


def test_cancelling_ends_at_once_what_is_not_begun() -> None:
    table = Table(12, backoff_first_ns=S)
    resting = table.begun("a", rows=2)
    table.finish(resting, FAILED, TRANSIENT)
    table.begun("dies", rows=2)
    table.take(table.board.drop("dies", table.now_ns))
    table.grant("b", rows=4, begin=1)
    assert table.take(table.board.cancel(table.now_ns)) is True
    assert table.states() == [6, 6, 6, 6, 2, 6, 6, 6, 6, 6, 6, 6]
    assert table.board.ledger.reason[0] == ErrorClass.CANCELLATION
    assert table.take(table.board.cancel(table.now_ns)) is False
    assert table.ask() == Stop("cancelling")


def test_a_run_that_has_ended_is_not_cancelled_any_more() -> None:
    table = Table(4)
    table.finish(table.begun(rows=4))
    assert table.take(table.board.cancel(table.now_ns)) is False
    assert table.ask() == Finished()


def test_begun_rows_may_end_by_themselves_during_the_grace_but_none_begins() -> None:
    table = Table(4)
    grant = table.grant(rows=4, begin=2)
    table.take(table.board.cancel(table.now_ns))
    taken = table.report(grant, Done(0, 1, OK))
    assert (taken.held, taken.begun, taken.stop) == (1, False, "cancelling")
    assert table.states() == [3, 2, 6, 6]
    taken = table.report(grant, Done(1, 2, FAILED, TRANSIENT))
    assert taken.retried == []
    assert table.board.finished


def test_after_the_grace_begun_rows_are_cancelled_and_their_grants_void() -> None:
    table = Table(4)
    grant = table.begun(rows=2)
    table.take(table.board.cancel(table.now_ns))
    assert table.board.next_due_ns() == table.board.grace_ends_ns
    table.now_ns = table.board.grace_ends_ns - 1
    assert table.take(table.board.end_grace(table.now_ns)) is False
    table.now_ns += 1
    assert table.take(table.board.end_grace(table.now_ns)) is True
    assert table.states() == [6] * 4
    with pytest.raises(Fenced):
        table.finish(grant)
    assert table.take(table.board.end_grace(table.now_ns)) is False
    assert table.board.next_due_ns() is None


def test_a_grant_lost_while_cancelling_is_not_retried() -> None:
    table = Table(4)
    table.begun(rows=2)
    table.take(table.board.cancel(table.now_ns))
    table.expire()
    assert table.states() == [6] * 4
    assert table.board.ended == [0, 0, 0, 4]


# -- commits -------------------------------------------------------------------------------------


def test_the_prefix_stops_at_the_first_row_that_is_not_final() -> None:
    table = Table(12)
    one, two = table.begun("a", rows=4), table.begun("b", rows=4)
    table.finish(two)
    assert table.board.terminal_prefix() == 0
    table.report(one, Done(0, 3, OK), Done(3, 4, FAILED, TRANSIENT))
    assert table.board.terminal_prefix() == 3, "a retry is no end"


def test_commits_mark_in_order_and_repeats_are_idle() -> None:
    table = Table(8)
    table.finish(table.begun(rows=5))
    assert table.take(table.board.commit(3, 2, table.now_ns)) is True
    assert table.states() == [7, 7, 7, 3, 3, 0, 0, 0]
    assert table.take(table.board.commit(3, 2, table.now_ns)) is False
    assert table.take(table.board.commit(1, 0, table.now_ns)) is False
    assert table.take(table.board.commit(5, 4, table.now_ns)) is True
    assert (table.board.next_commit, table.board.version) == (5, 4)
    assert table.board.ended == [5, 0, 0, 0]


def test_a_commit_beyond_what_is_final_halts_the_run() -> None:
    table = Table(8)
    table.finish(table.begun(rows=5))
    table.begun(rows=2)
    with pytest.raises(IllegalTransition) as refusal:
        table.board.commit(6, 5, table.now_ns)
    told = refusal.value
    assert (told.seq, told.prior, told.attempted) == (5, "IN_FLIGHT", "COMMITTED")
    assert State.COMMITTED not in table.states()


# -- bad logs ------------------------------------------------------------------------------------


def test_a_log_begins_with_its_opening() -> None:
    table = Table(4)
    with pytest.raises(Invalid):
        Board.replay([])
    with pytest.raises(Invalid):
        Board.replay(table.log[1:])
    assert Board.replay(table.log).policy == Policy(backoff_first_ns=0)


def test_time_in_the_log_never_runs_backward() -> None:
    table = Table(8)
    table.grant(rows=2)
    table.now_ns -= S // 2
    grant = table.begun(rows=2)
    table.now_ns -= S // 4
    table.report(grant, Done(2, 3, OK))
    table.expire()
    table.now_ns -= 20 * S
    table.commit()
    table.take(table.board.cancel(table.now_ns))
    times = [entry.decided_ns for entry in table.log]
    assert times == sorted(times)


def test_bytes_that_are_no_entry_are_refused() -> None:
    for body in (b"", b"\xc1", codec.pack(["opened", "x"]), codec.pack(["nothing", 1])):
        with pytest.raises(StoreCorrupt):
            records.decode(body)


def test_a_checkpoint_whose_parts_do_not_fit_together_is_refused() -> None:
    table = Table(8)
    table.begun("dies", rows=2)
    table.take(table.board.drop("dies", table.now_ns))
    told = codec.unpack_as(Dump, table.board.dump())
    for wrong in (
        replace(told, suspects=[(0, 5)]),
        replace(told, resting=[(1, 0, 1)]),
        replace(told, size=9),
    ):
        with pytest.raises((StoreCorrupt, Invalid)):
            Board.load(codec.pack(wrong))


def test_answers_kept_for_repeats_are_bounded_by_what_they_tell() -> None:
    table = Table(30_000, attempts_max=200)
    for _ in range(3):
        grant = table.begun(rows=9_000)
        rows = [seq for part in grant.parts for seq in range(part.lo, part.hi)]
        done = [Done(seq, seq + 1, FAILED, TRANSIENT, delay_ns=S * (seq % 2 + 1)) for seq in rows]
        table.report(grant, *done)
    assert len(table.board.over) == 1
    assert Board.load(table.board.dump()).dump() == table.board.dump()


def test_budgets_and_times_may_change_and_pages_may_not() -> None:
    table = Table(10, attempts_max=2, page_rows=16)
    other = replace(table.board.policy, attempts_max=5, lease_ns=7)
    changed, entries = table.board.retune(other, table.now_ns)
    assert changed
    assert table.board.policy.attempts_max == 5
    assert table.board.retune(other, table.now_ns) == (False, [])
    replayed = Board.load(table.board.dump())
    assert replayed.policy == other
    assert len(entries) == 1
    with pytest.raises(Invalid, match="pages"):
        table.board.retune(replace(other, page_rows=32), table.now_ns)
