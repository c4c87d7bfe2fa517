"""The calendar at the first open after a boot: store time is set by it, and never falls again.

A machine that boots with a wrong calendar would carry store time into the future: leases, keys and retention run out
at once, and for good. So a leap beyond a bound is refused, and one that is merely long is kept in the meta row, for
`holdfast ready` to warn of.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from holdfast.clock import Clock, S
from holdfast.config import STORE_TIME_LEAP_MAX_NS
from holdfast.errors import Invalid, StoreTimeLeap
from holdfast.store.schema import Meta

VARIABLE = "HOLDFAST_STORE_TIME_UNTIL"


def leap_ns(clock: Clock, meta: Meta | None, floor_ns: int) -> int:
    """By how much the calendar is after the last commit; less than 0 if it is before it. Within a boot, what it was
    when the boot began. StoreTimeLeap if it is too far after it to be true."""
    if meta is None or not floor_ns:
        return 0
    if meta.boot_id == clock.boot_id():
        return meta.leap_ns
    leap = clock.wall_ns() - floor_ns
    if leap > STORE_TIME_LEAP_MAX_NS and clock.wall_ns() > _until_ns():
        raise StoreTimeLeap(
            last=text(floor_ns), calendar=text(clock.wall_ns()), days=leap // (24 * 3600 * S)
        )
    return leap


def text(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns // S, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return str(ns)


def _until_ns() -> int:
    """The day up to which the calendar is said to be right; 0 if none is given."""
    given = os.environ.get(VARIABLE)
    if not given:
        return 0
    try:
        day = datetime.fromisoformat(given)
    except ValueError:
        raise Invalid(what=VARIABLE, why="a date, as 2031-12-31", found=given[:32]) from None
    if day.tzinfo is None:
        day = day.replace(tzinfo=UTC)
    return int(day.timestamp()) * S
