"""Garbage is collected in a moment that somebody names, and only if it would be soon anyway."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast import garbage

MODULES = ("holdfast.garbage",)


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generations that are collected, from a clean start."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.enable()


def allocate(left: int) -> list[Cycle]:
    """New objects, until the interpreter is this many away from a collection."""
    kept: list[Cycle] = []
    while gc.get_threshold()[0] - gc.get_count()[0] > left:
        kept.append(Cycle())
    return kept


# -- a process that is not ours alone --------------------------------------------------------------


def test_a_collection_that_is_near_is_brought_on(collected: list[int]) -> None:
    kept = allocate(garbage.NEAR - 10)
    collected.clear()
    garbage.bring_on()
    assert len(collected) == 1
    assert kept


def test_one_that_is_far_is_left(collected: list[int]) -> None:
    gc.set_threshold(5_000)
    kept = allocate(garbage.NEAR + 200)
    collected.clear()
    garbage.bring_on()
    assert collected == []
    assert kept


@pytest.mark.parametrize("how", ["disabled", "threshold"])
def test_who_wants_no_collections_gets_none(collected: list[int], how: str) -> None:
    if how == "disabled":
        gc.disable()
    else:
        gc.set_threshold(0)
    kept = [Cycle() for _ in range(650)]
    collected.clear()
    garbage.bring_on()
    assert collected == []
    assert kept


# In a process by itself: how often all is collected depends on how much there is.
OLD_CYCLES = """
import gc
from holdfast import garbage

class Cycle:
    def __init__(self):
        self.own = self

living = []
gc.freeze()
before = gc.get_stats()[2]["collections"]
for _ in range(1_000):
    living = [*living[-2_000:], *(Cycle() for _ in range(300))]
    garbage.bring_on()
print(gc.get_stats()[2]["collections"] - before)
print(sum(isinstance(one, Cycle) for one in gc.get_objects()))
"""


def test_old_cycles_are_collected_as_ever() -> None:
    """What and when is the interpreter's to say: moments are not taken from the older generations."""
    ran = subprocess.run(
        [sys.executable, "-c", OLD_CYCLES], capture_output=True, text=True, timeout=60
    )
    full, alive = map(int, ran.stdout.split())
    assert full >= 1
    assert alive < 150_000, "of 300,000"


# -- a process of ours -----------------------------------------------------------------------------


def test_nothing_is_collected_twice_while_the_interpreter_does(collected: list[int]) -> None:
    kept = allocate(10)
    collected.clear()
    garbage.collect(busy=False)
    assert collected == []
    assert kept


def test_every_generation_has_its_turn_when_there_is_time(collected: list[int]) -> None:
    gc.disable()
    gc.set_threshold(700, 3, 3)
    for _ in range(100):
        for _ in range(garbage.NEAR + 50):
            Cycle()
        garbage.collect(busy=False)
    assert len(collected) == 100
    assert set(collected) == {0, 1, 2}


def test_who_is_busy_puts_the_long_ones_off_but_not_for_ever(
    collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    gc.set_threshold(700, 3, 3)
    monkeypatch.setattr(garbage, "PUT_OFF_MAX", 20)
    for _ in range(150):
        for _ in range(garbage.NEAR + 50):
            Cycle()
        garbage.collect(busy=True)
    assert len(collected) == 150
    assert collected.count(2) == 1


def test_a_process_of_ours_collects_only_when_it_is_told() -> None:
    code = (
        "import gc; from holdfast import garbage; garbage.take_over();"
        "print(gc.isenabled(), gc.get_freeze_count() > 1000)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
