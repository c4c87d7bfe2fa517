"""A run that stops by its own rules: when, by what count, and that a replay of its log says the same."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.answers import Grant, Stop
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.position import Dump
from holdfast.ledger.records import Done, Stopped
from holdfast.ledger.stop_rules import ERRORS_KEPT, StopRules, add_errors
from tests.ledger.rig import FAILED, OK, Table

INPUT, TRANSIENT = int(ErrorClass.INPUT), int(ErrorClass.TRANSIENT)


class Stage:
    """Rows that end one by one on a table with stop rules."""

    def __init__(self, size: int = 100, **rules: Any) -> None:
        self.table = Table(size, stop=StopRules(**rules))
        self.board = self.table.board

    def end(self, grant: Grant, seq: int, code: int, text: str = "", kind: int = INPUT) -> Any:
        n = self.table._numbers.get(grant.epoch, 0) + 1
        self.table._numbers[grant.epoch] = n
        done = [Done(seq, seq + 1, code, 0 if code == OK else kind)]
        begin = [(seq + 50, seq + 51)] if seq + 50 < self.board.size else []
        return self.table.take(
            self.board.advance(
                grant.epoch, n, b"%d" % n, done=done, begin=begin, now_ns=self.table.now_ns,
                errors={seq: text},
            )
        )  # fmt: skip

    def check_replay(self) -> None:
        again = Board.replay(self.table.log)
        assert again.dump() == self.board.dump()
        assert again.stopped == self.board.stopped
        loaded = Board.load(self.board.dump())
        assert loaded.dump() == self.board.dump()
        assert loaded.counted() == self.board.counted()


def test_failures_stop_a_run_and_what_is_begun_ends() -> None:
    stage = Stage(failures=3)
    grant = stage.table.grant(rows=100, begin=50)
    assert [stage.end(grant, at, FAILED).stop for at in range(2)] == ["", ""]
    taken = stage.end(grant, 2, FAILED)
    # The report that reaches the bound begins nothing more.
    assert (taken.stop, taken.begun) == ("stopped", False)
    assert stage.board.stopped is not None
    assert stage.board.stopped.why == "3 rows failed (failures=3)"
    assert stage.table.ask("other") == Stop("stopped")
    # 50 rows at first, two by the reports before.
    assert stage.board.ledger.in_flight_count == 49
    for at in range(3, 52):
        assert stage.end(grant, at, OK).stop == "stopped"
    assert stage.board.ledger.in_flight_count == 0
    assert sum(isinstance(entry, Stopped) for entry in stage.table.log) == 1
    stage.check_replay()


def test_a_run_that_is_resumed_counts_anew() -> None:
    stage = Stage(failures=3)
    grant = stage.table.grant(rows=100, begin=50)
    for at in range(3):
        stage.end(grant, at, FAILED)
    stage.table.log += stage.board.resume(stage.table.now_ns)
    assert stage.board.stopped is None
    assert stage.board.counted() == (0, 0, 0.0)
    assert stage.end(grant, 3, FAILED).stop == ""
    assert stage.end(grant, 4, FAILED).stop == ""
    assert stage.end(grant, 5, FAILED).stop == "stopped"
    stage.check_replay()


def test_a_share_counts_only_after_enough_rows_ended() -> None:
    stage = Stage(share=0.5, of=10)
    grant = stage.table.grant(rows=100, begin=50)
    for at in range(9):
        assert stage.end(grant, at, FAILED if at < 5 else OK).stop == ""
    assert stage.end(grant, 9, OK).stop == "stopped"
    assert stage.board.stopped is not None
    assert stage.board.stopped.why == "5 of 10 rows failed, 50.0% (share=0.5, of=10)"
    stage.check_replay()


def test_only_rows_that_failed_for_good_count() -> None:
    stage = Stage(failures=1)
    grant = stage.table.grant(rows=100, begin=50)
    assert stage.end(grant, 0, FAILED, kind=TRANSIENT).stop == ""
    assert stage.board.stopped is None


def test_equal_errors_are_counted_by_class_and_normalised_text() -> None:
    stage = Stage(same_error=3)
    grant = stage.table.grant(rows=100, begin=50)
    for at in range(2):
        assert stage.end(grant, at, FAILED, f"Error: no user {at}").stop == ""
        assert stage.end(grant, 10 + at, FAILED, f"Error: no file '{at}'").stop == ""
    # Another class is another error.
    assert stage.end(grant, 20, FAILED, "Error: no user 7", int(ErrorClass.SCHEMA)).stop == ""
    stage.check_replay()
    assert stage.end(grant, 30, FAILED, "Error: no user 9").stop == "stopped"
    assert stage.board.stopped is not None
    assert stage.board.stopped.why == (
        "3 rows failed with the same error, input: Error: no user <n> (same_error=3)"
    )
    stage.check_replay()


def test_cost_stops_a_run() -> None:
    stage = Stage(cost=1.0)
    grant = stage.table.grant(rows=100, begin=50)
    stage.table.log += stage.board.spend(0.6, stage.table.now_ns)
    assert stage.end(grant, 0, OK).stop == ""
    stage.table.log += stage.board.spend(0.5, stage.table.now_ns)
    assert stage.board.stopped is not None
    assert stage.board.stopped.why == "the calls cost 1.1 (cost=1)"
    assert stage.end(grant, 1, OK).stop == "stopped"
    stage.check_replay()


def test_rows_that_are_lost_for_good_count_too() -> None:
    table = Table(10, attempts_max=1, stop=StopRules(same_error=3))
    table.begun(rows=5)
    table.expire()
    assert table.board.stopped is not None
    assert table.board.stopped.why.startswith("5 rows failed with the same error")
    assert Board.replay(table.log).dump() == table.board.dump()


def test_the_last_row_stops_nothing() -> None:
    stage = Stage(1, failures=1)
    grant = stage.table.grant(rows=1, begin=1)
    stage.end(grant, 0, FAILED)
    assert stage.board.finished
    assert stage.board.stopped is None


def test_without_rules_the_log_tells_nothing_of_them() -> None:
    stage = Stage()
    grant = stage.table.grant(rows=100, begin=50)
    stage.end(grant, 0, FAILED, "x")
    assert stage.board.spend(5.0, 1) == []
    assert stage.board.resume(1) == []
    assert [type(entry).__name__ for entry in stage.table.log] == ["Opened", "Leased", "Advanced"]


def test_errors_that_differ_all_take_bounded_memory() -> None:
    counts: dict[int, int] = {-1: 5}
    for at in range(ERRORS_KEPT + 10):
        counts = add_errors(counts, [(at, 1)])
    assert len(counts) <= ERRORS_KEPT
    assert counts[-1] == 5


def test_a_checkpoint_of_an_older_version_is_read() -> None:
    table = Table(10)
    fields = codec.unpack(table.board.dump())
    older = codec.pack(fields[:17])
    assert Board.load(older).dump() == table.board.dump()
    assert codec.pack(codec.unpack_as(Dump, older)) == table.board.dump()


@pytest.mark.parametrize("rules", [{"failures": -1}, {"share": 1.5}, {"cost": -0.1}])
def test_bounds_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        StopRules(**rules)
