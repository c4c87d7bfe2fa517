"""The half of `cx` that is about other worlds: where mail came from, and how it is sent.

What cannot be sent is Invalid here, in the reducer, where nothing has happened yet. What it became is
an intent like any other; where it goes from there is `fabric`'s and `publish`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import FABRIC_SEND, INBOX, FabricSendParams, Intent, WorldName
from holdfast.world import fabric
from holdfast.world.catalog import check_text
from holdfast.world.frame import (
    EffectCall,
    Frame,
    Vocabulary,
    is_undeclared,
    packed,
    packed_plain,
)
from holdfast.world.program import Cause


class Correspondence:
    """What `Context` is made of, besides the rest of it."""

    __slots__ = ()

    _frame: Frame
    _vocabulary: Vocabulary
    addressed: list[tuple[str, Cause]]

    if TYPE_CHECKING:

        def _asked(self, vocabulary: Any, *args: Any) -> Any: ...
        def _encode(self, event: Any) -> tuple[str, bytes]: ...
        def _admit(self, type: str, cause: Cause) -> None: ...
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

    # -- where it came from --------------------------------------------------------------------
    # Of anything but mail it is None. All of it is in the journal.

    @property
    def from_universe(self) -> str | None:
        cause = self._frame.cause
        if cause is None or cause.from_world is None:
            return None
        return cause.from_universe or self._frame.universe

    @property
    def from_world(self) -> str | None:
        """The id of the world that sent this; `cx.send_to` answers it."""
        return None if self._frame.cause is None else self._frame.cause.from_world

    @property
    def from_height(self) -> int | None:
        """The height of its journal at which it did."""
        return None if self._frame.cause is None else self._frame.cause.from_height

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._frame.cause is None else dict(self._frame.cause.headers)

    @property
    def message_id(self) -> bytes | None:
        cause = self._frame.cause
        if cause is None or cause.from_world is None:
            return None
        return cause.message_id or cause.intent_hash

    @property
    def correlation_id(self) -> str | None:
        """Handed on with everything that is wanted here."""
        return self._frame.correlation_id

    # -- where it goes -------------------------------------------------------------------------

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
        """Send an event to another world, of this universe or another; it is made if it is not there.

        A world class of another universe need not be known here: its name will do. Sent again under
        the same `message_id`, a message arrives once.
        """
        schema, value = self._encode(event)
        to = WorldName(self._type_of(world, universe), name)
        if not isinstance(world, str):
            # Code of another universe, known by name only, has events of its own.
            self._admit(to.type, ("event", schema))
        fields = {"schema": schema, "value_cbor": value}
        return self._mail(to, universe, _joined(headers, more_headers), message_id, fields)

    def send_to(
        self,
        world_id: str,
        event: Any,
        *,
        universe: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: bytes | str | None = None,
    ) -> Intent:
        """Send an event to a world by its id, as `cx.from_world` has it; it must be there.

        The event of this step fails if the world is of this universe and this code has its type, which
        does not know what is sent.
        """
        schema, value = self._encode(event)
        fields = {"schema": schema, "value_cbor": value}
        return self._mail(world_id, universe, _joined(headers, {}), message_id, fields)

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
        """Put plain data into a named inbox of another world: `@hf.on(hf.inbox(name))` there."""
        to = WorldName(self._type_of(world, universe), name)
        if not isinstance(world, str):
            self._admit(to.type, ("inbox", inbox))
        body = packed_plain("payload", payload)
        fields = {"mode": INBOX, "inbox": inbox, "payload_cbor": body}
        return self._mail(to, universe, _joined(headers, {}), message_id, fields)

    # -- inside --------------------------------------------------------------------------------

    def _type_of(self, world: Any, universe: str | None) -> str:
        if universe is None or universe == self._frame.universe:
            if self._frame.replay and isinstance(world, type):
                # This code may have dropped the world type since.
                return world.__name__
            found: str = self._asked(self._vocabulary.world_type, world)
            return found
        if not isinstance(world, str | type):
            raise Invalid(what="world", found=repr(world)[:64], why="neither a class nor its name")
        return world if isinstance(world, str) else world.__name__

    def _mail(
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
            dest_universe=None if universe == self._frame.universe else universe,
            dest_world=to,
            headers=headers,
            correlation_id=self._frame.correlation_id,
            message_id=message_id,
            **fields,
        )
        intent = self._emit(FABRIC_SEND, self._checked(mail))
        self._address(mail)
        return intent

    def _address(self, mail: FabricSendParams) -> None:
        if isinstance(mail.dest_world, str) and mail.dest_universe in (None, self._frame.universe):
            cause = ("inbox" if mail.mode == INBOX else "event", mail.body()[0])
            self.addressed.append((mail.dest_world, cause))

    def _send(self, call: EffectCall, tag: str) -> Intent:
        """Mail as an effect: whatever the user has put together."""
        mail = codec.unpack_as(FabricSendParams, call.params)
        if mail.correlation_id is None:
            mail = replace(mail, correlation_id=self._frame.correlation_id)
        params = self._checked(mail)
        if mail.payload_cbor is not None:
            codec.unpack(mail.payload_cbor)
        if mail.dest_universe in (None, self._frame.universe):
            if self._frame.replay:
                try:
                    self._vocabulary.check_mail(mail)
                except Invalid as error:
                    if not is_undeclared(error):
                        raise
            else:
                self._asked(self._vocabulary.check_mail, mail)
        intent = self._emit(FABRIC_SEND, params, priority=call.priority, tag=tag, key=call.key)
        self._address(mail)
        return intent

    def _checked(self, mail: FabricSendParams) -> bytes:
        """Mail that cannot be sent is Invalid here, where nothing has happened yet."""
        params = packed(mail)
        fabric.check(mail, self._frame.universe)
        return params


def _joined(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    if not headers:
        return dict(more)
    if not isinstance(headers, Mapping):
        raise Invalid(what="headers", why="not a mapping", found=type(headers).__name__)
    twice = sorted(headers.keys() & more.keys())
    if twice:
        raise Invalid(what="headers", why="given twice", found=twice)
    return {**headers, **more}
