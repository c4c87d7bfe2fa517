"""History limits by world type: `hf.App(…, keep={Account: hf.Keep(entries=100_000, days=30)})`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.world.history import HistoryBound

ENTRIES_MAX = 1 << 48
DAYS_MAX = 36_500
_DAY_NS = 24 * 3600 * S


class Keep(msgspec.Struct, frozen=True):
    """A history limit. An entry is kept while it is among the last `entries` or younger than `days`. One of
    the two limits may be omitted."""

    entries: int | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        if self.entries is None and self.days is None:
            raise Invalid(what="keep", why="set entries, days, or both")
        if self.entries is not None and (
            type(self.entries) is not int or not 1 <= self.entries <= ENTRIES_MAX
        ):
            raise Invalid(
                what="keep entries", found=repr(self.entries)[:64], min=1, max=ENTRIES_MAX
            )
        if self.days is not None and (
            type(self.days) not in (int, float) or not 0 < self.days <= DAYS_MAX
        ):
            raise Invalid(what="keep days", found=repr(self.days)[:64], min=0, max=DAYS_MAX)

    @property
    def bound(self) -> HistoryBound:
        return HistoryBound(self.entries or 0, int((self.days or 0) * _DAY_NS))


def bounds_of(keep: Mapping[Any, Any], worlds: list[type[Any]]) -> dict[type[Any], HistoryBound]:
    """Map each limited world type to its bound. Raise Invalid for a key that is not a world of the app, or a
    value that is not a Keep."""
    bounds: dict[type[Any], HistoryBound] = {}
    for world, limit in keep.items():
        if world not in worlds:
            name = getattr(world, "__name__", repr(world)[:64])
            raise Invalid(what="keep", found=name, why="not a world of this app")
        if not isinstance(limit, Keep):
            raise Invalid(
                what="keep", world=world.__name__, found=repr(limit)[:64], expected="hf.Keep"
            )
        bounds[world] = limit.bound
    return bounds
