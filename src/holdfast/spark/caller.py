"""Calls the user's function and says how each row ended.

The classes of document 002: what `retry_on` names and `Retry` are transient, MemoryError is
resource, what does not fit the schema is schema, anything else is input (`error_classes`). A batch function that
raises is called again with halves of its batch, down to single rows, so that one bad row fails
alone; with what may be retried, or is of the wrong schema, the whole batch ends as one.

Whatever a function does, its row ends: `sys.exit()`, an error that cannot be printed and a reason
that is no text are failures of the row, or a thread that dies over them would leave it begun.
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
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.states import State
from holdfast.spark import raw_values
from holdfast.spark.call_slots import Watch, timed_out
from holdfast.spark.coercion import WrongSchema
from holdfast.spark.error_classes import Rule, Rules, retry_after_s
from holdfast.spark.outcome import Call, Fail, Retry, Skip
from holdfast.spark.rows import Encoder, tabulated

# The run and seq that a row had first, by its seq here.
Origin = tuple[str, int]
Origins = Mapping[int, Origin]

_SUCCESS = State.TERMINAL_SUCCESS
# `Ended(...)` of a success, for each call: without the function that a named tuple has for it.
_new = tuple.__new__

SKIP_COLUMN = "_skip"
FAIL_COLUMN = "_fail"


class Ended(NamedTuple):
    """How one row's call ended. `values` are the result columns of a success; `raw` is what was
    returned when it did not fit them."""

    seq: int
    state: int
    values: tuple[Any, ...] | None
    error_class: int
    error: str
    delay_ns: int
    cost: float
    micros: int
    raw: str = ""
    # What the call said it used; None: it did not.
    tokens: int | None = None


class BatchEnded(NamedTuple):
    """How one batch's call ended: successes as one Arrow batch, the rest row by row."""

    seqs: Sequence[int]
    batch: pa.RecordBatch
    others: list[Ended]
    cost: float
    micros: int
    calls: int
    tokens: int | None = None


