"""Spark jobs of a run: each runs in a separate thread and is tagged, so that it can be watched and
cancelled.

Classic sessions and Spark Connect tag, cancel and count jobs differently. Only this module knows
both.
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

# Tasks of a dynamic run if Spark has no executor limit, and the maximum.
DYNAMIC_TASKS = 256
DYNAMIC_TASKS_MAX = 4096
POOL_PROPERTY = "spark.scheduler.pool"
JOB_GROUP_PROPERTY = "spark.jobGroup.id"
# Spark's names for a cancellation: classic, and over Connect.
CANCELLATIONS = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED", "OPERATION_CANCELLED")

# Number of threads that build functions for Spark now, and Spark's Python before the first of them.
_building = 0
_python_before = ""
_python_lock = threading.Lock()


def is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks run at once, as far as the session knows."""
    if not is_connect(spark):
        return max(int(spark.sparkContext.defaultParallelism), 1)
    from pyspark.sql import functions

    parts = spark.range(1 << 16).select(functions.spark_partition_id().alias("p")).distinct()
    return max(int(parts.count()), 1)


def dynamic_tasks(spark: SparkSession) -> int:
    """Return the number of tasks that uses every executor of dynamic allocation."""
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
def use_driver_python(spark: SparkSession) -> Iterator[None]:
    """Build functions for the Python of this process, where Spark would use the first one on PATH.

    This applies only to a local master without an explicit Python. Threads may do it concurrently: the last
    one restores the setting.
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


class SparkJob:
    """One Spark action in a thread. `error` is Spark's error after a failure. `description` is
    shown on Spark's web page (Connect has only tags).
    """

    def __init__(
        self, spark: SparkSession, tag: str, action: Callable[[], Any], description: str = ""
    ) -> None:
        self.spark = spark
        self.tag = tag.replace(",", ";")  # forbidden in a tag
        self.error: Exception | None = None
        self.result: Any = None
        self._cancelled_here = False  # whether `cancel` was called
        self._action = action
        # Properties of the calling thread, which Spark applies to the jobs of a thread.
        self._description = description or tag
        self._pool = self._group = None
        if not is_connect(spark):
            self._pool = spark.sparkContext.getLocalProperty(POOL_PROPERTY)
            # A notebook cancels the jobs of a cell by the job group of the cell.
            self._group = spark.sparkContext.getLocalProperty(JOB_GROUP_PROPERTY)
        self._thread = threading.Thread(target=self._run, name=tag, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.has_ended

    @property
    def is_cancelled_elsewhere(self) -> bool:
        """Whether the job was cancelled elsewhere: in the web UI, with `cancelAllJobs`, or over
        Connect.
        """
        return self.error is not None and not self._cancelled_here and is_cancellation(self.error)

    def cancel(self) -> None:
        self._cancelled_here = True
        if is_connect(self.spark):
            self.spark.interruptTag(self.tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(self.tag)

    def _run(self) -> None:
        try:
            self._tag_thread()
            self.result = self._action()
        except Exception as error:
            self.error = error

    def _tag_thread(self) -> None:
        """Set the tags of this thread. Tags belong to the thread that starts the job."""
        if is_connect(self.spark):
            self.spark.addTag(self.tag)
        else:
            self.spark.sparkContext.addJobTag(self.tag)
            self.spark.sparkContext.setJobGroup(self._group or self.tag, self._description)
            if self._pool:
                self.spark.sparkContext.setLocalProperty(POOL_PROPERTY, self._pool)


def is_cancellation(error: Exception) -> bool:
    text = str(error)
    return any(word in text for word in CANCELLATIONS)


def error_reason(error: Exception) -> str:
    """Return the line of a Spark error that contains the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("at ")]  # stack frames of the JVM
    causes = [line for line in lines if "holdfast." in line or "Error" in line]
    return (causes or lines or [type(error).__name__])[-1][:500]
