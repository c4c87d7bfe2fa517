"""Calls the user's function and says how each row ended.

The classes of document 002: what `retry_on` names and `Retry` are transient, MemoryError is
resource, what does not fit the schema is schema, anything else is input. A batch function that
raises is called again with halves of its batch, down to single rows, so that one bad row fails
alone; with what may be retried, or is of the wrong schema, the whole batch ends as one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import Row

from holdfast.clock import SYSTEM
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.states import State
from holdfast.spark.outcome import Call, Fail, Retry, Skip
from holdfast.spark.rows import Encoder, WrongSchema

SKIP_COLUMN = "_skip"
FAIL_COLUMN = "_fail"


class Ended(NamedTuple):
    """How one row's call ended. `values` are the result columns of a success."""

    seq: int
    state: int
    values: tuple[Any, ...] | None
    error_class: int
    error: str
    delay_ns: int
    cost: float
    micros: int


class BatchEnded(NamedTuple):
    """How one batch's call ended: successes as one Arrow batch, the rest row by row."""

    seqs: list[int]
    batch: pa.RecordBatch
    others: list[Ended]
    cost: float
    micros: int
    calls: int


class Caller:
    def __init__(
        self,
        fn: Callable[..., Any],
        retry_on: tuple[type[BaseException], ...],
        encoder: Encoder,
        run_id: str,
        timeout_s: float,
    ) -> None:
        self.fn = fn
        self.retry_on = retry_on
        self.encoder = encoder
        self.run_id = run_id
        self.timeout_s = timeout_s
        self.is_async = is_async(fn)
        self._with_call = takes_call(fn)

    def one(self, seq: int, row: Row, attempt: int) -> Ended:
        call = Call(self.run_id, seq, attempt)
        began = SYSTEM.mono_ns()
        try:
            found = self.fn(row, call) if self._with_call else self.fn(row)
        except Exception as error:
            return self._raised(call, error, began)
        return self._returned(call, found, began)

    async def one_async(self, seq: int, row: Row, attempt: int) -> Ended:
        call = Call(self.run_id, seq, attempt)
        began = SYSTEM.mono_ns()
        try:
            coroutine = self.fn(row, call) if self._with_call else self.fn(row)
            found = await asyncio.wait_for(coroutine, self.timeout_s)
        except Exception as error:
            return self._raised(call, error, began)
        return self._returned(call, found, began)

    def batch(self, seqs: list[int], table: pa.Table, attempt: int) -> BatchEnded:
        call = Call(self.run_id, seqs[0], attempt)
        began = SYSTEM.mono_ns()
        ended = _Batches(self, seqs, call)
        ended.run(table, 0)
        return ended.result(_micros(began))

    async def batch_async(self, seqs: list[int], table: pa.Table, attempt: int) -> BatchEnded:
        """As `batch`, for `async def`: the coroutine runs on this loop, halves one by one."""
        call = Call(self.run_id, seqs[0], attempt)
        began = SYSTEM.mono_ns()
        ended = _Batches(self, seqs, call)
        await ended.run_async(table, 0, self.timeout_s)
        return ended.result(_micros(began))

    def _returned(self, call: Call, found: Any, began: int) -> Ended:
        micros = _micros(began)
        state, error_class, text, delay_ns = State.TERMINAL_FAIL, ErrorClass.INPUT, "", 0
        if type(found) is dict or not isinstance(found, Skip | Retry | Fail):
            try:
                values = self.encoder.values(found)
            except WrongSchema as error:
                error_class, text = ErrorClass.SCHEMA, f"returned {error}"
            else:
                return Ended(call.seq, State.TERMINAL_SUCCESS, values, 0, "", 0, call.cost, micros)
        elif isinstance(found, Skip):
            state, error_class, text = State.TERMINAL_SKIP, ErrorClass.NONE, found.reason
        elif isinstance(found, Retry):
            error_class, text = ErrorClass.TRANSIENT, found.reason
            delay_ns = int((found.after_s or 0) * 1e9)
        else:
            text = found.reason
        return Ended(call.seq, state, None, error_class, _cut(text), delay_ns, call.cost, micros)

    def _raised(self, call: Call, error: Exception, began: int) -> Ended:
        text = _cut(f"{type(error).__name__}: {error}")
        error_class = self.class_of(error)
        return Ended(
            call.seq, State.TERMINAL_FAIL, None, error_class, text, 0, call.cost, _micros(began)
        )

    def wrong_schema(self, ended: Ended, why: str) -> Ended:
        """A success whose values turned out to be no values of the schema."""
        return ended._replace(
            state=State.TERMINAL_FAIL,
            values=None,
            error_class=ErrorClass.SCHEMA,
            error=_cut(f"returned {why}"),
        )

    def class_of(self, error: BaseException) -> int:
        if isinstance(error, WrongSchema):
            return ErrorClass.SCHEMA
        if isinstance(error, MemoryError):
            return ErrorClass.RESOURCE
        if isinstance(error, self.retry_on):
            return ErrorClass.TRANSIENT
        return ErrorClass.INPUT


