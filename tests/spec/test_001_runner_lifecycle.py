"""Document 001, rule by rule, in document order.

Where the design differs from the document, the test checks the design and its rule text names the difference.
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
    FrameHandler,
    LogEvent,
    LogKind,
    Metrics,
    RecordedStep,
    Recorder,
    Runner,
    RunnerCounters,
    RunnerPolicy,
    RunnerState,
    StepKind,
    TickLock,
    TickLockClosed,
    TickStats,
    WorkItem,
    replay_file,
)
from holdfast.runner.boot import check_key_spaces, key_spaces
from holdfast.runner.frames import FrameMessage, MessageFlag, MessageKind, encode_message
from holdfast.store import schema, tuples
from tests.postgres import RIG_STORES
from tests.runner.rig import (
    COMMIT_OK,
    QUEUE,
    TIMERS,
    UNKNOWN_ABORTED,
    RunnerRig,
    ScriptedHandler,
    SimulatedCrash,
)

MODULES = ("holdfast.runner.boot", "holdfast.runner.runner")


LONG_S = 30.0

MESSAGE = FrameMessage(
    kind=MessageKind.COMMAND,
    flags=MessageFlag.NONE,
    to_worker=7,
    route_worker=0,
    route_timestamp=0,
    from_worker=None,
    message_id=b"m-1",
    trace=None,
    payload=b"hello",
)
FRAME = encode_message(MESSAGE)


@pytest.fixture(params=RIG_STORES)
def rig(request: pytest.FixtureRequest) -> Iterator[RunnerRig]:
    opened = RunnerRig(request.param)
    yield opened
    opened.store.close()


def set_marker(rig: RunnerRig, marker: bytes | None) -> None:
    """Replace or delete the schema marker of the store."""

    def write(txn: stores.Txn) -> None:
        if marker is None:
            txn.delete(schema.MARKER_KEY)
        else:
            txn.put(schema.MARKER_KEY, marker)

    rig.store.transact(write)


def marker_of(rig: RunnerRig) -> bytes | None:
    return rig.store.read(lambda txn: txn.get(schema.MARKER_KEY))


# -- Boot sequence -------------------------------------------------------------------------------


@pytest.mark.spec("001", "Boot sequence", "a boot with a valid layout and marker starts the runner")
def test_boot_with_valid_layout_and_marker_starts_the_runner(rig: RunnerRig) -> None:
    runner = rig.stopped_runner()
    assert runner.state is RunnerState.STOPPED
    runner.boot()
    assert runner.state is RunnerState.RUNNING


@pytest.mark.spec(
    "001", "Boot sequence", "the boot checks the key space layout before the schema marker"
)
def test_boot_checks_the_layout_before_the_marker(rig: RunnerRig) -> None:
    set_marker(rig, None)
    with pytest.raises(Invalid):
        rig.stopped_runner(bootstrap=True).boot({"app_state": 0, "late": 2})
    assert marker_of(rig) is None


@pytest.mark.spec(
    "001", "Boot sequence", "a failed boot step leaves the runner stopped and writes nothing"
)
@pytest.mark.parametrize("failure", ["layout", "missing", "foreign", "store"])
def test_failed_boot_leaves_the_runner_stopped_and_writes_nothing(
    rig: RunnerRig, failure: str
) -> None:
    layout = {"app_state": 1} if failure == "layout" else None
    if failure in ("missing", "store"):
        set_marker(rig, None)
    if failure == "foreign":
        set_marker(rig, schema.encode_marker(9, 9))
    if failure == "store":
        rig.inject_faults(Busy())
    before = dict(rig.backend.rows)
    runner = rig.stopped_runner(bootstrap=failure == "store")
    with pytest.raises((Invalid, NotFound, SchemaMismatch, Busy)):
        runner.boot(layout)
    assert runner.state is RunnerState.STOPPED
    assert rig.backend.rows == before


# -- DBI bootstrap -------------------------------------------------------------------------------


@pytest.mark.spec("001", "DBI bootstrap", "the layout check requires app_state as key space 0")
def test_check_spaces_requires_app_state_at_zero() -> None:
    with pytest.raises(Invalid):
        check_key_spaces({"outcome": 0, "app_state": 1})


@pytest.mark.spec(
    "001", "DBI bootstrap", "the layout check refuses a gap in the numbers of the key spaces"
)
def test_check_spaces_rejects_a_gap() -> None:
    with pytest.raises(Invalid) as refusal:
        check_key_spaces({"app_state": 0, "outcome": 1, "queue": 3})
    assert (refusal.value.space, refusal.value.found, refusal.value.expected) == ("queue", 3, 2)


@pytest.mark.spec(
    "001",
    "DBI bootstrap",
    "the numbers of the key spaces are fixed, start at app_state, and every boot checks them",
)
def test_spaces_are_contiguous_from_app_state(rig: RunnerRig) -> None:
    # Written out: to renumber, rename or remove a space makes stored keys unreadable.
    known_spaces = [
        "app_state", "outcome", "sequence", "blob", "lease", "lease_log", "journal", "inbox", "queue",
        "dedupe", "snapshot", "world", "ready", "worker", "run", "task",
    ]  # fmt: skip
    assert list(key_spaces().items())[: len(known_spaces)] == [
        (name, n) for n, name in enumerate(known_spaces)
    ]
    assert list(key_spaces().values()) == list(range(len(key_spaces())))
    check_key_spaces(key_spaces())
    # The first element of a stored key is the number of its space.
    for space in schema.Space:
        assert (
            tuples.unpack(schema.key_prefix(space, "x"))[0]
            == int(space)
            == key_spaces()[space.name.lower()]
        )
    # Every boot checks this layout by default.
    runner = rig.stopped_runner()
    runner.boot()
    with pytest.raises(Invalid):
        rig.stopped_runner().boot({**key_spaces(), "beyond": len(key_spaces()) + 1})


# -- Schema-version guard ------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "the marker is RSV0, then major and minor as little-endian u16, under a fixed key",
)
def test_schema_marker_format_and_key(rig: RunnerRig) -> None:
    assert schema.MARKER_KEY == b"runner.schema.version"
    expected = b"RSV0" + struct.pack("<HH", schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
    assert marker_of(rig) == expected
    assert schema.encode_marker(0x0102, 0x0304) == b"RSV0\x02\x01\x04\x03"


@pytest.mark.spec(
    "001", "Schema-version guard", "a boot with a matching marker succeeds and writes nothing"
)
def test_boot_with_a_matching_marker_writes_nothing(rig: RunnerRig) -> None:
    before = rig.backend.commits
    rig.stopped_runner().boot()
    assert rig.backend.commits == before


@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "a boot with a wrong marker raises SchemaMismatch and keeps the stored marker",
)
@pytest.mark.parametrize(
    "marker",
    [
        schema.encode_marker(schema.SCHEMA_MAJOR + 1, schema.SCHEMA_MINOR),
        schema.encode_marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1),
        b"RSV1" + schema.encode_marker()[4:],
        schema.encode_marker()[:-1],
        schema.encode_marker() + b"\x00",
        b"",
    ],
)
@pytest.mark.parametrize("bootstrap", [False, True])
def test_boot_with_a_wrong_marker_raises_schema_mismatch(
    rig: RunnerRig, marker: bytes, bootstrap: bool
) -> None:
    set_marker(rig, marker)
    with pytest.raises(SchemaMismatch):
        rig.stopped_runner(bootstrap=bootstrap).boot()
    assert marker_of(rig) == marker


@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "a boot without bootstrap raises NotFound if the marker is missing",
)
def test_boot_without_a_marker_raises_not_found(rig: RunnerRig) -> None:
    set_marker(rig, None)
    with pytest.raises(NotFound):
        rig.stopped_runner().boot()
    assert marker_of(rig) is None


@pytest.mark.spec("001", "Schema-version guard", "a boot with bootstrap writes a missing marker")
def test_boot_with_bootstrap_writes_a_missing_marker(rig: RunnerRig) -> None:
    set_marker(rig, None)
    runner = rig.stopped_runner(bootstrap=True)
    runner.boot()
    assert marker_of(rig) == schema.encode_marker()
    assert runner.state is RunnerState.RUNNING


# -- Step dispatch scaffold ----------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "the frame handler passes the decoded frame to the callback",
    module="holdfast.runner.frame_handler",
)
def test_frame_handler_passes_the_decoded_frame_to_the_callback() -> None:
    seen: list[FrameMessage] = []
    FrameHandler(7, seen.append).step(FRAME)
    assert seen == [MESSAGE]


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "the frame handler dead-letters a frame that is addressed to another worker",
    module="holdfast.runner.frame_handler",
)
def test_frame_handler_buries_a_misrouted_frame(rig: RunnerRig) -> None:
    seen: list[FrameMessage] = []
    rig.put(encode_message(replace(MESSAGE, to_worker=8)))
    assert rig.runner(FrameHandler(7, seen.append)).tick().dead == 1
    assert seen == []
    assert rig.dead_letters()[0].code == "misrouted"


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "steps_completed counts only steps whose callback succeeded",
    module="holdfast.runner.frame_handler",
)
def test_frame_handler_steps_completed_counts_successful_callbacks_only(rig: RunnerRig) -> None:
    rig.put(FRAME, FRAME, b"garbage")
    failing = ScriptedHandler(Busy())
    handler = FrameHandler(7, lambda message: failing(rig.handled[-1]))

    def remember(work: WorkItem) -> None:
        rig.record_work(work)
        handler(work)

    rig.runner(remember).tick()
    assert handler.steps_completed == 1


# -- Inbox loop scaffold -------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the runner handles the oldest item first",
    module=("holdfast.runner.claim_ops", "holdfast.runner.claimer"),
)
def test_items_are_handled_oldest_first(rig: RunnerRig) -> None:
    rig.put(b"1", b"2")
    rig.put(b"3")
    rig.runner(max_batch=2).tick()
    assert rig.payloads == [b"1", b"2"]


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the runner claims an item before its handler runs, with an expiry in store time",
    module=("holdfast.runner.claim_ops", "holdfast.runner.claimer"),
)
def test_item_is_claimed_while_its_handler_runs(rig: RunnerRig) -> None:
    rig.put(b"a")
    seen: list[queue.QueueCounts] = []

    def look(work: WorkItem) -> None:
        seen.append(rig.counts())
        assert work.expires_ns == work.claim.expires_ns
        assert abs(work.expires_ns - rig.store.now_ns() - 5 * S) < MS

    rig.runner(look, lease_ttl_ms=5000).tick()
    assert seen == [queue.QueueCounts(claimed=1)]


@pytest.mark.spec("001", "Inbox loop scaffold", "the handler runs outside any transaction")
def test_handler_may_commit_its_own_transaction(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(lambda work: rig.put(b"follow-up") if work.payload == b"a" else None)
    assert rig.run_until_idle(runner).done == 2


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "an ack deletes item and claim in one commit",
    module="holdfast.runner.settlement",
)
def test_ack_deletes_item_and_claim_in_one_commit(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner()

    def counts_and_claims() -> tuple[queue.QueueCounts, int]:
        return rig.counts(), len(rig.store.read(queue.claims_of, QUEUE, runner.owner, 10))

    # The claim commits and all later commits are dropped: item and claim both exist.
    rig.inject_faults(COMMIT_OK, *[UNKNOWN_ABORTED] * 20)
    runner.tick()
    assert counts_and_claims() == (queue.QueueCounts(claimed=1), 1)
    # After one more successful commit neither exists, although all later commits are dropped.
    rig.backend.faults.clear()
    before = rig.backend.commits
    rig.handled.clear()
    rig.inject_faults(COMMIT_OK, *[UNKNOWN_ABORTED] * 20)
    runner.tick()
    assert rig.backend.commits == before + 1
    assert counts_and_claims() == (queue.QueueCounts(done=1), 0), (
        "a commit that took one of the two"
    )
    # No work was left for another commit.
    rig.backend.faults.clear()
    runner.tick()
    assert counts_and_claims() == (queue.QueueCounts(done=1), 0)
    assert rig.backend.commits == before + 1
    assert rig.payloads == [], "it was handled before"


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the item stores its failure count, so the count survives workers and restarts",
    module="holdfast.runner.settlement",
)
def test_failures_are_counted_across_workers_and_restarts(rig: RunnerRig) -> None:
    rig.put(b"a")
    for n in range(3):
        rig.runner(ScriptedHandler(Busy()), worker=f"w{n}", retry_budget_max=4).tick()
        rig.clock.advance(60 * S)
    rig.runner().tick()
    assert rig.handled[0].claim.failures == 3


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a requeue needs the current claim token, and a stale token changes nothing",
    module="holdfast.runner.settlement",
)
def test_requeue_with_a_stale_claim_token_changes_nothing(rig: RunnerRig) -> None:
    rig.put(b"a")

    def lose_claim(work: WorkItem) -> None:
        rig.clock.advance(2 * S)
        rig.runner(worker="other", lease_ttl_ms=60_000, handler=rig.record_work).tick()
        raise Busy()

    assert rig.runner(lose_claim, lease_ttl_ms=1000).tick() == TickStats(claimed=1, lost=1)
    assert rig.counts() == queue.QueueCounts(done=1)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "an exhausted retry budget writes a dead letter and deletes item and claim",
    module="holdfast.runner.settlement",
)
def test_exhausted_retry_budget_makes_a_dead_letter(rig: RunnerRig) -> None:
    rig.put(b"a")
    total = rig.run_until_idle(rig.runner(ScriptedHandler(Busy(), Conflict()), retry_budget_max=2))
    assert (total.requeued, total.dead) == (1, 1)
    assert rig.counts() == queue.QueueCounts(dead=1)
    [letter] = rig.dead_letters()
    assert (letter.payload, letter.failures, letter.claims) == (b"a", 2, 2)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "an undecodable frame becomes a dead letter on its first attempt",
    module="holdfast.runner.frame_handler",
)
def test_undecodable_frame_is_a_dead_letter_on_its_first_attempt(rig: RunnerRig) -> None:
    rig.put(b"garbage")
    assert rig.runner(FrameHandler(7, print)).tick() == TickStats(claimed=1, dead=1)
    assert rig.dead_letters()[0].code == "undecodable"


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "no claim remains after any outcome of the handler",
    module="holdfast.runner.settlement",
)
def test_no_claim_remains_after_any_handler_outcome(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 6)
    runner = rig.runner(ScriptedHandler(None, Busy(), Conflict(), ValueError(), NotFound(), None))
    runner.tick()
    assert rig.counts().claimed == 0
    assert rig.store.read(queue.claims_of, QUEUE, runner.owner, 10) == []


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "another worker handles the item of a crashed worker"
)
def test_item_of_a_crashed_worker_is_handled_by_another_worker(rig: RunnerRig) -> None:
    rig.put(b"a")
    with pytest.raises(SimulatedCrash):
        rig.runner(ScriptedHandler(SimulatedCrash())).tick()
    rig.clock.advance(31 * S)
    assert rig.runner(worker="next").tick().done == 1


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the errors busy and conflict are retryable",
    module="holdfast.runner.settlement",
)
@pytest.mark.parametrize("error", [Busy(), Conflict()])
def test_busy_and_conflict_are_requeued(rig: RunnerRig, error: Exception) -> None:
    rig.put(b"a")
    assert rig.runner(ScriptedHandler(error)).tick() == TickStats(claimed=1, requeued=1)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a non-retryable error writes a dead letter, and the runner raises the error if its policy demands it",
)
def test_on_fatal_raise_keeps_the_dead_letter_and_raises_the_error(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(ScriptedHandler(ValueError("mine")), on_fatal="raise")
    with pytest.raises(ValueError, match="mine"):
        runner.tick()
    assert rig.counts() == queue.QueueCounts(dead=1)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "the policy decides whether the runner stops, raises or continues after a non-retryable error",
)
def test_on_fatal_policy_decides_to_continue_or_stop(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    runner = rig.runner(ScriptedHandler(*[ValueError()] * 2), on_fatal="go_on", max_batch=1)
    assert runner.tick().dead == 1
    runner.set_policy(replace(runner.policy, on_fatal="stop"))
    assert runner.tick().dead == 1
    assert runner.state is RunnerState.STOPPING


# -- Due-timer dispatch scaffold -----------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "a tick drains due timers even if the queue fills the batch: timers have a reserved share",
    module=("holdfast.runner.claim_ops", "holdfast.runner.claimer"),
)
def test_due_timers_are_drained_even_when_the_queue_fills_the_batch(rig: RunnerRig) -> None:
    rig.put(*[b"q"] * 8)
    for _ in range(4):
        rig.put_timer(b"t")
    rig.runner(max_batch=8, timer_share=0.25).tick()
    assert rig.payloads == [b"q"] * 6 + [b"t"] * 2


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "timers fire by due time, then by seq, and never before the due time",
    module=("holdfast.runner.claim_ops", "holdfast.runner.claimer"),
)
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_timers_fire_when_due_in_due_order(rig: RunnerRig, max_batch: int) -> None:
    """For any number of timers due at once and any insertion order."""
    runner = rig.runner(max_batch=max_batch)
    for after_ms in (500, 300, 400, 100, 300, 200):
        rig.put_timer(b"%d" % after_ms, after_ms=after_ms)
    assert runner.tick() == TickStats()
    rig.clock.advance(250 * MS)
    while runner.tick().made_progress:
        pass
    assert rig.payloads == [b"100", b"200"]
    rig.clock.advance(250 * MS)
    while runner.tick().made_progress:
        pass
    assert rig.payloads == [b"100", b"200", b"300", b"300", b"400", b"500"]
    assert [work.seq for work in rig.handled] == [4, 6, 2, 5, 3, 1]


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "timers fire by due time, then by seq, and never before the due time",
    module=("holdfast.runner.claim_ops", "holdfast.durable.queue"),
)
def test_overdue_and_requeued_timers_fire_in_due_order(rig: RunnerRig) -> None:
    """Timers requeued by a worker keep their original due time."""
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
    while runner.tick().made_progress:
        pass
    assert rig.payloads == [b"first", b"second", b"third", b"fourth"]


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "the runner dispatches timer frames like queue frames",
    module="holdfast.runner.frame_handler",
)
def test_timer_frame_is_dispatched_like_a_queue_frame(rig: RunnerRig) -> None:
    rig.put_timer(FRAME)
    rig.put_timer(b"garbage")
    handler = FrameHandler(7, lambda message: None)
    assert rig.runner(handler).tick() == TickStats(claimed=2, done=1, dead=1)
    assert handler.steps_completed == 1


@pytest.mark.spec(
    "001",
    "Due-timer dispatch scaffold",
    "a worker removes a timer only with its current claim token",
    module="holdfast.runner.settlement",
)
def test_timer_is_removed_only_with_its_current_claim_token(rig: RunnerRig) -> None:
    rig.put_timer(b"t")
    runner = rig.runner(lambda work: rig.clock.advance(2 * S), lease_ttl_ms=1000)
    assert runner.tick() == TickStats(claimed=1, lost=1)
    assert rig.counts(TIMERS).done == 0
    assert rig.runner(worker="next").tick().done == 1


# -- Reliability counters ------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "the counters count attempts, successes, failures by class and dispositions",
    module="holdfast.runner.counters",
)
def test_attempts_outcomes_and_dispositions_are_counted(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 4)
    runner = rig.runner(ScriptedHandler(None, Conflict(), Busy(), ValueError()))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes) == (4, 1)
    assert (metrics.conflicts, metrics.busies, metrics.fatals) == (1, 1, 1)
    assert (metrics.requeues, metrics.dead_letters) == (2, 1)


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "queue items and timers share the same counters",
    module="holdfast.runner.counters",
)
def test_timers_and_queue_share_the_counters(rig: RunnerRig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t")
    runner = rig.runner()
    runner.tick()
    assert runner.counters.snapshot().attempts == 2


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "the counters sample latency in ms of the injected clock: number, total and maximum",
    module="holdfast.runner.counters",
)
def test_latency_is_sampled_with_the_injected_clock(rig: RunnerRig) -> None:
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
    "the counters have a snapshot and a reset, and a reset sets all of them to zero",
    module="holdfast.runner.counters",
)
def test_counters_can_be_read_and_reset(rig: RunnerRig) -> None:
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
    "the metrics sink receives a copy of the counters after each update",
    module="holdfast.runner.counters",
)
def test_counters_sink_gets_a_copy_at_each_update(rig: RunnerRig) -> None:
    rig.put(b"a")
    snapshots: list[Metrics] = []
    rig.runner(counters=RunnerCounters(snapshots.append)).tick()
    assert [(metrics.attempts, metrics.successes) for metrics in snapshots] == [(1, 0), (1, 1)]


@pytest.mark.spec(
    "001",
    "Reliability counters",
    "a metrics sink that calls tick again does not disturb the runner",
    module="holdfast.runner.counters",
)
def test_counters_sink_that_reenters_tick_does_no_harm(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(counters=RunnerCounters(lambda metrics: runner.tick()))
    assert runner.tick().done == 1


# -- Log sink (optional) -------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Log sink (optional)",
    "the log hook receives retryable and fatal failures as different events",
    module="holdfast.runner.hooks",
)
def test_failures_are_logged_by_class(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    events: list[LogEvent] = []
    rig.runner(ScriptedHandler(Busy(), ValueError()), log=events.append).tick()
    kinds = [(event.kind, event.status) for event in events[:2]]
    assert kinds == [(LogKind.RETRYABLE, "busy"), (LogKind.FATAL, "handler_error")]


@pytest.mark.spec(
    "001",
    "Log sink (optional)",
    "the log hook receives each disposition with the retry count",
    module="holdfast.runner.hooks",
)
def test_dispositions_are_logged_with_the_retry_count(rig: RunnerRig) -> None:
    [seq] = rig.put(b"a")
    events: list[LogEvent] = []
    rig.run_until_idle(
        rig.runner(ScriptedHandler(Busy(), Busy()), retry_budget_max=2, log=events.append)
    )
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
    "the log hook receives the error that ends the loop, with seq 0",
    module=("holdfast.runner.hooks", "holdfast.runner.loop"),
)
def test_loop_error_is_logged_with_seq_zero(rig: RunnerRig) -> None:
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
    "the default policy has a value for every limit",
    module="holdfast.runner.policy",
)
def test_default_policy_sets_every_limit() -> None:
    policy = RunnerPolicy.default()
    assert policy.lease_ttl_ms > 0
    assert policy.requeue_max_attempts > 0
    assert policy.retry_budget_max > 0


@pytest.mark.spec(
    "001", "Runner policy surface", "lease_ttl_ms of the policy bounds the duration of a claim"
)
def test_lease_ttl_ms_of_the_policy_bounds_a_claim(rig: RunnerRig) -> None:
    rig.put(b"a")
    with pytest.raises(SimulatedCrash):
        rig.runner(ScriptedHandler(SimulatedCrash()), lease_ttl_ms=7000).tick()
    other = rig.runner(worker="other")
    rig.clock.advance(6999 * MS)
    assert other.tick() == TickStats()
    rig.clock.advance(2 * MS)
    assert other.tick().done == 1


@pytest.mark.spec(
    "001",
    "Runner policy surface",
    "requeue_max_attempts of the policy bounds the settlement retries",
    module="holdfast.runner.settlement",
)
def test_requeue_max_attempts_bounds_settlement_retries(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(ScriptedHandler(Busy()), requeue_max_attempts=2)
    rig.inject_faults(COMMIT_OK, Busy(), Busy())
    assert [runner.tick(), runner.tick()] == [
        TickStats(claimed=1, busy=1),
        TickStats(busy=1, lost=1),
    ]
    assert not runner.has_unsettled


@pytest.mark.spec(
    "001", "Runner policy surface", "retry_budget_max of the policy bounds the failures of an item"
)
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_retry_budget_max_bounds_failures_of_an_item(rig: RunnerRig, budget: int) -> None:
    rig.put(b"a")
    script = ScriptedHandler(*[Busy()] * 20)
    rig.run_until_idle(rig.runner(script, retry_budget_max=budget))
    assert len(script.attempts) == budget


@pytest.mark.spec(
    "001",
    "Runner policy surface",
    "set_policy replaces the whole policy of a running runner",
    module="holdfast.runner.policy",
)
def test_set_policy_replaces_the_policy_as_a_whole(rig: RunnerRig) -> None:
    rig.put(b"a")
    script = ScriptedHandler(*[Busy()] * 9)
    runner = rig.runner(script, retry_budget_max=9)
    runner.tick()
    runner.set_policy(replace(runner.policy, retry_budget_max=2))
    assert rig.run_until_idle(runner).dead == 1
    with pytest.raises(FrozenInstanceError):
        runner.policy.retry_budget_max = 3  # type: ignore[misc]


# -- Deterministic replay hook (optional) --------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "the replay hook receives the attempt and result of queue items and timers, and each disposition",
    module="holdfast.runner.hooks",
)
def test_replay_hook_gets_every_step_and_disposition(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    rig.put_timer(b"t")
    steps: list[RecordedStep] = []
    lines: list[LogEvent] = []
    handler = ScriptedHandler(Busy(), None, ValueError())
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
    # The log has the failures and the same dispositions, and no event for the success.
    assert [(line.kind, line.status) for line in lines] == [
        (LogKind.RETRYABLE, "busy"),
        (LogKind.FATAL, "handler_error"),
        (LogKind.REQUEUED, "busy"),
        (LogKind.DEAD_LETTER, "handler_error"),
    ]


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "a replay event has the worker, the seq (also of a timer), the result code and the frame",
    module="holdfast.runner.hooks",
)
def test_replay_step_has_worker_seq_result_and_frame(rig: RunnerRig) -> None:
    rig.put_timer(b"first")
    rig.put_timer(b"t")
    steps: list[RecordedStep] = []
    rig.runner(ScriptedHandler(None, Busy()), replay=steps.append).tick()
    last = steps[-1]
    assert (last.worker, last.seq, last.result, last.frame) == ("w", 2, "busy", b"t")


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "the frame in a replay event is immutable and stays valid after the callback",
    module="holdfast.runner.hooks",
)
def test_replay_step_frame_is_immutable_bytes(rig: RunnerRig) -> None:
    rig.put(b"a")
    steps: list[RecordedStep] = []
    rig.runner(replay=steps.append).tick()
    assert type(steps[0].frame) is bytes


@pytest.mark.spec(
    "001",
    "Deterministic replay hook (optional)",
    "the replay tool repeats a recorded run and compares the results",
    module=("holdfast.runner.recorder", "holdfast.runner.replay"),
)
def test_recorded_steps_can_be_replayed_from_a_file(rig: RunnerRig, tmp_path: Path) -> None:
    def handler(work: WorkItem) -> None:
        if work.payload == b"bad":
            raise ValueError

    rig.put(b"good", b"bad")
    with Recorder(tmp_path / "steps") as recorder:
        rig.runner(handler, replay=recorder).tick()
    report = replay_file(tmp_path / "steps", handler)
    assert (report.attempts, report.matched, report.ok) == (2, 2, True)


# -- Worker shell --------------------------------------------------------------------------------


@pytest.mark.spec("001", "Worker shell", "queue items and timers share max_batch in a tick")
def test_max_batch_is_shared_by_queue_and_timers(rig: RunnerRig) -> None:
    rig.put(*[b"q"] * 3)
    for _ in range(3):
        rig.put_timer(b"t")
    runner = rig.runner(max_batch=4)
    assert [runner.tick().claimed, runner.tick().claimed] == [4, 2]


@pytest.mark.spec(
    "001", "Worker shell", "the idle sleep has a maximum and ends when the next timer is due"
)
def test_idle_sleep_ends_with_the_next_due_timer(rig: RunnerRig) -> None:
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
    "the runner uses the injected clock and sleep for leases, due times, idle sleep and latency",
    module="holdfast.runner.loop",
)
def test_run_uses_the_injected_clock_and_sleep(rig: RunnerRig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t", after_ms=3_600_000)

    def handler(work: WorkItem) -> None:
        rig.record_work(work)
        rig.clock.advance(5 * MS)
        if work.kind == "timer":
            runner.request_stop()

    runner = rig.runner(handler, sleep=rig.clock.sleep)
    runner.run()
    assert rig.payloads == [b"a", b"t"]
    assert runner.counters.snapshot().latency_total_ms == 10


@pytest.mark.spec(
    "001",
    "Worker shell",
    "a shared tick lock serialises the ticks of several runners",
    module="holdfast.runner.tick",
)
def test_tick_lock_serialises_ticks_of_two_runners(rig: RunnerRig) -> None:
    gate = TickLock()
    first_inside, release = threading.Event(), threading.Event()
    order: list[str] = []

    def first(work: WorkItem) -> None:
        first_inside.set()
        assert release.wait(LONG_S)
        order.append("first")

    rig.put(b"a", b"b")
    first_runner = rig.runner(first, tick_lock=gate, max_batch=1)
    second_runner = rig.runner(
        lambda work: order.append("second"), tick_lock=gate, max_batch=1, worker="two"
    )
    threads = [
        threading.Thread(target=first_runner.tick),
        threading.Thread(target=second_runner.tick),
    ]
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
    "a closed tick lock refuses ticks and the scan of due items for the idle sleep",
    module="holdfast.runner.tick",
)
def test_closed_tick_lock_refuses_tick_and_idle_sleep(rig: RunnerRig) -> None:
    gate = TickLock()
    runner = rig.runner(tick_lock=gate)
    gate.shutdown()
    with pytest.raises(TickLockClosed):
        runner.tick()
    with pytest.raises(TickLockClosed):
        runner.idle_sleep_ms()


@pytest.mark.spec(
    "001", "Worker shell", "a stop request ends new claims, and a shutdown stops the runner"
)
def test_request_stop_ends_claims_and_shutdown_stops_the_runner(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    runner.request_stop()
    assert runner.tick() == TickStats()
    assert runner.state is RunnerState.STOPPING
    assert runner.shutdown()
    assert runner.state is RunnerState.STOPPED


@pytest.mark.spec(
    "001",
    "Worker shell",
    "a started runner loops in a thread until it is joined",
    module="holdfast.runner.loop",
)
def test_started_runner_runs_until_join() -> None:
    with stores.open("memory:") as store:
        handled = threading.Event()
        runner = Runner(store, QUEUE, lambda work: handled.set(), worker="w")
        runner.start()
        store.transact(queue.put, QUEUE, b"a", priority=0)
        assert handled.wait(LONG_S)
        runner.request_stop()
        assert runner.join(LONG_S)
        assert runner.state is RunnerState.STOPPED


@pytest.mark.spec(
    "001",
    "Worker shell",
    "busy, not found and conflict in a tick count as busy and do not stop the runner",
)
@pytest.mark.parametrize("error", [Busy(), NotFound(), Conflict()])
def test_transient_store_errors_make_a_tick_busy(
    rig: RunnerRig, error: Busy | NotFound | Conflict
) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.inject_faults(error, COMMIT_OK, error)
    assert [runner.tick(), runner.tick(), runner.tick()] == [
        TickStats(busy=1),
        TickStats(claimed=1, busy=1),
        TickStats(done=1),
    ]
