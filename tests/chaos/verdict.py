"""What must hold after the chaos, from the clients' logs, the receiver's and the store.

Each check is a generator of breaches, one line each; none means that it held.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.app.runtime import Runtime
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, lease
from holdfast.errors import NotFound
from holdfast.store.api import Store, Txn
from holdfast.tasks import records, recount, verify
from holdfast.tasks.records import TaskCompleted, TaskCreated, TaskDead, TaskFailed
from holdfast.tasks.rows import PLACES, counts_of, keys_of
from tests.chaos.app import DESKS, Desk, app, desk_of
from tests.chaos.receiver import Receiver

PAGE = 1000
SHOWN = 5


class Said(NamedTuple):
    """How one order or task ended, as far as its client was told."""

    what: str
    how: str
    desk: str
    keyed: bool


@dataclass
class Told:
    """All that the clients were told. What is only intended, because its client was killed, is unknown."""

    said: dict[str, Said] = field(default_factory=dict)
    retries: int = 0
    longest_s: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> Told:
        told = cls()
        for path in sorted(folder.glob("*.log")):
            for text in path.read_text().splitlines():
                how, what, id, fields = json.loads(text)
                if how == "intend":
                    told.said[id] = Said(what, "unknown", fields["desk"], fields["keyed"])
                elif how == "retry":
                    told.retries += 1
                else:
                    told.said[id] = told.said[id]._replace(how=how)
                    told.longest_s = max(told.longest_s, fields.get("took_s", 0.0))
        return told

    def count(self, how: str) -> int:
        return sum(1 for said in self.said.values() if said.how == how)

    def ids(self, *whats: str) -> dict[str, Said]:
        return {id: said for id, said in self.said.items() if said.what in whats}


def desks(runtime: Runtime) -> dict[str, Desk]:
    found = {}
    for number in range(DESKS):
        name = desk_of(number)
        try:
            found[name] = runtime.world(Desk, name).state()
        except NotFound:
            found[name] = Desk()
    return found


def settled(runtime: Runtime) -> bool:
    """Whether nothing waits any more: no order for its receipt or its timer, no task for its end."""
    counts = runtime.store.read(counts_of, keys_of(app.universe), "default")
    if counts.leased or any(getattr(counts, place) for place in PLACES):
        return False
    return all(
        len(desk.ordered) == len(desk.paid) + len(desk.unpaid) == len(desk.rung)
        for desk in desks(runtime).values()
    )


def breaches(runtime: Runtime, told: Told, outside: Receiver) -> list[str]:
    """All that did not hold."""
    seen = _Seen(runtime, told, outside)
    checks = (
        orders_are_handled_as_told,
        each_order_has_one_receipt,
        each_timer_fires_once_and_not_early,
        effects_have_one_key_each,
        tasks_are_as_told_and_end_once,
        tasks_have_one_key_each,
        log_and_rows_of_tasks_agree,
        epochs_only_grow,
        leases_do_not_overlap,
    )
    found = []
    for check in checks:
        lines = list(check(seen))
        found += [f"{check.__name__}: {line}" for line in lines[:SHOWN]]
        if len(lines) > SHOWN:
            found.append(f"{check.__name__}: and {len(lines) - SHOWN} more")
    return found


class _Seen:
    def __init__(self, runtime: Runtime, told: Told, outside: Receiver) -> None:
        self.runtime = runtime
        self.store: Store = runtime.store
        self.told = told
        self.outside = outside
        self.desks = desks(runtime)


# -- worlds ----------------------------------------------------------------------------------------


def orders_are_handled_as_told(seen: _Seen) -> Iterator[str]:
    there: defaultdict[str, list[str]] = defaultdict(list)
    for name, desk in seen.desks.items():
        for id in desk.ordered:
            there[id].append(name)
    orders = seen.told.ids("order", "ask")
    yield from _each_as_told(orders, Counter({id: len(at) for id, at in there.items()}))
    for id, at in there.items():
        if id in orders and set(at) != {orders[id].desk}:
            yield f"{id} was sent to {orders[id].desk}, and is at {at}"


def each_order_has_one_receipt(seen: _Seen) -> Iterator[str]:
    for name, desk in seen.desks.items():
        yield from (f"{name}: {line}" for line in desk.unpaid)
        if Counter(desk.paid) != Counter(desk.ordered):
            yield f"{name}: {_difference(desk.ordered, desk.paid)}"


def each_timer_fires_once_and_not_early(seen: _Seen) -> Iterator[str]:
    for name, desk in seen.desks.items():
        if Counter(desk.rung) != Counter(desk.ordered):
            yield f"{name}: {_difference(desk.ordered, desk.rung)}"
        yield from (f"{name}: {id} rang too early" for id in desk.early)


def effects_have_one_key_each(seen: _Seen) -> Iterator[str]:
    keys = seen.outside.keys("effect")
    for desk in seen.desks.values():
        for id in desk.ordered:
            if len(set(keys.get(id, []))) != 1:
                yield f"{id} has the keys {sorted(set(keys.get(id, [])))}"
    yield from _one_order_each(keys)


# -- tasks -----------------------------------------------------------------------------------------


def tasks_are_as_told_and_end_once(seen: _Seen) -> Iterator[str]:
    log = seen.store.read(_task_log)
    ends = Counter(
        record.task_id
        for record in log
        if isinstance(record, TaskCompleted | TaskDead)
        or (isinstance(record, TaskFailed) and record.final)
    )
    created = [record.task_id for record in log if isinstance(record, TaskCreated)]
    if Counter(created) != Counter(set(created)):
        yield "a task was created twice"
    for task in created:
        if ends[task] != 1:
            yield f"task {task} ended {ends[task]} times"
    completed = sum(isinstance(record, TaskCompleted) for record in log)
    if completed != len(created):
        yield f"{len(created)} tasks were created and {completed} completed"
    # An order is known by what its task calls outside, and a task by its key there.
    keys = seen.outside.keys("task")
    yield from _each_as_told(
        seen.told.ids("task"), Counter({id: len(set(found)) for id, found in keys.items()})
    )
    if len({key for found in keys.values() for key in found}) != len(created):
        yield f"{len(created)} tasks were created, and others were called for"


def tasks_have_one_key_each(seen: _Seen) -> Iterator[str]:
    yield from _one_order_each(seen.outside.keys("task"))


def log_and_rows_of_tasks_agree(seen: _Seen) -> Iterator[str]:
    yield from seen.store.read(lambda txn: [str(d) for d in verify.differences(txn, app.universe)])
    yield from seen.store.read(lambda txn: [str(d) for d in recount.differences(txn, app.universe)])


def _task_log(txn: Txn) -> list[records.Single]:
    """Every record that is kept: a checkpoint may have cut off the oldest."""
    subject = keys_of(app.universe).subject
    head = journal.head(txn, subject)
    found: list[records.Single] = []
    for lo in range(head.floor, head.height + 1, SCAN_PAGE):
        for entry in journal.read(txn, subject, lo, lo + SCAN_PAGE, SCAN_PAGE):
            found += records.singles(records.decode(entry.body), lambda task: None)
    return found


# -- leases ----------------------------------------------------------------------------------------


def epochs_only_grow(seen: _Seen) -> Iterator[str]:
    for resource, events in lease_events(seen.store).items():
        epochs = [event.epoch for event in events if event.kind == "granted"]
        if epochs != list(range(epochs[0], epochs[0] + len(epochs))) or epochs[0] != 1:
            yield f"{resource}: epochs {epochs[:20]}"


def leases_do_not_overlap(seen: _Seen) -> Iterator[str]:
    """By the decisions' own times: a grant comes after whatever ended the one before."""
    for resource, events in lease_events(seen.store).items():
        times = [event.decided_ns for event in events]
        if times != sorted(times):
            yield f"{resource}: a later decision has an earlier time"
        held: lease.LeaseEvent | None = None
        for event in events:
            if event.kind == "granted":
                if held is not None:
                    yield f"{resource}: {event.epoch} was granted while {held.epoch} was held"
                held = event
            else:
                held = None


