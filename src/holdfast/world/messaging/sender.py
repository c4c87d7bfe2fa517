"""The messaging half of `cx`: the sender of the current mail, and sending mail to other worlds.

Mail that cannot be sent raises Invalid in the reducer, before any effect. Valid mail becomes an
intent. The modules `messaging.delivery` and `intents` deliver it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import FABRIC_SEND, INBOX, FabricSendParams, Intent, WorldName
from holdfast.world.catalog import check_text
from holdfast.world.definition import Cause
from holdfast.world.messaging import delivery
from holdfast.world.step_inputs import (
    EffectCall,
    ReducerInputs,
    TypeRegistry,
    is_undeclared,
    pack_checked,
    pack_plain,
)


class MessagingContext:
    """The base class of `Context` with the methods about other worlds."""

    __slots__ = ()

    _inputs: ReducerInputs
    _registry: TypeRegistry
    addressed: list[tuple[str, Cause]]

    if TYPE_CHECKING:

        def _call_registry(self, method: Any, *args: Any) -> Any: ...
        def _encode(self, event: Any) -> tuple[str, bytes]: ...
        def _require_declared(self, type: str, cause: Cause) -> None: ...
        def _emit(
            self,
            kind: str,
            params: bytes,
            *,
            priority: int = 0,
            timeout_ns: int = 0,
            tag: str = "",
            key: str | None = None,
            policy: bytes = b"",
        ) -> Intent: ...

    # -- the sender of the current mail --------------------------------------------------------
    # None unless the ingress is mail. All values are in the journal.

    @property
    def from_universe(self) -> str | None:
        cause = self._inputs.cause
        if cause is None or cause.from_world is None:
            return None
        return cause.from_universe or self._inputs.universe

    @property
    def from_world(self) -> str | None:
        """The id of the sending world. `cx.send_to` replies to it."""
        return None if self._inputs.cause is None else self._inputs.cause.from_world

    @property
    def from_height(self) -> int | None:
        """The height of the sender's journal at which it sent this mail."""
        return None if self._inputs.cause is None else self._inputs.cause.from_height

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._inputs.cause is None else dict(self._inputs.cause.headers)

    @property
    def message_id(self) -> bytes | None:
        cause = self._inputs.cause
        if cause is None or cause.from_world is None:
            return None
        return cause.message_id or cause.intent_hash

    @property
    def correlation_id(self) -> str | None:
        """The correlation id of the ingress. All intents of this step inherit it."""
        return self._inputs.correlation_id

    # -- sending -------------------------------------------------------------------------------

    def send(
        self,
        world: Any,
        name: str,
        event: Any,
        *,
        universe: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: bytes | str | None = None,
        **more_headers: str,
    ) -> Intent:
        """Send an event to another world of this or another universe. The world is created if it
        does not exist.

        A world class of another universe may be given by its name. Messages with the same
        `message_id` are delivered once.
        """
        schema, value = self._encode(event)
        to = WorldName(self._type_of(world, universe), name)
        if not isinstance(world, str):
            # Code of another universe declares its own events, so a world given by name is not
            # checked.
            self._require_declared(to.type, ("event", schema))
        fields = {"schema": schema, "value_cbor": value}
        return self._emit_mail(
            to, universe, _merge_headers(headers, more_headers), message_id, fields
        )

    def send_to(
        self,
        world_id: str,
        event: Any,
        *,
        universe: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: bytes | str | None = None,
    ) -> Intent:
        """Send an event to a world by its id, for example `cx.from_world`. The world must exist.

        The current event fails if the destination is in this universe, this code has its world
        type, and that type does not declare the sent event.
        """
        schema, value = self._encode(event)
        fields = {"schema": schema, "value_cbor": value}
        return self._emit_mail(world_id, universe, _merge_headers(headers, {}), message_id, fields)

    def post(
        self,
        world: Any,
        name: str,
        inbox: str,
        payload: Any,
        *,
        universe: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: bytes | str | None = None,
    ) -> Intent:
        """Send plain data to a named inbox of another world, handled there by
        `@hf.on(hf.inbox(name))`."""
        to = WorldName(self._type_of(world, universe), name)
        if not isinstance(world, str):
            self._require_declared(to.type, ("inbox", inbox))
        body = pack_plain("payload", payload)
        fields = {"mode": INBOX, "inbox": inbox, "payload_cbor": body}
        return self._emit_mail(to, universe, _merge_headers(headers, {}), message_id, fields)

    # -- inside --------------------------------------------------------------------------------

    def _type_of(self, world: Any, universe: str | None) -> str:
        if universe is None or universe == self._inputs.universe:
            if self._inputs.replay and isinstance(world, type):
                # This code may no longer declare the world type.
                return world.__name__
            world_type: str = self._call_registry(self._registry.world_type, world)
            return world_type
        if not isinstance(world, str | type):
            raise Invalid(what="world", found=repr(world)[:64], why="neither a class nor its name")
        return world if isinstance(world, str) else world.__name__

    def _emit_mail(
        self,
        to: str | WorldName,
        universe: str | None,
        headers: dict[str, str],
        message_id: bytes | str | None,
        fields: dict[str, Any],
    ) -> Intent:
        if isinstance(message_id, str):
            check_text("message_id", message_id)
            message_id = codec.digest(b"message", message_id.encode())
        mail = FabricSendParams(
            dest_universe=None if universe == self._inputs.universe else universe,
            dest_world=to,
            headers=headers,
            correlation_id=self._inputs.correlation_id,
            message_id=message_id,
            **fields,
        )
        intent = self._emit(FABRIC_SEND, self._pack_mail(mail))
        self._record_recipient(mail)
        return intent

    def _record_recipient(self, mail: FabricSendParams) -> None:
        if isinstance(mail.dest_world, str) and mail.dest_universe in (None, self._inputs.universe):
            cause = ("inbox" if mail.mode == INBOX else "event", mail.body()[0])
            self.addressed.append((mail.dest_world, cause))

    def _send_params(self, call: EffectCall, tag: str) -> Intent:
        """Send mail that the user built as an effect call."""
        mail = codec.unpack_as(FabricSendParams, call.params)
        if mail.correlation_id is None:
            mail = replace(mail, correlation_id=self._inputs.correlation_id)
        params = self._pack_mail(mail)
        if mail.payload_cbor is not None:
            codec.unpack(mail.payload_cbor)
        if mail.dest_universe in (None, self._inputs.universe):
            if self._inputs.replay:
                try:
                    self._registry.check_mail(mail)
                except Invalid as error:
                    if not is_undeclared(error):
                        raise
            else:
                self._call_registry(self._registry.check_mail, mail)
        intent = self._emit(FABRIC_SEND, params, priority=call.priority, tag=tag, key=call.key)
        self._record_recipient(mail)
        return intent

    def _pack_mail(self, mail: FabricSendParams) -> bytes:
        """Check and pack mail. Mail that cannot be sent raises Invalid before any effect."""
        params = pack_checked(mail)
        delivery.check_sendable(mail, self._inputs.universe)
        return params


def _merge_headers(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    if not headers:
        return dict(more)
    if not isinstance(headers, Mapping):
        raise Invalid(what="headers", why="not a mapping", found=type(headers).__name__)
    duplicates = sorted(headers.keys() & more.keys())
    if duplicates:
        raise Invalid(what="headers", why="given twice", found=duplicates)
    return {**headers, **more}
