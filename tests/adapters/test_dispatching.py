"""One dispatch from request to end: what the pane got, and what the log says of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import store as stores
from holdfast.adapters import agent as typing
from holdfast.adapters.agent import Typist, marked
from holdfast.adapters.dispatching import (
    DispatchEnded,
    Dispatching,
    LeaderMissing,
    PreflightFailed,
    Request,
    SendFailed,
    TargetMissing,
    TargetUnresolved,
    Unconfirmed,
    UnconfirmedYet,
    name_leader,
)
from holdfast.adapters.tmux import Tmux
from holdfast.authority import dispatch_log
from holdfast.authority.dispatch import Backlog, DispatchRecord, mark_of
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import WorkerCli
from holdfast.errors import Invalid, KeyConflict, ValueTooLarge
from holdfast.runner.faults import Refused
from holdfast.store.api import Store
from tests.panes import TmuxServer, tmux
from tests.process.watch import until

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.dispatching",)

U = "bank"


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:") as opened:
        yield opened


@pytest.fixture
def dispatching(store: Store) -> Dispatching:
    return Dispatching(store, U)


@pytest.fixture
def impatient(tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "APPEARS_S", 0.2)
    monkeypatch.setattr(typing, "TAKEN_S", 0.2)


def request(tmux: TmuxServer | None, target: str = "worker", **fields: object) -> Request:
    given: dict[str, object] = {
        "request_id": "r1",
        "text": "hello",
        "cli": WorkerCli.CLAUDE,
        "socket": "hf-no-such-server" if tmux is None else tmux.socket,
        "metadata": {},
    }
    return Request(target=target, **{**given, **fields})  # type: ignore[arg-type]


def told(store: Store) -> list[str]:
    found = store.read(dispatch_log.events, U, 0, 1000)
    return [one.transition.value if one.transition else "requested" for one in found]


def the(dispatching: Dispatching, request_id: str = "r1") -> DispatchRecord:
    found = dispatching.log.find(request_id)
    assert found is not None
    return found


# -- ways through the log ----------------------------------------------------------------------------


def test_a_text_that_the_pane_shows_is_delivered(
    tmux: TmuxServer, dispatching: Dispatching, store: Store
) -> None:
    agent = tmux.agent("worker")
    done = dispatching.run(request(tmux, metadata={"world": "Agent/ada"}))
    assert (done.status, done.tries, done.mark) == ("delivered", 1, mark_of("r1"))
    assert told(store) == ["requested", "tried", "notified", "delivered"]
    assert (the(dispatching).reason, the(dispatching).metadata) == (
        "seen_in_pane", {"world": "Agent/ada"},
    )  # fmt: skip
    agent.expect_texts(marked("hello", mark_of("r1")))


def test_a_command_of_the_agent_is_typed_only_where_it_is_meant(
    tmux: TmuxServer, dispatching: Dispatching, store: Store
) -> None:
    agent = tmux.agent("worker")
    with pytest.raises(Invalid):
        dispatching.run(request(tmux, text="!id"))
    name_leader(store, U, pane="worker", socket=tmux.socket)
    with pytest.raises(Invalid):
        dispatching.run(request(tmux, "leader", text="!id", cli=WorkerCli.OTHER))
    meant = request(tmux, text="/clear", commands=True, request_id="r2")
    assert dispatching.run(meant).status == "delivered"
    agent.expect_texts(marked("/clear", mark_of("r2")))


def test_with_acknowledge_it_stays_notified_until_the_agent_says_so(
    tmux: TmuxServer, dispatching: Dispatching, store: Store
) -> None:
    tmux.agent("worker")
    assert dispatching.run(request(tmux, acknowledge=True)).status == "notified"
    assert dispatching.log.backlog() == Backlog(notified=1)
    dispatching.log.delivered("r1")
    assert dispatching.run(request(tmux, acknowledge=True)).status == "delivered"


def test_unconfirmed_tries_are_counted_and_the_last_one_fails(
    tmux: TmuxServer, dispatching: Dispatching, store: Store, impatient: None
) -> None:
    agent = tmux.agent("worker", "deaf")
    for tries in (1, 2):
        with pytest.raises(UnconfirmedYet):
            dispatching.run(request(tmux, tries_max=3))
        assert (the(dispatching).status.value, the(dispatching).tries) == ("pending", tries)
        assert the(dispatching).reason == "unconfirmed"
    with pytest.raises(Unconfirmed):
        dispatching.run(request(tmux, tries_max=3))
    assert (the(dispatching).status.value, the(dispatching).reason) == ("failed", "unconfirmed")
    until(lambda: len(agent.texts) >= 3, "what was typed")
    assert len(agent.texts) == 3
    with pytest.raises(Unconfirmed):
        dispatching.run(request(tmux, tries_max=3))
    assert len(agent.texts) == 3, "what failed is not tried again"


@pytest.mark.parametrize(
    ("target", "error"),
    [("nobody", TargetMissing), ("%99", TargetMissing), ("a:b:c", TargetUnresolved)],
)
def test_a_target_that_is_not_there_fails_at_once(
    tmux: TmuxServer, dispatching: Dispatching, store: Store, target: str, error: type[Refused]
) -> None:
    with pytest.raises(error):
        dispatching.run(request(tmux, target))
    assert (the(dispatching).status.value, the(dispatching).reason) == ("failed", error.code)
    assert told(store) == ["requested", "failed"]


def test_a_failed_preflight_fails_it(tmux: TmuxServer, dispatching: Dispatching) -> None:
    agent = tmux.agent("worker")
    tmux.run("select-pane", "-d", "-t", agent.pane_id)
    with pytest.raises(PreflightFailed):
        dispatching.run(request(tmux))
    assert the(dispatching).reason == "preflight_failed"


def test_a_machine_without_tmux_fails_the_send(
    dispatching: Dispatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SendFailed) as error:
        dispatching.run(request(None))
    assert "apt-get install tmux" in str(error.value)


def test_what_an_operator_failed_is_not_typed(tmux: TmuxServer, dispatching: Dispatching) -> None:
    agent = tmux.agent("worker")
    dispatching.run(request(tmux, acknowledge=True))
    dispatching.log.failed("r1", "changed our minds")
    with pytest.raises(DispatchEnded) as error:
        dispatching.run(request(tmux, acknowledge=True))
    assert error.value.reason == "changed our minds"
    agent.expect_texts(marked("hello", mark_of("r1")))


# -- the leader --------------------------------------------------------------------------------------


def test_without_a_leader_it_is_deferred_and_stays_pending(
    dispatching: Dispatching, store: Store
) -> None:
    for _ in range(3):
        with pytest.raises(LeaderMissing) as error:
            dispatching.run(request(None, "leader"))
        assert error.value.retryable
    assert dispatching.log.backlog() == Backlog(pending=1, deferred=1)
    assert told(store) == ["requested", "deferred"], "that it still waits is no event"


def test_a_leader_whose_pane_is_gone_is_waited_for_and_found_again(
    tmux: TmuxServer, dispatching: Dispatching, store: Store
) -> None:
    name_leader(store, U, pane="lead", socket=tmux.socket)
    with pytest.raises(LeaderMissing):
        dispatching.run(request(None, "leader"))
    assert the(dispatching).reason == "leader_missing"
    agent = tmux.agent("lead")
    assert dispatching.run(request(None, "leader")).status == "delivered"
    agent.expect_texts(marked("hello", mark_of("r1")))
    assert dispatching.log.backlog() == Backlog(delivered=1)


def test_the_leader_gets_the_presses_of_its_program(
    tmux: TmuxServer, dispatching: Dispatching, store: Store
) -> None:
    agent = tmux.agent("lead")
    name_leader(store, U, pane="lead", cli="codex", socket=tmux.socket)
    dispatching.run(request(None, "leader", cli=WorkerCli.CLAUDE))
    until(lambda: len(agent.submitted) >= 2, "both presses")
    agent.expect(marked("hello", mark_of("r1")), "")


# -- after a crash -----------------------------------------------------------------------------------


class Died(BaseException):
    """What ends a process does not pass by any handler."""


@pytest.mark.parametrize("at", ["tried", "concluded", "delivered"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_dies_anywhere_leaves_a_text_that_is_typed_once(
    tmux: TmuxServer,
    dispatching: Dispatching,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    when: str,
) -> None:
    agent = tmux.agent("worker")
    genuine = getattr(DispatchLog, at)

    def dies(log: DispatchLog, *args: object, **kwargs: object) -> None:
        if when == "after":
            genuine(log, *args, **kwargs)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(DispatchLog, at, dies)
        with pytest.raises(Died):
            dispatching.run(request(tmux))
    assert dispatching.run(request(tmux)).status == "delivered"
    agent.expect_texts(marked("hello", mark_of("r1")))
    assert dispatching.log.backlog() == Backlog(delivered=1)


def test_a_process_that_dies_between_text_and_enter_leaves_a_text_that_is_submitted_once(
    tmux: TmuxServer, dispatching: Dispatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmux.agent("worker")

    genuine = Tmux.press

    def dies(tmux: Tmux, pane_id: str, key: str) -> None:
        if key == "Enter":
            raise Died
        genuine(tmux, pane_id, key)

    with monkeypatch.context() as patched:
        patched.setattr(Tmux, "press", dies)
        with pytest.raises(Died):
            dispatching.run(request(tmux))
    until(lambda: agent.shows(mark_of("r1")), "the draft")
    assert agent.submitted == []
    assert dispatching.run(request(tmux)).status == "delivered"
    agent.expect(marked("hello", mark_of("r1")))


def test_another_that_was_faster_is_not_contradicted(
    tmux: TmuxServer, dispatching: Dispatching, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmux.agent("worker")
    genuine = Typist.send

    def overtaken(self: Typist, *args: object, **kwargs: object) -> object:
        sent = genuine(self, *args, **kwargs)  # type: ignore[arg-type]
        monkeypatch.setattr(Typist, "send", genuine)
        Dispatching(store, U).run(request(tmux))
        return sent

    monkeypatch.setattr(Typist, "send", overtaken)
    assert dispatching.run(request(tmux)).status == "delivered"
    agent.expect_texts(marked("hello", mark_of("r1")))
    assert told(store) == ["requested", "tried", "notified", "delivered"]


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"target": ""}, Invalid),
        ({"text": ""}, Invalid),
        ({"text": "a\x1bb"}, Invalid),
        ({"text": "x" * 70_000}, ValueTooLarge),
        ({"tries_max": 0}, Invalid),
        ({"tries_max": 21}, Invalid),
        ({"socket": "-S /etc"}, Invalid),
        ({"request_id": ""}, Invalid),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_written(
    dispatching: Dispatching, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        dispatching.run(request(None, **fields))  # type: ignore[arg-type]
    assert dispatching.log.backlog() == Backlog()


def test_the_same_id_with_another_text_is_a_conflict(
    tmux: TmuxServer, dispatching: Dispatching
) -> None:
    tmux.agent("worker")
    dispatching.run(request(tmux))
    with pytest.raises(KeyConflict):
        dispatching.run(request(tmux, text="another"))


@pytest.mark.parametrize(("pane", "socket"), [("", ""), ("a:b:c", ""), ("%1", "a b")])
def test_a_leader_is_named_by_what_a_pane_can_be_called(
    store: Store, pane: str, socket: str
) -> None:
    with pytest.raises(Invalid):
        name_leader(store, U, pane=pane, socket=socket)
