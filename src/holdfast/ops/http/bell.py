"""Long polls: requests that wait for a task to do, or for one to end, without a thread each and without
asking again and again.

Those who ask for the same stand in one line. A ring lets the first of a line look; if it finds
something, it lets the next one look, so a hundred waiting requests cost one look per task and not a
hundred. A ring that comes while somebody looks is not lost: lines count their rings.

One thread listens to the store for all lines, and only while somebody stands in one. `store.wait` cannot
be called off, so a topic of our own tells it that there is another queue to listen to. Time rings too:
a delay that is over, a lease that has run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import HoldfastError, StoreClosed
from holdfast.ops.http.route import Gone
from holdfast.store.api import Store
from holdfast.tasks.coordinator import Leased
from holdfast.tasks.lease import next_due_ns
from holdfast.tasks.look import ended_of, offering
from holdfast.tasks.rows import keys_of

# The listener looks up this often at the least, and this often at most for what is due by time.
LISTEN_S = 5.0
DUE_S = 0.02
# Topics that are listened to; with more, those that nobody waits for are left out.
TOPICS_MAX = 1_000

NOTHING = Leased([])

K = TypeVar("K")


class Line:
    """Those who wait for the same, first come first served."""

    def __init__(self) -> None:
        self.members = 0
        self.rings = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def ring(self) -> None:
        """Let one of them look."""
        self.rings += 1
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return

    def ring_all(self) -> None:
        for _ in range(len(self._waiting) + 1):
            self.ring()

    async def wait(self, seen: int, timeout_s: float, gone: Gone) -> None:
        """Until it rings for us, or has rung since `seen`, or nobody waits, or the time is up."""
        if self.rings != seen:
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        gone.watch(mine)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await mine


class Bell:
    def __init__(
        self,
        store: Store,
        universe: str,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._store = store
        self._universe = universe
        self._keys = keys_of(universe)
        self._loop = loop
        self._own_topic = f"tasks/{universe}/http/{clock.entropy(8).hex()}"
        self._closed = False
        # Lines by the queues and names, and by the seq of the task, that they wait for. Changed in the
        # loop only.
        self._queues: dict[tuple[frozenset[str], frozenset[str]], Line] = {}
        self._tasks: dict[int, Line] = {}
        # What the listener listens to: what somebody waits for, and some of what somebody did.
        self._topics: set[str] = set()
        self._awaited = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="holdfast-http-bell", daemon=True)
        self._thread.start()

    async def lease(
        self,
        queues: Iterable[str],
        names: Iterable[str],
        wait_s: float,
        attempt: Callable[[], Awaitable[Leased]],
        gone: Gone,
    ) -> Leased:
        """What the first attempt that finds something is granted; nothing when the time is up."""
        found = await attempt()
        if found.grants or wait_s <= 0:
            return found
        until_s = self._loop.time() + wait_s
        key = (frozenset(queues), frozenset(names))
        with self._standing(self._queues, key, map(self._keys.queue_topic, key[0])) as line:
            try:
                while not self._closed:
                    seen = line.rings
                    if gone.now:
                        break
                    found = await attempt()
                    if found.grants:
                        return found
                    left_s = until_s - self._loop.time()
                    if left_s <= 0:
                        return found
                    await line.wait(seen, left_s, gone)
                return NOTHING
            finally:
                # There may be more for the next one; or it has rung for us, and we did not look.
                line.ring()

    async def until_ended(
        self,
        seq: int,
        wait_s: float,
        has_ended: Callable[[], Awaitable[bool]],
        gone: Gone,
    ) -> None:
        """Until a task has ended, or the time is up."""
        until_s = self._loop.time() + wait_s
        with self._standing(self._tasks, seq, [self._keys.task_topic(seq)]) as line:
            while not self._closed and not gone.now:
                seen = line.rings
                left_s = until_s - self._loop.time()
                if left_s <= 0 or await has_ended():
                    return
                await line.wait(seen, left_s, gone)

    def close(self) -> None:
        """Send everybody home. Called in the loop."""
        self._closed = True
        self._ended.set()
        self._awaited.set()
        for line in (*self._queues.values(), *self._tasks.values()):
            line.ring_all()
        with contextlib.suppress(HoldfastError):
            self._tell_listener()

    # -- lines, in the loop ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _standing(self, lines: dict[K, Line], key: K, topics: Iterable[str]) -> Iterator[Line]:
        """In a line, and listened for."""
        line = lines.setdefault(key, Line())
        line.members += 1
        try:
            fresh = set(topics) - self._topics
            if fresh:
                # Replaced and never changed: the listener may be reading it.
                self._topics = fresh | (
                    self._topics if len(self._topics) < TOPICS_MAX else self._wanted()
                )
                self._tell_listener()
            self._awaited.set()
            yield line
        finally:
            line.members -= 1
            if not line.members:
                del lines[key]
            if not self._queues and not self._tasks and not self._closed:
                self._awaited.clear()

    def _wanted(self) -> set[str]:
        """The topics of those who wait now."""
        queues = {self._keys.queue_topic(name) for key, _ in self._queues for name in key}
        return queues | {self._keys.task_topic(seq) for seq in self._tasks}

    def _ring(self, queues: list[str] | None, ended: list[int]) -> None:
        for (key, _), line in list(self._queues.items()):
            if queues is None or not key.isdisjoint(queues):
                line.ring()
        for seq in ended:
            if seq in self._tasks:
                self._tasks[seq].ring_all()

    def _tell_listener(self) -> None:
        self._store.submit(lambda txn: txn.notify(self._own_topic))

    # -- the listener, in its thread -----------------------------------------------------------------

    def _listen(self) -> None:
        since = 0
        while True:
            self._awaited.wait()
            if self._ended.is_set():
                return
            try:
                since = self._hear(since)
            except (StoreClosed, RuntimeError):
                return  # the store, or the loop, is gone
            except HoldfastError:
                # Whoever polls meets the same trouble, and is told.
                self._ended.wait(LISTEN_S)

    def _hear(self, since: int) -> int:
        """Sleep until something may have happened, and ring for whom it did."""
        store, universe = self._store, self._universe
        due_ns = store.read(next_due_ns, universe) if self._queues else None
        rest_s = LISTEN_S
        if due_ns is not None:
            rest_s = min(max((due_ns - store.now_ns()) / S, DUE_S), LISTEN_S)
        heard = store.wait([self._own_topic, *self._topics], since, rest_s)
        if self._ended.is_set():
            return heard
        queues = {name for key, _ in list(self._queues) for name in key}
        ended = store.read(ended_of, universe, list(self._tasks))
        if due_ns is not None and store.now_ns() >= due_ns:
            found: list[str] | None = None  # whoever looks first puts in order what is due
        else:
            found = store.read(offering, universe, queues)
        if found is None or found or ended:
            self._loop.call_soon_threadsafe(self._ring, found, ended)
        return heard
