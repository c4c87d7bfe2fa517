"""Checks of the output of a stage with paid calls: the answers, their order, and the bytes of the files."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.spark.sinks.parquet import read_parts
from tests.spark.paid_calls import answer


class WrongOutput(Exception):
    """The output of a stage is wrong."""


def output_of(path: Path) -> pa.Table:
    """All rows that a stage committed to this output."""
    manifest = read_parts(path)
    if not manifest.complete:
        raise WrongOutput(f"{path.name}: the manifest is not complete")
    return pa.concat_tables(map(pq.read_table, manifest.files))


def check_answers(name: str, found: pa.Table, wanted: list[int]) -> None:
    keys = keys_of(found)
    if keys != wanted:
        missing, extra = set(wanted) - set(keys), len(keys) - len(set(keys))
        raise WrongOutput(f"{name}: {len(missing)} missing, {extra} twice, or not in order")
    if found.column("answer").to_pylist() != [answer(key) for key in keys]:
        raise WrongOutput(f"{name}: wrong answers")


def part_digests(output: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.glob("part-*.parquet"))
    }


def keys_of(table: pa.Table) -> list[int]:
    keys: list[int] = table.column("id").to_pylist()
    return keys
