"""The digest of a step's arguments.

An object that an upcast made from a recorded value counts as it was recorded. So a step that got the object before the
class changed is asked for with the same arguments after it. An equal object that the code made itself has no recorded
form. A live object that cannot be stored counts by its type.

`equal_digests` has the other ways to write the same call. They are computed only when a recorded digest differs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from itertools import combinations, islice
from typing import Any, NamedTuple

import msgspec

from holdfast import codec
from holdfast.app.function_state import encode_argument
from holdfast.value_versions import UpcastObjects

# No msgpack value and no name of a type begins with it.
_ENCODED_MARK = b"\xc1"
# Ways to write one call that are compared with a recorded step.
_FORMS_MAX = 256


class ArgumentDigest(NamedTuple):
    """The digest that a new step stores, and the digest of the same call in former releases."""

    stored: bytes
    former: bytes


def digest_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], upcast: UpcastObjects, state: bytes = b""
) -> ArgumentDigest:
    """The digest of the arguments and of the values that the function carries (`function_state`)."""
    found = _digest_of_arguments(args, kwargs, upcast)
    if state:
        return ArgumentDigest(codec.digest(b"state", found.stored, state)[:16], found.former)
    return found


def _digest_of_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], upcast: UpcastObjects
) -> ArgumentDigest:
    try:
        if not kwargs and codec.SCALAR_TYPES.issuperset(map(type, args)):
            digest = codec.digest(codec.pack([args, kwargs]))[:16]
            return ArgumentDigest(digest, digest)
        if upcast:
            args = tuple(as_stored(value, upcast) for value in args)
            kwargs = {name: as_stored(value, upcast) for name, value in kwargs.items()}
        digest = codec.digest(codec.pack_value([list(args), kwargs]))[:16]
        return ArgumentDigest(digest, digest)
    except codec.ENCODE_ERRORS:
        values = [*args, *(kwargs[name] for name in sorted(kwargs))]
        names = list(map(str.encode, sorted(kwargs)))
        parts = [_encode_part(value, upcast) for value in values]
        return ArgumentDigest(
            codec.digest(*(stored for stored, _ in parts), *names)[:16],
            codec.digest(*(former for _, former in parts), *names)[:16],
        )


def _encode_part(value: Any, upcast: UpcastObjects) -> tuple[bytes, bytes]:
    """The bytes of one argument, and its bytes in former releases: the name of the type."""
    try:
        packed = codec.pack_value(value)
        return packed, packed
    except codec.ENCODE_ERRORS:
        former = f"{type(value).__module__}.{type(value).__qualname__}".encode()
        encoded = encode_argument(value, upcast)
        return (_ENCODED_MARK + encoded if encoded else former), former


def equal_digests(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    upcast: UpcastObjects,
    state: bytes = b"",
) -> Iterator[bytes]:
    """The digests of the other ways to write a call: arguments by position or by name, defaults given or omitted."""
    for other_args, other_kwargs in equal_calls(fn, args, kwargs, upcast):
        yield from digest_of(other_args, other_kwargs, upcast, state)


def equal_calls(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], upcast: UpcastObjects
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The ways to write a call, within a bound."""
    return islice(_equal_calls(fn, args, kwargs, upcast), _FORMS_MAX)


def _equal_calls(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], upcast: UpcastObjects
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself raises the error
        return
    bound.apply_defaults()
    positional: list[str] = []
    rest: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    required_positions = 0
    omittable: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update(value)
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            positional.append(name)
            required_positions += parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.default is not parameter.empty:
            default = digest_of((parameter.default,), {}, upcast).stored
            if digest_of((value,), {}, upcast).stored == default:
                omittable.append(name)
    first = len(positional) if rest else 0
    for count in range(len(positional), first - 1, -1):
        by_position = positional[:count]
        by_name = {name: bound.arguments[name] for name in positional[count:]} | named
        may_omit = [name for name in omittable if name in by_name]
        for number in range(len(may_omit) + 1):
            for omitted in combinations(may_omit, number):
                if set(positional[count:required_positions]) <= set(omitted):
                    yield (
                        (*(bound.arguments[name] for name in by_position), *rest),
                        {name: value for name, value in by_name.items() if name not in omitted},
                    )


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
