"""State process: a warm child process that computes the states of worlds for the HTTP server.

A reducer is code of the application. One that hangs, ends its process or allocates without bound does so in the child,
and the server answers with an error:

    reducer_timeout   the replay took longer than its time limit; the child is killed
    reducer_died      the child ended
    reducer_memory    the replay needed more memory than its limit
    states_busy       the child was in use for too long; retry

One request uses the child at a time. The next request starts a new child after one was killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.app.app import App
from holdfast.clock import SYSTEM
from holdfast.errors import (
    HoldfastError,
    ReducerDied,
    ReducerMemory,
    ReducerTimeout,
    ReplayDiverged,
    StatesBusy,
)
from holdfast.ops import world_documents
from holdfast.ops.replay_process import (
    TIME_LIMIT,
    LostReplay,
    ReplayProcess,
    replay_function,
)
from holdfast.store.api import Store
from holdfast.world import catalog

# How long the replay of one state may take, and how long a request waits for the child.
LIMIT_S = 10.0
WAIT_S = 20.0
# The memory that a replay may use, in addition to what the child uses when it has imported the application.
MEMORY_BYTES_MAX = 1024**3
# Requests that use the child or wait for it. A server has more threads for requests that wait.
REQUESTS_MAX = 16
# How often the child checks whether its parent has ended.
PARENT_POLL_S = 1.0


class StateTarget(NamedTuple):
    """The world and the height, and the memory that the replay may use."""

    universe: str
    world_id: str
    at: int | None
    memory_bytes_max: int


class StateProcess:
    """The warm child of one application. Any thread may call it."""

    def __init__(
        self,
        url: str,
        app: str,
        *,
        limit_s: float = LIMIT_S,
        wait_s: float = WAIT_S,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
    ) -> None:
        """`app` is `module:attribute`. The child starts with the first request."""
        self._url = url
        self._app = app
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._memory_bytes_max = memory_bytes_max
        self._child: ReplayProcess | None = None
        # Held while the child computes, and while it is replaced.
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(REQUESTS_MAX)
        self._closed = False

    def read(self, universe: str, world_id: str, at: int | None) -> dict[str, Any]:
        """Return the fields of a state as JSON types."""
        with self.in_use():
            return self._read(StateTarget(universe, world_id, at, self._memory_bytes_max))

    @property
    def pid(self) -> int | None:
        """The process id of the child; None before its start."""
        child = self._child
        return None if child is None else child.pid

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Wait until no other request uses the child. Raise StatesBusy if that takes too long."""
        if not self._places.acquire(blocking=False):
            raise StatesBusy(what="states", max=REQUESTS_MAX)
        try:
            if not self._lock.acquire(timeout=self._wait_s):
                raise StatesBusy(what="states", waited_s=self._wait_s)
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._places.release()

    def close(self) -> None:
        """Kill the child. A request that uses it gets `reducer_died`."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
            with self._lock:
                self._discard()

    def _read(self, target: StateTarget) -> dict[str, Any]:
        [answer] = self._living_child().replay(_state_in_child, [target], self._limit_s, 0.0)
        if isinstance(answer, LostReplay):
            self._discard()
            about = {"world": target.world_id, "at": target.at}
            if answer.code == TIME_LIMIT:
                raise ReducerTimeout(**about, limit_s=self._limit_s)
            raise ReducerDied(**about)
        if isinstance(answer, ReducerMemory):
            # The heap of the child may be fragmented.
            self._discard()
        if isinstance(answer, HoldfastError):
            raise answer
        fields: dict[str, Any] = json.loads(answer)
        return fields

    def _living_child(self) -> ReplayProcess:
        if self._closed:
            raise StatesBusy(what="states", why="the server stops")
        if self._child is not None and not self._child.is_alive():
            self._discard()
        if self._child is None:
            seed = os.environ.get("PYTHONHASHSEED", "random")
            self._child = ReplayProcess(self._url, self._app, seed, __name__)
        return self._child

    def _discard(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


# -- in the child ----------------------------------------------------------------------------------


@replay_function(StateTarget, bytes)
def _state_in_child(store: Store, app: App, target: StateTarget, limit_s: float | None) -> bytes:
    _prepare(target.memory_bytes_max)
    # Shows where the code hangs, before the parent kills this process.
    faulthandler.dump_traceback_later((limit_s or LIMIT_S) * 0.9)
    record = store.read(catalog.get_record, target.universe, target.world_id)
    try:
        fields = store.read(world_documents.read_state, record, app, target.at)
        return json.dumps(fields).encode()
    except MemoryError:
        raise _memory_error(target) from None
    except ReplayDiverged as error:
        # An exception of a reducer fails its step, and its text is the reason.
        if str(error.fields.get("why", "")).rstrip().rpartition("\n")[2].startswith("MemoryError"):
            raise _memory_error(target) from None
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def _memory_error(target: StateTarget) -> ReducerMemory:
    return ReducerMemory(
        world=target.world_id, at=target.at, memory_bytes_max=target.memory_bytes_max
    )


@cache
def _prepare(memory_bytes_max: int) -> None:
    """Limit the private memory of this process, and end it with its parent, also while the code hangs. Mapped files of
    the store do not count."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + memory_bytes_max
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        SYSTEM.sleep(PARENT_POLL_S)
    os._exit(1)
