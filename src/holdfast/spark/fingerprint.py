"""Input fingerprints: whether the input under a known name equals the ingested input.

    plan_fingerprint(df)  cheap: digest of schema, analysed plan, input files with size and modification time
    content_hash(df)      expensive: one pass; "rows:sum", the same text that ingest computes
    same_input(...)       equal trusted plans, else equal contents

A plan is *trusted* (`is_trusted(plan)`) when it determines the data: every leaf is a range or files with a
known size and modification time, and every function in it is known to be pure. Any other plan (rows in the
session, UDFs, tables of other systems, an abridged plan text) is only a hint, and the contents are
compared: an unrecognized plan costs a pass. A trusted plan shares the limit of build tools: a file
rewritten with the same size and time is not detected.

The content hash adds the hashes of the rows modulo 2^64, so it depends on neither order nor partitions.
`xxhash64` alone does not suffice for a row: it skips nulls, so (null, 1) and (1, null) have equal hashes,
it concatenates the elements of arrays, and it refuses maps. `row_hash` marks nulls by their position and
converts nested values to JSON first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from holdfast.spark.row_match import columns_digest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

TRUSTED_PREFIX = "plan:"
HINT_PREFIX = "hint:"
HASH_MASK = (1 << 64) - 1

# Self-describing formats. The options that read a CSV are not part of the plan.
_SELF_DESCRIBING_FORMATS = frozenset({"parquet", "orc"})
_KNOWN_NODES = frozenset(
    {
        "Aggregate",
        "Filter",
        "Join",
        "Project",
        "Range",
        "Relation",
        "Repartition",
        "RepartitionByExpression",
        "Sort",
        "SubqueryAlias",
        "Union",
        "View",
    }
)
_PURE_FUNCTIONS = frozenset({
    "abs", "and", "array", "avg", "cast", "ceil", "coalesce", "concat", "concat_ws", "count",
    "date_add", "date_format", "date_sub", "date_trunc", "day", "dayofmonth", "decimal",
    "element_at", "floor", "from_json", "get_json_object", "greatest", "hash", "hex", "hour",
    "if", "ifnull", "in", "isnotnull", "isnull", "least", "left", "length", "like", "lower",
    "lpad", "ltrim", "map", "max", "md5", "min", "minute", "month", "named_struct", "not",
    "nullif", "or", "pmod", "regexp_extract", "regexp_replace", "right", "round", "rpad",
    "rtrim", "sha1", "sha2", "size", "split", "struct", "substr", "substring", "sum", "to_date",
    "to_json", "to_timestamp", "trim", "upper", "xxhash64", "year",
})  # fmt: skip
# Settings that change the meaning of a plan and are not part of its text.
_SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_MAX_FIELDS_SETTING = "spark.sql.debug.maxToStringFields"
PLAN_FIELDS_MAX = 1 << 20
FILES_STAT_MAX = 10_000

_ID = re.compile(r"#(\d+)L?")
_ATTRIBUTE = re.compile(r"[^\s,\[\]()]*#\d+L?")
_ALIAS = re.compile(r" AS [^#]*?([^\s,\[\]()#]*#\d+L?)")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(")
_NODE = re.compile(r"^[\s:+|-]*([A-Za-z]\w*)")
_FORMAT = re.compile(r"\] (\w+)$")


def plan_fingerprint(df: DataFrame) -> str:
    """Return `plan:` and a digest if the plan determines the input, else `hint:` and a digest."""
    text, cached = _analysed_plan(df)
    files = _input_files(df)
    settings = [str(df.sparkSession.conf.get(name)) for name in _SETTINGS]
    numbers: dict[str, str] = {}
    plain = _ID.sub(lambda found: numbers.setdefault(found[1], f"#{len(numbers)}"), text)
    hasher = hashlib.sha256()
    for part in (df.schema.json(), plain, *settings, *sorted(files)):
        hasher.update(len(part).to_bytes(8, "big") + part.encode())
    is_known = not cached and _is_pure(text, bool(files)) and all(files.values())
    return (TRUSTED_PREFIX if is_known else HINT_PREFIX) + hasher.hexdigest()


def is_trusted(plan: str) -> bool:
    return plan.startswith(TRUSTED_PREFIX)


def content_hash(df: DataFrame) -> str:
    """Compute the `input_hash` of ingest by one aggregate."""
    from pyspark.sql import functions as F

    # In halves: a sum of whole hashes would overflow, which Spark rejects.
    low = F.col("h").bitwiseAND(F.lit(0xFFFFFFFF))
    high = F.shiftrightunsigned("h", 32)
    hashed = df.select(row_hash(df.schema).alias("h"))
    [row] = hashed.agg(
        F.count("*").alias("n"), F.sum(low).alias("l"), F.sum(high).alias("u")
    ).collect()
    return format_input_hash(df.schema, row.n, (row.l or 0) + ((row.u or 0) << 32))


def same_input(df: DataFrame, plan: str, input_hash: str) -> bool:
    if is_trusted(plan) and plan_fingerprint(df) == plan:
        return True
    return content_hash(df) == input_hash


def format_input_hash(schema: StructType, rows: int, hash_sum: int) -> str:
    """Format the hash of an input. It includes names and types, since row hashes cover only values."""
    names = hashlib.sha256(schema.simpleString().encode()).digest()
    return f"{rows}:{(hash_sum + int.from_bytes(names[:8], 'big')) & HASH_MASK:016x}"


def row_hash(schema: StructType) -> Column:
    """Build the expression that hashes all columns of a row."""
    from pyspark.sql import functions as F

    parts = _hash_parts(schema.fields)
    return F.xxhash64(*parts) if parts else F.lit(0).cast("bigint")


def match_hashes(schema: StructType, columns: Sequence[str]) -> list[Column]:
    """Build two hashes of these columns of a row, independent of their order: 128 bits together.

    Each column is hashed with the hash so far as the seed, so another seed at the start gives another
    hash. Neither is cryptographic.
    """
    from pyspark.sql import functions as F

    wanted = set(columns)
    fields = sorted((one for one in schema.fields if one.name in wanted), key=lambda f: f.name)
    return [F.xxhash64(_null_marker(seed), *_hash_parts(fields)) for seed in (-2, -3)]


def match_digest(schema: StructType, columns: Sequence[str]) -> str:
    """Digest names and types of these columns. Hashes with different digests are not comparable."""
    wanted = set(columns)
    return columns_digest(
        (f.name, f.dataType.simpleString()) for f in schema.fields if f.name in wanted
    )


def _hash_parts(fields: Sequence[StructField]) -> list[Column]:
    from pyspark.sql import functions as F

    parts: list[Column] = []
    for at, field in enumerate(fields):
        column = F.col(quote_name(field.name))
        parts += _hash_inputs(column, field.dataType)
        if field.nullable:
            # Nulls do not enter the hash, so this leaves values unchanged and marks a null.
            parts.append(F.when(column.isNull(), _null_marker(at)))
    return parts


def struct_type(ddl: str) -> StructType:
    """Parse a DDL text. Spark Connect would send a DDL text to the server, so schemas are passed as
    StructType.
    """
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema


def _null_marker(at: int) -> Column:
    """Return a number that marks a null and is unlikely to occur in data."""
    from pyspark.sql import functions as F

    digest_bytes = hashlib.sha256(f"holdfast null {at}".encode()).digest()
    return F.lit(int.from_bytes(digest_bytes[:8], "big", signed=True))


def _hash_inputs(column: Column, kind: DataType) -> list[Column]:
    from pyspark.sql import functions as F
    from pyspark.sql import types

    nested = types.ArrayType | types.MapType | types.StructType | types.VariantType
    if isinstance(kind, types.ArrayType) and not isinstance(kind.elementType, nested):
        # Not as JSON: formatting a column of embeddings would take longer than its ingest.
        parts = [column, F.array_size(column)]
        if kind.containsNull:
            holes = F.transform(column, lambda element: element.isNull())
            parts += [
                F.when(F.exists(column, lambda element: element.isNull()), part)
                for part in (holes, _null_marker(-1))
            ]
        return parts
    if isinstance(kind, nested):
        options = {
            "ignoreNullFields": "false",
            "timeZone": "UTC",
            "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
            "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        }
        return [F.to_json(F.struct(_maps_as_entries(column, kind).alias("v")), options)]
    if isinstance(kind, types.StringType) and kind != types.StringType():
        return [column.cast("binary")]
    return [column]


def _maps_as_entries(column: Column, kind: DataType) -> Column:
    """Convert maps to arrays of their entries. JSON would use the printed form of a key as its
    name.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types

    if not _has_map(kind):
        return column
    if isinstance(kind, types.MapType):
        entry = types.StructType(
            [types.StructField("key", kind.keyType), types.StructField("value", kind.valueType)]
        )
        return _maps_as_entries(F.map_entries(column), types.ArrayType(entry))
    if isinstance(kind, types.ArrayType):
        element = kind.elementType
        return (
            F.transform(column, lambda x: _maps_as_entries(x, element))
            if _has_map(element)
            else column
        )
    assert isinstance(kind, types.StructType)
    inner = [
        _maps_as_entries(column.getField(f.name), f.dataType).alias(f.name) for f in kind.fields
    ]
    return F.when(column.isNotNull(), F.struct(*inner))


