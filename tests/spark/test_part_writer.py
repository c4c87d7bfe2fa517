"""The thread of a Spark task that writes parts: what it does when the ledger service refuses, or it fails itself."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import StoreError
from holdfast.spark import part_writer, wire
from holdfast.spark.client import Address, ServiceLost
from holdfast.spark.executor_writes import WriteIntervals
from holdfast.spark.part_writer import PartWriter
from holdfast.spark.sinks import OutputFull, OutputReadOnly
from holdfast.spark.sinks.iceberg_files import PartWriter as IcebergWriter
from holdfast.spark.write_access import WriteAccess

ADDRESS = Address("127.0.0.1", 1, "token")
SINK = b'{"kind": "parquet", "path": "/nowhere"}'


class Service:
    """Answers requests in order; an exception is raised. When it has no answer left, all is written."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def ask(self, message: Any, *attached: Any) -> tuple[Any, memoryview]:
        self.asked.append(message)
        if not isinstance(message, wire.TakePart):
            return wire.Ok(), memoryview(b"")
        answer = self.answers.pop(0) if self.answers else wire.PartWork("over")
        if isinstance(answer, BaseException):
            raise answer
        return answer, memoryview(b"")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "REFUSED_S", 0.01)


def run(service: Service) -> PartWriter:
    writer = PartWriter(ADDRESS, WriteAccess())
    writer._client = service  # type: ignore[assignment]
    with writer:
        writer.finish(all_rows=True)
    return writer


def checks(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> list[wire.PartWork]:
    left, seen = list(errors), list[wire.PartWork]()

    def check(work: wire.PartWork) -> None:
        seen.append(work)
        if left:
            raise left.pop(0)

    monkeypatch.setattr(part_writer, "check", check)
    return seen


def test_a_refusal_does_not_end_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch)
    service = Service(StoreError(what="read"), StoreError(what="read"), wire.PartWork("wait"))
    assert run(service).fit
    assert len(service.asked) == 4


def test_a_lost_service_ends_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch)
    service = Service(ServiceLost(why="gone"))
    run(service)
    assert len(service.asked) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_fails_otherwise_keeps_no_task_waiting() -> None:
    run(Service(MemoryError()))


def test_an_output_that_is_full_for_a_while_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checks(monkeypatch, OutputFull(path="/out"), OutputFull(path="/out"))
    service = Service(wire.PartWork("wait", sink=SINK))
    assert run(service).fit
    assert len(seen) == 3
    assert not [one for one in service.asked if isinstance(one, wire.Broken)]


def test_an_output_that_cannot_be_written_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch, OutputReadOnly(path="/out"))
    service = Service(wire.PartWork("wait", sink=SINK))
    assert not run(service).fit
    [broken] = [one for one in service.asked if isinstance(one, wire.Broken)]
    assert broken.error[0] == "output_read_only"


def test_credentials_are_not_shown() -> None:
    told = IcebergWriter("", "r", "s3://b/t", [], {"s3.secret-access-key": "hidden"})
    work = wire.PartWork("write", writer=b"hidden")
    body = WriteIntervals(b"hidden", WriteAccess({"s3://b": {"key": "hidden"}}))
    assert "hidden" not in repr((told, work, body))
