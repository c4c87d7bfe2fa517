"""The cost of load limits while none is set: each operation reads one absent row, a batch of messages too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.clock import SYSTEM
from holdfast.durable import inbox, load_limits
from holdfast.errors import Overloaded
from holdfast.messages import event_ingress
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import GrantRequest, TaskReport, TaskToSubmit
from holdfast.workers.limit_settings import change_limits
from holdfast.world import ingress
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import WorldAddress

MODULES = ("holdfast.durable.load_limits", "holdfast.world.ingress")

EVENT = event_ingress("Ordered", b"1")
MAIL = TaskSpec(name="pack", queue="mail", lease_ns=60_000_000_000)


class CountingBackend(MemoryBackend):
    """A memory backend that counts the reads of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[bytes] = Counter()

    def get(self, key: bytes) -> bytes | None:
        self.reads[key] += 1
        return super().get(key)


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def store(backend: CountingBackend) -> Iterator[InProcessStore]:
    with InProcessStore("memory:", backend, SYSTEM) as store:
        yield store


def world(universe: str, number: int) -> WorldAddress:
    return WorldAddress(universe, "Buyer", f"world-{number}", f"{number:032x}")


def reads_of_limits(backend: CountingBackend, universe: str = "shop") -> int:
    return backend.reads.pop(load_limits.limits_key(universe), 0)


def test_message_reads_the_limits_once(store: InProcessStore, backend: CountingBackend) -> None:
    for key in (None, "user:1", "user:1"):
        store.transact(ingress.deliver, world("shop", 1), key, EVENT)
        assert reads_of_limits(backend) == 1


def test_batch_of_messages_reads_the_limits_once(
    store: InProcessStore, backend: CountingBackend
) -> None:
    batch = [(world("shop", number % 8), None, EVENT) for number in range(100)]
    store.transact(ingress.deliver_many, batch)
    assert reads_of_limits(backend) == 1


def test_batch_for_two_universes_is_judged_by_the_limits_of_each(store: InProcessStore) -> None:
    store.transact(change_limits, "full", {"inbox": 1})
    free = [(world("free", 1), None, EVENT)] * 3
    store.transact(ingress.deliver_many, [*free, (world("full", 2), None, EVENT)])
    with pytest.raises(Overloaded, match="full"):
        store.transact(ingress.deliver_many, [*free, (world("full", 2), None, EVENT)])
    depths = [
        store.read(inbox.depth, subject_of(universe, f"{number:032x}"))
        for universe, number in (("free", 1), ("full", 2))
    ]
    assert depths == [3, 1]


def test_task_operation_reads_the_limits_once(
    store: InProcessStore, backend: CountingBackend
) -> None:
    task = TaskToSubmit(b"1")
    store.transact(operations.submit, "shop", MAIL, [task, task])
    assert reads_of_limits(backend) == 1
    store.transact(operations.submit_each, "shop", [MAIL], [0, 0], [task, task])
    assert reads_of_limits(backend) == 1
    granted = store.transact(operations.lease, "shop", GrantRequest("w", ["mail"], 4)).grants
    assert reads_of_limits(backend) == 1
    reports = [TaskReport(grant.seq, grant.lease) for grant in granted]
    store.transact(operations.apply_reports, "shop", "w", store.generation, reports)
    assert (len(reports), reads_of_limits(backend)) == (4, 1)
