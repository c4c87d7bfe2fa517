"""The options of the JVMs that tests start, with a class archive: the classes of Spark, parsed and verified once.

A Spark JVM uses half of the time of its start to load classes from jars. An archive for class data sharing (CDS) maps
them into memory instead. The first process that needs the archive makes it in `build/`, for all later runs of the
tests. Meanwhile other processes wait: a JVM without the archive needs twice the processor time for its start. A JVM
ignores an archive of other jars.

    python -m tests.spark.class_archive     # a small Spark job, whose JVM writes the archive when it exits
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from holdfast.spark.java import find_java
from tests.processes import ROOT

# Short-lived JVMs: compile little, collect with one thread.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ARCHIVES = ROOT / "build" / "spark-classes"
MAKE_S = 240.0
JARS = Path(pyspark.__file__).parent / "jars"


@functools.cache
def _make_once() -> None:
    make_archive(archive_path())


def jvm_options() -> str:
    """The options of a JVM. The archive belongs to the classpath that Spark gives to every JVM."""
    _make_once()
    path = archive_path()
    # A JVM logs to standard output that it ignores an archive.
    return (
        f"{JVM_OPTIONS} -XX:SharedArchiveFile={path} -Xlog:disable"
        if path.exists()
        else JVM_OPTIONS
    )


@functools.cache
def archive_path() -> Path:
    java = os.path.realpath(find_java(os.environ).where)
    facts = (java, os.stat(java).st_mtime_ns, str(JARS), JARS.stat().st_mtime_ns)
    return ARCHIVES / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.jsa"


def make_archive(path: Path) -> None:
    """Make the archive, unless it exists. Wait for a process that makes it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        environ = {
            k: v for k, v in os.environ.items() if k not in ("SPARK_DIST_CLASSPATH", "SPARK_REMOTE")
        }
        environ |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "SPARK_SUBMIT_OPTS": f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={part} -Xlog:disable",
        }
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=environ, timeout=MAKE_S, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        part.replace(path)


def main() -> None:
    """Run a job that loads the classes of most tests, and wait until the JVM has exited."""
    from pyspark.sql import SparkSession

    from holdfast.spark.session import session

    config = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
    config |= {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "2",
    }
    spark: SparkSession = session("local[2]", app="class archive", config=config)
    with tempfile.TemporaryDirectory() as directory:
        numbers = spark.range(0, 100, 1, 4).selectExpr("id", "cast(id % 7 as string) as text")
        mapped = numbers.mapInArrow(lambda batches: batches, "id long, text string")
        mapped.write.parquet(f"{directory}/rows")
        rows = spark.read.parquet(f"{directory}/rows").orderBy("id")
        assert rows.join(numbers.groupBy("text").count(), "text").count() == 100
        assert len(spark.createDataFrame(rows.collect()).toArrow()) == 100
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()
    jvm.wait()


if __name__ == "__main__":
    main()
