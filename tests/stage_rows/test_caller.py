"""The function caller: outcomes of returned values and raised exceptions, per row and per batch."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, Row, StringType, StructField, StructType

from holdfast.config import ERROR_TEXT_CHARS_MAX, TTL_NS_MAX
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark import raw_values
from holdfast.spark.arrow_rows import ResultEncoder
from holdfast.spark.caller import BatchOutcome, CallOutcome, FunctionCaller, is_async, takes_call
from holdfast.spark.exception_rules import transient
from holdfast.spark.row_results import Call, Fail, Retry, Skip

pytestmark = pytest.mark.timeout(30)

SCHEMA = StructType([StructField("y", LongType()), StructField("s", StringType())])


def make_caller(fn: Callable[..., Any], *, timeout_s: float = 30, **options: Any) -> FunctionCaller:
    retry_on = options.pop("retry_on", (TimeoutError, ConnectionError))
    return FunctionCaller(fn, retry_on, ResultEncoder(SCHEMA), "run1", timeout_s)


def call_row(fn: Callable[..., Any], **options: Any) -> CallOutcome:
    return make_caller(fn, **options).call_row(7, Row(id=7), 2)


def call_row_async(fn: Callable[..., Any], **options: Any) -> CallOutcome:
    return asyncio.run(make_caller(fn, **options).call_row_async(7, Row(id=7), 2))


def raising(error: BaseException) -> Callable[[Any], NoReturn]:
    def work(row: Any) -> NoReturn:
        raise error

    return work


# --- single rows --------------------------------------------------------------------------------


def test_result_becomes_the_values_of_the_columns() -> None:
    outcome = call_row(lambda row: {"s": "a", "y": row.id})
    assert (outcome.seq, outcome.state, outcome.values) == (7, RowState.TERMINAL_SUCCESS, (7, "a"))
    assert (outcome.error_class, outcome.error) == (ErrorClass.NONE, "")


RESULTS = [
    {"s": "a", "y": 7},
    {"y": 7, "s": None, "more": 1},
    {"y": 7.0, "s": "a"},
    {"y": True, "s": "a"},
    {"y": "7", "s": "a"},
    {"y": 7},
    {},
    (7, "a"),
    7,
    None,
    Skip("no"),
    Retry("later", after_s=2),
    Fail("never"),
]


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_outcome_does_not_depend_on_the_call_parameter(result: Any) -> None:
    without_call, with_call = make_caller(lambda row: result), make_caller(lambda row, call: result)
    for _ in range(2):  # the encoder has cached the types by the second result
        first, second = without_call.call_row(7, Row(id=7), 2), with_call.call_row(7, Row(id=7), 2)
        assert first._replace(micros=0) == second._replace(micros=0)
        assert type(first) is type(second) is CallOutcome


@pytest.mark.parametrize("cost", [0.25, 1, "0.5", "much", None, float("nan"), True])
def test_cost_is_reported_with_an_exact_result(cost: Any) -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1, "s": "a"}

    def convert(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1.0, "s": "a"}

    exact, converting = make_caller(work), make_caller(convert)
    outcomes = [exact.call_row(7, Row(id=7), 2) for _ in range(2)]
    expected = converting.call_row(7, Row(id=7), 2)
    assert [outcome.cost for outcome in outcomes] == [expected.cost] * 2
    assert [outcome.values for outcome in outcomes] == [(1, "a")] * 2


def test_tokens_are_reported_with_an_exact_result() -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.tokens = 12
        return {"y": 1, "s": "a"}

    function_caller = make_caller(work)
    assert [function_caller.call_row(7, Row(id=7), 2).tokens for _ in range(2)] == [12, 12]


def test_async_function_has_the_same_outcome_as_a_sync_function() -> None:
    async def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = 0.5
        return {"y": row.id, "s": call.idempotency_key}

    outcome = call_row_async(work)
    assert (outcome.values, outcome.cost) == ((7, "run1:7"), 0.5)


@pytest.mark.parametrize(
    ("answer", "state", "kind"),
    [
        (Skip("empty"), RowState.TERMINAL_SKIP, ErrorClass.NONE),
        (Fail("no use"), RowState.TERMINAL_FAIL, ErrorClass.INPUT),
        (Retry("busy"), RowState.TERMINAL_FAIL, ErrorClass.TRANSIENT),
        ({"y": "text", "s": "a"}, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ({"y": 1.5, "s": "a"}, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ({"y": 1}, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA),
        (None, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ("text", RowState.TERMINAL_FAIL, ErrorClass.SCHEMA),
    ],
    ids=str,
)
def test_skip_fail_retry_and_invalid_results_have_their_state_and_error_class(
    answer: Any, state: RowState, kind: ErrorClass
) -> None:
    outcome = call_row(lambda row: answer)
    assert (outcome.state, outcome.error_class, outcome.values) == (state, kind, None)
    reason = getattr(answer, "reason", "returned")
    assert reason in outcome.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("slow"), ErrorClass.TRANSIENT),
        (ConnectionResetError("gone"), ErrorClass.TRANSIENT),
        (MemoryError(), ErrorClass.RESOURCE),
        (ValueError("bad"), ErrorClass.INPUT),
        (KeyError("k"), ErrorClass.INPUT),
        (RecursionError("deep"), ErrorClass.INPUT),
        (SystemExit(3), ErrorClass.INPUT),
        (KeyboardInterrupt(), ErrorClass.INPUT),
        (GeneratorExit(), ErrorClass.INPUT),
        (asyncio.CancelledError(), ErrorClass.INPUT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_raised_exception_fails_the_row_with_its_error_class(
    error: BaseException, kind: ErrorClass
) -> None:
    async def later(row: Any) -> NoReturn:
        raise error

    plain = call_row(raising(error))
    assert (plain.state, plain.error_class) == (RowState.TERMINAL_FAIL, kind)
    assert plain.error.startswith(type(error).__name__)
    if not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        assert call_row_async(later)[:6] == plain[:6]


def test_retry_on_decides_which_exceptions_are_transient() -> None:
    class Quota(Exception):
        pass

    assert call_row(raising(Quota()), retry_on=(Quota,)).error_class == ErrorClass.TRANSIENT
    assert call_row(raising(TimeoutError()), retry_on=()).error_class == ErrorClass.INPUT
    assert call_row(raising(MemoryError()), retry_on=()).error_class == ErrorClass.RESOURCE


def test_sys_exit_fails_its_row() -> None:
    outcome = call_row(lambda row: sys.exit("stop"))
    assert (outcome.state, outcome.error) == (RowState.TERMINAL_FAIL, "SystemExit: stop")


def test_call_beyond_its_timeout_is_a_transient_failure() -> None:
    async def work(row: Any) -> None:
        await asyncio.Event().wait()

    outcome = call_row_async(work, timeout_s=0.01)
    assert outcome.error_class == ErrorClass.TRANSIENT
    assert outcome.error.startswith("TimeoutError")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Skip(None), ""),  # type: ignore[arg-type]
        (Fail(ValueError("inner")), "inner"),  # type: ignore[arg-type]
        (Skip(5), "5"),  # type: ignore[arg-type]
        (Fail("\udcff broken"), "\\udcff broken"),
        (Fail("ü"), "ü"),
        (Fail("x" * 100_000), "x" * ERROR_TEXT_CHARS_MAX),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_reason_is_converted_to_encodable_text(answer: Any, told: str) -> None:
    outcome = call_row(lambda row: answer)
    assert outcome.error == told
    outcome.error.encode()


def test_unprintable_error_is_reported_by_its_class() -> None:
    assert call_row(raising(Unprintable())).error == "Unprintable: Unprintable"
    assert call_row(raising(ValueError("\udcff"))).error == "ValueError: \\udcff"


@pytest.mark.parametrize(
    ("after_s", "delay_ns"),
    [
        (None, 0),
        (0, 1),
        (2.5, 2_500_000_000),
        (-3, 1),
        (float("inf"), TTL_NS_MAX),
        (1e12, TTL_NS_MAX),
    ],
)
def test_retry_after_s_sets_a_bounded_delay(after_s: float | None, delay_ns: int) -> None:
    assert call_row(lambda row: Retry("later", after_s=after_s)).delay_ns == delay_ns


@pytest.mark.parametrize("after_s", ["soon", float("nan")])
def test_retry_with_an_invalid_after_s_fails_its_row(after_s: Any) -> None:
    outcome = call_row(lambda row: Retry("later", after_s=after_s))
    assert (outcome.state, outcome.error_class) == (RowState.TERMINAL_FAIL, ErrorClass.INPUT)


@pytest.mark.parametrize(
    ("cost", "found"), [(0.25, 0.25), (3, 3.0), ("x", 0.0), (None, 0.0), (float("nan"), 0.0)]
)
def test_invalid_cost_counts_as_zero_and_never_fails_a_row(cost: Any, found: float) -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1, "s": ""}

    outcome = call_row(work)
    assert (outcome.state, outcome.cost) == (RowState.TERMINAL_SUCCESS, found)


def test_idempotency_key_is_equal_for_every_attempt() -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        return {"y": call.attempt, "s": call.idempotency_key}

    function_caller = make_caller(work)
    assert function_caller.call_row(7, Row(id=7), 1).values == (1, "run1:7")
    assert function_caller.call_row(7, Row(id=7), 3).values == (3, "run1:7")


# --- signatures of functions --------------------------------------------------------------------


class SyncCallable:
    def __call__(self, row: Any, call: Call) -> Any:
        return {"y": call.seq, "s": ""}

    def method(self, row: Any) -> Any:
        return {"y": row.id, "s": ""}

    @staticmethod
    def static(row: Any, call: Call) -> Any:
        return {"y": call.seq, "s": ""}


class AsyncCallable:
    async def __call__(self, row: Any) -> Any:
        return {"y": row.id, "s": ""}


async def async_function(row: Any) -> Any:
    return {"y": row.id, "s": ""}


def keyword_call(row: Any, *, call: Call) -> Any:
    return {"y": call.seq, "s": ""}


def with_model(model: str, row: Any, call: Call) -> Any:
    return {"y": call.seq, "s": model}


WITH_CALL: dict[str, Callable[..., Any]] = {
    "object": SyncCallable(),
    "static": SyncCallable.static,
    "lambda": lambda row, call: {"y": call.seq, "s": ""},
    "default call": lambda row, call=None: {"y": call.seq, "s": ""},
    "rest": lambda row, *rest: {"y": rest[0].seq, "s": ""},
    "partial": functools.partial(with_model, "m"),
}
WITHOUT_CALL: dict[str, Callable[..., Any]] = {
    "method": SyncCallable().method,
    "lambda": lambda row: {"y": row.id, "s": ""},
    "default": lambda row, model="m": {"y": row.id, "s": model},
    "partial": functools.partial(lambda row, model: {"y": row.id, "s": model}, model="m"),
    "options": lambda row, **options: {"y": row.id, "s": str(len(options))},
}


@pytest.mark.parametrize("fn", WITH_CALL.values(), ids=WITH_CALL.keys())
def test_function_with_a_call_parameter_gets_the_call(fn: Callable[..., Any]) -> None:
    assert takes_call(fn)
    values = call_row(fn).values
    assert values is not None
    assert values[0] == 7


@pytest.mark.parametrize("fn", WITHOUT_CALL.values(), ids=WITHOUT_CALL.keys())
def test_function_without_a_call_parameter_gets_only_the_row(fn: Callable[..., Any]) -> None:
    assert not takes_call(fn)
    values = call_row(fn).values
    assert values is not None
    assert values[0] == 7


def test_call_can_be_a_keyword_only_parameter() -> None:
    values = call_row(keyword_call).values
    assert values == (7, "")


@pytest.mark.parametrize(
    "fn",
    [
        async_function,
        AsyncCallable(),
        AsyncCallable().__call__,
        functools.partial(async_function),
        functools.partial(AsyncCallable()),
    ],
    ids=["function", "object", "method", "partial", "partial object"],
)
def test_is_async_recognises_every_form_of_async_function(fn: Callable[..., Any]) -> None:
    assert is_async(fn)
    assert call_row_async(fn).values == (7, "")


@pytest.mark.parametrize("fn", [*WITH_CALL.values(), *WITHOUT_CALL.values()])
def test_is_async_is_false_for_sync_functions(fn: Callable[..., Any]) -> None:
    assert not is_async(fn)


def test_unawaited_coroutine_is_a_schema_failure() -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        outcome = call_row(lambda row: async_function(row))
    assert outcome.error_class == ErrorClass.SCHEMA
    assert "coroutine" in outcome.error


# --- batches ------------------------------------------------------------------------------------

SEQS = list(range(100, 110))


def input_table(rows: int = 10) -> pa.Table:
    return pa.table({"id": list(range(rows))})


def result_table(batch: pa.Table) -> pa.Table:
    ids = batch.column("id").to_pylist()
    return pa.table({"y": ids, "s": [str(key) for key in ids]})


def call_batch(fn: Callable[..., Any], **options: Any) -> BatchOutcome:
    return make_caller(fn, **options).call_batch(SEQS, input_table(), 1)


def call_batch_async(fn: Callable[..., Any], **options: Any) -> BatchOutcome:
    return asyncio.run(make_caller(fn, **options).call_batch_async(SEQS, input_table(), 1))


def test_batch_results_are_kept_whole() -> None:
    for outcome in (
        call_batch(result_table),
        call_batch(lambda batch: result_table(batch).to_batches()[0]),
    ):
        assert outcome.seqs == SEQS
        assert outcome.batch.to_pydict()["y"] == list(range(10))
        assert (outcome.resultless, outcome.calls) == ([], 1)


@pytest.mark.parametrize("bad", [0, 4, 9])
def test_bad_row_of_a_batch_fails_alone(bad: int) -> None:
    def work(batch: pa.Table) -> pa.Table:
        if bad in batch.column("id").to_pylist():
            raise ValueError("cannot")
        return result_table(batch)

    async def work_later(batch: pa.Table) -> pa.Table:
        return work(batch)

    for outcome in (call_batch(work), call_batch_async(work_later)):
        assert [
            (resultless.seq, resultless.state, resultless.error_class)
            for resultless in outcome.resultless
        ] == [(100 + bad, RowState.TERMINAL_FAIL, ErrorClass.INPUT)]
        assert outcome.seqs == [seq for seq in SEQS if seq != 100 + bad]
        assert outcome.batch.to_pydict()["y"] == [i for i in range(10) if i != bad]
        assert 1 < outcome.calls <= 9


def test_batch_of_bad_rows_fails_row_by_row() -> None:
    outcome = call_batch(raising(ValueError("none")))
    assert (outcome.seqs, outcome.batch.num_rows) == ([], 0)
    assert [resultless.seq for resultless in outcome.resultless] == SEQS


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TimeoutError("slow"), ErrorClass.TRANSIENT), (MemoryError("big"), ErrorClass.RESOURCE)],
)
def test_retryable_batch_failure_is_not_split(error: Exception, kind: ErrorClass) -> None:
    outcome = call_batch(raising(error))
    assert outcome.calls == 1
    assert {(resultless.state, resultless.error_class) for resultless in outcome.resultless} == {
        (RowState.TERMINAL_FAIL, kind)
    }
    assert [resultless.seq for resultless in outcome.resultless] == SEQS


@pytest.mark.parametrize(
    "answer",
    [
        lambda batch: result_table(batch).slice(1),
        lambda batch: pa.concat_tables([result_table(batch)] * 2),
        lambda batch: result_table(batch).drop_columns(["s"]),
        lambda batch: batch,
        lambda batch: pa.table({"y": ["a"] * 10, "s": ["a"] * 10}),
        lambda batch: None,
    ],
    ids=["too few", "too many", "missing", "other columns", "other types", "nothing"],
)
def test_batch_result_of_the_wrong_shape_fails_all_rows_with_class_schema(
    answer: Callable[[pa.Table], Any],
) -> None:
    outcome = call_batch(answer)
    assert outcome.calls == 1
    assert [resultless.seq for resultless in outcome.resultless] == SEQS
    assert {resultless.error_class for resultless in outcome.resultless} == {ErrorClass.SCHEMA}


def test_skip_and_fail_columns_mark_rows_of_a_batch() -> None:
    def work(batch: pa.Table) -> pa.Table:
        n = batch.num_rows
        return (
            result_table(batch)
            .append_column("_skip", pa.array(["dull" if i == 2 else None for i in range(n)]))
            .append_column("_fail", pa.array(["bad" if i in (0, 9) else None for i in range(n)]))
        )

    outcome = call_batch(work)
    assert [
        (resultless.seq, resultless.state, resultless.error) for resultless in outcome.resultless
    ] == [
        (100, RowState.TERMINAL_FAIL, "bad"),
        (102, RowState.TERMINAL_SKIP, "dull"),
        (109, RowState.TERMINAL_FAIL, "bad"),
    ]
    assert [resultless.error_class for resultless in outcome.resultless] == [
        ErrorClass.INPUT,
        ErrorClass.NONE,
        ErrorClass.INPUT,
    ]
    assert outcome.batch.to_pydict()["y"] == [1, 3, 4, 5, 6, 7, 8]


def test_false_in_a_boolean_skip_column_marks_no_row() -> None:
    marks = pa.array([i == 3 for i in range(10)])
    outcome = call_batch(lambda batch: result_table(batch).append_column("_skip", marks))
    assert [(resultless.seq, resultless.error) for resultless in outcome.resultless] == [(103, "")]
    assert outcome.batch.num_rows == 9


def test_skip_column_of_nulls_marks_no_row() -> None:
    outcome = call_batch(lambda batch: result_table(batch).append_column("_skip", pa.nulls(10)))
    assert (outcome.resultless, outcome.batch.num_rows) == ([], 10)


def test_skip_column_can_mark_every_row_of_a_batch() -> None:
    outcome = call_batch(
        lambda batch: result_table(batch).append_column("_skip", pa.array(["no"] * 10))
    )
    assert (outcome.seqs, outcome.batch.num_rows, len(outcome.resultless)) == ([], 0, 10)


def test_split_batches_have_separate_idempotency_keys_and_costs() -> None:
    keys: list[str] = []

    def work(batch: pa.Table, call: Call) -> pa.Table:
        keys.append(call.idempotency_key)
        call.cost = 1.0
        assert call.rows == batch.num_rows
        if 0 in batch.column("id").to_pylist():
            raise ValueError("cannot")
        return result_table(batch)

    function_caller = make_caller(work)
    outcome = function_caller.call_batch(SEQS, input_table(), 1)
    assert len(set(keys)) == len(keys) == outcome.calls
    assert outcome.cost == outcome.calls
    again = list(keys)
    keys.clear()
    function_caller.call_batch(SEQS, input_table(), 2)
    assert keys == again


def test_batch_beyond_its_timeout_fails_all_its_rows() -> None:
    async def work(batch: pa.Table) -> None:
        await asyncio.Event().wait()

    outcome = call_batch_async(work, timeout_s=0.01)
    assert {resultless.error_class for resultless in outcome.resultless} == {ErrorClass.TRANSIENT}
    assert len(outcome.resultless) == 10


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError()], ids=repr)
def test_every_exception_of_a_batch_fails_its_rows(error: BaseException) -> None:
    assert [resultless.seq for resultless in call_batch(raising(error)).resultless] == SEQS


# --- raw values of results with the wrong schema ----------------------------------------------------


def test_result_of_the_wrong_schema_is_kept_as_raw_value() -> None:
    outcome = call_row(lambda row: {"y": "7", "s": b"x"})
    assert outcome.error_class == ErrorClass.SCHEMA
    assert raw_values.decode(outcome.raw) == {"y": "7", "s": b"x"}
    assert call_row(lambda row: {"y": 7.0, "s": "x", "z": 1}).values == (7, "x")
    assert call_row(lambda row: {"y": 7.0, "s": "x"}).raw == ""
    assert call_row(raising(ValueError("no"))).raw == ""


def test_oversized_success_is_kept_as_raw_value() -> None:
    function_caller = make_caller(lambda row: {"y": 1, "s": "x"})
    outcome = function_caller.as_schema_failure(
        function_caller.call_row(7, Row(id=7), 1), "returned too much"
    )
    assert (outcome.values, raw_values.decode(outcome.raw)) == (None, {"y": 1, "s": "x"})


def test_batch_rows_of_the_wrong_schema_fail_alone_with_raw_values() -> None:
    def work(batch: pa.Table) -> Any:
        rows = result_table(batch).to_pylist()
        rows[3]["y"] = "three"
        rows[5]["_skip"] = "dull"
        rows[6]["s"] = None
        return rows

    outcome = call_batch(work)
    assert (outcome.calls, outcome.batch.num_rows) == (1, 8)
    bad, skipped = outcome.resultless
    assert (bad.seq, bad.error_class) == (SEQS[3], ErrorClass.SCHEMA)
    assert raw_values.decode(bad.raw)["y"] == "three"
    assert (skipped.seq, skipped.state, skipped.raw) == (SEQS[5], RowState.TERMINAL_SKIP, "")


def test_unattributable_batch_result_is_kept_as_raw_of_the_first_row() -> None:
    outcome = call_batch(lambda batch: result_table(batch).slice(1))
    assert [bool(resultless.raw) for resultless in outcome.resultless] == [True] + [False] * 9
    assert len(raw_values.decode(outcome.resultless[0].raw)) == 9
    assert "first row" in outcome.resultless[1].error


def test_unprintable_result_is_reported_by_its_class() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise ValueError("mute")

    outcome = call_row(lambda row: {"y": Mute(), "s": "x"})
    assert (outcome.error_class, "not printable" in outcome.error) == (ErrorClass.SCHEMA, True)
    assert raw_values.decode(outcome.raw)["y"]["$object"].endswith("Mute")


def test_retry_after_header_sets_the_delay_of_a_retry() -> None:
    import httpx

    request = httpx.Request("GET", "http://127.0.0.1/")
    busy = httpx.Response(429, headers={"retry-after": "30"}, request=request)
    error = httpx.HTTPStatusError("busy", request=request, response=busy)
    outcome = call_row(raising(error), retry_on=(transient,))
    assert (outcome.error_class, outcome.delay_ns) == (ErrorClass.TRANSIENT, 30_000_000_000)
    assert call_row(raising(error), retry_on=()).delay_ns == 0
    many = call_batch(raising(error), retry_on=(transient,))
    assert {resultless.delay_ns for resultless in many.resultless} == {30_000_000_000}
