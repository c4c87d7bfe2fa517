"""A real ledger service for tests, and lines to it that say exactly what a test wants said.

    with serving(url, rows=100) as service:
        worker = service.line()
        grant = worker.claim(10, begin=10)
        worker.report(grant, done=[(0, 10)])

`Line` speaks raw frames: it resends, leaves things out and lies where `client.Client` would not.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.ledger import runs
from holdfast.ledger.board import Board
from holdfast.ledger.classes import Policy
from holdfast.ledger.log import load
from holdfast.ledger.records import Done
from holdfast.ledger.states import State
from holdfast.spark import task, wire
from holdfast.spark.client import Address, Blocks
from holdfast.spark.journal import Input, Outcomes, schema_bytes
from holdfast.spark.keeper import Keeper, new_token
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.rows import message_of, stream_of, table_of
from holdfast.spark.service import Charge
from holdfast.spark.sinks.parquet import read_parts
from holdfast.store import open as open_store
from holdfast.store.api import Store

WAIT_S = 20.0
S = 1_000_000_000
RESULT = pa.schema([pa.field("y", pa.int64())])


def table(lo: int, hi: int) -> pa.Table:
    return pa.table({"id": pa.array(range(lo, hi), pa.int64())})


def results(values: Sequence[int]) -> pa.Table:
    return pa.Table.from_arrays([pa.array(values, pa.int64())], schema=RESULT)


def charge(
    url: str,
    *,
    name: str = "job",
    sink: dict[str, str | int | bool] | None = None,
    policy: Policy | None = None,
    rate_per_s: float = 0.0,
    tokens_per_min: float = 0.0,
    file_rows: int = 1 << 20,
    file_bytes: int = FILE_BYTES,
    record: runs.RunRecord | None = None,
    seen: str = "",
) -> Charge:
    made = record or runs.RunRecord(
        run_id=SYSTEM.entropy(8).hex(),
        name=name,
        created_ns=1,
        key=["id"],
        result_schema=schema_bytes(RESULT),
        sink=sink or {},
        policy=policy or Policy(backoff_first_ns=0, backoff_max_ns=0),
    )
    return Charge(
        store=url,
        token=new_token(),
        host="127.0.0.1",
        port=0,
        record=codec.pack(made),
        new=record is None,
        again=False,
        file_rows=file_rows,
        file_bytes=file_bytes,
        rate_per_s=rate_per_s,
        tokens_per_min=tokens_per_min,
        seen=seen,
    )


@dataclass
class Grant:
    epoch: int
    ranges: list[tuple[int, int]]
    attempts: list[int]
    begun: int
    alone: bool
    rows: pa.Table
    n: int = 0

    @property
    def seqs(self) -> list[int]:
        return [seq for lo, hi in self.ranges for seq in range(lo, hi)]


def ids_of(grants: Sequence[Grant]) -> list[int]:
    """The input that came with them, in order."""
    return sorted(seq for grant in grants for seq in grant.rows.column("id").to_pylist())


class Line:
    """One connection, frame by frame."""

    def __init__(
        self, address: Address, owner: str = "child/test", token: str | None = None
    ) -> None:
        self.socket = socket.create_connection((address.host, address.port))
        self.known: list[int] = []
        self.welcome = self.ask(wire.Hello(address.token if token is None else token, owner))

    def send(self, message: wire.Message, *attached: bytes) -> None:
        wire.send(self.socket, message, *attached)

    def receive(self) -> Any:
        answer, self.attached = wire.receive_answer(self.socket)
        return answer

    def ask(self, message: wire.Message, *attached: bytes) -> Any:
        self.send(message, *attached)
        return self.receive()

    def closed(self) -> bool:
        """Wait until the other side hung up; False when it says something instead."""
        ready, _, _ = select.select([self.socket], [], [], WAIT_S)
        assert ready, "the line stays open"
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    # --- work -----------------------------------------------------------------------------------

    def stepped(
        self, claim: wire.Claim | None, *moves: wire.Move, data: bytes = b"", wait_ms: int = 0
    ) -> Any:
        asked = replace(step(claim, *moves, wait_ms=wait_ms), held=self.known)
        return self.ask(asked, data)

    def claim(self, rows: int, *, begin: int = 0, wait_ms: int = 0) -> Grant:
        answer = self.stepped(wire.Claim(rows, begin), wait_ms=wait_ms)
        assert answer.state == "granted", answer
        return self.granted(answer)

    def take(self, rows: int) -> list[Grant]:
        """All of so many rows, begun. Towards the end a claim gets less than it asks for."""
        grants: list[Grant] = []
        while sum(len(grant.seqs) for grant in grants) < rows:
            grants.append(self.claim(rows, begin=rows))
        return grants

    def granted(self, answer: wire.Stepped) -> Grant:
        grant = answer.grant
        assert grant is not None
        self.known.append(grant.epoch)
        parts = grant.parts
        return Grant(
            grant.epoch,
            [(part.lo, part.hi) for part in parts],
            [part.attempt for part in parts],
            grant.begun,
            grant.alone,
            table_of(self.attached),
        )

    def report(
        self,
        grant: Grant,
        *,
        done: Sequence[tuple[int, int]] = (),
        others: Sequence[wire.Other] = (),
        begin: Sequence[tuple[int, int]] = (),
        claim: wire.Claim | None = None,
    ) -> Any:
        move, data = report(grant, done=done, others=others, begin=begin)
        return self.stepped(claim, move, data=data)


def step(claim: wire.Claim | None, *moves: wire.Move, wait_ms: int = 0) -> wire.Step:
    return wire.Step(list(moves), claim, wait_ms, 1, 0.5, [1])


def report(
    grant: Grant,
    *,
    done: Sequence[tuple[int, int]] = (),
    others: Sequence[wire.Other] = (),
    begin: Sequence[tuple[int, int]] = (),
) -> tuple[wire.Move, bytes]:
    """The next report of a grant: successes of ranges (y = 2 * seq), and rows that ended otherwise."""
    grant.n += 1
    seqs = [seq for lo, hi in done for seq in range(lo, hi)]
    data = message_of(results([2 * seq for seq in seqs]).to_batches()[0]) if seqs else b""
    ends = [Done(lo, hi, int(State.TERMINAL_SUCCESS)) for lo, hi in done]
    ends += [Done(o.seq, o.seq + 1, o.state, o.error_class, o.delay_ns) for o in others]
    first = seqs[0] if seqs else 0
    dense = not seqs or seqs[-1] - first + 1 == len(seqs)
    places = b"" if dense else b"".join((s - first).to_bytes(4, "little") for s in seqs)
    digest = repr((ends, list(begin), data)).encode()[-64:]
    move = wire.Move(
        grant.epoch, grant.n, digest, ends, list(begin), places, first, list(others), len(data)
    )
    return move, data


@dataclass
class Serving:
    store: Store
    keeper: Keeper
    run_id: str
    lines: list[Line] = field(default_factory=list)

    def line(self, owner: str = "child/test") -> Line:
        made = Line(self.keeper.address, owner)
        self.lines.append(made)
        return made

    def fill(self, rows: int, blocks: int = 1) -> int:
        """Give it an input of `rows` rows in so many blocks, and seal it."""
        line = Blocks(self.keeper.own_address)()
        bounds = [rows * i // blocks for i in range(blocks + 1)]
        put = [
            (line.put_block(stream_of(table(lo, hi))), hi - lo)
            for lo, hi in pairwise(bounds)
            if hi > lo
        ]
        line.close()
        return int(self.keeper.ask(seal(put)).size)

    def stand(self) -> wire.Stand:
        found: wire.Stand = self.keeper.ask(wire.Status())
        return found

    def progress(self) -> runs.Progress:
        return codec.unpack_as(runs.Progress, self.stand().progress)

    def record(self) -> runs.RunRecord:
        return self.store.read(runs.the, self.run_id)

    def board(self) -> Board:
        """What the log alone comes to."""
        return load(self.store, self.run_id)

    def outcomes(self) -> Outcomes:
        record = self.record()
        return Outcomes(self.store, record, Input(self.store, record))

    def until(self, true: Any) -> wire.Stand:
        """Ask until the stand is so: each answer is a round trip, so nobody sleeps."""
        end_ns = SYSTEM.mono_ns() + int(WAIT_S * 1e9)
        while SYSTEM.mono_ns() < end_ns:
            stand = self.stand()
            if true(stand):
                return stand
        raise AssertionError(f"it never came to that: {self.stand()} {self.progress()}")

    def wait_over(self) -> wire.Stand:
        return self.until(lambda stand: stand.over)

    def wait_exit(self) -> int:
        """The exit status of the service's process, which somebody ends."""
        pidfd = os.pidfd_open(self.keeper.pid)
        try:
            ready, _, _ = select.select([pidfd], [], [], WAIT_S)
            assert ready, "the service lives on"
        finally:
            os.close(pidfd)
        process = self.keeper._process
        assert process is not None
        return process.wait()


