"""The fork server: a Python process that has imported Holdfast and forks the Python processes of a test.

A new interpreter spends most of its start on imports. A forked process has them already. It then runs like
`python -m MODULE` or `python -c CODE` with the arguments, environment, directory and limits of the test process.

- A forked process is a child of the test process (CLONE_PARENT), which waits for it like for a spawned one.
- The server has one thread and no open store. It exits when the test process closes its socket or ends.
- The hash seed and the command line in /proc are those of the server. `is_renamed` writes the command line again.
- HOLDFAST_TEST_FRESH=1 starts every process in a new interpreter instead. `make chaos` sets it.
"""

import ctypes
import gc
import importlib
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
# The system call `clone`. On other machines processes are spawned.
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
CLONE_PARENT = 0x8000
REQUEST_BYTES_MAX = 1 << 20
RESOURCES = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
PRELOADED_MODULES = (
    "holdfast.cli.up",
    "holdfast.cli.ready",
    "holdfast.app.builtin_effects.fabric",
    "holdfast.store.lmdb.store",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.postgres.store",
    "encodings.idna",
)


class ForkRequest(msgspec.Struct):
    # `-m` and a module or `-c` and code, then the arguments.
    command: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    limits: list[tuple[int, int]]
    is_renamed: bool = False


class ForkedChild:
    """A forked child of this process with its pipes. It has the attributes of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb", buffering=0)
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def can_fork(command: Sequence[str], env: Mapping[str, str] | None) -> bool:
    """Whether a process with this command starts the same way from the server. Variables of the interpreter
    (PYTHON…) have an effect only in a new one."""
    return (
        CLONE > 0
        and not os.environ.get("HOLDFAST_TEST_FRESH")
        and len(command) > 2
        and command[0] == sys.executable
        and command[1] in ("-m", "-c")
        and not any(name.startswith("PYTHON") for name in env or ())
    )


class ForkServer:
    """The client side of the server, which starts with the first request."""

    def __init__(self, modules: Sequence[str] = PRELOADED_MODULES) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ForkedChild:
        """Fork a process that runs `command` in a new session."""
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin[0], stdout[1], stderr[1]]
        pid = self.fork_with(command, env, cwd, theirs)
        for fd in theirs:
            os.close(fd)
        return ForkedChild(pid, stdin[1], stdout[0], stderr[0])

    def fork_with(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        fds: list[int],
        *,
        is_renamed: bool = False,
    ) -> int:
        """Fork a process with these standard streams, and return its pid."""
        limits = [resource.getrlimit(r) for r in RESOURCES]
        request = ForkRequest(list(command[1:]), dict(env), cwd, _umask(), limits, is_renamed)
        body = msgspec.msgpack.encode(request)
        assert len(body) <= REQUEST_BYTES_MAX
        with self._lock:
            server = self._connect()
            socket.send_fds(server, [body], fds)
            return int(server.recv(64))

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
        return self._socket


def rename_process(command: list[str]) -> None:
    """Overwrite the command line of this process, which must be at least as long."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    assert len(text) <= end - start, "the command line is too long"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("/proc/self/status has no Umask")


# -- the server ------------------------------------------------------------------------------------


def serve(client: socket.socket) -> ForkRequest | None:
    """Fork a process for each request. Returns the request in the forked process, and None at the end of the client."""
    while True:
        body, fds, _, _ = socket.recv_fds(client, REQUEST_BYTES_MAX, 3)
        if not body:
            return None
        pid = _clone()
        if pid == 0:
            client.close()
            os.setsid()
            for to, fd in enumerate(fds):
                os.dup2(fd, to)
        for fd in fds:
            os.close(fd)
        if pid == 0:
            return msgspec.msgpack.decode(body, type=ForkRequest)
        client.send(str(pid).encode())


def _clone() -> int:
    """Fork this process. The new process is a child of the parent of this process."""
    # PyDLL keeps the GIL, which only the forking thread may hold.
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def run(request: ForkRequest) -> None:
    """Run the command of a request in the forked process."""
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    os.umask(request.umask)
    for number, limit in zip(RESOURCES, request.limits, strict=True):
        if resource.getrlimit(number) != tuple(limit):
            resource.setrlimit(number, limit)
    if request.is_renamed:
        rename_process([sys.executable, *request.command])
    importlib.invalidate_caches()
    kind, target, *arguments = request.command
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [kind, *arguments]
    if kind == "-m":
        sys.path[0] = request.cwd
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    else:
        sys.path[0] = ""
        exec(compile(target, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if (received := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run(received)
