"""Requests that stand, and what may come between them, their answers, and whoever waits beside them."""

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
from holdfast.errors import Invalid, Withdrawn
from holdfast.sim.edits import Edit, Mutant
from holdfast.store.api import Standing, Store, Txn
from holdfast.store.engine import STANDS, Engine, Request
from holdfast.store.lmdb import LmdbStore
from holdfast.store.memory import MemoryBackend
from holdfast.store.standers import TRIED_MAX
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import KINDS, Spec, keys_of, pack_int
from holdfast.tasks.runs import status_of
from holdfast.tasks.states import State
from tests.conformance.conftest import open_store

MODULES = ("holdfast.store.standers", "holdfast.store.link", "holdfast.store.engine")
WITHIN_S = 30.0
KEYS = keys_of("main")
TOPIC = KEYS.queue_topic("default")


@pytest.fixture
def lmdb(tmp_path: Path) -> Iterator[LmdbStore]:
    with open_store("lmdb", tmp_path) as opened:
        assert isinstance(opened, LmdbStore)
        yield opened


def stand(store: Store, *, limit: int = 1) -> Standing:
    rooms = (limit,) * len(KINDS)
    found = store.stand([TOPIC], tasks.lease_when, "main", "w", ["default"], limit, rooms, (), 0)
    assert found is not None
    return found


def submit(txn: Txn, count: int = 1) -> Any:
    return tasks.submit(txn, "main", Spec(name="t", queue="default"), [New(b"x")] * count)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@contextlib.contextmanager
def in_one_frame(store: LmdbStore) -> Iterator[None]:
    """What is sent inside goes out together at its end."""
    with store._link._sending:
        yield
    store._link.flush()


def aside(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_whoever_waits_is_woken_though_one_that_stands_is_busy_elsewhere(
    lmdb: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer comes first, in the same frame; its thread looks for it some time later."""
    # Those who wait are woken, and do not only look up now and then.
    monkeypatch.setattr("holdfast.store.link._LOOK_S", 10 * WITHIN_S)
    lmdb.submit(submit).result(WITHIN_S)  # from now on answers are read by a thread of their own
    link = lmdb._link
    woken: list[int] = []

    def put(n: int) -> None:
        lmdb.transact(lambda txn: txn.put(("n", n), b"1"))
        woken.append(n)

    with in_one_frame(lmdb):
        standing = stand(lmdb)
        for n in range(5):
            aside(partial(put, n))
        until(lambda: len(link._outbox) == 6, "all of them in the outbox")
    until(lambda: standing.answered, "its answer")
    until(lambda: sorted(woken) == list(range(5)), "all who waited")


def test_one_that_is_called_back_after_it_was_notified_holds_nothing(lmdb: LmdbStore) -> None:
    """It was too many for the commit that notified it, and its recall lay behind that one."""
    standing = [stand(lmdb) for _ in range(TRIED_MAX + 1)]
    lmdb.transact(lambda txn: txn.put(("a",), b""))  # by now they stand
    last = standing[-1]
    seqs: list[list[int]] = []
    told: list[bool] = []

    def bring(txn: Txn) -> Any:
        for n in range(COMMIT_ROWS_MAX + 1):
            txn.put(("fill", n), b"")
        return submit(txn, len(standing))

    with in_one_frame(lmdb):
        brings = aside(lambda: seqs.append(lmdb.transact(bring)))
        until(lambda: len(lmdb._link._outbox) == 1, "what brings tasks")
        recalls = aside(lambda: told.append(last.withdraw()))
        until(lambda: len(lmdb._link._outbox) == 2, "the recall")
    for thread in (brings, recalls):
        thread.join(WITHIN_S)
    [found] = seqs
    leased = [seq for seq in found if state(lmdb, seq) is State.LEASED]
    [withdrawn] = told
    assert len(leased) == len(standing) - withdrawn


def state(store: Store, seq: int) -> State:
    return State(store.read(lambda txn: status_of(txn, KEYS, pack_int(seq))).state)


# -- one that breaks -------------------------------------------------------------------------------


BROKEN = Mutant(
    "a mistake",
    (
        Edit(
            "tasks.standby:lease_when",
            "decision = Decision(txn, universe)",
            "raise ZeroDivisionError('a mistake')",
        ),
    ),
)


@pytest.fixture(params=["memory", "lmdb-local"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(request.param, tmp_path) as opened:
        yield opened


def test_one_that_breaks_spoils_no_commit_of_others(local: Store) -> None:
    standing = stand(local)
    with BROKEN.planted():
        [seq] = local.transact(submit)
    assert state(local, seq) is State.WAITING
    assert standing.answered
    with pytest.raises(Invalid, match="a mistake"):
        standing.result()


def test_one_that_breaks_is_tried_no_more_and_the_others_are(local: Store) -> None:
    standing = [stand(local) for _ in range(3)]
    with BROKEN.planted():
        local.transact(submit)
    assert all(one.answered for one in standing)
    after = stand(local)
    assert [grant.seq for grant in after.result().grants] == [1]


def test_one_that_is_called_back_in_a_batch_that_breaks_is_gone(tmp_path: Path) -> None:
    """The batch is done again, one by one."""
    backend = MemoryBackend()
    engine = Engine(backend, SimClock())
    client = b"client"
    args = ("main", "w", ["default"], 1, (1,) * len(KINDS), (), 0)
    lease = (tasks.lease_when.name, msgspec.Raw(codec.pack(list(args))))
    standing = Request(1, client, 0, calls=[lease], when=[TOPIC])
    assert engine.commit([standing]) == [STANDS]
    recall = Request(1, client, 0, resent=True, withdrawn=True)
    broken = Request(2, client, 0, puts={b"k" * 5000: b""}, adds={b"n": "x"})  # type: ignore[dict-item]
    told, refused = engine.commit([recall, broken])
    assert told.error is not None
    assert told.error[0] == Withdrawn.code
    assert refused.error is not None
    assert len(engine.standers) == 0


def test_one_that_is_called_back_before_its_turn_has_come_is_not_tried(tmp_path: Path) -> None:
    """A commit tries some; of the others, one is called back in the same batch, which breaks."""
    engine = Engine(MemoryBackend(), SimClock())
    client = b"client"
    args = ("main", "w", ["default"], 1, (1,) * len(KINDS), (), 0)
    lease = (tasks.lease_when.name, msgspec.Raw(codec.pack(args)))
    for no in range(1, TRIED_MAX + 3):
        engine.commit([Request(no, client, 0, calls=[lease], when=[TOPIC])])
    called = (
        tasks.submit.name,
        msgspec.Raw(codec.pack(("main", Spec("t", "default"), [New(b"")]))),
    )
    _, told, refused = engine.commit(
        [
            Request(50, client, 0, calls=[called]),
            Request(TRIED_MAX + 1, client, 0, resent=True, withdrawn=True),
            Request(51, client, 0, adds={b"n": "x"}),  # type: ignore[dict-item]
        ]
    )
    assert told.error is not None
    assert told.error[0] == Withdrawn.code
    assert refused.error is not None
    assert [one.no for one in engine.late] == [TRIED_MAX + 2]
    assert (client, TRIED_MAX + 1) not in engine.standers
