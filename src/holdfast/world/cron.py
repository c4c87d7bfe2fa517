"""Cron rules with five fields, and the instants that they match in a time zone. Pure: no clock.

    minute 0-59   hour 0-23   day 1-31   month 1-12 or jan-dec   weekday 0-7 or sun-sat (0, 7: Sunday)

Each field is `*`, or a list of numbers and ranges, each with an optional step: `*/15`, `9-17`,
`mon-fri`, `1,15,20-28/2`. As in other crons, if day and weekday are both restricted, one of them
must match. Otherwise both must match. Any other input raises `Invalid` with the name of the field.

A rule refers to local wall clock time. Daylight saving changes are handled as follows:

    set forward   a skipped local time matches once, at the moment of the change
    set back      a repeated local time matches its first occurrence only
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast import failpoints
from holdfast.errors import Invalid

# Every satisfiable rule matches a date within this number of years. The worst case is 29 February
# on a given weekday across a century without a leap year.
YEARS_MAX = 41
_S = 1_000_000_000
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class UnknownTimeZone(Invalid):
    """An unknown IANA time zone."""

    code = "no_zone"
    hint = "use a zone of the IANA database; if the system has none, `pip install tzdata`"


class CronField(NamedTuple):
    """One field of a cron rule: its name, range and symbolic values."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


FIELDS = (
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day", 1, 31),
    CronField("month", 1, 12, _MONTHS),
    CronField("weekday", 0, 7, _WEEKDAYS),
)


class CronRule(NamedTuple):
    """A parsed cron rule."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    # Day and weekday are both restricted: one match suffices.
    either_day: bool

    def matches(self, day: date) -> bool:
        """Whether the rule matches a date."""
        if day.month not in self.months:
            return False
        by_number = day.day in self.days
        by_weekday = day.isoweekday() % 7 in self.weekdays
        return by_number or by_weekday if self.either_day else by_number and by_weekday

    def next_ns(self, after_ns: int, zone: str) -> int:
        """Return the first matching instant after the given one. Raise Invalid if there is none (30
        February)."""
        tz = zone_of(zone)
        day = datetime.fromtimestamp(after_ns // _S, tz).date()
        last = day.year + YEARS_MAX
        while day.year <= last:
            if day.month not in self.months:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
                continue
            if self.matches(day):
                found = self._first_instant_ns(day, tz, after_ns)
                if found is not None:
                    return found
            day += timedelta(days=1)
        raise Invalid(what="cron", why="it matches no existing date")

    def _first_instant_ns(self, day: date, tz: ZoneInfo, after_ns: int) -> int | None:
        """Return the first matching instant of a date after the given instant. Instants ascend with
        local times."""
        times = range(len(self.hours) * len(self.minutes))
        if self._instant_ns(day, times[-1], tz) <= after_ns:
            return None
        at = bisect_right(times, after_ns, key=lambda n: self._instant_ns(day, n, tz))
        return self._instant_ns(day, at, tz)

    def _instant_ns(self, day: date, n: int, tz: ZoneInfo) -> int:
        hour, minute = divmod(n, len(self.minutes))
        wall = time(self.hours[hour], self.minutes[minute])
        return _instant_ns(datetime.combine(day, wall), tz)


def parse(text: str) -> CronRule:
    if not isinstance(text, str):
        raise Invalid(what="cron", found=repr(text)[:64], expected="text")
    return _parse(text)


@lru_cache(maxsize=1024)
def _parse(text: str) -> CronRule:
    parts = text.split()
    if len(parts) != len(FIELDS):
        expected = " ".join(field.name for field in FIELDS)
        raise Invalid(what="cron", found=str(text)[:64], expected=expected)
    sets = [_parse_field(part.lower(), field) for part, field in zip(parts, FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = sets
    rule = CronRule(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(number % 7 for number in weekdays),
        not parts[2].startswith("*") and not parts[4].startswith("*"),
    )
    _require_matching_date(rule, text)
    return rule


def zone_of(zone: str) -> ZoneInfo:
    if not isinstance(zone, str):
        raise UnknownTimeZone(what="zone", found=repr(zone)[:64])
    if failpoints.armed:
        failpoints.hit("cron.find_zone", zone)
    return _zone(zone)


@lru_cache(maxsize=256)
def _zone(zone: str) -> ZoneInfo:
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise UnknownTimeZone(what="zone", found=str(zone)[:64]) from None


# -- inside --------------------------------------------------------------------------------------


def _parse_field(text: str, field: CronField) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _parse_number(step_text, field, text) if slash else 1
        if span == "*":
            low, high = field.low, min(field.high, 6) if field.names is _WEEKDAYS else field.high
        else:
            first, dash, last = span.partition("-")
            low = _parse_value(first, field, text)
            # As in other crons, `5/10` starts at 5 and ends at the maximum of the field.
            high = _parse_value(last, field, text) if dash else (field.high if slash else low)
        if not (field.low <= low <= high <= field.high and 1 <= step <= field.high):
            raise _field_error(field, text)
        found.update(range(low, high + 1, step))
    return found


def _parse_value(text: str, field: CronField, whole: str) -> int:
    if text in field.names:
        return field.names.index(text) + (1 if field.names is _MONTHS else 0)
    return _parse_number(text, field, whole)


def _parse_number(text: str, field: CronField, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 2):
        raise _field_error(field, whole)
    return int(text)


def _field_error(field: CronField, text: str) -> Invalid:
    return Invalid(what="cron", field=field.name, found=text[:64], min=field.low, max=field.high)


def _require_matching_date(rule: CronRule, text: str) -> None:
    """Raise Invalid if the rule matches no date. Within 28 years every date falls on every weekday,
    including 29 February."""
    first = date(1996, 1, 1)
    if not any(rule.matches(first + timedelta(days=n)) for n in range(366 * 28)):
        raise Invalid(what="cron", found=text[:64], why="it matches no existing date")


def _instant_ns(wall: datetime, tz: ZoneInfo) -> int:
    """Return the first instant of a local time, or the moment of the change if the local time is
    skipped."""
    instant = wall.replace(tzinfo=tz, fold=0).astimezone(UTC)
    shown = instant.astimezone(tz).replace(tzinfo=None)
    if shown != wall:
        # The local time is skipped. With fold=1 the offset is the one after the change. Search for
        # the change, at which the offsets meet, to the second.
        instant = _gap_end(wall, tz)
    return int(instant.timestamp()) * _S


def _gap_end(wall: datetime, tz: ZoneInfo) -> datetime:
    """Return the moment at which the local clock skips this time."""
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
