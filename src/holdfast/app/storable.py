"""Which types can be stored: asked when an app is built, so that none is found out by its first value.

What is stored is msgpack, read back by the annotation. msgspec writes and reads builtins, its own
structs, dataclasses, named tuples, enums, dates, UUIDs, decimals, and unions of them. A class that it
does not know cannot be read back, unless one of the plain values that msgpack has is an instance of it
(`object`, `collections.abc.Iterable`). Keys of dicts are text: only then have equal dicts equal bytes. A
field of type `Any` is checked at run time, with its value.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import inspect as types

from holdfast.errors import Invalid

# One of each kind of value that msgpack gives without being told a type.
_PLAIN: tuple[Any, ...] = (None, True, 0, 0.0, "", b"", [], {}, datetime.fromtimestamp(0, UTC))


class NotStorable(Invalid):
    """A type that cannot be stored and read back."""

    code = "not_storable"
    hint = (
        "declare it as an hf.Event, a msgspec.Struct or a dataclass, or keep its fields as builtins, "
        "with str for the keys of dicts; convert to other classes inside the handler"
    )


def check_fields(what: str, kind: type[Any]) -> None:
    """NotStorable for the first field of a world or an event that cannot be stored."""
    for name, hint in _fields(kind):
        try:
            info = types.type_info(hint)
        except TypeError as error:
            raise NotStorable(
                what=what, type=kind.__name__, field=name, found=_shown(hint), why=str(error)
            ) from None
        _check(what, kind.__name__, name, info)


def check_type(what: str, name: str, field: str, hint: Any) -> None:
    """NotStorable if values of an annotation cannot be. One that msgspec does not understand is left
    to whoever gives a value."""
    try:
        info = types.type_info(hint)
    except Exception:
        return
    _check(what, name, field, info)


def check_function(
    what: str, name: str, signature: inspect.Signature, hints: Mapping[str, Any], returns: Any
) -> None:
    """The same for the arguments and the result of a function. An argument that need not be given (it
    has a default, or is one of `*args` or `**kwargs`) is checked when a caller gives it."""
    for field, one in signature.parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.default is one.empty and field in hints:
            check_type(what, name, field, hints[field])
    check_type(what, name, "return", returns)


# -- inside --------------------------------------------------------------------------------------


def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    if issubclass(kind, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _check(what: str, name: str, field: str, info: types.Type) -> None:
    for path, found in _unknown(field, info):
        raise NotStorable(what=what, type=name, field=path, found=found)


def _unknown(field: str, info: types.Type) -> Iterator[tuple[str, str]]:
    """Types within a type that cannot be stored, each with the way to it."""
    ahead: list[tuple[str, Any]] = [(field, info)]
    seen: list[Any] = []
    while ahead:
        path, here = ahead.pop()
        # A type that names itself is one object.
        if any(here is one for one in seen):
            continue
        seen.append(here)
        if isinstance(here, types.CustomType) and not _readable(here.cls):
            yield path, _shown(here.cls)
        if isinstance(here, types.DictType) and not _is_text(here.key_type):
            yield path, f"a dict with keys of {type(here.key_type).__name__}"
        for one in getattr(here, "fields", ()):
            ahead.append((f"{path}.{one.name}", one.type))
        for attribute in ("types", "item_types"):
            ahead += [(path, one) for one in getattr(here, attribute, ()) or ()]
        for attribute in ("item_type", "key_type", "value_type", "type"):
            inner = getattr(here, attribute, None)
            if isinstance(inner, types.Type):
                ahead.append((f"{path}[]" if attribute == "item_type" else path, inner))


def _is_text(key: types.Type) -> bool:
    """Whether every key of this type is text. A key of any type is checked with its value."""
    if isinstance(key, types.UnionType):
        return all(map(_is_text, key.types))
    if isinstance(key, types.LiteralType):
        return all(isinstance(value, str) for value in key.values)
    if isinstance(key, types.CustomType):
        return _readable(key.cls) and isinstance("", key.cls)
    if isinstance(key, types.EnumType):
        return issubclass(key.cls, str)
    return isinstance(key, types.StrType | types.AnyType)


def _readable(cls: Any) -> bool:
    try:
        return any(isinstance(value, cls) for value in _PLAIN)
    except TypeError:
        return False


def _shown(cls: Any) -> str:
    if isinstance(cls, type):
        return f"{cls.__module__}.{cls.__qualname__}"
    return str(cls)
