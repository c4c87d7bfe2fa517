from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import Busy
from holdfast.runner import FrameHandler, Misrouted, Tick, Undecodable
from holdfast.runner.frames import Flag, Kind, Message, encode_message
from tests.runner.rig import Rig

MODULES = ("holdfast.runner.dispatch",)

MESSAGE = Message(
    kind=Kind.COMMAND,
    flags=Flag.NONE,
    to_worker=7,
    route_worker=0,
    route_timestamp=0,
    from_worker=None,
    message_id=b"m",
    trace=None,
    payload=b"hello",
)
FRAME = encode_message(MESSAGE)
FOREIGN = encode_message(replace(MESSAGE, to_worker=8))


def test_a_step_decodes_calls_back_and_counts() -> None:
    seen: list[Message] = []
    handler = FrameHandler(7, seen.append)
    handler.step(FRAME)
    assert seen == [MESSAGE]
    assert handler.steps_completed == 1


def test_a_step_whose_callback_fails_is_not_completed() -> None:
    def callback(message: Message) -> None:
        raise Busy()

    handler = FrameHandler(7, callback)
    with pytest.raises(Busy):
        handler.step(FRAME)
    assert handler.steps_completed == 0


def test_a_frame_for_another_worker_is_not_handed_over() -> None:
    seen: list[Message] = []
    with pytest.raises(Misrouted) as refusal:
        FrameHandler(7, seen.append).step(FOREIGN)
    assert (refusal.value.to_worker, refusal.value.worker) == (8, 7)
    assert seen == []


def test_an_undecodable_frame_names_the_field() -> None:
    with pytest.raises(Undecodable) as refusal:
        FrameHandler(7, print).step(FRAME[:-1])
    assert refusal.value.field == "frame_len"


@pytest.mark.parametrize(
    ("frame", "code"), [(FOREIGN, "misrouted"), (b"", "undecodable"), (FRAME + b"x", "undecodable")]
)
def test_a_bad_frame_is_a_dead_letter_at_once_and_stops_nobody(
    rig: Rig, frame: bytes, code: str
) -> None:
    rig.put(frame, FRAME)
    handler = FrameHandler(7, lambda message: None)
    runner = rig.runner(handler, on_fatal="stop")
    assert runner.tick() == Tick(claimed=2, done=1, dead=1)
    [letter] = rig.dead()
    assert (letter.code, letter.payload, letter.failures) == (code, frame, 1)
    assert handler.steps_completed == 1
    assert runner.tick() == Tick()


def test_timer_frames_take_the_same_path(rig: Rig) -> None:
    rig.put_timer(FRAME)
    seen: list[Message] = []
    assert rig.runner(FrameHandler(7, seen.append)).tick().done == 1
    assert seen == [MESSAGE]
