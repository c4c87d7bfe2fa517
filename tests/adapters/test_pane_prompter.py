"""The pane prompter: types a prompt once, submits it with the key presses of its CLI, and confirms
it on the screen."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast import failpoints
from holdfast.adapters import pane_prompter as adapter
from holdfast.adapters.errors import Unavailable
from holdfast.adapters.pane_prompter import (
    TEXT_BYTES_MAX,
    PanePrompter,
    PromptResult,
    check_not_command,
    check_prompt,
    with_marker,
)
from holdfast.adapters.tmux import Tmux, lock_path
from holdfast.dispatch.outcomes import DispatchOutcomeReason as Why
from holdfast.dispatch.outcomes import WorkerCli
from holdfast.dispatch.request import mark_of
from holdfast.errors import Invalid, ValueTooLarge
from tests.process.watch import until
from tests.tmux_panes import PaneAgent, TmuxServer, tmux

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.pane_prompter",)

MARK = mark_of("request-1")
CLAUDE, CODEX, OTHER = WorkerCli.CLAUDE, WorkerCli.CODEX, WorkerCli.OTHER


@pytest.fixture
def prompter(tmux: TmuxServer) -> PanePrompter:
    return PanePrompter(Tmux(tmux.socket))


@pytest.fixture
def impatient(tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for echo and confirmation."""
    monkeypatch.setattr(adapter, "ECHO_TIMEOUT_S", 0.3)
    monkeypatch.setattr(adapter, "CONFIRM_TIMEOUT_S", 0.6)


def submit_count(agent: PaneAgent) -> int:
    return len(agent.submitted)


# -- the submit policy -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cli", "presses"), [(CLAUDE, 1), (CODEX, 2), (OTHER, 2)])
def test_prompt_is_submitted_with_the_key_presses_of_each_cli(
    tmux: TmuxServer, prompter: PanePrompter, cli: WorkerCli, presses: int
) -> None:
    agent = tmux.start_agent("worker", "framed")
    assert prompter.send("worker", "hello", cli, MARK).reason is Why.CONFIRMED
    until(lambda: submit_count(agent) >= presses, "the presses")
    assert agent.submitted == [with_marker("hello", MARK)] + [""] * (presses - 1)


def test_prompt_still_in_the_draft_is_submitted_again(
    tmux: TmuxServer, prompter: PanePrompter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "PRESS_AGAIN_S", 0.7)
    agent = tmux.start_agent("worker", "paste")
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(with_marker("hello", MARK))


