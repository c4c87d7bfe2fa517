"""Reused rows of a run: rows with an adopted outcome, read by the driver or by an executor from a
bundle.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from holdfast.ledger import runs
from holdfast.ledger.lineage import RunLineage
from holdfast.spark.run_data import RunInput
from holdfast.store.api import Store

# The seq in this run, the run that holds the outcome, and the seq in that run.
SOURCE_SCHEMA = pa.schema(
    [("_seq", pa.int64()), ("_from_run", pa.string()), ("_from_seq", pa.int64())]
)


def read_reused_rows(store: Store, record: runs.RunRecord, lo: int, hi: int) -> pa.Table:
    """Return the key columns of reused rows in [lo, hi) and the location of their outcomes, page by
    page.
    """
    source, ancestry = RunInput(store, record), RunLineage(store, record)
    key = list(record.key)
    keys = [source.schema.field(name) for name in key]
    schema = pa.schema([*keys, *SOURCE_SCHEMA])
    tables = [schema.empty_table()]
    for first in range(lo, hi, record.policy.page_rows):
        pointers = ancestry.adopted(first, min(first + record.policy.page_rows, hi))
        if not pointers:
            continue
        counts = [one.hi - one.lo for one in pointers]
        rows = source.rows([(one.lo, one.hi) for one in pointers], key)
        names = [pa.repeat(one.run, count) for one, count in zip(pointers, counts, strict=True)]
        columns = [
            pa.array(np.concatenate([np.arange(one.lo, one.hi) for one in pointers])),
            pa.concat_arrays(names),
            pa.array(
                np.concatenate(
                    [np.arange(one.from_lo, one.from_lo + one.hi - one.lo) for one in pointers]
                )
            ),
        ]
        tables.append(pa.Table.from_arrays([*rows.columns, *columns], schema=schema))
    return pa.concat_tables(tables)
