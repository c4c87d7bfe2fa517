"""How a call ends: what a function may return or raise, row by row and batch by batch."""

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
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.states import State
from holdfast.spark import raw_values
from holdfast.spark.caller import BatchEnded, Caller, Ended, is_async, takes_call
from holdfast.spark.error_classes import transient
from holdfast.spark.outcome import Call, Fail, Retry, Skip
from holdfast.spark.rows import Encoder

pytestmark = pytest.mark.timeout(30)

SCHEMA = StructType([StructField("y", LongType()), StructField("s", StringType())])


def caller(fn: Callable[..., Any], *, timeout_s: float = 30, **options: Any) -> Caller:
    retry_on = options.pop("retry_on", (TimeoutError, ConnectionError))
    return Caller(fn, retry_on, Encoder(SCHEMA), "run1", timeout_s)


def called(fn: Callable[..., Any], **options: Any) -> Ended:
    return caller(fn, **options).one(7, Row(id=7), 2)


def awaited(fn: Callable[..., Any], **options: Any) -> Ended:
    return asyncio.run(caller(fn, **options).one_async(7, Row(id=7), 2))


def raising(error: BaseException) -> Callable[[Any], NoReturn]:
    def work(row: Any) -> NoReturn:
        raise error

    return work


# --- one row ------------------------------------------------------------------------------------


def test_a_result_is_the_values_of_the_columns() -> None:
    ended = called(lambda row: {"s": "a", "y": row.id})
    assert (ended.seq, ended.state, ended.values) == (7, State.TERMINAL_SUCCESS, (7, "a"))
    assert (ended.error_class, ended.error) == (ErrorClass.NONE, "")


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
def test_a_function_without_a_call_ends_as_one_with_it(result: Any) -> None:
    plain, asks = caller(lambda row: result), caller(lambda row, call: result)
    for _ in range(2):  # the encoder knows the second result's types
        first, second = plain.one(7, Row(id=7), 2), asks.one(7, Row(id=7), 2)
        assert first._replace(micros=0) == second._replace(micros=0)
        assert type(first) is type(second) is Ended


@pytest.mark.parametrize("cost", [0.25, 1, "0.5", "much", None, float("nan"), True])
def test_a_cost_is_told_with_a_result_that_fits_at_once(cost: Any) -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1, "s": "a"}

    def convert(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1.0, "s": "a"}

    one, other = caller(work), caller(convert)
    found = [one.one(7, Row(id=7), 2) for _ in range(2)]
    expected = other.one(7, Row(id=7), 2)
    assert [ended.cost for ended in found] == [expected.cost] * 2
    assert [ended.values for ended in found] == [(1, "a")] * 2


def test_tokens_are_told_with_a_result_that_fits_at_once() -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.tokens = 12
        return {"y": 1, "s": "a"}

    one = caller(work)
    assert [one.one(7, Row(id=7), 2).tokens for _ in range(2)] == [12, 12]


def test_an_async_function_ends_as_a_plain_one_does() -> None:
    async def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = 0.5
        return {"y": row.id, "s": call.idempotency_key}

    ended = awaited(work)
    assert (ended.values, ended.cost) == ((7, "run1:7"), 0.5)


