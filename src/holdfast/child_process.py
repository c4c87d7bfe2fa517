"""Child processes: spawn, pool of idle children, status line, end, kill by verified pid.

Children are spawned, never forked. A forked process forgets the children of its parent: it must neither use,
kill nor reap them.

Pid and start time identify a process, so that a kill never hits another process that reuses the pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from holdfast.clock import MS, SYSTEM, S

# How often to check whether a starting child is stopped.
STATUS_POLL_S = 0.25


class SpawnedChild:
    """A child process with its pipes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=pass_fds,
            start_new_session=new_session,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the process without waiting. Any thread may call it."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def end(self, timeout_s: float = 0.0) -> int:
        """Wait for the exit, kill the process after `timeout_s`, and close its pipes. Return the exit
        code, negative for a signal. Only for the owner of the child.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if timeout_s:
                self.process.wait(timeout_s)
        self.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code

    def read_status_line(self, stopped_s: float) -> str:
        """Read the status line of a starting child and close the pipe. Empty if the child exited. A child
        that is stopped (SIGSTOP) for longer than `stopped_s` is killed.
        """
        running_ns = SYSTEM.mono_ns()
        with self.stdout as out:
            poll = select.poll()
            poll.register(out, select.POLLIN)
            while not poll.poll(STATUS_POLL_S * 1000):
                if not is_stopped(self.pid):
                    running_ns = SYSTEM.mono_ns()
                elif SYSTEM.mono_ns() - running_ns > stopped_s * S:
                    self.kill()
            return out.readline().decode().strip()


class PooledChild(Protocol):
    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...

    def discard(self) -> None:
        """End the process and release its resources. Only for the owner of the child."""


ChildT = TypeVar("ChildT", bound=PooledChild)


class ChildPool(Generic[ChildT]):
    """Idle children of one kind. `start` spawns one.

    `newest_first`: take the most recently used child. Otherwise take the child that was started first,
    because a child that was started just now is not ready yet.
    """

    def __init__(
        self,
        start: Callable[[], ChildT],
        *,
        newest_first: bool = False,
        idle_max: int | None = None,
    ) -> None:
        self._start = start
        self._newest_first = newest_first
        self._idle_max = idle_max
        self._idle: list[ChildT] = []
        # Weak: an owner may end its child instead of returning it.
        self._busy: weakref.WeakSet[ChildT] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        _pools.add(self)

    def prestart(self, count: int = 1) -> None:
        """Start children until `count` of them are idle, so that no caller waits for a start."""
        with self._lock:
            while self._idle and not self._idle[-1].is_alive():
                self._idle.pop().discard()
            while len(self._idle) < count:
                self._idle.append(self._start())

    def take(self) -> ChildT:
        """Take an idle child, or start one."""
        with self._lock:
            child = self._pop_alive() or self._start()
            self._busy.add(child)
            return child

    @property
    def is_full(self) -> bool:
        return self._idle_max is not None and len(self._idle) >= self._idle_max

    def put(self, child: ChildT) -> None:
        """Return a child. A dead child, a child beyond `idle_max` and a child of a closed pool are discarded."""
        with self._lock:
            self._busy.discard(child)
            if child.is_alive() and not self.is_full and not self._closed:
                self._idle.append(child)
                return
        child.discard()

    def close(self) -> None:
        """Discard the idle children and kill the busy ones. Their owners discard them."""
        with self._lock:
            self._closed = True
            idle, busy = self._idle, list(self._busy)
            self._idle = []
        for child in idle:
            child.discard()
        for child in busy:
            child.kill()

    def discard_idle(self) -> None:
        """Discard the idle children. The pool stays open."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.discard()

    def forget(self) -> None:
        """Forget every child in a forked process, where the lock may be held by a thread of the parent."""
        self._lock = threading.Lock()
        self._idle, self._busy = [], weakref.WeakSet()

    def _pop_alive(self) -> ChildT | None:
        while self._idle:
            child = self._idle.pop(-1 if self._newest_first else 0)
            if child.is_alive():
                return child
            child.discard()
        return None


class DetachedChildren:
    """Children that outlive this process. They are only reaped, so that no zombie remains."""

    def __init__(self) -> None:
        self._children: list[SpawnedChild] = []
        _pools.add(self)

    def add(self, child: SpawnedChild) -> None:
        self._children.append(child)

    def reap(self) -> None:
        self._children[:] = [child for child in self._children if child.is_alive()]

    def forget(self) -> None:
        self._children.clear()


def is_stopped(pid: int) -> bool:
    return process_state(pid)[0] in ("T", "t")


def kill_verified(pid: int, start_time: str) -> None:
    """Kill this process, unless its pid now belongs to another process."""
    if start_time and process_state(pid)[1] == start_time:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        # A killed process holds its locks until it has exited.
        deadline_ns = SYSTEM.mono_ns() + 100 * MS
        while process_state(pid)[0] not in ("", "Z", "X") and SYSTEM.mono_ns() < deadline_ns:
            SYSTEM.sleep(0.001)


def process_state(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; empty strings if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]


def _forget_in_forked_process() -> None:
    for children in list(_pools):
        children.forget()


_pools: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_forked_process)
