"""Keys: the order in which rows get their seq, and what is wrong with the keys of an input.

The stated order. Rows are numbered 0, 1, 2, … in the ascending order of their key, column by column
in the order the key names them:

- whole numbers, decimals, dates, timestamps: by value (a timestamp by its instant, not by what a
  clock on some wall shows);
- strings and binary: by their bytes, unsigned, a prefix before what it is a prefix of; for strings
  in UTF-8 that is the order of code points, and how Spark sorts a string without a collation;
- booleans: false before true.

Keys are unique and never null, so the order is total and a row's seq depends on the input alone,
not on how it was partitioned. Floats are refused: NaN and the two zeros have no agreed order.

A *comparable* is a key as plain Python values (a tuple of int, bytes, Decimal, bool) that Python
orders as above. Timestamps and dates become integers on the way: two aware datetimes of one zone
compare by wall clock in Python, which is wrong in the hour a clock is set back.

Everything here is Arrow, nothing is Spark: executors, driver and ledger service share it.
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
    hint = "a key names one row; drop the duplicates or add a column to the key. `found` counts until the search stopped"


def columns(batch: pa.RecordBatch, key: Sequence[str]) -> list[pa.Array]:
    """The key columns in a form that both Arrow and (as Python values) `tuple` order as stated."""
    return [_plain(batch.column(name)) for name in key]


def nulls(keyed: Sequence[pa.Array]) -> int:
    """How many rows lack a part of their key, at least: the most of any one column."""
    return max(int(column.null_count) for column in keyed)


def ascends(keyed: Sequence[pa.Array]) -> bool:
    """Strictly: in order and without duplicates. Nulls are not looked for."""
    if len(keyed[0]) < 2:
        return True
    less, same = _neighbours(keyed[0])
    for column in keyed[1:]:
        inner, equal = _neighbours(column)
        less = pc.or_(less, pc.and_(same(), inner))
        same = _both(same, equal)
    return bool(pc.all(less).as_py())


def order(keyed: Sequence[pa.Array]) -> pa.Array:
    """The row numbers in ascending order of the key."""
    if len(keyed) == 1:
        return pc.array_sort_indices(keyed[0])
    names = [f"k{at}" for at in range(len(keyed))]
    table = pa.RecordBatch.from_arrays(list(keyed), names=names)
    return pc.sort_indices(table, sort_keys=[(name, "ascending") for name in names])


def repeats(keyed: Sequence[pa.Array]) -> pa.Array:
    """Of ordered rows: the numbers of those that have the key of the row before them."""
    same = reduce(pc.and_, (_neighbours(column)[1]() for column in keyed))
    return pc.add(pc.indices_nonzero(same), 1)


def examples(batch: pa.RecordBatch, key: Sequence[str], rows: pa.Array) -> list[str]:
    """The keys of up to `EXAMPLES_MAX` of these rows, for people."""
    taken = [batch.column(name).take(rows[:EXAMPLES_MAX]) for name in key]
    shown = [[_shown(value) for value in column] for column in taken]
    return [", ".join(parts)[:EXAMPLE_CHARS_MAX] for parts in zip(*shown, strict=True)]


def at(keyed: Sequence[pa.Array], row: int) -> Comparable:
    return tuple(column[row].as_py() for column in keyed)


def lower_bound(keyed: Sequence[pa.Array], bound: Comparable, lo: int = 0) -> int:
    """Of ordered rows from `lo` on: the first whose key is not below `bound`."""
    hi = len(keyed[0])
    while lo < hi:
        middle = (lo + hi) // 2
        if at(keyed, middle) < bound:
            lo = middle + 1
        else:
            hi = middle
    return lo


def _plain(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return column.view(pa.int64())
    if pa.types.is_date32(kind):
        return column.view(pa.int32())
    if _is_text(kind):
        # Text from Spark is not always valid UTF-8; its bytes always are comparable.
        return column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    return column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _neighbours(column: pa.Array) -> tuple[pa.Array, Any]:
    """For each row but the last: is it below the next, and (on demand) is it the same as the next."""
    these, those = column[:-1], column[1:]
    return pc.less(these, those), lambda: pc.equal(these, those)


def _both(one: Any, other: Any) -> Any:
    return lambda: pc.and_(one(), other())


def _shown(value: pa.Scalar) -> str:
    try:
        return str(value.as_py())
    except (ValueError, OverflowError, pa.ArrowException):
        return repr(value)
