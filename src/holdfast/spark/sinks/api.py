"""The sink interface of the ordered commit, and its errors.

    check_vacant refuses a place that a new run must not use, before its input is read
    begin        claims an empty or own place without touching a foreign one; returns the last version
    commit_many  commits parts in seq order atomically; durable when it returns
    finish       marks the output as complete

- A `Part` is the successful rows of a fixed seq interval, so a repeated part has the same rows. Its
  version is its last seq. Parts at or below the committed version are skipped.
- Parts are contiguous. A gap or an overlap means that the cut changed: `PartOutOfOrder`.
- A part may be empty (every row failed or was skipped). Its version is committed too.
- The rows of a part are a table or a function that yields row groups. A sink that writes group by
  group holds one group at a time.
- A run over a changed input succeeds the run that owns the output (`owner`). `begin_after` gets the
  rows that are equal in both runs (`Base`) and returns the intervals that need no rows
  (`KeptPart`): unchanged files for `mode="replace"` and `"upsert"`, every equal row for `"append"`.
  All other rows arrive as a `Part`. Until `finish` readers see the former output (with "append" the
  committed rows).
- A sink is rebuilt in another process from `spec()`, which is plain data without secrets.
  Credentials come from the environment of the writing process.

    HoldfastError
    ├── Invalid
    │   ├── OutputNotOurs     choose another place; nothing was touched
    │   └── PartOutOfOrder    fix the code: parts are not contiguous
    ├── Busy
    │   └── OutputHeld        retry later: another process is writing the manifest
    ├── Fenced
    │   └── OutputTaken       stop: another process of this run took over the output
    └── OutputError           call an operator; nothing uncommitted is visible
        ├── OutputCorrupt
        ├── OutputFull        retry after freeing space
        └── OutputReadOnly
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from holdfast.errors import Busy, Fenced, HoldfastError, Invalid
from holdfast.spark.sinks.part_files import WrittenPart

Spec = dict[str, str | int | bool]

METHODS = ("spec", "check_vacant", "begin", "commit_many", "finish", "parts")
KINDS = {
    "parquet": "holdfast.spark.sinks.parquet:ParquetSink",
    "delta": "holdfast.spark.sinks.delta:DeltaSink",
    "iceberg": "holdfast.spark.sinks.iceberg:IcebergSink",
    "table": "holdfast.spark.sinks.table:TableSink",
}
NOTHING = -1  # the version of an output without parts


class OutputNotOurs(Invalid):
    code = "output_not_ours"
    hint = "nothing was touched; choose another output, or move the existing files away"


class PartOutOfOrder(Invalid):
    code = "part_out_of_order"
    hint = "parts must follow each other without a gap; use the same part ranges for the whole run"


class OutputHeld(Busy):
    code = "output_held"
    hint = "another process holds the manifest lock; end that process if it hangs"


class OutputTaken(Fenced):
    code = "output_taken"
    hint = "another process of this run took over the output; stop this one"


class OutputError(HoldfastError):
    code = "output"


class OutputCorrupt(OutputError):
    code = "output_corrupt"
    hint = "nothing was changed; restore the file, or run again into a new output"


class OutputFull(OutputError):
    code = "output_full"
    retryable = True
    hint = "nothing of this commit is visible; free disk space at the output"


class OutputReadOnly(OutputError):
    code = "output_read_only"
    hint = "the output's directory must be writable by the process that commits"


ROW_GROUP_ROWS = 1 << 17


class Part(NamedTuple):
    """The successful rows of seqs [lo, hi), in seq order.

    `rows` is a table, or a function that yields its row groups from the first one on each call.
    """

    lo: int
    hi: int
    rows: pa.Table | Callable[[], Iterator[pa.Table]]

    @property
    def version(self) -> int:
        return self.hi - 1

    def groups(self) -> Iterator[pa.Table]:
        """Yield the rows as non-empty row groups."""
        if not isinstance(self.rows, pa.Table):
            yield from (group for group in self.rows() if group.num_rows)
            return
        for at in range(0, self.rows.num_rows, ROW_GROUP_ROWS):
            yield self.rows.slice(at, ROW_GROUP_ROWS)

    @property
    def table(self) -> pa.Table:
        """All rows in one table. A part that yields no group has no columns."""
        if isinstance(self.rows, pa.Table):
            return self.rows
        groups = list(self.rows())
        return pa.concat_tables(groups) if groups else pa.table({})


class Same(NamedTuple):
    """Rows [lo, hi) of this run equal the rows of the base from `base_lo` on: key, outcome and
    result.
    """

    lo: int
    hi: int
    base_lo: int


class Base(NamedTuple):
    """The run whose rows the output holds, for the run that succeeds it.

    `same` is ascending. It contains rows that succeeded or were skipped in both runs. It omits
    changed, new, re-called and removed rows.
    """

    run_id: str
    same: Sequence[Same]


class KeptPart(NamedTuple):
    """Seqs [lo, hi) that need no rows, because the output has them. `file` is set if they are a
    whole file.
    """

    lo: int
    hi: int
    file: str = ""

    @property
    def version(self) -> int:
        return self.hi - 1


class Begun(NamedTuple):
    """The last committed version, and the intervals that need no rows, ascending."""

    version: int
    kept: Sequence[KeptPart]


@runtime_checkable
class SuccessorSink(Protocol):
    """The additional interface of a sink that a run over a changed input may write to.

    `commit_many` accepts its `KeptPart`s among the `Part`s in seq order.
    """

    def owner(self) -> str:
        """Return the id of the run whose rows the place holds, "" if none. Needs no `begin`."""

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        """Start or resume the succession of `base.run_id`."""

    # Optional: is_shared and owners(). They return whether several stages write to the place, and
    # the ids of the runs with rows in it, newest first.


@runtime_checkable
class ExecutorSink(Protocol):
    """The additional interface of a sink whose part files executors may write.

    `commit_many` accepts `WrittenPart`s instead of `Part`s.
    """

    def part_writer(self) -> bytes:
        """Return the configuration of `write_part` for another process. Called after `begin`."""

    def check_writer(self, writer: bytes) -> None:
        """On an executor, before its first call: refuse a place that `write_part` cannot write to."""

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        """On an executor: write the files of a part durably. The sink is open but not begun there."""


@runtime_checkable
class Sink(Protocol):
    def spec(self) -> Spec:
        """Return plain data from which `open_sink` rebuilds this sink in another process."""

    # Optional: check(schema) refuses, before any work, a schema that the first commit would fail
    # with. `in_driver = True` with use(spark): the driver writes the output when all rows are
    # final.

    def check_vacant(self) -> None:
        """Refuse a place that a new run must not use. Touches nothing. Called before any work."""

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        """Claim the place for this run; return its last committed version, `NOTHING` if none."""

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        """Commit one part; return the committed version."""

    def commit_many(self, parts: Sequence[Any]) -> int:
        """Commit all parts atomically, skipping those already committed."""

    def finish(self) -> None:
        """Mark the output as complete for readers."""

    def parts(self, run_id: str) -> list[str]:
        """Return the Parquet files of the run's committed rows in seq order. Needs no `begin`."""