def end_children() -> None:
    """Children that were warmed for tasks in this process."""
    while task._idle:
        task._idle.pop().end()


def rows_of_output(path: Path) -> list[int]:
    return [
        seq
        for file in read_parts(path).files
        for seq in pq.read_table(file).column("id").to_pylist()
    ]


SEALED = pa.schema([pa.field("id", pa.int64())])


def seal(blocks: list[tuple[int, int]]) -> wire.Seal:
    return wire.Seal(blocks, False, [], schema_bytes(SEALED), "hash", "plan")


@contextlib.contextmanager
def serving(
    path: Path,
    rows: int | None = None,
    *,
    blocks: int = 1,
    made: Charge | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """A service on a store of its own; with `rows`, its input is sealed already."""
    with open_store(str(path), bootstrap=True) as store:
        charged = made or charge(str(path), **options)
        if made is None:
            name = codec.unpack_as(runs.RunRecord, charged.record).name
            latest = store.read(runs.latest, name)
            charged = msgspec.structs.replace(charged, seen=latest.run_id if latest else "")
        with Keeper(store, charged) as keeper:
            run_id = codec.unpack_as(runs.RunRecord, charged.record).run_id
            found = Serving(store, keeper, run_id)
            if rows is not None:
                assert found.fill(rows, blocks) == rows
            try:
                yield found
            finally:
                for line in found.lines:
                    line.close()
