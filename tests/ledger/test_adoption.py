"""Rows that take over the outcome of another run: by the same moves, in one decision, and for good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.answers import Finished
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.lineage import Ancestry, Lineage, Origin, Places, Pointer, ranges_of
from holdfast.ledger.records import AdoptedRange, decode
from holdfast.ledger.states import State
from holdfast.store import open as open_store
from tests.ledger.rig import FAILED, OK, SKIPPED, Table, spans

MODULES = ("holdfast.ledger.lineage", "holdfast.ledger.board")

INPUT = int(ErrorClass.INPUT)


def adopted(table: Table, *rows: AdoptedRange, run: str = "base") -> int:
    count: int = table.take(table.board.adopt(run, rows, table.now_ns))
    return count


@pytest.mark.spec("002", "Transition Contract", "adopted rows move by the table, in one decision")
def test_adopted_rows_end_as_they_ended_there() -> None:
    table = Table(10)
    rows = [AdoptedRange(0, 3, 5, OK), AdoptedRange(3, 4, 9, SKIPPED)]
    rows.append(AdoptedRange(6, 8, 20, FAILED, INPUT))
    assert adopted(table, *rows) == 6
    assert table.states() == [3, 3, 3, 4, 0, 0, 5, 5, 0, 0]
    assert table.board.ledger.reason.tolist()[6:8] == [INPUT, INPUT]
    assert table.board.ended == [3, 1, 2, 0]
    assert not table.board.ledger.lease.any(), "a final row has no owner"
    assert not table.board.grants


@pytest.mark.spec("002", "Lease Ownership", "1: adopted rows are begun under an epoch of their own")
def test_an_adoption_takes_an_epoch() -> None:
    table = Table(10)
    adopted(table, AdoptedRange(0, 2, 0, OK))
    adopted(table, AdoptedRange(2, 4, 0, OK), run="other")
    assert table.board.epoch == 2
    assert table.grant().epoch == 3


@pytest.mark.spec("002", "Atomicity", "2: a row is adopted once; the second time halts the run")
@pytest.mark.parametrize("again", [AdoptedRange(1, 2, 0, OK), AdoptedRange(0, 4, 0, FAILED, INPUT)])
def test_a_row_that_is_not_unseen_cannot_be_adopted(again: AdoptedRange) -> None:
    table = Table(4)
    adopted(table, AdoptedRange(1, 2, 0, OK))
    with pytest.raises(IllegalTransition) as caught:
        adopted(table, again)
    assert caught.value.fields["seq"] == 1
    assert caught.value.fields["prior"] == "TERMINAL_SUCCESS"
    assert caught.value.fields["owner"] == "run/base"
    assert table.board.halted is not None
    assert table.states() == [0, 3, 0, 0], "none of its rows moved"


def test_rows_that_a_worker_holds_cannot_be_adopted() -> None:
    table = Table(4)
    table.grant(rows=2)
    with pytest.raises(IllegalTransition):
        adopted(table, AdoptedRange(0, 1, 0, OK))


@pytest.mark.parametrize(
    "rows",
    [
        [AdoptedRange(0, 9, 0, OK)],
        [AdoptedRange(2, 2, 0, OK)],
        [AdoptedRange(0, 2, 0, OK), AdoptedRange(1, 3, 5, OK)],
        [AdoptedRange(0, 1, -1, OK)],
        [AdoptedRange(0, 1, 0, int(State.TERMINAL_CANCEL))],
        [AdoptedRange(0, 1, 0, int(State.COMMITTED))],
    ],
)
def test_what_is_no_adoption_is_refused_and_halts_nothing(rows: list[AdoptedRange]) -> None:
    table = Table(4)
    with pytest.raises(Invalid):
        adopted(table, *rows)
    assert table.board.halted is None
    assert table.states() == [0, 0, 0, 0]


def test_what_is_left_is_handed_out_and_all_of_it_is_committed() -> None:
    table = Table(6, page_rows=4)
    adopted(table, AdoptedRange(0, 1, 0, OK), AdoptedRange(2, 5, 7, OK))
    grants = [table.begun(rows=6), table.begun(rows=6)]
    assert [span for grant in grants for span in spans(grant)] == [(1, 2), (5, 6)]
    for grant in grants:
        table.finish(grant)
    assert isinstance(table.ask(), Finished)
    assert table.commit() == 6
    assert table.states() == [7] * 6


@given(st.lists(st.sampled_from([0, OK, SKIPPED, FAILED]), max_size=40), st.integers(1, 9))
def test_a_replay_of_the_log_gives_the_same_board(codes: list[int], page_rows: int) -> None:
    table = Table(len(codes), page_rows=page_rows)
    wanted = np.array(codes, dtype=np.int64)
    seqs = np.flatnonzero(wanted)
    ranges = ranges_of(seqs, seqs + 100, wanted[seqs], steps=[True, False])
    rows = [
        AdoptedRange(lo, hi, from_lo, code, INPUT if code == FAILED else 0)
        for lo, hi, from_lo, code in ranges
    ]
    if rows:
        adopted(table, *rows)
    assert table.states() == codes
    log = [decode(codec.pack(entry)) for entry in table.log]
    assert log == table.log
    assert Board.replay(log).dump() == table.board.dump()
    assert Board.load(table.board.dump()).dump() == table.board.dump()


# -- lineage -------------------------------------------------------------------------------------


def test_ranges_end_where_a_column_breaks() -> None:
    seqs = np.array([0, 1, 2, 5, 6, 7])
    places = np.array([10, 11, 20, 21, 22, 23])
    codes = np.array([3, 3, 3, 3, 3, 4])
    assert ranges_of(seqs, places, codes, steps=[True, False]) == [
        (0, 2, 10, 3),
        (2, 3, 20, 3),
        (5, 7, 21, 3),
        (7, 8, 23, 4),
    ]
    assert ranges_of(seqs[:0], places[:0]) == []


def test_places_are_found_by_seq() -> None:
    places = Places([(2, 4, 0, 100), (6, 7, 1, 50)])
    numbers, seqs = places.find(np.array([0, 2, 3, 4, 6, 7]))
    assert numbers.tolist() == [-1, 0, 0, -1, 1, -1]
    assert seqs.tolist() == [-1, 100, 101, -1, 50, -1]
    assert Places([]).find(np.array([1]))[0].tolist() == [-1]


def test_ancestry_cuts_at_what_is_asked_for(tmp_path: Path) -> None:
    record = runs.RunRecord("b", "job", size=20, policy=Policy(page_rows=8), base_run="a")
    pages = {
        0: Lineage(["a", "z"], [(1, 8, 0, 11, OK)], [(1, 8, 1, 0)]),
        1: Lineage(["a"], [(8, 12, 0, 18, OK)], []),
    }
    with open_store(str(tmp_path), bootstrap=True) as store:
        for page, lineage in pages.items():
            store.transact(_put, runs.lineage_key("b", page), codec.pack(lineage))
        ancestry = Ancestry(store, record)
        assert ancestry.adopted(3, 10) == [
            Pointer(3, 8, "a", 13, OK),
            Pointer(8, 10, "a", 18, OK),
        ]
        assert ancestry.origins(0, 20) == [Origin(1, 8, "z", 0)]
        assert ancestry.adopted(5, 5) == []
        alone = Ancestry(store, runs.RunRecord("b", "job", size=20))
        assert alone.adopted(0, 20) == []


def _put(txn: object, key: bytes, value: bytes) -> None:
    txn.put(key, value)  # type: ignore[attr-defined]


# -- runs that rest on others --------------------------------------------------------------------


def test_a_pinned_run_is_not_deleted(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        for run_id, created_ns in (("a", 1), ("b", 2)):
            record = runs.RunRecord(
                run_id, "job", runs.Status.FINISHED, created_ns, policy=Policy()
            )
            store.transact(runs.create, record)
        assert [one.run_id for one in store.read(runs.of_name, "job")] == ["b", "a"]
        assert store.transact(runs.pin, "a", "b")
        assert store.read(runs.rests_on, "b") == ["a"]
        with pytest.raises(runs.RunPinned) as caught:
            store.transact(runs.delete, "a", 100)
        assert caught.value.fields["by"] == "b"
        while store.transact(runs.delete, "b", 100):
            pass
        assert store.read(runs.pinned_by, "a") == []
        while store.transact(runs.delete, "a", 100):
            pass
        assert store.read(runs.of_name, "job") == []
        assert not store.transact(runs.pin, "a", "b"), "there is nothing left to rest on"


def test_a_run_that_is_being_deleted_cannot_be_rested_on(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        store.transact(runs.create, runs.RunRecord("a", "job", runs.Status.FINISHED))
        for n in range(3):
            store.transact(_put, runs.block_key("a", n), b"x")
        assert store.transact(runs.delete, "a", 1) == 1
        assert not store.transact(runs.pin, "a", "b")


def test_an_open_run_can_be_superseded_and_deleted(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        store.transact(runs.create, runs.RunRecord("a", "job", runs.Status.OPEN))
        found = store.transact(runs.move, "a", runs.Event.SUPERSEDE)
        assert found.status is runs.Status.SUPERSEDED
        assert found.finished_ns > 0
        while store.transact(runs.delete, "a", 100):
            pass
