"""tmux, as far as a dispatch needs it: find a pane, read its screen, type, press a key.

- Every command is a list of arguments: no shell sees a text or a name. What tmux itself would read
  something into is written so that it does not: a text is behind `--`, a `;` at its end is escaped,
  and panes are chosen here by their exact names, then named to tmux by their ids.
- A pane that is not there is None, whether it, its session or the whole server is missing. Anything
  else that tmux refuses is `TmuxFailed`.
- A long text goes in pieces: a tmux command has a bound, and so have we.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from holdfast.adapters.errors import NotInstalled
from holdfast.errors import HoldfastError, Invalid, Timeout

COMMAND = "tmux"
COMMAND_TIMEOUT_S = 10.0
# tmux takes commands of up to 16 KiB; a character is four bytes at most.
PIECE_CHARS = 1000
ERROR_CHARS_MAX = 200

_PANE_ID = re.compile(r"%\d{1,9}")
_NAME = r"[\w@+~ -]{1,100}"
_NAMED = re.compile(rf"(?P<session>{_NAME})(:(?P<window>{_NAME})?(\.(?P<pane>\d{{1,4}}))?)?")
_SOCKET = re.compile(r"[\w@+~./-]{1,100}")
# What tmux says when there is no server to ask.
_NOBODY = ("no server running", "error connecting to", "no sessions")

_CURSOR = "#{cursor_x} #{cursor_y} #{pane_height}"
_FIELDS = (
    "pane_id", "pane_dead", "pane_in_mode", "pane_input_off", "pane_pid", "pane_index",
    "pane_active", "window_index", "window_active",
)  # fmt: skip
# Names may hold anything: they are quoted.
_FORMAT = " ".join(
    [
        *(f"#{{{field}}}" for field in _FIELDS),
        *(
            f"=#{{q:{field}}}"
            for field in ("session_name", "window_name", "pane_current_command", "socket_path")
        ),
    ]
)


class TmuxFailed(HoldfastError):
    code = "tmux_failed"


class TmuxMissing(NotInstalled):
    hint = "apt-get install tmux"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneState:
    """A pane as it is found."""

    pane_id: str
    dead: bool
    in_mode: bool
    input_off: bool
    # The program that tmux started there, and the name of what is in front.
    pid: int
    command: str
    session: str
    # Its number, and its name.
    windows: frozenset[str]
    window_active: bool
    number: str
    active: bool
    # The socket of its server, as the server names it.
    server: str = ""


class View(NamedTuple):
    """The lines of a pane, and where the cursor stands among them."""

    lines: list[str]
    row: int
    column: int


class Tmux:
    """One server: `socket` is its name, or a path; without one, the user's own."""

    def __init__(self, socket: str = "", *, command: str = COMMAND) -> None:
        if socket and (not _SOCKET.fullmatch(socket) or socket.startswith("-")):
            raise Invalid(what="socket", found=socket[:100], expected="a name, or a path")
        self.socket = socket
        self._server = [command, *_which(socket)]
        self._kept: tuple[int, ...] = ()

    def keeping(self, *files: int) -> Tmux:
        """The same server; its commands keep these files open, also when we die in the middle."""
        kept = copy.copy(self)
        kept._kept = files
        return kept

    def lock_path(self, pane: PaneState) -> Path:
        """The file that the typist of a pane has locked."""
        return lock_path(pane.server, pane.pane_id)

    def pane(self, target: str) -> PaneState | None:
        """The pane that is meant; None when it is not there."""
        wanted = target_of(target)
        return next((found for found in self._panes() if wanted.means(found)), None)

    def _panes(self) -> list[PaneState]:
        # All are listed and ours is chosen here: asked for a window that is not there, tmux would
        # answer with the one that is in front.
        try:
            told = self._run("list-panes", "-a", "-F", _FORMAT)
        except TmuxFailed as error:
            if error.fields["said"].startswith(_NOBODY):
                return []
            raise
        return [_state_of(line) for line in told.splitlines()]

    def look(self, pane_id: str, *, history: int = 0) -> View | None:
        """What a pane shows, with so many lines that have scrolled away; None when it is gone.

        One command asks for both, so that cursor and lines are of the same moment.
        """
        cursor = ["display-message", "-p", "-t", pane_id, _CURSOR]
        lines = ["capture-pane", "-p", "-t", pane_id, "-S", str(-history)]
        try:
            told, *shown = self._run(*cursor, ";", *lines).split("\n")
        except TmuxFailed as error:
            if error.fields["said"].startswith(("can't find", *_NOBODY)):
                return None
            raise
        numbers = told.split()
        if len(numbers) != 3:
            return None
        column, row, height = map(int, numbers)
        shown = shown[:-1] if shown and not shown[-1] else shown
        return View(shown, max(len(shown) - height, 0) + row, column)

    def type(self, pane_id: str, text: str) -> None:
        """Type a text, as it stands."""
        for piece in _pieces(text):
            self._run("send-keys", "-t", pane_id, "-l", "--", piece)

    def press(self, pane_id: str, key: str) -> None:
        """Press a key by its name: Enter, C-u."""
        self._run("send-keys", "-t", pane_id, key)

    def leave_mode(self, pane_id: str) -> None:
        """End the mode that somebody scrolls or chooses in: what is typed would go there."""
        self._run("send-keys", "-t", pane_id, "-X", "cancel")

    def _run(self, *args: str) -> str:
        try:
            done = subprocess.run(
                [*self._server, *args],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                env=_environment(),
                pass_fds=self._kept,
                check=False,
            )
        except FileNotFoundError:
            raise TmuxMissing(what="tmux") from None
        except subprocess.TimeoutExpired:
            raise Timeout(what=f"tmux {args[0]}", waited_s=COMMAND_TIMEOUT_S) from None
        except (OSError, ValueError) as error:
            raise TmuxFailed(command=args[0], said=str(error)[:ERROR_CHARS_MAX]) from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()
            raise TmuxFailed(command=args[0], said=said[:ERROR_CHARS_MAX])
        return done.stdout.decode("utf-8", "replace")


