"""Row sizes: the bytes of a row, by its values alone.

Files and row groups of the output are cut by these sizes. A size depends only on the values of the row,
not on its batch, its offset or the buffers behind it. So the cuts are the same after every fault and on
every machine.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

OFFSET_BYTES = 4

RowSizes = NDArray[np.int64]


def row_width(schema: pa.Schema) -> int | None:
    """Return the bytes of every row, if all columns have a fixed width."""
    widths = [_type_width(field.type) for field in schema]
    return sum(width for width in widths if width is not None) if None not in widths else None


def row_sizes(table: pa.Table | pa.RecordBatch) -> RowSizes:
    """Return the bytes of each row of `table`."""
    sizes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        width = _type_width(column.type)
        if width is not None:
            sizes += width
        elif isinstance(column, pa.ChunkedArray):
            parts = [_array_sizes(chunk) for chunk in column.chunks]
            sizes += np.concatenate(parts) if parts else 0
        else:
            sizes += _array_sizes(column)
    return sizes


def _type_width(kind: pa.DataType) -> int | None:
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return 1
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        return None
    try:
        return int(kind.bit_width) // 8
    except ValueError:  # text and the like
        return None


def _array_sizes(array: pa.Array) -> RowSizes:
    kind = array.type
    width = _type_width(kind)
    if width is not None:
        return np.full(len(array), width, np.int64)
    if isinstance(array, pa.ExtensionArray):
        return _array_sizes(array.storage)
    if pa.types.is_map(kind):
        inner = pa.struct([kind.key_field, kind.item_field])
        return _array_sizes(array.cast(pa.list_(pa.field("entries", inner, nullable=False))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.concatenate([[0], np.cumsum(_array_sizes(array.values))])
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        sizes = ends[offsets[1:]] - ends[offsets[:-1]]
    elif pa.types.is_struct(kind):
        sizes = np.zeros(len(array), np.int64)
        for child in array.flatten():
            sizes += _array_sizes(child)
        return sizes
    elif pa.types.is_fixed_size_list(kind):
        count = np.full(len(array), kind.list_size, np.int64)
        inner = _array_sizes(array.values)[: count.sum()]
        sizes = inner.reshape(len(array), kind.list_size).sum(axis=1)
    else:
        lengths = pc.fill_null(pc.binary_length(array), 0)
        sizes = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if array.null_count:  # bytes behind a null are not a value
        sizes = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, sizes)
    result: RowSizes = sizes + OFFSET_BYTES
    return result
