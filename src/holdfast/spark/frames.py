"""Inputs that are no DataFrame of Spark, or one that may not be read here: refused in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.spark.errors import InPipeline, NotADataFrame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How Spark names an analysis inside a query function of a declarative pipeline.
_IN_PIPELINE = "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION"


def session_of(df: Any) -> SparkSession:
    """The session of an input that a stage can read; `NotADataFrame` or `InPipeline` otherwise."""
    home = type(df).__module__
    if home.startswith("pyspark.pandas."):
        raise NotADataFrame(found=f"pyspark.pandas.{type(df).__name__}", use="df.to_spark()")
    if home.startswith("pandas."):
        use = "spark.createDataFrame(df)"
        raise NotADataFrame(found=f"pandas.{type(df).__name__}", use=use)
    if not (hasattr(df, "sparkSession") and hasattr(df, "mapInArrow")):
        use = "spark.createDataFrame(...), or spark.read"
        raise NotADataFrame(found=f"{home}.{type(df).__name__}", use=use)
    try:
        # The first analysis; over Connect a request.
        _ = df.columns
    except Exception as error:
        if _IN_PIPELINE in str(error):
            raise InPipeline() from None
        raise
    found: SparkSession = df.sparkSession
    return found
