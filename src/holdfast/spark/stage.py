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
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.ledger import prune, runs
from holdfast.ledger.board import ROWS_MAX
from holdfast.ledger.classes import ATTEMPTS_MAX, PAGE_ROWS, Policy
from holdfast.ledger.stop_rules import StopRules
from holdfast.spark import again, code, jobs, wire
from holdfast.spark.addresses import checked_host, driver_host
from holdfast.spark.arguments import checked_key, checked_number, whole_number
from holdfast.spark.caller import takes_row
from holdfast.spark.engine import Duty
from holdfast.spark.error_classes import Rule, transient
from holdfast.spark.errors import InputChanged, NotAStage, RunCancelled, RunChanged, RunHalted
from holdfast.spark.fingerprint import same_input
from holdfast.spark.ingest import RESERVED, check_input
from holdfast.spark.journal import schema_bytes
from holdfast.spark.keeper import Keeper, new_token, warm
from holdfast.spark.lazy import lazily
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.plan import Plan
from holdfast.spark.progress import MODES
from holdfast.spark.remap_run import FailedRows, remap
from holdfast.spark.rows import Encoder, arrow_schema
from holdfast.spark.run import Drive, Prepared, Run, sink_at
from holdfast.spark.service import Charge
from holdfast.spark.sinks import Sink
from holdfast.spark.sinks.object_place import given_options
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls, authority
from holdfast.store import open as open_store
from holdfast.store.api import Store, address_of

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

# In the configuration of a retry run whose rows end by a mapping of what was kept.
REMAP = "remap"

