"""The block writer: writes input blocks to the spool, in the task that reads the input."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.config import VALUE_BYTES_MAX
from holdfast.ledger.runs import SpoolBlock
from holdfast.spark import spool as spools
from holdfast.spark.errors import SpoolUnreachable
from holdfast.spark.spool_access import SpoolAccess

# Attempts per block. Spark retries a failed task only a few times.
PUT_ATTEMPTS = 5
PUT_RETRY_S = 0.5


class BlockWriter:
    """Object names consist of the task, its attempt and the block number."""

    def __init__(self, access: SpoolAccess, run_id: str) -> None:
        self._spool = spools.Spool.open_with(access, run_id)
        self._key = access.key
        self._writer = spools.writer_id()
        self._task, self._attempt = _task_attempt()
        self._numbers = itertools.count()

    def put(self, batch: pa.RecordBatch) -> SpoolBlock:
        name = spools.block_name(self._task, self._attempt, next(self._numbers), self._writer)
        for tries_remaining in reversed(range(PUT_ATTEMPTS)):
            try:
                return spools.write_block(self._spool, name, batch, self._key, VALUE_BYTES_MAX)
            except SpoolUnreachable:
                if not tries_remaining:
                    raise
            SYSTEM.sleep(PUT_RETRY_S)
        raise AssertionError


def _task_attempt() -> tuple[int, int]:
    """Return the partition and attempt of Spark's task; zeros on the driver."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
