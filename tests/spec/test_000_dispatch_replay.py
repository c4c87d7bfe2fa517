"""Document 000, chapters on backlog, replay and dispatch, rule by rule, in document order.

Where the design differs from the document, the test checks the design and its rule text names the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.adapters import pane_prompter as typing
from holdfast.adapters.dispatch_protocol import (
    DispatchProtocol,
    LeaderMissing,
    NotConfirmedYet,
    PromptRequest,
    Unconfirmed,
    set_leader_pane,
)
from holdfast.adapters.pane_prompter import with_marker
from holdfast.clock import S, SimClock
from holdfast.config import WriterLimits
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch import notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import (
    OUTCOMES,
    DispatchOutcomeReason,
    QueueTransition,
    WorkerCli,
    transition_of,
)
from holdfast.dispatch.request import (
    DISPATCH,
    DispatchBacklog,
    DispatchRecord,
    DispatchStatus,
    InvalidTransition,
    mark_of,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.workers.dispatch.dispatcher import Dispatcher
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import read_readiness
from tests.durable.conftest import SIMULATED
from tests.leadership.rig import U, acquire
from tests.process.watch import until
from tests.tmux_panes import TmuxServer, tmux

__all__ = ["tmux"]

MODULES = ("holdfast.dispatch.request", "holdfast.dispatch.log")
REPLAY_SECTION = "Replay / recovery"
CLASSIFICATION_SECTION = "Dispatch classification"

LIMITS = WriterLimits(idle_exit_s=0.2)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=list(SIMULATED))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from SIMULATED[request.param](tmp_path, clock)


@pytest.fixture
def log(store: Store) -> DispatchLog:
    return DispatchLog(store, U)


def conclude_confirmed(log: DispatchLog, request_id: str = "r1") -> DispatchRecord:
    return log.concluded(request_id, DispatchOutcomeReason.CONFIRMED, retries_left=0)


def build_request(tmux: TmuxServer, target: str = "worker", **overrides: object) -> PromptRequest:
    defaults: dict[str, object] = {"cli": WorkerCli.CLAUDE, "socket": tmux.socket, "metadata": {}}
    return PromptRequest(request_id="r1", target=target, text="hello", **{**defaults, **overrides})  # type: ignore[arg-type]


def remove_records(txn: Txn) -> None:
    """Delete all records and their index rows, but not the counters."""
    keys = dispatch_log.keys_of(U)
    counters = {*keys.counts.values(), keys.deferred}
    root = schema.key_prefix(schema.Space.APP_STATE, "dispatch", U)
    rows = txn.scan(root, tuples.prefix_end(root))
    assert len(rows) > 10
    for key, _ in rows:
        if key not in counters:
            txn.delete(key)


# -- Backlog ---------------------------------------------------------------------------------------


@pytest.mark.spec("000", "Backlog", "a new dispatch request is pending")
def test_new_dispatch_request_is_pending(log: DispatchLog) -> None:
    assert log.request("r1", "work").status is DispatchStatus.PENDING
    assert log.backlog().pending == 1


@pytest.mark.spec(
    "000", "Backlog", "a confirmed notification moves a dispatch request from pending to notified"
)
def test_confirmed_dispatch_moves_from_pending_to_notified(log: DispatchLog) -> None:
    log.request("r1", "work")
    assert conclude_confirmed(log).status is DispatchStatus.NOTIFIED
    assert (log.backlog().pending, log.backlog().notified) == (0, 1)


@pytest.mark.spec(
    "000", "Backlog", "completion moves a notified dispatch request to delivered or failed"
)
@pytest.mark.parametrize("end", ["delivered", "failed"])
def test_notified_dispatch_ends_delivered_or_failed(log: DispatchLog, end: str) -> None:
    log.request("r1", "work")
    conclude_confirmed(log)
    ended = log.delivered("r1") if end == "delivered" else log.failed("r1", "no")
    assert ended.status.value == end
    assert (ended.deferred, ended.events) == (False, 3)
    assert log.find("r1") == ended
    # It is counted under its final status only.
    counted = {"pending": 0, "notified": 0, "delivered": 0, "failed": 0, "deferred": 0, end: 1}
    assert log.backlog() == DispatchBacklog(**counted)


@pytest.mark.spec(
    "000",
    "Backlog",
    "the readiness snapshot has a stored count for each dispatch status and never scans the records",
    module="holdfast.workers.readiness_facts",
)
def test_readiness_snapshot_counts_dispatches_by_status(store: Store, log: DispatchLog) -> None:
    for n in range(10):
        log.request(f"r{n}", "work")
    for n in range(6):
        conclude_confirmed(log, f"r{n}")
    for n in range(3):
        log.delivered(f"r{n}")
    log.failed("r9", "no")
    expected = {"pending": 3, "notified": 3, "delivered": 3, "failed": 1}

    def counted() -> dict[str, int]:
        backlog = read_readiness(store, U).backlog
        return {name: backlog[name] for name in expected}

    assert counted() == expected
    # The counts do not depend on the records: they are maintained, not recounted.
    store.transact(remove_records)
    assert log.find("r1") is None
    assert counted() == expected


@pytest.mark.spec(
    "000",
    "Backlog",
    "a dispatch record has the request id, the target, the status and the time of each status",
)
def test_dispatch_record_has_id_target_status_and_times(log: DispatchLog, clock: SimClock) -> None:
    log.request("r1", "work:0.1")
    clock.advance(S)
    conclude_confirmed(log)
    clock.advance(S)
    log.delivered("r1")
    record = log.find("r1")
    assert record is not None
    assert (record.request_id, record.target, record.status.value) == (
        "r1",
        "work:0.1",
        "delivered",
    )
    times = (record.created_at, record.notified_at, record.delivered_at)
    assert times == tuple(sorted(set(filter(None, times)))), "each later than the one before"
    assert record.failed_at is None


@pytest.mark.spec(
    "000", "Backlog", "a forbidden status transition raises a typed error and changes nothing"
)
def test_delivered_on_a_pending_dispatch_raises_invalid_transition(log: DispatchLog) -> None:
    record = log.request("r1", "work")
    with pytest.raises(InvalidTransition) as error:
        log.delivered("r1")
    assert (error.value.prior, error.value.attempted) == ("PENDING", "DELIVERED")
    assert log.find("r1") == record


@pytest.mark.spec(
    "000", "Backlog", "a delivered or failed dispatch request never changes its status"
)
@pytest.mark.parametrize("end", [DispatchStatus.DELIVERED, DispatchStatus.FAILED])
def test_ended_dispatch_allows_no_transition(end: DispatchStatus) -> None:
    assert not [move for move in QueueTransition if DISPATCH.allows(end, move)]


@pytest.mark.spec(
    "000",
    "Backlog",
    "a pending dispatch request whose prompt cannot be sent fails without the status notified (our rule)",
)
def test_pending_dispatch_may_fail(log: DispatchLog) -> None:
    log.request("r1", "work")
    failed = log.concluded("r1", DispatchOutcomeReason.TARGET_MISSING, retries_left=3)
    assert (failed.status, failed.notified_at) == (DispatchStatus.FAILED, None)


# -- Replay / recovery -----------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    REPLAY_SECTION,
    "the replay cursor is durable and survives a restart of the process",
    module="holdfast.dispatch.notifications",
)
def test_replay_cursor_survives_a_restart(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(notifications.subscribe, U)
        for name in "abc":
            DispatchLog(store, U).request(name, "work")
        store.transact(notifications.advance, U, 0, 2, ["a/0", "b/0"])
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        [pending] = store.read(notifications.next_events, U, 10)
        assert (pending.height, pending.event.event_id) == (3, "c/0")


@pytest.mark.spec(
    "000",
    REPLAY_SECTION,
    "the dispatcher recognises a replayed event by its event id, also after a restart",
    module="holdfast.dispatch.notifications",
)
def test_replayed_event_is_recognised_after_a_restart(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(notifications.subscribe, U)
        DispatchLog(store, U).request("a", "work")
        store.transact(notifications.advance, U, 0, 1, ["a/0"])
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(notifications.rewind, U, 0)
        [again] = store.read(notifications.next_events, U, 10)
        assert again.handled


@pytest.mark.spec(
    "000",
    REPLAY_SECTION,
    "readiness shows why the leader notification is deferred until the deferral is cleared",
    module=("holdfast.dispatch.notifications", "holdfast.workers.readiness_facts"),
)
def test_readiness_shows_why_the_leader_notification_is_deferred(store: Store) -> None:
    acquire(store)
    store.transact(notifications.subscribe, U)
    store.transact(notifications.defer_leader_notification, U, "leader_missing", "no pane")
    [blocker] = read_readiness(store, U).reasons
    assert (blocker.reason, blocker.code, blocker.text) == (
        ReadinessReason.NOTIFICATION_DEFERRED,
        "leader_missing",
        "no pane",
    )
    store.transact(notifications.clear_deferred, U)
    assert read_readiness(store, U).ready


@pytest.mark.spec(
    "000",
    REPLAY_SECTION,
    "a deferred leader notification stays pending and is sent when the pane exists (our rule)",
    module="holdfast.workers.dispatch.dispatcher",
)
def test_deferred_leader_notification_is_sent_later(tmux: TmuxServer) -> None:
    with stores.open("memory:") as store:
        log = DispatchLog(store, U)
        dispatcher = Dispatcher(store, universe=U, worker="w", incarnation="1")
        set_leader_pane(store, U, pane="lead", socket=tmux.socket)
        log.request("r1", "work")
        log.failed("r1", "no")
        dispatcher.tick()
        assert store.read(notifications.count_pending, U) == 2
        agent = tmux.start_agent("lead")
        set_leader_pane(store, U, pane=agent.pane_id, socket=tmux.socket)
        dispatcher._retry_at_ns = 0
        dispatcher.tick()
        assert store.read(notifications.count_pending, U) == 0
        until(lambda: agent.texts, "the notice")
        assert len(agent.texts) == 1


# -- Readiness of replay and dispatch ----------------------------------------------------------------


@pytest.mark.spec(
    "000",
    "Readiness",
    "readiness has a blocker with the number of pending replay events",
    module="holdfast.workers.readiness_facts",
)
def test_pending_replay_events_are_a_readiness_blocker(store: Store, log: DispatchLog) -> None:
    acquire(store)
    store.transact(notifications.subscribe, U)
    log.request("r1", "work")
    log.failed("r1", "no")
    [blocker] = read_readiness(store, U).reasons
    assert (blocker.reason, blocker.text.split()[0]) == (ReadinessReason.REPLAY_PENDING, "2")


# -- Dispatch classification -------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    CLASSIFICATION_SECTION,
    "the program in the pane selects the number of submit key presses: one for claude, two for others",
    module=("holdfast.dispatch.outcomes", "holdfast.adapters.pane_prompter"),
)
@pytest.mark.parametrize(("cli", "presses"), [("claude", 1), ("codex", 2), ("another", 2)])
def test_submit_key_presses_depend_on_the_worker_cli(
    tmux: TmuxServer, cli: str, presses: int
) -> None:
    agent = tmux.start_agent("worker", "framed")
    with stores.open("memory:") as store:
        DispatchProtocol(store, U).run(build_request(tmux, cli=WorkerCli.named(cli)))
    # Keys arrive in order, so all key presses of the dispatch precede "end".
    tmux.run("send-keys", "-t", agent.pane_id, "-l", "end")
    tmux.run("send-keys", "-t", agent.pane_id, "Enter")
    until(lambda: "end" in agent.submitted, "the end")
    text = with_marker("hello", mark_of("r1"))
    assert agent.submitted == [text, *[""] * (presses - 1), "end"]


@pytest.mark.spec(
    "000",
    CLASSIFICATION_SECTION,
    "each dispatch outcome has one transition: notified, retried, deferred or failed",
    module="holdfast.dispatch.outcomes",
)
def test_every_dispatch_outcome_reason_has_a_transition() -> None:
    assert set(OUTCOMES) == set(DispatchOutcomeReason)
    transitions = {
        transition_of(reason, retries_left=retries_left)
        for reason in DispatchOutcomeReason
        for retries_left in (0, 1)
    }
    assert transitions == {
        QueueTransition.NOTIFIED,
        QueueTransition.RETRIED,
        QueueTransition.DEFERRED,
        QueueTransition.FAILED,
    }


@pytest.mark.spec(
    "000",
    CLASSIFICATION_SECTION,
    "a request to a missing leader stays pending, and the dispatcher retries it when the pane exists",
    module="holdfast.adapters.dispatch_protocol",
)
def test_dispatch_to_a_missing_leader_stays_pending_until_a_pane_exists(tmux: TmuxServer) -> None:
    with stores.open("memory:") as store:
        dispatching = DispatchProtocol(store, U)
        set_leader_pane(store, U, pane="lead", socket=tmux.socket)
        with pytest.raises(LeaderMissing):
            dispatching.run(build_request(tmux, "leader"))
        assert dispatching.log.backlog().pending == 1
        tmux.start_agent("lead")
        assert dispatching.run(build_request(tmux, "leader")).status == "delivered"


@pytest.mark.spec(
    "000",
    CLASSIFICATION_SECTION,
    "an unconfirmed request stays pending while retries remain, then fails with the reason unconfirmed",
    module="holdfast.adapters.dispatch_protocol",
)
def test_unconfirmed_dispatch_is_retried_and_then_fails(
    tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typing, "ECHO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(typing, "CONFIRM_TIMEOUT_S", 0.1)
    tmux.start_agent("worker", "deaf")
    with stores.open("memory:") as store:
        dispatching = DispatchProtocol(store, U)
        with pytest.raises(NotConfirmedYet):
            dispatching.run(build_request(tmux, tries_max=2))
        assert dispatching.log.backlog().pending == 1
        with pytest.raises(Unconfirmed):
            dispatching.run(build_request(tmux, tries_max=2))
        record = dispatching.log.find("r1")
        assert record is not None
        assert (record.status, record.reason) == (DispatchStatus.FAILED, "unconfirmed")


@pytest.mark.spec(
    "000",
    CLASSIFICATION_SECTION,
    "a missing or unresolvable target, a failed preflight and a failed send are final outcomes",
    module="holdfast.dispatch.outcomes",
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
def test_final_dispatch_outcomes_fail_with_retries_left(
    log: DispatchLog, reason: DispatchOutcomeReason
) -> None:
    log.request("r1", "work")
    ended = log.concluded("r1", reason, retries_left=9)
    assert (ended.status, ended.reason) == (DispatchStatus.FAILED, reason.value)


def test_dispatch_log_rebuilds_the_records(store: Store, log: DispatchLog) -> None:
    log.request("r1", "work")
    log.tried("r1")
    conclude_confirmed(log)
    log.delivered("r1")
    rebuilt = dispatch_log.rebuild(store.read(dispatch_log.events, U, 0, 100))
    assert rebuilt == {"r1": log.find("r1")}
