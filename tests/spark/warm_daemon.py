"""The daemon of Spark's Python workers, with the modules of the tasks loaded.

Spark forks a worker from its daemon. Tests that cancel jobs or fail tasks end workers, and each new worker would load
these modules for a second.
"""

import gc
import sys

# Spark's archives last: Python compiles all modules of an archive at each import.
sys.path.sort(key=lambda path: path.endswith(".zip"))

import pandas  # noqa: F401  # by the first conversion of pyarrow
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import holdfast.spark.ingest
import holdfast.spark.outcome_bundles
import holdfast.spark.part_writer
import holdfast.spark.spark_task  # noqa: F401

if __name__ == "__main__":
    # A worker collects all garbage after each task.
    gc.collect()
    gc.freeze()
    manager()
