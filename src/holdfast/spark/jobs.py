"""Spark jobs of a run: in a thread of their own, tagged, so that they can be watched and ended.

Classic sessions and Spark Connect differ in how a job is tagged, cancelled and counted; this is
the one place that knows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tasks of a dynamic run where Spark sets no bound for executors, and at most.
DYNAMIC_TASKS = 256
DYNAMIC_TASKS_MAX = 4096
POOL = "spark.scheduler.pool"
GROUP = "spark.jobGroup.id"
# How Spark names it: classic, and over Connect.
CANCELLATIONS = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED", "OPERATION_CANCELLED")

# Threads that build functions for Spark now, and the Python that Spark had before the first of them.
_building = 0
_python_before = ""
_python_lock = threading.Lock()


def is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at once, as far as the session knows."""
    if not is_connect(spark):
        return max(int(spark.sparkContext.defaultParallelism), 1)
    from pyspark.sql import functions

    parts = spark.range(1 << 16).select(functions.spark_partition_id().alias("p")).distinct()
    return max(int(parts.count()), 1)


def dynamic_tasks(spark: SparkSession) -> int:
    """Tasks of a run that is to use every executor that dynamic allocation may bring."""
    executors = spark.conf.get("spark.dynamicAllocation.maxExecutors", None)
    cores = int(str(spark.conf.get("spark.executor.cores", "1")))
    cpus = int(str(spark.conf.get("spark.task.cpus", "1")))
    wanted = int(str(executors)) * max(cores // cpus, 1) if executors else DYNAMIC_TASKS
    return max(min(wanted, DYNAMIC_TASKS_MAX), 2 * parallelism(spark))


def ui_link(spark: SparkSession) -> str:
    if is_connect(spark):
        return ""
    return str(spark.sparkContext.uiWebUrl or "")


@contextlib.contextmanager
def own_python(spark: SparkSession) -> Iterator[None]:
    """Build functions for the Python that runs this, where Spark would take the first on PATH.

    Only for a local master, and only if nobody said which Python it is to be. Threads may do so at once:
    the setting is put back when the last of them is through.
    """
    global _building, _python_before
    if is_connect(spark):
        yield
        return
    context: Any = spark.sparkContext
    with _python_lock:
        if not _building:
            _python_before = context.pythonExec
        _building += 1
        if str(context.master).startswith("local") and "PYSPARK_PYTHON" not in os.environ:
            context.pythonExec = sys.executable
    try:
        yield
    finally:
        with _python_lock:
            _building -= 1
            if not _building:
                context.pythonExec = _python_before


class Job:
    """One action in a thread. `error` is what Spark said when it failed; `about` is what its web page
    shows for it (Connect has tags alone)."""

    def __init__(
        self, spark: SparkSession, tag: str, action: Callable[[], Any], about: str = ""
    ) -> None:
        self.spark = spark
        self.tag = tag.replace(",", ";")  # which Spark forbids in a tag
        self.error: Exception | None = None
        self.result: Any = None
        self._ours = False  # whether the end was asked for here
        self._action = action
        # Of the calling thread, as Spark has it for the jobs that a thread starts itself.
        self._about = about or tag
        self._pool = self._group = None
        if not is_connect(spark):
            self._pool = spark.sparkContext.getLocalProperty(POOL)
            # A notebook cancels the jobs of a cell by the group of the cell.
            self._group = spark.sparkContext.getLocalProperty(GROUP)
        self._thread = threading.Thread(target=self._run, name=tag, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.ended

    @property
    def killed(self) -> bool:
        """Whether somebody else cancelled it: in the web UI, with `cancelAllJobs`, over Connect."""
        return self.error is not None and not self._ours and is_cancellation(self.error)

    def cancel(self) -> None:
        self._ours = True
        if is_connect(self.spark):
            self.spark.interruptTag(self.tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(self.tag)

    def _run(self) -> None:
        try:
            self._mark()
            self.result = self._action()
        except Exception as error:
            self.error = error

    def _mark(self) -> None:
        """Tags are of the thread that starts the job."""
        if is_connect(self.spark):
            self.spark.addTag(self.tag)
        else:
            self.spark.sparkContext.addJobTag(self.tag)
            self.spark.sparkContext.setJobGroup(self._group or self.tag, self._about)
            if self._pool:
                self.spark.sparkContext.setLocalProperty(POOL, self._pool)


def is_cancellation(error: Exception) -> bool:
    text = str(error)
    return any(word in text for word in CANCELLATIONS)


def reason(error: Exception) -> str:
    """The line of a Spark error that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("at ")]  # stack frames of the JVM
    told = [line for line in lines if "holdfast." in line or "Error" in line]
    return (told or lines or [type(error).__name__])[-1][:500]