@pytest.mark.parametrize(
    ("answer", "state", "kind"),
    [
        (Skip("empty"), State.TERMINAL_SKIP, ErrorClass.NONE),
        (Fail("no use"), State.TERMINAL_FAIL, ErrorClass.INPUT),
        (Retry("busy"), State.TERMINAL_FAIL, ErrorClass.TRANSIENT),
        ({"y": "text", "s": "a"}, State.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ({"y": 1.5, "s": "a"}, State.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ({"y": 1}, State.TERMINAL_FAIL, ErrorClass.SCHEMA),
        (None, State.TERMINAL_FAIL, ErrorClass.SCHEMA),
        ("text", State.TERMINAL_FAIL, ErrorClass.SCHEMA),
    ],
    ids=str,
)
def test_an_answer_that_is_no_result_has_its_state_and_class(
    answer: Any, state: State, kind: ErrorClass
) -> None:
    ended = called(lambda row: answer)
    assert (ended.state, ended.error_class, ended.values) == (state, kind, None)
    reason = getattr(answer, "reason", "returned")
    assert reason in ended.error


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
def test_whatever_is_raised_ends_the_row_with_its_class(
    error: BaseException, kind: ErrorClass
) -> None:
    async def later(row: Any) -> NoReturn:
        raise error

    plain = called(raising(error))
    assert (plain.state, plain.error_class) == (State.TERMINAL_FAIL, kind)
    assert plain.error.startswith(type(error).__name__)
    if not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        assert awaited(later)[:6] == plain[:6]


def test_what_is_retried_is_what_the_stage_says() -> None:
    class Quota(Exception):
        pass

    assert called(raising(Quota()), retry_on=(Quota,)).error_class == ErrorClass.TRANSIENT
    assert called(raising(TimeoutError()), retry_on=()).error_class == ErrorClass.INPUT
    assert called(raising(MemoryError()), retry_on=()).error_class == ErrorClass.RESOURCE


def test_sys_exit_is_a_failure_of_its_row() -> None:
    ended = called(lambda row: sys.exit("stop"))
    assert (ended.state, ended.error) == (State.TERMINAL_FAIL, "SystemExit: stop")


def test_a_call_that_takes_too_long_is_a_time_out() -> None:
    async def work(row: Any) -> None:
        await asyncio.Event().wait()

    ended = awaited(work, timeout_s=0.01)
    assert ended.error_class == ErrorClass.TRANSIENT
    assert ended.error.startswith("TimeoutError")


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
def test_a_reason_is_text_that_can_be_sent_whatever_it_was(answer: Any, told: str) -> None:
    ended = called(lambda row: answer)
    assert ended.error == told
    ended.error.encode()


def test_an_error_that_cannot_be_printed_is_told_by_its_class() -> None:
    assert called(raising(Unprintable())).error == "Unprintable: Unprintable"
    assert called(raising(ValueError("\udcff"))).error == "ValueError: \\udcff"


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
def test_a_retry_rests_as_long_as_it_says_within_bounds(
    after_s: float | None, delay_ns: int
) -> None:
    assert called(lambda row: Retry("later", after_s=after_s)).delay_ns == delay_ns


@pytest.mark.parametrize("after_s", ["soon", float("nan")])
def test_a_retry_that_says_nonsense_is_a_failure_of_its_row(after_s: Any) -> None:
    ended = called(lambda row: Retry("later", after_s=after_s))
    assert (ended.state, ended.error_class) == (State.TERMINAL_FAIL, ErrorClass.INPUT)


@pytest.mark.parametrize(
    ("cost", "found"), [(0.25, 0.25), (3, 3.0), ("x", 0.0), (None, 0.0), (float("nan"), 0.0)]
)
def test_a_cost_is_a_number_or_nothing_and_never_fails_a_row(cost: Any, found: float) -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        call.cost = cost
        return {"y": 1, "s": ""}

    ended = called(work)
    assert (ended.state, ended.cost) == (State.TERMINAL_SUCCESS, found)


def test_a_call_knows_its_attempt_and_its_key_stays_the_same() -> None:
    def work(row: Any, call: Call) -> dict[str, Any]:
        return {"y": call.attempt, "s": call.idempotency_key}

    made = caller(work)
    assert made.one(7, Row(id=7), 1).values == (1, "run1:7")
    assert made.one(7, Row(id=7), 3).values == (3, "run1:7")


# --- what a function looks like -----------------------------------------------------------------


class Plain:
    def __call__(self, row: Any, call: Call) -> Any:
        return {"y": call.seq, "s": ""}

    def method(self, row: Any) -> Any:
        return {"y": row.id, "s": ""}

    @staticmethod
    def static(row: Any, call: Call) -> Any:
        return {"y": call.seq, "s": ""}


class Later:
    async def __call__(self, row: Any) -> Any:
        return {"y": row.id, "s": ""}


async def later(row: Any) -> Any:
    return {"y": row.id, "s": ""}


def by_name(row: Any, *, call: Call) -> Any:
    return {"y": call.seq, "s": ""}


def with_model(model: str, row: Any, call: Call) -> Any:
    return {"y": call.seq, "s": model}


WITH_CALL: dict[str, Callable[..., Any]] = {
    "object": Plain(),
    "static": Plain.static,
    "lambda": lambda row, call: {"y": call.seq, "s": ""},
    "default call": lambda row, call=None: {"y": call.seq, "s": ""},
    "rest": lambda row, *rest: {"y": rest[0].seq, "s": ""},
    "partial": functools.partial(with_model, "m"),
}
WITHOUT_CALL: dict[str, Callable[..., Any]] = {
    "method": Plain().method,
    "lambda": lambda row: {"y": row.id, "s": ""},
    "default": lambda row, model="m": {"y": row.id, "s": model},
    "partial": functools.partial(lambda row, model: {"y": row.id, "s": model}, model="m"),
    "options": lambda row, **options: {"y": row.id, "s": str(len(options))},
}


@pytest.mark.parametrize("fn", WITH_CALL.values(), ids=WITH_CALL.keys())
def test_a_function_with_a_place_for_the_call_is_given_it(fn: Callable[..., Any]) -> None:
    assert takes_call(fn)
    values = called(fn).values
    assert values is not None
    assert values[0] == 7


@pytest.mark.parametrize("fn", WITHOUT_CALL.values(), ids=WITHOUT_CALL.keys())
def test_a_function_without_a_place_for_the_call_is_not(fn: Callable[..., Any]) -> None:
    assert not takes_call(fn)
    values = called(fn).values
    assert values is not None
    assert values[0] == 7


def test_the_call_may_be_asked_for_by_name() -> None:
    values = called(by_name).values
    assert values == (7, "")


@pytest.mark.parametrize(
    "fn",
    [later, Later(), Later().__call__, functools.partial(later), functools.partial(Later())],
    ids=["function", "object", "method", "partial", "partial object"],
)
def test_async_functions_are_known_in_every_shape(fn: Callable[..., Any]) -> None:
    assert is_async(fn)
    assert awaited(fn).values == (7, "")


@pytest.mark.parametrize("fn", [*WITH_CALL.values(), *WITHOUT_CALL.values()])
def test_plain_functions_are_not_taken_for_async_ones(fn: Callable[..., Any]) -> None:
    assert not is_async(fn)


def test_a_coroutine_that_nobody_awaits_is_no_result() -> None:
    with pytest.warns(RuntimeWarning, match="never awaited"):
        ended = called(lambda row: later(row))
    assert ended.error_class == ErrorClass.SCHEMA
    assert "coroutine" in ended.error


# --- batches ------------------------------------------------------------------------------------

SEQS = list(range(100, 110))


def table(rows: int = 10) -> pa.Table:
    return pa.table({"id": list(range(rows))})


def results(batch: pa.Table) -> pa.Table:
    ids = batch.column("id").to_pylist()
    return pa.table({"y": ids, "s": [str(one) for one in ids]})


def batched(fn: Callable[..., Any], **options: Any) -> BatchEnded:
    return caller(fn, **options).batch(SEQS, table(), 1)


def batch_awaited(fn: Callable[..., Any], **options: Any) -> BatchEnded:
    return asyncio.run(caller(fn, **options).batch_async(SEQS, table(), 1))


def test_a_batch_of_results_is_kept_whole() -> None:
    for ended in (batched(results), batched(lambda batch: results(batch).to_batches()[0])):
        assert ended.seqs == SEQS
        assert ended.batch.to_pydict()["y"] == list(range(10))
        assert (ended.others, ended.calls) == ([], 1)


@pytest.mark.parametrize("bad", [0, 4, 9])
def test_one_bad_row_of_a_batch_fails_alone(bad: int) -> None:
    def work(batch: pa.Table) -> pa.Table:
        if bad in batch.column("id").to_pylist():
            raise ValueError("cannot")
        return results(batch)

    async def work_later(batch: pa.Table) -> pa.Table:
        return work(batch)

    for ended in (batched(work), batch_awaited(work_later)):
        assert [(one.seq, one.state, one.error_class) for one in ended.others] == [
            (100 + bad, State.TERMINAL_FAIL, ErrorClass.INPUT)
        ]
        assert ended.seqs == [seq for seq in SEQS if seq != 100 + bad]
        assert ended.batch.to_pydict()["y"] == [i for i in range(10) if i != bad]
        assert 1 < ended.calls <= 9


def test_a_batch_of_bad_rows_fails_row_by_row() -> None:
    ended = batched(raising(ValueError("none")))
    assert (ended.seqs, ended.batch.num_rows) == ([], 0)
    assert [one.seq for one in ended.others] == SEQS


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TimeoutError("slow"), ErrorClass.TRANSIENT), (MemoryError("big"), ErrorClass.RESOURCE)],
)
def test_a_batch_that_may_be_retried_is_not_searched(error: Exception, kind: ErrorClass) -> None:
    ended = batched(raising(error))
    assert ended.calls == 1
    assert {(one.state, one.error_class) for one in ended.others} == {(State.TERMINAL_FAIL, kind)}
    assert [one.seq for one in ended.others] == SEQS


