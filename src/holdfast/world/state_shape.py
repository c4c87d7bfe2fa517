"""The shape of a world's state: the names of its fields, and of the fields of nested classes.

Each journal entry has a digest of the shape that its code used. A replay by other code derives two
facts from it:

- whether a difference may come from fields that only one of the two versions has
  (`reducer.replay_step`);
- which fields the code of an entry dropped when it continued from a snapshot of newer code. These
  fields have their defaults from there on, in every replay (`WorldDefinition.reload_as_shape`).

Types are not part of the shape: a field that changes from `int` to `int | None` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect as types

from holdfast import codec
from holdfast.world import new_fields

DIGEST_BYTES = 8
TRIES_MAX = 4000
# The number of shapes of other code that are cached.
SHAPES_CACHED_MAX = 16


class StateShape:
    """The shape of one state class."""

    __slots__ = ("_cached", "_names_by_field", "digest")

    def __init__(self, kind: Any) -> None:
        # Field of the class → the names that it contributes. The last field comes first.
        self._names_by_field: dict[str, frozenset[str]] = dict(_iter_names_by_field(kind))
        self.digest = _digest(self._names_by_field, frozenset())
        self._cached: dict[bytes, frozenset[str]] = {self.digest: frozenset()}

    def fields_missing_in(self, digest: bytes) -> frozenset[str]:
        """Return the fields that are missing in a state of the other shape. Return an empty set if
        the shapes differ in any other way."""
        found = self._cached.get(digest)
        if found is None:
            found = self._search_fields(digest)
            if len(self._cached) < SHAPES_CACHED_MAX:
                self._cached[digest] = found
        return found

    def _search_fields(self, digest: bytes) -> frozenset[str]:
        for fields in islice(new_fields.candidate_subsets(list(self._names_by_field)), TRIES_MAX):
            if _digest(self._names_by_field, fields) == digest:
                return fields
        return frozenset()


def _digest(labels: dict[str, frozenset[str]], without: frozenset[str]) -> bytes:
    names: set[str] = set()
    for field, brings in labels.items():
        if field not in without:
            names |= brings
    return sha256(codec.pack(sorted(names))).digest()[:DIGEST_BYTES]


def _iter_names_by_field(kind: Any) -> Iterator[tuple[str, frozenset[str]]]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    for field in reversed(info.fields):
        brings = {f".{field.encode_name}"}
        _collect_names(field.type, brings, [kind])
        yield field.encode_name, frozenset(brings)


def _collect_names(here: Any, names: set[str], seen: list[Any]) -> None:
    """Add the names of the fields of all classes inside a type, each class once."""
    inner: list[Any] = [one for part in ("types", "item_types") for one in _as_tuple(here, part)]
    inner += [getattr(here, part, None) for part in ("item_type", "key_type", "value_type", "type")]
    fields = _as_tuple(here, "fields")
    if fields:
        of = getattr(here, "cls", None)
        if any(of is one for one in seen):
            return
        seen.append(of)
        for field in fields:
            names.add(f"{getattr(of, '__name__', of)}.{field.encode_name}")
            inner.append(field.type)
    if isinstance(here, types.CustomType) and codec.is_model(here.cls):
        if any(here.cls is one for one in seen):
            return
        seen.append(here.cls)
        for name, hint in codec.model_field_types(here.cls).items():
            names.add(f"{here.cls.__name__}.{name}")
            inner.append(_type_info(hint))
    for one in inner:
        if isinstance(one, types.Type):
            _collect_names(one, names, seen)


def _type_info(hint: Any) -> types.Type | None:
    try:
        return types.type_info(hint)
    except Exception:
        return None  # such as a union of models


def _as_tuple(here: Any, part: str) -> tuple[Any, ...]:
    return tuple(getattr(here, part, None) or ())
