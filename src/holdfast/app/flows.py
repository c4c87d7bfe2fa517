"""Flow declarations, and the functions that a flow's code calls.

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
import contextlib
import datetime
import functools
import hashlib
import inspect
import math
import typing
import uuid as uuids
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import msgspec

from holdfast import codec
from holdfast.app.definitions import Effect, EffectWithOptions
from holdfast.app.storable_types import check_function
from holdfast.app.tasks import Task, TaskCall
from holdfast.app.world_reference import WorldReference, reference_of, with_step_key
from holdfast.clock import S
from holdfast.config import MESSAGE_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.flows import operations
from holdfast.flows.execution import CURRENT_FLOW, FlowExecution, NextRun, StepCall, StepKind
from holdfast.flows.model import EFFECT, FLOW, RECEIVE, SLEEP, TASK, FlowSpec
from holdfast.flows.operations import OpenRequest
from holdfast.messages import FLOW_WORLD_PREFIX, Intent, keyed_hash
from holdfast.workers.flows.step_runs import CURRENT_STEP, LocalWork, encode_result
from holdfast.world.catalog import check_text
from holdfast.world.definition import EventType

T = TypeVar("T")
P = ParamSpec("P")
E = TypeVar("E")

FLOW_OPTIONS = ("key", "queue", "priority", "parent_close", "timeout_s")
PARENT_CLOSE = ("cancel", "abandon")


class Flow(Generic[P, T]):
    """A durable function. Created by `@hf.flow`."""

    def __init__(self, fn: Callable[P, Coroutine[Any, Any, T]], spec: FlowSpec) -> None:
        if not inspect.iscoroutinefunction(fn):
            raise Invalid(what="flow", name=spec.name, why="a flow is an async def function")
        self.fn = fn
        self.name = spec.name
        self.spec = spec
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__
        operations.check_spec(spec)
        check_text("flow", spec.name)
        check_text("queue", spec.queue)
        try:
            self._signature = inspect.signature(fn)
            hints = typing.get_type_hints(fn)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise Invalid(
                what="flow", name=self.name, why=f"its annotations cannot be read: {error}"
            ) from None
        self.returns: Any = hints.pop("return", Any)
        self._hints = hints
        self.code_version = _fingerprint(fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<flow {self.name}>"

    def options(
        self,
        *,
        key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
        parent_close: str = "cancel",
    ) -> FlowCall[P, T]:
        """Return the flow with options, kept apart from its arguments."""
        spec = self.spec
        if queue is not None:
            check_text("queue", queue)
            spec = msgspec.structs.replace(spec, queue=queue)
        if priority is not None:
            spec = msgspec.structs.replace(spec, priority=_checked_int("priority", priority))
        if timeout_s is not None:
            spec = msgspec.structs.replace(spec, timeout_ns=_ns("timeout_s", timeout_s))
        if parent_close not in PARENT_CLOSE:
            raise Invalid(
                what="parent_close", found=repr(parent_close)[:64], expected=list(PARENT_CLOSE)
            )
        if key is not None:
            check_text("key", key)
        operations.check_spec(spec)
        return FlowCall(self, spec, key or "", parent_close == "cancel")

    def check_storable(self) -> None:
        check_function("flow", self.name, self._signature, self._hints, self.returns)

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode the arguments. Raise Invalid if they do not match the function's signature."""
        try:
            self._signature.bind(*args, **kwargs)
            packed = codec.pack_value([list(args), kwargs])
            codec.check_depth("flow arguments", packed, flow=self.name)
            self._convert(*codec.unpack(packed))
        except codec.ENCODE_ERRORS as error:
            raise Invalid(what="flow arguments", flow=self.name, why=str(error)) from None
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="flow arguments",
                flow=self.name,
                bytes=len(packed),
                bytes_max=MESSAGE_BYTES_MAX,
            )
        return packed

    def _convert(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            hint = self._hints.get(name, Any)
            if hint is Any or kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                continue
            bound.arguments[name] = codec.convert(value, hint)
        return list(bound.args), dict(bound.kwargs)

    # -- used by workers ---------------------------------------------------------------------------

    def within(self, universe: str, event_types: Mapping[type, EventType]) -> FlowCode:
        """Return the flow as the workers of an app run it."""
        return FlowCode(self, universe, event_types)

    def bind(self, args: bytes) -> Callable[[], Coroutine[Any, Any, Any]]:
        positional, named = self._convert(*codec.unpack(args))
        return lambda: self.fn(*positional, **named)

    def dump(self, value: Any) -> bytes:
        packed = encode_result(value)
        self.value(packed)
        return packed

    def value(self, packed: bytes) -> T:
        return typing.cast(T, decoder(self.returns)(packed))


class FlowCode:
    """A flow in its app: what an activation and the functions of this module need."""

    def __init__(
        self, flow: Flow[Any, Any], universe: str, event_types: Mapping[type, EventType]
    ) -> None:
        self.flow = flow
        self.name = flow.name
        self.code_version = flow.code_version
        self.universe = universe
        self.event_types = event_types
        self.bind = flow.bind
        self.dump = flow.dump


class FlowCall(Generic[P, T]):
    """A flow with options, as accepted by `rt.start` and `hf.step`."""

    def __init__(self, flow: Flow[P, T], spec: FlowSpec, key: str, cancels_child: bool) -> None:
        self.flow = flow
        self.spec = spec
        self.key = key
        self.cancels_child = cancels_child


class FlowDecorator(typing.Protocol):
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Flow[P, T]: ...


@typing.overload
def flow(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Flow[P, T]: ...
@typing.overload
def flow(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = 0,
    lease_s: float = 60,
    attempts: int = 5,
    expiries_max: int = 3,
    timeout_s: float | None = None,
    retain_s: float = 7 * 24 * 3600,
) -> FlowDecorator: ...


def flow(
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = 0,
    lease_s: float = 60,
    attempts: int = 5,
    expiries_max: int = 3,
    timeout_s: float | None = None,
    retain_s: float = 7 * 24 * 3600,
) -> Any:
    """Declare a flow: an `async def` function whose steps are recorded.

    `attempts` limits the errors that the flow's own code raises. `expiries_max` limits lost workers. `timeout_s`
    counts from the start, sleeps included. The flow is deleted `retain_s` after its end.
    """

    def declare(fn: Callable[..., Any], /) -> Any:
        if not callable(fn):
            raise Invalid(what="flow", found=repr(fn)[:64], why="not a function")
        spec = FlowSpec(
            name=getattr(fn, "__name__", "flow") if name is None else name,
            queue=queue,
            priority=_checked_int("priority", priority),
            lease_ns=_ns("lease_s", lease_s),
            attempts=_checked_int("attempts", attempts),
            expiries_max=_checked_int("expiries_max", expiries_max),
            timeout_ns=0 if timeout_s is None else _ns("timeout_s", timeout_s),
            retain_ns=_ns("retain_s", retain_s),
        )
        return Flow(fn, spec)

    return declare if fn is None else declare(fn)


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
    if _checked_int("attempts", attempts) < 1:
        raise Invalid(what="attempts", found=attempts, min=1)
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in classes):
        raise Invalid(what="retry_on", found=repr(retry_on)[:64], expected="exception classes")
    if timeout_s is not None:
        _ns("timeout_s", timeout_s)
    work = LocalWork(
        fn,
        (),
        {},
        attempts,
        timeout_s,
        _ns("backoff_s", backoff_s) / S,
        _ns("backoff_max_s", backoff_max_s) / S,
        classes,
    )
    return StepOptions(fn, name, work)


# -- in the flow's code ----------------------------------------------------------------------------


@typing.overload
def step(fn: Task[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
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
def step(fn: Effect[P, T], /, *args: Any, **kwargs: Any) -> asyncio.Future[T]: ...
@typing.overload
def step(fn: EffectWithOptions, /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]: ...
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


def undo(fn: Any, /, *args: Any, **kwargs: Any) -> None:
    """Register a compensation. If the flow fails or is cancelled, the compensations run in reverse order."""
    execution = _execution("undo")
    call, code = _step_call(execution, fn, args, kwargs)
    execution.undo(call, code)


def sleep(seconds: float) -> asyncio.Future[None]:
    """Sleep. A sleeping flow holds no worker."""
    execution = _execution("sleep")
    wait_ns = _ns_or_zero("seconds", seconds)
    return execution.step(
        StepCall(
            StepKind.OPEN,
            "hf.sleep",
            codec.digest(str(wait_ns).encode())[:16],
            lambda call: _request(call, SLEEP, wait_ns=wait_ns),
            _decode_none,
        )
    )


def receive(*types: type[E], timeout_s: float | None = None) -> asyncio.Future[E]:
    """Take the oldest event of these types from the mailbox of the flow, or wait for one. Raises hf.Timeout."""
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
    wait_ns = -1 if timeout_s is None else _ns_or_zero("timeout_s", timeout_s)
    names = tuple(kind.__name__ for kind in types)
    by_name = {kind.__name__: kind for kind in types}

    def decode(packed: bytes) -> Any:
        name, value = codec.unpack(packed)
        kind = by_name.get(name)
        if kind is None:
            raise Invalid(what="event", type=name, why="the code does not receive it any more")
        return known[kind].decode(value)

    return execution.step(
        StepCall(
            StepKind.OPEN,
            "hf.receive",
            codec.digest_of([list(names), wait_ns])[:16],
            lambda call: _request(call, RECEIVE, wait_ns=wait_ns, types=names),
            decode,
        )
    )


def publish(name: str, value: Any) -> None:
    """Publish a value under a name. `handle.published(name)` reads the last one."""
    execution = _execution("publish")
    check_text("name", name)
    execution.publish(name, encode_result(value))


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
    return execution


def _step_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[StepCall, Any]:
    """Return the call of a step, and the code whose name must be unique."""
    if isinstance(fn, Task | TaskCall):
        return _task_call(fn, args, kwargs), fn if isinstance(fn, Task) else fn.task
    if isinstance(fn, Flow | FlowCall):
        return _flow_call(fn, args, kwargs), fn if isinstance(fn, Flow) else fn.flow
    if isinstance(fn, Effect | EffectWithOptions):
        effect = fn if isinstance(fn, Effect) else fn.effect
        return _effect_call(execution, fn, args, kwargs), effect
    work = LocalWork(fn, args, kwargs)
    name: str | None = None
    if isinstance(fn, StepOptions):
        name = fn.name
        work = msgspec.structs.replace(fn.work, args=args, kwargs=kwargs)
    if not callable(work.fn):
        raise Invalid(what="step", found=repr(work.fn)[:64], why="not a function")
    if (reference := reference_of(work.fn)) is not None:
        return _world_call(reference, name, work), None
    inner = work.fn.func if isinstance(work.fn, functools.partial) else work.fn
    name = name or _name_of(inner)
    call = StepCall(StepKind.LOCAL, name, _digest(args, kwargs), work, decoder(_return_type(inner)))
    return call, getattr(inspect.unwrap(inner), "__code__", None)


def _name_of(fn: Any) -> str:
    name = getattr(fn, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise Invalid(
            what="step",
            found=repr(fn)[:64],
            why="it has no name of its own; name it with hf.options(fn, name=…)",
        )
    return str(name).replace("<locals>.", "")


def _world_call(reference: WorldReference[Any], name: str | None, work: LocalWork) -> StepCall:
    """The call of a world's method. The name of the world belongs to its arguments."""
    method = work.fn.__name__
    name = name or f"{reference.kind.__name__}.{method}"
    digest = _digest((reference.name, *work.args), work.kwargs)
    work = msgspec.structs.replace(work, fn=with_step_key(work.fn))
    returns = reference.kind if method == "state" else int if method == "send" else Any
    return StepCall(StepKind.LOCAL, name, digest, work, decoder(returns))


def _task_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
    call: TaskCall[Any, Any] = fn.plain if isinstance(fn, Task) else fn
    if call.key or call.after or call.delay_ns:
        raise Invalid(what="task option", why="a step takes queue, priority and limit_key only")
    packed = call.task.pack(args, kwargs)
    return StepCall(
        StepKind.OPEN,
        call.task.name,
        codec.digest(packed)[:16],
        lambda step: _request(step, TASK, task=call.spec, args=packed, limit=call.limit),
        call.task.value,
    )


def _flow_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
    call: FlowCall[Any, Any] = fn.options() if isinstance(fn, Flow) else fn
    if call.key:
        raise Invalid(what="key", why="the key of a child flow is the idempotency key of its step")
    packed = call.flow.pack(args, kwargs)
    return StepCall(
        StepKind.OPEN,
        call.flow.name,
        codec.digest(packed)[:16],
        lambda step: _request(
            step, FLOW, flow=call.spec, args=packed, cancels_child=call.cancels_child
        ),
        call.flow.value,
    )


def _effect_call(
    execution: FlowExecution, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepCall:
    if kwargs:
        raise Invalid(
            what="effect arguments",
            why="an effect takes positional arguments",
            found=sorted(kwargs),
        )
    with_options = fn if isinstance(fn, EffectWithOptions) else EffectWithOptions(fn, {})
    effect = with_options.effect
    call = effect.call(args, with_options.options)
    if call.key is not None:
        raise Invalid(what="key", why="the idempotency key of an effect is that of its step")

    def decode(packed: bytes) -> Any:
        return decoder(effect.returns)(packed) if packed else None

    return StepCall(
        StepKind.OPEN,
        effect.kind,
        codec.digest(call.params)[:16],
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
    )


def _request(call: StepCall, kind: int, **fields: Any) -> OpenRequest:
    return OpenRequest(kind, call.name, call.occurrence, call.position, call.digest, **fields)


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The digest of the arguments. A live object that cannot be stored counts by its type."""
    try:
        return codec.digest(codec.pack_value([list(args), kwargs]))[:16]
    except codec.ENCODE_ERRORS:
        parts = [*args, *(kwargs[name] for name in sorted(kwargs))]
        return codec.digest(
            *(_digest_part(part) for part in parts), *map(str.encode, sorted(kwargs))
        )[:16]


def _digest_part(value: Any) -> bytes:
    try:
        return codec.pack_value(value)
    except codec.ENCODE_ERRORS:
        return f"{type(value).__module__}.{type(value).__qualname__}".encode()


def decoder(hint: Any) -> Callable[[bytes], Any]:
    def decode(packed: bytes) -> Any:
        value = codec.unpack(packed)
        if hint is Any:
            return value
        try:
            return codec.convert(value, hint)
        except (msgspec.MsgspecError, TypeError) as error:
            raise Invalid(what="value", why=str(error)) from None

    return decode


def _decode_none(packed: bytes) -> None:
    return None


@functools.lru_cache(4096)
def _return_type_of(fn: Any) -> Any:
    try:
        return typing.get_type_hints(fn).get("return", Any)
    except Exception:
        return Any


def _return_type(fn: Any) -> Any:
    try:
        return _return_type_of(inspect.unwrap(fn))
    except TypeError:
        return Any


def _fingerprint(fn: Any) -> str:
    """The version of a flow's code: its source and that of its module, where its other functions usually are."""
    text = fn.__qualname__
    sources: tuple[Any, ...] = (fn, inspect.getmodule(fn))
    for found in sources:
        with contextlib.suppress(OSError, TypeError):
            text += inspect.getsource(found)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _checked_int(what: str, value: Any) -> int:
    if type(value) is not int:
        raise Invalid(what=what, found=repr(value)[:64], expected="a whole number")
    return value


def _ns(what: str, seconds: Any) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds <= TTL_NS_MAX / S:
        raise Invalid(what=what, found=repr(seconds)[:64], min=0, max=TTL_NS_MAX / S)
    return math.ceil(seconds * S)


def _ns_or_zero(what: str, seconds: Any) -> int:
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds == 0:
        return 0
    return _ns(what, seconds)
