"""Declarations in user code: worlds, events, effects, and the handler of each cause.

    class Deposited(hf.Event):
        amount: int

    class Account(hf.World):
        balance: int = 0

        @hf.on(Deposited)
        def deposited(self, event: Deposited, cx: hf.Context) -> None:
            self.balance += event.amount

The fields of a world are its state. Each field has a type and a default. Handlers are synchronous and
receive only the state, the event and the context. Events are hf.Event classes, dataclasses or pydantic models.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
import weakref
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast import codec, value_versions
from holdfast.app.parameter_types import types_of
from holdfast.app.storable_types import check_function
from holdfast.config import CONCURRENCY_MAX, EFFECT_KIND_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import Intent, ReceiptStatus
from holdfast.messages import IntentReceipt as StoredReceipt
from holdfast.world.catalog import check_text
from holdfast.world.step_inputs import EffectCall, RequestableEffect, StartableFlow

if TYPE_CHECKING:
    from holdfast.effects.budget import Cost
    from holdfast.store.api import Store
    from holdfast.workers.effects.handler import CallControl, CostEstimator

T = TypeVar("T")
P = ParamSpec("P")
if TYPE_CHECKING:
    # The default makes a plain `hf.Event` an event with a reply of any type.
    from typing_extensions import TypeVar as TypeVarWithDefault

    R = TypeVarWithDefault("R", default=Any)
else:
    R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., None])

# The default of lost processes in one intent, as for tasks and flows.
EXPIRIES_MAX = 3
_CAUSES_ATTRIBUTE = "__holdfast_on__"


# Type checkers need this decorator to treat subclasses as frozen.
@typing.dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, Generic[R], frozen=True):
    """The base class of events. Fields are typed; a value of another type is rejected on delivery.

    `class BalanceAsked(hf.Event[int])` names the type of the reply that `ask` returns.
    """


def decode_reply(event: type[Any], reply: bytes) -> Any:
    """Decode the reply to an event, as the type that the event names."""
    hint = reply_type(event)
    value = codec.unpack(reply)
    if hint is Any:
        return value
    try:
        return codec.convert(value, hint)
    except codec.ENCODE_ERRORS as error:
        raise Invalid(what="reply", event=event.__name__, why=str(error)) from None


def reply_type(event: Any) -> Any:
    """The type in `class BalanceAsked(hf.Event[int])`; Any if the class names none."""
    if event not in _reply_types:
        generics = [one for base in event.__mro__ for one in vars(base).get("__orig_bases__", ())]
        hints = [typing.get_args(one)[0] for one in generics if typing.get_origin(one) is Event]
        _reply_types[event] = hints[0] if hints and not isinstance(hints[0], TypeVar) else Any
    return _reply_types[event]


_reply_types: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class World(msgspec.Struct):
    """The base class of worlds. Every field needs a default, because the first event creates the world."""


class Receipt(msgspec.Struct, Generic[T], frozen=True):
    """The outcome of an effect: `ok` with a value, `error`, or `timeout`."""

    status: str
    value: T
    code: str = ""
    error: str = ""
    attempts: int = 1
    tag: str = ""
    cost: float = 0.0
    intent_hash: bytes = b""
    # The dead intent that this one replaces, if an operator redrove it.
    redrive_of: bytes | None = None

    @property
    def ok(self) -> bool:
        return self.status == ReceiptStatus.OK.value


class _NoControl:
    """The no-op call control of a `Call` that a test creates directly."""

    dropped = False

    def progress(self) -> None:
        return


class Call(msgspec.Struct, frozen=True):
    """The call context that an effect receives before its arguments. All attempts at one intent share one
    idempotency key."""

    idempotency_key: str
    attempt: int
    world: str
    # The deadline of this attempt, in store time. `progress` extends it.
    deadline_ns: int = 0
    hold: Any = _NoControl()

    @property
    def cancelled(self) -> bool:
        """Whether the result will be discarded, because the effect was cancelled or timed out."""
        return bool(self.hold.dropped)

    def progress(self) -> None:
        """Report progress, which restarts the timeout: the attempt has `timeout_s` from now."""
        self.hold.progress()


class Mail(msgspec.Struct, Generic[T], frozen=True):
    """A message that `cx.post` put into a named inbox, with its origin."""

    inbox: str
    payload: T
    headers: dict[str, str]
    from_universe: str
    from_world: str
    from_height: int
    message_id: bytes
    correlation_id: str | None = None


class Inbox(NamedTuple):
    """A named inbox as the cause of a handler. Created by `hf.inbox`."""

    name: str
    # The type that payloads are converted to.
    kind: Any = Any


def inbox(name: str, kind: Any = Any) -> Inbox:
    """Name an inbox, as in `@hf.on(hf.inbox("orders"))`. With a type, payloads are validated against it."""
    check_text("inbox", name)
    return Inbox(name, kind)


class Costed(msgspec.Struct, Generic[T], frozen=True):
    """The result of an effect with its cost: `return hf.Costed(value, cost=0.02)`."""

    value: T
    cost: float


class Effect(RequestableEffect[P, T]):
    """An external side effect. Created by `@hf.effect`, requested by `cx.do`."""

    # The roles that this effect needs, in addition to an effect worker.
    roles: typing.ClassVar[tuple[str, ...]] = ()

    def __init__(self, kind: str, fn: Callable[..., Any], **options: Any) -> None:
        self.kind = kind
        self.fn = fn
        self.attempts: int = options.pop("attempts", 5)
        self.expiries_max: int = options.pop("expiries_max", EXPIRIES_MAX)
        self.timeout_s: float = options.pop("timeout_s", 60.0)
        self.rate_per_s: float | None = options.pop("rate_per_s", None)
        self.concurrency: int = options.pop("concurrency", 16)
        if options:
            raise Invalid(what="effect option", kind=kind, found=sorted(options))
        _check_timeout(self.timeout_s)
        _check_int_range("attempts", self.attempts, 1_000_000)
        _check_int_range("expiries_max", self.expiries_max, 1_000_000)
        _check_int_range("concurrency", self.concurrency, CONCURRENCY_MAX)
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= 1e9:
            raise Invalid(what="rate_per_s", kind=kind, found=self.rate_per_s, min=0, max=1e9)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", kind)
        self._signature = inspect.signature(fn)
        # The fast path of the argument check, for signatures with positional parameters only.
        self._argument_counts = _argument_counts(self._signature)
        self.asynchronous = inspect.iscoroutinefunction(fn)
        hints = typing.get_type_hints(fn)
        self.returns: Any = _result_type(hints.get("return", Any))
        names = list(self._signature.parameters)
        # Of `fn(call, *args)` the first one is the call context, which is not stored.
        types = types_of(self._signature, hints)
        self._argument_hints = [hint for _, hint in types.positional[1:]]
        self._rest_hint = types.rest
        # Hints of the stored arguments; the call context, the first parameter, is not stored.
        self._hints_by_name = {name: hints[name] for name in names[1:] if name in hints}

    def check_storable(self) -> None:
        """Raise NotStorable if an argument or the result cannot be stored."""
        check_function("effect", self.kind, self._signature, self._hints_by_name, self.returns)

    def options(self, **options: Any) -> EffectWithOptions[P, T]:
        """Return the effect with per-call options, kept apart from its arguments."""
        return EffectWithOptions(self, options)

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments by position. Stored arguments have no names."""
        if not kwargs:
            return args
        try:
            bound = self._signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise Invalid(what="effect arguments", kind=self.kind, why=str(error)) from None
        if bound.kwargs:
            bound.apply_defaults()  # an omitted argument before a named one
        if bound.kwargs:
            raise Invalid(
                what="effect arguments",
                kind=self.kind,
                found=sorted(bound.kwargs),
                why="an effect takes positional arguments",
            )
        return bound.args[1:]

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        known_options = {"key", "tag", "timeout_s", "priority"}
        if not options.keys() <= known_options:
            raise Invalid(
                what="option",
                found=sorted(options.keys() - known_options),
                expected=sorted(known_options),
            )
        try:
            if (
                self._argument_counts is None
                or not self._argument_counts[0] <= len(args) <= self._argument_counts[1]
            ):
                self._signature.bind(None, *args)
            params = codec.pack_value(list(args))
            self._decode_arguments(params)
        except codec.ENCODE_ERRORS as error:
            raise Invalid(what="effect arguments", kind=self.kind, why=str(error)) from None
        codec.check_depth("effect arguments", params, kind=self.kind)
        # Without an explicit timeout the effect worker applies the declared one. The intent does not store
        # it, so a release may change the declaration without a replay divergence.
        timeout_s = options.get("timeout_s", 0)
        if "timeout_s" in options:
            _check_timeout(timeout_s)
        return EffectCall(
            self.kind,
            params,
            options.get("priority", 0),
            int(timeout_s * 1_000_000_000),
            options.get("tag", ""),
            options.get("key"),
            self.policy_hash,
        )

    @cached_property
    def policy_hash(self) -> bytes:
        """The hash of attempts, expiries, timeout, rate and billing, as declared by the requesting process. A replay
        does not compare it, so a release may change a policy."""
        billing = self.billing()
        charged = None if billing is None else [billing.operation, billing.args]
        return codec.digest_of(
            [
                self.attempts,
                float(self.timeout_s),
                self.rate_per_s and float(self.rate_per_s),
                charged,
                # Absent by default, as in the hashes of older intents.
                *([self.expiries_max] if self.expiries_max != EXPIRIES_MAX else []),
            ]
        )

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: CallControl) -> Any:
        """Call the function for an intent. All attempts at an intent share one idempotency key."""
        key = f"{intent.generation}-{intent.intent_hash.hex()}"
        call = Call(key, attempt, intent.origin_name, deadline_ns, hold)
        return self.fn(call, *self._decode_arguments(intent.params))

    def dump(self, result: Any) -> bytes:
        value = result.value if isinstance(result, Costed) else result
        try:
            packed = codec.pack_value(value)
            _convert(self.returns, codec.unpack(packed))
            codec.check_depth("effect result", packed)
        except (*codec.ENCODE_ERRORS, Invalid) as error:
            raise _bad_result(kind=self.kind, why=str(error)) from None
        return value_versions.encode_versions(self.returns) + packed

    def within(self, store: Store) -> Effect[P, T]:
        """Return the effect bound to the store of an effect worker; by default the effect itself."""
        return self

    def billing(self) -> CostEstimator | None:
        return None

    def bill(self, intent: Intent, result: Any) -> list[Cost]:
        return []

    def unbilled(self, error: Exception) -> bool:
        return True

    def cost_of(self, result: Any) -> float:
        cost = result.cost if isinstance(result, Costed) else 0.0
        if not isinstance(cost, int | float) or not math.isfinite(cost):
            raise _bad_result(
                kind=self.kind, why="the cost must be a number", found=repr(cost)[:64]
            )
        return float(cost)

    def receipt(self, stored: StoredReceipt) -> Receipt[Any]:
        """Decode a receipt of this effect."""
        return receipt_of(stored, self.returns)

    def _decode_arguments(self, params: bytes) -> list[Any]:
        """Return the arguments, converted to the annotated types."""
        values: list[Any] = codec.unpack(params)
        converted = [
            _convert(hint, value) for hint, value in zip(self._argument_hints, values, strict=False)
        ]
        return converted + [_convert(self._rest_hint, value) for value in values[len(converted) :]]


