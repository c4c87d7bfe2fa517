"""What users write: worlds, events, effects, and which method reacts to what.

    class Deposited(hf.Event):
        amount: int

    class Account(hf.World):
        balance: int = 0

        @hf.on(Deposited)
        def deposited(self, event: Deposited, cx: hf.Context) -> None:
            self.balance += event.amount

A world's fields are its state: typed, with defaults, stored as they are declared. Handlers are
synchronous and see only state, event and context. Events are hf.Event classes or dataclasses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast import codec
from holdfast.app.storable import check_function
from holdfast.config import CONCURRENCY_MAX, EFFECT_KIND_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import Intent, Status
from holdfast.messages import Receipt as StoredReceipt
from holdfast.world.catalog import check_text
from holdfast.world.frame import EffectCall

if TYPE_CHECKING:
    from holdfast.effects.budget import Charge
    from holdfast.roles.doing import Billing, Hold
    from holdfast.store.api import Store

T = TypeVar("T")
P = ParamSpec("P")
M = TypeVar("M", bound=Callable[..., None])

_MARK = "__holdfast_on__"


# Said once more for type checkers: a class that extends this one is frozen without saying so.
@typing.dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True):
    """The base of events. Fields are typed; what does not fit is refused at the door."""


class World(msgspec.Struct):
    """The base of worlds. Every field has a default: a world exists from its first event on."""


class Receipt(msgspec.Struct, Generic[T], frozen=True):
    """How an effect ended: `ok` with a value, `error`, or `timeout`."""

    status: str
    value: T
    code: str = ""
    error: str = ""
    attempts: int = 1
    tag: str = ""
    cost: float = 0.0
    intent_hash: bytes = b""
    # The intent that was given up, if an operator had this one done in its place.
    redrive_of: bytes | None = None

    @property
    def ok(self) -> bool:
        return self.status == Status.OK.value


class _Unheld:
    """A call that nobody waits for: made by hand, in a test."""

    dropped = False

    def progress(self) -> None:
        return


class Call(msgspec.Struct, frozen=True):
    """What an effect is told besides its arguments. All calls of one intent have one key."""

    idempotency_key: str
    attempt: int
    world: str
    # By store time: when this attempt is out of time, unless it makes progress.
    deadline_ns: int = 0
    hold: Any = _Unheld()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more: it was cancelled, or is out of time."""
        return bool(self.hold.dropped)

    def progress(self) -> None:
        """Say that it goes on: the attempt has its whole `timeout_s` again from now."""
        self.hold.progress()


class Mail(msgspec.Struct, Generic[T], frozen=True):
    """What was put into a named inbox by `cx.post`, and where it came from."""

    inbox: str
    payload: T
    headers: dict[str, str]
    from_universe: str
    from_world: str
    from_height: int
    message_id: bytes
    correlation_id: str | None = None


class Inbox(NamedTuple):
    """A named inbox as a cause: made by `hf.inbox`."""

    name: str
    # What its payloads are converted to.
    kind: Any = Any


def inbox(name: str, kind: Any = Any) -> Inbox:
    """Name an inbox, for `@hf.on(hf.inbox("orders"))`; with a type, payloads are checked against it."""
    check_text("inbox", name)
    return Inbox(name, kind)


class Costed(msgspec.Struct, Generic[T], frozen=True):
    """What an effect returns to say what it cost: `hf.Costed(value, cost=0.02)`."""

    value: T
    cost: float


