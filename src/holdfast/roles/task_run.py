"""A task in a worker's hands: one attempt, under one lease.

While it runs, the task's own code can ask about it (`current_task`): its id, the attempt, the key that all
its attempts have in common, whether anybody still waits for it; and can say that it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec

from holdfast import codec, forks
from holdfast.clock import Clock
from holdfast.config import ERROR_TEXT_CHARS_MAX, MESSAGE_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner.faults import Exited, Refused, code_of
from holdfast.tasks.coordinator import End, Grant, Report


class BadTaskResult(Refused):
    code = "bad_result"
    hint = "what the task returned cannot be stored, or is not what it is declared to return"


class TaskCode(Protocol):
    """What a worker runs: a declared task."""

    name: str
    asynchronous: bool
    isolation: str
    # "batch", or "each": its outcome is committed before its worker begins another task.
    report: str

    def invoke(self, args: bytes) -> Any:
        """Call the function; of an asynchronous one, the awaitable."""

    def dump(self, value: Any) -> bytes: ...

    @property
    def home(self) -> tuple[str, str]:
        """Where another process finds it: module and name."""


class TaskRun:
    """What `hf.current_task()` gives."""

    __slots__ = (
        "began_ns", "code", "dropped", "expires_ns", "grant", "lend", "now", "progressed", "renew_ns",
        "said", "taken_ns", "token",
    )  # fmt: skip

    def __init__(
        self,
        grant: Grant,
        code: TaskCode,
        taken_ns: int = 0,
        renew_ns: int = 0,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.grant = grant
        self.code = code
        self.token = (grant.seq, grant.lease)
        self.taken_ns = taken_ns
        self.began_ns = 0
        # By store time: when the lease runs out, and when to ask for more.
        self.expires_ns = grant.expires_ns
        self.renew_ns = renew_ns
        # Store time, as far as it is known here: it goes on while the store is away.
        self.now = now
        self.dropped = self.progressed = False
        self.said: bytes | None = None
        # Gives the worker another hand while this one waits for other tasks.
        self.lend: Callable[[int], None] | None = None

    def begin(self, now_ns: int, clock: Clock) -> None:
        self.began_ns = now_ns

    # -- for the task's own code -----------------------------------------------------------------

    @property
    def id(self) -> str:
        return f"{self.grant.generation}-{self.grant.seq}"

    @property
    def attempt(self) -> int:
        """1 for the first grant, and so on."""
        return self.grant.attempt

    @property
    def idempotency_key(self) -> str:
        """The same for all attempts of this task, and for no other task."""
        return f"task-{self.grant.generation}-{self.grant.seq}"

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for this attempt any more: cancelled, or out of time."""
        return self.dropped or self.lapsed

    @property
    def lapsed(self) -> bool:
        """Whether its lease has run out by our own clock. Nobody needs to say so: it may be another's."""
        return self.now is not None and self.now() >= self.expires_ns

    def progress(self, value: Any = None) -> None:
        """Say that it goes on: its execution window starts anew. The value is shown to who asks."""
        if value is not None:
            try:
                said = codec.pack_value(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise Invalid(what="progress", why=str(error)) from None
            if len(said) > PROGRESS_BYTES_MAX:
                raise Invalid(what="progress", bytes=len(said), bytes_max=PROGRESS_BYTES_MAX)
            self.said = said
        self.progressed = True


PROGRESS_BYTES_MAX = 4096
CURRENT: ContextVar[Any] = ContextVar("holdfast_task")


def current_task() -> TaskRun:
    """The task that this code runs in."""
    try:
        found: TaskRun = CURRENT.get()
    except LookupError:
        raise Invalid(what="current_task", why="no task runs here") from None
    return found


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for other tasks: if it is a task that waits, its worker has a hand more meanwhile,
    so that tasks which wait for each other do not stand still."""
    run = CURRENT.get(None)
    lend = None if run is None else run.lend
    if lend is not None:
        lend(1)
    try:
        yield
    finally:
        if lend is not None:
            lend(-1)


# A member of an enum takes longer to look up than a result to pack.
_OK = int(End.OK)


class Ended(msgspec.Struct):
    """How an attempt ended, ready to be reported."""

    work: TaskRun
    report: Report
    # 0 if it was not measured.
    latency_ns: int = 0
    # Whether the report is committed already.
    told: bool = False


def attempt(run: TaskRun, clock: Clock | None = None) -> Ended:
    """Run it. Without a clock how long it took is left to who began it: the clock is asked less often."""
    began_ns = run.began_ns
    code, grant = run.code, run.grant
    mark = CURRENT.set(run)
    before = forks.made
    try:
        report = done(grant, code.dump(code.invoke(grant.args)))
    except Exception as error:
        if forks.made != before:
            forks.leave(error)
        report = failed(run, error)
    except BaseException as error:
        if forks.made != before:
            forks.leave(error)
        # Real interrupts reach the main thread alone: this is the task's own doing.
        report = failed(run, _exited(error))
    finally:
        CURRENT.reset(mark)
    return Ended(run, report, 0 if clock is None else clock.mono_ns() - began_ns)


async def attempt_async(run: TaskRun, clock: Clock) -> Ended:
    """The same of a coroutine, in a task of its own: the context is its own, too."""
    began_ns = run.began_ns
    CURRENT.set(run)
    try:
        answer: Awaitable[Any] = run.code.invoke(run.grant.args)
        report = done(run.grant, run.code.dump(await answer))
    except Exception as error:
        report = failed(run, error)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and run.dropped:
            raise
        report = failed(run, _exited(error))
    return Ended(run, report, clock.mono_ns() - began_ns)


def ended_by(run: TaskRun, error: Exception, latency_ns: int) -> Ended:
    return Ended(run, failed(run, error), latency_ns)


def released(run: TaskRun) -> Ended:
    """A task that was not begun, because its lease was over first."""
    return Ended(run, Report(run.grant.seq, run.grant.lease, End.RELEASED))


def done(grant: Grant, result: bytes) -> Report:
    if len(result) > MESSAGE_BYTES_MAX:
        raise BadTaskResult(bytes=len(result), bytes_max=MESSAGE_BYTES_MAX)
    return Report(grant.seq, grant.lease, _OK, result)


def failed(run: TaskRun, error: Exception) -> Report:
    end = End.REFUSED if isinstance(error, Refused) else End.FAILED
    return Report(run.grant.seq, run.grant.lease, end, b"", code_of(error), text_of(error))


def _exited(error: BaseException) -> Exited:
    told = error.code if isinstance(error, SystemExit) else None
    return Exited(raised=type(error).__name__, status=told if isinstance(told, int) else 1)


def text_of(error: Exception) -> str:
    """The error's own text, whatever its class does when asked for it."""
    try:
        text = str(error)
    except Exception:
        text = "(its text could not be had)"
    said = text if isinstance(error, HoldfastError) else f"{type(error).__name__}: {text}"
    # Half a surrogate pair cannot be stored.
    return said[:ERROR_TEXT_CHARS_MAX].encode(errors="replace").decode()


Attempt = Callable[[TaskRun], Ended]
