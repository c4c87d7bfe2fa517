"""Fingerprints: whether the input under a known name is the input that was ingested.

    plan_of(df)         cheap: schema, analysed plan, input files with size and time of change, digested
    content_hash(df)    dear: one pass; "rows:sum", the same text that ingest computes on its way
    same_input(...)     equal trusted plans, else equal contents

A plan is *trusted* (`trusted(plan)`) when it determines the data: every leaf is a range or files whose
size and time can be asked for, and every function in it is known to be pure. Anything else (rows that
live in the session, UDFs, tables of other systems, a text that Spark abridged) is only a hint, and
the contents are compared instead: what is not recognised costs a pass. What a trusted plan rests on
is the usual bargain of build tools: a file rewritten with the same size and time goes unseen.

The content hash adds up the hashes of the rows modulo 2^64, so it depends on neither order nor
partitions. `xxhash64` alone would not do for a row: it skips nulls, so (null, 1) and (1, null) hash
alike, it runs the elements of arrays together, and it refuses maps. `row_hash` marks nulls by their
place and turns nested values into JSON first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from holdfast.spark.match import digest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

TRUSTED = "plan:"
UNTRUSTED = "hint:"
MASK = (1 << 64) - 1

# Formats whose files say all there is to say: how a CSV is read is an option, and no part of the plan.
_FORMATS = frozenset({"parquet", "orc"})
_NODES = frozenset(
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
_PURE = frozenset({
    "abs", "and", "array", "avg", "cast", "ceil", "coalesce", "concat", "concat_ws", "count",
    "date_add", "date_format", "date_sub", "date_trunc", "day", "dayofmonth", "decimal",
    "element_at", "floor", "from_json", "get_json_object", "greatest", "hash", "hex", "hour",
    "if", "ifnull", "in", "isnotnull", "isnull", "least", "left", "length", "like", "lower",
    "lpad", "ltrim", "map", "max", "md5", "min", "minute", "month", "named_struct", "not",
    "nullif", "or", "pmod", "regexp_extract", "regexp_replace", "right", "round", "rpad",
    "rtrim", "sha1", "sha2", "size", "split", "struct", "substr", "substring", "sum", "to_date",
    "to_json", "to_timestamp", "trim", "upper", "xxhash64", "year",
})  # fmt: skip
# What changes the meaning of a plan without being in its text.
_SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ABRIDGE = "spark.sql.debug.maxToStringFields"
FIELDS_MAX = 1 << 20
FILES_ASKED_MAX = 10_000

_ID = re.compile(r"#(\d+)L?")
_ATTRIBUTE = re.compile(r"[^\s,\[\]()]*#\d+L?")
_ALIAS = re.compile(r" AS [^#]*?([^\s,\[\]()#]*#\d+L?)")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(")
_NODE = re.compile(r"^[\s:+|-]*([A-Za-z]\w*)")
_FORMAT = re.compile(r"\] (\w+)$")


def plan_of(df: DataFrame) -> str:
    """`plan:` and a digest if it determines the input, `hint:` and a digest if not."""
    text, cached = _analysed(df)
    files = _files(df)
    settings = [str(df.sparkSession.conf.get(name)) for name in _SETTINGS]
    seen: dict[str, str] = {}
    plain = _ID.sub(lambda found: seen.setdefault(found[1], f"#{len(seen)}"), text)
    made = hashlib.sha256()
    for part in (df.schema.json(), plain, *settings, *sorted(files)):
        made.update(len(part).to_bytes(8, "big") + part.encode())
    known = not cached and _is_pure(text, bool(files)) and all(files.values())
    return (TRUSTED if known else UNTRUSTED) + made.hexdigest()


def trusted(plan: str) -> bool:
    return plan.startswith(TRUSTED)


def content_hash(df: DataFrame) -> str:
    """What `ingest` would call `input_hash`, by one aggregate."""
    from pyspark.sql import functions as F

    # By halves: a sum of whole hashes overflows, which Spark refuses to do silently.
    low = F.col("h").bitwiseAND(F.lit(0xFFFFFFFF))
    high = F.shiftrightunsigned("h", 32)
    hashed = df.select(row_hash(df.schema).alias("h"))
    [row] = hashed.agg(
        F.count("*").alias("n"), F.sum(low).alias("l"), F.sum(high).alias("u")
    ).collect()
    return text_of(df.schema, row.n, (row.l or 0) + ((row.u or 0) << 32))


def same_input(df: DataFrame, plan: str, input_hash: str) -> bool:
    if trusted(plan) and plan_of(df) == plan:
        return True
    return content_hash(df) == input_hash


def text_of(schema: StructType, rows: int, hash_sum: int) -> str:
    """Names and types count too: the hashes of the rows are of values alone."""
    names = hashlib.sha256(schema.simpleString().encode()).digest()
    return f"{rows}:{(hash_sum + int.from_bytes(names[:8], 'big')) & MASK:016x}"


def row_hash(schema: StructType) -> Column:
    """A hash of all columns of a row, as an expression."""
    from pyspark.sql import functions as F

    parts = _parts(schema.fields)
    return F.xxhash64(*parts) if parts else F.lit(0).cast("bigint")


def match_hashes(schema: StructType, columns: Sequence[str]) -> list[Column]:
    """Two hashes of these columns of a row, in any order of theirs: 128 bits together.

    Each column is hashed with the hash so far as the seed, so another seed at the start gives another
    hash. Neither is cryptographic.
    """
    from pyspark.sql import functions as F

    wanted = set(columns)
    fields = sorted((one for one in schema.fields if one.name in wanted), key=lambda f: f.name)
    return [F.xxhash64(_mark(seed), *_parts(fields)) for seed in (-2, -3)]


def match_digest(schema: StructType, columns: Sequence[str]) -> str:
    """Names and types of these columns: hashes of another digest cannot be compared with them."""
    wanted = set(columns)
    return digest((f.name, f.dataType.simpleString()) for f in schema.fields if f.name in wanted)


def _parts(fields: Sequence[StructField]) -> list[Column]:
    from pyspark.sql import functions as F

    parts: list[Column] = []
    for at, field in enumerate(fields):
        column = F.col(quoted(field.name))
        parts += _hashables(column, field.dataType)
        if field.nullable:
            # Nulls do not enter the hash, so this changes nothing for a value and marks its absence.
            parts.append(F.when(column.isNull(), _mark(at)))
    return parts


def struct(ddl: str) -> StructType:
    """Schemas go to Spark as StructType: Connect would ask the server about a DDL text."""
    from pyspark.sql.types import StructType

    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def _mark(at: int) -> Column:
    """A number that stands for "nothing here" and that no data is likely to hold."""
    from pyspark.sql import functions as F

    told = hashlib.sha256(f"holdfast null {at}".encode()).digest()
    return F.lit(int.from_bytes(told[:8], "big", signed=True))


def _hashables(column: Column, kind: DataType) -> list[Column]:
    from pyspark.sql import functions as F
    from pyspark.sql import types

    nested = types.ArrayType | types.MapType | types.StructType | types.VariantType
    if isinstance(kind, types.ArrayType) and not isinstance(kind.elementType, nested):
        # Not as JSON: a column of embeddings would take longer to print than to ingest.
        parts = [column, F.array_size(column)]
        if kind.containsNull:
            holes = F.transform(column, lambda element: element.isNull())
            parts += [
                F.when(F.exists(column, lambda element: element.isNull()), part)
                for part in (holes, _mark(-1))
            ]
        return parts
    if isinstance(kind, nested):
        options = {
            "ignoreNullFields": "false",
            "timeZone": "UTC",
            "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
            "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        }
        return [F.to_json(F.struct(_without_maps(column, kind).alias("v")), options)]
    if isinstance(kind, types.StringType) and kind != types.StringType():
        return [column.cast("binary")]
    return [column]


def _without_maps(column: Column, kind: DataType) -> Column:
    """Maps as arrays of their entries: JSON would name an entry by whatever its key prints as."""
    from pyspark.sql import functions as F
    from pyspark.sql import types

    if not _has_map(kind):
        return column
    if isinstance(kind, types.MapType):
        entry = types.StructType(
            [types.StructField("key", kind.keyType), types.StructField("value", kind.valueType)]
        )
        return _without_maps(F.map_entries(column), types.ArrayType(entry))
    if isinstance(kind, types.ArrayType):
        element = kind.elementType
        return (
            F.transform(column, lambda x: _without_maps(x, element))
            if _has_map(element)
            else column
        )
    assert isinstance(kind, types.StructType)
    inner = [_without_maps(column.getField(f.name), f.dataType).alias(f.name) for f in kind.fields]
    return F.when(column.isNotNull(), F.struct(*inner))


def _has_map(kind: DataType) -> bool:
    from pyspark.sql import types

    if isinstance(kind, types.ArrayType):
        return _has_map(kind.elementType)
    if isinstance(kind, types.StructType):
        return any(_has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, types.MapType)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# --- plans ---------------------------------------------------------------------------------------


def _analysed(df: Any) -> tuple[str, bool]:
    """The text of the analysed plan, and whether data cached in the session stand in for a part."""
    if hasattr(df, "_jdf"):
        execution = df._jdf.queryExecution()
        text = str(execution.analyzed().treeString(True, False, FIELDS_MAX, False, False))
        return text, "InMemoryRelation" in str(execution.withCachedData().toString())
    conf = df.sparkSession.conf
    was = conf.get(_ABRIDGE)
    conf.set(_ABRIDGE, str(FIELDS_MAX))
    try:
        whole = str(df._explain_string(extended=True))
    finally:
        conf.set(_ABRIDGE, was)
    # Two lines of schema come between the heading and the plan.
    text = whole.partition("== Analyzed Logical Plan ==\n")[2].partition("\n== Optimized")[0]
    return text.partition("\n")[2], "InMemoryRelation" in whole


def _is_pure(text: str, has_files: bool) -> bool:
    """Is every node and function known, and everything that looks like a column a column?

    The last, because texts are not quoted in a plan: the ids of columns are renumbered, so a string
    that reads like one could change unseen.
    """
    defined: set[str] = set()
    for line in filter(None, text.splitlines()):
        node = _NODE.match(line)
        if node is None or node[1] not in _NODES or "more fields" in line:
            return False
        if node[1] == "Range":
            defined.update(found for found in _ATTRIBUTE.findall(text) if found.startswith("id#"))
            continue
        if node[1] == "Relation":
            form = _FORMAT.search(line)
            if form is None or form[1] not in _FORMATS or not has_files:
                return False
            defined.update(_ATTRIBUTE.findall(line))
        if any(name.lower() not in _PURE for name in _CALL.findall(line)):
            return False
        defined.update(_ALIAS.findall(line))
    return bool(text) and all(found in defined for found in _ATTRIBUTE.findall(text))


def _files(df: Any) -> dict[str, bool]:
    """The input files, each as a line of text, and whether its size and time are in it."""
    local = hasattr(df, "_jdf") or df.sparkSession.client.host in _LOOPBACK
    names = df.inputFiles()
    lines: dict[str, bool] = {}
    for name in names:
        stat = None
        parts = urlsplit(name)
        if parts.scheme in {"", "file"}:
            stat = _stat(unquote(parts.path)) if local else None
        elif hasattr(df, "_jdf") and len(names) <= FILES_ASKED_MAX:
            stat = _ask(df, name)
        lines[f"{name} {stat}"] = stat is not None
    return lines


def _stat(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _ask(df: Any, name: str) -> tuple[int, int] | None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    jvm = df.sparkSession._jvm
    try:
        path = jvm.org.apache.hadoop.fs.Path(name)
        settings = df.sparkSession._jsparkSession.sessionState().newHadoopConf()
        found = path.getFileSystem(settings).getFileStatus(path)
        return int(found.getLen()), int(found.getModificationTime())
    except Py4JError:
        return None
