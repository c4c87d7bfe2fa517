"""`Difference.document`: the text fields that `holdfast verify --json` prints."""

from __future__ import annotations

import pytest

from holdfast.durable.difference import Difference


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "nothing"), (b"\x01\xff", "01ff"), (("bank", 3), "bank/3"), (7, "7")],
    ids=["none", "bytes", "tuple", "number"],
)
def test_difference_document_formats_values_as_text(value: object, text: str) -> None:
    document = Difference("queue", "bank/work", "counter ready", value, 1).document()
    assert document == {
        "kind": "queue",
        "where": "bank/work",
        "what": "counter ready",
        "found": text,
        "expected": "1",
    }


def test_difference_document_appends_the_log_height() -> None:
    difference = Difference("task", "bank/1-1", "state", "DEAD", "FAILED", height=9)
    assert difference.document()["what"] == "state at height 9"
