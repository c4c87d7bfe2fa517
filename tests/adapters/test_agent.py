"""A text into a pane: typed once, submitted as its program wants it, and seen to be taken."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.adapters import agent as adapter
from holdfast.adapters.agent import TEXT_BYTES_MAX, Sent, Typist, check_start, check_text, marked
from holdfast.adapters.errors import Unavailable
from holdfast.adapters.tmux import Tmux, lock_path
from holdfast.authority.dispatch import mark_of
from holdfast.authority.outcome import DispatchOutcomeReason as Why
from holdfast.authority.outcome import WorkerCli
from holdfast.errors import Invalid, ValueTooLarge
from tests.panes import Agent, TmuxServer, tmux
from tests.process.watch import until

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.agent",)

MARK = mark_of("request-1")
CLAUDE, CODEX, OTHER = WorkerCli.CLAUDE, WorkerCli.CODEX, WorkerCli.OTHER


@pytest.fixture
def typist(tmux: TmuxServer) -> Typist:
    return Typist(Tmux(tmux.socket))


@pytest.fixture
def impatient(tmux: TmuxServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not taken at once is not waited for long."""
    monkeypatch.setattr(adapter, "APPEARS_S", 0.3)
    monkeypatch.setattr(adapter, "TAKEN_S", 0.6)


def enters(agent: Agent) -> int:
    return len(agent.submitted)


# -- the submit policy -----------------------------------------------------------------------------


@pytest.mark.parametrize(("cli", "presses"), [(CLAUDE, 1), (CODEX, 2), (OTHER, 2)])
def test_each_program_gets_its_presses(
    tmux: TmuxServer, typist: Typist, cli: WorkerCli, presses: int
) -> None:
    agent = tmux.agent("worker", "framed")
    assert typist.send("worker", "hello", cli, MARK).reason is Why.CONFIRMED
    until(lambda: enters(agent) >= presses, "the presses")
    assert agent.submitted == [marked("hello", MARK)] + [""] * (presses - 1)


def test_a_draft_that_still_stands_is_submitted_again(
    tmux: TmuxServer, typist: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "PRESS_AGAIN_S", 0.7)
    agent = tmux.agent("worker", "paste")
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(marked("hello", MARK))


def test_lines_are_one_text_to_an_agent(tmux: TmuxServer, typist: Typist) -> None:
    agent = tmux.agent("worker", "framed")
    typist.send("worker", "first\nsecond\n\tthird", CLAUDE, MARK)
    until(lambda: agent.submitted, "the text")
    agent.expect(marked("first\nsecond\n\tthird", MARK))


# -- confirmation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["line", "framed", "hidden"])
@pytest.mark.parametrize("length", [1, 20, 60, 79, 400])
def test_a_text_is_confirmed_however_it_is_wrapped(
    tmux: TmuxServer, typist: Typist, mode: str, length: int
) -> None:
    agent = tmux.agent("worker", mode)
    text = "x" * length
    assert typist.send("worker", text, CLAUDE, MARK) == Sent(Why.CONFIRMED, "", True, agent.pane_id)
    until(lambda: agent.texts, "the text")
    agent.expect_texts(marked(text, MARK))


@pytest.mark.usefixtures("impatient")
def test_a_pane_that_shows_nothing_confirms_nothing(tmux: TmuxServer, typist: Typist) -> None:
    tmux.agent("worker", "deaf")
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.UNCONFIRMED


@pytest.mark.usefixtures("impatient")
def test_a_draft_that_nobody_takes_is_not_confirmed(tmux: TmuxServer, typist: Typist) -> None:
    tmux.agent("worker", "stuck")
    sent = typist.send("worker", "hello", CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.UNCONFIRMED, True)