@pytest.mark.parametrize(
    "answer",
    [
        lambda batch: results(batch).slice(1),
        lambda batch: pa.concat_tables([results(batch)] * 2),
        lambda batch: results(batch).drop_columns(["s"]),
        lambda batch: batch,
        lambda batch: pa.table({"y": ["a"] * 10, "s": ["a"] * 10}),
        lambda batch: None,
    ],
    ids=["too few", "too many", "missing", "other columns", "other types", "nothing"],
)
def test_a_batch_of_the_wrong_shape_fails_whole_with_class_schema(
    answer: Callable[[pa.Table], Any],
) -> None:
    ended = batched(answer)
    assert ended.calls == 1
    assert [one.seq for one in ended.others] == SEQS
    assert {one.error_class for one in ended.others} == {ErrorClass.SCHEMA}


def test_rows_of_a_batch_are_skipped_and_failed_by_columns() -> None:
    def work(batch: pa.Table) -> pa.Table:
        n = batch.num_rows
        return (
            results(batch)
            .append_column("_skip", pa.array(["dull" if i == 2 else None for i in range(n)]))
            .append_column("_fail", pa.array(["bad" if i in (0, 9) else None for i in range(n)]))
        )

    ended = batched(work)
    assert [(one.seq, one.state, one.error) for one in ended.others] == [
        (100, State.TERMINAL_FAIL, "bad"),
        (102, State.TERMINAL_SKIP, "dull"),
        (109, State.TERMINAL_FAIL, "bad"),
    ]
    assert [one.error_class for one in ended.others] == [
        ErrorClass.INPUT,
        ErrorClass.NONE,
        ErrorClass.INPUT,
    ]
    assert ended.batch.to_pydict()["y"] == [1, 3, 4, 5, 6, 7, 8]


