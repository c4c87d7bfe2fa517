"""The writer process: connect to it, start it if there is none, kill it if it is stuck.

A writer is spawned in a separate session (`child_process`): it outlives the client that started it and
receives no terminal signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.child_process import (
    DetachedChildren,
    SpawnedChild,
    is_stopped,
    kill_verified,
    process_state,
)
from holdfast.clock import SYSTEM, S
from holdfast.config import WriterLimits
from holdfast.errors import StoreCorrupt, WriterLost, from_wire
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.writer_address import (
    SOCKET_FILE,
    WRITER_LOCK_FILE,
    WriterArguments,
    has_store_files,
    open_log,
    short_directory,
)

if TYPE_CHECKING:
    from holdfast.store.lmdb.protocol import WriterWelcome


def connect_or_start(
    path: Path, *, bootstrap: bool, limits: WriterLimits
) -> tuple[socket.socket, WriterWelcome]:
    """Return a connection to the directory's writer after the handshake."""
    deadline_ns = SYSTEM.mono_ns() + int(limits.connect_s * S)
    silent_ns = stopped_since_ns = 0
    pause_s = 0.002
    failure = "no writer answered"
    while SYSTEM.mono_ns() < deadline_ns:
        try:
            sock = connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            if start_writer(path, bootstrap=bootstrap, limits=limits) == "held":
                # Another process is starting a writer, or a writer is exiting or stopped (SIGSTOP).
                pid, start_time = lock_holder(path)
                if not is_stopped(pid):
                    stopped_since_ns = 0
                elif not stopped_since_ns:
                    stopped_since_ns = SYSTEM.mono_ns()
                elif SYSTEM.mono_ns() - stopped_since_ns > limits.stopped_s * S:
                    kill_verified(pid, start_time)
                SYSTEM.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.05)
            continue
        except PermissionError:
            raise permissions.access_denied(path / SOCKET_FILE) from None
        except OSError as error:
            failure = str(error)
            SYSTEM.sleep(pause_s)
            continue
        _discard_prestarted(path)
        try:
            return sock, _handshake(sock, limits.stopped_s)
        except TimeoutError:
            failure = "the writer does not answer"
            silent_ns += int(limits.stopped_s * S)
            pid, start_time = peer_of(sock)
            if is_stopped(pid) or silent_ns > limits.hung_s * S:
                kill_verified(pid, start_time)
            sock.close()
        except OSError as error:
            failure = str(error)
            sock.close()
            SYSTEM.sleep(pause_s)
    raise WriterLost(path=str(path), why=failure)


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_directory(path) as directory:
            sock.connect(f"{directory}/{SOCKET_FILE}")
    except BaseException:
        sock.close()
        raise
    return sock


def _handshake(sock: socket.socket, timeout_s: float) -> WriterWelcome:
    # Imported late: a started writer imports it concurrently.
    from holdfast.store.lmdb.protocol import (
        client_hello,
        decode_welcome,
        encode,
        encode_frame,
        new_frame_decoder,
    )

    sock.settimeout(timeout_s)
    sock.sendall(encode_frame(encode(client_hello())))
    frames = new_frame_decoder()
    while True:
        data = sock.recv(65536)
        if not data:
            raise ConnectionResetError("the writer closed the connection")
        for body in frames.feed(data):
            return decode_welcome(body)


def prestart_writer(path: Path, *, limits: WriterLimits) -> None:
    """Start a writer in the background if there is none."""
    try:
        connect(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        _prestarted[path] = _spawn(path, bootstrap=True, limits=limits)
    except OSError:
        return  # the open that follows reports the error


def _discard_prestarted(path: Path) -> None:
    """Close the status pipe of a prestarted writer: a writer is already connected."""
    child = _prestarted.pop(path, None)
    if child is not None:
        child.stdout.close()


def start_writer(path: Path, *, bootstrap: bool, limits: WriterLimits) -> str:
    """Start a writer. Return `ready` or `held`, or raise the writer's start error."""
    reap_children()
    child = _prestarted.pop(path, None) or _spawn(path, bootstrap=bootstrap, limits=limits)
    line = child.read_status_line(limits.stopped_s)
    if line in ("ready", "held"):
        return line
    if line.startswith("error "):
        raise from_wire(msgspec.json.decode(line[6:]))
    code = child.process.wait()
    if code == -signal.SIGKILL:
        return "held"  # killed before it reported its status: the caller tries again
    if code in (-signal.SIGBUS, -signal.SIGSEGV):
        raise StoreCorrupt(path=str(path), why="the file is cut off or damaged")
    raise WriterLost(path=str(path), why=f"the writer ended with code {code}, see writer.log")


def _spawn(path: Path, *, bootstrap: bool, limits: WriterLimits) -> SpawnedChild:
    arguments = WriterArguments(
        str(path), bootstrap, limits.idle_exit_s, limits.backlog_bytes, limits.reader_check_s
    )
    source = str(Path(__file__).resolve().parents[3])
    # A refused store gets no log: the writer creates it after the inspection.
    log = open_log(path, create=not has_store_files(path))
    child = SpawnedChild(
        # -P: never import from the current directory.
        [sys.executable, "-P", "-c", WRITER_CODE, source, msgspec.json.encode(arguments).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log is None else log,
        new_session=True,
    )
    if log is not None:
        os.close(log)
    _writers.add(child)
    return child


def peer_of(sock: socket.socket) -> tuple[int, str]:
    """Pid and start time of the peer process."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", raw)[0]
    return pid, process_state(pid)[1]


def lock_holder(path: Path) -> tuple[int, str]:
    """Pid and start time of a writer that holds the lock but does not listen; pid 0 if there is none."""
    inodes: set[str] = set()
    for file in (path, path / WRITER_LOCK_FILE):
        with contextlib.suppress(OSError):
            inodes.add(str(os.stat(file).st_ino))
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 7: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] in inodes:
                command = Path(f"/proc/{fields[4]}/cmdline").read_bytes()
                # A restore also holds the lock and must not be killed.
                if WRITER_CODE.encode() in command and os.fsencode(path) in command:
                    return int(fields[4]), process_state(int(fields[4]))[1]
    return 0, ""


def reap_children() -> None:
    _writers.reap()


# A forked process does not own the writers of its parent.
_writers = DetachedChildren()
# Writers started by `prestart_writer` whose status line is unread.
_prestarted: dict[Path, SpawnedChild] = {}
os.register_at_fork(after_in_child=_prestarted.clear)
WRITER_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from holdfast.store.lmdb.writer import main; sys.exit(main(sys.argv[1:]))"
)