# Of runs whose record is older than the setting.
_CONFIG_BEFORE = {"file_bytes": str(FILE_BYTES)}

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
        timeout_s: float = 600,
        batch: bool = False,
        batch_rows: int = BATCH_ROWS,
        flush_rows: int = FLUSH_ROWS,
        file_rows: int = FILE_ROWS,
        file_bytes: int = FILE_BYTES,
        ahead_rows: int = 0,
        lease_s: float = 15,
        grace_s: float = 10,
        on_fail: Literal["keep", "raise"] = "keep",
        stop_after: Stop | None = None,
        meta: bool = False,
        version: str = "1",
        tasks: int | Literal["dynamic"] = 0,
        ledger_host: str | None = None,
        ledger_port: int = 0,
        bind: str | None = None,
        tls: Tls | None = None,
        progress: Literal["auto", "terminal", "notebook", "plain", "quiet"] = "auto",
    ) -> None:
        self.name = name
        self.fn = fn
        self.key = checked_key(key)
        self.schema = schema
        self.store = store
        self.retry_on = _checked_errors(retry_on)
        self.concurrency = whole_number("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self.rate_per_s = checked_number("rate_per_s", rate_per_s, 0)
        self.timeout_s = checked_number("timeout_s", timeout_s, 0.001)
        self.batch_rows = whole_number("batch_rows", batch_rows, 1, ROWS_MAX) if batch else 0
        self.flush_rows = whole_number("flush_rows", flush_rows, 1, 100_000)
        self.file_rows = whole_number("file_rows", file_rows, 1)
        self.file_bytes = whole_number("file_bytes", file_bytes, 1)
        self.on_fail = on_fail
        self.meta = meta
        self.version = version
        self.dynamic = tasks == "dynamic"
        self.tasks = 0 if tasks == "dynamic" else whole_number("tasks", tasks, 0)
        self.ledger_host = checked_host(ledger_host)
        self.ledger_port = whole_number("ledger_port", ledger_port, 0, PORT_MAX)
        self.bind = bind
        self.tls = tls
        self.progress = progress
        if not isinstance(name, str) or not 0 < len(name.encode()) <= 150:
            raise NotAStage(what="name", why="1 to 150 bytes", found=name)
        if not callable(fn):
            raise NotAStage(what="fn", why="not callable", found=type(fn).__name__)
        if not takes_row(fn):
            raise NotAStage(what="fn", why="it takes a row, and the call if it likes", found=fn)
        if on_fail not in ("keep", "raise"):
            raise NotAStage(what="on_fail", why='"keep" or "raise"', found=on_fail)
        if not isinstance(version, str):
            raise NotAStage(what="version", why="text", found=version)
        if tls is not None and not isinstance(tls, Tls):
            raise NotAStage(what="tls", why="holdfast.spark.Tls(cert, key, ca)", found=tls)
        if progress not in MODES:
            raise NotAStage(what="progress", why=f"one of {MODES}", found=progress)
        if stop_after is not None and not isinstance(stop_after, Stop):
            raise NotAStage(what="stop_after", why="a holdfast.spark.Stop", found=stop_after)
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
    ) -> Run:
        """Run, or go on with, the run of this name; returns when every row is committed."""
        spark = df.sparkSession
        prepared = self._prepare(spark)
        check_input(df, self.key)
        sink = _sink_of(output)
        home = self._open_store(store)
        try:
            record, seen = self._look(home)
            record = None if fresh else record
            if record is not None and record.status is not runs.Status.INGESTING:
                self._check_same(record, prepared, sink)
                if not same_input(df, record.plan, record.input_hash):
                    raise InputChanged(name=self.name, run_id=record.run_id)
                done = self._settled(record, home, spark)
                if done is not None:
                    return done
                if record.status is runs.Status.FINISHED:
                    return self._retry(home, spark, record, prepared, seen)
            elif sink is not None:
                sink.check_vacant()
                self._check_output(sink, df, prepared)
            return self._drive(home, spark, df, record, prepared, sink, seen)
        except BaseException:
            home.close()
            raise

    def resume(
        self, spark: SparkSession | None = None, *, store: str | os.PathLike[str] | None = None
    ) -> Run:
        """Go on with the run of this name; its input was taken in before, so no DataFrame is needed."""
        if spark is None:
            from holdfast.spark.session import session

            spark = session()
        prepared = self._prepare(spark)
        home = self._open_store(store)
        try:
            record, seen = self._look(home)
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
        if spark is None:
            from holdfast.spark.session import session

            spark = session()
        prepared = self._prepare(spark)
        home = self._open_store(store)
        try:
            record, seen = self._look(home)
            if record is None:
                raise NotFound(what="run", name=self.name)
            self._check_same(record, prepared, None)
            begun = REMAP in record.config and record.status is runs.Status.OPEN
            old = home.read(runs.the, record.retry_of) if begun else record
            if old.status is not runs.Status.FINISHED:
                why = "only the rows of a finished run are mapped"
                raise Invalid(what="run", name=self.name, why=why, status=old.status.value)
            failed = FailedRows(home, old)
            if not failed.kept:
                return Run(record, home, spark, on_fail=self.on_fail)
            return self._remap(home, spark, old, record if begun else None, prepared, seen,
                               (mapping, failed))  # fmt: skip
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
                prune.delete(home, self.name, found)
            return len(found)

    def explain(self, *, store: str | os.PathLike[str] | None = None) -> Plan:
        """What a run would do now: run, reuse, retry. Prints as text."""
        with self._open_store(store) as home:
            return Plan.of(home, self.name)

    def __call__(self, df: DataFrame) -> DataFrame:
        """The lazy form, for `df.transform(stage)`: rows are taken in now, calls are made when the
        result is evaluated, once, however often that is."""
        spark = df.sparkSession
        prepared = self._prepare(spark)
        check_input(df, self.key)
        home = self._open_store(None)
        try:
            keeper, found = self._lazily_served(df, home, spark, prepared)
        except BaseException:
            home.close()
            raise
        if keeper.store is not home:
            home.close()
        # A task of the lazy form yields its rows: it stays until they are there.
        duty = msgspec.structs.replace(self._duty(keeper, found, prepared), turn_s=0.0)
        return lazily(spark, found, duty, prepared.function,
                      tasks=self.tasks or jobs.parallelism(spark), meta=self.meta,
                      strict=self.on_fail == "raise")  # fmt: skip

    # --- inside -----------------------------------------------------------------------------

    def _lazily_served(
        self, df: DataFrame, home: Store, spark: SparkSession, prepared: Prepared
    ) -> tuple[Keeper, runs.RunRecord]:
        """A service that lives as long as this process, with the input in it."""
        record, seen = self._look(home)
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

    def _look(self, home: Store) -> tuple[runs.RunRecord | None, str]:
        """The run to go on with, and the one that the name leads to: a retry that died over its
        input stands for the run whose rows it was to try."""
        record = home.read(runs.latest, self.name)
        seen = record.run_id if record is not None else ""
        while record is not None and record.status is runs.Status.INGESTING and record.retry_of:
            record = home.read(runs.get, record.retry_of)
        return record, seen

    def _prepare(self, spark: SparkSession) -> Prepared:
        schema = _struct(spark, self.schema)
        taken = sorted((set(schema.names) & set(self.key)) | (set(schema.names) & RESERVED))
        if taken or not schema.names:
            why = "result columns must differ from the key and from ours, and there is at least one"
            raise NotAStage(what="schema", why=why, found=taken)
        # As Spark tells columns apart.
        if len({name.lower() for name in [*schema.names, *self.key]}) < len(schema) + len(self.key):
            raise NotAStage(what="schema", why="a column is named twice", found=schema.names)
        return Prepared(schema, self.fn, code.dump(self.fn, self.retry_on))

    def _check_output(self, sink: Sink, df: DataFrame, prepared: Prepared) -> None:
        """Refuse what the output cannot take, before the input is read and a call is made."""
        from pyspark.sql.types import StructType

        keys = StructType([df.schema[name] for name in self.key])
        fields = [*keys.fields, *prepared.schema.fields]
        if unread := [field.name for field in fields if _is_unread(field.dataType)]:
            why = "Spark cannot read this type from a file"
            raise NotAStage(what="schema", why=why, found=unread)
        check = getattr(sink, "check", None)  # sinks of others may leave it out
        if check is not None:
            check(arrow_schema(StructType(fields)))

    def _open_store(self, place: str | os.PathLike[str] | None) -> Store:
        url = os.fspath(place or self.store or "")
        if not url:
            raise NotAStage(
                what="store", why="where outcomes are kept: Stage(store=) or run(store=)"
            )
        if url.startswith("memory:"):
            raise NotAStage(
                what="store", why="memory: is of one process; use a directory", found=url
            )
        return open_store(_absolute(url), bootstrap=True)

    def _config(self, prepared: Prepared, sink: Sink | None) -> dict[str, str]:
        """What the outcomes of a run depend on."""
        spec = dict(sink.spec()) if sink is not None else {}
        return {
            "key": ",".join(self.key),
            "schema": prepared.schema.simpleString(),
            "batch_rows": str(self.batch_rows),
            "file_rows": str(self.file_rows),
            "file_bytes": str(self.file_bytes),
            "output": codec.pack(spec).hex() if spec else "",
            "version": self.version,
        }

    def _check_same(self, record: runs.RunRecord, prepared: Prepared, sink: Sink | None) -> None:
        now = self._config(prepared, sink)
        if sink is None:
            now["output"] = record.config.get("output", "")
        for what, found in now.items():
            was = record.config.get(what, _CONFIG_BEFORE.get(what, ""))
            if was != found:
                if what == "output":
                    was, found = _shown(was), _shown(found)
                raise RunChanged(name=self.name, what=what, was=was, now=found)

    def _settled(self, record: runs.RunRecord, home: Store, spark: SparkSession) -> Run | None:
        """The run as it is when it is over; None when there is work."""
        if record.status is runs.Status.FINISHED and not record.retry_requested_ns:
            return Run(record, home, spark, on_fail=self.on_fail)
        if REMAP in record.config and record.status is runs.Status.OPEN:
            # Its rows are not to be called: they end by the mapping.
            why = "a remap of it was interrupted; call remap again, it goes on"
            raise Invalid(what="run", name=self.name, why=why)
        if record.status is runs.Status.CANCELLED:
            raise RunCancelled(name=self.name, run_id=record.run_id)
        if record.status is runs.Status.HALTED:
            raise RunHalted(name=self.name, run_id=record.run_id, why=record.halted)
        return None

    def _drive(
        self,
        home: Store,
        spark: SparkSession,
        df: DataFrame | None,
        record: runs.RunRecord | None,
        prepared: Prepared,
        sink: Sink | None,
        seen: str,
    ) -> Run:
        with self._served(home, spark, record, prepared, sink, seen) as keeper:
            drive = Drive(self.name, home, spark, keeper, mode=self.progress)
            with drive:
                slots = jobs.parallelism(spark)
                drive.probe(self._duty(keeper, drive.record(), prepared), prepared, slots)
                if df is not None:
                    drive.take_in(df, self.key)
                found = drive.record()
                duty = self._duty(keeper, found, prepared)
                drive.pull(duty, prepared.function, self._task_count(spark, slots))
                found = drive.record()
        if found.status is runs.Status.FINISHED and found.retry_requested_ns:
            # It had stopped, and its failed rows were marked meanwhile.
            return self._retry(home, spark, found, prepared, found.run_id)
        warm()
        return Run(found, home, spark, on_fail=self.on_fail)

    def _retry(
        self,
        home: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        prepared: Prepared,
        seen: str,
    ) -> Run:
        """A run over the rows that failed, as `holdfast runs retry` asked for."""
        record = self._retry_record(home, old, prepared)
        _leave(home, self.name)
        with self._keep(home, spark, record, new=True, seen=seen) as keeper:
            drive = Drive(self.name, home, spark, keeper, mode=self.progress)
            with drive:
                slots = jobs.parallelism(spark)
                drive.probe(self._duty(keeper, drive.record(), prepared), prepared, slots)
                drive.take_failed(old)
                duty = self._duty(keeper, drive.record(), prepared)
                drive.pull(duty, prepared.function, self._task_count(spark, slots))
                found = drive.record()
        return Run(found, home, spark, on_fail=self.on_fail)

    def _remap(
        self,
        home: Store,
        spark: SparkSession,
        old: runs.RunRecord,
        begun: runs.RunRecord | None,
        prepared: Prepared,
        seen: str,
        mapped: tuple[Callable[[Any], Any], FailedRows],
    ) -> Run:
        """A retry run whose rows end by a mapping; one that was begun goes on."""
        record = begun or self._retry_record(home, old, prepared)
        # One try each, row by row: nothing that was kept changes from one to the next.
        policy = msgspec.structs.replace(record.policy, attempts_max=1, batch_rows=0)
        config = {**record.config, REMAP: "1"}
        record = msgspec.structs.replace(record, policy=policy, config=config)
        _leave(home, self.name)
        with self._keep(home, spark, record, new=begun is None, seen=seen) as keeper:
            drive = Drive(self.name, home, spark, keeper, mode=self.progress)
            with drive:
                if begun is None:
                    drive.take_failed(old)
                duty = self._duty(keeper, drive.record(), prepared)
                duty = msgspec.structs.replace(
                    duty,
                    address=keeper.own_address,
                    concurrency=1,
                    batch_rows=0,
                    rate=False,
                    turn_s=0.0,
                )
                drive.work(remap(duty, *mapped, Encoder(prepared.schema)))
                found = drive.record()
        return Run(found, home, spark, on_fail=self.on_fail)

    def _retry_record(self, home: Store, old: runs.RunRecord, prepared: Prepared) -> runs.RunRecord:
        number = len(again.chain(home, old))
        return msgspec.structs.replace(
            self._new_record(home, prepared, None),
            config={what: told for what, told in old.config.items() if what != REMAP},
            sink=again.sink_of(again.chain(home, old)[-1], number),
            retry_of=old.run_id,
        )

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
        self, home: Store, spark: SparkSession, record: runs.RunRecord, *, new: bool, seen: str
    ) -> Keeper:
        charge = Charge(
            store=address_of(home),
            token=new_token(),
            host=self.ledger_host or driver_host(spark),
            port=self.ledger_port,
            record=codec.pack(record),
            new=new,
            again=False,
            file_rows=self.file_rows,
            file_bytes=self.file_bytes,
            storage_options=given_options(),
            rate_per_s=float(self.rate_per_s),
            seen=seen,
            paths=[path for path in sys.path if path],
            bind=self.bind or "",
            cert=str(Path(self.tls.cert).absolute()) if self.tls else "",
            key=str(Path(self.tls.key).absolute()) if self.tls else "",
            ca=authority(self.tls) if self.tls else "",
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
            rate=bool(self.rate_per_s),
            timeout_s=self.timeout_s,
            turn_s=TURN_S if self.dynamic else 0.0,
        )

    def _task_count(self, spark: SparkSession, slots: int) -> int:
        return jobs.dynamic_tasks(spark) if self.dynamic else self.tasks or slots


