"""Unsupported column types, refused before any row runs.

Spark has no Arrow type for year-month intervals and no Python value for calendar intervals. A batch
function may receive calendar intervals, since Arrow has a type for them. A TIME column can be written to
Parquet, but Spark cannot read it back. The same holds inside arrays, maps and structs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import Invalid
from holdfast.spark.errors import NotAStage

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_UNSUPPORTED_INPUT = frozenset({"YearMonthIntervalType"})
_UNSUPPORTED_IN_ROWS = frozenset({"CalendarIntervalType"})
_UNSUPPORTED_RESULT = frozenset({"YearMonthIntervalType", "CalendarIntervalType", "TimeType"})


class ColumnTypeUnsupported(Invalid):
    code = "column_type_unsupported"
    hint = "cast the column, or drop it before the stage"


def check_input_types(schema: StructType, *, rows: bool) -> None:
    """Refuse a column that the function cannot receive, as Rows or as Arrow."""
    refused = _UNSUPPORTED_INPUT | _UNSUPPORTED_IN_ROWS if rows else _UNSUPPORTED_INPUT
    for field in schema.fields:
        for kind in _iter_nested_types(field.dataType):
            if type(kind).__name__ in refused:
                raise ColumnTypeUnsupported(column=field.name, type=kind.simpleString())


def check_result_types(schema: StructType) -> None:
    """Refuse a result column that cannot be written to the output and read back by Spark."""
    for field in schema.fields:
        for kind in _iter_nested_types(field.dataType):
            if type(kind).__name__ in _UNSUPPORTED_RESULT:
                why = f"Spark cannot read {kind.simpleString()} from an output"
                raise NotAStage(what="schema", column=field.name, why=why)


def _iter_nested_types(kind: DataType) -> Iterator[Any]:
    yield kind
    inner = [getattr(kind, name, None) for name in ("elementType", "keyType", "valueType")]
    inner += [field.dataType for field in getattr(kind, "fields", ())]
    for one in inner:
        if one is not None:
            yield from _iter_nested_types(one)
