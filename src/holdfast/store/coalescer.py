"""A leader/followers coalescer: one function call serves the calls of many threads.

A thread that finds no leader becomes the leader and serves all waiting calls in one batch. Calls that arrive
meanwhile wait for the next batch, so every batch starts after each of its calls was made. The leader then
promotes the first waiting thread.

A signal handler may interrupt the main thread anywhere. The interrupted thread leaves the queue, and its
followers get an error or another leader, so no thread waits for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from holdfast.errors import StoreForked


class CoalescedCall:
    """A call of one thread. `serve` stores its result in a subclass and may set `error` and `done`."""

    __slots__ = ("done", "error", "gate", "is_leader")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        # Whether this thread serves the waiting calls.
        self.is_leader = False
        # Released once: when the call is done, or when its thread becomes the leader.
        self.gate = threading.Lock()
        self.gate.acquire()


C = TypeVar("C", bound=CoalescedCall)


def take_all(waiting: list[C]) -> list[C]:
    batch = waiting[:]
    waiting.clear()
    return batch


class Coalescer(Generic[C]):
    def __init__(
        self,
        serve: Callable[[Sequence[C]], None],
        to_error: Callable[[BaseException], Exception],
        take: Callable[[list[C]], list[C]] = take_all,
    ) -> None:
        """`serve` serves a batch. When it raises, `to_error` makes the error of the calls that are not done.
        `take` removes the next batch, at least one call, from the front of the waiting calls."""
        self._serve = serve
        self._to_error = to_error
        self._take = take
        self._lock = threading.Lock()
        self._waiting: list[C] = []
        self._has_leader = False
        self._pid = os.getpid()

    def run(self, call: C) -> None:
        """Return when the call is served, or raise its error."""
        if os.getpid() != self._pid:
            raise StoreForked(why="the serving threads belong to the parent")
        try:
            with self._lock:
                self._waiting.append(call)
                call.is_leader, self._has_leader = not self._has_leader, True
            if not call.is_leader:
                call.gate.acquire()
            if call.is_leader:
                self._lead(call)
        except BaseException:
            self._leave(call)
            raise
        if call.error is not None:
            raise call.error

    def _lead(self, leader: C) -> None:
        batch: list[C] = []
        try:
            with self._lock:
                batch = self._take(self._waiting)
            self._serve(batch)
        except BaseException as error:
            for call in batch:
                if not call.done:
                    call.error = self._to_error(error)
            raise
        finally:
            # First the next leader, which has work to do.
            self._leave(leader)
            for call in batch:
                call.done = True
                if call is not leader:
                    call.gate.release()

    def _leave(self, call: C) -> None:
        """Remove a call from the queue. If its thread is the leader, promote the next one."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            if not call.is_leader:
                return
            call.is_leader = False
            self._has_leader = bool(self._waiting)
            if self._waiting:
                successor = self._waiting[0]
                successor.is_leader = True
                successor.gate.release()