def test_marks_may_be_booleans_and_false_marks_nothing() -> None:
    marks = pa.array([i == 3 for i in range(10)])
    ended = batched(lambda batch: results(batch).append_column("_skip", marks))
    assert [(one.seq, one.error) for one in ended.others] == [(103, "")]
    assert ended.batch.num_rows == 9


def test_a_column_of_no_marks_marks_nothing() -> None:
    ended = batched(lambda batch: results(batch).append_column("_skip", pa.nulls(10)))
    assert (ended.others, ended.batch.num_rows) == ([], 10)


def test_every_row_of_a_batch_may_be_skipped() -> None:
    ended = batched(lambda batch: results(batch).append_column("_skip", pa.array(["no"] * 10)))
    assert (ended.seqs, ended.batch.num_rows, len(ended.others)) == ([], 0, 10)


def test_halves_are_other_requests_to_the_outside_and_all_of_them_cost() -> None:
    keys: list[str] = []

    def work(batch: pa.Table, call: Call) -> pa.Table:
        keys.append(call.idempotency_key)
        call.cost = 1.0
        assert call.rows == batch.num_rows
        if 0 in batch.column("id").to_pylist():
            raise ValueError("cannot")
        return results(batch)

    made = caller(work)
    ended = made.batch(SEQS, table(), 1)
    assert len(set(keys)) == len(keys) == ended.calls
    assert ended.cost == ended.calls
    again = list(keys)
    keys.clear()
    made.batch(SEQS, table(), 2)
    assert keys == again


