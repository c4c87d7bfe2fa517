"""Dispatches in a running app: executed by a pool, reconciled by the dispatcher, notified to the leader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec, failpoints
from holdfast import store as stores
from holdfast.adapters import pane_prompter as typing
from holdfast.adapters.dispatch_protocol import set_leader_pane
from holdfast.adapters.pane_prompter import with_marker
from holdfast.app.runtime import ROLES
from holdfast.clock import S
from holdfast.dispatch import leader_pane, notifications
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.dispatch.request import (
    DispatchBacklog,
    DispatchRecord,
    DispatchStatus,
    mark_of,
    request_id_of,
)
from holdfast.durable import queue
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.store.api import Store
from holdfast.workers.dispatch import dispatcher as dispatchers
from holdfast.workers.dispatch.dispatcher import Dispatcher, format_notice
from holdfast.workers.dispatch.ops import abandon_requests, expedite_deferred
from holdfast.workers.effects.receipts import redrive_effects
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import read_readiness
from holdfast.world import intents
from tests.process.watch import until
from tests.tmux_panes import PaneAgent, TmuxServer, tmux

__all__ = ["tmux"]

MODULES = (
    "holdfast.workers.dispatch.dispatcher",
    "holdfast.workers.dispatch.ops",
    "holdfast.app.builtin_effects.agent",
)

U = "crew"
HOUR_NS = 3600 * S


class Told(hf.Event):
    target: str
    text: str
    cli: str = "claude"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Stop(hf.Event):
    pass


class Foreman(hf.World):
    wanted: list[bytes] = msgspec.field(default_factory=list)
    ended: list[str] = msgspec.field(default_factory=list)
    refused: list[str] = msgspec.field(default_factory=list)

    @hf.on(Told)
    def told(self, event: Told, cx: hf.Context) -> None:
        try:
            intent = cx.do(
                hf.agent.dispatch, event.target, event.text, event.cli, event.options, tag="t"
            )
            self.wanted.append(intent.intent_hash)
        except Invalid as error:
            self.refused.append(str(error.fields.get("what")))

    @hf.on(Stop)
    def stop(self, event: Stop, cx: hf.Context) -> None:
        cx.cancel(self.wanted[-1])

    @hf.on(hf.agent.dispatch)
    def done(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None:
        told = receipt.value.status if receipt.ok else receipt.code
        self.ended.append(f"{receipt.status} {told}")


app = hf.App(U, worlds=[Foreman])


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:") as opened:
        yield opened


@pytest.fixture
def runtime(store: Store) -> Iterator[hf.Runtime]:
    with app.open(store) as running:
        yield running


@pytest.fixture
def foreman(runtime: hf.Runtime) -> hf.WorldHandle[Foreman]:
    return runtime.world(Foreman, "ada")


@pytest.fixture
def log(store: Store) -> DispatchLog:
    return DispatchLog(store, U)


@pytest.fixture
def dispatcher(store: Store) -> Dispatcher:
    """A dispatcher that the test ticks."""
    return Dispatcher(store, universe=U, worker="w", incarnation="1")


def wait_for_receipts(foreman: hf.WorldHandle[Foreman], count: int = 1) -> list[str]:
    until(lambda: len(foreman.state().ended) >= count, f"{count} receipts")
    return list(foreman.state().ended)


def list_records(store: Store, status: DispatchStatus) -> list[DispatchRecord]:
    return store.read(dispatch_log.list_by_status, U, status, None, 100)


def socket_options(tmux: TmuxServer, **more: Any) -> dict[str, Any]:
    return {"socket": tmux.socket, **more}


# -- from a world to a pane ----------------------------------------------------------------------------


def test_world_dispatches_and_gets_a_delivered_receipt(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    agent = tmux.start_agent("worker")
    foreman.send(Told("worker", "hello", "claude", socket_options(tmux, metadata={"ticket": "7"})))
    assert wait_for_receipts(foreman) == ["ok delivered"]
    [record] = list_records(store, DispatchStatus.DELIVERED)
    assert record.metadata == {"ticket": "7", "world": "ada", "tag": "t"}
    agent.expect(with_marker("hello", mark_of(record.request_id)))


def test_agent_acknowledges_a_notified_dispatch(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store, log: DispatchLog
) -> None:
    tmux.start_agent("worker")
    foreman.send(Told("worker", "hello", "claude", socket_options(tmux, acknowledge=True)))
    assert wait_for_receipts(foreman) == ["ok notified"]
    [record] = list_records(store, DispatchStatus.NOTIFIED)
    hf.agent.delivered(store, universe=U, request_id=record.request_id)
    assert log.backlog() == DispatchBacklog(delivered=1)


def test_dispatch_to_a_missing_target_fails_without_retry(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("nobody", "hello", "claude", socket_options(tmux)))
    assert wait_for_receipts(foreman) == ["error target_missing"]
    [record] = list_records(store, DispatchStatus.FAILED)
    assert (record.reason, record.tries) == ("target_missing", 0)


def test_unconfirmed_dispatch_is_retried_and_then_fails(
    tmux: TmuxServer,
    foreman: hf.WorldHandle[Foreman],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(typing, "ECHO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(typing, "CONFIRM_TIMEOUT_S", 0.1)
    tmux.start_agent("worker", "deaf")
    foreman.send(Told("worker", "hello", "claude", socket_options(tmux, tries_max=2)))
    assert wait_for_receipts(foreman) == ["error unconfirmed"]
    [record] = list_records(store, DispatchStatus.FAILED)
    assert record.tries == 2


def test_redriven_dispatch_is_a_new_request(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("worker", "hello", "claude", socket_options(tmux)))
    wait_for_receipts(foreman)
    tmux.start_agent("worker")
    [dead_letter] = store.read(queue.list_dead, intents.effect_queue(U, "agent.dispatch"))
    store.transact(redrive_effects, U, "agent.dispatch", [dead_letter.seq])
    assert wait_for_receipts(foreman, 2) == ["error target_missing", "ok delivered"]
    [record] = list_records(store, DispatchStatus.DELIVERED)
    assert record.metadata["redrive_of"] == foreman.state().wanted[0].hex()


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (Told("worker", ""), "text"),
        (Told("worker", "a\x1b[2J"), "text"),
        (Told("worker", "two\nlines", "other"), "text"),
        (Told("worker", "x" * 70_000), "text"),
        (Told("", "hello"), "target"),
        (Told("worker", "hello", ""), "cli"),
        (Told("worker", "hello", "claude", {"socket": "a b"}), "socket"),
        (Told("worker", "hello", "claude", {"tries_max": 0}), "tries_max"),
        (Told("leader", "hello", "other", {"tries_max": 0}), "tries_max"),
        (Told("leader", "a\x1b[2J", "other"), "text"),
        (Told("worker", "hello", "claude", {"unknown": 1}), "effect arguments"),
    ],
)
def test_bad_dispatch_is_rejected_in_the_reducer(
    foreman: hf.WorldHandle[Foreman], log: DispatchLog, event: Told, what: str
) -> None:
    foreman.send(event)
    until(lambda: foreman.state().refused, "the refusal")
    assert foreman.state().refused == [what]
    assert log.backlog() == DispatchBacklog()


def test_simulation_does_not_type_into_a_pane(tmux: TmuxServer) -> None:
    agent = tmux.start_agent("worker")
    with hf.simulate(app, seed=1) as simulated:
        foreman = simulated.world(Foreman, "ada")
        foreman.send(Told("worker", "hello", "claude", socket_options(tmux)))
        simulated.run_until_quiet()
        assert foreman.state().ended == ["error not_configured"]
    assert agent.submitted == []


# -- services of an app --------------------------------------------------------------------------------


def test_only_an_app_with_dispatch_effects_runs_a_dispatcher() -> None:
    with app.open("memory:") as running:
        assert [role.name for role in running.roles].count("dispatch") == 1
    with hf.App("plain").open("memory:") as running:
        assert "dispatch" not in [role.name for role in running.roles]
    assert "dispatch" in ROLES


# -- orphaned requests ---------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatchers, "RECONCILE_S", 0.05)


def test_cancelled_dispatch_fails_its_request(
    often: None, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("leader", "hello"))
    until(lambda: list_records(store, DispatchStatus.PENDING), "the request")
    foreman.send(Stop())
    assert wait_for_receipts(foreman) == ["error cancelled"]
    until(
        lambda: list_records(store, DispatchStatus.FAILED), "the end of the request", timeout_s=20
    )
    assert list_records(store, DispatchStatus.FAILED)[0].reason == "abandoned"


def test_dispatcher_keeps_a_request_without_an_effect_id(
    dispatcher: Dispatcher, log: DispatchLog
) -> None:
    log.request("by-hand", "work")
    dispatcher.tick()
    assert log.backlog() == DispatchBacklog(pending=1)


def test_dispatcher_checks_all_pending_requests_page_by_page(
    dispatcher: Dispatcher, log: DispatchLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatchers, "PAGE", 3)
    for n in range(8):
        log.request(f"1-{n:064x}", "work")
    while dispatcher.tick():
        pass
    assert log.backlog() == DispatchBacklog(failed=8)


def test_abandon_requests_keeps_a_request_with_a_pending_effect(
    foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("leader", "hello"))
    [record] = until(lambda: list_records(store, DispatchStatus.PENDING), "the request")
    assert store.transact(abandon_requests, U, [record.request_id], "x") == 0


# -- the leader ----------------------------------------------------------------------------------------


def test_deferred_dispatch_is_delivered_after_set_leader(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store, runtime: hf.Runtime
) -> None:
    foreman.send(Told("leader", "hello"))
    until(lambda: dispatch_backlog(store).deferred, "that it is deferred")
    until(lambda: not read_readiness(store, U).ready, "that it shows")
    [blocker] = [
        one
        for one in read_readiness(store, U).reasons
        if one.reason is ReadinessReason.NOTIFICATION_DEFERRED
    ]
    assert (blocker.code, "1 dispatches" in blocker.text) == ("leader_missing", True)
    agent = tmux.start_agent("lead")
    hf.agent.set_leader(store, universe=U, pane="lead", socket=tmux.socket)
    assert wait_for_receipts(foreman) == ["ok delivered"]
    until(lambda: agent.texts, "the text")
    until(lambda: read_readiness(store, U).ready, "that nothing waits any more")


def test_expedite_makes_a_deferred_dispatch_due_immediately(store: Store, log: DispatchLog) -> None:
    name = intents.effect_queue(U, "agent.dispatch")
    with unserved_dispatch(store) as request_id:
        log.request(request_id, "leader")
        log.concluded(request_id, DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
        [claim] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        assert store.transact(expedite_deferred, U, 10) == 0, "it is being tried"
        store.transact(queue.fail, claim, "leader_missing", "", True, HOUR_NS)
        assert store.transact(queue.claim, name, "pool", 1, HOUR_NS) == []
        assert store.transact(expedite_deferred, U, 10) == 1
        [again] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        assert again.seq == claim.seq


@contextmanager
def unserved_dispatch(store: Store) -> Iterator[str]:
    """Yield the request id of a dispatch that no pool executes."""
    with app.open(store, roles=("orchestrator", "world")) as running:
        foreman = running.world(Foreman, "ada")
        foreman.send(Told("leader", "hello"))
        until(lambda: foreman.state().wanted, "the intent")
        name = intents.effect_queue(U, "agent.dispatch")
        [(_, payload)] = until(lambda: store.read(queue.peek, name, 1), "its item")
        yield request_id_of(codec.unpack_as(Intent, payload))


def dispatch_backlog(store: Store) -> DispatchBacklog:
    return store.read(dispatch_log.backlog, U)


@pytest.fixture
def lead(tmux: TmuxServer, store: Store) -> PaneAgent:
    agent = tmux.start_agent("lead")
    set_leader_pane(store, U, pane="lead", socket=tmux.socket)
    return agent


def end_request(log: DispatchLog, name: str, reason: str = "") -> None:
    log.request(name, "work")
    if reason:
        log.failed(name, reason)
    else:
        log.concluded(name, DispatchOutcomeReason.CONFIRMED, retries_left=0)
        log.delivered(name)


def expected_notices(store: Store) -> list[str]:
    events = store.read(dispatch_log.events, U, 0, 1000)
    return [
        with_marker(format_notice(one), mark_of(one.event_id))
        for one in events
        if one.status.value in ("delivered", "failed")
    ]


def test_leader_is_notified_of_each_ended_dispatch(
    lead: PaneAgent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end_request(log, "r1")
    end_request(log, "r2", "nobody\nreads \x1b there")
    assert store.read(notifications.count_pending, U) == 5
    while dispatcher.tick():
        pass
    lead.expect(*expected_notices(store))
    assert "to work failed: nobody reads ? there" in lead.submitted[1]
    assert store.read(notifications.count_pending, U) == 0


def test_leader_is_not_notified_of_dispatches_to_its_pane(
    lead: PaneAgent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    log.request("r1", "leader")
    log.failed("r1", "no")
    dispatcher.tick()
    assert (lead.submitted, store.read(notifications.count_pending, U)) == ([], 0)


def test_missing_leader_is_notified_after_it_returns(
    tmux: TmuxServer, lead: PaneAgent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    lead.kill()
    end_request(log, "r1")
    dispatcher.tick()
    state = store.read(notifications.read, U)
    assert state is not None
    assert state.deferred is not None
    assert (state.deferred.code, state.cursor) == ("leader_missing", 0)
    reasons = [one.reason for one in read_readiness(store, U).reasons]
    assert reasons[1:] == [ReadinessReason.REPLAY_PENDING, ReadinessReason.NOTIFICATION_DEFERRED]
    back = tmux.start_agent("lead")

    def caught_up() -> bool:
        dispatcher.tick()
        return store.read(notifications.count_pending, U) == 0

    until(caught_up, "that it was told")
    back.expect(*expected_notices(store))
    state = store.read(notifications.read, U)
    assert state is not None
    assert state.deferred is None


def test_notice_typed_before_a_crash_is_not_typed_twice(
    lead: PaneAgent,
    dispatcher: Dispatcher,
    log: DispatchLog,
    store: Store,
) -> None:
    class Died(BaseException):
        pass

    end_request(log, "r1")
    with failpoints.on("dispatcher.advance_cursor", raises=Died), pytest.raises(Died):
        dispatcher.tick()
    assert store.read(notifications.count_pending, U) == 3
    dispatcher.tick()
    lead.expect(*expected_notices(store))
    assert store.read(notifications.count_pending, U) == 0


def test_rewind_does_not_notify_the_leader_twice(
    lead: PaneAgent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end_request(log, "r1")
    dispatcher.tick()
    for _ in range(30):
        # Scrolls the notice out of the pane. Only the store has a record of it.
        lead.tmux.run("send-keys", "-t", lead.pane_id, "x", "Enter")
    lead.tmux.run("clear-history", "-t", lead.pane_id)
    store.transact(notifications.rewind, U, 0)
    dispatcher.tick()
    assert [text for text in lead.submitted if text != "x"] == expected_notices(store)
    assert store.read(notifications.count_pending, U) == 0


def test_only_the_leaseholding_dispatcher_notifies_the_leader(
    lead: PaneAgent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    other = Dispatcher(store, universe=U, worker="v", incarnation="1")
    end_request(log, "r1")
    dispatcher.tick()
    end_request(log, "r2")
    other.tick()
    assert store.read(notifications.count_pending, U) == 3
    dispatcher.tick()
    lead.expect(*expected_notices(store))
    dispatcher.shut_down()
    end_request(log, "r3")
    other._retry_at_ns = 0
    other.tick()
    lead.expect(*expected_notices(store))


def test_unconfirmed_leader_notices_are_not_retried_every_tick(
    tmux: TmuxServer,
    dispatcher: Dispatcher,
    log: DispatchLog,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(typing, "ECHO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(typing, "CONFIRM_TIMEOUT_S", 0.1)
    agent = tmux.start_agent("lead", "deaf")
    set_leader_pane(store, U, pane="lead", socket=tmux.socket)
    end_request(log, "r1")
    for _ in range(20):
        dispatcher.tick()
    until(lambda: agent.texts, "the first")
    assert len(agent.texts) == 1, "the next time is a second away"
    state = store.read(notifications.read, U)
    assert state is not None
    assert state.deferred is not None
    assert state.deferred.code == "unconfirmed"


def test_dispatcher_without_leader_pane_sends_no_notice(
    dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end_request(log, "r1")
    assert not dispatcher.tick()
    assert store.read(leader_pane.find_leader, U) is None


def test_dead_dispatch_effect_fails_its_request_in_the_same_commit(
    store: Store, log: DispatchLog
) -> None:
    with unserved_dispatch(store) as request_id:
        log.request(request_id, "leader")
        name = intents.effect_queue(U, "agent.dispatch")
        [claim] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        store.transact(queue.dead_letter, claim, "expiries_exhausted", "its pools died")
        assert log.backlog() == DispatchBacklog(failed=1)
        found = log.find(request_id)
        assert found is not None
        assert found.reason == "expiries_exhausted"
