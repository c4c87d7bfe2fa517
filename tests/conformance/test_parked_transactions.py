"""Store.submit_when: a parked transaction waits in the store until a commit notifies one of its topics."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.store.api import ParkedTransaction, Store, Txn
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.parked_requests import UNPARK_TRIES_MAX
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import SKIPPED_MAX
from holdfast.tasks.model import EXECUTOR_KINDS, TaskSpec, keys_of, pack_int
from holdfast.tasks.operations import GrantRequest, TaskToSubmit
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState
from tests.conformance.conftest import open_store

MODULES = ("holdfast.store.parked_requests", "holdfast.tasks.leases")
WITHIN_S = 30.0
KEYS = keys_of("main")


@pytest.fixture(params=["memory", "lmdb-local", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(request.param, tmp_path) as opened:
        yield opened


def lease_request(
    queue: str = "default", limit: int = 1, names: tuple[str, ...] = ()
) -> GrantRequest:
    free_slots = (limit,) * len(EXECUTOR_KINDS)
    return GrantRequest("w", [queue], limit, free_slots=free_slots, names=names)


def park_lease_request(
    store: Store, *, queue: str = "default", limit: int = 10, due_ns: int = 0
) -> ParkedTransaction:
    parked = store.submit_when(
        [KEYS.queue_topic(queue)], tasks.lease_or_park, "main", lease_request(queue, limit), due_ns
    )
    assert parked is not None
    return parked


def submit_tasks(
    store: Store, count: int = 1, *, queue: str = "default", delay_s: int = 0
) -> list[int]:
    spec = TaskSpec(name="t", queue=queue)
    new = [TaskToSubmit(b"x", delay_ns=delay_s * S) for _ in range(count)]
    seqs: list[int] = store.transact(tasks.submit, "main", spec, new)
    return seqs


def await_answer(parked: ParkedTransaction) -> Any:
    since = 0
    for _ in range(int(WITHIN_S)):
        if parked.is_answered:
            return parked.result()
        since = parked.wait(["nothing"], since, 1.0)
    raise AssertionError("no answer")


def state(store: Store, seq: int) -> TaskState:
    return TaskState(store.read(lambda txn: get_status(txn, KEYS, pack_int(seq))).state)


def test_submit_when_leases_a_waiting_task_at_once(store: Store) -> None:
    [seq] = submit_tasks(store)
    assert [grant.seq for grant in await_answer(park_lease_request(store)).grants] == [seq]


def test_parked_request_leases_a_task_in_the_commit_that_submits_it(store: Store) -> None:
    parked = park_lease_request(store)
    [seq] = submit_tasks(store)
    # The lease exists before the client reads the answer.
    assert state(store, seq) is TaskState.LEASED
    assert [grant.seq for grant in await_answer(parked).grants] == [seq]


def test_parked_request_stays_parked_without_a_matching_task(store: Store) -> None:
    parked = park_lease_request(store, queue="other")
    submit_tasks(store)
    assert not parked.is_answered
    [seq] = submit_tasks(store, queue="other")
    assert [grant.seq for grant in await_answer(parked).grants] == [seq]


def test_parked_request_is_answered_when_a_task_is_due_before_its_recheck(store: Store) -> None:
    later, sooner = (
        park_lease_request(store),
        park_lease_request(store, due_ns=store.now_ns() + 1 * S),
    )
    submit_tasks(store, delay_s=100)
    assert not later.is_answered
    submit_tasks(store, delay_s=3)
    assert await_answer(later).grants == []
    assert not sooner.is_answered


@pytest.mark.parametrize("calls", [1, 2])
def test_parked_transaction_returns_its_result_and_resolves_deferred_values(
    store: Store, calls: int
) -> None:
    deferred: list[Any] = []

    def lease(txn: Txn) -> str:
        for _ in range(calls):
            deferred.append(tasks.lease_or_park(txn, "main", lease_request(), 0))
        return "asked"

    seqs = submit_tasks(store, calls)
    parked = store.submit_when([KEYS.queue_topic("default")], lease)
    assert parked is not None
    assert await_answer(parked) == "asked"
    assert [grant.seq for result in deferred for grant in result.value.grants] == seqs


def test_cancelled_parked_request_leases_no_task(store: Store) -> None:
    parked = park_lease_request(store)
    assert parked.cancel()
    [seq] = submit_tasks(store)
    assert state(store, seq) is TaskState.WAITING


def test_cancel_of_an_applied_parked_request_returns_false(store: Store) -> None:
    parked = park_lease_request(store)
    [seq] = submit_tasks(store)
    assert not parked.cancel()
    assert [grant.seq for grant in parked.result().grants] == [seq]


def test_parked_requests_are_served_in_order_of_arrival(store: Store) -> None:
    first, second = park_lease_request(store), park_lease_request(store)
    submit_tasks(store)
    assert await_answer(first).grants
    assert not second.is_answered
    submit_tasks(store)
    assert await_answer(second).grants


def test_parked_requests_beyond_unpark_tries_max_all_get_a_task(store: Store) -> None:
    parked = [park_lease_request(store, limit=1) for _ in range(2 * UNPARK_TRIES_MAX + 3)]
    seqs = submit_tasks(store, len(parked))
    got = [grant.seq for one in parked for grant in await_answer(one).grants]
    assert sorted(got) == seqs


def test_submit_when_with_reads_or_writes_raises_invalid(store: Store) -> None:
    def read(txn: Txn) -> None:
        txn.get(("a",))
        tasks.lease_or_park(txn, "main", lease_request(), 0)

    def put(txn: Txn) -> None:
        txn.put(("a",), b"1")

    for wrong in (read, put):
        with pytest.raises(Invalid, match="operations"):
            store.submit_when(["t"], wrong)


def test_parked_operation_that_fails_is_answered_with_its_error(store: Store) -> None:
    submit_tasks(store)
    request = GrantRequest("w", ["default"], 1, free_slots=(1,))
    wrong = store.submit_when(["t"], tasks.lease_or_park, "main", request, 0)
    assert wrong is not None
    with pytest.raises(Invalid, match="free slots"):
        await_answer(wrong)


# -- with a writer process -----------------------------------------------------------------------


def test_parked_request_of_a_closed_client_leases_no_task(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store:
        with open_store("lmdb", tmp_path) as other:
            park_lease_request(other)
            submit_tasks(other, queue="another")  # the request before it is parked
        [seq] = submit_tasks(store)
        assert state(store, seq) is TaskState.WAITING


def test_parked_request_is_parked_again_at_the_next_writer(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store, open_store("lmdb", tmp_path) as other:
        assert isinstance(store, LmdbStore)
        parked = park_lease_request(other)
        os.kill(store._client.welcome.pid, signal.SIGKILL)
        # The client detects the dead writer during a wait.
        waiting = threading.Thread(target=parked.wait, args=(["nothing"], -1, 2.0))
        waiting.start()
        [seq] = submit_tasks(store)
        assert [grant.seq for grant in await_answer(parked).grants] == [seq]
        waiting.join(WITHIN_S)


def test_parked_request_does_not_block_other_threads(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store:
        parked = park_lease_request(store, queue="never")
        threads = [
            threading.Thread(target=lambda: [submit_tasks(store) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        assert not any(thread.is_alive() for thread in threads)
        assert parked.cancel()


def test_submit_when_inside_batched_is_sent_with_the_batch(
    tmp_path: Path,
) -> None:
    with open_store("lmdb", tmp_path) as store, failpoints.on("lmdb.send") as send:
        assert isinstance(store, LmdbStore)
        with store.batched():
            parked = park_lease_request(store)
            assert send.hits == 0
            [seq] = submit_tasks(store)
        assert send.hits == 1
        assert [grant.seq for grant in await_answer(parked).grants] == [seq]
        with store.batched():
            second = park_lease_request(store)
        assert send.hits == 2
        assert second.cancel()


def test_tasks_with_unknown_names_do_not_block_a_parked_request(store: Store) -> None:
    def park() -> ParkedTransaction:
        topics, request = [KEYS.queue_topic("default")], lease_request(limit=10, names=("t",))
        parked = store.submit_when(topics, tasks.lease_or_park, "main", request, 0)
        assert parked is not None
        return parked

    parked = park()
    store.transact(
        tasks.submit, "main", TaskSpec(name="unknown"), [TaskToSubmit(b"x")] * (SKIPPED_MAX + 5)
    )
    [seq] = submit_tasks(store)
    for _ in range(5):
        granted = await_answer(parked).grants
        if granted:
            break
        parked = park()
    assert [grant.seq for grant in granted] == [seq]
