"""Which runs of a store are deleted, and how."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.clock import SYSTEM, S
from holdfast.durable import lease
from holdfast.ledger import prune, runs
from holdfast.ledger.runs import Event, RunPinned, RunRecord, Status
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn

MODULES = ("holdfast.ledger.prune",)

OVER = Status.FINISHED


def record(run_id: str, at: int, name: str = "labels", **fields: object) -> RunRecord:
    told = {"status": OVER, "created_ns": at, "finished_ns": at + 5} | fields
    return RunRecord(run_id, name, **told)  # type: ignore[arg-type]


def going(records: list[RunRecord], **options: object) -> set[str]:
    verdicts = prune.judge(records, **options)  # type: ignore[arg-type]
    return {verdict.record.run_id for verdict in verdicts if verdict.goes}


FIVE = [record(f"r{at}", at) for at in range(5)]
TABLE = {"kind": "table", "table": "cat.db.labels"}
DAILY = [record(f"d{at}", at, base_run=f"d{at - 1}" if at else "") for at in range(10)]


@pytest.mark.parametrize(
    ("records", "options", "gone"),
    [
        (FIVE, {"keep": 3}, {"r0", "r1"}),
        (FIVE, {"keep": 1}, {"r0", "r1", "r2", "r3"}),
        (FIVE, {"keep": 9}, set()),
        # Each name has its own newest ones.
        ([*FIVE, record("x", 0, "other")], {"keep": 4}, {"r0"}),
        # Only what ended before the bound.
        (FIVE, {"keep": 1, "before_ns": 7}, {"r0", "r1"}),
        # A kept run needs its base, its input and what it retries, and so on.
        (
            [record("a", 1), record("b", 2, base_run="a"), record("c", 3, retry_of="b")],
            {"keep": 1},
            set(),
        ),
        ([record("a", 1), record("b", 2), record("c", 3, input_run="a")], {"keep": 1}, {"b"}),
        # A base that is not shown itself needs no base: a name whose input grows every day does not keep all runs.
        (DAILY, {"keep": 3}, {f"d{at}" for at in range(6)}),
        (DAILY, {"keep": 1}, {f"d{at}" for at in range(8)}),
        (DAILY, {"keep": 2}, {f"d{at}" for at in range(7)}),
        # ... but the output is followed from the last run that has written it.
        (
            [
                record("a", 1),
                record("b", 2, base_run="a"),
                record("c", 3, base_run="b", status=Status.CANCELLED),
                record("d", 4, base_run="c", status=Status.CANCELLED),
                record("e", 5, base_run="d", status=Status.OPEN),
            ],
            {"keep": 1},
            {"a"},
        ),
        # A table that the driver writes has the rows of a run that says so.
        (
            [
                record("a", 1, sink=TABLE, config={runs.WRITTEN: "1"}),
                record("b", 2, base_run="a", sink=TABLE),
                record("c", 3, base_run="b", sink=TABLE),
            ],
            {"keep": 1},
            set(),
        ),
        # ... but a run that holds the input of one that stays does.
        (
            [record("a", 1), record("b", 2, input_run="a"), record("c", 3, base_run="b")],
            {"keep": 1},
            set(),
        ),
        # The newest can be resumed; an older one cannot, whatever its status says.
        (
            [
                record("a", 1, status=Status.OPEN),
                record("b", 2, status=Status.OPEN),
                record("c", 3),
            ],
            {"keep": 1},
            {"a", "b"},
        ),
        ([record("a", 1, status=Status.OPEN)], {"keep": 1}, set()),
        # What is half deleted goes, however new it is.
        ([record("a", 1), record("b", 2, deleting=True)], {"keep": 3}, {"b"}),
        ([], {}, set()),
    ],
)
def test_old_runs_go_that_no_kept_run_needs(
    records: list[RunRecord], options: dict[str, object], gone: set[str]
) -> None:
    assert going(records, **options) == gone
    assert going(records[::-1], **options) == gone


def test_a_run_that_is_kept_has_a_reason() -> None:
    told = prune.judge(FIVE, keep=2, live=frozenset({"labels"}))
    assert [verdict.reason for verdict in told] == [
        "a driver is at work on it",
        "one of the newest 2",
        "",
        "",
        "",
    ]


def _put(txn: Txn, key: bytes) -> None:
    txn.put(key, b"x")


def filled(store: Store, *names: str) -> None:
    """Runs of one name, oldest first, each with a row of input."""
    for at, run_id in enumerate(names):
        store.transact(runs.create, RunRecord(run_id, "labels", created_ns=at))
        store.transact(_put, runs.block_key(run_id, 0))


def rows_left(store: Store) -> int:
    space = schema.prefix(schema.Space.RUN)
    return len(store.read(lambda txn: txn.scan(space, tuples.after(space))))


def test_a_deletion_leaves_nothing_and_frees_the_name(any_store: Store) -> None:
    filled(any_store, "a", "b")
    any_store.transact(runs.move, "a", Event.CANCEL)
    assert prune.delete(any_store, "labels", ["a"]) == 2
    assert any_store.read(runs.get, "a") is None
    assert any_store.read(runs.the, "b").run_id == "b"
    # One that could be resumed goes as well, when it is named.
    prune.delete(any_store, "labels", ["b"])
    assert rows_left(any_store) == 0
    any_store.transact(lease.acquire, runs.lease_resource("labels"), "driver", "1", S)


def test_a_run_of_another_name_is_left_alone(any_store: Store) -> None:
    filled(any_store, "a")
    assert prune.delete(any_store, "other", ["a", "none"]) == 0
    assert any_store.read(runs.the, "a")


def test_nothing_is_deleted_while_a_driver_has_the_name(any_store: Store) -> None:
    filled(any_store, "a")
    held = any_store.transact(lease.acquire, runs.lease_resource("labels"), "driver", "1", 100 * S)
    assert any_store.read(prune.live_names, ["labels", "other"]) == {"labels"}
    with pytest.raises(runs.RunAtWork):
        prune.delete(any_store, "labels", ["a"])
    assert any_store.read(runs.the, "a")
    any_store.transact(lease.release, held)
    assert prune.delete(any_store, "labels", ["a"])


def test_a_pinned_run_is_deleted_after_the_run_that_rests_on_it(any_store: Store) -> None:
    filled(any_store, "a", "b")
    assert any_store.transact(runs.pin, "a", "b")
    with pytest.raises(RunPinned):
        prune.delete(any_store, "labels", ["a"])
    prune.delete(any_store, "labels", ["b", "a"])
    assert rows_left(any_store) == 0


def test_the_input_of_a_pinned_run_goes_and_its_outcomes_stay(any_store: Store) -> None:
    filled(any_store, "first", "second")
    first = any_store.read(runs.the, "first")
    any_store.transact(_put, runs.match_key(first.run_id, 0))
    any_store.transact(runs.pin, first.run_id, "newer")
    before = rows_left(any_store)
    stayed = prune.prune(any_store, "labels", [first.run_id])
    assert stayed == {first.run_id: "rows of run newer rest on it; its input is deleted"}
    after = any_store.read(runs.the, first.run_id)
    assert after.input_dropped
    assert after.blocks == []
    assert not after.deleting
    assert any_store.read(runs.block, first.run_id, 0) is None
    assert before - rows_left(any_store) >= 2
    # Again: nothing is left to do.
    left = rows_left(any_store)
    assert prune.drop_input(any_store, "labels", first.run_id)
    assert rows_left(any_store) == left
    any_store.transact(runs.unpin, first.run_id, "newer")
    assert prune.prune(any_store, "labels", [first.run_id]) == {}


def test_the_input_of_a_run_that_can_be_resumed_stays(any_store: Store) -> None:
    any_store.transact(runs.create, record("r1", 1, status=Status.OPEN, blocks=[(0, 5)]))
    assert not prune.drop_input(any_store, "labels", "r1")
    assert not any_store.read(runs.the, "r1").input_dropped


def test_the_input_that_another_run_reads_stays(any_store: Store) -> None:
    filled(any_store, "first", "second", "third")
    second = any_store.read(runs.the, "second")
    any_store.transact(runs.put, msgspec.structs.replace(second, input_run="first"))
    any_store.transact(runs.pin, "first", "second")
    assert prune.prune(any_store, "labels", ["first"]) == {"first": "rows of run second rest on it"}
    assert any_store.read(runs.block, "first", 0) is not None


def test_a_slow_deletion_of_objects_keeps_its_lease(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "LEASE_NS", S // 5)

    class Slow:
        def reach(self, record: RunRecord) -> None: ...

        def delete(self, record: RunRecord) -> None:
            SYSTEM.sleep(0.6)

        def delete_input(self, record: RunRecord) -> None: ...

        def sweep(self, store: Store, records: object) -> None: ...

    any_store.transact(runs.create, record("a", 1, spool="/spool"))
    assert prune.prune(any_store, "labels", ["a"], Slow()) == {}
    assert any_store.read(runs.get, "a") is None
