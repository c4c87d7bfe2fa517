"""What the ordered commit needs of a place to put rows, and how such a place says no.

    check_vacant a new run may begin here; asked before its input is read
    begin        the place is ours or empty, or nothing of it is touched; answers the last version
    commit_many  parts in seq order, as one visible step; durable when it returns
    finish       nothing more will come

- A `Part` is the successes of a fixed seq interval, so a repeat of it holds the same rows. Its
  version is its last seq: what is at or below the committed version was done before and is skipped.
- Parts are contiguous. A gap or an overlap means that the cut changed: `PartOutOfOrder`.
- A part may be empty (every row of it failed or was skipped); its version is committed all the same.
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
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from holdfast.errors import Busy, Fenced, HoldfastError, Invalid

Spec = dict[str, str | int | bool]

METHODS = ("spec", "check_vacant", "begin", "commit_many", "finish", "parts")
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


class Part(NamedTuple):
    """The successes of seqs [lo, hi), in seq order."""

    lo: int
    hi: int
    table: pa.Table

    @property
    def version(self) -> int:
        return self.hi - 1


@runtime_checkable
class Sink(Protocol):
    def spec(self) -> Spec:
        """Plain data from which `open_sink` rebuilds this sink elsewhere."""

    def check_vacant(self) -> None:
        """Refuse a place that a new run must not take; touches nothing. Before any work is done."""

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        """Take the place for this run and answer its last committed version, `NOTHING` if none."""

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        """One part; answers the version that is committed now."""

    def commit_many(self, parts: Sequence[Part]) -> int:
        """All of them in one step; those already committed are skipped."""

    def finish(self) -> None:
        """Say to readers that the output is complete."""

    def parts(self, run_id: str) -> list[str]:
        """Where the run's committed rows lie: Parquet files in seq order. Needs no `begin`."""


def open_sink(spec: Mapping[str, str | int | bool]) -> Sink:
    """The sink of a spec: `parquet`, `delta`, or `module:Class` built with the rest of the spec."""
    rest = dict(spec)
    kind = rest.pop("kind", "")
    home = {
        "parquet": "holdfast.spark.sinks.parquet:ParquetSink",
        "delta": "holdfast.spark.sinks.delta:DeltaSink",
    }.get(str(kind), str(kind))
    module, _, name = home.partition(":")
    if not (module and name):
        raise Invalid(what="sink", kind=kind, why="use parquet, delta or module:Class")
    try:
        made = getattr(importlib.import_module(module), name)
        # Looked at before it is called: a spec comes out of a store.
        if not isinstance(made, type) or any(not hasattr(made, one) for one in METHODS):
            raise Invalid(what="sink", kind=kind, why=f"a sink is a class with {METHODS}")
        sink: Sink = made(**rest)
    except (ImportError, AttributeError, TypeError) as error:
        raise Invalid(what="sink", kind=kind, why=str(error)) from error
    return sink


def pending(parts: Sequence[Part], version: int, *, path: str) -> list[Part]:
    """The parts above `version`; they must follow it, and each other."""
    wanted = [part for part in parts if part.version > version]
    at = version + 1
    for part in wanted:
        if part.lo != at or part.hi <= part.lo:
            raise PartOutOfOrder(path=path, expected_lo=at, lo=part.lo, hi=part.hi)
        if part.table.num_rows > part.hi - part.lo:
            raise Invalid(what="part", path=path, lo=part.lo, hi=part.hi, rows=part.table.num_rows)
        at = part.hi
    return wanted


def fitted(table: pa.Table, schema: pa.Schema, *, path: str) -> pa.Table:
    """`table` with exactly `schema` and one chunk a column, so that equal rows give equal bytes."""
    if table.schema.names != schema.names or table.schema.types != schema.types:
        raise Invalid(
            what="part", path=path, expected=schema.to_string(), found=table.schema.to_string()
        )
    return pa.Table.from_arrays(table.columns, schema=schema).combine_chunks()


def plain(schema: pa.Schema) -> pa.Schema:
    """The columns alone: metadata would make the bytes of two runs differ."""
    if len(set(schema.names)) != len(schema.names) or not schema.names:
        raise Invalid(what="schema", columns=schema.names, why="columns need names of their own")
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise Invalid(what="schema", column=field.name, why="give the values' type instead")
    return pa.schema([field.remove_metadata() for field in schema])
