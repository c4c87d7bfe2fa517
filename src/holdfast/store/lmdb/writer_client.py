"""The writer client: a connection to the writer process, shared by all threads of a client.

The connection needs no dedicated thread (leader/followers). A waiting thread that finds the reader lock
free becomes the reader, distributes the answers to all threads, and promotes another waiter after it
received its own answer. In the same way one sender sends the requests of all threads.

When the writer process ends, the reader connects to or starts another one (`writer_connection`) and resends the
unanswered requests, marked as resent. The new writer looks up the recorded outcome of each before it applies it.

The client is the source of its subscriptions: a thread that waits for a topic becomes the reader like a thread
that waits for an answer. If it finds the connection lost, it starts a thread that reconnects, because `wake` and
`cancel` must end the wait at once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from holdfast import failpoints, logs
from holdfast.clock import SYSTEM
from holdfast.config import FRAME_BYTES_MAX, RESEND_BATCH, RESENDS_MAX, WriterLimits
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    Invalid,
    StoreClosed,
    StoreGone,
    StoreReplaced,
    WriterLost,
    to_wire,
)
from holdfast.store.futures import CompletionBatch
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.store.lmdb.leader_lock import LeaderLock
from holdfast.store.lmdb.protocol import (
    WriterWelcome,
    decode_writer_message,
    encode,
    encode_frame,
)
from holdfast.store.lmdb.topic_subscriptions import TopicSubscriptions
from holdfast.store.lmdb.writer_connection import POLL_S, WriterConnection
from holdfast.store.lmdb.writer_process import reap_children
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.subscription import Sleepers, Subscription, release_once, wait_once

# While answered threads are still being woken, up to this many transactions are held back for one send.
_SEND_TOGETHER = 16
# The pause of the reconnect thread after a failed attempt.
RECONNECT_PAUSE_S = 0.25


def _ignore(answer: CommitAnswer) -> None:
    """The callback of a call whose thread was interrupted."""


class PendingCall:
    """A request without an answer yet."""

    __slots__ = ("answer", "callback", "gate", "is_parked", "request", "resends", "sent_ns")

    def __init__(
        self, request: CommitRequest, callback: Callable[[CommitAnswer], None] | None = None
    ) -> None:
        self.request = request
        self.callback = callback
        self.answer: CommitAnswer | None = None
        self.sent_ns = 0
        self.resends = 0
        # A parked request: the writer owes no answer yet, and no thread has to wait for one.
        self.is_parked = bool(request.park_topics)
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def is_answered(self) -> bool:
        return self.answer is not None

    def wake(self) -> None:
        release_once(self.gate)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class WriterClient:
    def __init__(self, path: Path, *, bootstrap: bool, limits: WriterLimits) -> None:
        self.client = SYSTEM.entropy(8)
        self._request_numbers = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._outbox: deque[PendingCall] = deque()
        self._sender_lock = LeaderLock()
        self._reader_lock = LeaderLock()
        self.topics = TopicSubscriptions()
        # The shared subscription whose thread is the reader.
        self._reading_subscription: Subscription | None = None
        # Set unless a reconnect thread runs. Meanwhile no subscription becomes the reader.
        self._reconnect_ended = threading.Event()
        self._reconnect_ended.set()
        self._receiver: threading.Thread | None = None
        self._to_wake: deque[PendingCall] = deque()
        self.completions = CompletionBatch()
        # From the send of a request to its answer, without parked requests. The reader adds them.
        self.latencies = LatencyHistogram()
        # Per thread: the nesting depth of `batched`.
        self._batching = threading.local()
        self._connection = WriterConnection(
            path,
            bootstrap=bootstrap,
            limits=limits,
            oldest_unanswered_ns=self._oldest_unanswered_ns,
        )

    @property
    def welcome(self) -> WriterWelcome:
        return self._connection.welcome

    def next_no(self) -> int:
        return next(self._request_numbers)

    # -- transactions --------------------------------------------------------------------------

    def call(self, request: CommitRequest) -> CommitAnswer:
        """Send a transaction and wait for its answer."""
        call = PendingCall(request)
        self._enqueue(call)
        return self._await(call)

    def _await(self, call: PendingCall) -> CommitAnswer:
        timed_out = False
        try:
            while call.answer is None:
                if timed_out:
                    self.flush(check_orphaned=True)
                if self._reader_lock.try_acquire(check_orphaned=timed_out):
                    try:
                        while call.answer is None:
                            self._read(None)
                    finally:
                        self._reader_lock.release()
                        self._promote_reader()
                else:
                    # The thread that should have promoted the next reader may have been interrupted.
                    timed_out = not call.gate.acquire(timeout=POLL_S)
        finally:
            if call.answer is None:
                self._abandon(call)
            self._wake_next()
        return call.answer

    def park(self, request: CommitRequest) -> PendingCall:
        """Send a request to be parked. `wait` returns when it is answered."""
        call = PendingCall(request)
        self._enqueue(call)
        return call

    def cancel_parked(self, call: PendingCall) -> CommitAnswer:
        """Cancel a parked request. The answer is `RequestCancelled`, or its outcome if it was already applied."""
        if call.answer is not None:
            return call.answer
        parked = call.request
        call.is_parked = False
        call.request = CommitRequest(
            parked.no, parked.client, parked.snapshot, resent=True, cancels_parked=True
        )
        self._outbox.append(call)
        self.flush()
        return self._await(call)

    def _abandon(self, call: PendingCall) -> None:
        """Detach a call whose thread was interrupted before the answer."""
        call.callback = _ignore
        with contextlib.suppress(ValueError):
            self._to_wake.remove(call)
        self._promote_reader()

    def submit(self, request: CommitRequest, callback: Callable[[CommitAnswer], None]) -> None:
        """Send a transaction. The receiver thread passes its answer to the callback."""
        try:
            self.start_delivery()
        except RuntimeError:
            # An exiting interpreter starts no threads (3.12): this thread reads the answer.
            callback(self.call(request))
            self.completions.wake()
            return
        self._enqueue(PendingCall(request, callback))

    def start_delivery(self) -> None:
        """Start the receiver thread, unless it runs."""
        if self._receiver is None or not self._receiver.is_alive():
            receiver = threading.Thread(
                target=self._receive_forever, name="holdfast-receiver", daemon=True
            )
            receiver.start()
            self._receiver = receiver

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Send the requests submitted in the block in batches."""
        batching = self._batching
        batching.depth = getattr(batching, "depth", 0) + 1
        try:
            yield
        finally:
            batching.depth -= 1
            self.flush()

    def _enqueue(self, call: PendingCall) -> None:
        self.check()
        self._pending[call.request.no] = call
        self._outbox.append(call)
        if call.callback is None and not call.is_parked:
            delayed = bool(self._to_wake)
        else:
            delayed = getattr(self._batching, "depth", 0) > 0
        if not delayed or len(self._outbox) >= _SEND_TOGETHER:
            self.flush()

    def check(self) -> None:
        """Raise the permanent error of this client, if it has one."""
        self._connection.check()

    def flush(self, *, check_orphaned: bool = False) -> None:
        """Send new subscriptions and the outbox unless another thread is the sender.

        Never blocks on the sender: an event loop calls this method, and a reconnecting sender starts a writer."""
        topics = self.topics
        while (self._outbox or topics.has_unsent_subscription) and not self._connection.is_broken:
            if not self._sender_lock.try_acquire(check_orphaned=check_orphaned):
                return  # the current sender checks both again after it has released the lock
            try:
                self._send_unsent()
            finally:
                self._sender_lock.release()

    def _send_unsent(self) -> None:
        try:
            if self.topics.has_unsent_subscription:
                # A lost connection loses them: the next connection subscribes all topics.
                watch, unwatch = self.topics.take_changes()
                self._connection.send(encode_frame(encode([[], watch, unwatch])))
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
            # Interrupted, possibly inside a frame: treat the connection as lost.
            self._connection.shut_down()
            raise

    def _send_calls(self, calls: list[PendingCall], topics: Sequence[str] = ()) -> None:
        """Send the calls in one frame, or split them. Refuse only a call that fits into no frame."""
        failure = ""
        try:
            body = encode([[call.request for call in calls], topics])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            failure = str(error)
        else:
            if len(body) <= FRAME_BYTES_MAX:
                if not self._connection.send(encode_frame(body)):
                    self._requeue(calls)
                return
        if len(calls) > 1:
            half = len(calls) // 2
            self._send_calls(calls[:half])
            self._send_calls(calls[half:], topics)
        elif calls:
            [call] = calls
            refusal = Invalid(
                what="transaction", why=failure or "too large", bytes_max=FRAME_BYTES_MAX
            )
            if self._pending.pop(call.request.no, None) is not None:
                self._finish(call, CommitAnswer(call.request.no, to_wire(refusal)))
                self._wake_next()
                self.completions.wake()

    def _requeue(self, calls: list[PendingCall]) -> None:
        """Requeue calls that were never sent, for the next connection."""
        self._connection.is_broken = True
        unsent = [call for call in calls if not call.request.resent]
        for call in unsent:
            call.sent_ns = 0
        self._outbox.extendleft(reversed(unsent))

    # -- reading -------------------------------------------------------------------------------

    def _read(self, timeout: float | None) -> None:
        """Receive and distribute messages, or reconnect. The caller holds the reader lock."""
        connection = self._connection
        if connection.end_error is not None:
            self._fail_all(connection.end_error)
            return
        # Otherwise the receive timeout of the socket suffices. (The main thread polls: an interrupt inside recv
        # would lose received bytes and end the connection.)
        polls = timeout is not None and (timeout < POLL_S or _is_main())
        if polls and not connection.poll(min(timeout or 0, POLL_S)):
            self._check_writer()
        else:
            self._receive()

    def _read_or_interrupt(self, timeout_s: float) -> bool:
        """`_read` that `interrupt` ends. Return False instead of a reconnect."""
        connection = self._connection
        if connection.end_error is not None:
            self._fail_all(connection.end_error)
            return True
        is_readable, is_timed_out = connection.poll_or_interrupt(min(timeout_s, POLL_S))
        if is_readable:
            return self._receive(reconnects=False)
        if is_timed_out:
            self._check_writer()
        return True

    def _check_writer(self) -> None:
        """After a time without messages: detect an interrupted sender and a stuck writer."""
        self.flush(check_orphaned=True)
        self._connection.kill_stuck_writer()

    def _receive(self, *, reconnects: bool = True) -> bool:
        """Receive and distribute messages. Return whether there is a connection."""
        try:
            try:
                bodies = self._connection.receive()
            except BlockingIOError:
                self._check_writer()
            except ConnectionError:
                if not reconnects:
                    return False
                self._reconnect()
            else:
                self._distribute(bodies)
            return True
        except BaseException:
            # A signal handler may raise anywhere in the main thread: reconnect and resend, because received
            # answers may not have been distributed.
            if _is_main():
                self._connection.shut_down()
            raise

    def _distribute(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            message = decode_writer_message(body)
            if message.answers:
                try:
                    self._connection.check_data()
                except (StoreGone, StoreReplaced) as error:
                    self._fail_all(error)
                    return
            now_ns = SYSTEM.mono_ns()
            for answer in message.answers:
                # The call stays pending until it has its answer, because an interrupt may occur here.
                call = self._pending.get(answer.no)
                if call is not None:
                    if call.answer is None:
                        if call.sent_ns and not call.is_parked:
                            self.latencies.add(now_ns - call.sent_ns)
                        self._finish(call, answer)
                    self._pending.pop(answer.no, None)
            if self._to_wake or self._outbox:
                self._wake_next()
            self.completions.wake()
            if message.topics:
                self.topics.record(message.topics)

    def _finish(self, call: PendingCall, answer: CommitAnswer) -> None:
        call.answer = answer
        if call.is_parked:
            # Its thread may return late, so it must not be part of the wake-up chain.
            release_once(call.gate)
        elif call.callback is None:
            self._to_wake.append(call)
        else:
            call.callback(answer)

    def _wake_next(self) -> None:
        """Wake one thread that has its answer. That thread wakes the next when it returns.

        Waking all of them at once would cause GIL contention: nine context switches per transaction
        instead of one and a half. Every thread that leaves `call`, for any reason, runs this method,
        so the chain never breaks.
        """
        if self._to_wake:
            try:
                self._to_wake.popleft().wake()
            except IndexError:
                pass  # another thread took it
            else:
                return
        if self._outbox:
            self.flush()

    def _promote_reader(self) -> None:
        """Wake one waiting thread to become the next reader."""
        if self._pending:
            for call in list(self._pending.values()):
                if call.callback is None and not call.is_parked:
                    call.wake()
                    return
        self.topics.sleepers.wake_one_thread()

    def _receive_forever(self) -> None:
        with self._reader_lock:
            while self._connection.end_error is None:
                try:
                    self._read(None)
                except Exception as error:
                    # Fail all pending calls and continue to read.
                    self._fail_all(WriterLost(path=str(self._connection.path), why=repr(error)))

    # -- topics --------------------------------------------------------------------------------

    def wait(
        self, topics: tuple[str, ...], since: int, timeout: float, call: PendingCall | None = None
    ) -> int:
        """Block until a topic is notified, the timeout ends, or the parked call is answered."""
        is_new = self.topics.add_waiter(topics)
        try:
            if is_new:
                self.flush()
            return wait_once(self, topics, since, timeout, call)
        finally:
            if call is not None and call.answer is not None and (self._to_wake or self._outbox):
                self._wake_next()
            self.topics.remove_waiter(topics)

    def subscribe(self, topics: tuple[str, ...], since: int) -> Subscription:
        """Subscribe. A closed or forked client sends nothing, and every wait raises its error."""
        if self._connection.end_error is not None:
            return Subscription(self, topics, since)
        is_new = self.topics.add_waiter(topics)
        try:
            if is_new:
                self.flush()
            return Subscription(self, topics, since)
        except BaseException:
            self.topics.remove_waiter(topics)
            raise

    def release(self, subscription: Subscription) -> None:
        # A forked child must not take the lock: a thread of the parent may hold it.
        if self._connection.end_error is None:
            self.topics.remove_waiter(subscription.topics)

    @property
    def sleepers(self) -> Sleepers:
        return self.topics.sleepers

    def mono_ns(self) -> int:
        return SYSTEM.mono_ns()

    def last_notified(self, topics: tuple[str, ...]) -> int | None:
        return self.topics.last_notified(topics)

    def is_new(self, last: int, since: int) -> bool:
        # Not only greater: a restored store continues from the commit number of its backup.
        return last != since

    def sleep(self, subscription: Subscription, last: int | None, timeout_s: float) -> None:
        """Become the reader, or sleep until the reader wakes this thread."""
        if self._reconnect_ended.is_set() and self._reader_lock.try_acquire():
            self._read_unless_due(subscription, last, timeout_s)
            return
        if failpoints.armed:
            failpoints.hit("lmdb.reader_exists", self)
        subscription.gate.acquire(blocking=False)
        is_reader = is_over = False
        try:
            self.sleepers.add(subscription)
            # Check after registration: the notifying and the promoting thread use the opposite order.
            if not subscription.is_due(last):
                is_reader = self._reconnect_ended.is_set() and self._reader_lock.try_acquire(
                    check_orphaned=True
                )
                if not is_reader:
                    is_notified = subscription.gate.acquire(timeout=min(timeout_s, POLL_S))
                    is_over = not is_notified and timeout_s <= POLL_S
        finally:
            # Before reading: otherwise this sleeper could be promoted to reader again.
            self.sleepers.remove(subscription)
        if is_reader:
            self._read_unless_due(subscription, last, timeout_s)
        elif (is_over or subscription.is_woken) and not self._reader_lock.is_locked:
            # This thread may have been promoted, but its wait ends.
            self._promote_reader()

    def _read_unless_due(
        self, subscription: Subscription, last: int | None, timeout_s: float
    ) -> None:
        """Read once unless already notified. The caller holds the reader lock, and the former reader has distributed
        everything that it received."""
        is_connected = True
        try:
            if subscription.is_shared:
                # Before the check: `wake` uses the opposite order.
                self._reading_subscription = subscription
                if not subscription.is_due(last):
                    is_connected = self._read_or_interrupt(timeout_s)
            elif not subscription.is_due(last):
                self._read(timeout_s)
        finally:
            self._reading_subscription = None
            self._reader_lock.release()
            if is_connected:
                self._promote_reader()
            else:
                self._start_reconnect()

    def interrupt(self, subscription: Subscription) -> bool:
        if self._reading_subscription is not subscription:
            return False
        self._connection.interrupt()
        return True

    # -- the writer process --------------------------------------------------------------------

    def close(self) -> None:
        connection = self._connection
        if connection.end_error is None:
            connection.end_error = StoreClosed(path=str(connection.path))
        connection.shut_down()
        with self._reader_lock:
            self._fail_all(connection.end_error)
            connection.close()
        reap_children()

    def disown_in_child(self, error: HoldfastError) -> None:
        """Reset in a forked child: the connection and the threads that hold the leader locks belong to the parent."""
        self._connection.end_error = error
        self._sender_lock = LeaderLock()
        self._reader_lock = LeaderLock()
        self._reading_subscription = None
        self._outbox.clear()
        self.topics.has_unsent_subscription = False

    def _fail_all(self, error: HoldfastError) -> None:
        for no in list(self._pending):
            call = self._pending.pop(no, None)
            if call is not None:
                outcome_unknown = call.sent_ns and not isinstance(error, StoreGone | StoreReplaced)
                call_error = CommitUnknown(txn_no=no, why=error.code) if outcome_unknown else error
                self._finish(call, CommitAnswer(no, to_wire(call_error)))
        self._wake_next()
        self.completions.wake()
        self.sleepers.wake_all()

    def _start_reconnect(self) -> None:
        """Reconnect in a thread, unless another thread becomes the reader first."""
        ended = threading.Event()
        thread = threading.Thread(
            target=self._reconnect_in_thread, args=(ended,), name="holdfast-reconnect", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # No more threads: this thread reconnects, and `wake` takes effect afterwards.
            self._reconnect_in_thread(ended)
        else:
            self._reconnect_ended = ended

    def _reconnect_in_thread(self, ended: threading.Event) -> None:
        try:
            if self._reader_lock.try_acquire():
                try:
                    self._read(0.0)
                except Exception as error:
                    self._fail_all(WriterLost(path=str(self._connection.path), why=repr(error)))
                finally:
                    self._reader_lock.release()
                if self._connection.is_closed:
                    # No subscription starts another attempt meanwhile.
                    SYSTEM.sleep(RECONNECT_PAUSE_S)
        finally:
            ended.set()
            self._promote_reader()

    def _reconnect(self) -> None:
        """Connect to or start a writer and resend the unanswered requests."""
        if self._connection.end_error is not None:
            self._fail_all(self._connection.end_error)
            return
        with self._sender_lock:
            self._reconnect_locked()
        self.flush()

    def _reconnect_locked(self) -> None:
        self._connection.sock.close()
        try:
            self._connection.connect()
        except HoldfastError as error:
            self._fail_all(error)
            return
        logs.warn("store", "writer replaced", store=str(self._connection.path))
        # Calls in the outbox were never sent: the next flush sends them once.
        unsent = set(self._outbox)
        to_resend = [
            pending
            for pending in list(self._pending.values())
            if pending.sent_ns or pending not in unsent
        ]
        now_ns = SYSTEM.mono_ns()
        for call in to_resend:
            call.request.resent = True
            call.resends += 1
            call.sent_ns = now_ns
        self._fail_after_resends([call for call in to_resend if call.resends > RESENDS_MAX])
        to_resend = [call for call in to_resend if call.answer is None]
        watch, _ = self.topics.take_changes(all_topics=True)
        if failpoints.armed:
            failpoints.hit("lmdb.resubscribe", self)
        self._send_calls([], watch)
        for at in range(0, len(to_resend), RESEND_BATCH):
            self._send_calls(to_resend[at : at + RESEND_BATCH])

    def _fail_after_resends(self, calls: list[PendingCall]) -> None:
        """Fail calls that outlived several writers: the transaction itself may crash them (poison request)."""
        for call in calls:
            self._pending.pop(call.request.no, None)
            unknown = CommitUnknown(
                txn_no=call.request.no,
                why="the writer crashes repeatedly on this transaction, see writer.log",
            )
            self._finish(call, CommitAnswer(call.request.no, to_wire(unknown)))
        if calls:
            self._wake_next()
            self.completions.wake()

    def _oldest_unanswered_ns(self) -> int:
        return min(
            (
                call.sent_ns
                for call in list(self._pending.values())
                if call.sent_ns and not call.is_parked
            ),
            default=0,
        )
