"""Golden frames are written here by hand from the layout, never taken from the encoder."""

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
    Flag,
    FrameError,
    Intent,
    IntentKind,
    Kind,
    Message,
    decode_intent,
    decode_message,
    encode_intent,
    encode_message,
)

MODULES = ("holdfast.runner.frames",)

MESSAGE_HEADER_BYTES = 60
INTENT_HEADER_BYTES = 28

FULL = Message(
    kind=Kind.EVENT,
    flags=Flag.DURABLE | Flag.REQUIRES_ACK | Flag.HAS_FROM | Flag.HAS_TRACE,
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

BARE = Message(
    kind=Kind.COMMAND,
    flags=Flag.NONE,
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

# Worker 0 as the sender and a trace of no bytes: present, though they look absent.
EDGE = Message(
    kind=Kind.TIMER,
    flags=Flag.HIGH_PRIORITY | Flag.DEDUPE_REQUIRED | Flag.HAS_FROM | Flag.HAS_TRACE,
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

EMIT = Intent(kind=IntentKind.EMIT, due_ts=None, message=BARE)
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

ARM = Intent(kind=IntentKind.TIMER_ARM, due_ts=-3, message=FULL)
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


def untyped(value: Message | Intent, **fields: Any) -> Message | Intent:
    return replace(value, **fields)


def refusal(call: Callable[[Any], object], value: object) -> dict[str, object]:
    with pytest.raises(FrameError) as caught:
        call(value)
    assert list(caught.value.fields) == ["field", "offset", "found", "expected"]
    return caught.value.fields


def refused_or_identical(recode: Recode, frame: bytes) -> bool:
    """True if refused. Any other error than FrameError escapes and fails the test."""
    try:
        again = recode(frame)
    except FrameError:
        return True
    assert again == frame
    return False


# Golden frames


@pytest.mark.spec("001", "Step dispatch scaffold", "a step starts by decoding one LMSG frame")
@pytest.mark.parametrize(("message", "frame"), MESSAGES)
def test_a_golden_lmsg_frame_decodes_to_its_message(message: Message, frame: bytes) -> None:
    assert decode_message(frame) == message


@pytest.mark.parametrize(("message", "frame"), MESSAGES)
def test_a_message_encodes_to_its_golden_frame(message: Message, frame: bytes) -> None:
    assert encode_message(message) == frame


@pytest.mark.parametrize(("intent", "frame"), INTENTS)
def test_a_golden_lint_frame_decodes_to_its_intent(intent: Intent, frame: bytes) -> None:
    assert decode_intent(frame) == intent


@pytest.mark.parametrize(("intent", "frame"), INTENTS)
def test_an_intent_encodes_to_its_golden_frame(intent: Intent, frame: bytes) -> None:
    assert encode_intent(intent) == frame


def test_a_decoded_message_has_enums_not_numbers() -> None:
    message = decode_message(FULL_FRAME)
    assert (type(message.kind), type(message.flags)) == (Kind, Flag)
    assert type(decode_intent(ARM_FRAME).kind) is IntentKind


# Round trips

s64 = st.integers(-(2**63), 2**63 - 1)
plain_flags = st.integers(0, 0x0F).map(Flag)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    from_worker = draw(st.none() | s64)
    trace = draw(st.none() | st.binary(max_size=40))
    flags = draw(plain_flags)
    if from_worker is not None:
        flags |= Flag.HAS_FROM
    if trace is not None:
        flags |= Flag.HAS_TRACE
    return Message(
        kind=draw(st.sampled_from(Kind)),
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
def intents(draw: st.DrawFn) -> Intent:
    kind = draw(st.sampled_from(IntentKind))
    due_ts = draw(s64) if kind is IntentKind.TIMER_ARM else None
    return Intent(kind=kind, due_ts=due_ts, message=draw(messages()))


@given(messages())
def test_every_message_survives_a_round_trip(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(intents())
def test_every_intent_survives_a_round_trip(intent: Intent) -> None:
    assert decode_intent(encode_intent(intent)) == intent


# Corrupted frames


@pytest.mark.spec("001", "Step dispatch scaffold", "a step decodes one frame, never part of one")
@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_a_truncated_frame_is_refused_at_every_length(recode: Recode, frame: bytes) -> None:
    for length in range(len(frame)):
        found = refusal(recode, frame[:length])["found"]
        assert found == (length if length < header_bytes(frame) else len(frame))


@pytest.mark.spec("001", "Step dispatch scaffold", "a step decodes one frame, never more than one")
@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_every_trailing_byte_is_refused(recode: Recode, frame: bytes) -> None:
    for trailing in range(256):
        refused = refusal(recode, frame + bytes([trailing]))
        assert refused == {
            "field": "frame_len",
            "offset": 8,
            "found": len(frame),
            "expected": len(frame) + 1,
        }


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_two_frames_are_not_one(recode: Recode, frame: bytes) -> None:
    assert refusal(recode, frame + frame)["field"] == "frame_len"


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_any_byte_changed_to_any_other_is_refused_or_means_itself(
    recode: Recode, frame: bytes
) -> None:
    for offset, value in product(range(len(frame)), range(256)):
        refused_or_identical(recode, patched(frame, offset, f"{value:02x}"))


@pytest.mark.parametrize(("recode", "frame"), FRAMES)
def test_magic_version_length_and_reserved_bytes_have_one_legal_value(
    recode: Recode, frame: bytes
) -> None:
    for offset, value in product([*range(12), 14, 15], range(256)):
        changed = patched(frame, offset, f"{value:02x}")
        assert refused_or_identical(recode, changed) == (changed != frame)


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
        (52, "ffffffff", "trace_len", 0xFFFFFFFF, "a length, as the flag says"),
        (52, "feffffff", "frame_len", 71, 60 + 4 + 0xFFFFFFFE + 5),
        (56, "04000000", "frame_len", 71, 70),
        (56, "ffffffff", "frame_len", 71, 60 + 4 + 2 + 0xFFFFFFFF),
    ],
)
def test_a_refused_lmsg_names_field_offset_found_and_expected(
    offset: int, new_hex: str, field: str, found: object, expected: object
) -> None:
    refused = refusal(decode_message, patched(FULL_FRAME, offset, new_hex))
    where = MESSAGE_OFFSETS[field]
    assert refused == {"field": field, "offset": where, "found": found, "expected": expected}


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
def test_a_refused_lint_names_field_offset_found_and_expected(
    frame: bytes, offset: int, new_hex: str, field: str, found: object, expected: object
) -> None:
    refused = refusal(decode_intent, patched(frame, offset, new_hex))
    where = INTENT_OFFSETS[field]
    assert refused == {"field": field, "offset": where, "found": found, "expected": expected}


def test_a_refusal_inside_an_intent_counts_its_offset_from_the_intents_first_byte() -> None:
    in_frame = refusal(decode_intent, patched(ARM_FRAME, INTENT_HEADER_BYTES + 12, "03"))
    in_value = refusal(encode_intent, replace(ARM, message=replace(FULL, to_worker=2**63)))
    assert (in_frame["field"], in_frame["offset"]) == ("kind", 28 + 12)
    assert (in_value["field"], in_value["offset"]) == ("to_worker", 28 + 16)


def test_an_intent_without_its_message_is_refused() -> None:
    empty = patched(patched(ARM_FRAME[:28], 8, "1c000000"), 24, "00000000")
    refused = refusal(decode_intent, empty)
    assert refused == {"field": "header", "offset": 28, "found": 0, "expected": 60}


def test_an_intent_in_an_intent_is_refused() -> None:
    nested = ARM_FRAME[:28] + EMIT_FRAME
    nested = patched(patched(nested, 8, f"{28 + 89:02x}000000"), 24, f"{89:02x}000000")
    assert refusal(decode_intent, nested)["found"] == b"LINT"


# Values that have no frame


@pytest.mark.parametrize("field", ["to_worker", "route_worker", "route_timestamp", "from_worker"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_wider_than_64_bits_is_refused(field: str, value: int) -> None:
    refused = refusal(encode_message, untyped(FULL, **{field: value}))
    assert (refused["field"], refused["found"]) == (field, value)


def test_a_due_time_wider_than_64_bits_is_refused() -> None:
    assert refusal(encode_intent, replace(ARM, due_ts=2**63))["field"] == "due_ts"


def test_a_message_without_an_id_is_refused() -> None:
    assert refusal(encode_message, replace(BARE, message_id=b""))["field"] == "message_id_len"


def test_kinds_and_flags_that_v0_does_not_know_are_refused() -> None:
    assert refusal(encode_message, untyped(BARE, kind=3))["field"] == "kind"
    assert refusal(encode_message, replace(BARE, flags=Flag(0x40)))["field"] == "flags"
    assert refusal(encode_message, untyped(BARE, flags=0x100))["field"] == "flags"
    assert refusal(encode_message, untyped(BARE, flags=-1))["field"] == "flags"
    assert refusal(encode_intent, untyped(EMIT, kind=2))["field"] == "kind"


@pytest.mark.parametrize("flag", [Flag.HAS_FROM, Flag.HAS_TRACE])
def test_a_flag_for_something_that_is_not_there_is_refused(flag: Flag) -> None:
    refused = refusal(encode_message, replace(BARE, flags=Flag.DURABLE | flag))
    assert (refused["found"], refused["expected"]) == (Flag.DURABLE | flag, Flag.DURABLE)


def test_the_flags_for_sender_and_trace_may_be_left_to_the_encoder() -> None:
    left_out = replace(FULL, flags=Flag.DURABLE | Flag.REQUIRES_ACK)
    assert encode_message(left_out) == FULL_FRAME


def test_an_emit_with_a_due_time_is_refused_even_at_zero() -> None:
    refused = refusal(encode_intent, replace(EMIT, due_ts=0))
    assert (refused["field"], refused["found"]) == ("due_ts", 0)


def test_a_timer_without_a_due_time_is_refused() -> None:
    refused = refusal(encode_intent, replace(ARM, due_ts=None))
    assert (refused["field"], refused["found"]) == ("due_ts", None)


# Limits


def test_the_largest_message_passes_and_one_byte_more_does_not() -> None:
    largest = replace(BARE, payload=bytes(FRAME_BYTES_MAX - len(BARE_FRAME)))
    frame = encode_message(largest)
    assert len(frame) == FRAME_BYTES_MAX
    assert decode_message(frame) == largest

    larger = replace(largest, payload=largest.payload + b"\0")
    assert refusal(encode_message, larger)["found"] == FRAME_BYTES_MAX + 1


def test_the_limit_holds_for_an_intent_with_its_message() -> None:
    room = FRAME_BYTES_MAX - INTENT_HEADER_BYTES - len(BARE_FRAME)
    largest = replace(EMIT, message=replace(BARE, payload=bytes(room)))
    assert decode_intent(encode_intent(largest)) == largest

    larger = replace(EMIT, message=replace(BARE, payload=bytes(room + 1)))
    assert refusal(encode_intent, larger)["found"] == FRAME_BYTES_MAX + 1


# Fuzz

noise = st.binary(max_size=160)


@st.composite
def almost_frames(draw: st.DrawFn) -> bytes:
    """A valid frame with up to four bytes overwritten and its length field set right again."""
    frame = bytearray(draw(messages().map(encode_message) | intents().map(encode_intent)))
    for _ in range(draw(st.integers(1, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    frame += draw(st.binary(max_size=3))
    frame[8:12] = len(frame).to_bytes(4, "little")
    return bytes(frame)


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "a frame that cannot be decoded is told apart and not retried"
)
@given(noise)
def test_arbitrary_bytes_raise_nothing_but_a_frame_error(data: bytes) -> None:
    refused_or_identical(recode_message, data)
    refused_or_identical(recode_intent, data)


@given(st.binary(min_size=48, max_size=160))
def test_arbitrary_bytes_behind_a_good_start_raise_nothing_but_a_frame_error(data: bytes) -> None:
    length = (12 + len(data)).to_bytes(4, "little")
    refused_or_identical(recode_message, b"LMSG\0\0\0\0" + length + data)
    refused_or_identical(recode_intent, b"LINT\0\0\0\0" + length + data)


@given(almost_frames())
def test_whatever_decodes_encodes_to_the_same_bytes(frame: bytes) -> None:
    refused_or_identical(recode_message, frame)
    refused_or_identical(recode_intent, frame)


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "a frame that cannot be decoded is told apart and not retried"
)
def test_a_frame_error_is_bad_input_that_no_retry_mends() -> None:
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
