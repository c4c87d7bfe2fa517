"""Local steps of flows: runs a step's function with attempts, timeout and backoff, and builds its outcome.

An `async def` function runs in the event loop of the worker, a plain function in a thread. A thread cannot be
stopped: after a timeout its result is dropped, and it keeps its slot until it ends. Its worker stores that the thread
still runs (`flows.step_threads`).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import msgspec

from holdfast import codec, traces
from holdfast.clock import S
from holdfast.config import ERROR_TEXT_CHARS_MAX, MESSAGE_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.flows.execution import (
    CURRENT_FLOW,
    UNDO_ATTEMPTS,
    StepCall,
)
from holdfast.flows.model import UNDO_FAILED, UNDO_PREFIX
from holdfast.flows.records import StepCompleted, StepFailure, StepOutcome
from holdfast.retry import Backoff, jitter
from holdfast.runner.error_policy import HandlerExited, Refused, code_of


class LocalWork(msgspec.Struct, frozen=True):
    """The work of a local step: the function that the activation calls, its arguments, retries and time limit."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attempts: int = 1
    timeout_s: float | None = None
    backoff_s: float = 0.1
    backoff_max_s: float = 60.0
    retry_on: tuple[type[BaseException], ...] = (Exception,)


class StepRun:
    """The step that `hf.current_step()` returns."""

    __slots__ = (
        "_is_lost",
        "attempt",
        "cancel_requested",
        "context",
        "flow_id",
        "idempotency_key",
        "name",
        "occurrence",
        "thread",
    )

    def __init__(
        self, call: StepCall, flow_id: str, is_lost: Callable[[], bool], attempt: int = 1
    ) -> None:
        self.name = call.name
        self.occurrence = call.occurrence
        self.idempotency_key = call.idempotency_key
        self.flow_id = flow_id
        # The context variables of the code that called the step.
        self.context = call.context
        self.attempt = attempt
        self.cancel_requested = False
        # The thread of an attempt that timed out, if it still runs.
        self.thread: Future[Any] | None = None
        self._is_lost = is_lost

    @property
    def cancelled(self) -> bool:
        """Whether the outcome will be dropped: the flow was cancelled, or the worker lost its lease."""
        return self.cancel_requested or self._is_lost()


CURRENT_STEP: ContextVar[StepRun | None] = ContextVar("holdfast_step", default=None)


def current_step() -> StepRun:
    """Return the step that runs the calling code."""
    step = CURRENT_STEP.get()
    if step is None:
        raise Invalid(what="current_step", why="no step of a flow runs here")
    return step


StepInvoker = Callable[[LocalWork, StepRun, Executor], Awaitable[Any]]


async def run_step(
    call: StepCall,
    run: StepRun,
    threads: Executor,
    invoke: StepInvoker,
    on_thread_left: Callable[[StepRun], Awaitable[None]],
    *,
    began_ns: int,
    is_retry: bool = False,
) -> StepOutcome:
    """Run the attempts of a step with `invoke`. Cancellation of the asyncio task ends it without an outcome.
    `on_thread_left` gets an attempt that timed out and whose thread still runs. `is_retry` means that an attempt has
    failed."""
    if is_retry:
        await _back_off(call, run)
    while True:
        attempt = _attempt_of(call, run)
        try:
            with _trace_of(attempt):
                value = await invoke(call.work, attempt, threads)
                outcome = completed_outcome(call, run, began_ns, value)
            return outcome
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            failure: BaseException = error  # the step's own code raised it
        except GeneratorExit as error:
            failure = error
        except Exception as error:
            failure = error
        if attempt.thread is not None:
            await on_thread_left(attempt)
        failed = failed_outcome(call, run, began_ns, failure)
        if failed is not None:
            return failed
        await _back_off(call, run)


def start_coroutine(
    call: StepCall, run: StepRun, loop: asyncio.AbstractEventLoop
) -> asyncio.Task[Any] | None:
    """Start the first attempt of a coroutine function without a time limit, in one asyncio task instead of two. Returns
    None for any other function, and while spans are recorded: `run_step` runs it."""
    work: LocalWork = call.work
    fn = work.fn
    if type(fn) is not FunctionType or work.timeout_s is not None or traces.is_recording():
        return None
    if not fn.__code__.co_flags & inspect.CO_COROUTINE:
        return None
    return loop.create_task(_call_coroutine(work), context=_context_of(_attempt_of(call, run)))


