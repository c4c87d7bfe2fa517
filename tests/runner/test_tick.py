"""One tick: what it claims, in what share, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.clock import MS, S
from holdfast.durable import item, queue
from holdfast.errors import (
    Busy,
    ClaimLost,
    Conflict,
    Invalid,
    NotFound,
    StoreClosed,
    StoreFull,
    Timeout,
)
from holdfast.retry import Backoff
from holdfast.runner import (
    Faults,
    LogEvent,
    LogKind,
    NotRunning,
    Refused,
    State,
    Tick,
    Work,
    claims,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from tests.runner.rig import FINE, QUEUE, TIMERS, Crash, Rig, Scripted

MODULES = ("holdfast.runner.runner", "holdfast.runner.claimer", "holdfast.runner.claims")


def test_a_stopped_runner_does_not_tick(rig: Rig) -> None:
    with pytest.raises(NotRunning):
        rig.stopped_runner().tick()


def test_a_tick_handles_what_is_there_in_order_and_acknowledges_it(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    assert rig.runner().tick() == Tick(claimed=3, done=3)
    assert rig.payloads == [b"a", b"b", b"c"]
    assert rig.counts() == queue.Counts(done=3)


def test_an_item_that_is_erased_right_after_its_claim_is_left_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a purge: its large content is gone when the runner looks for it."""
    gone, _ = rig.put(b"a" * 10_000, b"b" * 10_000)
    [held] = [one for one in rig.store.read(_items) if one.blob][:1]
    read = rig.store.read

    def erased_first(fn: Any, *args: Any) -> Any:
        if fn is claims.payloads:
            rig.store.transact(queue.withdraw, QUEUE, gone, True)
            rig.store.transact(blobs.wipe, held.blob)
        return read(fn, *args)

    monkeypatch.setattr(rig.store, "read", erased_first)
    rig.runner().tick()
    assert rig.payloads == [b"b" * 10_000]


def _items(txn: Txn) -> list[item.Item]:
    prefix = item.keys_of(QUEUE).items
    return [item.decode(row) for _, row in txn.scan(prefix, tuples.after(prefix), 10)]


def test_a_tick_takes_no_more_than_a_batch(rig: Rig) -> None:
    rig.put(*[b"x"] * 10)
    runner = rig.runner(max_batch=4)
    assert [runner.tick().done for _ in range(4)] == [4, 4, 2, 0]


def test_a_batch_of_items_costs_two_commits(rig: Rig) -> None:
    rig.put(*[b"x"] * 20)
    rig.put_timer(b"t")
    runner = rig.runner(Scripted(None, Busy(), Invalid()))
    before = rig.backend.commits
    assert runner.tick().claimed == 21
    assert rig.backend.commits == before + 2


def test_an_idle_tick_commits_nothing(rig: Rig) -> None:
    rig.put_timer(b"later", after_ms=1000)
    runner = rig.runner()
    before = rig.backend.commits
    assert runner.tick() == Tick()
    assert rig.backend.commits == before


def test_a_large_payload_reaches_its_handler_whole(rig: Rig) -> None:
    rig.put(b"small", b"L" * 100_000)
    rig.runner().tick()
    assert rig.payloads == [b"small", b"L" * 100_000]


def test_a_full_queue_leaves_timers_their_share(rig: Rig) -> None:
    rig.put(*[b"q"] * 100)
    for _ in range(100):
        rig.put_timer(b"t")
    rig.runner(max_batch=8, timer_share=0.25).tick()
    assert sorted(rig.payloads) == [b"q"] * 6 + [b"t"] * 2


def test_with_a_batch_of_one_both_still_get_their_turn(rig: Rig) -> None:
    rig.put(*[b"q"] * 100)
    for _ in range(100):
        rig.put_timer(b"t")
    runner = rig.runner(max_batch=1, timer_share=0.25)
    for _ in range(40):
        assert runner.tick().done == 1
    assert rig.payloads.count(b"t") == 10


def test_places_that_one_side_leaves_go_to_the_other(rig: Rig) -> None:
    rig.put(b"q")
    for _ in range(20):
        rig.put_timer(b"t")
    rig.runner(max_batch=8).tick()
    assert sorted(rig.payloads) == [b"q"] + [b"t"] * 7
    rig.handled.clear()
    rig.put(*[b"q"] * 20)
    rig.runner(timers=None, max_batch=8).tick()
    assert rig.payloads == [b"q"] * 8


