"""A run: its driver while it is active, and its results.

`RunDriver` is the driver side of an active run. It ingests the input, runs Spark jobs until the
ledger is complete, and shows the progress. If a job fails (a lost executor, a drained driver node),
it starts another one, provided that the ledger advanced since the last start.

`Run` is the result object: counts, output, failures, report.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa

from holdfast import codec, failpoints, traces
from holdfast.clock import SYSTEM
from holdfast.errors import NotFound, from_wire
from holdfast.ledger import runs
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.failures import list_failed_rows as failed_rows
from holdfast.ledger.log import count_rows as counts_of
from holdfast.ledger.states import RowState
from holdfast.spark import changed_input, driver_writes, executor_probe, ledger_protocol, spark_jobs
from holdfast.spark.child_job import ChildJob, ProbeRequest
from holdfast.spark.errors import (
    JobCancelled,
    NotAStage,
    OutputUnreadable,
    RowsFailed,
    RunCancelled,
    RunFailed,
    RunHalted,
    RunStopped,
)
from holdfast.spark.fingerprint import plan_fingerprint, quote_name, struct_type
from holdfast.spark.ingest import IngestResult, ingest
from holdfast.spark.ledger_client import BlockUploaderFactory
from holdfast.spark.outcome_bundles import can_bundle, outcome_frame
from holdfast.spark.output_export import export_outcomes
from holdfast.spark.output_file_check import check_files_exist, missing_file_error
from holdfast.spark.progress import COMPARING, READING, SORTING, ProgressDisplay
from holdfast.spark.report import Report
from holdfast.spark.retry_run import failed_blocks, retry_chain
from holdfast.spark.reused_rows import read_reused_rows
from holdfast.spark.run_data import RunInput, RunOutcomes, encode_schema
from holdfast.spark.service_supervisor import ServiceSupervisor
from holdfast.spark.sinks import ParquetSink, Sink, open_sink
from holdfast.spark.sinks.location import OBJECT_SCHEMES
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.spark_task import PullRows
from holdfast.spark.spool import BLOCK_BYTES as SPOOL_BLOCK_BYTES
from holdfast.spark.spool import make_spool_access
from holdfast.spark.spool import marker_object as spool_marker
from holdfast.spark.write_access import WriteAccess
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVER_POLL_S = 0.03
# The result row of a task.
PULL_RESULT_DDL = "part bigint, state string, calls bigint, cost double, reused bigint"
# Maximum restarts of the job without progress in the ledger.
STUCK_JOBS_MAX = 3
# A task without work ends within this time. Then the job is cancelled: tasks that still wait for an
# executor (a replacement or dynamic allocation) have no work either.
TASKS_END_S = 1.0
# How long the driver waits for Spark to end a cancelled job.
CANCEL_S = 10.0
SAMPLE_ROWS = 20
_NO_FILESYSTEM = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class .*FileSystem")


class PreparedStage(msgspec.Struct, frozen=True):
    """A prepared stage: the result schema, the function, and the pickled function."""

    schema: Any  # StructType
    fn: Callable[..., Any]
    function: bytes


class RunDriver:
    def __init__(
        self, name: str, store: Store, spark: SparkSession, supervisor: ServiceSupervisor, mode: Any
    ) -> None:
        self.name = name
        self.store = store
        self.spark = spark
        self.supervisor = supervisor
        run_id = codec.unpack_as(runs.RunRecord, supervisor.config.record).run_id
        self.tag = f"holdfast:{name}:{run_id}:{SYSTEM.entropy(4).hex()}"
        self._job_description = f"holdfast stage {name}, run {run_id}"
        self.display = ProgressDisplay(name, 0, mode, ui_url=spark_jobs.ui_link(spark))
        self._run_id = run_id
        self._traced: traces.TraceScope | None = None
        self._job: spark_jobs.SparkJob | None = None
        # The prebuilt pull job: its body, its number of tasks, its DataFrame.
        self._prebuilt_job: tuple[PullRows, int, DataFrame] | None = None

    def __enter__(self) -> RunDriver:
        self.display.__enter__()
        attributes = {"holdfast.stage": self.name, "holdfast.run": self._run_id}
        self._traced = traces.enter_child(f"stage {self.name}", traces.INTERNAL, attributes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._job is not None and not self._job.has_ended:
            self._job.cancel()
            self._job.join(CANCEL_S)
        self.display.__exit__(kind, error, trace)
        if self._traced is not None:
            self._traced.__exit__(kind, error, trace)

    def record(self) -> runs.RunRecord:
        config_record = codec.unpack_as(runs.RunRecord, self.supervisor.config.record)
        record = self.store.read(runs.get_record, config_record.run_id)
        assert record is not None
        return record

    def probe_executors(self, job_spec: ChildJob, prepared: PreparedStage, tasks: int) -> None:
        """Check the executors before anything is read or called."""
        if not executor_probe.needs_job(self.spark):
            executor_probe.check_local_imports(prepared.fn)
            return
        record = self.record()
        with executor_probe.output_marker(record.sink) as marker, spool_marker(record) as marked:
            job_spec = msgspec.structs.replace(job_spec, probe=ProbeRequest(marked))
            job = self._job = spark_jobs.SparkJob(
                self.spark,
                f"{self.tag}:probe",
                lambda: executor_probe.run_probe_job(
                    self.spark, job_spec, prepared.function, marker, tasks
                ),
                f"{self._job_description}: look at the executors",
            )
            while not job.join(DRIVER_POLL_S):
                self.supervisor.request(ledger_protocol.GetRunStatus())
        if job.is_cancelled_elsewhere:
            raise self._cancelled_error(job)
        if job.error is not None:
            raise executor_probe.probe_job_error(self.name, job.error) from job.error
        refusal = executor_probe.first_error(job.result)
        if refusal is not None:
            raise refusal

    def _cancelled_error(self, job: spark_jobs.SparkJob) -> JobCancelled:
        assert job.error is not None
        return JobCancelled(name=self.name, job=job.tag, why=spark_jobs.error_reason(job.error))

    def ingest_input(
        self,
        df: DataFrame,
        key: list[str],
        match: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Ingest the input, if the run has none yet. `match` are the columns that identify equal
        content and `keep` the columns to store; the default is all. `meanwhile` is called after the
        job has started.
        """
        if self.record().status is not runs.RunLifecycle.INGESTING:
            return
        self._show_ingest(READING)
        plan = plan_fingerprint(df)
        options: dict[str, Any] = {"match": match, "keep": keep}
        ingested = self._run_ingest_job(df, key, meanwhile, sort=False, **options)
        if ingested is None or ingested.needs_sort:
            self.supervisor.request(ledger_protocol.DropInput())
            ingested = self._run_ingest_job(df, key, sort=True, **options)
        assert ingested is not None
        staged = [(one.n, one.rows, one.size_bytes, one.bounds) for one in ingested.staged]
        self._show_ingest(COMPARING, sum(one.size_bytes for one in ingested.staged))
        self.supervisor.request(
            ledger_protocol.SealInput(
                blocks=ingested.blocks,
                merge=ingested.needs_merge,
                staged=staged if ingested.needs_merge else [],
                schema=encode_schema(ingested.schema),
                input_hash=ingested.input_hash,
                plan=plan,
                match=list(df.columns if match is None else match),
                match_digest=ingested.match_digest,
            )
        )

    def _show_ingest(self, step: str, taken_bytes: int = 0) -> None:
        self.display.update_ingest(SYSTEM.mono_ns(), taken_bytes, step=step)

    def _run_ingest_job(
        self,
        df: DataFrame,
        key: list[str],
        meanwhile: Callable[[], None] | None = None,
        **options: Any,
    ) -> IngestResult | None:
        """Run one job that reads the input and stores its blocks. Returns None if the input is
        unsorted: the job is cancelled, because its tasks would end one by one, each at the cost of
        a Python worker.
        """
        job = self._job = spark_jobs.SparkJob(
            self.spark,
            f"{self.tag}:ingest",
            lambda: self._ingest(df, key, options),
            f"{self._job_description}: {'sort' if options['sort'] else 'read'} the input",
        )
        if meanwhile is not None:
            meanwhile()
        while not job.join(DRIVER_POLL_S):
            # The request restarts a dead service, which the tasks wait for.
            status: ledger_protocol.RunStatusReply = self.supervisor.request(
                ledger_protocol.GetRunStatus()
            )
            self._show_ingest(SORTING if options["sort"] else READING, status.input_bytes)
            if status.needs_sort and not options["sort"]:
                job.cancel()
                job.join(CANCEL_S)
                return None
        if job.is_cancelled_elsewhere:
            raise self._cancelled_error(job)
        if job.error is not None:
            raise job.error
        ingested: IngestResult = job.result
        return ingested

    def _ingest(self, df: DataFrame, key: list[str], options: dict[str, Any]) -> IngestResult:
        record = self.record()
        if record.spool:
            # The service cannot merge blocks that it does not hold.
            options = {**options, "block_bytes": SPOOL_BLOCK_BYTES, "memory_bytes": 0}
        connect = BlockUploaderFactory(
            self.supervisor.address, make_spool_access(record), record.run_id, options["sort"]
        )
        with spark_jobs.use_driver_python(self.spark):
            return ingest(df, key, connect, **options)

    def reuse_input(self, old: runs.RunRecord) -> None:
        """Use the input blocks of an older run in place."""
        self.supervisor.request(_seal_like(old, old.blocks))

    def ingest_failed_rows(self, old: runs.RunRecord) -> None:
        """Ingest the failed rows of an older run as the input of this one."""
        record = self.record()
        connection = BlockUploaderFactory(
            self.supervisor.local_address, make_spool_access(record), record.run_id
        )()
        try:
            blocks = [
                (connection.put_block(data), rows) for data, rows in failed_blocks(self.store, old)
            ]
        finally:
            connection.close()
        self.supervisor.request(_seal_like(old, blocks))

    def prebuild_pull_job(self, job_spec: ChildJob, function: bytes, tasks: int) -> None:
        """Build the pull job in Spark before it starts. That takes a tenth of a second and overlaps
        with reading the input. `run_pull_jobs` reports any error of the job.
        """
        with contextlib.suppress(Exception):
            body = PullRows(job_spec, function)
            self._prebuilt_job = (body, tasks, self._pull_frame(body, tasks))

    def run_pull_jobs(self, job_spec: ChildJob, function: bytes, tasks: int) -> None:
        """Run pull jobs until the run is finished."""
        self._raise_service_error(
            self.supervisor.request(ledger_protocol.GetRunStatus())
        )  # checks the output before the first call
        position, stuck_jobs = b"", 0
        self._forget_job()
        record = self.record()
        writes = WriteAccess(options_for(record.spool, record.sink.get("path")))
        reused = codec.unpack_as(
            runs.RunProgress, self.supervisor.request(ledger_protocol.GetRunStatus()).progress
        ).reused
        while True:
            status: ledger_protocol.RunStatusReply = self.supervisor.request(
                ledger_protocol.GetRunStatus()
            )
            progress = codec.unpack_as(runs.RunProgress, status.progress)
            body = PullRows(job_spec, function, reused, writes if status.writing else None)
            reused = 0  # report it once: listeners sum over all jobs
            is_work_left = status.writing or not self._are_all_rows_final(progress)
            status = self._watch_job(self._start_pull_job(body, tasks) if is_work_left else None)
            if status.over:
                break
            if status.stopped:
                raise self._stopped_error(status)
            if self._job is not None and self._job.is_cancelled_elsewhere:
                raise self._cancelled_error(self._job)
            # A job whose tasks released their slots is followed by another.
            stuck = status.position == position and not self._has_released_slots()
            stuck_jobs = stuck_jobs + 1 if stuck else 0
            position = status.position
            if stuck_jobs >= STUCK_JOBS_MAX:
                error = self._job.error if self._job is not None else None
                why = (
                    spark_jobs.error_reason(error)
                    if error
                    else "all tasks ended before all rows were final"
                )
                raise RunFailed(name=self.name, why=why) from error
            if self._has_released_slots():
                self._wait_for_rows()
        if self._job is not None and not self._job.join(TASKS_END_S):
            self._job.cancel()
        if status.status == runs.RunLifecycle.CANCELLED.value:
            raise RunCancelled(name=self.name, run_id=job_spec.run_id)

    def run_in_driver(self, action: Callable[[], Any]) -> None:
        """Do the run's work in a thread of the driver, without a Spark job, until the run is
        finished.
        """
        self._job = spark_jobs.SparkJob(
            self.spark, self.tag, action, f"{self._job_description}: map kept values"
        )
        status = self._watch_job(self._job)
        if status.stopped and not status.over:
            raise self._stopped_error(status)
        if not status.over:
            error = self._job.error
            why = (
                spark_jobs.error_reason(error)
                if error
                else "the work ended before all rows were final"
            )
            raise RunFailed(name=self.name, why=why) from error

    def _wait_for_rows(self) -> None:
        """Wait until rows can be granted: retries are due, or the commit has caught up."""
        while True:
            status: ledger_protocol.RunStatusReply = self.supervisor.request(
                ledger_protocol.GetRunStatus()
            )
            self._raise_service_error(status)
            progress = codec.unpack_as(runs.RunProgress, status.progress)
            self.display.update(progress, size=sum(progress.counts))
            if status.claim_ready or status.over or status.stopped:
                return
            SYSTEM.sleep(DRIVER_POLL_S)

    def _forget_job(self) -> None:
        """Forget the finished ingest job."""
        self._job = None

    def _has_released_slots(self) -> bool:
        """Return whether tasks of the last job ended because of their time slice or lack of rows."""
        results = self._job.result if self._job is not None else None
        return any(row.state == "turn" for row in results or [])

    def _stopped_error(self, status: ledger_protocol.RunStatusReply) -> RunStopped:
        progress = codec.unpack_as(runs.RunProgress, status.progress)
        done, skipped, failed, _ = progress.ended
        return RunStopped(
            name=self.name,
            run_id=self.record().run_id,
            why=status.stopped,
            done=done + skipped,
            failed=failed,
            left=sum(progress.counts) - sum(progress.ended),
        )

    def _start_pull_job(self, body: PullRows, tasks: int) -> spark_jobs.SparkJob:
        description = f"{self._job_description}: call rows"
        self._job = spark_jobs.SparkJob(
            self.spark, self.tag, lambda: self._collect_pull_job(body, tasks), description
        )
        return self._job

    def _collect_pull_job(self, body: PullRows, tasks: int) -> Any:
        prebuilt, self._prebuilt_job = self._prebuilt_job, None
        if prebuilt is not None and prebuilt[:2] == (body, tasks):
            return prebuilt[2].collect()
        return self._pull_frame(body, tasks).collect()

    def _pull_frame(self, body: PullRows, tasks: int) -> DataFrame:
        from pyspark.sql import functions as F

        if failpoints.armed:
            failpoints.hit("spark.build_pull_job", tasks)
        # Totals of the finished tasks, for Spark's web UI and listeners.
        figures = [F.sum(name).alias(name) for name in ("calls", "cost", "reused")]
        with spark_jobs.use_driver_python(self.spark):
            pulled = self.spark.range(0, tasks, 1, tasks).mapInArrow(
                body, struct_type(PULL_RESULT_DDL)
            )
            return pulled.observe(f"holdfast {self.name}", *figures)

    def _watch_job(self, job: spark_jobs.SparkJob | None) -> ledger_protocol.RunStatusReply:
        """Poll until the run or the job is finished, then read the status a last time. Without a
        job all rows are final and the ledger service writes the output.
        """
        while True:
            ended = job is None or job.has_ended
            status: ledger_protocol.RunStatusReply = self.supervisor.request(
                ledger_protocol.GetRunStatus()
            )
            self._raise_service_error(status)
            progress = codec.unpack_as(runs.RunProgress, status.progress)
            self.display.update(progress, size=sum(progress.counts))
            if status.over or (
                ended and (status.writing or not self._are_all_rows_final(progress))
            ):
                return status
            if job is not None and not ended:
                job.join(DRIVER_POLL_S)
            else:
                SYSTEM.sleep(DRIVER_POLL_S)

    def _raise_service_error(self, status: ledger_protocol.RunStatusReply) -> None:
        if status.halted:
            raise RunHalted(name=self.name, why=status.halted)
        if status.error is not None:
            raise from_wire(status.error)

    def _are_all_rows_final(self, progress: runs.RunProgress) -> bool:
        """Return whether all rows are final and only the output is being written."""
        return sum(progress.ended) == sum(progress.counts)


