"""Row keys: the order that defines seqs, and the validation of an input's keys.

Rows are numbered 0, 1, 2, … in ascending key order, column by column:

- integers, decimals, dates, timestamps: by value (a timestamp by its instant, not by local time);
- strings and binary: by unsigned bytes, a prefix first. For UTF-8 strings this is code point order,
  and the order in which Spark sorts a string without collation;
- booleans: false before true.

Keys are unique and not null, so the order is total. The seq of a row depends on the input alone,
not on its partitions. Floats are refused: NaN and the two zeros have no agreed order.

A *comparable* is a key as a tuple of Python values (int, bytes, Decimal, bool) in this order.
Timestamps and dates are converted to integers: Python compares two aware datetimes of one zone by
local time, which is wrong in the hour when a clock is set back.

This module uses Arrow and no Spark: executors, driver and ledger service share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import Invalid

EXAMPLES_MAX = 5
EXAMPLE_CHARS_MAX = 200

Comparable = tuple[Any, ...]


class KeyMissing(Invalid):
    code = "key_missing"
    hint = "name key columns that the input has, spelled as in `columns`"


class KeyTypeUnsupported(Invalid):
    code = "key_type_unsupported"
    hint = "a key is whole numbers, strings, binary, dates, timestamps, decimals or booleans; cast the column first"


class KeyNull(Invalid):
    code = "key_null"
    hint = "every row needs a key; filter out the rows without one or choose another key"


class KeyDuplicate(Invalid):
    code = "key_duplicate"
    hint = "keys must be unique; drop the duplicates or add a column to the key. `found` counts only until the search stopped"


def comparable_columns(batch: pa.RecordBatch, key: Sequence[str]) -> list[pa.Array]:
    """Return the key columns in a form that Arrow and Python tuples order as stated."""
    return [_comparable_column(batch.column(name)) for name in key]


def count_nulls(keyed: Sequence[pa.Array]) -> int:
    """Return a lower bound of the rows with a null in the key: the maximum over the columns."""
    return max(int(column.null_count) for column in keyed)


def is_ascending(keyed: Sequence[pa.Array]) -> bool:
    """Return whether the keys ascend strictly, without duplicates. Ignores nulls."""
    if len(keyed[0]) < 2:
        return True
    less, same = _compare_neighbours(keyed[0])
    for column in keyed[1:]:
        inner, equal = _compare_neighbours(column)
        less = pc.or_(less, pc.and_(same(), inner))
        same = _both(same, equal)
    return bool(pc.all(less).as_py())


def sort_order(keyed: Sequence[pa.Array]) -> pa.Array:
    """Return the row numbers in ascending key order."""
    if len(keyed) == 1:
        return pc.array_sort_indices(keyed[0])
    names = [f"k{at}" for at in range(len(keyed))]
    table = pa.RecordBatch.from_arrays(list(keyed), names=names)
    return pc.sort_indices(table, sort_keys=[(name, "ascending") for name in names])


def repeated_rows(keyed: Sequence[pa.Array]) -> pa.Array:
    """Return the numbers of ordered rows with the same key as the row before."""
    same = reduce(pc.and_, (_compare_neighbours(column)[1]() for column in keyed))
    return pc.add(pc.indices_nonzero(same), 1)


def key_examples(batch: pa.RecordBatch, key: Sequence[str], rows: pa.Array) -> list[str]:
    """Return the keys of up to `EXAMPLES_MAX` of these rows as text."""
    taken = [batch.column(name).take(rows[:EXAMPLES_MAX]) for name in key]
    shown = [[_value_text(value) for value in column] for column in taken]
    return [", ".join(parts)[:EXAMPLE_CHARS_MAX] for parts in zip(*shown, strict=True)]


def key_at(keyed: Sequence[pa.Array], row: int) -> Comparable:
    return tuple(column[row].as_py() for column in keyed)


def lower_bound(keyed: Sequence[pa.Array], bound: Comparable, lo: int = 0) -> int:
    """Return the first ordered row from `lo` on with a key not below `bound`."""
    hi = len(keyed[0])
    while lo < hi:
        middle = (lo + hi) // 2
        if key_at(keyed, middle) < bound:
            lo = middle + 1
        else:
            hi = middle
    return lo


def _comparable_column(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return column.view(pa.int64())
    if pa.types.is_date32(kind):
        return column.view(pa.int32())
    if _is_text(kind):
        # Text from Spark may be invalid UTF-8, but its bytes are always comparable.
        return column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    return column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _compare_neighbours(column: pa.Array) -> tuple[pa.Array, Any]:
    """Return for each row but the last: is it below the next, and (lazily) is it equal to the next."""
    these, those = column[:-1], column[1:]
    return pc.less(these, those), lambda: pc.equal(these, those)


def _both(one: Any, other: Any) -> Any:
    return lambda: pc.and_(one(), other())


def _value_text(value: pa.Scalar) -> str:
    try:
        return str(value.as_py())
    except (ValueError, OverflowError, pa.ArrowException):
        return repr(value)
