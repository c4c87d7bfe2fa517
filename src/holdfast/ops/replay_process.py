"""Replay processes: child processes that import the application and replay worlds or flows under a hash seed.

`ReplayPool.run` gives shares of targets to `jobs` threads. A thread has a `ReplayLane` with one child per hash seed. The
child replays a share and sends one reply per target. If the child ends, or exceeds the time limit of a target, the
answer for this target is a `LostReplay`, and a new child continues behind it.

Frames are msgpack over a socket. The first frame has the import path, the module of the replay function, the store and
the application. A request is (name of the replay function, time limit, targets), a reply is (kind, value). The child
executes no received code.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from holdfast import store as stores
from holdfast.app.app import App
from holdfast.child_process import SpawnedChild
from holdfast.clock import SYSTEM, S
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid, from_wire, to_wire
from holdfast.ops.app_loader import load_app
from holdfast.store.api import Store
from holdfast.wire_frames import FrameFormat, FrameSocket

# Two seeds that give strings different hashes.
HASH_SEEDS = ("1", "2")
# Codes of a `LostReplay`.
PROCESS_LOST = "verifier_lost"
TIME_LIMIT = "time_limit"

# The time for a child to start and to import the application, and to stop at the time limit.
START_S = 120.0
STOP_S = 5.0
# How often to check whether a child without a reply has ended.
POLL_S = 0.25
FRAMES = FrameFormat(">I", FRAME_BYTES_MAX)

Share = TypeVar("Share")
Result = TypeVar("Result")


class ReplayFailed(HoldfastError):
    code = "replay_failed"
    hint = "the replay process raised this error; its traceback is on stderr"


class LostReplay(NamedTuple):
    """The answer for a target whose child ended, or exceeded the time limit."""

    code: str


class ReplayFunction(Generic[Result]):
    """A function of the child: (store, app, target, time limit) → result. Created by `replay_function`."""

    def __init__(
        self, fn: Callable[[Store, Any, Any, float | None], Result], target: Any, result: Any
    ) -> None:
        self.name = f"{fn.__module__}:{fn.__qualname__}"
        self.fn = fn
        self.targets: Any = list[target]
        self.result = result


def replay_function(
    target: Any, result: Any
) -> Callable[[Callable[[Store, Any, Any, float | None], Result]], ReplayFunction[Result]]:
    """Declare a module-level function that a child calls. Targets and results are sent as these types."""
    return lambda fn: ReplayFunction(fn, target, result)


# -- in the parent -------------------------------------------------------------------------------


class ReplayProcess(SpawnedChild):
    def __init__(self, url: str, app: str | None, hash_seed: str, module: str) -> None:
        """`module` has the replay functions. The child imports it before the time limit of a target counts."""
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                pass_fds=[theirs.fileno()],
            )
        self._pipe = FrameSocket(ours, FRAMES)
        self._app = app
        self._is_ready = False
        self._send([sys.path, sys.argv, module, url, app])

    def replay(
        self,
        function: ReplayFunction[Result],
        targets: Sequence[Any],
        limit_s: float | None,
        stop_s: float = STOP_S,
    ) -> Iterator[Result | HoldfastError | LostReplay]:
        """Yield one answer per target. A LostReplay is the last one. `stop_s` is the time in which a function ends by
        itself at its limit."""
        try:
            self._wait_until_ready()
            self._send([function.name, limit_s, targets])
            for _ in targets:
                kind, value = self._receive(None if limit_s is None else limit_s + stop_s)
                if kind == "error":
                    yield from_wire(value)
                else:
                    yield msgspec.convert(value, function.result)
        except TimeoutError:
            yield LostReplay(TIME_LIMIT)
        except OSError:
            yield LostReplay(PROCESS_LOST)

    def close(self) -> None:
        """Kill the process and close the pipe. Only for the thread that owns the child."""
        self.end()
        self._pipe.close()

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            try:
                self._receive(START_S)
            except TimeoutError:
                raise Invalid(what="app", found=self._app, why="its import did not end") from None
            self._is_ready = True

    def _send(self, message: Any) -> None:
        # A child that has ended is noticed when its reply is received.
        with contextlib.suppress(OSError):
            self._pipe.send(msgspec.msgpack.encode(message))

    def _receive(self, limit_s: float | None) -> tuple[str, Any]:
        deadline_ns = None if limit_s is None else SYSTEM.mono_ns() + int(limit_s * S)
        while not self._pipe.poll(POLL_S):
            # A process forked by the application may keep the pipe open.
            if not self.is_alive() and not self._pipe.poll(0):
                raise ConnectionError("the replay process ended")
            if deadline_ns is not None and SYSTEM.mono_ns() > deadline_ns:
                raise TimeoutError
        return msgspec.msgpack.decode(self._pipe.receive(), type=tuple[str, Any])


class ReplayLane:
    """The children of one thread, one per hash seed."""

    def __init__(self, url: str, app: str | None) -> None:
        self._url = url
        self._app = app
        self._processes: dict[str, ReplayProcess] = {}
        self._lock = threading.Lock()
        self._is_stopped = False

    def replay(
        self,
        function: ReplayFunction[Result],
        hash_seed: str,
        targets: Sequence[Any],
        limit_s: float | None = None,
    ) -> list[Result | HoldfastError | LostReplay]:
        """Replay the targets in a child with this hash seed. Return one answer per target."""
        answers: list[Result | HoldfastError | LostReplay] = []
        while len(answers) < len(targets):
            process = self._process(hash_seed, function)
            for answer in process.replay(function, targets[len(answers) :], limit_s):
                answers.append(answer)
            if isinstance(answers[-1], LostReplay):
                with self._lock:
                    del self._processes[hash_seed]
                process.close()
        return answers

    def stop(self) -> None:
        """Kill the children and start no other one. Any thread may call it."""
        with self._lock:
            self._is_stopped = True
            for process in self._processes.values():
                process.kill()

    def close(self) -> None:
        """End the children. Only for the thread of the lane."""
        for process in self._processes.values():
            process.close()

    def _process(self, hash_seed: str, function: ReplayFunction[Any]) -> ReplayProcess:
        with self._lock:
            if self._is_stopped:
                raise ReplayFailed(why="the replay was stopped")
            process = self._processes.get(hash_seed)
            if process is None:
                module = function.name.partition(":")[0]
                process = ReplayProcess(self._url, self._app, hash_seed, module)
                self._processes[hash_seed] = process
            return process


class ReplayPool:
    """Threads that replay shares of targets. No two threads share a child."""

    def __init__(self, url: str, app: str | None, jobs: int) -> None:
        self._url = url
        self._app = app
        self._jobs = jobs

    def run(
        self, check: Callable[[ReplayLane, Share], Result], shares: Sequence[Share]
    ) -> Iterator[Result]:
        """Call `check` for each share in one of the threads, and yield its results as they complete.

        An error of `check` is raised here. The end of the iteration kills the children.
        """
        waiting = deque(shares)
        completed: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run_lane(lane: ReplayLane) -> None:
            with contextlib.closing(lane):
                while True:
                    try:
                        share = waiting.popleft()
                    except IndexError:
                        return  # another thread took the last share
                    try:
                        completed.put((check(lane, share), None))
                    except BaseException as error:
                        completed.put((None, error))
                        return

        lanes = [ReplayLane(self._url, self._app) for _ in range(min(self._jobs, len(shares)))]
        threads = [threading.Thread(target=run_lane, args=(lane,)) for lane in lanes]
        try:
            for thread in threads:
                thread.start()
            for _ in shares:
                result, error = completed.get()
                if error is not None:
                    raise error
                yield result
        finally:
            waiting.clear()
            for lane in lanes:
                lane.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()


# -- in the child --------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    pipe = FrameSocket(socket.socket(fileno=int(sys.argv[1])), FRAMES)
    # A process that the application forks must not use this pipe.
    os.register_at_fork(after_in_child=pipe.close)
    path, argv, module, url, app_name = msgspec.msgpack.decode(pipe.receive())
    sys.path[:], sys.argv[:] = path, argv
    # An interrupt is sent to the whole process group. The parent ends this process.
    signal.signal(signal.SIGINT, lambda *_: None)
    # The output of the application must not get into the output of the command.
    os.dup2(2, 1)
    importlib.import_module(module)
    app = None if app_name is None else load_app(app_name)
    with stores.open(url, bootstrap=False) as store:
        pipe.send(msgspec.msgpack.encode(["ready", None]))
        with contextlib.suppress(ConnectionError):
            while True:
                name, limit_s, sent = msgspec.msgpack.decode(pipe.receive())
                module, _, attribute = name.partition(":")
                function: ReplayFunction[Any] = getattr(importlib.import_module(module), attribute)
                for target in msgspec.convert(sent, function.targets):
                    pipe.send(_reply(function, store, app, target, limit_s))


def _reply(
    function: ReplayFunction[Any], store: Store, app: App | None, target: Any, limit_s: float | None
) -> bytes:
    try:
        return msgspec.msgpack.encode(["result", function.fn(store, app, target, limit_s)])
    except HoldfastError as error:
        return msgspec.msgpack.encode(["error", to_wire(error)])
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        return msgspec.msgpack.encode(["error", to_wire(ReplayFailed(why=text))])


_COMMAND = "from holdfast.ops.replay_process import main; main()"
