"""Flow declarations: `@hf.flow`, and the options of a flow's call."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from holdfast import codec, value_versions
from holdfast.app.definitions import Receipt, receipt_of
from holdfast.app.parameter_types import BadArgument, types_of
from holdfast.app.schedule_options import ScheduleOptions, checked_args
from holdfast.app.storable_types import check_function
from holdfast.clock import S
from holdfast.config import MESSAGE_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.flows.model import FlowSpec
from holdfast.flows.new_flow import NewFlow, check_spec
from holdfast.messages import FLOW_START_PREFIX, IntentReceipt
from holdfast.value_versions import UpcastObjects
from holdfast.workers.flows.step_runs import check_type, encode_result
from holdfast.world.catalog import check_text
from holdfast.world.definition import EventType
from holdfast.world.step_inputs import StartableFlow

T = TypeVar("T")
P = ParamSpec("P")
E = TypeVar("E")

FLOW_OPTIONS = ("key", "queue", "priority", "parent_close", "timeout_s", "tag")
PARENT_CLOSE = ("cancel", "abandon")


class Flow(StartableFlow[P, T]):
    """A durable function. Created by `@hf.flow`."""

    def __init__(self, fn: Callable[P, Coroutine[Any, Any, T]], spec: FlowSpec) -> None:
        if not inspect.iscoroutinefunction(fn):
            raise Invalid(what="flow", name=spec.name, why="a flow is an async def function")
        self.fn = fn
        self.name, self.kind = spec.name, FLOW_START_PREFIX + spec.name
        self.spec = spec
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__
        check_spec(spec)
        check_text("flow", spec.name)
        check_text("queue", spec.queue)
        try:
            self.signature = inspect.signature(fn)
            hints = typing.get_type_hints(fn)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise Invalid(
                what="flow", name=self.name, why=f"its annotations cannot be read: {error}"
            ) from None
        self.returns: Any = hints.pop("return", Any)
        self._hints = hints
        self.types = types_of(self.signature, hints)
        # The number of arguments by position that certainly fits the signature. -1: none does.
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        is_plain = kinds <= {
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        }
        self._arguments_in_full = len(self.signature.parameters) if is_plain else -1
        self.code_version = _fingerprint(fn)
        # The schedule of `@hf.flow(every=…)`.
        self.schedule: ScheduleOptions | None = None

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
        tag: str | None = None,
    ) -> FlowCall[P, T]:
        """Return the flow with options, kept apart from its arguments."""
        spec = self.spec
        if queue is not None:
            check_text("queue", queue)
            spec = msgspec.structs.replace(spec, queue=queue)
        if priority is not None:
            spec = msgspec.structs.replace(spec, priority=checked_int("priority", priority))
        if timeout_s is not None:
            spec = msgspec.structs.replace(spec, timeout_ns=ns("timeout_s", timeout_s))
        if parent_close not in PARENT_CLOSE:
            raise Invalid(
                what="parent_close", found=repr(parent_close)[:64], expected=list(PARENT_CLOSE)
            )
        if key is not None:
            check_text("key", key)
        if tag is not None:
            check_text("tag", tag)
        check_spec(spec)
        return FlowCall(self, spec, key or "", parent_close == "cancel", tag or "")

    def check_storable(self) -> None:
        check_function("flow", self.name, self.signature, self._hints, self.returns)

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode the arguments. Raise Invalid if they do not match the function's signature."""
        try:
            self.signature.bind(*args, **kwargs)
            packed = codec.pack_value([list(args), kwargs])
        except codec.ENCODE_ERRORS as error:
            raise Invalid(what="flow arguments", flow=self.name, why=str(error)) from None
        codec.check_depth("flow arguments", packed, flow=self.name)
        try:
            positional, named = codec.unpack(packed)
            self.types.convert(positional, named, codec.convert)
        except BadArgument as error:
            raise BadArgument(what="flow arguments", flow=self.name, **error.fields) from None
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="flow arguments",
                flow=self.name,
                bytes=len(packed),
                bytes_max=MESSAGE_BYTES_MAX,
            )
        return value_versions.encode_versions(*self._hints.values()) + packed

    # -- used by workers ---------------------------------------------------------------------------

    def within(self, universe: str, app: DeclaredParts) -> BoundFlow:
        """Return the flow bound to an app, as its workers run it."""
        return BoundFlow(self, universe, app)

    def bind(
        self, args: bytes, upcast: UpcastObjects | None = None
    ) -> Callable[[], Coroutine[Any, Any, Any]]:
        versions, body = codec.split_versions(args)
        stored, stored_named = codec.unpack(body)
        if stored_named or len(stored) != self._arguments_in_full:
            # Raises TypeError if the arguments do not fit the signature.
            self.signature.bind(*stored, **stored_named)
        positional, named = self.types.convert(
            stored,
            stored_named,
            lambda value, hint: value_versions.convert(value, hint, versions, upcast),
        )
        return lambda: self.fn(*positional, **named)

    def dump(self, value: Any) -> bytes:
        packed = value_versions.encode_versions(self.returns) + encode_result("flow result", value)
        check_type("flow result", packed, self.value)
        return packed

    def receipt(self, stored: IntentReceipt) -> Receipt[Any]:
        """Decode the receipt that a world gets at the end of the flow."""
        return receipt_of(stored, self.returns)

    def value(self, packed: bytes, upcast: UpcastObjects | None = None) -> T:
        return typing.cast(T, value_versions.decode(packed, self.returns, upcast))


