"""The executor probe, without executors: the meaning of each finding, and which error is raised."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import holdfast
from holdfast.errors import HoldfastError, from_wire, to_wire
from holdfast.spark import executor_probe, function_pickle
from holdfast.spark.child_job import ChildJob, ProbeRequest
from holdfast.spark.errors import (
    ExecutorUnfit,
    HoldfastDiffers,
    OutputNotShared,
    PythonDiffers,
    RunFailed,
)
from holdfast.spark.ledger_client import LedgerUnreachable, ServiceAddress
from tests.ledger_service.service_rig import kill_idle_children

pytestmark = pytest.mark.timeout(60)

HERE = list(sys.version_info[:2])
OTHER = [3, 8]
# No process listens on this port.
PROBE_JOB = ChildJob(
    address=ServiceAddress("127.0.0.1", 9, "token"),
    run_id="run",
    lo=0,
    hi=-1,
    schema="{}",
    concurrency=1,
    flush_rows=1,
    batch_rows=0,
    rate=False,
    timeout_s=1.0,
    probe=ProbeRequest(),
)
HEADER = msgspec.msgpack.encode(PROBE_JOB)

# --- errors of a failed probe job ---------------------------------------------------------------

ABORTED = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent failure: "
    "Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.7 executor 1): "
)
TRACE = "\n\tat org.apache.spark.api.python.BasePythonRunner.compute(PythonRunner.scala:166)\n\tat java.base/java.lang.Thread.run(Thread.java:840)\n"
OTHER_PYTHON = (
    ABORTED
    + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    + '  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 3301, in main\n'
    + "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor versions.\n"
    + "Please check environment variables PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON are correctly set.\n"
    + TRACE
)
NO_PYTHON = (
    ABORTED
    + 'java.io.IOException: Cannot run program "/opt/env/bin/python3.11": Exec failed, error: 2 (No such file or directory)'
    + TRACE
)
NO_MODULE = (
    ABORTED
    + "org.apache.spark.SparkException: \nError from python worker:\n"
    + "  ModuleNotFoundError: No module named 'pyspark'\nPYTHONPATH was:\n  /opt/spark/jars\n"
    + TRACE
)
LOST = (
    ABORTED + "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)" + TRACE
)


@pytest.mark.parametrize(
    ("text", "kind", "fields"),
    [
        (OTHER_PYTHON, PythonDiffers, {"executor_python": "3.9", "driver_python": "3.11"}),
        (
            NO_PYTHON,
            ExecutorUnfit,
            {"why": "there is no program /opt/env/bin/python3.11; see PYSPARK_PYTHON"},
        ),
        (
            NO_MODULE,
            ExecutorUnfit,
            {"module": "pyspark", "why": "the executor's Python does not have this module"},
        ),
    ],
    ids=["another Python", "no Python", "no module"],
)
def test_failed_probe_job_names_what_the_executor_lacks(
    text: str, kind: type[HoldfastError], fields: dict[str, str]
) -> None:
    found = executor_probe.probe_job_error("labels", RuntimeError(text))
    assert type(found) is kind
    assert found.fields == fields
    assert "no call was made" in found.hint
    assert "\n" not in str(found)


def test_other_probe_job_failure_is_a_one_line_run_failed() -> None:
    found = executor_probe.probe_job_error("labels", RuntimeError(LOST))
    assert type(found) is RunFailed
    assert (found.name, "\n" in str(found)) == ("labels", False)
    assert "ExecutorLostFailure" in found.why


# --- the reply of a task ------------------------------------------------------------------------


def probe_reply(body: Any) -> list[Any]:
    """The reply of the probe body, run here over one batch as Spark does."""
    [batch] = body(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
    [text] = batch.column("finding").to_pylist()
    reply: list[Any] = json.loads(text)
    return reply


def test_executor_with_another_holdfast_version_names_both_versions() -> None:
    error = from_wire(probe_reply(executor_probe.probe_body("0", HERE, HEADER, b"", "")))
    assert type(error) is HoldfastDiffers
    assert (error.has, error.driver) == (holdfast.__version__, "0")
    assert error.executor == os.uname().nodename


def test_executor_without_holdfast_returns_holdfast_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "holdfast", None)
    body = executor_probe.probe_body("0.9", HERE, HEADER, b"", "")
    error = from_wire(probe_reply(body))
    assert type(error) is HoldfastDiffers
    assert ("holdfast" in error.why, error.driver) == (True, "0.9")


def test_executor_with_another_python_names_both_versions_and_starts_no_child() -> None:
    error = from_wire(
        probe_reply(executor_probe.probe_body(holdfast.__version__, OTHER, b"no header", b"", ""))
    )
    assert type(error) is PythonDiffers
    here = ".".join(map(str, HERE))
    assert (error.executor_python, error.driver_python) == (here, "3.8")
    assert (
        from_wire(executor_probe.probe_executor("host-1", OTHER, b"no header", b"", "")).executor
        == "host-1"
    )


@pytest.fixture
def _no_child_is_left() -> Iterator[None]:
    yield
    kill_idle_children()


class ExitsWhenUnpickled:
    """Exits the process that unpickles it."""

    def __call__(self, row: Any) -> Any:
        return {}

    def __reduce__(self) -> Any:
        return os._exit, (7,)


@pytest.mark.usefixtures("_no_child_is_left")
def test_probe_reports_the_exit_status_of_a_child_that_died_loading() -> None:
    error = from_wire(
        executor_probe.probe_executor(
            "host-1", HERE, HEADER, function_pickle.dump_function(ExitsWhenUnpickled(), ()), ""
        )
    )
    assert type(error) is ExecutorUnfit
    assert (error.executor, error.exit_status) == ("host-1", "7")
    assert error.why == "a child process died while it loaded the function"


@pytest.mark.usefixtures("_no_child_is_left")
def test_probe_reports_the_address_of_an_unreachable_ledger() -> None:
    error = from_wire(
        executor_probe.probe_executor(
            "host-1", HERE, HEADER, function_pickle.dump_function(len, ()), ""
        )
    )
    assert type(error) is LedgerUnreachable
    assert (error.host, error.port, error.executor) == ("127.0.0.1", "9", "host-1")


# --- the error that is raised -------------------------------------------------------------------

FINDINGS = [
    HoldfastDiffers(executor="b", has="1", driver="2"),
    HoldfastDiffers(executor="a", has="1", driver="2"),
    PythonDiffers(executor="a", executor_python="3.9", driver_python="3.11"),
    ExecutorUnfit(executor="a", why="died"),
    function_pickle.NotLoadable(executor="a", module="torch"),
    OutputNotShared(executor="a", path="/out"),
]


def test_first_error_does_not_depend_on_executor_order() -> None:
    for some in (FINDINGS, FINDINGS[2:], FINDINGS[3:], FINDINGS[4:]):
        found = {
            str(executor_probe.first_error([to_wire(one) for one in order]))
            for order in itertools.permutations(some)
        }
        expected = some[1] if some is FINDINGS else some[0]
        assert found == {str(expected)}


def test_first_error_of_no_findings_is_none() -> None:
    assert executor_probe.first_error([]) is None


def test_output_marker_exists_only_during_the_probe(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with executor_probe.output_marker({"kind": "parquet", "path": str(out)}) as marker:
        assert Path(marker).parent == out
        assert Path(marker).exists()
    assert not (tmp_path / "a").exists()
    with executor_probe.output_marker({"kind": "parquet", "path": "s3://bucket/out"}) as marker:
        assert marker == ""
