"""Document 001, rule by rule, in its order.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.errors import Busy, Conflict, Invalid, NotFound, SchemaMismatch
from holdfast.runner import (
    Counters,
    FrameHandler,
    Gate,
    GateClosed,
    LogEvent,
    LogKind,
    Metrics,
    Policy,
    Recorder,
    Runner,
    State,
    Step,
    StepKind,
    Tick,
    Work,
    replay_file,
)
from holdfast.runner.boot import check_spaces, spaces
from holdfast.runner.frames import Flag, Kind, Message, encode_message
from holdfast.store import schema, tuples
from tests.postgres import RIGS
from tests.runner.rig import DROPPED, FINE, QUEUE, TIMERS, Crash, Rig, Scripted

MODULES = ("holdfast.runner.boot", "holdfast.runner.runner")


LONG_S = 30.0

MESSAGE = Message(
    kind=Kind.COMMAND,
    flags=Flag.NONE,
    to_worker=7,
    route_worker=0,
    route_timestamp=0,
    from_worker=None,
    message_id=b"m-1",
    trace=None,
    payload=b"hello",
)
FRAME = encode_message(MESSAGE)


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.store.close()


def remark(rig: Rig, marker: bytes | None) -> None:
    """Give the store another schema marker, or none."""

    def write(txn: stores.Txn) -> None:
        if marker is None:
            txn.delete(schema.MARKER_KEY)
        else:
            txn.put(schema.MARKER_KEY, marker)

    rig.store.transact(write)


def marker_of(rig: Rig) -> bytes | None:
    return rig.store.read(lambda txn: txn.get(schema.MARKER_KEY))


# -- Boot sequence -------------------------------------------------------------------------------


@pytest.mark.spec("001", "Boot sequence", "layout and marker in order: the runner runs")
def test_a_runner_whose_checks_pass_is_running(rig: Rig) -> None:
    runner = rig.stopped_runner()
    assert runner.state is State.STOPPED
    runner.boot()
    assert runner.state is State.RUNNING


@pytest.mark.spec("001", "Boot sequence", "the layout is checked before the marker is looked at")
def test_a_bad_layout_is_noticed_before_the_marker_is_written(rig: Rig) -> None:
    remark(rig, None)
    with pytest.raises(Invalid):
        rig.stopped_runner(bootstrap=True).boot({"app_state": 0, "late": 2})
    assert marker_of(rig) is None


@pytest.mark.spec("001", "Boot sequence", "any failed step leaves it stopped, nothing written")
@pytest.mark.parametrize("failure", ["layout", "missing", "foreign", "store"])
def test_a_failed_boot_leaves_it_stopped_and_writes_nothing(rig: Rig, failure: str) -> None:
    layout = {"app_state": 1} if failure == "layout" else None
    if failure in ("missing", "store"):
        remark(rig, None)
    if failure == "foreign":
        remark(rig, schema.marker(9, 9))
    if failure == "store":
        rig.fault(Busy())
    before = dict(rig.backend.rows)
    runner = rig.stopped_runner(bootstrap=failure == "store")
    with pytest.raises((Invalid, NotFound, SchemaMismatch, Busy)):
        runner.boot(layout)
    assert runner.state is State.STOPPED
    assert rig.backend.rows == before


# -- DBI bootstrap -------------------------------------------------------------------------------


@pytest.mark.spec("001", "DBI bootstrap", "space 0 must be app_state")
def test_a_layout_without_app_state_at_zero_is_refused() -> None:
    with pytest.raises(Invalid):
        check_spaces({"outcome": 0, "app_state": 1})


@pytest.mark.spec("001", "DBI bootstrap", "the numbers of the spaces have no gap")
def test_a_layout_with_a_gap_is_refused() -> None:
    with pytest.raises(Invalid) as refusal:
        check_spaces({"app_state": 0, "outcome": 1, "queue": 3})
    assert (refusal.value.space, refusal.value.found, refusal.value.expected) == ("queue", 3, 2)


@pytest.mark.spec("001", "DBI bootstrap", "the layout is known and the same for every start")
def test_our_layout_is_contiguous_from_app_state(rig: Rig) -> None:
    # Written out: a space that is renumbered, renamed or removed makes stored keys unreadable.
    known = [
        "app_state", "outcome", "sequence", "blob", "lease", "lease_log", "journal", "inbox", "queue",
        "dedupe", "snapshot", "world", "ready", "worker", "run", "task",
    ]  # fmt: skip
    assert list(spaces().items())[: len(known)] == [(name, n) for n, name in enumerate(known)]
    assert list(spaces().values()) == list(range(len(spaces())))
    check_spaces(spaces())
    # The first element of a stored key is the number of its space.
    for space in schema.Space:
        assert (
            tuples.unpack(schema.prefix(space, "x"))[0]
            == int(space)
            == spaces()[space.name.lower()]
        )
    # Every start checks it, unless it is told another one.
    runner = rig.stopped_runner()
    runner.boot()
    with pytest.raises(Invalid):
        rig.stopped_runner().boot({**spaces(), "beyond": len(spaces()) + 1})


# -- Schema-version guard ------------------------------------------------------------------------


@pytest.mark.spec("001", "Schema-version guard", "the marker is RSV0, major and minor as u16le")
def test_the_marker_is_eight_bytes_under_its_plain_name(rig: Rig) -> None:
    assert schema.MARKER_KEY == b"runner.schema.version"
    expected = b"RSV0" + struct.pack("<HH", schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
    assert marker_of(rig) == expected
    assert schema.marker(0x0102, 0x0304) == b"RSV0\x02\x01\x04\x03"


@pytest.mark.spec("001", "Schema-version guard", "a matching marker lets it start, unchanged")
def test_a_matching_marker_is_accepted(rig: Rig) -> None:
    before = rig.backend.commits
    rig.stopped_runner().boot()
    assert rig.backend.commits == before


@pytest.mark.spec("001", "Schema-version guard", "a wrong marker is refused and kept as it is")
@pytest.mark.parametrize(
    "marker",
    [
        schema.marker(schema.SCHEMA_MAJOR + 1, schema.SCHEMA_MINOR),
        schema.marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1),
        b"RSV1" + schema.marker()[4:],
        schema.marker()[:-1],
        schema.marker() + b"\x00",
        b"",
    ],
)
@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_wrong_marker_is_refused(rig: Rig, marker: bytes, bootstrap: bool) -> None:
    remark(rig, marker)
    with pytest.raises(SchemaMismatch):
        rig.stopped_runner(bootstrap=bootstrap).boot()
    assert marker_of(rig) == marker


@pytest.mark.spec("001", "Schema-version guard", "missing marker without bootstrap: not found")
def test_a_missing_marker_is_not_found(rig: Rig) -> None:
    remark(rig, None)
    with pytest.raises(NotFound):
        rig.stopped_runner().boot()
    assert marker_of(rig) is None


@pytest.mark.spec("001", "Schema-version guard", "missing marker with bootstrap: written")
def test_a_missing_marker_is_written_when_bootstrap_is_on(rig: Rig) -> None:
    remark(rig, None)
    runner = rig.stopped_runner(bootstrap=True)
    runner.boot()
    assert marker_of(rig) == schema.marker()
    assert runner.state is State.RUNNING


# -- Step dispatch scaffold ----------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "the callback gets the decoded frame",
    module="holdfast.runner.dispatch",
)
def test_a_frame_is_decoded_for_the_callback() -> None:
    seen: list[Message] = []
    FrameHandler(7, seen.append).step(FRAME)
    assert seen == [MESSAGE]


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "only frames for this worker",
    module="holdfast.runner.dispatch",
)
def test_a_frame_for_somebody_else_never_reaches_the_callback(rig: Rig) -> None:
    seen: list[Message] = []
    rig.put(encode_message(replace(MESSAGE, to_worker=8)))
    assert rig.runner(FrameHandler(7, seen.append)).tick().dead == 1
    assert seen == []
    assert rig.dead()[0].code == "misrouted"


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "completed steps alone count",
    module="holdfast.runner.dispatch",
)
def test_steps_completed_counts_successful_callbacks_only(rig: Rig) -> None:
    rig.put(FRAME, FRAME, b"garbage")
    failing = Scripted(Busy())
    handler = FrameHandler(7, lambda message: failing(rig.handled[-1]))

    def remember(work: Work) -> None:
        rig.keep(work)
        handler(work)

    rig.runner(remember).tick()
    assert handler.steps_completed == 1


# -- Inbox loop scaffold -------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the oldest item first",
    module=("holdfast.runner.claims", "holdfast.runner.claimer"),
)
def test_items_are_handled_oldest_first(rig: Rig) -> None:
    rig.put(b"1", b"2")
    rig.put(b"3")
    rig.runner(max_batch=2).tick()
    assert rig.payloads == [b"1", b"2"]


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "claimed before it is handled, by the store's clock",
    module=("holdfast.runner.claims", "holdfast.runner.claimer"),
)
def test_an_item_is_claimed_while_its_handler_runs(rig: Rig) -> None:
    rig.put(b"a")
    seen: list[queue.Counts] = []

    def look(work: Work) -> None:
        seen.append(rig.counts())
        assert work.deadline_ns == work.claim.expires_ns
        assert abs(work.deadline_ns - rig.store.now_ns() - 5 * S) < MS

    rig.runner(look, lease_ttl_ms=5000).tick()
    assert seen == [queue.Counts(claimed=1)]


@pytest.mark.spec("001", "Inbox loop scaffold", "the handler runs outside any transaction")
def test_a_handler_may_commit_itself(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(lambda work: rig.put(b"follow-up") if work.payload == b"a" else None)
    assert rig.run(runner).done == 2


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "done: item and claim go in one commit",
    module="holdfast.runner.settle",
)
def test_an_acknowledged_item_and_its_claim_go_together(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()

    def here() -> tuple[queue.Counts, int]:
        return rig.counts(), len(rig.store.read(queue.claims_of, QUEUE, runner.owner, 10))

    # The commit of the claim is kept, and none after it: item and claim are both there ...
    rig.fault(FINE, *[DROPPED] * 20)
    runner.tick()
    assert here() == (queue.Counts(claimed=1), 1)
    # ... and after the next one that is kept neither is, though all commits after it are lost.
    rig.backend.faults.clear()
    before = rig.backend.commits
    rig.handled.clear()
    rig.fault(FINE, *[DROPPED] * 20)
    runner.tick()
    assert rig.backend.commits == before + 1
    assert here() == (queue.Counts(done=1), 0), "a commit that took one of the two"
    # Nothing was left for another commit.
    rig.backend.faults.clear()
    runner.tick()
    assert here() == (queue.Counts(done=1), 0)
    assert rig.backend.commits == before + 1
    assert rig.payloads == [], "it was handled before"


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "failures are counted on the item itself, in its transaction",
    module="holdfast.runner.settle",
)
def test_failures_are_counted_across_workers_and_restarts(rig: Rig) -> None:
    rig.put(b"a")
    for n in range(3):
        rig.runner(Scripted(Busy()), worker=f"w{n}", retry_budget_max=4).tick()
        rig.clock.advance(60 * S)
    rig.runner().tick()
    assert rig.handled[0].claim.failures == 3


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a retry needs the claim token; it keeps its seq and waits",
    module="holdfast.runner.settle",
)
def test_a_requeue_under_a_stale_token_changes_nothing(rig: Rig) -> None:
    rig.put(b"a")

    def outrun(work: Work) -> None:
        rig.clock.advance(2 * S)
        rig.runner(worker="other", lease_ttl_ms=60_000, handler=rig.keep).tick()
        raise Busy()

    assert rig.runner(outrun, lease_ttl_ms=1000).tick() == Tick(claimed=1, lost=1)
    assert rig.counts() == queue.Counts(done=1)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "budget used up: dead letter, item and claim gone with it",
    module="holdfast.runner.settle",
)
def test_an_exhausted_item_is_a_dead_letter_and_nothing_else(rig: Rig) -> None:
    rig.put(b"a")
    total = rig.run(rig.runner(Scripted(Busy(), Conflict()), retry_budget_max=2))
    assert (total.requeued, total.dead) == (1, 1)
    assert rig.counts() == queue.Counts(dead=1)
    [letter] = rig.dead()
    assert (letter.payload, letter.failures, letter.claims) == (b"a", 2, 2)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "an undecodable frame is a dead letter at once",
    module="holdfast.runner.dispatch",
)
def test_garbage_is_buried_on_its_first_attempt(rig: Rig) -> None:
    rig.put(b"garbage")
    assert rig.runner(FrameHandler(7, print)).tick() == Tick(claimed=1, dead=1)
    assert rig.dead()[0].code == "undecodable"


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "claims do not pile up", module="holdfast.runner.settle"
)
def test_no_claim_is_left_whatever_the_handler_did(rig: Rig) -> None:
    rig.put(*[b"x"] * 6)
    runner = rig.runner(Scripted(None, Busy(), Conflict(), ValueError(), NotFound(), None))
    runner.tick()
    assert rig.counts().claimed == 0
    assert rig.store.read(queue.claims_of, QUEUE, runner.owner, 10) == []


@pytest.mark.spec("001", "Inbox loop scaffold", "an item outlives the worker that had it")
def test_the_item_of_a_crashed_worker_is_handled_by_the_next(rig: Rig) -> None:
    rig.put(b"a")
    with pytest.raises(Crash):
        rig.runner(Scripted(Crash())).tick()
    rig.clock.advance(31 * S)
    assert rig.runner(worker="next").tick().done == 1


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "busy and conflict are retryable", module="holdfast.runner.settle"
)
@pytest.mark.parametrize("error", [Busy(), Conflict()])
def test_busy_and_conflict_are_requeued(rig: Rig, error: Exception) -> None:
    rig.put(b"a")
    assert rig.runner(Scripted(error)).tick() == Tick(claimed=1, requeued=1)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a non-retryable error keeps the item (as a dead letter) and surfaces to the policy",
)
def test_a_non_retryable_error_keeps_the_item_and_reaches_the_caller(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(ValueError("mine")), on_fatal="raise")
    with pytest.raises(ValueError, match="mine"):
        runner.tick()
    assert rig.counts() == queue.Counts(dead=1)


@pytest.mark.spec("001", "Inbox loop scaffold", "the policy decides: stop, escalate or go on")
def test_the_policy_decides_what_a_non_retryable_error_does(rig: Rig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(Scripted(*[ValueError()] * 2), on_fatal="go_on", max_batch=1)
    assert runner.tick().dead == 1
    runner.set_policy(replace(runner.policy, on_fatal="stop"))
    assert runner.tick().dead == 1
    assert runner.state is State.STOPPING


# -- Due-timer dispatch scaffold -----------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "a tick drains due timers with the queue, a share of the batch being theirs",
    module=("holdfast.runner.claims", "holdfast.runner.claimer"),
)
def test_due_timers_are_drained_even_when_the_queue_fills_the_batch(rig: Rig) -> None:
    rig.put(*[b"q"] * 8)
    for _ in range(4):
        rig.put_timer(b"t")
    rig.runner(max_batch=8, timer_share=0.25).tick()
    assert rig.payloads == [b"q"] * 6 + [b"t"] * 2


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "by due time, then by number; not before",
    module=("holdfast.runner.claims", "holdfast.runner.claimer"),
)
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_timers_fire_when_due_and_in_order(rig: Rig, max_batch: int) -> None:
    """However many are due at once, and in whatever order they were put."""
    runner = rig.runner(max_batch=max_batch)
    for after_ms in (500, 300, 400, 100, 300, 200):
        rig.put_timer(b"%d" % after_ms, after_ms=after_ms)
    assert runner.tick() == Tick()
    rig.clock.advance(250 * MS)
    while runner.tick().moved:
        pass
    assert rig.payloads == [b"100", b"200"]
    rig.clock.advance(250 * MS)
    while runner.tick().moved:
        pass
    assert rig.payloads == [b"100", b"200", b"300", b"300", b"400", b"500"]
    assert [work.seq for work in rig.handled] == [4, 6, 2, 5, 3, 1]


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "by due time, then by number; not before",
    module=("holdfast.runner.claims", "holdfast.durable.queue"),
)
def test_timers_that_were_due_when_they_were_put_are_in_line_with_the_others(rig: Rig) -> None:
    """And so are those that have come back from a worker: each by the time it waited for."""
    rig.put_timer(b"first", after_ms=100)
    rig.put_timer(b"second", after_ms=200)
    rig.clock.advance(300 * MS)
    rig.put_timer(b"third")
    rig.clock.advance(MS)
    rig.put_timer(b"fourth")
    token = rig.store.transact(queue.claim, TIMERS, "gone", 1, S)
    assert [claim.payload for claim in token] != []
    rig.store.transact(queue.release, token)
    runner = rig.runner(max_batch=1)
    while runner.tick().moved:
        pass
    assert rig.payloads == [b"first", b"second", b"third", b"fourth"]


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "the same dispatch as the queue's",
    module="holdfast.runner.dispatch",
)
def test_a_timer_frame_is_dispatched_like_any_other(rig: Rig) -> None:
    rig.put_timer(FRAME)
    rig.put_timer(b"garbage")
    handler = FrameHandler(7, lambda message: None)
    assert rig.runner(handler).tick() == Tick(claimed=2, done=1, dead=1)
    assert handler.steps_completed == 1


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "removed only under its own claim token",
    module="holdfast.runner.settle",
)
def test_a_timer_that_was_taken_over_is_not_removed_by_the_late_one(rig: Rig) -> None:
    rig.put_timer(b"t")
    runner = rig.runner(lambda work: rig.clock.advance(2 * S), lease_ttl_ms=1000)
    assert runner.tick() == Tick(claimed=1, lost=1)
    assert rig.counts(TIMERS).done == 0
    assert rig.runner(worker="next").tick().done == 1


# -- Reliability counters ------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "attempts, successes, failures by class, dispositions",
    module="holdfast.runner.counters",
)
def test_attempts_outcomes_and_dispositions_are_counted(rig: Rig) -> None:
    rig.put(*[b"x"] * 4)
    runner = rig.runner(Scripted(None, Conflict(), Busy(), ValueError()))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes) == (4, 1)
    assert (metrics.conflicts, metrics.busies, metrics.fatals) == (1, 1, 1)
    assert (metrics.requeues, metrics.dead_letters) == (2, 1)


@pytest.mark.spec(
    "001", "Reliability counters", "queue and timers count alike", module="holdfast.runner.counters"
)
def test_timers_move_the_same_counters(rig: Rig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t")
    runner = rig.runner()
    runner.tick()
    assert runner.counters.snapshot().attempts == 2


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "latency: samples, total, max, in ms of the injected clock",
    module="holdfast.runner.counters",
)
def test_latency_is_sampled_with_the_injected_clock(rig: Rig) -> None:
    rig.put(b"3")
    rig.put_timer(b"40")
    runner = rig.runner(lambda work: rig.clock.advance(int(work.payload) * MS))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert (metrics.latency_samples, metrics.latency_total_ms, metrics.latency_max_ms) == (
        2,
        43,
        40,
    )


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "a snapshot is taken, a reset clears",
    module="holdfast.runner.counters",
)
def test_counters_can_be_read_and_reset(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    runner.tick()
    before = runner.counters.snapshot()
    runner.counters.reset()
    assert before.successes == 1
    assert runner.counters.snapshot() == Metrics()


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "the sink is called at once after an update, with a copy",
    module="holdfast.runner.counters",
)
def test_the_sink_keeps_copies_taken_at_each_update(rig: Rig) -> None:
    rig.put(b"a")
    kept: list[Metrics] = []
    rig.runner(counters=Counters(kept.append)).tick()
    assert [(metrics.attempts, metrics.successes) for metrics in kept] == [(1, 0), (1, 1)]


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "a sink that re-enters or fails does no harm",
    module="holdfast.runner.counters",
)
def test_a_sink_that_reenters_is_survived(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(counters=Counters(lambda metrics: runner.tick()))
    assert runner.tick().done == 1


# -- Log sink (optional) -------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Log sink (optional)",
    "failures of both classes are told",
    module="holdfast.runner.hooks",
)
def test_failures_are_logged_by_class(rig: Rig) -> None:
    rig.put(b"a", b"b")
    events: list[LogEvent] = []
    rig.runner(Scripted(Busy(), ValueError()), log=events.append).tick()
    kinds = [(event.kind, event.status) for event in events[:2]]
    assert kinds == [(LogKind.RETRYABLE, "busy"), (LogKind.FATAL, "handler_error")]


@pytest.mark.spec(
    "001",
    "Log sink (optional)",
    "dispositions are told with the retry count",
    module="holdfast.runner.hooks",
)
def test_dispositions_are_logged_with_the_retry_count(rig: Rig) -> None:
    [seq] = rig.put(b"a")
    events: list[LogEvent] = []
    rig.run(rig.runner(Scripted(Busy(), Busy()), retry_budget_max=2, log=events.append))
    assert [event.kind for event in events if event.kind in (LogKind.RETRYABLE, LogKind.FATAL)] == [
        LogKind.RETRYABLE,
        LogKind.RETRYABLE,
    ]
    ends = [event for event in events if event.kind in (LogKind.REQUEUED, LogKind.DEAD_LETTER)]
    assert [(event.kind, event.seq, event.detail) for event in ends] == [
        (LogKind.REQUEUED, seq, 1),
        (LogKind.DEAD_LETTER, seq, 2),
    ]
    assert {event.worker for event in ends} == {"w"}


@pytest.mark.spec(
    "001",
    "Log sink (optional)",
    "what ends the loop is told under sequence 0",
    module=("holdfast.runner.hooks", "holdfast.runner.loop"),
)
def test_an_error_of_the_loop_is_logged_without_a_sequence(rig: Rig) -> None:
    events: list[LogEvent] = []
    runner = rig.runner(log=events.append, sleep=lambda seconds: rig.store.close())
    with pytest.raises(Exception, match="store_closed"):
        runner.run()
    [event] = events
    assert (event.kind, event.worker, event.seq) == (LogKind.LOOP_ERROR, "w", 0)
    assert event.status == "store_closed"


# -- Runner policy surface -----------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Runner policy surface",
    "there is a default for every knob",
    module="holdfast.runner.policy",
)
def test_there_is_a_default_policy() -> None:
    policy = Policy.default()
    assert policy.lease_ttl_ms > 0
    assert policy.requeue_max_attempts > 0
    assert policy.retry_budget_max > 0


@pytest.mark.spec("001", "Runner policy surface", "lease_ttl_ms is how long a claim lasts")
def test_the_lease_is_as_long_as_the_policy_says(rig: Rig) -> None:
    rig.put(b"a")
    with pytest.raises(Crash):
        rig.runner(Scripted(Crash()), lease_ttl_ms=7000).tick()
    other = rig.runner(worker="other")
    rig.clock.advance(6999 * MS)
    assert other.tick() == Tick()
    rig.clock.advance(2 * MS)
    assert other.tick().done == 1


@pytest.mark.spec(
    "001",
    "Runner policy surface",
    "requeue_max_attempts bounds the tries to settle",
    module="holdfast.runner.settle",
)
def test_a_settlement_is_tried_as_often_as_the_policy_says(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(Busy()), requeue_max_attempts=2)
    rig.fault(FINE, Busy(), Busy())
    assert [runner.tick(), runner.tick()] == [Tick(claimed=1, busy=1), Tick(busy=1, lost=1)]
    assert not runner.in_hand


@pytest.mark.spec("001", "Runner policy surface", "retry_budget_max bounds the failures of an item")
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_the_retry_budget_is_the_policys(rig: Rig, budget: int) -> None:
    rig.put(b"a")
    script = Scripted(*[Busy()] * 20)
    rig.run(rig.runner(script, retry_budget_max=budget))
    assert len(script.attempts) == budget


@pytest.mark.spec(
    "001",
    "Runner policy surface",
    "a policy is replaced while it runs",
    module="holdfast.runner.policy",
)
def test_a_policy_is_replaced_as_a_whole(rig: Rig) -> None:
    rig.put(b"a")
    script = Scripted(*[Busy()] * 9)
    runner = rig.runner(script, retry_budget_max=9)
    runner.tick()
    runner.set_policy(replace(runner.policy, retry_budget_max=2))
    assert rig.run(runner).dead == 1
    with pytest.raises(FrozenInstanceError):
        runner.policy.retry_budget_max = 3  # type: ignore[misc]


# -- Deterministic replay hook (optional) --------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "attempt and result of queue and timers, and each disposition",
    module="holdfast.runner.hooks",
)
def test_every_step_and_disposition_is_told(rig: Rig) -> None:
    rig.put(b"a", b"b")
    rig.put_timer(b"t")
    steps: list[Step] = []
    lines: list[LogEvent] = []
    handler = Scripted(Busy(), None, ValueError())
    rig.runner(handler, replay=steps.append, log=lines.append).tick()
    assert [(step.kind, step.result) for step in steps] == [
        (StepKind.INBOX_ATTEMPT, ""),
        (StepKind.INBOX_RESULT, "busy"),
        (StepKind.INBOX_ATTEMPT, ""),
        (StepKind.INBOX_RESULT, "ok"),
        (StepKind.TIMER_ATTEMPT, ""),
        (StepKind.TIMER_RESULT, "handler_error"),
        (StepKind.REQUEUE, "busy"),
        (StepKind.DEAD_LETTER, "handler_error"),
    ]
    # The log has the failures and the same dispositions, and no line for the success.
    assert [(line.kind, line.status) for line in lines] == [
        (LogKind.RETRYABLE, "busy"),
        (LogKind.FATAL, "handler_error"),
        (LogKind.REQUEUED, "busy"),
        (LogKind.DEAD_LETTER, "handler_error"),
    ]


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "worker, number (a timer's too), result code and frame",
    module="holdfast.runner.hooks",
)
def test_a_step_carries_worker_number_result_and_frame(rig: Rig) -> None:
    rig.put_timer(b"first")
    rig.put_timer(b"t")
    steps: list[Step] = []
    rig.runner(Scripted(None, Busy()), replay=steps.append).tick()
    last = steps[-1]
    assert (last.worker, last.seq, last.result, last.frame) == ("w", 2, "busy", b"t")


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "a frame stays what it was after the call",
    module="holdfast.runner.hooks",
)
def test_frames_may_be_kept_for_they_are_immutable(rig: Rig) -> None:
    rig.put(b"a")
    steps: list[Step] = []
    rig.runner(replay=steps.append).tick()
    assert type(steps[0].frame) is bytes


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "what was recorded can be run again",
    module=("holdfast.runner.recording", "holdfast.runner.replay"),
)
def test_a_post_mortem_runs_the_recorded_steps_again(rig: Rig, tmp_path: Path) -> None:
    def handler(work: Work) -> None:
        if work.payload == b"bad":
            raise ValueError

    rig.put(b"good", b"bad")
    with Recorder(tmp_path / "steps") as recorder:
        rig.runner(handler, replay=recorder).tick()
    report = replay_file(tmp_path / "steps", handler)
    assert (report.attempts, report.matched, report.ok) == (2, 2, True)


# -- Worker shell --------------------------------------------------------------------------------


@pytest.mark.spec("001", "Worker shell", "a tick takes max_batch from queue and timers together")
def test_a_batch_is_shared_by_queue_and_timers(rig: Rig) -> None:
    rig.put(*[b"q"] * 3)
    for _ in range(3):
        rig.put_timer(b"t")
    runner = rig.runner(max_batch=4)
    assert [runner.tick().claimed, runner.tick().claimed] == [4, 2]


@pytest.mark.spec("001", "Worker shell", "idle sleep is bounded, and ends with the next due timer")
def test_the_idle_sleep_is_timer_aware(rig: Rig) -> None:
    runner = rig.runner(idle_sleep_max_ms=700)
    assert runner.idle_sleep_ms() == 700
    rig.put_timer(b"t", after_ms=250)
    assert 249 <= runner.idle_sleep_ms() <= 250
    runner.set_policy(replace(runner.policy, idle_sleep_max_ms=90))
    assert runner.idle_sleep_ms() == 90
    rig.put(b"now")
    assert runner.idle_sleep_ms() == 0


@pytest.mark.spec(
    "001",
    "Worker shell",
    "injected clock and sleep drive leases, dues, rest and latency",
    module="holdfast.runner.loop",
)
def test_a_whole_run_lives_in_simulated_time(rig: Rig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t", after_ms=3_600_000)

    def handler(work: Work) -> None:
        rig.keep(work)
        rig.clock.advance(5 * MS)
        if work.kind == "timer":
            runner.request_stop()

    runner = rig.runner(handler, sleep=rig.clock.sleep)
    runner.run()
    assert rig.payloads == [b"a", b"t"]
    assert runner.counters.snapshot().latency_total_ms == 10


@pytest.mark.spec(
    "001", "Worker shell", "a shared gate serialises ticks", module="holdfast.runner.gate"
)
def test_two_runners_behind_a_gate_never_tick_at_once(rig: Rig) -> None:
    gate = Gate()
    first_inside, release = threading.Event(), threading.Event()
    order: list[str] = []

    def first(work: Work) -> None:
        first_inside.set()
        assert release.wait(LONG_S)
        order.append("first")

    rig.put(b"a", b"b")
    one = rig.runner(first, gate=gate, max_batch=1)
    two = rig.runner(lambda work: order.append("second"), gate=gate, max_batch=1, worker="two")
    threads = [threading.Thread(target=one.tick), threading.Thread(target=two.tick)]
    threads[0].start()
    assert first_inside.wait(LONG_S)
    threads[1].start()
    threads[1].join(0.01)
    assert order == []
    release.set()
    for thread in threads:
        thread.join(LONG_S)
    assert order == ["first", "second"]


@pytest.mark.spec(
    "001",
    "Worker shell",
    "the gate covers the looks for what is due",
    module="holdfast.runner.gate",
)
def test_a_gate_that_is_shut_down_refuses_ticks_and_idle_looks(rig: Rig) -> None:
    gate = Gate()
    runner = rig.runner(gate=gate)
    gate.shutdown()
    with pytest.raises(GateClosed):
        runner.tick()
    with pytest.raises(GateClosed):
        runner.idle_sleep_ms()


@pytest.mark.spec(
    "001", "Worker shell", "asked to stop, it claims no more; shut down, it is stopped"
)
def test_a_stop_is_requested_and_a_shutdown_completes_it(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    runner.request_stop()
    assert runner.tick() == Tick()
    assert runner.state is State.STOPPING
    assert runner.shutdown()
    assert runner.state is State.STOPPED


@pytest.mark.spec(
    "001", "Worker shell", "it loops in a thread and can be joined", module="holdfast.runner.loop"
)
def test_a_started_runner_works_until_it_is_joined() -> None:
    with stores.open("memory:") as store:
        handled = threading.Event()
        runner = Runner(store, QUEUE, lambda work: handled.set(), worker="w")
        runner.start()
        store.transact(queue.put, QUEUE, b"a", priority=0)
        assert handled.wait(LONG_S)
        runner.request_stop()
        assert runner.join(LONG_S)
        assert runner.state is State.STOPPED


@pytest.mark.spec(
    "001", "Worker shell", "busy, not found and conflict in a tick are busy and end nothing"
)
@pytest.mark.parametrize("error", [Busy(), NotFound(), Conflict()])
def test_transient_refusals_make_a_tick_busy(rig: Rig, error: Busy | NotFound | Conflict) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.fault(error, FINE, error)
    assert [runner.tick(), runner.tick(), runner.tick()] == [
        Tick(busy=1),
        Tick(claimed=1, busy=1),
        Tick(done=1),
    ]
