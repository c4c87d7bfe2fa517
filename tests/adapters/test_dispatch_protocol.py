"""The dispatch protocol: text typed into the pane and transitions in the dispatch log, from request
to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.adapters import pane_prompter as typing
from holdfast.adapters.dispatch_protocol import (
    DispatchFailed,
    DispatchProtocol,
    LeaderMissing,
    NotConfirmedYet,
    PreflightFailed,
    PromptRequest,
    SendFailed,
    TargetMissing,
    TargetUnresolved,
    Unconfirmed,
    set_leader_pane,
)
from holdfast.adapters.pane_prompter import with_marker
from holdfast.adapters.tmux import Tmux
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch.outcomes import QueueTransition, WorkerCli
from holdfast.dispatch.request import DispatchBacklog, DispatchRecord, mark_of
from holdfast.errors import Invalid, KeyConflict, ValueTooLarge
from holdfast.runner.error_policy import Refused
from holdfast.store.api import Store
from tests.process.watch import until
from tests.tmux_panes import TmuxServer, tmux

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.dispatch_protocol",)

U = "bank"


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:") as opened:
        yield opened


@pytest.fixture
def protocol(store: Store) -> DispatchProtocol:
    return DispatchProtocol(store, U)


@pytest.fixture
def impatient(tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "ECHO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(typing, "CONFIRM_TIMEOUT_S", 0.2)


def make_request(
    tmux: TmuxServer | None, target: str = "worker", **fields: object
) -> PromptRequest:
    defaults: dict[str, object] = {
        "request_id": "r1",
        "text": "hello",
        "cli": WorkerCli.CLAUDE,
        "socket": "hf-no-such-server" if tmux is None else tmux.socket,
        "metadata": {},
    }
    return PromptRequest(target=target, **{**defaults, **fields})  # type: ignore[arg-type]


def logged_transitions(store: Store) -> list[str]:
    events = store.read(dispatch_log.events, U, 0, 1000)
    return [one.transition.value if one.transition else "requested" for one in events]


def find_record(protocol: DispatchProtocol, request_id: str = "r1") -> DispatchRecord:
    record = protocol.log.find(request_id)
    assert record is not None
    return record


# -- log transitions ---------------------------------------------------------------------------------


def test_shown_prompt_is_delivered(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    agent = tmux.start_agent("worker")
    done = protocol.run(make_request(tmux, metadata={"world": "Agent/ada"}))
    assert (done.status, done.tries, done.mark) == ("delivered", 1, mark_of("r1"))
    assert logged_transitions(store) == ["requested", "tried", "notified", "delivered"]
    assert (find_record(protocol).reason, find_record(protocol).metadata) == (
        "seen_in_pane", {"world": "Agent/ada"},
    )  # fmt: skip
    agent.expect_texts(with_marker("hello", mark_of("r1")))


def test_agent_command_is_typed_only_with_commands_option(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    agent = tmux.start_agent("worker")
    with pytest.raises(Invalid):
        protocol.run(make_request(tmux, text="!id"))
    set_leader_pane(store, U, pane="worker", socket=tmux.socket)
    with pytest.raises(Invalid):
        protocol.run(make_request(tmux, "leader", text="!id", cli=WorkerCli.OTHER))
    meant = make_request(tmux, text="/clear", commands=True, request_id="r2")
    assert protocol.run(meant).status == "delivered"
    agent.expect_texts(with_marker("/clear", mark_of("r2")))


def test_acknowledged_prompt_stays_notified_until_delivered(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    tmux.start_agent("worker")
    assert protocol.run(make_request(tmux, acknowledge=True)).status == "notified"
    assert protocol.log.backlog() == DispatchBacklog(notified=1)
    protocol.log.delivered("r1")
    assert protocol.run(make_request(tmux, acknowledge=True)).status == "delivered"


def test_unconfirmed_dispatch_fails_after_tries_max(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store, impatient: None
) -> None:
    agent = tmux.start_agent("worker", "deaf")
    for tries in (1, 2):
        with pytest.raises(NotConfirmedYet):
            protocol.run(make_request(tmux, tries_max=3))
        assert (find_record(protocol).status.value, find_record(protocol).tries) == (
            "pending",
            tries,
        )
        assert find_record(protocol).reason == "unconfirmed"
    with pytest.raises(Unconfirmed):
        protocol.run(make_request(tmux, tries_max=3))
    assert (find_record(protocol).status.value, find_record(protocol).reason) == (
        "failed",
        "unconfirmed",
    )
    until(lambda: len(agent.texts) >= 3, "what was typed")
    assert len(agent.texts) == 3
    with pytest.raises(Unconfirmed):
        protocol.run(make_request(tmux, tries_max=3))
    assert len(agent.texts) == 3, "what failed is not tried again"


@pytest.mark.parametrize(
    ("target", "error"),
    [("nobody", TargetMissing), ("%99", TargetMissing), ("a:b:c", TargetUnresolved)],
)
def test_missing_target_fails_the_dispatch_at_once(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store, target: str, error: type[Refused]
) -> None:
    with pytest.raises(error):
        protocol.run(make_request(tmux, target))
    assert (find_record(protocol).status.value, find_record(protocol).reason) == (
        "failed",
        error.code,
    )
    assert logged_transitions(store) == ["requested", "failed"]


def test_failed_preflight_fails_the_dispatch(tmux: TmuxServer, protocol: DispatchProtocol) -> None:
    agent = tmux.start_agent("worker")
    tmux.run("select-pane", "-d", "-t", agent.pane_id)
    with pytest.raises(PreflightFailed):
        protocol.run(make_request(tmux))
    assert find_record(protocol).reason == "preflight_failed"


def test_missing_tmux_fails_the_dispatch(
    protocol: DispatchProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SendFailed) as error:
        protocol.run(make_request(None))
    assert "apt-get install tmux" in str(error.value)


def test_dispatch_failed_by_an_operator_is_not_typed(
    tmux: TmuxServer, protocol: DispatchProtocol
) -> None:
    agent = tmux.start_agent("worker")
    protocol.run(make_request(tmux, acknowledge=True))
    protocol.log.failed("r1", "changed our minds")
    with pytest.raises(DispatchFailed) as error:
        protocol.run(make_request(tmux, acknowledge=True))
    assert error.value.reason == "changed our minds"
    agent.expect_texts(with_marker("hello", mark_of("r1")))


# -- the leader --------------------------------------------------------------------------------------


def test_dispatch_without_a_leader_is_deferred_and_stays_pending(
    protocol: DispatchProtocol, store: Store
) -> None:
    for _ in range(3):
        with pytest.raises(LeaderMissing) as error:
            protocol.run(make_request(None, "leader"))
        assert error.value.retryable
    assert protocol.log.backlog() == DispatchBacklog(pending=1, deferred=1)
    assert logged_transitions(store) == ["requested", "deferred"], "that it still waits is no event"


def test_dispatch_waits_for_a_missing_leader_pane(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    set_leader_pane(store, U, pane="lead", socket=tmux.socket)
    with pytest.raises(LeaderMissing):
        protocol.run(make_request(None, "leader"))
    assert find_record(protocol).reason == "leader_missing"
    agent = tmux.start_agent("lead")
    assert protocol.run(make_request(None, "leader")).status == "delivered"
    agent.expect_texts(with_marker("hello", mark_of("r1")))
    assert protocol.log.backlog() == DispatchBacklog(delivered=1)


def test_leader_pane_gets_the_key_presses_of_its_cli(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    agent = tmux.start_agent("lead")
    set_leader_pane(store, U, pane="lead", cli="codex", socket=tmux.socket)
    protocol.run(make_request(None, "leader", cli=WorkerCli.CLAUDE))
    until(lambda: len(agent.submitted) >= 2, "both presses")
    agent.expect(with_marker("hello", mark_of("r1")), "")


# -- after a crash -----------------------------------------------------------------------------------


class DispatchCrash(BaseException):
    """Simulated process death. It is a BaseException, so no handler catches it."""


@pytest.mark.parametrize(
    "at", [QueueTransition.TRIED, QueueTransition.NOTIFIED, QueueTransition.DELIVERED]
)
@pytest.mark.parametrize("when", ["dispatch.log_transition", "dispatch.transition_logged"])
def test_crash_at_any_log_step_types_the_prompt_once(
    tmux: TmuxServer,
    protocol: DispatchProtocol,
    store: Store,
    at: QueueTransition,
    when: str,
) -> None:
    agent = tmux.start_agent("worker")

    def dies(request_id: str, transition: QueueTransition) -> None:
        if transition is at:
            raise DispatchCrash

    with failpoints.on(when, calls=dies), pytest.raises(DispatchCrash):
        protocol.run(make_request(tmux))
    assert protocol.run(make_request(tmux)).status == "delivered"
    agent.expect_texts(with_marker("hello", mark_of("r1")))
    assert protocol.log.backlog() == DispatchBacklog(delivered=1)


def test_crash_between_text_and_enter_submits_the_prompt_once(
    tmux: TmuxServer, protocol: DispatchProtocol
) -> None:
    agent = tmux.start_agent("worker")

    def dies(_: Tmux, key: str) -> None:
        if key == "Enter":
            raise DispatchCrash

    with failpoints.on("tmux.press_key", calls=dies), pytest.raises(DispatchCrash):
        protocol.run(make_request(tmux))
    until(lambda: agent.shows(mark_of("r1")), "the draft")
    assert agent.submitted == []
    assert protocol.run(make_request(tmux)).status == "delivered"
    agent.expect(with_marker("hello", mark_of("r1")))


def test_concurrent_dispatch_that_finished_first_is_kept(
    tmux: TmuxServer, protocol: DispatchProtocol, store: Store
) -> None:
    agent = tmux.start_agent("worker")

    def overtake(_: PromptRequest) -> None:
        DispatchProtocol(store, U).run(make_request(tmux))

    with failpoints.on("dispatch.prompt_typed", calls=overtake, times=1):
        assert protocol.run(make_request(tmux)).status == "delivered"
    agent.expect_texts(with_marker("hello", mark_of("r1")))
    assert logged_transitions(store) == ["requested", "tried", "notified", "delivered"]


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
def test_invalid_dispatch_request_is_refused_before_any_write(
    protocol: DispatchProtocol, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        protocol.run(make_request(None, **fields))  # type: ignore[arg-type]
    assert protocol.log.backlog() == DispatchBacklog()


def test_request_id_reused_with_another_text_is_a_conflict(
    tmux: TmuxServer, protocol: DispatchProtocol
) -> None:
    tmux.start_agent("worker")
    protocol.run(make_request(tmux))
    with pytest.raises(KeyConflict):
        protocol.run(make_request(tmux, text="another"))


@pytest.mark.parametrize(("pane", "socket"), [("", ""), ("a:b:c", ""), ("%1", "a b")])
def test_set_leader_pane_refuses_invalid_panes(store: Store, pane: str, socket: str) -> None:
    with pytest.raises(Invalid):
        set_leader_pane(store, U, pane=pane, socket=socket)
