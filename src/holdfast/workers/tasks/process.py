"""Task processes: run tasks with `isolation="process"` in child processes.

A child is spawned when an executor thread needs one and none is idle. It runs one task at a time.
The death of a child ends the attempt as `exited`, which counts as an expiry. A task that repeatedly
kills its process becomes DEAD without affecting other tasks. The parent sends a cancellation for a
cancelled or timed-out task, and kills a child that does not return within `GRACE_S`.

Frames are msgpack over a socket. The first frame holds the import path. A request is (module, name,
grant), a reply is (kind, …). The child imports the task's module and executes no received code. A
task of a script (`__main__`) is found by running the script under another module name, as
`multiprocessing` does. A script that opens its app outside of `if __name__ == "__main__":` gets an
error.
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
from typing import Any

import msgspec

from holdfast import codec, value_versions
from holdfast.child_process import ChildPool, SpawnedChild
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.tasks.operations import AttemptOutcome, TaskGrant, TaskReport
from holdfast.wire_frames import FrameFormat, FrameSocket
from holdfast.workers.tasks.attempt import AttemptResult, TaskAttempt, run_attempt

GRACE_S = 1.0
POLL_S = 0.05
FRAMES = FrameFormat(">I", FRAME_BYTES_MAX)


class TaskProcessLost(HoldfastError):
    code = "exited"
    retryable = True
    hint = "the process of the task died; the attempt counts as an expiry"


class TaskProcessPool:
    """The child processes of an executor. They are not bound to threads, so an abandoned thread
    keeps no idle child.
    """

    def __init__(self) -> None:
        self._children = ChildPool(TaskProcess, newest_first=True)

    def run_attempt(self, attempt: TaskAttempt, clock: Clock) -> AttemptResult:
        process = self._children.take()
        report = process.run_attempt(attempt)
        self._children.put(process)
        return AttemptResult(attempt, report, clock.mono_ns() - attempt.began_ns)

    def close(self) -> None:
        """End the idle children and kill the busy ones: their executor threads notice and close the
        pipe. Only the thread that reads a pipe may close it.
        """
        self._children.close()


class TaskProcess(SpawnedChild):
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self._pipe = FrameSocket(ours, FRAMES)
        script = getattr(sys.modules["__main__"], "__file__", None)
        with contextlib.suppress(OSError):
            self._pipe.send(msgspec.msgpack.encode([sys.path, script or ""]))

    def run_attempt(self, attempt: TaskAttempt) -> TaskReport:
        module, name = attempt.code.home
        try:
            self._pipe.send(msgspec.msgpack.encode([module, name, attempt.grant]))
            return self._await_report(attempt)
        except (EOFError, OSError, Invalid, msgspec.MsgspecError):
            # After an invalid frame no reply of the child can be trusted.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            error = TaskProcessLost(exit_code=self.process.returncode)
            self.discard()
            return TaskReport(*attempt.token, AttemptOutcome.EXITED, b"", error.code, str(error))

    def _await_report(self, attempt: TaskAttempt) -> TaskReport:
        cancel_sent_ns = 0
        while True:
            if self._pipe.poll(POLL_S):
                what, value = msgspec.msgpack.decode(self._pipe.receive(), type=tuple[str, Any])
                if what == "end":
                    report = msgspec.convert(value, TaskReport)
                    if (report.seq, report.lease) != attempt.token:
                        raise EOFError  # out of sync: its replies cannot be trusted
                    return _with_versions(report, getattr(attempt.code, "returns", Any))
                if what == "progress":
                    attempt.progressed = True
                    attempt.progress_value = value if value is not None else attempt.progress_value
            elif not self.is_alive() and not self._pipe.poll(0):
                # A process forked by the task may keep the pipe open.
                raise EOFError
            elif attempt.dropped and not cancel_sent_ns:
                cancel_sent_ns = SYSTEM.mono_ns()
                self._pipe.send(b"\xc0")
            elif attempt.dropped and SYSTEM.mono_ns() - cancel_sent_ns > GRACE_S * S:
                self.discard()
                raise EOFError

    def discard(self) -> None:
        """Kill the process and close the pipe. Only for the thread that owns the child."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self._pipe.close()


# -- in the child --------------------------------------------------------------------------------


