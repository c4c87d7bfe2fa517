"""Canonical bytes and hashes.

Stored records are msgpack. `pack` is deterministic: struct fields in their declared order, plain
dicts sorted by key, so equal values have equal bytes and may be hashed. `unpack` is strict: a
record that does not fit its type is `Invalid`, never half read.

`pack` writes a set in the order of its values, which works for values of one plain type. `pack_value`
is for values that users give: it finds sets of anything else, such as sets of sets, whose order depends
on the hash seed of the process, and writes their elements in the order of their bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import hashlib
import os
import threading
import uuid
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

import msgspec

from holdfast.errors import Invalid

T = TypeVar("T")

HASH_BYTES = 32
# How deep lists, dicts and records may be nested in a message.
DEPTH_MAX = 100
# ... and how deep a value is looked into before that is known: a list that holds itself has no end.
_LEVELS_MAX = 1000


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
# Values without anything inside.
_SCALARS: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, str, bytes, bytearray, datetime.datetime, datetime.date,
        datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal,
    }
)  # fmt: skip
# Those that any two values of one type can be compared by. Numbers that are not a number cannot.
_ORDERED: frozenset[type] = frozenset(
    {int, str, bytes, datetime.date, datetime.timedelta, uuid.UUID}
)


def pack_value(value: Any) -> bytes:
    """The bytes of a value that a user gave: equal values have equal bytes, sets of sets too."""
    if type(value) in _SCALARS or not _needs_order(value):
        return pack(value)
    return pack(_with_order(value))


def _needs_order(value: Any) -> bool:
    """Whether there is a set in it that cannot be written in the order of its values. All values of a level
    are looked at together: that is several times as fast as one by one."""
    level: list[Any] = [value]
    for _ in range(_LEVELS_MAX):
        inside: list[Any] = []
        for kind in {type(one) for one in level} - _SCALARS:
            some = [one for one in level if type(one) is kind]
            if issubclass(kind, dict):
                inside += chain.from_iterable(map(dict.values, some))
            elif issubclass(kind, list | tuple):
                inside += chain.from_iterable(some)
            elif issubclass(kind, set | frozenset):
                if not all(map(_has_order, some)):
                    return True
            else:
                for name in _field_names(kind):
                    inside += [getattr(one, name, None) for one in some]
        if not inside:
            return False
        level = inside
    raise RecursionError("values are nested too deep")


def _has_order(values: set[Any] | frozenset[Any]) -> bool:
    kinds = set(map(type, values))
    if kinds == {float}:
        return all(value == value for value in values)
    return len(kinds) < 2 and kinds <= _ORDERED


def _field_names(kind: type[Any]) -> Iterable[str]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [one.name for one in getattr(kind, "__attrs_attrs__", ())]


def _with_order(value: Any) -> Any:
    """The value with lists of packed elements in the place of such sets."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, set | frozenset):
        if _has_order(value):
            return value
        return [msgspec.Raw(one) for one in sorted(pack(_with_order(one)) for one in value)]
    if isinstance(value, dict):
        return {key: _with_order(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_order(one) for one in value]
    names = [name for name in _field_names(type(value)) if hasattr(value, name)]
    if not names:
        return value
    made = copy.copy(value)
    put = msgspec.structs.force_setattr if isinstance(made, msgspec.Struct) else object.__setattr__
    for name in names:
        put(made, name, _with_order(getattr(value, name)))
    return made


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