def test_multi_line_prompt_is_submitted_as_one_text(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    agent = tmux.start_agent("worker", "framed")
    prompter.send("worker", "first\nsecond\n\tthird", CLAUDE, MARK)
    until(lambda: agent.submitted, "the text")
    agent.expect(with_marker("first\nsecond\n\tthird", MARK))


# -- confirmation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["line", "framed", "hidden"])
@pytest.mark.parametrize("length", [1, 20, 60, 79, 400])
def test_prompt_is_confirmed_for_any_line_wrapping(
    tmux: TmuxServer, prompter: PanePrompter, mode: str, length: int
) -> None:
    agent = tmux.start_agent("worker", mode)
    text = "x" * length
    assert prompter.send("worker", text, CLAUDE, MARK) == PromptResult(
        Why.CONFIRMED, "", True, agent.pane_id
    )
    until(lambda: agent.texts, "the text")
    agent.expect_texts(with_marker(text, MARK))


@pytest.mark.usefixtures("impatient")
def test_prompt_is_unconfirmed_when_the_pane_shows_nothing(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    tmux.start_agent("worker", "deaf")
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.UNCONFIRMED


@pytest.mark.usefixtures("impatient")
def test_prompt_is_unconfirmed_when_its_draft_is_not_submitted(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    tmux.start_agent("worker", "stuck")
    sent = prompter.send("worker", "hello", CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.UNCONFIRMED, True)


# -- typing once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["line", "framed", "hidden"])
def test_prompt_already_in_the_pane_is_not_typed_again(
    tmux: TmuxServer, prompter: PanePrompter, mode: str
) -> None:
    agent = tmux.start_agent("worker", mode)
    prompter.send("worker", "hello", CLAUDE, MARK)
    sent = prompter.send("worker", "hello", CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    prompter.send("worker", "last", CLAUDE, mark_of("last"))
    until(lambda: len(agent.texts) >= 2, "the last text")
    agent.expect(with_marker("hello", MARK), with_marker("last", mark_of("last")))


@pytest.mark.parametrize("mode", ["line", "framed"])
@pytest.mark.parametrize("length", [5, 9, 10, 11, 12, 13, 41, 61, 62])
def test_leftover_draft_of_the_prompt_is_submitted_without_retyping(
    tmux: TmuxServer, prompter: PanePrompter, mode: str, length: int
) -> None:
    # At some of the lengths the last letters of the marker, or its bracket, wrap to a new line.
    agent = tmux.start_agent("worker", mode)
    text = "x" * length
    Tmux(tmux.socket).type_text(agent.pane_id, with_marker(text, MARK))
    until(lambda: agent.shows(MARK), "the draft")
    sent = prompter.send("worker", text, CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    agent.expect(with_marker(text, MARK))


@pytest.mark.parametrize("mode", ["line", "framed"])
def test_foreign_draft_is_cleared_before_typing(
    tmux: TmuxServer, prompter: PanePrompter, mode: str
) -> None:
    agent = tmux.start_agent("worker", mode)
    Tmux(tmux.socket).type_text(agent.pane_id, "as I was say")
    until(lambda: agent.shows("as I was say"), "the draft")
    prompter.send("worker", "hello", CLAUDE, MARK)
    agent.expect(with_marker("hello", MARK))


@pytest.mark.parametrize("mode", ["line", "framed"])
def test_complete_draft_of_another_request_is_submitted_first(
    tmux: TmuxServer, prompter: PanePrompter, mode: str
) -> None:
    agent = tmux.start_agent("worker", mode)
    other = mark_of("another")
    Tmux(tmux.socket).type_text(agent.pane_id, with_marker("theirs", other))
    until(lambda: agent.shows(other), "the draft")
    prompter.send("worker", "ours", CLAUDE, MARK)
    sent = prompter.send("worker", "theirs", CLAUDE, other)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    agent.expect(with_marker("theirs", other), with_marker("ours", MARK))


def test_on_type_is_called_once_before_typing(tmux: TmuxServer, prompter: PanePrompter) -> None:
    agent = tmux.start_agent("worker")
    shown: list[bool] = []
    for _ in range(2):
        prompter.send("worker", "hi", CLAUDE, MARK, on_type=lambda: shown.append(agent.shows(MARK)))
    assert shown == [False]


def test_concurrent_prompts_to_one_pane_are_typed_in_sequence(tmux: TmuxServer) -> None:
    agent = tmux.start_agent("worker", "framed")
    texts = [f"text number {n} " + str(n) * 40 for n in range(6)]

    @dataclass
    class Sender(threading.Thread):
        text: str
        sent: list[PromptResult] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__()

        def __hash__(self) -> int:
            return id(self)

        def run(self) -> None:
            typist = PanePrompter(Tmux(tmux.socket))
            self.sent.append(typist.send("worker", self.text, CODEX, mark_of(self.text)))

    senders = [Sender(text) for text in texts]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(30)
    assert [one.sent[0].reason for one in senders] == [Why.CONFIRMED] * len(texts)
    until(lambda: len(agent.texts) >= len(texts), "all texts")
    assert sorted(agent.texts) == sorted(with_marker(text, mark_of(text)) for text in texts)


# -- failures ----------------------------------------------------------------------------------------


def test_missing_pane_is_target_missing(tmux: TmuxServer, prompter: PanePrompter) -> None:
    assert prompter.send("nobody", "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING


def test_missing_tmux_server_is_target_missing() -> None:
    prompter = PanePrompter(Tmux("hf-no-such-server"))
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING
    assert not prompter.exists("worker")


def test_dead_pane_is_target_missing(tmux: TmuxServer, prompter: PanePrompter) -> None:
    tmux.run("set-option", "-g", "remain-on-exit", "on")
    pane_id = tmux.start_program("gone", "true")
    until(lambda: not prompter.exists(pane_id), "its end")
    assert prompter.send(pane_id, "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING


def test_invalid_pane_name_is_target_unresolved(tmux: TmuxServer, prompter: PanePrompter) -> None:
    assert prompter.send("a:b:c", "hello", CLAUDE, MARK).reason is Why.TARGET_UNRESOLVED


@pytest.mark.parametrize("cli", [CLAUDE, CODEX])
def test_prompt_is_not_typed_into_a_shell(
    tmux: TmuxServer, prompter: PanePrompter, cli: WorkerCli, tmp_path: os.PathLike[str]
) -> None:
    tmux.start_program("shell", "bash", "--norc", "-i")
    until(lambda: "bash" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its prompt")
    sent = prompter.send("shell", "rm -rf /nowhere", cli, MARK)
    assert sent.reason is Why.PREFLIGHT_FAILED
    assert "nowhere" not in tmux.run("capture-pane", "-p", "-t", "=shell:")


def test_prompt_for_another_program_is_typed_into_a_shell(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    tmux.start_program("shell", "bash", "--norc", "-i")
    until(lambda: "bash" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its prompt")
    assert prompter.send("shell", "echo $((6*7))", OTHER, MARK).reason is Why.CONFIRMED
    until(lambda: "42" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its answer")


def test_prompt_is_typed_into_an_agent_started_by_a_script(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    agent = tmux.start_agent("worker", "framed", shell="bash")
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(with_marker("hello", MARK))


def test_pane_in_copy_mode_is_reset_before_typing(tmux: TmuxServer, prompter: PanePrompter) -> None:
    agent = tmux.start_agent("worker", "framed")
    tmux.run("copy-mode", "-t", agent.pane_id)
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(with_marker("hello", MARK))


def test_pane_with_disabled_input_fails_the_preflight(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    agent = tmux.start_agent("worker")
    tmux.run("select-pane", "-d", "-t", agent.pane_id)
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.PREFLIGHT_FAILED
    assert agent.submitted == []


def test_tmux_error_is_send_failed(tmux: TmuxServer, prompter: PanePrompter) -> None:
    agent = tmux.start_agent("worker")

    def press_in_missing_pane(client: Tmux, key: str) -> None:
        client._run("send-keys", "-t", "%99", key)

    with failpoints.on("tmux.press_key", calls=press_in_missing_pane):
        sent = prompter.send("worker", "hello", CLAUDE, MARK)
    assert sent.reason is Why.SEND_FAILED
    assert "find pane" in sent.detail
    assert agent.submitted == []


def test_pane_that_cannot_be_locked_is_send_failed(
    tmux: TmuxServer, prompter: PanePrompter
) -> None:
    agent = tmux.start_agent("worker")
    lock = lock_of(tmux)
    lock.mkdir()
    try:
        assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.SEND_FAILED
        assert agent.submitted == []
    finally:
        lock.rmdir()


def lock_of(tmux: TmuxServer, socket: str = "") -> Path:
    server = Tmux(socket or tmux.socket)
    found = server.find_pane("worker")
    assert found is not None
    return server.lock_path(found)


def test_pane_lock_is_in_a_private_directory(tmux: TmuxServer, prompter: PanePrompter) -> None:
    agent = tmux.start_agent("worker")
    assert prompter.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    lock = lock_of(tmux)
    assert lock.exists()
    assert stat.S_IMODE(lock.parent.stat().st_mode) == 0o700
    assert lock.parent.stat().st_uid == os.getuid()
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    agent.expect(with_marker("hello", MARK))


def test_pane_lock_is_the_same_for_socket_name_and_path(tmux: TmuxServer) -> None:
    agent = tmux.start_agent("worker")
    path = tmux.run("display-message", "-p", "-t", agent.pane_id, "#{socket_path}").strip()
    assert lock_of(tmux) == lock_of(tmux, path)


@pytest.fixture
def shared_socket(tmux: TmuxServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a tmux socket in a directory that other users can write."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return shared / "socket"


def test_pane_lock_of_a_shared_socket_directory_is_in_a_private_one(
    shared_socket: Path, tmp_path: Path
) -> None:
    lock = lock_path(str(shared_socket), "%0")
    own = tmp_path / f"holdfast-{os.getuid()}"
    assert lock.parent == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert lock_path(str(shared_socket), "%1") != lock


@pytest.mark.parametrize("squat", ["open", "link", "file"])
def test_unsafe_lock_directory_is_refused(shared_socket: Path, tmp_path: Path, squat: str) -> None:
    own = tmp_path / f"holdfast-{os.getuid()}"
    if squat == "open":
        own.mkdir()
        own.chmod(0o777)
    elif squat == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "other")
    else:
        own.write_text("")
    with pytest.raises(PermissionError):
        lock_path(str(shared_socket), "%0")


def test_pane_locked_for_long_is_unavailable(
    tmux: TmuxServer, prompter: PanePrompter, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmux.start_agent("worker")
    monkeypatch.setattr(adapter, "LOCK_TIMEOUT_S", 0.2)
    found = Tmux(tmux.socket).find_pane("worker")
    assert found is not None
    with prompter._locked_pane(found), pytest.raises(Unavailable) as error:
        PanePrompter(Tmux(tmux.socket)).send("worker", "hello", CLAUDE, MARK)
    assert error.value.retryable
    assert agent.submitted == []


def test_cancelled_prompt_ends_early(tmux: TmuxServer, prompter: PanePrompter) -> None:
    tmux.start_agent("worker", "deaf")
    looked: list[int] = []
    sent = prompter.send(
        "worker", "hello", CLAUDE, MARK, is_cancelled=lambda: bool(looked.append(1)) or True
    )
    assert sent.reason is Why.UNCONFIRMED
    assert len(looked) == 2, "once while it should appear, once while it should be taken"


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  \n ", "a\x1b[2Jb", "a\rb", "a\x00b", "a\x03", "a\u2028b"])
@pytest.mark.parametrize("cli", list(WorkerCli))
def test_empty_prompt_or_control_character_is_refused(text: str, cli: WorkerCli) -> None:
    with pytest.raises(Invalid):
        check_prompt(text, cli)


def test_prompt_with_a_surrogate_is_refused() -> None:
    with pytest.raises(Invalid):
        check_prompt("a\ud800b", CLAUDE)


@pytest.mark.parametrize("text", ["a\nb", "a\tb"])
def test_prompt_line_break_is_refused_outside_agents(text: str) -> None:
    check_prompt(text, CLAUDE)
    check_prompt(text, CODEX)
    with pytest.raises(Invalid):
        check_prompt(text, OTHER)


@pytest.mark.parametrize(
    "text", ["!id", "/clear", "# note", "  !id", "\n\t/clear", "&task", "!", "/"]
)
def test_prompt_that_starts_a_command_is_refused(text: str) -> None:
    for cli in (CLAUDE, CODEX):
        with pytest.raises(Invalid) as error:
            check_not_command(text, cli)
        assert error.value.fields["found"] == text.lstrip()[0]
    check_not_command(text, OTHER)


@pytest.mark.parametrize("text", ["a !b", "a\n/b", "a\n# b", "(!)", "[holdfast] x", "-x", "$x"])
def test_prompt_with_a_command_character_inside_is_accepted(text: str) -> None:
    for cli in WorkerCli:
        check_not_command(text, cli)


def test_prompt_size_is_limited() -> None:
    check_prompt("x" * TEXT_BYTES_MAX, CLAUDE)
    with pytest.raises(ValueTooLarge):
        check_prompt("x" * (TEXT_BYTES_MAX + 1), CLAUDE)
