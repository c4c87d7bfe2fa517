"""A test rig: a ledger service, and raw connections to it.

    with service_thread(rows=100) as service:
        worker = service.connect()
        grant = worker.claim(10, begin=10)
        worker.report(grant, done=[(0, 10)])

`service_thread` runs the service in a thread of this process, on a store in memory. `running_service` runs it as a
driver does, in a real process on an embedded store, for tests in which that process dies, stops or restarts. It takes
a hundred times as long to start.

`RawConnection` sends single frames. It can repeat, omit and falsify requests, unlike `LedgerClient`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.ledger import runs
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.log import load_run
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol, spark_task
from holdfast.spark.arrow_rows import decode_table, encode_batch, encode_stream
from holdfast.spark.ledger_client import BlockUploader, LedgerClient, ServiceAddress
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.run_data import RunInput, RunOutcomes, encode_schema
from holdfast.spark.service import LedgerService, ServiceConfig
from holdfast.spark.service_supervisor import ServiceSupervisor, new_token
from holdfast.spark.sinks.parquet import read_parts
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.process.watch import until

WAIT_S = 20.0
S = 1_000_000_000
RESULT_SCHEMA = pa.schema([pa.field("y", pa.int64())])


def input_table(lo: int, hi: int) -> pa.Table:
    return pa.table({"id": pa.array(range(lo, hi), pa.int64())})


def result_table(values: Sequence[int]) -> pa.Table:
    return pa.Table.from_arrays([pa.array(values, pa.int64())], schema=RESULT_SCHEMA)


def service_config(
    url: str,
    *,
    name: str = "job",
    sink: dict[str, str | int | bool] | None = None,
    policy: RunPolicy | None = None,
    rate_per_s: float = 0.0,
    tokens_per_min: float = 0.0,
    file_rows: int = 1 << 20,
    file_bytes: int = FILE_BYTES,
    record: runs.RunRecord | None = None,
    expected_latest: str = "",
) -> ServiceConfig:
    run_record = record or runs.RunRecord(
        run_id=SYSTEM.entropy(8).hex(),
        name=name,
        created_ns=1,
        key=["id"],
        result_schema=encode_schema(RESULT_SCHEMA),
        sink=sink or {},
        policy=policy or RunPolicy(backoff_first_ns=0, backoff_max_ns=0),
    )
    return ServiceConfig(
        store=url,
        token=new_token(),
        host="127.0.0.1",
        port=0,
        record=codec.pack(run_record),
        is_new_run=record is None,
        is_restart=False,
        file_rows=file_rows,
        file_bytes=file_bytes,
        rate_per_s=rate_per_s,
        tokens_per_min=tokens_per_min,
        expected_latest=expected_latest,
    )


@dataclass
class ClaimedRows:
    epoch: int
    ranges: list[tuple[int, int]]
    attempts: list[int]
    begun: int
    isolated: bool
    rows: pa.Table
    report_no: int = 0

    @property
    def seqs(self) -> list[int]:
        return [seq for lo, hi in self.ranges for seq in range(lo, hi)]


def input_ids(grants: Sequence[ClaimedRows]) -> list[int]:
    """The ids of the granted input rows, in order."""
    return sorted(seq for grant in grants for seq in grant.rows.column("id").to_pylist())


class RawConnection:
    """One connection to the ledger service. The test sends and receives single frames."""

    def __init__(
        self, address: ServiceAddress, owner: str = "child/test", token: str | None = None
    ) -> None:
        self.sock = socket.create_connection((address.host, address.port))
        self.known_epochs: list[int] = []
        self.welcome = self.request(
            ledger_protocol.Hello(address.token if token is None else token, owner)
        )

    def send(self, message: ledger_protocol.WireMessage, *attached: bytes) -> None:
        ledger_protocol.send(self.sock, message, *attached)

    def receive(self) -> Any:
        answer, self.attachment = ledger_protocol.receive_reply(self.sock)
        return answer

    def request(self, message: ledger_protocol.WireMessage, *attached: bytes) -> Any:
        self.send(message, *attached)
        return self.receive()

    def wait_closed(self) -> bool:
        """Wait until the service closes the connection. False if it sends a byte instead."""
        ready, _, _ = select.select([self.sock], [], [], WAIT_S)
        assert ready, "the line stays open"
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()

    # --- claims and reports ---------------------------------------------------------------------

    def exchange(
        self,
        claim: ledger_protocol.ClaimRows | None,
        *reports: ledger_protocol.GrantReport,
        data: bytes = b"",
        wait_ms: int = 0,
    ) -> Any:
        request = replace(
            exchange_request(claim, *reports, wait_ms=wait_ms), known_epochs=self.known_epochs
        )
        return self.request(request, data)

    def claim(self, rows: int, *, begin: int = 0, wait_ms: int = 0) -> ClaimedRows:
        answer = self.exchange(ledger_protocol.ClaimRows(rows, begin), wait_ms=wait_ms)
        assert answer.state == "granted", answer
        return self.record_grant(answer)

    def claim_all(self, rows: int) -> list[ClaimedRows]:
        """Claim and begin `rows` rows. Near the end of the input one claim gets fewer rows than requested."""
        grants: list[ClaimedRows] = []
        while sum(len(grant.seqs) for grant in grants) < rows:
            grants.append(self.claim(rows, begin=rows))
        return grants

    def record_grant(self, answer: ledger_protocol.ExchangeReply) -> ClaimedRows:
        grant = answer.grant
        assert grant is not None
        self.known_epochs.append(grant.epoch)
        ranges = grant.ranges
        return ClaimedRows(
            grant.epoch,
            [(part.lo, part.hi) for part in ranges],
            [part.attempt for part in ranges],
            grant.begun,
            grant.isolated,
            decode_table(self.attachment),
        )

    def report(
        self,
        grant: ClaimedRows,
        *,
        done: Sequence[tuple[int, int]] = (),
        others: Sequence[ledger_protocol.ResultlessRowReport] = (),
        begin: Sequence[tuple[int, int]] = (),
        claim: ledger_protocol.ClaimRows | None = None,
    ) -> Any:
        grant_report, data = next_report(grant, done=done, others=others, begin=begin)
        return self.exchange(claim, grant_report, data=data)


def exchange_request(
    claim: ledger_protocol.ClaimRows | None, *reports: ledger_protocol.GrantReport, wait_ms: int = 0
) -> ledger_protocol.Exchange:
    return ledger_protocol.Exchange(list(reports), claim, wait_ms, 1, 0.5, [1])


def next_report(
    grant: ClaimedRows,
    *,
    done: Sequence[tuple[int, int]] = (),
    others: Sequence[ledger_protocol.ResultlessRowReport] = (),
    begin: Sequence[tuple[int, int]] = (),
) -> tuple[ledger_protocol.GrantReport, bytes]:
    """The next report of a grant: success ranges (y = 2 * seq) and rows without a result."""
    grant.report_no += 1
    seqs = [seq for lo, hi in done for seq in range(lo, hi)]
    data = encode_batch(result_table([2 * seq for seq in seqs]).to_batches()[0]) if seqs else b""
    finished = [FinishedRange(lo, hi, int(RowState.TERMINAL_SUCCESS)) for lo, hi in done]
    finished += [
        FinishedRange(o.seq, o.seq + 1, o.state, o.error_class, o.delay_ns) for o in others
    ]
    first = seqs[0] if seqs else 0
    dense = not seqs or seqs[-1] - first + 1 == len(seqs)
    seq_offsets = b"" if dense else b"".join((s - first).to_bytes(4, "little") for s in seqs)
    digest = repr((finished, list(begin), data)).encode()[-64:]
    grant_report = ledger_protocol.GrantReport(
        epoch=grant.epoch,
        report_no=grant.report_no,
        digest=digest,
        done=finished,
        begin=list(begin),
        seqs=seq_offsets,
        lo=first,
        resultless=list(others),
        size=len(data),
    )
    return grant_report, data


class MemoryStore(InProcessStore):
    """A store in memory for several services, one after another. A service that stops does not close it."""

    def __init__(self) -> None:
        super().__init__("memory:", MemoryBackend(), SYSTEM)

    def close(self) -> None:
        pass


class ServiceThread:
    """The ledger service in a thread of this process, with the interface of `ServiceSupervisor`."""

    def __init__(self, store: Store, config: ServiceConfig) -> None:
        self.service = LedgerService(config, store)
        self.config = replace(config, port=self.service.port)
        self._thread = threading.Thread(
            target=self.service.serve, name="ledger service", daemon=True
        )
        self._thread.start()
        self._client = LedgerClient(self.local_address, "driver", reconnect_s=0)

    address = ServiceSupervisor.address
    local_address = ServiceSupervisor.local_address

    def request(self, message: ledger_protocol.WireMessage) -> Any:
        answer, _ = self._client.request(message)
        return answer

    def stop(self) -> None:
        """Stop like a service whose driver has exited."""
        if not self._thread.is_alive():
            return
        self._client.close()
        self.service.drain()
        self.service.stop()
        self._thread.join()

    def __enter__(self) -> ServiceThread:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@dataclass
class ServiceRig:
    store: Store
    supervisor: ServiceSupervisor | ServiceThread
    run_id: str
    connections: list[RawConnection] = field(default_factory=list)

    def connect(self, owner: str = "child/test") -> RawConnection:
        connection = RawConnection(self.supervisor.address, owner)
        self.connections.append(connection)
        return connection

    def put_input(self, rows: int, blocks: int = 1) -> int:
        """Upload an input of `rows` rows in `blocks` blocks and seal it."""
        uploader = BlockUploader(self.supervisor.local_address)
        bounds = [rows * i // blocks for i in range(blocks + 1)]
        uploaded = [
            (uploader.put_block(encode_stream(input_table(lo, hi))), hi - lo)
            for lo, hi in pairwise(bounds)
            if hi > lo
        ]
        uploader.close()
        return int(self.supervisor.request(seal_request(uploaded)).size)

    def seal_input(self, rows: int | None, blocks: int) -> None:
        if rows is not None:
            assert self.put_input(rows, blocks) == rows

    def status(self) -> ledger_protocol.RunStatusReply:
        status: ledger_protocol.RunStatusReply = self.supervisor.request(
            ledger_protocol.GetRunStatus()
        )
        return status

    def progress(self) -> runs.RunProgress:
        return codec.unpack_as(runs.RunProgress, self.status().progress)

    def record(self) -> runs.RunRecord:
        return self.store.read(runs.get_existing, self.run_id)

    def load_scheduler(self) -> RunScheduler:
        """The run scheduler rebuilt from the log."""
        return load_run(self.store, self.run_id)

    def outcomes(self) -> RunOutcomes:
        record = self.record()
        return RunOutcomes(self.store, record, RunInput(self.store, record))

    def wait_until(self, condition: Any) -> ledger_protocol.RunStatusReply:
        """Poll the run status until the condition holds."""

        def find() -> ledger_protocol.RunStatusReply | None:
            status = self.status()
            return status if condition(status) else None

        try:
            return until(find, "the condition", WAIT_S)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.status()} {self.progress()}") from None

    def wait_over(self) -> ledger_protocol.RunStatusReply:
        return self.wait_until(lambda stand: stand.over)

    def wait_exit(self) -> int:
        """Wait for the service process to exit. Return its exit status."""
        assert isinstance(self.supervisor, ServiceSupervisor)
        pidfd = os.pidfd_open(self.supervisor.pid)
        try:
            ready, _, _ = select.select([pidfd], [], [], WAIT_S)
            assert ready, "the service lives on"
        finally:
            os.close(pidfd)
        process = self.supervisor._process
        assert process is not None
        return process.process.wait()


def kill_idle_children() -> None:
    """Kill the idle child processes that were prestarted in this process."""
    spark_task.children.discard_idle()


def output_ids(path: Path) -> list[int]:
    return [
        seq
        for file in read_parts(path).files
        for seq in pq.read_table(file).column("id").to_pylist()
    ]


INPUT_SCHEMA = pa.schema([pa.field("id", pa.int64())])


def seal_request(blocks: list[tuple[int, int]]) -> ledger_protocol.SealInput:
    return ledger_protocol.SealInput(blocks, False, [], encode_schema(INPUT_SCHEMA), "hash", "plan")


@contextlib.contextmanager
def running_service(
    path: Path,
    rows: int | None = None,
    *,
    blocks: int = 1,
    config: ServiceConfig | None = None,
    **options: Any,
) -> Iterator[ServiceRig]:
    """Run a ledger service process on a separate store. With `rows`, the input is already sealed."""
    with open_store(str(path), bootstrap=True) as store:
        config = config or _next_config(store, service_config(str(path), **options))
        with ServiceSupervisor(store, config) as supervisor, _rig(store, supervisor) as rig:
            rig.seal_input(rows, blocks)
            yield rig


@contextlib.contextmanager
def service_thread(
    rows: int | None = None,
    *,
    store: MemoryStore | None = None,
    blocks: int = 1,
    config: ServiceConfig | None = None,
    **options: Any,
) -> Iterator[ServiceRig]:
    """Run a ledger service in this process, on a new store in memory unless a `store` is given."""
    store = store or MemoryStore()
    config = config or _next_config(store, service_config("memory:", **options))
    with ServiceThread(store, config) as supervisor, _rig(store, supervisor) as rig:
        rig.seal_input(rows, blocks)
        yield rig


def _next_config(store: Store, config: ServiceConfig) -> ServiceConfig:
    """The configuration of a driver that has seen the latest run of the name."""
    latest = store.read(runs.get_latest, codec.unpack_as(runs.RunRecord, config.record).name)
    return replace(config, expected_latest=latest.run_id if latest else "")


@contextlib.contextmanager
def _rig(store: Store, supervisor: ServiceSupervisor | ServiceThread) -> Iterator[ServiceRig]:
    rig = ServiceRig(
        store, supervisor, codec.unpack_as(runs.RunRecord, supervisor.config.record).run_id
    )
    try:
        yield rig
    finally:
        for connection in rig.connections:
            connection.close()
