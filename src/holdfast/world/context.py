"""What a reducer sees besides its state and the event.

Everything here comes from the journal entry that is being made or repeated, so a replay gives the
same answers: the time, the random numbers, and the identities of what is emitted.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.config import (
    CYCLE_BYTES_MAX,
    EMISSIONS_MAX,
    MESSAGE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
    TTL_NS_MAX,
)
from holdfast.durable.bounds import check_time
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.messages import (
    EFFECT_CANCEL,
    FABRIC_SEND,
    INBOX,
    TIMER_CANCEL,
    TIMER_SET,
    FabricSendParams,
    Ingress,
    Intent,
    TimerSet,
    WorldName,
    intent_hash,
)
from holdfast.world import every, fabric
from holdfast.world.catalog import check_text


class Vocabulary(Protocol):
    """How an application names its events, worlds and effects."""

    def encode_event(self, event: Any) -> tuple[str, bytes]: ...
    def world_type(self, kind: Any) -> str: ...
    def effect_call(self, effect: Any, args: tuple[Any, ...]) -> EffectCall: ...

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
    # Whether this world handles receipts of its mail.
    mail_answered: bool = False
    # What is being reacted to.
    cause: Ingress | None = None


class Context:
    """`cx`: given to every handler. What it emits is durable with the entry, or not at all."""

    __slots__ = ("_frame", "_random", "_uuids", "_vocabulary", "intents", "replied", "wanted_bytes")

    def __init__(self, frame: Frame, vocabulary: Vocabulary) -> None:
        self._frame = frame
        self._vocabulary = vocabulary
        self._random: random.Random | None = None
        self._uuids = 0
        self.intents: list[Intent] = []
        self.wanted_bytes = 0
        self.replied: bytes | None = None

    # -- what is given -------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The wall clock when the entry was made."""
        return datetime.fromtimestamp(self._frame.wall_ns / 1e9, UTC)

    @property
    def now_ns(self) -> int:
        return self._frame.wall_ns

    @property
    def height(self) -> int:
        return self._frame.height

    @property
    def name(self) -> str:
        return self._frame.name

    @property
    def world_id(self) -> str:
        return self._frame.world_id

    # Of mail, where it came from; of anything else, None. All of it is in the journal.

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

    @property
    def random(self) -> random.Random:
        if self._random is None:
            self._random = random.Random(self._frame.entropy)
        return self._random

    def uuid(self) -> uuid.UUID:
        self._uuids += 1
        raw = codec.digest(self._frame.entropy, self._uuids.to_bytes(8, "big"))[:16]
        return uuid.UUID(bytes=raw, version=4)

    # -- what is wanted ------------------------------------------------------------------------

    def do(self, effect: Any, *args: Any, tag: str | None = None) -> Intent:
        """Want an effect. Its receipt comes back to the handler of the effect."""
        call = self._vocabulary.effect_call(effect, args)
        if call.kind == FABRIC_SEND:
            return self._send(call, call.tag if tag is None else tag)
        return self._emit(
            call.kind,
            call.params,
            priority=call.priority,
            timeout_ns=call.timeout_ns,
            tag=call.tag if tag is None else tag,
            key=call.key,
        )

    def cancel(self, intent: Intent | bytes) -> Intent:
        """Stop wanting an effect, by its intent or its `intent_hash`.

        If nobody is doing it, its receipt is the error `cancelled`; else it ends as it ends.
        """
        return self._emit(
            EFFECT_CANCEL, intent if isinstance(intent, bytes) else intent.intent_hash
        )

    def after(self, seconds: float, event: Any, *, key: str | None = None) -> Intent:
        """Deliver an event to this world after a time. The key is a slot: setting it replaces."""
        longest = TTL_NS_MAX // S
        if type(seconds) not in (int, float) or not 0 <= seconds <= longest:
            raise Invalid(
                what="after", found=repr(seconds)[:64], expected=f"seconds, 0 to {longest}"
            )
        return self._set_timer(event, key, delay_ns=int(seconds * S))

    def at(self, when: datetime, event: Any, *, key: str | None = None) -> Intent:
        """Deliver an event when the clock on the wall shows this time; at once if it has."""
        return self._set_timer(event, key, wall_ns=_wall_ns(when))

    def every(
        self,
        cron: str,
        event: Any,
        *,
        key: str | None = None,
        missed: str = "one",
        zone: str = "UTC",
    ) -> Intent:
        """Deliver an event whenever a rule in five fields says so, until its key is cancelled.

        `missed` says what becomes of times at which nothing ran: `skip`, `one` for all, or `all`.
        """
        every.check(cron, missed, zone)
        return self._set_timer(event, key, cron=cron, missed=missed, zone=zone)

    def cancel_timer(self, key: str) -> Intent:
        check_text("timer key", key)
        return self._emit(TIMER_CANCEL, codec.pack(key))

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
        schema, value = self._vocabulary.encode_event(event)
        to = WorldName(self._type_of(world, universe), name)
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
        """Send an event to a world by its id, as `cx.from_world` has it; it must be there."""
        schema, value = self._vocabulary.encode_event(event)
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
        packed = _plain("payload", payload)
        fields = {"mode": INBOX, "inbox": inbox, "payload_cbor": packed}
        return self._mail(to, universe, _joined(headers, {}), message_id, fields)

    def reply(self, value: Any) -> None:
        """Answer whoever asks. The last reply counts."""
        packed = _plain("reply", value)
        _check_size("reply", packed)
        self.replied = packed

    # -- inside --------------------------------------------------------------------------------

    def _set_timer(self, event: Any, key: str | None, **when: Any) -> Intent:
        type, value = self._vocabulary.encode_event(event)
        if key is not None:
            check_text("timer key", key)
        slot = key if key is not None else f"@{self._frame.height}.{len(self.intents)}"
        return self._emit(TIMER_SET, _packed(TimerSet(slot, type, value, **when)))

    def _type_of(self, world: Any, universe: str | None) -> str:
        if universe is None or universe == self._frame.universe:
            return self._vocabulary.world_type(world)
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
            message_id = codec.digest(b"message", message_id.encode())
        mail = FabricSendParams(
            dest_universe=None if universe == self._frame.universe else universe,
            dest_world=to,
            headers=headers,
            correlation_id=self._frame.correlation_id,
            message_id=message_id,
            **fields,
        )
        return self._emit(FABRIC_SEND, self._checked(mail))

    def _send(self, call: EffectCall, tag: str) -> Intent:
        """Mail as an effect: whatever the user has put together."""
        mail = codec.unpack_as(FabricSendParams, call.params)
        if mail.correlation_id is None:
            mail = replace(mail, correlation_id=self._frame.correlation_id)
        params = self._checked(mail)
        if mail.dest_universe in (None, self._frame.universe):
            self._vocabulary.check_mail(mail)
        return self._emit(FABRIC_SEND, params, priority=call.priority, tag=tag, key=call.key)

    def _checked(self, mail: FabricSendParams) -> bytes:
        """Mail that cannot be sent is Invalid here, where nothing has happened yet."""
        params = _packed(mail)
        fabric.check(mail, self._frame.universe)
        return params

    def _emit(
        self,
        kind: str,
        params: bytes,
        *,
        priority: int = 0,
        timeout_ns: int = 0,
        tag: str = "",
        key: str | None = None,
    ) -> Intent:
        if len(self.intents) >= EMISSIONS_MAX:
            raise Invalid(what="intents", why="too many of one event", max=EMISSIONS_MAX)
        _check_size("parameters", params)
        self.wanted_bytes += len(params)
        if self.wanted_bytes > CYCLE_BYTES_MAX:
            raise ValueTooLarge(
                what="intents of one event", bytes=self.wanted_bytes, bytes_max=CYCLE_BYTES_MAX
            )
        if key is not None:
            check_text("key", key)
        if type(priority) is not int or abs(priority) > QUEUE_PRIORITY_MAX:
            raise Invalid(what="priority", found=repr(priority)[:64], max=QUEUE_PRIORITY_MAX)
        frame = self._frame
        place = (frame.height, len(self.intents)) if key is None else key
        intent = Intent(
            frame.universe,
            frame.world_id,
            intent_hash(frame.generation, frame.world_id, place),
            kind,
            params,
            frame.name,
            b"",
            frame.wall_ns,
            priority,
            timeout_ns,
            tag,
            key,
            frame.correlation_id,
            frame.height,
            frame.generation,
            answered=kind != FABRIC_SEND or frame.mail_answered,
        )
        _packed(intent)
        self.intents.append(intent)
        return intent


