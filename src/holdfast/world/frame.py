"""What surrounds one step of a world: its place and time, its cause, and how its code names things."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import FabricSendParams, Ingress
from holdfast.world.program import Cause


def undeclared(**fields: Any) -> Invalid:
    """What code is told that wants an event, a world type or an effect that it does not declare."""
    error = Invalid(**fields)
    error.__dict__["undeclared"] = True
    return error


def is_undeclared(error: Invalid) -> bool:
    return "undeclared" in error.__dict__


class Vocabulary(Protocol):
    """How an application names its events, worlds and effects. `undeclared` for what it does not know."""

    def encode_event(self, event: Any) -> tuple[str, bytes]: ...
    def world_type(self, kind: Any) -> str: ...
    def effect_call(self, effect: Any, args: tuple[Any, ...]) -> EffectCall: ...

    def encode_again(self, event: Any) -> tuple[str, bytes]:
        """As `encode_event`, in a replay: this code may have dropped the event's type since."""

    def check_known(self, type: str, cause: Cause) -> None:
        """`undeclared` if this code has the world type, and the type does not know the cause."""

    def check_mail(self, mail: FabricSendParams) -> None:
        """Invalid unless this code could read it: for mail that stays in the universe."""


class EffectCall(codec.Record, frozen=True):
    """An effect with its arguments and options, before it has an identity."""

    kind: str
    params: bytes
    priority: int = 0
    timeout_ns: int = 0
    tag: str = ""
    key: str | None = None
    # The hash of the policy that the effect was declared with: see `Effect.policy_hash`.
    policy: bytes = b""


class Frame(codec.Record, frozen=True):
    """Where and when a step happens."""

    universe: str
    world_id: str
    name: str
    height: int
    wall_ns: int
    entropy: bytes
    generation: int
    correlation_id: str | None = None
    # Whether delivered mail is answered with a receipt.
    mail_answered: bool = False
    # What is being reacted to.
    cause: Ingress | None = None
    type: str = ""
    # The step is in the journal already: what it wanted was admitted then.
    replay: bool = False


def packed_plain(what: str, value: Any) -> bytes:
    try:
        packed = codec.pack_value(value)
    except codec.UNWRITABLE as error:
        raise Invalid(what=what, why=str(error)) from None
    codec.check_depth(what, packed)
    return packed


def packed(record: codec.Record) -> bytes:
    """The record's bytes, checked: what is wrong must fail here, not at the commit."""
    try:
        packed = codec.pack(record)
    except codec.UNWRITABLE as error:
        raise Invalid(what=type(record).__name__, why=str(error)) from None
    codec.unpack_as(type(record), packed)
    return packed
