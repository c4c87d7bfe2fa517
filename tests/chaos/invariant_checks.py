"""The invariants after a chaos run, checked against the clients' logs, the receiver's calls and the store.

Each check is a generator of breaches, one line each. No line means that the invariant holds.
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
from holdfast.tasks import consistency, replay_check
from holdfast.tasks import events as tasks_events
from holdfast.tasks.events import TaskCompleted, TaskCreated, TaskDead, TaskFailed
from holdfast.tasks.model import WAIT_STATES, get_counts, keys_of
from tests.chaos.app import WORLDS, OrderDesk, app, world_name
from tests.chaos.receiver import Receiver

PAGE = 1000
SHOWN = 5


class ClientOutcome(NamedTuple):
    """The outcome of one order or task that its client logged."""

    operation: str
    outcome: str
    world: str
    keyed: bool


@dataclass
class ClientLogs:
    """The logged outcomes of all clients. A request that is only intended, since its client was killed, is unknown."""

    outcomes: dict[str, ClientOutcome] = field(default_factory=dict)
    retries: int = 0
    longest_s: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> ClientLogs:
        logs = cls()
        for path in sorted(folder.glob("*.log")):
            for text in path.read_text().splitlines():
                outcome, operation, id, fields = json.loads(text)
                if outcome == "intend":
                    logs.outcomes[id] = ClientOutcome(
                        operation, "unknown", fields["desk"], fields["keyed"]
                    )
                elif outcome == "retry":
                    logs.retries += 1
                else:
                    logs.outcomes[id] = logs.outcomes[id]._replace(outcome=outcome)
                    logs.longest_s = max(logs.longest_s, fields.get("took_s", 0.0))
        return logs

    def count(self, outcome: str) -> int:
        return sum(1 for request in self.outcomes.values() if request.outcome == outcome)

    def requests(self, *operations: str) -> dict[str, ClientOutcome]:
        return {
            id: request for id, request in self.outcomes.items() if request.operation in operations
        }


def world_states(runtime: Runtime) -> dict[str, OrderDesk]:
    found = {}
    for number in range(WORLDS):
        name = world_name(number)
        try:
            found[name] = runtime.world(OrderDesk, name).state()
        except NotFound:
            found[name] = OrderDesk()
    return found


def is_settled(runtime: Runtime) -> bool:
    """Whether every order has its receipt and its timer, and every task has ended."""
    counts = runtime.store.read(get_counts, keys_of(app.universe), "default")
    if counts.leased or any(getattr(counts, place) for place in WAIT_STATES):
        return False
    return all(
        len(desk.ordered) == len(desk.paid) + len(desk.unpaid) == len(desk.event)
        for desk in world_states(runtime).values()
    )


def breaches(runtime: Runtime, client_logs: ClientLogs, receiver: Receiver) -> list[str]:
    """One line for each broken invariant."""
    state = _FinalState(runtime, client_logs, receiver)
    checks = (
        orders_match_the_client_logs,
        each_order_has_one_receipt,
        each_timer_fires_once_and_not_early,
        effects_have_one_key_each,
        tasks_match_the_client_logs_and_end_once,
        tasks_have_one_key_each,
        log_and_rows_of_tasks_agree,
        epochs_only_grow,
        leases_do_not_overlap,
    )
    found = []
    for check in checks:
        lines = list(check(state))
        found += [f"{check.__name__}: {line}" for line in lines[:SHOWN]]
        if len(lines) > SHOWN:
            found.append(f"{check.__name__}: and {len(lines) - SHOWN} more")
    return found


class _FinalState:
    def __init__(self, runtime: Runtime, client_logs: ClientLogs, receiver: Receiver) -> None:
        self.runtime = runtime
        self.store: Store = runtime.store
        self.client_logs = client_logs
        self.receiver = receiver
        self.worlds = world_states(runtime)


# -- worlds ----------------------------------------------------------------------------------------


def orders_match_the_client_logs(state: _FinalState) -> Iterator[str]:
    there: defaultdict[str, list[str]] = defaultdict(list)
    for name, desk in state.worlds.items():
        for id in desk.ordered:
            there[id].append(name)
    orders = state.client_logs.requests("order", "ask")
    yield from _match_client_outcomes(orders, Counter({id: len(at) for id, at in there.items()}))
    for id, at in there.items():
        if id in orders and set(at) != {orders[id].world}:
            yield f"{id} was sent to {orders[id].world}, and is at {at}"


def each_order_has_one_receipt(state: _FinalState) -> Iterator[str]:
    for name, desk in state.worlds.items():
        yield from (f"{name}: {line}" for line in desk.unpaid)
        if Counter(desk.paid) != Counter(desk.ordered):
            yield f"{name}: {_difference(desk.ordered, desk.paid)}"


def each_timer_fires_once_and_not_early(state: _FinalState) -> Iterator[str]:
    for name, desk in state.worlds.items():
        if Counter(desk.event) != Counter(desk.ordered):
            yield f"{name}: {_difference(desk.ordered, desk.event)}"
        yield from (f"{name}: {id} rang too early" for id in desk.early)


def effects_have_one_key_each(state: _FinalState) -> Iterator[str]:
    keys = state.receiver.keys_by_id("effect")
    for desk in state.worlds.values():
        for id in desk.ordered:
            if len(set(keys.get(id, []))) != 1:
                yield f"{id} has the keys {sorted(set(keys.get(id, [])))}"
    yield from _keys_belong_to_one_order(keys)


# -- tasks -----------------------------------------------------------------------------------------


def tasks_match_the_client_logs_and_end_once(state: _FinalState) -> Iterator[str]:
    log = state.store.read(_task_log)
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
    # A request is identified by the id of its task's calls, and a task by its idempotency key.
    keys = state.receiver.keys_by_id("task")
    yield from _match_client_outcomes(
        state.client_logs.requests("task"),
        Counter({id: len(set(found)) for id, found in keys.items()}),
    )
    if len({key for found in keys.values() for key in found}) != len(created):
        yield f"{len(created)} tasks were created, and others were called for"


def tasks_have_one_key_each(state: _FinalState) -> Iterator[str]:
    yield from _keys_belong_to_one_order(state.receiver.keys_by_id("task"))


def log_and_rows_of_tasks_agree(state: _FinalState) -> Iterator[str]:
    yield from state.store.read(
        lambda txn: [str(d) for d in replay_check.find_differences(txn, app.universe)]
    )
    yield from state.store.read(
        lambda txn: [str(d) for d in consistency.find_differences(txn, app.universe)]
    )


def _task_log(txn: Txn) -> list[tasks_events.TaskRecord]:
    """Every event in the task log. A checkpoint may have truncated the oldest."""
    subject = keys_of(app.universe).subject
    head = journal.head(txn, subject)
    found: list[tasks_events.TaskRecord] = []
    for lo in range(head.floor, head.height + 1, SCAN_PAGE):
        for entry in journal.read(txn, subject, lo, lo + SCAN_PAGE, SCAN_PAGE):
            found += tasks_events.iter_records(
                tasks_events.decode_entry(entry.body), lambda task: None
            )
    return found


# -- leases ----------------------------------------------------------------------------------------


def epochs_only_grow(state: _FinalState) -> Iterator[str]:
    for resource, events in lease_events(state.store).items():
        epochs = [event.epoch for event in events if event.kind == "granted"]
        if epochs != list(range(epochs[0], epochs[0] + len(epochs))) or epochs[0] != 1:
            yield f"{resource}: epochs {epochs[:20]}"


def leases_do_not_overlap(state: _FinalState) -> Iterator[str]:
    """By the decision times: a grant follows the end of the grant before it."""
    for resource, events in lease_events(state.store).items():
        times = [event.decided_ns for event in events]
        if times != sorted(times):
            yield f"{resource}: a later decision has an earlier time"
        last_grant: lease.LeaseEvent | None = None
        for event in events:
            if event.kind == "granted":
                if last_grant is not None:
                    yield f"{resource}: {event.epoch} was granted while {last_grant.epoch} was held"
                last_grant = event
            else:
                last_grant = None


def lease_events(store: Store) -> dict[str, list[lease.LeaseEvent]]:
    found: defaultdict[str, list[lease.LeaseEvent]] = defaultdict(list)
    last = 0
    while page := store.read(lease.events, last, PAGE):
        for event in page:
            found[event.resource].append(event)
        last = page[-1].n
    return found


# -- helpers ---------------------------------------------------------------------------------------


def _match_client_outcomes(
    requests: dict[str, ClientOutcome], found: Counter[str]
) -> Iterator[str]:
    allowed = {"acked": (1,), "unknown": (0, 1), "refused": (0,)}
    for id, one in requests.items():
        if found[id] not in allowed[one.outcome]:
            yield f"{id} ({'with' if one.keyed else 'without'} a key) was {one.outcome}, and is there {found[id]} times"
    for id in found.keys() - requests.keys():
        yield f"{id} is stored, but no client sent it"


def _keys_belong_to_one_order(keys: dict[str, list[str]]) -> Iterator[str]:
    owner: dict[str, str] = {}
    for id, found in keys.items():
        for key in set(found):
            if owner.setdefault(key, id) != id:
                yield f"the key {key} was used for {owner[key]} and for {id}"


def _difference(wanted: list[Any], found: list[Any]) -> str:
    missing, more = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    return f"missing {sorted(missing)[:5]}, too many {sorted(more)[:5]}"
