"""The office of a ledger service in this process, on a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from holdfast.clock import MS, S, SimClock, iso_time
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.classes import Policy
from holdfast.ledger.log import RunLog, open_run
from holdfast.spark import office, wire
from holdfast.spark.desk import Desk
from holdfast.spark.journal import schema_bytes
from holdfast.spark.office import Office
from holdfast.spark.rows import stream_of
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from tests.spark.service_rig import RESULT, Grant, report, seal, step, table

HOUR = 3600 * S
ROWS = 20
WAIT_S = 60.0


class Offices:
    """A run on a store in memory, and the office that serves it."""

    def __init__(self, *, sealed: bool = True) -> None:
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        record = runs.RunRecord(
            run_id="r-1",
            name="job",
            created_ns=1,
            key=["id"],
            result_schema=schema_bytes(RESULT),
            policy=Policy(),
        )
        self.store.transact(runs.create, record)
        self.lease: Lease = self.store.transact(
            leases.acquire, runs.lease_resource("job"), "service", "1", 1000 * HOUR
        )
        self.desk = Desk(None, RunLog(self.store, "r-1", self.lease))
        self.office = Office(self.store, self.desk, record, 0.0, self.clock)
        if not sealed:
            return
        block = self.office.put_block(memoryview(stream_of(table(0, ROWS))))
        self.office.seal(seal([(block.n, ROWS)]))

    def record(self) -> runs.RunRecord:
        return self.store.read(runs.the, "r-1")

    def claim(self, owner: str) -> Grant:
        stepped, _ = self.office.step(owner, step(wire.Claim(10, 5)), memoryview(b""))
        granted = stepped.grant
        assert granted is not None
        return Grant(granted.epoch, [], [], granted.begun, granted.alone, table(0, 0))

    def lie(self, owner: str) -> IllegalTransition:
        """Report the end of a row that was never begun."""
        move, data = report(self.claim(owner), done=[(7, 8)])
        with pytest.raises(IllegalTransition) as refused:
            self.office.step(owner, step(None, move), memoryview(data))
        return refused.value

    def restart(self) -> Office:
        """Another process takes over: it has the log and the record, and nothing else."""
        self.desk.close()
        log, board = open_run(self.store, "r-1", self.lease)
        self.desk = Desk(board, log)
        self.office = Office(self.store, self.desk, self.record(), 0.0, self.clock)
        return self.office


@pytest.fixture
def offices() -> Iterator[Offices]:
    made = Offices()
    yield made
    made.desk.close()
    made.store.close()


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: it says seq, prior, attempted, owner and wall clock",
    module="holdfast.spark.office",
)
@pytest.mark.parametrize("hours", [-5, 9])
def test_an_illegal_move_is_told_by_the_wall_clock(offices: Offices, hours: int) -> None:
    # The wall clock is set while the store is open: store time does not follow it.
    offices.clock.step_wall(hours * HOUR)
    store_ns, wall_ns = offices.store.now_ns(), offices.clock.wall_ns()
    assert abs(wall_ns - store_ns - hours * HOUR) < S
    told = offices.lie("child/liar").fields
    assert (told["seq"], told["prior"], told["attempted"]) == (7, "DISPATCHED", "TERMINAL_SUCCESS")
    assert "child/liar" in told["owner"]
    assert abs(told["wall_ns"] - wall_ns) < S
    assert abs(told["store_ns"] - store_ns) < S
    assert (told["wall_time"], told["store_time"]) == (
        iso_time(told["wall_ns"]),
        iso_time(told["store_ns"]),
    )
    record = offices.record()
    assert record.status is runs.Status.HALTED
    assert f"at {told['wall_time']} (store time {told['store_time']})" in record.halted


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: the wall clock of the illegal move, not of the process that tells it later",
    module="holdfast.spark.office",
)
def test_a_service_that_takes_over_tells_the_time_of_the_illegal_move(offices: Offices) -> None:
    offices.clock.step_wall(9 * HOUR)
    # Away from the edge of a millisecond, which is where times are cut.
    offices.clock.advance(MS // 2)
    wall_ns = offices.clock.wall_ns()
    offices.lie("child/liar")
    halted = offices.desk.board.halted
    assert halted is not None
    # The record of the run is as if the process had died before it could write it.
    as_before = replace(offices.record(), halted="", status=runs.Status.OPEN)
    offices.store.transact(runs.put, as_before)
    offices.clock.advance(3 * HOUR)
    offices.restart().mark_halted(halted)
    record = offices.record()
    assert record.status is runs.Status.HALTED
    assert f"at {iso_time(wall_ns)} (store time {iso_time(halted.decided_ns)})" in record.halted


def test_blocks_out_of_order_are_stopped_when_a_merge_could_not_hold_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = memoryview(stream_of(table(0, ROWS)))
    monkeypatch.setattr(office, "SORT_BYTES", 3 * len(block))
    run = Offices(sealed=False)
    assert [run.office.put_block(block, in_order=False).n for _ in range(5)] == [0, 1, 2, -1, -1]
    assert run.office.status().taken_bytes == 3 * len(block)
    run.office.drop_input()
    assert run.office.status().taken_bytes == 0
    assert run.store.read(runs.block, "r-1", 0) is None
    assert [run.office.put_block(block).n for _ in range(5)] == [3, 4, 5, 6, 7]
    run.office.seal(seal([(5, ROWS)]))
    assert run.record().blocks == [(5, ROWS)]
    with pytest.raises(Invalid):
        run.office.drop_input()


def test_blocks_of_the_first_pass_are_stopped_once_spark_sorts_the_input() -> None:
    block = memoryview(stream_of(table(0, ROWS)))
    run = Offices(sealed=False)
    assert run.office.put_block(block, sorted=False).n == 0
    run.office.drop_input()
    assert run.office.put_block(block, in_order=False, sorted=False).n == -1
    assert run.office.put_block(block, sorted=True).n == 1
    assert not run.office.status().needs_sort
    # A service that was killed meanwhile learns it from the first sorted block.
    again = Offices(sealed=False).office
    assert again.put_block(block, sorted=True).n == 0
    assert again.put_block(block, sorted=False).n == -1


def test_a_claim_that_waits_is_answered_by_rows_that_come_back(offices: Offices) -> None:
    """A closed connection frees rows: the claim that waits for them is answered in the same decision."""
    held: list[int] = []
    while True:
        asked = replace(step(wire.Claim(20, 20)), held=held)
        answer, _ = offices.office.step("child/1", asked, memoryview(b""))
        if answer.grant is None:
            break
        held.append(answer.grant.epoch)
    found: list[wire.Stepped] = []

    def ask() -> None:
        asked = step(wire.Claim(5, 5), wait_ms=5000)
        found.append(offices.office.step("child/2", asked, memoryview(b""))[0])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while True:
        with offices.desk.lock:
            if offices.desk.service.waiting:
                offices.office.gone("child/1")
                break
    thread.join(WAIT_S)
    assert [answer.state for answer in found] == ["granted"]
    assert found[0].grant is not None
    assert found[0].grant.epoch > held[-1]
