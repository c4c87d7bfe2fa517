"""Cron rules: strict parsing, and correct instants on days of DST changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.errors import Invalid
from holdfast.world.cron import UnknownTimeZone, parse, zone_of

MODULES = ("holdfast.world.cron",)


def instants(rule: str, start: str, zone: str = "Europe/Berlin") -> list[str]:
    """Return the next four instants as local wall time with UTC offset."""

    def iterate() -> object:
        at_ns = int(datetime.fromisoformat(start).timestamp()) * 10**9
        while True:
            at_ns = parse(rule).next_ns(at_ns, zone)
            yield datetime.fromtimestamp(at_ns // 10**9, zone_of(zone)).strftime("%m-%d %H:%M %z")

    return list(islice(iterate(), 4))  # type: ignore[call-overload]


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
        # `*/n` does not restrict a day field, so both day fields must match: 1 and 31 January, if a
        # Sunday.
        ("0 0 */30 1 */7", ["01-31 00:00", "01-01 00:00", "01-31 00:00", "01-01 00:00"]),
    ],
)
def test_cron_rule_matches_its_times(rule: str, expected: list[str]) -> None:
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
def test_invalid_cron_rule_is_refused(rule: str) -> None:
    with pytest.raises(Invalid):
        parse(rule)


@pytest.mark.parametrize(
    "rule",
    ["0 0 29 2 *", "0 0 29 2 */7", "0 0 */28 2 */7", "0 0 */30 1 */7", "59 23 31 12 *"],
)
@pytest.mark.parametrize("start", ["1999-12-31", "2024-02-29", "2096-03-01", "2099-12-31"])
def test_cron_rule_finds_rare_dates_across_a_century(rule: str, start: str) -> None:
    after_ns = int(datetime.fromisoformat(f"{start}T12:00+00:00").timestamp()) * 10**9
    found_ns = parse(rule).next_ns(after_ns, "UTC")
    assert found_ns > after_ns
    assert parse(rule).matches(datetime.fromtimestamp(found_ns // 10**9, UTC).date())


# -- DST changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "rule", "start", "expected"),
    [
        ("Europe/Berlin", "30 2 * * *", "2026-03-28T00:00",
         ["03-28 02:30 +0100", "03-29 03:00 +0200", "03-30 02:30 +0200"]),
        ("America/New_York", "30 2 * * *", "2026-03-07T12:00",
         ["03-08 03:00 -0400", "03-09 02:30 -0400", "03-10 02:30 -0400"]),
        # A change of half an hour: from 02:00 to 02:30.
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03T00:00",
         ["10-04 02:30 +1100", "10-05 02:15 +1100", "10-06 02:15 +1100"]),
        # A change at midnight: the day begins at 01:00.
        ("America/Santiago", "30 0 * * *", "2026-09-05T12:00",
         ["09-06 01:00 -0300", "09-07 00:30 -0300", "09-08 00:30 -0300"]),
        # A skipped day: all its times run once, at the jump.
        ("Pacific/Apia", "0 */6 30 * *", "2011-12-30T00:00",
         ["12-31 00:00 +1400", "01-30 00:00 +1400", "01-30 06:00 +1400"]),
    ],
)  # fmt: skip
def test_cron_time_skipped_by_dst_runs_at_the_jump(
    zone: str, rule: str, start: str, expected: list[str]
) -> None:
    assert instants(rule, f"{start}+00:00", zone)[:3] == expected


def test_cron_times_skipped_together_run_once() -> None:
    assert instants("*/20 * * * *", "2026-03-29T00:30+00:00") == [
        "03-29 01:40 +0100", "03-29 03:00 +0200", "03-29 03:20 +0200", "03-29 03:40 +0200",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("zone", "rule", "start", "expected"),
    [
        ("Europe/Berlin", "30 2 * * *", "2026-10-24T00:00",
         ["10-24 02:30 +0200", "10-25 02:30 +0200", "10-26 02:30 +0100"]),
        ("America/New_York", "30 1 * * *", "2026-10-31T12:00",
         ["11-01 01:30 -0400", "11-02 01:30 -0500", "11-03 01:30 -0500"]),
        # A change of half an hour: 01:30 to 02:00 occurs twice.
        ("Australia/Lord_Howe", "45 1 * * *", "2026-04-03T20:00",
         ["04-05 01:45 +1100", "04-06 01:45 +1030", "04-07 01:45 +1030"]),
        # Each wall-clock hour runs once.
        ("America/New_York", "0 * * * *", "2026-11-01T03:30",
         ["11-01 00:00 -0400", "11-01 01:00 -0400", "11-01 02:00 -0500"]),
        # A change at midnight: the last hour of the previous day occurs twice.
        ("America/Santiago", "30 23 * * *", "2026-04-04T12:00",
         ["04-04 23:30 -0300", "04-05 23:30 -0400", "04-06 23:30 -0400"]),
    ],
)  # fmt: skip
def test_cron_time_repeated_by_dst_runs_the_first_time(
    zone: str, rule: str, start: str, expected: list[str]
) -> None:
    assert instants(rule, f"{start}+00:00", zone)[:3] == expected


def test_cron_keeps_quarter_hour_offsets() -> None:
    assert instants("0 9 * * *", "2026-11-13T12:00+00:00", "Asia/Kathmandu")[:2] == [
        "11-14 09:00 +0545", "11-15 09:00 +0545",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [None, 5, b"* * * * *", ["* * * * *"], {}])
def test_non_text_is_no_cron_rule_and_no_time_zone(wrong: Any) -> None:
    with pytest.raises(Invalid):
        parse(wrong)
    with pytest.raises(UnknownTimeZone):
        zone_of(wrong)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime"])
def test_unknown_time_zone_error_mentions_tzdata(zone: str) -> None:
    with pytest.raises(UnknownTimeZone, match="tzdata"):
        zone_of(zone)


ZONES = some.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe"]
)
RULES = some.sampled_from(
    ["*/7 * * * *", "30 2 * * *", "0 0 * * sun", "59 23 1 * *", "15 1-3 * 3,10,11 *"]
)


@given(some.datetimes(datetime(2000, 1, 1), datetime(2050, 1, 1)), RULES, ZONES)
def test_cron_instants_increase_and_match_the_rule_or_a_dst_jump(
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
        assert jumped or (named and rule.matches(shown.date()))


@given(
    some.datetimes(datetime(2000, 1, 1), datetime(2050, 1, 1)),
    some.sampled_from(["*/7 * * * *", "15,45 1-3 * * *", "0 0 * * *", "30 23 * * sat,sun"]),
    ZONES,
)
def test_cron_misses_no_instant(start: datetime, text: str, zone: str) -> None:
    """Compare with a minute-by-minute search over the day before the next instant."""
    rule, tz = parse(text), zone_of(zone)
    after = start.replace(tzinfo=UTC, second=0, microsecond=0)
    found = datetime.fromtimestamp(rule.next_ns(_ns(after), zone) // 10**9, UTC)
    minute = max(after, found - timedelta(days=1))
    while (minute := minute + timedelta(minutes=1)) < found:
        shown = minute.astimezone(tz)
        named = shown.minute in rule.minutes and shown.hour in rule.hours
        assert shown.fold or not (named and rule.matches(shown.date())), shown


def _ns(when: datetime) -> int:
    return int(when.timestamp()) * 10**9