class Caller:
    # What a row that ended counts for among the calls of the run.
    calls_each = 1

    def __init__(
        self,
        fn: Callable[..., Any],
        retry_on: tuple[Rule, ...],
        encoder: Encoder,
        run_id: str,
        timeout_s: float,
    ) -> None:
        self.fn = fn
        self.class_of = Rules(retry_on).class_of
        self.encoder = encoder
        self.run_id = run_id
        self.timeout_s = timeout_s
        self.is_async = is_async(fn)
        self._with_call = takes_call(fn)
        if not self._with_call and _takes_call_by_name(fn):
            self.fn, self._with_call = (lambda subject, call: fn(subject, call=call)), True

    def one(
        self,
        seq: int,
        row: Row,
        attempt: int,
        origin: Origin | None = None,
        watch: Watch | None = None,
    ) -> Ended:
        # Only the function can say anything of its call: without one there is nothing to be said.
        call = Call(self.run_id, seq, attempt, origin=origin) if self._with_call else None
        if watch is not None:
            watch.cells[watch.place] = seq << 8 | attempt
            if call is not None:
                call._watch = watch
        began = SYSTEM.mono_ns()
        before = forks.made
        try:
            found = self.fn(row) if call is None else self.fn(row, call)
            if forks.made != before:
                forks.leave()
            return self._returned(seq, call, found, began)
        except BaseException as error:
            if forks.made != before:
                forks.leave(error)
            return self._raised(seq, call, error, began)

    async def one_async(
        self,
        seq: int,
        row: Row,
        attempt: int,
        origin: Origin | None = None,
        watch: Watch | None = None,
    ) -> Ended:
        call = Call(self.run_id, seq, attempt, origin=origin) if self._with_call else None
        if watch is not None:
            watch.begin(seq, attempt)
            if call is not None:
                call._watch = watch
        began = SYSTEM.mono_ns()
        try:
            found = await self.in_time(
                lambda: self.fn(row) if call is None else self.fn(row, call), watch
            )
            return self._returned(seq, call, found, began)
        except BaseException as error:
            return self._raised(seq, call, error, began)

    async def in_time(self, begin: Callable[[], Any], watch: Watch | None) -> Any:
        """What a coroutine returns; out of time it is cancelled, unless it says that it goes on."""
        coroutine = begin()
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                if watch is not None:
                    watch.limit(limit, self.timeout_s)
                return await coroutine
        except TimeoutError:
            if limit.expired():
                raise timed_out(self.timeout_s) from None
            raise
        finally:
            if watch is not None:
                watch.limit(None, 0.0)

    def batch(
        self,
        seqs: Sequence[int],
        table: pa.Table,
        attempt: int,
        origins: Origins | None = None,
        watch: Watch | None = None,
    ) -> BatchEnded:
        began = SYSTEM.mono_ns()
        ended = _Batches(self, seqs, attempt, origins, watch)
        ended.run(table, 0)
        return ended.result(_micros(began))

    async def batch_async(
        self,
        seqs: Sequence[int],
        table: pa.Table,
        attempt: int,
        origins: Origins | None = None,
        watch: Watch | None = None,
    ) -> BatchEnded:
        """As `batch`, for `async def`: the coroutine runs on this loop, halves one by one."""
        began = SYSTEM.mono_ns()
        ended = _Batches(self, seqs, attempt, origins, watch)
        await ended.run_async(table, 0)
        return ended.result(_micros(began))

    def _returned(self, seq: int, call: Call | None, found: Any, began: int) -> Ended:
        micros = _micros(began)
        if type(found) is dict and (call is None or _says_nothing(call)):
            exact = self.encoder.exact(found)
            if exact is not None:
                return _new(Ended, (seq, _SUCCESS, exact, 0, "", 0, 0.0, micros, "", None))
        state, error_class, text, delay_ns = State.TERMINAL_FAIL, ErrorClass.INPUT, "", 0
        raw = ""
        if type(found) is dict or not isinstance(found, Skip | Retry | Fail):
            try:
                values = self.encoder.values(found)
            except WrongSchema as error:
                error_class, text = ErrorClass.SCHEMA, f"returned {error}"
                raw = raw_values.encode(found)
            else:
                cost, used = _cost(call), _tokens(call)
                return Ended(seq, _SUCCESS, values, 0, "", 0, cost, micros, "", used)
        elif isinstance(found, Skip):
            state, error_class, text = State.TERMINAL_SKIP, ErrorClass.NONE, found.reason
        elif isinstance(found, Retry):
            error_class, text = ErrorClass.TRANSIENT, found.reason
            delay_ns = _delay_ns(found)
        else:
            text = found.reason
        cost, used = _cost(call), _tokens(call)
        told = _cut(text)
        return Ended(seq, state, None, error_class, told, delay_ns, cost, micros, raw, used)

    def _raised(self, seq: int, call: Call | None, error: BaseException, began: int) -> Ended:
        text = _told(error)
        error_class = self.class_of(error)
        delay_ns = _asked_ns(error) if error_class == ErrorClass.TRANSIENT else 0
        cost, micros, used = _cost(call), _micros(began), _tokens(call)
        fail = State.TERMINAL_FAIL
        return Ended(seq, fail, None, error_class, text, delay_ns, cost, micros, "", used)

    def wrong_schema(self, ended: Ended, why: str) -> Ended:
        """A success whose values turned out to be no values of the schema, or too many bytes."""
        values = dict(zip(self.encoder.names, ended.values or (), strict=True))
        return ended._replace(
            state=State.TERMINAL_FAIL,
            values=None,
            error_class=ErrorClass.SCHEMA,
            error=_cut(why),
            raw=raw_values.encode(values),
        )


