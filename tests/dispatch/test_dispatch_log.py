"""The dispatch log: transitions by the table, records, counters, indexes, event log and their bounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.dispatch import consistency, notifications
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.notifications import ReplayState
from holdfast.dispatch.outcomes import DispatchOutcomeReason, QueueTransition
from holdfast.dispatch.request import (
    DISPATCH,
    DispatchBacklog,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    InvalidTransition,
    intent_hash_of,
    make_record,
    make_request_event,
    mark_of,
    request_id_of,
)
from holdfast.durable import journal
from holdfast.errors import (
    IllegalTransition,
    Invalid,
    KeyConflict,
    NotFound,
    Overloaded,
    from_wire,
    to_wire,
)
from holdfast.messages import Intent
from holdfast.store import schema
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.dispatch.request", "holdfast.dispatch.log")

U = "bank"
CURSOR = schema.key_prefix(schema.Space.APP_STATE, "replay", U, "state")
# The transitions that bring a request into each state.
PATHS: dict[DispatchStatus, list[QueueTransition]] = {
    DispatchStatus.PENDING: [],
    DispatchStatus.NOTIFIED: [QueueTransition.NOTIFIED],
    DispatchStatus.DELIVERED: [QueueTransition.NOTIFIED, QueueTransition.DELIVERED],
    DispatchStatus.FAILED: [QueueTransition.FAILED],
}
PAIRS = [(status, move) for status in DispatchStatus for move in QueueTransition]


@pytest.fixture
def log(sim_store: Store) -> DispatchLog:
    return DispatchLog(sim_store, U)


def request_in_state(
    store: Store, status: DispatchStatus, request_id: str = "r1"
) -> DispatchRecord:
    record = DispatchLog(store, U).request(request_id, "work")
    for transition in PATHS[status]:
        record = store.transact(dispatch_log.move, U, request_id, transition, "")
    return record


def events(store: Store) -> list[DispatchEvent]:
    return store.read(dispatch_log.events, U, 0, 10_000)


def list_records(store: Store) -> list[DispatchRecord]:
    return [
        record
        for status in DispatchStatus
        for record in store.read(dispatch_log.list_by_status, U, status, None, 10_000)
    ]


def require_consistent(store: Store) -> None:
    """Check the counters against a recount, the records against the log, and both indexes."""
    assert store.read(lambda txn: list(consistency.check_dispatches(txn, U))) == []
    records = list_records(store)
    counted = Counter(record.status.value for record in records)
    deferred = sum(record.deferred for record in records)
    assert store.read(dispatch_log.backlog, U) == DispatchBacklog(**counted, deferred=deferred)
    assert dispatch_log.rebuild(events(store)) == {one.request_id: one for one in records}
    for record in records:
        assert store.read(dispatch_log.find, U, record.request_id) == record
        assert store.read(dispatch_log.find_by_mark, U, mark_of(record.request_id)) == record


# -- the table -------------------------------------------------------------------------------------


def test_dispatch_table_reaches_every_state_and_ends_in_two() -> None:
    assert not DISPATCH.unreachable()
    assert DISPATCH.terminal == {DispatchStatus.DELIVERED, DispatchStatus.FAILED}


@pytest.mark.parametrize(("status", "transition"), PAIRS)
def test_move_applies_or_rejects_every_transition_of_the_table(
    sim_store: Store, status: DispatchStatus, transition: QueueTransition
) -> None:
    before = request_in_state(sim_store, status)
    expected = DISPATCH.table.get((status, transition))
    logged_before = len(events(sim_store))
    if expected is None:
        with pytest.raises(InvalidTransition) as error:
            sim_store.transact(dispatch_log.move, U, "r1", transition, "why")
        assert error.value.fields["prior"] == status.name
        assert error.value.fields["attempted"] == transition.name
        assert (error.value.request_id, error.value.target) == ("r1", "work")
        assert sim_store.read(dispatch_log.find, U, "r1") == before
        assert len(events(sim_store)) == logged_before
    else:
        after = sim_store.transact(dispatch_log.move, U, "r1", transition, "why")
        assert (after.status, after.reason) == (expected, "why")
        assert len(events(sim_store)) == logged_before + 1
    require_consistent(sim_store)


@pytest.mark.parametrize(("status", "transition"), PAIRS)
def test_record_fold_follows_the_transition_table(
    status: DispatchStatus, transition: QueueTransition
) -> None:
    record = make_record(make_request_event("r1", "work", 5, {}, ""))
    record = msgspec.structs.replace(record, status=status)
    event = DispatchEvent("r1/1", "r1", "work", transition, status, 7, "why")
    if DISPATCH.allows(status, transition):
        assert record.after(event).status is DISPATCH.table[status, transition]
    else:
        with pytest.raises(IllegalTransition):
            record.after(event)


def test_invalid_transition_keeps_its_class_across_the_wire() -> None:
    assert type(from_wire(to_wire(InvalidTransition(request_id="r")))) is InvalidTransition


# -- records ---------------------------------------------------------------------------------------


def test_request_records_the_time_of_each_state(log: DispatchLog, clock: SimClock) -> None:
    made = log.request("r1", "work", {"world": "Agent/ada"})
    assert (made.status, made.metadata) == (DispatchStatus.PENDING, {"world": "Agent/ada"})
    assert (made.notified_at, made.delivered_at, made.failed_at) == (None, None, None)
    clock.advance(S)
    notified = log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    clock.advance(S)
    delivered = log.delivered("r1")
    assert delivered.created_at == made.created_at
    assert notified.notified_at is not None
    assert delivered.notified_at == notified.notified_at
    assert delivered.delivered_at is not None
    assert made.created_at < notified.notified_at < delivered.delivered_at
    assert (delivered.failed_at, delivered.reason) == (None, "acknowledged")


def test_failed_request_has_a_time_and_a_reason(log: DispatchLog) -> None:
    log.request("r1", "work")
    failed = log.failed("r1", "nobody reads there")
    assert failed.failed_at is not None
    assert (failed.reason, failed.delivered_at) == ("nobody reads there", None)


def test_repeated_request_returns_the_existing_record(log: DispatchLog, sim_store: Store) -> None:
    log.request("r1", "work", digest="abc")
    failed = log.failed("r1", "no")
    assert log.request("r1", "work", digest="abc") == failed
    assert log.backlog() == DispatchBacklog(failed=1)


@pytest.mark.parametrize("other", [("elsewhere", "abc"), ("work", "abd")])
def test_same_request_id_with_other_content_is_a_key_conflict(
    log: DispatchLog, other: tuple[str, str]
) -> None:
    made = log.request("r1", "work", digest="abc")
    with pytest.raises(KeyConflict):
        log.request("r1", other[0], digest=other[1])
    assert log.find("r1") == made


def test_tried_counts_attempts_and_keeps_the_reason(log: DispatchLog) -> None:
    log.request("r1", "work")
    log.tried("r1")
    log.concluded("r1", DispatchOutcomeReason.UNCONFIRMED, retries_left=1)
    record = log.tried("r1")
    assert (record.tries, record.reason, record.status.value) == (2, "unconfirmed", "pending")


def test_deferred_request_is_counted_until_it_is_tried(log: DispatchLog) -> None:
    log.request("r1", "leader")
    record = log.concluded("r1", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    assert (record.status.value, record.reason, record.deferred) == (
        "pending", "leader_missing", True,
    )  # fmt: skip
    assert log.backlog() == DispatchBacklog(pending=1, deferred=1)
    log.tried("r1")
    assert log.backlog() == DispatchBacklog(pending=1)


@pytest.mark.parametrize("status", list(DispatchStatus))
def test_abandon_fails_only_a_pending_request(sim_store: Store, status: DispatchStatus) -> None:
    before = request_in_state(sim_store, status)
    pending = status is DispatchStatus.PENDING
    assert sim_store.transact(dispatch_log.abandon, U, "r1", "cancelled") is pending
    after = sim_store.read(dispatch_log.find, U, "r1")
    assert after is not None
    assert after.reason == "cancelled" if pending else after == before
    require_consistent(sim_store)


def test_list_by_status_orders_requests_by_time_of_the_transition(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for name in "cab":
        log.request(name, "work")
        clock.advance(S)
    for name in "bca":
        log.failed(name, "no")
        clock.advance(S)
    found = sim_store.read(dispatch_log.list_by_status, U, DispatchStatus.FAILED, None, 2)
    assert [one.request_id for one in found] == ["b", "c"]
    rest = sim_store.read(dispatch_log.list_by_status, U, DispatchStatus.FAILED, found[-1], 2)
    assert [one.request_id for one in rest] == ["a"]


def test_each_universe_has_its_own_dispatch_log(log: DispatchLog, sim_store: Store) -> None:
    log.request("r1", "work")
    other = DispatchLog(sim_store, "shop")
    assert (other.find("r1"), other.backlog()) == (None, DispatchBacklog())


# -- consistency check -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoilt", "what"),
    [
        (lambda txn, keys: txn.add(keys.counts[DispatchStatus.FAILED], 1), "counters"),
        (lambda txn, keys: txn.add(keys.deferred, 1), "counters"),
        (lambda txn, keys: txn.put(keys.states[DispatchStatus.FAILED] + b"x", b"r"), "requests by state"),
        (lambda txn, keys: txn.put(keys.marks + b"x", b"r9"), "marks"),
        (lambda txn, keys: txn.put(CURSOR, codec.pack(ReplayState(9, 9))), "cursor of the leader"),
    ],
    ids=["counter", "deferred", "index", "mark", "cursor"],
)  # fmt: skip
def test_consistency_check_finds_a_corrupted_derived_row(
    sim_store: Store, spoilt: Any, what: str
) -> None:
    request_in_state(sim_store, DispatchStatus.NOTIFIED)
    keys = dispatch_log.keys_of(U)
    sim_store.transact(lambda txn: spoilt(txn, keys) and None)
    differences = sim_store.read(lambda txn: list(consistency.check_dispatches(txn, U)))
    assert [one.what for one in differences] == [what]


def test_expired_requests_leave_no_derived_rows(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for n in range(4):
        log.request(f"old-{n}", "work")
        log.failed(f"old-{n}", "no")
    clock.advance(dispatch_log.ENDED_KEPT_NS + S)
    log.request("new", "work")
    assert sim_store.read(lambda txn: list(consistency.check_dispatches(txn, U))) == []


# -- bounds ----------------------------------------------------------------------------------------


def test_new_requests_expire_requests_that_ended_long_ago(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for n in range(10):
        log.request(f"old-{n}", "work")
        log.failed(f"old-{n}", "no")
    clock.advance(dispatch_log.ENDED_KEPT_NS + S)
    for n in range(3):
        log.request(f"new-{n}", "work")
    assert log.backlog() == DispatchBacklog(pending=3)
    assert sim_store.read(dispatch_log.find_by_mark, U, mark_of("old-0")) is None
    assert {one.request_id for one in list_records(sim_store)} == {"new-0", "new-1", "new-2"}


def test_unacknowledged_request_fails_after_its_time_limit(
    log: DispatchLog, clock: SimClock
) -> None:
    log.request("r1", "work")
    log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    clock.advance(dispatch_log.ACKNOWLEDGED_WITHIN_NS + S)
    log.request("r2", "work")
    found = log.find("r1")
    assert found is not None
    assert (found.status.value, found.reason) == ("failed", "unacknowledged")


def test_pending_request_never_expires(log: DispatchLog, clock: SimClock) -> None:
    log.request("r1", "leader")
    clock.advance(10 * dispatch_log.ENDED_KEPT_NS)
    log.request("r2", "leader")
    assert log.backlog() == DispatchBacklog(pending=2)


def test_dispatch_log_is_truncated_below_the_cursor(
    log: DispatchLog, sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "LOG_KEPT", 20)
    monkeypatch.setattr(dispatch_log, "LOG_CUT_EVERY", 10)
    for n in range(100):
        log.request(f"r{n}", "work")
    head = sim_store.read(journal.head, f"{U}/dispatch")
    assert head.height == 100
    assert 70 <= head.floor <= 81
    sim_store.read(journal.verify, f"{U}/dispatch")


def test_dispatch_log_is_not_truncated_above_the_cursor(
    log: DispatchLog, sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "LOG_KEPT", 20)
    monkeypatch.setattr(dispatch_log, "LOG_CUT_EVERY", 10)
    sim_store.transact(notifications.subscribe, U)
    for n in range(100):
        log.request(f"r{n}", "work")
    assert [one.height for one in sim_store.read(notifications.next_events, U, 1000)] == list(
        range(1, 101)
    )


def test_request_is_overloaded_when_the_leader_is_too_far_behind(
    log: DispatchLog, sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "PENDING_MAX", 3)
    sim_store.transact(notifications.subscribe, U)
    for n in range(3):
        log.request(f"r{n}", "work")
    with pytest.raises(Overloaded) as error:
        log.request("r3", "work")
    assert error.value.retryable
    assert error.value.retry_after_s > 0
    sim_store.transact(notifications.advance, U, 0, 3, [])
    log.request("r3", "work")


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "target", "metadata"),
    [
        ("", "work", {}),
        ("x" * 151, "work", {}),
        ("r1", "", {}),
        ("r1", "x" * 201, {}),
        ("r1", "work", {"much": "x" * 5000}),
    ],
)
def test_bad_request_is_invalid_and_stores_nothing(
    log: DispatchLog, request_id: str, target: str, metadata: dict[str, str]
) -> None:
    with pytest.raises(Invalid):
        log.request(request_id, target, metadata)
    assert log.backlog() == DispatchBacklog()


def test_delivered_of_an_unknown_request_is_not_found(log: DispatchLog) -> None:
    with pytest.raises(NotFound):
        log.delivered("r1")


def test_request_id_of_an_effect_contains_its_intent_hash() -> None:
    intent = Intent(
        universe_id=U,
        world_id="w",
        intent_hash=bytes(range(32)),
        effect_kind="agent.dispatch",
        params=b"",
        origin_name="A/a",
        policy_context_hash=b"",
        enqueued_at_ns=0,
        generation=3,
    )
    assert intent_hash_of(request_id_of(intent)) == bytes(range(32))
    for other in ("r1", "3-abc", "x-" + "0" * 64, "3-" + "g" * 64):
        assert intent_hash_of(other) is None


# -- state machine ---------------------------------------------------------------------------------


class DispatchLogMachine(RuleBasedStateMachine):
    """Any order of requests, moves and abandons: counters, indexes and log agree with the records."""

    ids = st.sampled_from(["r1", "r2", "r3"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store: Any = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.log = DispatchLog(self.store, U)

    @rule(request_id=ids, to=st.sampled_from(["work", "leader"]))
    def request(self, request_id: str, to: str) -> None:
        try:
            self.log.request(request_id, to)
        except KeyConflict:
            found = self.log.find(request_id)
            assert found is not None
            assert found.target != to

    @rule(request_id=ids, transition=st.sampled_from(QueueTransition), seconds=st.integers(0, 3))
    def move(self, request_id: str, transition: QueueTransition, seconds: int) -> None:
        self.clock.advance(seconds * S)
        before = self.log.find(request_id)
        try:
            self.store.transact(dispatch_log.move, U, request_id, transition, transition.value)
        except NotFound:
            assert before is None
        except InvalidTransition:
            assert before is not None
            assert not DISPATCH.allows(before.status, transition)
            assert self.log.find(request_id) == before

    @rule(request_id=ids)
    def abandon(self, request_id: str) -> None:
        self.store.transact(dispatch_log.abandon, U, request_id, "given up")

    @invariant()
    def log_and_derived_rows_agree(self) -> None:
        require_consistent(self.store)

    def teardown(self) -> None:
        self.store.close()


TestDispatchLogMachine = DispatchLogMachine.TestCase
TestDispatchLogMachine.settings = settings(max_examples=40, stateful_step_count=30)
