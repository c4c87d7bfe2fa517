"""The query of the task list: its filters, which combinations have an index, and the page that it selects."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ops.api import cursors
from holdfast.ops.api.call import NoIndex
from holdfast.ops.api.endpoint import PageQuery
from holdfast.store.api import Txn
from holdfast.tasks import task_list
from holdfast.tasks.task_list import TaskPage, TimeRange

# States whose lists have the order of their queue index, or of the leases.
_QUEUED = ("ready", "suspect", "parked", "stray", "leased")


class TaskListQuery(PageQuery):
    """`state` is a state, or a place where tasks wait. `since_ns` and `until_ns` bound the time of the submission. Ready,
    suspect, parked, stray and leased tasks are listed by `queue` only. `tag` takes every filter beside it. With `key` only
    `name` is taken. A page may be short with `tag`, and with `queue` for leased tasks."""

    limit_min: ClassVar[int] = 0

    state: str = ""
    queue: str = ""
    name: str = ""
    tag: str = ""
    key: str = ""
    since_ns: int = 0
    until_ns: int = 0


def read_page(txn: Txn, universe: str, query: TaskListQuery) -> TaskPage:
    limit, where = cursors.page_limit(query), query.state.lower()
    times = TimeRange(query.since_ns, query.until_ns)
    by_pair = bool(query.queue or query.name or times != task_list.ANY_TIME)
    if query.key:
        _refuse(query, ("state", "queue", "tag", "since_ns", "until_ns"), ("key", "name"))
        return TaskPage(task_list.find_by_key(txn, universe, query.key, query.name), "")
    if where in _QUEUED and not query.tag:
        _refuse(query, ("name", "since_ns", "until_ns"), ("queue", "state", "tag"))
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


def _refuse(query: TaskListQuery, filters: tuple[str, ...], indexed: tuple[str, ...]) -> None:
    for name in filters:
        if getattr(query, name):
            beside = "key" if query.key else f"state {query.state.lower()[:64]}"
            raise NoIndex(what=name, why=f"not with {beside}", indexed=sorted(indexed))
