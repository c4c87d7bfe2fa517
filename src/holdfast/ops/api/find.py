"""`GET /v1/find?text=`: the task, flow or world with an id, a key or a name.

Keys and names are read by their indexes, under each name of tasks and flows and each type of worlds: at most `NAMES_MAX`
of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec

from holdfast.errors import HoldfastError
from holdfast.flows import queries as flow_queries
from holdfast.flows.flow_list import FlowRow
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, Page, RequestModel, Scope
from holdfast.ops.flow_documents import existing_flow, find_flow
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.tasks import queries as task_queries
from holdfast.tasks import task_list
from holdfast.tasks.ids import parse_task_id
from holdfast.tasks.queries import TaskRow
from holdfast.world import catalog
from holdfast.world.catalog import WorldRecord

NAMES_MAX = 1_000


class FindQuery(RequestModel):
    """`text` is an id, the key of a task or a flow, the name of a world, or `NAME/KEY` or `TYPE/NAME`."""

    text: str


class FoundDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A subject. `kind` is task, flow or world; `name` is the type of a world, and `key` its name."""

    kind: str
    id: str
    name: str
    key: str | None
    state: str


def find_subjects(call: ApiCall) -> Page[FoundDocument]:
    def read(txn: Txn) -> list[FoundDocument]:
        text = call.query.text.strip()
        # A subject may have its id as its key.
        return list(dict.fromkeys(_found(txn, call.universe, text))) if text else []

    return Page(items=call.read(read))


# -- inside ------------------------------------------------------------------------------------------


def _found(txn: Txn, universe: str, text: str) -> Iterator[FoundDocument]:
    for source in (_by_id, _tasks_by_key, _flows_by_key, _worlds_by_name):
        # A text that cannot be a key or an id names nothing.
        try:
            yield from source(txn, universe, text)
        except HoldfastError:
            continue


def _by_id(txn: Txn, universe: str, text: str) -> Iterator[FoundDocument]:
    if text[:1].isdigit():
        yield _task(task_queries.get_task(txn, universe, parse_task_id(text)))
    else:
        # An id, or `NAME/KEY`.
        yield _flow(find_flow(txn, universe, text))


def _tasks_by_key(txn: Txn, universe: str, text: str) -> Iterator[FoundDocument]:
    name, _, key = text.partition("/")
    found = task_list.find_by_key(txn, universe, text)
    if key and name:
        found += task_list.find_by_key(txn, universe, key, name)
    yield from map(_task, found)


def _flows_by_key(txn: Txn, universe: str, text: str) -> Iterator[FoundDocument]:
    for name in islice(iter_names(txn, (int(Space.FLOW), universe, "k")), NAMES_MAX):
        id = flow_queries.find_by_key(txn, universe, name, text)
        if id is not None:
            yield _flow(existing_flow(txn, universe, text, id))


def _worlds_by_name(txn: Txn, universe: str, text: str) -> Iterator[FoundDocument]:
    type, _, name = text.partition("/")
    types = list(islice(iter_names(txn, (int(Space.WORLD), universe, "n")), NAMES_MAX))
    ids = [catalog.find_id(txn, universe, one, text) for one in types]
    if type in types and name:
        ids.append(catalog.find_id(txn, universe, type, name))
    yield from (_world(catalog.get_record(txn, universe, id)) for id in ids if id)
    if not any(ids):
        yield _world(catalog.get_record(txn, universe, text))


def _task(row: TaskRow) -> FoundDocument:
    return FoundDocument("task", str(row.id), row.spec.name, row.body.key or None, row.where)


def _flow(row: FlowRow) -> FoundDocument:
    spec, key = row.body.spec, row.body.key or None
    return FoundDocument("flow", str(row.id), spec.name, key, row.state.name.lower())


def _world(record: WorldRecord) -> FoundDocument:
    return FoundDocument("world", record.world_id, record.type, record.name, record.status.value)


ENDPOINTS = (
    Endpoint("GET", "/v1/find", Scope.READ, find_subjects, Page[FoundDocument],
             "Find a task, flow or world by its id, key or name",
             EndpointOptions(query=FindQuery)),
)  # fmt: skip
