"""A run: while it is driven, and afterwards.

`Drive` is the driver's part of a run at work: it takes the input in, keeps a Spark job going until
the ledger is complete, and shows how it stands. The job may fail (an executor takes its tasks along,
a driver node is drained): as long as the ledger moved since it was started, it is started again.

`Run` is what users get: counts, output, failures, report.
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

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.errors import NotFound, from_wire
from holdfast.ledger import runs
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.failures import failed as failed_rows
from holdfast.ledger.log import counts as counts_of
from holdfast.ledger.states import State
from holdfast.spark import driver_writes, extension, jobs, probe, wire
from holdfast.spark.again import chain, failed_blocks
from holdfast.spark.client import Blocks
from holdfast.spark.engine import Duty
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
from holdfast.spark.fingerprint import plan_of, quoted, struct
from holdfast.spark.ingest import Ingested, ingest
from holdfast.spark.journal import Input, Outcomes, schema_bytes
from holdfast.spark.keeper import Keeper
from holdfast.spark.outcome_rows import frame_of, is_bundled
from holdfast.spark.output_files import check_present, missing_file
from holdfast.spark.progress import COMPARING, READING, SORTING, Bar
from holdfast.spark.report import Report
from holdfast.spark.reused_rows import reused_between
from holdfast.spark.rewrite import rewrite
from holdfast.spark.sinks import ParquetSink, Sink, open_sink
from holdfast.spark.sinks.location import OBJECT_SCHEMES
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.spool import BLOCK_BYTES as SPOOL_BLOCK_BYTES
from holdfast.spark.spool import access_of
from holdfast.spark.spool import marker as spool_marker
from holdfast.spark.task import Pull
from holdfast.spark.write_access import WriteAccess
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POLL_S = 0.03
# What a task of a run tells at its end.
PULLED = "part bigint, state string, calls bigint, cost double, reused bigint"
# How often a job is started again although the ledger stands where it stood.
BARREN_JOBS_MAX = 3
# A task that has nothing left to do ends within this time. After it the job is cancelled: tasks that wait for an
# executor, one that is started in the place of a lost one or by dynamic allocation, have nothing to do either.
END_S = 1.0
# How long the driver waits for Spark to end a cancelled job.
CANCEL_S = 10.0
SAMPLE_ROWS = 20
_NO_FILESYSTEM = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class .*FileSystem")


class Prepared(msgspec.Struct, frozen=True):
    """What is run: the result's schema, the function, and the function as it travels."""

    schema: Any  # StructType
    fn: Callable[..., Any]
    function: bytes


