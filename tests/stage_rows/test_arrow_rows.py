"""Conversion between Arrow and Python rows. A result that does not fit the schema is refused with its column."""

from __future__ import annotations

import datetime as dt
import math
import pickle
from array import array
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark.sql import types as T
from pyspark.sql.types import Row, StructField, StructType, _create_row

from holdfast.spark.arrow_rows import (
    CONVERT_ROWS,
    ResultEncoder,
    RowReader,
    decode_table,
    encode_stream,
    to_rows,
)
from holdfast.spark.coercion import WrongSchema
from tests.case_ids import stable_repr

pytestmark = pytest.mark.timeout(30)


class ColorEnum(Enum):
    RED = 7


class LetterEnum(Enum):
    A = "a"


@dataclass
class PointDataclass:
    a: Any
    b: Any


class PointTuple(NamedTuple):
    b: str
    a: int


@dataclass(frozen=True)
class ResultDataclass:
    y: int
    z: str
    more: float


class ResultTuple(NamedTuple):
    z: str
    y: int


class PointModel(BaseModel):
    """A pydantic model."""

    a: int
    b: str | None = None


class NestedModel(BaseModel):
    """A pydantic model with nested models and a field outside of the schema."""

    y: PointModel
    z: list[PointModel] = []
    score: float = 0.5


class TextModel(BaseModel):
    a: str
    b: str


class NestedTextModel(BaseModel):
    y: TextModel
    z: list[PointModel] = []


class NoneModel(BaseModel):
    a: int | None = None


class StrictModel(BaseModel):
    y: int
    z: str


