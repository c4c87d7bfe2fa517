"""Canonical bytes and hashes.

Stored records are msgpack. `pack` is deterministic: struct fields in their declared order, plain
dicts sorted by key, so equal values have equal bytes and may be hashed. `unpack` is strict: a
record that does not fit its type is `Invalid`, never half read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any, TypeVar

import msgspec

from holdfast.errors import Invalid

T = TypeVar("T")

HASH_BYTES = 32
# How deep lists, dicts and records may be nested in a message.
DEPTH_MAX = 100


def _plain(value: Any) -> Any:
    """A number of a class of its own, as the seq that `send` answers with, is a number."""
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encoder = msgspec.msgpack.Encoder(order="sorted", enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_typed: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.RLock()
# Types that `convert` has seen: those of declarations, so they are few.
_used: dict[int, Any] = {}


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False, gc=False):
    """A stored value. Fields are positional on disk: add new ones at the end, with a default."""


# What a decoder raises for bytes that are no record: text that is not UTF-8, and values that are nested
# too deep, have errors of Python's own.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# ... and an encoder, for values that cannot be written.
UNWRITABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

pack = _encoder.encode


def unpack(data: bytes) -> Any:
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise Invalid(what="record", why=str(error)) from None


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A reusable decoder for hot paths; `unpack_as` is the checked form."""
    found = _typed.get(kind)
    if found is None:
        found = _typed[kind] = new_decoder(kind)
    return found


def new_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """One thread at a time: the library keeps what it knows of a record's type with the type, and shows
    it to other threads before it is complete, who die of it."""
    with _making:
        return msgspec.msgpack.Decoder(kind)


def new_json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _making:
        return msgspec.json.Decoder(kind)


def unpack_as(kind: type[T], data: bytes) -> T:
    try:
        return decoder(kind).decode(data)
    except UNREADABLE as error:
        raise Invalid(what=kind.__name__, why=str(error)) from None


def check_depth(what: str, packed: bytes, **fields: Any) -> None:
    """Invalid if values are nested deeper than `DEPTH_MAX`: whoever reads them may have less room than
    whoever wrote them. Each level has a byte at least, so what is short need not be looked at."""
    if len(packed) <= DEPTH_MAX:
        return
    level: list[Any] = [unpack(packed)]
    for _ in range(DEPTH_MAX + 1):
        level = [
            one
            for nest in level
            if type(nest) in (list, dict)
            for one in (nest.values() if type(nest) is dict else nest)
            if type(one) in (list, dict)
        ]
        if not level:
            return
    raise Invalid(what=what, why="nested too deep", depth_max=DEPTH_MAX, **fields)


def convert(value: Any, kind: Any) -> Any:
    """`msgspec.convert`; the first time that a type is used, no other thread makes anything of it."""
    # By its identity: not every annotation has a hash. Those kept here do not go.
    if id(kind) in _used:
        return msgspec.convert(value, kind)
    with _making:
        try:
            return msgspec.convert(value, kind)
        finally:
            _used[id(kind)] = kind


def digest(*parts: bytes) -> bytes:
    """SHA-256 over parts, each preceded by its length, so that no two lists collide."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def digest_of(value: Any) -> bytes:
    return hashlib.sha256(pack(value)).digest()


def _forget_lock() -> None:
    """A thread that held it is not there in a forked child."""
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)
