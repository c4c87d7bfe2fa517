"""The execution of a flow: replays the records and finds the steps to run. It has no I/O.

The shell (`workers.flows`) feeds records and commits what the execution buffers. One round:

    feed(records)      outcomes and other records, in their total order
    advance()          runs the flow's code until it waits, and delivers the outcomes one by one
    take_new_steps()   steps without a recorded outcome, to be started
    take_buffer()      records to commit before or with the next outcome

An outcome is delivered only after its commit, in the order of the records, and only when the flow is quiescent.
A step that other code has inserted simply runs. A recorded or open step that is asked for with other arguments is a
divergence: the flow is parked and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict, deque
from collections.abc import Callable, Container, Coroutine, Iterable
from contextvars import ContextVar
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from holdfast.errors import HoldfastError, Invalid, Timeout
from holdfast.flows.loop import FlowLoop, LoopHost
from holdfast.flows.model import RECEIVE_NAME, UNDO_PREFIX, step_key
from holdfast.flows.records import (
    AnyRecord,
    CancelRequested,
    CompensationStarted,
    FlowEnded,
    FlowRedriven,
    FlowTimedOut,
    Forked,
    Published,
    StepCompleted,
    StepFailure,
    StepOutcome,
    UndoRedriven,
    UndoRegistered,
    without_end,
)
from holdfast.value_versions import UnreadableValue, UpcastObjects

# Values that the flow's code gets at once. They are not awaited.
VALUE_NAMES = frozenset({"hf.now", "hf.uuid", "hf.random"})
UNDO_ATTEMPTS = 5
OTHER_ARGUMENTS = "it is recorded with other arguments"
# Steps that are refused to the code of a cancelled flow before it is stopped: a loop that catches every CancelledError
# never gives the thread back to the worker.
REFUSED_STEPS_MAX = 1_000
# Calls of `hf` that are refused to the code of a suspended flow. A loop with a bare `except:` catches every refusal.
REFUSED_CALLS_MAX = 1_000


class StepFailed(HoldfastError):
    """A step has failed finally: `step`, `error_type`, `error` and `attempts` of the original error."""

    code = "step_failed"


class NextRun(BaseException):
    """Raised by `hf.again`: ends the run with the arguments of the next one."""

    def __init__(self, args: bytes) -> None:
        self.packed_args = args


class FlowSuspended(BaseException):
    """Raised by every call of `hf` in a `finally` block that Python runs while the worker drops a waiting flow from
    memory. Nothing is recorded. The block runs again when the flow has reached it. Also raised in the tasks that are
    closed before the compensations of their flow."""


class FlowStopped(BaseException):
    """Raised in the code of a cancelled flow that catches CancelledError and asks for step after step."""


class FlowExited(HoldfastError):
    code = "exited"
    hint = "the flow's code tried to exit its process; return from the function instead"


class StepCallKind(Enum):
    """A local step runs in the activation. The outcome of an open step comes from outside: a timer, mail, a child."""

    LOCAL = auto()
    OPEN = auto()


class StepCall:
    """One call of `hf.step`, `hf.sleep` or `hf.receive`."""

    __slots__ = (
        "context", "decode", "digest", "equal_digests", "former_digest", "future", "idempotency_key", "kind", "name",
        "occurrence", "position", "returns_none", "versions", "work",
    )  # fmt: skip

    def __init__(
        self,
        kind: StepCallKind,
        name: str,
        digest: bytes,
        work: Any,
        decode: Callable[..., Any],
    ) -> None:
        """`decode` takes a recorded value and a dict that collects upcast objects. `work` is what the shell starts: a callable with its arguments, or a request for an open step."""
        self.kind = kind
        self.name = name
        self.digest = digest
        # The digest of this call in records of former releases.
        self.former_digest = digest
        # Makes the digests of the other ways to write this call.
        self.equal_digests: Callable[[], Iterable[bytes]] = tuple
        self.work = work
        self.decode = decode
        self.occurrence = self.position = 0
        # Whether the only value of the step is None, as declared.
        self.returns_none = False
        # The bytes before its value that state the versions of the classes inside it.
        self.versions = b""
        self.idempotency_key = ""
        # Of the code that called a local step.
        self.context: contextvars.Context | None = None
        self.future: asyncio.Future[Any]

    @property
    def identity(self) -> tuple[str, int]:
        return self.name, self.occurrence

    def accepts(self, digest: bytes) -> bool:
        """Whether a recorded digest is that of this call."""
        if digest == self.digest or digest == self.former_digest:
            return True
        return digest in self.equal_digests()

    @property
    def label(self) -> str:
        return f"{self.name}#{self.occurrence}"


class FlowRunId(NamedTuple):
    generation: int
    seq: int
    run: int


class Divergence(HoldfastError):
    """`code` among the fields is `value_unreadable` for a recorded value that does not fit its type."""

    code = "replay_diverged"
    hint = "deploy code that asks for the recorded steps, then resume the flow"


class RecordQueue:
    """The records of a flow: the undelivered ones in order, and every outcome by its step."""

    def __init__(self) -> None:
        self.known = 0
        self.outcomes: dict[tuple[str, int], StepOutcome] = {}
        self.undos: set[tuple[str, int]] = set()
        # The number of recorded values of each published name. A replay does not publish them again.
        self.published: dict[str, int] = defaultdict(int)
        # The arguments of the steps that were started elsewhere and have no outcome yet.
        self.open_digests: dict[tuple[str, int], bytes] = {}
        self.undelivered: deque[AnyRecord] = deque()
        # Objects made by upcasts of recorded values. As arguments of a step they count as they were recorded.
        self.upcast: UpcastObjects = {}
        # The compensations of the steps that a fork took over.
        self.parent_undos: set[tuple[str, int]] = set()
        # In a fork that a former release made, those before this position.
        self.forked_at = 0
        self.is_redriven = False

    def feed(self, records: list[AnyRecord]) -> None:
        self.known += len(records)
        for record in records:
            match record:
                case FlowRedriven():
                    self.is_redriven = True
                    self._forget_end(record)
                case UndoRedriven():
                    self._forget_undo(record)
                case Forked():
                    self.parent_undos = {(undo.name, undo.occurrence) for undo in record.undos}
                    self.forked_at = record.position if record.taken < 0 else 0
                case UndoRegistered():
                    self.undos.add((record.name, record.occurrence))
                case Published():
                    self.published[record.name] += 1
                case StepCompleted() | StepFailure():
                    self.outcomes[record.name, record.occurrence] = record
                    if record.name not in VALUE_NAMES:
                        self.undelivered.append(record)
                case _:
                    self.undelivered.append(record)

    def _forget_end(self, redriven: FlowRedriven) -> None:
        """Drop the end of the flow and the failures that the redrive repeats."""
        kept = without_end(self.undelivered, redriven)
        kept_ids = {id(record) for record in kept}
        for record in self.undelivered:
            if isinstance(record, StepFailure) and id(record) not in kept_ids:
                self.outcomes.pop((record.name, record.occurrence), None)
        self.undelivered = deque(kept)

    def _forget_undo(self, redriven: UndoRedriven) -> None:
        """Drop the failure of a compensation and the end of the flow: the compensation runs again."""
        failed = (redriven.name, redriven.occurrence)
        self.outcomes.pop(failed, None)

        def is_dropped(record: AnyRecord) -> bool:
            if isinstance(record, StepFailure):
                return (record.name, record.occurrence) == failed
            return isinstance(record, FlowEnded)

        self.undelivered = deque(record for record in self.undelivered if not is_dropped(record))

    def take_next(self, requested: Container[tuple[str, int]], *, wait: bool) -> AnyRecord | None:
        """Remove and return the first record that can be delivered now. The outcome of a step that was not requested
        stays: code that asks for it later gets it. With `wait` such an outcome holds back the records after it."""
        for index, record in enumerate(self.undelivered):
            if isinstance(record, StepCompleted | StepFailure):
                ready = (record.name, record.occurrence) in requested
            else:
                ready = not (wait and isinstance(record, CompensationStarted))
            if ready:
                del self.undelivered[index]
                return record
            if wait:
                return None
        return None


CURRENT_FLOW: ContextVar[FlowExecution | None] = ContextVar("holdfast_flow", default=None)


class FlowExecution:
    def __init__(
        self,
        body: Callable[[], Coroutine[Any, Any, Any]],
        *,
        id: FlowRunId,
        host: LoopHost,
        on_ready: Callable[[], None],
        values: Callable[[str], Any],
        code: Any = None,
    ) -> None:
        """`values` makes the recorded values: `values("hf.now")`. `code` is the declared flow."""
        self._body = body
        self.code = code
        self.id = id
        self.loop = FlowLoop(host, on_ready, id.seq)
        self._make_value = values
        self._main: asyncio.Task[Any] | None = None
        self._undos: list[tuple[UndoRegistered, StepCall]] = []
        self._positions = 0
        self._occurrences: dict[str, int] = defaultdict(int)
        self._code_of_name: dict[str, Any] = {}
        self.records = RecordQueue()
        # Steps that the code has requested and that have no outcome yet.
        self.requested: dict[tuple[str, int], StepCall] = {}
        self._new_steps: list[StepCall] = []
        # Steps whose futures the flow's code cancelled.
        self._dropped: list[tuple[str, int]] = []
        self._buffer: list[AnyRecord] = []
        self.divergence: Divergence | None = None
        # Whether every call of `hf` by the flow's code is refused.
        self.closed = False
        self.cancelled = self.timed_out = False
        self.compensation: CompensationStarted | None = None

    # -- for the shell ---------------------------------------------------------------------------

    def feed(self, records: list[AnyRecord]) -> None:
        """Add records that follow the known ones."""
        self.records.feed(records)

    def feed_open(self, digests: dict[tuple[str, int], bytes]) -> None:
        """Set the steps that were started elsewhere by a former activation, with the digests of their arguments."""
        self.records.open_digests = digests

    def advance(self) -> bool:
        """Run the flow's code until it waits for something that is not recorded. Returns False if the code did not
        come to rest within a bound: call again."""
        if self._main is None:
            self._main = self._start(self._run_body)
        if not self.loop.run_ready():
            return False
        while self.divergence is None and (record := self._next_deliverable()) is not None:
            self._deliver(record)
            if not self.loop.run_ready():
                return False
        return True

    async def _run_body(self) -> Any:
        """Run the flow's code, and then the `finally` blocks of its asynchronous generators."""
        try:
            value = await self._body()
        except (GeneratorExit, FlowSuspended, FlowStopped):
            raise
        except BaseException:
            await self.loop.close_generators()
            raise
        await self.loop.close_generators()
        return value

    @property
    def known_records(self) -> int:
        return self.records.known

    def take_new_steps(self) -> list[StepCall]:
        """Remove and return the steps to start. Steps with a recorded outcome are not among them."""
        steps, self._new_steps = self._new_steps, []
        outcomes, requested = self.records.outcomes, self.requested
        return [
            step
            for step in steps
            if (identity := step.identity) not in outcomes
            and identity in requested
            and not step.future.done()
        ]

    def take_dropped(self) -> list[tuple[str, int]]:
        """Remove and return the steps that the flow's code cancelled. They need no outcome. A receive is among them also
        if an event came first: the code did not get the event."""
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return [
            identity
            for identity in dropped
            if identity not in self.records.outcomes or self.has_event(identity)
        ]

    def has_event(self, identity: tuple[str, int]) -> bool:
        """Whether the step is a receive whose outcome is an event."""
        outcome = self.records.outcomes.get(identity)
        return isinstance(outcome, StepCompleted) and outcome.mail > 0

    def take_buffer(self) -> list[AnyRecord]:
        records, self._buffer = self._buffer, []
        return records

    @property
    def has_buffer(self) -> bool:
        return bool(self._buffer)

    @property
    def waits_for_outcome(self) -> bool:
        """Whether the code waits for a step: a commit can wake it."""
        return any(not call.future.done() for call in self.requested.values())

    @property
    def done(self) -> bool:
        return self._main is not None and self._main.done()

    @property
    def unhandled_errors(self) -> list[Exception]:
        """Errors that reached no code of the flow, such as an exit of the process while the code was closed."""
        return [
            error if isinstance(error, Exception) else FlowExited(raised=type(error).__name__)
            for error in self.loop.unhandled
        ]

    def result(self) -> Any:
        """Return the result of the flow's code, or raise its error."""
        assert self._main is not None
        return self._main.result()

    def unrequested_steps(self) -> list[str]:
        """The recorded and open steps that the code has not requested."""
        recorded = [
            (record.position, f"{record.name}#{record.occurrence}")
            for record in self.records.undelivered
            if isinstance(record, StepCompleted | StepFailure)
        ]
        opened = [
            (0, f"{name}#{occurrence}")
            for name, occurrence in self.records.open_digests.keys() - self.requested.keys()
            if (name, occurrence) not in self.records.outcomes
        ]
        return [label for _, label in sorted(recorded)] + [label for _, label in sorted(opened)]

    @property
    def has_undos(self) -> bool:
        return bool(self._undos)

    def close(self) -> int:
        """Drop the flow's code. Its `finally` blocks run, and their calls of `hf` raise FlowSuspended. Returns the number
        of coroutines that did not end."""
        self.closed = True
        return self.loop.close()

    def dispose(self) -> None:
        """Break the reference cycles of a closed execution. Without them its objects are freed at once, and Python's
        garbage collector does not have to visit them."""
        for call in self.requested.values():
            call.future.cancel()
        self.loop.dispose()
        self._main = None

    def refuse_call(self) -> None:
        """Refuse a call of `hf` to closed code. Beyond the limit calls are accepted, but they record nothing and no step
        gets an outcome: code that awaits one gives the thread back."""
        self._occurrences["hf.refused_call"] += 1
        if self._occurrences["hf.refused_call"] <= REFUSED_CALLS_MAX:
            raise FlowSuspended

    # -- delivery --------------------------------------------------------------------------------

    def _next_deliverable(self) -> AnyRecord | None:
        # The code may ask for the next outcome, or register a compensation, after its foreign wait.
        return self.records.take_next(
            self.requested, wait=self.loop.foreign_waits > 0 and not self.done
        )

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
        identity = (record.name, record.occurrence)
        call = self.requested[identity]
        if not call.accepts(record.digest):
            self._diverge(call, OTHER_ARGUMENTS)
            return
        del self.requested[identity]
        # Other code may have counted more steps before this one. The steps after it have higher positions.
        self._positions = max(self._positions, record.position)
        future = call.future
        if future.done():
            return
        if isinstance(record, StepFailure):
            future.set_exception(_error_of(call, record))
            return
        try:
            value = call.decode(record.value, self.records.upcast)
        except Exception as error:
            why = f"its recorded value cannot be read: {reason_of(error)}"
            self._diverge(call, why, UnreadableValue.code)
            return
        future.set_result(value)

    def _diverge(self, call: StepCall, why: str, code: str = "") -> None:
        if self.divergence is None:
            self.divergence = Divergence(step=call.label, why=why, code=code or Divergence.code)

    def _cancel_main(self) -> None:
        """Cancel the flow's code, and the steps that its other tasks await: they get no outcome."""
        if self._main is None or self._main.done() or self.compensation is not None:
            return
        self._main.cancel()
        for call in list(self.requested.values()):
            call.future.cancel()

    # -- compensation ----------------------------------------------------------------------------

    def _start_compensation(self, record: CompensationStarted) -> None:
        """Replace the flow's code by its compensations, in the reverse order of their registration. The other tasks of the
        code are closed with their loop, so none of them and none of their timers and threads continues it."""
        buffer, undo_count = list(self._buffer), len(self._undos)
        self.close()
        # Closed code may have called `hf` until its calls were accepted. They record nothing.
        self._buffer = buffer
        del self._undos[undo_count:]
        self.compensation = record
        self.loop = self.loop.make_next()
        self.requested.clear()
        self._new_steps.clear()
        self._dropped.clear()
        undos = [
            undo
            for registered, undo in self._undos
            if (registered.name, registered.occurrence) in self.records.undos
        ]
        self._main = self._start(lambda: self._compensate(undos))

    async def _compensate(self, undos: list[StepCall]) -> None:
        for undo in reversed(undos):
            name = UNDO_PREFIX + undo.name
            call = StepCall(undo.kind, name, undo.digest, undo.work, undo.decode)
            call.former_digest, call.equal_digests = undo.former_digest, undo.equal_digests
            call.context = undo.context
            # The number of its registration, which does not depend on the other compensations.
            self._occurrences[name] = undo.occurrence - 1
            try:
                await self.step(call)
            except StepFailed:
                continue  # its failure is recorded: the flow has the dead letter `undo_failed`

    # -- for the flow's code ---------------------------------------------------------------------

    def step(self, call: StepCall, code: Any = None) -> asyncio.Future[Any]:
        """Give a call its position and occurrence, and return the future of its outcome."""
        self._check_name(call, code)
        self._number(call)
        # Not counted: a step that other code inserts does not change the order of a set of steps.
        call.future = self.loop.create_future(crc32(call.label.encode()))
        call.future.add_done_callback(partial(self._on_settled, call))
        if self.closed and self.compensation is None:
            return call.future
        if (self.cancelled or self.timed_out) and self.compensation is None:
            if call.identity not in self.records.outcomes:
                self._occurrences["hf.refused"] += 1
                if self._occurrences["hf.refused"] > REFUSED_STEPS_MAX:
                    raise FlowStopped
                call.future.cancel()
                return call.future
        identity, open_digests = call.identity, self.records.open_digests
        self.requested[identity] = call
        if identity not in self.records.outcomes:
            if call.kind is StepCallKind.LOCAL and call.context is None:
                call.context = _context_of_step()
            self._new_steps.append(call)
        if identity in open_digests and not call.accepts(open_digests[identity]):
            self._diverge(call, OTHER_ARGUMENTS)
        return call.future

    def _on_settled(self, call: StepCall, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()  # a failed step without a waiting coroutine is no error of the flow
        elif self.requested.get(call.identity) is call:
            self._dropped.append(call.identity)

    def value(
        self, name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> Any:
        """Return a recorded value, or make and buffer it."""
        call = StepCall(StepCallKind.LOCAL, name, b"", None, decode)
        self._number(call)
        recorded = self.records.outcomes.get(call.identity)
        if isinstance(recorded, StepCompleted):
            return decode(recorded.value)
        packed = encode(self._make_value(name))
        record = StepCompleted(call.name, call.occurrence, call.position, b"", packed)
        self.records.outcomes[call.identity] = record
        self._buffer.append(record)
        return decode(packed)

    def undo(self, call: StepCall, code: Any = None) -> None:
        self._check_name(call, code)
        self._number(call, counted_as=f"hf.undo:{call.name}")
        registered = UndoRegistered(call.name, call.occurrence, call.position, call.digest)
        if call.position < self.records.forked_at or call.identity in self.records.parent_undos:
            return
        call.context = _context_of_step()
        self._undos.append((registered, call))
        if (call.name, call.occurrence) not in self.records.undos:
            self._buffer.append(registered)

    def publish(self, name: str, value: bytes) -> None:
        call = StepCall(StepCallKind.LOCAL, "hf.publish", b"", None, bytes)
        # Counted by name: a value that other code publishes in between does not take the place of a recorded one.
        self._number(call, counted_as=f"hf.publish:{name}")
        if call.occurrence > self.records.published[name]:
            self._buffer.append(Published(name, value))

    def _check_name(self, call: StepCall, code: Any) -> None:
        if code is not None and self._code_of_name.setdefault(call.name, code) is not code:
            raise Invalid(
                what="step",
                name=call.name,
                why="two functions have this name; name one with hf.options(fn, name=…)",
            )

    def _number(self, call: StepCall, counted_as: str = "") -> None:
        """Number a call by its name. Compensations have a separate count, so a new one shifts no step number."""
        counted_as = counted_as or call.name
        self._positions += 1
        self._occurrences[counted_as] += 1
        call.position, call.occurrence = self._positions, self._occurrences[counted_as]
        call.idempotency_key = step_key(*self.id, call.name, call.occurrence)

    def _start(self, body: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(CURRENT_FLOW.set, self)
        task = context.run(lambda: self.loop.create_task(_guard(body), context=context))
        return task


async def _guard(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the flow's code. `hf.again` is returned as a value, because a BaseException would end the event loop."""
    try:
        return await body()
    except NextRun as next_run:
        return next_run
    except FlowStopped:
        raise asyncio.CancelledError from None
    except (Exception, asyncio.CancelledError):
        raise
    except (GeneratorExit, FlowSuspended) as error:
        flow = CURRENT_FLOW.get()
        if flow is None or flow.closed:
            raise
        raise FlowExited(raised=type(error).__name__) from None
    except BaseExceptionGroup as group:
        return _next_run_of(group)
    except BaseException as error:
        raise FlowExited(raised=type(error).__name__) from None


def _context_of_step() -> contextvars.Context:
    """A copy of the context of the flow's code. It does not refer to the flow, because the flow refers to it."""
    context = contextvars.copy_context()
    context.run(CURRENT_FLOW.set, None)
    return context


def _next_run_of(group: BaseExceptionGroup[BaseException]) -> NextRun:
    """Return the `hf.again` of a task in a TaskGroup. Errors of other tasks in the group are raised instead."""
    if group.subgroup(FlowStopped) is not None:
        raise asyncio.CancelledError from None
    found, errors = group.split(NextRun)
    if isinstance(errors, Exception):
        raise errors
    if errors is not None or found is None:
        raise FlowExited(raised=type(_first_of(errors or group)).__name__) from None
    first = _first_of(found)
    assert isinstance(first, NextRun)
    return first


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reason_of(error: Exception) -> str:
    """The fields of an error about a value, as text."""
    fields = error.fields if isinstance(error, HoldfastError) else {"why": error}
    return ", ".join(
        f"{name} {value}" if name != "why" else str(value) for name, value in fields.items()
    )


def _error_of(call: StepCall, record: StepFailure) -> Exception:
    if record.name == RECEIVE_NAME and record.code == "timeout":
        return Timeout(what="receive", step=call.label)
    return StepFailed(
        step=call.label,
        code=record.code,
        error_type=record.error_type,
        error=record.error,
        attempts=record.attempts,
    )
