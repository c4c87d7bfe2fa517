"""A tmux client for dispatches: find a pane, read its screen, type text, press a key.

- Every command is an argument list: no shell interprets a text or a name. Arguments that tmux
  itself would interpret are escaped: a text follows `--`, and a `;` at its end is quoted. This
  module selects panes by exact names and passes their ids to tmux.
- A missing pane is None, whether the pane, its session or the whole server is missing. Any other
  failure of tmux raises `TmuxFailed`.
- A long text is sent in pieces, because the size of a tmux command is limited.
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

from holdfast import failpoints
from holdfast.adapters.errors import NotInstalled
from holdfast.errors import HoldfastError, Invalid, Timeout

COMMAND = "tmux"
COMMAND_TIMEOUT_S = 10.0
# tmux accepts commands of up to 16 KiB. A character has at most four bytes.
PIECE_CHARS = 1000
ERROR_CHARS_MAX = 200

_PANE_ID = re.compile(r"%\d{1,9}")
_NAME = r"[\w@+~ -]{1,100}"
_NAMED = re.compile(rf"(?P<session>{_NAME})(:(?P<window>{_NAME})?(\.(?P<pane>\d{{1,4}}))?)?")
_SOCKET = re.compile(r"[\w@+~./-]{1,100}")
# The messages of tmux when no server is running.
_NO_SERVER = ("no server running", "error connecting to", "no sessions")

_CURSOR = "#{cursor_x} #{cursor_y} #{pane_height}"
_FIELDS = (
    "pane_id", "pane_dead", "pane_in_mode", "pane_input_off", "pane_pid", "pane_index",
    "pane_active", "window_index", "window_active",
)  # fmt: skip
# Names may contain any character, so they are quoted.
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
    """A tmux command failed."""

    code = "tmux_failed"


class TmuxMissing(NotInstalled):
    """tmux is not installed."""

    hint = "apt-get install tmux"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneState:
    """The state of a pane."""

    pane_id: str
    dead: bool
    in_mode: bool
    input_off: bool
    # The process that tmux started in the pane, and the name of the foreground program.
    pid: int
    command: str
    session: str
    # The index and the name of the window.
    windows: frozenset[str]
    window_active: bool
    number: str
    active: bool
    # The socket of its tmux server, as the server reports it.
    server: str = ""


class PaneView(NamedTuple):
    """The lines of a pane and the cursor position in them."""

    lines: list[str]
    row: int
    column: int


class Tmux:
    """One tmux server: `socket` is its name or path; empty for the user's default server."""

    def __init__(self, socket: str = "", *, command: str = COMMAND) -> None:
        if socket and (not _SOCKET.fullmatch(socket) or socket.startswith("-")):
            raise Invalid(what="socket", found=socket[:100], expected="a name, or a path")
        self.socket = socket
        self._server = [command, *_socket_options(socket)]
        self._inherited_files: tuple[int, ...] = ()

    def with_open_files(self, *files: int) -> Tmux:
        """Return a client of the same server whose commands inherit these open files, even if this
        process dies."""
        kept = copy.copy(self)
        kept._inherited_files = files
        return kept

    def lock_path(self, pane: PaneState) -> Path:
        """The lock file of the pane's prompter."""
        return lock_path(pane.server, pane.pane_id)

    def find_pane(self, target: str) -> PaneState | None:
        """Return the pane of a target, or None if it does not exist."""
        wanted = parse_target(target)
        return next((found for found in self._list_panes() if wanted.matches(found)), None)

    def _list_panes(self) -> list[PaneState]:
        # List all panes and select here: for a missing window tmux would answer with the active
        # one.
        try:
            output = self._run("list-panes", "-a", "-F", _FORMAT)
        except TmuxFailed as error:
            if error.fields["said"].startswith(_NO_SERVER):
                return []
            raise
        return [_parse_pane(line) for line in output.splitlines()]

    def capture(self, pane_id: str, *, history: int = 0) -> PaneView | None:
        """Capture the screen of a pane with `history` scrolled lines, or None if the pane does not
        exist.

        One command reads both cursor and lines, so that they are consistent.
        """
        cursor = ["display-message", "-p", "-t", pane_id, _CURSOR]
        lines = ["capture-pane", "-p", "-t", pane_id, "-S", str(-history)]
        try:
            cursor_line, *shown = self._run(*cursor, ";", *lines).split("\n")
        except TmuxFailed as error:
            if error.fields["said"].startswith(("can't find", *_NO_SERVER)):
                return None
            raise
        numbers = cursor_line.split()
        if len(numbers) != 3:
            return None
        column, row, height = map(int, numbers)
        shown = shown[:-1] if shown and not shown[-1] else shown
        return PaneView(shown, max(len(shown) - height, 0) + row, column)

    def type_text(self, pane_id: str, text: str) -> None:
        """Type a text literally."""
        for piece in _pieces(text):
            self._run("send-keys", "-t", pane_id, "-l", "--", piece)

    def press_key(self, pane_id: str, key: str) -> None:
        """Press a key by its name: Enter, C-u."""
        if failpoints.armed:
            failpoints.hit("tmux.press_key", self, key)
        self._run("send-keys", "-t", pane_id, key)

    def leave_mode(self, pane_id: str) -> None:
        """Leave copy or choose mode, which would receive the typed keys."""
        self._run("send-keys", "-t", pane_id, "-X", "cancel")

    def _run(self, *args: str) -> str:
        try:
            done = subprocess.run(
                [*self._server, *args],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                env=_environment(),
                pass_fds=self._inherited_files,
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
    """Return the lock file of a pane. It is never deleted: one per pane.

    Its directory is private, so that no other user can lock the file. A pane has one file,
    independent of the name or path that the client uses for the server.
    """
    socket = Path(server).resolve()
    name = sha256(f"{socket}\n{pane_id}".encode()).hexdigest()[:16]
    return _private_directory(socket.parent) / f"holdfast-pane-{name}.lock"


def foreground_programs(found: PaneState) -> frozenset[str]:
    """Return the names of all programs in the pane's foreground process group. If a script started
    the agent, tmux reports only its shell."""
    names = {found.command.lstrip("-")}
    group = _process_stat(found.pid)[2]
    for entry in os.listdir("/proc") if group > 0 else ():
        if entry.isdigit():
            name, in_group, _ = _process_stat(int(entry))
            if in_group == group:
                names.add(name)
    return frozenset(names)


class PaneTarget(NamedTuple):
    """A pane by id, or by session, window and index. Missing parts select the active one."""

    pane_id: str = ""
    session: str = ""
    window: str = ""
    number: str = ""

    def matches(self, pane: PaneState) -> bool:
        if self.pane_id:
            return pane.pane_id == self.pane_id
        return (
            pane.session == self.session
            and (self.window in pane.windows if self.window else pane.window_active)
            and (self.number == pane.number if self.number else pane.active)
        )


def parse_target(target: str) -> PaneTarget:
    """Parse `%pane`, `session`, `session:window` or `session:window.pane`."""
    if _PANE_ID.fullmatch(target):
        return PaneTarget(target)
    named = _NAMED.fullmatch(target)
    if named is None:
        expected = "%pane, or session, session:window, session:window.pane"
        raise Invalid(what="target", found=target[:100], expected=expected)
    return PaneTarget("", named["session"], named["window"] or "", named["pane"] or "")


def _parse_pane(line: str) -> PaneState:
    try:
        words = shlex.split(line)
    except ValueError:
        words = []
    if len(words) != len(_FIELDS) + 4:
        raise TmuxFailed(command="list-panes", said=f"cannot parse: {line[:ERROR_CHARS_MAX]}")
    given = dict(zip(_FIELDS, words, strict=False))
    session, window, command, server = (word[1:] for word in words[len(_FIELDS) :])
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


def _private_directory(of_server: Path) -> Path:
    """Return the private directory of the tmux server, or a private directory of this user if the
    socket is elsewhere."""
    if _is_private(of_server):
        return of_server
    own = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    if not _is_private(own):
        raise PermissionError(f"{own} must be a directory of uid {os.getuid()} with mode 0700")
    return own


def _is_private(directory: Path) -> bool:
    """Whether a directory belongs to this user and no other user may enter it."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def _process_stat(pid: int) -> tuple[str, int, int]:
    """Return the name of a process, its process group, and the foreground group of its terminal; 0
    if unknown."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        return head.partition("(")[2], int(fields[2]), int(fields[5])
    except (OSError, ValueError, IndexError):
        return "", 0, 0


def _socket_options(socket: str) -> list[str]:
    if not socket:
        return []
    return ["-S" if "/" in socket else "-L", socket]


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), PIECE_CHARS):
        piece = text[at : at + PIECE_CHARS]
        # At the end of an argument it would separate tmux commands.
        yield piece[:-1] + "\\;" if piece.endswith(";") else piece


def _environment() -> dict[str, str]:
    """Return the environment without the tmux server that this process may run in, with UTF-8 as
    the locale."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    return {**kept, "LC_ALL": "C.UTF-8"}
