from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import Busy
from holdfast.runner import FrameHandler, Misrouted, TickStats, Undecodable
from holdfast.runner.frames import FrameMessage, MessageFlag, MessageKind, encode_message
from tests.runner.rig import RunnerRig

MODULES = ("holdfast.runner.frame_handler",)

MESSAGE = FrameMessage(
    kind=MessageKind.COMMAND,
    flags=MessageFlag.NONE,
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


def test_step_decodes_the_frame_calls_the_callback_and_counts() -> None:
    seen: list[FrameMessage] = []
    handler = FrameHandler(7, seen.append)
    handler.step(FRAME)
    assert seen == [MESSAGE]
    assert handler.steps_completed == 1


def test_step_with_a_failing_callback_is_not_counted_as_completed() -> None:
    def callback(message: FrameMessage) -> None:
        raise Busy()

    handler = FrameHandler(7, callback)
    with pytest.raises(Busy):
        handler.step(FRAME)
    assert handler.steps_completed == 0


def test_step_raises_misrouted_for_a_frame_of_another_worker() -> None:
    seen: list[FrameMessage] = []
    with pytest.raises(Misrouted) as caught:
        FrameHandler(7, seen.append).step(FOREIGN)
    assert (caught.value.to_worker, caught.value.worker) == (8, 7)
    assert seen == []


def test_step_raises_undecodable_with_the_field() -> None:
    with pytest.raises(Undecodable) as caught:
        FrameHandler(7, print).step(FRAME[:-1])
    assert caught.value.field == "frame_len"


@pytest.mark.parametrize(
    ("frame", "code"), [(FOREIGN, "misrouted"), (b"", "undecodable"), (FRAME + b"x", "undecodable")]
)
def test_bad_frame_is_dead_lettered_on_the_first_attempt_and_the_runner_continues(
    rig: RunnerRig, frame: bytes, code: str
) -> None:
    rig.put(frame, FRAME)
    handler = FrameHandler(7, lambda message: None)
    runner = rig.runner(handler, on_fatal="stop")
    assert runner.tick() == TickStats(claimed=2, done=1, dead=1)
    [letter] = rig.dead_letters()
    assert (letter.code, letter.payload, letter.failures) == (code, frame, 1)
    assert handler.steps_completed == 1
    assert runner.tick() == TickStats()


def test_timer_frames_are_handled_by_the_frame_handler(rig: RunnerRig) -> None:
    rig.put_timer(FRAME)
    seen: list[FrameMessage] = []
    assert rig.runner(FrameHandler(7, seen.append)).tick().done == 1
    assert seen == [MESSAGE]
