"""The inputs of one reducer step: position, time, cause, and the type registry of the
application."""

from __future__ import annotations

from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import FabricSendParams, Ingress
from holdfast.world.definition import Cause

P = ParamSpec("P")
T = TypeVar("T")


class RequestableEffect(Generic[P, T]):
    """What `cx.do` requests: an effect, or an effect with options. `P` are its arguments after `call`, `T` is the
    type of its result."""

    __slots__ = ()


class StartableFlow(Generic[P, T]):
    """What `cx.start` starts: a flow, or a flow with options. `P` are its arguments, `T` is the type of its result."""


def undeclared_error(**fields: Any) -> Invalid:
    """Make the error for an event, world type or effect that the application does not declare."""
    error = Invalid(**fields)
    error.__dict__["undeclared"] = True
    return error


def is_undeclared(error: Invalid) -> bool:
    return "undeclared" in error.__dict__


class TypeRegistry(Protocol):
    """The type registry of an application: names of its events, worlds and effects. Its methods
    raise `undeclared_error` for types that the application does not declare."""

    def encode_event(self, event: Any) -> tuple[str, bytes]: ...
    def world_type(self, kind: Any) -> str: ...
    def effect_call(
        self, effect: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> EffectCall: ...

    def flow_call(self, flow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EffectCall: ...

    def encode_again(self, event: Any) -> tuple[str, bytes]:
        """Encode an event in a replay, even if this code no longer declares its type."""

    def check_known(self, type: str, cause: Cause) -> None:
        """Raise `undeclared_error` if this code has the world type and the type does not declare
        the cause."""

    def check_mail(self, mail: FabricSendParams) -> None:
        """Raise Invalid unless this code could decode the mail. For mail within the universe."""


class EffectCall(codec.Record, frozen=True):
    """An effect with its arguments and options, before it has an intent hash."""

    kind: str
    params: bytes
    priority: int = 0
    timeout_ns: int = 0
    tag: str = ""
    key: str | None = None
    # The hash of the policy that the effect was declared with (see `Effect.policy_hash`).
    policy: bytes = b""
    # The packed properties of a flow to start.
    flow_spec: bytes = b""


class ReducerInputs(codec.Record, frozen=True):
    """Position, time, entropy and cause of one step."""

    universe: str
    world_id: str
    name: str
    height: int
    wall_ns: int
    entropy: bytes
    generation: int
    correlation_id: str | None = None
    # Whether the sender gets a receipt for delivered mail.
    wants_mail_receipts: bool = False
    # The ingress that this step handles.
    cause: Ingress | None = None
    type: str = ""
    # The step is already in the journal: its intents passed all checks when it was made.
    replay: bool = False


def pack_plain(what: str, value: Any) -> bytes:
    """Pack plain data; raise Invalid if it cannot be stored."""
    try:
        packed = codec.pack_value(value)
    except codec.ENCODE_ERRORS as error:
        raise Invalid(what=what, why=str(error)) from None
    codec.check_depth(what, packed)
    return packed


def pack_checked(record: codec.Record) -> bytes:
    """Pack a record and decode it again, so that an invalid field fails here and not at the
    commit."""
    try:
        packed = codec.pack(record)
    except codec.ENCODE_ERRORS as error:
        raise Invalid(what=type(record).__name__, why=str(error)) from None
    codec.unpack_as(type(record), packed)
    return packed