async def _call_coroutine(work: LocalWork) -> Any:
    result = await _await(work.fn(*work.args, **work.kwargs))
    while inspect.isawaitable(result):
        result = await _await(result)
    return result


def _attempt_of(call: StepCall, run: StepRun) -> StepRun:
    """Each attempt has its own `StepRun`: only the attempt that timed out is cancelled."""
    return StepRun(call, run.flow_id, lambda: run.cancelled, run.attempt)


def completed_outcome(call: StepCall, run: StepRun, began_ns: int, value: Any) -> StepCompleted:
    """Encode and check the value of a step."""
    packed = call.versions + encode_result("step result", value)
    # The flow gets the value as a replay would.
    check_type("step result", packed, call.decode)
    return StepCompleted(
        name=call.name,
        occurrence=call.occurrence,
        position=call.position,
        digest=call.digest,
        value=packed,
        attempts=run.attempt,
        began_ns=began_ns,
    )


def failed_outcome(
    call: StepCall, run: StepRun, began_ns: int, failure: BaseException
) -> StepFailure | None:
    """Return the final failure of a step, or None if it is tried again."""
    work: LocalWork = call.work
    attempts = UNDO_ATTEMPTS if call.name.startswith(UNDO_PREFIX) else work.attempts
    retried = isinstance(failure, work.retry_on) and not isinstance(
        failure, Refused | BadStepResult
    )
    if run.attempt < attempts and retried and not run.cancelled:
        return None
    return StepFailure(
        name=call.name,
        occurrence=call.occurrence,
        position=call.position,
        digest=call.digest,
        code=_code_of(call, failure),
        error_type=type(failure).__name__,
        error=_text(failure),
        attempts=run.attempt,
        began_ns=began_ns,
    )


async def _back_off(call: StepCall, run: StepRun) -> None:
    """Wait before the next attempt."""
    work: LocalWork = call.work
    backoff = Backoff(int(work.backoff_s * S), 2.0, int(work.backoff_max_s * S))
    delay_ns = backoff.delay_ns(run.attempt, jitter(call.position, run.attempt))
    run.attempt += 1
    await asyncio.sleep(delay_ns / S)


def _trace_of(attempt: StepRun) -> AbstractContextManager[object]:
    """Return the block whose span is the attempt of a step."""
    return _traced(attempt) if traces.is_recording() else _UNTRACED


@contextmanager
def _traced(attempt: StepRun) -> Iterator[None]:
    """Make a span current in the context of the attempt."""
    attributes: dict[str, str | int | bool] = {
        "holdfast.flow.id": attempt.flow_id,
        "holdfast.step.name": attempt.name,
        "holdfast.step.occurrence": attempt.occurrence,
        "holdfast.attempt": attempt.attempt,
    }
    context = _copy_of(attempt.context)
    scope = context.run(traces.enter_child, f"step {attempt.name}", traces.INTERNAL, attributes)
    attempt.context = context
    code = text = ""
    try:
        yield
    except BaseException as error:
        code, text = traces.code_of(error), str(error)
        raise
    finally:
        if scope is not None:
            scope.end(code, text)


_UNTRACED: AbstractContextManager[object] = nullcontext()


class StepTimeout(HoldfastError):
    code = "timeout"
    hint = "the step exceeded its timeout_s"


class BadStepResult(Invalid):
    code = "bad_result"
    hint = "use plain data, dataclasses, msgspec structs or pydantic models, as the annotation declares"


class StepResultTooLarge(BadStepResult):
    hint = "it is too large; keep large data outside and store a reference to it"


