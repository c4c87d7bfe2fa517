"""Chains of inputs that grow, in this process: the real office on a store in memory, and a worker that
a test can stop at any row. `Model` says what must come of it, in plain dictionaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from holdfast.clock import S, SimClock
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.log import RunLog, load, open_run
from holdfast.ledger.records import Done
from holdfast.ledger.states import State
from holdfast.spark import wire
from holdfast.spark.desk import Desk
from holdfast.spark.journal import Input, Outcomes, schema_bytes
from holdfast.spark.match import HASHES
from holdfast.spark.office import Office
from holdfast.spark.row_reports import ranges_of
from holdfast.spark.rows import message_of, stream_of, table_of
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

FOREVER = 1 << 60
RESULT = pa.schema([pa.field("y", pa.string())])
INPUT = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.int64())])

Row = tuple[int, int]
World = dict[int, int]


class Called(NamedTuple):
    row: Row
    key: str


def ending(text: int, mended: bool) -> State:
    """How the function ends a row: most succeed, some are skipped, some fail until it is mended."""
    if text % 7 == 6:
        return State.TERMINAL_SKIP
    if text % 5 == 4 and not mended:
        return State.TERMINAL_FAIL
    return State.TERMINAL_SUCCESS


def result(row: Row) -> str:
    return f"{row[0]}:{row[1]}"


def hash_of(row: Row, match: str) -> tuple[int, int]:
    told = repr(row if match == "all" else row[1]).encode()
    made = hashlib.sha256(match.encode() + told).digest()
    return (
        int.from_bytes(made[:8], "big", signed=True),
        int.from_bytes(made[8:16], "big", signed=True),
    )


class Chain:
    """The runs of one name."""

    def __init__(self, page_rows: int = 8, match: str = "all") -> None:
        self.match = match
        self.page_rows = page_rows
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.calls: list[Called] = []
        self.told: list[Row] = []
        self.lease: Lease | None = None
        self.desk: Desk | None = None
        self._office: Office | None = None
        self._count = 0

    @property
    def office(self) -> Office:
        assert self._office is not None
        return self._office

    @property
    def record(self) -> runs.RunRecord:
        found = self.store.read(runs.latest, "job")
        assert found is not None
        return found

    def begin(self, world: World, *, blocks: int = 1, retry_failed: bool = True) -> None:
        """A new run over this input, on top of the last one; its driver fences that one's."""
        self.stop()
        self.take_lease()
        base = self.store.read(runs.latest, "job")
        self._count += 1
        assert self.lease is not None
        record = runs.RunRecord(
            run_id=f"r-{self._count}",
            name="job",
            created_ns=self._count,
            key=["id"],
            result_schema=schema_bytes(RESULT),
            config={"version": "1", "schema": "y string"},
            policy=Policy(page_rows=self.page_rows, backoff_first_ns=0),
            base_run=base.run_id if base else "",
            retry_failed=retry_failed,
        )
        self.store.transact(runs.create, record)
        self.desk = Desk(None, RunLog(self.store, record.run_id, self.lease))
        self._office = Office(self.store, self.desk, record, 0.0, self.clock)
        self.office.seal(self.put(world, blocks))

    def again(self, record: runs.RunRecord) -> tuple[Desk, Office]:
        """The service of a run whose input is not sealed, in another process."""
        assert self.lease is not None
        desk = Desk(None, RunLog(self.store, record.run_id, self.lease))
        return desk, Office(self.store, desk, record, 0.0, self.clock)

    def seal_again(self, world: World) -> wire.Seal:
        """The same request once more: the blocks are there."""
        return wire.Seal(
            [(0, len(world))], False, [], schema_bytes(INPUT), "hash", "plan", [], self.match
        )

    def put(self, world: World, blocks: int) -> wire.Seal:
        rows = sorted(world.items())
        step = max(-(-len(rows) // blocks), 1)
        put = []
        for at in range(0, len(rows), step):
            piece = rows[at : at + step]
            hashes = [hash_of(row, self.match) for row in piece]
            columns = [[row[i] for row in piece] for i in (0, 1)]
            columns += [[pair[i] for pair in hashes] for i in (0, 1)]
            table = pa.table(
                [pa.array(column, pa.int64()) for column in columns], names=["id", "text", *HASHES]
            )
            put.append((self.office.put_block(memoryview(stream_of(table))).n, len(piece)))
        return wire.Seal(put, False, [], schema_bytes(INPUT), "hash", "plan", [], self.match)

    def take_lease(self) -> None:
        if self.lease is not None:
            self.store.transact(leases.release, self.lease)
        self.lease = self.store.transact(
            leases.acquire, runs.lease_resource("job"), f"s{self._count}", "1", 1000 * 3600 * S
        )

    def stop(self) -> None:
        """The process of the service dies; what it logged is there."""
        if self.desk is not None:
            self.desk.close()
        self.desk = None

    def resume(self) -> None:
        """Another process goes on with the run."""
        self.stop()
        self.take_lease()
        assert self.lease is not None
        record = self.record
        log, board = open_run(self.store, record.run_id, self.lease)
        self.desk = Desk(board, log)
        self._office = Office(self.store, self.desk, record, 0.0, self.clock)
        self.office.start(same_driver=False)

    def work(self, *, mended: bool = False, calls_max: int = FOREVER, lose: int = 0) -> int:
        """Call what is handed out; the last calls, `lose` of them or more, are never reported."""
        made = 0
        while made < calls_max:
            stepped, data = self.office.step("child/a#1", _step(wire.Claim(4, 4)), memoryview(b""))
            if stepped.state != "granted":
                assert stepped.state == "over", stepped
                break
            assert stepped.grant is not None
            grant = stepped.grant
            seqs = [seq for part in grant.parts for seq in range(part.lo, part.hi)]
            begins = ranges_of(seqs) if grant.alone else []
            rows = [(r["id"], r["text"]) for r in table_of(data).to_pylist()]
            origins = {
                seq: f"{run}:{first + seq - lo}"
                for lo, hi, run, first in grant.origins
                for seq in range(lo, hi)
            }
            n = 0
            if begins:
                n += 1
                move = wire.Move(grant.epoch, n, b"b", [], begins, b"", 0, [], 0)
                self.office.step("child/a#1", _step(None, move), memoryview(b""))
            for seq, row in zip(seqs, rows, strict=True):
                key = origins.get(seq, f"{self.record.run_id}:{seq}")
                self.calls.append(Called(row, key))
                made += 1
                if calls_max - made < lose:
                    continue
                n += 1
                self._report(grant.epoch, n, seq, row, mended)
                self.told.append(row)
        return made

    def _report(self, epoch: int, n: int, seq: int, row: Row, mended: bool) -> None:
        state = ending(row[1], mended)
        others, data = [], b""
        kind = 0
        if state is State.TERMINAL_SUCCESS:
            data = message_of(pa.RecordBatch.from_pydict({"y": [result(row)]}, schema=RESULT))
        else:
            kind = int(ErrorClass.INPUT) if state is State.TERMINAL_FAIL else 0
            others = [wire.Other(seq, int(state), kind, f"because {row}", 0)]
        done = [Done(seq, seq + 1, int(state), kind)]
        move = wire.Move(epoch, n, b"%d" % seq, done, [], b"", seq, others, len(data))
        self.office.step("child/a#1", _step(None, move), memoryview(data))

    def finish(self) -> None:
        """What the committer does when the last row has ended."""
        assert self.desk is not None
        with self.desk.lock:
            board = self.desk.board
            size = board.size
            ticket = self.desk.enqueue(board.commit(size, size - 1, self.store.now_ns())[1])
        ticket.wait()
        self.office.publish()
        self.office.move(runs.Event.FINISH)

    # --- what came of it ------------------------------------------------------------------------

    def outcomes(self) -> Outcomes:
        return self.outcomes_of(self.record)

    def outcomes_of(self, record: runs.RunRecord) -> Outcomes:
        return Outcomes(self.store, record, Input(self.store, record))

    def output(self) -> list[tuple[int, str]]:
        found = self.outcomes().successes(0, self.record.size).to_pylist()
        return [(row["id"], row["y"]) for row in found]

    def records(self) -> dict[int, tuple[str, str]]:
        found = self.outcomes().records(0, self.record.size).to_pylist()
        return {row["id"]: (row["_state"], row["_error"]) for row in found}

    def check_replay(self) -> None:
        """The log alone gives the same board."""
        assert self.desk is not None
        self.desk.flush()
        assert load(self.store, self.record.run_id).dump() == self.desk.board.dump()

    def delete(self, run_id: str) -> None:
        while self.store.transact(runs.delete, run_id, 3):
            pass


def _step(claim: wire.Claim | None, *moves: wire.Move) -> wire.Step:
    return wire.Step(list(moves), claim, 0, len(moves), 0.0, [])


class Model:
    """What kept runs know, newest last: for each row its key outside, and how it ended."""

    def __init__(self) -> None:
        self.known: dict[str, dict[tuple[int, int], tuple[str, State | None]]] = {}
        self._world: World = {}
        self._run = ""

    def begin(self, run_id: str, world: World, retry_failed: bool) -> set[Row]:
        """The rows of a new run that must be called."""
        self._run, self._world = run_id, dict(world)
        mine: dict[tuple[int, int], tuple[str, State | None]] = {}
        due: set[Row] = set()
        for seq, row in enumerate(sorted(world.items())):
            before = [known[row] for known in reversed(self.known.values()) if row in known]
            key = before[0][0] if before else f"{run_id}:{seq}"
            states = [state for _, state in before]
            good = [s for s in states if s in (State.TERMINAL_SUCCESS, State.TERMINAL_SKIP)]
            state: State | None = good[0] if good else None
            if not good and not retry_failed and State.TERMINAL_FAIL in states:
                state = State.TERMINAL_FAIL
            mine[row] = (key, state)
            if state is None:
                due.add(row)
        self.known[run_id] = mine
        return due

    def reported(self, rows: Iterable[Row], mended: bool) -> None:
        mine = self.known[self._run]
        for row in rows:
            mine[row] = (mine[row][0], ending(row[1], mended))

    def open(self) -> set[Row]:
        return {row for row, (_, state) in self.known[self._run].items() if state is None}

    def key(self, row: Row) -> str:
        return self.known[self._run][row][0]

    def output(self) -> list[tuple[int, str]]:
        mine = self.known[self._run]
        rows = sorted(row for row, (_, s) in mine.items() if s is State.TERMINAL_SUCCESS)
        return [(row[0], result(row)) for row in rows]

    def records(self) -> dict[int, tuple[str, str]]:
        mine = self.known[self._run]
        return {
            row[0]: (state.name, f"because {row}")
            for row, (_, state) in mine.items()
            if state in (State.TERMINAL_SKIP, State.TERMINAL_FAIL)
        }
