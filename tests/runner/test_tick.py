"""One runner tick: claims, timer share, retries, dead letters, fatal errors and lease handling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast import failpoints
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
    ErrorPolicy,
    LogEvent,
    LogKind,
    NotRunning,
    Refused,
    RunnerState,
    TickStats,
    WorkItem,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from tests.runner.rig import COMMIT_OK, QUEUE, TIMERS, RunnerRig, ScriptedHandler, SimulatedCrash

MODULES = ("holdfast.runner.runner", "holdfast.runner.claimer", "holdfast.runner.claim_ops")


def test_tick_of_a_stopped_runner_raises_not_running(rig: RunnerRig) -> None:
    with pytest.raises(NotRunning):
        rig.stopped_runner().tick()


def test_tick_handles_items_in_order_and_acks_them(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    assert rig.runner().tick() == TickStats(claimed=3, done=3)
    assert rig.payloads == [b"a", b"b", b"c"]
    assert rig.counts() == queue.QueueCounts(done=3)


def test_item_erased_after_its_claim_is_skipped(rig: RunnerRig) -> None:
    """A purge deletes the blob of the item before the runner reads it."""
    gone, _ = rig.put(b"a" * 10_000, b"b" * 10_000)
    [blob_item] = [queue_item for queue_item in rig.store.read(_read_items) if queue_item.blob][:1]

    def erase(_: object) -> None:
        rig.store.transact(queue.cancel, QUEUE, gone, True)
        rig.store.transact(blobs.erase_idle, blob_item.blob)

    with failpoints.on("runner.read_payloads", calls=erase) as read_payloads:
        rig.runner().tick()
    assert read_payloads.hits == 1
    assert rig.payloads == [b"b" * 10_000]


def _read_items(txn: Txn) -> list[item.QueueItem]:
    prefix = item.keys_of(QUEUE).items
    return [item.decode_item(row) for _, row in txn.scan(prefix, tuples.prefix_end(prefix), 10)]


def test_tick_claims_at_most_max_batch_items(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 10)
    runner = rig.runner(max_batch=4)
    assert [runner.tick().done for _ in range(4)] == [4, 4, 2, 0]


def test_tick_makes_two_commits_per_batch(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 20)
    rig.put_timer(b"t")
    runner = rig.runner(ScriptedHandler(None, Busy(), Invalid()))
    before = rig.backend.commits
    assert runner.tick().claimed == 21
    assert rig.backend.commits == before + 2


def test_idle_tick_commits_nothing(rig: RunnerRig) -> None:
    rig.put_timer(b"later", after_ms=1000)
    runner = rig.runner()
    before = rig.backend.commits
    assert runner.tick() == TickStats()
    assert rig.backend.commits == before


def test_handler_gets_a_large_payload_complete(rig: RunnerRig) -> None:
    rig.put(b"small", b"L" * 100_000)
    rig.runner().tick()
    assert rig.payloads == [b"small", b"L" * 100_000]


def test_full_queue_leaves_timers_their_timer_share(rig: RunnerRig) -> None:
    rig.put(*[b"q"] * 100)
    for _ in range(100):
        rig.put_timer(b"t")
    rig.runner(max_batch=8, timer_share=0.25).tick()
    assert sorted(rig.payloads) == [b"q"] * 6 + [b"t"] * 2


def test_timer_share_holds_with_max_batch_one(rig: RunnerRig) -> None:
    rig.put(*[b"q"] * 100)
    for _ in range(100):
        rig.put_timer(b"t")
    runner = rig.runner(max_batch=1, timer_share=0.25)
    for _ in range(40):
        assert runner.tick().done == 1
    assert rig.payloads.count(b"t") == 10


def test_unused_timer_share_goes_to_the_queue_and_vice_versa(rig: RunnerRig) -> None:
    rig.put(b"q")
    for _ in range(20):
        rig.put_timer(b"t")
    rig.runner(max_batch=8).tick()
    assert sorted(rig.payloads) == [b"q"] + [b"t"] * 7
    rig.handled.clear()
    rig.put(*[b"q"] * 20)
    rig.runner(timers=None, max_batch=8).tick()
    assert rig.payloads == [b"q"] * 8


def test_retry_keeps_its_seq_and_runs_after_its_backoff(rig: RunnerRig) -> None:
    [seq] = rig.put(b"a")
    script = ScriptedHandler(Busy())
    runner = rig.runner(script, backoff=Backoff(first_ns=100 * MS, max_ns=S))
    assert runner.tick() == TickStats(claimed=1, requeued=1)
    assert runner.tick() == TickStats()
    wait_ms = runner.idle_sleep_ms()
    assert 50 <= wait_ms <= 101
    rig.clock.advance(wait_ms * MS)
    assert runner.tick() == TickStats(claimed=1, done=1)
    assert script.attempts == [1, 2]
    assert seq == 1


def test_exhausted_retry_budget_makes_a_dead_letter_with_payload_and_error(rig: RunnerRig) -> None:
    [seq] = rig.put(b"a")
    script = ScriptedHandler(*[Timeout(after_s=3)] * 9)
    total = rig.run_until_idle(rig.runner(script, retry_budget_max=3))
    assert (total.requeued, total.dead) == (2, 1)
    assert script.attempts == [1, 2, 3]
    [letter] = rig.dead_letters()
    assert (letter.seq, letter.payload, letter.code, letter.failures) == (seq, b"a", "timeout", 3)
    assert "after_s=3" in letter.error


def test_retry_budget_above_the_queue_default_is_used(rig: RunnerRig) -> None:
    rig.put(b"a")
    script = ScriptedHandler(*[Busy()] * 7)
    assert rig.run_until_idle(rig.runner(script, retry_budget_max=8)).done == 1
    assert script.attempts == list(range(1, 9))


def test_non_retryable_error_makes_a_dead_letter_with_a_traceback(
    rig: RunnerRig,
) -> None:
    rig.put(b"a")
    runner = rig.runner(ScriptedHandler(ZeroDivisionError("by zero")))
    assert runner.tick() == TickStats(claimed=1, dead=1)
    [letter] = rig.dead_letters()
    assert letter.code == "handler_error"
    assert letter.error.startswith("ZeroDivisionError: by zero\n")
    assert "rig.py" in letter.error


class ErrorWithBrokenStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@pytest.mark.parametrize(
    "error", [ErrorWithBrokenStr(), ValueError("\ud800 half a pair"), ValueError("x" * 100_000)]
)
def test_error_with_unprintable_text_makes_a_dead_letter(rig: RunnerRig, error: Exception) -> None:
    rig.put(b"a")
    assert rig.runner(ScriptedHandler(error)).tick() == TickStats(claimed=1, dead=1)
    assert rig.dead_letters()[0].error.startswith(type(error).__name__)


def test_error_registered_as_retryable_is_requeued(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(
        ScriptedHandler(ConnectionError()), faults=ErrorPolicy().with_retryable(OSError)
    )
    assert runner.tick().requeued == 1


def test_on_fatal_go_on_handles_the_rest_of_the_batch(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(ScriptedHandler(None, ValueError()), on_fatal="go_on")
    assert runner.tick() == TickStats(claimed=3, done=2, dead=1)
    assert runner.state is RunnerState.RUNNING


def test_on_fatal_raise_dead_letters_the_item_and_releases_the_rest(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    error = ValueError("mine")
    runner = rig.runner(ScriptedHandler(None, error), on_fatal="raise")
    with pytest.raises(ValueError, match="mine") as raised:
        runner.tick()
    assert raised.value is error
    assert rig.counts() == queue.QueueCounts(ready=1, dead=1, done=1)
    assert runner.counters.snapshot().released == 1
    assert runner.tick() == TickStats(claimed=1, done=1)


def test_on_fatal_stop_dead_letters_the_item_and_stops(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(ScriptedHandler(ValueError()), on_fatal="stop")
    assert runner.tick() == TickStats(claimed=2, dead=1, released=1)
    assert runner.state is RunnerState.STOPPING
    assert runner.tick() == TickStats()
    assert runner.shutdown()
    assert runner.state is RunnerState.STOPPED


def test_fatal_error_is_raised_only_after_its_item_is_settled(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(ScriptedHandler(ValueError()), on_fatal="raise")
    rig.inject_faults("fine", Busy())
    assert runner.tick() == TickStats(claimed=1, busy=1)
    with pytest.raises(ValueError):
        runner.tick()
    assert rig.counts().dead == 1


def test_refused_item_is_dead_lettered_without_on_fatal(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(ScriptedHandler(Refused(why="nonsense")), on_fatal="raise")
    assert runner.tick() == TickStats(claimed=2, done=1, dead=1)
    assert rig.dead_letters()[0].code == "refused"


def test_stop_request_of_a_handler_releases_the_rest_of_the_batch(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(lambda work: runner.request_stop())
    assert runner.tick() == TickStats(claimed=3, done=1, released=2)
    assert rig.counts() == queue.QueueCounts(ready=2, done=1)


def test_released_items_keep_their_attempt_and_failure_counts(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    first = rig.runner(lambda work: first.request_stop())
    first.tick()
    rig.runner(worker="other").tick()
    [work] = rig.handled
    assert (work.payload, work.attempt, work.claim.failures, work.claim.expiries) == (b"b", 1, 0, 0)


def test_slow_batch_settles_finished_items_after_settle_after_ms(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 4)
    done_before: list[int] = []

    def slow(work: WorkItem) -> None:
        done_before.append(rig.counts().done)
        rig.clock.advance(40 * MS)

    assert rig.runner(slow, settle_after_ms=50).tick().done == 4
    assert done_before == [0, 0, 2, 2]


def test_slow_batch_retries_a_refused_settlement_only_twice_per_tick(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 5)
    rig.inject_faults(COMMIT_OK, Busy(), Busy())
    runner = rig.runner(lambda work: rig.clock.advance(60 * MS), settle_after_ms=50)
    # One attempt between two handlers and one at the end of the tick.
    assert runner.tick() == TickStats(claimed=5, busy=2)
    assert runner.tick() == TickStats(done=5)


def test_items_with_too_little_lease_left_are_released(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 5)

    def slow(work: WorkItem) -> None:
        assert work.expires_ns - rig.store.now_ns() >= 500 * MS
        rig.clock.advance(300 * MS)

    runner = rig.runner(slow, lease_ttl_ms=1000)
    assert runner.tick() == TickStats(claimed=5, done=2, released=3)
    assert rig.run_until_idle(runner).done == 3
    assert rig.counts().done == 5


def test_handler_longer_than_its_lease_loses_its_claim(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(lambda work: rig.clock.advance(2 * S), lease_ttl_ms=1000)
    assert runner.tick() == TickStats(claimed=2, lost=2)
    assert rig.counts().done == 0
    assert runner.counters.snapshot().lost == 2


def test_extend_keeps_the_claim_of_a_long_handler(rig: RunnerRig) -> None:
    rig.put(b"a")

    def patient(work: WorkItem) -> None:
        for _ in range(5):
            rig.clock.advance(800 * MS)
            was_ns = work.expires_ns
            assert work.extend() == work.expires_ns > was_ns

    assert rig.runner(patient, lease_ttl_ms=1000).tick().done == 1


def test_extend_of_a_lost_claim_raises_and_the_outcome_is_dropped(rig: RunnerRig) -> None:
    rig.put(b"a")

    def late(work: WorkItem) -> None:
        rig.clock.advance(2 * S)
        work.extend()

    runner = rig.runner(late, lease_ttl_ms=1000, on_fatal="raise")
    assert runner.tick() == TickStats(claimed=1, lost=1)
    assert rig.dead_letters() == []
    assert runner.counters.snapshot().fatals == 0


def test_handler_that_catches_claim_lost_still_loses_its_claim(rig: RunnerRig) -> None:
    rig.put(b"a")

    def careless(work: WorkItem) -> None:
        rig.clock.advance(2 * S)
        with pytest.raises(ClaimLost):
            work.extend()

    assert rig.runner(careless, lease_ttl_ms=1000).tick() == TickStats(claimed=1, lost=1)


def test_expired_claims_count_as_attempts_and_make_a_dead_letter(rig: RunnerRig) -> None:
    rig.put(b"a")
    attempts: list[int] = []

    def hang(work: WorkItem) -> None:
        attempts.append(work.attempt)
        rig.clock.advance(2 * S)

    runner = rig.runner(hang, lease_ttl_ms=1000, expiries_max=3)
    for _ in range(5):
        runner.tick()
    assert attempts == [1, 2, 3]
    assert rig.dead_letters()[0].expiries == 3


@pytest.mark.parametrize("error", [Busy(), Conflict(), NotFound(), StoreFull()])
def test_tick_is_busy_when_the_store_refuses_a_claim(
    rig: RunnerRig, error: Busy | Conflict | NotFound | StoreFull
) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.inject_faults(error)
    assert runner.tick() == TickStats(busy=1)
    assert rig.run_until_idle(runner).done == 1


def test_tick_raises_store_closed(rig: RunnerRig) -> None:
    runner = rig.runner()
    rig.store.close()
    with pytest.raises(StoreClosed):
        runner.tick()


def test_crash_in_a_handler_propagates_and_settles_nothing(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    runner = rig.runner(ScriptedHandler(None, SimulatedCrash()))
    with pytest.raises(SimulatedCrash):
        runner.tick()
    assert rig.counts() == queue.QueueCounts(claimed=3)
    rig.clock.advance(31 * S)
    assert rig.runner(worker="next").tick().done == 3


def test_tick_inside_a_tick_is_invalid(rig: RunnerRig) -> None:
    rig.put(b"a")
    errors: list[Invalid] = []

    def handler(work: WorkItem) -> None:
        with pytest.raises(Invalid) as caught:
            runner.tick()
        errors.append(caught.value)

    runner = rig.runner(handler)
    assert runner.tick().done == 1
    assert errors[0].what == "tick lock"


def test_set_policy_applies_from_the_next_tick(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 10)
    runner = rig.runner(max_batch=2)
    assert runner.tick().done == 2
    runner.set_policy(replace(runner.policy, max_batch=5))
    assert runner.tick().done == 5


def test_last_progress_is_updated_between_handlers(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    seen: list[int] = []

    def handler(work: WorkItem) -> None:
        seen.append(runner.last_progress_ns)
        rig.clock.advance(S)

    runner = rig.runner(handler)
    began_ns = runner.last_progress_ns
    runner.tick()
    assert seen == [began_ns, began_ns + S]
    assert runner.last_progress_ns == began_ns + 2 * S


def test_idle_sleep_ends_at_the_next_due_item_and_has_a_maximum(rig: RunnerRig) -> None:
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


def test_timers_do_not_fire_before_they_are_due_by_store_time(rig: RunnerRig) -> None:
    rig.put_timer(b"t", after_ms=60_000)
    runner = rig.runner()
    rig.clock.step_wall(10 * 3600 * S)
    assert runner.tick() == TickStats()
    rig.clock.advance(59_999 * MS)
    assert runner.tick() == TickStats()
    rig.clock.advance(2 * MS)
    assert runner.tick() == TickStats(claimed=1, done=1)
    assert rig.handled[0].kind == "timer"


def test_overdue_timers_fire_after_a_downtime(rig: RunnerRig) -> None:
    for after_ms in (1, 2, 3):
        rig.put_timer(b"%d" % after_ms, after_ms=after_ms)
    rig.clock.advance(7 * 24 * 3600 * S)
    assert rig.runner().tick().done == 3
    assert rig.payloads == [b"1", b"2", b"3"]


def test_runner_is_deterministic_for_the_same_history() -> None:
    def history() -> dict[bytes, bytes]:
        rig = RunnerRig()
        rig.put(*[b"%d" % n for n in range(20)])
        rig.put_timer(b"t", after_ms=50)
        script = ScriptedHandler(*[Busy(), None, ValueError("x"), Conflict()] * 10)
        rig.run_until_idle(rig.runner(script, max_batch=3))
        return rig.backend.rows

    assert history() == history()


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": 10**6}, {"timers": QUEUE}])
def test_runner_with_invalid_options_is_rejected(
    rig: RunnerRig, options: dict[str, object]
) -> None:
    with pytest.raises(Invalid):
        rig.stopped_runner(**options)


def test_timer_items_are_settled_in_the_timer_queue(rig: RunnerRig) -> None:
    rig.put_timer(b"t")
    runner = rig.runner(ScriptedHandler(Busy()))
    assert runner.tick().requeued == 1
    assert rig.counts(TIMERS).delayed == 1
    assert rig.counts(QUEUE) == queue.QueueCounts()


def test_error_of_a_tick_called_by_the_host_is_logged_once(rig: RunnerRig) -> None:
    """A host that calls tick() itself gets the same log events as the loop."""
    rig.put(b"a")
    events: list[LogEvent] = []
    runner = rig.runner(ScriptedHandler(ValueError("mine")), on_fatal="raise", log=events.append)
    with pytest.raises(ValueError):
        runner.tick()
    assert [
        (event.status, event.error) for event in events if event.kind is LogKind.LOOP_ERROR
    ] == [("handler_error", "mine")]
    assert runner.counters.snapshot().loop_errors == 1
