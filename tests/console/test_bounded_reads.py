"""Each list of the API reads a bounded number of rows, counted by the store, and no list grows with its store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.console_store import (
    DEAD_QUEUE,
    ENDED_QUEUE,
    KEYED_QUEUE,
    NAMES,
    UNIVERSE,
    WAITING_QUEUE,
    ConsoleSizes,
    fill,
)
from holdfast.clock import SYSTEM
from holdfast.ops.api import registry
from holdfast.ops.api.call import NoIndex, invoke
from holdfast.ops.api.endpoint import PageQuery
from holdfast.store.api import Row
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = (
    "holdfast.tasks.list_index",
    "holdfast.tasks.task_list",
    "holdfast.ops.api.task_lists",
)

ROWS = 3_000
SIZES = ConsoleSizes(tasks=ROWS, worlds=ROWS, dead_letters=ROWS, flows=ROWS, records=ROWS)
LIMIT = 20
# A page reads a few rows for each item, and a few for its index.
READ_MAX = 10 * LIMIT + 200
ENDPOINTS = {one.operation_id: one for one in registry.endpoints()}
# The ends of tasks are counted in the minute of their end.
SINCE_NS, UNTIL_NS = 1, 1 << 62


class RowCounter(MemoryBackend):
    """A memory backend that counts the rows that transactions read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_read = 0

    def get(self, key: bytes) -> bytes | None:
        self.rows_read += 1
        return super().get(key)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        rows = super().scan(lo, hi, limit, reverse)
        self.rows_read += max(len(rows), 1)
        return rows


class LargeStore:
    def __init__(self, store: InProcessStore, counter: RowCounter) -> None:
        self.store = store
        self._counter = counter

    def read(
        self, operation: str, query: dict[str, str], **path: str
    ) -> tuple[dict[str, object], int]:
        """Return the answer of an endpoint and the number of rows that it has read."""
        self._counter.rows_read = 0
        answer = invoke(ENDPOINTS[operation], self.store, UNIVERSE, path=path, query=query)
        return answer, self._counter.rows_read


@pytest.fixture(scope="module")
def large() -> Iterator[LargeStore]:
    counter = RowCounter()
    with InProcessStore("memory:", counter, SYSTEM) as store:
        fill(store, SIZES)
        yield LargeStore(store, counter)


LISTS: list[tuple[str, dict[str, str]]] = [
    ("list_tasks", {}),
    ("list_tasks", {"state": "waiting"}),
    ("list_tasks", {"state": "ready"}),
    ("list_tasks", {"state": "ready", "queue": KEYED_QUEUE}),
    ("list_tasks", {"state": "completed"}),
    ("list_tasks", {"state": "failed"}),
    ("list_tasks", {"state": "failed", "queue": ENDED_QUEUE, "name": NAMES[2]}),
    ("list_tasks", {"state": "completed", "name": NAMES[2]}),
    ("list_tasks", {"name": NAMES[0]}),
    ("list_tasks", {"name": NAMES[1]}),
    ("list_tasks", {"name": "none"}),
    ("list_tasks", {"queue": ENDED_QUEUE}),
    ("list_tasks", {"queue": WAITING_QUEUE, "name": NAMES[0]}),
    ("list_tasks", {"state": "delayed", "queue": WAITING_QUEUE}),
    ("list_tasks", {"state": "blocked"}),
    ("list_tasks", {"state": "leased", "queue": WAITING_QUEUE}),
    ("list_tasks", {"since_ns": "1"}),
    ("list_tasks", {"until_ns": "1"}),
    ("list_tasks", {"since_ns": "1", "queue": ENDED_QUEUE, "state": "failed"}),
    ("list_tasks", {"key": "order-7"}),
    ("list_tasks", {"key": "order-7", "name": NAMES[1]}),
    ("list_tasks", {"tag": "none"}),
    ("list_flows", {}),
    ("list_flows", {"state": "waiting"}),
    ("list_flows", {"state": "running"}),
    ("list_flows", {"tag": "none"}),
    ("list_flows", {"key": "flow-7"}),
    ("list_flows", {"since_ns": "1", "state": "running"}),
    ("list_flows", {"until_ns": "1"}),
    ("list_worlds", {"type": "Customer"}),
    ("list_dead_queues", {}),
    ("list_error_groups", {}),
    ("list_audit", {}),
    ("list_budgets", {}),
    ("list_budget_days", {}),
    ("list_ended", {}),
    ("list_effects", {"kind": "shop.quote", "state": "dead"}),
    ("list_timers", {}),
    ("list_jobs", {}),
    ("list_runs", {}),
    ("list_schedules", {}),
    ("list_workers", {}),
    ("list_dispatches", {"status": "pending"}),
]  # fmt: skip
COUNTS = (
    "list_queues",
    "count_flows",
    "count_effects",
    "show_readiness",
    "show_limits",
    "count_dispatches",
)


