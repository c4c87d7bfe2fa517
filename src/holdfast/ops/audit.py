"""The audit log: which operator changed what, with which token. An entry commits together with its change.

Entries are appended in commit order and never changed. `holdfast audit` and `GET /v1/audit` list them.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.codec import Record
from holdfast.durable.validation import check_limit
from holdfast.store import tuples
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


class NumberedEntry(NamedTuple):
    number: int
    entry: AuditEntry


def list_entries(
    txn: Txn, universe: str, before: int | None = None, limit: int = 100
) -> list[NumberedEntry]:
    """Return entries below a number, newest first."""
    check_limit(limit)
    prefix = key_prefix(Space.AUDIT, universe)
    end = tuples.prefix_end(prefix) if before is None else prefix + tuples.pack_int(before)
    rows = txn.scan(prefix, end, limit, True)
    return [
        NumberedEntry(_last_int(key), codec.unpack_as(AuditEntry, packed)) for key, packed in rows
    ]


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