def _joined(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    if not headers:
        return dict(more)
    if not isinstance(headers, Mapping):
        raise Invalid(what="headers", why="not a mapping", found=type(headers).__name__)
    twice = sorted(headers.keys() & more.keys())
    if twice:
        raise Invalid(what="headers", why="given twice", found=twice)
    return {**headers, **more}


def _plain(what: str, value: Any) -> bytes:
    try:
        return codec.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what=what, why=str(error)) from None


def _packed(record: codec.Record) -> bytes:
    """The record's bytes, checked: what is wrong must fail here, not at the commit."""
    try:
        packed = codec.pack(record)
    except (TypeError, ValueError, OverflowError) as error:
        raise Invalid(what=type(record).__name__, why=str(error)) from None
    codec.unpack_as(type(record), packed)
    return packed


def _wall_ns(when: datetime) -> int:
    """A time as nanoseconds of the calendar, exactly: a float of seconds would be off, and early."""
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise Invalid(what="at", found=str(when)[:64], expected="a datetime with its zone")
    since = when - _EPOCH
    wall_ns = ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1_000
    check_time("at", wall_ns)
    return wall_ns


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _check_size(what: str, packed: bytes) -> None:
    if len(packed) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what=what, bytes=len(packed), bytes_max=MESSAGE_BYTES_MAX)