class Drive:
    def __init__(
        self, name: str, store: Store, spark: SparkSession, keeper: Keeper, mode: Any
    ) -> None:
        self.name = name
        self.store = store
        self.spark = spark
        self.keeper = keeper
        run_id = codec.unpack_as(runs.RunRecord, keeper.charge.record).run_id
        self.tag = f"holdfast:{name}:{run_id}:{SYSTEM.entropy(4).hex()}"
        self._about = f"holdfast stage {name}, run {run_id}"
        self.bar = Bar(name, 0, mode, ui_url=jobs.ui_link(spark))
        self._job: jobs.Job | None = None
        # The job of `pull` as Spark knows it: its body, its tasks, its DataFrame.
        self._described: tuple[Pull, int, DataFrame] | None = None

    def __enter__(self) -> Drive:
        self.bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._job is not None and not self._job.ended:
            self._job.cancel()
            self._job.join(CANCEL_S)
        self.bar.__exit__(kind, error, trace)

    def record(self) -> runs.RunRecord:
        charged = codec.unpack_as(runs.RunRecord, self.keeper.charge.record)
        found = self.store.read(runs.get, charged.run_id)
        assert found is not None
        return found

    def probe(self, duty: Duty, prepared: Prepared, tasks: int) -> None:
        """Have the executors looked at, before anything is read or called."""
        if not probe.needs_job(self.spark):
            probe.check_here(prepared.fn)
            return
        record = self.record()
        with probe.marker(record.sink) as marker, spool_marker(record) as marked:
            duty = msgspec.structs.replace(duty, spool_marker=marked)
            job = self._job = jobs.Job(
                self.spark,
                f"{self.tag}:probe",
                lambda: probe.collect(self.spark, duty, prepared.function, marker, tasks),
                f"{self._about}: look at the executors",
            )
            while not job.join(POLL_S):
                self.keeper.ask(wire.Status())
        if job.killed:
            raise self._cancelled(job)
        if job.error is not None:
            raise probe.of_spark(self.name, job.error) from job.error
        refusal = probe.refusal(job.result)
        if refusal is not None:
            raise refusal

    def _cancelled(self, job: jobs.Job) -> JobCancelled:
        assert job.error is not None
        return JobCancelled(name=self.name, job=job.tag, why=jobs.reason(job.error))

    def take_in(
        self,
        df: DataFrame,
        key: list[str],
        match: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """The input, if the run has none yet. `match` are the columns that make a row the same, and
        `keep` those that are stored; without them, all. `meanwhile` is called once the job has begun."""
        if self.record().status is not runs.Status.INGESTING:
            return
        self._show(READING)
        plan = plan_of(df)
        options: dict[str, Any] = {"match": match, "keep": keep}
        taken = self._pass_over(df, key, meanwhile, sort=False, **options)
        if taken is None or taken.needs_sort:
            self.keeper.ask(wire.DropInput())
            taken = self._pass_over(df, key, sort=True, **options)
        assert taken is not None
        staged = [(one.n, one.rows, one.size_bytes, one.bounds) for one in taken.staged]
        self._show(COMPARING, sum(one.size_bytes for one in taken.staged))
        self.keeper.ask(
            wire.Seal(
                taken.blocks,
                taken.needs_merge,
                staged if taken.needs_merge else [],
                schema_bytes(taken.schema),
                taken.input_hash,
                plan,
                list(df.columns if match is None else match),
                taken.match_digest,
            )
        )

    def _show(self, step: str, taken_bytes: int = 0) -> None:
        self.bar.ingesting(SYSTEM.mono_ns(), taken_bytes, step=step)

    def _pass_over(
        self,
        df: DataFrame,
        key: list[str],
        meanwhile: Callable[[], None] | None = None,
        **options: Any,
    ) -> Ingested | None:
        """One job that reads the input and stores its blocks. None: the input is in no order, and the job was
        cancelled. Its tasks would end one by one, each at the cost of a Python worker."""
        job = self._job = jobs.Job(
            self.spark,
            f"{self.tag}:ingest",
            lambda: self._ingest(df, key, options),
            f"{self._about}: {'sort' if options['sort'] else 'read'} the input",
        )
        if meanwhile is not None:
            meanwhile()
        while not job.join(POLL_S):
            # Asking brings a service back that died: tasks wait for it.
            stand: wire.Stand = self.keeper.ask(wire.Status())
            self._show(SORTING if options["sort"] else READING, stand.taken_bytes)
            if stand.needs_sort and not options["sort"]:
                job.cancel()
                job.join(CANCEL_S)
                return None
        if job.killed:
            raise self._cancelled(job)
        if job.error is not None:
            raise job.error
        taken: Ingested = job.result
        return taken

    def _ingest(self, df: DataFrame, key: list[str], options: dict[str, Any]) -> Ingested:
        record = self.record()
        if record.spool:
            # Nothing is merged where the data is not.
            options = {**options, "block_bytes": SPOOL_BLOCK_BYTES, "memory_bytes": 0}
        connect = Blocks(self.keeper.address, access_of(record), record.run_id, options["sort"])
        with jobs.own_python(self.spark):
            return ingest(df, key, connect, **options)

    def take_again(self, old: runs.RunRecord) -> None:
        """The input of an older run, whose blocks this one reads where they are."""
        self.keeper.ask(
            wire.Seal(
                old.blocks, False, [], old.input_schema, old.input_hash, old.plan,
                old.match, old.match_digest,
            )
        )  # fmt: skip

    def take_failed(self, old: runs.RunRecord) -> None:
        """The rows that failed in an older run, as the input of this one."""
        record = self.record()
        line = Blocks(self.keeper.own_address, access_of(record), record.run_id)()
        try:
            blocks = [(line.put_block(data), rows) for data, rows in failed_blocks(self.store, old)]
        finally:
            line.close()
        seal = wire.Seal(
            blocks, False, [], old.input_schema, old.input_hash, old.plan, old.match,
            old.match_digest,
        )  # fmt: skip
        self.keeper.ask(seal)

    def describe_pull(self, duty: Duty, function: bytes, tasks: int) -> None:
        """Tell Spark of the job of `pull` before it is started. That takes a tenth of a second, and is
        done while the input is read. What is wrong with it `pull` finds out, and says."""
        with contextlib.suppress(Exception):
            body = Pull(duty, function)
            self._described = (body, tasks, self._frame(body, tasks))

    def pull(self, duty: Duty, function: bytes, tasks: int) -> None:
        """Keep a job at it until the run is over."""
        self._check_refused(self.keeper.ask(wire.Status()))  # the output, before the first call
        position, barren = b"", 0
        self._forget_job()
        record = self.record()
        writes = WriteAccess(options_for(record.spool, record.sink.get("path")))
        reused = codec.unpack_as(runs.Progress, self.keeper.ask(wire.Status()).progress).reused
        while True:
            stand: wire.Stand = self.keeper.ask(wire.Status())
            progress = codec.unpack_as(runs.Progress, stand.progress)
            body = Pull(duty, function, reused, writes if stand.writing else None)
            reused = 0  # once over all jobs: listeners add them up
            left = stand.writing or not self._committing(progress)
            stand = self._watch(self._start(body, tasks) if left else None)
            if stand.over:
                break
            if stand.stopped:
                raise self._stopped(stand)
            if self._job is not None and self._job.killed:
                raise self._cancelled(self._job)
            # A job whose tasks gave their slots back is followed by another.
            stuck = stand.position == position and not self._gave_back()
            barren = barren + 1 if stuck else 0
            position = stand.position
            if barren >= BARREN_JOBS_MAX:
                error = self._job.error if self._job is not None else None
                why = jobs.reason(error) if error else "tasks end and rows are left"
                raise RunFailed(name=self.name, why=why) from error
            if self._gave_back():
                self._await_rows()
        if self._job is not None and not self._job.join(END_S):
            self._job.cancel()
        if stand.status == runs.Status.CANCELLED.value:
            raise RunCancelled(name=self.name, run_id=duty.run_id)

    def work(self, action: Callable[[], Any]) -> None:
        """Do the run's work in a thread of the driver, without a Spark job, until the run is over."""
        self._job = jobs.Job(self.spark, self.tag, action, f"{self._about}: map kept values")
        stand = self._watch(self._job)
        if stand.stopped and not stand.over:
            raise self._stopped(stand)
        if not stand.over:
            error = self._job.error
            why = jobs.reason(error) if error else "the work ended and rows are left"
            raise RunFailed(name=self.name, why=why) from error

    def _await_rows(self) -> None:
        """Until a task would be given rows: those that rest are due, or the output has caught up."""
        while True:
            stand: wire.Stand = self.keeper.ask(wire.Status())
            self._check_refused(stand)
            progress = codec.unpack_as(runs.Progress, stand.progress)
            self.bar.update(progress, size=sum(progress.counts))
            if stand.ready or stand.over or stand.stopped:
                return
            SYSTEM.sleep(POLL_S)

    def _forget_job(self) -> None:
        """The job that read the input is over."""
        self._job = None

    def _gave_back(self) -> bool:
        """Whether tasks of the last job ended because their time was up, or had nothing to do."""
        done = self._job.result if self._job is not None else None
        return any(row.state == "turn" for row in done or [])

    def _stopped(self, stand: wire.Stand) -> RunStopped:
        progress = codec.unpack_as(runs.Progress, stand.progress)
        done, skipped, failed, _ = progress.ended
        return RunStopped(
            name=self.name,
            run_id=self.record().run_id,
            why=stand.stopped,
            done=done + skipped,
            failed=failed,
            left=sum(progress.counts) - sum(progress.ended),
        )

    def _start(self, body: Pull, tasks: int) -> jobs.Job:
        about = f"{self._about}: call rows"
        self._job = jobs.Job(self.spark, self.tag, lambda: self._collect(body, tasks), about)
        return self._job

    def _collect(self, body: Pull, tasks: int) -> Any:
        described, self._described = self._described, None
        if described is not None and described[:2] == (body, tasks):
            return described[2].collect()
        return self._frame(body, tasks).collect()

    def _frame(self, body: Pull, tasks: int) -> DataFrame:
        from pyspark.sql import functions as F

        # Of the tasks that ended, so that Spark's web page and listeners have them.
        figures = [F.sum(name).alias(name) for name in ("calls", "cost", "reused")]
        with jobs.own_python(self.spark):
            pulled = self.spark.range(0, tasks, 1, tasks).mapInArrow(body, struct(PULLED))
            return pulled.observe(f"holdfast {self.name}", *figures)

    def _watch(self, job: jobs.Job | None) -> wire.Stand:
        """Until the run is over, or the job is: then it is looked at once more. No job: rows have
        all ended, and the output is written by the ledger service."""
        while True:
            ended = job is None or job.ended
            stand: wire.Stand = self.keeper.ask(wire.Status())
            self._check_refused(stand)
            progress = codec.unpack_as(runs.Progress, stand.progress)
            self.bar.update(progress, size=sum(progress.counts))
            if stand.over or (ended and (stand.writing or not self._committing(progress))):
                return stand
            if job is not None and not ended:
                job.join(POLL_S)
            else:
                SYSTEM.sleep(POLL_S)

    def _check_refused(self, stand: wire.Stand) -> None:
        if stand.halted:
            raise RunHalted(name=self.name, why=stand.halted)
        if stand.error is not None:
            raise from_wire(stand.error)

    def _committing(self, progress: runs.Progress) -> bool:
        """Whether all rows ended, and only the output is still being written."""
        return sum(progress.ended) == sum(progress.counts)


@dataclass(frozen=True)
class RunStatus:
    status: str
    # The rule that stopped it, or the illegal move that halted it; empty for neither.
    reason: str
    cancel_requested: bool
    retry_requested: bool


class StatusText(str):
    """The status of a run: equal to its text, and callable for all of it."""

    _whole: RunStatus

    def __new__(cls, whole: RunStatus) -> StatusText:
        made = super().__new__(cls, whole.status)
        made._whole = whole
        return made

    def __call__(self) -> RunStatus:
        return self._whole


class Run:
    """A run of a stage that is over (or, by `Run.of`, as it stands)."""

    def __init__(
        self, record: runs.RunRecord, store: Store, spark: SparkSession, on_fail: str = "keep"
    ) -> None:
        self._record = record
        self._chain = chain(store, record)
        self._store = store
        self._spark = spark
        if on_fail == "raise":
            failed = self.counts()[State.TERMINAL_FAIL.name]
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
        """The latest run of a name as it stands: at work, finished, cancelled, with failed rows.

        `storage_options` are credentials of its spool, if they are not in the environment."""
        home = open_store(os.fspath(store))
        record = home.read(runs.latest, name)
        if record is None:
            home.close()
            raise NotFound(what="run", name=name)
        if record.spool:
            keep_options(record.spool, storage_options)
        return cls(record, home, spark)

    @property
    def run_id(self) -> str:
        return self._record.run_id

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def status(self) -> StatusText:
        """The status as text; called, `run.status()` tells more: why it stopped or halted, what is asked of it."""
        record = self._record
        status = RunStatus(
            record.status.value,
            record.stopped or record.halted,
            bool(record.cancel_requested_ns),
            bool(record.retry_requested_ns),
        )
        return StatusText(status)

    def progress(self) -> runs.Progress:
        """The last figures of the run: calls, cost, retries, latencies."""
        found = self._store.read(runs.progress, self.run_id)
        return found if found is not None else runs.Progress(counts=[0] * 8, ended=[0] * 4)

    def counts(self) -> dict[str, int]:
        """Rows by state name. Those of the TERMINAL states count rows that ended so, committed or
        not: after a run COMMITTED is all of them and the four add up to it."""
        found = [counts_of(self._store, record.run_id) for record in self._chain]
        newest = found[0]
        counts = {state.name: count for state, count in zip(State, newest.by_state, strict=True)}
        # What failed in an older run of the chain was tried again in the newer one.
        succeeded, skipped = (sum(one.ended[i] for one in found) for i in (0, 1))
        counts[State.TERMINAL_SUCCESS.name] = succeeded
        counts[State.TERMINAL_SKIP.name] = skipped
        counts[State.TERMINAL_FAIL.name] = newest.ended[2]
        counts[State.TERMINAL_CANCEL.name] = sum(one.ended[3] for one in found)
        if sum(newest.ended) < sum(newest.by_state):
            return counts
        counts[State.COMMITTED.name] = found[-1].by_state[State.COMMITTED]
        return counts

    def output(self) -> DataFrame:
        """Key and result columns of the rows that succeeded, in the order of the key."""
        sink = open_sink(self._record.sink) if self._record.sink else None
        without_files = sink is None or driver_writes.is_in_driver(sink)
        if without_files and len(self._chain) == 1 and is_bundled(self._store, self._record):
            return self._read_by_executors(self._record, State.TERMINAL_SUCCESS)
        outcomes = [self._outcomes(record) for record in self._chain]
        if without_files:
            tables = [one.successes(0, one.record.size) for one in outcomes]
            found = self._frame(pa.concat_tables(tables))
            return found if len(tables) == 1 else found.orderBy(*map(quoted, self._record.key))
        files = [
            path
            for record in reversed(self._chain)
            for path in open_sink(record.sink).parts(record.run_id)
        ]
        schema = self._spark_schema(outcomes[0].schema)
        if not files:
            return self._spark.createDataFrame([], schema)
        check_present(files)
        paths = [_literal(path) for path in files]
        try:
            found = self._spark.read.schema(schema).parquet(*paths)
        except Exception as error:
            if missing := missing_file(error):
                raise missing from None
            if not _NO_FILESYSTEM.search(str(error)):
                raise
            raise OutputUnreadable(path=paths[0], files=len(paths)) from None
        return found.orderBy(*map(quoted, self._record.key))

    def failed(self) -> DataFrame:
        """Key columns of the rows that failed, and why: _seq _state _attempts _error_class _error;
        _raw is what was returned when it did not fit the schema (`Stage.remap` maps it)."""
        if is_bundled(self._store, self._record):
            return self._read_by_executors(self._record, State.TERMINAL_FAIL)
        return self._frame(self._outcomes(self._record).failed(0, self._record.size))

    def reused(self) -> DataFrame:
        """Key columns of the rows whose outcome an earlier run had: _seq, and _from_run _from_seq,
        where it lies."""
        if is_bundled(self._store, self._record):
            return self._read_by_executors(self._record, "reused")
        return self._frame(reused_between(self._store, self._record, 0, self._record.size))

    def changed(self) -> DataFrame:
        """Key columns of the rows that the run before had with another content, and _seq."""
        return self._frame(extension.changed(self._store, self._record))

    def gone(self) -> DataFrame:
        """Key columns of the rows of the run before that are no longer in the input; _seq is there."""
        return self._frame(extension.gone(self._store, self._record))

    def skipped(self) -> DataFrame:
        """The same of the rows that were skipped; the reason is in _error."""
        if all(is_bundled(self._store, one) for one in self._chain):
            frames = [
                self._read_by_executors(one, State.TERMINAL_SKIP) for one in reversed(self._chain)
            ]
            return functools.reduce(lambda a, b: a.union(b), frames)
        tables = [self._outcomes(one).skipped(0, one.size) for one in reversed(self._chain)]
        return self._frame(pa.concat_tables(tables))

    def report(self) -> Report:
        """Figures and plots: shows itself in a notebook, `.save("run.html")`, prints as text."""
        progress = self.progress()
        sample = self._failed_rows(progress, SAMPLE_ROWS)
        older = self._store.read(runs.older_progress, self._record)
        return Report(self._record, progress, sample, store=self._store.url, older=older)

    def write(self, output: str | os.PathLike[str] | Sink) -> None:
        """Write the rows that succeeded to `output`: again, if it is gone, or to another place.

        Reads the outcomes from the store, or has executors read them from the spool; no function is called. A place that holds anything else is
        refused, and one that this run has written is left as it is.
        """
        sink = driver_writes.use(sink_at(output), self._spark)
        rewrite(self._spark, self._store, self._chain, sink)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {self.name}: {self.status}>"

    def _outcomes(self, record: runs.RunRecord) -> Outcomes:
        return Outcomes(self._store, record, Input(self._store, record))

    def _read_by_executors(
        self, record: runs.RunRecord, rows: State | Literal["reused"]
    ) -> DataFrame:
        return frame_of(self._spark, self._store, record, rows)

    def _frame(self, table: pa.Table) -> DataFrame:
        if table.num_rows:
            # In one piece: Spark takes an empty batch for the end.
            return self._spark.createDataFrame(table.combine_chunks())
        return self._spark.createDataFrame([], self._spark_schema(table.schema))

    def _spark_schema(self, schema: pa.Schema) -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(schema)

    def _failed_rows(self, progress: runs.Progress, limit: int) -> list[FailedRow]:
        source = Input(self._store, self._record)
        read_block = source.keys_of_block if source.is_spooled else None
        return failed_rows(self._store, self._record, progress, limit=limit, read_block=read_block)

    def _examples(self) -> list[str]:
        rows = self._failed_rows(self.progress(), 3)
        return [f"{row.key}: {row.error}" for row in rows]


def sink_at(output: str | os.PathLike[str] | Sink) -> Sink:
    if isinstance(output, str | os.PathLike):
        return ParquetSink(output)
    if not isinstance(output, Sink):
        raise NotAStage(what="output", why="a path or a sink", found=type(output).__name__)
    return output


def _literal(path: str) -> str:
    """A path that Spark takes as it is: no patterns in it, and of the file system that it knows."""
    text = re.sub(r"([\\*?\[\]{}])", r"\\\1", path)
    scheme, found, rest = text.partition("://")
    if not found:
        return f"file://{text}"
    return f"{OBJECT_SCHEMES.get(scheme, scheme)}://{rest}"
