"""Test operations for the conformance suite of stores. They use only keys below ("probe",).

The shipped writer does not know them. A test that needs them uses the fixture `probe_writers`.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import NotFound
from holdfast.store.api import Txn, operation


@operation("probe.now")
def now(txn: Txn) -> int:
    """The exact store time of this commit."""
    txn.put(("probe", "now"), b"")
    return txn.now_ns


@operation("probe.twice")
def twice(txn: Txn, n: int, names: list[str]) -> dict[str, Any]:
    """Add n twice, read the counter back and return it."""
    txn.add(("probe",), n)
    txn.add(("probe",), n)
    return {"n": txn.count(("probe",)), "names": names}


@operation("probe.keywords")
def keywords(txn: Txn, name: str, *, first: int, second: int = 7) -> list[Any]:
    """Return the arguments."""
    return [name, first, second]


@operation("probe.refuse")
def refuse(txn: Txn, what: str) -> None:
    """Write a row, then raise: the commit must not keep the row."""
    txn.put(("probe", "half"), b"x")
    raise NotFound(what=what)