class Effect(Generic[P, T]):
    """Something to be done outside. Made by `@hf.effect`; wanted by `cx.do`."""

    # What else has to run where it is used, besides an adapter pool.
    roles: typing.ClassVar[tuple[str, ...]] = ()

    def __init__(self, kind: str, fn: Callable[..., Any], **options: Any) -> None:
        self.kind = kind
        self.fn = fn
        self.attempts: int = options.pop("attempts", 5)
        self.timeout_s: float = options.pop("timeout_s", 60.0)
        self.rate_per_s: float | None = options.pop("rate_per_s", None)
        self.concurrency: int = options.pop("concurrency", 16)
        if options:
            raise Invalid(what="effect option", kind=kind, found=sorted(options))
        _check_timeout(self.timeout_s)
        _check_count("attempts", self.attempts, 1_000_000)
        _check_count("concurrency", self.concurrency, CONCURRENCY_MAX)
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= 1e9:
            raise Invalid(what="rate_per_s", kind=kind, found=self.rate_per_s, min=0, max=1e9)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", kind)
        self._signature = inspect.signature(fn)
        # The fast way to check a call: how many arguments there may be, if only their number counts.
        self._arity = _arity(self._signature)
        self.asynchronous = inspect.iscoroutinefunction(fn)
        hints = typing.get_type_hints(fn)
        self.returns: Any = _returned(hints.get("return", Any))
        names = list(self._signature.parameters)
        self._takes = [hints.get(name, Any) for name in names[1:]]
        # Of what it is given by the intent: the call is not stored.
        self._hints = {name: hints[name] for name in names[1:] if name in hints}

    def check_storable(self) -> None:
        """NotStorable if an argument or the result cannot be stored."""
        check_function("effect", self.kind, self._signature, self._hints, self.returns)

    def options(self, **options: Any) -> Wanted:
        """The effect with options that could collide with its arguments."""
        return Wanted(self, options)

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        known = {"key", "tag", "timeout_s", "priority"}
        if not options.keys() <= known:
            raise Invalid(
                what="option", found=sorted(options.keys() - known), expected=sorted(known)
            )
        try:
            if self._arity is None or not self._arity[0] <= len(args) <= self._arity[1]:
                self._signature.bind(None, *args)
            params = codec.pack_value(list(args))
            self._arguments(params)
        except codec.UNWRITABLE as error:
            raise Invalid(what="effect arguments", kind=self.kind, why=str(error)) from None
        codec.check_depth("effect arguments", params, kind=self.kind)
        # Unless it is asked for, the time is the pool's to know: a new release may change it, and
        # no journal diverges.
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
        """The hash of attempts, timeout, rate and billing, as declared where the effect is wanted. A
        replay does not compare it: a release may change a policy."""
        billing = self.billing()
        charged = None if billing is None else [billing.operation, billing.args]
        return codec.digest_of(
            [
                self.attempts,
                float(self.timeout_s),
                self.rate_per_s and float(self.rate_per_s),
                charged,
            ]
        )

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: Hold) -> Any:
        """Call the function for an intent; all its calls have one idempotency key."""
        key = f"{intent.generation}-{intent.intent_hash.hex()}"
        call = Call(key, attempt, intent.origin_name, deadline_ns, hold)
        return self.fn(call, *self._arguments(intent.params))

    def dump(self, result: Any) -> bytes:
        value = result.value if isinstance(result, Costed) else result
        try:
            packed = codec.pack_value(value)
            _as(self.returns, codec.unpack(packed))
            codec.check_depth("effect result", packed)
        except (*codec.UNWRITABLE, Invalid) as error:
            raise _bad_result(kind=self.kind, why=str(error)) from None
        return packed

    def within(self, store: Store) -> Effect[P, T]:
        """The effect as a pool of this store does it: itself, unless it keeps books there."""
        return self

    def billing(self) -> Billing | None:
        return None

    def bill(self, intent: Intent, result: Any) -> list[Charge]:
        return []

    def unbilled(self, error: Exception) -> bool:
        return True

    def cost_of(self, result: Any) -> float:
        cost = result.cost if isinstance(result, Costed) else 0.0
        if not isinstance(cost, int | float) or not math.isfinite(cost):
            raise _bad_result(kind=self.kind, why="a cost is a number", found=repr(cost)[:64])
        return float(cost)

    def receipt(self, stored: StoredReceipt) -> Receipt[Any]:
        value = None
        if stored.status is Status.OK and stored.value:
            value = _as(self.returns, codec.unpack(stored.value))
        return Receipt(
            stored.status.value,
            value,
            stored.code,
            stored.error,
            stored.attempts,
            stored.tag,
            stored.cost,
            stored.intent_hash,
            stored.redrive_of,
        )

    def _arguments(self, params: bytes) -> list[Any]:
        """The arguments as the function's annotations have them. More than named ones are as sent."""
        values: list[Any] = codec.unpack(params)
        known = [_as(hint, value) for hint, value in zip(self._takes, values, strict=False)]
        return known + values[len(known) :]


class Wanted(msgspec.Struct, frozen=True):
    """An effect with options, as `cx.do` takes it."""

    effect: Effect[Any, Any]
    options: dict[str, Any]


class Declare(typing.Protocol):
    """What `@hf.effect(…)` does to a function. `async def`, or a cost with it, is the same effect."""

    @typing.overload
    def __call__(self, fn: Callable[P, Awaitable[Costed[T]]], /) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[P, Awaitable[T]], /) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[P, Costed[T]], /) -> Effect[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[P, T], /) -> Effect[P, T]: ...


