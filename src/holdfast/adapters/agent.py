"""A text into the pane of an agent: find the pane, look, type, submit, confirm (document 000).

What is typed ends with a mark that is made of the request's id. It is how a text is known again:

- Before anything is typed the pane is searched for the mark. A request that was typed by somebody who
  died before it was written down is confirmed, or submitted, and not typed twice.
- A draft of somebody else's that stands in the pane would be submitted with ours. If it ends with a
  mark, its typist died before the key: it is submitted by itself. Any other is wiped. So a text whose
  mark was ever seen has been submitted, or will be.
- It is confirmed once the mark is to be seen and no longer stands at the cursor: there it is a draft
  that nobody has submitted.

A pane has one typist at a time on a machine: a file is locked meanwhile, which the system lets go of
when a process dies. `send` answers with a `DispatchOutcomeReason` and never raises for what a pane
does; what the answer means for the request is in `authority.outcome`.

What a pane does not echo cannot be confirmed: it is typed again while there are retries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.adapters.errors import Unavailable
from holdfast.adapters.tmux import PaneState, Tmux, TmuxFailed, View, in_front, target_of
from holdfast.authority.dispatch import MARK_CHARS
from holdfast.authority.outcome import DispatchOutcomeReason, WorkerCli
from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import Invalid, Timeout, ValueTooLarge

TEXT_BYTES_MAX = 64 * 1024
# Lines that have scrolled away and are searched for a mark.
HISTORY_LINES = 2000
LOOK_EVERY_S = 0.05
# How long a text may take to appear before it is submitted all the same ...
APPEARS_S = 2.0
# ... and how long until it must have been taken after that.
TAKEN_S = 3.0
# Between two presses, and before one is repeated because the draft still stands there.
PRESS_PAUSE_S = 0.2
PRESS_AGAIN_S = 0.7
LOCK_S = 20.0
# The key that empties the line before the cursor, in terminals and in agents.
WIPE = "C-u"

# A prompt that is typed to one of these is run as a command.
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "fish", "ksh", "mksh", "ash", "csh", "tcsh"})
# At the start of a prompt agents take these for a command: a shell's, their own, a note, another place.
COMMANDS = "!/#&"
# What a terminal obeys instead of showing; a line break and a tab are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_UNSEEN = re.compile(r"[^0-9A-Za-z]+")
# How a draft of another request ends, as far as it is seen.
_COMPLETE = re.compile(rf"hf[0-9a-f]{{{MARK_CHARS}}}\Z")


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of it, in words; and whether something was typed for it now."""

    reason: DispatchOutcomeReason
    detail: str = ""
    typed: bool = False
    pane_id: str = ""


