"""Carried columns: input columns that are copied to the output beside the key and the results.

    carry="*"               all columns of the input but the key
    carry=["text", "lang"]  these

A run stores the text of the option in its configuration. `carried_names` resolves it to the columns of an
input. The values are those of the run's own input, also for rows with an adopted result. A file of an
earlier run is therefore kept only if its carried values are equal as well (`with_equal_values`). The
content hashes of the rows prove that if they cover the carried columns. Otherwise both inputs are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.ledger import runs
from holdfast.spark.errors import NotAStage
from holdfast.spark.run_data import RunInput, carried_names, decode_schema
from holdfast.spark.sinks.api import Same
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType

ALL_COLUMNS = "*"
COMPARE_ROWS = 65_536


def encode_carry(carry: Any) -> str:
    """Encode the option as it is stored; empty for no columns."""
    if carry == ALL_COLUMNS and isinstance(carry, str):
        return ALL_COLUMNS
    good = isinstance(carry, Sequence) and not isinstance(carry, str | bytes)
    if not good or not all(isinstance(name, str) for name in carry):
        raise NotAStage(what="carry", why='must be "*" or a list of input columns', found=carry)
    if len({name.lower() for name in carry}) < len(carry):
        raise NotAStage(what="carry", why="a column is named twice", found=list(carry))
    return json.dumps(list(carry)) if carry else ""


def find_carried_fields(df: DataFrame, key: Sequence[str], text: str) -> list[StructField]:
    """Return the carried columns of `df`. Refuse unknown columns."""
    names = df.columns
    if text not in ("", ALL_COLUMNS) and (
        unknown := [n for n in json.loads(text) if n not in names]
    ):
        raise NotAStage(what="carry", why="no such column", found=unknown, columns=names)
    return [df.schema[name] for name in carried_names(text, names, key)]


def check_carry(df: DataFrame, key: Sequence[str], text: str, result: StructType) -> None:
    """Refuse a carried column with the name of a result column, before any row is read or called."""
    results = {name.lower() for name in result.names}
    fields = find_carried_fields(df, key, text)
    if clashing := [field.name for field in fields if field.name.lower() in results]:
        why = "a carried column has the name of a result column; rename one of them"
        raise NotAStage(what="carry", why=why, found=clashing)


def with_equal_values(
    store: Store, record: runs.RunRecord, base: runs.RunRecord, same: Sequence[Same]
) -> list[Same]:
    """Return the parts of the ranges `same` with equal carried values in both runs."""
    names = _carried_names(record)
    known = set(names) <= set(record.match)
    known = known and (not base.base_run or set(names) <= set(base.match))
    if not names or known:
        return list(same)
    mine, theirs = decode_schema(record.input_schema), decode_schema(base.input_schema)
    if base.input_dropped or any(
        n not in theirs.names or mine.field(n).type != theirs.field(n).type for n in names
    ):
        return []
    sources = RunInput(store, record), RunInput(store, base)
    return [piece for one in same for piece in _equal_ranges(*sources, one, names)]


def _carried_names(record: runs.RunRecord) -> list[str]:
    text = record.config.get("carry", "")
    return carried_names(text, decode_schema(record.input_schema).names, record.key) if text else []


def _equal_ranges(mine: RunInput, theirs: RunInput, one: Same, names: list[str]) -> Iterator[Same]:
    shift = one.base_lo - one.lo
    begun = -1
    for lo in range(one.lo, one.hi, COMPARE_ROWS):
        hi = min(lo + COMPARE_ROWS, one.hi)
        ours = mine.rows([(lo, hi)], names)
        others = theirs.rows([(lo + shift, hi + shift)], names)
        for at, equal in enumerate(_equal_rows(ours, others), lo):
            if equal and begun < 0:
                begun = at
            elif not equal and begun >= 0:
                yield Same(begun, at, begun + shift)
                begun = -1
    if begun >= 0:
        yield Same(begun, one.hi, begun + shift)


def _equal_rows(ours: pa.Table, others: pa.Table) -> list[bool]:
    if ours.equals(others):
        return [True] * ours.num_rows
    equal = [True] * ours.num_rows
    for mine, theirs in zip(ours.columns, others.columns, strict=True):
        if not mine.equals(theirs):
            pairs = zip(equal, mine.to_pylist(), theirs.to_pylist(), strict=True)
            equal = [equal_so_far and a == b for equal_so_far, a, b in pairs]
    return equal