# -- once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["line", "framed", "hidden"])
def test_what_stands_in_the_pane_is_not_typed_again(
    tmux: TmuxServer, typist: Typist, mode: str
) -> None:
    agent = tmux.agent("worker", mode)
    typist.send("worker", "hello", CLAUDE, MARK)
    sent = typist.send("worker", "hello", CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    typist.send("worker", "last", CLAUDE, mark_of("last"))
    until(lambda: len(agent.texts) >= 2, "the last text")
    agent.expect(marked("hello", MARK), marked("last", mark_of("last")))


@pytest.mark.parametrize("mode", ["line", "framed"])
@pytest.mark.parametrize("length", [5, 9, 10, 11, 12, 13, 41, 61, 62])
def test_a_draft_that_somebody_left_is_submitted_and_not_typed_again(
    tmux: TmuxServer, typist: Typist, mode: str, length: int
) -> None:
    # Some of the lengths put the last letters of the mark on a line of their own, or its bracket.
    agent = tmux.agent("worker", mode)
    text = "x" * length
    Tmux(tmux.socket).type(agent.pane_id, marked(text, MARK))
    until(lambda: agent.shows(MARK), "the draft")
    sent = typist.send("worker", text, CLAUDE, MARK)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    agent.expect(marked(text, MARK))


@pytest.mark.parametrize("mode", ["line", "framed"])
def test_a_draft_that_somebody_left_is_wiped_first(
    tmux: TmuxServer, typist: Typist, mode: str
) -> None:
    agent = tmux.agent("worker", mode)
    Tmux(tmux.socket).type(agent.pane_id, "as I was say")
    until(lambda: agent.shows("as I was say"), "the draft")
    typist.send("worker", "hello", CLAUDE, MARK)
    agent.expect(marked("hello", MARK))


@pytest.mark.parametrize("mode", ["line", "framed"])
def test_a_whole_text_of_another_request_is_submitted_by_itself_first(
    tmux: TmuxServer, typist: Typist, mode: str
) -> None:
    agent = tmux.agent("worker", mode)
    other = mark_of("another")
    Tmux(tmux.socket).type(agent.pane_id, marked("theirs", other))
    until(lambda: agent.shows(other), "the draft")
    typist.send("worker", "ours", CLAUDE, MARK)
    sent = typist.send("worker", "theirs", CLAUDE, other)
    assert (sent.reason, sent.typed) == (Why.CONFIRMED, False)
    agent.expect(marked("theirs", other), marked("ours", MARK))


def test_begin_is_called_before_anything_is_typed_and_only_then(
    tmux: TmuxServer, typist: Typist
) -> None:
    agent = tmux.agent("worker")
    shown: list[bool] = []
    for _ in range(2):
        typist.send("worker", "hi", CLAUDE, MARK, begin=lambda: shown.append(agent.shows(MARK)))
    assert shown == [False]


def test_texts_for_one_pane_are_typed_one_after_another(tmux: TmuxServer) -> None:
    agent = tmux.agent("worker", "framed")
    texts = [f"text number {n} " + str(n) * 40 for n in range(6)]

    @dataclass
    class Sender(threading.Thread):
        text: str
        sent: list[Sent] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__()

        def __hash__(self) -> int:
            return id(self)

        def run(self) -> None:
            typist = Typist(Tmux(tmux.socket))
            self.sent.append(typist.send("worker", self.text, CODEX, mark_of(self.text)))

    senders = [Sender(text) for text in texts]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(30)
    assert [one.sent[0].reason for one in senders] == [Why.CONFIRMED] * len(texts)
    until(lambda: len(agent.texts) >= len(texts), "all texts")
    assert sorted(agent.texts) == sorted(marked(text, mark_of(text)) for text in texts)


# -- what stands in the way --------------------------------------------------------------------------


def test_a_pane_that_is_not_there_is_missing(tmux: TmuxServer, typist: Typist) -> None:
    assert typist.send("nobody", "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING


def test_a_server_that_is_not_there_is_a_missing_target() -> None:
    typist = Typist(Tmux("hf-no-such-server"))
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING
    assert not typist.there("worker")


def test_a_pane_whose_program_has_ended_is_missing(tmux: TmuxServer, typist: Typist) -> None:
    tmux.run("set-option", "-g", "remain-on-exit", "on")
    pane_id = tmux.plain("gone", "true")
    until(lambda: not typist.there(pane_id), "its end")
    assert typist.send(pane_id, "hello", CLAUDE, MARK).reason is Why.TARGET_MISSING


def test_what_no_pane_can_be_called_is_unresolved(tmux: TmuxServer, typist: Typist) -> None:
    assert typist.send("a:b:c", "hello", CLAUDE, MARK).reason is Why.TARGET_UNRESOLVED


@pytest.mark.parametrize("cli", [CLAUDE, CODEX])
def test_a_prompt_is_not_typed_to_a_shell(
    tmux: TmuxServer, typist: Typist, cli: WorkerCli, tmp_path: os.PathLike[str]
) -> None:
    tmux.plain("shell", "bash", "--norc", "-i")
    until(lambda: "bash" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its prompt")
    sent = typist.send("shell", "rm -rf /nowhere", cli, MARK)
    assert sent.reason is Why.PREFLIGHT_FAILED
    assert "nowhere" not in tmux.run("capture-pane", "-p", "-t", "=shell:")


def test_a_shell_is_typed_to_when_it_is_what_was_meant(tmux: TmuxServer, typist: Typist) -> None:
    tmux.plain("shell", "bash", "--norc", "-i")
    until(lambda: "bash" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its prompt")
    assert typist.send("shell", "echo $((6*7))", OTHER, MARK).reason is Why.CONFIRMED
    until(lambda: "42" in tmux.run("capture-pane", "-p", "-t", "=shell:"), "its answer")


def test_an_agent_that_a_script_started_is_typed_to(tmux: TmuxServer, typist: Typist) -> None:
    agent = tmux.agent("worker", "framed", shell="bash")
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(marked("hello", MARK))


def test_a_pane_in_which_somebody_scrolls_is_brought_back(tmux: TmuxServer, typist: Typist) -> None:
    agent = tmux.agent("worker", "framed")
    tmux.run("copy-mode", "-t", agent.pane_id)
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    agent.expect(marked("hello", MARK))


def test_a_pane_that_takes_no_input_fails_the_preflight(tmux: TmuxServer, typist: Typist) -> None:
    agent = tmux.agent("worker")
    tmux.run("select-pane", "-d", "-t", agent.pane_id)
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.PREFLIGHT_FAILED
    assert agent.submitted == []


def test_a_tmux_that_refuses_is_a_failed_send(
    tmux: TmuxServer, typist: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmux.agent("worker")
    monkeypatch.setattr(
        Tmux, "press", lambda self, pane_id, key: self._run("send-keys", "-t", "%99")
    )
    sent = typist.send("worker", "hello", CLAUDE, MARK)
    assert sent.reason is Why.SEND_FAILED
    assert "find pane" in sent.detail
    assert agent.submitted == []


def test_a_pane_that_cannot_be_locked_is_a_failed_send(tmux: TmuxServer, typist: Typist) -> None:
    agent = tmux.agent("worker")
    lock = lock_of(tmux)
    lock.mkdir()
    try:
        assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.SEND_FAILED
        assert agent.submitted == []
    finally:
        lock.rmdir()


def lock_of(tmux: TmuxServer, socket: str = "") -> Path:
    server = Tmux(socket or tmux.socket)
    found = server.pane("worker")
    assert found is not None
    return server.lock_path(found)


def test_the_lock_of_a_pane_lies_where_no_other_user_can_hold_it(
    tmux: TmuxServer, typist: Typist
) -> None:
    agent = tmux.agent("worker")
    assert typist.send("worker", "hello", CLAUDE, MARK).reason is Why.CONFIRMED
    lock = lock_of(tmux)
    assert lock.exists()
    assert stat.S_IMODE(lock.parent.stat().st_mode) == 0o700
    assert lock.parent.stat().st_uid == os.getuid()
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    agent.expect(marked("hello", MARK))


def test_a_server_has_one_lock_by_its_name_and_by_its_path(tmux: TmuxServer) -> None:
    agent = tmux.agent("worker")
    path = tmux.run("display-message", "-p", "-t", agent.pane_id, "#{socket_path}").strip()
    assert lock_of(tmux) == lock_of(tmux, path)


@pytest.fixture
def elsewhere(tmux: TmuxServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket of the pane's server lies in a directory that is open to others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return shared / "socket"


def test_where_a_socket_lies_in_the_open_locks_have_a_directory_of_their_own(
    elsewhere: Path, tmp_path: Path
) -> None:
    lock = lock_path(str(elsewhere), "%0")
    own = tmp_path / f"holdfast-{os.getuid()}"
    assert lock.parent == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert lock_path(str(elsewhere), "%1") != lock


@pytest.mark.parametrize("squat", ["open", "link", "file"])
def test_a_directory_of_locks_that_is_not_closed_is_refused(
    elsewhere: Path, tmp_path: Path, squat: str
) -> None:
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
        lock_path(str(elsewhere), "%0")


def test_a_pane_that_another_types_into_for_long_is_busy(
    tmux: TmuxServer, typist: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmux.agent("worker")
    monkeypatch.setattr(adapter, "LOCK_S", 0.2)
    found = Tmux(tmux.socket).pane("worker")
    assert found is not None
    with typist._alone(found), pytest.raises(Unavailable) as error:
        Typist(Tmux(tmux.socket)).send("worker", "hello", CLAUDE, MARK)
    assert error.value.retryable
    assert agent.submitted == []


def test_a_call_that_nobody_waits_for_ends_early(tmux: TmuxServer, typist: Typist) -> None:
    tmux.agent("worker", "deaf")
    looked: list[int] = []
    sent = typist.send(
        "worker", "hello", CLAUDE, MARK, dropped=lambda: bool(looked.append(1)) or True
    )
    assert sent.reason is Why.UNCONFIRMED
    assert len(looked) == 2, "once while it should appear, once while it should be taken"


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  \n ", "a\x1b[2Jb", "a\rb", "a\x00b", "a\x03", "a\u2028b"])
@pytest.mark.parametrize("cli", list(WorkerCli))
def test_an_empty_text_or_a_control_character_is_refused(text: str, cli: WorkerCli) -> None:
    with pytest.raises(Invalid):
        check_text(text, cli)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(Invalid):
        check_text("a\ud800b", CLAUDE)


@pytest.mark.parametrize("text", ["a\nb", "a\tb"])
def test_a_line_break_is_text_to_an_agent_and_a_key_elsewhere(text: str) -> None:
    check_text(text, CLAUDE)
    check_text(text, CODEX)
    with pytest.raises(Invalid):
        check_text(text, OTHER)


@pytest.mark.parametrize(
    "text", ["!id", "/clear", "# note", "  !id", "\n\t/clear", "&task", "!", "/"]
)
def test_a_text_that_an_agent_takes_for_a_command_is_refused(text: str) -> None:
    for cli in (CLAUDE, CODEX):
        with pytest.raises(Invalid) as error:
            check_start(text, cli)
        assert error.value.fields["found"] == text.lstrip()[0]
    check_start(text, OTHER)


@pytest.mark.parametrize("text", ["a !b", "a\n/b", "a\n# b", "(!)", "[holdfast] x", "-x", "$x"])
def test_a_text_with_such_a_character_behind_its_start_is_typed(text: str) -> None:
    for cli in WorkerCli:
        check_start(text, cli)


def test_a_text_has_a_bound() -> None:
    check_text("x" * TEXT_BYTES_MAX, CLAUDE)
    with pytest.raises(ValueTooLarge):
        check_text("x" * (TEXT_BYTES_MAX + 1), CLAUDE)
