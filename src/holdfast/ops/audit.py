"""The audit log: which operator changed what, with which token. An entry commits together with its change.

Entries are appended in commit order and never changed. `holdfast audit` and `GET /v1/audit` list them.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.codec import Record
from holdfast.store.api import Deferred, Txn
from holdfast.store.schema import Space, key_prefix


class AuditEntry(Record, frozen=True):
    at_ns: int
    actor: str
    action: str
    subject: str
    detail: str = ""


def record(
    txn: Txn, universe: str, actor: str, action: str, subject: str, detail: str = ""
) -> Deferred[int]:
    """Append an entry in this transaction."""
    entry = AuditEntry(SYSTEM.wall_ns(), actor, action, subject, detail)
    return txn.append(key_prefix(Space.AUDIT, universe), codec.pack(entry))
