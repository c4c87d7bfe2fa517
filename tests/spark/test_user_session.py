"""A stage in a session that the user built without any setting for holdfast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pyspark.sql import SparkSession
from holdfast.spark import Stage

home = sys.argv[1]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
stage = Stage("plain", lambda row: {"y": row.id + 1}, key="id", schema="y long",
              store=home + "/store", progress="quiet")
run = stage.run(spark.range(50), output=home + "/output")
assert run.counts()["COMMITTED"] == 50, run.counts()
assert run.output().count() == 50
lazy = spark.range(3).transform(Stage("lazy", lambda row: {"y": row.id + 1}, key="id",
                                      schema="y long", store=home + "/store"))
print([tuple(row) for row in lazy.orderBy("id").collect()])
assert spark.sparkContext.pythonExec == "python3", "the user's own functions run where they ran"
"""


@pytest.mark.timeout(180)
@pytest.mark.deep
def test_user_session_without_pyspark_python_runs_the_stage_on_the_driver_python(
    tmp_path: Path,
) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    # The `python3` that Spark's workers find on PATH cannot import holdfast.
    (bare / "python3").write_text("#!/bin/sh\necho 'the wrong Python' >&2\nexit 1\n")
    (bare / "python3").chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYSPARK")}
    environ |= {"PATH": f"{bare}:{environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("[(0, 1), (1, 2), (2, 3)]")
