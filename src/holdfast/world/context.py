"""What a reducer sees besides its state and the event.

Everything here comes from the journal entry that is being made or repeated, so a replay gives the
same answers: the time, the random numbers, and the identities of what is emitted. What is about
other worlds is in `mail`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

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
from holdfast.durable.bounds import check_time
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
from holdfast.world import every
from holdfast.world.catalog import check_text
from holdfast.world.frame import EffectCall, Frame, Vocabulary, is_undeclared, packed, packed_plain
from holdfast.world.mail import Correspondence
from holdfast.world.program import Cause

__all__ = ["Context", "EffectCall", "Frame", "Vocabulary"]

P = ParamSpec("P")
T = TypeVar("T")


class ContextEnded(Invalid):
    """A context was used after the handler that it was given to."""

    code = "context_ended"
    hint = "use cx in the handler that is given it, and keep it in no other place or thread"


class Context(Correspondence):
    """`cx`: given to every handler. What it emits is durable with the entry, or not at all."""

    __slots__ = (
        "_ended",
        "_frame",
        "_random",
        "_uuids",
        "_vocabulary",
        "addressed",
        "intents",
        "refusal",
        "replied",
        "wanted_bytes",
    )

    def __init__(self, frame: Frame, vocabulary: Vocabulary) -> None:
        self._frame = frame
        self._ended = False
        self._vocabulary = vocabulary
        self._random: random.Random | None = None
        self._uuids = 0
        self.intents: list[Intent] = []
        self.wanted_bytes = 0
        self.replied: bytes | None = None
        # Mail by world id: the host looks up the types and refuses what this code does not handle there.
        self.addressed: list[tuple[str, Cause]] = []
        # What this code does not know was wanted: the event fails.
        self.refusal: Invalid | None = None

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
        self._admit(self._frame.type, ("receipt", call.kind))
        return self._emit(
            call.kind,
            call.params,
            priority=call.priority,
            timeout_ns=call.timeout_ns,
            tag=call.tag if tag is None else tag,
            key=call.key,
            policy=call.policy,
        )

    def cancel(self, intent: Intent | bytes) -> Intent:
        """Stop wanting an effect, by its intent or its `intent_hash`.

        Its receipt is the error `cancelled`, at once. If it is being done, it is stopped as well as
        that can be; it may have happened. What has had its receipt stays as it is.
        """
        wanted = intent.intent_hash if isinstance(intent, Intent) else intent
        if type(wanted) is not bytes:
            raise Invalid(what="cancel", found=repr(intent)[:64], expected="an intent, or its hash")
        return self._emit(EFFECT_CANCEL, wanted)

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

    def reply(self, value: Any) -> None:
        """Answer whoever asks. The last reply counts."""
        self._require_step("reply")
        reply = packed_plain("reply", value)
        _check_size("reply", reply)
        self.replied = reply

    def end(self) -> None:
        """The handler has returned: what is wanted from now on would be in no entry."""
        self._ended = True

    # -- inside --------------------------------------------------------------------------------

    def _require_step(self, what: str) -> None:
        if self._ended:
            raise ContextEnded(what=what, world=self._frame.name, height=self._frame.height)

    def _set_timer(self, event: Any, key: str | None, **when: Any) -> Intent:
        type, value = self._encode(event)
        self._admit(self._frame.type, ("event", type))
        if key is not None:
            check_text("timer key", key)
            if key.startswith("@"):
                raise Invalid(what="timer key", found=key[:64], why="@ is for timers without a key")
        slot = key if key is not None else f"@{self._frame.height}.{len(self.intents)}"
        return self._emit(TIMER_SET, packed(TimerSet(slot, type, value, **when)))

    def _encode(self, event: Any) -> tuple[str, bytes]:
        if self._frame.replay:
            return self._vocabulary.encode_again(event)
        return self._asked(self._vocabulary.encode_event, event)

    def _admit(self, type: str, cause: Cause) -> None:
        """Refuse what a world type of this code does not know: it would wait for other code."""
        if not self._frame.replay:
            self._asked(self._vocabulary.check_known, type, cause)

    def _asked(self, vocabulary: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The vocabulary's answer. A refusal fails the event, though its reducer may catch the error."""
        try:
            return vocabulary(*args, **kwargs)
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
    ) -> Intent:
        self._require_step(kind)
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
        if tag:
            check_text("tag", tag, TAG_BYTES_MAX)
        if type(priority) is not int or abs(priority) > QUEUE_PRIORITY_MAX:
            raise Invalid(what="priority", found=repr(priority)[:64], max=QUEUE_PRIORITY_MAX)
        frame = self._frame
        index = len(self.intents)
        if key is None:
            identity = intent_hash(frame.generation, frame.world_id, (frame.height, index))
        else:
            identity = keyed_hash(frame.world_id, key)
        intent = Intent(
            frame.universe,
            frame.world_id,
            identity,
            kind,
            params,
            frame.name,
            policy,
            frame.wall_ns,
            priority,
            timeout_ns,
            tag,
            key,
            frame.correlation_id,
            frame.height,
            frame.generation,
            answered=kind != FABRIC_SEND or frame.mail_answered,
            index=index,
        )
        packed(intent)
        self.intents.append(intent)
        return intent


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