class _RemoteAttempt(TaskAttempt):
    """An attempt whose worker is in the parent process."""

    __slots__ = ("_pipe", "_send_lock")

    def __init__(self, grant: TaskGrant, code: Any, pipe: FrameSocket) -> None:
        super().__init__(grant, code)
        self._pipe = pipe
        # Threads of the task may send progress, too.
        self._send_lock = threading.Lock()

    def progress(self, value: Any = None) -> None:
        super().progress(value)
        self.send("progress", self.progress_value)

    def send(self, what: str, value: Any) -> None:
        with self._send_lock:
            self._pipe.send(msgspec.msgpack.encode([what, value]))


def main() -> None:
    pipe = FrameSocket(socket.socket(fileno=int(sys.argv[1])), FRAMES)
    path, script = msgspec.msgpack.decode(pipe.receive(), type=tuple[list[str], str])
    sys.path[:] = path
    sys.argv[:] = [script or "holdfast-task"]
    serve(pipe, script)


def serve(pipe: FrameSocket, script: str) -> None:
    """Run the received tasks one after the other, until the parent closes the pipe."""
    # A process forked by a task must not read or write this pipe.
    own_pid = os.getpid()
    os.register_at_fork(after_in_child=pipe.close)
    calls: list[bytes] = []
    available = threading.Semaphore(0)
    current: list[_RemoteAttempt] = []

    def listen() -> None:
        while True:
            try:
                body = pipe.receive()
            except (EOFError, OSError, Invalid):
                # The parent is gone, or its frames are invalid: no result can be reported.
                os._exit(0)
            if body == b"\xc0":
                for remote_attempt in list(current):
                    remote_attempt.dropped = True
                continue
            calls.append(body)
            available.release()

    # Terminals and supervisors signal the whole process group, but only the parent ends this
    # process. A handler is not inherited by processes that a task starts, an ignored signal is.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=listen, daemon=True).start()
    while True:
        available.acquire()
        module, name, sent = msgspec.msgpack.decode(calls.pop(0))
        grant = msgspec.convert(sent, TaskGrant)
        try:
            remote_attempt = _RemoteAttempt(grant, find_task(module, name, script), pipe)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            report = TaskReport(
                grant.seq, grant.lease, AttemptOutcome.FAILED, b"", "not_importable", text
            )
            pipe.send(msgspec.msgpack.encode(["end", report]))
        else:
            current[:] = [remote_attempt]
            remote_attempt.begin(SYSTEM.mono_ns(), SYSTEM)
            report = run_attempt(remote_attempt, SYSTEM).report
            if os.getpid() != own_pid:
                os._exit(0)
            current.clear()
            remote_attempt.send("end", report)


def _with_versions(report: TaskReport, returns: Any) -> TaskReport:
    """State the versions of the classes in a result. The child may not have imported the upcasts of the app."""
    prefix = value_versions.encode_versions(returns)
    if not report.result or not prefix:
        return report
    _, body = codec.split_versions(report.result)
    return msgspec.structs.replace(report, result=prefix + body)


def find_task(module: str, name: str, script: str = "") -> Any:
    """Import the task of this name. Only declared tasks are run."""
    found: Any = _import_script(script) if module == "__main__" else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (hasattr(found, "invoke") and hasattr(found, "dump")):
        raise Invalid(what="task", module=module, name=name, why="not found in its module")
    return found


def _import_script(path: str) -> Any:
    """Import the parent's script as a module, without its `if __name__ == "__main__":` part."""
    found = sys.modules.get(SCRIPT_MODULE)
    if found is None:
        spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path) if path else None
        if spec is None or spec.loader is None:
            raise Invalid(what="task", why="its module cannot be imported by another process")
        found = sys.modules[SCRIPT_MODULE] = importlib.util.module_from_spec(spec)
        _importing.set()
        try:
            spec.loader.exec_module(found)
        finally:
            _importing.clear()
    return found


def is_importing_script() -> bool:
    """Whether a script is being imported to find a task. It must not open an app meanwhile."""
    return _importing.is_set()


_importing = threading.Event()


SCRIPT_MODULE = "__holdfast_main__"
_COMMAND = "from holdfast.workers.tasks.process import main; main()"
