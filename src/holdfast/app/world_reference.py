"""Worlds inside flows and tasks: `hf.world(Account, "ada")`.

    balance = await hf.step(hf.world(Account, "ada").ask, Deposit(5))

As a step, `ask` and `send` use the idempotency key of the step, so a repeated step delivers its event once. Inside
another function they need `key=` for that, because one step can send several events.

`holdfast.world` is also a package, so `hf.world` is that package, made callable here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import holdfast.world as world_package
from holdfast.app.definitions import Event, World
from holdfast.errors import Invalid

if TYPE_CHECKING:
    from holdfast.app.world_handle import Delivery, WorldHandle

W = TypeVar("W", bound=World)
R = TypeVar("R")
# The methods that deliver an event, and take the key of their step.
KEYED = ("ask", "send")


class AskMethod(Protocol):
    """The type of `hf.world(…).ask`. A step that calls it has the type of the reply that the event names."""

    @overload
    def __call__(self, event: Event[R], *, timeout: float = 30.0, key: str | None = None) -> R: ...
    @overload
    def __call__(self, event: object, *, timeout: float = 30.0, key: str | None = None) -> Any: ...


def _refer(kind: type[W], name: str) -> WorldReference[W]:
    if not (isinstance(kind, type) and issubclass(kind, World)):
        raise Invalid(what="world", found=repr(kind)[:64], expected="a class of hf.World")
    if not isinstance(name, str):
        raise Invalid(what="world", found=repr(name)[:64], expected="the name of a world")
    return WorldReference(kind, name)


class WorldReference(Generic[W]):
    """A world by its type and name. The runtime of the worker delivers its events."""

    def __init__(self, kind: type[W], name: str) -> None:
        self.kind = kind
        self.name = name

    def __repr__(self) -> str:
        return f"<world {self.kind.__name__}/{self.name}>"

    def send(self, event: Any, *, key: str | None = None) -> Delivery:
        """Deliver an event durably and return its inbox seq."""
        return self._handle().send(event, key=key)

    if TYPE_CHECKING:

        @property
        def ask(self) -> AskMethod:
            """Deliver an event and wait for the reply of its handler."""

    else:

        def ask(self, event, *, timeout=30.0, key=None):
            """Deliver an event and wait for the reply of its handler."""
            return self._handle().ask(event, timeout=timeout, key=key)

    def state(self, at: int | None = None) -> W:
        """Return the state after the last entry, or after entry `at`."""
        return self._handle().state(at)

    def _handle(self) -> WorldHandle[W]:
        from holdfast.app.runtime import runtime_of
        from holdfast.workers.tasks.attempt import CURRENT

        attempt = CURRENT.get(None)
        if attempt is None:
            raise Invalid(
                what="world", why="called outside a step and a task; use rt.world(…) there"
            )
        return runtime_of(attempt.code).world(self.kind, self.name)


def reference_of(fn: Any) -> WorldReference[Any] | None:
    """Return the world of a bound method such as `hf.world(Account, "ada").ask`, or None."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, WorldReference) else None


def with_step_key(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method as a step runs it: with the step's idempotency key, unless the call has a key."""
    if fn.__name__ not in KEYED:
        return fn

    from holdfast.workers.flows.step_runs import current_step

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("key", current_step().idempotency_key)
        return fn(*args, **kwargs)

    return call


class _WorldPackage(types.ModuleType):
    def __call__(self, kind: type[W], name: str) -> WorldReference[W]:
        return _refer(kind, name)


world_package.__class__ = _WorldPackage

if TYPE_CHECKING:

    def world(kind: type[W], name: str) -> WorldReference[W]:
        """Return a world of the app, for use in steps of flows and in tasks."""

else:
    world = world_package