def lease_events(store: Store) -> dict[str, list[lease.LeaseEvent]]:
    found: defaultdict[str, list[lease.LeaseEvent]] = defaultdict(list)
    last = 0
    while page := store.read(lease.events, last, PAGE):
        for event in page:
            found[event.resource].append(event)
        last = page[-1].n
    return found


# -- inside ----------------------------------------------------------------------------------------


def _each_as_told(said: dict[str, Said], there: Counter[str]) -> Iterator[str]:
    allowed = {"acked": (1,), "unknown": (0, 1), "refused": (0,)}
    for id, one in said.items():
        if there[id] not in allowed[one.how]:
            yield f"{id} ({'with' if one.keyed else 'without'} a key) was {one.how}, and is there {there[id]} times"
    for id in there.keys() - said.keys():
        yield f"{id} is there, and nobody sent it"


def _one_order_each(keys: dict[str, list[str]]) -> Iterator[str]:
    owner: dict[str, str] = {}
    for id, found in keys.items():
        for key in set(found):
            if owner.setdefault(key, id) != id:
                yield f"the key {key} was used for {owner[key]} and for {id}"


def _difference(wanted: list[Any], found: list[Any]) -> str:
    missing, more = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    return f"missing {sorted(missing)[:5]}, too many {sorted(more)[:5]}"
