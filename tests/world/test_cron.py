"""Calendar rules: strict to read, and right on days when the clock is set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.errors import Invalid
from holdfast.world import cron
from holdfast.world.cron import NoZone, parse, zone_of

MODULES = ("holdfast.world.cron",)


def instants(rule: str, start: str, zone: str = "Europe/Berlin") -> list[str]:
    """The next four, as the clock on the wall shows them, with its offset from UTC."""

    def go_on() -> object:
        at_ns = int(datetime.fromisoformat(start).timestamp()) * 10**9
        while True:
            at_ns = parse(rule).next_ns(at_ns, zone)
            yield datetime.fromtimestamp(at_ns // 10**9, zone_of(zone)).strftime("%m-%d %H:%M %z")

    return list(islice(go_on(), 4))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("*/20 * * * *", ["11-13 12:20", "11-13 12:40", "11-13 13:00", "11-13 13:20"]),
        ("0 9 * * mon-fri", ["11-16 09:00", "11-17 09:00", "11-18 09:00", "11-19 09:00"]),
        ("0 9 * * 7", ["11-15 09:00", "11-22 09:00", "11-29 09:00", "12-06 09:00"]),
        ("30 8-10/2 * * *", ["11-14 08:30", "11-14 10:30", "11-15 08:30", "11-15 10:30"]),
        ("0 0 1 jan,JUL *", ["01-01 00:00", "07-01 00:00", "01-01 00:00", "07-01 00:00"]),
        ("5/25 12 * * *", ["11-13 12:05", "11-13 12:30", "11-13 12:55", "11-14 12:05"]),
        ("0 0 13 * fri", ["11-20 00:00", "11-27 00:00", "12-04 00:00", "12-11 00:00"]),
        ("0 0 31 * *", ["12-31 00:00", "01-31 00:00", "03-31 00:00", "05-31 00:00"]),
        ("0 0 29 2 *", ["02-29 00:00"] * 4),
    ],
)
def test_a_rule_names_its_times(rule: str, expected: list[str]) -> None:
    found = instants(rule, "2026-11-13T12:00+00:00", "UTC")
    assert [text.removesuffix(" +0000") for text in found] == expected


@pytest.mark.parametrize(
    "rule",
    [
        "", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *",
        "* * * 13 *", "* * * 0 *", "* * * * 8", "-1 * * * *", "5-1 * * * *", "*/0 * * * *",
        "*/99 * * * *", "1,,2 * * * *", "a * * * *", "* * * foo *", "* * * * monday", "1.5 * * * *",
        "٣ * * * *", "@daily", "* * 30 2 *", "* * 31 4,6,9,11 *", "1-2-3 * * * *", "1/2/3 * * * *",
        "*/ * * * *", "/5 * * * *", "mon * * * *",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(Invalid):
        parse(rule)


def test_a_time_that_the_clock_jumps_over_is_taken_at_the_jump() -> None:
    assert instants("30 2 * * *", "2026-03-28T00:00+00:00") == [
        "03-28 02:30 +0100", "03-29 03:00 +0200", "03-30 02:30 +0200", "03-31 02:30 +0200",
    ]  # fmt: skip


def test_times_that_are_jumped_over_together_are_one() -> None:
    assert instants("*/20 * * * *", "2026-03-29T00:30+00:00") == [
        "03-29 01:40 +0100", "03-29 03:00 +0200", "03-29 03:20 +0200", "03-29 03:40 +0200",
    ]  # fmt: skip


def test_a_time_that_the_clock_shows_twice_is_taken_the_first_time() -> None:
    assert instants("30 2 * * *", "2026-10-24T00:00+00:00") == [
        "10-24 02:30 +0200", "10-25 02:30 +0200", "10-26 02:30 +0100", "10-27 02:30 +0100",
    ]  # fmt: skip


def test_a_jump_of_half_an_hour_is_found_too() -> None:
    assert instants("15 2 * * *", "2026-10-03T00:00+00:00", "Australia/Lord_Howe")[:2] == [
        "10-04 02:30 +1100", "10-05 02:15 +1100",
    ]  # fmt: skip


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime"])
def test_an_unknown_zone_says_what_to_install(zone: str) -> None:
    with pytest.raises(NoZone, match="tzdata"):
        zone_of(zone)


ZONES = some.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"])
RULES = some.sampled_from(
    ["*/7 * * * *", "30 2 * * *", "0 0 * * sun", "59 23 1 * *", "15 1-3 * 3,10,11 *"]
)


@given(some.datetimes(datetime(2000, 1, 1), datetime(2050, 1, 1)), RULES, ZONES)
def test_instants_go_on_and_each_is_named_by_the_rule_or_by_a_jump(
    start: datetime, text: str, zone: str
) -> None:
    rule, tz = parse(text), zone_of(zone)
    found = [int(start.replace(tzinfo=UTC).timestamp()) * 10**9]
    for _ in range(5):
        found.append(rule.next_ns(found[-1], zone))
    assert all(a < b for a, b in pairwise(found))
    for at_ns in found[1:]:
        shown = datetime.fromtimestamp(at_ns // 10**9, tz)
        before = datetime.fromtimestamp(at_ns // 10**9 - 1, tz)
        jumped = shown.replace(tzinfo=None) - before.replace(tzinfo=None) > timedelta(seconds=1)
        named = shown.minute in rule.minutes and shown.hour in rule.hours
        assert jumped or (named and rule.names(shown.date()))
    assert cron.DAYS_MAX > 366 * 8
