"""Long polls: requests that wait for a task, without a thread each and without asking again and again.

Those who ask for the same queues stand in one line. A ring lets the first of a line look; if it finds
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
from collections.abc import Awaitable, Callable, Iterable

from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import HoldfastError, StoreClosed
from holdfast.store.api import Store
from holdfast.tasks.coordinator import Leased
from holdfast.tasks.lease import next_due_ns
from holdfast.tasks.look import offering
from holdfast.tasks.rows import keys_of

# The listener looks up this often at the least, and this often at most for what is due by time.
LISTEN_S = 5.0
DUE_S = 0.02
# Queues that are listened to; with more, those that nobody waits for are forgotten.
QUEUES_MAX = 1_000

NOTHING = Leased([])


class Line:
    """Those who wait for the same queues, first come first served."""

    def __init__(self, queues: tuple[str, ...]) -> None:
        self.queues = queues
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

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Until it rings for us, or has rung since `seen`, or the time is up."""
        if self.rings != seen:
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
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
        self._lines: dict[tuple[str, ...], Line] = {}
        self._closed = False
        # Shared with the listener.
        self._lock = threading.Lock()
        self._queues: set[str] = set()
        self._awaited = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="holdfast-http-bell", daemon=True)
        self._thread.start()

    async def lease(
        self,
        queues: Iterable[str],
        wait_s: float,
        attempt: Callable[[], Awaitable[Leased]],
        gone: Callable[[], bool],
    ) -> Leased:
        """What the first attempt that finds something is granted; nothing when the time is up."""
        found = await attempt()
        if found.grants or wait_s <= 0:
            return found
        until_s = self._loop.time() + wait_s
        line = self._join(tuple(queues))
        try:
            while not self._closed:
                seen = line.rings
                if gone():
                    line.ring()  # it may have rung for us
                    return NOTHING
                found = await attempt()
                if found.grants:
                    line.ring()
                    return found
                left_s = until_s - self._loop.time()
                if left_s <= 0:
                    return found
                await line.wait(seen, left_s)
            return NOTHING
        except BaseException:
            line.ring()
            raise
        finally:
            self._leave(line)

    def close(self) -> None:
        """Send everybody home. Called in the loop."""
        self._closed = True
        self._ended.set()
        self._awaited.set()
        for line in self._lines.values():
            line.ring_all()
        with contextlib.suppress(HoldfastError):
            self._tell_listener()

    # -- lines, in the loop ------------------------------------------------------------------------

    def _join(self, queues: tuple[str, ...]) -> Line:
        line = self._lines.get(queues)
        if line is None:
            line = self._lines[queues] = Line(queues)
        line.members += 1
        with self._lock:
            fresh = not self._queues.issuperset(queues)
            if fresh and len(self._queues) >= QUEUES_MAX:
                self._queues = {name for one in self._lines for name in one}
            self._queues.update(queues)
        self._awaited.set()
        if fresh:
            self._tell_listener()
        return line

    def _leave(self, line: Line) -> None:
        line.members -= 1
        if not line.members:
            del self._lines[line.queues]
        if not self._lines and not self._closed:
            self._awaited.clear()

    def _ring(self, queues: list[str] | None) -> None:
        for line in list(self._lines.values()):
            if queues is None or not set(queues).isdisjoint(line.queues):
                line.ring()

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
        store, universe = self._store, self._universe
        with self._lock:
            names = sorted(self._queues)
        due_ns = store.read(next_due_ns, universe)
        rest_s = LISTEN_S
        if due_ns is not None:
            rest_s = min(max((due_ns - store.now_ns()) / S, DUE_S), LISTEN_S)
        topics = [self._own_topic, *(self._keys.queue_topic(name) for name in names)]
        heard = store.wait(topics, since, rest_s)
        if self._ended.is_set():
            return heard
        found: list[str] | None = None
        if due_ns is None or store.now_ns() < due_ns:
            with self._lock:
                names = sorted(self._queues)
            found = store.read(offering, universe, names)
        if found is None or found:
            self._loop.call_soon_threadsafe(self._ring, found)
        return heard