def test_a_retry_keeps_its_number_and_comes_back_after_its_delay(rig: Rig) -> None:
    [seq] = rig.put(b"a")
    script = Scripted(Busy())
    runner = rig.runner(script, backoff=Backoff(first_ns=100 * MS, max_ns=S))
    assert runner.tick() == Tick(claimed=1, requeued=1)
    assert runner.tick() == Tick()
    wait_ms = runner.idle_sleep_ms()
    assert 50 <= wait_ms <= 101
    rig.clock.advance(wait_ms * MS)
    assert runner.tick() == Tick(claimed=1, done=1)
    assert script.attempts == [1, 2]
    assert seq == 1


def test_a_budget_used_up_ends_in_a_dead_letter_with_everything(rig: Rig) -> None:
    [seq] = rig.put(b"a")
    script = Scripted(*[Timeout(after_s=3)] * 9)
    total = rig.run(rig.runner(script, retry_budget_max=3))
    assert (total.requeued, total.dead) == (2, 1)
    assert script.attempts == [1, 2, 3]
    [letter] = rig.dead()
    assert (letter.seq, letter.payload, letter.code, letter.failures) == (seq, b"a", "timeout", 3)
    assert "after_s=3" in letter.error


def test_a_budget_above_the_queues_default_is_honoured(rig: Rig) -> None:
    rig.put(b"a")
    script = Scripted(*[Busy()] * 7)
    assert rig.run(rig.runner(script, retry_budget_max=8)).done == 1
    assert script.attempts == list(range(1, 9))


def test_a_non_retryable_error_is_a_dead_letter_at_once_and_tells_where_it_happened(
    rig: Rig,
) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(ZeroDivisionError("by zero")))
    assert runner.tick() == Tick(claimed=1, dead=1)
    [letter] = rig.dead()
    assert letter.code == "handler_error"
    assert letter.error.startswith("ZeroDivisionError: by zero\n")
    assert "rig.py" in letter.error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@pytest.mark.parametrize(
    "error", [Unspeakable(), ValueError("\ud800 half a pair"), ValueError("x" * 100_000)]
)
def test_an_error_that_cannot_be_put_into_words_still_ends_in_a_dead_letter(
    rig: Rig, error: Exception
) -> None:
    rig.put(b"a")
    assert rig.runner(Scripted(error)).tick() == Tick(claimed=1, dead=1)
    assert rig.dead()[0].error.startswith(type(error).__name__)


def test_a_registered_error_is_retried(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(ConnectionError()), faults=Faults().retrying(OSError))
    assert runner.tick().requeued == 1


