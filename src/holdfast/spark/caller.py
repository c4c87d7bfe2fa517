"""The function caller: calls the user's function and classifies the outcome of each row.

Error classes (`exception_rules`): exceptions named by `retry_on` and `Retry` are transient, MemoryError is
resource, a result that does not fit the schema is schema, any other exception is input. A batch function
that raises is called again with halves of its batch, down to single rows, so that one bad row fails
alone. Transient errors and schema errors end the whole batch at once.

Every row gets an outcome. `sys.exit()`, an unprintable exception and a reason that is not text are
failures of the row. Otherwise the thread would die and leave the row begun.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import Row

from holdfast import forks
from holdfast.clock import SYSTEM
from holdfast.config import ERROR_TEXT_CHARS_MAX, TTL_NS_MAX
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark import raw_values
from holdfast.spark.arrow_rows import ResultEncoder, to_table
from holdfast.spark.call_slots import CallSlot, timeout_error
from holdfast.spark.coercion import WrongSchema
from holdfast.spark.exception_rules import RetryRule, RetryRules, retry_after_s
from holdfast.spark.row_results import Call, Fail, Retry, Skip

# Run and seq under which the row first occurred, by its seq in this run.
OriginPosition = tuple[str, int]
OriginsBySeq = Mapping[int, OriginPosition]

_SUCCESS = RowState.TERMINAL_SUCCESS
# Builds the `CallOutcome` of a success without the constructor of the named tuple: it runs once per
# call.
_new_tuple = tuple.__new__

SKIP_COLUMN = "_skip"
FAIL_COLUMN = "_fail"


class CallOutcome(NamedTuple):
    """The outcome of the call of one row. `values` are the result columns of a success. `raw` is
    the returned value, if it did not fit the schema.
    """

    seq: int
    state: int
    values: tuple[Any, ...] | None
    error_class: int
    error: str
    delay_ns: int
    cost: float
    micros: int
    raw: str = ""
    # Tokens that the call reported; None if it reported none.
    tokens: int | None = None


class BatchOutcome(NamedTuple):
    """The outcome of the call of one batch: successes as one Arrow batch, all other rows one by
    one.
    """

    seqs: Sequence[int]
    batch: pa.RecordBatch
    resultless: list[CallOutcome]
    cost: float
    micros: int
    calls: int
    tokens: int | None = None


class FunctionCaller:
    # Calls that each finished row adds to the call count of the run.
    calls_per_row = 1

    def __init__(
        self,
        fn: Callable[..., Any],
        retry_on: tuple[RetryRule, ...],
        encoder: ResultEncoder,
        run_id: str,
        timeout_s: float,
    ) -> None:
        self.fn = fn
        self.class_of = RetryRules(retry_on).class_of
        self.encoder = encoder
        self.run_id = run_id
        self.timeout_s = timeout_s
        self.is_async = is_async(fn)
        self._with_call = takes_call(fn)
        if not self._with_call and _takes_call_keyword(fn):
            self.fn, self._with_call = (lambda subject, call: fn(subject, call=call)), True

    def call_row(
        self,
        seq: int,
        row: Row,
        attempt: int,
        origin: OriginPosition | None = None,
        slot: CallSlot | None = None,
    ) -> CallOutcome:
        # A `Call` object is needed only if the function takes one.
        call = Call(self.run_id, seq, attempt, origin=origin) if self._with_call else None
        if slot is not None:
            slot.cells[slot.offset] = seq << 8 | attempt
            if call is not None:
                call._slot = slot
        began = SYSTEM.mono_ns()
        before = forks.fork_count
        try:
            result = self.fn(row) if call is None else self.fn(row, call)
            if forks.fork_count != before:
                forks.exit_child()
            return self._outcome_of_result(seq, call, result, began)
        except BaseException as error:
            if forks.fork_count != before:
                forks.exit_child(error)
            return self._outcome_of_error(seq, call, error, began)

    async def call_row_async(
        self,
        seq: int,
        row: Row,
        attempt: int,
        origin: OriginPosition | None = None,
        slot: CallSlot | None = None,
    ) -> CallOutcome:
        call = Call(self.run_id, seq, attempt, origin=origin) if self._with_call else None
        if slot is not None:
            slot.begin(seq, attempt)
            if call is not None:
                call._slot = slot
        began = SYSTEM.mono_ns()
        try:
            result = await self.await_with_timeout(
                lambda: self.fn(row) if call is None else self.fn(row, call), slot
            )
            return self._outcome_of_result(seq, call, result, began)
        except BaseException as error:
            return self._outcome_of_error(seq, call, error, began)

    async def await_with_timeout(self, start: Callable[[], Any], slot: CallSlot | None) -> Any:
        """Await a coroutine under the timeout. It is cancelled at the timeout unless it reports
        progress.
        """
        coroutine = start()
        timeout = asyncio.timeout(self.timeout_s)
        try:
            async with timeout:
                if slot is not None:
                    slot.set_timeout(timeout, self.timeout_s)
                return await coroutine
        except TimeoutError:
            if timeout.expired():
                raise timeout_error(self.timeout_s) from None
            raise
        finally:
            if slot is not None:
                slot.set_timeout(None, 0.0)

    def call_batch(
        self,
        seqs: Sequence[int],
        table: pa.Table,
        attempt: int,
        origins: OriginsBySeq | None = None,
        slot: CallSlot | None = None,
    ) -> BatchOutcome:
        began = SYSTEM.mono_ns()
        batch_call = _BatchCall(self, seqs, attempt, origins, slot)
        batch_call.run(table, 0)
        return batch_call.result(_elapsed_us(began))

    async def call_batch_async(
        self,
        seqs: Sequence[int],
        table: pa.Table,
        attempt: int,
        origins: OriginsBySeq | None = None,
        slot: CallSlot | None = None,
    ) -> BatchOutcome:
        """Do the same as `call_batch` for `async def`: on this event loop, halves one after the other."""
        began = SYSTEM.mono_ns()
        batch_call = _BatchCall(self, seqs, attempt, origins, slot)
        await batch_call.run_async(table, 0)
        return batch_call.result(_elapsed_us(began))

    def _outcome_of_result(
        self, seq: int, call: Call | None, result: Any, began: int
    ) -> CallOutcome:
        micros = _elapsed_us(began)
        if type(result) is dict and (call is None or _has_no_usage(call)):
            exact = self.encoder.encode_exact(result)
            if exact is not None:
                return _new_tuple(
                    CallOutcome, (seq, _SUCCESS, exact, 0, "", 0, 0.0, micros, "", None)
                )
        state, error_class, text, delay_ns = RowState.TERMINAL_FAIL, ErrorClass.INPUT, "", 0
        raw = ""
        if type(result) is dict or not isinstance(result, Skip | Retry | Fail):
            try:
                values = self.encoder.encode_values(result)
            except WrongSchema as error:
                error_class, text = ErrorClass.SCHEMA, f"returned {error}"
                raw = raw_values.encode(result)
            else:
                cost, used = _reported_cost(call), _reported_tokens(call)
                return CallOutcome(
                    seq=seq,
                    state=_SUCCESS,
                    values=values,
                    error_class=0,
                    error="",
                    delay_ns=0,
                    cost=cost,
                    micros=micros,
                    raw="",
                    tokens=used,
                )
        elif isinstance(result, Skip):
            state, error_class, text = RowState.TERMINAL_SKIP, ErrorClass.NONE, result.reason
        elif isinstance(result, Retry):
            error_class, text = ErrorClass.TRANSIENT, result.reason
            delay_ns = _requested_delay_ns(result)
        else:
            text = result.reason
        cost, used = _reported_cost(call), _reported_tokens(call)
        reason = _reason_text(text)
        return CallOutcome(
            seq=seq,
            state=state,
            values=None,
            error_class=error_class,
            error=reason,
            delay_ns=delay_ns,
            cost=cost,
            micros=micros,
            raw=raw,
            tokens=used,
        )

    def _outcome_of_error(
        self, seq: int, call: Call | None, error: BaseException, began: int
    ) -> CallOutcome:
        text = _error_text(error)
        error_class = self.class_of(error)
        delay_ns = _server_delay_ns(error) if error_class == ErrorClass.TRANSIENT else 0
        cost, micros, used = _reported_cost(call), _elapsed_us(began), _reported_tokens(call)
        fail = RowState.TERMINAL_FAIL
        return CallOutcome(
            seq=seq,
            state=fail,
            values=None,
            error_class=error_class,
            error=text,
            delay_ns=delay_ns,
            cost=cost,
            micros=micros,
            raw="",
            tokens=used,
        )

    def as_schema_failure(self, outcome: CallOutcome, why: str) -> CallOutcome:
        """Turn a success into a schema failure: its values do not fit the schema, or are too large."""
        values = dict(zip(self.encoder.names, outcome.values or (), strict=True))
        return outcome._replace(
            state=RowState.TERMINAL_FAIL,
            values=None,
            error_class=ErrorClass.SCHEMA,
            error=_reason_text(why),
            raw=raw_values.encode(values),
        )


class _BatchCall:
    """One batch, and the halves into which it is split when the function raises."""

    def __init__(
        self,
        caller: FunctionCaller,
        seqs: Sequence[int],
        attempt: int,
        origins: OriginsBySeq | None = None,
        slot: CallSlot | None = None,
    ) -> None:
        self.caller = caller
        self.slot = slot
        self.seqs = seqs
        self.origins = origins or {}
        self.attempt = attempt
        self.calls = 0
        self.cost = 0.0
        self.tokens: int | None = None
        self.results: list[tuple[int, pa.RecordBatch]] = []
        self.resultless: list[CallOutcome] = []

    def run(self, table: pa.Table, at: int) -> None:
        call = self._begin_call(table, at)
        halves: list[tuple[pa.Table, int]] = []
        before = forks.fork_count
        try:
            result = self._call_function(table, call)
            if forks.fork_count != before:
                forks.exit_child()
            self._add_result(result, table.num_rows, at)
        except BaseException as error:
            if forks.fork_count != before:
                forks.exit_child(error)
            halves = self._split_after_error(error, table, at)
        self._add_usage(call)
        for half, lo in halves:
            self.run(half, lo)

    async def run_async(self, table: pa.Table, at: int) -> None:
        call = self._begin_call(table, at)
        halves: list[tuple[pa.Table, int]] = []
        try:
            result = await self.caller.await_with_timeout(
                lambda: self._call_function(table, call), self.slot
            )
            self._add_result(result, table.num_rows, at)
        except BaseException as error:
            halves = self._split_after_error(error, table, at)
        self._add_usage(call)
        for half, lo in halves:
            await self.run_async(half, lo)

    def _add_usage(self, call: Call) -> None:
        self.cost += _reported_cost(call)
        used = _reported_tokens(call)
        if used is not None:
            self.tokens = (self.tokens or 0) + used

    def result(self, micros: int) -> BatchOutcome:
        self.results.sort(key=lambda kept: kept[0])
        bad = {other.seq for other in self.resultless}
        seqs = [seq for seq in self.seqs if seq not in bad] if bad else self.seqs
        batches = [batch for _, batch in self.results]
        if len(batches) == 1:
            whole = batches[0]
        elif batches:
            whole = pa.concat_batches(batches)
        else:
            whole = pa.RecordBatch.from_pylist([], schema=self.caller.encoder.arrow)
        assert whole.num_rows == len(seqs), "every row of a batch ends once"
        self.resultless.sort(key=lambda other: other.seq)
        return BatchOutcome(
            seqs, whole, self.resultless, self.cost, micros, self.calls, self.tokens
        )

    def _begin_call(self, table: pa.Table, at: int) -> Call:
        """Begin the call for these rows. If a failed batch is called again in halves, each half has a different
        idempotency key, because the called service must see it as a new request.
        """
        self.calls += 1
        first, last = self.seqs[at], self.seqs[at + table.num_rows - 1]
        origin = self._common_origin(at, at + table.num_rows) if self.origins else None
        call = Call(
            self.caller.run_id, first, self.attempt, last=last, rows=table.num_rows, origin=origin
        )
        if self.slot is not None:
            self.slot.begin(first, self.attempt)
            call._slot = self.slot
        return call

    def _common_origin(self, lo: int, hi: int) -> OriginPosition | None:
        """Return the common origin if an earlier run had all of these rows side by side; else None."""
        first = self.origins.get(self.seqs[lo])
        if first is None:
            return None
        run_id, seq = first
        for i in range(lo, hi):
            if self.origins.get(self.seqs[i]) != (run_id, seq + self.seqs[i] - self.seqs[lo]):
                return None
        return first

    def _call_function(self, table: pa.Table, call: Call) -> Any:
        fn = self.caller.fn
        return fn(table, call) if self.caller._with_call else fn(table)

    def _add_result(self, result: Any, rows: int, at: int) -> None:
        table = to_table(result)
        marks, table = _take_marked_rows(table)
        try:
            batch, unfit = self.caller.encoder.encode_table(
                result if table is None else table, rows
            )
        except WrongSchema as error:
            # Result rows cannot be assigned to input rows: keep the whole result with the first
            # row.
            raw = raw_values.encode(result)
            for i in range(rows):
                text = (
                    f"returned {error}" if not i else f"returned {error}; _raw is in the first row"
                )
                self._add_resultless(
                    at + i, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA, text, "" if i else raw
                )
            return
        if marks:
            bad = {one.position for one in unfit}
            valid = [i for i in range(rows) if i not in bad]
            kept = [k for k, i in enumerate(valid) if i not in marks]
            batch = batch.take(pa.array(kept, pa.int64()))
        if batch.num_rows:
            self.results.append((at, batch))
        for one in unfit:
            if one.position not in marks:
                raw = raw_values.encode(one.value)
                text = f"returned {one.why}"
                self._add_resultless(
                    at + one.position, RowState.TERMINAL_FAIL, ErrorClass.SCHEMA, text, raw
                )
        for i, (code, reason) in marks.items():
            state = RowState(code)
            kind = ErrorClass.NONE if state == RowState.TERMINAL_SKIP else ErrorClass.INPUT
            self._add_resultless(at + i, state, kind, reason)

    def _split_after_error(
        self, error: BaseException, table: pa.Table, at: int
    ) -> list[tuple[pa.Table, int]]:
        """Return the halves to call next. There are none if the batch is retried whole or has one
        row.
        """
        error_class = self.caller.class_of(error)
        rows = table.num_rows
        # Only input errors depend on the content of single rows, so only they are bisected.
        if error_class != ErrorClass.INPUT or rows == 1:
            text = _error_text(error)
            delay_ns = _server_delay_ns(error) if error_class == ErrorClass.TRANSIENT else 0
            for i in range(rows):
                self._add_resultless(
                    at + i, RowState.TERMINAL_FAIL, error_class, text, delay_ns=delay_ns
                )
            return []
        half = rows // 2
        return [(table.slice(0, half), at), (table.slice(half), at + half)]

    def _add_resultless(
        self, i: int, state: int, error_class: int, text: str, raw: str = "", delay_ns: int = 0
    ) -> None:
        seq, text = self.seqs[i], _reason_text(text)
        self.resultless.append(
            CallOutcome(
                seq=seq,
                state=state,
                values=None,
                error_class=error_class,
                error=text,
                delay_ns=delay_ns,
                cost=0.0,
                micros=0,
                raw=raw,
            )
        )


def _take_marked_rows(table: Any) -> tuple[dict[int, tuple[int, str]], Any]:
    """Return the rows that a batch function marked by `_skip` or `_fail`, and the table without
    these columns.
    """
    marks: dict[int, tuple[int, str]] = {}
    for column, state in (
        (SKIP_COLUMN, RowState.TERMINAL_SKIP),
        (FAIL_COLUMN, RowState.TERMINAL_FAIL),
    ):
        if isinstance(table, pa.Table):
            if column not in table.column_names:
                continue
            reasons = table.column(column).to_pylist()
            table = table.drop_columns([column])
        elif isinstance(table, list):
            reasons = [one.get(column) if isinstance(one, dict) else None for one in table]
        else:
            continue
        for i, reason in enumerate(reasons):
            # A boolean column marks rows, too. False is not a mark.
            if reason is not None and reason is not False:
                marks[i] = (state, "" if reason is True else str(reason))
    return marks, table


def is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def takes_row(fn: Callable[..., Any]) -> bool:
    """Whether the function can be called with a row, as far as its signature is known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True
    row: tuple[Any, ...] = (None, None) if takes_call(fn) else (None,)
    named = {"call": None} if _takes_call_keyword(fn) else {}
    try:
        signature.bind(*row, **named)
    except TypeError:
        return False
    return True


