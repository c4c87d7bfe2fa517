"""Storable types: validates annotations when an app is built, before the first value is stored.

Values are stored as msgpack and decoded by their annotation. msgspec supports builtins, its own structs,
dataclasses, named tuples, enums, dates, UUIDs, decimals, and unions of them. Any other class cannot be
decoded, unless a plain msgpack value is an instance of it (`object`, `collections.abc.Iterable`). Dict
keys must be strings, because only then do equal dicts have equal bytes. A field of type `Any` is checked
at run time, with its value.
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

# One value of each type that msgpack decodes without a type annotation.
_PLAIN_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    0.0,
    "",
    b"",
    [],
    {},
    datetime.fromtimestamp(0, UTC),
)


class NotStorable(Invalid):
    """A type that cannot be stored and read back."""

    code = "not_storable"
    hint = (
        "declare it as an hf.Event, a msgspec.Struct or a dataclass, or keep its fields as builtins, "
        "with str for the keys of dicts; convert to other classes inside the handler"
    )


def check_fields(what: str, kind: type[Any]) -> None:
    """Raise NotStorable for the first field of a world or an event that cannot be stored."""
    for name, hint in _field_types(kind):
        try:
            info = types.type_info(hint)
        except TypeError as error:
            raise NotStorable(
                what=what, type=kind.__name__, field=name, found=_type_name(hint), why=str(error)
            ) from None
        _require_storable(what, kind.__name__, name, info)


def check_type(what: str, name: str, field: str, hint: Any) -> None:
    """Raise NotStorable if values of an annotation cannot be stored. An annotation that msgspec does not
    support is skipped; its values are checked at run time."""
    try:
        info = types.type_info(hint)
    except Exception:
        return
    _require_storable(what, name, field, info)


def check_function(
    what: str, name: str, signature: inspect.Signature, hints: Mapping[str, Any], returns: Any
) -> None:
    """Raise NotStorable if a required argument or the result of a function cannot be stored. An optional
    argument (with a default, or in `*args` or `**kwargs`) is checked when a caller passes it."""
    for field, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty and field in hints:
            check_type(what, name, field, hints[field])
    check_type(what, name, "return", returns)


# -- inside --------------------------------------------------------------------------------------


def _field_types(kind: type[Any]) -> list[tuple[str, Any]]:
    if issubclass(kind, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _require_storable(what: str, name: str, field: str, info: types.Type) -> None:
    for path, type_name in _unstorable_types(field, info):
        raise NotStorable(what=what, type=name, field=path, found=type_name)


def _unstorable_types(field: str, info: types.Type) -> Iterator[tuple[str, str]]:
    """Yield the nested types that cannot be stored, each with its field path."""
    stack: list[tuple[str, Any]] = [(field, info)]
    visited: list[Any] = []
    while stack:
        path, type_info = stack.pop()
        # A recursive type is one object, so identity ends the recursion.
        if any(type_info is item for item in visited):
            continue
        visited.append(type_info)
        if isinstance(type_info, types.CustomType) and not _is_decodable(type_info.cls):
            yield path, _type_name(type_info.cls)
        if isinstance(type_info, types.DictType) and not _is_string_key(type_info.key_type):
            yield path, f"a dict with keys of {type(type_info.key_type).__name__}"
        for item in getattr(type_info, "fields", ()):
            stack.append((f"{path}.{item.name}", item.type))
        for attribute in ("types", "item_types"):
            stack += [(path, item) for item in getattr(type_info, attribute, ()) or ()]
        for attribute in ("item_type", "key_type", "value_type", "type"):
            inner = getattr(type_info, attribute, None)
            if isinstance(inner, types.Type):
                stack.append((f"{path}[]" if attribute == "item_type" else path, inner))


def _is_string_key(key: types.Type) -> bool:
    """Whether every key of this type is a string. Keys of type `Any` are checked at run time."""
    if isinstance(key, types.UnionType):
        return all(map(_is_string_key, key.types))
    if isinstance(key, types.LiteralType):
        return all(isinstance(value, str) for value in key.values)
    if isinstance(key, types.CustomType):
        return _is_decodable(key.cls) and isinstance("", key.cls)
    if isinstance(key, types.EnumType):
        return issubclass(key.cls, str)
    return isinstance(key, types.StrType | types.AnyType)


def _is_decodable(cls: Any) -> bool:
    try:
        return any(isinstance(value, cls) for value in _PLAIN_VALUES)
    except TypeError:
        return False


def _type_name(cls: Any) -> str:
    if isinstance(cls, type):
        return f"{cls.__module__}.{cls.__qualname__}"
    return str(cls)