def test_a_batch_that_takes_too_long_is_a_time_out_of_all_its_rows() -> None:
    async def work(batch: pa.Table) -> None:
        await asyncio.Event().wait()

    ended = batch_awaited(work, timeout_s=0.01)
    assert {one.error_class for one in ended.others} == {ErrorClass.TRANSIENT}
    assert len(ended.others) == 10


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError()], ids=repr)
def test_whatever_a_batch_raises_its_rows_end(error: BaseException) -> None:
    assert [one.seq for one in batched(raising(error)).others] == SEQS


# --- what did not fit is kept -----------------------------------------------------------------------


def test_a_result_that_does_not_fit_is_kept_as_text() -> None:
    ended = called(lambda row: {"y": "7", "s": b"x"})
    assert ended.error_class == ErrorClass.SCHEMA
    assert raw_values.decode(ended.raw) == {"y": "7", "s": b"x"}
    assert called(lambda row: {"y": 7.0, "s": "x", "z": 1}).values == (7, "x")
    assert called(lambda row: {"y": 7.0, "s": "x"}).raw == ""
    assert called(raising(ValueError("no"))).raw == ""


def test_a_success_that_turns_out_too_large_is_kept_as_text() -> None:
    one = caller(lambda row: {"y": 1, "s": "x"})
    ended = one.wrong_schema(one.one(7, Row(id=7), 1), "returned too much")
    assert (ended.values, raw_values.decode(ended.raw)) == (None, {"y": 1, "s": "x"})


def test_rows_of_a_batch_that_do_not_fit_fail_alone_and_are_kept() -> None:
    def work(batch: pa.Table) -> Any:
        rows = results(batch).to_pylist()
        rows[3]["y"] = "three"
        rows[5]["_skip"] = "dull"
        rows[6]["s"] = None
        return rows

    ended = batched(work)
    assert (ended.calls, ended.batch.num_rows) == (1, 8)
    bad, skipped = ended.others
    assert (bad.seq, bad.error_class) == (SEQS[3], ErrorClass.SCHEMA)
    assert raw_values.decode(bad.raw)["y"] == "three"
    assert (skipped.seq, skipped.state, skipped.raw) == (SEQS[5], State.TERMINAL_SKIP, "")


def test_a_batch_whose_rows_cannot_be_told_apart_is_kept_with_its_first_row() -> None:
    ended = batched(lambda batch: results(batch).slice(1))
    assert [bool(one.raw) for one in ended.others] == [True] + [False] * 9
    assert len(raw_values.decode(ended.others[0].raw)) == 9
    assert "first row" in ended.others[1].error


def test_a_result_that_cannot_be_printed_is_told_by_its_class() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise ValueError("mute")

    ended = called(lambda row: {"y": Mute(), "s": "x"})
    assert (ended.error_class, "not printable" in ended.error) == (ErrorClass.SCHEMA, True)
    assert raw_values.decode(ended.raw)["y"]["$object"].endswith("Mute")


def test_a_row_rests_as_long_as_the_server_asked_for() -> None:
    import httpx

    request = httpx.Request("GET", "http://127.0.0.1/")
    busy = httpx.Response(429, headers={"retry-after": "30"}, request=request)
    error = httpx.HTTPStatusError("busy", request=request, response=busy)
    ended = called(raising(error), retry_on=(transient,))
    assert (ended.error_class, ended.delay_ns) == (ErrorClass.TRANSIENT, 30_000_000_000)
    assert called(raising(error), retry_on=()).delay_ns == 0
    many = batched(raising(error), retry_on=(transient,))
    assert {one.delay_ns for one in many.others} == {30_000_000_000}
