"""The input blocks of a run while the input is ingested: the ledger service numbers, stores and drops them.

Blocks arrive from many threads. Their count and bytes are guarded by the lock of the log writer. The bytes of
blocks with unordered rows are bounded by the memory of a merge. Above it the pass is void, and Spark sorts the
input for a second pass.
"""

from __future__ import annotations

from holdfast.config import VALUE_BYTES_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.ledger import runs
from holdfast.spark import (
    block_merge,
    ledger_protocol,
    run_transactions,
    spool_maintenance,
    spool_validation,
)
from holdfast.spark.service_log_writer import ServiceLogWriter
from holdfast.store.api import Store

DELETE_BLOCKS = 100
# Unordered input above the memory of a merge is sorted by Spark.
UNORDERED_BYTES_MAX = block_merge.MEMORY_BYTES


class InputBlocks:
    def __init__(self, store: Store, log_writer: ServiceLogWriter, record: runs.RunRecord) -> None:
        self._store = store
        self._log_writer = log_writer
        # Of this record only fields that never change are used.
        self._record = record
        self._count = 0
        # Bytes of all stored blocks, and of the blocks with unordered rows.
        self.total_bytes = 0
        self._unordered_bytes = 0
        # The current pass reads the input that Spark sorted.
        self._is_sorted_pass = False
        if record.status is runs.RunLifecycle.INGESTING:
            self._count = store.read(runs.next_block, record.run_id)

    @property
    def needs_sort(self) -> bool:
        return self._unordered_bytes > UNORDERED_BYTES_MAX

    def put(
        self,
        data: memoryview,
        in_order: bool = True,
        at: runs.SpoolBlock | None = None,
        sorted: bool | None = None,
    ) -> ledger_protocol.BlockStored:
        """Store a block. Reply `STOP_INGEST` if the unordered input exceeds the memory of a merge,
        or if the block comes from the first pass after that pass has ended.
        """
        if len(data) > VALUE_BYTES_MAX:
            # Blocks are cut at rows, so this is a single row.
            raise ValueTooLarge(what="input row", bytes=len(data), max=VALUE_BYTES_MAX)
        size, value = spool_validation.checked_block_value(self._record, data, at)
        with self._log_writer.lock:
            self._require_open()
            # A restarted service learns it from the first block of the second pass.
            self._is_sorted_pass = self._is_sorted_pass or bool(sorted)
            if sorted is False and self._is_sorted_pass:
                return ledger_protocol.BlockStored(ledger_protocol.STOP_INGEST)
            self._unordered_bytes += 0 if in_order else size
            if self.needs_sort:
                return ledger_protocol.BlockStored(ledger_protocol.STOP_INGEST)
            self.total_bytes += size
            n = self._count
            self._count += 1
            ticket = self._log_writer.enqueue((), [(runs.block_key(self._record.run_id, n), value)])
        ticket.wait()
        return ledger_protocol.BlockStored(n)

    def drop(self) -> None:
        """Remove the blocks of a pass that was aborted because the input is unordered."""
        with self._log_writer.lock:
            self._require_open()
            self._unordered_bytes = self.total_bytes = 0
            self._is_sorted_pass = True
        self.delete_unused(set())

    def merge(self, staged: list[tuple[int, int, int, bytes]]) -> list[tuple[int, int]]:
        """Merge overlapping blocks. Return (n, rows) of the merged blocks in key order."""
        return block_merge.merge_blocks(
            [block_merge.StagedBlock(*block) for block in staged],
            self._record.key,
            self._read,
            lambda data: self.put(memoryview(data)).number,
        ).blocks

    def delete_unused(self, kept: set[int]) -> None:
        """Delete unreferenced blocks: from duplicate tasks, or merged into others."""
        spare = [n for n in range(self._count) if n not in kept]
        for at in range(0, len(spare), DELETE_BLOCKS):
            some = spare[at : at + DELETE_BLOCKS]
            objects = spool_maintenance.list_block_objects(self._store, self._record, some)
            self._store.transact(
                run_transactions.delete_blocks,
                self._log_writer.log.lease,
                self._record.run_id,
                some,
            )
            spool_maintenance.delete_objects(self._record, objects)

    def _require_open(self) -> None:
        if self._log_writer.has_scheduler:
            raise Invalid(what="input", why="the run has its input already")

    def _read(self, n: int) -> bytes:
        data = self._store.read(runs.get_block, self._record.run_id, n)
        assert data is not None
        return bytes(data)
