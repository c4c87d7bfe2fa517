"""What the ordered commit needs of a place to put rows, and how such a place says no.

    check_vacant a new run may begin here; asked before its input is read
    begin        the place is ours or empty, or nothing of it is touched; answers the last version
    commit_many  parts in seq order, as one visible step; durable when it returns
    finish       nothing more will come

- A `Part` is the successes of a fixed seq interval, so a repeat of it holds the same rows. Its
  version is its last seq: what is at or below the committed version was done before and is skipped.
- Parts are contiguous. A gap or an overlap means that the cut changed: `PartOutOfOrder`.
- A part may be empty (every row of it failed or was skipped); its version is committed all the same.
- The rows of a part are a table, or a function that yields them in row groups: a sink that writes one
  group after the other holds no more than one of them.
- A run over input that grew succeeds the run that owns the output (`owner`). `begin_after` is told
  which rows of the two are the same (`Base`) and answers with the intervals that need no rows
  (`KeptPart`): the files that stay as they are, for `mode="replace"` and `"upsert"`, and every row
  that is the same, for `"append"`. All else comes as a `Part`. Until `finish` readers see the former
  output ("append": what is committed).
- A sink is rebuilt in another process from `spec()`, which is plain data and holds no secrets:
  credentials come from the environment of the process that writes.

    HoldfastError
    ├── Invalid
    │   ├── OutputNotOurs     choose another place; nothing was touched
    │   └── PartOutOfOrder    fix the code: parts do not follow each other
    ├── Busy
    │   └── OutputHeld        retry later: another process is just writing the manifest
    ├── Fenced
    │   └── OutputTaken       stop: another process of this run writes here now
    └── OutputError           call an operator; nothing uncommitted is visible
        ├── OutputCorrupt
        ├── OutputFull        may be repeated once there is space
        └── OutputReadOnly
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from holdfast.errors import Busy, Fenced, HoldfastError, Invalid
from holdfast.spark.sinks.written import WrittenPart

Spec = dict[str, str | int | bool]

METHODS = ("spec", "check_vacant", "begin", "commit_many", "finish", "parts")
KINDS = {
    "parquet": "holdfast.spark.sinks.parquet:ParquetSink",
    "delta": "holdfast.spark.sinks.delta:DeltaSink",
    "iceberg": "holdfast.spark.sinks.iceberg:IcebergSink",
    "table": "holdfast.spark.sinks.table:TableSink",
}
NOTHING = -1  # the version of an output that holds no part yet


class OutputNotOurs(Invalid):
    code = "output_not_ours"
    hint = "nothing was touched; choose another output, or move what is there away"


class PartOutOfOrder(Invalid):
    code = "part_out_of_order"
    hint = "parts follow each other without a gap; keep the same cut for the whole run"


class OutputHeld(Busy):
    code = "output_held"
    hint = "another process holds the manifest; if it is stopped, end it"


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
    hint = "nothing of this commit is visible; free some space where the output lies"


class OutputReadOnly(OutputError):
    code = "output_read_only"
    hint = "the output's directory must be writable by the process that commits"


ROW_GROUP_ROWS = 1 << 17


class Part(NamedTuple):
    """The successes of seqs [lo, hi), in seq order.

    `rows` is a table, or a function that yields the row groups of it, each time from the first one.
    """

    lo: int
    hi: int
    rows: pa.Table | Callable[[], Iterator[pa.Table]]

    @property
    def version(self) -> int:
        return self.hi - 1

    def groups(self) -> Iterator[pa.Table]:
        """Its rows, a row group at a time; none of them is empty."""
        if not isinstance(self.rows, pa.Table):
            yield from (group for group in self.rows() if group.num_rows)
            return
        for at in range(0, self.rows.num_rows, ROW_GROUP_ROWS):
            yield self.rows.slice(at, ROW_GROUP_ROWS)

    @property
    def table(self) -> pa.Table:
        """All rows at once. A part that yields nothing has no columns either."""
        if isinstance(self.rows, pa.Table):
            return self.rows
        groups = list(self.rows())
        return pa.concat_tables(groups) if groups else pa.table({})


class Same(NamedTuple):
    """Rows [lo, hi) of this run are those of the base from `base_lo` on: key, outcome and result."""

    lo: int
    hi: int
    base_lo: int


class Base(NamedTuple):
    """The run whose rows an output holds, seen from the run that succeeds it.

    `same` is ascending. It holds rows that ended well or were skipped in both; a row that changed, is
    new, was called again or is gone is in none of it.
    """

    run_id: str
    same: Sequence[Same]


class KeptPart(NamedTuple):
    """Seqs [lo, hi) that need no rows: the output has them, in `file` if they are all of a file."""

    lo: int
    hi: int
    file: str = ""

    @property
    def version(self) -> int:
        return self.hi - 1


class Begun(NamedTuple):
    """The last committed version, and what needs no rows, ascending."""

    version: int
    kept: Sequence[KeptPart]


@runtime_checkable
class SuccessorSink(Protocol):
    """What a sink has in addition if a run over input that grew may write to it.

    `commit_many` takes its `KeptPart`s, among the `Part`s, in seq order.
    """

    def owner(self) -> str:
        """The id of the run whose rows the place holds, "" if there is none. Needs no `begin`."""

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        """Succeed `base.run_id` here, or go on with that."""

    # May also have is_shared and owners(): whether several stages write to the place, and the ids of
    # the runs that it holds rows of, newest first.


@runtime_checkable
class ExecutorSink(Protocol):
    """What a sink has in addition if executors may write the files of its parts.

    `commit_many` takes `WrittenPart`s in place of `Part`s.
    """

    def part_writer(self) -> bytes:
        """What `write_part` needs to know in another process. Asked after the output was begun."""

    def check_writer(self, writer: bytes) -> None:
        """On an executor, before its first call: refuse a place that `write_part` would fail at."""

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        """On an executor: write the files of a part, durably. The sink is opened and not begun there."""


@runtime_checkable
class Sink(Protocol):
    def spec(self) -> Spec:
        """Plain data from which `open_sink` rebuilds this sink elsewhere."""

    # May also have check(schema): refuse, before any work, what the first commit would fail at;
    # and `in_driver = True` with use(spark): the driver writes it, when all rows have ended.

    def check_vacant(self) -> None:
        """Refuse a place that a new run must not take; touches nothing. Before any work is done."""

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        """Take the place for this run and answer its last committed version, `NOTHING` if none."""

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        """One part; answers the version that is committed now."""

    def commit_many(self, parts: Sequence[Any]) -> int:
        """All of them in one step; those already committed are skipped."""

    def finish(self) -> None:
        """Say to readers that the output is complete."""

    def parts(self, run_id: str) -> list[str]:
        """Where the run's committed rows lie: Parquet files in seq order. Needs no `begin`."""


