"""Settlement under refused commits and commits of unknown outcome: each outcome counts exactly once."""

from __future__ import annotations

import itertools

import pytest

from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.errors import Busy, Conflict, HoldfastError, NotFound, StoreCorrupt
from holdfast.runner import LogKind, TickStats, WorkItem
from tests.runner.rig import (
    COMMIT_OK,
    UNKNOWN_ABORTED,
    UNKNOWN_COMMITTED,
    RunnerRig,
    ScriptedHandler,
)

MODULES = ("holdfast.runner.settlement", "holdfast.runner.claimer")


@pytest.mark.parametrize("error", [Busy(), Conflict(), NotFound()])
def test_refused_settlement_is_retried_without_another_handler_call(
    rig: RunnerRig, error: HoldfastError
) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner()
    rig.inject_faults(COMMIT_OK, error)
    assert runner.tick() == TickStats(claimed=2, busy=1)
    assert runner.tick() == TickStats(done=2)
    assert len(rig.handled) == 2


def test_runner_claims_nothing_while_settlement_is_refused(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(max_batch=1)
    rig.inject_faults(COMMIT_OK, Busy(), Busy())
    assert runner.tick() == TickStats(claimed=1, busy=1)
    assert runner.tick() == TickStats(busy=1)
    assert runner.tick() == TickStats(claimed=1, done=2)


def test_settlement_is_abandoned_after_requeue_max_attempts(rig: RunnerRig) -> None:
    rig.put(b"a")
    events = []
    runner = rig.runner(requeue_max_attempts=3, log=events.append)
    rig.inject_faults(COMMIT_OK, Busy(), Busy(), Busy())
    ticks = [runner.tick() for _ in range(4)]
    assert ticks == [
        TickStats(claimed=1, busy=1),
        TickStats(busy=1),
        TickStats(busy=1, lost=1),
        TickStats(),
    ]
    assert [event.kind for event in events] == [LogKind.LOOP_ERROR, LogKind.LOST]
    rig.clock.advance(31 * S)
    assert runner.tick() == TickStats(claimed=1, done=1)


def test_tick_raises_store_corrupt_of_a_settlement(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.inject_faults(COMMIT_OK, StoreCorrupt())
    with pytest.raises(StoreCorrupt):
        runner.tick()


ERRORS = {"done": None, "requeued": Busy(), "dead": ValueError()}


@pytest.mark.parametrize("end", list(ERRORS))
@pytest.mark.parametrize("fault", [UNKNOWN_COMMITTED, UNKNOWN_ABORTED])
def test_settlement_of_unknown_outcome_is_resolved_and_counted_once(
    rig: RunnerRig, end: str, fault: str
) -> None:
    rig.put(b"a")
    script = ScriptedHandler(ERRORS[end])
    runner = rig.runner(script)
    rig.inject_faults(COMMIT_OK, fault)
    tick = runner.tick()
    assert tick == TickStats(claimed=1, **{end: 1})
    assert script.attempts == [1]
    counts = rig.counts()
    assert (counts.done, counts.delayed, counts.dead) == (
        tick.done,
        tick.requeued,
        tick.dead,
    )


@pytest.mark.parametrize(
    "faults",
    list(itertools.product([COMMIT_OK, UNKNOWN_COMMITTED, UNKNOWN_ABORTED, Busy()], repeat=4)),
    ids=str,
)
def test_every_item_settles_once_for_all_faults_of_four_commits(faults: tuple[str, ...]) -> None:
    rig = RunnerRig()
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(ScriptedHandler(None, Busy(), ValueError()), max_batch=3)
    rig.inject_faults(*faults)
    total = rig.run_until_idle(runner)
    assert (total.claimed, total.done, total.requeued, total.dead, total.lost) == (4, 2, 1, 1, 0)
    assert rig.counts() == queue.QueueCounts(done=2, dead=1)
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes, metrics.requeues, metrics.dead_letters) == (
        4,
        2,
        1,
        1,
    )


def test_settlement_of_unknown_outcome_is_lost_after_the_claim_expired(
    rig: RunnerRig,
) -> None:
    rig.put(b"a")

    def slow(work: WorkItem) -> None:
        rig.inject_faults(UNKNOWN_ABORTED, Busy())
        rig.clock.advance(900 * MS)

    first = rig.runner(slow, lease_ttl_ms=1000)
    second = rig.runner(worker="second")
    assert first.tick() == TickStats(claimed=1, busy=1)
    rig.clock.advance(200 * MS)
    assert second.tick() == TickStats(claimed=1, done=1)
    assert first.tick() == TickStats(lost=1)
    assert rig.counts().done == 1


def test_settlement_looked_up_after_claim_expiry_is_not_counted_as_done(
    rig: RunnerRig,
) -> None:
    rig.put(b"a")
    first = rig.runner()
    second = rig.runner(worker="second")
    rig.inject_faults(COMMIT_OK, UNKNOWN_ABORTED, UNKNOWN_ABORTED)
    assert first.tick() == TickStats(claimed=1, busy=1)
    rig.clock.advance(31 * S)
    assert second.tick() == TickStats(claimed=1, done=1)
    assert first.tick() == TickStats(lost=1)
    assert rig.counts().done == 1


def test_dead_letter_of_an_expiry_is_not_mistaken_for_our_settlement(rig: RunnerRig) -> None:
    rig.put(b"a")
    first = rig.runner(ScriptedHandler(Busy()))
    second = rig.runner(worker="second", expiries_max=1)
    rig.inject_faults(COMMIT_OK, UNKNOWN_ABORTED, UNKNOWN_ABORTED)
    assert first.tick() == TickStats(claimed=1, busy=1)
    rig.clock.advance(31 * S)
    second.tick()
    assert rig.counts().dead == 1
    assert first.tick() == TickStats(lost=1)


def test_expired_claims_of_an_unknown_commit_are_not_adopted(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.inject_faults(UNKNOWN_COMMITTED)
    assert runner.tick() == TickStats(busy=1)
    rig.clock.advance(31 * S)
    assert runner.tick() == TickStats(claimed=1, done=1)
    assert rig.handled[0].attempt == 2


def test_live_claims_of_an_unknown_commit_are_adopted(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    rig.put_timer(b"t")
    runner = rig.runner()
    rig.inject_faults(UNKNOWN_COMMITTED)
    assert runner.tick() == TickStats(busy=1)
    assert rig.counts().claimed == 2
    assert runner.tick() == TickStats(claimed=3, done=3)
    assert [work.kind for work in rig.handled] == ["queue", "queue", "timer"]
    assert {work.attempt for work in rig.handled} == {1}


def test_adopted_claims_wait_for_capacity(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(max_batch=3)
    rig.inject_faults(UNKNOWN_COMMITTED)
    runner.tick()
    runner.set_policy(rig.stopped_runner(max_batch=1).policy)
    assert [runner.tick().done for _ in range(4)] == [1, 1, 1, 0]
    assert rig.counts().done == 3


def test_claims_whose_release_failed_are_adopted_again(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")

    def slow(work: WorkItem) -> None:
        rig.clock.advance(600 * MS)
        if len(rig.handled) == 0:
            rig.inject_faults(COMMIT_OK, Busy())
        rig.record_work(work)

    runner = rig.runner(slow, lease_ttl_ms=1000)
    assert runner.tick() == TickStats(claimed=2, done=1, busy=1)
    assert runner.tick().claimed == 1
    assert rig.payloads == [b"a", b"b"]
