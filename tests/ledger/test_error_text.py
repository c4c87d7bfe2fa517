"""Normalised error texts and error groups: texts that differ only in numbers, names or paths are one error."""

from __future__ import annotations

import pytest

from holdfast.durable.error_text import NORMALISED_CHARS_MAX, normalise
from holdfast.ledger.error_groups import EXAMPLES_MAX, GROUPS_KEPT, OTHER_ERRORS, ErrorGroups


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("ValueError: no label for document 107", "ValueError: no label for document <n>"),
        ("ValueError: 207", "ValueError: <n>"),
        ("it took -3.5e-7 s of 1,000.5", "it took <n> s of <n>"),
        ("KeyError: 'x12'", "KeyError: <text>"),
        ('no such model "gpt 4"', "no such model <text>"),
        ("it's the user's fault", "it's the user's fault"),
        ("open /data/in/7.txt failed", "open <path> failed"),
        ("and/or", "and/or"),
        ("at 0x7f3aa, of deadbeef01", "at <hex>, of <hex>"),
        ("job 550e8400-e29b-41d4-a716-446655440000 is gone", "job <id> is gone"),
        ("request req_011CXabcdefgh23 failed", "request <id> failed"),
        ("GET https://api.example.com/v1?x=1 timed out", "GET <url> timed out"),
        ("HTTP Error 401: Unauthorized", "HTTP Error 401: Unauthorized"),
        ("Error code: 429 - try in 20s", "Error code: 429 - try in <n>s"),
        ("status_code=503 after 3 tries", "status_code=503 after <n> tries"),
        ("two\n  lines", "two lines"),
        ("", ""),
    ],
)
def test_normalise_replaces_variable_parts_of_an_error_text(text: str, normalised: str) -> None:
    assert normalise(text) == normalised
    assert normalise(normalised) == normalised


def test_normalise_truncates_a_long_text() -> None:
    assert len(normalise("a b " * 100_000)) == NORMALISED_CHARS_MAX


def test_error_groups_keep_examples_and_counts() -> None:
    groups = ErrorGroups()
    for at in range(30):
        groups.add(4, f"ValueError: row {at}", rows=1)
    groups.add(1, "TimeoutError", count=1)
    first, second = groups.top(10)
    assert (first.error_class, first.text, first.count, first.rows) == (
        4,
        "ValueError: row <n>",
        30,
        30,
    )
    assert first.examples == [f"ValueError: row {at}" for at in range(EXAMPLES_MAX)]
    assert (second.count, second.rows) == (1, 0)
    # The next process starts from the published groups.
    again = ErrorGroups(groups.top(10))
    again.add(4, "ValueError: row 99", rows=1)
    assert again.top(1)[0].rows == 31


def test_error_groups_count_every_failed_row_beyond_groups_kept() -> None:
    groups = ErrorGroups()
    words = [f"{a}{b}{c}" for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyzabcd"]
    assert len(words) == 1000 > GROUPS_KEPT
    for word in words:
        groups.add(4, f"Bad {word}", rows=1)
        groups.add(5, "often", rows=1)
    top_groups = groups.top(20)
    assert sum(group.rows for group in top_groups if group.error_class == 4) == 1000
    assert (top_groups[0].text, top_groups[0].rows) == ("often", 1000)
    assert top_groups[-1].text == OTHER_ERRORS
