"""The part writer thread of a Spark task: error replies of the ledger service, and failures of the thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast import failpoints
from holdfast.errors import StoreError
from holdfast.spark import ledger_protocol, part_writer
from holdfast.spark.executor_writes import WriteIntervals
from holdfast.spark.ledger_client import ServiceAddress, ServiceLost
from holdfast.spark.part_writer import PartWriterThread
from holdfast.spark.sinks import OutputFull, OutputReadOnly, ParquetSink
from holdfast.spark.sinks.iceberg_files import IcebergWriterConfig as IcebergWriter
from holdfast.spark.write_access import WriteAccess

ADDRESS = ServiceAddress("127.0.0.1", 1, "token")


class FakeLedgerClient:
    """A fake client. It returns the replies in order and raises an exception reply. At the end it replies "over"."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.requests: list[Any] = []

    def request(self, message: Any, *attachments: Any) -> tuple[Any, memoryview]:
        self.requests.append(message)
        if not isinstance(message, ledger_protocol.RequestPart):
            return ledger_protocol.Ok(), memoryview(b"")
        reply = self.replies.pop(0) if self.replies else ledger_protocol.PartAssignment("over")
        if isinstance(reply, BaseException):
            raise reply
        return reply, memoryview(b"")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def short_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "RETRY_DELAY_S", 0.01)


def run_part_writer(client: FakeLedgerClient) -> PartWriterThread:
    writer = PartWriterThread(ADDRESS, WriteAccess())
    writer._client = client  # type: ignore[assignment]
    with writer:
        writer.finish(all_rows=True)
    return writer


@pytest.fixture
def sink(tmp_path: Path) -> bytes:
    """The configuration of an output that this process can write."""
    parquet = ParquetSink(tmp_path / "out")
    parquet.begin("run-1", "labels", pa.schema([("id", pa.int64())]))
    return msgspec.json.encode(parquet.spec())


def test_store_error_reply_does_not_stop_the_part_writer() -> None:
    client = FakeLedgerClient(
        StoreError(what="read"), StoreError(what="read"), ledger_protocol.PartAssignment("wait")
    )
    assert run_part_writer(client).can_write
    assert len(client.requests) == 4


def test_lost_service_stops_the_part_writer() -> None:
    client = FakeLedgerClient(ServiceLost(why="gone"))
    run_part_writer(client)
    assert len(client.requests) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_task_does_not_wait_for_a_crashed_part_writer() -> None:
    run_part_writer(FakeLedgerClient(MemoryError()))


def test_part_writer_retries_while_the_output_is_full(sink: bytes) -> None:
    client = FakeLedgerClient(ledger_protocol.PartAssignment("wait", sink=sink))
    with failpoints.on("spark.check_output", raises=OutputFull(path="/out"), times=2) as check:
        assert run_part_writer(client).can_write
    assert check.hits == 3
    assert not [one for one in client.requests if isinstance(one, ledger_protocol.ReportBroken)]


def test_part_writer_reports_a_read_only_output_as_broken(sink: bytes) -> None:
    client = FakeLedgerClient(ledger_protocol.PartAssignment("wait", sink=sink))
    read_only = OutputReadOnly(path="/out")
    with failpoints.on("spark.check_output", raises=read_only, times=1):
        assert not run_part_writer(client).can_write
    [broken] = [one for one in client.requests if isinstance(one, ledger_protocol.ReportBroken)]
    assert broken.error[0] == "output_read_only"


def test_repr_hides_credentials() -> None:
    writer_config = IcebergWriter("", "r", "s3://b/t", [], {"s3.secret-access-key": "hidden"})
    work = ledger_protocol.PartAssignment("write", writer=b"hidden")
    body = WriteIntervals(b"hidden", WriteAccess({"s3://b": {"key": "hidden"}}))
    assert "hidden" not in repr((writer_config, work, body))
