"""Tasks that run in processes of their own.

Each hand of the crew has one child, spawned when it is first needed, and gives it one task at a time.
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
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import HoldfastError, Invalid
from holdfast.roles.task_run import Ended, TaskRun, attempt
from holdfast.tasks.coordinator import End, Grant, Report

GRACE_S = 1.0
LOOK_S = 0.05


class ChildLost(HoldfastError):
    code = "exited"
    retryable = True
    hint = "the process of the task died; an attempt that does this counts as an expiry"


class Children:
    """The children of a crew, by the thread that looks after each."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._all: set[Child] = set()
        self._lock = threading.Lock()

    def attempt(self, run: TaskRun, clock: Clock) -> Ended:
        child: Child | None = getattr(self._mine, "child", None)
        if child is None or not child.alive:
            if child is not None:
                self._forget(child)
            child = self._mine.child = Child()
            with self._lock:
                self._all.add(child)
        report = child.run(run)
        if not child.alive:
            self._forget(child)
            self._mine.child = None
        return Ended(run, report, clock.mono_ns() - run.began_ns)

    def _forget(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._all.discard(child)

    def close(self) -> None:
        with self._lock:
            children, self._all = list(self._all), set()
        for child in children:
            child.end()


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
        self._pipe = Connection(ours.detach())
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
                    return msgspec.convert(rest[0], Report)
                if what == "progress":
                    run.progressed = True
                    run.said = rest[0] if rest[0] is not None else run.said
            elif run.dropped and not told_ns:
                told_ns = SYSTEM.mono_ns()
                self._pipe.send_bytes(b"\xc0")
            elif run.dropped and SYSTEM.mono_ns() - told_ns > GRACE_S * S:
                self.end()
                raise EOFError

    def end(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(GRACE_S)
        self._pipe.close()


# -- in the child --------------------------------------------------------------------------------


class _Distant(TaskRun):
    """A run whose worker is in another process."""

    __slots__ = ("_pipe",)

    def __init__(self, grant: Grant, code: Any, pipe: Connection) -> None:
        super().__init__(grant, code)
        self._pipe = pipe

    def progress(self, value: Any = None) -> None:
        super().progress(value)
        self._pipe.send_bytes(msgspec.msgpack.encode(["progress", self.said]))


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    path, script = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[list[str], str])
    sys.path[:] = path
    sys.argv[:] = [script or "holdfast-task"]
    serve(pipe, script)


def serve(pipe: Connection, script: str) -> None:
    """Run what is sent, one after the other, until the parent is gone."""
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
        else:
            now[:] = [run]
            run.begin(SYSTEM.mono_ns(), SYSTEM)
            report = attempt(run, SYSTEM).report
            now.clear()
        pipe.send_bytes(msgspec.msgpack.encode(["end", report]))


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
