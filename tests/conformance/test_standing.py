"""Transactions that stand where commits are made, until there is something for them to do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.store.api import Standing, Store, Txn
from holdfast.store.lmdb import LmdbStore
from holdfast.store.standers import TRIED_MAX
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import New
from holdfast.tasks.lease import PARKED_MAX
from holdfast.tasks.rows import KINDS, Spec, keys_of, pack_int
from holdfast.tasks.runs import status_of
from holdfast.tasks.states import State
from tests.conformance.conftest import open_store

MODULES = ("holdfast.store.standers", "holdfast.tasks.standby")
WITHIN_S = 30.0
KEYS = keys_of("main")


@pytest.fixture(params=["memory", "lmdb-local", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(request.param, tmp_path) as opened:
        yield opened


def stand(store: Store, *, queue: str = "default", limit: int = 10, due_ns: int = 0) -> Standing:
    rooms = (limit,) * len(KINDS)
    found = store.stand(
        [KEYS.queue_topic(queue)], tasks.lease_when, "main", "w", [queue], limit, rooms, (), due_ns
    )
    assert found is not None
    return found


def submit(store: Store, count: int = 1, *, queue: str = "default", delay_s: int = 0) -> list[int]:
    spec = Spec(name="t", queue=queue)
    new = [New(b"x", delay_ns=delay_s * S) for _ in range(count)]
    found: list[int] = store.transact(tasks.submit, "main", spec, new)
    return found


def answer(standing: Standing) -> Any:
    since = 0
    for _ in range(int(WITHIN_S)):
        if standing.answered:
            return standing.result()
        since = standing.wait(["nothing"], since, 1.0)
    raise AssertionError("no answer")


def state(store: Store, seq: int) -> State:
    return State(store.read(lambda txn: status_of(txn, KEYS, pack_int(seq))).state)


def test_what_waits_already_is_taken_at_once(store: Store) -> None:
    [seq] = submit(store)
    assert [grant.seq for grant in answer(stand(store)).grants] == [seq]


def test_what_comes_is_taken_in_the_commit_that_brings_it(store: Store) -> None:
    standing = stand(store)
    [seq] = submit(store)
    # Before anybody has looked at the answer.
    assert state(store, seq) is State.LEASED
    assert [grant.seq for grant in answer(standing).grants] == [seq]


def test_one_for_whom_there_is_nothing_stands_on(store: Store) -> None:
    standing = stand(store, queue="other")
    submit(store)
    assert not standing.answered
    [seq] = submit(store, queue="other")
    assert [grant.seq for grant in answer(standing).grants] == [seq]


def test_one_is_told_what_comes_due_before_it_looks_again(store: Store) -> None:
    later, sooner = stand(store), stand(store, due_ns=store.now_ns() + 1 * S)
    submit(store, delay_s=100)
    assert not later.answered
    submit(store, delay_s=3)
    assert answer(later).grants == []
    assert not sooner.answered


@pytest.mark.parametrize("calls", [1, 2])
def test_it_returns_what_its_function_does_and_fills_in_what_was_pending(
    store: Store, calls: int
) -> None:
    pending: list[Any] = []

    def lease(txn: Txn) -> str:
        for _ in range(calls):
            args = ("main", "w", ["default"], 1, (1,) * len(KINDS), (), 0)
            pending.append(tasks.lease_when(txn, *args))
        return "asked"

    seqs = submit(store, calls)
    standing = store.stand([KEYS.queue_topic("default")], lease)
    assert standing is not None
    assert answer(standing) == "asked"
    assert [grant.seq for one in pending for grant in one.value.grants] == seqs


def test_what_is_called_back_takes_nothing_any_more(store: Store) -> None:
    standing = stand(store)
    assert standing.withdraw()
    [seq] = submit(store)
    assert state(store, seq) is State.WAITING


def test_what_was_applied_cannot_be_called_back(store: Store) -> None:
    standing = stand(store)
    [seq] = submit(store)
    assert not standing.withdraw()
    assert [grant.seq for grant in standing.result().grants] == [seq]


def test_the_first_who_came_is_the_first_who_gets(store: Store) -> None:
    first, second = stand(store), stand(store)
    submit(store)
    assert answer(first).grants
    assert not second.answered
    submit(store)
    assert answer(second).grants


def test_of_more_than_one_commit_tries_all_get_theirs(store: Store) -> None:
    standing = [stand(store, limit=1) for _ in range(2 * TRIED_MAX + 3)]
    seqs = submit(store, len(standing))
    got = [grant.seq for one in standing for grant in answer(one).grants]
    assert sorted(got) == seqs


def test_one_that_reads_or_writes_is_refused(store: Store) -> None:
    def read(txn: Txn) -> None:
        txn.get(("a",))
        tasks.lease_when(txn, "main", "w", ["default"], 1, (1,) * len(KINDS), (), 0)

    def put(txn: Txn) -> None:
        txn.put(("a",), b"1")

    for wrong in (read, put):
        with pytest.raises(Invalid, match="operations"):
            store.stand(["t"], wrong)


def test_an_operation_that_fails_is_answered_with_its_error(store: Store) -> None:
    submit(store)
    wrong = store.stand(["t"], tasks.lease_when, "main", "w", ["default"], 1, (1,), (), 0)
    assert wrong is not None
    with pytest.raises(Invalid, match="rooms"):
        answer(wrong)


# -- with a writer process -----------------------------------------------------------------------


def test_whoever_is_gone_gets_nothing(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store:
        with open_store("lmdb", tmp_path) as other:
            stand(other)
            submit(other, queue="another")  # by now it stands
        [seq] = submit(store)
        assert state(store, seq) is State.WAITING


def test_what_stood_at_a_writer_that_died_stands_at_the_next(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store, open_store("lmdb", tmp_path) as other:
        assert isinstance(store, LmdbStore)
        standing = stand(other)
        os.kill(store._link.welcome.pid, signal.SIGKILL)
        # It notices while it waits.
        waiting = threading.Thread(target=standing.wait, args=(["nothing"], -1, 2.0))
        waiting.start()
        [seq] = submit(store)
        assert [grant.seq for grant in answer(standing).grants] == [seq]
        waiting.join(WITHIN_S)


def test_others_get_their_answers_while_one_stands(tmp_path: Path) -> None:
    with open_store("lmdb", tmp_path) as store:
        standing = stand(store, queue="never")
        threads = [
            threading.Thread(target=lambda: [submit(store) for _ in range(20)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        assert not any(thread.is_alive() for thread in threads)
        assert standing.withdraw()


def test_what_stands_goes_out_with_what_is_asked_for_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("lmdb", tmp_path) as store:
        assert isinstance(store, LmdbStore)
        sent: list[bytes] = []
        send = store._link._send
        monkeypatch.setattr(store._link, "_send", lambda data: sent.append(data) or send(data))
        with store.together():
            standing = stand(store)
            assert sent == []
            [seq] = submit(store)
        assert len(sent) == 1
        assert [grant.seq for grant in answer(standing).grants] == [seq]
        with store.together():
            alone = stand(store)
        assert len(sent) == 2
        assert alone.withdraw()


def test_tasks_that_nobody_here_knows_do_not_keep_others_from_who_stands(store: Store) -> None:
    def ask() -> Standing:
        rooms = (10,) * len(KINDS)
        topics = [KEYS.queue_topic("default")]
        found = store.stand(
            topics, tasks.lease_when, "main", "w", ["default"], 10, rooms, ("t",), 0
        )
        assert found is not None
        return found

    standing = ask()
    store.transact(tasks.submit, "main", Spec(name="unknown"), [New(b"x")] * (PARKED_MAX + 5))
    [seq] = submit(store)
    for _ in range(5):
        granted = answer(standing).grants
        if granted:
            break
        standing = ask()
    assert [grant.seq for grant in granted] == [seq]
