"""Types of columns that cannot go through a stage, refused before anything runs.

Spark has no Arrow form for year-month intervals, and no Python value for calendar intervals: a batch
function may have those, for Arrow has a type for them. A TIME column can be written to Parquet and not
be read back by Spark. Inside of arrays, maps and structs it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import Invalid
from holdfast.spark.errors import NotAStage

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_INPUT = frozenset({"YearMonthIntervalType"})
_ROWS = frozenset({"CalendarIntervalType"})
_RESULT = frozenset({"YearMonthIntervalType", "CalendarIntervalType", "TimeType"})


class ColumnTypeUnsupported(Invalid):
    code = "column_type_unsupported"
    hint = "cast the column, or drop it before the stage"


def check_input_types(schema: StructType, *, rows: bool) -> None:
    """Whether the function can be given every column, as Rows or as Arrow."""
    refused = _INPUT | _ROWS if rows else _INPUT
    for field in schema.fields:
        for kind in _within(field.dataType):
            if type(kind).__name__ in refused:
                raise ColumnTypeUnsupported(column=field.name, type=kind.simpleString())


def check_result_types(schema: StructType) -> None:
    """Whether results of this schema can be written, and read back by Spark."""
    for field in schema.fields:
        for kind in _within(field.dataType):
            if type(kind).__name__ in _RESULT:
                why = f"Spark does not read {kind.simpleString()} back from an output"
                raise NotAStage(what="schema", column=field.name, why=why)


def _within(kind: DataType) -> Iterator[Any]:
    yield kind
    inner = [getattr(kind, name, None) for name in ("elementType", "keyType", "valueType")]
    inner += [field.dataType for field in getattr(kind, "fields", ())]
    for one in inner:
        if one is not None:
            yield from _within(one)
