"""Chains of runs over changed inputs, in this process: the real service requests on a store in memory, and a worker
that a test can stop at any row. `ChainModel` computes the expected outcomes in plain dictionaries.
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
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.log import RunLog, load_run, open_run
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark.arrow_rows import decode_table, encode_batch, encode_stream
from holdfast.spark.row_match import HASH_COLUMNS
from holdfast.spark.row_reports import to_ranges
from holdfast.spark.run_data import RunInput, RunOutcomes, encode_schema
from holdfast.spark.service_log_writer import ServiceLogWriter
from holdfast.spark.service_requests import ServiceRequests
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

UNLIMITED = 1 << 60
RESULT = pa.schema([pa.field("y", pa.string())])
INPUT = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.int64())])

InputRow = tuple[int, int]
InputRows = dict[int, int]


class ChainCall(NamedTuple):
    row: InputRow
    key: str


def end_state(text: int, fixed: bool) -> RowState:
    """The end state of a row: most rows succeed, some are skipped, some fail until the function is fixed."""
    if text % 7 == 6:
        return RowState.TERMINAL_SKIP
    if text % 5 == 4 and not fixed:
        return RowState.TERMINAL_FAIL
    return RowState.TERMINAL_SUCCESS


def row_result(row: InputRow) -> str:
    return f"{row[0]}:{row[1]}"


def row_hashes(row: InputRow, match: str) -> tuple[int, int]:
    data = repr(row if match == "all" else row[1]).encode()
    digest = hashlib.sha256(match.encode() + data).digest()
    return (
        int.from_bytes(digest[:8], "big", signed=True),
        int.from_bytes(digest[8:16], "big", signed=True),
    )


class RunChain:
    """The runs of one name."""

    def __init__(self, page_rows: int = 8, match: str = "all") -> None:
        self.match = match
        self.page_rows = page_rows
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.calls: list[ChainCall] = []
        self.reported: list[InputRow] = []
        self.lease: Lease | None = None
        self.log_writer: ServiceLogWriter | None = None
        self._requests: ServiceRequests | None = None
        self._run_count = 0

    @property
    def requests(self) -> ServiceRequests:
        assert self._requests is not None
        return self._requests

    @property
    def record(self) -> runs.RunRecord:
        latest = self.store.read(runs.get_latest, "job")
        assert latest is not None
        return latest

    def begin_run(
        self, input_rows: InputRows, *, blocks: int = 1, retry_failed: bool = True
    ) -> None:
        """Begin a new run over this input, based on the latest run. Its driver fences the previous driver."""
        self.stop_service()
        self.take_lease()
        base = self.store.read(runs.get_latest, "job")
        self._run_count += 1
        assert self.lease is not None
        record = runs.RunRecord(
            run_id=f"r-{self._run_count}",
            name="job",
            created_ns=self._run_count,
            key=["id"],
            result_schema=encode_schema(RESULT),
            config={"version": "1", "schema": "y string"},
            policy=RunPolicy(page_rows=self.page_rows, backoff_first_ns=0),
            base_run=base.run_id if base else "",
            retry_failed=retry_failed,
        )
        self.store.transact(runs.create, record)
        self.log_writer = ServiceLogWriter(None, RunLog(self.store, record.run_id, self.lease))
        self._requests = ServiceRequests(self.store, self.log_writer, record, 0.0, self.clock)
        self.requests.seal(self.put_blocks(input_rows, blocks))

    def reopen_service(self, record: runs.RunRecord) -> tuple[ServiceLogWriter, ServiceRequests]:
        """The log writer and the requests of a new service process for a run whose input is not sealed."""
        assert self.lease is not None
        log_writer = ServiceLogWriter(None, RunLog(self.store, record.run_id, self.lease))
        return log_writer, ServiceRequests(self.store, log_writer, record, 0.0, self.clock)

    def repeat_seal(self, input_rows: InputRows) -> ledger_protocol.SealInput:
        """The same seal request again. The blocks are already stored."""
        return ledger_protocol.SealInput(
            [(0, len(input_rows))], False, [], encode_schema(INPUT), "hash", "plan", [], self.match
        )

    def put_blocks(self, input_rows: InputRows, blocks: int) -> ledger_protocol.SealInput:
        rows = sorted(input_rows.items())
        step = max(-(-len(rows) // blocks), 1)
        stored = []
        for at in range(0, len(rows), step):
            piece = rows[at : at + step]
            hashes = [row_hashes(row, self.match) for row in piece]
            columns = [[row[i] for row in piece] for i in (0, 1)]
            columns += [[pair[i] for pair in hashes] for i in (0, 1)]
            table = pa.table(
                [pa.array(column, pa.int64()) for column in columns],
                names=["id", "text", *HASH_COLUMNS],
            )
            stored.append(
                (self.requests.blocks.put(memoryview(encode_stream(table))).number, len(piece))
            )
        return ledger_protocol.SealInput(
            stored, False, [], encode_schema(INPUT), "hash", "plan", [], self.match
        )

    def take_lease(self) -> None:
        if self.lease is not None:
            self.store.transact(leases.release, self.lease)
        self.lease = self.store.transact(
            leases.acquire, runs.lease_resource("job"), f"s{self._run_count}", "1", 1000 * 3600 * S
        )

    def stop_service(self) -> None:
        """End the service process. Its logged entries remain."""
        if self.log_writer is not None:
            self.log_writer.close()
        self.log_writer = None

    def resume(self) -> None:
        """Continue the run in another service process."""
        self.stop_service()
        self.take_lease()
        assert self.lease is not None
        record = self.record
        log, scheduler = open_run(self.store, record.run_id, self.lease)
        self.log_writer = ServiceLogWriter(scheduler, log)
        self._requests = ServiceRequests(self.store, self.log_writer, record, 0.0, self.clock)
        self.requests.continue_run(same_driver=False)

    def call_rows(
        self, *, fixed: bool = False, calls_max: int = UNLIMITED, unreported: int = 0
    ) -> int:
        """Call the granted rows. At least the last `unreported` calls are never reported."""
        calls_made = 0
        while calls_made < calls_max:
            reply, data = self.requests.handle_exchange(
                "child/a#1", _exchange(ledger_protocol.ClaimRows(4, 4)), memoryview(b"")
            )
            if reply.state != "granted":
                assert reply.state == "over", reply
                break
            assert reply.grant is not None
            grant = reply.grant
            seqs = [seq for part in grant.ranges for seq in range(part.lo, part.hi)]
            begins = to_ranges(seqs) if grant.isolated else []
            rows = [(r["id"], r["text"]) for r in decode_table(data).to_pylist()]
            origins = {
                seq: f"{run}:{first + seq - lo}"
                for lo, hi, run, first in grant.origins
                for seq in range(lo, hi)
            }
            report_no = 0
            if begins:
                report_no += 1
                report = ledger_protocol.GrantReport(
                    grant.epoch, report_no, b"b", [], begins, b"", 0, [], 0
                )
                self.requests.handle_exchange("child/a#1", _exchange(None, report), memoryview(b""))
            for seq, row in zip(seqs, rows, strict=True):
                key = origins.get(seq, f"{self.record.run_id}:{seq}")
                self.calls.append(ChainCall(row, key))
                calls_made += 1
                if calls_max - calls_made < unreported:
                    continue
                report_no += 1
                self._report(grant.epoch, report_no, seq, row, fixed)
                self.reported.append(row)
        return calls_made

    def _report(self, epoch: int, report_no: int, seq: int, row: InputRow, fixed: bool) -> None:
        state = end_state(row[1], fixed)
        resultless, data = [], b""
        error_class = 0
        if state is RowState.TERMINAL_SUCCESS:
            data = encode_batch(pa.RecordBatch.from_pydict({"y": [row_result(row)]}, schema=RESULT))
        else:
            error_class = int(ErrorClass.INPUT) if state is RowState.TERMINAL_FAIL else 0
            resultless = [
                ledger_protocol.ResultlessRowReport(
                    seq, int(state), error_class, f"because {row}", 0
                )
            ]
        done = [FinishedRange(seq, seq + 1, int(state), error_class)]
        report = ledger_protocol.GrantReport(
            epoch, report_no, b"%d" % seq, done, [], b"", seq, resultless, len(data)
        )
        self.requests.handle_exchange("child/a#1", _exchange(None, report), memoryview(data))

    def finish_run(self) -> None:
        """Commit all rows and finish the run, like the output committer after the last row."""
        assert self.log_writer is not None
        with self.log_writer.lock:
            scheduler = self.log_writer.scheduler
            size = scheduler.size
            ticket = self.log_writer.enqueue(
                scheduler.commit(size, size - 1, self.store.now_ns())[1]
            )
        ticket.wait()
        self.requests.publish()
        self.requests.change_status(runs.RunEvent.FINISH)

    # --- outcomes -------------------------------------------------------------------------------

    def outcomes(self) -> RunOutcomes:
        return self.outcomes_of(self.record)

    def outcomes_of(self, record: runs.RunRecord) -> RunOutcomes:
        return RunOutcomes(self.store, record, RunInput(self.store, record))

    def output(self) -> list[tuple[int, str]]:
        rows = self.outcomes().successes(0, self.record.size).to_pylist()
        return [(row["id"], row["y"]) for row in rows]

    def resultless_rows(self) -> dict[int, tuple[str, str]]:
        rows = self.outcomes().resultless_rows(0, self.record.size).to_pylist()
        return {row["id"]: (row["_state"], row["_error"]) for row in rows}

    def check_replay(self) -> None:
        """A replay of the log must equal the scheduler."""
        assert self.log_writer is not None
        self.log_writer.flush()
        assert load_run(self.store, self.record.run_id).dump() == self.log_writer.scheduler.dump()

    def delete_run(self, run_id: str) -> None:
        while self.store.transact(runs.delete_rows, run_id, 3):
            pass


def _exchange(
    claim: ledger_protocol.ClaimRows | None, *reports: ledger_protocol.GrantReport
) -> ledger_protocol.Exchange:
    return ledger_protocol.Exchange(list(reports), claim, 0, len(reports), 0.0, [])


class ChainModel:
    """For each kept run, newest last, the idempotency key and the end state of each row."""

    def __init__(self) -> None:
        self.known: dict[str, dict[tuple[int, int], tuple[str, RowState | None]]] = {}
        self._input_rows: InputRows = {}
        self._run = ""

    def begin_run(self, run_id: str, input_rows: InputRows, retry_failed: bool) -> set[InputRow]:
        """Begin a new run and return the rows that must be called."""
        self._run, self._input_rows = run_id, dict(input_rows)
        own_rows: dict[tuple[int, int], tuple[str, RowState | None]] = {}
        due: set[InputRow] = set()
        for seq, row in enumerate(sorted(input_rows.items())):
            earlier = [known[row] for known in reversed(self.known.values()) if row in known]
            key = earlier[0][0] if earlier else f"{run_id}:{seq}"
            states = [state for _, state in earlier]
            good_states = [
                s for s in states if s in (RowState.TERMINAL_SUCCESS, RowState.TERMINAL_SKIP)
            ]
            state: RowState | None = good_states[0] if good_states else None
            if not good_states and not retry_failed and RowState.TERMINAL_FAIL in states:
                state = RowState.TERMINAL_FAIL
            own_rows[row] = (key, state)
            if state is None:
                due.add(row)
        self.known[run_id] = own_rows
        return due

    def mark_reported(self, rows: Iterable[InputRow], fixed: bool) -> None:
        own_rows = self.known[self._run]
        for row in rows:
            own_rows[row] = (own_rows[row][0], end_state(row[1], fixed))

    def unfinished_rows(self) -> set[InputRow]:
        return {row for row, (_, state) in self.known[self._run].items() if state is None}

    def idempotency_key(self, row: InputRow) -> str:
        return self.known[self._run][row][0]

    def output(self) -> list[tuple[int, str]]:
        own_rows = self.known[self._run]
        rows = sorted(row for row, (_, s) in own_rows.items() if s is RowState.TERMINAL_SUCCESS)
        return [(row[0], row_result(row)) for row in rows]

    def resultless_rows(self) -> dict[int, tuple[str, str]]:
        own_rows = self.known[self._run]
        return {
            row[0]: (state.name, f"because {row}")
            for row, (_, state) in own_rows.items()
            if state in (RowState.TERMINAL_SKIP, RowState.TERMINAL_FAIL)
        }