class ModelLike:
    """A model of another library. It has `model_dump` as pydantic has."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return dict(self.fields)


TIME = dt.datetime(2024, 2, 29, 12, 30, 1, 5)
POINT = StructType([StructField("a", T.IntegerType()), StructField("b", T.StringType())])
STRICT = StructType([StructField("a", T.IntegerType(), False)])


def encoder(*kinds: T.DataType, nullable: bool = True) -> ResultEncoder:
    names = ["y", "z"]
    return ResultEncoder(
        StructType([StructField(n, k, nullable) for n, k in zip(names, kinds, strict=False)])
    )


def round_trip(kind: T.DataType, value: Any) -> Any:
    """The value after encoding and decoding."""
    one = encoder(kind)
    return one.to_batch([one.encode_values({"y": value})]).to_pylist()[0]["y"]


ACCEPTED = [
    (T.IntegerType(), 5, 5),
    (T.DoubleType(), 2, 2.0),
    (T.DoubleType(), 2.5, 2.5),
    (T.StringType(), "ü", "ü"),
    (T.BooleanType(), False, False),
    (T.DateType(), dt.date(2024, 2, 29), dt.date(2024, 2, 29)),
    (T.DecimalType(6, 2), Decimal("12.5"), Decimal("12.50")),
    (T.BinaryType(), b"\x00\xff", b"\x00\xff"),
    (T.BinaryType(), bytearray(b"ab"), b"ab"),
    (T.TimestampNTZType(), TIME, TIME),
    (T.DayTimeIntervalType(), dt.timedelta(seconds=3), dt.timedelta(seconds=3)),
    (T.ArrayType(T.DoubleType()), [1, 2.5, None], [1.0, 2.5, None]),
    (T.ArrayType(T.LongType()), array("q", [1, 2]), [1, 2]),
    (T.ArrayType(POINT), [{"a": 1, "b": "x"}, None], [{"a": 1, "b": "x"}, None]),
    (T.MapType(T.StringType(), T.LongType()), {"k": 1}, [("k", 1)]),
    (POINT, {"b": "x", "a": 1}, {"a": 1, "b": "x"}),
    (POINT, Row(a=1, b="x"), {"a": 1, "b": "x"}),
    (POINT, (1, None), {"a": 1, "b": None}),
    (T.IntegerType(), 1.0, 1),
    (T.LongType(), 2.0**60, 2**60),
    (T.LongType(), Decimal("1.00"), 1),
    (T.IntegerType(), np.int8(3), 3),
    (T.IntegerType(), np.float32(3), 3),
    (T.IntegerType(), np.array(3), 3),
    (T.IntegerType(), ColorEnum.RED, 7),
    (T.DoubleType(), 2**53, 2.0**53),
    (T.DoubleType(), np.float32(0.5), 0.5),
    (T.FloatType(), 2**24, 2.0**24),
    (T.FloatType(), 0.1, float(np.float32(0.1))),
    (T.FloatType(), float("inf"), float("inf")),
    (T.BooleanType(), np.bool_(True), True),
    (T.StringType(), np.str_("x"), "x"),
    (T.StringType(), LetterEnum.A, "a"),
    (T.DecimalType(6, 2), 12, Decimal("12.00")),
    (T.BinaryType(), memoryview(b"ab"), b"ab"),
    (T.TimestampNTZType(), pd.Timestamp(TIME), TIME),
    (T.TimestampNTZType(), np.datetime64(TIME, "ns"), TIME),
    (T.TimestampNTZType(), pd.NaT, None),
    (T.LongType(), pd.NA, None),
    (T.ArrayType(T.FloatType()), np.array([1.5, 2.5], "f4"), [1.5, 2.5]),
    (T.ArrayType(T.FloatType()), np.array([1.5, 2.5]), [1.5, 2.5]),
    (T.ArrayType(T.DoubleType()), np.array([1, 2]), [1.0, 2.0]),
    (T.ArrayType(T.IntegerType()), np.array([1.0, 2.0]), [1, 2]),
    (T.ArrayType(T.LongType()), np.array([1, 2], "u8"), [1, 2]),
    (T.ArrayType(T.DoubleType()), pd.Series([1.5, 2.5]), [1.5, 2.5]),
    (T.ArrayType(T.ArrayType(T.FloatType())), np.zeros((2, 2)), [[0.0, 0.0], [0.0, 0.0]]),
    (T.ArrayType(T.StringType()), np.array(["a", "b"]), ["a", "b"]),
    (POINT, Row(b="x", a=1), {"a": 1, "b": "x"}),
    (POINT, PointDataclass(1, "x"), {"a": 1, "b": "x"}),
    (POINT, PointTuple("x", 1), {"a": 1, "b": "x"}),
    (POINT, ModelLike(a=1, b="x"), {"a": 1, "b": "x"}),
    (POINT, PointModel(a=1, b="x"), {"a": 1, "b": "x"}),
    (POINT, PointModel(a=1), {"a": 1, "b": None}),
    (T.ArrayType(POINT), [PointModel(a=1), None], [{"a": 1, "b": None}, None]),
    (T.MapType(T.StringType(), POINT), {"k": PointModel(a=1, b="x")}, [("k", {"a": 1, "b": "x"})]),
    (POINT, {"a": 1, "b": "x", "c": 2}, {"a": 1, "b": "x"}),
    (T.ArrayType(POINT), [PointDataclass(1, "x")], [{"a": 1, "b": "x"}]),
    *((kind, None, None) for kind in (T.IntegerType(), POINT, T.ArrayType(T.LongType()))),
]


@pytest.mark.parametrize(("kind", "value", "found"), ACCEPTED, ids=stable_repr)
def test_encoder_keeps_values_of_the_declared_type(
    kind: T.DataType, value: Any, found: Any
) -> None:
    assert round_trip(kind, value) == found


REFUSED = [
    (T.IntegerType(), 1.5, "y"),
    (T.IntegerType(), True, "y"),
    (T.IntegerType(), "1", "y"),
    (T.IntegerType(), float("nan"), "y"),
    (T.IntegerType(), float("inf"), "y"),
    (T.LongType(), Decimal("1.5"), "y"),
    (T.LongType(), Decimal("NaN"), "y"),
    (T.DoubleType(), True, "y"),
    (T.DoubleType(), "2.5", "y"),
    (T.DoubleType(), 2**53 + 1, "y"),
    (T.DoubleType(), 10**400, "y"),
    (T.DoubleType(), Decimal("0.5"), "y"),
    (T.FloatType(), 2**24 + 1, "y"),
    (T.FloatType(), 1e39, "y"),
    (T.ArrayType(T.FloatType()), [1e39], r"y\[\]"),
    (T.ArrayType(T.FloatType()), np.array([1e39]), r"y\[\]"),
    (T.ArrayType(T.IntegerType()), np.array([1, 1.5]), r"y\[\]"),
    (T.ArrayType(T.IntegerType()), np.array([[1], [2]]), r"y\[\]"),
    (T.TimestampNTZType(), pd.Timestamp(1), "y"),
    (T.TimestampNTZType(), np.datetime64(1, "ns"), "y"),
    (T.StringType(), ColorEnum.RED, "y"),
    (T.BinaryType(), np.array([1], "u1"), "y"),
    (T.StringType(), 1, "y"),
    (T.StringType(), b"x", "y"),
    (T.BooleanType(), 1, "y"),
    (T.DateType(), TIME, "y"),
    (T.DateType(), "2024-02-29", "y"),
    (T.TimestampType(), dt.date(2024, 2, 29), "y"),
    (T.TimestampType(), 0, "y"),
    (T.DecimalType(6, 2), 12.5, "y"),
    (T.BinaryType(), "text", "y"),
    (T.ArrayType(T.IntegerType()), [1, 1.5], r"y\[\]"),
    (T.ArrayType(T.IntegerType()), "12", "y"),
    (T.ArrayType(T.StringType()), [1], r"y\[\]"),
    (T.ArrayType(T.IntegerType(), False), [1, None], r"y\[\]"),
    (T.MapType(T.StringType(), T.IntegerType()), {1: 1}, "y key"),
    (T.MapType(T.StringType(), T.IntegerType()), {"a": "1"}, r"y\[\]"),
    (T.MapType(T.StringType(), T.IntegerType()), [("a", 1)], "y"),
    (POINT, {"a": 1}, "y"),
    (POINT, {"a": 1, "b": 2}, r"y\.b"),
    (POINT, (1,), "y"),
    (POINT, Row(b="x", c=1), "y"),
    (POINT, PointDataclass(1, 2), r"y\.b"),
    (POINT, StrictModel(y=1, z="x"), "y"),
    (STRICT, NoneModel(), r"y\.a"),
    (POINT, "ab", "y"),
    (STRICT, {"a": None}, r"y\.a"),
    (T.ArrayType(T.ArrayType(POINT)), [[{"a": 1.5, "b": ""}]], r"y\[\]\[\]\.a"),
]


@pytest.mark.parametrize(("kind", "value", "column"), REFUSED, ids=stable_repr)
def test_encoder_refuses_values_of_another_type_and_names_the_column(
    kind: T.DataType, value: Any, column: str
) -> None:
    with pytest.raises(WrongSchema, match=f"column {column} is"):
        encoder(kind).encode_values({"y": value})


TOO_LARGE = [
    (T.IntegerType(), 1 << 40),
    (T.LongType(), 1 << 70),
    (T.ByteType(), 200),
    (T.DecimalType(5, 2), Decimal("1.234")),
    (T.DecimalType(5, 2), Decimal("123456")),
    (T.StringType(), "\udcff"),
]


@pytest.mark.parametrize(("kind", "value"), TOO_LARGE, ids=stable_repr)
def test_encode_error_reports_a_value_too_large_for_its_column(
    kind: T.DataType, value: Any
) -> None:
    one = encoder(kind)
    bad = one.encode_values({"y": value})
    with pytest.raises((pa.ArrowException, ValueError, OverflowError)):
        one.to_batch([bad])
    assert one.encode_error(bad)
    assert one.encode_error((None,)) == ""


def test_encoder_refuses_none_in_a_not_null_column() -> None:
    with pytest.raises(WrongSchema, match="NOT NULL"):
        encoder(T.IntegerType(), nullable=False).encode_values({"y": None})


@pytest.mark.parametrize(
    "found",
    [
        {"y": 1, "z": "a"},
        {"z": "a", "y": 1},
        {"z": "a", "y": 1, "more": 2},
        Row(z="a", y=1),
        Row(1, "a"),
        (1, "a"),
        [1, "a"],
        ResultDataclass(1, "a", 2.5),
        ModelLike(y=1, z="a"),
        StrictModel(y=1, z="a"),
        ResultTuple("a", 1),
    ],
    ids=stable_repr,
)
def test_encoder_accepts_dict_row_tuple_dataclass_and_model(found: Any) -> None:
    assert encoder(T.LongType(), T.StringType()).encode_values(found) == (1, "a")


def test_encoder_accepts_nested_pydantic_models() -> None:
    one = encoder(POINT, T.ArrayType(POINT))
    found = NestedModel(y=PointModel(a=1, b="x"), z=[PointModel(a=2), PointModel(a=3, b="z")])
    expected = {"y": {"a": 1, "b": "x"}, "z": [{"a": 2, "b": None}, {"a": 3, "b": "z"}]}
    assert one.to_batch([one.encode_values(found)]).to_pylist() == [expected]
    with pytest.raises(WrongSchema, match=r"column y\.a is a str"):
        one.encode_values(NestedTextModel(y=TextModel(a="1", b="x")))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"y": 1}, r"missing: \['z'\]"),
        ({"y": 1, "x": 2}, r"unknown: \['x'\]"),
        ({1: 1}, r"unknown: \['1'\]"),
        (Row(y=1), r"missing: \['z'\]"),
        ((1,), "1 values for"),
        ((1, "a", 2), "3 values for"),
        (None, "a NoneType; return a dict"),
        ("text", "a str; return a dict"),
        (5, "a int; return a dict"),
        ({1, 2}, "a set; return a dict"),
    ],
    ids=stable_repr,
)
def test_encoder_error_describes_a_result_that_is_not_a_row(found: Any, message: str) -> None:
    with pytest.raises(WrongSchema, match=message):
        encoder(T.LongType(), T.StringType()).encode_values(found)


def test_encoder_checks_nested_and_flat_columns_alike() -> None:
    one = encoder(T.ArrayType(T.LongType()), T.StringType())
    with pytest.raises(WrongSchema, match="column z is a int"):
        one.encode_values({"y": [1], "z": 1})
    rows = [
        one.encode_values({"y": [1, None], "z": "a"}),
        one.encode_values({"y": None, "z": None}),
    ]
    assert one.to_batch(rows).to_pylist() == [{"y": [1, None], "z": "a"}, {"y": None, "z": None}]


def test_encoder_makes_an_empty_batch_of_no_rows() -> None:
    assert encoder(T.LongType(), T.StringType()).to_batch([]).num_rows == 0
    assert encoder(POINT).to_batch([]).num_rows == 0


# --- tables -------------------------------------------------------------------------------------


def cast_table(table: Any, rows: int | None = None) -> pa.RecordBatch:
    return encoder(T.IntegerType(), T.StringType()).cast_table(
        table, table.num_rows if rows is None else rows
    )


def test_encode_table_accepts_any_column_order_and_width() -> None:
    wide = pa.table(
        {
            "z": pa.array(["a", "b"]).dictionary_encode(),
            "y": pa.chunked_array([pa.array([1], pa.int64()), pa.array([2], pa.int64())]),
        }
    )
    batch = cast_table(wide)
    assert cast_table(pa.table({"y": [1.0, 2.0], "x": [1, 1], "z": ["a", "b"]})) == batch
    assert batch.to_pydict() == {"y": [1, 2], "z": ["a", "b"]}
    assert batch.schema.types == [pa.int32(), pa.string()]
    fitted = encoder(T.IntegerType(), T.StringType()).encode_table
    assert fitted(wide.combine_chunks().to_batches()[0], 2) == (batch, [])
    for same in (
        pd.DataFrame({"z": ["a", "b"], "y": [1, 2]}, index=[7, 8]),
        {"y": np.array([1, 2]), "z": ["a", "b"]},
        [{"y": 1, "z": "a"}, Row(z="b", y=2)],
    ):
        assert fitted(same, 2) == (batch, [])


def test_cast_table_accepts_an_empty_table() -> None:
    assert (
        cast_table(
            pa.table({"y": pa.array([], pa.int32()), "z": pa.array([], pa.string())})
        ).num_rows
        == 0
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"y": [1.5], "z": ["a"]}), "truncated"),
        (pa.table({"y": [True], "z": ["a"]}), "column y is of bool"),
        (pa.table({"y": ["1"], "z": ["a"]}), "column y is of string"),
        (pa.table({"y": [1], "z": [5]}), "column z is of int64"),
        (pa.table({"y": [1 << 40], "z": ["a"]}), "not in range"),
        (pa.table({"y": [1]}), r"missing: \['z'\]"),
        (pa.table([[1], [2], ["a"]], names=["y", "y", "z"]), "repeated"),
    ],
    ids=stable_repr,
)
def test_cast_table_refuses_other_columns(table: pa.Table, message: str) -> None:
    with pytest.raises(WrongSchema, match=message):
        cast_table(table)


def test_cast_table_refuses_another_row_count() -> None:
    with pytest.raises(WrongSchema, match="1 rows for a batch of 2"):
        cast_table(pa.table({"y": [1], "z": ["a"]}), 2)


def test_cast_table_refuses_nulls_in_a_not_null_column() -> None:
    strict = encoder(T.IntegerType(), nullable=False)
    with pytest.raises(WrongSchema, match="NOT NULL"):
        strict.cast_table(pa.table({"y": pa.array([None, 1], pa.int32())}), 2)


@pytest.mark.parametrize("found", [None, "table", 5, {"y": 1}], ids=stable_repr)
def test_encode_table_error_names_the_type_of_a_non_table(found: Any) -> None:
    with pytest.raises(WrongSchema, match=type(found).__name__):
        encoder(T.IntegerType()).encode_table(found, 1)


def test_encode_table_separates_rows_that_do_not_fit() -> None:
    one = encoder(T.IntegerType(), T.StringType())
    batch, unfit = one.encode_table(pa.table({"y": [1.0, 1.5, 3.0], "z": ["a", "b", "c"]}), 3)
    assert batch.to_pydict() == {"y": [1, 3], "z": ["a", "c"]}
    assert [(bad.position, bad.value) for bad in unfit] == [(1, {"y": 1.5, "z": "b"})]
    assert "column y is a float: 1.5" in unfit[0].why
    mixed = pd.DataFrame({"y": [1, "2", 1 << 40], "z": ["a", "b", "c"]})
    batch, unfit = one.encode_table(mixed, 3)
    assert batch.to_pydict() == {"y": [1], "z": ["a"]}
    assert [bad.position for bad in unfit] == [1, 2]
    _, unfit = one.encode_table(pa.table({"y": [1, 2]}), 2)
    assert [bad.position for bad in unfit] == [0, 1]


def test_encode_table_does_not_turn_an_overflow_into_infinity() -> None:
    _, unfit = encoder(T.FloatType()).encode_table(pa.table({"y": [1.0, 1e39, float("inf")]}), 3)
    assert [bad.position for bad in unfit] == [1]


# --- rows ---------------------------------------------------------------------------------------


def test_to_rows_of_nested_columns_equal_spark_rows() -> None:
    nested = pa.table(
        {
            "id": [1, 2],
            "tags": [["a"], None],
            "point": [{"x": 1}, {"x": None}],
            "at": pa.array([TIME, None], pa.timestamp("us")),
        }
    )
    first, second = to_rows(nested)
    assert first == Row(id=1, tags=["a"], point=Row(x=1), at=TIME)
    assert second.point.x is None
    plain = to_rows(pa.table({"id": [1], "name": ["a"]}))
    assert plain == [Row(id=1, name="a")]
    assert plain[0].asDict() == {"id": 1, "name": "a"}


NUMBERS = [
    (pa.int8(), [-128, 127]),
    (pa.int64(), [-(2**63), 2**63 - 1]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float32(), [0.1, float("inf")]),
    (pa.float64(), [0.1, -0.0]),
    (pa.float16(), [0.5, 1.5]),
    (pa.int64(), [1, None]),
    (pa.float64(), [None, 0.5]),
    (pa.bool_(), [True, False]),
    (pa.string(), ["ü", None]),
    (pa.date32(), [dt.date(2024, 2, 29), None]),
    (pa.decimal128(6, 2), [Decimal("1.50"), None]),
]


@pytest.mark.parametrize(("kind", "values"), NUMBERS, ids=stable_repr)
def test_to_rows_of_plain_columns_equal_spark_rows(kind: pa.DataType, values: list[Any]) -> None:
    column = pa.array(values, kind)
    table = pa.table({"id": [1, 2], "v": pa.chunked_array([column[:1], column[1:]])})
    expected = [
        _create_row(["id", "v"], (at + 1, one)) for at, one in enumerate(column.to_pylist())
    ]
    found = to_rows(table)
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert type(one) is Row
        assert type(one.v) is type(other.v)
        assert one.__fields__ == other.__fields__
        assert pickle.loads(pickle.dumps(one)) == other
        assert repr(one) == repr(other)


def test_to_rows_keeps_nan() -> None:
    [row] = to_rows(pa.table({"v": [math.nan]}))
    assert math.isnan(row.v)


@pytest.mark.parametrize("step", [1, 7, CONVERT_ROWS, CONVERT_ROWS + 1, 5000])
def test_row_reader_returns_each_row_once_in_order(step: int) -> None:
    size = 3 * CONVERT_ROWS + 5
    reader = RowReader(pa.table({"id": range(size)}))
    found = [row.id for lo in range(0, size, step) for row in reader.take(min(step, size - lo))]
    assert found == list(range(size))
    assert not reader.conversion_errors


def test_row_reader_take_returns_peeked_rows() -> None:
    reader = RowReader(pa.table({"id": range(10)}))
    assert [row.id for row in reader.take(3)] == [0, 1, 2]
    assert [row.id for row in reader.peek(7)] == list(range(3, 10))
    assert [row.id for row in reader.take(7)] == list(range(3, 10))


def test_row_reader_records_rows_that_cannot_be_converted() -> None:
    size, bad = CONVERT_ROWS + 10, (3, CONVERT_ROWS + 2)
    # Beyond the latest date of Python.
    days = pa.array([2**30 if at in bad else at for at in range(size)], pa.int32())
    reader = RowReader(pa.table({"id": range(size), "day": days.cast(pa.date32())}))
    found = [row for _ in range(size) for row in reader.take(1)]
    assert [at for at, row in enumerate(found) if row is None] == list(bad)
    assert tuple(reader.conversion_errors) == bad
    assert [row.id for row in found if row] == [at for at in range(size) if at not in bad]


def test_table_round_trips_through_the_arrow_stream() -> None:
    table = pa.table({"y": [1, 2], "z": [["a"], None]})
    assert decode_table(encode_stream(table)) == table
    assert decode_table(encode_stream(table.slice(0, 0))).num_rows == 0


class StrSubclass(str):
    pass


class IntSubclass(int):
    pass


# Results for `encode_exact` (the fast path), compared with `encode_values`.
RESULT_VALUES = [
    5, True, None, 5.0, 5.5, "5", "ü", b"5", IntSubclass(5), StrSubclass("a"), ColorEnum.RED, LetterEnum.A, np.int64(5),
    np.float64(5.0), np.str_("a"), pd.NA, pd.NaT, math.nan, 2**63, Decimal(5), [5], {"a": 5}, TIME,
    TIME.date(), bytearray(b"a"), array("q", [1]),
]  # fmt: skip


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        T.LongType(), T.DoubleType(), T.FloatType(), T.StringType(), T.BooleanType(), T.BinaryType(),
        T.DateType(), T.DecimalType(6, 2), T.TimestampType(), T.ArrayType(T.LongType()), POINT,
    ],
    ids=stable_repr,
)  # fmt: skip
def test_encode_exact_equals_encode_values(kind: T.DataType, nullable: bool) -> None:
    one = encoder(kind, nullable=nullable)
    two = encoder(kind, T.LongType(), nullable=nullable)
    for _ in range(2):  # the second pass uses the encoder's caches
        for value in RESULT_VALUES:
            for result_encoder, result in (
                (one, {"y": value}),
                (two, {"y": value, "z": 1, "more": 2}),
            ):
                exact = result_encoder.encode_exact(result)
                if exact is None:
                    continue
                expected = ResultEncoder(result_encoder.schema).encode_values(result)
                assert list(map(type, exact)) == list(map(type, expected))
                assert repr(exact) == repr(expected)


def test_encode_exact_returns_none_for_inexact_results() -> None:
    one, two = encoder(T.LongType()), encoder(T.LongType(), T.StringType())
    assert one.encode_exact({"y": 5}) == (5,)
    assert one.encode_exact({"y": None, "more": 1}) == (None,)
    assert (
        one.encode_exact({"y": True})
        is one.encode_exact({"y": 5.0})
        is one.encode_exact({})
        is None
    )
    assert two.encode_exact({"y": 5, "z": "a"}) is None
    assert two.encode_values({"z": "a", "y": 5}) == two.encode_exact({"z": "a", "y": 5}) == (5, "a")
    assert two.encode_exact({"y": 5, "z": None}) is two.encode_exact({"y": 5}) is None
    strict = encoder(T.LongType(), nullable=False)
    assert strict.encode_exact({"y": None}) is None


def test_encoder_accepts_numpy_scalars() -> None:
    encoder = ResultEncoder(_numbers())
    assert encoder.encode_values({"a": np.int64(3), "b": np.float32(0.5)}) == (3, 0.5)
    with pytest.raises(WrongSchema):
        encoder.encode_values({"a": np.float64(1.5), "b": 0.0})


def _numbers() -> StructType:
    return StructType([StructField("a", T.LongType()), StructField("b", T.DoubleType())])
