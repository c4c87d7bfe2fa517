"""Canonical bytes and hashes.

Stored records are msgpack. `pack` is deterministic: struct fields in their declared order, plain
dicts sorted by key, so equal values have equal bytes and may be hashed. `unpack` is strict: a
record that does not fit its type is `Invalid`, never half read.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from holdfast.errors import Invalid

T = TypeVar("T")

HASH_BYTES = 32

_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_typed: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False, gc=False):
    """A stored value. Fields are positional on disk: add new ones at the end, with a default."""


pack = _encoder.encode


def unpack(data: bytes) -> Any:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Invalid(what="record", why=str(error)) from None


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A reusable decoder for hot paths; `unpack_as` is the checked form."""
    found = _typed.get(kind)
    if found is None:
        found = _typed[kind] = msgspec.msgpack.Decoder(kind)
    return found


def unpack_as(kind: type[T], data: bytes) -> T:
    try:
        return decoder(kind).decode(data)
    except msgspec.MsgspecError as error:
        raise Invalid(what=kind.__name__, why=str(error)) from None


def digest(*parts: bytes) -> bytes:
    """SHA-256 over parts, each preceded by its length, so that no two lists collide."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def digest_of(value: Any) -> bytes:
    return hashlib.sha256(pack(value)).digest()
