"""Stage: a function over the rows of a DataFrame, with exactly one stored outcome per row across
failures.

    stage = Stage("labels", classify, key="doc_id", schema="label string", store="./data",
                  retry_on=(TimeoutError,), attempts=3, concurrency=16, rate_per_s=50)
    run = stage.run(df, output="labels/")       # blocks; the same call again resumes, or does nothing
    df.transform(stage).orderBy("label")        # the lazy form: evaluated twice, called once

A name has one active run. Settings that define the meaning of outcomes must not change under a
name: a resume compares key, schema, batching, output, `version` and the input. Settings of the
execution may change between resumes: attempts, concurrency, rate, timeouts, and the function
itself. Set `version="2"` when old outcomes must not be mixed with new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from holdfast.errors import Invalid, NotFound
from holdfast.ledger import run_deletion, runs
from holdfast.ledger.run_policy import PAGE_ROWS
from holdfast.spark import (
    changed_input,
    driver_writes,
    function_pickle,
    ledger_protocol,
    retry_run,
    spark_jobs,
)
from holdfast.spark.arrow_rows import ResultEncoder
from holdfast.spark.carried_columns import check_carry
from holdfast.spark.changed_input import Changes, ExtendOptions
from holdfast.spark.child_job import SlotRelease
from holdfast.spark.column_types import check_input_types, check_result_types
from holdfast.spark.errors import InputChanged, RunCancelled, RunHalted
from holdfast.spark.exception_rules import RetryRule, transient
from holdfast.spark.fingerprint import same_input
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.ingest import check_input
from holdfast.spark.input_check import checked_session
from holdfast.spark.lazy_frame import make_lazy_frame
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.remap_run import FailedRowIndex, make_remap_work
from holdfast.spark.retention import retain
from holdfast.spark.run import PreparedStage, Run, RunDriver, as_sink
from holdfast.spark.run_plan import RunPlan
from holdfast.spark.service_supervisor import ServiceSupervisor, prestart_service
from holdfast.spark.sinks import Sink
from holdfast.spark.spool import register_spool
from holdfast.spark.spool_maintenance import SpoolDeletion
from holdfast.spark.stage_arguments import checked_int, checked_key
from holdfast.spark.stage_comparison import compare_new_input
from holdfast.spark.stage_options import (
    check_config,
    check_driver_output,
    check_output,
    check_stage,
    checked_result_schema,
    default_session,
    open_run_store,
    resumable_run,
)
from holdfast.spark.stage_run_record import child_job_of, new_run_record, outcome_settings
from holdfast.spark.stage_service_config import service_config_of
from holdfast.spark.stage_settings import (
    CallSettings,
    ListenSettings,
    OutputSettings,
    StageSettings,
    checked_policy,
)
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BATCH_ROWS = 16_384
FLUSH_ROWS = 100
FILE_ROWS = 4 * PAGE_ROWS
# Configuration of how rows are cut. It does not affect the meaning of outcomes.
_CUT_OPTIONS = ("batch_rows", "file_rows", "file_bytes")

# Services of lazy forms by (store URL, name). They live as long as the process.
_lazy_services: dict[tuple[str, str], ServiceSupervisor] = {}


class Stage(StageSettings):
    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        key: str | Sequence[str],
        schema: str | StructType,
        store: str | os.PathLike[str] | None = None,
        retry_on: RetryRule | Sequence[RetryRule] = (TimeoutError, ConnectionError, transient),
        attempts: int = 3,
        retry_budget: int = 0,
        concurrency: int = 1,
        rate_per_s: float = 0,
        tokens_per_min: float = 0,
        tokens: TokenEstimate | None = None,
        timeout_s: float = 600,
        batch: bool = False,
        batch_rows: int = BATCH_ROWS,
        flush_rows: int = FLUSH_ROWS,
        file_rows: int = FILE_ROWS,
        file_bytes: int = FILE_BYTES,
        carry: Literal["*"] | Sequence[str] = (),
        ahead_rows: int = 0,
        lease_s: float = 15,
        grace_s: float = 10,
        on_fail: Literal["keep", "raise"] | None = None,
        stop_after: Stop | None = None,
        meta: bool = False,
        version: str = "1",
        tasks: int | Literal["dynamic"] = 0,
        ledger_host: str | None = None,
        ledger_port: int = 0,
        bind: str | None = None,
        tls: Tls | None = None,
        spool: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
        keep_runs: int = 0,
        progress: Literal["auto", "terminal", "notebook", "plain", "quiet"] = "auto",
    ) -> None:
        self.name = name
        self.fn = fn
        self.key = checked_key(key)
        self.schema = schema
        self.store = store
        self.calls = CallSettings.checked(
            retry_on=retry_on,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            tokens_per_min=tokens_per_min,
            tokens=tokens,
            timeout_s=timeout_s,
            batch_rows=batch_rows if batch else None,
            flush_rows=flush_rows,
        )
        self.outputs = OutputSettings.checked(
            carry=carry, file_rows=file_rows, file_bytes=file_bytes, on_fail=on_fail, meta=meta
        )
        self.version = version
        self.dynamic = tasks == "dynamic"
        self.tasks = 0 if tasks == "dynamic" else checked_int("tasks", tasks, 0)
        self.listen = ListenSettings.checked(ledger_host, ledger_port, bind, tls)
        self.spool = register_spool(spool, storage_options)
        self.keep_runs = checked_int("keep_runs", keep_runs, 0)
        self.progress = progress
        check_stage(name, fn, on_fail, version, tls, progress, stop_after)
        self.policy = checked_policy(
            attempts=attempts,
            retry_budget=retry_budget,
            lease_s=lease_s,
            grace_s=grace_s,
            ahead_rows=ahead_rows,
            file_rows=self.file_rows,
            batch_rows=self.batch_rows,
            stop_after=stop_after,
        )

    # --- public API -------------------------------------------------------------------------

    def run(
        self,
        df: DataFrame,
        output: str | os.PathLike[str] | Sink | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        fresh: bool = False,
        changed: Literal["refuse", "extend"] = "refuse",
        match: Sequence[str] | None = None,
        retry_failed: bool = True,
    ) -> Run:
        """Run or resume the run of this name. Returns when every row is committed.

        `changed="extend"`: a changed input creates a new run over all of it. Rows whose key and
        content (`match`) succeeded in a stored run are reused.
        """
        spark = checked_session(df)
        prepared = self._prepare(spark)
        check_input(df, self.key)
        check_input_types(df.schema, rows=not self.batch_rows)
        check_carry(df, self.key, self.carry, prepared.schema)
        extend_options = changed_input.checked_options(df, changed, match, retry_failed)
        sink = None if output is None else as_sink(output)
        run_store = self._open_store(store)
        try:
            record, latest_run_id = resumable_run(run_store, self.name)
            record = None if fresh else record
            if record is not None and record.status is not runs.RunLifecycle.INGESTING:
                self._check_same(record, prepared, sink, extend=extend_options.extend)
                same = same_input(df, record.plan, record.input_hash)
                if not same and not extend_options.extend:
                    raise InputChanged(name=self.name, run_id=record.run_id)
                if extend_options.extend and (
                    not same or changed_input.needs_new_run(run_store, record, extend_options)
                ):
                    return self._run_extended(run_store, spark, None if same else df, record, prepared,
                                        latest_run_id, extend_options)  # fmt: skip
                finished = self._finished_run(record, run_store, spark)
                if finished is not None:
                    return finished
                if record.status is runs.RunLifecycle.FINISHED:
                    return self._run_retry(run_store, spark, record, prepared, latest_run_id)
            elif sink is not None:
                sink.check_vacant()
                check_output(sink, df, self.key, prepared.schema, self.carry)
            return self._run_input(
                run_store,
                spark,
                df,
                record,
                prepared,
                sink,
                latest_run_id,
                match=extend_options.match,
            )
        except BaseException:
            run_store.close()
            raise

    def resume(
        self, spark: SparkSession | None = None, *, store: str | os.PathLike[str] | None = None
    ) -> Run:
        """Resume the run of this name. Its input is stored, so no DataFrame is needed."""
        spark = spark or default_session()
        prepared = self._prepare(spark)
        run_store = self._open_store(store)
        try:
            record, latest_run_id = resumable_run(run_store, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            if record.status is runs.RunLifecycle.INGESTING:
                raise Invalid(
                    what="run", name=self.name, why="its input is incomplete; use run(df)"
                )
            self._check_same(record, prepared, None)
            finished = self._finished_run(record, run_store, spark)
            if finished is not None:
                return finished
            if record.status is runs.RunLifecycle.FINISHED:
                return self._run_retry(run_store, spark, record, prepared, latest_run_id)
            return self._run_input(run_store, spark, None, record, prepared, None, latest_run_id)
        except BaseException:
            run_store.close()
            raise

    def remap(
        self,
        mapping: Callable[[Any], Any],
        spark: SparkSession | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
    ) -> Run:
        """Map the stored values (`_raw`) of rows that failed the schema, without calling the
        stage's function. `mapping` gets a value and returns the corrected result. Rows whose mapped
        value fits the schema succeed. The other rows stay failed.
        """
        spark = spark or default_session()
        prepared = self._prepare(spark)
        run_store = self._open_store(store)
        try:
            record, latest_run_id = resumable_run(run_store, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            self._check_same(record, prepared, None)
            is_begun = (
                retry_run.REMAP_KEY in record.config and record.status is runs.RunLifecycle.OPEN
            )
            old = (
                run_store.read(runs.get_existing, record.retry_of or record.base_run)
                if is_begun
                else record
            )
            if old.status is not runs.RunLifecycle.FINISHED:
                why = "only a finished run can be remapped"
                raise Invalid(what="run", name=self.name, why=why, status=old.status.value)
            follows = not record.retry_of and changed_input.can_follow(record)
            failed = FailedRowIndex(run_store, old, ranked=not follows)
            if not failed.with_raw_count:
                return self._as_run(record, run_store, spark)
            new = record if is_begun else new_run_record(self, run_store, prepared, None)
            new = (
                new
                if is_begun
                else retry_run.make_remap_record(run_store, old, new, follows=follows)
            )
            return self._run_remap(
                run_store, spark, old, new, latest_run_id, prepared, (mapping, failed)
            )
        except BaseException:
            run_store.close()
            raise

    def cancel(self, *, store: str | os.PathLike[str] | None = None) -> None:
        """Request cancellation of the run: no further row begins, begun rows get the grace period."""
        with self._open_store(store) as run_store:
            record = run_store.read(runs.get_latest, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            run_store.transact(runs.request_cancel, record.run_id)

    def delete(self, *, store: str | os.PathLike[str] | None = None) -> int:
        """Delete every run of this name from the store, including a resumable run, and return the
        number of runs. The output stays. Raises `RunAtWork` while a driver runs the stage.
        """
        with self._open_store(store) as run_store:
            _stop_lazy_service(run_store, self.name)
            # Newest first, because a newer run may pin an older one.
            run_ids = [record.run_id for record in run_store.read(runs.list_runs_of, self.name)]
            if run_ids:
                run_deletion.delete_runs(run_store, self.name, run_ids, SpoolDeletion())
            return len(run_ids)

    @overload
    def explain(self, *, store: str | os.PathLike[str] | None = None) -> RunPlan: ...

    @overload
    def explain(
        self,
        df: DataFrame,
        *,
        match: Sequence[str] | None = None,
        retry_failed: bool = True,
        store: str | os.PathLike[str] | None = None,
    ) -> Changes: ...

    def explain(
        self,
        df: DataFrame | None = None,
        *,
        match: Sequence[str] | None = None,
        retry_failed: bool = True,
        store: str | os.PathLike[str] | None = None,
    ) -> RunPlan | Changes:
        """Return what a run would do now: calls, reuse, retries. Prints as text. With an input,
        return what `run(df, changed="extend")` would reuse and call, and its cost. This reads the
        input once.
        """
        with self._open_store(store) as run_store:
            if df is None:
                return RunPlan.of(run_store, self.name)
            prepared = self._prepare(checked_session(df))
            check_input(df, self.key)
            check_input_types(df.schema, rows=not self.batch_rows)
            check_carry(df, self.key, self.carry, prepared.schema)
            extend_options = changed_input.checked_options(df, "extend", match, retry_failed)
            return compare_new_input(self, run_store, df, prepared, extend_options)

    def __call__(self, df: DataFrame) -> DataFrame:
        """Build the lazy form, for `df.transform(stage)`. The input is ingested now. Calls are made
        when the result is evaluated, once per row for any number of evaluations.
        """
        spark = checked_session(df)
        prepared = self._prepare(spark)
        check_input(df, self.key)
        check_input_types(df.schema, rows=not self.batch_rows)
        check_carry(df, self.key, self.carry, prepared.schema)
        run_store = self._open_store(None)
        try:
            supervisor, record = self._serve_lazy_form(df, run_store, spark, prepared)
        except BaseException:
            run_store.close()
            raise
        if supervisor.store is not run_store:
            run_store.close()
        # A task of the lazy form waits for its rows, because it yields them.
        job = msgspec.structs.replace(
            child_job_of(self, supervisor, record, prepared), slot_release=SlotRelease()
        )
        return make_lazy_frame(spark, record, job, prepared.function,
                      tasks=self.tasks or spark_jobs.parallelism(spark), meta=self.meta,
                      strict=self.outputs.lazily_strict)  # fmt: skip

    # --- internals --------------------------------------------------------------------------

    def _serve_lazy_form(
        self, df: DataFrame, run_store: Store, spark: SparkSession, prepared: PreparedStage
    ) -> tuple[ServiceSupervisor, runs.RunRecord]:
        """Start or reuse a service that lives as long as this process, with the input ingested."""
        record, latest_run_id = resumable_run(run_store, self.name)
        if record is not None and record.status is not runs.RunLifecycle.INGESTING:
            self._check_same(record, prepared, None)
            if not same_input(df, record.plan, record.input_hash):
                raise InputChanged(name=self.name, run_id=record.run_id)
            self._finished_run(record, run_store, spark)
        service_key = (run_store.url, self.name)
        running = _lazy_services.get(service_key)
        if running is not None and record is not None and record.run_id == running.run_id:
            running.request(ledger_protocol.ResumeRun())
            return running, record
        _stop_lazy_service(run_store, self.name)
        supervisor = self._supervisor_for(run_store, spark, record, prepared, None, latest_run_id)
        driver = RunDriver(self.name, run_store, spark, supervisor, mode=self.progress)
        try:
            job = child_job_of(self, supervisor, driver.record(), prepared)
            driver.probe_executors(job, prepared, spark_jobs.parallelism(spark))
            driver.ingest_input(df, self.key)
        except BaseException:
            supervisor.stop()
            raise
        atexit.register(supervisor.stop)
        supervisor.start_watch()
        _lazy_services[service_key] = supervisor
        return supervisor, driver.record()

    def _prepare(self, spark: SparkSession) -> PreparedStage:
        schema = checked_result_schema(spark, self.schema, self.key)
        check_result_types(schema)
        return PreparedStage(
            schema, self.fn, function_pickle.dump_function(self.fn, self.retry_on, self.tokens)
        )

    def _open_store(self, place: str | os.PathLike[str] | None) -> Store:
        return open_run_store(place or self.store or "")

    def _check_same(
        self,
        record: runs.RunRecord,
        prepared: PreparedStage,
        sink: Sink | None,
        *,
        extend: bool = False,
    ) -> None:
        now = outcome_settings(self, prepared, sink)
        if extend:
            # A new run may cut rows differently without changing the meaning of its outcomes.
            now = {what: value for what, value in now.items() if what not in _CUT_OPTIONS}
        if sink is None:
            now["output"] = record.config.get("output", "")
        check_config(record, now)

    def _finished_run(
        self, record: runs.RunRecord, run_store: Store, spark: SparkSession
    ) -> Run | None:
        """Return the run if it is finished; None if work is left. Raises if it cannot be resumed."""
        if record.status is runs.RunLifecycle.FINISHED and not record.retry_requested_ns:
            return self._as_run(record, run_store, spark)
        if retry_run.REMAP_KEY in record.config and record.status is runs.RunLifecycle.OPEN:
            # Its rows end by the mapping and must not be called.
            why = "a remap of it was interrupted; call remap again to resume it"
            raise Invalid(what="run", name=self.name, why=why)
        if record.status is runs.RunLifecycle.CANCELLED:
            raise RunCancelled(name=self.name, run_id=record.run_id)
        if record.status is runs.RunLifecycle.HALTED:
            raise RunHalted(name=self.name, run_id=record.run_id, why=record.halted)
        return None

    def _as_run(self, record: runs.RunRecord, run_store: Store, spark: SparkSession) -> Run:
        return Run(
            driver_writes.write_driver_output(run_store, record, spark),
            run_store,
            spark,
            on_fail=self.on_fail,
        )

    def _complete_run(self, record: runs.RunRecord, run_store: Store, spark: SparkSession) -> Run:
        """Return the run that this driver has finished, after applying the retention of the stage."""
        run = self._as_run(record, run_store, spark)
        retain(run_store, self.name, self.keep_runs)
        return run

    def _run_input(
        self,
        run_store: Store,
        spark: SparkSession,
        df: DataFrame | None,
        record: runs.RunRecord | None,
        prepared: PreparedStage,
        sink: Sink | None,
        latest_run_id: str,
        *,
        match: Sequence[str] | None = None,
    ) -> Run:
        def take(drive: RunDriver, meanwhile: Callable[[], None]) -> None:
            if df is not None:
                drive.ingest_input(df, self.key, match, meanwhile=meanwhile)

        with self._service(run_store, spark, record, prepared, sink, latest_run_id) as supervisor:
            ended = self._execute(run_store, spark, supervisor, prepared, take)
        if ended.status is runs.RunLifecycle.FINISHED and ended.retry_requested_ns:
            # It was stopped, and a retry of its failed rows was requested in the meantime.
            return self._run_retry(run_store, spark, ended, prepared, ended.run_id)
        prestart_service()
        return self._complete_run(ended, run_store, spark)

    def _run_extended(
        self,
        run_store: Store,
        spark: SparkSession,
        df: DataFrame | None,
        old: runs.RunRecord,
        prepared: PreparedStage,
        latest_run_id: str,
        extend_options: ExtendOptions,
    ) -> Run:
        """Run over a changed input or, without `df`, over the input of the old run again."""
        if old.status is runs.RunLifecycle.HALTED or retry_run.REMAP_KEY in old.config:
            self._finished_run(old, run_store, spark)
        first = retry_run.retry_chain(run_store, old)[-1]
        changed_input.require_can_follow(first)
        record = msgspec.structs.replace(
            new_run_record(self, run_store, prepared, None),
            config={
                **outcome_settings(self, prepared, None),
                "output": old.config.get("output", ""),
            },
            sink=first.sink,
            base_run=old.run_id,
            input_run=first.blocks_run if df is None else "",
            retry_failed=extend_options.retry_failed,
        )
        if df is not None:
            check_driver_output(record, spark, df, self.key, prepared.schema, self.carry)
            changed_input.rehash_kept_inputs(run_store, spark, record, df.schema, extend_options)
        _stop_lazy_service(run_store, self.name)

        def take(drive: RunDriver, meanwhile: Callable[[], None]) -> None:
            if df is None:
                drive.reuse_input(first)
            else:
                drive.ingest_input(df, self.key, extend_options.match, meanwhile=meanwhile)

        with self._new_supervisor(
            run_store, spark, record, new=True, latest_run_id=latest_run_id
        ) as supervisor:
            ended = self._execute(run_store, spark, supervisor, prepared, take)
        prestart_service()
        return self._complete_run(ended, run_store, spark)

    def _run_retry(
        self,
        run_store: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        prepared: PreparedStage,
        latest_run_id: str,
    ) -> Run:
        """Retry the failed rows, as `holdfast runs retry` requested."""
        if changed_input.can_follow(retry_run.retry_chain(run_store, old)[-1]):
            return self._run_extended(
                run_store, spark, None, old, prepared, latest_run_id, changed_input.RETRY_OPTIONS
            )
        record = retry_run.make_retry_record(
            run_store, old, new_run_record(self, run_store, prepared, None)
        )
        _stop_lazy_service(run_store, self.name)
        with self._new_supervisor(
            run_store, spark, record, new=True, latest_run_id=latest_run_id
        ) as supervisor:
            ended = self._execute(
                run_store, spark, supervisor, prepared, lambda one, _: one.ingest_failed_rows(old)
            )
        return self._complete_run(ended, run_store, spark)

    def _execute(
        self,
        run_store: Store,
        spark: SparkSession,
        supervisor: ServiceSupervisor,
        prepared: PreparedStage,
        ingest_input: Callable[[RunDriver, Callable[[], None]], None],
    ) -> runs.RunRecord:
        """Probe the executors, ingest the input and make the calls; return the run's final record."""
        with RunDriver(self.name, run_store, spark, supervisor, mode=self.progress) as driver:
            slots = spark_jobs.parallelism(spark)
            job = child_job_of(self, supervisor, driver.record(), prepared)
            tasks = spark_jobs.dynamic_tasks(spark) if self.dynamic else self.tasks or slots
            driver.probe_executors(job, prepared, slots)
            ingest_input(driver, lambda: driver.prebuild_pull_job(job, prepared.function, tasks))
            driver.run_pull_jobs(job, prepared.function, tasks)
            return driver.record()

    def _run_remap(
        self,
        run_store: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        record: runs.RunRecord,
        latest_run_id: str,
        prepared: PreparedStage,
        mapped: tuple[Callable[[Any], Any], FailedRowIndex],
    ) -> Run:
        """Run a remap, or continue one that was interrupted."""
        new = record.status is runs.RunLifecycle.INGESTING
        _stop_lazy_service(run_store, self.name)
        with self._new_supervisor(
            run_store, spark, record, new=new, latest_run_id=latest_run_id, executors_write=False
        ) as supervisor:
            driver = RunDriver(self.name, run_store, spark, supervisor, mode=self.progress)
            with driver:
                if new and record.base_run:
                    driver.reuse_input(old)
                elif new:
                    driver.ingest_failed_rows(old)
                job = child_job_of(self, supervisor, driver.record(), prepared)
                job = msgspec.structs.replace(
                    job,
                    address=supervisor.local_address,
                    concurrency=1,
                    batch_rows=0,
                    rate=False,
                    token_limited=False,
                    slot_release=SlotRelease(),
                )
                driver.run_in_driver(make_remap_work(job, *mapped, ResultEncoder(prepared.schema)))
                ended = driver.record()
        return self._complete_run(ended, run_store, spark)

    @contextlib.contextmanager
    def _service(
        self,
        run_store: Store,
        spark: SparkSession,
        record: runs.RunRecord | None,
        prepared: PreparedStage,
        sink: Sink | None,
        latest_run_id: str,
    ) -> Iterator[ServiceSupervisor]:
        """Yield the service of the run: that of its lazy form, which stays open, or a temporary
        one.
        """
        running = _lazy_services.get((run_store.url, self.name))
        if running is not None and record is not None and record.run_id == running.run_id:
            running.request(ledger_protocol.ResumeRun())
            yield running
            return
        _stop_lazy_service(run_store, self.name)
        with self._supervisor_for(
            run_store, spark, record, prepared, sink, latest_run_id
        ) as supervisor:
            yield supervisor

    def _supervisor_for(
        self,
        run_store: Store,
        spark: SparkSession,
        record: runs.RunRecord | None,
        prepared: PreparedStage,
        sink: Sink | None,
        latest_run_id: str,
    ) -> ServiceSupervisor:
        new = record is None or record.status is runs.RunLifecycle.INGESTING
        if new:
            record = new_run_record(self, run_store, prepared, sink)
        assert record is not None
        # Budgets and times may change between resumes. The cut of rows may not.
        policy = msgspec.structs.replace(
            self.policy, page_rows=record.policy.page_rows, batch_rows=record.policy.batch_rows
        )
        record = msgspec.structs.replace(record, policy=policy)
        return self._new_supervisor(run_store, spark, record, new=new, latest_run_id=latest_run_id)

    def _new_supervisor(
        self,
        run_store: Store,
        spark: SparkSession,
        record: runs.RunRecord,
        *,
        new: bool,
        latest_run_id: str,
        executors_write: bool = True,
    ) -> ServiceSupervisor:
        config = service_config_of(
            self,
            run_store,
            spark,
            record,
            new=new,
            latest_run_id=latest_run_id,
            executors_write=executors_write,
        )
        return ServiceSupervisor(run_store, config)


def _stop_lazy_service(run_store: Store, name: str) -> None:
    """Stop the service of a lazy form, because another run of its name starts."""
    supervisor = _lazy_services.pop((run_store.url, name), None)
    if supervisor is not None:
        supervisor.release(wait=True)
