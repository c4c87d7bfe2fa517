"""Host names of the ledger service: the one that executors connect to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spark import spark_jobs
from holdfast.spark.errors import NotAStage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"


def advertised_host(spark: SparkSession) -> str:
    """Return the host under which executors reach this machine. It is the loopback address unless
    Spark's configuration names another driver host.
    """
    if spark_jobs.is_connect(spark):
        return LOOPBACK
    host = str(spark.conf.get("spark.driver.host", LOOPBACK))
    return LOOPBACK if host in ("localhost", "") else host


def checked_host(host: str | None) -> str | None:
    """Refuse a wildcard address as the advertised host."""
    if host in ("0.0.0.0", "::"):
        why = "executors cannot connect to a wildcard address; use bind= for the listening address"
        raise NotAStage(what="ledger_host", why=why, found=host)
    return host
