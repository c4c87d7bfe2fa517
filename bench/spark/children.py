"""Reports of many children at once: `python -m bench.spark.children`.

A real ledger service on a separate store. All children are connections of this one asyncio process and speak
the real protocol. Each child claims rows and reports 32 of them at a time, so that all together send the given
number of reports per second. A report is due at its time even if the previous one is not answered, and its
latency counts from its due time. With `--waiting N`, N more children wait for rows meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from typing import NamedTuple

import pyarrow as pa

from bench.spark.idle_children import (
    REPORT_ROWS,
    RESULT,
    ChildConnection,
    cpu_s,
    wait_for_rows,
)
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

BLOCK_ROWS = 1 << 20


class Measured(NamedTuple):
    reports_s: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    cores: float


class Child:
    """One child: the rows that it holds, and its reports."""

    def __init__(self, line: ChildConnection, data: bytes) -> None:
        self.line = line
        self.data = data
        self.sent: list[float] = []
        self._grant: ledger_protocol.GrantedRowsMessage | None = None
        self._n = 0
        self._rows: list[tuple[int, int]] = []

    async def claim(self, rows: int) -> None:
        answer = await self.line.ask(
            ledger_protocol.Exchange([], ledger_protocol.ClaimRows(rows, rows), 0, 0, 0.0, [])
        )
        assert answer.grant is not None, answer
        self._grant, self._n = answer.grant, 0
        self._rows = [
            (lo, min(lo + REPORT_ROWS, part.hi))
            for part in answer.grant.parts
            for lo in range(part.lo, part.hi, REPORT_ROWS)
        ]

    async def report(self) -> None:
        assert self._grant is not None
        lo, hi = self._rows.pop(0)
        self._n += 1
        done = [FinishedRange(lo, hi, int(RowState.TERMINAL_SUCCESS))]
        move = ledger_protocol.GrantReport(
            epoch=self._grant.epoch,
            report_no=self._n,
            digest=b"%d" % self._n,
            done=done,
            begin=[],
            seqs=b"",
            lo=lo,
            resultless=[],
            size=len(self.data),
        )
        step = ledger_protocol.Exchange([move], None, 0, hi - lo, 0.0, [], [self._grant.epoch])
        answer = await self.line.ask(step, self.data)
        assert not answer.report_replies[0].lost

    async def run(self, first_ns: int, every_ns: int, count: int) -> None:
        for at in range(count):
            due_ns = first_ns + at * every_ns
            if (wait_ns := due_ns - SYSTEM.mono_ns()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            await self.report()
            self.sent.append((SYSTEM.mono_ns() - due_ns) / 1e6)


async def measure(
    address: ServiceAddress, pid: int, children: int, waiting: int, rate: float, seconds: float
) -> Measured:
    values = pa.array(range(REPORT_ROWS), pa.int64())
    data = encode_batch(pa.RecordBatch.from_arrays([values], schema=RESULT))
    each = max(int(rate * seconds / children), 1)
    made = []
    for at in range(children):
        child = Child(await ChildConnection.open(address, f"child/{at}"), data)
        await child.claim(each * REPORT_ROWS)
        made.append(child)
    # One more child holds the rest, so that the waiting children get none.
    lines = [await ChildConnection.open(address, f"child/waiting-{at}") for at in range(waiting)]
    idle = [asyncio.create_task(wait_for_rows(line)) for line in lines]
    await asyncio.sleep(0.2)
    every_ns = int(children / rate * 1e9)
    before, began_ns = cpu_s(pid), SYSTEM.mono_ns()
    first_ns = began_ns + 100_000_000
    await asyncio.gather(
        *(
            child.run(first_ns + every_ns * at // children, every_ns, each)
            for at, child in enumerate(made)
        )
    )
    took_s = (SYSTEM.mono_ns() - began_ns) / 1e9
    cores = (cpu_s(pid) - before) / took_s
    for task in idle:
        task.cancel()
    for line in [*(child.line for child in made), *lines]:
        line.close()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*idle, return_exceptions=True)
    sent = sorted(ms for child in made for ms in child.sent)
    return Measured(
        len(sent) / took_s,
        statistics.median(sent),
        sent[int(len(sent) * 0.95)],
        sent[-1],
        cores,
    )


def one(children: int, waiting: int, rate: float, seconds: float) -> Measured:
    each = max(int(rate * seconds / children), 1)
    rows = children * each * REPORT_ROWS
    with tempfile.TemporaryDirectory(prefix="holdfast-children-") as directory:
        store = open_store(directory, bootstrap=True)
        with contextlib.closing(store):
            # Batches keep a grant whole. Without them the last rows would be shared out.
            policy = RunPolicy(
                lease_ns=600 * 1_000_000_000,
                batch_rows=each * REPORT_ROWS,
                page_rows=each * REPORT_ROWS,
            )
            record = runs.RunRecord(
                run_id=SYSTEM.entropy(8).hex(),
                name="children",
                created_ns=1,
                key=["id"],
                result_schema=encode_schema(RESULT),
                policy=policy,
            )
            charge = ServiceConfig(
                store=directory, token=new_token(), host="127.0.0.1", port=0,
                record=codec.pack(record), is_new_run=True, is_restart=False, file_rows=1 << 30, rate_per_s=0.0,
            )  # fmt: skip
            with ServiceSupervisor(store, charge) as supervisor:
                blocks = BlockUploaderFactory(supervisor.address)()
                put, schema = [], b""
                for lo in range(0, rows, BLOCK_ROWS):
                    hi = min(lo + BLOCK_ROWS, rows)
                    table = pa.table({"id": pa.array(range(lo, hi), pa.int64())})
                    schema = encode_schema(table.schema)
                    put.append((blocks.put_block(encode_stream(table)), hi - lo))
                blocks.close()
                supervisor.request(
                    ledger_protocol.SealInput(put, False, [], schema, "hash", "plan")
                )
                return asyncio.run(
                    measure(supervisor.address, supervisor.pid, children, waiting, rate, seconds)
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--children", type=int, default=400)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="reports per second, of 32 rows each"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    measured = one(args.children, args.waiting, args.rate, args.seconds)
    print(
        f"{args.children} children, {args.waiting} waiting: {measured.reports_s:.0f} of "
        f"{args.rate:.0f} reports/s, p50 {measured.p50_ms:.1f} ms, p95 {measured.p95_ms:.1f} ms, "
        f"max {measured.max_ms:.0f} ms, service {measured.cores:.2f} cores",
        flush=True,
    )


if __name__ == "__main__":
    main()
