"""The connection to the writer: threads that leave early, and those that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.store
from holdfast.config import WriterLimits
from holdfast.store.api import Txn
from holdfast.store.lmdb import LmdbStore

MODULES = ("holdfast.store.link",)
ROUNDS = 100


class Interrupted(Exception):
    """Raised by a signal in the middle of a call, as Ctrl-C is."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    limits = WriterLimits(linger_s=0.2, stopped_s=60)
    opened = holdfast.store.open(tmp_path / "data", limits=limits)
    assert isinstance(opened, LmdbStore)
    with opened:
        yield opened


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def put(txn: Txn, key: str) -> str:
    txn.put((key,), b"1")
    return key


def notify(txn: Txn, topic: str) -> None:
    txn.notify(topic)


def put_until_the_alarm(store: LmdbStore) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    store.transact(put, "interrupted")


@pytest.mark.parametrize("receiver", [False, True], ids=["callers read", "a thread reads"])
def test_a_call_that_is_interrupted_leaves_the_others_their_answers(
    store: LmdbStore, alarm: None, receiver: bool
) -> None:
    if receiver:
        store.submit(put, "first").result(30)
    writer = store._link.welcome.pid
    done: list[str] = []
    others = [
        threading.Thread(target=lambda key=f"other-{n}": done.append(store.transact(put, key)))
        for n in range(4)
    ]
    os.kill(writer, signal.SIGSTOP)
    try:
        for other in others[:2]:
            other.start()
        with pytest.raises(Interrupted):
            put_until_the_alarm(store)
        for other in others[2:]:
            other.start()
    finally:
        os.kill(writer, signal.SIGCONT)
    for other in others:
        other.join(30)
    assert sorted(done) == [f"other-{n}" for n in range(4)]
    assert store.transact(put, "later") == "later"


@pytest.mark.parametrize("looks", [0.5, 2.0], ids=["the socket waits", "it is polled"])
def test_whoever_reads_for_all_and_leaves_is_followed_by_another(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, looks: float
) -> None:
    # By a connection of its own they are told, so that nobody but them reads on this one.
    with holdfast.store.open(store.path) as other:
        wait_s = 120.0
        # Whoever is not woken sleeps on.
        monkeypatch.setattr("holdfast.store.link._LOOK_S", wait_s * looks)
        told = threading.Semaphore(0)

        def listen(topic: str) -> None:
            since = -1
            for _ in range(ROUNDS):
                since = store.wait(topic, since, wait_s)
                told.release()

        topics = [f"topic-{n}" for n in range(4)]
        for topic in topics:
            threading.Thread(target=listen, args=(topic,), daemon=True).start()
        # The first that each hears is what the writer says when it is asked.
        for _ in topics:
            assert told.acquire(timeout=30)
        for topic in topics * (ROUNDS - 1):
            other.transact(notify, topic)
            assert told.acquire(timeout=30)


def test_whoever_is_listed_when_the_reader_has_just_left_reads_itself(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.link._LOOK_S", 120.0)
    duty = store._link._reading
    take = duty.take
    # At the first try somebody has it, who passed it on before anybody was listed.
    monkeypatch.setattr(duty, "take", lambda *, look=False: look and take(look=look))
    told: list[int] = []
    listener = threading.Thread(target=lambda: told.append(store.wait("topic", -1, 120.0)))
    listener.daemon = True
    listener.start()
    listener.join(30)
    assert len(told) == 1


def test_the_writer_does_not_import_from_the_current_directory(tmp_path: Path) -> None:
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


def test_waiting_for_an_answer_inside_together_does_not_wait_for_ever(store: LmdbStore) -> None:
    with store.together():
        assert store.submit(put, "a").result(30) == "a"


@pytest.mark.parametrize("known", [False, True], ids=["nobody's", "the main thread's"])
@pytest.mark.parametrize("duty", ["_reading", "_sending"])
def test_a_duty_that_an_interrupt_left_behind_is_taken_up_by_others(
    store: LmdbStore, duty: str, known: bool
) -> None:
    left = getattr(store._link, duty)
    assert left._lock.acquire(False)
    if known:
        left._owner = threading.main_thread().ident
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


def lost_by_the_main_thread(store: LmdbStore, duty: str) -> None:
    """As after an interrupt in the wrong moment."""
    left = getattr(store._link, duty)
    assert left._lock.acquire(False)
    left._owner = threading.main_thread().ident


def test_who_reads_does_not_pass_for_somebody_who_sends(store: LmdbStore) -> None:
    since = store.wait("news", 0, 0.0)
    lost_by_the_main_thread(store, "_sending")
    other = threading.Thread(target=store.transact, args=(notify, "news"))
    other.start()
    # The main thread reads all the while.
    assert store.wait("news", since, 20) != since
    other.join(30)


def test_who_waits_for_a_duty_does_not_pass_for_somebody_who_is_at_it(store: LmdbStore) -> None:
    lost_by_the_main_thread(store, "_sending")
    store.wait("what nobody has watched yet", 0, 0.1)
    lost_by_the_main_thread(store, "_reading")
    store.close()


def test_an_interrupted_wait_of_the_main_thread_keeps_its_connection(
    store: LmdbStore, alarm: None
) -> None:
    since = store.wait("news", 0, 0.0)
    before = store._link._sock
    for _ in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            store.wait("news", since, 20)
    assert store.transact(put, "a") == "a"
    assert store._link._sock is before


def test_a_duty_that_somebody_is_at_is_left_to_him(store: LmdbStore) -> None:
    duty = store._link._reading
    held = threading.Event()
    leave = threading.Event()

    def hold() -> None:
        with duty:
            held.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert not duty.take(look=True)
        time.sleep(0.05)
    leave.set()
    holder.join(30)
    assert duty.take()
    duty.release()


# In a process by itself: if it hangs, then for good, with the interpreter's lock.
COLLECTED_WHILE_ONE_LOOKS = """
import faulthandler, gc, threading
from holdfast.store.duty import Duty

class Cycle:
    def __init__(self):
        self.own = self
        self.local = threading.local()

faulthandler.dump_traceback_later(120, exit=True)
duty = Duty("no file", frozenset())
duty.take()
for threshold in range(1, 100):
    gc.disable()
    gc.collect()
    Cycle()
    gc.set_threshold(threshold)
    # One of these has the collection begin while the frames of the threads are gathered.
    gc.enable()
    duty.take(look=True)
    assert gc.isenabled()
gc.disable()
duty.take(look=True)
assert not gc.isenabled()
print("looked")
"""


def test_a_collection_of_garbage_while_a_thread_looks_does_not_hang() -> None:
    """Python 3.11 gathers the frames under a lock that the end of a `threading.local` takes, too."""
    ran = subprocess.run(
        [sys.executable, "-c", COLLECTED_WHILE_ONE_LOOKS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.strip() == "looked", ran.stderr
