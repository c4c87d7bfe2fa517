"""Stage: a function over the rows of a DataFrame, each row once, whatever dies meanwhile.

    stage = Stage("labels", classify, key="doc_id", schema="label string", store="./data",
                  retry_on=(TimeoutError,), attempts=3, concurrency=16, rate_per_s=50)
    run = stage.run(df, output="labels/")       # blocks; the same call again resumes, or does nothing
    df.transform(stage).orderBy("label")        # the lazy form: evaluated twice, called once

A name has one run at a time. What a run's outcomes mean must not change under its name: key, schema,
batching, output and `version` are compared, and so is the input. How it gets there may change from
one resume to the next: attempts, concurrency, rate, time-outs, and the function itself; say
`version="2"` when old outcomes must not stand beside new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.ledger import prune, runs
from holdfast.ledger.board import ROWS_MAX
from holdfast.ledger.classes import ATTEMPTS_MAX, PAGE_ROWS, Policy
from holdfast.ledger.stop_rules import StopRules
from holdfast.spark import again, code, driver_writes, extension, jobs, wire
from holdfast.spark.addresses import checked_host
from holdfast.spark.arguments import checked_key, checked_number, whole_number
from holdfast.spark.carry import carry_text, check_carry
from holdfast.spark.code import Estimate
from holdfast.spark.column_types import check_input_types, check_result_types
from holdfast.spark.engine import Duty
from holdfast.spark.error_classes import Rule, transient
from holdfast.spark.errors import InputChanged, RunCancelled, RunHalted
from holdfast.spark.extension import Changes, Growth
from holdfast.spark.fingerprint import same_input
from holdfast.spark.frames import session_of
from holdfast.spark.ingest import check_input
from holdfast.spark.journal import schema_bytes
from holdfast.spark.keeper import Keeper, warm
from holdfast.spark.lazy import lazily
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.plan import Plan
from holdfast.spark.remap_run import FailedRows, remap
from holdfast.spark.retention import retain
from holdfast.spark.rows import Encoder, arrow_schema
from holdfast.spark.run import Drive, Prepared, Run, sink_at
from holdfast.spark.sinks import Sink
from holdfast.spark.spool import access_of, kept_url
from holdfast.spark.spool_upkeep import Deletion
from holdfast.spark.stage_charge import charge_of
from holdfast.spark.stage_options import (
    check_config,
    check_driver_output,
    check_output,
    check_stage,
    checked_tokens,
    default_session,
    latest,
    open_home,
    prepare,
    retry_rules,
)
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BATCH_ROWS = 16_384
FLUSH_ROWS = 100
FILE_ROWS = 4 * PAGE_ROWS
CONCURRENCY_MAX = 10_000
TTL_S_MAX = 30 * 24 * 3600
PORT_MAX = 65_535
# How long a task of a dynamic run keeps its slot.
TURN_S = 30.0
# How long a task keeps its slot without a row to call.
IDLE_S = 2.0
# What of a run's configuration says how its rows are cut, not what their outcomes mean.
_CUT = ("batch_rows", "file_rows", "file_bytes")

# Stores and services of lazy forms, which live as long as the process.
_open: dict[tuple[str, str], Keeper] = {}


class Stage:
    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        key: str | Sequence[str],
        schema: str | StructType,
        store: str | os.PathLike[str] | None = None,
        retry_on: Rule | Sequence[Rule] = (TimeoutError, ConnectionError, transient),
        attempts: int = 3,
        retry_budget: int = 0,
        concurrency: int = 1,
        rate_per_s: float = 0,
        tokens_per_min: float = 0,
        tokens: Estimate | None = None,
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
        self.retry_on = retry_rules(retry_on)
        self.concurrency = whole_number("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self.rate_per_s = checked_number("rate_per_s", rate_per_s, 0)
        self.tokens_per_min = checked_number("tokens_per_min", tokens_per_min, 0)
        self.tokens = checked_tokens(tokens_per_min, tokens)
        self.timeout_s = checked_number("timeout_s", timeout_s, 0.001)
        self.batch_rows = whole_number("batch_rows", batch_rows, 1, ROWS_MAX) if batch else 0
        self.flush_rows = whole_number("flush_rows", flush_rows, 1, 100_000)
        self.file_rows = whole_number("file_rows", file_rows, 1)
        self.file_bytes = whole_number("file_bytes", file_bytes, 1)
        self.carry = carry_text(carry)
        self.on_fail = on_fail or "keep"
        # The lazy form leaves a failed row out only when it is told to.
        self.lazily_strict = on_fail == "raise" or (on_fail is None and not meta)
        self.meta = meta
        self.version = version
        self.dynamic = tasks == "dynamic"
        self.tasks = 0 if tasks == "dynamic" else whole_number("tasks", tasks, 0)
        self.ledger_host = checked_host(ledger_host)
        self.ledger_port = whole_number("ledger_port", ledger_port, 0, PORT_MAX)
        self.bind = bind
        self.tls = tls
        self.spool = kept_url(spool, storage_options)
        self.keep_runs = whole_number("keep_runs", keep_runs, 0)
        self.progress = progress
        check_stage(name, fn, on_fail, version, tls, progress, stop_after)
        # A page is made of whole batches.
        pages = self.batch_rows * max(PAGE_ROWS // self.batch_rows, 1) if batch else PAGE_ROWS
        self.policy = Policy(
            attempts_max=whole_number("attempts", attempts, 1, ATTEMPTS_MAX),
            retries_max=whole_number("retry_budget", retry_budget, 0),
            lease_ns=int(checked_number("lease_s", lease_s, 0.1, TTL_S_MAX) * 1e9),
            grace_ns=int(checked_number("grace_s", grace_s, 0, TTL_S_MAX) * 1e9),
            page_rows=pages,
            batch_rows=self.batch_rows,
            # The commit goes by whole files: it is behind by up to one of them at any time.
            ahead_rows_max=ahead_rows
            and whole_number("ahead_rows", ahead_rows, 0) + self.file_rows,
            stop=stop_after.rules() if stop_after is not None else StopRules(),
        )

    # --- what users call --------------------------------------------------------------------

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
        """Run, or go on with, the run of this name; returns when every row is committed.

        `changed="extend"`: a changed input makes a new run over all of it, and rows whose key and
        content (`match`) ended well in a kept run are reused."""
        spark = session_of(df)
        prepared = self._prepare(spark)
        check_input(df, self.key)
        check_input_types(df.schema, rows=not self.batch_rows)
        check_carry(df, self.key, self.carry, prepared.schema)
        growth = extension.checked(df, changed, match, retry_failed)
        sink = None if output is None else sink_at(output)
        home = self._open_store(store)
        try:
            record, seen = latest(home, self.name)
            record = None if fresh else record
            if record is not None and record.status is not runs.Status.INGESTING:
                self._check_same(record, prepared, sink, extend=growth.extend)
                same = same_input(df, record.plan, record.input_hash)
                if not same and not growth.extend:
                    raise InputChanged(name=self.name, run_id=record.run_id)
                if growth.extend and (not same or extension.is_again(home, record, growth)):
                    return self._extend(home, spark, None if same else df, record, prepared,
                                        seen, growth)  # fmt: skip
                done = self._settled(record, home, spark)
                if done is not None:
                    return done
                if record.status is runs.Status.FINISHED:
                    return self._retry(home, spark, record, prepared, seen)
            elif sink is not None:
                sink.check_vacant()
                check_output(sink, df, self.key, prepared.schema, self.carry)
            return self._drive(home, spark, df, record, prepared, sink, seen, growth.match)
        except BaseException:
            home.close()
            raise

    def resume(
        self, spark: SparkSession | None = None, *, store: str | os.PathLike[str] | None = None
    ) -> Run:
        """Go on with the run of this name; its input was taken in before, so no DataFrame is needed."""
        spark = spark or default_session()
        prepared = self._prepare(spark)
        home = self._open_store(store)
        try:
            record, seen = latest(home, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            if record.status is runs.Status.INGESTING:
                raise Invalid(what="run", name=self.name, why="its input is not whole; use run(df)")
            self._check_same(record, prepared, None)
            done = self._settled(record, home, spark)
            if done is not None:
                return done
            if record.status is runs.Status.FINISHED:
                return self._retry(home, spark, record, prepared, seen)
            return self._drive(home, spark, None, record, prepared, None, seen)
        except BaseException:
            home.close()
            raise

    def remap(
        self,
        mapping: Callable[[Any], Any],
        spark: SparkSession | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
    ) -> Run:
        """Map the values (`_raw`) that were kept of rows which failed for their form: the stage's
        function is not called. `mapping` gets a value and returns what the function should have
        returned. Rows that it makes fit succeed; the others stay failed."""
        spark = spark or default_session()
        prepared = self._prepare(spark)
        home = self._open_store(store)
        try:
            record, seen = latest(home, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            self._check_same(record, prepared, None)
            begun = again.REMAP in record.config and record.status is runs.Status.OPEN
            old = home.read(runs.the, record.retry_of or record.base_run) if begun else record
            if old.status is not runs.Status.FINISHED:
                why = "only the rows of a finished run are mapped"
                raise Invalid(what="run", name=self.name, why=why, status=old.status.value)
            follows = not record.retry_of and extension.succeeds(record)
            failed = FailedRows(home, old, ranked=not follows)
            if not failed.kept:
                return self._over(record, home, spark)
            new = record if begun else self._new_record(home, prepared, None)
            new = new if begun else again.remap_of(home, old, new, follows=follows)
            return self._remap(home, spark, old, new, seen, prepared, (mapping, failed))
        except BaseException:
            home.close()
            raise

    def cancel(self, *, store: str | os.PathLike[str] | None = None) -> None:
        """Ask the run of this name to stop: no row is begun any more, begun ones get their grace."""
        with self._open_store(store) as home:
            record = home.read(runs.latest, self.name)
            if record is None:
                raise NotFound(what="run", name=self.name)
            home.transact(runs.request_cancel, record.run_id)

    def delete(self, *, store: str | os.PathLike[str] | None = None) -> int:
        """Remove every run of this name from the store, a run that could be resumed included; how many
        runs. The output stays as it is. `RunAtWork` while a driver has the run."""
        with self._open_store(store) as home:
            _leave(home, self.name)
            # Newest first: an older run may be pinned by a newer one.
            found = [record.run_id for record in home.read(runs.of_name, self.name)]
            if found:
                prune.delete(home, self.name, found, Deletion())
            return len(found)

    @overload
    def explain(self, *, store: str | os.PathLike[str] | None = None) -> Plan: ...

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
    ) -> Plan | Changes:
        """What a run would do now: run, reuse, retry. Prints as text. With an input, what
        `run(df, changed="extend")` would reuse and call, and its cost: the input is read once."""
        with self._open_store(store) as home:
            if df is None:
                return Plan.of(home, self.name)
            prepared = self._prepare(session_of(df))
            check_input(df, self.key)
            check_input_types(df.schema, rows=not self.batch_rows)
            check_carry(df, self.key, self.carry, prepared.schema)
            growth = extension.checked(df, "extend", match, retry_failed)
            return self._compared(home, df, prepared, growth)

    def __call__(self, df: DataFrame) -> DataFrame:
        """The lazy form, for `df.transform(stage)`: rows are taken in now, calls are made when the
        result is evaluated, once, however often that is."""
        spark = session_of(df)
        prepared = self._prepare(spark)
        check_input(df, self.key)
        check_input_types(df.schema, rows=not self.batch_rows)
        check_carry(df, self.key, self.carry, prepared.schema)
        home = self._open_store(None)
        try:
            keeper, found = self._lazily_served(df, home, spark, prepared)
        except BaseException:
            home.close()
            raise
        if keeper.store is not home:
            home.close()
        # A task of the lazy form yields its rows: it stays until they are there.
        duty = msgspec.structs.replace(self._duty(keeper, found, prepared), turn_s=0.0, idle_s=0.0)
        return lazily(spark, found, duty, prepared.function,
                      tasks=self.tasks or jobs.parallelism(spark), meta=self.meta,
                      strict=self.lazily_strict)  # fmt: skip

    # --- inside -----------------------------------------------------------------------------

    def _lazily_served(
        self, df: DataFrame, home: Store, spark: SparkSession, prepared: Prepared
    ) -> tuple[Keeper, runs.RunRecord]:
        """A service that lives as long as this process, with the input in it."""
        record, seen = latest(home, self.name)
        if record is not None and record.status is not runs.Status.INGESTING:
            self._check_same(record, prepared, None)
            if not same_input(df, record.plan, record.input_hash):
                raise InputChanged(name=self.name, run_id=record.run_id)
            self._settled(record, home, spark)
        place = (home.url, self.name)
        held = _open.get(place)
        if held is not None and record is not None and record.run_id == held.run_id:
            held.ask(wire.Resume())
            return held, record
        _leave(home, self.name)
        keeper = self._keeper(home, spark, record, prepared, None, seen)
        drive = Drive(self.name, home, spark, keeper, mode=self.progress)
        try:
            duty = self._duty(keeper, drive.record(), prepared)
            drive.probe(duty, prepared, jobs.parallelism(spark))
            drive.take_in(df, self.key)
        except BaseException:
            keeper.leave()
            raise
        atexit.register(keeper.leave)
        keeper.watch()
        _open[place] = keeper
        return keeper, drive.record()

    def _prepare(self, spark: SparkSession) -> Prepared:
        schema = prepare(spark, self.schema, self.key)
        check_result_types(schema)
        return Prepared(schema, self.fn, code.dump(self.fn, self.retry_on, self.tokens))

    def _open_store(self, place: str | os.PathLike[str] | None) -> Store:
        return open_home(place or self.store or "")

    def _config(self, prepared: Prepared, sink: Sink | None) -> dict[str, str]:
        """What the outcomes of a run depend on."""
        spec = dict(sink.spec()) if sink is not None else {}
        return {
            "key": ",".join(self.key),
            "schema": prepared.schema.simpleString(),
            "batch_rows": str(self.batch_rows),
            "file_rows": str(self.file_rows),
            "file_bytes": str(self.file_bytes),
            "carry": self.carry,
            "output": codec.pack(spec).hex() if spec else "",
            "version": self.version,
            "spool": self.spool,
        }

    def _check_same(
        self, record: runs.RunRecord, prepared: Prepared, sink: Sink | None, *, extend: bool = False
    ) -> None:
        now = self._config(prepared, sink)
        if extend:
            # Another run may be cut otherwise; what its outcomes mean is the same.
            now = {what: told for what, told in now.items() if what not in _CUT}
        if sink is None:
            now["output"] = record.config.get("output", "")
        check_config(record, now)

    def _settled(self, record: runs.RunRecord, home: Store, spark: SparkSession) -> Run | None:
        """The run as it is when it is over; None when there is work."""
        if record.status is runs.Status.FINISHED and not record.retry_requested_ns:
            return self._over(record, home, spark)
        if again.REMAP in record.config and record.status is runs.Status.OPEN:
            # Its rows are not to be called: they end by the mapping.
            why = "a remap of it was interrupted; call remap again, it goes on"
            raise Invalid(what="run", name=self.name, why=why)
        if record.status is runs.Status.CANCELLED:
            raise RunCancelled(name=self.name, run_id=record.run_id)
        if record.status is runs.Status.HALTED:
            raise RunHalted(name=self.name, run_id=record.run_id, why=record.halted)
        return None

    def _over(self, record: runs.RunRecord, home: Store, spark: SparkSession) -> Run:
        return Run(driver_writes.write(home, record, spark), home, spark, on_fail=self.on_fail)

    def _ended(self, record: runs.RunRecord, home: Store, spark: SparkSession) -> Run:
        """The run, which this driver has ended; older ones go if the stage keeps only so many."""
        found = self._over(record, home, spark)
        retain(home, self.name, self.keep_runs)
        return found

    def _drive(
        self,
        home: Store,
        spark: SparkSession,
        df: DataFrame | None,
        record: runs.RunRecord | None,
        prepared: Prepared,
        sink: Sink | None,
        seen: str,
        match: Sequence[str] | None = None,
    ) -> Run:
        def take(drive: Drive, meanwhile: Callable[[], None]) -> None:
            if df is not None:
                drive.take_in(df, self.key, match, meanwhile=meanwhile)

        with self._served(home, spark, record, prepared, sink, seen) as keeper:
            found = self._driven(home, spark, keeper, prepared, take)
        if found.status is runs.Status.FINISHED and found.retry_requested_ns:
            # It had stopped, and its failed rows were marked meanwhile.
            return self._retry(home, spark, found, prepared, found.run_id)
        warm()
        return self._ended(found, home, spark)

    def _extend(
        self,
        home: Store,
        spark: SparkSession,
        df: DataFrame | None,
        old: runs.RunRecord,
        prepared: Prepared,
        seen: str,
        growth: Growth,
    ) -> Run:
        """A run over a changed input, or (without `df`) once more over the input of the old one."""
        if old.status is runs.Status.HALTED or again.REMAP in old.config:
            self._settled(old, home, spark)
        first = again.chain(home, old)[-1]
        extension.check_succeeds(first)
        record = msgspec.structs.replace(
            self._new_record(home, prepared, None),
            config={**self._config(prepared, None), "output": old.config.get("output", "")},
            sink=first.sink,
            base_run=old.run_id,
            input_run=first.blocks_run if df is None else "",
            retry_failed=growth.retry_failed,
        )
        if df is not None:
            check_driver_output(record, spark, df, self.key, prepared.schema, self.carry)
            extension.rehash(home, spark, record, df.schema, growth)
        _leave(home, self.name)

        def take(drive: Drive, meanwhile: Callable[[], None]) -> None:
            if df is None:
                drive.take_again(first)
            else:
                drive.take_in(df, self.key, growth.match, meanwhile=meanwhile)

        with self._keep(home, spark, record, new=True, seen=seen) as keeper:
            found = self._driven(home, spark, keeper, prepared, take)
        warm()
        return self._ended(found, home, spark)

    def _retry(
        self,
        home: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        prepared: Prepared,
        seen: str,
    ) -> Run:
        """Call the failed rows again, as `holdfast runs retry` asked for."""
        if extension.succeeds(again.chain(home, old)[-1]):
            return self._extend(home, spark, None, old, prepared, seen, extension.RETRY)
        record = again.retry_of(home, old, self._new_record(home, prepared, None))
        _leave(home, self.name)
        with self._keep(home, spark, record, new=True, seen=seen) as keeper:
            found = self._driven(home, spark, keeper, prepared, lambda one, _: one.take_failed(old))
        return self._ended(found, home, spark)

    def _driven(
        self,
        home: Store,
        spark: SparkSession,
        keeper: Keeper,
        prepared: Prepared,
        take: Callable[[Drive, Callable[[], None]], None],
    ) -> runs.RunRecord:
        """Look at the executors, have the input taken, make the calls; the run as it is then."""
        with Drive(self.name, home, spark, keeper, mode=self.progress) as drive:
            slots = jobs.parallelism(spark)
            duty = self._duty(keeper, drive.record(), prepared)
            tasks = jobs.dynamic_tasks(spark) if self.dynamic else self.tasks or slots
            drive.probe(duty, prepared, slots)
            take(drive, lambda: drive.describe_pull(duty, prepared.function, tasks))
            drive.pull(duty, prepared.function, tasks)
            return drive.record()

    def _compared(self, home: Store, df: DataFrame, prepared: Prepared, growth: Growth) -> Changes:
        """Take keys and hashes of an input into a store of its own, and look up what is known."""
        spark = df.sparkSession
        old, _ = latest(home, self.name)
        old = None if old is None or old.status is runs.Status.INGESTING else old
        record = msgspec.structs.replace(
            self._new_record(home, prepared, None), retry_failed=growth.retry_failed, spool=""
        )
        if old is not None:
            self._check_same(old, prepared, None, extend=True)
            extension.rehash(home, spark, record, df.schema, growth)
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-explain-") as place,
            open_store(place, bootstrap=True) as scratch,
            self._keep(scratch, spark, record, new=True, seen="") as keeper,
            Drive(self.name, scratch, spark, keeper, mode="quiet") as drive,
        ):
            drive.take_in(df, self.key, growth.match, keep=self.key)
            base = again.chain(home, old)[-1] if old is not None else None
            found = extension.compare(home, base, scratch, drive.record())
            keeper.leave()  # the directory goes when nothing writes to it any more
            return found

    def _remap(
        self,
        home: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        record: runs.RunRecord,
        seen: str,
        prepared: Prepared,
        mapped: tuple[Callable[[Any], Any], FailedRows],
    ) -> Run:
        """A run whose rows end by a mapping; one that was begun goes on."""
        new = record.status is runs.Status.INGESTING
        _leave(home, self.name)
        with self._keep(home, spark, record, new=new, seen=seen, executors_write=False) as keeper:
            drive = Drive(self.name, home, spark, keeper, mode=self.progress)
            with drive:
                if new and record.base_run:
                    drive.take_again(old)
                elif new:
                    drive.take_failed(old)
                duty = self._duty(keeper, drive.record(), prepared)
                duty = msgspec.structs.replace(
                    duty,
                    address=keeper.own_address,
                    concurrency=1,
                    batch_rows=0,
                    rate=False,
                    priced=False,
                    turn_s=0.0,
                    idle_s=0.0,
                )
                drive.work(remap(duty, *mapped, Encoder(prepared.schema)))
                found = drive.record()
        return self._ended(found, home, spark)

    @contextlib.contextmanager
    def _served(
        self,
        home: Store,
        spark: SparkSession,
        record: runs.RunRecord | None,
        prepared: Prepared,
        sink: Sink | None,
        seen: str,
    ) -> Iterator[Keeper]:
        """The service of the run: that of its lazy form, which lives on, or one for now."""
        held = _open.get((home.url, self.name))
        if held is not None and record is not None and record.run_id == held.run_id:
            held.ask(wire.Resume())
            yield held
            return
        _leave(home, self.name)
        with self._keeper(home, spark, record, prepared, sink, seen) as keeper:
            yield keeper

    def _keeper(
        self,
        home: Store,
        spark: SparkSession,
        record: runs.RunRecord | None,
        prepared: Prepared,
        sink: Sink | None,
        seen: str,
    ) -> Keeper:
        new = record is None or record.status is runs.Status.INGESTING
        if new:
            record = self._new_record(home, prepared, sink)
        assert record is not None
        # Budgets and times may change from one resume to the next; how rows are cut may not.
        policy = msgspec.structs.replace(
            self.policy, page_rows=record.policy.page_rows, batch_rows=record.policy.batch_rows
        )
        record = msgspec.structs.replace(record, policy=policy)
        return self._keep(home, spark, record, new=new, seen=seen)

    def _keep(
        self,
        home: Store,
        spark: SparkSession,
        record: runs.RunRecord,
        *,
        new: bool,
        seen: str,
        executors_write: bool = True,
    ) -> Keeper:
        charge = charge_of(
            self, home, spark, record, new=new, seen=seen, executors_write=executors_write
        )
        return Keeper(home, charge)

    def _new_record(self, home: Store, prepared: Prepared, sink: Sink | None) -> runs.RunRecord:
        return runs.RunRecord(
            run_id=SYSTEM.entropy(10).hex(),
            name=self.name,
            created_ns=home.now_ns(),
            generation=home.generation,
            key=self.key,
            result_schema=schema_bytes(arrow_schema(prepared.schema)),
            config=self._config(prepared, sink),
            sink=dict(sink.spec()) if sink is not None else {},
            policy=self.policy,
            spool=self.spool,
        )

    def _duty(self, keeper: Keeper, record: runs.RunRecord, prepared: Prepared) -> Duty:
        return Duty(
            address=keeper.address,
            run_id=record.run_id,
            lo=0,
            hi=-1,
            schema=prepared.schema.json(),
            concurrency=self.concurrency,
            flush_rows=self.flush_rows,
            batch_rows=self.batch_rows,
            rate=bool(self.rate_per_s or self.tokens_per_min),
            priced=bool(self.tokens_per_min),
            timeout_s=self.timeout_s,
            turn_s=TURN_S if self.dynamic else 0.0,
            idle_s=IDLE_S,
            lease_s=record.policy.lease_ns / 1e9,
            spool=access_of(record),
        )


def _leave(home: Store, name: str) -> None:
    """End the service of a lazy form: another run of its name begins."""
    keeper = _open.pop((home.url, name), None)
    if keeper is not None:
        keeper.leave()