class Typist:
    """Types into panes of one tmux server."""

    def __init__(self, tmux: Tmux, clock: Clock = SYSTEM) -> None:
        self._tmux = tmux
        self._clock = clock

    def there(self, target: str) -> bool:
        """Whether there is such a pane, and something runs in it."""
        found = self._tmux.pane(target)
        return found is not None and not found.dead

    def send(
        self,
        target: str,
        text: str,
        cli: WorkerCli,
        mark: str,
        *,
        begin: Callable[[], object] = lambda: None,
        dropped: Callable[[], bool] = lambda: False,
    ) -> Sent:
        """Have a text in a pane, once. `begin` is called before anything is typed."""
        try:
            target_of(target)
        except Invalid as error:
            return Sent(DispatchOutcomeReason.TARGET_UNRESOLVED, str(error))
        try:
            found = self._tmux.pane(target)
            if found is None or found.dead:
                return Sent(DispatchOutcomeReason.TARGET_MISSING, f"nothing runs at {target}")
            with self._alone(found) as tmux:
                typing = _Typing(tmux, self._clock, found.pane_id, cli, mark, dropped)
                return typing.run(text, begin)
        except (TmuxFailed, Timeout, OSError) as error:
            return Sent(DispatchOutcomeReason.SEND_FAILED, str(error))

    @contextlib.contextmanager
    def _alone(self, pane: PaneState) -> Iterator[Tmux]:
        """Nobody else on this machine types into the pane meanwhile, not even if we are killed and
        one of our keys is still on its way: the command that carries it holds the lock, too."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        held = os.open(self._tmux.lock_path(pane), flags, 0o600)
        try:
            if not _locked(held):
                if not _until(self._clock, lambda: _locked(held), LOCK_S):
                    raise Unavailable(what="pane", pane=pane.pane_id, why="another types there")
                # It may have died a moment ago: what it typed last is yet to be seen.
                self._clock.sleep(PRESS_PAUSE_S)
            yield self._tmux.keeping(held)
        finally:
            os.close(held)


class _Typing:
    """One text, one pane, which is ours meanwhile."""

    def __init__(
        self,
        tmux: Tmux,
        clock: Clock,
        pane_id: str,
        cli: WorkerCli,
        mark: str,
        dropped: Callable[[], bool],
    ) -> None:
        self._tmux = tmux
        self._clock = clock
        self._pane_id = pane_id
        self._cli = cli
        self._mark = mark
        self._dropped = dropped
        self._pressed_ns = clock.mono_ns()

    def run(self, text: str, begin: Callable[[], object]) -> Sent:
        wrong = self._preflight()
        if wrong:
            return self._sent(DispatchOutcomeReason.PREFLIGHT_FAILED, wrong)
        where = self._where()
        typed = where is _ABSENT
        if typed:
            begin()
            self._clear()
            self._tmux.type(self._pane_id, marked(text, self._mark))
            self._wait(lambda: self._where() is not _ABSENT, APPEARS_S)
        if typed or where is _DRAFT:
            self._submit()
        if self._wait(self._taken, TAKEN_S):
            return self._sent(DispatchOutcomeReason.CONFIRMED, typed=typed)
        why = "the pane does not show that it was taken"
        return self._sent(DispatchOutcomeReason.UNCONFIRMED, why, typed=typed)

    def _clear(self) -> None:
        """A draft that somebody left, who died or went away, would be submitted with ours."""
        left = self._draft()
        if _COMPLETE.search(left):
            # All of it is there but the key: whoever does that request finds that it was taken.
            self._submit()
            self._wait(lambda: self._draft() != left, TAKEN_S)
        self._tmux.press(self._pane_id, WIPE)

    def _preflight(self) -> str:
        """Why nothing is to be typed there; empty when it may be."""
        found = self._tmux.pane(self._pane_id)
        if found is not None and found.in_mode:
            with contextlib.suppress(TmuxFailed):
                self._tmux.leave_mode(self._pane_id)
            found = self._tmux.pane(self._pane_id)
        if found is None or found.dead:
            return "nothing runs in the pane any more"
        if found.in_mode:
            return "somebody scrolls or chooses in the pane"
        if found.input_off:
            return "the pane takes no input"
        if self._cli is not WorkerCli.OTHER and in_front(found) <= SHELLS:
            return f"{self._cli.value} does not run there: {found.command} would run the text"
        return ""

    def _submit(self) -> None:
        for press in range(self._cli.presses):
            if press:
                self._clock.sleep(PRESS_PAUSE_S)
            self._press()

    def _press(self) -> None:
        self._tmux.press(self._pane_id, "Enter")
        self._pressed_ns = self._clock.mono_ns()

    def _taken(self) -> bool:
        where = self._where()
        if where is _DRAFT and self._clock.mono_ns() - self._pressed_ns > PRESS_AGAIN_S * S:
            # An agent that was busy drawing may have taken Enter for a part of the text.
            self._press()
        return where is _TAKEN

    def _where(self) -> str:
        """Whether the mark is in the pane: as a draft at the cursor, elsewhere, or not at all."""
        view = self._tmux.look(self._pane_id, history=HISTORY_LINES)
        wanted = _seen(marker(self._mark))
        if view is None or wanted not in _seen("".join(view.lines)):
            return _ABSENT
        return _DRAFT if _draft_in(view).endswith(wanted) else _TAKEN

    def _draft(self) -> str:
        view = self._tmux.look(self._pane_id)
        return "" if view is None else _draft_in(view)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        return _until(self._clock, condition, timeout_s, self._dropped)

    def _sent(
        self, reason: DispatchOutcomeReason, detail: str = "", *, typed: bool = False
    ) -> Sent:
        return Sent(reason, detail, typed, self._pane_id)


# Where a mark is found.
_ABSENT, _DRAFT, _TAKEN = "absent", "draft", "taken"


def check_text(text: str, cli: WorkerCli) -> None:
    """What may be typed: nothing that a terminal would obey, and no more than fits."""
    if not isinstance(text, str) or not text.strip():
        raise Invalid(what="text", why="there is nothing to type")
    size = len(text.encode(errors="surrogatepass"))
    if size > TEXT_BYTES_MAX:
        raise ValueTooLarge(what="text", bytes=size, bytes_max=TEXT_BYTES_MAX)
    found = _CONTROL.search(text)
    if found:
        raise Invalid(
            what="text", why="a control character", found=repr(found[0]), at=found.start()
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise Invalid(what="text", why="half a character")
    if not cli.takes_lines and re.search(r"[\n\t]", text):
        raise Invalid(what="text", why="a line break or a tab is a key to this program, not text")


def check_start(text: str, cli: WorkerCli) -> None:
    """Refuse a prompt that the agent would take for a command. `!rm -rf .` is run by a shell there."""
    start = text.lstrip()[:1]
    if cli is not WorkerCli.OTHER and start in COMMANDS:
        raise Invalid(
            what="text",
            found=start,
            why=f"{cli.value} takes it for a command: begin with a word, or set the option commands",
        )


def marker(mark: str) -> str:
    """How a mark stands in a pane."""
    return f"[hf:{mark}]"


def marked(text: str, mark: str) -> str:
    return f"{text} {marker(mark)}"


def _seen(text: str) -> str:
    """Letters and digits alone: an agent wraps lines and draws frames where it likes."""
    return _UNSEEN.sub("", text)


def _draft_in(view: View) -> str:
    """What stands before the cursor, if anything does on its own line."""
    last = view.lines[view.row][: view.column] if view.row < len(view.lines) else ""
    # The bracket that ends a mark may have been wrapped by itself.
    if not _seen(last) and "]" not in last:
        return ""
    return _seen("".join([*view.lines[: view.row], last]))


def _until(
    clock: Clock,
    condition: Callable[[], bool],
    timeout_s: float,
    dropped: Callable[[], bool] = lambda: False,
) -> bool:
    deadline_ns = clock.mono_ns() + int(timeout_s * S)
    while not condition():
        if dropped() or clock.mono_ns() >= deadline_ns:
            return False
        clock.sleep(LOOK_EVERY_S)
    return True


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
