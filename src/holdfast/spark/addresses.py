"""Host names of the ledger service: which one executors are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spark import jobs
from holdfast.spark.errors import NotAStage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"


def driver_host(spark: SparkSession) -> str:
    """Where executors reach this machine: the loopback unless the driver is reached elsewhere."""
    if jobs.is_connect(spark):
        return LOOPBACK
    host = str(spark.conf.get("spark.driver.host", LOOPBACK))
    return LOOPBACK if host in ("localhost", "") else host


def checked_host(host: str | None) -> str | None:
    if host in ("0.0.0.0", "::"):
        why = "executors connect to it; bind= says where to listen"
        raise NotAStage(what="ledger_host", why=why, found=host)
    return host
