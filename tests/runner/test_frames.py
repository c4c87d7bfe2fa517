"""LMSG and LINT frames. The golden frames are written by hand from the layout, not by the encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.runner.frames import (
    FRAME_BYTES_MAX,
    FrameError,
    FrameIntent,
    FrameMessage,
    IntentKind,
    MessageFlag,
    MessageKind,
    decode_intent,
    decode_message,
    encode_intent,
    encode_message,
)

MODULES = ("holdfast.runner.frames",)

MESSAGE_HEADER_BYTES = 60
INTENT_HEADER_BYTES = 28

FULL = FrameMessage(
    kind=MessageKind.EVENT,
    flags=MessageFlag.DURABLE
    | MessageFlag.REQUIRES_ACK
    | MessageFlag.HAS_FROM
    | MessageFlag.HAS_TRACE,
    to_worker=7,
    route_worker=-2,
    route_timestamp=0x0102030405060708,
    from_worker=9,
    message_id=b"id-1",
    trace=b"tr",
    payload=b"hello",
)
FULL_FRAME = bytes.fromhex(
    "4c4d5347"  # LMSG
    "0000 0000"  # major, minor
    "47000000"  # frame_len: 60 + 4 + 2 + 5 = 71
    "01 39 0000"  # event; durable, ack, from, trace; reserved
    "0700000000000000"  # to_worker
    "feffffffffffffff"  # route_worker
    "0807060504030201"  # route_timestamp
    "0900000000000000"  # from_worker
    "04000000 02000000 05000000"  # message_id_len, trace_len, payload_len
    "69642d31 7472 68656c6c6f"
)

BARE = FrameMessage(
    kind=MessageKind.COMMAND,
    flags=MessageFlag.NONE,
    to_worker=1,
    route_worker=0,
    route_timestamp=0,
    from_worker=None,
    message_id=b"m",
    trace=None,
    payload=b"",
)
BARE_FRAME = bytes.fromhex(
    "4c4d5347 0000 0000"
    "3d000000"  # frame_len: 61
    "00 00 0000"  # command, no flags
    "0100000000000000 0000000000000000 0000000000000000"
    "0000000000000000"  # no sender
    "01000000 ffffffff 00000000"  # no trace
    "6d"
)

# Sender 0 and an empty trace: both fields are present, with the value of an absent one.
EDGE = FrameMessage(
    kind=MessageKind.TIMER,
    flags=MessageFlag.HIGH_PRIORITY
    | MessageFlag.DEDUPE_REQUIRED
    | MessageFlag.HAS_FROM
    | MessageFlag.HAS_TRACE,
    to_worker=-(2**63),
    route_worker=2**63 - 1,
    route_timestamp=-1,
    from_worker=0,
    message_id=b"\x00",
    trace=b"",
    payload=b"\xff",
)
EDGE_FRAME = bytes.fromhex(
    "4c4d5347 0000 0000"
    "3e000000"  # frame_len: 62
    "02 36 0000"  # timer; priority, dedupe, from, trace
    "0000000000000080 ffffffffffffff7f ffffffffffffffff"
    "0000000000000000"
    "01000000 00000000 01000000"
    "00 ff"
)

EMIT = FrameIntent(kind=IntentKind.EMIT, due_ts=None, message=BARE)
EMIT_FRAME = (
    bytes.fromhex(
        "4c494e54 0000 0000"  # LINT
        "59000000"  # frame_len: 28 + 61 = 89
        "00 00 0000"  # emit, no due
        "0000000000000000"
        "3d000000"  # message_len: 61
    )
    + BARE_FRAME
)

ARM = FrameIntent(kind=IntentKind.TIMER_ARM, due_ts=-3, message=FULL)
ARM_FRAME = (
    bytes.fromhex(
        "4c494e54 0000 0000"
        "63000000"  # frame_len: 28 + 71 = 99
        "01 01 0000"  # timer-arm, has-due
        "fdffffffffffffff"
        "47000000"  # message_len: 71
    )
    + FULL_FRAME
)

MESSAGES = [
    pytest.param(FULL, FULL_FRAME, id="full"),
    pytest.param(BARE, BARE_FRAME, id="bare"),
    pytest.param(EDGE, EDGE_FRAME, id="edge"),
]
INTENTS = [pytest.param(EMIT, EMIT_FRAME, id="emit"), pytest.param(ARM, ARM_FRAME, id="arm")]

Recode = Callable[[bytes], bytes]


def recode_message(frame: bytes) -> bytes:
    return encode_message(decode_message(frame))


def recode_intent(frame: bytes) -> bytes:
    return encode_intent(decode_intent(frame))


FRAMES = [
    pytest.param(recode_message, FULL_FRAME, id="full"),
    pytest.param(recode_message, BARE_FRAME, id="bare"),
    pytest.param(recode_message, EDGE_FRAME, id="edge"),
    pytest.param(recode_intent, EMIT_FRAME, id="emit"),
    pytest.param(recode_intent, ARM_FRAME, id="arm"),
]


def patched(frame: bytes, offset: int, new_hex: str) -> bytes:
    new = bytes.fromhex(new_hex)
    return frame[:offset] + new + frame[offset + len(new) :]


def replace_untyped(value: FrameMessage | FrameIntent, **fields: Any) -> FrameMessage | FrameIntent:
    return replace(value, **fields)


def frame_error_fields(call: Callable[[Any], object], value: object) -> dict[str, object]:
    with pytest.raises(FrameError) as caught:
        call(value)
    assert list(caught.value.fields) == ["field", "offset", "found", "expected"]
    return caught.value.fields


def is_refused_or_reencodes_identically(recode: Recode, frame: bytes) -> bool:
    """Return True if decoding raises FrameError. Any other error fails the test."""
    try:
        reencoded = recode(frame)
    except FrameError:
        return True
    assert reencoded == frame
    return False


# Golden frames


@pytest.mark.spec(
    "001", "Step dispatch scaffold", "a step decodes one LMSG frame in the stored format"
)
@pytest.mark.parametrize(("message", "frame"), MESSAGES)
def test_decode_message_of_a_golden_lmsg_frame(message: FrameMessage, frame: bytes) -> None:
    assert decode_message(frame) == message


@pytest.mark.parametrize(("message", "frame"), MESSAGES)
def test_encode_message_equals_its_golden_lmsg_frame(message: FrameMessage, frame: bytes) -> None:
    assert encode_message(message) == frame


@pytest.mark.parametrize(("intent", "frame"), INTENTS)
def test_decode_intent_of_a_golden_lint_frame(intent: FrameIntent, frame: bytes) -> None:
    assert decode_intent(frame) == intent


@pytest.mark.parametrize(("intent", "frame"), INTENTS)
def test_encode_intent_equals_its_golden_lint_frame(intent: FrameIntent, frame: bytes) -> None:
    assert encode_intent(intent) == frame


def test_decoded_kind_and_flags_are_enums() -> None:
    message = decode_message(FULL_FRAME)
    assert (type(message.kind), type(message.flags)) == (MessageKind, MessageFlag)
    assert type(decode_intent(ARM_FRAME).kind) is IntentKind


# Round trips

s64 = st.integers(-(2**63), 2**63 - 1)
plain_flags = st.integers(0, 0x0F).map(MessageFlag)


@st.composite
def messages(draw: st.DrawFn) -> FrameMessage:
    from_worker = draw(st.none() | s64)
    trace = draw(st.none() | st.binary(max_size=40))
    flags = draw(plain_flags)
    if from_worker is not None:
        flags |= MessageFlag.HAS_FROM
    if trace is not None:
        flags |= MessageFlag.HAS_TRACE
    return FrameMessage(
        kind=draw(st.sampled_from(MessageKind)),
        flags=flags,
        to_worker=draw(s64),
        route_worker=draw(s64),
        route_timestamp=draw(s64),
        from_worker=from_worker,
        message_id=draw(st.binary(min_size=1, max_size=40)),
        trace=trace,
        payload=draw(st.binary(max_size=200)),
    )


@st.composite
def intents(draw: st.DrawFn) -> FrameIntent:
    kind = draw(st.sampled_from(IntentKind))
    due_ts = draw(s64) if kind is IntentKind.TIMER_ARM else None
    return FrameIntent(kind=kind, due_ts=due_ts, message=draw(messages()))


@given(messages())
def test_message_frame_round_trip(message: FrameMessage) -> None:
    assert decode_message(encode_message(message)) == message


@given(intents())
def test_intent_frame_round_trip(intent: FrameIntent) -> None:
    assert decode_intent(encode_intent(intent)) == intent


# Corrupted frames


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "the decoder refuses a truncated frame, so a step never decodes a part of one",
)
@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_frame_truncated_at_any_length_is_rejected(recode: Recode, frame: bytes) -> None:
    for length in range(len(frame)):
        found = frame_error_fields(recode, frame[:length])["found"]
        assert found == (length if length < header_bytes(frame) else len(frame))


@pytest.mark.spec(
    "001",
    "Step dispatch scaffold",
    "the decoder refuses a frame with trailing bytes, so a step decodes at most one frame",
)
@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_frame_with_any_trailing_byte_is_rejected(recode: Recode, frame: bytes) -> None:
    for trailing in range(256):
        error_fields = frame_error_fields(recode, frame + bytes([trailing]))
        assert error_fields == {
            "field": "frame_len",
            "offset": 8,
            "found": len(frame),
            "expected": len(frame) + 1,
        }


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_two_concatenated_frames_are_rejected(recode: Recode, frame: bytes) -> None:
    assert frame_error_fields(recode, frame + frame)["field"] == "frame_len"


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_frame_with_any_byte_changed_is_rejected_or_reencodes_identically(
    recode: Recode, frame: bytes
) -> None:
    for offset, value in product(range(len(frame)), range(256)):
        is_refused_or_reencodes_identically(recode, patched(frame, offset, f"{value:02x}"))


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_frame_magic_version_length_and_reserved_bytes_have_one_legal_value(
    recode: Recode, frame: bytes
) -> None:
    for offset, value in product([*range(12), 14, 15], range(256)):
        changed = patched(frame, offset, f"{value:02x}")
        assert is_refused_or_reencodes_identically(recode, changed) == (changed != frame)


@pytest.mark.parametrize(
    ("offset", "new_hex", "field", "found", "expected"),
    [
        (0, "4c494e54", "magic", b"LINT", b"LMSG"),
        (4, "0100", "major", 1, 0),
        (6, "0001", "minor", 256, 0),
        (8, "46000000", "frame_len", 70, 71),
        (8, "01000001", "frame_len", FRAME_BYTES_MAX + 1, f"at most {FRAME_BYTES_MAX}"),
        (12, "03", "kind", 3, "0 to 2"),
        (13, "79", "flags", 0x79, 0x39),
        (13, "b9", "flags", 0xB9, 0x39),
        (13, "29", "from_worker", 9, 0),
        (13, "19", "trace_len", 2, 0xFFFFFFFF),
        (14, "0100", "reserved", 1, 0),
        (48, "00000000", "message_id_len", 0, "at least 1"),
        (48, "05000000", "frame_len", 71, 72),
        (52, "ffffffff", "trace_len", 0xFFFFFFFF, "a length, because the trace flag is set"),
        (52, "feffffff", "frame_len", 71, 60 + 4 + 0xFFFFFFFE + 5),
        (56, "04000000", "frame_len", 71, 70),
        (56, "ffffffff", "frame_len", 71, 60 + 4 + 2 + 0xFFFFFFFF),
    ],
)
def test_lmsg_frame_error_has_field_offset_found_and_expected(
    offset: int, new_hex: str, field: str, found: object, expected: object
) -> None:
    error_fields = frame_error_fields(decode_message, patched(FULL_FRAME, offset, new_hex))
    where = MESSAGE_OFFSETS[field]
    assert error_fields == {"field": field, "offset": where, "found": found, "expected": expected}


@pytest.mark.parametrize(
    ("frame", "offset", "new_hex", "field", "found", "expected"),
    [
        (ARM_FRAME, 0, "4c4d5347", "magic", b"LMSG", b"LINT"),
        (ARM_FRAME, 12, "02", "kind", 2, "0 to 1"),
        (ARM_FRAME, 12, "00", "flags", 1, 0),
        (ARM_FRAME, 13, "00", "flags", 0, 1),
        (ARM_FRAME, 13, "03", "flags", 3, 1),
        (ARM_FRAME, 24, "46000000", "message_len", 70, 71),
        (EMIT_FRAME, 12, "01", "flags", 0, 1),
        (EMIT_FRAME, 13, "01", "flags", 1, 0),
        (EMIT_FRAME, 16, "01", "due_ts", 1, 0),
        (EMIT_FRAME, 24, "3e000000", "message_len", 62, 61),
    ],
)
def test_lint_frame_error_has_field_offset_found_and_expected(
    frame: bytes, offset: int, new_hex: str, field: str, found: object, expected: object
) -> None:
    error_fields = frame_error_fields(decode_intent, patched(frame, offset, new_hex))
    where = INTENT_OFFSETS[field]
    assert error_fields == {"field": field, "offset": where, "found": found, "expected": expected}


def test_frame_error_offset_is_relative_to_the_intent_frame() -> None:
    in_frame = frame_error_fields(decode_intent, patched(ARM_FRAME, INTENT_HEADER_BYTES + 12, "03"))
    in_value = frame_error_fields(
        encode_intent, replace(ARM, message=replace(FULL, to_worker=2**63))
    )
    assert (in_frame["field"], in_frame["offset"]) == ("kind", 28 + 12)
    assert (in_value["field"], in_value["offset"]) == ("to_worker", 28 + 16)


def test_intent_frame_without_a_message_is_rejected() -> None:
    empty = patched(patched(ARM_FRAME[:28], 8, "1c000000"), 24, "00000000")
    error_fields = frame_error_fields(decode_intent, empty)
    assert error_fields == {"field": "header", "offset": 28, "found": 0, "expected": 60}


def test_intent_frame_nested_in_an_intent_frame_is_rejected() -> None:
    nested = ARM_FRAME[:28] + EMIT_FRAME
    nested = patched(patched(nested, 8, f"{28 + 89:02x}000000"), 24, f"{89:02x}000000")
    assert frame_error_fields(decode_intent, nested)["found"] == b"LINT"


# Values without a frame


@pytest.mark.parametrize("field", ["to_worker", "route_worker", "route_timestamp", "from_worker"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_encode_message_rejects_a_number_wider_than_64_bits(field: str, value: int) -> None:
    error_fields = frame_error_fields(encode_message, replace_untyped(FULL, **{field: value}))
    assert (error_fields["field"], error_fields["found"]) == (field, value)


def test_encode_intent_rejects_a_due_time_wider_than_64_bits() -> None:
    assert frame_error_fields(encode_intent, replace(ARM, due_ts=2**63))["field"] == "due_ts"


def test_encode_message_rejects_an_empty_message_id() -> None:
    assert (
        frame_error_fields(encode_message, replace(BARE, message_id=b""))["field"]
        == "message_id_len"
    )


def test_encode_rejects_kinds_and_flags_unknown_to_v0() -> None:
    assert frame_error_fields(encode_message, replace_untyped(BARE, kind=3))["field"] == "kind"
    assert (
        frame_error_fields(encode_message, replace(BARE, flags=MessageFlag(0x40)))["field"]
        == "flags"
    )
    assert (
        frame_error_fields(encode_message, replace_untyped(BARE, flags=0x100))["field"] == "flags"
    )
    assert frame_error_fields(encode_message, replace_untyped(BARE, flags=-1))["field"] == "flags"
    assert frame_error_fields(encode_intent, replace_untyped(EMIT, kind=2))["field"] == "kind"


@pytest.mark.parametrize("flag", [MessageFlag.HAS_FROM, MessageFlag.HAS_TRACE])
def test_encode_message_rejects_a_flag_for_an_absent_field(flag: MessageFlag) -> None:
    error_fields = frame_error_fields(
        encode_message, replace(BARE, flags=MessageFlag.DURABLE | flag)
    )
    assert (error_fields["found"], error_fields["expected"]) == (
        MessageFlag.DURABLE | flag,
        MessageFlag.DURABLE,
    )


def test_encode_message_sets_the_sender_and_trace_flags() -> None:
    left_out = replace(FULL, flags=MessageFlag.DURABLE | MessageFlag.REQUIRES_ACK)
    assert encode_message(left_out) == FULL_FRAME


def test_encode_intent_rejects_an_emit_with_a_due_time_of_zero() -> None:
    error_fields = frame_error_fields(encode_intent, replace(EMIT, due_ts=0))
    assert (error_fields["field"], error_fields["found"]) == ("due_ts", 0)


def test_encode_intent_rejects_a_timer_without_a_due_time() -> None:
    error_fields = frame_error_fields(encode_intent, replace(ARM, due_ts=None))
    assert (error_fields["field"], error_fields["found"]) == ("due_ts", None)


# Limits


def test_message_frame_has_at_most_frame_bytes_max_bytes() -> None:
    largest = replace(BARE, payload=bytes(FRAME_BYTES_MAX - len(BARE_FRAME)))
    frame = encode_message(largest)
    assert len(frame) == FRAME_BYTES_MAX
    assert decode_message(frame) == largest

    larger = replace(largest, payload=largest.payload + b"\0")
    assert frame_error_fields(encode_message, larger)["found"] == FRAME_BYTES_MAX + 1


def test_intent_frame_has_at_most_frame_bytes_max_bytes() -> None:
    payload_bytes_max = FRAME_BYTES_MAX - INTENT_HEADER_BYTES - len(BARE_FRAME)
    largest = replace(EMIT, message=replace(BARE, payload=bytes(payload_bytes_max)))
    assert decode_intent(encode_intent(largest)) == largest

    larger = replace(EMIT, message=replace(BARE, payload=bytes(payload_bytes_max + 1)))
    assert frame_error_fields(encode_intent, larger)["found"] == FRAME_BYTES_MAX + 1


# Fuzz

noise = st.binary(max_size=160)


@st.composite
def almost_frames(draw: st.DrawFn) -> bytes:
    """A valid frame with up to four bytes overwritten, trailing bytes and a matching length field."""
    frame = bytearray(draw(messages().map(encode_message) | intents().map(encode_intent)))
    for _ in range(draw(st.integers(1, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    frame += draw(st.binary(max_size=3))
    frame[8:12] = len(frame).to_bytes(4, "little")
    return bytes(frame)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a frame that cannot be decoded raises its own error class, which is not retryable",
)
@given(noise)
def test_decoding_arbitrary_bytes_raises_only_frame_error(data: bytes) -> None:
    is_refused_or_reencodes_identically(recode_message, data)
    is_refused_or_reencodes_identically(recode_intent, data)


@given(st.binary(min_size=48, max_size=160))
def test_decoding_arbitrary_bytes_after_a_valid_header_start_raises_only_frame_error(
    data: bytes,
) -> None:
    length = (12 + len(data)).to_bytes(4, "little")
    is_refused_or_reencodes_identically(recode_message, b"LMSG\0\0\0\0" + length + data)
    is_refused_or_reencodes_identically(recode_intent, b"LINT\0\0\0\0" + length + data)


@given(almost_frames())
def test_decoded_frame_encodes_to_the_same_bytes(frame: bytes) -> None:
    is_refused_or_reencodes_identically(recode_message, frame)
    is_refused_or_reencodes_identically(recode_intent, frame)


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a frame that cannot be decoded raises its own error class, which is not retryable",
)
def test_frame_error_is_invalid_and_not_retryable() -> None:
    with pytest.raises(Invalid) as caught:
        decode_message(b"")
    assert (caught.value.code, caught.value.retryable) == ("frame", False)
    assert str(caught.value) == "frame: field='header' offset=0 found=0 expected=60"


MESSAGE_OFFSETS = {
    "magic": 0,
    "major": 4,
    "minor": 6,
    "frame_len": 8,
    "kind": 12,
    "flags": 13,
    "reserved": 14,
    "from_worker": 40,
    "message_id_len": 48,
    "trace_len": 52,
}
INTENT_OFFSETS = {"magic": 0, "kind": 12, "flags": 13, "due_ts": 16, "message_len": 24}


def header_bytes(frame: bytes) -> int:
    return MESSAGE_HEADER_BYTES if frame.startswith(b"LMSG") else INTENT_HEADER_BYTES
