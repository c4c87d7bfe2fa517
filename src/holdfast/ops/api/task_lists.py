"""The query of the task list: its filters, which combinations have an index, and the page that it selects."""

from __future__ import annotations

from typing import ClassVar

from holdfast.durable import error_groups
from holdfast.durable.creation_times import ANY_TIME, TimeRange
from holdfast.ops import error_group_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import NoIndex
from holdfast.ops.api.endpoint import PageQuery
from holdfast.store.api import Txn
from holdfast.tasks import queries, task_list
from holdfast.tasks.model import keys_of, pack_int
from holdfast.tasks.task_list import TaskPage

# States whose lists have the order of their queue index, or of the leases.
_FILTERS = ("state", "queue", "tag", "since_ns", "until_ns")
_QUEUED = ("ready", "suspect", "parked", "stray", "leased")


class TaskListQuery(PageQuery):
    """`state` is a state, or a place where tasks wait. `since_ns` and `until_ns` bound the time of the submission. Ready,
    suspect, parked, stray and leased tasks are listed by `queue` only. `tag` takes every filter beside it. With `key` only
    `name` is taken. `error` is an error group of `GET /v1/errors?kind=task`, the oldest first, and takes no other filter. A
    page may be short with `tag`, and with `queue` for leased tasks."""

    limit_min: ClassVar[int] = 0

    state: str = ""
    queue: str = ""
    name: str = ""
    tag: str = ""
    key: str = ""
    error: str = ""
    since_ns: int = 0
    until_ns: int = 0


def read_page(txn: Txn, universe: str, query: TaskListQuery) -> TaskPage:
    limit, where = cursors.page_limit(query), query.state.lower()
    times = TimeRange(query.since_ns, query.until_ns)
    by_pair = bool(query.queue or query.name or times != ANY_TIME)
    if query.error:
        refuse_beside("error", query, (*_FILTERS, "key", "name"), ("error",))
        return _page_of_error(txn, universe, query)
    if query.key:
        refuse_beside("key", query, _FILTERS, ("key", "name"))
        return TaskPage(task_list.find_by_key(txn, universe, query.key, query.name), "")
    if where in _QUEUED and not query.tag:
        filters = ("name", "since_ns", "until_ns")
        refuse_beside(f"state {where}", query, filters, ("queue", "state", "tag"))
    return task_list.list_tasks(
        txn,
        universe,
        where,
        query.queue,
        query.name,
        query.cursor,
        limit,
        # The index by queue and name has no activations of flows. The lists of waiting and running tasks show them.
        owned=where in _QUEUED or (where == "delayed" and not by_pair),
        tag=query.tag,
        times=times,
    )


def refuse_beside(
    what: str, query: PageQuery, filters: tuple[str, ...], indexed: tuple[str, ...]
) -> None:
    """Raise NoIndex if the query has a filter that no index answers beside another one."""
    for name in filters:
        if getattr(query, name):
            raise NoIndex(what=name, why=f"not with {what}", indexed=sorted(indexed))


def _page_of_error(txn: Txn, universe: str, query: TaskListQuery) -> TaskPage:
    members, next = error_group_documents.members_page(
        txn, universe, error_groups.TASK, query.error, query.cursor, cursors.page_limit(query)
    )
    keys = keys_of(universe)
    rows = (queries.get_row(txn, keys, pack_int(seq)) for seq in members)
    return TaskPage([row for row in rows if row is not None], next or "")
