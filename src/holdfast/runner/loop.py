"""The loop around `tick`: when to rest, what wakes it, how it starts and ends.

It rests while nothing is due, or every place in the crew is taken, and then sleeps on the bell. When
the store refuses, or claims came to nothing although something was due, it pauses for longer each
time, so that trouble is never met with a spin.

However it ends, what is in hand is finished and settled if that is possible, and the runner is
STOPPED after. Only a crash skips that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.clock import MS, SYSTEM, S
from holdfast.durable.queue import topic
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner.bell import LISTEN_S, Bell
from holdfast.runner.boot import NotRunning, State
from holdfast.runner.faults import transient
from holdfast.runner.tick import Tick
from holdfast.store.api import Store

if TYPE_CHECKING:
    from holdfast.runner.runner import Runner

# The first pause after a fruitless tick; each further one is twice as long, up to the idle maximum.
PAUSE_FIRST_MS = 10
# How long an answer that is on its way is waited for before anything else is looked at.
AWAIT_MS = 20
# A bell may ring because its listener has only looked up; twice within this long is for a reason.
LOOKED_UP_NS = int(0.9 * LISTEN_S * S)


class Loop:
    def __init__(
        self,
        runner: Runner,
        store: Store,
        queues: Sequence[str],
        *,
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._runner = runner
        self._store = store
        self._topics = [topic(queue) for queue in queues]
        self._sleep = sleep
        self._running = threading.Lock()
        self._bell: Bell | None = None
        # When the last pause ended: whether somebody in this process has rung since, and what was heard.
        self._called = False
        self._heard = 0
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._fruitless = 0
        # Whether the last tick was made for something that the one before had just missed.
        self._met = False

    def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise Invalid(what="runner", worker=self._runner.worker, why="it runs already")
        # Here, and not when its thread has come so far: nobody else runs it in between.
        self._take()
        self.failure = None
        self._thread = threading.Thread(target=self._main, name=self._runner.worker, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads for us
            self._running.release()
            raise

    def run(self) -> None:
        if self._runner.state is State.STOPPED:
            raise NotRunning(worker=self._runner.worker)
        self._take()
        self._run()

    def ring(self) -> None:
        # Before it rings: whoever is woken by it looks.
        self._called = True
        bell = self._bell
        if bell is not None:
            bell.ring()

    def join(self, timeout_s: float | None) -> bool:
        thread = self._thread
        if thread is not None:
            if thread is threading.current_thread():
                return False
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        if self.failure is not None:
            raise self.failure
        return True

    def finish(self, timeout_s: float | None) -> bool:
        """Join the thread or, if there is none, finish here what ticks have left in hand."""
        ended = self.join(timeout_s)
        if ended and self._runner.state is State.STOPPING:
            self.run()
        return ended

    def _take(self) -> None:
        if not self._running.acquire(blocking=False):
            raise Invalid(what="runner", worker=self._runner.worker, why="it runs already")

    def _run(self) -> None:
        try:
            if self._sleep is None:
                self._bell = Bell(self._store, self._topics, name=self._runner.worker)
            self._work()
        finally:
            self._runner.halt()
            if self._bell is not None:
                self._bell.close()
            self._running.release()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _work(self) -> None:
        runner = self._runner
        try:
            while runner.state is State.RUNNING or runner.in_hand:
                self._rest(runner.tick())
        except Exception as error:
            if runner.told is not error:
                runner.hooks.loop_error(error)
            runner.request_stop()
            with contextlib.suppress(Exception):
                while runner.in_hand:
                    self._rest(runner.tick())
            raise

    def _rest(self, tick: Tick) -> None:
        runner = self._runner
        stopping = runner.state is not State.RUNNING
        if stopping and not runner.in_hand:
            return
        if runner.awaits and self._bell is not None:
            # It brings what there is to claim.
            self._bell.rest(min(AWAIT_MS / 1000, runner.attend_s()))
            return
        longest_ns = runner.policy.idle_sleep_max_ms * MS
        claiming = runner.room > 0 and not stopping
        if tick.moved and not tick.busy and claiming:
            self._fruitless, self._met = 0, False
            return
        pause_ns = self._idle_ns() if claiming else longest_ns
        if tick.busy or pause_ns == 0:
            if not (tick.busy or self._met):
                # It fell due between the tick and this look, or the tick would have met it.
                self._met = True
                return
            pause_ns = min((PAUSE_FIRST_MS * MS) << min(self._fruitless, 20), longest_ns)
            self._fruitless += 1
        else:
            self._fruitless = 0
        self._met = False
        self._pause(min(pause_ns / S, runner.attend_s()))

    def _idle_ns(self) -> int:
        try:
            return self._runner.idle_sleep_ns()
        except HoldfastError as error:
            if not transient(error):
                raise
            return 0

    def _pause(self, seconds: float) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
        elif self._bell is not None:
            self._await(self._bell, seconds)

    def _await(self, bell: Bell, seconds: float) -> None:
        """Sleep until it rings, or the time is up. That its listener looked up, and has heard nothing, is no
        reason to look at the store."""
        rung_ns, now_ns = 0, SYSTEM.mono_ns()
        until_ns = now_ns + int(seconds * S)
        while now_ns < until_ns:
            bell.wait((until_ns - now_ns) / S)
            now_ns = SYSTEM.mono_ns()
            if self._called or bell.heard != self._heard or now_ns - rung_ns < LOOKED_UP_NS:
                break
            rung_ns = now_ns
        # Before the tick: what rings from now on, also during it, ends the next pause.
        self._called, self._heard = False, bell.heard