def lock_path(server: str, pane_id: str) -> Path:
    """The lock file of a pane. It stays: one for each pane there was.

    It lies in a directory that is closed to other users, so that none of them can hold it. One server
    has one file for a pane, by whatever name or path the server is asked for.
    """
    socket = Path(server).resolve()
    name = sha256(f"{socket}\n{pane_id}".encode()).hexdigest()[:16]
    return _own_directory(socket.parent) / f"holdfast-pane-{name}.lock"


def in_front(found: PaneState) -> frozenset[str]:
    """The names of all programs that have the pane's terminal: an agent may have been started by a
    script, and then tmux tells of its shell alone."""
    names = {found.command.lstrip("-")}
    group = _stat(found.pid)[2]
    for entry in os.listdir("/proc") if group > 0 else ():
        if entry.isdigit():
            name, in_group, _ = _stat(int(entry))
            if in_group == group:
                names.add(name)
    return frozenset(names)


class Target(NamedTuple):
    """A pane by its id, or by where it is; what is not said is the one in front."""

    pane_id: str = ""
    session: str = ""
    window: str = ""
    number: str = ""

    def means(self, pane: PaneState) -> bool:
        if self.pane_id:
            return pane.pane_id == self.pane_id
        return (
            pane.session == self.session
            and (self.window in pane.windows if self.window else pane.window_active)
            and (self.number == pane.number if self.number else pane.active)
        )


def target_of(target: str) -> Target:
    """What is meant by `%pane`, `session`, `session:window` or `session:window.pane`."""
    if _PANE_ID.fullmatch(target):
        return Target(target)
    named = _NAMED.fullmatch(target)
    if named is None:
        expected = "%pane, or session, session:window, session:window.pane"
        raise Invalid(what="target", found=target[:100], expected=expected)
    return Target("", named["session"], named["window"] or "", named["pane"] or "")


def _state_of(line: str) -> PaneState:
    try:
        told = shlex.split(line)
    except ValueError:
        told = []
    if len(told) != len(_FIELDS) + 4:
        raise TmuxFailed(command="list-panes", said=f"not understood: {line[:ERROR_CHARS_MAX]}")
    given = dict(zip(_FIELDS, told, strict=False))
    session, window, command, server = (word[1:] for word in told[len(_FIELDS) :])
    return PaneState(
        pane_id=given["pane_id"],
        dead=given["pane_dead"] == "1",
        in_mode=given["pane_in_mode"] not in ("", "0"),
        input_off=given["pane_input_off"] == "1",
        pid=int(given["pane_pid"]),
        session=session,
        windows=frozenset({given["window_index"], window}),
        window_active=given["window_active"] == "1",
        number=given["pane_index"],
        active=given["pane_active"] == "1",
        command=command,
        server=server,
    )


def _own_directory(of_server: Path) -> Path:
    """The server's own directory, which tmux keeps closed; or, where its socket lies elsewhere, one of
    this user."""
    if _closed(of_server):
        return of_server
    own = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    if not _closed(own):
        raise PermissionError(f"{own} must be a directory of uid {os.getuid()} with mode 0700")
    return own


def _closed(directory: Path) -> bool:
    """Whether a directory is this user's and no other user may enter it."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def _stat(pid: int) -> tuple[str, int, int]:
    """The name of a process, its group, and the group that has its terminal; 0 where nobody knows."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        return head.partition("(")[2], int(fields[2]), int(fields[5])
    except (OSError, ValueError, IndexError):
        return "", 0, 0


def _which(socket: str) -> list[str]:
    if not socket:
        return []
    return ["-S" if "/" in socket else "-L", socket]


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), PIECE_CHARS):
        piece = text[at : at + PIECE_CHARS]
        # At the end of an argument it would begin the next command.
        yield piece[:-1] + "\\;" if piece.endswith(";") else piece


def _environment() -> dict[str, str]:
    """Ours, without the server that we may be running in; and text is UTF-8 whatever ours says."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    return {**kept, "LC_ALL": "C.UTF-8"}
