"""A world definition as the host uses it: creating, encoding and decoding state, and finding
handlers.

`app` builds a WorldDefinition from the user's class. This layer uses nothing else of the
application. A stored event is one version byte followed by the event as msgpack. The application's
upcasts convert an older version, one version at a time. A version newer than the code is unknown to
it.

A definition *declares* an ingress if it has a handler for it, or if the application lists it: an
event or an inbox in `events=`, a receipt by its effect. The host stops before any other ingress
(invariant I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import inspect as types

from holdfast import codec
from holdfast.config import MESSAGE_BYTES_MAX, STATE_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid, ValueTooLarge
from holdfast.messages import FABRIC_SEND, Ingress, IngressKind
from holdfast.world import new_fields
from holdfast.world.history import HistoryBound
from holdfast.world.state_shape import StateShape

Handler = Callable[[Any, Any, Any], None]
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
# ("event" | "receipt" | "inbox", the event's type, the effect's kind or the inbox's name).
Cause = tuple[str, str]

_SIDE_BY_KIND = dict.fromkeys(IngressKind, "event") | {
    IngressKind.RECEIPT: "receipt",
    IngressKind.INBOX: "inbox",
}


_VERSION_BYTES = tuple(bytes([version]) for version in range(256))


def cause_of(ingress: Ingress) -> tuple[Cause, int]:
    """Return the cause of an ingress, and the version of an event: a worker must declare both to
    handle it."""
    side = _SIDE_BY_KIND[ingress.kind]
    return (side, ingress.type), ingress.value[0] if side == "event" and ingress.value else 0


_SHAPE_SEPARATOR = "@"


def code_name(version: str, shape: bytes | None) -> str:
    """Name code by its version and the shape of its state, or by its version if the shape is not
    known."""
    return f"{version}{_SHAPE_SEPARATOR}{shape.hex()}" if shape else version


class BadState(Invalid):
    """A state that cannot be encoded, or cannot be decoded again."""

    hint = "a handler stored a value in the state that the type of its field does not allow"


class EventType:
    """An event type: its class, its stored version, and the upcasts from older versions."""

    __slots__ = ("_decoder", "_may_nest", "_version_byte", "kind", "name", "upcasts", "version")

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
        self._version_byte = bytes([version])
        self._decoder = codec.new_decoder(kind)
        self._may_nest = _may_nest_deeply(kind)

    def encode(self, event: Any) -> bytes:
        """Encode and check an event. Fields that were assigned after construction are checked only
        here."""
        try:
            body = codec.pack_value(event) if self._may_nest else codec.pack(event)
            self._decoder.decode(body)
        except codec.ENCODE_ERRORS as error:
            raise Invalid(what="event", type=self.name, why=str(error)) from None
        if self._may_nest:
            codec.check_depth("event", body, type=self.name)
        if len(body) >= MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="event", type=self.name, bytes=len(body), bytes_max=MESSAGE_BYTES_MAX
            )
        return self._version_byte + body

    def decode(self, value: bytes) -> Any:
        try:
            if value[:1] == self._version_byte:
                return self._decoder.decode(memoryview(value)[1:])
            return self._upcast_body(value[0] if value else 0, value[1:])
        except codec.DECODE_ERRORS as error:
            raise Invalid(what="event", type=self.name, why=str(error)) from None

    def _upcast_body(self, version: int, body: bytes) -> Any:
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
        return codec.convert(fields, self.kind)


def _may_nest_deeply(kind: type[Any]) -> bool:
    """Whether values of a type may be nested without bound: the type is recursive, or contains
    Any."""

    def is_unbounded(here: Any, above: list[Any]) -> bool:
        if isinstance(here, types.AnyType | types.CustomType | types.RawType):
            return True
        if any(here is one for one in above):
            return True
        inner = [field.type for field in getattr(here, "fields", ())]
        inner += [one for name in ("types", "item_types") for one in getattr(here, name, ()) or ()]
        for name in ("item_type", "key_type", "value_type", "type"):
            one = getattr(here, name, None)
            inner += [one] if isinstance(one, types.Type) else []
        return any(is_unbounded(one, [*above, here]) for one in inner)

    return is_unbounded(types.type_info(kind), [])


class WorldDefinition:
    """The definition of one world type: state class, event types, handlers and history bound."""

    __slots__ = (
        "_decoder",
        "_may_nest",
        "_new_fields",
        "_shape",
        "declared_versions",
        "events",
        "handlers",
        "history",
        "shape",
        "state",
        "type",
        "version",
        "wants_mail_receipts",
    )

    def __init__(
        self,
        type: str,
        version: str,
        state: type[Any],
        events: Mapping[str, EventType],
        handlers: Mapping[Cause, Handler],
        history: HistoryBound | None = None,
        declared_causes: Iterable[Cause] = (),
    ) -> None:
        """A cause in `declared` without a handler is journaled and ignored."""
        self.type = type
        # How much history a world of this type keeps; None for all of it.
        self.history = history
        self.version = version
        self.state = state
        self.events = dict(events)
        self.handlers = dict(handlers)
        # Each declared cause, with the newest version that this code decodes. Receipts and inboxes
        # have no version.
        self.declared_versions: dict[Cause, int] = {
            cause: events[cause[1]].version if cause[0] == "event" else 0
            for cause in (*handlers, *declared_causes)
        }
        # A sender gets receipts for delivered mail if it handles or declares the receipts of mail.
        self.wants_mail_receipts = ("receipt", FABRIC_SEND) in self.declared_versions
        # The runtime sends this receipt itself for mail that it cannot deliver.
        self.declared_versions[("receipt", FABRIC_SEND)] = 0
        self._decoder = codec.new_decoder(state)
        # Whether the state may contain values of any type, including sets.
        self._may_nest = _may_nest_deeply(state)
        self._shape = StateShape(state)
        self.shape = self._shape.digest
        # Sets of new fields that explained digests of older code, the latest first.
        self._new_fields: tuple[frozenset[str], ...] = ()

    def initial_state(self) -> Any:
        try:
            made = self.state()
        except Exception as error:
            raise self._bad_state(error) from error
        return self.reload_state(made)

    def dump_state(self, state: Any) -> bytes:
        """Encode the state. Raise BadState if a reducer stored a value that cannot be encoded."""
        try:
            return codec.pack_value(state) if self._may_nest else codec.pack(state)
        except Exception as error:
            raise self._bad_state(error) from error

    def canonical_bytes(self, state: Any) -> bytes:
        """Encode the state after one encode and decode. Equal states have equal bytes in any
        process. Journal digests and snapshots use these bytes."""
        return self.dump_state(self.reload_state(state))

    def storable_bytes(self, state: Any) -> bytes:
        """Return the canonical bytes. Raise BadState if the state cannot be encoded or is too
        large."""
        return self.check_state_size(self.canonical_bytes(state))

    def check_state_size(self, packed: bytes) -> bytes:
        if len(packed) > STATE_BYTES_MAX:
            why = f"{len(packed):,} bytes; a state may have at most {STATE_BYTES_MAX:,}"
            raise BadState(what="state", type=self.type, why=why)
        return packed

    @property
    def code(self) -> str:
        """The name of this code, as workers declare it."""
        return code_name(self.version, self.shape)

    def has_shape_of(self, code: str) -> bool:
        """Whether the state of other code has the same fields, as far as the name of that code
        shows."""
        _, at, shape = code.rpartition(_SHAPE_SEPARATOR)
        return not at or shape == self.shape.hex()

    def matches_without_new_fields(self, state: Any, canonical: bytes, digest: bytes) -> bool:
        """Whether the digest matches the state without its new fields."""
        return self._find_new_fields(state, canonical, digest) is not None

    def bytes_without_new_fields(self, state: Any, canonical: bytes, digest: bytes) -> bytes | None:
        """Return the bytes that the digest was made of: the state without its new fields. None if
        the digest belongs to another state."""
        new = self._find_new_fields(state, canonical, digest)
        return None if new is None else new_fields.pack_without(canonical, new)

    def _find_new_fields(
        self, state: Any, canonical: bytes, digest: bytes
    ) -> frozenset[str] | None:
        for new in self._new_fields:
            if new_fields.are_new_fields(state, canonical, digest, new):
                return new
        found = new_fields.find_new_fields(state, canonical, digest)
        if found is not None:
            # The next digest was usually made by the same code.
            self._new_fields = (found, *self._new_fields)[:4]
        return found

    def reload_as_shape(self, state: Any, shape: bytes | None) -> Any:
        """Return the state as other code, with this shape of the state, loaded it after a snapshot. Fields that the
        other code lacks have their defaults, because that code dropped their values."""
        if not shape or shape == self.shape or self.state.__struct_config__.array_like:
            return self.reload_state(state)
        dropped = self._shape.fields_missing_in(shape)
        return (
            self.load_state(new_fields.pack_without(self.dump_state(state), dropped))
            if dropped
            else self.reload_state(state)
        )

    def reload_state(self, state: Any) -> Any:
        """Encode the state and decode it again. Raise BadState if that fails."""
        return self.load_state(self.dump_state(state))

    def load_state(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except Exception as error:
            raise self._bad_state(error) from error

    def _bad_state(self, error: Exception) -> HoldfastError:
        return BadState(what="state", type=self.type, why=f"{type(error).__name__}: {error}")

    def handler(self, ingress: Ingress) -> Handler | None:
        return self.handlers.get((_SIDE_BY_KIND[ingress.kind], ingress.type))

    def can_consume(self, ingress: Ingress) -> bool:
        """Whether this code may consume an ingress."""
        version = self.declared_versions.get((_SIDE_BY_KIND[ingress.kind], ingress.type))
        # The first byte of an event is its version.
        return version is not None and (not version or ingress.value[:1] <= _VERSION_BYTES[version])

    def handler_argument(self, ingress: Ingress) -> Any:
        """Return the handler's argument: the decoded event, or the stored receipt or mail."""
        if ingress.kind is IngressKind.RECEIPT or ingress.kind is IngressKind.INBOX:
            return ingress
        event = self.events.get(ingress.type)
        if event is None:
            raise Invalid(what="event", type=ingress.type, why="unknown to this code")
        return event.decode(ingress.value)
