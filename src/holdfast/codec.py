"""Canonical encoding (msgpack) and hashes.

`pack` is deterministic: struct fields in their declared order, plain dicts sorted by key. Equal values
have equal bytes and can be hashed. `unpack` is strict: a record that does not fit its type is
`Invalid`, never partially decoded.

`pack` sorts a set by its values, which works for values of one plain type. `pack_value` encodes user
values. Other sets, such as sets of sets, iterate in an order that depends on the hash seed of the
process. `pack_value` sorts the elements of such sets by their encoded bytes.

pydantic models are encoded as dicts of their fields and validated by their class when they are decoded. pydantic is
not imported here: a class that is a model exists only in a program that has imported it.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import hashlib
import os
import sys
import threading
import uuid
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

import msgspec

from holdfast import failpoints
from holdfast.errors import Invalid

T = TypeVar("T")

HASH_BYTES = 32
# Maximum nesting of lists, dicts and records in a message.
DEPTH_MAX = 100
# Maximum depth of the search for unordered sets. It bounds a list that contains itself.
_SEARCH_DEPTH_MAX = 1000


def encode_other(value: Any) -> Any:
    """The encoding of a value of a class that msgspec does not support: a subclass of int, such as the seq that
    `send` returns, or a pydantic model."""
    if isinstance(value, int):
        return int(value)
    if is_model(type(value)):
        return dump_model(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def _decode_other(kind: Any, value: Any) -> Any:
    """Decode a value of a class that msgspec does not support. msgspec then checks that it is an instance."""
    if not is_model(kind) or isinstance(value, kind):
        return value
    by_name = {"by_name": True} if _can_validate_by_name() else {}
    try:
        # Not strict: msgpack has no tuples, UUIDs or decimals.
        return kind.model_validate(value, strict=False, **by_name)
    except ValueError as error:
        raise ValueError(_validation_text(kind, error)) from None


def is_model(kind: Any) -> bool:
    """Whether a class is a pydantic model."""
    return (
        isinstance(kind, type)
        and hasattr(kind, "__pydantic_validator__")
        and hasattr(kind, "model_validate")
    )


def model_field_types(kind: Any) -> dict[str, Any]:
    """The annotations of the fields of a pydantic model, without forward references."""
    kind.model_rebuild()
    return {name: field.annotation for name, field in kind.model_fields.items()}


def dump_model(value: Any) -> Any:
    """The fields of a pydantic model, as its validation accepts them."""
    return value.model_dump(round_trip=True, warnings=False, by_alias=not _can_validate_by_name())


def _can_validate_by_name() -> bool:
    """Whether validation accepts the names of fields that have aliases (pydantic 2.11)."""
    major, minor = sys.modules["pydantic"].VERSION.split(".")[:2]
    return (int(major), int(minor)) >= (2, 11)


def _validation_text(kind: type, error: Any) -> str:
    """The errors of a pydantic validation in one line."""
    errors = error.errors(include_url=False) if hasattr(error, "errors") else ()
    texts = [f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in errors]
    return f"{kind.__name__}: {'; '.join(texts) or error}"


_encoder = msgspec.msgpack.Encoder(order="sorted", enc_hook=encode_other)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_type_lock = threading.RLock()
# Types that `convert` has used, by id. They come from declarations, so their number is small.
_converted_types: dict[int, Any] = {}
_types_with_models: dict[int, Any] = {}
# The attributes of msgspec's type information that hold the types inside a type.
_PARTS_OF_TYPES = ("fields", "types", "item_types", "item_type", "key_type", "value_type", "type")


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False, gc=False):
    """A stored value. Fields are positional on disk: add new ones at the end, with a default."""


# Exceptions of a decoder for bytes that are not a valid record. Invalid UTF-8 and excessive nesting
# raise built-in exceptions.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Exceptions of an encoder for values that cannot be encoded.
ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

pack = _encoder.encode
# Types without nested values.
SCALAR_TYPES: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, str, bytes, bytearray, datetime.datetime, datetime.date,
        datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal,
    }
)  # fmt: skip
# Types with a total order. Floats are checked separately because of NaN.
_ORDERABLE_TYPES: frozenset[type] = frozenset(
    {int, str, bytes, datetime.date, datetime.timedelta, uuid.UUID}
)


def pack_value(value: Any) -> bytes:
    """Encode a user value. Equal values have equal bytes, including sets of sets."""
    if type(value) in SCALAR_TYPES or not _has_unordered_set(value):
        return pack(value)
    return pack(_with_sorted_sets(value))


def _has_unordered_set(value: Any) -> bool:
    """Whether the value contains a set whose elements have no total order. The search handles all values
    of a nesting level together, which is several times faster than one by one."""
    level: list[Any] = [value]
    for _ in range(_SEARCH_DEPTH_MAX):
        nested: list[Any] = []
        for kind in {type(item) for item in level} - SCALAR_TYPES:
            values = [item for item in level if type(item) is kind]
            if issubclass(kind, dict):
                nested += chain.from_iterable(map(dict.values, values))
            elif issubclass(kind, list | tuple):
                nested += chain.from_iterable(values)
            elif issubclass(kind, set | frozenset):
                if not all(map(_is_orderable, values)):
                    return True
            else:
                for name in field_names(kind):
                    nested += [getattr(item, name, None) for item in values]
        if not nested:
            return False
        level = nested
    raise RecursionError("values are nested too deep")


def _is_orderable(values: set[Any] | frozenset[Any]) -> bool:
    kinds = set(map(type, values))
    if kinds == {float}:
        return all(value == value for value in values)
    return len(kinds) < 2 and kinds <= _ORDERABLE_TYPES


def field_names(kind: type[Any]) -> Iterable[str]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if is_model(kind):
        return list(kind.model_fields)
    return [attribute.name for attribute in getattr(kind, "__attrs_attrs__", ())]


def _with_sorted_sets(value: Any) -> Any:
    """Copy the value with each unordered set replaced by a sorted list of its encoded elements."""
    if type(value) in SCALAR_TYPES:
        return value
    if isinstance(value, set | frozenset):
        if _is_orderable(value):
            return value
        return [
            msgspec.Raw(item) for item in sorted(pack(_with_sorted_sets(item)) for item in value)
        ]
    if isinstance(value, dict):
        return {key: _with_sorted_sets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_sorted_sets(item) for item in value]
    if is_model(type(value)):
        return _with_sorted_sets(dump_model(value))
    names = [name for name in field_names(type(value)) if hasattr(value, name)]
    if not names:
        return value
    copied = copy.copy(value)
    set_field = (
        msgspec.structs.force_setattr if isinstance(copied, msgspec.Struct) else object.__setattr__
    )
    for name in names:
        set_field(copied, name, _with_sorted_sets(getattr(value, name)))
    return copied


def unpack(data: bytes) -> Any:
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS as error:
        if data[:1] == VERSIONS_MARK:
            return unpack(split_versions(data)[1])
        raise Invalid(what="record", why=str(error)) from None


# The first byte of a value that is stored with the versions of its classes. No msgpack value begins with it.
VERSIONS_MARK = b"\xc1"
_LENGTH_BYTES = 2


def versions_prefix(versions: dict[str, int]) -> bytes:
    """Return the bytes before a value that state the versions of the classes inside it."""
    packed = pack(versions)
    return VERSIONS_MARK + len(packed).to_bytes(_LENGTH_BYTES, "big") + packed


def split_versions(data: bytes) -> tuple[dict[str, int], bytes]:
    """Return the versions of the classes inside a stored value, and the value itself."""
    if data[:1] != VERSIONS_MARK:
        return {}, data
    start = 1 + _LENGTH_BYTES
    end = start + int.from_bytes(data[1:start], "big")
    body = data[end:]
    if body[:1] == VERSIONS_MARK:
        raise Invalid(what="record", why="its version prefix occurs twice")
    return unpack_as(dict[str, int], data[start:end]), body


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the cached decoder of a type, for hot paths. `unpack_as` is the checked form."""
    cached = _decoders.get(kind)
    if cached is None:
        cached = _decoders[kind] = new_decoder(kind)
    return cached