def effect(
    kind: str,
    *,
    attempts: int = 5,
    timeout_s: float = 60.0,
    rate_per_s: float | None = None,
    concurrency: int = 16,
) -> Declare:
    """Declare an effect: any code, `def` or `async def`, whose first argument is `call`."""
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
        )

    return declare


class Upcast(NamedTuple):
    """How a stored event of an older version becomes one of the next. Made by `@hf.upcast`."""

    event: type[Any]
    version: int
    fn: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self.fn(fields)


def upcast(
    event: type[Any], version: int
) -> Callable[[Callable[[dict[str, Any]], dict[str, Any]]], Upcast]:
    """Declare how the fields of `event`, as version `version` stored them, become those of the next.

    Versions count from 1. An event with n upcasts is at version n + 1: name them in `App(upcasts=…)`.
    """
    if not is_event(event):
        raise Invalid(what="upcast", found=repr(event)[:64], why="an hf.Event class or a dataclass")
    if type(version) is not int or not 1 <= version <= 254:
        raise Invalid(what="event version", type=event.__name__, found=version, min=1, max=254)

    def declare(fn: Callable[[dict[str, Any]], dict[str, Any]]) -> Upcast:
        return Upcast(event, version, fn)

    return declare


def on(*causes: Any) -> Callable[[M], M]:
    """Mark a method as the handler of events (by class), receipts (by effect) or an inbox."""
    if not causes:
        raise Invalid(what="on", why="names the events or effects that the method handles")

    for cause in causes:
        if not (is_event(cause) or isinstance(cause, Effect | Inbox)):
            raise Invalid(what="on", found=repr(cause)[:64], why="neither an event nor an effect")

    def mark(method: M) -> M:
        setattr(method, _MARK, (*getattr(method, _MARK, ()), *causes))
        return method

    return mark


def handlers_of(world: type[World]) -> dict[Any, Callable[..., None]]:
    """Cause → method, of a world class and its bases. Two methods for one cause are a mistake."""
    found: dict[Any, Callable[..., None]] = {}
    for name, method in inspect.getmembers(world, callable):
        for cause in getattr(method, _MARK, ()):
            if cause in found and found[cause] is not method:
                raise Invalid(
                    what="handler",
                    world=world.__name__,
                    cause=getattr(cause, "__name__", str(cause)),
                    why=f"both {found[cause].__name__} and {name} handle it",
                )
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise Invalid(
                    what="handler", world=world.__name__, name=name, why="reducers are not async"
                )
            _check_reducer(world, name, method)
            found[cause] = typing.cast(Callable[..., None], method)
    return found


def _check_reducer(world: type[World], name: str, method: Callable[..., object]) -> None:
    why = ""
    if inspect.isgeneratorfunction(method):
        why = "a reducer does not yield: nothing of it would run"
    else:
        try:
            inspect.signature(method).bind(None, None, None)
        except TypeError:
            why = "it takes the event and cx"
    if why:
        raise Invalid(what="handler", world=world.__name__, name=name, why=why)


def _arity(signature: inspect.Signature) -> tuple[int, int] | None:
    """How many arguments there may be after the call; None when it takes more to say."""
    taken = list(signature.parameters.values())[1:]
    if any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in taken):
        return None
    return sum(one.default is one.empty for one in taken), len(taken)


def _returned(hint: Any) -> Any:
    """What a receipt's value is, by what the function says that it returns."""
    if typing.get_origin(hint) is Costed:
        return typing.get_args(hint)[0]
    return Any if hint is Costed else hint


def _as(hint: Any, value: Any) -> Any:
    return value if hint is Any else codec.convert(value, hint)


def _bad_result(**fields: Any) -> HoldfastError:
    # What does effects is imported by who does them: an app is declared before its store's process is
    # started, and all that is imported after that costs nobody's time.
    from holdfast.roles.doing import BadResult

    return BadResult(**fields)


def _check_timeout(timeout_s: Any) -> None:
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= TTL_NS_MAX / 4e9:
        raise Invalid(what="timeout_s", found=repr(timeout_s)[:64], min=0, max=TTL_NS_MAX / 4e9)


def _check_count(what: str, found: Any, most: int) -> None:
    if type(found) is not int or not 1 <= found <= most:
        raise Invalid(what=what, found=repr(found)[:64], min=1, max=most)


def is_event(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, Event) or dataclasses.is_dataclass(kind))