def _has_map(kind: DataType) -> bool:
    from pyspark.sql import types

    if isinstance(kind, types.ArrayType):
        return _has_map(kind.elementType)
    if isinstance(kind, types.StructType):
        return any(_has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, types.MapType)


def quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# --- plans ---------------------------------------------------------------------------------------


def _analysed_plan(df: Any) -> tuple[str, bool]:
    """Return the text of the analysed plan, and whether cached data of the session replaces a part
    of it.
    """
    if hasattr(df, "_jdf"):
        execution = df._jdf.queryExecution()
        text = str(execution.analyzed().treeString(True, False, PLAN_FIELDS_MAX, False, False))
        return text, "InMemoryRelation" in str(execution.withCachedData().toString())
    conf = df.sparkSession.conf
    previous = conf.get(_MAX_FIELDS_SETTING)
    conf.set(_MAX_FIELDS_SETTING, str(PLAN_FIELDS_MAX))
    try:
        whole = str(df._explain_string(extended=True))
    finally:
        conf.set(_MAX_FIELDS_SETTING, previous)
    # A line with the schema is between the heading and the plan.
    text = whole.partition("== Analyzed Logical Plan ==\n")[2].partition("\n== Optimized")[0]
    return text.partition("\n")[2], "InMemoryRelation" in whole


