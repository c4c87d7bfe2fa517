"""The functions that a flow's code calls.

    @hf.flow(attempts=5, timeout_s=3600)
    async def order(id: str, cents: int) -> str:
        held = await hf.step(reserve, id)
        hf.undo(release, held)
        await hf.step(hf.options(charge, attempts=3, timeout_s=10), id, cents)
        await hf.sleep(86_400)
        review = await hf.receive(Review, timeout_s=86_400)
        return await hf.step(invoice, id, review.stars)

Steps are recorded. A worker that runs the flow again gets the recorded outcomes at once.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import inspect
import typing
import uuid as uuids
from collections.abc import Awaitable, Callable
from types import FunctionType, NoneType
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from holdfast import codec, traces, value_versions
from holdfast.app.argument_digest import as_stored, digest_of, equal_calls, equal_digests
from holdfast.app.definitions import Effect, EffectWithOptions, Event
from holdfast.app.flow_definition import Flow, FlowCall, checked_int, decoder, ns, ns_or_zero
from holdfast.app.function_state import encode_state
from holdfast.app.return_types import return_type
from holdfast.app.tasks import Task, TaskCall
from holdfast.app.world_reference import AskMethod, WorldReference, reference_of, with_step_key
from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.flows.execution import (
    CURRENT_FLOW,
    FlowExecution,
    NextRun,
    StepCall,
    StepCallKind,
)
from holdfast.flows.model import EFFECT, FLOW, RECEIVE, RECEIVE_NAME, SLEEP, TASK
from holdfast.flows.operations import OpenRequest
from holdfast.messages import FLOW_WORLD_PREFIX, Intent, keyed_hash
from holdfast.value_versions import StoredForm, UpcastObjects, encode_versions
from holdfast.workers.flows.step_runs import CURRENT_STEP, LocalWork, encode_result
from holdfast.world.catalog import check_text
from holdfast.world.step_inputs import RequestableEffect

T = TypeVar("T")
P = ParamSpec("P")
E = TypeVar("E")
E2 = TypeVar("E2")
E3 = TypeVar("E3")
R = TypeVar("R")


class StepOptions(Generic[P, T]):
    """A plain function with the options of a step. Created by `hf.options`."""

    def __init__(self, fn: Callable[P, Any], name: str | None, work: LocalWork) -> None:
        self.fn = fn
        self.name = name
        self.work = work


@typing.overload
def options(
    fn: Callable[P, Awaitable[T]],
    /,
    *,
    name: str | None = None,
    attempts: int = 1,
    timeout_s: float | None = None,
    backoff_s: float = 0.1,
    backoff_max_s: float = 60,
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> StepOptions[P, T]: ...
@typing.overload
def options(
    fn: Callable[P, T],
    /,
    *,
    name: str | None = None,
    attempts: int = 1,
    timeout_s: float | None = None,
    backoff_s: float = 0.1,
    backoff_max_s: float = 60,
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> StepOptions[P, T]: ...


def options(
    fn: Any,
    /,
    *,
    name: str | None = None,
    attempts: int = 1,
    timeout_s: float | None = None,
    backoff_s: float = 0.1,
    backoff_max_s: float = 60,
    retry_on: Any = Exception,
) -> Any:
    """Return a plain function with the options of a step: its name, attempts, timeout and backoff."""
    if isinstance(fn, Task | TaskCall | Flow | FlowCall | Effect | EffectWithOptions):
        raise Invalid(
            what="options", found=repr(fn)[:64], why="tasks, flows and effects have .options(…)"
        )
    if not callable(fn):
        raise Invalid(what="step", found=repr(fn)[:64], why="not a function")
    if name is not None:
        check_text("step", name)
        if name.startswith(("hf.", "undo:")):
            raise Invalid(what="step", name=name, why="the prefixes hf. and undo: are reserved")
    if checked_int("attempts", attempts) < 1:
        raise Invalid(what="attempts", found=attempts, min=1)
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in classes):
        raise Invalid(what="retry_on", found=repr(retry_on)[:64], expected="exception classes")
    if timeout_s is not None:
        ns("timeout_s", timeout_s)
    work = LocalWork(
        fn=fn,
        args=(),
        kwargs={},
        attempts=attempts,
        timeout_s=timeout_s,
        backoff_s=ns("backoff_s", backoff_s) / S,
        backoff_max_s=ns("backoff_max_s", backoff_max_s) / S,
        retry_on=classes,
    )
    return StepOptions(fn, name, work)


# -- in the flow's code ----------------------------------------------------------------------------


@typing.overload
def step(fn: Task[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: TaskCall[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: Flow[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: FlowCall[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: StepOptions[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
@typing.overload
def step(
    fn: RequestableEffect[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]: ...
@typing.overload
def step(
    fn: AskMethod, event: Event[R], /, *, timeout: float = 30.0, key: str | None = None
) -> asyncio.Future[R]: ...
@typing.overload
def step(
    fn: AskMethod, event: object, /, *, timeout: float = 30.0, key: str | None = None
) -> asyncio.Future[Any]: ...
@typing.overload
def step(
    fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...


def step(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a function once and record its outcome. A replay returns the recorded outcome.

    The step has its position when this is called, also in `asyncio.gather`. Effects, tasks and flows run in their own
    workers, other functions in the worker of the flow.
    """
    execution = _execution("step")
    call, code = _step_call(execution, fn, args, kwargs)
    return execution.step(call, code)


