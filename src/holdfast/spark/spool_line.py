"""A child's line to the ledger when the run has a spool: results and input rows do not travel on it.

- What a report holds is put into the spool first. The report then names the object, with its length and hash.
- The blocks of granted rows are read from the spool when the grant is there.
- While the spool takes its time, leases are kept. One that cannot be reached is tried again for `PATIENCE_NS`.

`step` is told the name of each step after it happened. Tests kill the process there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from holdfast.clock import SYSTEM
from holdfast.ledger.states import State
from holdfast.spark import spool as spools
from holdfast.spark import wire
from holdfast.spark.client import Client
from holdfast.spark.errors import SpoolLost, SpoolUnreachable
from holdfast.spark.sinks.files import Step, no_step
from holdfast.spark.spool_access import SpoolAccess

PATIENCE_NS = 300_000_000_000
WAIT_S_MAX = 5.0
BLOCKS_CACHED = 8

step: Step = no_step

T = TypeVar("T")


class SpoolLine:
    """`ask` as that of a client, for one thread at a time. Rows of a grant come as a table."""

    def __init__(self, client: Client, access: SpoolAccess, run_id: str, lease_s: float) -> None:
        self._client = client
        self._access = access
        self._spool = spools.Spool.by(access, run_id)
        self._writer = spools.writer_id()
        self._beat_s = lease_s / 4
        self._blocks = spools.BlockCache(BLOCKS_CACHED)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")

    def ask(self, message: wire.Message, *attached: wire.Bytes) -> tuple[Any, Any]:
        held = message.held if isinstance(message, wire.Step | wire.Inherit) else []
        if isinstance(message, wire.Step) and any(map(_has_data, message.moves)):
            moves = message.moves
            moves = self._keeping(held, lambda: self._put_all(moves, attached))
            message, attached = replace(message, moves=moves), ()
            step("stored")
        answer, data = self._client.ask(message, *attached)
        grant = answer.grant if isinstance(answer, wire.Stepped) else None
        if grant is None:
            return answer, data
        try:
            return answer, self._keeping([*held, grant.epoch], lambda: self._rows(grant))
        except SpoolLost as error:
            self._client.ask(wire.Broken(wire.refused(error).error))
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _put_all(self, moves: list[wire.Move], attached: tuple[wire.Bytes, ...]) -> list[wire.Move]:
        return [self._put(move, data) for move, data in zip(moves, attached, strict=True)]

    def _put(self, move: wire.Move, batch: wire.Bytes) -> wire.Move:
        if not _has_data(move):
            return move
        raws = {one.seq: one.raw for one in move.others if one.raw}
        data = spools.chunk_bytes(move.seqs, memoryview(batch), raws)
        name = spools.chunk_name(move.epoch, move.n, self._writer)
        at = _patiently(lambda: self._spool.put(name, data, raws=bool(raws)))
        others = [replace(one, raw="") for one in move.others]
        return replace(
            move, seqs=b"", lo=move.lo if batch else 0, others=others, size=0, at=at,
            hi=_end(move) if batch else 0,
        )  # fmt: skip

    def _rows(self, grant: wire.Granted) -> pa.Table:
        spool = spools.Spool.by(self._access, grant.blocks_run)
        tables: list[pa.Table] = []
        ends = [block.first + block.at.rows for block in grant.blocks]
        for part in grant.parts:
            lo = part.lo
            while lo < part.hi:
                block = grant.blocks[int(np.searchsorted(ends, lo, side="right"))]
                upto = min(part.hi, block.first + block.at.rows)
                table = self._block(spool, block, grant)
                tables.append(table.slice(lo - block.first, upto - lo))
                lo = upto
        return pa.concat_tables(tables).select(grant.columns)

    def _block(self, spool: spools.Spool, block: wire.BlockRef, grant: wire.Granted) -> pa.Table:
        try:
            return self._blocks.get(
                block.at.at.name,
                False,
                lambda: _patiently(lambda: spools.read_block(spool, block.at)),
            )
        except spools.ObjectLost as why:
            rows = [(block.first, block.first + block.at.rows)]
            raise spools.lost(spool, "input", rows, block.at.at.name, str(why)) from None

    def _keeping(self, epochs: list[int], work: Callable[[], T]) -> T:
        """Do something with the spool; the leases of these grants do not run out over it."""
        under_way = self._thread.submit(work)
        while True:
            try:
                return under_way.result(self._beat_s)
            except Late:
                if under_way.done():
                    raise
                self._client.ask(wire.Beat(epochs))


def _has_data(move: wire.Move) -> bool:
    return bool(move.size) or any(one.raw for one in move.others)


def _end(move: wire.Move) -> int:
    """After the last row of a report that has a result."""
    return max(done.hi for done in move.done if done.code == State.TERMINAL_SUCCESS)


def _patiently(work: Callable[[], T]) -> T:
    until_ns = SYSTEM.mono_ns() + PATIENCE_NS
    wait_s = 0.1
    while True:
        try:
            return work()
        except SpoolUnreachable:
            if SYSTEM.mono_ns() >= until_ns:
                raise
        SYSTEM.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
