"""The bytes of unreceived events. The load limit `bytes_in_flight` counts those of open flows."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.flows.model import FlowKeys, MailRow, decode_mail, pack_int
from holdfast.store import blobs
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows


def sum_of(txn: Txn, events: Iterable[MailRow], since_ns: int) -> int:
    """Return the bytes of the counted events that were sent since a time."""
    return sum(_size(txn, mail) for mail in events if mail.counted and mail.sent_ns >= since_ns)


def of_flow(txn: Txn, keys: FlowKeys, seq: int, since_ns: int) -> int:
    """Return the bytes of the events in the inbox of a flow. Reads every event."""
    rows = iter_rows(txn, keys.mail + pack_int(seq))
    return sum_of(txn, (decode_mail(row) for _, row in rows), since_ns)


def _size(txn: Txn, mail: MailRow) -> int:
    return len(blobs.get(txn, mail.blob)) if mail.blob else len(mail.value)
