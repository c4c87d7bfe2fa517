"""Flow queries: one flow, its steps, its inbox, its published values, and its blockers."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast import codec
from holdfast.flows.model import (
    FlowBodyRow,
    FlowHeadRow,
    FlowId,
    decode_mail,
    get_body,
    get_head,
    keys_of,
    pack_int,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn


class FlowDetails(NamedTuple):
    seq: int
    body: FlowBodyRow
    head: FlowHeadRow
    result: bytes


def get_details(txn: Txn, universe: str, seq: int) -> FlowDetails:
    keys = keys_of(universe)
    body, head = get_body(txn, keys, seq), get_head(txn, keys, seq)
    result = blobs.get(txn, head.blob) if head.blob else head.result
    return FlowDetails(seq, body, head, result)


def find_by_key(txn: Txn, universe: str, name: str, key: str) -> FlowId | None:
    keys = keys_of(universe)
    packed = txn.get(keys.keys + tuples.pack((name, key)))
    if packed is None:
        return None
    seq = tuples.unpack_last_int(packed, 0)
    return FlowId(get_body(txn, keys, seq).generation, seq)


def arguments_of_key(txn: Txn, universe: str, name: str, key: str) -> bytes | None:
    """The encoded arguments with which the flow of a key was started. None if the key is free."""
    keys = keys_of(universe)
    packed = txn.get(keys.keys + tuples.pack((name, key)))
    if packed is None:
        return None
    body = get_body(txn, keys, tuples.unpack_last_int(packed, 0))
    return blobs.get(txn, body.blob) if body.blob else body.args


def list_mail(txn: Txn, universe: str, seq: int) -> list[tuple[str, Any]]:
    prefix = keys_of(universe).mail + pack_int(seq)
    found: list[tuple[str, Any]] = []
    for _, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        mail = decode_mail(row)
        value = blobs.get(txn, mail.blob) if mail.blob else mail.value
        found.append((mail.type, event_fields(value)))
    return found


def event_fields(value: bytes) -> Any:
    """The fields of an encoded event, as stored. The byte before them is the version of its type."""
    return codec.unpack(value[1:])


def published_values(txn: Txn, universe: str, seq: int) -> dict[str, Any]:
    prefix = keys_of(universe).published + pack_int(seq)
    found: dict[str, Any] = {}
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        name = tuples.unpack(key)[-1]
        assert isinstance(name, str)
        found[name] = codec.unpack(row)
    return found
