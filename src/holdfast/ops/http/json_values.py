"""JSON values of the HTTP API: typed decoding with size and depth limits, and conversion to stored values.

Arguments and results are msgpack in the store and JSON on the wire. Values that JSON cannot represent are
converted: bytes to base64, map keys to strings, unknown types to an object with their name. A number that
exceeds 64 bits is rejected, because other readers would decode it differently.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ops.http.problem import BadRequest

DEPTH_MAX = 64
# The most lists, maps and members in a body. Small ones need a hundred times their text size in memory, and
# decoding them holds the GIL.
PARTS_MAX = 200_000

T = TypeVar("T")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class TooDeep(Invalid):
    code = "too_deep"
    hint = f"values may be nested up to {DEPTH_MAX} levels"


class TooManyParts(Invalid):
    code = "too_many_parts"
    hint = f"a request may have up to {PARTS_MAX:,} lists, maps and members: send smaller batches, or text"


class RequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base class of request bodies. Unknown fields are rejected."""


def decode(kind: type[T], body: bytes) -> T:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = codec.new_json_decoder(kind)
    brackets = body.count(b"[") + body.count(b"{")
    if brackets + body.count(b",") > PARTS_MAX and _count_parts(body) > PARTS_MAX:
        raise TooManyParts(what="body", max=PARTS_MAX)
    try:
        decoded: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(what="body", why=str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(what="body", why=str(error)) from None
    except RecursionError:
        raise TooDeep(what="body", max=DEPTH_MAX) from None
    # Each level needs a bracket, so a body with few brackets cannot be too deep.
    if brackets > DEPTH_MAX:
        _check_depth([decoded])
    return decoded


def pack_json(what: str, value: Any) -> bytes:
    """Encode a value for the store."""
    try:
        return codec.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what=what, why=str(error)) from None


def to_json(stored: bytes) -> Any:
    """Decode a stored value to its JSON representation."""
    try:
        return _to_json(codec.unpack(stored))
    except (Invalid, RecursionError):
        return _opaque_value("unreadable", stored)


def arguments_to_json(stored: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Decode the arguments of a task: positional and keyword."""
    value = to_json(stored)
    if isinstance(value, list) and len(value) == 2:
        args, kwargs = value
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    return [value], {}


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key_text(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, msgspec.msgpack.Ext):
        return _opaque_value(f"ext {value.code}", bytes(value.data))
    return msgspec.to_builtins(value)  # bytes in base64, times in ISO 8601


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    return msgspec.json.encode(key).decode().strip('"')


def _opaque_value(kind: str, data: bytes) -> dict[str, str]:
    return {"kind": kind, "base64": base64.b64encode(data).decode()}


def _count_parts(body: bytes) -> int:
    """Count lists, maps and members: brackets and commas outside of strings."""
    bare = _STRING.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{") + bare.count(b",")


def _check_depth(level: list[Any]) -> None:
    """Raise TooDeep above DEPTH_MAX levels. Iterates by level, so that the check itself cannot overflow."""
    depth = 0
    while level:
        # The body, its list, and the objects in that list do not count as levels of a value.
        if depth > DEPTH_MAX + 3:
            raise TooDeep(what="body", max=DEPTH_MAX)
        level = [inner for value in level for inner in _children(value)]
        depth += 1


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return ()
