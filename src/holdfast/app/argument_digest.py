"""The digest of a step's arguments.

An object that an upcast made from a recorded value counts as it was recorded. So a step that got the object before the
class changed is asked for with the same arguments after it. An equal object that the code made itself has no recorded
form.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from holdfast import codec
from holdfast.value_versions import UpcastObjects


def digest_of(args: tuple[Any, ...], kwargs: dict[str, Any], upcast: UpcastObjects) -> bytes:
    """The digest of the arguments. A live object that cannot be stored counts by its type."""
    try:
        if not kwargs and codec.SCALAR_TYPES.issuperset(map(type, args)):
            return codec.digest(codec.pack([args, kwargs]))[:16]
        if upcast:
            args = tuple(as_stored(value, upcast) for value in args)
            kwargs = {name: as_stored(value, upcast) for name, value in kwargs.items()}
        return codec.digest(codec.pack_value([list(args), kwargs]))[:16]
    except codec.ENCODE_ERRORS:
        parts = [*args, *(kwargs[name] for name in sorted(kwargs))]
        return codec.digest(
            *(_digest_part(part) for part in parts), *map(str.encode, sorted(kwargs))
        )[:16]


def _digest_part(value: Any) -> bytes:
    try:
        return codec.pack_value(value)
    except codec.ENCODE_ERRORS:
        return f"{type(value).__module__}.{type(value).__qualname__}".encode()


def as_stored(value: Any, upcast: UpcastObjects, depth: int = codec.DEPTH_MAX) -> Any:
    """Copy a value with each upcast object in it replaced by its stored fields."""
    if (found := upcast.get(id(value))) is not None:
        return found.fields
    if type(value) in codec.SCALAR_TYPES or depth == 0:
        return value
    if isinstance(value, dict):
        return {key: as_stored(item, upcast, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_stored(item, upcast, depth - 1) for item in value]
    if codec.is_model(type(value)):
        fields = {name: getattr(value, name) for name in codec.field_names(type(value))}
        stored = as_stored(fields, upcast, depth - 1)
        changed = any(stored[name] is not fields[name] for name in fields)
        return stored if changed else value
    return _with_stored_fields(value, upcast, depth)


def _with_stored_fields(value: Any, upcast: UpcastObjects, depth: int) -> Any:
    copied = None
    for name in codec.field_names(type(value)):
        field = getattr(value, name, None)
        stored = as_stored(field, upcast, depth - 1)
        if stored is field:
            continue
        copied = copy.copy(value) if copied is None else copied
        if isinstance(copied, msgspec.Struct):
            msgspec.structs.force_setattr(copied, name, stored)
        else:
            object.__setattr__(copied, name, stored)
    return value if copied is None else copied
