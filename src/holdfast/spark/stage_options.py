"""The options of a stage: each is checked when the stage is made, and refused by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import codec
from holdfast.ledger import runs
from holdfast.spark import jobs
from holdfast.spark.caller import takes_row
from holdfast.spark.carry import carried_fields
from holdfast.spark.code import Estimate
from holdfast.spark.driver_writes import is_in_driver, use
from holdfast.spark.error_classes import Rule
from holdfast.spark.errors import NotAStage, RunChanged
from holdfast.spark.ingest import RESERVED
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.progress import MODES
from holdfast.spark.rows import arrow_schema
from holdfast.spark.sinks import Sink, open_sink
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls
from holdfast.store import open as open_store
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Of runs whose record is older than the setting.
_CONFIG_BEFORE = {"file_bytes": str(FILE_BYTES)}


def check_config(record: runs.RunRecord, now: Mapping[str, str]) -> None:
    """Refuse a stage that differs from its run in what the outcomes depend on."""
    for what, found in now.items():
        was = record.config.get(what, _CONFIG_BEFORE.get(what, ""))
        if was != found:
            if what == "output":
                was, found = shown_output(was), shown_output(found)
            raise RunChanged(name=record.name, what=what, was=was, now=found)


def struct_of(spark: SparkSession, schema: str | StructType) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise NotAStage(what="schema", why="DDL or StructType", found=type(schema).__name__)
    try:
        return _plain_struct(spark, schema) or spark.createDataFrame([], schema).schema
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotAStage(what="schema", why=why, found=schema) from None


def _plain_struct(spark: SparkSession, ddl: str) -> StructType | None:
    """Columns of plain types, without a DataFrame: to make one takes Spark longer than to read the text.
    None: the schema of a DataFrame may be another one than the text says, or it is refused."""
    from pyspark.sql import types

    if jobs.is_connect(spark):
        return None  # the text would be read by such a DataFrame
    try:
        found = types.StructType.fromDDL(ddl)
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
    if not isinstance(found, types.StructType):
        return None
    return found if all(one.dataType in plain and not one.metadata for one in found) else None


def is_unread(kind: Any) -> bool:
    """Whether the type is, or holds, one that Spark writes to Arrow and does not read from Parquet."""
    from pyspark.sql import types

    if isinstance(kind, types.ArrayType):
        return is_unread(kind.elementType)
    if isinstance(kind, types.MapType):
        return is_unread(kind.keyType) or is_unread(kind.valueType)
    if isinstance(kind, types.StructType):
        return any(is_unread(field.dataType) for field in kind.fields)
    return bool(kind.typeName().startswith("time(") or kind.typeName() == "time")


def absolute(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if not colon:
        return str(Path(url).absolute())
    return f"lmdb:{Path(rest).absolute()}" if scheme == "lmdb" else url


def shown_output(packed: str) -> str:
    spec = codec.unpack(bytes.fromhex(packed)) if packed else {"path": "nowhere"}
    return str(spec.get("path") or spec.get("table", ""))


def retry_rules(rules: Any) -> tuple[Rule, ...]:
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


def checked_tokens(tokens_per_min: float, tokens: Any) -> Estimate:
    """The estimate of a call's tokens, which a limit of them needs."""
    if not tokens_per_min and tokens is None:
        return 0
    if not tokens_per_min:
        raise NotAStage(what="tokens", why="an estimate for tokens_per_min, which is not given")
    if callable(tokens) or (
        isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0
    ):
        found: Estimate = tokens
        return found
    why = (
        "tokens_per_min needs an estimate of each call: a number above 0, or a function of the row"
    )
    raise NotAStage(what="tokens", why=why, found=tokens)


