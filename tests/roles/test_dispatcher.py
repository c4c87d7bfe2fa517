"""Dispatches in a running app: done by a pool, looked after by the dispatcher, told to the leader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.adapters import agent as typing
from holdfast.adapters.agent import marked
from holdfast.adapters.dispatching import name_leader
from holdfast.app.runtime import ROLES
from holdfast.authority import dispatch_log, panes, replay
from holdfast.authority.dispatch import (
    Backlog,
    DispatchRecord,
    DispatchStatus,
    mark_of,
    request_id_of,
)
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason
from holdfast.authority.readiness import Reason
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.roles import dispatcher as dispatchers
from holdfast.roles.dispatcher import Dispatcher, notice
from holdfast.roles.dispatches import abandon_all, hasten
from holdfast.roles.readiness import look
from holdfast.roles.receipts import redrive_effects
from holdfast.store.api import Store
from holdfast.world import publish
from tests.panes import Agent, TmuxServer, tmux
from tests.process.watch import until

__all__ = ["tmux"]

MODULES = ("holdfast.roles.dispatcher", "holdfast.roles.dispatches", "holdfast.app.shipped.agent")

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
    """One that runs when it is told to."""
    return Dispatcher(store, universe=U, worker="w", incarnation="1")


def ends(foreman: hf.WorldHandle[Foreman], count: int = 1) -> list[str]:
    until(lambda: len(foreman.state().ended) >= count, f"{count} receipts")
    return list(foreman.state().ended)


def records(store: Store, status: DispatchStatus) -> list[DispatchRecord]:
    return store.read(dispatch_log.listed, U, status, None, 100)


def on(tmux: TmuxServer, **more: Any) -> dict[str, Any]:
    return {"socket": tmux.socket, **more}


# -- from a world to a pane ----------------------------------------------------------------------------


def test_a_world_dispatches_and_is_told(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    agent = tmux.agent("worker")
    foreman.send(Told("worker", "hello", "claude", on(tmux, metadata={"ticket": "7"})))
    assert ends(foreman) == ["ok delivered"]
    [record] = records(store, DispatchStatus.DELIVERED)
    assert record.metadata == {"ticket": "7", "world": "ada", "tag": "t"}
    agent.expect(marked("hello", mark_of(record.request_id)))


def test_an_agent_acknowledges_what_it_was_asked_to(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store, log: DispatchLog
) -> None:
    tmux.agent("worker")
    foreman.send(Told("worker", "hello", "claude", on(tmux, acknowledge=True)))
    assert ends(foreman) == ["ok notified"]
    [record] = records(store, DispatchStatus.NOTIFIED)
    hf.agent.delivered(store, universe=U, request_id=record.request_id)
    assert log.backlog() == Backlog(delivered=1)


def test_a_missing_target_is_an_error_and_no_retry(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("nobody", "hello", "claude", on(tmux)))
    assert ends(foreman) == ["error target_missing"]
    [record] = records(store, DispatchStatus.FAILED)
    assert (record.reason, record.tries) == ("target_missing", 0)


def test_unconfirmed_sends_are_retried_by_the_queue_and_then_fail(
    tmux: TmuxServer,
    foreman: hf.WorldHandle[Foreman],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(typing, "APPEARS_S", 0.1)
    monkeypatch.setattr(typing, "TAKEN_S", 0.1)
    tmux.agent("worker", "deaf")
    foreman.send(Told("worker", "hello", "claude", on(tmux, tries_max=2)))
    assert ends(foreman) == ["error unconfirmed"]
    [record] = records(store, DispatchStatus.FAILED)
    assert record.tries == 2


def test_a_redriven_dispatch_is_a_request_of_its_own(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("worker", "hello", "claude", on(tmux)))
    ends(foreman)
    tmux.agent("worker")
    [letter] = store.read(queue.dead, publish.effects(U, "agent.dispatch"))
    store.transact(redrive_effects, U, "agent.dispatch", [letter.seq])
    assert ends(foreman, 2) == ["error target_missing", "ok delivered"]
    [record] = records(store, DispatchStatus.DELIVERED)
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
def test_a_bad_request_is_refused_in_the_reducer(
    foreman: hf.WorldHandle[Foreman], log: DispatchLog, event: Told, what: str
) -> None:
    foreman.send(event)
    until(lambda: foreman.state().refused, "the refusal")
    assert foreman.state().refused == [what]
    assert log.backlog() == Backlog()


def test_a_simulation_types_nothing(tmux: TmuxServer) -> None:
    agent = tmux.agent("worker")
    with hf.simulate(app, seed=1) as simulated:
        foreman = simulated.world(Foreman, "ada")
        foreman.send(Told("worker", "hello", "claude", on(tmux)))
        simulated.run_until_quiet()
        assert foreman.state().ended == ["error not_configured"]
    assert agent.submitted == []


# -- which roles run -----------------------------------------------------------------------------------


def test_an_app_that_dispatches_has_a_dispatcher_and_another_has_none() -> None:
    with app.open("memory:") as running:
        assert [role.name for role in running.roles].count("dispatch") == 1
    with hf.App("plain").open("memory:") as running:
        assert "dispatch" not in [role.name for role in running.roles]
    assert "dispatch" in ROLES


# -- requests whose effects have ended -----------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatchers, "RECONCILE_S", 0.05)


def test_a_cancelled_dispatch_fails(
    often: None, foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("leader", "hello"))
    until(lambda: records(store, DispatchStatus.PENDING), "the request")
    foreman.send(Stop())
    assert ends(foreman) == ["error cancelled"]
    until(lambda: records(store, DispatchStatus.FAILED), "the end of the request", timeout_s=20)
    assert records(store, DispatchStatus.FAILED)[0].reason == "abandoned"


def test_a_request_that_no_effect_made_is_left_alone(
    dispatcher: Dispatcher, log: DispatchLog
) -> None:
    log.request("by-hand", "work")
    dispatcher.tick()
    assert log.backlog() == Backlog(pending=1)


def test_all_pending_requests_are_gone_over_page_by_page(
    dispatcher: Dispatcher, log: DispatchLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatchers, "PAGE", 3)
    for n in range(8):
        log.request(f"1-{n:064x}", "work")
    while dispatcher.tick():
        pass
    assert log.backlog() == Backlog(failed=8)


def test_an_effect_that_is_there_again_keeps_its_request(
    foreman: hf.WorldHandle[Foreman], store: Store
) -> None:
    foreman.send(Told("leader", "hello"))
    [record] = until(lambda: records(store, DispatchStatus.PENDING), "the request")
    assert store.transact(abandon_all, U, [record.request_id], "x") == 0


# -- the leader ----------------------------------------------------------------------------------------


def test_a_deferred_dispatch_goes_out_when_the_leader_names_its_pane(
    tmux: TmuxServer, foreman: hf.WorldHandle[Foreman], store: Store, runtime: hf.Runtime
) -> None:
    foreman.send(Told("leader", "hello"))
    until(lambda: dispatch_backlog(store).deferred, "that it is deferred")
    until(lambda: not look(store, U).ready, "that it shows")
    [blocker] = [
        one for one in look(store, U).reasons if one.reason is Reason.NOTIFICATION_DEFERRED
    ]
    assert (blocker.code, "1 dispatches" in blocker.text) == ("leader_missing", True)
    agent = tmux.agent("lead")
    hf.agent.set_leader(store, universe=U, pane="lead", socket=tmux.socket)
    assert ends(foreman) == ["ok delivered"]
    until(lambda: agent.texts, "the text")
    until(lambda: look(store, U).ready, "that nothing waits any more")


def test_hastening_makes_a_deferred_effect_due_at_once(store: Store, log: DispatchLog) -> None:
    name = publish.effects(U, "agent.dispatch")
    with wanted(store) as request_id:
        log.request(request_id, "leader")
        log.concluded(request_id, DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
        [claim] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        assert store.transact(hasten, U, 10) == 0, "it is being tried"
        store.transact(queue.fail, claim, "leader_missing", "", True, HOUR_NS)
        assert store.transact(queue.claim, name, "pool", 1, HOUR_NS) == []
        assert store.transact(hasten, U, 10) == 1
        [again] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        assert again.seq == claim.seq


@contextmanager
def wanted(store: Store) -> Iterator[str]:
    """A dispatch that a world wants and no pool does; the id of its request."""
    with app.open(store, roles=("orchestrator", "world")) as running:
        foreman = running.world(Foreman, "ada")
        foreman.send(Told("leader", "hello"))
        until(lambda: foreman.state().wanted, "the intent")
        name = publish.effects(U, "agent.dispatch")
        [(_, payload)] = until(lambda: store.read(queue.peek, name, 1), "its item")
        yield request_id_of(codec.unpack_as(Intent, payload))


def dispatch_backlog(store: Store) -> Backlog:
    return store.read(dispatch_log.backlog, U)


@pytest.fixture
def lead(tmux: TmuxServer, store: Store) -> Agent:
    agent = tmux.agent("lead")
    name_leader(store, U, pane="lead", socket=tmux.socket)
    return agent


def end(log: DispatchLog, name: str, reason: str = "") -> None:
    log.request(name, "work")
    if reason:
        log.failed(name, reason)
    else:
        log.concluded(name, DispatchOutcomeReason.CONFIRMED, retries_left=0)
        log.delivered(name)


def notices(store: Store) -> list[str]:
    found = store.read(dispatch_log.events, U, 0, 1000)
    return [
        marked(notice(one), mark_of(one.event_id))
        for one in found
        if one.status.value in ("delivered", "failed")
    ]


def test_the_leader_is_told_of_each_dispatch_that_ended(
    lead: Agent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end(log, "r1")
    end(log, "r2", "nobody\nreads \x1b there")
    assert store.read(replay.pending, U) == 5
    while dispatcher.tick():
        pass
    lead.expect(*notices(store))
    assert "to work failed: nobody reads ? there" in lead.submitted[1]
    assert store.read(replay.pending, U) == 0


def test_a_leader_is_not_told_of_what_it_was_sent_itself(
    lead: Agent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    log.request("r1", "leader")
    log.failed("r1", "no")
    dispatcher.tick()
    assert (lead.submitted, store.read(replay.pending, U)) == ([], 0)


def test_a_leader_that_is_away_is_told_when_it_is_back(
    tmux: TmuxServer, lead: Agent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    lead.kill()
    end(log, "r1")
    dispatcher.tick()
    state = store.read(replay.read, U)
    assert state is not None
    assert state.deferred is not None
    assert (state.deferred.code, state.cursor) == ("leader_missing", 0)
    reasons = [one.reason for one in look(store, U).reasons]
    assert reasons[1:] == [Reason.REPLAY_PENDING, Reason.NOTIFICATION_DEFERRED]
    back = tmux.agent("lead")

    def caught_up() -> bool:
        dispatcher.tick()
        return store.read(replay.pending, U) == 0

    until(caught_up, "that it was told")
    back.expect(*notices(store))
    state = store.read(replay.read, U)
    assert state is not None
    assert state.deferred is None


def test_a_notice_that_was_typed_before_a_crash_is_not_typed_again(
    lead: Agent,
    dispatcher: Dispatcher,
    log: DispatchLog,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Died(BaseException):
        pass

    def dies(*_: object) -> None:
        raise Died

    end(log, "r1")
    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "_advance", dies)
        with pytest.raises(Died):
            dispatcher.tick()
    assert store.read(replay.pending, U) == 3
    dispatcher.tick()
    lead.expect(*notices(store))
    assert store.read(replay.pending, U) == 0


def test_a_rewound_log_is_gone_over_and_told_to_nobody_twice(
    lead: Agent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end(log, "r1")
    dispatcher.tick()
    for _ in range(30):
        # More than the pane shows and keeps: only the memory of the store can know.
        lead.tmux.run("send-keys", "-t", lead.pane_id, "x", "Enter")
    lead.tmux.run("clear-history", "-t", lead.pane_id)
    store.transact(replay.rewind, U, 0)
    dispatcher.tick()
    assert [text for text in lead.submitted if text != "x"] == notices(store)
    assert store.read(replay.pending, U) == 0


def test_of_two_dispatchers_one_tells_the_leader(
    lead: Agent, dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    other = Dispatcher(store, universe=U, worker="v", incarnation="1")
    end(log, "r1")
    dispatcher.tick()
    end(log, "r2")
    other.tick()
    assert store.read(replay.pending, U) == 3
    dispatcher.tick()
    lead.expect(*notices(store))
    dispatcher.finish()
    end(log, "r3")
    other._retry_at_ns = 0
    other.tick()
    lead.expect(*notices(store))


def test_a_leader_that_shows_nothing_is_not_flooded(
    tmux: TmuxServer,
    dispatcher: Dispatcher,
    log: DispatchLog,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(typing, "APPEARS_S", 0.1)
    monkeypatch.setattr(typing, "TAKEN_S", 0.1)
    agent = tmux.agent("lead", "deaf")
    name_leader(store, U, pane="lead", socket=tmux.socket)
    end(log, "r1")
    for _ in range(20):
        dispatcher.tick()
    until(lambda: agent.texts, "the first")
    assert len(agent.texts) == 1, "the next time is a second away"
    state = store.read(replay.read, U)
    assert state is not None
    assert state.deferred is not None
    assert state.deferred.code == "unconfirmed"


def test_without_a_named_leader_nobody_is_told(
    dispatcher: Dispatcher, log: DispatchLog, store: Store
) -> None:
    end(log, "r1")
    assert not dispatcher.tick()
    assert store.read(panes.leader, U) is None


def test_an_effect_that_dies_ends_its_request_in_the_same_commit(
    store: Store, log: DispatchLog
) -> None:
    with wanted(store) as request_id:
        log.request(request_id, "leader")
        name = publish.effects(U, "agent.dispatch")
        [claim] = store.transact(queue.claim, name, "pool", 1, HOUR_NS)
        store.transact(queue.bury, claim, "expiries_exhausted", "its pools died")
        assert log.backlog() == Backlog(failed=1)
        found = log.find(request_id)
        assert found is not None
        assert found.reason == "expiries_exhausted"
