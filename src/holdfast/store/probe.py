"""Three operations by which a store shows that it runs operations as it should.

The conformance suite uses them on every store; they touch nothing but the key ("probe",).
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import NotFound
from holdfast.store.api import Txn, operation


@operation
def now(txn: Txn) -> int:
    """The exact store time of this commit."""
    txn.put(("probe", "now"), b"")
    return txn.now_ns


@operation
def twice(txn: Txn, n: int, names: list[str]) -> dict[str, Any]:
    """Add n two times over, reading back what it wrote, and answer with the count."""
    txn.add(("probe",), n)
    txn.add(("probe",), n)
    return {"n": txn.count(("probe",)), "names": names}


@operation
def refuse(txn: Txn, what: str) -> None:
    """Write something, then refuse: nothing of it may stay."""
    txn.put(("probe", "half"), b"x")
    raise NotFound(what=what)
