"""gc_control: the caller chooses the moment of a collection, and an early one runs only if it is near."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast import gc_control

MODULES = ("holdfast.gc_control",)


class GcCycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """Record the collected generations after a full collection."""
    generations: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            generations.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # the collections of a test visit only its own objects
    gc.callbacks.append(record)
    yield generations
    gc.callbacks.remove(record)
    gc.set_threshold(*thresholds)
    gc.enable()


def allocate(left: int) -> list[GcCycle]:
    """Allocate objects until the interpreter is `left` allocations away from a collection."""
    objects: list[GcCycle] = []
    while gc.get_threshold()[0] - gc.get_count()[0] > left:
        objects.append(GcCycle())
    return objects


# -- client processes: automatic GC is enabled -----------------------------------------------------


def test_collect_if_near_collects_when_a_collection_is_near(collected: list[int]) -> None:
    objects = allocate(gc_control.NEAR_ALLOCATIONS - 10)
    collected.clear()
    gc_control.collect_if_near()
    assert len(collected) == 1
    assert objects


def test_collect_if_near_does_not_collect_when_far(collected: list[int]) -> None:
    gc.set_threshold(5_000)
    objects = allocate(gc_control.NEAR_ALLOCATIONS + 200)
    collected.clear()
    gc_control.collect_if_near()
    assert collected == []
    assert objects


@pytest.mark.parametrize("how", ["disabled", "threshold"])
def test_collect_if_near_respects_disabled_gc(collected: list[int], how: str) -> None:
    if how == "disabled":
        gc.disable()
    else:
        gc.set_threshold(0)
    objects = [GcCycle() for _ in range(650)]
    collected.clear()
    gc_control.collect_if_near()
    assert collected == []
    assert objects


# Runs in a child process: the frequency of full collections depends on the number of live objects.
OLD_CYCLES = """
import gc
from holdfast import gc_control

class Cycle:
    def __init__(self):
        self.own = self

living = []
gc.freeze()
before = gc.get_stats()[2]["collections"]
for _ in range(1_000):
    living = [*living[-2_000:], *(Cycle() for _ in range(300))]
    gc_control.collect_if_near()
print(gc.get_stats()[2]["collections"] - before)
print(sum(isinstance(one, Cycle) for one in gc.get_objects()))
"""


def test_collect_if_near_does_not_prevent_full_collections() -> None:
    """Early collections do not suppress the interpreter's collections of older generations."""
    completed = subprocess.run(
        [sys.executable, "-c", OLD_CYCLES], capture_output=True, text=True, timeout=60
    )
    full, alive = map(int, completed.stdout.split())
    assert full >= 1
    assert alive < 150_000, "of 300,000"


# -- processes with roles --------------------------------------------------------------------------


def test_reduce_automatic_freezes_objects_and_collects_less_often(collected: list[int]) -> None:
    gc.set_threshold(*gc_control._INITIAL_THRESHOLDS)
    gc.unfreeze()
    gc_control.reduce_automatic()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] >= gc_control.YOUNG_ALLOCATIONS
    assert gc.isenabled()


@pytest.mark.parametrize("how", ["disabled", "threshold"])
def test_reduce_automatic_respects_settings_of_the_application(
    collected: list[int], how: str
) -> None:
    gc.set_threshold(*gc_control._INITIAL_THRESHOLDS)
    gc.unfreeze()
    if how == "disabled":
        gc.disable()
    else:
        gc.set_threshold(123, 4, 5)
    before = gc.get_threshold()
    gc_control.reduce_automatic()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


# -- the writer process: automatic GC is disabled --------------------------------------------------


def test_collect_between_batches_does_not_collect_with_automatic_gc(collected: list[int]) -> None:
    objects = allocate(10)
    collected.clear()
    gc_control.collect_between_batches(busy=False)
    assert collected == []
    assert objects


def test_collect_between_batches_collects_every_generation_when_idle(collected: list[int]) -> None:
    gc.disable()
    gc.set_threshold(700, 3, 3)
    for _ in range(100):
        for _ in range(gc_control.NEAR_ALLOCATIONS + 50):
            GcCycle()
        gc_control.collect_between_batches(busy=False)
    assert len(collected) == 100
    assert set(collected) == {0, 1, 2}


def test_collect_between_batches_defers_full_collections_up_to_a_bound(
    collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    gc.set_threshold(700, 3, 3)
    monkeypatch.setattr(gc_control, "FULL_COLLECTION_DEFERRALS_MAX", 20)
    for _ in range(150):
        for _ in range(gc_control.NEAR_ALLOCATIONS + 50):
            GcCycle()
        gc_control.collect_between_batches(busy=True)
    assert len(collected) == 150
    assert collected.count(2) == 1


def test_disable_automatic_freezes_objects_and_disables_gc() -> None:
    code = (
        "import gc; from holdfast import gc_control; gc_control.disable_automatic();"
        "print(gc.isenabled(), gc.get_freeze_count() > 1000)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.split() == ["False", "True"], completed.stderr
