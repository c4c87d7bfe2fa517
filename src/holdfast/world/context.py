"""The reducer context `cx`: the inputs of a handler besides its state and event, and its intents.

All values derive from the journal entry of the step: the time, the random numbers, and the
identities of intents. So a replay returns the same values. The methods about other worlds are in
`messaging.sender`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar, overload

from holdfast import codec
from holdfast.clock import S
from holdfast.config import (
    CYCLE_BYTES_MAX,
    EMISSIONS_MAX,
    MESSAGE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
    TAG_BYTES_MAX,
    TTL_NS_MAX,
)
from holdfast.durable.validation import check_time
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.messages import (
    EFFECT_CANCEL,
    FABRIC_SEND,
    TIMER_CANCEL,
    TIMER_SET,
    Intent,
    TimerSet,
    intent_hash,
    keyed_hash,
)
from holdfast.world import recurring_timers
from holdfast.world.catalog import check_text
from holdfast.world.definition import Cause
from holdfast.world.messaging.sender import MessagingContext
from holdfast.world.step_inputs import (
    EffectCall,
    ReducerInputs,
    RequestableEffect,
    StartableFlow,
    TypeRegistry,
    is_undeclared,
    pack_checked,
    pack_plain,
)

__all__ = ["Context", "EffectCall", "ReducerInputs", "TypeRegistry"]

P = ParamSpec("P")
T = TypeVar("T")


class ContextEnded(Invalid):
    """A handler's context was used after the handler had returned."""

    code = "context_ended"
    hint = "use cx only while its handler runs; do not store it or pass it to another thread"


