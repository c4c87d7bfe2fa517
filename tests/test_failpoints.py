"""Failpoints: arming, counting, errors and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from holdfast import failpoints
from holdfast.errors import StoreFull
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.failpoints",)
PLACE = "memory.commit"


def commit(backend: MemoryBackend) -> None:
    backend.begin().commit()


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    made = MemoryBackend()
    yield made
    assert failpoints.armed_names() == []
    assert not failpoints.armed


def test_armed_point_raises_its_error_until_the_block_ends(backend: MemoryBackend) -> None:
    with failpoints.on(PLACE, raises=StoreFull(path="p")):
        assert failpoints.armed_names() == [PLACE]
        with pytest.raises(StoreFull):
            commit(backend)
        with pytest.raises(StoreFull):
            commit(backend)
    commit(backend)
    assert backend.id == 1


def test_armed_point_calls_its_function_with_the_arguments_of_the_place(
    backend: MemoryBackend,
) -> None:
    called: list[object] = []
    txn = backend.begin()
    with failpoints.on(PLACE, calls=called.append):
        txn.commit()
    assert called == [txn]


def test_armed_point_calls_its_function_before_it_raises(backend: MemoryBackend) -> None:
    called: list[object] = []
    with failpoints.on(PLACE, calls=called.append, raises=KeyError), pytest.raises(KeyError):
        commit(backend)
    assert len(called) == 1


def test_point_counts_hits_after_its_last_action(backend: MemoryBackend) -> None:
    with failpoints.on(PLACE, raises=KeyError, times=2) as point:
        for _ in range(2):
            with pytest.raises(KeyError):
                commit(backend)
        commit(backend)
    assert (point.hits, backend.id) == (3, 1)


def test_point_without_an_action_only_counts(backend: MemoryBackend) -> None:
    with failpoints.on(PLACE) as point:
        commit(backend)
    commit(backend)
    assert (point.hits, backend.id) == (1, 2)


def test_error_in_the_block_disarms_the_point(backend: MemoryBackend) -> None:
    with pytest.raises(ZeroDivisionError), failpoints.on(PLACE, raises=KeyError):
        raise ZeroDivisionError
    commit(backend)


def test_end_of_one_block_leaves_other_points_armed(backend: MemoryBackend) -> None:
    with failpoints.on(PLACE) as outer:
        with failpoints.on("memory.rows_put"):
            pass
        assert failpoints.armed
        commit(backend)
    assert outer.hits == 1


def test_unknown_name_and_second_arming_are_refused(backend: MemoryBackend) -> None:
    with pytest.raises(ValueError, match="unknown"), failpoints.on("memory.unheard_of"):
        pass
    with failpoints.on(PLACE) as first:
        with pytest.raises(ValueError, match="armed already"), failpoints.on(PLACE):
            pass
        commit(backend)
    assert first.hits == 1


def test_disarm_all_disarms_a_point_whose_block_runs(backend: MemoryBackend) -> None:
    with failpoints.on(PLACE, raises=KeyError):
        failpoints.disarm_all()
        commit(backend)


def test_action_may_block_one_thread_while_others_hit_the_point(backend: MemoryBackend) -> None:
    reached, may_continue = threading.Event(), threading.Event()

    def pause(_: object) -> None:
        reached.set()
        may_continue.wait(60)

    with failpoints.on(PLACE, calls=pause, times=1) as point:
        blocked = threading.Thread(target=commit, args=(backend,))
        blocked.start()
        assert reached.wait(60)
        commit(backend)
        may_continue.set()
        blocked.join(60)
    assert point.hits == 2


def test_hits_of_many_threads_are_all_counted_and_act_exactly_times(
    backend: MemoryBackend,
) -> None:
    acted: list[object] = []
    start = threading.Barrier(8)

    def hit_often() -> None:
        start.wait(60)
        for _ in range(500):
            failpoints.hit(PLACE, None)

    with failpoints.on(PLACE, calls=acted.append, times=100) as point:
        threads = [threading.Thread(target=hit_often) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert (point.hits, len(acted)) == (4_000, 100)


def test_no_environment_variable_arms_a_point() -> None:
    names = ["HOLDFAST_FAILPOINTS", "FAILPOINTS", "GOFAIL_FAILPOINTS"]
    code = "from holdfast import failpoints; print(failpoints.armed, failpoints.armed_names())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **dict.fromkeys(names, "memory.commit=panic")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "False []\n"