def receipt_of(stored: StoredReceipt, returns: Any) -> Receipt[Any]:
    """Return a stored receipt with its value as the declared type."""
    value = None
    if stored.status is ReceiptStatus.OK and stored.value:
        value = value_versions.decode(stored.value, returns)
    return Receipt(
        status=stored.status.value,
        value=value,
        code=stored.code,
        error=stored.error,
        attempts=stored.attempts,
        tag=stored.tag,
        cost=stored.cost,
        intent_hash=stored.intent_hash,
        redrive_of=stored.redrive_of,
    )


class EffectWithOptions(RequestableEffect[P, T]):
    """An effect with per-call options, as accepted by `cx.do`."""

    __slots__ = ("effect", "options")

    def __init__(self, effect: Effect[P, T], options: dict[str, Any]) -> None:
        self.effect = effect
        self.options = options


class EffectDecorator(typing.Protocol):
    """The decorator that `@hf.effect(…)` returns. `async def` and `Costed` do not change the effect's type."""

    @typing.overload
    def __call__(
        self, fn: Callable[Concatenate[Any, P], Awaitable[Costed[T]]], /
    ) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[Concatenate[Any, P], Awaitable[T]], /) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[Concatenate[Any, P], Costed[T]], /) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[Concatenate[Any, P], T], /) -> Effect[P, T]: ...


