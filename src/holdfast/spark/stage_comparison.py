"""The comparison of a new input with the stored runs of a stage, for `Stage.explain`."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import msgspec

from holdfast.ledger import runs
from holdfast.spark import changed_input, retry_run
from holdfast.spark.changed_input import Changes, ExtendOptions
from holdfast.spark.run import PreparedStage, RunDriver
from holdfast.spark.stage_options import resumable_run
from holdfast.spark.stage_run_record import new_run_record
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.spark.stage import Stage


def compare_new_input(
    stage: Stage,
    run_store: Store,
    df: DataFrame,
    prepared: PreparedStage,
    extend_options: ExtendOptions,
) -> Changes:
    """Ingest the keys and hashes of an input into a scratch store and compare them with stored
    runs.
    """
    spark = df.sparkSession
    old, _ = resumable_run(run_store, stage.name)
    old = None if old is None or old.status is runs.RunLifecycle.INGESTING else old
    record = msgspec.structs.replace(
        new_run_record(stage, run_store, prepared, None),
        retry_failed=extend_options.retry_failed,
        spool="",
    )
    if old is not None:
        stage._check_same(old, prepared, None, extend=True)
        changed_input.rehash_kept_inputs(run_store, spark, record, df.schema, extend_options)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-explain-") as place,
        open_store(place, bootstrap=True) as scratch,
        stage._new_supervisor(scratch, spark, record, new=True, latest_run_id="") as supervisor,
        RunDriver(stage.name, scratch, spark, supervisor, mode="quiet") as driver,
    ):
        driver.ingest_input(df, stage.key, extend_options.match, keep=stage.key)
        base = retry_run.retry_chain(run_store, old)[-1] if old is not None else None
        changes = changed_input.compare_input(run_store, base, scratch, driver.record())
        supervisor.stop()  # stop the service before its directory is removed
        return changes