@typing.overload
def undo(
    fn: Task[P, Any]
    | TaskCall[P, Any]
    | Flow[P, Any]
    | FlowCall[P, Any]
    | StepOptions[P, Any]
    | RequestableEffect[P, Any],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None: ...
@typing.overload
def undo(fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...


def undo(fn: Any, /, *args: Any, **kwargs: Any) -> None:
    """Register a compensation. If the flow fails or is cancelled, the compensations run in reverse order."""
    execution = _execution("undo")
    call, code = _step_call(execution, fn, args, kwargs)
    execution.undo(call, code)


def sleep(seconds: float) -> asyncio.Future[None]:
    """Sleep. A sleeping flow holds no worker."""
    execution = _execution("sleep")
    wait_ns = ns_or_zero("seconds", seconds)
    digest = codec.digest(str(wait_ns).encode())[:16]
    work = functools.partial(_request, kind=SLEEP, wait_ns=wait_ns)
    call = StepCall(StepCallKind.OPEN, "hf.sleep", digest, work, _decode_none)
    call.returns_none = True
    return execution.step(call)


@typing.overload
def receive(kind: type[E], /, *, timeout_s: float | None = None) -> asyncio.Future[E]: ...
@typing.overload
def receive(
    kind: type[E], kind2: type[E2], /, *, timeout_s: float | None = None
) -> asyncio.Future[E | E2]: ...
@typing.overload
def receive(
    kind: type[E], kind2: type[E2], kind3: type[E3], /, *, timeout_s: float | None = None
) -> asyncio.Future[E | E2 | E3]: ...
@typing.overload
def receive(*types: type[E], timeout_s: float | None = None) -> asyncio.Future[E]: ...


def receive(*types: type[Any], timeout_s: float | None = None) -> asyncio.Future[Any]:
    """Take the oldest event of these types from the inbox of the flow, or wait for one. Raises hf.Timeout."""
    execution = _execution("receive")
    if not types:
        raise Invalid(what="receive", why="name at least one event type")
    known = execution.code.event_types
    for kind in types:
        if kind not in known:
            name = getattr(kind, "__name__", repr(kind)[:64])
            raise Invalid(
                what="event", type=name, why="unknown to the app; name it in App(events=…)"
            )
    wait_ns = -1 if timeout_s is None else ns_or_zero("timeout_s", timeout_s)
    names = tuple(kind.__name__ for kind in types)
    by_name = {kind.__name__: kind for kind in types}

    def decode(packed: bytes, upcast: UpcastObjects | None = None) -> Any:
        name, value = codec.unpack(packed)
        kind = by_name.get(name)
        if kind is None:
            raise Invalid(what="event", type=name, why="the code no longer receives it")
        event = known[kind].decode(value)
        if upcast is not None and value[0] != known[kind].version:
            upcast[id(event)] = StoredForm(event, codec.unpack(value[1:]))
        return event

    return execution.step(
        StepCall(
            StepCallKind.OPEN,
            RECEIVE_NAME,
            codec.digest_of([list(names), wait_ns])[:16],
            lambda call: _request(call, RECEIVE, wait_ns=wait_ns, types=names),
            decode,
        )
    )


def publish(name: str, value: Any) -> None:
    """Publish a value under a name. `handle.published(name)` reads the last one."""
    execution = _execution("publish")
    check_text("name", name)
    execution.publish(name, encode_result("published value", value))


def now() -> datetime.datetime:
    """Return the recorded time, with its zone."""
    found: datetime.datetime = _execution("now").value(
        "hf.now", codec.pack, decoder(datetime.datetime)
    )
    return found


def uuid() -> uuids.UUID:
    """Return a recorded random UUID."""
    found: uuids.UUID = _execution("uuid").value("hf.uuid", codec.pack, decoder(uuids.UUID))
    return found


def random() -> float:
    """Return a recorded random number in [0, 1)."""
    found: float = _execution("random").value("hf.random", codec.pack, decoder(float))
    return found


def cancelled() -> bool:
    """Whether the flow is cancelled or timed out. Its code gets no further step then."""
    execution = _execution("cancelled")
    return execution.cancelled or execution.timed_out


def again(*args: Any, **kwargs: Any) -> NoReturn:
    """End this run and start the next one with fresh steps, under the same id and key."""
    raise NextRun(_execution("again").code.flow.pack(args, kwargs))


def _execution(what: str) -> FlowExecution:
    execution = CURRENT_FLOW.get()
    if execution is None:
        if CURRENT_STEP.get() is not None:
            raise Invalid(what=what, why="called inside a step; call it in the code of the flow")
        raise Invalid(what=what, why="called outside a flow; start the flow with rt.start")
    if execution.closed:
        execution.refuse_call()
        return execution
    if not execution.loop.is_current():
        raise Invalid(what=what, why="called in another thread; call it in the code of the flow")
    return execution


def _step_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[StepCall, Any]:
    """Return the call of a step, and the code whose name must be unique."""
    if type(fn) is FunctionType:
        facts = _facts_of(fn)
        work = LocalWork(fn, args, kwargs)
        call = StepCall(StepCallKind.LOCAL, facts.name, b"", work, facts.decode)
        _set_digest(execution, call, fn, args, kwargs)
        call.returns_none = facts.returns_none
        call.versions = encode_versions(facts.returns)
        return call, facts.code
    if isinstance(fn, Task | TaskCall):
        task = fn if isinstance(fn, Task) else fn.task
        _check_declared(execution, "task", task.name)
        return _task_call(execution, fn, args, kwargs), task
    if isinstance(fn, Flow | FlowCall):
        flow = fn if isinstance(fn, Flow) else fn.flow
        _check_declared(execution, "flow", flow.name)
        return _flow_call(execution, fn, args, kwargs), flow
    if isinstance(fn, Effect | EffectWithOptions):
        effect = fn if isinstance(fn, Effect) else fn.effect
        _check_declared(execution, "effect", effect.kind)
        return _effect_call(execution, fn, args, kwargs), effect
    work = LocalWork(fn, args, kwargs)
    name: str | None = None
    if isinstance(fn, StepOptions):
        name = fn.name
        work = msgspec.structs.replace(fn.work, args=args, kwargs=kwargs)
    if not callable(work.fn):
        raise Invalid(what="step", found=repr(work.fn)[:64], why="not a function")
    if (reference := reference_of(work.fn)) is not None:
        return _world_call(execution, reference, name, work), None
    inner = work.fn
    if isinstance(inner, functools.partial):
        args, kwargs = (*inner.args, *args), {**inner.keywords, **kwargs}
        inner = inner.func
    name = name or _name_of(inner)
    returns = return_type(inner)
    call = StepCall(StepCallKind.LOCAL, name, b"", work, decoder(returns))
    _set_digest(execution, call, inner, args, kwargs)
    call.returns_none = returns is NoneType
    call.versions = encode_versions(returns)
    return call, getattr(inspect.unwrap(inner), "__code__", None)


def _set_digest(
    execution: FlowExecution,
    call: StepCall,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    state: bytes | None = None,
) -> StepCall:
    """Set the digest of a call's arguments, and the digests of an equal call that a record may have."""
    upcast = execution.records.upcast
    state = encode_state(fn, upcast) if state is None else state
    digest = digest_of(args, kwargs, upcast, state)
    call.digest, call.former_digest = digest
    call.equal_digests = functools.partial(equal_digests, fn, args, kwargs, upcast, state)
    return call


def _check_declared(execution: FlowExecution, what: str, name: str) -> None:
    """Refuse a child that no worker of this app would run: the step would never end."""
    if name not in execution.code.children[what]:
        raise Invalid(what=what, name=name, why=f"unknown to the app; name it in App({what}s=…)")


class _FunctionFacts(NamedTuple):
    """Cached facts of a plain function that runs as a step: its name, result type, decoder and code."""

    name: str
    decode: Callable[..., Any]
    returns: Any
    returns_none: bool
    code: Any


# Weak: a local function of a flow must not outlive its activation.
_facts: WeakKeyDictionary[Any, _FunctionFacts] = WeakKeyDictionary()


def _facts_of(fn: FunctionType) -> _FunctionFacts:
    facts = _facts.get(fn)
    if facts is None:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        returns = return_type(fn)
        facts = _FunctionFacts(_name_of(fn), decoder(returns), returns, returns is NoneType, code)
        _facts[fn] = facts
    return facts


def _name_of(fn: Any) -> str:
    name = getattr(fn, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise Invalid(
            what="step",
            found=repr(fn)[:64],
            why="it has no name; name it with hf.options(fn, name=…)",
        )
    return str(name).replace("<locals>.", "")


def _world_call(
    execution: FlowExecution, reference: WorldReference[Any], name: str | None, work: LocalWork
) -> StepCall:
    """The call of a world's method. The name of the world belongs to its arguments."""
    method = work.fn.__name__
    name = name or f"{reference.kind.__name__}.{method}"
    digest = digest_of((reference.name, *work.args), work.kwargs, execution.records.upcast).stored
    work = msgspec.structs.replace(work, fn=with_step_key(work.fn))
    returns = reference.kind if method == "state" else int if method == "send" else Any
    return StepCall(StepCallKind.LOCAL, name, digest, work, decoder(returns))


def _task_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepCall:
    call: TaskCall[Any, Any] = fn.plain if isinstance(fn, Task) else fn
    if call.key or call.after or call.delay_ns:
        raise Invalid(
            what="task option", why="a step takes queue, priority, limit_key and tag only"
        )
    packed = call.task.pack(args, kwargs)
    step_call = StepCall(
        StepCallKind.OPEN,
        call.task.name,
        b"",
        lambda step: _request(
            step, TASK, task=call.spec, args=packed, limit=call.limit, tag=call.tag
        ),
        call.task.value,
    )
    return _set_digest(execution, step_call, call.task.fn, args, kwargs, state=b"")


def _flow_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepCall:
    call: FlowCall[Any, Any] = fn.options() if isinstance(fn, Flow) else fn
    if call.key:
        raise Invalid(
            what="key", why="a child flow takes no key; its key is the idempotency key of its step"
        )
    packed = call.flow.pack(args, kwargs)

    def request(step: StepCall) -> OpenRequest:
        records = execution.records
        equal_args: tuple[bytes, ...] = ()
        if records.is_redriven:
            # The child may have been started by code that wrote the same call in another way.
            calls = equal_calls(call.flow.fn, args, kwargs, records.upcast)
            equal_args = tuple(codec.digest(call.flow.pack(*equal)) for equal in calls)
        return _request(
            step,
            FLOW,
            flow=call.spec,
            args=packed,
            cancels_child=call.cancels_child,
            equal_args=equal_args,
            tag=call.tag,
        )

    step_call = StepCall(StepCallKind.OPEN, call.flow.name, b"", request, call.flow.value)
    return _set_digest(execution, step_call, call.flow.fn, args, kwargs, state=b"")


def _effect_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepCall:
    with_options = fn if isinstance(fn, EffectWithOptions) else EffectWithOptions(fn, {})
    effect = with_options.effect
    positional = effect.positional(args, kwargs)
    call = effect.call(positional, with_options.options)
    if call.key is not None:
        raise Invalid(
            what="key",
            why="an effect in a flow takes no key; its key is the idempotency key of its step",
        )
    params = call.params
    if execution.records.upcast:
        params = codec.pack_value(as_stored(list(positional), execution.records.upcast))

    def decode(packed: bytes, upcast: UpcastObjects | None = None) -> Any:
        return value_versions.decode(packed, effect.returns, upcast) if packed else None

    return StepCall(
        StepCallKind.OPEN,
        effect.kind,
        codec.digest(params)[:16],
        lambda step: _request(step, EFFECT, intent=codec.pack(_intent(execution, step, call))),
        decode,
    )


def _intent(execution: FlowExecution, step: StepCall, call: Any) -> Intent:
    return Intent(
        universe_id=execution.code.universe,
        world_id=f"{FLOW_WORLD_PREFIX}{execution.id.seq}",
        correlation_id=f"{execution.id.run}/{step.occurrence}/{step.name}",
        intent_hash=keyed_hash(f"flow/{execution.id.generation}", step.idempotency_key),
        effect_kind=call.kind,
        params=call.params,
        origin_name=step.idempotency_key,
        policy_context_hash=call.policy,
        enqueued_at_ns=0,
        priority=call.priority,
        timeout_ns=call.timeout_ns,
        tag=call.tag,
        generation=execution.id.generation,
        trace=traces.current(),
    )


def _request(call: StepCall, kind: int, **fields: Any) -> OpenRequest:
    return OpenRequest(
        kind,
        call.name,
        call.occurrence,
        call.position,
        call.digest,
        trace=traces.current() if kind in (TASK, FLOW) else b"",
        **fields,
    )


def _decode_none(packed: bytes, upcast: UpcastObjects | None = None) -> None:
    return None
