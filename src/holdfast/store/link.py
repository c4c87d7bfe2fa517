"""A client's connection to the writer process.

Many threads share one connection without a thread of its own: whoever waits for an answer and
finds nobody reading becomes the reader, hands out the answers of the others, and passes the duty
on when it has its own. Likewise whoever finds nobody sending sends for all.

When the writer goes away, the reader finds or starts another and sends again what was not
answered, marked as such: the new writer looks each up in the recorded outcomes before it applies
it. A writer that owes an answer and is stopped, or hung, is killed and replaced; it is verified by
pid and start time, so nobody else is ever hit.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.clock import SYSTEM, S
from holdfast.config import FRAME_BYTES_MAX, RESENDS_MAX, RESENT_TOGETHER, WriterLimits
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    Invalid,
    StoreClosed,
    StoreGone,
    StoreReplaced,
    WriterLost,
    from_wire,
    to_wire,
)
from holdfast.store.duty import Duty
from holdfast.store.engine import Answer, Request
from holdfast.store.future import Completions
from holdfast.store.home import Home
from holdfast.store.reach import is_stopped, kill_exactly, peer_of, reach, reap_children
from holdfast.store.watches import Watches
from holdfast.store.wire import (
    Frames,
    Welcome,
    decode_to_client,
    encode,
    frame,
)

# How often a reader that waits looks up, in case the writer is stuck.
_LOOK_S = 0.25
# How often a client looks whether the path still leads to the store.
HOME_LOOK_NS = S
# While answered threads are still being woken, this many transactions wait to be sent together.
_CROWD = 16
# What is done under a duty, and only there: who waits for one, or is at another, is not at it.
_SENDING = frozenset({"_send_outbox", "_send_watched", "_renew"})
_READING = frozenset({"_read", "_shut"})


def _ignore(answer: Answer) -> None:
    """The callback of a call whose caller went away."""


class Call:
    """One transaction under way."""

    __slots__ = ("answer", "callback", "lock", "request", "resends", "sent_ns", "stands")

    def __init__(self, request: Request, callback: Callable[[Answer], None] | None = None) -> None:
        self.request = request
        self.callback = callback
        self.answer: Answer | None = None
        self.sent_ns = 0
        self.resends = 0
        # Nobody owes it an answer, and nobody need be waiting for one.
        self.stands = bool(request.when)
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        _rouse(self.lock)


def _rouse(lock: threading.Lock) -> bool:
    """Release it; whether nobody had. Every answer comes by here, so there is no context manager."""
    try:
        lock.release()
    except RuntimeError:
        return False
    return True


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Link:
    def __init__(self, path: Path, *, bootstrap: bool, limits: WriterLimits) -> None:
        self._path = path
        self._bootstrap = bootstrap
        self._limits = limits
        self.client = SYSTEM.entropy(8)
        self._numbers = itertools.count(1)
        self._pending: dict[int, Call] = {}
        self._outbox: deque[Call] = deque()
        self._sending = Duty(__file__, _SENDING)
        self._reading = Duty(__file__, _READING)
        self._topics: dict[str, int] = {}
        self._watches = Watches()
        self._sleepers: dict[str, list[threading.Lock]] = {}
        self._frames = Frames()
        self._receiver: threading.Thread | None = None
        self._answered: deque[Call] = deque()
        self.completions = Completions()
        # Why this connection is of no use any more: closed, or the store was replaced.
        self._ended: HoldfastError | None = None
        # The writer is gone and the reader has not found another yet: nothing is sent meanwhile.
        self._broken = False
        self._heard_ns = 0
        # Per thread: how deep it is inside `together`.
        self._holding = threading.local()
        self._identity: tuple[str, int] | None = None
        self._home: Home | None = None
        self._home_ns = 0
        self._connect()

    def next_no(self) -> int:
        return next(self._numbers)

    # -- transactions --------------------------------------------------------------------------

    def call(self, request: Request) -> Answer:
        """Send a transaction and wait for its answer."""
        call = Call(request)
        self._post(call)
        return self._await(call)

    def _await(self, call: Call) -> Answer:
        waited = False
        try:
            while call.answer is None:
                if waited:
                    self.flush(look=True)
                if self._reading.take(look=waited):
                    try:
                        while call.answer is None:
                            self._read(None)
                    finally:
                        self._reading.release()
                        self._pass_on()
                else:
                    # Whoever should have passed the duty on may have been interrupted in it.
                    waited = not call.lock.acquire(timeout=_LOOK_S)
        finally:
            if call.answer is None:
                self._abandon(call)
            self._wake_next()
        return call.answer

    def stand(self, request: Request) -> Call:
        """Send a transaction that stands; `wait` ends when it has its answer."""
        call = Call(request)
        self._post(call)
        return call

    def withdraw(self, call: Call) -> Answer:
        """Call back what stands. Its answer is `Withdrawn`, or that which it has."""
        if call.answer is not None:
            return call.answer
        was = call.request
        call.stands = False
        call.request = Request(was.no, was.client, was.snapshot, resent=True, withdrawn=True)
        self._outbox.append(call)
        self.flush()
        return self._await(call)

    def _abandon(self, call: Call) -> None:
        """Its thread leaves without an answer (an interrupt): nobody waits for this one any more."""
        call.callback = _ignore
        with contextlib.suppress(ValueError):
            self._answered.remove(call)
        self._pass_on()

    def post(self, request: Request, callback: Callable[[Answer], None]) -> None:
        """Send a transaction; the callback gets its answer, in the receiver's thread."""
        if self._receiver is None or not self._receiver.is_alive():
            self._receiver = threading.Thread(
                target=self._receive_forever, name="holdfast-receiver", daemon=True
            )
            try:
                self._receiver.start()
            except RuntimeError:
                # The interpreter exits and starts no more threads (3.12): this thread reads the answer.
                self._receiver = None
                callback(self.call(request))
                self.completions.wake()
                return
        self._post(Call(request, callback))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is posted inside goes out by the handful, not one by one."""
        held = self._holding
        held.depth = getattr(held, "depth", 0) + 1
        try:
            yield
        finally:
            held.depth -= 1
            self.flush()

    def _post(self, call: Call) -> None:
        self.check()
        self._pending[call.request.no] = call
        self._outbox.append(call)
        if call.callback is None and not call.stands:
            waits = bool(self._answered)
        else:
            waits = getattr(self._holding, "depth", 0) > 0
        if not waits or len(self._outbox) >= _CROWD:
            self.flush()

    def check(self) -> None:
        """Raise what has ended this connection for good, if anything has."""
        if self._ended is not None:
            raise self._ended
        if SYSTEM.mono_ns() >= self._home_ns:
            self._look_home()

    def _look_home(self) -> None:
        """End the connection if the path does not lead to the store any more."""
        self._home_ns = SYSTEM.mono_ns() + HOME_LOOK_NS
        if self._home is None:
            return
        try:
            self._home.check()
        except (StoreGone, StoreReplaced) as error:
            self._ended = error
            # Threads that read or wait hear of it now.
            self._hang_up()
            raise

    def _is_home(self) -> bool:
        """Whether answers may be handed out. The writer looks at the path that it was started with; ours may be
        another (a link, a mount of another container), and lead elsewhere by now."""
        try:
            if self._home is not None:
                self._home.check_data()
        except (StoreGone, StoreReplaced) as error:
            self._ended = error
            self._fail_all(error)
            return False
        return True

    def flush(self, *, look: bool = False) -> None:
        """Send what waits to be sent, unless somebody is at it."""
        while self._outbox and not self._broken:
            if not self._sending.take(look=look):
                return  # whoever sends now looks again before it leaves
            try:
                self._send_outbox()
            finally:
                self._sending.release()

    def _send_outbox(self) -> None:
        try:
            calls = []
            try:
                while True:
                    calls.append(self._outbox.popleft())
            except IndexError:
                calls = [call for call in calls if call.answer is None]
            if not calls:
                return
            now_ns = SYSTEM.mono_ns()
            for call in calls:
                call.sent_ns = now_ns
            self._send_calls(calls)
        except BaseException:
            # Interrupted, perhaps in the middle of a frame: as when the connection is lost.
            self._hang_up()
            raise

    def _send_calls(self, calls: list[Call], watched: Sequence[str] = ()) -> None:
        """Send in one frame, or in more; what fits into none is refused, and only that."""
        trouble = ""
        try:
            body = encode([[call.request for call in calls], watched])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            trouble = str(error)
        else:
            if len(body) <= FRAME_BYTES_MAX:
                if not self._send(frame(body)):
                    self._put_back(calls)
                return
        if len(calls) > 1:
            half = len(calls) // 2
            self._send_calls(calls[:half])
            self._send_calls(calls[half:], watched)
        elif calls:
            [call] = calls
            told = Invalid(
                what="transaction", why=trouble or "too large", bytes_max=FRAME_BYTES_MAX
            )
            if self._pending.pop(call.request.no, None) is not None:
                self._finish(call, Answer(call.request.no, to_wire(told)))
                self._wake_next()
                self.completions.wake()

    def _put_back(self, calls: list[Call]) -> None:
        """Nothing went out: what was never sent before waits for the next connection."""
        self._broken = True
        fresh = [call for call in calls if not call.request.resent]
        for call in fresh:
            call.sent_ns = 0
        self._outbox.extendleft(reversed(fresh))

    def _send(self, data: bytes) -> bool:
        """Send; whether anything went out. The reader finds a broken connection and mends it."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._replace_if_stuck()
            except OSError:
                return len(view) < len(data)
        return True

    # -- reading -------------------------------------------------------------------------------

    def _read(self, timeout: float | None) -> None:
        """Take what has arrived and hand it out. The caller is the reader."""
        if self._ended is not None:
            self._fail_all(self._ended)
            return
        # Else the socket itself looks up in time. (The main thread may be interrupted in it, which ends the
        # connection: nobody knows then what was read.)
        polls = timeout is not None and (timeout < _LOOK_S or _is_main())
        if polls and not self._poll.poll(min(timeout or 0, _LOOK_S) * 1000):
            self.flush(look=True)
            self._replace_if_stuck()
            return
        try:
            self._take_in()
        except BaseException:
            # A signal's handler may raise anywhere in the main thread: what was read and not handed out
            # is asked for again.
            if _is_main():
                self._hang_up()
            raise

    def _hang_up(self) -> None:
        """Make this connection a lost one: the next reader makes another, and sends again."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _take_in(self) -> None:
        try:
            data = self._sock.recv(self._frames.size)
        except BlockingIOError:
            self.flush(look=True)
            self._replace_if_stuck()
            return
        except OSError:
            data = b""
        if not data:
            self._reconnect()
            return
        self._heard_ns = SYSTEM.mono_ns()
        for body in self._frames.feed(data):
            message = decode_to_client(body)
            if message.answers and not self._is_home():
                return
            for answer in message.answers:
                # It stays among those that wait until it has its answer, whatever interrupts us here.
                call = self._pending.get(answer.no)
                if call is not None:
                    if call.answer is None:
                        self._finish(call, answer)
                    self._pending.pop(answer.no, None)
            if self._answered or self._outbox:
                self._wake_next()
            self.completions.wake()
            for topic, commit_no in message.topics.items():
                # One that is watched no more may still be told of.
                if topic in self._watches:
                    self._topics[topic] = commit_no
                for sleeper in self._sleepers.pop(topic, ()):
                    _rouse(sleeper)

    def _finish(self, call: Call, answer: Answer) -> None:
        call.answer = answer
        if call.stands:
            # Nobody knows when its thread comes by: the others are not to wait for that.
            _rouse(call.lock)
        elif call.callback is None:
            self._answered.append(call)
        else:
            call.callback(answer)

    def _wake_next(self) -> None:
        """Wake one thread that has its answer; it wakes the next when it leaves.

        Woken all at once they would fight for the interpreter at each of their steps: nine context
        switches a transaction instead of one and a half. Every thread that leaves `call` comes by
        here, for whatever reason it leaves, so the chain never breaks.
        """
        if self._answered:
            try:
                self._answered.popleft().wake()
            except IndexError:
                pass  # by another
            else:
                return
        if self._outbox:
            self.flush()

    def _pass_on(self) -> None:
        """Make somebody who still waits the next reader."""
        for call in list(self._pending.values()):
            if call.callback is None and not call.stands:
                call.wake()
                return
        for some in list(self._sleepers.values()):
            for sleeper in list(some):
                if _rouse(sleeper):
                    return

    def _receive_forever(self) -> None:
        with self._reading:
            while self._ended is None:
                try:
                    self._read(None)
                except Exception as error:
                    # Whatever it is, those who wait are told, and the next answer is read.
                    self._fail_all(WriterLost(path=str(self._path), why=repr(error)))

    # -- topics --------------------------------------------------------------------------------

    def wait(
        self, topics: Sequence[str], since: int, timeout: float, call: Call | None = None
    ) -> int:
        """Until a topic is notified, or the time is up; or one that stands has its answer."""
        fresh = self._watches.begin(topics)
        try:
            if fresh:
                self._watch()
                self.flush()
            return self._await_news(topics, since, timeout, call)
        finally:
            self._watches.end(topics, self._forget)

    def _await_news(
        self, topics: Sequence[str], since: int, timeout: float, call: Call | None
    ) -> int:
        deadline_ns = SYSTEM.mono_ns() + int(timeout * S)
        while True:
            if call is not None and call.answer is not None:
                if self._answered or self._outbox:
                    self._wake_next()
                return since
            last = self._heard(topics)
            # Not equal, rather than greater: a restored store counts from its backup on.
            if last is not None and last != since:
                return last
            left = (deadline_ns - SYSTEM.mono_ns()) / S
            self.check()
            if left <= 0:
                return since
            self._sleep(topics, last, left, call)

    def _forget(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._sleepers.pop(topic, None)

    def _watch(self) -> None:
        with self._sending:
            self._send_watched()

    def _send_watched(self) -> None:
        watch, unwatch = self._watches.take()
        if watch or unwatch:
            self._send(frame(encode([[], watch, unwatch])))

    def _heard(self, topics: Sequence[str]) -> int | None:
        """The last commit that notified any of them; None before the writer has said."""
        found = [self._topics[topic] for topic in topics if topic in self._topics]
        return max(found) if len(found) == len(topics) else None

    def _sleep(
        self, topics: Sequence[str], last: int | None, timeout: float, call: Call | None = None
    ) -> None:
        if self._reading.take():
            self._read_unless_news(topics, last, timeout, call)
            return
        sleeper = threading.Lock() if call is None else call.lock
        sleeper.acquire(blocking=False)
        reads = False
        try:
            for topic in topics:
                self._sleepers.setdefault(topic, []).append(sleeper)
            # Looked at now that we are listed: whoever notifies, or passes on, looks in the other order.
            if not self._news(topics, last, call):
                reads = self._reading.take(look=True)
                if not reads:
                    sleeper.acquire(timeout=min(timeout, _LOOK_S))
        finally:
            # Before it reads, or else the duty might be passed on to this one.
            self._rise(topics, sleeper)
        if reads:
            self._read_unless_news(topics, last, timeout, call)

    def _read_unless_news(
        self, topics: Sequence[str], last: int | None, timeout: float, call: Call | None
    ) -> None:
        """The caller has the duty. Whoever read before has handed out everything."""
        try:
            if not self._news(topics, last, call):
                self._read(timeout)
        finally:
            self._reading.release()
            self._pass_on()

    def _news(self, topics: Sequence[str], last: int | None, call: Call | None) -> bool:
        return self._heard(topics) != last or (call is not None and call.answer is not None)

    def _rise(self, topics: Sequence[str], sleeper: threading.Lock) -> None:
        """Sleep no longer."""
        for topic in topics:
            with contextlib.suppress(KeyError, ValueError):
                self._sleepers[topic].remove(sleeper)

    # -- the writer process --------------------------------------------------------------------

    def close(self) -> None:
        if self._ended is None:
            self._ended = StoreClosed(path=str(self._path))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._shut(self._ended)
        reap_children()

    def disown(self, ended: HoldfastError) -> None:
        """In a forked child: the connection is the parent's, and so are the threads that have the duties."""
        self._ended = ended
        self._sending = Duty(__file__, _SENDING)
        self._reading = Duty(__file__, _READING)
        self._outbox.clear()

    def _shut(self, ended: HoldfastError) -> None:
        self._fail_all(ended)
        self._sock.close()

    def _fail_all(self, error: HoldfastError) -> None:
        for no in list(self._pending):
            call = self._pending.pop(no, None)
            if call is not None:
                doubtful = call.sent_ns and not isinstance(error, StoreGone | StoreReplaced)
                told = CommitUnknown(txn_no=no, why=error.code) if doubtful else error
                self._finish(call, Answer(no, to_wire(told)))
        self._wake_next()
        self.completions.wake()

    def _reconnect(self) -> None:
        """Find or start a writer and send again what it was not seen to answer."""
        if self._ended is not None:
            self._fail_all(self._ended)
            return
        with self._sending:
            self._renew()
        self.flush()

    def _renew(self) -> None:
        self._sock.close()
        try:
            self._connect()
        except HoldfastError as error:
            self._fail_all(error)
            return
        # What is still in the outbox was never sent: it goes the ordinary way, once.
        unsent = set(self._outbox)
        again = [one for one in list(self._pending.values()) if one.sent_ns or one not in unsent]
        now_ns = SYSTEM.mono_ns()
        for call in again:
            call.request.resent = True
            call.resends += 1
            call.sent_ns = now_ns
        self._give_up([call for call in again if call.resends > RESENDS_MAX])
        again = [call for call in again if call.answer is None]
        watch, _ = self._watches.take(anew=True)
        self._send_calls([], watch)
        for at in range(0, len(again), RESENT_TOGETHER):
            self._send_calls(again[at : at + RESENT_TOGETHER])

    def _give_up(self, calls: list[Call]) -> None:
        """One writer after the other died before it answered: perhaps of this very transaction."""
        for call in calls:
            self._pending.pop(call.request.no, None)
            told = CommitUnknown(
                txn_no=call.request.no, why="the writers die of it, see writer.log"
            )
            self._finish(call, Answer(call.request.no, to_wire(told)))
        if calls:
            self._wake_next()
            self.completions.wake()

    def _connect(self) -> None:
        if self._home is None:
            sock, welcome = reach(self._path, bootstrap=self._bootstrap, limits=self._limits)
            self._adopt(sock, welcome)
            return
        # A store that was there is not made anew, and an error may have to do with its end.
        self._look_home()
        try:
            sock, welcome = reach(self._path, bootstrap=False, limits=self._limits)
            self._adopt(sock, welcome)
        except HoldfastError:
            self._look_home()
            raise

    def _adopt(self, sock: socket.socket, welcome: Welcome) -> None:
        if welcome.error is not None:
            sock.close()
            raise from_wire(welcome.error)
        identity = (welcome.store_id, welcome.generation)
        home = self._home or Home(self._path)
        same = self._identity in (None, identity)
        if not same or home.data is None or home.data[1] != welcome.inode:
            sock.close()
            replaced = StoreReplaced(path=str(self._path))
            if self._identity is not None:
                self._ended = replaced
            raise replaced
        self._identity, self._home = identity, home
        self._sock = sock
        self._broken = False
        self._frames = Frames()
        self._pid, self._born = peer_of(sock)
        sock.settimeout(None)
        look = struct.pack("ll", 0, int(_LOOK_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, look)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, look)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._heard_ns = SYSTEM.mono_ns()
        self.welcome = welcome

    def _replace_if_stuck(self) -> None:
        """Kill a writer that owes an answer for too long; the next read finds it gone."""
        oldest = min(
            (
                call.sent_ns
                for call in list(self._pending.values())
                if call.sent_ns and not call.stands
            ),
            default=0,
        )
        if not oldest:
            return
        # A writer that answers others is busy, not stuck.
        owed_ns = SYSTEM.mono_ns() - max(oldest, self._heard_ns)
        stopped = owed_ns > self._limits.stopped_s * S and is_stopped(self._pid)
        if stopped or owed_ns > self._limits.hung_s * S:
            kill_exactly(self._pid, self._born)
