"""Cron rules compared with the library cronsim, and with a model that looks at every minute.

The library has other rules for days on which a zone's offset changes. On these days docs/timers.md is the rule: the
model states it minute by minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from random import Random
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from holdfast.errors import Invalid
from holdfast.world.cron import FIELDS, CronField, CronRule, parse, zone_of

MODULES = ("holdfast.world.cron",)

ZONES = (
    "UTC", "Europe/Berlin", "Europe/London", "America/New_York", "America/Sao_Paulo", "America/Santiago",
    "America/St_Johns", "Africa/Casablanca", "Africa/Cairo", "Asia/Kathmandu", "Asia/Tehran", "Asia/Tokyo",
    "Asia/Gaza", "Australia/Lord_Howe", "Antarctica/Troll", "Atlantic/Azores", "Pacific/Apia",
    "Pacific/Chatham",
)  # fmt: skip
EXPRESSIONS = 10_000
OCCURRENCES = 4
MINUTE = timedelta(minutes=1)


# -- the library -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_rules_in_random_zones_match_the_times_of_cronsim() -> None:
    random = Random(18)
    compared = 0
    while compared < EXPRESSIONS:
        text, zone = random_rule(random), random.choice(ZONES)
        try:
            rule = parse(text)
        except Invalid:
            continue  # it matches no existing date
        start = datetime(2005, 1, 1, tzinfo=UTC) + MINUTE * random.randrange(25 * 366 * 1440)
        ours = list(islice(instants(rule, start, zone), OCCURRENCES))
        local = start.astimezone(zone_of(zone))
        theirs = [found.astimezone(UTC) for found in islice(CronSim(text, local), OCCURRENCES)]
        horizon = min(ours[-1], theirs[-1])
        assert without_days_of_change(ours, horizon, zone) == without_days_of_change(
            theirs, horizon, zone
        ), (text, zone, start)
        compared += 1


def without_days_of_change(found: list[datetime], horizon: datetime, zone: str) -> list[datetime]:
    tz = zone_of(zone)
    return [
        at for at in found if at <= horizon and not is_day_of_change(at.astimezone(tz).date(), tz)
    ]


def is_day_of_change(day: date, tz: ZoneInfo) -> bool:
    """Whether the offset changes on this local day, or at its midnight."""
    edges = [
        datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(hours=h) for h in (-26, 50)
    ]
    return edges[0].astimezone(tz).utcoffset() != edges[1].astimezone(tz).utcoffset()


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_days_of_offset_changes_match_a_model_of_every_minute() -> None:
    random = Random(18)
    changes = [(zone, change) for zone in ZONES for change in offset_changes(zone)]
    assert len(changes) > 200
    for zone, change in random.sample(changes, 40):
        start, end = change - timedelta(hours=20), change + timedelta(hours=20)
        minutes = shown_minutes(start, end, zone_of(zone))
        for text in ("*/20 * * * *", "30 2 * * *", "0 0 * * *", *frequent_rules(random, 2)):
            rule = parse(text)
            found = []
            for at in instants(rule, start, zone):
                if at >= end:
                    break
                found.append(at)
            assert found == matches_by_minute(rule, minutes), (text, zone, change)


def shown_minutes(
    start: datetime, end: datetime, tz: ZoneInfo
) -> list[tuple[datetime, list[datetime]]]:
    """Return each minute after the start with its new local times: the local times that the clock skipped just before,
    then its own local time unless an earlier minute had it."""
    minutes: list[tuple[datetime, list[datetime]]] = []
    latest = local_of(start, tz)
    at = start + MINUTE
    while at < end:
        local = local_of(at, tz)
        new: list[datetime] = []
        while latest < local:
            latest += MINUTE
            new.append(latest)
        minutes.append((at, new))
        at += MINUTE
    return minutes


def matches_by_minute(
    rule: CronRule, minutes: list[tuple[datetime, list[datetime]]]
) -> list[datetime]:
    return [
        at
        for at, local_times in minutes
        if any(
            local.minute in rule.minutes and local.hour in rule.hours and rule.matches(local.date())
            for local in local_times
        )
    ]


def local_of(at: datetime, tz: ZoneInfo) -> datetime:
    return at.astimezone(tz).replace(tzinfo=None)


def offset_changes(zone: str) -> list[datetime]:
    """The offset changes of a zone from 2008 to 2030."""
    tz, found = zone_of(zone), []
    day = datetime(2008, 1, 1, tzinfo=UTC)
    while day.year < 2030:
        following = day + timedelta(days=1)
        if day.astimezone(tz).utcoffset() != following.astimezone(tz).utcoffset():
            at = day
            while at.astimezone(tz).utcoffset() == day.astimezone(tz).utcoffset():
                at += 15 * MINUTE
            found.append(at)
        day = following
    return found


# -- rules -----------------------------------------------------------------------------------------


def instants(rule: CronRule, start: datetime, zone: str) -> Iterator[datetime]:
    at_ns = int(start.timestamp()) * 10**9
    while True:
        at_ns = rule.next_ns(at_ns, zone)
        yield datetime.fromtimestamp(at_ns // 10**9, UTC)


def random_rule(random: Random) -> str:
    return " ".join(random_field(random, field) for field in FIELDS)


def frequent_rules(random: Random, count: int) -> list[str]:
    """Rules that match every day."""
    return [
        " ".join(random_field(random, field) for field in FIELDS[:2]) + " * * *"
        for _ in range(count)
    ]


def random_field(random: Random, field: CronField) -> str:
    return ",".join(random_part(random, field) for _ in range(random.choice((1, 1, 1, 2, 3))))


def random_part(random: Random, field: CronField) -> str:
    low = random.randint(field.low, field.high)
    # The library reads 7-7/2 as 7/2.
    high = random.randint(min(low + 1, field.high), field.high)
    low = min(low, high - 1)
    step = random.randint(1, field.high // 2)
    if field.names and random.random() < 0.3:
        return random.choice(field.names)
    return random.choice(
        (
            "*",
            "*",
            "*",
            f"*/{step}",
            f"{low}",
            f"{low}-{high}",
            f"{low}-{high}/{step}",
            f"{low}/{step}",
        )
    )