def _is_pure(text: str, has_files: bool) -> bool:
    """Whether every node and function is known, and every token that looks like a column is one.

    The second check is needed because plans do not quote texts. The ids of columns are renumbered, so a
    string that looks like one could change undetected.
    """
    defined: set[str] = set()
    for line in filter(None, text.splitlines()):
        node = _NODE.match(line)
        if node is None or node[1] not in _KNOWN_NODES or "more fields" in line:
            return False
        if node[1] == "Range":
            defined.update(found for found in _ATTRIBUTE.findall(text) if found.startswith("id#"))
            continue
        if node[1] == "Relation":
            form = _FORMAT.search(line)
            if form is None or form[1] not in _SELF_DESCRIBING_FORMATS or not has_files:
                return False
            defined.update(_ATTRIBUTE.findall(line))
        if any(name.lower() not in _PURE_FUNCTIONS for name in _CALL.findall(line)):
            return False
        defined.update(_ALIAS.findall(line))
    return bool(text) and all(found in defined for found in _ATTRIBUTE.findall(text))


def _input_files(df: Any) -> dict[str, bool]:
    """Return the input files as lines of text, each with a flag: size and modification time are
    known.
    """
    local = hasattr(df, "_jdf") or df.sparkSession.client.host in _LOOPBACK
    names = df.inputFiles()
    lines: dict[str, bool] = {}
    for name in names:
        stat = None
        parts = urlsplit(name)
        if parts.scheme in {"", "file"}:
            stat = _file_stat(unquote(parts.path)) if local else None
        elif hasattr(df, "_jdf") and len(names) <= FILES_STAT_MAX:
            stat = _hadoop_stat(df, name)
        lines[f"{name} {stat}"] = stat is not None
    return lines


def _file_stat(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _hadoop_stat(df: Any, name: str) -> tuple[int, int] | None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    jvm = df.sparkSession._jvm
    try:
        path = jvm.org.apache.hadoop.fs.Path(name)
        settings = df.sparkSession._jsparkSession.sessionState().newHadoopConf()
        status = path.getFileSystem(settings).getFileStatus(path)
        return int(status.getLen()), int(status.getModificationTime())
    except Py4JError:
        return None
