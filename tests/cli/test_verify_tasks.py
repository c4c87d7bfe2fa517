"""`holdfast verify` of tasks: it replays the task log and names the first difference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast import store as stores
from holdfast.store.api import Store, Txn
from holdfast.tasks import checkpoint
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import TaskSpec, keys_of, pack, pack_int, queue_index
from holdfast.tasks.operations import GrantRequest, TaskReport, TaskToSubmit
from holdfast.tasks.row_ranges import get_status, remove_from_range
from holdfast.tasks.states import TaskState
from tests.cli.conftest import RunCommand

KEYS = keys_of("shop")


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with stores.open(str(path)) as store:
        store.transact(tasks.submit, "shop", TaskSpec("pack"), [TaskToSubmit(b"x")] * 10)
        leased = store.transact(tasks.lease, "shop", GrantRequest("w", ["default"], 5))
        reports = [TaskReport(grant.seq, grant.lease) for grant in leased.grants[:3]]
        store.transact(tasks.apply_reports, "shop", "w", store.generation, reports)
        yield store


def test_verify_of_consistent_tasks_exits_with_0(run: RunCommand, path: Path, store: Store) -> None:
    assert run("verify", "--store", path).code == 0


def test_verify_of_tasks_with_a_truncated_log_exits_with_0(
    run: RunCommand, path: Path, store: Store
) -> None:
    for _ in range(3):
        store.transact(tasks.submit, "shop", TaskSpec("pack"), [TaskToSubmit(b"x")])
        assert checkpoint.create(store, "shop")
    assert run("verify", "--store", path).code == 0


def test_verify_finds_a_task_status_that_differs_from_the_log(
    run: RunCommand, path: Path, store: Store
) -> None:
    def change(txn: Txn) -> None:
        status = get_status(txn, KEYS, pack_int(5))
        changed = replace(status, state=TaskState.FAILED, worker="nobody")
        txn.put(KEYS.statuses + pack_int(5), pack(changed))

    store.transact(change)
    result = run("verify", "--store", path)
    assert result.code == 1
    first = result.out.splitlines()[0]
    assert first == "task shop/1-5: state at height 2: found FAILED, expected LEASED"


def test_verify_finds_a_missing_task_wait_index_row(
    run: RunCommand, path: Path, store: Store
) -> None:
    store.transact(
        lambda txn: remove_from_range(txn, KEYS.ready + queue_index("default", 0, 0), pack_int(6))
    )
    result = run("verify", "--store", path, "--json")
    assert result.code == 1
    [task, count] = result.document["differences"]
    assert (task["where"], task["what"], task["found"]) == ("shop/1-6", "place", "none")
    assert (count["where"], count["what"]) == ("shop", "count of ready in default")
