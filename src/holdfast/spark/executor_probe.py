"""The executor probe before a run: one small Spark job with a task per slot.

    run_probe_job              on the driver: collects the errors of all tasks
    probe_body                 in Spark's Python worker; shipped by value, so it runs without holdfast installed
    probe_executor, probe_in_child   on the executor: Python, the function in a child process, the ledger, the output

The probe makes no call and stores nothing: the next `run` resumes a run that was refused here. A local
master with the driver's own Python needs no probe job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import __version__
from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError, from_wire, to_wire
from holdfast.spark import function_pickle, spark_jobs
from holdfast.spark.child_job import ChildJob, ProbeRequest
from holdfast.spark.errors import (
    ExecutorUnfit,
    HoldfastDiffers,
    OutputNotShared,
    PythonDiffers,
    RunFailed,
)
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.sinks.location import locate
from holdfast.spark.sinks.parquet_files import translate_os_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_MAX = 64
# How long an executor tries to reach the ledger, and how often it looks for the marker file.
LEDGER_REACH_S = 3.0
MARKER_TRIES = 5
MARKER_RETRY_S = 0.2
LOCAL_SINKS = ("parquet", "delta")

_MISMATCH = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version: ([\d.]+).*?driver: ([\d.]+)")
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]*)"')
_NO_MODULE = re.compile(r"No module named '([^']*)'")


# --- on the driver ------------------------------------------------------------------------------


def needs_job(spark: SparkSession) -> bool:
    """Whether tasks run on other machines or in another Python."""
    if spark_jobs.is_connect(spark):
        return True
    context: Any = spark.sparkContext
    master = str(context.master)
    if not master.startswith("local") or master.startswith("local-cluster"):
        return True
    return "PYSPARK_PYTHON" in os.environ and context.pythonExec != sys.executable


def check_local_imports(function: Callable[..., Any]) -> None:
    """Check locally that the first imports of the function are installed."""
    missing = function_pickle.find_missing_import(function)
    if missing:
        raise function_pickle.NotLoadable(module=missing, executor=socket.gethostname())


def run_probe_job(
    spark: SparkSession, job: ChildJob, function: bytes, marker: str, tasks: int
) -> list[list[Any]]:
    """Run the probe job, whose `job.probe` is set. Return the errors of the tasks in wire form."""
    header = msgspec.msgpack.encode(job)
    python = list(sys.version_info[:2])
    body = probe_body(__version__, python, header, function, marker)
    count = min(tasks, TASKS_MAX)
    with spark_jobs.use_driver_python(spark):
        rows = spark.range(0, count, 1, count).mapInArrow(body, "finding string").collect()
    return [finding for row in rows if (finding := json.loads(row.finding))]


def first_error(errors: list[list[Any]]) -> HoldfastError | None:
    """Return the error to raise, independent of the order of the executors' replies."""
    if not errors:
        return None
    return from_wire(
        min(errors, key=lambda one: (ERROR_PRECEDENCE.get(one[0], 0), json.dumps(one)))
    )


def probe_job_error(name: str, error: Exception) -> HoldfastError:
    """Translate a failure of the probe job itself."""
    text = str(error)
    if found := _MISMATCH.search(text):
        return PythonDiffers(executor_python=found[1], driver_python=found[2])
    if found := _NO_PROGRAM.search(text):
        return ExecutorUnfit(why=f"there is no program {found[1]}; see PYSPARK_PYTHON")
    if found := _NO_MODULE.search(text):
        return ExecutorUnfit(module=found[1], why="the executor's Python does not have this module")
    return RunFailed(name=name, why=spark_jobs.error_reason(error))


@contextlib.contextmanager
def output_marker(sink: Mapping[str, Any]) -> Iterator[str]:
    """Create a marker file in the output's directory for the duration of the context; "" for an
    output that is not on a disk.
    """
    directory = locate(str(sink["path"])).local if sink.get("kind") in LOCAL_SINKS else None
    if directory is None:
        yield ""
        return
    created = [one for one in (directory, *directory.parents) if not one.exists()]
    file = directory / f".holdfast-probe-{SYSTEM.entropy(8).hex()}"
    with translate_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file.touch()
    try:
        yield str(file)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
            for one in created:
                one.rmdir()


# --- on an executor -----------------------------------------------------------------------------


def probe_body(
    version: str, python: list[int], header: bytes, function: bytes, marker: str
) -> Callable[[Any], Iterator[Any]]:
    """Build the body of the job. It uses no name of this module: Spark ships it by value."""

    def body(batches: Any) -> Iterator[Any]:
        import json
        import socket

        import pyarrow as pa

        for _ in batches:
            pass
        host = socket.gethostname()
        try:
            from holdfast import __version__

            finding = [
                "holdfast_differs",
                {"executor": host, "has": __version__, "driver": version},
            ]
            if __version__ == version:
                from holdfast.spark.executor_probe import probe_executor

                finding = probe_executor(host, python, header, function, marker)
        except ImportError as error:
            finding = ["holdfast_differs", {"executor": host, "why": str(error), "driver": version}]
        yield pa.RecordBatch.from_pydict({"finding": [json.dumps(finding)]})

    return body


def probe_executor(
    host: str, python: list[int], header: bytes, function: bytes, marker: str
) -> list[Any]:
    """Probe in Spark's Python worker. Return an error in wire form, or an empty list."""
    try:
        if list(sys.version_info[:2]) != python:
            raise PythonDiffers(
                executor_python=".".join(map(str, sys.version_info[:2])),
                driver_python=".".join(map(str, python)),
            )
        _probe_child(msgspec.msgpack.decode(header, type=ChildJob), function)
        if marker and not _is_marker_visible(marker):
            raise OutputNotShared(path=os.path.dirname(marker))
    except HoldfastError as error:
        code_of, fields = to_wire(error)
        return [code_of, {**{name: str(one) for name, one in fields.items()}, "executor": host}]
    return []


def _probe_child(job: ChildJob, function: bytes) -> None:
    """Unpickle the function in a child process, which the run then reuses."""
    from holdfast.spark import spark_task

    job = msgspec.structs.replace(job, paths=[path for path in sys.path if path])
    child = spark_task.children.take()
    result = child.run_job(job, function)
    if result is None:
        status = child.end()
        raise ExecutorUnfit(
            why="a child process died while it loaded the function", exit_status=status
        )
    spark_task.children.put(child)
    if result.wire_error:
        raise from_wire(result.wire_error)


def probe_in_child(job: ChildJob, probe: ProbeRequest, fn: Callable[..., Any]) -> None:
    """Check the imports of the loaded function, the ledger and the spool, in the child."""
    missing = function_pickle.find_missing_import(fn)
    if missing:
        raise function_pickle.NotLoadable(module=missing)
    with LedgerClient(
        job.address, "probe", reconnect_s=LEDGER_REACH_S, reply_timeout_s=LEDGER_REACH_S
    ) as client:
        client.connect()
    if job.spool is not None:
        from holdfast.spark.spool import check_executor_access

        check_executor_access(job.spool, job.run_id, probe.spool_marker)


def _is_marker_visible(marker: str) -> bool:
    for _ in range(MARKER_TRIES):
        if os.path.exists(marker):
            return True
        SYSTEM.sleep(MARKER_RETRY_S)
    return False


# Precedence of errors when executors differ in several ways.
ERROR_PRECEDENCE = {
    kind.code: n
    for n, kind in enumerate(
        (HoldfastDiffers, PythonDiffers, ExecutorUnfit, function_pickle.NotLoadable), start=-4
    )
}