def open_sink(spec: Mapping[str, str | int | bool]) -> Sink:
    """The sink of a spec: one of `KINDS`, or `module:Class` built with the rest of it."""
    rest = dict(spec)
    kind = rest.pop("kind", "")
    home = KINDS.get(str(kind), str(kind))
    module, _, name = home.partition(":")
    if not (module and name):
        raise Invalid(what="sink", kind=kind, why=f"use {', '.join(KINDS)} or module:Class")
    try:
        made = getattr(importlib.import_module(module), name)
        # Looked at before it is called: a spec comes out of a store.
        if not isinstance(made, type) or any(not hasattr(made, one) for one in METHODS):
            raise Invalid(what="sink", kind=kind, why=f"a sink is a class with {METHODS}")
        sink: Sink = made(**rest)
    except (ImportError, AttributeError, TypeError) as error:
        raise Invalid(what="sink", kind=kind, why=str(error)) from error
    return sink


def kept_files(base: Base, files: Iterable[tuple[str, int, int]]) -> list[KeptPart]:
    """The files of the base, as (name, lo, hi), that are rows of this run without a change."""
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


def pending(parts: Sequence[AnyPart], version: int, *, path: str) -> list[AnyPart]:
    """The parts above `version`; they must follow it, and each other."""
    wanted = [part for part in parts if part.version > version]
    at = version + 1
    for part in wanted:
        if part.lo != at or part.hi <= part.lo:
            raise PartOutOfOrder(path=path, expected_lo=at, lo=part.lo, hi=part.hi)
        rows = part.rows if isinstance(part, Part) else None
        if isinstance(rows, pa.Table) and rows.num_rows > part.hi - part.lo:
            raise Invalid(what="part", path=path, lo=part.lo, hi=part.hi, rows=rows.num_rows)
        at = part.hi
    return wanted


def fitted(table: pa.Table, schema: pa.Schema, *, path: str) -> pa.Table:
    """`table` with exactly `schema` and one chunk a column, so that equal rows give equal bytes."""
    if table.schema.names != schema.names or table.schema.types != schema.types:
        raise Invalid(
            what="part", path=path, expected=schema.to_string(), found=table.schema.to_string()
        )
    return pa.Table.from_arrays(table.columns, schema=schema).combine_chunks()


def fitted_part(part: Part, schema: pa.Schema, *, path: str) -> Part:
    """`part` with exactly `schema`, whose rows are counted while they are read."""

    def groups() -> Iterator[pa.Table]:
        rows = 0
        for group in part.groups():
            rows += group.num_rows
            if rows > part.hi - part.lo:
                raise Invalid(what="part", path=path, lo=part.lo, hi=part.hi, rows=rows)
            yield fitted(group, schema, path=path)

    return part._replace(rows=groups)


def plain(schema: pa.Schema) -> pa.Schema:
    """The columns alone: metadata would make the bytes of two runs differ."""
    if len(set(schema.names)) != len(schema.names) or not schema.names:
        raise Invalid(what="schema", columns=schema.names, why="columns need names of their own")
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise Invalid(what="schema", column=field.name, why="give the values' type instead")
    return pa.schema([field.remove_metadata() for field in schema])
