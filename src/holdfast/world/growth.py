"""A world class that has got new fields since a digest was made.

The digest is that of all fields, so a new field changes it although nothing else differs. The state is
accepted when it has the digest without some of its fields, each of which is at its default. A digest is
a SHA-256: no other state has it. Nothing has to be known of the class as it was.

Only fields of the world class itself are looked at. A field that was removed or renamed, a default
that was changed, or a new field in a class inside the state is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import combinations, islice
from typing import Any

import msgspec

from holdfast import codec

# How many fields that are not the last of their class may be new, and how much is tried.
FIELDS_MAX = 3
TRIES_MAX = 400
TRIES_MIN = 8
TRIED_BYTES_MAX = 16 * 1024 * 1024


def grown(state: Any, canonical: bytes, digest: bytes) -> frozenset[str] | None:
    """The fields that are new, if the digest is that of the state without them."""
    if type(state).__struct_config__.array_like:
        return None
    fields = codec.unpack(canonical)
    tries = max(min(TRIES_MAX, TRIED_BYTES_MAX // max(len(canonical), 1)), TRIES_MIN)
    for new in islice(subsets(_at_default(type(state), fields)), tries):
        if sha256(_without(fields, new)).digest() == digest:
            return new
    return None


def has_grown(state: Any, canonical: bytes, digest: bytes, new: frozenset[str]) -> bool:
    """Whether it is these fields that are new. One that a reducer has written since is a difference."""
    fields = codec.unpack(canonical)
    if sha256(_without(fields, new)).digest() != digest:
        return False
    return new <= set(_at_default(type(state), fields))


def without(canonical: bytes, new: frozenset[str]) -> bytes:
    """The bytes of the state as they were before it had these fields."""
    return _without(codec.unpack(canonical), new)


def _without(fields: dict[str, Any], new: frozenset[str]) -> bytes:
    return codec.pack({name: value for name, value in fields.items() if name not in new})


def subsets(names: list[str]) -> Iterator[frozenset[str]]:
    """Of names, the last field first: the last ones, however many; then any few."""
    for size in range(1, len(names) + 1):
        yield frozenset(names[:size])
    for size in range(1, FIELDS_MAX + 1):
        yield from map(frozenset, combinations(names, size))


def _at_default(kind: type[Any], fields: dict[str, Any]) -> list[str]:
    """Fields that have their default, the last ones first: new ones are put there as a rule."""
    found = []
    for field in reversed(msgspec.structs.fields(kind)):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.encode_name in fields and codec.pack_value(default) == codec.pack(
            fields[field.encode_name]
        ):
            found.append(field.encode_name)
    return found
