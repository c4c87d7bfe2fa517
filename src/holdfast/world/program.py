"""A world's code, as the host sees it: how to make, read and write its state, and how to react.

`app` builds a Program from the user's class; this layer knows only what is here. A stored event is
one byte of version and the event as msgpack. An older version is brought up, one step at a time, by
the upcasts that the application gives; a newer one than the code knows is unknown to it.

A program *knows* an ingress that it has a handler for, or that the application declares: an event or
an inbox by `events=`, a receipt by its effect. The host stops before any other (invariant I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from holdfast import codec
from holdfast.config import MESSAGE_BYTES_MAX, STATE_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid, ValueTooLarge
from holdfast.messages import FABRIC_SEND, Ingress, Kind
from holdfast.world import growth
from holdfast.world.history import Bound
from holdfast.world.shape import Shape

Handler = Callable[[Any, Any, Any], None]
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
# ("event" | "receipt" | "inbox", the event's type, the effect's kind or the inbox's name).
Cause = tuple[str, str]

_SIDES = dict.fromkeys(Kind, "event") | {Kind.RECEIPT: "receipt", Kind.INBOX: "inbox"}


_VERSIONS = tuple(bytes([version]) for version in range(256))


def cause_of(ingress: Ingress) -> tuple[Cause, int]:
    """What an ingress needs its code to know: the cause, and the version of an event."""
    side = _SIDES[ingress.kind]
    return (side, ingress.type), ingress.value[0] if side == "event" and ingress.value else 0


_AT = "@"


def code_name(version: str, shape: bytes | None) -> str:
    """Code by its version and the shape of its state; by its version where the shape is not known."""
    return f"{version}{_AT}{shape.hex()}" if shape else version


class BadState(Invalid):
    """A state that cannot be stored, or not be read back."""

    hint = "a handler has put something into the state that its fields cannot hold"


class EventType:
    """A kind of event: its class, its stored version, and how older versions become new."""

    __slots__ = ("_decoder", "_deep", "_mark", "kind", "name", "upcasts", "version")

    def __init__(
        self,
        name: str,
        kind: type[Any],
        version: int = 1,
        upcasts: Mapping[int, Upcast] | None = None,
    ) -> None:
        if not 1 <= version <= 255:
            raise Invalid(what="event version", type=name, found=version, min=1, max=255)
        self.name = name
        self.kind = kind
        self.version = version
        self.upcasts = dict(upcasts or {})
        self._mark = bytes([version])
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._deep = _may_be_deep(kind)

    def encode(self, event: Any) -> bytes:
        """The event's bytes, checked: fields set by hand are not, when it was made."""
        try:
            body = codec.pack_value(event) if self._deep else codec.pack(event)
            self._decoder.decode(body)
        except codec.UNWRITABLE as error:
            raise Invalid(what="event", type=self.name, why=str(error)) from None
        if self._deep:
            codec.check_depth("event", body, type=self.name)
        if len(body) >= MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="event", type=self.name, bytes=len(body), bytes_max=MESSAGE_BYTES_MAX
            )
        return self._mark + body

    def decode(self, value: bytes) -> Any:
        try:
            if value[:1] == self._mark:
                return self._decoder.decode(memoryview(value)[1:])
            return self._brought_up(value[0] if value else 0, value[1:])
        except codec.UNREADABLE as error:
            raise Invalid(what="event", type=self.name, why=str(error)) from None

    def _brought_up(self, version: int, body: bytes) -> Any:
        if not 1 <= version < self.version:
            why = "newer than this code" if version > self.version else "no such version"
            raise Invalid(what="event", type=self.name, version=version, why=why)
        fields = codec.unpack(body)
        for step in range(version, self.version):
            upcast = self.upcasts.get(step)
            if upcast is None:
                raise Invalid(what="event", type=self.name, version=step, why="no upcast from it")
            try:
                fields = upcast(fields)
            except Exception as error:
                why = f"the upcast raised {type(error).__name__}: {error}"
                raise Invalid(what="event", type=self.name, version=step, why=why) from error
        return msgspec.convert(fields, self.kind)


def _may_be_deep(kind: type[Any]) -> bool:
    """Whether values of a type may be nested without end: it names itself, or holds anything."""

    def look(here: Any, above: list[Any]) -> bool:
        if isinstance(here, types.AnyType | types.CustomType | types.RawType):
            return True
        if any(here is one for one in above):
            return True
        inner = [field.type for field in getattr(here, "fields", ())]
        inner += [one for name in ("types", "item_types") for one in getattr(here, name, ()) or ()]
        for name in ("item_type", "key_type", "value_type", "type"):
            one = getattr(here, name, None)
            inner += [one] if isinstance(one, types.Type) else []
        return any(look(one, [*above, here]) for one in inner)

    return look(types.type_info(kind), [])