def latest(home: Store, name: str) -> tuple[runs.RunRecord | None, str]:
    """The run to go on with, and the one that the name leads to: a retry that died over its input
    stands for the run whose rows it was to try."""
    record = home.read(runs.latest, name)
    seen = record.run_id if record is not None else ""
    while record is not None and record.status is runs.Status.INGESTING:
        before = record.retry_of or record.base_run
        if not before:
            break
        record = home.read(runs.get, before)
    return record, seen


def check_output(
    sink: Sink, df: DataFrame, key: Sequence[str], result: StructType, carry: str = ""
) -> None:
    """Refuse what the output cannot take, before the input is read and a call is made."""
    from pyspark.sql.types import StructType

    keyed = [df.schema[name] for name in key]
    fields = [*keyed, *carried_fields(df, key, carry), *result.fields]
    if unread := [field.name for field in fields if is_unread(field.dataType)]:
        why = "Spark cannot read this type from a file"
        raise NotAStage(what="schema", why=why, found=unread)
    use(sink, df.sparkSession)
    check = getattr(sink, "check", None)  # foreign sinks may leave it out
    if check is not None:
        check(arrow_schema(StructType(fields)))


def check_driver_output(
    record: runs.RunRecord,
    spark: SparkSession,
    df: DataFrame,
    key: Sequence[str],
    result: StructType,
    carry: str,
) -> None:
    """The same for a run over a grown input, where the ledger service asks the output only when all rows have ended."""
    sink = open_sink(record.sink) if record.sink else None
    if sink is not None and is_in_driver(sink):
        check_output(use(sink, spark), df, key, result, carry)


def open_home(place: str | os.PathLike[str]) -> Store:
    """The store that a stage keeps its runs in."""
    url = os.fspath(place)
    if not url:
        raise NotAStage(what="store", why="where outcomes are kept: Stage(store=) or run(store=)")
    if url.startswith("memory:"):
        raise NotAStage(what="store", why="memory: is of one process; use a directory", found=url)
    return open_store(absolute(url), bootstrap=True)


def prepare(spark: SparkSession, schema: str | StructType, key: Sequence[str]) -> StructType:
    """The result columns of a stage, checked."""
    struct = struct_of(spark, schema)
    taken = sorted((set(struct.names) & set(key)) | (set(struct.names) & RESERVED))
    if taken or not struct.names:
        why = "result columns must differ from the key and from ours, and there is at least one"
        raise NotAStage(what="schema", why=why, found=taken)
    # As Spark tells columns apart.
    if len({name.lower() for name in [*struct.names, *key]}) < len(struct) + len(key):
        raise NotAStage(what="schema", why="a column is named twice", found=struct.names)
    return struct


def check_stage(
    name: Any, fn: Any, on_fail: Any, version: Any, tls: Any, progress: Any, stop_after: Any
) -> None:
    """Refuse a stage that cannot be run, when it is made."""
    if stop_after is not None and not isinstance(stop_after, Stop):
        raise NotAStage(what="stop_after", why="a holdfast.spark.Stop", found=stop_after)
    if not isinstance(name, str) or not 0 < len(name.encode()) <= 150:
        raise NotAStage(what="name", why="1 to 150 bytes", found=name)
    if not callable(fn):
        raise NotAStage(what="fn", why="not callable", found=type(fn).__name__)
    if not takes_row(fn):
        raise NotAStage(what="fn", why="it takes a row, and the call if it likes", found=fn)
    if on_fail not in ("keep", "raise", None):
        raise NotAStage(what="on_fail", why='"keep" or "raise"', found=on_fail)
    if not isinstance(version, str):
        raise NotAStage(what="version", why="text", found=version)
    if tls is not None and not isinstance(tls, Tls):
        raise NotAStage(what="tls", why="holdfast.spark.Tls(cert, key, ca)", found=tls)
    if progress not in MODES:
        raise NotAStage(what="progress", why=f"one of {MODES}", found=progress)


def default_session() -> SparkSession:
    """A session for callers that have none at hand."""
    from holdfast.spark.session import session

    return session()
