"""Tasks that run in processes of their own.

A child is spawned when a hand needs one and none is idle, and is given one task at a time.
A child that dies ends its task's attempt as `exited`, which counts as an expiry: a task that kills its
process again and again is DEAD in the end, and nobody else is hurt. A task that is cancelled or out of
time is told; a child that does not come back within `GRACE_S` is killed.

Frames are msgpack over a socket: first where to import from, then (module, name, grant) there, and
(what, …) back. The child imports the task's module as any program does and runs nothing that it was sent.
A task of a script (`__main__`) is found by running the script under another name, as `multiprocessing`
does; a script that opens its app outside of `if __name__ == "__main__":` is told so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import HoldfastError, Invalid
from holdfast.roles.task_run import Ended, TaskRun, attempt
from holdfast.tasks.coordinator import End, Grant, Report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

GRACE_S = 1.0
LOOK_S = 0.05


class ChildLost(HoldfastError):
    code = "exited"
    retryable = True
    hint = "the process of the task died; an attempt that does this counts as an expiry"


class Children:
    """The children of a crew. They belong to no hand in particular: one that is written off with its
    hand would be idle for ever."""

    def __init__(self) -> None:
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._lock = threading.Lock()
        self._closed = False

    def attempt(self, run: TaskRun, clock: Clock) -> Ended:
        child = self._take()
        report = child.run(run)
        with self._lock:
            if child.alive and not self._closed:
                self._idle.append(child)
            else:
                self._all.discard(child)
                child.end()
        return Ended(run, report, clock.mono_ns() - run.began_ns)

    def _take(self) -> Child:
        """The one that was idle for the shortest time, or a new one."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                self._all.discard(child)
                child.end()
            child = Child()
            self._all.add(child)
            return child

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy, self._all = self._all.difference(idle), set()
        for child in idle:
            child.end()
        for child in busy:
            # Its hand finds out, and lets go of the pipe: nobody else may, while that listens to it.
            child.kill()


class Child:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._pipe = _pipe(ours.detach())
        script = getattr(sys.modules["__main__"], "__file__", None)
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(msgspec.msgpack.encode([sys.path, script or ""]))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, run: TaskRun) -> Report:
        module, name = run.code.home
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode([module, name, run.grant]))
            return self._await(run)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            error = ChildLost(exit_code=self._process.returncode)
            self.end()
            return Report(*run.token, End.EXITED, b"", error.code, str(error))

    def _await(self, run: TaskRun) -> Report:
        told_ns = 0
        while True:
            if self._pipe.poll(LOOK_S):
                what, *rest = msgspec.msgpack.decode(self._pipe.recv_bytes())
                if what == "end":
                    report = msgspec.convert(rest[0], Report)
                    if (report.seq, report.lease) != run.token:
                        raise EOFError  # it is out of step: nothing it says can be relied on
                    return report
                if what == "progress":
                    run.progressed = True
                    run.said = rest[0] if rest[0] is not None else run.said
            elif not self.alive and not self._pipe.poll(0):
                # Its end of the pipe may live on in what it has forked.
                raise EOFError
            elif run.dropped and not told_ns:
                told_ns = SYSTEM.mono_ns()
                self._pipe.send_bytes(b"\xc0")
            elif run.dropped and SYSTEM.mono_ns() - told_ns > GRACE_S * S:
                self.end()
                raise EOFError

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """For whoever has it in hand."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._pipe.close()


# -- in the child --------------------------------------------------------------------------------


class _Distant(TaskRun):
    """A run whose worker is in another process."""

    __slots__ = ("_pipe", "_sending")

    def __init__(self, grant: Grant, code: Any, pipe: Connection) -> None:
        super().__init__(grant, code)
        self._pipe = pipe
        # Threads of the task may say something, too.
        self._sending = threading.Lock()

    def progress(self, value: Any = None) -> None:
        super().progress(value)
        self.send("progress", self.said)

    def send(self, what: str, value: Any) -> None:
        with self._sending:
            self._pipe.send_bytes(msgspec.msgpack.encode([what, value]))


def main() -> None:
    pipe = _pipe(int(sys.argv[1]))
    path, script = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[list[str], str])
    sys.path[:] = path
    sys.argv[:] = [script or "holdfast-task"]
    serve(pipe, script)


def serve(pipe: Connection, script: str) -> None:
    """Run what is sent, one after the other, until the parent is gone."""
    # What a task forks is none of ours: it must not read, nor answer, in our name.
    me = os.getpid()
    os.register_at_fork(after_in_child=pipe.close)
    calls: list[bytes] = []
    came = threading.Semaphore(0)
    now: list[_Distant] = []

    def listen() -> None:
        while True:
            try:
                body = pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone: nobody would hear of what we do
            if body == b"\xc0":
                for run in list(now):
                    run.dropped = True
                continue
            calls.append(body)
            came.release()

    # A terminal and a supervisor signal whole groups. When we end is our parent's to say; a handler,
    # unlike a signal that is ignored, is not passed on to what a task starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=listen, daemon=True).start()
    while True:
        came.acquire()
        module, name, sent = msgspec.msgpack.decode(calls.pop(0))
        grant = msgspec.convert(sent, Grant)
        try:
            run = _Distant(grant, find(module, name, script), pipe)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            report = Report(grant.seq, grant.lease, End.FAILED, b"", "not_importable", text)
            pipe.send_bytes(msgspec.msgpack.encode(["end", report]))
        else:
            now[:] = [run]
            run.begin(SYSTEM.mono_ns(), SYSTEM)
            report = attempt(run, SYSTEM).report
            if os.getpid() != me:
                os._exit(0)
            now.clear()
            run.send("end", report)


def find(module: str, name: str, script: str = "") -> Any:
    """The task of this name. Only what is declared as one is ever run."""
    found: Any = _script(script) if module == "__main__" else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (hasattr(found, "invoke") and hasattr(found, "dump")):
        raise Invalid(what="task", module=module, name=name, why="not found in its module")
    return found


def _script(path: str) -> Any:
    """The module of the program that submitted us, without its `if __name__ == "__main__":` part."""
    found = sys.modules.get(SCRIPT)
    if found is None:
        spec = importlib.util.spec_from_file_location(SCRIPT, path) if path else None
        if spec is None or spec.loader is None:
            raise Invalid(what="task", why="it is declared where no other process can import it")
        found = sys.modules[SCRIPT] = importlib.util.module_from_spec(spec)
        _importing.set()
        try:
            spec.loader.exec_module(found)
        finally:
            _importing.clear()
    return found


def importing() -> bool:
    """Whether a script is just being imported to find a task in it: nobody opens an app then."""
    return _importing.is_set()


_importing = threading.Event()


SCRIPT = "__holdfast_main__"
_COMMAND = "from holdfast.roles.task_child import main; main()"


def _pipe(fd: int) -> Connection:
    # Imported here: it takes as long as a quarter of us, and few apps have such tasks.
    from multiprocessing.connection import Connection

    return Connection(fd)
