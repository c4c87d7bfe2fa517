"""Races of parked requests with cancellations, broken batches, and other threads of the same client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import codec
from holdfast.clock import SimClock
from holdfast.config import COMMIT_ROWS_MAX
from holdfast.errors import Invalid, RequestCancelled
from holdfast.store.api import ParkedTransaction, Store, Txn
from holdfast.store.engine import StoreEngine
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.parked_requests import UNPARK_TRIES_MAX
from holdfast.store.requests import PARKED, CommitRequest
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import EXECUTOR_KINDS, TaskSpec, keys_of, pack_int
from holdfast.tasks.operations import GrantRequest, TaskToSubmit
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState
from tests.conformance.conftest import open_store
from tests.simulation.source_edits import Edit, Mutant

MODULES = (
    "holdfast.store.parked_requests",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.engine",
)
WITHIN_S = 30.0
KEYS = keys_of("main")
TOPIC = KEYS.queue_topic("default")
LEASE_REQUEST = GrantRequest("w", ["default"], 1, free_slots=(1,) * len(EXECUTOR_KINDS))


@pytest.fixture
def lmdb(tmp_path: Path) -> Iterator[LmdbStore]:
    with open_store("lmdb", tmp_path) as opened:
        assert isinstance(opened, LmdbStore)
        yield opened


def park_lease_request(store: Store, *, limit: int = 1) -> ParkedTransaction:
    request = GrantRequest("w", ["default"], limit, free_slots=(limit,) * len(EXECUTOR_KINDS))
    parked = store.submit_when([TOPIC], tasks.lease_or_park, "main", request, 0)
    assert parked is not None
    return parked


def submit_tasks(txn: Txn, count: int = 1) -> Any:
    return tasks.submit(
        txn, "main", TaskSpec(name="t", queue="default"), [TaskToSubmit(b"x")] * count
    )


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@contextlib.contextmanager
def sending_in_one_frame(store: LmdbStore) -> Iterator[None]:
    """Hold back sends inside the block and send them in one frame at its end."""
    with store._client._sender_lock:
        yield
    store._client.flush()


def start_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_waiting_threads_are_woken_when_a_parked_answer_is_unread(
    lmdb: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the parked request comes first in the frame; its thread reads it later."""
    # Disables polling: waiting threads proceed only if they are woken.
    monkeypatch.setattr("holdfast.store.lmdb.writer_client.POLL_S", 10 * WITHIN_S)
    lmdb.submit(submit_tasks).result(WITHIN_S)  # starts the receiver thread
    link = lmdb._client
    woken: list[int] = []

    def put(n: int) -> None:
        lmdb.transact(lambda txn: txn.put(("n", n), b"1"))
        woken.append(n)

    with sending_in_one_frame(lmdb):
        parked = park_lease_request(lmdb)
        for n in range(5):
            start_thread(partial(put, n))
        until(lambda: len(link._outbox) == 6, "all of them in the outbox")
    until(lambda: parked.is_answered, "its answer")
    until(lambda: sorted(woken) == list(range(5)), "all who waited")


def test_parked_request_cancelled_after_its_notification_holds_no_lease(lmdb: LmdbStore) -> None:
    """The notifying commit exceeded UNPARK_TRIES_MAX, and the cancellation was queued behind it."""
    parked = [park_lease_request(lmdb) for _ in range(UNPARK_TRIES_MAX + 1)]
    lmdb.transact(lambda txn: txn.put(("a",), b""))  # the requests before it are parked
    last = parked[-1]
    seqs: list[list[int]] = []
    cancelled: list[bool] = []

    def submit_large_commit(txn: Txn) -> Any:
        for n in range(COMMIT_ROWS_MAX + 1):
            txn.put(("fill", n), b"")
        return submit_tasks(txn, len(parked))

    with sending_in_one_frame(lmdb):
        submitting = start_thread(lambda: seqs.append(lmdb.transact(submit_large_commit)))
        until(lambda: len(lmdb._client._outbox) == 1, "what brings tasks")
        cancelling = start_thread(lambda: cancelled.append(last.cancel()))
        until(lambda: len(lmdb._client._outbox) == 2, "the recall")
    for thread in (submitting, cancelling):
        thread.join(WITHIN_S)
    [submitted] = seqs
    leased = [seq for seq in submitted if state(lmdb, seq) is TaskState.LEASED]
    [was_cancelled] = cancelled
    assert len(leased) == len(parked) - was_cancelled


