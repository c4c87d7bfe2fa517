"""The service configuration of a stage: the `ServiceConfig` that starts the ledger service of its
run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import codec
from holdfast.ledger import runs
from holdfast.spark.service import ServiceConfig
from holdfast.spark.service_host import advertised_host
from holdfast.spark.service_supervisor import new_token
from holdfast.spark.sinks.object_store import all_options
from holdfast.spark.tls import read_authority
from holdfast.store.api import Store, connection_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.spark.stage import Stage


def service_config_of(
    stage: Stage,
    run_store: Store,
    spark: SparkSession,
    record: runs.RunRecord,
    *,
    new: bool,
    latest_run_id: str,
    executors_write: bool,
) -> ServiceConfig:
    """Build the service configuration. `latest_run_id`: for a new run, the run that the name
    pointed to. `executors_write`: Spark tasks may write the output.
    """
    return ServiceConfig(
        store=connection_url(run_store),
        token=new_token(),
        host=stage.ledger_host or advertised_host(spark),
        port=stage.ledger_port,
        record=codec.pack(record),
        is_new_run=new,
        is_restart=False,
        executors_write=executors_write,
        file_rows=stage.file_rows,
        file_bytes=stage.file_bytes,
        storage_options=all_options(),
        rate_per_s=float(stage.rate_per_s),
        tokens_per_min=float(stage.tokens_per_min),
        expected_latest=latest_run_id,
        paths=[path for path in sys.path if path],
        bind=stage.bind or "",
        cert=str(Path(stage.tls.cert).absolute()) if stage.tls else "",
        key=str(Path(stage.tls.key).absolute()) if stage.tls else "",
        ca=read_authority(stage.tls) if stage.tls else "",
    )
