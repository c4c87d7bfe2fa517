"""WriterClient: threads that share the writer connection, and interrupts that abort one of them."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import holdfast.store
from holdfast import failpoints
from holdfast.config import WriterLimits
from holdfast.errors import StoreClosed, WriterLost
from holdfast.store.api import Txn
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.subscription import Subscription
from tests.process.watch import until

MODULES = ("holdfast.store.lmdb.writer_client",)
ROUNDS = 100


class SignalInterrupt(Exception):
    """Raised by a signal handler inside a call, like KeyboardInterrupt."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    limits = WriterLimits(idle_exit_s=0.2, stopped_s=60)
    opened = holdfast.store.open(tmp_path / "data", limits=limits)
    assert isinstance(opened, LmdbStore)
    with opened:
        yield opened


@pytest.fixture
def alarm() -> Iterator[None]:
    def raise_interrupt(*_: object) -> None:
        raise SignalInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def put(txn: Txn, key: str) -> str:
    txn.put((key,), b"1")
    return key


def notify(txn: Txn, topic: str) -> None:
    txn.notify(topic)


def kill_writer(store: LmdbStore) -> None:
    os.kill(store._client.welcome.pid, signal.SIGKILL)


def start_wait(subscription: Subscription) -> tuple[threading.Thread, list[bool]]:
    """Wait in a thread. The list gets the result."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(subscription.wait(120.0)), daemon=True)
    thread.start()
    return thread, results


def until_reading(store: LmdbStore, subscription: Subscription) -> None:
    until(lambda: store._client._reading_subscription is subscription, "its thread is the reader")


def put_until_interrupted(store: LmdbStore) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    store.transact(put, "interrupted")


@pytest.mark.parametrize("receiver", [False, True], ids=["callers read", "a thread reads"])
def test_interrupted_transact_does_not_lose_answers_of_other_threads(
    store: LmdbStore, alarm: None, receiver: bool
) -> None:
    if receiver:
        store.submit(put, "first").result(30)
    writer = store._client.welcome.pid
    done: list[str] = []
    others = [
        threading.Thread(target=lambda key=f"other-{n}": done.append(store.transact(put, key)))
        for n in range(4)
    ]
    os.kill(writer, signal.SIGSTOP)
    try:
        for other in others[:2]:
            other.start()
        with pytest.raises(SignalInterrupt):
            put_until_interrupted(store)
        for other in others[2:]:
            other.start()
    finally:
        os.kill(writer, signal.SIGCONT)
    for other in others:
        other.join(30)
    assert sorted(done) == [f"other-{n}" for n in range(4)]
    assert store.transact(put, "later") == "later"


@pytest.mark.parametrize("looks", [0.5, 2.0], ids=["the socket waits", "it is polled"])
def test_reader_that_leaves_promotes_another_reader(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, looks: float
) -> None:
    # A second connection sends the notifications, so that only the listeners read on this one.
    with holdfast.store.open(store.path) as other:
        wait_s = 120.0
        # A listener that is not woken misses the deadline: it does not poll in time.
        monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", wait_s * looks)
        notified = threading.Semaphore(0)

        def listen(topic: str) -> None:
            since = -1
            for _ in range(ROUNDS):
                since = store.wait(topic, since, wait_s)
                notified.release()

        topics = [f"topic-{n}" for n in range(4)]
        for topic in topics:
            threading.Thread(target=listen, args=(topic,), daemon=True).start()
        # The first wait of each listener returns the current commit number of its topic.
        for _ in topics:
            assert notified.acquire(timeout=30)
        for topic in topics * (ROUNDS - 1):
            other.transact(notify, topic)
            assert notified.acquire(timeout=30)


def test_sleeper_becomes_reader_when_the_reader_left_before_it_was_listed(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 120.0)
    lock = store._client._reader_lock
    # This thread is the reader until the sleeper has tried the lock, and leaves before the sleeper is listed.
    assert lock.try_acquire()
    commits: list[int] = []
    listener = threading.Thread(target=lambda: commits.append(store.wait("topic", -1, 120.0)))
    listener.daemon = True
    with failpoints.on(
        "lmdb.reader_exists", calls=lambda _: lock.release(), times=1
    ) as reader_exists:
        listener.start()
        listener.join(30)
    assert reader_exists.hits == 1
    assert len(commits) == 1


def test_writer_process_does_not_import_from_the_current_directory(tmp_path: Path) -> None:
    trap = tmp_path / "here"
    trap.mkdir()
    for name in ("select", "signal", "msgspec", "lmdb"):
        (trap / f"{name}.py").write_text("raise SystemExit('imported from the wrong place')")
    code = "import holdfast.store as s; s.open('data').close(); print('opened')"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=trap,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.strip() == "opened", ran.stderr


def test_result_inside_batched_sends_the_request_and_returns(store: LmdbStore) -> None:
    with store.batched():
        assert store.submit(put, "a").result(30) == "a"


def test_store_that_is_closed_before_a_request_is_sent_fails_its_future(store: LmdbStore) -> None:
    def close_and_write(txn: Txn) -> None:
        store.close()
        txn.put(("a",), b"x")

    future = store.submit(close_and_write)
    with pytest.raises(StoreClosed):
        future.result(30)


@pytest.mark.parametrize("known", [False, True], ids=["nobody's", "the main thread's"])
@pytest.mark.parametrize("lock_name", ["_reader_lock", "_sender_lock"])
def test_leader_lock_orphaned_by_an_interrupt_is_taken_over(
    store: LmdbStore, lock_name: str, known: bool
) -> None:
    lock = getattr(store._client, lock_name)
    assert lock._lock.acquire(False)
    if known:
        lock._owner = frame_of_an_ended_function()
    done: list[str] = []
    others = [
        threading.Thread(target=lambda key=key: done.append(store.transact(put, key)))
        for key in ("a", "b", "c")
    ]
    for other in others:
        other.start()
    for other in others:
        other.join(30)
    assert sorted(done) == ["a", "b", "c"]
    assert store.transact(put, "mine") == "mine"


def frame_of_an_ended_function() -> FrameType:
    return sys._getframe()


def orphan_lock_of_main_thread(store: LmdbStore, lock_name: str) -> None:
    """Leave a leader lock locked by the main thread, as an interrupt inside the leader function does."""
    lock = getattr(store._client, lock_name)
    assert lock._lock.acquire(False)
    lock._owner = frame_of_an_ended_function()


def test_orphaned_sender_lock_is_detected_while_its_owner_reads(store: LmdbStore) -> None:
    since = store.wait("news", 0, 0.0)
    orphan_lock_of_main_thread(store, "_sender_lock")
    other = threading.Thread(target=store.transact, args=(notify, "news"))
    other.start()
    # The main thread is reading during this call.
    assert store.wait("news", since, 20) != since
    other.join(30)


def test_orphaned_leader_lock_is_detected_while_its_owner_waits_for_it(store: LmdbStore) -> None:
    orphan_lock_of_main_thread(store, "_sender_lock")
    assert store.wait("a new topic", -1, 20) != -1
    orphan_lock_of_main_thread(store, "_reader_lock")
    store.close()


def test_interrupted_wait_keeps_the_connection(store: LmdbStore, alarm: None) -> None:
    since = store.wait("news", 0, 0.0)
    before = store._client._connection.sock
    for _ in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(SignalInterrupt):
            store.wait("news", since, 20)
    assert store.transact(put, "a") == "a"
    assert store._client._connection.sock is before


def test_leader_lock_in_use_is_not_taken_over(store: LmdbStore) -> None:
    lock = store._client._reader_lock
    acquired = threading.Event()
    may_release = threading.Event()

    def hold() -> None:
        with lock:
            acquired.set()
            may_release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    acquired.wait(30)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert not lock.try_acquire(check_orphaned=True)
        time.sleep(0.05)
    may_release.set()
    holder.join(30)
    assert lock.try_acquire()
    lock.release()


@pytest.mark.parametrize("end", ["wake", "cancel"])
def test_reader_of_a_subscription_is_interrupted_without_polling(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The waiting thread blocks in the poll of the connection. Only the interrupt can end it in time."""
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 120.0)
    for n in range(10):
        subscription = store.subscribe(f"topic-{n}")
        waiting = threading.Thread(target=subscription.wait, args=(120.0,))
        waiting.start()
        until(
            lambda one=subscription: store._client._reading_subscription is one,
            "its thread is the reader",
        )
        getattr(subscription, end)()
        waiting.join(30)
        assert not waiting.is_alive()


