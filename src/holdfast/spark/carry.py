"""Carry: input columns that go to the output beside the key and the results.

    carry="*"               all columns of the input but the key
    carry=["text", "lang"]  these

A run keeps the text of the option in its configuration; `carried` gives the columns that it means for
an input. The values are those of the input of the run itself, also for a row whose result an earlier
run had. So a file of an earlier run stays only if its carried values are the same as well (`unchanged`),
which the hashes of the rows tell if they are over the carried columns, and the two inputs if not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.ledger import runs
from holdfast.spark.errors import NotAStage
from holdfast.spark.journal import Input, carried, schema_of
from holdfast.spark.sinks.api import Same
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType

ALL = "*"
LOOK_ROWS = 65_536


def carry_text(carry: Any) -> str:
    """The option as it is kept; empty for no columns."""
    if carry == ALL and isinstance(carry, str):
        return ALL
    good = isinstance(carry, Sequence) and not isinstance(carry, str | bytes)
    if not good or not all(isinstance(name, str) for name in carry):
        raise NotAStage(what="carry", why='"*" or a list of input columns', found=carry)
    if len({name.lower() for name in carry}) < len(carry):
        raise NotAStage(what="carry", why="a column is named twice", found=list(carry))
    return json.dumps(list(carry)) if carry else ""


def carried_fields(df: DataFrame, key: Sequence[str], text: str) -> list[StructField]:
    """The columns of `df` that are carried; one that is not there is refused."""
    names = df.columns
    if text not in ("", ALL) and (unknown := [n for n in json.loads(text) if n not in names]):
        raise NotAStage(what="carry", why="no such column", found=unknown, columns=names)
    return [df.schema[name] for name in carried(text, names, key)]


def check_carry(df: DataFrame, key: Sequence[str], text: str, result: StructType) -> None:
    """Refuse a carried column that has the name of a result, before anything is read or called."""
    results = {name.lower() for name in result.names}
    fields = carried_fields(df, key, text)
    if taken := [field.name for field in fields if field.name.lower() in results]:
        why = "a carried column has the name of a result column; rename one of them"
        raise NotAStage(what="carry", why=why, found=taken)


def unchanged(
    store: Store, record: runs.RunRecord, base: runs.RunRecord, same: Sequence[Same]
) -> list[Same]:
    """Those of `same`, cut where needed, whose carried values are the same in both runs."""
    names = _columns(record)
    known = set(names) <= set(record.match)
    known = known and (not base.base_run or set(names) <= set(base.match))
    if not names or known:
        return list(same)
    mine, theirs = schema_of(record.input_schema), schema_of(base.input_schema)
    if base.input_dropped or any(
        n not in theirs.names or mine.field(n).type != theirs.field(n).type for n in names
    ):
        return []
    sources = Input(store, record), Input(store, base)
    return [piece for one in same for piece in _equal_pieces(*sources, one, names)]


def _columns(record: runs.RunRecord) -> list[str]:
    text = record.config.get("carry", "")
    return carried(text, schema_of(record.input_schema).names, record.key) if text else []


def _equal_pieces(mine: Input, theirs: Input, one: Same, names: list[str]) -> Iterator[Same]:
    shift = one.base_lo - one.lo
    begun = -1
    for lo in range(one.lo, one.hi, LOOK_ROWS):
        hi = min(lo + LOOK_ROWS, one.hi)
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
            equal = [so_far and a == b for so_far, a, b in pairs]
    return equal