def _leave(home: Store, name: str) -> None:
    """End the service of a lazy form: another run of its name begins."""
    keeper = _open.pop((home.url, name), None)
    if keeper is not None:
        keeper.leave()


def _struct(spark: SparkSession, schema: str | StructType) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise NotAStage(what="schema", why="DDL or StructType", found=type(schema).__name__)
    try:
        return spark.createDataFrame([], schema).schema
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotAStage(what="schema", why=why, found=schema) from None


def _sink_of(output: str | os.PathLike[str] | Sink | None) -> Sink | None:
    return None if output is None else sink_at(output)


def _is_unread(kind: Any) -> bool:
    """Whether the type is, or holds, one that Spark writes to Arrow and does not read from Parquet."""
    from pyspark.sql import types

    if isinstance(kind, types.ArrayType):
        return _is_unread(kind.elementType)
    if isinstance(kind, types.MapType):
        return _is_unread(kind.keyType) or _is_unread(kind.valueType)
    if isinstance(kind, types.StructType):
        return any(_is_unread(field.dataType) for field in kind.fields)
    return bool(kind.typeName().startswith("time(") or kind.typeName() == "time")


def _absolute(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if not colon:
        return str(Path(url).absolute())
    return f"lmdb:{Path(rest).absolute()}" if scheme == "lmdb" else url


def _shown(packed: str) -> str:
    return str(codec.unpack(bytes.fromhex(packed)).get("path", "")) if packed else "nowhere"


def _checked_errors(rules: Any) -> tuple[Rule, ...]:
    found = tuple(rules) if isinstance(rules, tuple | list) else (rules,)
    for rule in found:
        if isinstance(rule, type):
            good = issubclass(rule, BaseException)
        elif isinstance(rule, str):
            good = all(part.isidentifier() for part in rule.split("."))
        else:
            good = callable(rule)
        if not good:
            why = "exception classes, their names, or predicates"
            raise NotAStage(what="retry_on", why=why, found=rule)
    return found