class _Batches:
    """One batch and the halves it falls into when the function raises."""

    def __init__(self, caller: Caller, seqs: list[int], call: Call) -> None:
        self.caller = caller
        self.seqs = seqs
        self.call = call
        self.calls = 0
        self.kept: list[tuple[int, pa.RecordBatch]] = []
        self.others: list[Ended] = []

    def run(self, table: pa.Table, at: int) -> None:
        self.calls += 1
        try:
            found = self._call(table)
            self._keep(found, table.num_rows, at)
        except Exception as error:
            for half, lo in self._after(error, table, at):
                self.run(half, lo)

    async def run_async(self, table: pa.Table, at: int, timeout_s: float) -> None:
        self.calls += 1
        try:
            found = await asyncio.wait_for(self._call(table), timeout_s)
            self._keep(found, table.num_rows, at)
        except Exception as error:
            for half, lo in self._after(error, table, at):
                await self.run_async(half, lo, timeout_s)

    def result(self, micros: int) -> BatchEnded:
        self.kept.sort(key=lambda kept: kept[0])
        at = {seq: i for i, seq in enumerate(self.seqs)}
        bad = {other.seq for other in self.others}
        seqs = [seq for seq in self.seqs if seq not in bad] if bad else self.seqs
        batches = [batch for _, batch in self.kept]
        if len(batches) == 1:
            whole = batches[0]
        elif batches:
            whole = pa.concat_batches(batches)
        else:
            whole = pa.RecordBatch.from_pylist([], schema=self.caller.encoder.arrow)
        assert whole.num_rows == len(seqs), "every row of a batch ends once"
        self.others.sort(key=lambda other: at[other.seq])
        return BatchEnded(seqs, whole, self.others, self.call.cost, micros, self.calls)

    def _call(self, table: pa.Table) -> Any:
        fn = self.caller.fn
        return fn(table, self.call) if self.caller._with_call else fn(table)

    def _keep(self, found: Any, rows: int, at: int) -> None:
        if isinstance(found, pa.RecordBatch):
            found = pa.Table.from_batches([found])
        marks: dict[int, tuple[int, str]] = {}
        for column, state in (
            (SKIP_COLUMN, State.TERMINAL_SKIP),
            (FAIL_COLUMN, State.TERMINAL_FAIL),
        ):
            if isinstance(found, pa.Table) and column in found.column_names:
                for i, reason in enumerate(found.column(column).to_pylist()):
                    if reason is not None:
                        marks[i] = (state, str(reason))
                found = found.drop_columns([column])
        batch = self.caller.encoder.check_table(found, rows)
        if marks:
            keep = pa.array([i for i in range(rows) if i not in marks], pa.int64())
            batch = batch.take(keep)
        if batch.num_rows:
            self.kept.append((at, batch))
        for i, (code, reason) in marks.items():
            state = State(code)
            kind = ErrorClass.NONE if state == State.TERMINAL_SKIP else ErrorClass.INPUT
            self._other(at + i, state, kind, reason)

    def _after(self, error: Exception, table: pa.Table, at: int) -> list[tuple[pa.Table, int]]:
        """The halves to try after a failure; none when it is retried whole, or one row is left."""
        error_class = self.caller.class_of(error)
        rows = table.num_rows
        # Only what hangs on one row's content is looked for in halves.
        if error_class != ErrorClass.INPUT or rows == 1:
            text = f"{type(error).__name__}: {error}"
            for i in range(rows):
                self._other(at + i, State.TERMINAL_FAIL, error_class, text)
            return []
        half = rows // 2
        return [(table.slice(0, half), at), (table.slice(half), at + half)]

    def _other(self, i: int, state: int, error_class: int, text: str) -> None:
        self.others.append(Ended(self.seqs[i], state, None, error_class, _cut(text), 0, 0.0, 0))


def is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def takes_call(fn: Callable[..., Any]) -> bool:
    """Whether the function wants the call beside its row."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(placed) < 2:
        return any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return placed[1].default is placed[1].empty or placed[1].name == "call"


def _cut(text: str) -> str:
    return text[:ERROR_TEXT_CHARS_MAX]


def _micros(began: int) -> int:
    return (SYSTEM.mono_ns() - began) // 1000
