"""Reports per second of one child beside children that wait for rows: `python -m bench.spark.idle_children`.

A real ledger service on a separate store. All children are connections of this one process and speak the
real protocol. One child holds every row and reports 32 of them at a time. The waiting children request rows
and get none. Their cost is the work of the service at each report although no row is released.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.ledger import runs
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark.arrow_rows import encode_batch, encode_stream
from holdfast.spark.ledger_client import BlockUploaderFactory, ServiceAddress
from holdfast.spark.run_data import encode_schema
from holdfast.spark.service import ServiceConfig
from holdfast.spark.service_supervisor import ServiceSupervisor, new_token
from holdfast.store import open as open_store

REPORT_ROWS = 32
WAIT_MS = 500
RESULT = pa.schema([pa.field("y", pa.int64())])
_LENGTHS = struct.Struct("<II")
_decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ledger_protocol.LedgerReply)


class ChildConnection:
    """One child: a connection that sends frames and reads their answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: ServiceAddress, owner: str) -> ChildConnection:
        line = cls(*await asyncio.open_connection(address.host, address.port))
        await line.ask(ledger_protocol.Hello(address.token, owner))
        return line

    async def ask(self, message: ledger_protocol.WireMessage, data: bytes = b"") -> Any:
        head = msgspec.msgpack.encode(message)
        self._writer.write(_LENGTHS.pack(len(head), len(data)) + head + data)
        head_size, size = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
        answer = _decode.decode(await self._reader.readexactly(head_size))
        if size:
            await self._reader.readexactly(size)
        return answer

    def close(self) -> None:
        self._writer.close()


async def claim_all(line: ChildConnection, rows: int) -> list[ledger_protocol.GrantedRowsMessage]:
    grants: list[ledger_protocol.GrantedRowsMessage] = []
    while sum(part.hi - part.lo for grant in grants for part in grant.ranges) < rows:
        epochs = [grant.epoch for grant in grants]
        request = ledger_protocol.Exchange(
            [], ledger_protocol.ClaimRows(1 << 19, 1 << 19), 0, 0, 0.0, [], epochs
        )
        answer = await line.ask(request)
        assert answer.grant is not None, answer
        grants.append(answer.grant)
    return grants


async def report_all(
    line: ChildConnection, grants: list[ledger_protocol.GrantedRowsMessage], reports: int
) -> float:
    """Reports per second."""
    batch = pa.RecordBatch.from_arrays([pa.array(range(REPORT_ROWS), pa.int64())], schema=RESULT)
    data = encode_batch(batch)
    began_ns = SYSTEM.mono_ns()
    sent = 0
    for grant in grants:
        n = 0
        for part in grant.ranges:
            for lo in range(part.lo, part.hi - REPORT_ROWS + 1, REPORT_ROWS):
                n += 1
                done = [FinishedRange(lo, lo + REPORT_ROWS, int(RowState.TERMINAL_SUCCESS))]
                move = ledger_protocol.GrantReport(
                    epoch=grant.epoch,
                    report_no=n,
                    digest=b"%d" % n,
                    done=done,
                    begin=[],
                    seqs=b"",
                    lo=lo,
                    resultless=[],
                    size=len(data),
                )
                step = ledger_protocol.Exchange([move], None, 0, REPORT_ROWS, 0.0, [])
                answer = await line.ask(step, data)
                assert not answer.report_replies[0].lost
                sent += 1
                if sent == reports:
                    return sent / ((SYSTEM.mono_ns() - began_ns) / 1e9)
    raise AssertionError("too few rows")


async def wait_for_rows(line: ChildConnection) -> None:
    while True:
        await line.ask(
            ledger_protocol.Exchange([], ledger_protocol.ClaimRows(100, 100), WAIT_MS, 0, 0.0, [])
        )


async def measure(address: ServiceAddress, idle: int, rows: int, reports: int) -> float:
    worker = await ChildConnection.open(address, "child/worker")
    grants = await claim_all(worker, rows)
    lines = [await ChildConnection.open(address, f"child/idle-{at}") for at in range(idle)]
    waiting = [asyncio.create_task(wait_for_rows(line)) for line in lines]
    await asyncio.sleep(0)
    rate = await report_all(worker, grants, reports)
    for task in waiting:
        task.cancel()
    for line in [worker, *lines]:
        line.close()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*waiting, return_exceptions=True)
    return rate


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def one(idle: int, reports: int) -> tuple[float, float]:
    """Reports per second, and cores of the service."""
    rows = 2 * reports * REPORT_ROWS
    with tempfile.TemporaryDirectory(prefix="holdfast-idle-") as directory:
        store = open_store(directory, bootstrap=True)
        with contextlib.closing(store):
            record = runs.RunRecord(
                run_id=SYSTEM.entropy(8).hex(),
                name="idle",
                created_ns=1,
                key=["id"],
                result_schema=encode_schema(RESULT),
                policy=RunPolicy(lease_ns=600 * 1_000_000_000),
            )
            charge = ServiceConfig(
                store=directory, token=new_token(), host="127.0.0.1", port=0,
                record=codec.pack(record), is_new_run=True, is_restart=False, file_rows=1 << 30, rate_per_s=0.0,
            )  # fmt: skip
            with ServiceSupervisor(store, charge) as supervisor:
                table = pa.table({"id": pa.array(range(rows), pa.int64())})
                blocks = BlockUploaderFactory(supervisor.address)()
                n = blocks.put_block(encode_stream(table))
                blocks.close()
                schema = encode_schema(table.schema)
                supervisor.request(
                    ledger_protocol.SealInput([(n, rows)], False, [], schema, "hash", "plan")
                )
                before, began_ns = cpu_s(supervisor.pid), SYSTEM.mono_ns()
                rate = asyncio.run(measure(supervisor.address, idle, rows, reports))
                cores = (cpu_s(supervisor.pid) - before) / ((SYSTEM.mono_ns() - began_ns) / 1e9)
                return rate, cores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, nargs="*", default=[0, 50, 200, 400])
    parser.add_argument("--reports", type=int, default=500)
    args = parser.parse_args()
    for idle in args.idle:
        rate, cores = one(idle, args.reports)
        print(f"{idle:5} waiting: {rate:8.0f} reports/s, service {cores:.2f} cores", flush=True)


if __name__ == "__main__":
    main()
