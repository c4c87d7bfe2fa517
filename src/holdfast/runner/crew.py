"""A crew: the hands that run the handlers of one runner, several at a time.

    Threads   each hand is a thread, for handlers that are plain functions
    Tasks     each hand is a task of one event loop, for handlers that are coroutines

The loop gives and collects, and never waits. What is given waits in one line, and every hand takes
the next from it: nothing waits behind a slow neighbour while a hand is free. Only as many hands are
woken as the measured pace calls for, because waking one costs more than a quick handler, and one is
enough for quick handlers: more would fight for the interpreter. `nudge` wakes another when the line
stands.

A runner that tends its claims may give more than there are hands (`ahead`): what the hands will do
within `AHEAD_NS` at their pace, so that quick handlers never wait for a commit.

`drop` gives up on a handler that is out of time or not wanted any more: its task is cancelled, and a
hand that does not come back is written off and replaced. What a dropped handler returns is ignored.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from holdfast import forks
from holdfast.clock import MS, Clock
from holdfast.runner.faults import Exited
from holdfast.runner.work import Outcome

# How much work is taken beyond the hands there are, and for how long it may wait for one.
AHEAD_NS = 20 * MS
# A hand is woken for about this much work; less is left to those that are awake.
SHARE_NS = 1 * MS
# Hands that together end one this often are enough: more would only fight for the interpreter.
ENOUGH_NS = 60_000
# ... and so often are too many, unless it is one.
TOO_MANY_NS = 30_000
# A line that stands this long gets another hand.
NUDGE_NS = 5 * MS
# Quick outcomes are handed over this many at a time.
HANDFUL = 64
# Hands written off that are replaced: of more, each keeps its place until it comes back.
WRITTEN_OFF_MAX = 100
# How fast the pace follows: the share of the latest handler in it.
_FOLLOW = 0.05

# How an attempt ended: what `run` returned, which has its `work` and a `latency_ns` (0 if the crew is to
# measure it), or `Crashed`.
End = Any


class Piece(Protocol):
    """What is given to a crew: an item under a claim, a task under a lease."""

    taken_ns: int
    began_ns: int
    dropped: bool

    @property
    def token(self) -> Any: ...
    def begin(self, now_ns: int, clock: Clock) -> None: ...


class Crashed:
    """What went right through a handler."""

    __slots__ = ("error", "work")

    def __init__(self, work: Any, error: BaseException) -> None:
        self.work = work
        self.error = error


class Hand:
    """One of a crew; `work` is what it is at."""

    __slots__ = ("guest", "task", "work", "written_off")

    def __init__(self, *, guest: bool = False) -> None:
        self.work: Any = None
        self.written_off = False
        # Somebody else's thread, which has lent itself.
        self.guest = guest
        self.task: asyncio.Task[Any] | None = None


class Crew:
    """What both kinds have in common. `give`, `collect`, `drop` and `nudge` are the loop's alone."""

    # Where hands share an interpreter.
    _enough_ns = 0
    _too_many_ns = 0

    def __init__(
        self,
        size: int,
        *,
        began: Callable[[Any], None] | None,
        done: Callable[[], None],
        clock: Clock,
        ahead_max: int = 0,
    ) -> None:
        self._size = size
        self._began = began
        self._done = done
        self._clock = clock
        self._mono_ns = clock.mono_ns
        self._ahead_max = ahead_max
        self._line: deque[Any] = deque()
        self._finished: list[End] = []
        self._crashes: list[Crashed] = []
        self._held: dict[Any, Any] = {}
        # Those that are at something.
        self._hands: set[Hand] = set()
        self._lock = threading.Lock()
        self._awake = 0
        self._written_off = 0
        self._pace_ns = 0.0
        self._stood_ns = 0
        # Who was the last to take something.
        self._taker: Hand | None = None

    # -- the loop's side -----------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more may be given now."""
        hands = self._hands_left()
        return hands + self._ahead() - len(self._held) if hands else 0

    @property
    def free(self) -> int:
        """How many of them would be begun at once."""
        return max(0, self._hands_left() - len(self._held))

    @property
    def spent(self) -> bool:
        """Whether no hand is left: all were written off, and too many to replace them."""
        return self._hands_left() == 0

    @property
    def busy(self) -> bool:
        return bool(self._held)

    @property
    def line(self) -> int:
        """How many wait for a hand."""
        return len(self._line)

    @property
    def has_finished(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._finished or self._crashes)

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def held(self) -> list[Any]:
        return list(self._held.values())

    @property
    def standing(self) -> bool:
        """Whether work waits although a hand could be woken for it."""
        return bool(self._line) and self._awake < self._hands_left()

    def has(self, token: object) -> bool:
        return token in self._held

    def give(self, works: Sequence[Piece]) -> None:
        held = self._held
        for work in works:
            held[work.token] = work
        with self._lock:
            # With nothing in line, whoever is awake is at something, and who knows for how long.
            more = 0 if self._line else 1
            self._line.extend(works)
            self._stood_ns = self._clock.mono_ns()
            self._taker = None
        self._call(more)

    def collect(self) -> list[Any]:
        """What has finished by now. A crash in a handler is raised here, before anything else."""
        let_go = self._held.pop
        # What is not held any more was dropped.
        while self._crashes:
            crash = self._crashes.pop(0)
            if let_go(crash.work.token, None) is not None:
                raise crash.error
        if not self._finished:
            return []
        with self._lock:
            finished, self._finished = self._finished, []
        return [end for end in finished if let_go(end.work.token, None) is not None]

    def waiting(self) -> list[Any]:
        """Take back what no hand has begun."""
        with self._lock:
            works = list(self._line)
            self._line.clear()
        for work in works:
            del self._held[work.token]
        return works

    def overdue(self, waited_ns: int) -> list[Any]:
        """Take back what no hand has begun, if the first in line has waited so long."""
        with self._lock:
            if not self._line or self._clock.mono_ns() - self._line[0].taken_ns < waited_ns:
                return []
            # So much for the pace: no more is taken ahead until it is quick again.
            self._pace_ns = max(self._pace_ns, float(waited_ns))
        return self.waiting()

    def drop(self, work: Piece) -> None:
        """Give up on it, begun or not. Its outcome, if there ever is one, is ignored."""
        work.dropped = True
        self._held.pop(work.token, None)
        with self._lock:
            if work in self._line:
                self._line.remove(work)
                return
            hand = next((one for one in self._hands if one.work is work), None)
            if hand is None:
                return
            self._hands.discard(hand)
            hand.written_off = True
            self._written_off += 1
            self._awake -= 1
        self._stop(hand)
        self._call()

    def lend(self, hands: int) -> None:
        """So many more hands, or fewer, from now on: one who waits for others' work has none free."""
        with self._lock:
            self._size += hands
            # Whoever took something last may be the one who waits.
            self._taker = None
        if hands > 0:
            self._call(hands)

    def nudge(self) -> None:
        """If the line has stood, wake another hand for it."""
        now_ns = self._clock.mono_ns()
        if self.standing and now_ns - self._stood_ns >= NUDGE_NS:
            self._stood_ns = now_ns
            # Whoever took something last is at it still.
            self._taker = None
            self._call(1)

    def close(self) -> None:
        """No more work. Hands end when what they are at ends."""
        raise NotImplementedError

    # -- the hands' side -----------------------------------------------------------------------

    def _take(self, hand: Hand) -> Any:
        """The next in line; None sends the hand to sleep."""
        with self._lock:
            return self._pick(hand, self._mono_ns())

    def _ended(self, hand: Hand, work: Piece, end: End) -> bool:
        """Hand over how it ended; whether the hand is still wanted."""
        with self._lock:
            if hand.written_off:
                self._written_off -= 1
                return False
            hand.work = None
            self._hands.discard(hand)
            ring = self._put(end, self._mono_ns())
        if ring:
            self._done()
        return True

    def _next(self, hand: Hand, end: End) -> Any:
        """`_ended` and `_take` in one step, which for quick handlers is half of the work. None sends the
        hand to sleep, or home if it was written off."""
        with self._lock:
            if hand.written_off:
                self._written_off -= 1
                return None
            now_ns = self._mono_ns()
            ring = self._put(end, now_ns)
            work = self._pick(hand, now_ns)
        if ring:
            self._done()
        return work

    def _put(self, end: End, now_ns: int) -> bool:
        """Put it where it is collected, under the lock; whether to ring for it."""
        if type(end) is Crashed:
            self._crashes.append(end)
            return True
        self._finished.append(end)
        latency_ns = end.latency_ns or now_ns - end.work.began_ns
        was_ns = self._pace_ns or latency_ns
        self._pace_ns = pace_ns = was_ns + _FOLLOW * (latency_ns - was_ns)
        # Without `ahead` nobody looks in between.
        if not self._ahead_max or not self._line or pace_ns > SHARE_NS:
            return True
        # Of a handful one rings: whoever sleeps has seen that there was nothing before it.
        return len(self._finished) == HANDFUL

    def _pick(self, hand: Hand, now_ns: int) -> Any:
        """Take the next in line, if the hand is to go on; under the lock."""
        if not self._line or (self._awake > 1 and self._too_many(hand, now_ns)):
            hand.work = None
            self._hands.discard(hand)
            self._awake -= 1
            if not hand.guest:
                self._rests()
            return None
        if hand.work is None:
            self._hands.add(hand)
        work = hand.work = self._line.popleft()
        self._stood_ns = now_ns
        self._taker = hand
        work.begin(now_ns, self._clock)
        if self._began is not None:
            self._began(work)
        return work

    def _wanted(self, more: int = 0) -> int:
        """How many hands to wake, under the lock: by the pace, one at least."""
        line = len(self._line)
        if self._ahead_max and self._pace_ns:
            wanted = max(int(line * self._pace_ns / SHARE_NS), 1, self._awake + more)
            if self._every_ns < self._enough_ns:
                wanted = min(wanted, max(self._awake + more, 1))
        else:
            wanted = self._awake + line
        wake = max(0, min(wanted, self._hands_left()) - self._awake)
        wake = min(wake, line)
        self._awake += wake
        return wake

    @property
    def _every_ns(self) -> float:
        """How often one ends, about, with the hands that are awake."""
        return self._pace_ns / max(self._awake, 1)

    def _too_many(self, hand: Hand, now_ns: int) -> bool:
        """Whether others that are awake take so quickly what is in line that this hand is in their way.
        Others that are at something long do not count."""
        if not self._ahead_max or not self._pace_ns:
            return False
        return (
            self._taker not in (None, hand)
            and self._every_ns < self._too_many_ns
            and now_ns - self._stood_ns < self._enough_ns
        )

    def _ahead(self) -> int:
        if not self._ahead_max or not self._pace_ns:
            return 0
        return min(self._ahead_max, int(self._size * AHEAD_NS / self._pace_ns))

    def _hands_left(self) -> int:
        """How many hands there may be. If too many never came back, their places are lost."""
        beyond = max(0, self._written_off - WRITTEN_OFF_MAX * self._size)
        return max(0, self._size - beyond)

    def _call(self, more: int = 0) -> None:
        raise NotImplementedError

    def _stop(self, hand: Hand) -> None:
        """Tell a dropped hand to stop, if there is a way."""

    def _rests(self) -> None:
        """A hand goes to sleep; under the lock."""


