"""Adoption: rows take the outcome of another run in one decision, by the moves of the transition table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.events import AdoptedRange, decode_entry
from holdfast.ledger.lineage import (
    OutcomePointer,
    PageLineage,
    RowOrigin,
    RunLineage,
    SeqMap,
    compress_ranges,
)
from holdfast.ledger.replies import AllRowsFinal
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.states import RowState
from holdfast.store import open as open_store
from tests.ledger.scheduler_rig import FAILED, OK, SKIPPED, SchedulerRig, spans

MODULES = ("holdfast.ledger.lineage", "holdfast.ledger.run_scheduler")

INPUT = int(ErrorClass.INPUT)


def adopt(rig: SchedulerRig, *rows: AdoptedRange, run: str = "base") -> int:
    count: int = rig.log_decision(rig.scheduler.adopt(run, rows, rig.now_ns))
    return count


@pytest.mark.spec(
    "002",
    "Transition Contract",
    "adopted rows have the states of their source run, by legal transitions in one decision",
)
def test_adopted_rows_have_the_states_of_their_source_run() -> None:
    rig = SchedulerRig(10)
    rows = [AdoptedRange(0, 3, 5, OK), AdoptedRange(3, 4, 9, SKIPPED)]
    rows.append(AdoptedRange(6, 8, 20, FAILED, INPUT))
    assert adopt(rig, *rows) == 6
    assert rig.states() == [3, 3, 3, 4, 0, 0, 5, 5, 0, 0]
    assert rig.scheduler.ledger.reason.tolist()[6:8] == [INPUT, INPUT]
    assert rig.scheduler.ended == [3, 1, 2, 0]
    assert not rig.scheduler.ledger.owner_epochs.any(), "a final row has no owner"
    assert not rig.scheduler.grants


@pytest.mark.spec("002", "Lease Ownership", "1: each adoption uses a new epoch")
def test_adoption_uses_a_new_epoch() -> None:
    rig = SchedulerRig(10)
    adopt(rig, AdoptedRange(0, 2, 0, OK))
    adopt(rig, AdoptedRange(2, 4, 0, OK), run="other")
    assert rig.scheduler.epoch == 2
    assert rig.grant().epoch == 3


@pytest.mark.spec("002", "Atomicity", "2: adoption of a row that is not UNSEEN halts the run")
@pytest.mark.parametrize("again", [AdoptedRange(1, 2, 0, OK), AdoptedRange(0, 4, 0, FAILED, INPUT)])
def test_adoption_of_a_row_that_is_not_unseen_halts_the_run(again: AdoptedRange) -> None:
    rig = SchedulerRig(4)
    adopt(rig, AdoptedRange(1, 2, 0, OK))
    with pytest.raises(IllegalTransition) as caught:
        adopt(rig, again)
    assert caught.value.fields["seq"] == 1
    assert caught.value.fields["prior"] == "TERMINAL_SUCCESS"
    assert caught.value.fields["owner"] == "run/base"
    assert rig.scheduler.halted is not None
    assert rig.states() == [0, 3, 0, 0], "none of its rows moved"


def test_adoption_of_a_granted_row_raises_illegal_transition() -> None:
    rig = SchedulerRig(4)
    rig.grant(rows=2)
    with pytest.raises(IllegalTransition):
        adopt(rig, AdoptedRange(0, 1, 0, OK))


@pytest.mark.parametrize(
    "rows",
    [
        [AdoptedRange(0, 9, 0, OK)],
        [AdoptedRange(2, 2, 0, OK)],
        [AdoptedRange(0, 2, 0, OK), AdoptedRange(1, 3, 5, OK)],
        [AdoptedRange(0, 1, -1, OK)],
        [AdoptedRange(0, 1, 0, int(RowState.TERMINAL_CANCEL))],
        [AdoptedRange(0, 1, 0, int(RowState.COMMITTED))],
    ],
)
def test_invalid_adoption_is_refused_and_does_not_halt_the_run(rows: list[AdoptedRange]) -> None:
    rig = SchedulerRig(4)
    with pytest.raises(Invalid):
        adopt(rig, *rows)
    assert rig.scheduler.halted is None
    assert rig.states() == [0, 0, 0, 0]


def test_rows_without_an_adopted_outcome_are_granted_and_all_rows_commit() -> None:
    rig = SchedulerRig(6, page_rows=4)
    adopt(rig, AdoptedRange(0, 1, 0, OK), AdoptedRange(2, 5, 7, OK))
    grants = [rig.grant_begun(rows=6), rig.grant_begun(rows=6)]
    assert [span for grant in grants for span in spans(grant)] == [(1, 2), (5, 6)]
    for grant in grants:
        rig.finish(grant)
    assert isinstance(rig.claim(), AllRowsFinal)
    assert rig.commit() == 6
    assert rig.states() == [7] * 6


@given(st.lists(st.sampled_from([0, OK, SKIPPED, FAILED]), max_size=40), st.integers(1, 9))
def test_replay_of_a_log_with_adoptions_restores_the_scheduler(
    codes: list[int], page_rows: int
) -> None:
    rig = SchedulerRig(len(codes), page_rows=page_rows)
    wanted = np.array(codes, dtype=np.int64)
    seqs = np.flatnonzero(wanted)
    ranges = compress_ranges(seqs, seqs + 100, wanted[seqs], steps=[True, False])
    rows = [
        AdoptedRange(lo, hi, from_lo, code, INPUT if code == FAILED else 0)
        for lo, hi, from_lo, code in ranges
    ]
    if rows:
        adopt(rig, *rows)
    assert rig.states() == codes
    log = [decode_entry(codec.pack(entry)) for entry in rig.log]
    assert log == rig.log
    assert RunScheduler.replay(log).dump() == rig.scheduler.dump()
    assert RunScheduler.load(rig.scheduler.dump()).dump() == rig.scheduler.dump()


# -- lineage -------------------------------------------------------------------------------------


def test_compress_ranges_splits_where_a_column_breaks() -> None:
    seqs = np.array([0, 1, 2, 5, 6, 7])
    source_seqs = np.array([10, 11, 20, 21, 22, 23])
    codes = np.array([3, 3, 3, 3, 3, 4])
    assert compress_ranges(seqs, source_seqs, codes, steps=[True, False]) == [
        (0, 2, 10, 3),
        (2, 3, 20, 3),
        (5, 7, 21, 3),
        (7, 8, 23, 4),
    ]
    assert compress_ranges(seqs[:0], source_seqs[:0]) == []


def test_seq_map_finds_source_seqs() -> None:
    seq_map = SeqMap([(2, 4, 0, 100), (6, 7, 1, 50)])
    numbers, seqs = seq_map.find(np.array([0, 2, 3, 4, 6, 7]))
    assert numbers.tolist() == [-1, 0, 0, -1, 1, -1]
    assert seqs.tolist() == [-1, 100, 101, -1, 50, -1]
    assert SeqMap([]).find(np.array([1]))[0].tolist() == [-1]


def test_run_lineage_clips_pointers_to_the_requested_range(tmp_path: Path) -> None:
    record = runs.RunRecord("b", "job", size=20, policy=RunPolicy(page_rows=8), base_run="a")
    pages = {
        0: PageLineage(["a", "z"], [(1, 8, 0, 11, OK)], [(1, 8, 1, 0)]),
        1: PageLineage(["a"], [(8, 12, 0, 18, OK)], []),
    }
    with open_store(str(tmp_path), bootstrap=True) as store:
        for page, lineage in pages.items():
            store.transact(_put, runs.lineage_key("b", page), codec.pack(lineage))
        run_lineage = RunLineage(store, record)
        assert run_lineage.adopted(3, 10) == [
            OutcomePointer(3, 8, "a", 13, OK),
            OutcomePointer(8, 10, "a", 18, OK),
        ]
        assert run_lineage.origins(0, 20) == [RowOrigin(1, 8, "z", 0)]
        assert run_lineage.adopted(5, 5) == []
        without_base = RunLineage(store, runs.RunRecord("b", "job", size=20))
        assert without_base.adopted(0, 20) == []


def _put(txn: object, key: bytes, value: bytes) -> None:
    txn.put(key, value)  # type: ignore[attr-defined]


# -- pinned runs ---------------------------------------------------------------------------------


def test_delete_of_a_pinned_run_raises_run_pinned(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        for run_id, created_ns in (("a", 1), ("b", 2)):
            record = runs.RunRecord(
                run_id, "job", runs.RunLifecycle.FINISHED, created_ns, policy=RunPolicy()
            )
            store.transact(runs.create, record)
        assert [listed.run_id for listed in store.read(runs.list_runs_of, "job")] == ["b", "a"]
        assert store.transact(runs.pin, "a", "b")
        assert store.read(runs.list_pinned_runs, "b") == ["a"]
        with pytest.raises(runs.RunPinned) as caught:
            store.transact(runs.delete_rows, "a", 100)
        assert caught.value.fields["by"] == "b"
        while store.transact(runs.delete_rows, "b", 100):
            pass
        assert store.read(runs.list_pinning_runs, "a") == []
        while store.transact(runs.delete_rows, "a", 100):
            pass
        assert store.read(runs.list_runs_of, "job") == []
        assert not store.transact(runs.pin, "a", "b"), "there is nothing left to rest on"


def test_run_that_is_being_deleted_cannot_be_pinned(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        store.transact(runs.create, runs.RunRecord("a", "job", runs.RunLifecycle.FINISHED))
        for n in range(3):
            store.transact(_put, runs.block_key("a", n), b"x")
        assert store.transact(runs.delete_rows, "a", 1) == 1
        assert not store.transact(runs.pin, "a", "b")


def test_open_run_can_be_superseded_and_deleted(tmp_path: Path) -> None:
    with open_store(str(tmp_path), bootstrap=True) as store:
        store.transact(runs.create, runs.RunRecord("a", "job", runs.RunLifecycle.OPEN))
        record = store.transact(runs.change_status, "a", runs.RunEvent.SUPERSEDE)
        assert record.status is runs.RunLifecycle.SUPERSEDED
        assert record.finished_ns > 0
        while store.transact(runs.delete_rows, "a", 100):
            pass
