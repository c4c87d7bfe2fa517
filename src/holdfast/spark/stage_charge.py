"""What a stage tells the ledger service of its run: the service's `Charge`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import codec
from holdfast.ledger import runs
from holdfast.spark.addresses import driver_host
from holdfast.spark.keeper import new_token
from holdfast.spark.service import Charge
from holdfast.spark.sinks.object_store import given_options
from holdfast.spark.tls import authority
from holdfast.store.api import Store, address_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.spark.stage import Stage


def charge_of(
    stage: Stage,
    home: Store,
    spark: SparkSession,
    record: runs.RunRecord,
    *,
    new: bool,
    seen: str,
    executors_write: bool,
) -> Charge:
    """`seen`: for a new run, the one that the name led to. `executors_write`: Spark tasks may write the output."""
    return Charge(
        store=address_of(home),
        token=new_token(),
        host=stage.ledger_host or driver_host(spark),
        port=stage.ledger_port,
        record=codec.pack(record),
        new=new,
        again=False,
        executors_write=executors_write,
        file_rows=stage.file_rows,
        file_bytes=stage.file_bytes,
        storage_options=given_options(),
        rate_per_s=float(stage.rate_per_s),
        tokens_per_min=float(stage.tokens_per_min),
        seen=seen,
        paths=[path for path in sys.path if path],
        bind=stage.bind or "",
        cert=str(Path(stage.tls.cert).absolute()) if stage.tls else "",
        key=str(Path(stage.tls.key).absolute()) if stage.tls else "",
        ca=authority(stage.tls) if stage.tls else "",
    )