class DeclaredParts(typing.Protocol):
    """The parts of an app that its flows may use."""

    @property
    def event_types(self) -> Mapping[type, EventType]: ...
    @property
    def tasks(self) -> Mapping[str, Any]: ...
    @property
    def flows(self) -> Mapping[str, Any]: ...
    @property
    def effects(self) -> Mapping[str, Any]: ...


class BoundFlow:
    """A flow with its universe and the declared parts of its app: the `ActivationCode` of the workers."""

    def __init__(self, flow: Flow[Any, Any], universe: str, app: DeclaredParts) -> None:
        self.flow = flow
        self.name = flow.name
        self.code_version = flow.code_version + value_versions.declared_versions()
        self.universe = universe
        self.event_types = app.event_types
        self.children = {"task": app.tasks, "flow": app.flows, "effect": app.effects}
        self.bind = flow.bind
        self.dump = flow.dump


class FlowCall(StartableFlow[P, T]):
    """A flow with options, as accepted by `rt.start` and `hf.step`."""

    def __init__(
        self, flow: Flow[P, T], spec: FlowSpec, key: str, cancels_child: bool, tag: str
    ) -> None:
        self.flow = flow
        self.spec = spec
        self.key = key
        self.cancels_child = cancels_child
        self.tag = tag

    def new_flow(self, packed: bytes, trace: bytes) -> NewFlow:
        return NewFlow(self.spec, packed, self.key, tag=self.tag, trace=trace)


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
    every: str | None = None,
    zone: str = "UTC",
    missed: str = "one",
    overlap: str = "skip",
    args: Sequence[Any] = (),
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
    every: str | None = None,
    zone: str = "UTC",
    missed: str = "one",
    overlap: str = "skip",
    args: Sequence[Any] = (),
) -> Any:
    """Declare a flow: an `async def` function whose steps are recorded.

    `attempts` limits the errors that the flow's own code raises. `expiries_max` limits lost workers. `timeout_s`
    counts from the start, sleeps included. The flow is deleted `retain_s` after its end. With `every`, a cron rule, the
    flow is a schedule: `zone`, `missed`, `overlap` and `args` belong to it.
    """

    def declare(fn: Callable[..., Any], /) -> Any:
        if not callable(fn):
            raise Invalid(what="flow", found=repr(fn)[:64], why="not a function")
        spec = FlowSpec(
            name=getattr(fn, "__name__", "flow") if name is None else name,
            queue=queue,
            priority=checked_int("priority", priority),
            lease_ns=ns("lease_s", lease_s),
            attempts=checked_int("attempts", attempts),
            expiries_max=checked_int("expiries_max", expiries_max),
            timeout_ns=0 if timeout_s is None else ns("timeout_s", timeout_s),
            retain_ns=ns("retain_s", retain_s),
        )
        declared: Flow[..., Any] = Flow(fn, spec)
        if every is not None:
            declared.schedule = ScheduleOptions(every, zone, missed, overlap, checked_args(args))
            declared.schedule.check(declared.pack)
        return declared

    return declare if fn is None else declare(fn)


def decoder(hint: Any) -> Callable[..., Any]:
    """Return the function that decodes a stored value as a type. Its second argument collects upcast objects."""

    def decode(packed: bytes, upcast: UpcastObjects | None = None) -> Any:
        return value_versions.decode(packed, hint, upcast)

    return decode


def _fingerprint(fn: Any) -> str:
    """The version of a flow's code: its source and that of its module, where its other functions usually are."""
    text = fn.__qualname__
    module = inspect.getmodule(fn)
    with contextlib.suppress(OSError, TypeError):
        text += inspect.getsource(fn)
    if module is not None:
        with contextlib.suppress(OSError, TypeError):
            text += inspect.getsource(module)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_int(what: str, value: Any) -> int:
    if type(value) is not int:
        raise Invalid(what=what, found=repr(value)[:64], expected="a whole number")
    return value


def ns(what: str, seconds: Any) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds <= TTL_NS_MAX / S:
        raise Invalid(what=what, found=repr(seconds)[:64], min=0, max=TTL_NS_MAX / S)
    return math.ceil(seconds * S)


def ns_or_zero(what: str, seconds: Any) -> int:
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds == 0:
        return 0
    return ns(what, seconds)