def new_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Create a decoder under a lock. msgspec caches type information on the record type and publishes it
    before it is complete, which crashes other threads."""
    with _type_lock:
        return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


def new_json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _type_lock:
        return msgspec.json.Decoder(kind, dec_hook=_decode_other)


def unpack_as(kind: type[T], data: bytes) -> T:
    try:
        return decoder(kind).decode(data)
    except DECODE_ERRORS as error:
        raise Invalid(what=kind.__name__, why=str(error)) from None


def check_depth(what: str, packed: bytes, **fields: Any) -> None:
    """Raise Invalid if values are nested deeper than `DEPTH_MAX`. A reader may have a smaller stack than
    the writer. Each level takes at least one byte, so short data needs no check."""
    if len(packed) <= DEPTH_MAX:
        return
    level: list[Any] = [unpack(packed)]
    for _ in range(DEPTH_MAX + 1):
        level = [
            item
            for container in level
            if type(container) in (list, dict)
            for item in (container.values() if type(container) is dict else container)
            if type(item) in (list, dict)
        ]
        if not level:
            return
    raise Invalid(what=what, why="nested too deep", depth_max=DEPTH_MAX, **fields)


def convert(value: Any, kind: Any) -> Any:
    """Call `msgspec.convert`. The first use of a type holds the lock of `new_decoder`."""
    if failpoints.armed:
        failpoints.hit("codec.convert", kind)
    # Keyed by id, because not every annotation is hashable. The dict keeps the types alive.
    if id(kind) in _converted_types:
        return msgspec.convert(value, kind)
    if id(kind) in _types_with_models:
        return msgspec.convert(value, kind, dec_hook=_decode_other)
    with _type_lock:
        try:
            return msgspec.convert(value, kind, dec_hook=_decode_other)
        finally:
            # A call with a hook takes twice the time.
            known = _types_with_models if _may_contain_model(kind) else _converted_types
            known[id(kind)] = kind


def _may_contain_model(kind: Any) -> bool:
    if "pydantic" not in sys.modules:
        return False
    from msgspec import inspect as types

    try:
        stack: list[Any] = [types.type_info(kind)]
    except Exception:
        return True
    seen: set[int] = set()
    while stack:
        info = stack.pop()
        if isinstance(info, types.CustomType) and is_model(info.cls):
            return True
        if id(info) in seen:
            continue
        seen.add(id(info))
        parts = [getattr(info, name, None) for name in _PARTS_OF_TYPES]
        for part in parts:
            items = part if isinstance(part, tuple) else (part,)
            stack += [item for item in items if isinstance(item, types.Type | types.Field)]
    return False


def digest(*parts: bytes) -> bytes:
    """SHA-256 over parts. Each part is preceded by its length, so that two different lists never collide."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def digest_of(value: Any) -> bytes:
    return hashlib.sha256(pack(value)).digest()


def _reset_lock_in_child() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _type_lock
    _type_lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_lock_in_child)
