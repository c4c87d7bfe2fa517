"""Storable types: validates annotations when an app is built, before the first value is stored.

Values are stored as msgpack and decoded by their annotation. msgspec supports builtins, its own structs,
dataclasses, named tuples, enums, dates, UUIDs, decimals, and unions of them. Any other class cannot be
decoded, unless a plain msgpack value is an instance of it (`object`, `collections.abc.Iterable`). The fields
of a pydantic model are checked like those of a dataclass; pydantic decodes unions in it. Dict
keys must be strings, because only then do equal dicts have equal bytes. A field of type `Any` is checked
at run time, with its value.
"""

from __future__ import annotations

import dataclasses
import inspect
import types as python_types
import typing
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import inspect as types

from holdfast import codec
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


# Classes of pydantic whose values are strings.
_TEXT_CLASSES = frozenset({"pydantic.networks.EmailStr"})


class NotStorable(Invalid):
    """A type that cannot be stored and read back."""

    code = "not_storable"
    hint = (
        "declare it as an hf.Event, a pydantic model, a msgspec.Struct or a dataclass, or keep its fields as builtins, "
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
    except Exception as error:
        if _mentions_model(hint):
            why = "put a union of pydantic models into a field of a model"
            raise NotStorable(
                what=what, type=name, field=field, found=_type_name(hint), why=why
            ) from error
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
    if codec.is_model(kind):
        return [("", kind)]  # as a whole: unions in it are for pydantic
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
        if isinstance(type_info, types.CustomType):
            if codec.is_model(type_info.cls):
                stack += model_types(type_info.cls, path)
            elif not _is_decodable(type_info.cls):
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


def model_types(kind: Any, path: str = "") -> list[tuple[str, types.Type]]:
    """The types of the fields of a pydantic model and of the models in it, each model once, with their field paths.

    A union is split into its parts: pydantic decodes unions that msgspec does not support.
    """
    found: list[tuple[str, types.Type]] = []
    seen: list[Any] = [kind]
    stack = _model_fields(kind, path)
    while stack:
        at, hint = stack.pop()
        args = typing.get_args(hint)
        if typing.get_origin(hint) is Annotated:
            stack.append((at, args[0]))
        elif codec.is_model(hint):
            if hint not in seen:
                seen.append(hint)
                stack += _model_fields(hint, at)
        elif _is_union(hint) or (args and _mentions_model(hint)):
            if not _is_union(hint) and isinstance(typing.get_origin(hint), type):
                # Its own rules, such as the keys of a dict, without the models in it.
                found += _known_types(at, _without_models(hint))
            stack += [(at, arg) for arg in args if arg is not Ellipsis]
        else:
            found += _known_types(at, hint)
    return found


def _model_fields(kind: Any, path: str) -> list[tuple[str, Any]]:
    try:
        fields = codec.model_field_types(kind)
    except Exception as error:
        raise NotStorable(
            what="model", type=kind.__name__, field=path, why=str(error).splitlines()[0]
        ) from None
    return [(f"{path}.{name}".lstrip("."), hint) for name, hint in fields.items()]


def _known_types(path: str, hint: Any) -> list[tuple[str, types.Type]]:
    if _type_name(hint) in _TEXT_CLASSES:
        return []
    try:
        info = types.type_info(hint)
    except Exception:
        # An annotation that msgspec does not know: its class cannot be encoded.
        return [(path, types.CustomType(hint))]
    if isinstance(info, types.StructType):
        return [(path, types.CustomType(hint))]  # pydantic does not decode it
    return [(path, info)]


def _without_models(hint: Any) -> Any:
    """`dict[int, Model]` as `dict[int, Any]`."""
    args = tuple(Any if _mentions_model(arg) else arg for arg in typing.get_args(hint))
    try:
        return typing.get_origin(hint)[args]
    except TypeError:
        return Any


def _mentions_model(hint: Any) -> bool:
    return codec.is_model(hint) or any(map(_mentions_model, typing.get_args(hint)))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, python_types.UnionType)


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