class Threads(Crew):
    """Threads are daemons: a handler that hangs keeps its thread, but not the process."""

    _enough_ns = ENOUGH_NS
    _too_many_ns = TOO_MANY_NS

    def __init__(
        self,
        size: int,
        run: Callable[[Any], Any],
        *,
        name: str,
        began: Callable[[Any], None] | None,
        done: Callable[[], None],
        clock: Clock,
        ahead_max: int = 0,
    ) -> None:
        super().__init__(size, began=began, done=done, clock=clock, ahead_max=ahead_max)
        self._run = run
        self._name = name
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = 0
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            asleep = self._asleep
        for _ in range(asleep):
            self._bell.put(None)

    def _call(self, more: int = 0) -> None:
        with self._lock:
            wake = self._wanted(more)
            called = min(wake, self._asleep)
            self._asleep -= called
        for _ in range(called):
            self._bell.put(None)
        for number in range(wake - called):
            thread = threading.Thread(
                target=self._serve, name=f"{self._name} {number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # The system has no more threads for us: those there are go on, and `nudge` tries again.
                with self._lock:
                    self._awake -= wake - called - number
                    if not self._awake and not self._asleep:
                        raise
                return

    def enlist(self, work: Piece) -> Callable[[], None] | None:
        """Let the caller's own thread be a hand for this one, which has just come, and for what comes after
        it until nothing does: by what is returned. It is the loop's to enlist, and somebody else is the
        loop then. None: no hand is free."""
        if (self._held or self._written_off) and not self.free:
            return None
        hand = Hand(guest=True)
        self._held[work.token] = work
        with self._lock:
            now_ns = self._stood_ns = work.taken_ns
            self._awake += 1
            self._hands.add(hand)
            self._taker = hand
            hand.work = work
            work.begin(now_ns, self._clock)
            if self._began is not None:
                self._began(work)
        return partial(self._do, hand, work)

    def _do(self, hand: Hand, work: Piece | None) -> None:
        run, next_one = self._run, self._next
        before = forks.made
        while work is not None:
            end: End
            try:
                end = run(work)
            except BaseException as crash:
                end = Crashed(work, crash)
            if forks.made != before:
                forks.leave(end.error if isinstance(end, Crashed) else None)
            work = next_one(hand, end)

    def _serve(self) -> None:
        hand = Hand()
        while not self._closed:
            self._do(hand, self._take(hand))
            if hand.written_off:
                return
            if not self._closed:
                self._bell.get()

    def _rests(self) -> None:
        self._asleep += 1


class Run(Protocol):
    def __call__(self, work: Any, /) -> Awaitable[Any]: ...


class Tasks(Crew):
    """Tasks of an event loop that runs in another thread."""

    def __init__(
        self,
        size: int,
        run: Run,
        loop: asyncio.AbstractEventLoop,
        *,
        began: Callable[[Any], None] | None,
        done: Callable[[], None],
        clock: Clock,
        ahead_max: int = 0,
        failed: Callable[[Any, Exception, int], Any] = Outcome,
    ) -> None:
        super().__init__(size, began=began, done=done, clock=clock, ahead_max=ahead_max)
        self._run = run
        self._failed = failed
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        return

    def _call(self, more: int = 0) -> None:
        with self._lock:
            wake = self._wanted(more)
        if wake:
            self._loop.call_soon_threadsafe(self._start, wake)

    def _start(self, wake: int) -> None:
        for _ in range(wake):
            task = self._loop.create_task(self._serve(Hand()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _stop(self, hand: Hand) -> None:
        self._loop.call_soon_threadsafe(self._cancel, hand)

    def _cancel(self, hand: Hand) -> None:
        """In the loop's thread: the task is the one that the hand is at."""
        if hand.task is not None:
            hand.task.cancel()

    async def _attempt(self, work: Piece) -> Any:
        return await self._run(work)

    async def _serve(self, hand: Hand) -> None:
        work = self._take(hand)
        while work is not None:
            end: End
            try:
                # A task of its own: what one call leaves behind reaches no other.
                hand.task = self._loop.create_task(self._attempt(work))
                if hand.written_off:
                    hand.task.cancel()
                end = await hand.task
            except asyncio.CancelledError as crash:
                if hand.written_off:
                    self._ended(hand, work, Crashed(work, crash))
                    return
                # It cancelled itself, and nobody else is to suffer for it.
                error = Exited(raised=type(crash).__name__)
                end = self._failed(work, error, self._clock.mono_ns() - work.began_ns)
            except BaseException as crash:
                end = Crashed(work, crash)
            work = self._next(hand, end)