def test_go_on_handles_the_rest_of_the_batch(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(Scripted(None, ValueError()), on_fatal="go_on")
    assert runner.tick() == Tick(claimed=3, done=2, dead=1)
    assert runner.state is State.RUNNING


def test_raise_keeps_the_item_gives_back_the_rest_and_raises_the_error_itself(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    error = ValueError("mine")
    runner = rig.runner(Scripted(None, error), on_fatal="raise")
    with pytest.raises(ValueError, match="mine") as raised:
        runner.tick()
    assert raised.value is error
    assert rig.counts() == queue.Counts(ready=1, dead=1, done=1)
    assert runner.counters.snapshot().released == 1
    assert runner.tick() == Tick(claimed=1, done=1)


def test_stop_keeps_the_item_and_stops(rig: Rig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(Scripted(ValueError()), on_fatal="stop")
    assert runner.tick() == Tick(claimed=2, dead=1, released=1)
    assert runner.state is State.STOPPING
    assert runner.tick() == Tick()
    assert runner.shutdown()
    assert runner.state is State.STOPPED


def test_a_fatal_error_surfaces_only_when_its_item_is_kept(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(ValueError()), on_fatal="raise")
    rig.fault("fine", Busy())
    assert runner.tick() == Tick(claimed=1, busy=1)
    with pytest.raises(ValueError):
        runner.tick()
    assert rig.counts().dead == 1


def test_a_refused_item_is_buried_without_alarming_the_policy(rig: Rig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(Scripted(Refused(why="nonsense")), on_fatal="raise")
    assert runner.tick() == Tick(claimed=2, done=1, dead=1)
    assert rig.dead()[0].code == "refused"


def test_a_handler_that_asks_to_stop_ends_the_batch(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(lambda work: runner.request_stop())
    assert runner.tick() == Tick(claimed=3, done=1, released=2)
    assert rig.counts() == queue.Counts(ready=2, done=1)


def test_items_given_back_have_not_lost_anything(rig: Rig) -> None:
    rig.put(b"a", b"b")
    first = rig.runner(lambda work: first.request_stop())
    first.tick()
    rig.runner(worker="other").tick()
    [work] = rig.handled
    assert (work.payload, work.attempt, work.claim.failures, work.claim.expiries) == (b"b", 1, 0, 0)


def test_a_slow_batch_settles_what_is_finished_before_it_goes_on(rig: Rig) -> None:
    rig.put(*[b"x"] * 4)
    done_before: list[int] = []

    def slow(work: Work) -> None:
        done_before.append(rig.counts().done)
        rig.clock.advance(40 * MS)

    assert rig.runner(slow, settle_after_ms=50).tick().done == 4
    assert done_before == [0, 0, 2, 2]


def test_a_slow_batch_does_not_press_a_store_that_refuses(rig: Rig) -> None:
    rig.put(*[b"x"] * 5)
    rig.fault(FINE, Busy(), Busy())
    runner = rig.runner(lambda work: rig.clock.advance(60 * MS), settle_after_ms=50)
    # Once between two handlers, and once at the end.
    assert runner.tick() == Tick(claimed=5, busy=2)
    assert runner.tick() == Tick(done=5)


def test_what_has_no_time_left_is_given_back_not_begun(rig: Rig) -> None:
    rig.put(*[b"x"] * 5)

    def slow(work: Work) -> None:
        assert work.deadline_ns - rig.store.now_ns() >= 500 * MS
        rig.clock.advance(300 * MS)

    runner = rig.runner(slow, lease_ttl_ms=1000)
    assert runner.tick() == Tick(claimed=5, done=2, released=3)
    assert rig.run(runner).done == 3
    assert rig.counts().done == 5


def test_a_handler_longer_than_its_lease_loses_its_claim_and_nothing_is_settled(rig: Rig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(lambda work: rig.clock.advance(2 * S), lease_ttl_ms=1000)
    assert runner.tick() == Tick(claimed=2, lost=2)
    assert rig.counts().done == 0
    assert runner.counters.snapshot().lost == 2


def test_extending_keeps_the_claim_of_a_long_handler(rig: Rig) -> None:
    rig.put(b"a")

    def patient(work: Work) -> None:
        for _ in range(5):
            rig.clock.advance(800 * MS)
            was_ns = work.deadline_ns
            assert work.extend() == work.deadline_ns > was_ns

    assert rig.runner(patient, lease_ttl_ms=1000).tick().done == 1


def test_extending_a_lost_claim_says_so_and_the_outcome_is_dropped(rig: Rig) -> None:
    rig.put(b"a")

    def late(work: Work) -> None:
        rig.clock.advance(2 * S)
        work.extend()

    runner = rig.runner(late, lease_ttl_ms=1000, on_fatal="raise")
    assert runner.tick() == Tick(claimed=1, lost=1)
    assert rig.dead() == []
    assert runner.counters.snapshot().fatals == 0


def test_a_handler_that_hides_its_lost_claim_still_lost_it(rig: Rig) -> None:
    rig.put(b"a")

    def careless(work: Work) -> None:
        rig.clock.advance(2 * S)
        with pytest.raises(ClaimLost):
            work.extend()

    assert rig.runner(careless, lease_ttl_ms=1000).tick() == Tick(claimed=1, lost=1)


def test_expired_claims_are_counted_as_attempts_and_end_in_a_dead_letter(rig: Rig) -> None:
    rig.put(b"a")
    attempts: list[int] = []

    def hang(work: Work) -> None:
        attempts.append(work.attempt)
        rig.clock.advance(2 * S)

    runner = rig.runner(hang, lease_ttl_ms=1000, expiries_max=3)
    for _ in range(5):
        runner.tick()
    assert attempts == [1, 2, 3]
    assert rig.dead()[0].expiries == 3


@pytest.mark.parametrize("error", [Busy(), Conflict(), NotFound(), StoreFull()])
def test_a_store_that_refuses_a_claim_makes_the_tick_busy(
    rig: Rig, error: Busy | Conflict | NotFound | StoreFull
) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.fault(error)
    assert runner.tick() == Tick(busy=1)
    assert rig.run(runner).done == 1


def test_a_broken_store_is_an_error_of_the_tick(rig: Rig) -> None:
    runner = rig.runner()
    rig.store.close()
    with pytest.raises(StoreClosed):
        runner.tick()


def test_a_crash_goes_right_through_and_settles_nothing(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(Scripted(None, Crash()))
    with pytest.raises(Crash):
        runner.tick()
    assert rig.counts() == queue.Counts(claimed=3)
    rig.clock.advance(31 * S)
    assert rig.runner(worker="next").tick().done == 3


def test_a_tick_inside_a_tick_is_refused(rig: Rig) -> None:
    rig.put(b"a")
    refusals: list[Invalid] = []

    def handler(work: Work) -> None:
        with pytest.raises(Invalid) as refusal:
            runner.tick()
        refusals.append(refusal.value)

    runner = rig.runner(handler)
    assert runner.tick().done == 1
    assert refusals[0].what == "gate"


def test_a_new_policy_is_in_force_from_the_next_tick_on(rig: Rig) -> None:
    rig.put(*[b"x"] * 10)
    runner = rig.runner(max_batch=2)
    assert runner.tick().done == 2
    runner.set_policy(replace(runner.policy, max_batch=5))
    assert runner.tick().done == 5


def test_progress_is_reported_between_handlers_too(rig: Rig) -> None:
    rig.put(b"a", b"b")
    seen: list[int] = []

    def handler(work: Work) -> None:
        seen.append(runner.last_progress_ns)
        rig.clock.advance(S)

    runner = rig.runner(handler)
    began_ns = runner.last_progress_ns
    runner.tick()
    assert seen == [began_ns, began_ns + S]
    assert runner.last_progress_ns == began_ns + 2 * S


def test_the_idle_sleep_ends_when_the_next_item_is_due_and_has_a_maximum(rig: Rig) -> None:
    runner = rig.runner(idle_sleep_max_ms=500)
    assert runner.idle_sleep_ms() == 500
    rig.put_timer(b"t", after_ms=300)
    assert 299 <= runner.idle_sleep_ms() <= 300
    rig.clock.advance(200 * MS)
    assert 99 <= runner.idle_sleep_ms() <= 100
    rig.clock.advance(200 * MS)
    assert runner.idle_sleep_ms() == 0
    assert runner.tick().done == 1
    assert runner.idle_sleep_ms() == 500


def test_timers_never_fire_before_they_are_due_by_store_time(rig: Rig) -> None:
    rig.put_timer(b"t", after_ms=60_000)
    runner = rig.runner()
    rig.clock.step_wall(10 * 3600 * S)
    assert runner.tick() == Tick()
    rig.clock.advance(59_999 * MS)
    assert runner.tick() == Tick()
    rig.clock.advance(2 * MS)
    assert runner.tick() == Tick(claimed=1, done=1)
    assert rig.handled[0].kind == "timer"


def test_timers_overdue_by_long_fire_after_a_downtime(rig: Rig) -> None:
    for after_ms in (1, 2, 3):
        rig.put_timer(b"%d" % after_ms, after_ms=after_ms)
    rig.clock.advance(7 * 24 * 3600 * S)
    assert rig.runner().tick().done == 3
    assert rig.payloads == [b"1", b"2", b"3"]


def test_the_same_history_ends_in_the_same_rows() -> None:
    def history() -> dict[bytes, bytes]:
        rig = Rig()
        rig.put(*[b"%d" % n for n in range(20)])
        rig.put_timer(b"t", after_ms=50)
        script = Scripted(*[Busy(), None, ValueError("x"), Conflict()] * 10)
        rig.run(rig.runner(script, max_batch=3))
        return rig.backend.rows

    assert history() == history()


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": 10**6}, {"timers": QUEUE}])
def test_a_runner_that_makes_no_sense_is_refused(rig: Rig, options: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        rig.stopped_runner(**options)


def test_timer_items_are_settled_in_their_own_queue(rig: Rig) -> None:
    rig.put_timer(b"t")
    runner = rig.runner(Scripted(Busy()))
    assert runner.tick().requeued == 1
    assert rig.counts(TIMERS).delayed == 1
    assert rig.counts(QUEUE) == queue.Counts()


def test_a_tick_of_a_host_that_raises_is_logged_once(rig: Rig) -> None:
    """A host that ticks by itself has the same log as the loop."""
    rig.put(b"a")
    events: list[LogEvent] = []
    runner = rig.runner(Scripted(ValueError("mine")), on_fatal="raise", log=events.append)
    with pytest.raises(ValueError):
        runner.tick()
    assert [
        (event.status, event.error) for event in events if event.kind is LogKind.LOOP_ERROR
    ] == [("handler_error", "mine")]
    assert runner.counters.snapshot().loop_errors == 1
