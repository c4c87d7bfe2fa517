"""Options of a stage: validation when the stage is constructed, with the option's name in the
error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import codec
from holdfast.ledger import runs
from holdfast.spark import spark_jobs
from holdfast.spark.arrow_rows import to_arrow
from holdfast.spark.caller import takes_row
from holdfast.spark.carried_columns import find_carried_fields
from holdfast.spark.driver_writes import attach_session, is_driver_sink
from holdfast.spark.errors import NotAStage, RunChanged
from holdfast.spark.exception_rules import RetryRule
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.ingest import RESERVED_COLUMNS
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.progress import MODES
from holdfast.spark.sinks import Sink, open_sink
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Values for run records that are older than the setting.
_CONFIG_DEFAULTS = {"file_bytes": str(FILE_BYTES)}


def check_config(record: runs.RunRecord, now: Mapping[str, str]) -> None:
    """Refuse a stage that differs from its run in a setting that outcomes depend on."""
    for what, value in now.items():
        before = record.config.get(what, _CONFIG_DEFAULTS.get(what, ""))
        if before != value:
            if what == "output":
                before, value = output_text(before), output_text(value)
            raise RunChanged(name=record.name, what=what, was=before, now=value)


def parse_schema(spark: SparkSession, schema: str | StructType) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise NotAStage(
            what="schema", why="must be DDL or a StructType", found=type(schema).__name__
        )
    try:
        return _parse_plain_schema(spark, schema) or spark.createDataFrame([], schema).schema
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotAStage(what="schema", why=why, found=schema) from None


def _parse_plain_schema(spark: SparkSession, ddl: str) -> StructType | None:
    """Parse a DDL schema of plain types without a DataFrame, which Spark takes longer to build.
    Returns None if the schema of a DataFrame may differ from the text, or if the text is invalid.
    """
    from pyspark.sql import types

    if spark_jobs.is_connect(spark):
        return None  # Connect parses the text with a DataFrame anyway
    try:
        schema = types.StructType.fromDDL(ddl)
    except Exception:
        return None
    plain = {
        types.BooleanType(),
        types.ByteType(),
        types.ShortType(),
        types.IntegerType(),
        types.LongType(),
        types.FloatType(),
        types.DoubleType(),
        types.StringType(),
        types.BinaryType(),
        types.DateType(),
        types.TimestampType(),
    }
    if not isinstance(schema, types.StructType):
        return None
    return schema if all(one.dataType in plain and not one.metadata for one in schema) else None


def is_unreadable_by_spark(kind: Any) -> bool:
    """Return whether the type is or contains one that Spark writes to Arrow but cannot read from
    Parquet.
    """
    from pyspark.sql import types

    if isinstance(kind, types.ArrayType):
        return is_unreadable_by_spark(kind.elementType)
    if isinstance(kind, types.MapType):
        return is_unreadable_by_spark(kind.keyType) or is_unreadable_by_spark(kind.valueType)
    if isinstance(kind, types.StructType):
        return any(is_unreadable_by_spark(field.dataType) for field in kind.fields)
    return bool(kind.typeName().startswith("time(") or kind.typeName() == "time")


def absolute_store_url(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if not colon:
        return str(Path(url).absolute())
    return f"lmdb:{Path(rest).absolute()}" if scheme == "lmdb" else url


def output_text(packed: str) -> str:
    spec = codec.unpack(bytes.fromhex(packed)) if packed else {"path": "nowhere"}
    return str(spec.get("path") or spec.get("table", ""))


def checked_retry_rules(rules: Any) -> tuple[RetryRule, ...]:
    checked = tuple(rules) if isinstance(rules, tuple | list) else (rules,)
    for rule in checked:
        if isinstance(rule, type):
            is_valid = issubclass(rule, BaseException)
        elif isinstance(rule, str):
            is_valid = all(part.isidentifier() for part in rule.split("."))
        else:
            is_valid = callable(rule)
        if not is_valid:
            why = "must be exception classes, their names, or predicates"
            raise NotAStage(what="retry_on", why=why, found=rule)
    return checked


def checked_tokens(tokens_per_min: float, tokens: Any) -> TokenEstimate:
    """Return the token estimate of a call, which `tokens_per_min` requires."""
    if not tokens_per_min and tokens is None:
        return 0
    if not tokens_per_min:
        raise NotAStage(
            what="tokens", why="tokens is an estimate for tokens_per_min, which is not set"
        )
    if callable(tokens) or (
        isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0
    ):
        estimate: TokenEstimate = tokens
        return estimate
    why = (
        "tokens_per_min needs an estimate of each call: a number above 0, or a function of the row"
    )
    raise NotAStage(what="tokens", why=why, found=tokens)


def resumable_run(run_store: Store, name: str) -> tuple[runs.RunRecord | None, str]:
    """Return the run to resume and the id of the run that the name points to. A retry that died
    during ingest is replaced by the run that it retries.
    """
    record = run_store.read(runs.get_latest, name)
    latest_run_id = record.run_id if record is not None else ""
    while record is not None and record.status is runs.RunLifecycle.INGESTING:
        before = record.retry_of or record.base_run
        if not before:
            break
        record = run_store.read(runs.get_record, before)
    return record, latest_run_id


def check_output(
    sink: Sink, df: DataFrame, key: Sequence[str], result: StructType, carry: str = ""
) -> None:
    """Refuse an output that cannot store the rows, before the input is read and a call is made."""
    from pyspark.sql.types import StructType

    key_fields = [df.schema[name] for name in key]
    fields = [*key_fields, *find_carried_fields(df, key, carry), *result.fields]
    if unreadable := [field.name for field in fields if is_unreadable_by_spark(field.dataType)]:
        why = "Spark cannot read this type from a file"
        raise NotAStage(what="schema", why=why, found=unreadable)
    attach_session(sink, df.sparkSession)
    check = getattr(sink, "check", None)  # optional for user-defined sinks
    if check is not None:
        check(to_arrow(StructType(fields)))


def check_driver_output(
    record: runs.RunRecord,
    spark: SparkSession,
    df: DataFrame,
    key: Sequence[str],
    result: StructType,
    carry: str,
) -> None:
    """Apply `check_output` to a run over a changed input, where the sink is otherwise checked only
    when all rows are final.
    """
    sink = open_sink(record.sink) if record.sink else None
    if sink is not None and is_driver_sink(sink):
        check_output(attach_session(sink, spark), df, key, result, carry)


def open_run_store(place: str | os.PathLike[str]) -> Store:
    """Open the store that holds the runs of a stage."""
    url = os.fspath(place)
    if not url:
        raise NotAStage(
            what="store", why="set the store of the outcomes: Stage(store=) or run(store=)"
        )
    if url.startswith("memory:"):
        raise NotAStage(
            what="store", why="a memory: store belongs to one process; use a directory", found=url
        )
    return open_store(absolute_store_url(url), bootstrap=True)


def checked_result_schema(
    spark: SparkSession, schema: str | StructType, key: Sequence[str]
) -> StructType:
    """Return the checked result columns of a stage."""
    struct = parse_schema(spark, schema)
    reserved = sorted((set(struct.names) & set(key)) | (set(struct.names) & RESERVED_COLUMNS))
    if reserved or not struct.names:
        why = "needs at least one result column, and none with the name of a key or a reserved name"
        raise NotAStage(what="schema", why=why, found=reserved)
    # Spark compares column names without case.
    if len({name.lower() for name in [*struct.names, *key]}) < len(struct) + len(key):
        raise NotAStage(what="schema", why="a column occurs twice", found=struct.names)
    return struct


def check_stage(
    name: Any, fn: Any, on_fail: Any, version: Any, tls: Any, progress: Any, stop_after: Any
) -> None:
    """Refuse an invalid stage at construction."""
    if stop_after is not None and not isinstance(stop_after, Stop):
        raise NotAStage(what="stop_after", why="must be a holdfast.spark.Stop", found=stop_after)
    if not isinstance(name, str) or not 0 < len(name.encode()) <= 150:
        raise NotAStage(what="name", why="must have 1 to 150 bytes", found=name)
    if not callable(fn):
        raise NotAStage(what="fn", why="not callable", found=type(fn).__name__)
    if not takes_row(fn):
        raise NotAStage(what="fn", why="it must accept a row and, optionally, the call", found=fn)
    if on_fail not in ("keep", "raise", None):
        raise NotAStage(what="on_fail", why='must be "keep" or "raise"', found=on_fail)
    if not isinstance(version, str):
        raise NotAStage(what="version", why="must be text", found=version)
    if tls is not None and not isinstance(tls, Tls):
        raise NotAStage(what="tls", why="must be holdfast.spark.Tls(cert, key, ca)", found=tls)
    if progress not in MODES:
        raise NotAStage(what="progress", why=f"must be one of {MODES}", found=progress)


def default_session() -> SparkSession:
    """Return a session for callers that pass none."""
    from holdfast.spark.session import session

    return session()
