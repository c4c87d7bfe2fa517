"""How much history the worlds of a type keep: `hf.App(…, keep={Account: hf.Keep(entries=100_000, days=30)})`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.world.history import Bound

ENTRIES_MAX = 1 << 48
DAYS_MAX = 36_500
_DAY_NS = 24 * 3600 * S


class Keep(msgspec.Struct, frozen=True):
    """A bound on a history. An entry stays while it is among the last `entries`, or younger than `days`:
    whichever keeps more. One of the two may be left out."""

    entries: int | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        if self.entries is None and self.days is None:
            raise Invalid(what="keep", why="it names entries, days, or both")
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
    def bound(self) -> Bound:
        return Bound(self.entries or 0, int((self.days or 0) * _DAY_NS))


def bounds_of(keep: Mapping[Any, Any], worlds: list[type[Any]]) -> dict[type[Any], Bound]:
    """The bound of each world type that has one; Invalid for what is no world of the app, or no Keep."""
    found: dict[type[Any], Bound] = {}
    for world, one in keep.items():
        if world not in worlds:
            name = getattr(world, "__name__", repr(world)[:64])
            raise Invalid(what="keep", found=name, why="not a world of this app")
        if not isinstance(one, Keep):
            raise Invalid(
                what="keep", world=world.__name__, found=repr(one)[:64], expected="hf.Keep"
            )
        found[world] = one.bound
    return found
