"""The wall-clock leap check at the first open after a boot.

The first open after a boot sets store time from the wall clock, and store time never decreases. A boot with a wrong
wall clock would move store time into the future, where leases, keys and retention expire at once and permanently.
A leap beyond a bound is therefore refused. A smaller leap is recorded in the meta row so that `holdfast ready` can
warn about it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from holdfast.clock import Clock, S
from holdfast.config import STORE_TIME_LEAP_MAX_NS
from holdfast.errors import Invalid, StoreTimeLeap
from holdfast.store.schema import StoreMeta

TRUSTED_UNTIL_VARIABLE = "HOLDFAST_STORE_TIME_UNTIL"


def checked_leap_ns(clock: Clock, meta: StoreMeta | None, floor_ns: int) -> int:
    """Return the wall clock minus the time of the last commit; negative if the wall clock is behind. Later opens of
    the same boot return the recorded value. Raise StoreTimeLeap if the leap is implausible."""
    if meta is None or not floor_ns:
        return 0
    if meta.boot_id == clock.boot_id():
        return meta.leap_ns
    leap = clock.wall_ns() - floor_ns
    if leap > STORE_TIME_LEAP_MAX_NS and clock.wall_ns() > _trusted_until_ns():
        raise StoreTimeLeap(
            last=format_time(floor_ns),
            calendar=format_time(clock.wall_ns()),
            days=leap // (24 * 3600 * S),
        )
    return leap


def format_time(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns // S, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return str(ns)


def _trusted_until_ns() -> int:
    """The time until which the operator declares the wall clock correct; 0 if not configured."""
    configured = os.environ.get(TRUSTED_UNTIL_VARIABLE)
    if not configured:
        return 0
    try:
        day = datetime.fromisoformat(configured)
    except ValueError:
        raise Invalid(
            what=TRUSTED_UNTIL_VARIABLE, why="not a date such as 2031-12-31", found=configured[:32]
        ) from None
    if day.tzinfo is None:
        day = day.replace(tzinfo=UTC)
    return int(day.timestamp()) * S
