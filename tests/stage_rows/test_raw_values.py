"""Raw results that do not fit the schema, encoded as text and decoded. No return value makes the encoder fail."""

from __future__ import annotations

import datetime as dt
import json
from array import array
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import Row

from holdfast.spark import raw_values

pytestmark = pytest.mark.timeout(30)

NOW = dt.datetime(2024, 2, 29, 12, 30, 1, microsecond=5, tzinfo=dt.UTC)

ROUND_TRIP_VALUES = [
    None, True, 5, 1 << 90, 1.5, "\U0001f600", "\udcff", [1, [2]], {"a": {"b": None}},
    b"\x00\xff", Decimal("1.50"), NOW, NOW.date(), NOW.time(), dt.timedelta(days=-1, microseconds=1),
    {1: "a", "b": 2}, {"$float": "x"}, {(1, 2): 3}, {},
]  # fmt: skip


@pytest.mark.parametrize("value", ROUND_TRIP_VALUES, ids=ascii)
def test_raw_value_round_trips_unchanged(value: Any) -> None:
    text = raw_values.encode(value)
    assert text.isascii()
    assert raw_values.decode(text) == value
    assert type(raw_values.decode(text)) is type(value)


CONVERTED_VALUES = [
    ((1, 2), [1, 2]),
    (range(3), [0, 1, 2]),
    (array("d", [1.5]), [1.5]),
    ({1}, [1]),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.float32(0.5), 0.5),
    (pd.DataFrame({"a": [1, 2]}), [{"a": 1}, {"a": 2}]),
    (pa.table({"a": [1, 2]}), [{"a": 1}, {"a": 2}]),
    (Row(a=1, b=[Row(c=2)]), {"a": 1, "b": [{"c": 2}]}),
    (bytearray(b"x"), b"x"),
    (float("-inf"), float("-inf")),
]


@pytest.mark.parametrize(
    ("value", "found"), CONVERTED_VALUES, ids=lambda value: type(value).__name__
)
def test_raw_values_without_a_json_form_decode_to_plain_values(value: Any, found: Any) -> None:
    text = raw_values.encode(value)
    json.loads(text, parse_constant=pytest.fail)
    assert raw_values.decode(text) == found


def test_raw_object_of_an_unknown_type_is_encoded_with_its_class_name() -> None:
    found = raw_values.decode(raw_values.encode({"a": object(), "b": 1}))
    assert found["a"]["$object"] == "builtins.object"
    assert found["b"] == 1


def test_raw_encode_ends_for_recursive_and_deep_values() -> None:
    twice: list[Any] = []
    twice += [twice, twice]
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    for value in (twice, deep, {"a": twice}):
        assert "$object" in raw_values.encode(value)


def test_raw_encode_cuts_text_above_the_bound_and_records_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw_values, "RAW_BYTES_MAX", 100)
    monkeypatch.setattr(raw_values, "CUT_CHARS", 10)
    found = raw_values.decode(raw_values.encode("x" * 200))
    assert found == {"$cut": '"' + "x" * 9, "bytes": 202}
