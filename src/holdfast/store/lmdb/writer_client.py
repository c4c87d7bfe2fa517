"""The writer client: a connection to the writer process, shared by all threads of a client.

The connection needs no dedicated thread (leader/followers). A waiting thread that finds the reader lock
free becomes the reader, distributes the answers to all threads, and promotes another waiter after it
received its own answer. In the same way one sender sends the requests of all threads.

When the writer process ends, the reader connects to or starts another one and resends the unanswered
requests, marked as resent. The new writer looks up the recorded outcome of each before it applies it.
The client kills and replaces a writer that owes an answer and is stopped or hung. It verifies pid and
start time first, so that it never kills another process.
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

from holdfast.child_process import is_stopped, kill_verified
from holdfast.clock import SYSTEM, S
from holdfast.config import FRAME_BYTES_MAX, RESEND_BATCH, RESENDS_MAX, WriterLimits
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
from holdfast.store.engine import CommitAnswer, CommitRequest
from holdfast.store.futures import CompletionBatch
from holdfast.store.lmdb.directory_identity import DirectoryIdentity
from holdfast.store.lmdb.leader_lock import LeaderLock
from holdfast.store.lmdb.protocol import (
    WriterWelcome,
    decode_writer_message,
    encode,
    encode_frame,
    new_decoder,
)
from holdfast.store.lmdb.topic_subscriptions import TopicSubscriptions
from holdfast.store.lmdb.writer_process import (
    connect_or_start,
    peer_of,
    reap_children,
)

# How often a waiting reader checks for a stuck writer.
_POLL_S = 0.25
# How often a client checks that the path still leads to the store.
IDENTITY_CHECK_NS = S
# While answered threads are still being woken, up to this many transactions are held back for one send.
_SEND_TOGETHER = 16


def _ignore(answer: CommitAnswer) -> None:
    """The callback of a call whose thread was interrupted."""


class PendingCall:
    """A request without an answer yet."""

    __slots__ = ("answer", "callback", "is_parked", "lock", "request", "resends", "sent_ns")

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
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        _release_once(self.lock)


def _release_once(lock: threading.Lock) -> bool:
    """Release the lock and return whether it was locked. No context manager: this runs for every answer."""
    try:
        lock.release()
    except RuntimeError:
        return False
    return True


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class WriterClient:
    def __init__(self, path: Path, *, bootstrap: bool, limits: WriterLimits) -> None:
        self._path = path
        self._bootstrap = bootstrap
        self._limits = limits
        self.client = SYSTEM.entropy(8)
        self._request_numbers = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._outbox: deque[PendingCall] = deque()
        self._sender_lock = LeaderLock()
        self._reader_lock = LeaderLock()
        self._topics: dict[str, int] = {}
        self._subscriptions = TopicSubscriptions()
        self._sleepers: dict[str, list[threading.Lock]] = {}
        self._frames = new_decoder()
        self._receiver: threading.Thread | None = None
        self._to_wake: deque[PendingCall] = deque()
        self.completions = CompletionBatch()
        # The permanent error of this client: closed, or the store is gone or replaced.
        self._end_error: HoldfastError | None = None
        # The connection is lost and the reader has not reconnected yet: nothing is sent.
        self._broken = False
        self._received_ns = 0
        # Per thread: the nesting depth of `batched`.
        self._batching = threading.local()
        self._identity: tuple[str, int] | None = None
        self._directory: DirectoryIdentity | None = None
        self._next_check_ns = 0
        self._connect()

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
                    timed_out = not call.lock.acquire(timeout=_POLL_S)
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
        if self._receiver is None or not self._receiver.is_alive():
            self._receiver = threading.Thread(
                target=self._receive_forever, name="holdfast-receiver", daemon=True
            )
            try:
                self._receiver.start()
            except RuntimeError:
                # An exiting interpreter starts no threads (3.12): this thread reads the answer.
                self._receiver = None
                callback(self.call(request))
                self.completions.wake()
                return
        self._enqueue(PendingCall(request, callback))

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
        if self._end_error is not None:
            raise self._end_error
        if SYSTEM.mono_ns() >= self._next_check_ns:
            self._check_directory()

    def _check_directory(self) -> None:
        """End the connection if the path no longer leads to the store."""
        self._next_check_ns = SYSTEM.mono_ns() + IDENTITY_CHECK_NS
        if self._directory is None:
            return
        try:
            self._directory.check()
        except (StoreGone, StoreReplaced) as error:
            self._end_error = error
            # Wakes the threads that read or wait.
            self._shut_down_socket()
            raise

    def _is_directory_current(self) -> bool:
        """Whether answers may be delivered. The writer checks the path that it was started with. This client may use
        another path (a link, a mount of another container) that now leads to another store."""
        try:
            if self._directory is not None:
                self._directory.check_data()
        except (StoreGone, StoreReplaced) as error:
            self._end_error = error
            self._fail_all(error)
            return False
        return True

    def flush(self, *, check_orphaned: bool = False) -> None:
        """Send the outbox unless another thread is the sender."""
        while self._outbox and not self._broken:
            if not self._sender_lock.try_acquire(check_orphaned=check_orphaned):
                return  # the current sender checks the outbox again before it finishes
            try:
                self._send_outbox()
            finally:
                self._sender_lock.release()

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
            # Interrupted, possibly inside a frame: treat the connection as lost.
            self._shut_down_socket()
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
                if not self._send(encode_frame(body)):
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
        self._broken = True
        unsent = [call for call in calls if not call.request.resent]
        for call in unsent:
            call.sent_ns = 0
        self._outbox.extendleft(reversed(unsent))

    def _send(self, data: bytes) -> bool:
        """Send and return whether any byte was sent. The reader detects and replaces a broken connection."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._kill_stuck_writer()
            except OSError:
                return len(view) < len(data)
        return True

    # -- reading -------------------------------------------------------------------------------

    def _read(self, timeout: float | None) -> None:
        """Receive and distribute messages. The caller holds the reader lock."""
        if self._end_error is not None:
            self._fail_all(self._end_error)
            return
        # Otherwise the receive timeout of the socket suffices. (The main thread polls: an interrupt inside recv
        # would lose received bytes and end the connection.)
        polls = timeout is not None and (timeout < _POLL_S or _is_main())
        if polls and not self._poll.poll(min(timeout or 0, _POLL_S) * 1000):
            self.flush(check_orphaned=True)
            self._kill_stuck_writer()
            return
        try:
            self._receive()
        except BaseException:
            # A signal handler may raise anywhere in the main thread: reconnect and resend, because received
            # answers may not have been distributed.
            if _is_main():
                self._shut_down_socket()
            raise

    def _shut_down_socket(self) -> None:
        """Shut down the connection. The next reader reconnects and resends."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            data = self._sock.recv(self._frames.recv_bytes)
        except BlockingIOError:
            self.flush(check_orphaned=True)
            self._kill_stuck_writer()
            return
        except OSError:
            data = b""
        if not data:
            self._reconnect()
            return
        self._received_ns = SYSTEM.mono_ns()
        for body in self._frames.feed(data):
            message = decode_writer_message(body)
            if message.answers and not self._is_directory_current():
                return
            for answer in message.answers:
                # The call stays pending until it has its answer, because an interrupt may occur here.
                call = self._pending.get(answer.no)
                if call is not None:
                    if call.answer is None:
                        self._finish(call, answer)
                    self._pending.pop(answer.no, None)
            if self._to_wake or self._outbox:
                self._wake_next()
            self.completions.wake()
            for topic, commit_no in message.topics.items():
                # The writer may still report a topic that was just unsubscribed.
                if topic in self._subscriptions:
                    self._topics[topic] = commit_no
                for sleeper in self._sleepers.pop(topic, ()):
                    _release_once(sleeper)

    def _finish(self, call: PendingCall, answer: CommitAnswer) -> None:
        call.answer = answer
        if call.is_parked:
            # Its thread may return late, so it must not be part of the wake-up chain.
            _release_once(call.lock)
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
        for call in list(self._pending.values()):
            if call.callback is None and not call.is_parked:
                call.wake()
                return
        for sleepers in list(self._sleepers.values()):
            for sleeper in list(sleepers):
                if _release_once(sleeper):
                    return

    def _receive_forever(self) -> None:
        with self._reader_lock:
            while self._end_error is None:
                try:
                    self._read(None)
                except Exception as error:
                    # Fail all pending calls and continue to read.
                    self._fail_all(WriterLost(path=str(self._path), why=repr(error)))

    # -- topics --------------------------------------------------------------------------------

    def wait(
        self, topics: Sequence[str], since: int, timeout: float, call: PendingCall | None = None
    ) -> int:
        """Block until a topic is notified, the timeout ends, or the parked call is answered."""
        fresh = self._subscriptions.add_waiter(topics)
        try:
            if fresh:
                self._subscribe()
                self.flush()
            return self._await_notification(topics, since, timeout, call)
        finally:
            self._subscriptions.remove_waiter(topics, self._drop_topic)

    def _await_notification(
        self, topics: Sequence[str], since: int, timeout: float, call: PendingCall | None
    ) -> int:
        deadline_ns = SYSTEM.mono_ns() + int(timeout * S)
        while True:
            if call is not None and call.answer is not None:
                if self._to_wake or self._outbox:
                    self._wake_next()
                return since
            last = self._last_notified(topics)
            # Compare for inequality: a restored store continues from the commit number of its backup.
            if last is not None and last != since:
                return last
            left_s = (deadline_ns - SYSTEM.mono_ns()) / S
            self.check()
            if left_s <= 0:
                return since
            self._wait_notified(topics, last, left_s, call)

    def _drop_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._sleepers.pop(topic, None)

    def _subscribe(self) -> None:
        with self._sender_lock:
            self._send_subscriptions()

    def _send_subscriptions(self) -> None:
        watch, unwatch = self._subscriptions.take_changes()
        if watch or unwatch:
            self._send(encode_frame(encode([[], watch, unwatch])))

    def _last_notified(self, topics: Sequence[str]) -> int | None:
        """The last commit that notified any of the topics; None until the writer has reported all of them."""
        commit_nos = [self._topics[topic] for topic in topics if topic in self._topics]
        return max(commit_nos) if len(commit_nos) == len(topics) else None

    def _wait_notified(
        self,
        topics: Sequence[str],
        last: int | None,
        timeout: float,
        call: PendingCall | None = None,
    ) -> None:
        if self._reader_lock.try_acquire():
            self._read_unless_notified(topics, last, timeout, call)
            return
        sleeper = threading.Lock() if call is None else call.lock
        sleeper.acquire(blocking=False)
        is_reader = False
        try:
            for topic in topics:
                self._sleepers.setdefault(topic, []).append(sleeper)
            # Check after registration: the notifying and the promoting thread use the opposite order.
            if not self._is_notified(topics, last, call):
                is_reader = self._reader_lock.try_acquire(check_orphaned=True)
                if not is_reader:
                    sleeper.acquire(timeout=min(timeout, _POLL_S))
        finally:
            # Before reading: otherwise this sleeper could be promoted to reader again.
            self._remove_sleeper(topics, sleeper)
        if is_reader:
            self._read_unless_notified(topics, last, timeout, call)

    def _read_unless_notified(
        self, topics: Sequence[str], last: int | None, timeout: float, call: PendingCall | None
    ) -> None:
        """Read once unless already notified. The caller holds the reader lock, and the former reader has distributed
        everything that it received."""
        try:
            if not self._is_notified(topics, last, call):
                self._read(timeout)
        finally:
            self._reader_lock.release()
            self._promote_reader()

    def _is_notified(
        self, topics: Sequence[str], last: int | None, call: PendingCall | None
    ) -> bool:
        return self._last_notified(topics) != last or (call is not None and call.answer is not None)

    def _remove_sleeper(self, topics: Sequence[str], sleeper: threading.Lock) -> None:
        """Unregister the sleeper from its topics."""
        for topic in topics:
            with contextlib.suppress(KeyError, ValueError):
                self._sleepers[topic].remove(sleeper)

    # -- the writer process --------------------------------------------------------------------

    def close(self) -> None:
        if self._end_error is None:
            self._end_error = StoreClosed(path=str(self._path))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._reader_lock:
            self._close_socket(self._end_error)
        reap_children()

    def disown_in_child(self, error: HoldfastError) -> None:
        """Reset in a forked child: the connection and the threads that hold the leader locks belong to the parent."""
        self._end_error = error
        self._sender_lock = LeaderLock()
        self._reader_lock = LeaderLock()
        self._outbox.clear()

    def _close_socket(self, error: HoldfastError) -> None:
        self._fail_all(error)
        self._sock.close()

    def _fail_all(self, error: HoldfastError) -> None:
        for no in list(self._pending):
            call = self._pending.pop(no, None)
            if call is not None:
                outcome_unknown = call.sent_ns and not isinstance(error, StoreGone | StoreReplaced)
                call_error = CommitUnknown(txn_no=no, why=error.code) if outcome_unknown else error
                self._finish(call, CommitAnswer(no, to_wire(call_error)))
        self._wake_next()
        self.completions.wake()

    def _reconnect(self) -> None:
        """Connect to or start a writer and resend the unanswered requests."""
        if self._end_error is not None:
            self._fail_all(self._end_error)
            return
        with self._sender_lock:
            self._reconnect_locked()
        self.flush()

    def _reconnect_locked(self) -> None:
        self._sock.close()
        try:
            self._connect()
        except HoldfastError as error:
            self._fail_all(error)
            return
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
        watch, _ = self._subscriptions.take_changes(all_topics=True)
        self._send_calls([], watch)
        for at in range(0, len(to_resend), RESEND_BATCH):
            self._send_calls(to_resend[at : at + RESEND_BATCH])

    def _fail_after_resends(self, calls: list[PendingCall]) -> None:
        """Fail calls that outlived several writers: the transaction itself may crash them (poison request)."""
        for call in calls:
            self._pending.pop(call.request.no, None)
            unknown = CommitUnknown(
                txn_no=call.request.no, why="the writers crash on it, see writer.log"
            )
            self._finish(call, CommitAnswer(call.request.no, to_wire(unknown)))
        if calls:
            self._wake_next()
            self.completions.wake()

    def _connect(self) -> None:
        if self._directory is None:
            sock, welcome = connect_or_start(
                self._path, bootstrap=self._bootstrap, limits=self._limits
            )
            self._attach(sock, welcome)
            return
        # Never create a store that existed before. An error may be due to its removal.
        self._check_directory()
        try:
            sock, welcome = connect_or_start(self._path, bootstrap=False, limits=self._limits)
            self._attach(sock, welcome)
        except HoldfastError:
            self._check_directory()
            raise

    def _attach(self, sock: socket.socket, welcome: WriterWelcome) -> None:
        if welcome.error is not None:
            sock.close()
            raise from_wire(welcome.error)
        identity = (welcome.store_id, welcome.generation)
        directory = self._directory or DirectoryIdentity(self._path)
        same_store = self._identity in (None, identity)
        if (
            not same_store
            or directory.data_identity is None
            or directory.data_identity[1] != welcome.inode
        ):
            sock.close()
            replaced = StoreReplaced(path=str(self._path))
            if self._identity is not None:
                self._end_error = replaced
            raise replaced
        self._identity, self._directory = identity, directory
        self._sock = sock
        self._broken = False
        self._frames = new_decoder()
        self._pid, self._start_time = peer_of(sock)
        sock.settimeout(None)
        timeout = struct.pack("ll", 0, int(_POLL_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received_ns = SYSTEM.mono_ns()
        self.welcome = welcome

    def _kill_stuck_writer(self) -> None:
        """Kill a writer that has owed an answer for too long. The next read detects the lost connection."""
        oldest = min(
            (
                call.sent_ns
                for call in list(self._pending.values())
                if call.sent_ns and not call.is_parked
            ),
            default=0,
        )
        if not oldest:
            return
        # A writer that still sends anything is busy, not stuck.
        owed_ns = SYSTEM.mono_ns() - max(oldest, self._received_ns)
        stopped = owed_ns > self._limits.stopped_s * S and is_stopped(self._pid)
        if stopped or owed_ns > self._limits.hung_s * S:
            kill_verified(self._pid, self._start_time)
