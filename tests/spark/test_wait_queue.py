"""Children that wait for rows: one is woken for rows of one, in the order in which they came."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from holdfast.spark import wire
from holdfast.spark.wait_queue import Rows, WaitQueue
from tests.spark.service_rig import step
from tests.spark.test_office import Offices, offices

__all__ = ["offices"]

WAIT_S = 60.0
ALL: Rows = (0, -1)


class Table:
    """Rows that lie free, and children in threads that wait for one each."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.free = 0
        self.over = False
        self.taken: list[int] = []
        self.looks = 0
        self.waiting = WaitQueue(self.lock, lambda rows: self.free > 0 or self.over, lambda: False)
        self.threads: list[threading.Thread] = []

    def sit(self, number: int) -> None:
        """One more child; returns when it waits."""
        ready = threading.Event()

        def run() -> None:
            with self.lock, self.waiting.place(ALL) as place:
                ready.set()
                while not self.free and not self.over:
                    place.wait(WAIT_S)
                    self.looks += 1
                if not self.over:
                    self.free -= 1
                    self.taken.append(number)

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        assert ready.wait(WAIT_S)

    def put(self, rows: int) -> None:
        with self.lock:
            self.free += rows
            self.waiting.wake()

    def until_taken(self, count: int) -> None:
        for thread in self.threads[:count]:
            thread.join(WAIT_S)
        with self.lock:
            assert len(self.taken) == count


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    for number in range(20):
        made.sit(number)
    yield made
    with made.lock:
        made.over = True
        made.waiting.wake_all()
    for thread in made.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(made.waiting) == 0


def test_one_row_wakes_one_child(table: Table) -> None:
    table.put(1)
    table.until_taken(1)
    assert (table.taken, table.looks) == ([0], 1)


def test_rows_go_to_children_in_the_order_in_which_they_came(table: Table) -> None:
    table.put(7)
    table.until_taken(7)
    assert (table.taken, table.looks) == (list(range(7)), 7)


def test_a_decision_that_frees_nothing_wakes_nobody(table: Table) -> None:
    for _ in range(100):
        with table.lock:
            table.waiting.wake()
    table.put(1)
    table.until_taken(1)
    assert table.looks == 1


def test_a_child_that_waits_is_given_rows_that_come_back(offices: Offices) -> None:
    """With the real ledger: reports wake nobody, a lost connection and a cancellation do."""
    held: list[int] = []
    while True:
        asked = replace(step(wire.Claim(20, 20)), held=held)
        answer, _ = offices.office.step("child/1", asked, memoryview(b""))
        if answer.grant is None:
            break
        held.append(answer.grant.epoch)
    found: list[wire.Stepped] = []

    def ask() -> None:
        asked = step(wire.Claim(5, 5), wait_ms=5000)
        answer, _ = offices.office.step("child/2", asked, memoryview(b""))
        while answer.state == "wait":
            answer, _ = offices.office.step("child/2", asked, memoryview(b""))
        found.append(answer)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    offices.office.gone("child/1")
    thread.join(WAIT_S)
    assert [answer.state for answer in found] == ["granted"]
    assert found[0].grant is not None
    assert found[0].grant.epoch > held[-1]
