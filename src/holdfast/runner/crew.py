"""A crew: threads that run the handlers of one runner, several at a time.

The loop gives and collects, and never waits: `give` only as many as there is `room` for, so nothing
that was claimed waits behind a slow neighbour. Threads are daemons: a handler that hangs keeps its
place, but not the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from holdfast.durable.queue import Claim, Token
from holdfast.runner.work import Outcome, Work


class Crew:
    def __init__(
        self, size: int, run: Callable[[Work], Outcome], done: Callable[[], None], *, name: str
    ) -> None:
        self._size = size
        self._run = run
        self._done = done
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        self._finished: deque[tuple[Work, Outcome | BaseException]] = deque()
        self._running: dict[Token, Work] = {}
        for number in range(size):
            threading.Thread(target=self._serve, name=f"{name} {number}", daemon=True).start()

    @property
    def room(self) -> int:
        return self._size - len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def has(self, claim: Claim) -> bool:
        return claim.token in self._running

    def give(self, work: Work) -> None:
        assert self.room > 0
        self._running[work.claim.token] = work
        self._given.put(work)

    def collect(self) -> list[Outcome]:
        """What has finished by now. A crash in a handler is raised here, before anything else."""
        outcomes = []
        while self._finished:
            work, end = self._finished.popleft()
            del self._running[work.claim.token]
            if not isinstance(end, Outcome):
                raise end
            outcomes.append(end)
        return outcomes

    def close(self) -> None:
        for _ in range(self._size):
            self._given.put(None)

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            end: Outcome | BaseException
            try:
                end = self._run(work)
            except BaseException as crash:
                end = crash
            self._finished.append((work, end))
            self._done()