@pytest.mark.parametrize(("operation", "query"), LISTS, ids=str)
def test_page_of_a_list_reads_a_bounded_number_of_rows(
    large: LargeStore, operation: str, query: dict[str, str]
) -> None:
    paged = {**query, "limit": str(LIMIT)}
    for _ in range(3):
        answer, rows_read = large.read(operation, paged)
        assert rows_read <= READ_MAX, rows_read
        next = answer["cursor"] if operation == "list_tasks" else answer["next"]
        if next is None:
            return
        paged["cursor"] = str(next)


def test_lists_below_a_subject_read_a_bounded_number_of_rows(large: LargeStore) -> None:
    groups, _ = large.read("list_error_groups", {"kind": "task", "limit": "1"})
    [group] = groups["items"]  # type: ignore[misc]
    for operation, path in (
        ("list_dead_letters", {"queue": DEAD_QUEUE}),
        ("list_error_subjects", {"kind": "task", "group": group["group"]}),
        ("list_world_journal", {"type": "Customer", "name": "customer-000007"}),
    ):
        answer, rows_read = large.read(operation, {"limit": str(LIMIT)}, **path)
        assert rows_read <= READ_MAX, (operation, rows_read)
        if operation == "list_error_subjects":
            listed, rows_read = large.read(
                "list_tasks", {"error": path["group"], "limit": str(LIMIT)}
            )
            assert rows_read <= READ_MAX
            ids = [one["id"] for one in listed["tasks"]]  # type: ignore[attr-defined]
            assert ids == [one["id"] for one in answer["items"]]  # type: ignore[attr-defined]
        assert operation == "list_world_journal" or len(answer["items"]) == LIMIT  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", COUNTS)
def test_counts_read_a_bounded_number_of_rows(large: LargeStore, operation: str) -> None:
    assert large.read(operation, {})[1] <= READ_MAX


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("order-7", [("task", "ship", "order-7")]),
        ("ship/order-7", [("task", "ship", "order-7")]),
        ("flow-7", [("flow", "order", "flow-7")]),
        ("order/flow-7", [("flow", "order", "flow-7")]),
        ("1-1", [("task", "pack", None)]),
        ("f1-1", [("flow", "order", "flow-0")]),
        ("customer-000007", [("world", "Customer", "customer-000007")]),
        ("Customer/customer-000007", [("world", "Customer", "customer-000007")]),
        (f"{7:032x}", [("world", "Customer", "customer-000007")]),
        ("nobody", []),
        ("1-999999", []),
        (" ", []),
    ],
)
def test_find_names_the_subject_with_an_id_key_or_name(
    large: LargeStore, text: str, found: list[tuple[str, str, str | None]]
) -> None:
    answer, rows_read = large.read("find_subjects", {"text": text})
    items = answer["items"]
    assert [(one["kind"], one["name"], one["key"]) for one in items] == found  # type: ignore[attr-defined]
    assert rows_read <= 100


def test_every_list_of_the_api_is_counted_here() -> None:
    below_a_subject = {
        "list_dead_letters", "list_error_subjects", "list_world_journal", "list_flow_steps",
        "list_failed_rows", "list_world_lineage", "list_verify_reports",
        # Pages of at most `world_contents.SCANNED_MAX` rows.
        "list_world_effects", "list_world_timers", "list_world_forks", "list_limit_keys",
    }  # fmt: skip
    listed = {name for name, one in ENDPOINTS.items() if issubclass(one.options.query, PageQuery)}
    assert listed - below_a_subject == {operation for operation, _ in LISTS}


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ({"state": "ready", "name": "pick"}, "name"),
        ({"state": "leased", "since_ns": "1"}, "since_ns"),
        ({"key": "order-7", "queue": "shipping"}, "queue"),
        ({"worker": "w"}, "filter"),
    ],
)
def test_filter_without_an_index_is_refused(
    large: LargeStore, query: dict[str, str], refused: str
) -> None:
    with pytest.raises(NoIndex) as error:
        large.read("list_tasks", query)
    assert error.value.fields["what"] == refused


def test_filters_of_tasks_select_the_matching_tasks(large: LargeStore) -> None:
    tenth = ROWS // 10

    def count(**query: str) -> int:
        answer, _ = large.read("list_tasks", {**query, "limit": "1000"})
        return len(answer["tasks"])  # type: ignore[arg-type]

    assert count(key="order-7") == count(key="order-7", name="ship") == 1
    assert count(key="order-7", name="pick") == count(key="nobody") == 0
    assert count(queue=ENDED_QUEUE) == count(name="pack") == tenth
    assert count(state="completed") == count(state="failed", queue=ENDED_QUEUE) == tenth // 2
    assert count(state="failed", queue=KEYED_QUEUE) == count(state="blocked") == 0
    assert count(since_ns=str(UNTIL_NS)) == count(until_ns="1") == 0
