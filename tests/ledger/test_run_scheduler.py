"""The run scheduler: claims, reports, reclaimed grants, cancellation, commits and replay."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.errors import Fenced, IllegalTransition, Invalid, StoreCorrupt
from holdfast.ledger import events
from holdfast.ledger.events import FinishedRange, RowRange
from holdfast.ledger.replies import AllRowsFinal, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.run_state import RunCheckpoint
from holdfast.ledger.states import RowState
from tests.ledger.scheduler_rig import FAILED, LEASE_NS, OK, SKIPPED, SchedulerRig, spans

TRANSIENT = int(ErrorClass.TRANSIENT)
INPUT = int(ErrorClass.INPUT)


# -- claims --------------------------------------------------------------------------------------


def test_a_run_without_rows_is_finished() -> None:
    rig = SchedulerRig(0)
    assert rig.claim() == AllRowsFinal()
    assert rig.scheduler.finished
    assert rig.scheduler.terminal_prefix() == 0
    assert rig.log_decision(rig.scheduler.cancel(rig.now_ns)) is False
    assert RunScheduler.load(rig.scheduler.dump()).dump() == rig.scheduler.dump()


def test_claim_grants_the_lowest_rows_within_one_page() -> None:
    rig = SchedulerRig(20, page_rows=8)
    assert spans(rig.grant(rows=5)) == [(0, 5)]
    assert spans(rig.grant(rows=5)) == [(5, 8)]
    assert spans(rig.grant(rows=100)) == [(8, 16)]
    assert spans(rig.grant(rows=100)) == [(16, 20)]
    assert isinstance(rig.claim(), NoRowsYet)


def test_claim_of_a_range_grants_rows_of_that_range_only() -> None:
    rig = SchedulerRig(20, page_rows=8)
    assert spans(rig.grant(lo=10, hi=13)) == [(10, 13)]
    assert isinstance(rig.claim(lo=10, hi=13), NoRowsYet)
    assert spans(rig.grant(lo=9, hi=15)) == [(9, 10), (13, 15)]
    assert rig.states()[:10] == [0] * 9 + [1]


def test_claim_begins_the_first_rows_of_its_grant() -> None:
    rig = SchedulerRig(20)
    grant = rig.grant(rows=6, begin=4)
    assert grant.begun == 4
    assert rig.states()[:7] == [2, 2, 2, 2, 1, 1, 0]


def test_claim_grants_returned_rows_before_unseen_rows() -> None:
    rig = SchedulerRig(20)
    rig.grant("gone", rows=3)
    rig.grant("stays", rows=4)
    rig.log_decision(rig.scheduler.reclaim_owner("gone", rig.now_ns))
    again = rig.grant(rows=5)
    assert spans(again) == [(0, 3), (7, 9)]
    assert [part.attempt for part in again.ranges] == [1, 1]


def test_each_grant_has_a_new_epoch() -> None:
    rig = SchedulerRig(20)
    epochs = [rig.grant(rows=2).epoch for _ in range(5)]
    assert epochs == sorted(set(epochs))


def test_suspect_row_is_granted_isolated_and_last() -> None:
    rig = SchedulerRig(8)
    done = rig.grant_begun("steady", rows=1)
    rig.grant_begun("dies", rows=2)
    rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    assert spans(rig.grant(rows=5)) == [(3, 8)], "the head is at work: suspects are not urgent"
    suspect = rig.grant(rows=5, begin=5)
    assert (suspect.isolated, suspect.begun, suspect.ranges) == (True, 0, [RowRange(1, 2, 2)])
    rig.finish(done)


def test_suspect_row_at_the_commit_head_is_granted_first() -> None:
    rig = SchedulerRig(8)
    rig.grant_begun("dies", rows=2)
    rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    assert rig.grant(rows=5).ranges == [RowRange(0, 1, 2)]
    assert rig.grant(rows=5).ranges == [RowRange(2, 7, 1)], "the head is being worked on"


def test_suspect_rows_of_a_batch_are_granted_in_shrinking_slices() -> None:
    rig = SchedulerRig(32, batch_rows=16, page_rows=16)
    for slice_rows in (16, 4, 1):
        grant = rig.grant_begun("dies", rows=16, lo=0, hi=16)
        assert grant.rows == slice_rows
        rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    assert rig.states()[:5] == [5, 1, 1, 1, 1]


def test_claim_grants_whole_batches() -> None:
    rig = SchedulerRig(22, batch_rows=4, page_rows=16)
    assert spans(rig.grant(rows=3)) == [(0, 4)]
    assert spans(rig.grant(rows=7)) == [(4, 8)]
    assert spans(rig.grant(rows=9, begin=1)) == [(8, 16)]
    assert rig.states()[8:13] == [2, 2, 2, 2, 1]
    assert spans(rig.grant(rows=100)) == [(16, 22)]


def test_claim_waits_when_unseen_rows_exceed_ahead_rows_max() -> None:
    rig = SchedulerRig(100, ahead_rows_max=20)
    first = rig.grant_begun(rows=10)
    rig.grant_begun(rows=15)
    answer = rig.claim()
    assert isinstance(answer, NoRowsYet)
    assert answer.why == "lag"
    assert answer.until_ns == rig.scheduler.next_due_ns(), "the head may be waiting for a time"
    rig.finish(first)
    assert isinstance(rig.claim(), NoRowsYet)
    rig.commit()
    assert spans(rig.grant()) == [(25, 35)]


def test_ahead_rows_max_does_not_delay_rows_that_were_begun() -> None:
    rig = SchedulerRig(100, ahead_rows_max=5)
    rig.grant_begun("dies", rows=10)
    rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    assert rig.grant().isolated


def test_claim_without_rows_returns_the_reason_to_wait() -> None:
    rig = SchedulerRig(4, backoff_first_ns=S)
    grant = rig.grant_begun(rows=4)
    answer = rig.claim()
    assert answer == NoRowsYet(grant.expires_ns, "busy")
    rig.finish(grant, FAILED, TRANSIENT)
    answer = rig.claim()
    assert isinstance(answer, NoRowsYet)
    assert answer.why == "backoff"
    rig.now_ns = answer.until_ns
    again = rig.grant_begun(rows=4)
    assert [part.attempt for part in again.ranges] == [2]
    rig.finish(again)
    assert rig.claim() == AllRowsFinal()


def test_claim_of_a_finished_range_returns_all_rows_final() -> None:
    rig = SchedulerRig(40, page_rows=8)
    rig.finish(rig.grant_begun(rows=8, lo=8, hi=16))
    rig.finish(rig.grant_begun(rows=8, lo=16, hi=20))
    assert rig.claim(lo=8, hi=20) == AllRowsFinal()
    assert isinstance(rig.claim(lo=8, hi=21), RowGrant)
    assert not rig.scheduler.finished


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
def test_invalid_claim_is_refused(wrong: dict[str, int]) -> None:
    rig = SchedulerRig(8)
    with pytest.raises(Invalid):
        rig.claim(**wrong)  # type: ignore[arg-type]
    assert rig.states() == [0] * 8


# -- reports -------------------------------------------------------------------------------------


def test_report_ends_rows_and_begins_further_rows() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant(rows=6, begin=2)
    accepted = rig.report(
        grant, FinishedRange(0, 1, OK), FinishedRange(1, 2, SKIPPED), begin=[(4, 6)]
    )
    assert (accepted.rows_held, accepted.begun, accepted.stop, accepted.retried) == (
        4,
        True,
        "",
        [],
    )
    assert rig.states() == [3, 4, 1, 1, 2, 2, 0, 0]


def test_grant_ends_after_all_its_rows_are_reported() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=4)
    assert rig.finish(grant).rows_held == 0
    with pytest.raises(Fenced):
        rig.report(grant, begin=[(0, 1)])
    assert rig.scheduler.next_due_ns() is None


def test_report_of_a_retryable_failure_readies_the_row_for_a_retry() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=4)
    accepted = rig.report(grant, FinishedRange(1, 3, FAILED, TRANSIENT))
    assert [(again.lo, again.hi) for again in accepted.retried] == [(1, 3)]
    assert accepted.rows_held == 2
    assert rig.states()[:4] == [2, 1, 1, 2]
    assert rig.scheduler.ledger.attempts.tolist()[:4] == [0, 1, 1, 0]
    assert rig.grant(rows=2).ranges == [RowRange(1, 3, 2)]


def test_report_of_a_permanent_failure_is_final() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=4)
    assert rig.report(grant, FinishedRange(1, 3, FAILED, INPUT)).retried == []
    assert rig.states()[:4] == [2, 5, 5, 2]
    assert rig.scheduler.ended == [0, 0, 2, 0]


def test_row_fails_permanently_after_attempts_max() -> None:
    rig = SchedulerRig(1, attempts_max=3)
    for attempt in (1, 2, 3):
        grant = rig.grant_begun()
        assert grant.ranges == [RowRange(0, 1, attempt)]
        rig.finish(grant, FAILED, TRANSIENT)
    assert rig.states() == [5]
    assert rig.claim() == AllRowsFinal()


def test_retries_max_of_the_run_is_spent_on_the_lowest_rows() -> None:
    rig = SchedulerRig(8, retries_max=5)
    grant = rig.grant_begun(rows=8)
    accepted = rig.report(
        grant, FinishedRange(0, 3, FAILED, TRANSIENT), FinishedRange(4, 8, FAILED, TRANSIENT)
    )
    assert [(again.lo, again.hi) for again in accepted.retried] == [(0, 3), (4, 6)]
    assert rig.states() == [1, 1, 1, 2, 1, 1, 5, 5]
    assert rig.scheduler.stats()["retries"] == 5


def test_reported_delay_ns_sets_the_backoff_of_a_retry() -> None:
    rig = SchedulerRig(1)
    grant = rig.grant_begun()
    rig.report(grant, FinishedRange(0, 1, FAILED, TRANSIENT, delay_ns=3 * S))
    assert rig.claim() == NoRowsYet(rig.now_ns + 3 * S, "backoff")
    assert rig.scheduler.next_due_ns() == rig.now_ns + 3 * S


def test_checkpoint_does_not_depend_on_the_insertion_order_of_retries() -> None:
    rig = SchedulerRig(12)
    grant = rig.grant_begun(rows=12)
    for seq, delay_s in enumerate((9, 1, 8, 2, 7, 3, 12, 4, 11, 5, 10, 6)):
        rig.report(grant, FinishedRange(seq, seq + 1, FAILED, TRANSIENT, delay_ns=delay_s * S))
    loaded = RunScheduler.load(rig.scheduler.dump())
    for _ in range(6):
        rig.now_ns += S
        entries = rig.scheduler.claim("w", 1, now_ns=rig.now_ns)[1]
        RunScheduler.replay(entries, loaded)
        assert loaded.dump() == rig.scheduler.dump()


def test_due_retries_are_freed_in_bounded_batches() -> None:
    rig = SchedulerRig(3000)
    grant = rig.grant_begun(rows=3000)
    done = [
        FinishedRange(seq, seq + 1, FAILED, TRANSIENT, delay_ns=S * (1 + seq % 2))
        for seq in range(3000)
    ]
    rig.report(grant, *done)
    rig.now_ns += 3 * S
    freed = []
    for _ in range(3):
        before = len(rig.scheduler.backoff_heap)
        rig.grant(rows=1)
        freed.append(before - len(rig.scheduler.backoff_heap))
    assert freed == [1024, 1024, 952]
    assert RunScheduler.replay(rig.log).dump() == rig.scheduler.dump()


def test_repeated_report_gets_its_first_reply_and_changes_nothing() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    first, entries = rig.scheduler.report(
        grant.epoch, 1, b"x", done=[FinishedRange(0, 1, FAILED, TRANSIENT)], now_ns=5 * S
    )
    assert len(entries) == 1
    before = rig.scheduler.dump()
    again = rig.scheduler.report(
        grant.epoch, 1, b"x", done=[FinishedRange(0, 1, FAILED, TRANSIENT)], now_ns=9 * S
    )
    assert again == (first, [])
    assert rig.scheduler.dump() == before


def test_last_report_of_a_finished_grant_can_be_repeated() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    first = rig.finish(grant)
    scheduler = RunScheduler.load(rig.scheduler.dump())
    assert scheduler.report(grant.epoch, 1, b"1", now_ns=rig.now_ns) == (first, [])


def test_different_report_with_the_same_number_halts_the_run() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    rig.report(grant, FinishedRange(0, 1, OK))
    with pytest.raises(IllegalTransition) as refusal:
        rig.scheduler.report(
            grant.epoch, 1, b"other", done=[FinishedRange(0, 1, SKIPPED)], now_ns=7 * S
        )
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == (0, "TERMINAL_SUCCESS", "TERMINAL_SKIP")
    assert (error.owner, error.wall_ns) == ("w", 7 * S)
    assert rig.scheduler.halted is not None


@pytest.mark.parametrize("n", [0, 3])
def test_report_number_out_of_order_is_refused(n: int) -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    rig.report(grant, FinishedRange(0, 1, OK))
    before = rig.scheduler.dump()
    with pytest.raises(Invalid):
        rig.scheduler.report(grant.epoch, n, b"", done=[FinishedRange(1, 2, OK)], now_ns=rig.now_ns)
    assert rig.scheduler.dump() == before


@pytest.mark.parametrize(
    ("done", "begin", "told"),
    [
        ([FinishedRange(0, 1, OK)], [], (0, "TERMINAL_SUCCESS", "TERMINAL_SUCCESS")),
        ([FinishedRange(1, 3, OK)], [], (2, "DISPATCHED", "TERMINAL_SUCCESS")),
        (
            [FinishedRange(1, 2, OK), FinishedRange(1, 2, FAILED)],
            [],
            (1, "TERMINAL_SUCCESS", "TERMINAL_FAIL"),
        ),
        ([FinishedRange(6, 7, OK)], [], (6, "IN_FLIGHT", "TERMINAL_SUCCESS")),
        ([FinishedRange(10, 11, OK)], [], (10, "UNSEEN", "TERMINAL_SUCCESS")),
        ([FinishedRange(1, 2, 7)], [], (1, "IN_FLIGHT", "COMMITTED")),
        ([FinishedRange(1, 2, 6)], [], (1, "IN_FLIGHT", "TERMINAL_CANCEL")),
        ([FinishedRange(1, 2, 0)], [], (1, "IN_FLIGHT", "UNSEEN")),
        ([FinishedRange(1, 2, 99)], [], (1, "IN_FLIGHT", "99")),
        ([], [(1, 2)], (1, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(2, 4), (3, 5)], (3, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(2, 6)], (5, "IN_FLIGHT", "IN_FLIGHT")),
        ([], [(9, 10)], (9, "UNSEEN", "IN_FLIGHT")),
    ],
)
def test_illegal_report_halts_the_run_and_moves_no_row(
    done: list[FinishedRange], begin: list[tuple[int, int]], told: tuple[int, str, str]
) -> None:
    rig = SchedulerRig(12)
    grant = rig.grant(rows=5, begin=2)
    rig.grant_begun("other", rows=3)
    rig.report(grant, FinishedRange(0, 1, OK))
    before = rig.states()
    rig.now_ns = 9 * S
    with pytest.raises(IllegalTransition) as refusal:
        rig.report(grant, *done, begin=begin)
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == told
    assert (error.owner, error.wall_ns) == ("w", 9 * S)
    assert rig.states() == before


def test_report_of_invalid_rows_is_refused() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    for done in (FinishedRange(0, 9, OK), FinishedRange(-1, 1, OK), FinishedRange(1, 1, OK)):
        with pytest.raises(Invalid):
            rig.report(grant, done)
    for done in (
        FinishedRange(0, 1, FAILED, 99),
        FinishedRange(0, 1, FAILED, TRANSIENT, delay_ns=1 << 62),
    ):
        with pytest.raises(Invalid):
            rig.report(grant, done)
    with pytest.raises(Invalid):
        rig.report(grant, begin=[(1, 1)])
    assert rig.scheduler.halted is None


def test_halted_run_refuses_every_request() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    with pytest.raises(IllegalTransition):
        rig.report(grant, FinishedRange(4, 5, OK))
    halted = rig.scheduler.halted
    assert halted is not None
    before = rig.scheduler.dump()
    assert rig.claim() == NoMoreRows("halted")
    for call in (
        lambda: rig.report(grant, FinishedRange(0, 1, OK)),
        lambda: rig.scheduler.cancel(rig.now_ns),
        lambda: rig.scheduler.commit(0, -1, rig.now_ns),
        lambda: rig.scheduler.end_cancel_grace(rig.now_ns),
    ):
        with pytest.raises(IllegalTransition) as refusal:
            call()
        assert refusal.value.seq == 4
    assert rig.expire_leases() == []
    assert rig.scheduler.dump() == before
    again = RunScheduler.replay([*rig.log, halted])
    assert again.dump() == before


# -- expired and reclaimed grants ----------------------------------------------------------------


def test_expired_grant_leaves_begun_rows_suspect_and_frees_the_rest() -> None:
    rig = SchedulerRig(8)
    rig.grant("dies", rows=6, begin=2)
    rig.expire_leases()
    assert rig.states() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert rig.scheduler.ledger.attempts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert rig.scheduler.ledger.reason.tolist()[:3] == [ErrorClass.LEASE_EXPIRED] * 2 + [0]
    assert rig.scheduler.stats()["suspects"] == 2
    assert rig.scheduler.ledger.owner_epochs.tolist() == [0] * 8


def test_oldest_of_the_expired_grants_spends_retries_max_first() -> None:
    rig = SchedulerRig(8, retries_max=2)
    old, new = rig.grant_begun("a", rows=2), rig.grant_begun("b", rows=2)
    rig.now_ns += S
    rig.scheduler.heartbeat(old.epoch, rig.now_ns)
    assert rig.scheduler.next_due_ns() == new.expires_ns
    assert rig.expire_leases() == [old.epoch, new.epoch], "though the new one was overdue first"
    assert rig.states()[:4] == [1, 1, 5, 5]


def test_report_of_an_expired_grant_is_fenced_and_counted() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    rig.expire_leases()
    before = rig.scheduler.dump()
    with pytest.raises(Fenced):
        rig.finish(grant)
    with pytest.raises(Fenced):
        rig.scheduler.heartbeat(grant.epoch, rig.now_ns)
    with pytest.raises(Fenced):
        rig.scheduler.report(99, 1, b"", now_ns=rig.now_ns)
    assert rig.scheduler.fenced == 3
    assert rig.scheduler.dump() == before


def test_row_whose_grants_always_expire_fails_permanently() -> None:
    rig = SchedulerRig(1, attempts_max=3)
    for _ in range(3):
        rig.grant_begun()
        rig.expire_leases()
    assert rig.states() == [5]
    assert rig.scheduler.ledger.reason.tolist() == [ErrorClass.LEASE_EXPIRED]
    assert rig.claim() == AllRowsFinal()


def test_expiry_of_a_grant_without_begun_rows_costs_no_attempt() -> None:
    rig = SchedulerRig(4, attempts_max=1)
    for _ in range(5):
        rig.grant(rows=4)
        rig.expire_leases()
    assert rig.grant(rows=4).ranges == [RowRange(0, 4, 1)]


def test_heartbeat_extends_the_lease_of_a_grant() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant(rows=2)
    rig.now_ns += LEASE_NS - 1
    until_ns = rig.scheduler.heartbeat(grant.epoch, rig.now_ns)
    assert until_ns == rig.now_ns + LEASE_NS
    assert rig.scheduler.expire(until_ns - 1) == ([], [])
    assert rig.scheduler.next_due_ns() == until_ns
    assert rig.scheduler.expire(until_ns)[0] == [grant.epoch]


def test_report_extends_the_lease_of_a_grant() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=4)
    rig.now_ns += LEASE_NS - 1
    rig.report(grant, FinishedRange(0, 1, OK))
    assert rig.scheduler.expire(rig.now_ns + LEASE_NS - 1) == ([], [])


def test_reclaim_owner_reclaims_the_grants_of_that_owner_only() -> None:
    rig = SchedulerRig(20)
    mine = [rig.grant("a", rows=2).epoch, rig.grant("a", rows=2).epoch]
    other = rig.grant("b", rows=2)
    assert rig.log_decision(rig.scheduler.reclaim_owner("a", rig.now_ns)) == mine
    assert list(rig.scheduler.grants) == [other.epoch]
    assert rig.log_decision(rig.scheduler.reclaim_owner("a", rig.now_ns)) == []
    assert rig.log_decision(rig.scheduler.reclaim_owner("nobody", rig.now_ns)) == []


def test_reclaim_grant_returns_the_rows_of_a_grant() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant(rows=4)
    assert rig.log_decision(rig.scheduler.reclaim_grant(grant.epoch, rig.now_ns)) == [grant.epoch]
    assert rig.log_decision(rig.scheduler.reclaim_grant(grant.epoch, rig.now_ns)) == []
    assert rig.grant(rows=4).ranges == grant.ranges
    assert rig.scheduler.stats()["reclaims"] == 0, "nothing was lost"


def test_reclaim_all_ends_every_grant() -> None:
    rig = SchedulerRig(8)
    epochs = [rig.grant_begun(owner, rows=2).epoch for owner in "ab"]
    assert rig.log_decision(rig.scheduler.reclaim_all(rig.now_ns)) == epochs
    assert rig.scheduler.grants == {}


def test_grants_get_a_full_lease_after_a_restart() -> None:
    rig = SchedulerRig(8)
    grant = rig.grant_begun(rows=2)
    later_ns = rig.now_ns + 100 * S
    for scheduler in (RunScheduler.load(rig.scheduler.dump()), RunScheduler.replay(rig.log)):
        scheduler.renew_all_grants(later_ns)
        assert scheduler.expire(later_ns + LEASE_NS - 1) == ([], [])
        assert scheduler.expire(later_ns + LEASE_NS)[0] == [grant.epoch]


def test_finished_grants_are_removed_from_the_expiry_heap() -> None:
    rig = SchedulerRig(5000, page_rows=8)
    while isinstance(grant := rig.claim(rows=8, begin=8), RowGrant):
        rig.finish(grant)
    assert len(rig.scheduler._expiry_heap) < 100
    assert rig.scheduler.next_due_ns() is None
    assert len(rig.scheduler.finished_grants) == 256


# -- cancellation --------------------------------------------------------------------------------


def test_cancel_ends_rows_that_are_not_begun_at_once() -> None:
    rig = SchedulerRig(12, backoff_first_ns=S)
    in_backoff = rig.grant_begun("a", rows=2)
    rig.finish(in_backoff, FAILED, TRANSIENT)
    rig.grant_begun("dies", rows=2)
    rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    rig.grant("b", rows=4, begin=1)
    assert rig.log_decision(rig.scheduler.cancel(rig.now_ns)) is True
    assert rig.states() == [6, 6, 6, 6, 2, 6, 6, 6, 6, 6, 6, 6]
    assert rig.scheduler.ledger.reason[0] == ErrorClass.CANCELLATION
    assert rig.log_decision(rig.scheduler.cancel(rig.now_ns)) is False
    assert rig.claim() == NoMoreRows("cancelling")


def test_cancel_of_a_finished_run_has_no_effect() -> None:
    rig = SchedulerRig(4)
    rig.finish(rig.grant_begun(rows=4))
    assert rig.log_decision(rig.scheduler.cancel(rig.now_ns)) is False
    assert rig.claim() == AllRowsFinal()


def test_begun_rows_can_end_during_the_cancel_grace_but_no_row_begins() -> None:
    rig = SchedulerRig(4)
    grant = rig.grant(rows=4, begin=2)
    rig.log_decision(rig.scheduler.cancel(rig.now_ns))
    accepted = rig.report(grant, FinishedRange(0, 1, OK))
    assert (accepted.rows_held, accepted.begun, accepted.stop) == (1, False, "cancelling")
    assert rig.states() == [3, 2, 6, 6]
    accepted = rig.report(grant, FinishedRange(1, 2, FAILED, TRANSIENT))
    assert accepted.retried == []
    assert rig.scheduler.finished


def test_end_cancel_grace_cancels_begun_rows_and_fences_their_grants() -> None:
    rig = SchedulerRig(4)
    grant = rig.grant_begun(rows=2)
    rig.log_decision(rig.scheduler.cancel(rig.now_ns))
    assert rig.scheduler.next_due_ns() == rig.scheduler.grace_ends_ns
    rig.now_ns = rig.scheduler.grace_ends_ns - 1
    assert rig.log_decision(rig.scheduler.end_cancel_grace(rig.now_ns)) is False
    rig.now_ns += 1
    assert rig.log_decision(rig.scheduler.end_cancel_grace(rig.now_ns)) is True
    assert rig.states() == [6] * 4
    with pytest.raises(Fenced):
        rig.finish(grant)
    assert rig.log_decision(rig.scheduler.end_cancel_grace(rig.now_ns)) is False
    assert rig.scheduler.next_due_ns() is None


def test_expired_grant_of_a_cancelled_run_is_not_retried() -> None:
    rig = SchedulerRig(4)
    rig.grant_begun(rows=2)
    rig.log_decision(rig.scheduler.cancel(rig.now_ns))
    rig.expire_leases()
    assert rig.states() == [6] * 4
    assert rig.scheduler.ended == [0, 0, 0, 4]


# -- commits -------------------------------------------------------------------------------------


def test_terminal_prefix_stops_at_the_first_row_that_is_not_final() -> None:
    rig = SchedulerRig(12)
    one, two = rig.grant_begun("a", rows=4), rig.grant_begun("b", rows=4)
    rig.finish(two)
    assert rig.scheduler.terminal_prefix() == 0
    rig.report(one, FinishedRange(0, 3, OK), FinishedRange(3, 4, FAILED, TRANSIENT))
    assert rig.scheduler.terminal_prefix() == 3, "a retry is no end"


def test_commit_marks_rows_in_order_and_a_repeat_changes_nothing() -> None:
    rig = SchedulerRig(8)
    rig.finish(rig.grant_begun(rows=5))
    assert rig.log_decision(rig.scheduler.commit(3, 2, rig.now_ns)) is True
    assert rig.states() == [7, 7, 7, 3, 3, 0, 0, 0]
    assert rig.log_decision(rig.scheduler.commit(3, 2, rig.now_ns)) is False
    assert rig.log_decision(rig.scheduler.commit(1, 0, rig.now_ns)) is False
    assert rig.log_decision(rig.scheduler.commit(5, 4, rig.now_ns)) is True
    assert (rig.scheduler.next_commit, rig.scheduler.version) == (5, 4)
    assert rig.scheduler.ended == [5, 0, 0, 0]


def test_commit_beyond_the_terminal_prefix_halts_the_run() -> None:
    rig = SchedulerRig(8)
    rig.finish(rig.grant_begun(rows=5))
    rig.grant_begun(rows=2)
    with pytest.raises(IllegalTransition) as refusal:
        rig.scheduler.commit(6, 5, rig.now_ns)
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == (5, "IN_FLIGHT", "COMMITTED")
    assert RowState.COMMITTED not in rig.states()


# -- invalid logs and checkpoints ----------------------------------------------------------------


def test_replay_requires_the_run_opened_entry_first() -> None:
    rig = SchedulerRig(4)
    with pytest.raises(Invalid):
        RunScheduler.replay([])
    with pytest.raises(Invalid):
        RunScheduler.replay(rig.log[1:])
    assert RunScheduler.replay(rig.log).policy == RunPolicy(backoff_first_ns=0)


def test_decided_ns_in_the_log_never_decreases() -> None:
    rig = SchedulerRig(8)
    rig.grant(rows=2)
    rig.now_ns -= S // 2
    grant = rig.grant_begun(rows=2)
    rig.now_ns -= S // 4
    rig.report(grant, FinishedRange(2, 3, OK))
    rig.expire_leases()
    rig.now_ns -= 20 * S
    rig.commit()
    rig.log_decision(rig.scheduler.cancel(rig.now_ns))
    times = [entry.decided_ns for entry in rig.log]
    assert times == sorted(times)


def test_decode_entry_refuses_invalid_bytes() -> None:
    for body in (b"", b"\xc1", codec.pack(["opened", "x"]), codec.pack(["nothing", 1])):
        with pytest.raises(StoreCorrupt):
            events.decode_entry(body)


def test_inconsistent_checkpoint_is_refused() -> None:
    rig = SchedulerRig(8)
    rig.grant_begun("dies", rows=2)
    rig.log_decision(rig.scheduler.reclaim_owner("dies", rig.now_ns))
    checkpoint = codec.unpack_as(RunCheckpoint, rig.scheduler.dump())
    for wrong in (
        replace(checkpoint, suspects=[(0, 5)]),
        replace(checkpoint, backoff=[(1, 0, 1)]),
        replace(checkpoint, size=9),
    ):
        with pytest.raises((StoreCorrupt, Invalid)):
            RunScheduler.load(codec.pack(wrong))


def test_replies_kept_for_repeated_reports_are_bounded_by_their_size() -> None:
    rig = SchedulerRig(30_000, attempts_max=200)
    for _ in range(3):
        grant = rig.grant_begun(rows=9_000)
        rows = [seq for part in grant.ranges for seq in range(part.lo, part.hi)]
        done = [
            FinishedRange(seq, seq + 1, FAILED, TRANSIENT, delay_ns=S * (seq % 2 + 1))
            for seq in rows
        ]
        rig.report(grant, *done)
    assert len(rig.scheduler.finished_grants) == 1
    assert RunScheduler.load(rig.scheduler.dump()).dump() == rig.scheduler.dump()


def test_change_policy_changes_budgets_and_times_but_not_pages() -> None:
    rig = SchedulerRig(10, attempts_max=2, page_rows=16)
    other = replace(rig.scheduler.policy, attempts_max=5, lease_ns=7)
    changed, entries = rig.scheduler.change_policy(other, rig.now_ns)
    assert changed
    assert rig.scheduler.policy.attempts_max == 5
    assert rig.scheduler.change_policy(other, rig.now_ns) == (False, [])
    replayed = RunScheduler.load(rig.scheduler.dump())
    assert replayed.policy == other
    assert len(entries) == 1
    with pytest.raises(Invalid, match="pages"):
        rig.scheduler.change_policy(replace(other, page_rows=32), rig.now_ns)