class Program:
    __slots__ = (
        "_decoder",
        "_deep",
        "_new_fields",
        "_shape",
        "events",
        "handlers",
        "history",
        "known",
        "mail_answered",
        "shape",
        "state",
        "type",
        "version",
    )

    def __init__(
        self,
        type: str,
        version: str,
        state: type[Any],
        events: Mapping[str, EventType],
        handlers: Mapping[Cause, Handler],
        history: Bound | None = None,
        declared: Iterable[Cause] = (),
    ) -> None:
        """`declared` is journaled and ignored where it has no handler."""
        self.type = type
        # How much history such a world keeps; None: all of it.
        self.history = history
        self.version = version
        self.state = state
        self.events = dict(events)
        self.handlers = dict(handlers)
        # Each known cause, with the newest version of it that this code reads. Receipts and inboxes
        # have no version.
        self.known: dict[Cause, int] = {
            cause: events[cause[1]].version if cause[0] == "event" else 0
            for cause in (*handlers, *declared)
        }
        # Delivered mail is answered where the receipts of mail are handled or declared.
        self.mail_answered = ("receipt", FABRIC_SEND) in self.known
        # The runtime itself tells of mail that it could not deliver.
        self.known[("receipt", FABRIC_SEND)] = 0
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(state)
        # Whether the state may hold anything, sets too.
        self._deep = _may_be_deep(state)
        self._shape = Shape(state)
        self.shape = self._shape.digest
        # Fields that digests of older code were found to be without.
        self._new_fields: tuple[frozenset[str], ...] = ()

    def initial(self) -> Any:
        try:
            made = self.state()
        except Exception as error:
            raise self._unusable(error) from error
        return self.fresh(made)

    def dump(self, state: Any) -> bytes:
        """The state's bytes. A reducer may have put anything into it: Invalid if it cannot be kept."""
        try:
            return codec.pack_value(state) if self._deep else codec.pack(state)
        except Exception as error:
            raise self._unusable(error) from error

    def canonical(self, state: Any) -> bytes:
        """The bytes of the state as it is when it was stored and read again: equal states have equal
        bytes, in any process. The digest in a journal is made of them, and they are the snapshot."""
        return self.dump(self.fresh(state))

    def storable(self, state: Any) -> bytes:
        """The same bytes; BadState if they cannot be made, or are too many to be stored."""
        return self.bounded(self.canonical(state))

    def bounded(self, found: bytes) -> bytes:
        if len(found) > STATE_BYTES_MAX:
            why = f"{len(found):,} bytes, and a state has {STATE_BYTES_MAX:,} at most"
            raise BadState(what="state", type=self.type, why=why)
        return found

    @property
    def code(self) -> str:
        """Which code this is, as workers declare it."""
        return code_name(self.version, self.shape)

    def has_shape_of(self, code: str) -> bool:
        """Whether the state of other code has the fields of this one's, as far as that is known."""
        _, at, shape = code.rpartition(_AT)
        return not at or shape == self.shape.hex()

    def has_grown(self, state: Any, canonical: bytes, digest: bytes) -> bool:
        """Whether the digest is that of the state without fields that are new."""
        return self._grown(state, canonical, digest) is not None

    def before_growth(self, state: Any, canonical: bytes, digest: bytes) -> bytes | None:
        """The bytes that the digest was made of: the state, without fields that are new. None if the
        digest is that of another state."""
        new = self._grown(state, canonical, digest)
        return None if new is None else growth.without(canonical, new)

    def _grown(self, state: Any, canonical: bytes, digest: bytes) -> frozenset[str] | None:
        for new in self._new_fields:
            if growth.has_grown(state, canonical, digest, new):
                return new
        found = growth.grown(state, canonical, digest)
        if found is not None:
            # The next digest was made by the same code, as a rule.
            self._new_fields = (found, *self._new_fields)[:4]
        return found

    def adopted(self, state: Any, shape: bytes | None) -> Any:
        """The state as code with a state of this shape went on with it, after it was stored and read
        again. Fields that the other code does not have were dropped then: they are at their defaults."""
        if not shape or shape == self.shape or self.state.__struct_config__.array_like:
            return self.fresh(state)
        dropped = self._shape.lacks(shape)
        return (
            self.load(growth.without(self.dump(state), dropped)) if dropped else self.fresh(state)
        )

    def fresh(self, state: Any) -> Any:
        """The state as it is when it was stored and read again; Invalid if it cannot be."""
        return self.load(self.dump(state))

    def load(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> HoldfastError:
        return BadState(what="state", type=self.type, why=f"{type(error).__name__}: {error}")

    def handler(self, ingress: Ingress) -> Handler | None:
        return self.handlers.get((_SIDES[ingress.kind], ingress.type))

    def knows(self, ingress: Ingress) -> bool:
        """Whether this code may consume an ingress."""
        version = self.known.get((_SIDES[ingress.kind], ingress.type))
        # An event begins with its version.
        return version is not None and (not version or ingress.value[:1] <= _VERSIONS[version])

    def message(self, ingress: Ingress) -> Any:
        """What the handler is given: the event, or the receipt or mail as it was stored."""
        if ingress.kind is Kind.RECEIPT or ingress.kind is Kind.INBOX:
            return ingress
        event = self.events.get(ingress.type)
        if event is None:
            raise Invalid(what="event", type=ingress.type, why="unknown to this code")
        return event.decode(ingress.value)
