"""The index of flows by name: a row for each flow, and a mark that the index has every flow of its universe.

The commit that starts the first flow of a universe writes the mark. An older version wrote no rows, so a universe with
its flows has no mark until `holdfast store rebuild` writes rows and mark. The mark also states that the dead letter of
each failed compensation has its row (`compensation_dead_letters`).
"""

from __future__ import annotations

from functools import lru_cache

from holdfast.store import schema, tuples
from holdfast.store.api import Txn


@lru_cache(1024)
def prefix_of(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.FLOW, universe, "fn")


def row_key(universe: str, name: str, seq: int) -> bytes:
    return prefix_of(universe) + tuples.pack((name, seq))


def mark_key(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.FLOW, universe, "fnc")


def add(txn: Txn, universe: str, name: str, seq: int) -> None:
    txn.put(row_key(universe, name, seq), b"")
    if seq == 1:
        txn.put(mark_key(universe), b"")


def remove(txn: Txn, universe: str, name: str, seq: int) -> None:
    txn.delete(row_key(universe, name, seq))


def is_complete(txn: Txn, universe: str) -> bool:
    return txn.get(mark_key(universe)) is not None
