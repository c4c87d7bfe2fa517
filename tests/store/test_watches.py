"""The topics that a client watches at the writer are bounded, and none that is waited for is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.store
from holdfast.config import WATCHED_IDLE_MAX, WriterLimits
from holdfast.store.lmdb import LmdbStore
from holdfast.store.watches import Watches

MODULES = ("holdfast.store.watches", "holdfast.store.link")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    opened = holdfast.store.open(tmp_path / "data", limits=WriterLimits(linger_s=0.2))
    assert isinstance(opened, LmdbStore)
    with opened:
        yield opened


def ignore(topic: str) -> None: ...


def test_only_so_many_topics_that_no_thread_waits_for_are_watched() -> None:
    watches, dropped = Watches(), []
    for n in range(WATCHED_IDLE_MAX + 10):
        assert watches.begin([str(n)])
        watches.end([str(n)], dropped.append)
    assert len(watches) == WATCHED_IDLE_MAX
    # The least recently used first.
    assert dropped == [str(n) for n in range(10)]


def test_a_topic_that_is_waited_for_is_never_dropped() -> None:
    watches = Watches()
    many = [str(n) for n in range(3 * WATCHED_IDLE_MAX)]
    watches.begin(many)
    watches.begin(["0"])
    watches.end(["0"], ignore)
    assert all(topic in watches for topic in many)
    watches.end(many, ignore)
    assert len(watches) == WATCHED_IDLE_MAX


def test_the_writer_is_told_of_each_change_once_and_in_order() -> None:
    watches = Watches()
    assert watches.begin(["a", "b"])
    assert watches.take() == (["a", "b"], [])
    assert not watches.begin(["a"])
    watches.end(["a", "a", "b"], ignore)
    others = [f"other/{n}" for n in range(WATCHED_IDLE_MAX)]
    watches.begin(others)
    watches.end(others, ignore)
    # Dropped, and watched again before the writer was told.
    assert watches.begin(["b"])
    watch, unwatch = watches.take()
    assert (sorted(watch), unwatch) == (sorted([*others, "b"]), ["a"])
    assert watches.take() == ([], [])
    watch, unwatch = watches.take(anew=True)
    assert (sorted(watch), unwatch) == (sorted([*others, "b"]), [])


def test_a_client_watches_and_keeps_a_bounded_number_of_topics(store: LmdbStore) -> None:
    for n in range(WATCHED_IDLE_MAX * 2):
        store.wait([f"t/{n}", f"u/{n}"], 0, 0.0)
    link = store._link
    assert len(link._watches) == WATCHED_IDLE_MAX
    assert len(link._topics) <= WATCHED_IDLE_MAX
    assert len(link._sleepers) <= WATCHED_IDLE_MAX


def test_threads_that_wait_for_many_topics_hear_of_each(store: LmdbStore) -> None:
    """Pairs of threads call each other by turns, and between two calls each makes the client drop topics."""
    pairs, rounds = 4, 100
    heard: list[int] = []

    def call(pair: int, side: int) -> None:
        own, other = f"{pair}/{side}", f"{pair}/{1 - side}"
        since = store.wait(own, 0, 0.5)
        ready.wait()
        for n in range(rounds):
            if side or n:
                was, since = since, store.wait(own, since, 60.0)
                assert since != was
            for more in range(WATCHED_IDLE_MAX // 50):
                store.wait(f"{own}/{n}/{more}", 0, 0.0)
            store.transact(lambda txn: txn.notify(other))
        heard.append(pair)

    ready = threading.Barrier(2 * pairs)
    threads = [
        threading.Thread(target=call, args=(pair, side)) for pair in range(pairs) for side in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(heard) == sorted([*range(pairs)] * 2)
