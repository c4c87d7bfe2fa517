"""Versions of stored values: upcasts convert a value of an older class to the present class.

`hf.upcast(T, 1)` converts the fields of version 1 of T to version 2. An app declares the upcasts of its classes when it
is built. A class with n upcasts is at version n + 1 in this process. A stored value is preceded by the versions of the
classes inside its declared type. Values of classes without upcasts have no such prefix and are at version 1.

    encode_versions(hint)      the prefix of a value that is stored now, empty at version 1
    decode(packed, hint, …)    the value as the declared type, upcast

An outer class is upcast before the classes inside it, so its upcast gets and returns the inner values as stored.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from holdfast import codec
from holdfast.errors import Invalid

Upcast = Callable[[dict[str, Any]], dict[str, Any]]
_CLASS_TYPES = (types.StructType, types.DataclassType, types.CustomType)
_LIST_TYPES = (types.ListType, types.SetType, types.FrozenSetType, types.VarTupleType)


class StoredForm(NamedTuple):
    """An upcast object, and its fields as stored."""

    value: Any
    fields: Any


# Upcast objects by id. The entry keeps the object alive, so that its id stays unique.
UpcastObjects: typing.TypeAlias = MutableMapping[int, StoredForm]

_upcasts: dict[type[Any], dict[int, Upcast]] = {}
# The classes inside a type, by the id of the type. The entry keeps the type alive.
_classes: dict[int, tuple[Any, dict[str, type[Any]]]] = {}
_prefixes: dict[int, tuple[Any, bytes]] = {}


class UnreadableValue(Invalid):
    """A stored value that the present code cannot read as its declared type."""

    code = "value_unreadable"
    hint = "declare an hf.upcast of the type in App(upcasts=…), or deploy the type that wrote the value"


def declare(kind: type[Any], upcasts: Mapping[int, Upcast]) -> None:
    """Set the upcasts of a class: version 1 to 2, 2 to 3, and so on."""
    _upcasts[kind] = dict(upcasts)
    _prefixes.clear()


def version_of(kind: type[Any]) -> int:
    return 1 + len(_upcasts.get(kind, ()))


def declared_versions() -> str:
    """A digest of the classes with upcasts and their versions, as part of a code version. Empty without upcasts."""
    named = sorted(f"{kind.__module__}.{kind.__qualname__} {version_of(kind)}" for kind in _upcasts)
    return f"-{codec.digest_of(named).hex()[:8]}" if named else ""


def encode_versions(*hints: Any) -> bytes:
    """Return the prefix of a value that is stored with these types."""
    if not _upcasts:
        return b""
    if len(hints) == 1 and (cached := _prefixes.get(id(hints[0]))) is not None:
        return cached[1]
    versions = {
        name: version_of(kind)
        for hint in hints
        for name, kind in _classes_in(hint).items()
        if version_of(kind) > 1
    }
    prefix = codec.versions_prefix(versions) if versions else b""
    if len(hints) == 1:
        _prefixes[id(hints[0])] = (hints[0], prefix)
    return prefix


def decode(packed: bytes, hint: Any, upcast: UpcastObjects | None = None) -> Any:
    """Decode a stored value as its declared type. `upcast` collects the objects that were upcast."""
    versions, body = codec.split_versions(packed)
    return convert(codec.unpack(body), hint, versions, upcast)


def convert(
    value: Any, hint: Any, versions: Mapping[str, int], upcast: UpcastObjects | None = None
) -> Any:
    """Convert plain data of stored versions to the declared type."""
    if hint is Any:
        return value
    try:
        if versions or _upcasts:
            value = _upcast_inside(value, hint, versions, {} if upcast is None else upcast)
        return codec.convert(value, hint)
    except (msgspec.MsgspecError, TypeError) as error:
        raise UnreadableValue(type=_name_of(hint), why=str(error)) from None


def _upcast_inside(
    value: Any, hint: Any, versions: Mapping[str, int], upcast: UpcastObjects
) -> Any:
    classes = _classes_in(hint)
    for name, version in versions.items():
        kind = classes.get(name)
        if kind is not None and version > version_of(kind):
            raise UnreadableValue(type=name, version=version, why="newer than this code")
    if all(versions.get(name, 1) == version_of(kind) for name, kind in classes.items()):
        return value
    return _Upcasting(versions, upcast).walk(types.type_info(hint), value)


class _Upcasting:
    """The conversion of one value: it walks the value and its type together and upcasts objects."""

    def __init__(self, versions: Mapping[str, int], upcast: UpcastObjects) -> None:
        self._versions = versions
        self._upcast = upcast

    def walk(self, info: Any, value: Any) -> Any:
        if isinstance(info, _CLASS_TYPES):
            return self._class(info, value)
        if isinstance(info, types.UnionType):
            found = _member_of(info, value)
            return value if found is None else self.walk(found, value)
        if isinstance(value, list):
            if isinstance(info, _LIST_TYPES):
                return [self.walk(info.item_type, item) for item in value]
            if isinstance(info, types.TupleType):
                pairs = zip(info.item_types, value, strict=False)
                return [self.walk(item, part) for item, part in pairs] + value[
                    len(info.item_types) :
                ]
        if isinstance(value, dict):
            if isinstance(info, types.DictType):
                return {key: self.walk(info.value_type, item) for key, item in value.items()}
            if isinstance(info, types.TypedDictType):
                return self._fields(_field_types(info), value)
        return value

    def _class(self, info: Any, value: Any) -> Any:
        kind, stored = info.cls, value
        version = self._versions.get(kind.__name__, 1)
        for step in range(version, version_of(kind)):
            try:
                value = _upcasts[kind][step](value)
            except Exception as error:
                why = f"its upcast raised {type(error).__name__}: {error}"
                raise UnreadableValue(type=kind.__name__, version=step, why=why) from error
        if isinstance(value, dict):
            value = self._fields(_field_types(info), value)
        if version == version_of(kind):
            return value
        made = codec.convert(value, kind)
        self._upcast[id(made)] = StoredForm(made, stored)
        return made

    def _fields(self, by_name: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self.walk(by_name[name], item) if name in by_name else item
            for name, item in value.items()
        }


def _member_of(info: types.UnionType, value: Any) -> Any:
    """The member of a union that a value belongs to, by its tag if there are several classes."""
    if isinstance(value, list):
        shaped: tuple[type, ...] = (*_LIST_TYPES, types.TupleType)
    elif isinstance(value, dict):
        shaped = (*_CLASS_TYPES, types.DictType, types.TypedDictType)
    else:
        return None
    members = [member for member in info.types if isinstance(member, shaped)]
    tagged = [
        member
        for member in members
        if isinstance(member, types.StructType)
        and member.tag_field is not None
        and isinstance(value, dict)
        and value.get(member.tag_field) == member.tag
    ]
    return (tagged or members or [None])[0]


def _field_types(info: Any) -> dict[str, Any]:
    """The types of the fields of a class, by their stored names."""
    if isinstance(info, types.CustomType):
        if not codec.is_model(info.cls):
            return {}
        hints = codec.model_field_types(info.cls)
        return {name: types.type_info(hint) for name, hint in hints.items()}
    return {field.encode_name: field.type for field in info.fields}


def _classes_in(hint: Any) -> dict[str, type[Any]]:
    """The classes inside a type, by name."""
    if hint is Any:
        return {}
    cached = _classes.get(id(hint))
    if cached is None:
        try:
            found = {kind.__name__: kind for kind in _iter_classes(types.type_info(hint), set())}
        except Exception:  # a type without information has no upcasts
            found = {}
        cached = _classes[id(hint)] = (hint, found)
    return cached[1]


def _iter_classes(info: Any, seen: set[type[Any]]) -> Iterator[type[Any]]:
    parts: list[Any] = []
    if isinstance(info, (*_CLASS_TYPES, types.TypedDictType)):
        if info.cls in seen:
            return
        seen.add(info.cls)
        if not isinstance(info, types.TypedDictType):
            yield info.cls
        parts = list(_field_types(info).values())
    elif isinstance(info, types.UnionType):
        parts = list(info.types)
    elif isinstance(info, types.TupleType):
        parts = list(info.item_types)
    elif isinstance(info, _LIST_TYPES):
        parts = [info.item_type]
    elif isinstance(info, types.DictType):
        parts = [info.value_type]
    elif isinstance(info, types.Metadata):
        parts = [info.type]
    for part in parts:
        yield from _iter_classes(part, seen)


def _name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
