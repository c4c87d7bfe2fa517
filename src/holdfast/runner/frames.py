"""`LMSG` and `LINT` v0: binary frames of messages and intents from external producers.

Little-endian, no padding. Both headers begin with the same 16 bytes:

    offset  size  field            rule
         0     4  magic            `LMSG` or `LINT`
         4     2  major            u16, 0
         6     2  minor            u16, 0
         8     4  frame_len        u32, the whole frame, at most FRAME_BYTES_MAX
        12     1  kind             u8, `Kind` or `IntentKind`
        13     1  flags            u8, `Flag` or `IntentFlag`
        14     2  reserved         u16, 0

LMSG, a 60-byte header, then the message id, the trace and the payload:

        16     8  to_worker        s64
        24     8  route_worker     s64
        32     8  route_timestamp  s64
        40     8  from_worker      s64, 0 without HAS_FROM
        48     4  message_id_len   u32, at least 1
        52     4  trace_len        u32, FFFFFFFF exactly when HAS_TRACE is unset
        56     4  payload_len      u32
        60     …  message_id, trace, payload

LINT, a 28-byte header, then one LMSG:

        16     8  due_ts           s64; an emit has none (0), a timer-arm must have one (HAS_DUE)
        24     4  message_len      u32
        28     …  message

Invariants: a value has exactly one frame and a frame at most one value, so a decoded frame encodes to
the same bytes. A frame is rejected as a whole. Every rejection is a `FrameError` with field, offset (from
the first input byte), found and expected.

An empty trace differs from an absent trace, and worker 0 differs from an absent sender. Presence
therefore has separate flags.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, TypeVar

from holdfast.errors import Invalid

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024

_MESSAGE_MAGIC: Final = b"LMSG"
_MESSAGE_HEADER: Final = struct.Struct("<4sHHIBBHqqqqIII")
_INTENT_MAGIC: Final = b"LINT"
_INTENT_HEADER: Final = struct.Struct("<4sHHIBBHqI")

_MAJOR: Final = 0
_MINOR: Final = 0
_RESERVED: Final = 0
_FROM_ABSENT: Final = 0
_TRACE_ABSENT: Final = 0xFFFFFFFF
_DUE_ABSENT: Final = 0

_OFFSETS: Final = {
    "magic": 0,
    "major": 4,
    "minor": 6,
    "frame_len": 8,
    "kind": 12,
    "flags": 13,
    "reserved": 14,
    # LMSG
    "to_worker": 16,
    "route_worker": 24,
    "route_timestamp": 32,
    "from_worker": 40,
    "message_id_len": 48,
    "trace_len": 52,
    "payload_len": 56,
    # LINT
    "due_ts": 16,
    "message_len": 24,
}


class FrameError(Invalid):
    code = "frame"


class MessageKind(IntEnum):
    COMMAND = 0
    EVENT = 1
    TIMER = 2


class MessageFlag(IntFlag):
    NONE = 0x00
    DURABLE = 0x01
    HIGH_PRIORITY = 0x02
    DEDUPE_REQUIRED = 0x04
    REQUIRES_ACK = 0x08
    HAS_FROM = 0x10
    HAS_TRACE = 0x20


class IntentKind(IntEnum):
    EMIT = 0
    TIMER_ARM = 1


class IntentFlag(IntFlag):
    NONE = 0x00
    HAS_DUE = 0x01


_INTENT_FLAGS: Final = {
    IntentKind.EMIT: IntentFlag.NONE,
    IntentKind.TIMER_ARM: IntentFlag.HAS_DUE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameMessage:
    """A message. `flags` may omit HAS_FROM and HAS_TRACE: encoding sets them if the sender or the trace is
    present, and rejects them if it is absent. A decoded message has the flags of its frame.
    """

    kind: MessageKind
    flags: MessageFlag
    to_worker: int
    route_worker: int
    route_timestamp: int
    from_worker: int | None
    message_id: bytes
    trace: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameIntent:
    kind: IntentKind
    due_ts: int | None
    message: FrameMessage


def encode_message(message: FrameMessage) -> bytes:
    return _encode_message_at(message, at=0)


def decode_message(frame: bytes) -> FrameMessage:
    return _decode_message_at(frame, at=0)


def encode_intent(intent: FrameIntent) -> bytes:
    kind = _known_kind(IntentKind, intent.kind, at=0)
    if kind is IntentKind.EMIT and intent.due_ts is not None:
        raise _frame_error("due_ts", intent.due_ts, "none: an emit is due at once", at=0)
    if kind is IntentKind.TIMER_ARM and intent.due_ts is None:
        raise _frame_error("due_ts", None, "a time: a timer is due at one", at=0)
    message = _encode_message_at(intent.message, at=_INTENT_HEADER.size)
    header = _INTENT_HEADER.pack(
        _INTENT_MAGIC,
        _MAJOR,
        _MINOR,
        _frame_len(_INTENT_HEADER.size + len(message), at=0),
        kind,
        _INTENT_FLAGS[kind],
        _RESERVED,
        _s64("due_ts", _DUE_ABSENT if intent.due_ts is None else intent.due_ts, at=0),
        len(message),
    )
    return header + message


def decode_intent(frame: bytes) -> FrameIntent:
    kind, flags, due_ts, message_len = _unpack_header(frame, _INTENT_HEADER, _INTENT_MAGIC, at=0)
    kind = _known_kind(IntentKind, kind, at=0)
    flags = _known_flags(IntentFlag, flags, at=0)
    _require("flags", int(flags), int(_INTENT_FLAGS[kind]), at=0)
    if not flags & IntentFlag.HAS_DUE:
        _require("due_ts", due_ts, _DUE_ABSENT, at=0)
    _require("message_len", message_len, len(frame) - _INTENT_HEADER.size, at=0)
    return FrameIntent(
        kind=kind,
        due_ts=due_ts if flags & IntentFlag.HAS_DUE else None,
        message=_decode_message_at(frame[_INTENT_HEADER.size :], at=_INTENT_HEADER.size),
    )


# Below, `at` is the start of the frame in the caller's bytes: 0, or the size of the header of the
# enclosing intent. Errors add it to their offsets.


def _encode_message_at(message: FrameMessage, *, at: int) -> bytes:
    kind = _known_kind(MessageKind, message.kind, at=at)
    flags = _known_flags(MessageFlag, message.flags, at=at)
    for flag, value in (
        (MessageFlag.HAS_FROM, message.from_worker),
        (MessageFlag.HAS_TRACE, message.trace),
    ):
        if value is not None:
            flags |= flag
        elif flags & flag:
            raise _frame_error("flags", int(flags), int(flags & ~flag), at=at)
    if not message.message_id:
        raise _frame_error("message_id_len", 0, "at least 1", at=at)

    trace = b"" if message.trace is None else message.trace
    body_len = len(message.message_id) + len(trace) + len(message.payload)
    header = _MESSAGE_HEADER.pack(
        _MESSAGE_MAGIC,
        _MAJOR,
        _MINOR,
        _frame_len(_MESSAGE_HEADER.size + body_len, at=at),
        kind,
        flags,
        _RESERVED,
        _s64("to_worker", message.to_worker, at=at),
        _s64("route_worker", message.route_worker, at=at),
        _s64("route_timestamp", message.route_timestamp, at=at),
        _s64(
            "from_worker",
            _FROM_ABSENT if message.from_worker is None else message.from_worker,
            at=at,
        ),
        len(message.message_id),
        _TRACE_ABSENT if message.trace is None else len(trace),
        len(message.payload),
    )
    return b"".join((header, message.message_id, trace, message.payload))


def _decode_message_at(frame: bytes, *, at: int) -> FrameMessage:
    (
        kind,
        flags,
        to_worker,
        route_worker,
        route_timestamp,
        from_worker,
        message_id_len,
        trace_len,
        payload_len,
    ) = _unpack_header(frame, _MESSAGE_HEADER, _MESSAGE_MAGIC, at=at)
    kind = _known_kind(MessageKind, kind, at=at)
    flags = _known_flags(MessageFlag, flags, at=at)
    has_from = bool(flags & MessageFlag.HAS_FROM)
    has_trace = bool(flags & MessageFlag.HAS_TRACE)

    if not has_from:
        _require("from_worker", from_worker, _FROM_ABSENT, at=at)
    if message_id_len == 0:
        raise _frame_error("message_id_len", 0, "at least 1", at=at)
    if not has_trace:
        _require("trace_len", trace_len, _TRACE_ABSENT, at=at)
        trace_len = 0
    elif trace_len == _TRACE_ABSENT:
        raise _frame_error("trace_len", trace_len, "a length, because the trace flag is set", at=at)

    trace_start = _MESSAGE_HEADER.size + message_id_len
    payload_start = trace_start + trace_len
    _require("frame_len", len(frame), payload_start + payload_len, at=at)
    return FrameMessage(
        kind=kind,
        flags=flags,
        to_worker=to_worker,
        route_worker=route_worker,
        route_timestamp=route_timestamp,
        from_worker=from_worker if has_from else None,
        message_id=frame[_MESSAGE_HEADER.size : trace_start],
        trace=frame[trace_start:payload_start] if has_trace else None,
        payload=frame[payload_start:],
    )


def _unpack_header(
    frame: bytes, header: struct.Struct, magic: bytes, *, at: int
) -> tuple[int, ...]:
    """Check the first 16 bytes and the length. Return kind, flags and the fields after `reserved`."""
    if len(frame) < header.size:
        raise FrameError(
            field="header", offset=at + len(frame), found=len(frame), expected=header.size
        )
    found_magic, major, minor, frame_len, kind, flags, reserved, *rest = header.unpack_from(frame)
    _require("magic", found_magic, magic, at=at)
    _require("major", major, _MAJOR, at=at)
    _require("minor", minor, _MINOR, at=at)
    _require("frame_len", _frame_len(frame_len, at=at), len(frame), at=at)
    _require("reserved", reserved, _RESERVED, at=at)
    return (kind, flags, *rest)


_AnyKind = TypeVar("_AnyKind", MessageKind, IntentKind)
_AnyFlag = TypeVar("_AnyFlag", MessageFlag, IntentFlag)


def _known_kind(kinds: type[_AnyKind], found: int, *, at: int) -> _AnyKind:
    try:
        return kinds(found)
    except ValueError:
        raise _frame_error("kind", found, f"0 to {max(kinds):d}", at=at) from None


def _known_flags(flags: type[_AnyFlag], found: int, *, at: int) -> _AnyFlag:
    # IntFlag keeps bits without a member, so the constructor would accept any value.
    known = sum(flags)
    if int(found) & ~known:
        raise _frame_error("flags", int(found), int(found) & known, at=at)
    return flags(found)


def _frame_len(found: int, *, at: int) -> int:
    if found > FRAME_BYTES_MAX:
        raise _frame_error("frame_len", found, f"at most {FRAME_BYTES_MAX}", at=at)
    return found


def _s64(field: str, found: int, *, at: int) -> int:
    if not -(2**63) <= found < 2**63:
        raise _frame_error(field, found, "a signed 64-bit integer", at=at)
    return found


def _require(field: str, found: int | bytes, expected: int | bytes, *, at: int) -> None:
    if found != expected:
        raise _frame_error(field, found, expected, at=at)


def _frame_error(
    field: str, found: int | bytes | None, expected: int | bytes | str, *, at: int
) -> FrameError:
    return FrameError(field=field, offset=at + _OFFSETS[field], found=found, expected=expected)
