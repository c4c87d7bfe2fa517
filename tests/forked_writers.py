"""Forked writers: a fork server starts the writer processes of a test run.

A writer imports modules for 0.3 s. The fork server imports them once per test process and forks: the writer then
starts within milliseconds. It runs the same code, with the command line, environment, directory and limits that a
spawned writer would have, in its own session and as a child of the test process.

`spawns_writers` selects the tests whose subject is the start of a writer. They spawn it, like the processes that tests
start.

Surprising: the server forks twice and the test process is a subreaper for that moment. So the kernel makes the test
process the parent of the writer, and the test process reaps it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Tests in these places spawn their writers.
SPAWNING_DIRECTORIES = ("process", "chaos", "spark")
SPAWNING_FILES = ("test_writer_client.py", "test_interpreter_exit.py", "test_child_process.py")

PR_SET_CHILD_SUBREAPER = 36
REQUEST_BYTES_MAX = 1 << 20
PID_BYTES = 4
# The room for the command line of a writer.
COMMAND_LINE_BYTES = 8192
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


# -- the test process ------------------------------------------------------------------------------


def spawns_writers(path: Path) -> bool:
    """Whether the tests of this file start a writer as the product does."""
    return path.name in SPAWNING_FILES or not {*path.parts}.isdisjoint(SPAWNING_DIRECTORIES)


def install() -> None:
    """Let this process fork its writers, unless `is_enabled` is set to False."""
    from holdfast.child_process import SpawnedChild
    from holdfast.store.lmdb import writer_process

    class WriterChild(SpawnedChild):
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            forked = _fork_writer(command, options["stderr"]) if is_enabled else None
            if forked is None:
                super().__init__(command, **options)
            else:
                self.process = forked  # type: ignore[assignment]

    writer_process.SpawnedChild = WriterChild  # type: ignore[misc]


is_enabled = True
_server: ForkServer | None = None
_lock = threading.Lock()


def _fork_writer(command: Sequence[str], stderr: int) -> ForkedProcess | None:
    """Fork a writer, or return None if only a spawned process can have this environment."""
    global _server
    with _lock:
        if _server is None or _server.owner_pid != os.getpid():
            _server = ForkServer(command)
        if (
            _python_variables(os.environ) != _server.python_variables
            or command[-2] != _server.source
        ):
            return None
        return _server.fork(command, stderr)


def _python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


class ForkServer:
    def __init__(self, writer_command: Sequence[str]) -> None:
        self.source = writer_command[-2]
        self.owner_pid = os.getpid()
        self.python_variables = _python_variables(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        room = "-" * COMMAND_LINE_BYTES
        with theirs:
            # It ends with this process: the socket is then closed.
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), self.source, room],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, command: Sequence[str], stderr: int) -> ForkedProcess:
        request = {
            "command": list(command),
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "umask": _umask(),
            "limits": {str(limit): resource.getrlimit(limit) for limit in LIMITS},
        }
        out, their_out = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            errors = null if stderr == subprocess.DEVNULL else stderr
            _set_subreaper(True)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [null, their_out, errors])
            answer = self._socket.recv(PID_BYTES)
        finally:
            _set_subreaper(False)
            os.close(their_out)
            os.close(null)
        assert len(answer) == PID_BYTES, "the fork server has ended"
        return ForkedProcess(list(command), int.from_bytes(answer, "little"), out)


class ForkedProcess:
    """The part of `subprocess.Popen` that the owner of a writer uses."""

    stdin = stderr = None

    def __init__(self, args: list[str], pid: int, out: int) -> None:
        self.args = args
        self.pid = pid
        self.stdout: IO[bytes] = os.fdopen(out, "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._reap(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.001)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)

    def terminate(self) -> None:
        self.send_signal(15)

    def _reap(self, options: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, options)
                except ChildProcessError:
                    # As in `subprocess`: another waiter took the exit code.
                    pid, status = self.pid, 0
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def _set_subreaper(on: bool) -> None:
    result = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    assert result == 0, "the kernel has no subreapers"


# -- the fork server -------------------------------------------------------------------------------


def serve(sock: socket.socket) -> dict[str, Any]:
    """Fork a writer for each request. Return in each writer, with its request."""
    while True:
        message, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, 3)
        if not message:
            sys.exit()
        pids, their_pids = os.pipe()
        if (middle := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                os.setsid()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                sock.close()
                os.closerange(3, max(fds[-1], their_pids) + 1)
                request: dict[str, Any] = json.loads(message)
                return request
            os.write(their_pids, pid.to_bytes(PID_BYTES, "little"))
            os._exit(0)
        answer = os.read(pids, PID_BYTES)
        # The end of the process in between gives the writer its parent.
        os.waitpid(middle, 0)
        for fd in (*fds, pids, their_pids):
            os.close(fd)
        sock.send(answer)


def become_writer(request: dict[str, Any]) -> str:
    """Take over what a spawned writer inherits, and return the code to run."""
    _, _, _, code, *arguments = request["command"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for name, limits in request["limits"].items():
        if resource.getrlimit(int(name)) != tuple(limits):
            resource.setrlimit(int(name), tuple(limits))
    _rename_process(request["command"])
    sys.argv = ["-c", *arguments]
    return code


def _rename_process(command: list[str]) -> None:
    """Overwrite the command line: clients and tests recognise a writer by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    assert len(text) <= end - start, "the command line of the writer is too long"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def import_writer(source: str) -> None:
    """Import what a writer imports until it is idle."""
    sys.path.insert(0, source)
    from holdfast.store.lmdb import writer

    for module in writer._PRELOADED_MODULES:
        importlib.import_module(module)
    sys.path.remove(source)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    import_writer(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        writer_request = serve(requests)
    exec(become_writer(writer_request), {"__name__": "__main__"})