def open_sink(spec: Mapping[str, str | int | bool]) -> Sink:
    """Open the sink of a spec: one of `KINDS`, or `module:Class` with the other fields as
    arguments.
    """
    rest = dict(spec)
    kind = rest.pop("kind", "")
    target = KINDS.get(str(kind), str(kind))
    module, _, name = target.partition(":")
    if not (module and name):
        raise Invalid(what="sink", kind=kind, why=f"use {', '.join(KINDS)} or module:Class")
    try:
        sink_class = getattr(importlib.import_module(module), name)
        # Validate the class before the call, because a spec comes from a store.
        if not isinstance(sink_class, type) or any(not hasattr(sink_class, one) for one in METHODS):
            raise Invalid(what="sink", kind=kind, why=f"a sink is a class with {METHODS}")
        sink: Sink = sink_class(**rest)
    except (ImportError, AttributeError, TypeError) as error:
        raise Invalid(what="sink", kind=kind, why=str(error)) from error
    return sink


def kept_files(base: Base, files: Iterable[tuple[str, int, int]]) -> list[KeptPart]:
    """Return the base files (name, lo, hi) that consist of unchanged rows of this run."""
    kept: list[KeptPart] = []
    starts = [one.base_lo for one in base.same]
    for name, lo, hi in files:
        at = bisect_right(starts, lo) - 1
        if at < 0 or hi <= lo:
            continue
        same = base.same[at]
        if hi - same.base_lo <= same.hi - same.lo:
            shift = same.lo - same.base_lo
            kept.append(KeptPart(lo + shift, hi + shift, name))
    return kept


AnyPart = TypeVar("AnyPart", bound=Part | KeptPart | WrittenPart)


def parts_after(parts: Sequence[AnyPart], version: int, *, path: str) -> list[AnyPart]:
    """Return the parts above `version`. They must be contiguous with it and each other."""
    remaining = [part for part in parts if part.version > version]
    at = version + 1
    for part in remaining:
        if part.lo != at or part.hi <= part.lo:
            raise PartOutOfOrder(path=path, expected_lo=at, lo=part.lo, hi=part.hi)
        rows = part.rows if isinstance(part, Part) else None
        if isinstance(rows, pa.Table) and rows.num_rows > part.hi - part.lo:
            raise Invalid(what="part", path=path, lo=part.lo, hi=part.hi, rows=rows.num_rows)
        at = part.hi
    return remaining


def with_schema(table: pa.Table, schema: pa.Schema, *, path: str) -> pa.Table:
    """Return `table` with exactly `schema` and one chunk per column, so that equal rows give equal
    bytes.
    """
    if table.schema.names != schema.names or table.schema.types != schema.types:
        raise Invalid(
            what="part", path=path, expected=schema.to_string(), found=table.schema.to_string()
        )
    return pa.Table.from_arrays(table.columns, schema=schema).combine_chunks()


def part_with_schema(part: Part, schema: pa.Schema, *, path: str) -> Part:
    """Return `part` with exactly `schema`. Its rows are counted while they are read."""

    def groups() -> Iterator[pa.Table]:
        rows = 0
        for group in part.groups():
            rows += group.num_rows
            if rows > part.hi - part.lo:
                raise Invalid(what="part", path=path, lo=part.lo, hi=part.hi, rows=rows)
            yield with_schema(group, schema, path=path)

    return part._replace(rows=groups)


def without_metadata(schema: pa.Schema) -> pa.Schema:
    """Return the columns without metadata, which would make the bytes of two runs differ."""
    if len(set(schema.names)) != len(schema.names) or not schema.names:
        raise Invalid(
            what="schema", columns=schema.names, why="column names must be unique and not empty"
        )
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise Invalid(
                what="schema",
                column=field.name,
                why="dictionary types are not supported; use the type of the values",
            )
    return pa.schema([field.remove_metadata() for field in schema])