def effect(
    kind: str,
    *,
    attempts: int = 5,
    timeout_s: float = 60.0,
    rate_per_s: float | None = None,
    concurrency: int = 16,
    expiries_max: int = EXPIRIES_MAX,
) -> EffectDecorator:
    """Declare an effect: a function, `def` or `async def`, whose first parameter is `call`. `expiries_max` limits the
    processes that may be lost while they execute one intent."""
    if callable(kind):
        raise Invalid(
            what="effect", why='give it a kind: @hf.effect("kind")', found=repr(kind)[:64]
        )
    check_text("effect kind", kind, EFFECT_KIND_BYTES_MAX)
    for letter in "/>":
        if letter in kind:
            raise Invalid(what="effect kind", found=kind, why=f"it contains {letter}")

    def declare(fn: Callable[..., Any], /) -> Any:
        return Effect(
            kind,
            fn,
            attempts=attempts,
            timeout_s=timeout_s,
            rate_per_s=rate_per_s,
            concurrency=concurrency,
            expiries_max=expiries_max,
        )

    return declare


def typed_as(signature: Callable[P, T], effect: Effect[Any, Any]) -> Effect[P, T]:
    """Return the effect with the arguments and the result of `signature`, for type checkers. A ParamSpec that is
    written as a list has no optional arguments."""
    return effect