class _Batches:
    """One batch and the halves it falls into when the function raises."""

    def __init__(
        self,
        caller: Caller,
        seqs: Sequence[int],
        attempt: int,
        origins: Origins | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.caller = caller
        self.watch = watch
        self.seqs = seqs
        self.origins = origins or {}
        self.attempt = attempt
        self.calls = 0
        self.cost = 0.0
        self.tokens: int | None = None
        self.kept: list[tuple[int, pa.RecordBatch]] = []
        self.others: list[Ended] = []

    def run(self, table: pa.Table, at: int) -> None:
        call = self._begin(table, at)
        halves: list[tuple[pa.Table, int]] = []
        before = forks.made
        try:
            found = self._call(table, call)
            if forks.made != before:
                forks.leave()
            self._keep(found, table.num_rows, at)
        except BaseException as error:
            if forks.made != before:
                forks.leave(error)
            halves = self._after(error, table, at)
        self._count(call)
        for half, lo in halves:
            self.run(half, lo)

    async def run_async(self, table: pa.Table, at: int) -> None:
        call = self._begin(table, at)
        halves: list[tuple[pa.Table, int]] = []
        try:
            found = await self.caller.in_time(lambda: self._call(table, call), self.watch)
            self._keep(found, table.num_rows, at)
        except BaseException as error:
            halves = self._after(error, table, at)
        self._count(call)
        for half, lo in halves:
            await self.run_async(half, lo)

    def _count(self, call: Call) -> None:
        self.cost += _cost(call)
        used = _tokens(call)
        if used is not None:
            self.tokens = (self.tokens or 0) + used

    def result(self, micros: int) -> BatchEnded:
        self.kept.sort(key=lambda kept: kept[0])
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
        self.others.sort(key=lambda other: other.seq)
        return BatchEnded(seqs, whole, self.others, self.cost, micros, self.calls, self.tokens)

    def _begin(self, table: pa.Table, at: int) -> Call:
        """A half has a key of its own: to the outside it is another request than the whole."""
        self.calls += 1
        first, last = self.seqs[at], self.seqs[at + table.num_rows - 1]
        origin = self._origin(at, at + table.num_rows) if self.origins else None
        call = Call(
            self.caller.run_id, first, self.attempt, last=last, rows=table.num_rows, origin=origin
        )
        if self.watch is not None:
            self.watch.begin(first, self.attempt)
            call._watch = self.watch
        return call

    def _origin(self, lo: int, hi: int) -> Origin | None:
        """Of rows that an earlier run had first, all of them and side by side as here."""
        first = self.origins.get(self.seqs[lo])
        if first is None:
            return None
        run_id, seq = first
        for i in range(lo, hi):
            if self.origins.get(self.seqs[i]) != (run_id, seq + self.seqs[i] - self.seqs[lo]):
                return None
        return first

    def _call(self, table: pa.Table, call: Call) -> Any:
        fn = self.caller.fn
        return fn(table, call) if self.caller._with_call else fn(table)

    def _keep(self, found: Any, rows: int, at: int) -> None:
        table = tabulated(found)
        marks, table = _marks(table)
        try:
            batch, unfit = self.caller.encoder.fit_table(found if table is None else table, rows)
        except WrongSchema as error:
            # Which row is whose cannot be told: all of it is kept, with the first row.
            raw = raw_values.encode(found)
            for i in range(rows):
                text = (
                    f"returned {error}" if not i else f"returned {error}; _raw is in the first row"
                )
                self._other(at + i, State.TERMINAL_FAIL, ErrorClass.SCHEMA, text, "" if i else raw)
            return
        if marks:
            bad = {one.at for one in unfit}
            left = [i for i in range(rows) if i not in bad]
            kept = [k for k, i in enumerate(left) if i not in marks]
            batch = batch.take(pa.array(kept, pa.int64()))
        if batch.num_rows:
            self.kept.append((at, batch))
        for one in unfit:
            if one.at not in marks:
                raw = raw_values.encode(one.value)
                text = f"returned {one.why}"
                self._other(at + one.at, State.TERMINAL_FAIL, ErrorClass.SCHEMA, text, raw)
        for i, (code, reason) in marks.items():
            state = State(code)
            kind = ErrorClass.NONE if state == State.TERMINAL_SKIP else ErrorClass.INPUT
            self._other(at + i, state, kind, reason)

    def _after(self, error: BaseException, table: pa.Table, at: int) -> list[tuple[pa.Table, int]]:
        """The halves to try after a failure; none when it is retried whole, or one row is left."""
        error_class = self.caller.class_of(error)
        rows = table.num_rows
        # Only what hangs on one row's content is looked for in halves.
        if error_class != ErrorClass.INPUT or rows == 1:
            text = _told(error)
            delay_ns = _asked_ns(error) if error_class == ErrorClass.TRANSIENT else 0
            for i in range(rows):
                self._other(at + i, State.TERMINAL_FAIL, error_class, text, delay_ns=delay_ns)
            return []
        half = rows // 2
        return [(table.slice(0, half), at), (table.slice(half), at + half)]

    def _other(
        self, i: int, state: int, error_class: int, text: str, raw: str = "", delay_ns: int = 0
    ) -> None:
        seq, text = self.seqs[i], _cut(text)
        self.others.append(Ended(seq, state, None, error_class, text, delay_ns, 0.0, 0, raw))


def _marks(table: Any) -> tuple[dict[int, tuple[int, str]], Any]:
    """Rows that a batch function ended by `_skip` or `_fail`, and its answer without these columns."""
    found: dict[int, tuple[int, str]] = {}
    for column, state in ((SKIP_COLUMN, State.TERMINAL_SKIP), (FAIL_COLUMN, State.TERMINAL_FAIL)):
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
            # A column of booleans marks, too: False is no mark.
            if reason is not None and reason is not False:
                found[i] = (state, "" if reason is True else str(reason))
    return found, table


def is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def takes_row(fn: Callable[..., Any]) -> bool:
    """Whether the function can be called with a row at all, as far as it can be known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True
    row: tuple[Any, ...] = (None, None) if takes_call(fn) else (None,)
    named = {"call": None} if _takes_call_by_name(fn) else {}
    try:
        signature.bind(*row, **named)
    except TypeError:
        return False
    return True


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


def _takes_call_by_name(fn: Callable[..., Any]) -> bool:
    try:
        found = inspect.signature(fn).parameters.get("call")
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind is found.KEYWORD_ONLY


def _cut(text: Any) -> str:
    """A reason as text that can be sent: an exception may be given as one, or broken text."""
    try:
        told = text if isinstance(text, str) else "" if text is None else str(text)
    except Exception:
        told = type(text).__name__
    told = told[:ERROR_TEXT_CHARS_MAX]
    return told if told.isascii() else told.encode(errors="backslashreplace").decode()


def _told(error: BaseException) -> str:
    return _cut(f"{type(error).__name__}: {_cut(error)}")


def _delay_ns(retry: Retry) -> int:
    """0: the backoff of the stage. At once is not the same as not said."""
    if retry.after_s is None:
        return 0
    return max(int(min(float(retry.after_s) * 1e9, TTL_NS_MAX)), 1)


def _asked_ns(error: BaseException) -> int:
    """How long the server that refused asked to wait. 0: it did not say."""
    seconds = retry_after_s(error, SYSTEM.wall_ns() / 1e9)
    return 0 if seconds is None else max(int(seconds * 1e9), 1)


def _says_nothing(call: Call) -> bool:
    """Whether the function left the cost and the tokens of its call as they were."""
    return call.tokens is None and type(call.cost) is float and call.cost == 0.0


def _cost(call: Call | None) -> float:
    """What the function said it cost; a figure for people, so nothing fails over it."""
    if call is None:
        return 0.0
    try:
        cost = float(call.cost)
    except (TypeError, ValueError):
        return 0.0
    return cost if math.isfinite(cost) else 0.0


def _tokens(call: Call | None) -> int | None:
    """What the function said it used; what is no number counts as not said."""
    if call is None:
        return None
    try:
        return None if call.tokens is None else max(int(call.tokens), 0)
    except (TypeError, ValueError, OverflowError):
        return None


def _micros(began: int) -> int:
    return (SYSTEM.mono_ns() - began) // 1000
