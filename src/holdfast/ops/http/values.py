"""JSON at the door: typed, bounded in depth, and turned into what is stored, and back.

Arguments and results are msgpack in the store and JSON on the wire. What JSON cannot say is said in text:
bytes as base64, keys of maps as text, a value of an unknown kind as an object that names it. A number
that does not fit into 64 bits is refused: no other reader could be sure of it.
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
# Lists, maps and their members in a body. Small ones cost a hundred times their text in memory, and the
# interpreter does nothing else while it makes them.
PARTS_MAX = 200_000

T = TypeVar("T")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class TooDeep(Invalid):
    code = "too_deep"
    hint = f"values are nested up to {DEPTH_MAX} levels"


class TooManyParts(Invalid):
    code = "too_many_parts"
    hint = f"a request has up to {PARTS_MAX:,} lists, maps and members: send smaller ones, or text"


class Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request. A field that it does not have is a mistake of whoever sent it."""


def decode(kind: type[T], body: bytes) -> T:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = codec.new_json_decoder(kind)
    brackets = body.count(b"[") + body.count(b"{")
    if brackets + body.count(b",") > PARTS_MAX and _parts(body) > PARTS_MAX:
        raise TooManyParts(what="body", max=PARTS_MAX)
    try:
        found: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(what="body", why=str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(what="body", why=str(error)) from None
    except RecursionError:
        raise TooDeep(what="body", max=DEPTH_MAX) from None
    # As many brackets as levels, at least: few of them settle it.
    if brackets > DEPTH_MAX:
        _check_depth([found])
    return found


def packed(what: str, value: Any) -> bytes:
    """What is stored of a value."""
    try:
        return codec.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what=what, why=str(error)) from None


def plain(stored: bytes) -> Any:
    """A stored value, as JSON can say it."""
    try:
        return _plain(codec.unpack(stored))
    except (Invalid, RecursionError):
        return _opaque("unreadable", stored)


def arguments(stored: bytes) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a task: by position, by name."""
    found = plain(stored)
    if isinstance(found, list) and len(found) == 2:
        args, kwargs = found
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    return [found], {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.msgpack.Ext):
        return _opaque(f"ext {value.code}", bytes(value.data))
    return value


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    return msgspec.json.encode(key).decode().strip('"')


def _opaque(kind: str, data: bytes) -> dict[str, str]:
    return {"kind": kind, "base64": base64.b64encode(data).decode()}


def _parts(body: bytes) -> int:
    """Lists, maps and members in a text: brackets and commas that are not inside of strings."""
    bare = _STRING.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{") + bare.count(b",")


def _check_depth(level: list[Any]) -> None:
    """Level by level, so that no depth is too much for the check itself."""
    depth = 0
    while level:
        # The body itself, its list, and the object in that are no levels of a value.
        if depth > DEPTH_MAX + 3:
            raise TooDeep(what="body", max=DEPTH_MAX)
        level = [inner for value in level for inner in _inside(value)]
        depth += 1


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return ()
