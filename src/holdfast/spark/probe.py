"""A look at the executors before a run begins: one small Spark job, a task for each slot.

    check(drive...)   on the driver: raises the first thing that is wrong, as one typed error
    look              in Spark's Python worker; it travels by value, so that it runs where holdfast is missing
    answer, in_child  on the executor: Python, the function in a child process, the ledger, the output

Nothing is called and nothing is recorded: a run that is refused here is resumed by the next `run`. A local master
with the driver's own Python has none of these differences, and is not looked at by a job.
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
from holdfast.spark import code, jobs
from holdfast.spark.client import Client
from holdfast.spark.engine import Duty
from holdfast.spark.errors import (
    ExecutorUnfit,
    HoldfastDiffers,
    OutputNotShared,
    PythonDiffers,
    RunFailed,
)
from holdfast.spark.sinks.files import typed
from holdfast.spark.sinks.location import locate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_MAX = 64
# How long an executor tries to reach the ledger, and to see the marker on a network disk.
REACH_S = 3.0
SEEN_TRIES = 5
SEEN_S = 0.2
LOCAL_SINKS = ("parquet", "delta")

_MISMATCH = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version: ([\d.]+).*?driver: ([\d.]+)")
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]*)"')
_NO_MODULE = re.compile(r"No module named '([^']*)'")


# --- on the driver ------------------------------------------------------------------------------


def needs_job(spark: SparkSession) -> bool:
    """Whether tasks run elsewhere, or in another Python than this."""
    if jobs.is_connect(spark):
        return True
    context: Any = spark.sparkContext
    master = str(context.master)
    if not master.startswith("local") or master.startswith("local-cluster"):
        return True
    return "PYSPARK_PYTHON" in os.environ and context.pythonExec != sys.executable


def check_here(function: Callable[..., Any]) -> None:
    """The part that needs no job: what the function imports first is installed here."""
    missing = code.missing_import(function)
    if missing:
        raise code.NotLoadable(module=missing, executor=socket.gethostname())


def collect(
    spark: SparkSession, duty: Duty, function: bytes, marker: str, tasks: int
) -> list[list[Any]]:
    """What the executors said: for each task nothing, or an error as it travels."""
    header = msgspec.msgpack.encode(msgspec.structs.replace(duty, probe=True))
    python = list(sys.version_info[:2])
    body = look(__version__, python, header, function, marker)
    count = min(tasks, TASKS_MAX)
    with jobs.own_python(spark):
        rows = spark.range(0, count, 1, count).mapInArrow(body, "told string").collect()
    return [told for row in rows if (told := json.loads(row.told))]


def refusal(told: list[list[Any]]) -> HoldfastError | None:
    """The error to raise, the same one whichever executor answers first."""
    if not told:
        return None
    return from_wire(min(told, key=lambda one: (ORDER.get(one[0], 0), json.dumps(one))))


def of_spark(name: str, error: Exception) -> HoldfastError:
    """What it means that the job itself failed."""
    text = str(error)
    if found := _MISMATCH.search(text):
        return PythonDiffers(executor_python=found[1], driver_python=found[2])
    if found := _NO_PROGRAM.search(text):
        return ExecutorUnfit(why=f"there is no program {found[1]}; see PYSPARK_PYTHON")
    if found := _NO_MODULE.search(text):
        return ExecutorUnfit(module=found[1], why="the executor's Python does not have it")
    return RunFailed(name=name, why=jobs.reason(error))


@contextlib.contextmanager
def marker(sink: Mapping[str, Any]) -> Iterator[str]:
    """A file in the output's directory while this lasts; "" for an output that is not on a disk."""
    home = locate(str(sink["path"])).local if sink.get("kind") in LOCAL_SINKS else None
    if home is None:
        yield ""
        return
    made = [one for one in (home, *home.parents) if not one.exists()]
    file = home / f".holdfast-probe-{SYSTEM.entropy(8).hex()}"
    with typed(home):
        home.mkdir(parents=True, exist_ok=True)
        file.touch()
    try:
        yield str(file)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
            for one in made:
                one.rmdir()


# --- on an executor -----------------------------------------------------------------------------


def look(
    version: str, python: list[int], header: bytes, function: bytes, marker: str
) -> Callable[[Any], Iterator[Any]]:
    """The body of the job. It uses no name of this module: Spark ships it by value."""

    def body(batches: Any) -> Iterator[Any]:
        import json
        import socket

        import pyarrow as pa

        for _ in batches:
            pass
        host = socket.gethostname()
        try:
            from holdfast import __version__

            told = ["holdfast_differs", {"executor": host, "has": __version__, "driver": version}]
            if __version__ == version:
                from holdfast.spark.probe import answer

                told = answer(host, python, header, function, marker)
        except ImportError as error:
            told = ["holdfast_differs", {"executor": host, "why": str(error), "driver": version}]
        yield pa.RecordBatch.from_pydict({"told": [json.dumps(told)]})

    return body


def answer(host: str, python: list[int], header: bytes, function: bytes, marker: str) -> list[Any]:
    """In Spark's Python worker: an error as it travels, or nothing."""
    try:
        if list(sys.version_info[:2]) != python:
            raise PythonDiffers(
                executor_python=".".join(map(str, sys.version_info[:2])),
                driver_python=".".join(map(str, python)),
            )
        _ask_child(msgspec.msgpack.decode(header, type=Duty), function)
        if marker and not _seen(marker):
            raise OutputNotShared(path=os.path.dirname(marker))
    except HoldfastError as error:
        code_of, fields = to_wire(error)
        return [code_of, {**{name: str(one) for name, one in fields.items()}, "executor": host}]
    return []


def _ask_child(duty: Duty, function: bytes) -> None:
    """The function is unpickled where it will run: in a child, which the run then uses."""
    from holdfast.spark import task

    duty = msgspec.structs.replace(duty, paths=[path for path in sys.path if path])
    child = task.take_child()
    verdict = child.do(duty, function)
    if verdict is None:
        status = child.end()
        raise ExecutorUnfit(why="a child process died over the function", exit_status=status)
    task.give_back(child)
    if verdict.told:
        raise from_wire(verdict.told)


def in_child(duty: Duty, fn: Callable[..., Any]) -> None:
    """In the child, where the function is loaded: its imports, and the ledger."""
    missing = code.missing_import(fn)
    if missing:
        raise code.NotLoadable(module=missing)
    with Client(duty.address, "probe", patience_s=REACH_S, answer_s=REACH_S) as client:
        client.connect()
    if duty.spool is not None:
        from holdfast.spark.spool import look_at

        look_at(duty.spool, duty.run_id, duty.spool_marker)


def _seen(marker: str) -> bool:
    for _ in range(SEEN_TRIES):
        if os.path.exists(marker):
            return True
        SYSTEM.sleep(SEEN_S)
    return False


# What to say first when executors differ in several ways.
ORDER = {
    kind.code: n
    for n, kind in enumerate(
        (HoldfastDiffers, PythonDiffers, ExecutorUnfit, code.NotLoadable), start=-4
    )
}
