"""The pane prompter: types a prompt into the pane of an agent, submits and confirms it (document
000).

A typed text ends with a mark that is derived from the request id. The mark identifies the text in
the pane:

- Before typing, the pane is searched for the mark. If an earlier prompter typed the request and
  died before it was logged, the text is confirmed or submitted and not typed twice.
- A foreign draft in the pane would be submitted together with the new text. If the draft ends with
  a mark, its prompter died before Enter: the draft is submitted separately. Any other draft is
  deleted. So a text whose mark was ever visible has been submitted or will be.
- A text is confirmed once its mark is visible and not at the cursor. A mark at the cursor belongs
  to a draft that is not submitted.

A pane has one prompter at a time per machine: it holds a file lock, which the operating system
releases when the process dies. `send` returns a `DispatchOutcomeReason` and does not raise for the
behaviour of a pane. `dispatch.outcomes` maps the reason to a transition of the request.

A pane without echo cannot be confirmed: the text is typed again while retries are left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.adapters.errors import Unavailable
from holdfast.adapters.tmux import (
    PaneState,
    PaneView,
    Tmux,
    TmuxFailed,
    foreground_programs,
    parse_target,
)
from holdfast.clock import SYSTEM, Clock, S
from holdfast.dispatch.outcomes import DispatchOutcomeReason, WorkerCli
from holdfast.dispatch.request import MARK_CHARS
from holdfast.errors import Invalid, Timeout, ValueTooLarge

TEXT_BYTES_MAX = 64 * 1024
# The number of scrolled lines that are searched for a mark.
HISTORY_LINES = 2000
POLL_S = 0.05
# The time for a typed text to appear before it is submitted nevertheless ...
ECHO_TIMEOUT_S = 2.0
# ... and the time for the submission to be confirmed after that.
CONFIRM_TIMEOUT_S = 3.0
# The pause between two Enter presses, and the time before Enter is repeated for a remaining draft.
PRESS_PAUSE_S = 0.2
PRESS_AGAIN_S = 0.7
LOCK_TIMEOUT_S = 20.0
# The key that deletes the line before the cursor, in terminals and in agents.
CLEAR_LINE_KEY = "C-u"

# Shells: they would run a prompt as a command.
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "fish", "ksh", "mksh", "ash", "csh", "tcsh"})
# Prefixes that agents interpret as a command: of a shell, of the agent, a note, another mode.
COMMAND_PREFIXES = "!/#&"
# Characters that a terminal interprets. A line break and a tab are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")
# The end of another request's draft, as visible in the pane.
_MARK_AT_END = re.compile(rf"hf[0-9a-f]{{{MARK_CHARS}}}\Z")


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of an attempt, and whether a text was typed in it."""

    reason: DispatchOutcomeReason
    detail: str = ""
    typed: bool = False
    pane_id: str = ""


