"""Runs of stages without Spark: the real ledger, log and rows, worked by this process."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.ledger.answers import Grant
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import Done
from holdfast.ledger.runs import Chunk, Event, Other, Progress, RunRecord
from holdfast.ledger.states import State
from holdfast.store.api import Store, Txn

LEASE_NS = 600 * S
PAGE_ROWS = 16
BLOCK_ROWS = 10


@dataclass
class StageRun:
    """A run in which every row whose seq is in `failing` fails, and every tenth is skipped."""

    store: Store
    name: str
    size: int
    failing: dict[int, tuple[ErrorClass, str]] = field(default_factory=dict)
    number: int = 1

    def __post_init__(self) -> None:
        self.run_id = f"{self.name}-{self.number}"
        self.policy = Policy(attempts_max=1, page_rows=PAGE_ROWS)
        resource = runs.lease_resource(self.name)
        self.lease: Lease = self.store.transact(
            lease.acquire, resource, "driver", "first", LEASE_NS
        )
        self.store.transact(self._ingest)
        self.board, opened = Board.open(self.size, self.policy, now_ns=self.store.now_ns())
        self.log = RunLog(self.store, self.run_id, self.lease)
        self.log.append(opened)
        self.calls = 0

    def work(self, rows: int) -> None:
        """Let `rows` rows end."""
        while rows > 0:
            grant, entries = self.board.claim(
                "worker", rows, now_ns=self.store.now_ns(), begin=rows
            )
            assert isinstance(grant, Grant)
            self.log.append(entries)
            for part in grant.parts:
                self._end(grant.epoch, part.lo, part.hi)
                rows -= part.hi - part.lo

    def commit(self) -> None:
        upto = self.board.terminal_prefix()
        _, entries = self.board.commit(upto, upto, self.store.now_ns())
        self.log.append(entries)

    def tell(self) -> None:
        """Write the progress, as the ledger service does now and then."""
        errors = [(int(kind), text, 1) for kind, text in self.failing.values()]
        told = Progress(
            updated_ns=self.store.now_ns(),
            started_ns=self.record.created_ns,
            counts=self.board.ledger.counts(),
            calls=self.calls,
            cost=self.calls / 100,
            errors=errors,
            ended=list(self.board.ended),
        )
        self.store.transact(runs.put_progress, self.run_id, told)

    def finish(self) -> None:
        self.work(self.size - sum(self.board.ended))
        self.commit()
        self.tell()
        self.store.transact(runs.move, self.run_id, Event.FINISH)
        self.leave()

    def leave(self) -> None:
        """The driver is gone."""
        self.store.transact(lease.release, self.lease)

    @property
    def record(self) -> RunRecord:
        return self.store.read(runs.the, self.run_id)

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
        runs.move(txn, self.run_id, Event.SEAL)

    def _end(self, epoch: int, lo: int, hi: int) -> None:
        others, done, good = [], [], []
        for seq in range(lo, hi):
            self.calls += 1
            kind, text = self.failing.get(seq, (ErrorClass.NONE, ""))
            state = State.TERMINAL_SUCCESS
            if kind:
                state = State.TERMINAL_FAIL
            elif seq % 10 == 0:
                state, text = State.TERMINAL_SKIP, "empty"
            done.append(Done(seq, seq + 1, int(state), int(kind)))
            if state is State.TERMINAL_SUCCESS:
                good.append(seq - lo // PAGE_ROWS * PAGE_ROWS)
            else:
                others.append(Other(seq, int(state), 1, int(kind), text))
        _, entries = self.board.advance(epoch, 1, b"", done=done, now_ns=self.store.now_ns())
        chunk = Chunk(
            lo=lo,
            seqs=b"".join(offset.to_bytes(4, "little") for offset in good),
            batch=_ipc(pa.table({"label": ["x"] * len(good)})),
            others=others,
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
