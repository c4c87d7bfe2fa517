"""Input checks: refuses inputs that are not a Spark DataFrame, or that cannot be read here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.spark.errors import InPipeline, NotADataFrame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's error for an analysis inside a query function of a declarative pipeline.
_IN_PIPELINE = "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION"


def checked_session(df: Any) -> SparkSession:
    """Return the session of an input. Raise `NotADataFrame` or `InPipeline` if a stage cannot read
    it.
    """
    module = type(df).__module__
    if module.startswith("pyspark.pandas."):
        raise NotADataFrame(found=f"pyspark.pandas.{type(df).__name__}", use="df.to_spark()")
    if module.startswith("pandas."):
        use = "spark.createDataFrame(df)"
        raise NotADataFrame(found=f"pandas.{type(df).__name__}", use=use)
    if not (hasattr(df, "sparkSession") and hasattr(df, "mapInArrow")):
        use = "spark.createDataFrame(...), or spark.read"
        raise NotADataFrame(found=f"{module}.{type(df).__name__}", use=use)
    try:
        # This triggers the first analysis; over Connect it is a request.
        _ = df.columns
    except Exception as error:
        if _IN_PIPELINE in str(error):
            raise InPipeline() from None
        raise
    session: SparkSession = df.sparkSession
    return session