def state(store: Store, seq: int) -> TaskState:
    return TaskState(store.read(lambda txn: get_status(txn, KEYS, pack_int(seq))).state)


# -- a parked request that raises ------------------------------------------------------------------


LEASE_BUG = Mutant(
    "a mistake",
    (
        Edit(
            "tasks.leases:lease_or_park",
            "unit = UnitOfWork(txn, universe)",
            "raise ZeroDivisionError('a mistake')",
        ),
    ),
)


@pytest.fixture(params=["memory", "lmdb-local"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(request.param, tmp_path) as opened:
        yield opened


def test_parked_request_that_raises_does_not_fail_the_notifying_commit(local: Store) -> None:
    parked = park_lease_request(local)
    with LEASE_BUG.planted():
        [seq] = local.transact(submit_tasks)
    assert state(local, seq) is TaskState.WAITING
    assert parked.is_answered
    with pytest.raises(Invalid, match="a mistake"):
        parked.result()


def test_parked_request_that_raised_is_not_retried(local: Store) -> None:
    parked = [park_lease_request(local) for _ in range(3)]
    with LEASE_BUG.planted():
        local.transact(submit_tasks)
    assert all(one.is_answered for one in parked)
    after = park_lease_request(local)
    assert [grant.seq for grant in after.result().grants] == [1]


def test_parked_request_cancelled_in_a_broken_batch_is_removed(tmp_path: Path) -> None:
    """The engine retries the requests of the batch one by one."""
    backend = MemoryBackend()
    engine = StoreEngine(backend, SimClock())
    client = b"client"
    args = ("main", LEASE_REQUEST, 0)
    lease = (tasks.lease_or_park.name, msgspec.Raw(codec.pack(list(args))))
    parked = CommitRequest(1, client, 0, calls=[lease], park_topics=[TOPIC])
    assert engine.commit([parked]) == [PARKED]
    cancellation = CommitRequest(1, client, 0, resent=True, cancels_parked=True)
    broken = CommitRequest(2, client, 0, puts={b"k" * 5000: b""}, adds={b"n": "x"})  # type: ignore[dict-item]
    cancelled, refused = engine.commit([cancellation, broken])
    assert cancelled.error is not None
    assert cancelled.error[0] == RequestCancelled.code
    assert refused.error is not None
    assert len(engine.parked_requests) == 0


def test_parked_request_cancelled_before_its_retry_is_not_retried(tmp_path: Path) -> None:
    """A commit retries UNPARK_TRIES_MAX requests. The broken batch cancels one of the remaining requests."""
    engine = StoreEngine(MemoryBackend(), SimClock())
    client = b"client"
    args = ("main", LEASE_REQUEST, 0)
    lease = (tasks.lease_or_park.name, msgspec.Raw(codec.pack(args)))
    for no in range(1, UNPARK_TRIES_MAX + 3):
        engine.commit([CommitRequest(no, client, 0, calls=[lease], park_topics=[TOPIC])])
    called = (
        tasks.submit.name,
        msgspec.Raw(codec.pack(("main", TaskSpec("t", "default"), [TaskToSubmit(b"")]))),
    )
    _, cancelled, refused = engine.commit(
        [
            CommitRequest(50, client, 0, calls=[called]),
            CommitRequest(UNPARK_TRIES_MAX + 1, client, 0, resent=True, cancels_parked=True),
            CommitRequest(51, client, 0, adds={b"n": "x"}),  # type: ignore[dict-item]
        ]
    )
    assert cancelled.error is not None
    assert cancelled.error[0] == RequestCancelled.code
    assert refused.error is not None
    assert [one.no for one in engine.overdue] == [UNPARK_TRIES_MAX + 2]
    assert (client, UNPARK_TRIES_MAX + 1) not in engine.parked_requests