class PanePrompter:
    """Types prompts into panes of one tmux server."""

    def __init__(self, tmux: Tmux, clock: Clock = SYSTEM) -> None:
        self._tmux = tmux
        self._clock = clock

    def exists(self, target: str) -> bool:
        """Whether the pane exists and a program runs in it."""
        found = self._tmux.find_pane(target)
        return found is not None and not found.dead

    def send(
        self,
        target: str,
        text: str,
        cli: WorkerCli,
        mark: str,
        *,
        on_type: Callable[[], object] = lambda: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> PromptResult:
        """Put a text into a pane once. `on_type` is called before any text is typed."""
        try:
            parse_target(target)
        except Invalid as error:
            return PromptResult(DispatchOutcomeReason.TARGET_UNRESOLVED, str(error))
        try:
            found = self._tmux.find_pane(target)
            if found is None or found.dead:
                return PromptResult(
                    DispatchOutcomeReason.TARGET_MISSING, f"nothing runs at {target}"
                )
            with self._locked_pane(found) as tmux:
                typing = _PromptAttempt(tmux, self._clock, found.pane_id, cli, mark, is_cancelled)
                return typing.run(text, on_type)
        except (TmuxFailed, Timeout, OSError) as error:
            return PromptResult(DispatchOutcomeReason.SEND_FAILED, str(error))

    @contextlib.contextmanager
    def _locked_pane(self, pane: PaneState) -> Iterator[Tmux]:
        """Lock the pane on this machine. The tmux command of a key press inherits the lock, so the
        lock stays held if this process is killed while a key is in flight."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock_fd = os.open(self._tmux.lock_path(pane), flags, 0o600)
        try:
            if not _try_lock(lock_fd):
                if not _wait_until(self._clock, lambda: _try_lock(lock_fd), LOCK_TIMEOUT_S):
                    raise Unavailable(
                        what="pane", pane=pane.pane_id, why="another prompter holds its lock"
                    )
                # The former holder may have just died. Wait until its last keys are visible.
                self._clock.sleep(PRESS_PAUSE_S)
            yield self._tmux.with_open_files(lock_fd)
        finally:
            os.close(lock_fd)


class _PromptAttempt:
    """One attempt to put one text into one locked pane."""

    def __init__(
        self,
        tmux: Tmux,
        clock: Clock,
        pane_id: str,
        cli: WorkerCli,
        mark: str,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._tmux = tmux
        self._clock = clock
        self._pane_id = pane_id
        self._cli = cli
        self._mark = mark
        self._is_cancelled = is_cancelled
        self._pressed_ns = clock.mono_ns()

    def run(self, text: str, on_type: Callable[[], object]) -> PromptResult:
        wrong = self._preflight()
        if wrong:
            return self._result(DispatchOutcomeReason.PREFLIGHT_FAILED, wrong)
        where = self._find_mark()
        typed = where is _ABSENT
        if typed:
            on_type()
            self._clear_draft()
            self._tmux.type_text(self._pane_id, with_marker(text, self._mark))
            self._wait(lambda: self._find_mark() is not _ABSENT, ECHO_TIMEOUT_S)
        if typed or where is _DRAFT:
            self._submit()
        if self._wait(self._is_submitted, CONFIRM_TIMEOUT_S):
            return self._result(DispatchOutcomeReason.CONFIRMED, typed=typed)
        why = "the pane does not show that the program accepted the prompt"
        return self._result(DispatchOutcomeReason.UNCONFIRMED, why, typed=typed)

    def _clear_draft(self) -> None:
        """Remove a draft that another prompter or a user left: it would be submitted with the new
        text."""
        draft = self._draft()
        if _MARK_AT_END.search(draft):
            # The draft is complete and only lacks the submit key: its own request will find it delivered.
            self._submit()
            self._wait(lambda: self._draft() != draft, CONFIRM_TIMEOUT_S)
        self._tmux.press_key(self._pane_id, CLEAR_LINE_KEY)

    def _preflight(self) -> str:
        """Return the reason why no text may be typed into the pane; empty if typing is allowed."""
        found = self._tmux.find_pane(self._pane_id)
        if found is not None and found.in_mode:
            with contextlib.suppress(TmuxFailed):
                self._tmux.leave_mode(self._pane_id)
            found = self._tmux.find_pane(self._pane_id)
        if found is None or found.dead:
            return "no program runs in the pane"
        if found.in_mode:
            return "the pane is in copy or choose mode"
        if found.input_off:
            return "the pane accepts no input"
        if self._cli is not WorkerCli.OTHER and foreground_programs(found) <= SHELLS:
            return f"{self._cli.value} does not run there: {found.command} would run the text"
        return ""

    def _submit(self) -> None:
        for press in range(self._cli.presses):
            if press:
                self._clock.sleep(PRESS_PAUSE_S)
            self._press()

    def _press(self) -> None:
        self._tmux.press_key(self._pane_id, "Enter")
        self._pressed_ns = self._clock.mono_ns()

    def _is_submitted(self) -> bool:
        where = self._find_mark()
        if where is _DRAFT and self._clock.mono_ns() - self._pressed_ns > PRESS_AGAIN_S * S:
            # An agent that was redrawing may have taken Enter as part of the text.
            self._press()
        return where is _SUBMITTED

    def _find_mark(self) -> str:
        """Return whether the mark is in the pane: as a draft at the cursor, elsewhere, or
        absent."""
        view = self._tmux.capture(self._pane_id, history=HISTORY_LINES)
        wanted = _alphanumeric(marker(self._mark))
        if view is None or wanted not in _alphanumeric("".join(view.lines)):
            return _ABSENT
        return _DRAFT if _draft_of(view).endswith(wanted) else _SUBMITTED

    def _draft(self) -> str:
        view = self._tmux.capture(self._pane_id)
        return "" if view is None else _draft_of(view)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        return _wait_until(self._clock, condition, timeout_s, self._is_cancelled)

    def _result(
        self, reason: DispatchOutcomeReason, detail: str = "", *, typed: bool = False
    ) -> PromptResult:
        return PromptResult(reason, detail, typed, self._pane_id)


# Positions of a mark in the pane.
_ABSENT, _DRAFT, _SUBMITTED = "absent", "draft", "taken"


def check_prompt(text: str, cli: WorkerCli) -> None:
    """Raise Invalid unless the text can be typed: no control characters, and within the size
    limit."""
    if not isinstance(text, str) or not text.strip():
        raise Invalid(what="text", why="the text is empty")
    size = len(text.encode(errors="surrogatepass"))
    if size > TEXT_BYTES_MAX:
        raise ValueTooLarge(what="text", bytes=size, bytes_max=TEXT_BYTES_MAX)
    found = _CONTROL.search(text)
    if found:
        raise Invalid(
            what="text", why="a control character", found=repr(found[0]), at=found.start()
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise Invalid(what="text", why="a lone surrogate")
    if not cli.takes_lines and re.search(r"[\n\t]", text):
        raise Invalid(what="text", why="a line break or a tab is a key to this program, not text")


def check_not_command(text: str, cli: WorkerCli) -> None:
    """Refuse a prompt that the agent would interpret as a command. A shell would run `!rm -rf
    .`."""
    start = text.lstrip()[:1]
    if cli is not WorkerCli.OTHER and start in COMMAND_PREFIXES:
        raise Invalid(
            what="text",
            found=start,
            why=f"{cli.value} would run it as a command; begin with a word, or set the option commands",
        )


def marker(mark: str) -> str:
    """Format a mark as it is typed into a pane."""
    return f"[hf:{mark}]"


def with_marker(text: str, mark: str) -> str:
    return f"{text} {marker(mark)}"


def _alphanumeric(text: str) -> str:
    """Reduce text to letters and digits, because an agent wraps lines and draws frames."""
    return _NOT_ALPHANUMERIC.sub("", text)


def _draft_of(view: PaneView) -> str:
    """Return the text before the cursor, or empty if the cursor's line has no text before it."""
    last = view.lines[view.row][: view.column] if view.row < len(view.lines) else ""
    # The closing bracket of a mark may be wrapped onto a separate line.
    if not _alphanumeric(last) and "]" not in last:
        return ""
    return _alphanumeric("".join([*view.lines[: view.row], last]))


def _wait_until(
    clock: Clock,
    condition: Callable[[], bool],
    timeout_s: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    deadline_ns = clock.mono_ns() + int(timeout_s * S)
    while not condition():
        if is_cancelled() or clock.mono_ns() >= deadline_ns:
            return False
        clock.sleep(POLL_S)
    return True


def _try_lock(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
