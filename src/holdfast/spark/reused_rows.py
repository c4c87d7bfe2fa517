"""Rows of a run whose outcome an earlier run had: read by the driver, or by an executor from a bundle."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from holdfast.ledger import runs
from holdfast.ledger.lineage import Ancestry
from holdfast.spark.journal import Input
from holdfast.store.api import Store

# The number of a row here, the run that has its outcome, and its number there.
PLACES = pa.schema([("_seq", pa.int64()), ("_from_run", pa.string()), ("_from_seq", pa.int64())])


def reused_between(store: Store, record: runs.RunRecord, lo: int, hi: int) -> pa.Table:
    """Key columns of such rows in [lo, hi), and where their outcomes lie. Page by page."""
    source, ancestry = Input(store, record), Ancestry(store, record)
    key = list(record.key)
    keys = [source.schema.field(name) for name in key]
    schema = pa.schema([*keys, *PLACES])
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
