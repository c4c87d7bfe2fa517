"""Document 000, its chapters on backlog, replay and dispatch, rule by rule, in its order.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.adapters import agent as typing
from holdfast.adapters.agent import marked
from holdfast.adapters.dispatching import (
    Dispatching,
    LeaderMissing,
    Request,
    Unconfirmed,
    UnconfirmedYet,
    name_leader,
)
from holdfast.authority import dispatch_log, replay
from holdfast.authority.dispatch import (
    DISPATCH,
    Backlog,
    DispatchRecord,
    DispatchStatus,
    InvalidTransition,
    mark_of,
)
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import (
    OUTCOMES,
    DispatchOutcomeReason,
    QueueTransition,
    WorkerCli,
    transition_of,
)
from holdfast.authority.readiness import Reason
from holdfast.clock import S, SimClock
from holdfast.config import WriterLimits
from holdfast.roles.dispatcher import Dispatcher
from holdfast.roles.readiness import look
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from tests.authority.rig import U, acquire
from tests.durable.conftest import SIMULATED
from tests.panes import TmuxServer, tmux
from tests.process.watch import until

__all__ = ["tmux"]

MODULES = ("holdfast.authority.dispatch", "holdfast.authority.dispatch_log")
REPLAY = "Replay / recovery"
CLASSES = "Dispatch classification"

LIMITS = WriterLimits(linger_s=0.2)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=list(SIMULATED))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from SIMULATED[request.param](tmp_path, clock)


@pytest.fixture
def log(store: Store) -> DispatchLog:
    return DispatchLog(store, U)


def notify(log: DispatchLog, request_id: str = "r1") -> DispatchRecord:
    return log.concluded(request_id, DispatchOutcomeReason.CONFIRMED, retries_left=0)


def request(tmux: TmuxServer, target: str = "worker", **more: object) -> Request:
    given: dict[str, object] = {"cli": WorkerCli.CLAUDE, "socket": tmux.socket, "metadata": {}}
    return Request(request_id="r1", target=target, text="hello", **{**given, **more})  # type: ignore[arg-type]


def remove_records(txn: Txn) -> None:
    """Take all records and their places away, and leave the counters."""
    keys = dispatch_log.keys_of(U)
    counters = {*keys.counts.values(), keys.deferred}
    root = schema.prefix(schema.Space.APP_STATE, "dispatch", U)
    rows = txn.scan(root, tuples.after(root))
    assert len(rows) > 10
    for key, _ in rows:
        if key not in counters:
            txn.delete(key)


# -- Backlog ---------------------------------------------------------------------------------------


@pytest.mark.spec("000", "Backlog", "work that is new is pending")
def test_a_new_request_is_pending(log: DispatchLog) -> None:
    assert log.request("r1", "work").status is DispatchStatus.PENDING
    assert log.backlog().pending == 1


@pytest.mark.spec("000", "Backlog", "a notification moves work on from pending to notified")
def test_a_notification_moves_a_pending_request(log: DispatchLog) -> None:
    log.request("r1", "work")
    assert notify(log).status is DispatchStatus.NOTIFIED
    assert (log.backlog().pending, log.backlog().notified) == (0, 1)


@pytest.mark.spec("000", "Backlog", "completion makes of notified work delivered or failed work")
@pytest.mark.parametrize("end", ["delivered", "failed"])
def test_a_notified_request_ends_delivered_or_failed(log: DispatchLog, end: str) -> None:
    log.request("r1", "work")
    notify(log)
    ended = log.delivered("r1") if end == "delivered" else log.failed("r1", "no")
    assert ended.status.value == end
    assert (ended.deferred, ended.events) == (False, 3)
    assert log.find("r1") == ended
    # It is counted there and nowhere else.
    counted = {"pending": 0, "notified": 0, "delivered": 0, "failed": 0, "deferred": 0, end: 1}
    assert log.backlog() == Backlog(**counted)


@pytest.mark.spec(
    "000",
    "Backlog",
    "the four counts are in the runtime's snapshot, kept with every change (ours: and never counted"
    " by going over records)",
    module="holdfast.roles.readiness",
)
def test_the_snapshot_counts_requests_by_state(store: Store, log: DispatchLog) -> None:
    for n in range(10):
        log.request(f"r{n}", "work")
    for n in range(6):
        notify(log, f"r{n}")
    for n in range(3):
        log.delivered(f"r{n}")
    log.failed("r9", "no")
    expected = {"pending": 3, "notified": 3, "delivered": 3, "failed": 1}

    def counted() -> dict[str, int]:
        told = look(store, U).backlog
        return {name: told[name] for name in expected}

    assert counted() == expected
    # Without a single record the counts are the same: they are kept, not counted again.
    store.transact(remove_records)
    assert log.find("r1") is None
    assert counted() == expected


@pytest.mark.spec(
    "000", "Backlog", "each request is tracked: id, target, status and the time of each status"
)
def test_a_record_tells_id_target_status_and_times(log: DispatchLog, clock: SimClock) -> None:
    log.request("r1", "work:0.1")
    clock.advance(S)
    notify(log)
    clock.advance(S)
    log.delivered("r1")
    found = log.find("r1")
    assert found is not None
    assert (found.request_id, found.target, found.status.value) == ("r1", "work:0.1", "delivered")
    times = (found.created_at, found.notified_at, found.delivered_at)
    assert times == tuple(sorted(set(filter(None, times)))), "each later than the one before"
    assert found.failed_at is None


@pytest.mark.spec(
    "000", "Backlog", "a move that is not allowed is a typed error and changes nothing"
)
def test_pending_work_is_not_delivered(log: DispatchLog) -> None:
    made = log.request("r1", "work")
    with pytest.raises(InvalidTransition) as error:
        log.delivered("r1")
    assert (error.value.prior, error.value.attempted) == ("PENDING", "DELIVERED")
    assert log.find("r1") == made


@pytest.mark.spec("000", "Backlog", "what has ended stays as it ended")
@pytest.mark.parametrize("end", [DispatchStatus.DELIVERED, DispatchStatus.FAILED])
def test_nothing_moves_what_has_ended(end: DispatchStatus) -> None:
    assert not [move for move in QueueTransition if DISPATCH.allows(end, move)]


@pytest.mark.spec(
    "000",
    "Backlog",
    "work that cannot be handed over fails without having been notified (ours: from the outcomes)",
)
def test_pending_work_may_fail(log: DispatchLog) -> None:
    log.request("r1", "work")
    failed = log.concluded("r1", DispatchOutcomeReason.TARGET_MISSING, retries_left=3)
    assert (failed.status, failed.notified_at) == (DispatchStatus.FAILED, None)


# -- Replay / recovery -----------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    REPLAY,
    "replay goes by a cursor that outlives the process",
    module="holdfast.authority.replay",
)
def test_the_cursor_is_there_after_a_restart(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(replay.follow, U)
        for name in "abc":
            DispatchLog(store, U).request(name, "work")
        store.transact(replay.advance, U, 0, 2, ["a/0", "b/0"])
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        [left] = store.read(replay.ahead, U, 10)
        assert (left.height, left.event.event_id) == (3, "c/0")


@pytest.mark.spec(
    "000",
    REPLAY,
    "what is replayed is known by its event id, after a restart too; the memory is bounded (ours)",
    module="holdfast.authority.replay",
)
def test_a_replayed_event_is_recognised(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(replay.follow, U)
        DispatchLog(store, U).request("a", "work")
        store.transact(replay.advance, U, 0, 1, ["a/0"])
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(replay.rewind, U, 0)
        [again] = store.read(replay.ahead, U, 10)
        assert again.seen


@pytest.mark.spec(
    "000",
    REPLAY,
    "that a leader was not notified is tracked with its reason, until it is cleared",
    module=("holdfast.authority.replay", "holdfast.roles.readiness"),
)
def test_an_observer_sees_why_the_leader_was_not_told(store: Store) -> None:
    acquire(store)
    store.transact(replay.follow, U)
    store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    [blocker] = look(store, U).reasons
    assert (blocker.reason, blocker.code, blocker.text) == (
        Reason.NOTIFICATION_DEFERRED,
        "leader_missing",
        "no pane",
    )
    store.transact(replay.clear_deferred, U)
    assert look(store, U).ready


@pytest.mark.spec(
    "000",
    REPLAY,
    "a notification that was deferred stays pending, and is made when it can be (ours: R2)",
    module="holdfast.roles.dispatcher",
)
def test_a_deferred_notification_is_made_later(tmux: TmuxServer) -> None:
    with stores.open("memory:") as store:
        log = DispatchLog(store, U)
        dispatcher = Dispatcher(store, universe=U, worker="w", incarnation="1")
        name_leader(store, U, pane="lead", socket=tmux.socket)
        log.request("r1", "work")
        log.failed("r1", "no")
        dispatcher.tick()
        assert store.read(replay.pending, U) == 2
        agent = tmux.agent("lead")
        name_leader(store, U, pane=agent.pane_id, socket=tmux.socket)
        dispatcher._retry_at_ns = 0
        dispatcher.tick()
        assert store.read(replay.pending, U) == 0
        until(lambda: agent.texts, "the notice")
        assert len(agent.texts) == 1


# -- Readiness, of what is replayed and dispatched ---------------------------------------------------


@pytest.mark.spec(
    "000",
    "Readiness",
    "events that wait to be replayed make the runtime unready, and it says how many",
    module="holdfast.roles.readiness",
)
def test_events_that_wait_are_a_blocker(store: Store, log: DispatchLog) -> None:
    acquire(store)
    store.transact(replay.follow, U)
    log.request("r1", "work")
    log.failed("r1", "no")
    [blocker] = look(store, U).reasons
    assert (blocker.reason, blocker.text.split()[0]) == (Reason.REPLAY_PENDING, "2")


# -- Dispatch classification -------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    CLASSES,
    "the program in a pane decides how a text is submitted: claude by one press, others by two",
    module=("holdfast.authority.outcome", "holdfast.adapters.agent"),
)
@pytest.mark.parametrize(("cli", "presses"), [("claude", 1), ("codex", 2), ("another", 2)])
def test_each_program_is_submitted_to_in_its_way(tmux: TmuxServer, cli: str, presses: int) -> None:
    agent = tmux.agent("worker", "framed")
    with stores.open("memory:") as store:
        Dispatching(store, U).run(request(tmux, cli=WorkerCli.named(cli)))
    # What is pressed after it comes after it: so the presses of the dispatch are all there.
    tmux.run("send-keys", "-t", agent.pane_id, "-l", "end")
    tmux.run("send-keys", "-t", agent.pane_id, "Enter")
    until(lambda: "end" in agent.submitted, "the end")
    text = marked("hello", mark_of("r1"))
    assert agent.submitted == [text, *[""] * (presses - 1), "end"]


@pytest.mark.spec(
    "000",
    CLASSES,
    "every outcome is classified: handed over, to be tried again, held back, failed",
    module="holdfast.authority.outcome",
)
def test_every_reason_leads_to_one_transition() -> None:
    assert set(OUTCOMES) == set(DispatchOutcomeReason)
    found = {
        transition_of(reason, retries_left=left)
        for reason in DispatchOutcomeReason
        for left in (0, 1)
    }
    assert found == {
        QueueTransition.NOTIFIED,
        QueueTransition.RETRIED,
        QueueTransition.DEFERRED,
        QueueTransition.FAILED,
    }


@pytest.mark.spec(
    "000",
    CLASSES,
    "a request for a leader that is missing stays pending, and is tried when there is a pane",
    module="holdfast.adapters.dispatching",
)
def test_a_missing_leader_is_waited_for(tmux: TmuxServer) -> None:
    with stores.open("memory:") as store:
        dispatching = Dispatching(store, U)
        name_leader(store, U, pane="lead", socket=tmux.socket)
        with pytest.raises(LeaderMissing):
            dispatching.run(request(tmux, "leader"))
        assert dispatching.log.backlog().pending == 1
        tmux.agent("lead")
        assert dispatching.run(request(tmux, "leader")).status == "delivered"


@pytest.mark.spec(
    "000",
    CLASSES,
    "what is not confirmed stays pending while there are retries, and then fails as unconfirmed",
    module="holdfast.adapters.dispatching",
)
def test_what_is_not_confirmed_is_tried_again_and_then_fails(
    tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typing, "APPEARS_S", 0.1)
    monkeypatch.setattr(typing, "TAKEN_S", 0.1)
    tmux.agent("worker", "deaf")
    with stores.open("memory:") as store:
        dispatching = Dispatching(store, U)
        with pytest.raises(UnconfirmedYet):
            dispatching.run(request(tmux, tries_max=2))
        assert dispatching.log.backlog().pending == 1
        with pytest.raises(Unconfirmed):
            dispatching.run(request(tmux, tries_max=2))
        found = dispatching.log.find("r1")
        assert found is not None
        assert (found.status, found.reason) == (DispatchStatus.FAILED, "unconfirmed")


@pytest.mark.spec(
    "000",
    CLASSES,
    "a target that is missing or cannot be resolved, a failed preflight and a failed send are final",
    module="holdfast.authority.outcome",
)
@pytest.mark.parametrize(
    "reason",
    [
        DispatchOutcomeReason.TARGET_MISSING,
        DispatchOutcomeReason.TARGET_UNRESOLVED,
        DispatchOutcomeReason.PREFLIGHT_FAILED,
        DispatchOutcomeReason.SEND_FAILED,
    ],
)
def test_these_outcomes_fail_however_many_retries_are_left(
    log: DispatchLog, reason: DispatchOutcomeReason
) -> None:
    log.request("r1", "work")
    ended = log.concluded("r1", reason, retries_left=9)
    assert (ended.status, ended.reason) == (DispatchStatus.FAILED, reason.value)


def test_the_log_tells_the_same_as_the_records(store: Store, log: DispatchLog) -> None:
    log.request("r1", "work")
    log.tried("r1")
    notify(log)
    log.delivered("r1")
    told = dispatch_log.rebuilt(store.read(dispatch_log.events, U, 0, 100))
    assert told == {"r1": log.find("r1")}
