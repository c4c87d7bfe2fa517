"""A calendar rule in five fields, and the instants it names in a time zone. Pure: no clock.

    minute 0-59   hour 0-23   day 1-31   month 1-12 or jan-dec   weekday 0-7 or sun-sat (0, 7: Sunday)

Each field is `*`, or a list of numbers and ranges, each with an optional step: `*/15`, `9-17`,
`mon-fri`, `1,15,20-28/2`. As in every cron, a day matches if either its number or its weekday does
when both are restricted, and if both do otherwise. Anything else is `Invalid` and says which field.

A rule speaks of the clock on the wall, so a day on which that clock is set needs care:

    set forward   a time that does not exist is taken at the moment of the change, once
    set back      a time that exists twice is taken the first time only
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.errors import Invalid

# Every rule that names a day at all names one within so many years: 29 February on a certain weekday,
# over a century's end.
YEARS_MAX = 41
_S = 1_000_000_000
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class NoZone(Invalid):
    code = "no_zone"
    hint = "name a zone of the IANA database; if there is none here, `pip install tzdata`"


class Field(NamedTuple):
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day", 1, 31),
    Field("month", 1, 12, _MONTHS),
    Field("weekday", 0, 7, _WEEKDAYS),
)


class Cron(NamedTuple):
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    # Both are restricted: one of them suffices.
    either_day: bool

    def names(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_number = day.day in self.days
        by_weekday = day.isoweekday() % 7 in self.weekdays
        return by_number or by_weekday if self.either_day else by_number and by_weekday

    def next_ns(self, after_ns: int, zone: str) -> int:
        """The first instant after this one; Invalid if the rule names none (30 February)."""
        tz = zone_of(zone)
        day = datetime.fromtimestamp(after_ns // _S, tz).date()
        last = day.year + YEARS_MAX
        while day.year <= last:
            if day.month not in self.months:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
                continue
            if self.names(day):
                found = self._first(day, tz, after_ns)
                if found is not None:
                    return found
            day += timedelta(days=1)
        raise Invalid(what="cron", why="it names no day that there is")

    def _first(self, day: date, tz: ZoneInfo, after_ns: int) -> int | None:
        """The first instant of a day after this one. Instants follow each other as times do."""
        times = range(len(self.hours) * len(self.minutes))
        if self._instant_ns(day, times[-1], tz) <= after_ns:
            return None
        at = bisect_right(times, after_ns, key=lambda n: self._instant_ns(day, n, tz))
        return self._instant_ns(day, at, tz)

    def _instant_ns(self, day: date, n: int, tz: ZoneInfo) -> int:
        hour, minute = divmod(n, len(self.minutes))
        wall = time(self.hours[hour], self.minutes[minute])
        return _instant_ns(datetime.combine(day, wall), tz)


def parse(text: str) -> Cron:
    if not isinstance(text, str):
        raise Invalid(what="cron", found=repr(text)[:64], expected="text")
    return _parse(text)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Cron:
    parts = text.split()
    if len(parts) != len(FIELDS):
        expected = " ".join(field.name for field in FIELDS)
        raise Invalid(what="cron", found=str(text)[:64], expected=expected)
    sets = [_values(part.lower(), field) for part, field in zip(parts, FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = sets
    rule = Cron(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(number % 7 for number in weekdays),
        not parts[2].startswith("*") and not parts[4].startswith("*"),
    )
    _require_days(rule, text)
    return rule


def zone_of(zone: str) -> ZoneInfo:
    if not isinstance(zone, str):
        raise NoZone(what="zone", found=repr(zone)[:64])
    return _zone(zone)


@lru_cache(maxsize=256)
def _zone(zone: str) -> ZoneInfo:
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise NoZone(what="zone", found=str(zone)[:64]) from None


# -- inside --------------------------------------------------------------------------------------


def _values(text: str, field: Field) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _number(step_text, field, text) if slash else 1
        if span == "*":
            low, high = field.low, min(field.high, 6) if field.names is _WEEKDAYS else field.high
        else:
            first, dash, last = span.partition("-")
            low = _named(first, field, text)
            # As elsewhere, `5/10` begins at 5 and goes on to the end.
            high = _named(last, field, text) if dash else (field.high if slash else low)
        if not (field.low <= low <= high <= field.high and 1 <= step <= field.high):
            raise _wrong(field, text)
        found.update(range(low, high + 1, step))
    return found


def _named(text: str, field: Field, whole: str) -> int:
    if text in field.names:
        return field.names.index(text) + (1 if field.names is _MONTHS else 0)
    return _number(text, field, whole)


def _number(text: str, field: Field, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 2):
        raise _wrong(field, whole)
    return int(text)


def _wrong(field: Field, text: str) -> Invalid:
    return Invalid(what="cron", field=field.name, found=text[:64], min=field.low, max=field.high)


def _require_days(rule: Cron, text: str) -> None:
    """In 28 years every day of the year falls on every day of the week, 29 February, too."""
    first = date(1996, 1, 1)
    if not any(rule.names(first + timedelta(days=n)) for n in range(366 * 28)):
        raise Invalid(what="cron", found=text[:64], why="it names no day that there is")


def _instant_ns(wall: datetime, tz: ZoneInfo) -> int:
    """When the clock on the wall shows this for the first time, or would have, had it not been set."""
    instant = wall.replace(tzinfo=tz, fold=0).astimezone(UTC)
    shown = instant.astimezone(tz).replace(tzinfo=None)
    if shown != wall:
        # In the gap. With fold=1 the offset is the one after the change; the change itself is where
        # both offsets meet: search for it, to the second.
        instant = _change(wall, tz)
    return int(instant.timestamp()) * _S


def _change(wall: datetime, tz: ZoneInfo) -> datetime:
    """The moment at which the clock jumps over this time."""
    low = wall.replace(tzinfo=tz, fold=1).astimezone(UTC) - timedelta(seconds=1)
    high = wall.replace(tzinfo=tz, fold=0).astimezone(UTC)
    before = low.astimezone(tz).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=int((high - low).total_seconds()) // 2)
        if middle.astimezone(tz).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high