class Context(MessagingContext):
    """`cx`, the argument of every handler. Its intents become durable with the journal entry, or
    are dropped with it."""

    __slots__ = (
        "_ended",
        "_inputs",
        "_random",
        "_registry",
        "_uuids",
        "addressed",
        "intents",
        "refusal",
        "replied",
        "wanted_bytes",
    )

    def __init__(self, inputs: ReducerInputs, registry: TypeRegistry) -> None:
        self._inputs = inputs
        self._ended = False
        self._registry = registry
        self._random: random.Random | None = None
        self._uuids = 0
        self.intents: list[Intent] = []
        self.wanted_bytes = 0
        self.replied: bytes | None = None
        # Mail by world id: the host reads the types of these worlds and rejects causes that they do
        # not declare.
        self.addressed: list[tuple[str, Cause]] = []
        # The error of a request for an undeclared type. It fails the event.
        self.refusal: Invalid | None = None

    # -- inputs --------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The wall clock time at which the entry was made."""
        return datetime.fromtimestamp(self._inputs.wall_ns / 1e9, UTC)

    @property
    def now_ns(self) -> int:
        return self._inputs.wall_ns

    @property
    def height(self) -> int:
        return self._inputs.height

    @property
    def name(self) -> str:
        return self._inputs.name

    @property
    def world_id(self) -> str:
        return self._inputs.world_id

    @property
    def random(self) -> random.Random:
        if self._random is None:
            self._random = random.Random(self._inputs.entropy)
        return self._random

    def uuid(self) -> uuid.UUID:
        self._uuids += 1
        raw = codec.digest(self._inputs.entropy, self._uuids.to_bytes(8, "big"))[:16]
        return uuid.UUID(bytes=raw, version=4)

    # -- intents -------------------------------------------------------------------------------

    @overload
    def do(
        self, effect: RequestableEffect[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Intent: ...
    @overload
    def do(
        self, effect: RequestableEffect[..., Any], /, *args: Any, tag: str | None, **kwargs: Any
    ) -> Intent: ...

    def do(self, effect: Any, /, *args: Any, tag: Any = None, **kwargs: Any) -> Intent:
        """Request an effect. The handler of the effect gets its receipt. Type checkers know the arguments of a call
        without `tag=`, and of `effect.options(tag=…)`."""
        call = self._registry.effect_call(effect, args, kwargs)
        if call.kind == FABRIC_SEND:
            return self._send_params(call, call.tag if tag is None else tag)
        self._require_declared(self._inputs.type, ("receipt", call.kind))
        return self._emit(
            call.kind,
            call.params,
            priority=call.priority,
            timeout_ns=call.timeout_ns,
            tag=call.tag if tag is None else tag,
            key=call.key,
            policy=call.policy,
        )

    def start(self, flow: StartableFlow[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Intent:
        """Start a flow in the commit of this entry. The handler of the flow gets its end as a receipt. A key of
        `flow.options(key=…)` belongs to this world."""
        call = self._registry.flow_call(flow, args, kwargs)
        self._require_declared(self._inputs.type, ("receipt", call.kind))
        return self._emit(
            call.kind, call.params, tag=call.tag, key=call.key, flow_spec=call.flow_spec
        )

    def cancel(self, intent: Intent | bytes) -> Intent:
        """Cancel an effect or a started flow, by its intent or its `intent_hash`.

        The world gets a receipt with the error `cancelled` immediately. A running effect is stopped
        if possible, but it may have happened. An effect that already has its receipt is not
        affected.
        """
        cancelled_hash = intent.intent_hash if isinstance(intent, Intent) else intent
        if type(cancelled_hash) is not bytes:
            raise Invalid(what="cancel", found=repr(intent)[:64], expected="an intent, or its hash")
        return self._emit(EFFECT_CANCEL, cancelled_hash)

    def after(self, seconds: float, event: Any, *, key: str | None = None) -> Intent:
        """Deliver an event to this world after a delay. Setting a timer with the same key replaces
        it."""
        longest = TTL_NS_MAX // S
        if type(seconds) not in (int, float) or not 0 <= seconds <= longest:
            raise Invalid(
                what="after", found=repr(seconds)[:64], expected=f"seconds, 0 to {longest}"
            )
        return self._set_timer(event, key, delay_ns=int(seconds * S))

    def at(self, when: datetime, event: Any, *, key: str | None = None) -> Intent:
        """Deliver an event when the wall clock reaches this time, or immediately if the time has
        passed."""
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
        """Deliver an event at every time that a cron rule with five fields matches, until its key
        is cancelled.

        `missed` is the policy for times at which no worker ran: `skip` delivers none of them, `one`
        delivers a single event for all of them, `all` delivers each.
        """
        recurring_timers.check_rule(cron, missed, zone)
        return self._set_timer(event, key, cron=cron, missed=missed, zone=zone)

    def cancel_timer(self, key: str) -> Intent:
        check_text("timer key", key)
        return self._emit(TIMER_CANCEL, codec.pack(key))

    def reply(self, value: Any) -> None:
        """Set the reply for the client that awaits this event. The last reply counts."""
        self._require_open("reply")
        reply = pack_plain("reply", value)
        _check_message_size("reply", reply)
        self.replied = reply

    def end(self) -> None:
        """End the context after its handler has returned. Later intents would belong to no entry
        and are refused."""
        self._ended = True

    # -- inside --------------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if self._ended:
            raise ContextEnded(what=what, world=self._inputs.name, height=self._inputs.height)

    def _set_timer(self, event: Any, key: str | None, **when: Any) -> Intent:
        type, value = self._encode(event)
        self._require_declared(self._inputs.type, ("event", type))
        if key is not None:
            check_text("timer key", key)
            if key.startswith("@"):
                raise Invalid(what="timer key", found=key[:64], why="@ is for timers without a key")
        slot = key if key is not None else f"@{self._inputs.height}.{len(self.intents)}"
        return self._emit(TIMER_SET, pack_checked(TimerSet(slot, type, value, **when)))

    def _encode(self, event: Any) -> tuple[str, bytes]:
        if self._inputs.replay:
            return self._registry.encode_again(event)
        return self._call_registry(self._registry.encode_event, event)

    def _require_declared(self, type: str, cause: Cause) -> None:
        """Refuse a cause that a world type of this code does not declare: it would wait for other
        code."""
        if not self._inputs.replay:
            self._call_registry(self._registry.check_known, type, cause)

    def _call_registry(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the type registry. An undeclared type fails the event even if the
        reducer catches the error."""
        try:
            return method(*args, **kwargs)
        except Invalid as error:
            if is_undeclared(error):
                self.refusal = error
            raise

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
        flow_spec: bytes = b"",
    ) -> Intent:
        self._require_open(kind)
        if len(self.intents) >= EMISSIONS_MAX:
            raise Invalid(what="intents", why="too many of one event", max=EMISSIONS_MAX)
        _check_message_size("parameters", params)
        self.wanted_bytes += len(params)
        if self.wanted_bytes > CYCLE_BYTES_MAX:
            raise ValueTooLarge(
                what="intents of one event", bytes=self.wanted_bytes, bytes_max=CYCLE_BYTES_MAX
            )
        if key is not None:
            check_text("key", key)
        if tag:
            check_text("tag", tag, TAG_BYTES_MAX)
        if type(priority) is not int or abs(priority) > QUEUE_PRIORITY_MAX:
            raise Invalid(what="priority", found=repr(priority)[:64], max=QUEUE_PRIORITY_MAX)
        frame = self._inputs
        index = len(self.intents)
        if key is None:
            identity = intent_hash(frame.generation, frame.world_id, (frame.height, index))
        else:
            identity = keyed_hash(frame.world_id, key)
        intent = Intent(
            universe_id=frame.universe,
            world_id=frame.world_id,
            intent_hash=identity,
            effect_kind=kind,
            params=params,
            origin_name=frame.name,
            policy_context_hash=policy,
            enqueued_at_ns=frame.wall_ns,
            priority=priority,
            timeout_ns=timeout_ns,
            tag=tag,
            key=key,
            correlation_id=frame.correlation_id,
            from_height=frame.height,
            generation=frame.generation,
            wants_receipt=kind != FABRIC_SEND or frame.wants_mail_receipts,
            index=index,
            flow_spec=flow_spec,
        )
        pack_checked(intent)
        self.intents.append(intent)
        return intent


def _wall_ns(when: datetime) -> int:
    """Convert a time to exact nanoseconds since the epoch. A float of seconds is inexact and could
    be too early."""
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise Invalid(what="at", found=str(when)[:64], expected="a datetime with its zone")
    since = when - _EPOCH
    wall_ns = ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1_000
    check_time("at", wall_ns)
    return wall_ns


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _check_message_size(what: str, packed: bytes) -> None:
    if len(packed) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what=what, bytes=len(packed), bytes_max=MESSAGE_BYTES_MAX)