def test_close_ends_sleeping_subscriptions_without_polling(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 120.0)
    errors: list[BaseException] = []

    def wait(topic: str) -> None:
        try:
            store.subscribe(topic).wait(120.0)
        except StoreClosed as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(f"topic-{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: len(store._client.sleepers) == 4, "one reads, the others sleep")
    store.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 5


def test_cancelled_subscription_leaves_no_waiter_at_the_client(store: LmdbStore) -> None:
    topics = store._client.topics
    for n in range(100):
        with store.subscribe([f"a/{n}", f"b/{n}"]) as subscription:
            assert topics.waiting == {f"a/{n}": 1, f"b/{n}": 1}
            subscription.wait(0.0)
    assert topics.waiting == {}


@pytest.mark.parametrize(
    "subscribe",
    [lambda store: store.wait("topic", -1, 20), lambda store: store.subscribe("topic")],
    ids=["wait", "subscribe"],
)
def test_interrupted_subscription_leaves_no_waiter_at_the_client(
    store: LmdbStore,
    subscribe: Callable[[LmdbStore], object],
) -> None:
    with failpoints.on("lmdb.send", raises=SignalInterrupt), pytest.raises(SignalInterrupt):
        subscribe(store)
    assert store._client.topics.waiting == {}
    # The interrupted send is repeated on a new connection.
    assert store.wait("topic", -1, 20) != -1


@pytest.mark.parametrize("step", ["lmdb.connect", "lmdb.resubscribe"])
def test_subscribe_does_not_wait_for_a_reconnecting_thread(store: LmdbStore, step: str) -> None:
    """The event loop of the HTTP server subscribes. Resubscribe: the client has collected its earlier topics."""
    client = store._client
    reached, may_continue = threading.Event(), threading.Event()

    def pause(_: object) -> None:
        reached.set()
        may_continue.wait(60)

    client.start_delivery()
    with failpoints.on(step, calls=pause):
        os.kill(client.welcome.pid, signal.SIGKILL)
        assert reached.wait(30)
        subscriptions: list[Subscription] = []
        subscribing = threading.Thread(
            target=lambda: subscriptions.append(store.subscribe("topic"))
        )
        subscribing.start()
        subscribing.join(10)
        subscribed_in_time = len(subscriptions)
        may_continue.set()
        subscribing.join(30)
    assert subscribed_in_time == 1
    assert client.topics._waiter_counts == {"topic": 1}
    store.transact(notify, "topic")
    assert subscriptions[0].wait(30)


def test_woken_subscription_that_was_promoted_promotes_another_reader(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 120.0)
    client = store._client
    first, second = (store.subscribe(topic) for topic in ("first", "second"))
    threads = []
    with client._reader_lock:
        for subscription in (first, second):
            threads.append(threading.Thread(target=subscription.wait, args=(120.0,), daemon=True))
            threads[-1].start()
            until(lambda one=subscription: one.topics[0] in client.sleepers, "its thread sleeps")
        # `wake` has not yet released the gate when the leaving reader promotes this thread.
        first._is_woken = True
    client._promote_reader()
    until(lambda: client._reading_subscription is second, "the other thread is the reader")
    second.cancel()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_wake_before_the_poll_of_the_reader_ends_one_wait(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wake-up comes after the last check of the reader and before its poll."""
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 120.0)
    subscription = store.subscribe("topic")
    while subscription.wait(0.05):
        pass
    with failpoints.on("lmdb.poll", calls=lambda connection: subscription.wake()):
        for _ in range(ROUNDS):
            thread, results = start_wait(subscription)
            thread.join(30)
            assert results == [False]


@pytest.mark.parametrize("end", ["wake", "cancel"])
def test_subscription_ends_its_wait_while_the_client_reconnects(store: LmdbStore, end: str) -> None:
    """The connect of the new writer does not return. A stop request must not wait for it."""
    connecting, may_connect = threading.Event(), threading.Event()

    def connect_late(connection: object) -> None:
        connecting.set()
        may_connect.wait(60)

    with failpoints.on("lmdb.connect", calls=connect_late):
        reading, sleeping = store.subscribe("reading"), store.subscribe("sleeping")
        waits = []
        for subscription in (reading, sleeping):
            waits.append(start_wait(subscription))
            until_reading(store, reading)
        kill_writer(store)
        assert connecting.wait(30)
        for subscription, (thread, results) in zip((reading, sleeping), waits, strict=True):
            getattr(subscription, end)()
            thread.join(30)
            assert results == [False]
        may_connect.set()
    later = store.subscribe("reading")
    store.transact(notify, "reading")
    assert later.wait(30)


@pytest.mark.parametrize("threads_left", [True, False])
def test_subscriptions_are_notified_after_the_writer_was_replaced(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, threads_left: bool
) -> None:
    topics = [f"topic-{n}" for n in range(4)]
    subscriptions = [store.subscribe(topic) for topic in topics]
    for subscription in subscriptions:
        while subscription.wait(0.05):
            pass
    waits = [start_wait(subscription) for subscription in subscriptions]
    client = store._client
    until(lambda: len(client.sleepers) == 3, "one reads, the others sleep")
    former_pid = client.welcome.pid
    start = threading.Thread.start

    def refuse_to_reconnect(thread: threading.Thread) -> None:
        if thread.name == "holdfast-reconnect":
            raise RuntimeError("can't start new thread")
        start(thread)

    if not threads_left:
        monkeypatch.setattr(threading.Thread, "start", refuse_to_reconnect)
    kill_writer(store)
    # No other thread uses the connection: the subscriptions detect the loss.
    until(lambda: client.welcome.pid != former_pid, "the reconnect")
    with holdfast.store.open(store.path) as other:
        for topic in topics:
            other.transact(notify, topic)
    for thread, results in waits:
        thread.join(30)
        assert results == [True]


@pytest.mark.parametrize(
    "error", [WriterLost(path="data", why="no writer answered"), OSError("no more files")]
)
def test_subscription_survives_failed_reconnects(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.RECONNECT_PAUSE_S", 0.01)
    connection = store._client._connection
    failures = threading.Semaphore(0)

    def fail(connection: object) -> None:
        failures.release()
        raise error

    subscription = store.subscribe("topic")
    while subscription.wait(0.05):
        pass
    thread, results = start_wait(subscription)
    until_reading(store, subscription)
    with failpoints.on("lmdb.connect", calls=fail):
        kill_writer(store)
        for _ in range(3):
            assert failures.acquire(timeout=30)
        assert not results
    with holdfast.store.open(store.path) as other:
        # Until the subscription is connected to the new writer.
        until(lambda: not connection.is_closed, "the reconnect")
        other.transact(notify, "topic")
    thread.join(30)
    assert results == [True]


def test_client_without_a_descriptor_for_its_poll_reconnects_later(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no descriptor left right after the connect. The request is sent later, not dropped."""
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.RECONNECT_PAUSE_S", 0.01)
    epoll, refused = select.epoll, threading.Event()

    def refuse_once() -> select.epoll:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return epoll()

    subscription = store.subscribe("topic")
    while subscription.wait(0.05):
        pass
    thread, results = start_wait(subscription)
    until_reading(store, subscription)
    monkeypatch.setattr(select, "epoll", refuse_once)
    kill_writer(store)
    assert refused.wait(30)
    until(lambda: not store._client._connection.is_closed, "the reconnect")
    with holdfast.store.open(store.path) as other:
        other.transact(notify, "topic")
    thread.join(30)
    assert results == [True]
    assert store.transact(put, "later") == "later"