@dataclass(frozen=True)
class RunStatus:
    status: str
    # The stop rule or the illegal transition that ended it; empty for neither.
    reason: str
    cancel_requested: bool
    retry_requested: bool


class StatusText(str):
    """The status of a run. It equals its text, and calling it returns the full status."""

    _status: RunStatus

    def __new__(cls, status: RunStatus) -> StatusText:
        text = super().__new__(cls, status.status)
        text._status = status
        return text

    def __call__(self) -> RunStatus:
        return self._status


class Run:
    """A finished run of a stage, or with `Run.of` a run in any state."""

    def __init__(
        self, record: runs.RunRecord, store: Store, spark: SparkSession, on_fail: str = "keep"
    ) -> None:
        self._record = record
        self._retry_chain = retry_chain(store, record)
        self._store = store
        self._spark = spark
        if on_fail == "raise":
            failed = self.counts()[RowState.TERMINAL_FAIL.name]
            if failed:
                raise RowsFailed(name=record.name, failed=failed, examples=self._examples())

    @classmethod
    def of(
        cls,
        name: str,
        spark: SparkSession,
        store: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
    ) -> Run:
        """Return the latest run of a name in its current state: active, finished, cancelled, with
        failed rows.

        `storage_options` are credentials of its spool, if they are not in the environment.
        """
        run_store = open_store(os.fspath(store))
        record = run_store.read(runs.get_latest, name)
        if record is None:
            run_store.close()
            raise NotFound(what="run", name=name)
        if record.spool:
            keep_options(record.spool, storage_options)
        return cls(record, run_store, spark)

    @property
    def run_id(self) -> str:
        return self._record.run_id

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def status(self) -> StatusText:
        """The status as text. `run.status()` also returns the reason of a stop or halt and the
        pending requests.
        """
        record = self._record
        status = RunStatus(
            record.status.value,
            record.stopped or record.halted,
            bool(record.cancel_requested_ns),
            bool(record.retry_requested_ns),
        )
        return StatusText(status)

    def progress(self) -> runs.RunProgress:
        """The last published figures of the run: calls, cost, retries, latencies."""
        stored = self._store.read(runs.get_progress, self.run_id)
        return stored if stored is not None else runs.RunProgress(counts=[0] * 8, ended=[0] * 4)

    def counts(self) -> dict[str, int]:
        """Return rows by state name. The TERMINAL states count all rows with this outcome,
        committed or not. After a run COMMITTED is the number of all rows, and the four add up to
        it.
        """
        row_counts = [counts_of(self._store, record.run_id) for record in self._retry_chain]
        newest = row_counts[0]
        counts = {state.name: count for state, count in zip(RowState, newest.by_state, strict=True)}
        # Rows that failed in an older run of the chain were retried in the newer one.
        succeeded, skipped = (sum(one.ended[i] for one in row_counts) for i in (0, 1))
        counts[RowState.TERMINAL_SUCCESS.name] = succeeded
        counts[RowState.TERMINAL_SKIP.name] = skipped
        counts[RowState.TERMINAL_FAIL.name] = newest.ended[2]
        counts[RowState.TERMINAL_CANCEL.name] = sum(one.ended[3] for one in row_counts)
        if sum(newest.ended) < sum(newest.by_state):
            return counts
        counts[RowState.COMMITTED.name] = row_counts[-1].by_state[RowState.COMMITTED]
        return counts

    def output(self) -> DataFrame:
        """Return the key and result columns of the successful rows in key order."""
        sink = open_sink(self._record.sink) if self._record.sink else None
        without_files = sink is None or driver_writes.is_driver_sink(sink)
        if without_files and len(self._retry_chain) == 1 and can_bundle(self._store, self._record):
            return self._executor_frame(self._record, RowState.TERMINAL_SUCCESS)
        outcomes = [self._outcomes(record) for record in self._retry_chain]
        if without_files:
            tables = [one.successes(0, one.record.size) for one in outcomes]
            frame = self._frame(pa.concat_tables(tables))
            return frame if len(tables) == 1 else frame.orderBy(*map(quote_name, self._record.key))
        files = [
            path
            for record in reversed(self._retry_chain)
            for path in open_sink(record.sink).parts(record.run_id)
        ]
        schema = self._spark_schema(outcomes[0].schema)
        if not files:
            return self._spark.createDataFrame([], schema)
        check_files_exist(files)
        paths = [_spark_path(path) for path in files]
        try:
            frame = self._spark.read.schema(schema).parquet(*paths)
        except Exception as error:
            if missing := missing_file_error(error):
                raise missing from None
            if not _NO_FILESYSTEM.search(str(error)):
                raise
            raise OutputUnreadable(path=paths[0], files=len(paths)) from None
        return frame.orderBy(*map(quote_name, self._record.key))

    def failed(self) -> DataFrame:
        """Return the key columns of the failed rows and the reason: _seq _state _attempts
        _error_class _error. _raw is a returned value that did not match the schema (`Stage.remap`
        maps it).
        """
        if can_bundle(self._store, self._record):
            return self._executor_frame(self._record, RowState.TERMINAL_FAIL)
        return self._frame(self._outcomes(self._record).failed(0, self._record.size))

    def reused(self) -> DataFrame:
        """Return the key columns of the rows with an outcome of an earlier run: _seq, and its
        location _from_run _from_seq.
        """
        if can_bundle(self._store, self._record):
            return self._executor_frame(self._record, "reused")
        return self._frame(read_reused_rows(self._store, self._record, 0, self._record.size))

    def changed(self) -> DataFrame:
        """Return the key columns and _seq of the rows with other content than in the previous run."""
        return self._frame(changed_input.changed_rows(self._store, self._record))

    def gone(self) -> DataFrame:
        """Return the key columns of the previous run's rows that are missing in the input; _seq is
        the seq there.
        """
        return self._frame(changed_input.removed_rows(self._store, self._record))

    def skipped(self) -> DataFrame:
        """Return the key columns of the skipped rows; _error has the reason."""
        if all(can_bundle(self._store, one) for one in self._retry_chain):
            frames = [
                self._executor_frame(one, RowState.TERMINAL_SKIP)
                for one in reversed(self._retry_chain)
            ]
            return functools.reduce(lambda a, b: a.union(b), frames)
        tables = [self._outcomes(one).skipped(0, one.size) for one in reversed(self._retry_chain)]
        return self._frame(pa.concat_tables(tables))

    def report(self) -> Report:
        """Return figures and plots: displays in a notebook, `.save("run.html")`, prints as text."""
        progress = self.progress()
        sample = self._failed_rows(progress, SAMPLE_ROWS)
        older = self._store.read(runs.progress_of_retried_runs, self._record)
        return Report(self._record, progress, sample, store=self._store.url, older=older)

    def write(self, output: str | os.PathLike[str] | Sink) -> None:
        """Write the successful rows to `output`: again, if it is lost, or to another place.

        Reads the outcomes from the store, or lets executors read them from the spool. No function
        is called. A place with foreign content is refused, and a place that this run has written
        stays unchanged.
        """
        sink = driver_writes.attach_session(as_sink(output), self._spark)
        export_outcomes(self._spark, self._store, self._retry_chain, sink)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {self.name}: {self.status}>"

    def _outcomes(self, record: runs.RunRecord) -> RunOutcomes:
        return RunOutcomes(self._store, record, RunInput(self._store, record))

    def _executor_frame(
        self, record: runs.RunRecord, rows: RowState | Literal["reused"]
    ) -> DataFrame:
        return outcome_frame(self._spark, self._store, record, rows)

    def _frame(self, table: pa.Table) -> DataFrame:
        # One chunk, because Spark treats an empty batch as the end.
        return self._spark.createDataFrame(table.combine_chunks())

    def _spark_schema(self, schema: pa.Schema) -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(schema)

    def _failed_rows(self, progress: runs.RunProgress, limit: int) -> list[FailedRow]:
        source = RunInput(self._store, self._record)
        read_block = source.keys_of_block if source.is_spooled else None
        return failed_rows(self._store, self._record, progress, limit=limit, read_block=read_block)

    def _examples(self) -> list[str]:
        rows = self._failed_rows(self.progress(), 3)
        return [f"{row.key}: {row.error}" for row in rows]


def as_sink(output: str | os.PathLike[str] | Sink) -> Sink:
    if isinstance(output, str | os.PathLike):
        return ParquetSink(output)
    if not isinstance(output, Sink):
        raise NotAStage(what="output", why="must be a path or a sink", found=type(output).__name__)
    return output


def _spark_path(path: str) -> str:
    """Return a path that Spark reads literally: wildcards are escaped, the scheme is Hadoop's."""
    text = re.sub(r"([\\*?\[\]{}])", r"\\\1", path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return f"file://{text}"
    return f"{OBJECT_SCHEMES.get(scheme, scheme)}://{rest}"


def _seal_like(old: runs.RunRecord, blocks: list[tuple[int, int]]) -> ledger_protocol.SealInput:
    """Build a seal over these blocks with the columns and the identity of an older run's input."""
    return ledger_protocol.SealInput(
        blocks=blocks,
        merge=False,
        staged=[],
        schema=old.input_schema,
        input_hash=old.input_hash,
        plan=old.plan,
        match=old.match,
        match_digest=old.match_digest,
    )
