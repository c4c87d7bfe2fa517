"""A large store for the console: tasks in several states, flows, worlds, dead letters, budgets and audit entries.

The rows are those of the operations of Holdfast, in commits of `BATCH` items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.codec import pack
from holdfast.durable import queue as item_queue
from holdfast.effects import budget
from holdfast.flows import operations as flows
from holdfast.flows.model import FlowSpec
from holdfast.flows.new_flow import NewFlow
from holdfast.ops import audit
from holdfast.store.api import Store, Txn
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from holdfast.world import catalog

UNIVERSE = "shop"
BATCH = 1_000
# The tasks of each name: one waits in its queue, one has keys, one has ended.
NAMES = ("pick", "ship", "pack")
ENDED_QUEUE, KEYED_QUEUE, WAITING_QUEUE = "packing", "shipping", "picking"
DEAD_QUEUE = f"{UNIVERSE}/effects/shop.quote"
NO_ARGUMENTS = pack([[], {}])


@dataclass(frozen=True)
class ConsoleSizes:
    tasks: int
    worlds: int
    dead_letters: int
    flows: int
    # Budgets and audit entries.
    records: int


def fill(store: Store, sizes: ConsoleSizes) -> None:
    _fill_tasks(store, sizes.tasks)
    _fill_flows(store, sizes.flows)

    def worlds(txn: Txn, number: int) -> None:
        catalog.create(txn, UNIVERSE, "Customer", f"customer-{number:06d}", f"{number:032x}")

    def letters(txn: Txn, number: int) -> None:
        error = f"ValueError: no rate for {'XYZ'[number % 3]}"
        item_queue.add_dead_letter(txn, DEAD_QUEUE, b"x", "failed", error)

    def records(txn: Txn, number: int) -> None:
        budget.set_limit(txn, UNIVERSE, f"{number:032x}", "money", 1_000_000)
        audit.record(txn, UNIVERSE, "ops", "pause_world", f"world/Customer/{number}")

    for one, count in (
        (worlds, sizes.worlds),
        (letters, sizes.dead_letters),
        (records, sizes.records),
    ):
        _in_batches(store, one, count)


def _in_batches(store: Store, write: Callable[[Txn, int], None], count: int) -> None:
    for batch in _batches(count):

        def commit(txn: Txn, batch: range = batch) -> None:
            for number in batch:
                write(txn, number)

        store.transact(commit)


def _batches(count: int) -> Iterator[range]:
    return (range(first, min(first + BATCH, count)) for first in range(0, count, BATCH))


def _fill_tasks(store: Store, count: int) -> None:
    """A tenth has keys, a tenth has ended: half of it well. The rest waits."""
    waiting, keyed, ended = (
        TaskSpec(name=name, queue=queue, attempts=1, retain_ns=10**18)
        for name, queue in zip(NAMES, (WAITING_QUEUE, KEYED_QUEUE, ENDED_QUEUE), strict=True)
    )
    plain = TaskToSubmit(NO_ARGUMENTS)
    tenth = max(count // 10, 1)
    for batch in _batches(tenth):
        store.transact(tasks.submit, UNIVERSE, ended, [plain] * len(batch))
    _end_tasks(store, tenth)
    for batch in _batches(tenth):
        new = [TaskToSubmit(NO_ARGUMENTS, key=f"order-{number}") for number in batch]
        store.transact(tasks.submit, UNIVERSE, keyed, new)
    for batch in _batches(count - 2 * tenth):
        store.transact(tasks.submit, UNIVERSE, waiting, [plain] * len(batch))


def _end_tasks(store: Store, count: int) -> None:
    request = GrantRequest("filler", [ENDED_QUEUE], BATCH)
    for batch in _batches(count):
        granted = store.transact(tasks.lease, UNIVERSE, request).grants
        assert len(granted) == len(batch), len(granted)
        reports = [
            TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, NO_ARGUMENTS)
            if grant.seq % 2
            else TaskReport(
                grant.seq,
                grant.lease,
                AttemptOutcome.REFUSED,
                reason="failed",
                error=f"KeyError: no shelf of kind {'AB'[grant.seq % 4 // 2]}",
            )
            for grant in granted
        ]
        store.transact(tasks.apply_reports, UNIVERSE, "filler", store.generation, reports)


def _fill_flows(store: Store, count: int) -> None:
    spec = FlowSpec(name="order", queue="orders")
    for batch in _batches(count):
        new = [NewFlow(spec, NO_ARGUMENTS, key=f"flow-{number}") for number in batch]
        store.transact(flows.start, UNIVERSE, new)
