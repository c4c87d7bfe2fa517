"""Stage runs without Spark: the real ledger, log and rows; this process acts as driver and worker."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.log import RunLog
from holdfast.ledger.replies import RowGrant
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.runs import OutcomeChunk, ResultlessRow, RunEvent, RunProgress, RunRecord
from holdfast.ledger.states import RowState
from holdfast.store.api import Store, Txn

LEASE_NS = 600 * S
PAGE_ROWS = 16
BLOCK_ROWS = 10


@dataclass
class StageRun:
    """A run in which the rows with a seq in `failing` fail and every tenth row is skipped."""

    store: Store
    name: str
    size: int
    failing: dict[int, tuple[ErrorClass, str]] = field(default_factory=dict)
    number: int = 1

    def __post_init__(self) -> None:
        self.run_id = f"{self.name}-{self.number}"
        self.policy = RunPolicy(attempts_max=1, page_rows=PAGE_ROWS)
        resource = runs.lease_resource(self.name)
        self.lease: Lease = self.store.transact(
            lease.acquire, resource, "driver", "first", LEASE_NS
        )
        self.store.transact(self._ingest)
        self.scheduler, opened = RunScheduler.open(
            self.size, self.policy, now_ns=self.store.now_ns()
        )
        self.log = RunLog(self.store, self.run_id, self.lease)
        self.log.append(opened)
        self.calls = 0

    def finish_rows(self, rows: int) -> None:
        """Claim `rows` rows and report an outcome for each."""
        while rows > 0:
            grant, entries = self.scheduler.claim(
                "worker", rows, now_ns=self.store.now_ns(), begin=rows
            )
            assert isinstance(grant, RowGrant)
            self.log.append(entries)
            for part in grant.ranges:
                self._end_rows(grant.epoch, part.lo, part.hi)
                rows -= part.hi - part.lo

    def commit(self) -> None:
        upto = self.scheduler.terminal_prefix()
        _, entries = self.scheduler.commit(upto, upto, self.store.now_ns())
        self.log.append(entries)

    def write_progress(self) -> None:
        """Write the progress record, which the ledger service writes periodically."""
        errors = [(int(kind), text, 1) for kind, text in self.failing.values()]
        progress = RunProgress(
            updated_ns=self.store.now_ns(),
            started_ns=self.record.created_ns,
            counts=self.scheduler.ledger.counts(),
            calls=self.calls,
            cost=self.calls / 100,
            errors=errors,
            ended=list(self.scheduler.ended),
        )
        self.store.transact(runs.put_progress, self.run_id, progress)

    def finish(self) -> None:
        self.finish_rows(self.size - sum(self.scheduler.ended))
        self.commit()
        self.write_progress()
        self.store.transact(runs.change_status, self.run_id, RunEvent.FINISH)
        self.release_lease()

    def release_lease(self) -> None:
        """Release the lease of the driver."""
        self.store.transact(lease.release, self.lease)

    @property
    def record(self) -> RunRecord:
        return self.store.read(runs.get_existing, self.run_id)

    def _ingest(self, txn: Txn) -> None:
        blocks = []
        for n, lo in enumerate(range(0, self.size, BLOCK_ROWS)):
            names = [f"doc-{seq:03}" for seq in range(lo, min(lo + BLOCK_ROWS, self.size))]
            txn.put(runs.block_key(self.run_id, n), _ipc(pa.table({"doc_id": names})))
            blocks.append((n, len(names)))
        record = RunRecord(
            run_id=self.run_id,
            name=self.name,
            created_ns=txn.now_ns,
            generation=txn.generation,
            size=self.size,
            key=["doc_id"],
            blocks=blocks,
            config={"attempts": "1"},
            sink={"kind": "parquet", "path": "/data/labels"},
            policy=self.policy,
        )
        runs.create(txn, record)
        runs.change_status(txn, self.run_id, RunEvent.SEAL)

    def _end_rows(self, epoch: int, lo: int, hi: int) -> None:
        not_succeeded, done, success_offsets = [], [], []
        for seq in range(lo, hi):
            self.calls += 1
            kind, text = self.failing.get(seq, (ErrorClass.NONE, ""))
            state = RowState.TERMINAL_SUCCESS
            if kind:
                state = RowState.TERMINAL_FAIL
            elif seq % 10 == 0:
                state, text = RowState.TERMINAL_SKIP, "empty"
            done.append(FinishedRange(seq, seq + 1, int(state), int(kind)))
            if state is RowState.TERMINAL_SUCCESS:
                success_offsets.append(seq - lo // PAGE_ROWS * PAGE_ROWS)
            else:
                not_succeeded.append(ResultlessRow(seq, int(state), 1, int(kind), text))
        _, entries = self.scheduler.report(epoch, 1, b"", done=done, now_ns=self.store.now_ns())
        chunk = OutcomeChunk(
            lo=lo,
            seqs=b"".join(offset.to_bytes(4, "little") for offset in success_offsets),
            batch=_ipc(pa.table({"label": ["x"] * len(success_offsets)})),
            resultless=not_succeeded,
            attempts=[],
            cost=0.0,
            calls=hi - lo,
            spent_us_log2=[],
        )
        key = runs.chunk_key(self.run_id, lo // PAGE_ROWS, self.log.next_height)
        self.log.append(entries, [(key, codec.pack(chunk))])


def _ipc(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()
