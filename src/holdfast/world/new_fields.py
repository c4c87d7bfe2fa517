"""New fields of a world class: states that differ from an older digest only by added fields.

A digest covers all fields, so a new field changes it even if no other value differs. A state is
accepted if it matches the digest without a subset of its fields, each at its default. A digest is a
SHA-256, so no other state matches it. The former class is not needed.

Only fields of the world class itself are considered. A removed or renamed field, a changed default,
or a new field in a nested class is a divergence.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import combinations, islice
from typing import Any

import msgspec

from holdfast import codec

# The maximum number of new fields that are not the last of their class, and bounds on the search.
FIELDS_MAX = 3
TRIES_MAX = 400
TRIES_MIN = 8
HASHED_BYTES_MAX = 16 * 1024 * 1024


def find_new_fields(state: Any, canonical: bytes, digest: bytes) -> frozenset[str] | None:
    """Return the new fields if the digest matches the state without them, else None."""
    if type(state).__struct_config__.array_like:
        return None
    fields = codec.unpack(canonical)
    tries = max(min(TRIES_MAX, HASHED_BYTES_MAX // max(len(canonical), 1)), TRIES_MIN)
    for new in islice(candidate_subsets(_fields_at_default(type(state), fields)), tries):
        if sha256(_pack_fields_without(fields, new)).digest() == digest:
            return new
    return None


def are_new_fields(state: Any, canonical: bytes, digest: bytes, new: frozenset[str]) -> bool:
    """Whether exactly these fields are new. A field that a reducer has written since is a
    divergence."""
    fields = codec.unpack(canonical)
    if sha256(_pack_fields_without(fields, new)).digest() != digest:
        return False
    return new <= set(_fields_at_default(type(state), fields))


def pack_without(canonical: bytes, new: frozenset[str]) -> bytes:
    """Encode the state without these fields."""
    return _pack_fields_without(codec.unpack(canonical), new)


def _pack_fields_without(fields: dict[str, Any], new: frozenset[str]) -> bytes:
    return codec.pack({name: value for name, value in fields.items() if name not in new})


def candidate_subsets(names: list[str]) -> Iterator[frozenset[str]]:
    """Yield subsets of names that are ordered last field first: every run of last fields, then all
    small subsets."""
    for size in range(1, len(names) + 1):
        yield frozenset(names[:size])
    for size in range(1, FIELDS_MAX + 1):
        yield from map(frozenset, combinations(names, size))


def _fields_at_default(kind: type[Any], fields: dict[str, Any]) -> list[str]:
    """Return the fields at their default, the last field first, because new fields are usually
    added last."""
    names = []
    for field in reversed(msgspec.structs.fields(kind)):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.encode_name in fields and codec.pack_value(default) == codec.pack(
            fields[field.encode_name]
        ):
            names.append(field.encode_name)
    return names
