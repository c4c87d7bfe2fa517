"""Writes the blocks of an input into the spool, in the task that reads the input."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.config import VALUE_BYTES_MAX
from holdfast.ledger.runs import StoredBlock
from holdfast.spark import spool as spools
from holdfast.spark.errors import SpoolUnreachable
from holdfast.spark.spool_access import SpoolAccess

# A task that fails is tried again by Spark, a few times.
TRIES = 5
WAIT_S = 0.5


class BlockWriter:
    """Names are made of the task, its attempt and the number of the block."""

    def __init__(self, access: SpoolAccess, run_id: str) -> None:
        self._spool = spools.Spool.by(access, run_id)
        self._key = access.key
        self._writer = spools.writer_id()
        self._task, self._attempt = _task()
        self._numbers = itertools.count()

    def put(self, batch: pa.RecordBatch) -> StoredBlock:
        name = spools.block_name(self._task, self._attempt, next(self._numbers), self._writer)
        for left in reversed(range(TRIES)):
            try:
                return spools.put_block(self._spool, name, batch, self._key, VALUE_BYTES_MAX)
            except SpoolUnreachable:
                if not left:
                    raise
            SYSTEM.sleep(WAIT_S)
        raise AssertionError


def _task() -> tuple[int, int]:
    """The number of Spark's task and of its attempt; of the driver, which is none, 0."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
