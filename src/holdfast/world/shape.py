"""The shape of a world's state: the names of its fields, and of those in classes inside it.

Each journal entry has a digest of the shape that its code's state had. So a replay by other code knows
two things:

- whether a difference may come from fields that only one of the two has (`kernel.repeat`);
- which fields the code of an entry dropped when it went on from a snapshot of newer code. They have
  their defaults from there on, in every replay (`Program.adopted`).

Types are no part of it: `int` that became `int | None` is the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect as types

from holdfast import codec
from holdfast.world import growth

BYTES = 8
TRIES_MAX = 4000
# Shapes of other code that are remembered.
KNOWN_MAX = 16


class Shape:
    """The shape of one state class."""

    __slots__ = ("_known", "_labels", "digest")

    def __init__(self, kind: Any) -> None:
        # Field of the class itself → the names that it brings; the last field first.
        self._labels: dict[str, frozenset[str]] = dict(_labels(kind))
        self.digest = _digest(self._labels, frozenset())
        self._known: dict[bytes, frozenset[str]] = {self.digest: frozenset()}

    def lacks(self, digest: bytes) -> frozenset[str]:
        """The fields that a state of the other shape lacks, if it has all others and no more; else none."""
        found = self._known.get(digest)
        if found is None:
            found = self._find(digest)
            if len(self._known) < KNOWN_MAX:
                self._known[digest] = found
        return found

    def _find(self, digest: bytes) -> frozenset[str]:
        for fields in islice(growth.subsets(list(self._labels)), TRIES_MAX):
            if _digest(self._labels, fields) == digest:
                return fields
        return frozenset()


def _digest(labels: dict[str, frozenset[str]], without: frozenset[str]) -> bytes:
    names: set[str] = set()
    for field, brings in labels.items():
        if field not in without:
            names |= brings
    return sha256(codec.pack(sorted(names))).digest()[:BYTES]


def _labels(kind: Any) -> Iterator[tuple[str, frozenset[str]]]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    for field in reversed(info.fields):
        brings = {f".{field.encode_name}"}
        _collect(field.type, brings, [kind])
        yield field.encode_name, frozenset(brings)


def _collect(here: Any, names: set[str], seen: list[Any]) -> None:
    """Names of the fields of classes that a type holds, each class once."""
    inner: list[Any] = [one for part in ("types", "item_types") for one in _many(here, part)]
    inner += [getattr(here, part, None) for part in ("item_type", "key_type", "value_type", "type")]
    fields = _many(here, "fields")
    if fields:
        of = getattr(here, "cls", None)
        if any(of is one for one in seen):
            return
        seen.append(of)
        for field in fields:
            names.add(f"{getattr(of, '__name__', of)}.{field.encode_name}")
            inner.append(field.type)
    for one in inner:
        if isinstance(one, types.Type):
            _collect(one, names, seen)


def _many(here: Any, part: str) -> tuple[Any, ...]:
    return tuple(getattr(here, part, None) or ())
