"""Dispatches: moves by the table, records and counters and log in one, and bounds on all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.authority import dispatch_log, dispatch_recount, replay
from holdfast.authority.dispatch import (
    DISPATCH,
    Backlog,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    InvalidTransition,
    begun,
    intent_hash_of,
    mark_of,
    request_id_of,
    requested,
)
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason, QueueTransition
from holdfast.authority.replay import ReplayState
from holdfast.clock import S, SimClock
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
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = ("holdfast.authority.dispatch", "holdfast.authority.dispatch_log")

U = "bank"
CURSOR = schema.prefix(schema.Space.APP_STATE, "replay", U, "state")
# How a request gets into each state.
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


def in_state(store: Store, status: DispatchStatus, request_id: str = "r1") -> DispatchRecord:
    record = DispatchLog(store, U).request(request_id, "work")
    for transition in PATHS[status]:
        record = store.transact(dispatch_log.move, U, request_id, transition, "")
    return record


def events(store: Store) -> list[DispatchEvent]:
    return store.read(dispatch_log.events, U, 0, 10_000)


def every(store: Store) -> list[DispatchRecord]:
    return [
        record
        for status in DispatchStatus
        for record in store.read(dispatch_log.listed, U, status, None, 10_000)
    ]


def require_all_agree(store: Store) -> None:
    """Counters are a recount, the log tells the records, and every record is found where it is."""
    assert store.read(lambda txn: list(dispatch_recount.differences(txn, U))) == []
    records = every(store)
    counted = Counter(record.status.value for record in records)
    deferred = sum(record.deferred for record in records)
    assert store.read(dispatch_log.backlog, U) == Backlog(**counted, deferred=deferred)
    assert dispatch_log.rebuilt(events(store)) == {one.request_id: one for one in records}
    for record in records:
        assert store.read(dispatch_log.find, U, record.request_id) == record
        assert store.read(dispatch_log.by_mark, U, mark_of(record.request_id)) == record


# -- the table -------------------------------------------------------------------------------------


def test_the_table_is_sound() -> None:
    assert not DISPATCH.unreachable()
    assert DISPATCH.terminal == {DispatchStatus.DELIVERED, DispatchStatus.FAILED}


@pytest.mark.parametrize(("status", "transition"), PAIRS)
def test_every_move_is_made_or_refused_as_the_table_says(
    sim_store: Store, status: DispatchStatus, transition: QueueTransition
) -> None:
    was = in_state(sim_store, status)
    expected = DISPATCH.table.get((status, transition))
    told = len(events(sim_store))
    if expected is None:
        with pytest.raises(InvalidTransition) as error:
            sim_store.transact(dispatch_log.move, U, "r1", transition, "why")
        assert error.value.fields["prior"] == status.name
        assert error.value.fields["attempted"] == transition.name
        assert (error.value.request_id, error.value.target) == ("r1", "work")
        assert sim_store.read(dispatch_log.find, U, "r1") == was
        assert len(events(sim_store)) == told
    else:
        now = sim_store.transact(dispatch_log.move, U, "r1", transition, "why")
        assert (now.status, now.reason) == (expected, "why")
        assert len(events(sim_store)) == told + 1
    require_all_agree(sim_store)


@pytest.mark.parametrize(("status", "transition"), PAIRS)
def test_the_fold_moves_as_the_table_does(
    status: DispatchStatus, transition: QueueTransition
) -> None:
    record = begun(requested("r1", "work", 5, {}, ""))
    record = msgspec.structs.replace(record, status=status)
    event = DispatchEvent("r1/1", "r1", "work", transition, status, 7, "why")
    if DISPATCH.allows(status, transition):
        assert record.after(event).status is DISPATCH.table[status, transition]
    else:
        with pytest.raises(IllegalTransition):
            record.after(event)


def test_the_error_keeps_its_class_between_processes() -> None:
    assert type(from_wire(to_wire(InvalidTransition(request_id="r")))) is InvalidTransition


# -- records ---------------------------------------------------------------------------------------


def test_each_state_has_its_time(log: DispatchLog, clock: SimClock) -> None:
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


def test_a_failure_has_its_time_and_reason(log: DispatchLog) -> None:
    log.request("r1", "work")
    failed = log.failed("r1", "nobody reads there")
    assert failed.failed_at is not None
    assert (failed.reason, failed.delivered_at) == ("nobody reads there", None)


def test_the_same_request_again_is_the_one_there_is(log: DispatchLog, sim_store: Store) -> None:
    log.request("r1", "work", digest="abc")
    failed = log.failed("r1", "no")
    assert log.request("r1", "work", digest="abc") == failed
    assert log.backlog() == Backlog(failed=1)


@pytest.mark.parametrize("other", [("elsewhere", "abc"), ("work", "abd")])
def test_the_same_id_for_another_request_is_a_conflict(
    log: DispatchLog, other: tuple[str, str]
) -> None:
    made = log.request("r1", "work", digest="abc")
    with pytest.raises(KeyConflict):
        log.request("r1", other[0], digest=other[1])
    assert log.find("r1") == made


def test_tries_are_counted_and_keep_the_reason(log: DispatchLog) -> None:
    log.request("r1", "work")
    log.tried("r1")
    log.concluded("r1", DispatchOutcomeReason.UNCONFIRMED, retries_left=1)
    record = log.tried("r1")
    assert (record.tries, record.reason, record.status.value) == (2, "unconfirmed", "pending")


def test_a_deferred_request_is_pending_and_counted_until_it_is_tried(log: DispatchLog) -> None:
    log.request("r1", "leader")
    record = log.concluded("r1", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    assert (record.status.value, record.reason, record.deferred) == (
        "pending", "leader_missing", True,
    )  # fmt: skip
    assert log.backlog() == Backlog(pending=1, deferred=1)
    log.tried("r1")
    assert log.backlog() == Backlog(pending=1)


@pytest.mark.parametrize("status", list(DispatchStatus))
def test_only_a_pending_request_is_abandoned(sim_store: Store, status: DispatchStatus) -> None:
    was = in_state(sim_store, status)
    pending = status is DispatchStatus.PENDING
    assert sim_store.transact(dispatch_log.abandon, U, "r1", "cancelled") is pending
    now = sim_store.read(dispatch_log.find, U, "r1")
    assert now is not None
    assert now.reason == "cancelled" if pending else now == was
    require_all_agree(sim_store)


def test_requests_are_listed_by_the_time_they_came_into_their_state(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for name in "cab":
        log.request(name, "work")
        clock.advance(S)
    for name in "bca":
        log.failed(name, "no")
        clock.advance(S)
    found = sim_store.read(dispatch_log.listed, U, DispatchStatus.FAILED, None, 2)
    assert [one.request_id for one in found] == ["b", "c"]
    rest = sim_store.read(dispatch_log.listed, U, DispatchStatus.FAILED, found[-1], 2)
    assert [one.request_id for one in rest] == ["a"]


def test_universes_have_logs_of_their_own(log: DispatchLog, sim_store: Store) -> None:
    log.request("r1", "work")
    other = DispatchLog(sim_store, "shop")
    assert (other.find("r1"), other.backlog()) == (None, Backlog())


# -- a recount -------------------------------------------------------------------------------------


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
def test_a_recount_finds_what_does_not_fit(sim_store: Store, spoilt: Any, what: str) -> None:
    in_state(sim_store, DispatchStatus.NOTIFIED)
    keys = dispatch_log.keys_of(U)
    sim_store.transact(lambda txn: spoilt(txn, keys) and None)
    found = sim_store.read(lambda txn: list(dispatch_recount.differences(txn, U)))
    assert [one.what for one in found] == [what]


def test_removed_requests_leave_nothing_behind(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for n in range(4):
        log.request(f"old-{n}", "work")
        log.failed(f"old-{n}", "no")
    clock.advance(dispatch_log.KEPT_NS + S)
    log.request("new", "work")
    assert sim_store.read(lambda txn: list(dispatch_recount.differences(txn, U))) == []


# -- bounds ----------------------------------------------------------------------------------------


def test_what_ended_long_ago_is_removed_by_those_that_come(
    log: DispatchLog, sim_store: Store, clock: SimClock
) -> None:
    for n in range(10):
        log.request(f"old-{n}", "work")
        log.failed(f"old-{n}", "no")
    clock.advance(dispatch_log.KEPT_NS + S)
    for n in range(3):
        log.request(f"new-{n}", "work")
    assert log.backlog() == Backlog(pending=3)
    assert sim_store.read(dispatch_log.by_mark, U, mark_of("old-0")) is None
    assert {one.request_id for one in every(sim_store)} == {"new-0", "new-1", "new-2"}


def test_what_nobody_acknowledges_fails_in_the_end(log: DispatchLog, clock: SimClock) -> None:
    log.request("r1", "work")
    log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    clock.advance(dispatch_log.ACKNOWLEDGED_WITHIN_NS + S)
    log.request("r2", "work")
    found = log.find("r1")
    assert found is not None
    assert (found.status.value, found.reason) == ("failed", "unacknowledged")


def test_a_pending_request_is_never_removed(log: DispatchLog, clock: SimClock) -> None:
    log.request("r1", "leader")
    clock.advance(10 * dispatch_log.KEPT_NS)
    log.request("r2", "leader")
    assert log.backlog() == Backlog(pending=2)


def test_the_log_is_cut_behind_what_the_leader_knows(
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


def test_the_log_is_not_cut_above_the_cursor(
    log: DispatchLog, sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "LOG_KEPT", 20)
    monkeypatch.setattr(dispatch_log, "LOG_CUT_EVERY", 10)
    sim_store.transact(replay.follow, U)
    for n in range(100):
        log.request(f"r{n}", "work")
    assert [one.height for one in sim_store.read(replay.ahead, U, 1000)] == list(range(1, 101))


def test_a_leader_that_is_too_far_behind_makes_requests_wait(
    log: DispatchLog, sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "PENDING_MAX", 3)
    sim_store.transact(replay.follow, U)
    for n in range(3):
        log.request(f"r{n}", "work")
    with pytest.raises(Overloaded) as error:
        log.request("r3", "work")
    assert error.value.retryable
    assert error.value.retry_after_s > 0
    sim_store.transact(replay.advance, U, 0, 3, [])
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
def test_a_bad_request_is_invalid_and_leaves_nothing(
    log: DispatchLog, request_id: str, target: str, metadata: dict[str, str]
) -> None:
    with pytest.raises(Invalid):
        log.request(request_id, target, metadata)
    assert log.backlog() == Backlog()


def test_a_request_that_nobody_made_is_not_found(log: DispatchLog) -> None:
    with pytest.raises(NotFound):
        log.delivered("r1")


def test_a_request_names_its_effect_and_only_then() -> None:
    intent = Intent(U, "w", bytes(range(32)), "agent.dispatch", b"", "A/a", b"", 0, generation=3)
    assert intent_hash_of(request_id_of(intent)) == bytes(range(32))
    for other in ("r1", "3-abc", "x-" + "0" * 64, "3-" + "g" * 64):
        assert intent_hash_of(other) is None


# -- any history -----------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Whatever is asked, in whatever order: all that is derived agrees."""

    ids = st.sampled_from(["r1", "r2", "r3"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store: Any = LocalStore("memory:", MemoryBackend(), self.clock)
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
        was = self.log.find(request_id)
        try:
            self.store.transact(dispatch_log.move, U, request_id, transition, transition.value)
        except NotFound:
            assert was is None
        except InvalidTransition:
            assert was is not None
            assert not DISPATCH.allows(was.status, transition)
            assert self.log.find(request_id) == was

    @rule(request_id=ids)
    def abandon(self, request_id: str) -> None:
        self.store.transact(dispatch_log.abandon, U, request_id, "given up")

    @invariant()
    def all_agree(self) -> None:
        require_all_agree(self.store)

    def teardown(self) -> None:
        self.store.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=30)