class Upcast(NamedTuple):
    """A conversion of a stored event or value to the next version. Created by `@hf.upcast`."""

    event: type[Any]
    version: int
    fn: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self.fn(fields)


def upcast(
    event: type[Any], version: int
) -> Callable[[Callable[[dict[str, Any]], dict[str, Any]]], Upcast]:
    """Declare a conversion of the fields of a class from `version` to the next version. The class is an event, or
    the type of a value that a flow, a task or an effect stores.

    Versions start at 1. A class with n upcasts is at version n + 1. List the upcasts in `App(upcasts=…)`.
    """
    if not (is_event(event) or _is_struct(event)):
        raise Invalid(
            what="upcast",
            found=repr(event)[:64],
            why="not an hf.Event class, a dataclass, a msgspec struct or a pydantic model",
        )
    if type(version) is not int or not 1 <= version <= 254:
        raise Invalid(what="event version", type=event.__name__, found=version, min=1, max=254)

    def declare(fn: Callable[[dict[str, Any]], dict[str, Any]]) -> Upcast:
        return Upcast(event, version, fn)

    return declare


def on(*causes: Any) -> Callable[[M], M]:
    """Mark a method as the handler of events (named by class), receipts (named by effect) or an inbox."""
    if not causes:
        raise Invalid(what="on", why="name the events, effects or inbox that the method handles")

    for cause in causes:
        if not (is_event(cause) or isinstance(cause, Effect | Inbox | StartableFlow)):
            raise Invalid(
                what="on",
                found=repr(cause)[:64],
                why="not an event class, an effect, a flow or an inbox",
            )

    def mark(method: M) -> M:
        setattr(method, _CAUSES_ATTRIBUTE, (*getattr(method, _CAUSES_ATTRIBUTE, ()), *causes))
        return method

    return mark


def handlers_of(world: type[World]) -> dict[Any, Callable[..., None]]:
    """Map each cause to its handler, for a world class and its bases. Two handlers for one cause raise
    Invalid."""
    handlers: dict[Any, Callable[..., None]] = {}
    for name, method in inspect.getmembers(world, callable):
        for cause in getattr(method, _CAUSES_ATTRIBUTE, ()):
            if cause in handlers and handlers[cause] is not method:
                raise Invalid(
                    what="handler",
                    world=world.__name__,
                    cause=getattr(cause, "__name__", str(cause)),
                    why=f"both {handlers[cause].__name__} and {name} handle it",
                )
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise Invalid(
                    what="handler",
                    world=world.__name__,
                    name=name,
                    why="a reducer must not be async",
                )
            _check_reducer(world, name, method)
            handlers[cause] = typing.cast(Callable[..., None], method)
    return handlers


def _check_reducer(world: type[World], name: str, method: Callable[..., object]) -> None:
    why = ""
    if inspect.isgeneratorfunction(method):
        why = "a reducer must not be a generator: calling it would run nothing"
    else:
        try:
            inspect.signature(method).bind(None, None, None)
        except TypeError:
            why = "a handler takes two arguments, the event and cx"
    if why:
        raise Invalid(what="handler", world=world.__name__, name=name, why=why)


def _argument_counts(signature: inspect.Signature) -> tuple[int, int] | None:
    """The least and greatest number of arguments after `call`; None if the signature needs a full bind."""
    parameters = list(signature.parameters.values())[1:]
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return None
    return sum(parameter.default is parameter.empty for parameter in parameters), len(parameters)


def _result_type(hint: Any) -> Any:
    """The type of a receipt's value, from the annotated return type."""
    if typing.get_origin(hint) is Costed:
        return typing.get_args(hint)[0]
    return Any if hint is Costed else hint


def _convert(hint: Any, value: Any) -> Any:
    return value if hint is Any else codec.convert(value, hint)


def _bad_result(**fields: Any) -> HoldfastError:
    # Imported lazily: a process that only declares an app must not pay for importing the effect worker
    # before the store's writer process has started.
    from holdfast.workers.effects.handler import BadResult

    return BadResult(**fields)


def _check_timeout(timeout_s: Any) -> None:
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= TTL_NS_MAX / 4e9:
        raise Invalid(what="timeout_s", found=repr(timeout_s)[:64], min=0, max=TTL_NS_MAX / 4e9)


def _check_int_range(what: str, value: Any, maximum: int) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise Invalid(what=what, found=repr(value)[:64], min=1, max=maximum)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def is_event(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, Event) or dataclasses.is_dataclass(kind) or codec.is_model(kind)
    )
