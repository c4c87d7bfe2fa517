"""Outcomes and stores that refuse, or do not say: each outcome counts exactly once."""

from __future__ import annotations

import itertools

import pytest

from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.errors import Busy, Conflict, HoldfastError, NotFound, StoreCorrupt
from holdfast.runner import LogKind, Tick, Work
from tests.runner.rig import DROPPED, FINE, KEPT, Rig, Scripted

MODULES = ("holdfast.runner.settle", "holdfast.runner.claimer")


@pytest.mark.parametrize("error", [Busy(), Conflict(), NotFound()])
def test_a_refused_settlement_is_tried_again_without_running_the_handler_again(
    rig: Rig, error: HoldfastError
) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner()
    rig.fault(FINE, error)
    assert runner.tick() == Tick(claimed=2, busy=1)
    assert runner.tick() == Tick(done=2)
    assert len(rig.handled) == 2


def test_nothing_more_is_begun_while_finished_work_is_refused(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(max_batch=1)
    rig.fault(FINE, Busy(), Busy())
    assert runner.tick() == Tick(claimed=1, busy=1)
    assert runner.tick() == Tick(busy=1)
    assert runner.tick() == Tick(claimed=1, done=2)


def test_after_so_many_refusals_the_claim_is_left_to_run_out(rig: Rig) -> None:
    rig.put(b"a")
    events = []
    runner = rig.runner(requeue_max_attempts=3, log=events.append)
    rig.fault(FINE, Busy(), Busy(), Busy())
    ticks = [runner.tick() for _ in range(4)]
    assert ticks == [Tick(claimed=1, busy=1), Tick(busy=1), Tick(busy=1, lost=1), Tick()]
    assert [event.kind for event in events] == [LogKind.LOOP_ERROR, LogKind.LOST]
    rig.clock.advance(31 * S)
    assert runner.tick() == Tick(claimed=1, done=1)


def test_a_store_beyond_repair_is_not_waited_for(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.fault(FINE, StoreCorrupt())
    with pytest.raises(StoreCorrupt):
        runner.tick()


ERRORS = {"done": None, "requeued": Busy(), "dead": ValueError()}


@pytest.mark.parametrize("end", list(ERRORS))
@pytest.mark.parametrize("fault", [KEPT, DROPPED])
def test_a_settlement_of_unknown_outcome_is_looked_up_and_counted_once(
    rig: Rig, end: str, fault: str
) -> None:
    rig.put(b"a")
    script = Scripted(ERRORS[end])
    runner = rig.runner(script)
    rig.fault(FINE, fault)
    tick = runner.tick()
    assert tick == Tick(claimed=1, **{end: 1})
    assert script.attempts == [1]
    counts = rig.counts()
    assert (counts.done, counts.delayed, counts.dead) == (
        tick.done,
        tick.requeued,
        tick.dead,
    )


@pytest.mark.parametrize(
    "faults", list(itertools.product([FINE, KEPT, DROPPED, Busy()], repeat=4)), ids=str
)
def test_whatever_happens_to_four_commits_every_item_ends_once(faults: tuple[str, ...]) -> None:
    rig = Rig()
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(Scripted(None, Busy(), ValueError()), max_batch=3)
    rig.fault(*faults)
    total = rig.run(runner)
    assert (total.claimed, total.done, total.requeued, total.dead, total.lost) == (4, 2, 1, 1, 0)
    assert rig.counts() == queue.Counts(done=2, dead=1)
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes, metrics.requeues, metrics.dead_letters) == (
        4,
        2,
        1,
        1,
    )


def test_an_unknown_outcome_whose_claim_has_run_out_is_lost_and_done_only_by_the_next(
    rig: Rig,
) -> None:
    rig.put(b"a")

    def slow(work: Work) -> None:
        rig.fault(DROPPED, Busy())
        rig.clock.advance(900 * MS)

    first = rig.runner(slow, lease_ttl_ms=1000)
    second = rig.runner(worker="second")
    assert first.tick() == Tick(claimed=1, busy=1)
    rig.clock.advance(200 * MS)
    assert second.tick() == Tick(claimed=1, done=1)
    assert first.tick() == Tick(lost=1)
    assert rig.counts().done == 1


def test_what_is_looked_up_only_after_the_claim_has_run_out_is_never_counted_as_done(
    rig: Rig,
) -> None:
    rig.put(b"a")
    first = rig.runner()
    second = rig.runner(worker="second")
    rig.fault(FINE, DROPPED, DROPPED)
    assert first.tick() == Tick(claimed=1, busy=1)
    rig.clock.advance(31 * S)
    assert second.tick() == Tick(claimed=1, done=1)
    assert first.tick() == Tick(lost=1)
    assert rig.counts().done == 1


def test_a_dead_letter_of_an_expiry_is_not_taken_for_ours(rig: Rig) -> None:
    rig.put(b"a")
    first = rig.runner(Scripted(Busy()))
    second = rig.runner(worker="second", expiries_max=1)
    rig.fault(FINE, DROPPED, DROPPED)
    assert first.tick() == Tick(claimed=1, busy=1)
    rig.clock.advance(31 * S)
    second.tick()
    assert rig.counts().dead == 1
    assert first.tick() == Tick(lost=1)


def test_claims_that_have_run_out_are_not_adopted(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.fault(KEPT)
    assert runner.tick() == Tick(busy=1)
    rig.clock.advance(31 * S)
    assert runner.tick() == Tick(claimed=1, done=1)
    assert rig.handled[0].attempt == 2


def test_claims_of_an_unknown_commit_are_adopted_before_they_run_out(rig: Rig) -> None:
    rig.put(b"a", b"b")
    rig.put_timer(b"t")
    runner = rig.runner()
    rig.fault(KEPT)
    assert runner.tick() == Tick(busy=1)
    assert rig.counts().claimed == 2
    assert runner.tick() == Tick(claimed=3, done=3)
    assert [work.kind for work in rig.handled] == ["queue", "queue", "timer"]
    assert {work.attempt for work in rig.handled} == {1}


def test_adopted_claims_wait_for_room(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(max_batch=3)
    rig.fault(KEPT)
    runner.tick()
    runner.set_policy(rig.stopped_runner(max_batch=1).policy)
    assert [runner.tick().done for _ in range(4)] == [1, 1, 1, 0]
    assert rig.counts().done == 3


def test_what_could_not_be_given_back_is_adopted_again(rig: Rig) -> None:
    rig.put(b"a", b"b")

    def slow(work: Work) -> None:
        rig.clock.advance(600 * MS)
        if len(rig.handled) == 0:
            rig.fault(FINE, Busy())
        rig.keep(work)

    runner = rig.runner(slow, lease_ttl_ms=1000)
    assert runner.tick() == Tick(claimed=2, done=1, busy=1)
    assert runner.tick().claimed == 1
    assert rig.payloads == [b"a", b"b"]
