"""Reaching the writer process: connect to it, start it when there is none, replace it when stuck.

A process is identified by pid and start time, so that what is killed is the writer and never some
other process that was given its number. A writer is spawned, not forked, in a session of its own:
it outlives whoever started it, and no signal to a terminal reaches it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast import __version__
from holdfast.clock import MS, SYSTEM, S
from holdfast.config import WriterLimits
from holdfast.errors import StoreCorrupt, WriterLost, from_wire
from holdfast.store import access
from holdfast.store.address import LOCK, SOCKET, Arguments, directory_of, holds_store, log_file

if TYPE_CHECKING:
    from holdfast.store.wire import Welcome


def reach(path: Path, *, bootstrap: bool, limits: WriterLimits) -> tuple[socket.socket, Welcome]:
    """A connection to the directory's writer, who has said welcome."""
    deadline_ns = SYSTEM.mono_ns() + int(limits.connect_s * S)
    silent_ns = still_since_ns = 0
    pause_s = 0.002
    trouble = "no writer answered"
    while SYSTEM.mono_ns() < deadline_ns:
        try:
            sock = dial(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            if start_writer(path, bootstrap=bootstrap, limits=limits) == "held":
                # Another process starts one right now, or one is on its way out, or stands still.
                pid, born = _lock_holder(path)
                if not is_stopped(pid):
                    still_since_ns = 0
                elif not still_since_ns:
                    still_since_ns = SYSTEM.mono_ns()
                elif SYSTEM.mono_ns() - still_since_ns > limits.stopped_s * S:
                    kill_exactly(pid, born)
                SYSTEM.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.05)
            continue
        except PermissionError:
            raise access.denied(path / SOCKET) from None
        except OSError as error:
            trouble = str(error)
            SYSTEM.sleep(pause_s)
            continue
        _forget_begun(path)
        try:
            return sock, _greet(sock, limits.stopped_s)
        except TimeoutError:
            trouble = "the writer does not answer"
            silent_ns += int(limits.stopped_s * S)
            pid, born = peer_of(sock)
            if is_stopped(pid) or silent_ns > limits.hung_s * S:
                kill_exactly(pid, born)
            sock.close()
        except OSError as error:
            trouble = str(error)
            sock.close()
            SYSTEM.sleep(pause_s)
    raise WriterLost(path=str(path), why=trouble)


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with directory_of(path) as directory:
            sock.connect(f"{directory}/{SOCKET}")
    except BaseException:
        sock.close()
        raise
    return sock


def _greet(sock: socket.socket, timeout_s: float) -> Welcome:
    # Not before a writer was started: the two of us import it at the same time.
    from holdfast.store.wire import PROTOCOL, Frames, Hello, decode_welcome, encode, frame

    sock.settimeout(timeout_s)
    sock.sendall(frame(encode(Hello(PROTOCOL, os.getpid(), __version__))))
    frames = Frames()
    while True:
        data = sock.recv(65536)
        if not data:
            raise ConnectionResetError("the writer hung up")
        for body in frames.feed(data):
            return decode_welcome(body)


def begin_writer(path: Path, *, limits: WriterLimits) -> None:
    """Have a writer start, if there is none, while the caller is still at other things."""
    try:
        dial(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        _begun[path] = _spawn(path, bootstrap=True, limits=limits)
    except OSError:
        return  # whoever opens the store finds out why


def _forget_begun(path: Path) -> None:
    """There is a writer, so that nobody needs to hear what the one that was begun has to say."""
    child = _begun.pop(path, None)
    if child is not None:
        assert child.stdout is not None
        child.stdout.close()


def start_writer(path: Path, *, bootstrap: bool, limits: WriterLimits) -> str:
    """Start a writer; answers `ready` or `held`, or raises what keeps it from starting."""
    reap_children()
    child = _begun.pop(path, None) or _spawn(path, bootstrap=bootstrap, limits=limits)
    line = _first_line(child, limits.stopped_s)
    if line in ("ready", "held"):
        return line
    if line.startswith("error "):
        raise from_wire(msgspec.json.decode(line[6:]))
    code = child.wait()
    if code == -signal.SIGKILL:
        return "held"  # killed before it could speak: another may do better
    if code in (-signal.SIGBUS, -signal.SIGSEGV):
        raise StoreCorrupt(path=str(path), why="the file is cut off or damaged")
    raise WriterLost(path=str(path), why=f"the writer ended with code {code}, see writer.log")


def _spawn(path: Path, *, bootstrap: bool, limits: WriterLimits) -> subprocess.Popen[bytes]:
    arguments = Arguments(
        str(path), bootstrap, limits.linger_s, limits.backlog_bytes, limits.reader_check_s
    )
    source = str(Path(__file__).resolve().parents[2])
    # A store that is refused gets no log: the writer makes it once it has looked at what is there.
    log = log_file(path, create=not holds_store(path))
    child = subprocess.Popen(
        # -P: the current directory is not a place to import from.
        [sys.executable, "-P", "-c", _BOOT, source, msgspec.json.encode(arguments).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log is None else log,
        start_new_session=True,
    )
    if log is not None:
        os.close(log)
    _children.append(child)
    return child


def _first_line(child: subprocess.Popen[bytes], stopped_s: float) -> str:
    """What a starting writer says; nothing when it ended, or stood still and was killed."""
    assert child.stdout is not None
    moved_ns = SYSTEM.mono_ns()
    with child.stdout as out:
        poll = select.poll()
        poll.register(out, select.POLLIN)
        while not poll.poll(_LOOK_S * 1000):
            if not is_stopped(child.pid):
                moved_ns = SYSTEM.mono_ns()
            elif SYSTEM.mono_ns() - moved_ns > stopped_s * S:
                child.kill()
        return out.readline().decode().strip()


def peer_of(sock: socket.socket) -> tuple[int, str]:
    """Pid and start time of the process at the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", raw)[0]
    return pid, _stat(pid)[1]


def _lock_holder(path: Path) -> tuple[int, str]:
    """Pid and start time of the writer that has the lock but does not listen; 0 when none has."""
    inodes: set[str] = set()
    for file in (path, path / LOCK):
        with contextlib.suppress(OSError):
            inodes.add(str(os.stat(file).st_ino))
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 7: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] in inodes:
                command = Path(f"/proc/{fields[4]}/cmdline").read_bytes()
                # A restore takes the lock too, and is nobody's to kill.
                if _BOOT.encode() in command and os.fsencode(path) in command:
                    return int(fields[4]), _stat(int(fields[4]))[1]
    return 0, ""


def is_stopped(pid: int) -> bool:
    return _stat(pid)[0] in ("T", "t")


def kill_exactly(pid: int, born: str) -> None:
    """Kill this process, not another one that was given its number."""
    if born and _stat(pid)[1] == born:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        # A killed process holds its locks until it is gone.
        deadline_ns = SYSTEM.mono_ns() + 100 * MS
        while _stat(pid)[0] not in ("", "Z", "X") and SYSTEM.mono_ns() < deadline_ns:
            SYSTEM.sleep(0.001)


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process, or empty texts."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]


def reap_children() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def _disown_in_child() -> None:
    """Writers that the parent has started are no children of its child."""
    _children.clear()
    _begun.clear()


os.register_at_fork(after_in_child=_disown_in_child)

# How often a starting writer is looked at, in case it stands still.
_LOOK_S = 0.25
_children: list[subprocess.Popen[bytes]] = []
# Started ahead by `begin_writer`: what it says is still to be read.
_begun: dict[Path, subprocess.Popen[bytes]] = {}
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from holdfast.store.writer import main; sys.exit(main(sys.argv[1:]))"
)
