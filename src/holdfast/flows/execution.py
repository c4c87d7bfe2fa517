"""The execution of a flow: replays the records and finds the steps to run. It has no I/O.

The shell (`workers.flows`) feeds records and commits what the execution buffers. One round:

    feed(records)      outcomes and other records, in their total order
    advance()          runs the flow's code until it waits, and delivers the outcomes one by one
    take_new_steps()   steps without a recorded outcome, to be started
    take_buffer()      records to commit before or with the next outcome

An outcome is delivered only after its commit, in the order of the records, and only when the flow is quiescent.
A step that other code has inserted simply runs. A recorded step that is asked for with other arguments is a
divergence: the flow is parked and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any

from holdfast.errors import HoldfastError, Invalid, Timeout
from holdfast.flows.loop import FlowLoop, LoopHost
from holdfast.flows.model import step_key
from holdfast.flows.records import (
    AnyRecord,
    CancelRequested,
    CompensationStarted,
    FlowEnded,
    FlowRedriven,
    FlowTimedOut,
    Published,
    StepCompleted,
    StepFailure,
    StepOutcome,
    UndoRegistered,
)

# Values that the flow's code gets at once. They are not awaited.
VALUE_NAMES = frozenset({"hf.now", "hf.uuid", "hf.random"})
UNDO_PREFIX = "undo:"
UNDO_ATTEMPTS = 5


class StepFailed(HoldfastError):
    """A step failed for good: `step`, `error_type`, `error` and `attempts` of the original error."""

    code = "step_failed"


class NextRun(BaseException):
    """Raised by `hf.again`: ends the run with the arguments of the next one."""

    def __init__(self, args: bytes) -> None:
        self.packed_args = args


class StepKind(Enum):
    LOCAL = auto()
    OPEN = auto()


class StepCall:
    """One call of `hf.step`, `hf.sleep` or `hf.receive`."""

    __slots__ = (
        "decode", "digest", "future", "idempotency_key", "kind", "name", "occurrence", "position", "work",
    )  # fmt: skip

    def __init__(
        self,
        kind: StepKind,
        name: str,
        digest: bytes,
        work: Any,
        decode: Callable[[bytes], Any],
    ) -> None:
        """`work` is what the shell starts: a callable with its arguments, or a request for an open step."""
        self.kind = kind
        self.name = name
        self.digest = digest
        self.work = work
        self.decode = decode
        self.occurrence = self.position = 0
        self.idempotency_key = ""
        self.future: asyncio.Future[Any]

    @property
    def identity(self) -> tuple[str, int]:
        return self.name, self.occurrence

    @property
    def label(self) -> str:
        return f"{self.name}#{self.occurrence}"


class Divergence(HoldfastError):
    code = "replay_diverged"
    hint = "deploy code that asks for the recorded steps, then resume the flow"


CURRENT_FLOW: ContextVar[FlowExecution | None] = ContextVar("holdfast_flow", default=None)


class FlowExecution:
    def __init__(
        self,
        body: Callable[[], Coroutine[Any, Any, Any]],
        *,
        generation: int,
        seq: int,
        run: int,
        host: LoopHost,
        on_ready: Callable[[], None],
        values: Callable[[str], Any],
        code: Any = None,
    ) -> None:
        """`values` makes the recorded values: `values("hf.now")`. `code` is the declared flow."""
        self._body = body
        self.code = code
        self.generation, self.seq, self.run = generation, seq, run
        self.loop = FlowLoop(host, on_ready)
        self._make_value = values
        self._main: asyncio.Task[Any] | None = None
        self._undos: list[tuple[UndoRegistered, StepCall]] = []
        self._recorded_undos: set[tuple[str, int]] = set()
        self._positions = 0
        self._occurrences: dict[str, int] = defaultdict(int)
        self._code_of_name: dict[str, Any] = {}
        # Undelivered records in order, and the outcomes among them by step.
        self._undelivered: list[AnyRecord] = []
        self._outcomes: dict[tuple[str, int], StepOutcome] = {}
        # Steps that were asked for and have no outcome yet.
        self.asked: dict[tuple[str, int], StepCall] = {}
        self._new_steps: list[StepCall] = []
        self._buffer: list[AnyRecord] = []
        # The number of recorded published values. A replay does not publish them again.
        self._published_before = 0
        self.known_records = 0
        self.divergence: Divergence | None = None
        self.cancelled = self.timed_out = False
        self.compensation: CompensationStarted | None = None
        self.delivered: set[tuple[str, int]] = set()

    # -- for the shell ---------------------------------------------------------------------------

    def feed(self, records: list[AnyRecord]) -> None:
        """Add records that follow the known ones."""
        self.known_records += len(records)
        for record in records:
            if isinstance(record, FlowRedriven):
                self._forget_end(record)
                continue
            if isinstance(record, UndoRegistered):
                self._recorded_undos.add((record.name, record.occurrence))
            elif isinstance(record, Published):
                self._published_before += 1
            elif isinstance(record, StepCompleted | StepFailure):
                self._outcomes[record.name, record.occurrence] = record
                if record.name not in VALUE_NAMES:
                    self._undelivered.append(record)
            else:
                self._undelivered.append(record)

    def _forget_end(self, redriven: FlowRedriven) -> None:
        """Drop the end of the flow and the failure that caused it: the step runs again."""
        ends = (CancelRequested, FlowTimedOut, CompensationStarted, FlowEnded)
        failed = (redriven.name, redriven.occurrence)
        kept: list[AnyRecord] = []
        for record in self._undelivered:
            is_failure = (
                isinstance(record, StepFailure) and (record.name, record.occurrence) == failed
            )
            if not is_failure and not isinstance(record, ends):
                kept.append(record)
        if isinstance(self._outcomes.get(failed), StepFailure):
            del self._outcomes[failed]
        self._undelivered = kept

    def advance(self) -> bool:
        """Run the flow's code until it waits for something that is not recorded. Returns False if the code did not
        come to rest within a bound: call again."""
        if self._main is None:
            self._main = self._start(self._body)
        if not self.loop.run_ready():
            return False
        while self.divergence is None and (record := self._next_deliverable()) is not None:
            self._deliver(record)
            if not self.loop.run_ready():
                return False
        return True

    def take_new_steps(self) -> list[StepCall]:
        """Remove and return the steps to start. Steps with a recorded outcome are not among them."""
        steps, self._new_steps = self._new_steps, []
        return [
            step
            for step in steps
            if step.identity not in self._outcomes and step.identity in self.asked
        ]

    def take_buffer(self) -> list[AnyRecord]:
        records, self._buffer = self._buffer, []
        return records

    @property
    def has_buffer(self) -> bool:
        return bool(self._buffer)

    @property
    def done(self) -> bool:
        return self._main is not None and self._main.done()

    @property
    def unhandled_error(self) -> BaseException | None:
        return self.loop.unhandled[0] if self.loop.unhandled else None

    def result(self) -> Any:
        """Return the result of the flow's code, or raise its error."""
        assert self._main is not None
        return self._main.result()

    def unused_records(self) -> list[StepOutcome]:
        """The recorded outcomes that the code has not asked for."""
        return [
            record
            for record in self._undelivered
            if isinstance(record, StepCompleted | StepFailure) and not record.name.startswith("hf.")
        ]

    @property
    def has_undos(self) -> bool:
        return bool(self._undos)

    def close(self) -> None:
        """Drop the flow's code without running any more of it."""
        self.loop.close()

    # -- delivery --------------------------------------------------------------------------------

    def _next_deliverable(self) -> AnyRecord | None:
        """Remove and return the first record that can be delivered now. The outcome of a step that was not asked for
        stays: code that asks for it later gets it."""
        for index, record in enumerate(self._undelivered):
            if not isinstance(record, StepCompleted | StepFailure):
                del self._undelivered[index]
                return record
            if (record.name, record.occurrence) in self.asked:
                del self._undelivered[index]
                return record
            if self.loop.foreign_waits:
                # The code may ask for it after its own wait.
                return None
        return None

    def _deliver(self, record: AnyRecord) -> None:
        match record:
            case StepCompleted() | StepFailure():
                self._deliver_outcome(record)
            case CancelRequested():
                self.cancelled = True
                self._cancel_main()
            case FlowTimedOut():
                self.timed_out = True
                self._cancel_main()
            case CompensationStarted():
                self._start_compensation(record)
            case _:
                pass

    def _deliver_outcome(self, record: StepOutcome) -> None:
        call = self.asked[record.name, record.occurrence]
        if record.digest != call.digest:
            self._diverge(call, "it is recorded with other arguments")
            return
        del self.asked[call.identity]
        self.delivered.add(call.identity)
        future = call.future
        if future.done():
            return
        if isinstance(record, StepFailure):
            future.set_exception(_error_of(call, record))
            return
        try:
            value = call.decode(record.value)
        except Exception as error:
            self._diverge(call, f"its recorded value does not fit its type: {error}")
            return
        future.set_result(value)

    def _diverge(self, call: StepCall, why: str) -> None:
        if self.divergence is None:
            self.divergence = Divergence(step=call.label, why=why)

    def _cancel_main(self) -> None:
        if self._main is not None and not self._main.done() and self.compensation is None:
            self._main.cancel()

    # -- compensation ----------------------------------------------------------------------------

    def _start_compensation(self, record: CompensationStarted) -> None:
        """Replace the flow's code by its compensations, in the reverse order of their registration."""
        self.compensation = record
        self.loop._ready.clear()
        self.asked.clear()
        self._new_steps.clear()
        undos = [
            undo
            for registered, undo in self._undos
            if (registered.name, registered.occurrence) in self._recorded_undos
        ]
        self._main = self._start(lambda: self._compensate(undos))

    async def _compensate(self, undos: list[StepCall]) -> None:
        for undo in reversed(undos):
            call = StepCall(
                StepKind.LOCAL, UNDO_PREFIX + undo.name, undo.digest, undo.work, undo.decode
            )
            call.kind = undo.kind
            try:
                await self.step(call)
            except StepFailed:
                continue  # its failure is recorded: the flow has the dead letter `undo_failed`

    # -- for the flow's code ---------------------------------------------------------------------

    def step(self, call: StepCall, code: Any = None) -> asyncio.Future[Any]:
        """Give a call its position and occurrence, and return the future of its outcome."""
        if code is not None and self._code_of_name.setdefault(call.name, code) is not code:
            raise Invalid(
                what="step",
                name=call.name,
                why="two functions have this name; name one with hf.options(fn, name=…)",
            )
        self._number(call)
        call.future = self.loop.create_future()
        # A failed step that nobody awaits is no error of the flow.
        call.future.add_done_callback(_retrieve)
        if (self.cancelled or self.timed_out) and self.compensation is None:
            if call.identity not in self._outcomes:
                call.future.cancel()
                return call.future
        self.asked[call.identity] = call
        self._new_steps.append(call)
        return call.future

    def value(
        self, name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> Any:
        """Return a recorded value, or make and buffer it."""
        call = StepCall(StepKind.LOCAL, name, b"", None, decode)
        self._number(call)
        recorded = self._outcomes.get(call.identity)
        if isinstance(recorded, StepCompleted):
            return decode(recorded.value)
        packed = encode(self._make_value(name))
        record = StepCompleted(call.name, call.occurrence, call.position, b"", packed)
        self._outcomes[call.identity] = record
        self._buffer.append(record)
        return decode(packed)

    def undo(self, call: StepCall) -> None:
        self._number(call)
        registered = UndoRegistered(call.name, call.occurrence, call.position, call.digest)
        self._undos.append((registered, call))
        if (call.name, call.occurrence) not in self._recorded_undos:
            self._buffer.append(registered)

    def publish(self, name: str, value: bytes) -> None:
        self._number(call := StepCall(StepKind.LOCAL, "hf.publish", b"", None, bytes))
        if call.occurrence > self._published_before:
            self._buffer.append(Published(name, value))

    def _number(self, call: StepCall) -> None:
        self._positions += 1
        self._occurrences[call.name] += 1
        call.position, call.occurrence = self._positions, self._occurrences[call.name]
        call.idempotency_key = step_key(
            self.generation, self.seq, self.run, call.name, call.occurrence
        )

    def _start(self, body: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(CURRENT_FLOW.set, self)
        task = context.run(lambda: asyncio.Task(_guard(body), loop=self.loop, context=context))
        return task


async def _guard(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the flow's code. The end of a run is a value: a BaseException would leave the loop."""
    try:
        return await body()
    except NextRun as next_run:
        return next_run


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _error_of(call: StepCall, record: StepFailure) -> Exception:
    if record.name == "hf.receive" and record.code == "timeout":
        return Timeout(what="receive", step=call.label)
    return StepFailed(
        step=call.label,
        code=record.code,
        error_type=record.error_type,
        error=record.error,
        attempts=record.attempts,
    )