async def invoke_step(work: LocalWork, run: StepRun, threads: Executor) -> Any:
    """Call the function of a step once, within its timeout."""
    context = _context_of(run)
    loop = asyncio.get_running_loop()
    deadline = None if work.timeout_s is None else loop.time() + work.timeout_s
    # A callable object is asynchronous if its method is.
    method = getattr(type(work.fn), "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(work.fn) or inspect.iscoroutinefunction(method):
        result = context.run(work.fn, *work.args, **work.kwargs)
    else:
        thread = threads.submit(context.run, _call_plain, work)
        result = await _end_in_thread(thread, run, work, deadline)
    # A plain function may return an awaitable, as a wrapper of an `async def` does.
    while inspect.isawaitable(result):
        task = loop.create_task(_await(result), context=context)
        result = await _end_of_task(task, run, work, deadline)
    return result


def _context_of(run: StepRun) -> contextvars.Context:
    """The context of an attempt: `hf.current_step()` returns it, and no flow runs there."""
    context = _copy_of(run.context)
    context.run(CURRENT_STEP.set, run)
    context.run(CURRENT_FLOW.set, None)
    return context


def _copy_of(context: contextvars.Context | None) -> contextvars.Context:
    return contextvars.copy_context() if context is None else context.copy()


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)


async def _end_of_task(
    task: asyncio.Task[Any], run: StepRun, work: LocalWork, deadline: float | None
) -> Any:
    """Return the result of a coroutine. After the deadline, or if the step is cancelled, the coroutine is cancelled,
    and its clean-up ends before its flow continues."""
    if deadline is None:
        return await task
    try:
        done, _ = await asyncio.wait({task}, timeout=_left_s(deadline))
        if not done:
            run.cancel_requested = True
            task.cancel()
            await asyncio.wait({task})
    except asyncio.CancelledError:
        if not run.cancel_requested:
            run.cancel_requested = True
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # its outcome is dropped
        raise
    if done:
        return task.result()
    if not task.cancelled():
        task.exception()  # its outcome is dropped
    raise StepTimeout(step=run.name, timeout_s=work.timeout_s)


async def _end_in_thread(
    thread: Future[Any], run: StepRun, work: LocalWork, deadline: float | None
) -> Any:
    """Return the result of a function in a thread. A thread cannot be interrupted: after the deadline it is left."""
    started = asyncio.wrap_future(thread)
    try:
        done, _ = await asyncio.wait({started}, timeout=_left_s(deadline))
    except asyncio.CancelledError:
        run.cancel_requested = True
        await asyncio.wait({started})
        if not started.cancelled():
            started.exception()  # its outcome is dropped
        raise
    if not done:
        run.cancel_requested = True
        started.cancel()
        if not thread.cancel() and not thread.done():
            run.thread = thread
        raise StepTimeout(step=run.name, timeout_s=work.timeout_s)
    return started.result()


async def _await(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        # SystemExit would end the event loop of the worker.
        raise HandlerExited(raised=type(error).__name__) from None


def _call_plain(work: LocalWork) -> Any:
    try:
        return work.fn(*work.args, **work.kwargs)
    except StopIteration as error:
        # A future cannot hold it. A coroutine that raises it raises RuntimeError, too.
        raise RuntimeError("the function raised StopIteration") from error
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise HandlerExited(raised=type(error).__name__) from None


def encode_result(what: str, value: Any) -> bytes:
    """Encode a value that a flow stores. `what` names it in the error."""
    try:
        packed = codec.pack_value(value)
        codec.check_depth(what, packed)
    except (*codec.ENCODE_ERRORS, Invalid) as error:
        if inspect.isawaitable(value):
            raise BadStepResult(
                what=what, why="it was not awaited; write await before it"
            ) from None
        raise BadStepResult(what=what, why=f"cannot be stored: {error}") from None
    if len(packed) > MESSAGE_BYTES_MAX:
        raise StepResultTooLarge(what=what, bytes=len(packed), bytes_max=MESSAGE_BYTES_MAX)
    return packed


def check_type(what: str, packed: bytes, decode: Callable[[bytes], Any]) -> None:
    """Raise BadStepResult if a value does not match its declared type."""
    try:
        decode(packed)
    except Invalid as error:
        why = f"does not match its annotation: {error.fields.get('why', error)}"
        raise BadStepResult(what=what, why=why) from None


def _code_of(call: StepCall, error: BaseException) -> str:
    if call.name.startswith(UNDO_PREFIX):
        return UNDO_FAILED
    if isinstance(error, StepTimeout):
        return "timeout"
    return code_of(error) if isinstance(error, Exception) else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text could not be read)"
    return text[:ERROR_TEXT_CHARS_MAX].encode(errors="replace").decode()
