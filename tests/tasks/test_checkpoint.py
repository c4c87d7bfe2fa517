"""Checkpoints of the log: what they hold, when one is due, and that two makers do no harm."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.store.api import Txn
from holdfast.tasks import checkpoint, recount, verify
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.checkpoint import STALLED_NS, Chunk
from holdfast.tasks.coordinator import End, New, Report
from holdfast.tasks.rows import Spec, pack
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, Desk


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_TASKS", 3)
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MIN", 1_000)


def make(desk: Desk) -> bool:
    try:
        return checkpoint.make(desk.store, UNIVERSE)
    finally:
        desk.check()


def work(desk: Desk, rounds: int = 3) -> None:
    """Some of everything: tasks in all states."""
    for _ in range(rounds):
        seqs = desk.submit(*[New(b"x", limit="a")] * 2, *[b"y"] * 4)
        desk.submit(New(b"z", delay_ns=S), New(b"w", after=(seqs[-1],)))
        grants = desk.lease(4)
        for grant, end in zip(grants, (End.OK, End.FAILED, End.REFUSED), strict=False):
            desk.settle(Report(grant.seq, grant.lease, end))
        desk.later(LEASE_NS // 2)


def head(desk: Desk) -> journal.Head:
    return desk.store.read(journal.head, KEYS.subject)


def chunks(desk: Desk) -> list[Chunk]:
    def read(txn: Txn) -> list[Chunk]:
        now = checkpoint.current(txn, UNIVERSE)
        return list(checkpoint.chunks(txn, UNIVERSE, now.latest))

    return desk.store.read(read)


def test_a_checkpoint_holds_every_task_that_is_kept(desk: Desk) -> None:
    work(desk)
    assert make(desk)
    held = [seq for c in chunks(desk) for seq in [*c.fresh, *(task for task, _ in c.tasks)]]
    assert sorted(held) == sorted(desk.rows())


def test_the_log_is_kept_from_the_one_before_the_latest(desk: Desk) -> None:
    heights = []
    for _ in range(4):
        work(desk, 2)
        heights.append(head(desk).height)
        assert make(desk)
    assert head(desk).floor == heights[-2]


def test_what_is_left_of_the_log_still_says_all(desk: Desk) -> None:
    for _ in range(5):
        work(desk, 2)
        make(desk)
    work(desk, 1)
    assert head(desk).floor > 1
    assert not desk.store.read(lambda txn: list(verify.differences(txn, UNIVERSE)))


def test_chunks_of_former_ones_are_swept(desk: Desk) -> None:
    for _ in range(4):
        work(desk, 1)
        make(desk)
    now = desk.store.read(checkpoint.current, UNIVERSE)
    rows = desk.store.read(lambda txn: txn.scan(KEYS.checkpoints, KEYS.checkpoints + b"\xff"))
    assert len(rows) == 1 + now.latest.chunks + now.before.chunks


def test_nothing_new_needs_no_checkpoint(desk: Desk) -> None:
    assert not make(desk)
    work(desk)
    assert make(desk)
    assert not make(desk)


def test_one_is_due_when_the_log_has_outgrown_the_last(desk: Desk) -> None:
    assert not checkpoint.due(desk.store, UNIVERSE)
    work(desk, 6)
    assert checkpoint.due(desk.store, UNIVERSE)
    make(desk)
    assert not checkpoint.due(desk.store, UNIVERSE)
    made = 0
    for _ in range(12):
        work(desk, 1)
        if checkpoint.due(desk.store, UNIVERSE):
            made += make(desk)
    assert 1 <= made <= 4


def test_tasks_change_while_it_is_made(desk: Desk) -> None:
    work(desk)
    store, heights = desk.store, set()
    begun = store.transact(checkpoint.begin, UNIVERSE)
    at = n = 0
    while at <= begun.last:
        chunk = store.read(checkpoint._read_chunk, UNIVERSE, at, begun.last)
        packed = zlib.compress(pack(chunk))
        assert store.transact(checkpoint.add, UNIVERSE, begun.number, n, packed)
        at, n = chunk.hi, n + 1
        heights.add(chunk.height)
        work(desk, 1)
    assert store.transact(checkpoint.install, UNIVERSE, begun.number, n, 1)
    assert len(heights) > 3
    desk.check()
    work(desk, 1)
    assert make(desk)
    work(desk, 1)
    assert head(desk).floor > 1


def test_only_one_is_made_at_a_time(desk: Desk) -> None:
    work(desk)
    assert desk.store.transact(checkpoint.begin, UNIVERSE) is not None
    assert not make(desk)
    assert not checkpoint.due(desk.store, UNIVERSE)


def test_one_that_stalled_is_superseded_and_can_do_no_harm(desk: Desk) -> None:
    work(desk)
    first = desk.store.transact(checkpoint.begin, UNIVERSE)
    assert desk.store.transact(checkpoint.add, UNIVERSE, first.number, 0, b"stale")
    desk.later(STALLED_NS)
    assert make(desk)
    assert not desk.store.transact(checkpoint.add, UNIVERSE, first.number, 1, b"stale")
    assert not desk.store.transact(checkpoint.install, UNIVERSE, first.number, 2, 10)
    desk.check()


def test_what_a_dead_maker_left_is_swept_by_the_next(desk: Desk) -> None:
    work(desk)
    first = desk.store.transact(checkpoint.begin, UNIVERSE)
    for n in range(5):
        desk.store.transact(checkpoint.add, UNIVERSE, first.number, n, b"stale")
    desk.later(STALLED_NS)
    make(desk)
    rows = desk.store.read(lambda txn: txn.scan(KEYS.checkpoints, KEYS.checkpoints + b"\xff"))
    assert not [row for _, row in rows if row == b"stale"]


def test_a_forgotten_task_is_not_in_the_next_one(desk: Desk) -> None:
    seq = desk.one(retain_ns=S)
    desk.complete(desk.leased(seq))
    make(desk)
    desk.later(S)
    desk.maintain()
    desk.one()
    make(desk)
    desk.one()
    make(desk)
    assert seq not in [task for c in chunks(desk) for task in [*c.fresh, *dict(c.tasks)]]


def test_several_makers_and_a_worker_at_once_on_a_store_of_its_own_process(tmp_path: Path) -> None:
    done = threading.Event()
    made: list[bool] = []
    with stores.open(tmp_path) as store:

        def keep_making() -> None:
            while not done.is_set():
                made.append(checkpoint.make(store, UNIVERSE))

        makers = [threading.Thread(target=keep_making) for _ in range(2)]
        for maker in makers:
            maker.start()
        try:
            for _ in range(100):
                store.transact(tasks.submit, UNIVERSE, Spec("work"), [New(b"x")] * 5)
                leased = store.transact(tasks.lease, UNIVERSE, "w", ["default"], 4)
                reports = [Report(grant.seq, grant.lease) for grant in leased.grants]
                store.transact(tasks.settle, UNIVERSE, "w", store.generation, reports)
        finally:
            done.set()
            for maker in makers:
                maker.join()

        def differ(txn: Txn) -> list[verify.Difference]:
            return [*verify.differences(txn, UNIVERSE), *recount.differences(txn, UNIVERSE)]

        assert store.read(differ) == []
        assert sum(made) > 2
        assert store.read(journal.head, KEYS.subject).floor > 1