def takes_call(fn: Callable[..., Any]) -> bool:
    """Whether the function takes the call object as its second argument."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(placed) < 2:
        return any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return placed[1].default is placed[1].empty or placed[1].name == "call"


def _takes_call_keyword(fn: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(fn).parameters.get("call")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


def _reason_text(text: Any) -> str:
    """Return a reason as text that can be sent. The reason may be an exception or invalid Unicode."""
    try:
        result = text if isinstance(text, str) else "" if text is None else str(text)
    except Exception:
        result = type(text).__name__
    result = result[:ERROR_TEXT_CHARS_MAX]
    return result if result.isascii() else result.encode(errors="backslashreplace").decode()


def _error_text(error: BaseException) -> str:
    return _reason_text(f"{type(error).__name__}: {_reason_text(error)}")


def _requested_delay_ns(retry: Retry) -> int:
    """Return the requested retry delay. 0 means the backoff of the stage, so an immediate retry is
    at least 1.
    """
    if retry.after_s is None:
        return 0
    return max(int(min(float(retry.after_s) * 1e9, TTL_NS_MAX)), 1)


def _server_delay_ns(error: BaseException) -> int:
    """Return the delay that the server requested (Retry-After); 0 if it requested none."""
    seconds = retry_after_s(error, SYSTEM.wall_ns() / 1e9)
    return 0 if seconds is None else max(int(seconds * 1e9), 1)


def _has_no_usage(call: Call) -> bool:
    """Whether the function left cost and tokens of its call unset."""
    return call.tokens is None and type(call.cost) is float and call.cost == 0.0


def _reported_cost(call: Call | None) -> float:
    """Return the reported cost. It is informational, so an invalid value counts as 0."""
    if call is None:
        return 0.0
    try:
        cost = float(call.cost)
    except (TypeError, ValueError):
        return 0.0
    return cost if math.isfinite(cost) else 0.0


def _reported_tokens(call: Call | None) -> int | None:
    """Return the reported token count; a value that is not a number counts as not reported."""
    if call is None:
        return None
    try:
        return None if call.tokens is None else max(int(call.tokens), 0)
    except (TypeError, ValueError, OverflowError):
        return None


def _elapsed_us(began: int) -> int:
    return (SYSTEM.mono_ns() - began) // 1000
