from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from holdfast.errors import Busy, Invalid, NotFound
from holdfast.runner import (
    Damaged,
    Recorder,
    Step,
    StepKind,
    Work,
    read_steps,
    replay,
    replay_file,
)
from holdfast.runner.recording import HEADER
from tests.runner.rig import Crash, Rig, Scripted

MODULES = ("holdfast.runner.recording", "holdfast.runner.replay")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps"


def picky(work: Work) -> None:
    if work.payload == b"bad":
        raise ValueError
    if work.payload == b"busy" and work.attempt == 1:
        raise Busy()


def record(rig: Rig, path: Path, *payloads: bytes) -> None:
    rig.put(*payloads)
    rig.put_timer(b"timer")
    with Recorder(path) as recorder:
        rig.run(rig.runner(picky, replay=recorder))


def step(seq: int, frame: bytes = b"f", kind: StepKind = StepKind.INBOX_ATTEMPT) -> Step:
    return Step(kind, "w", seq, "", frame, "q", 1, 1)


def test_a_recording_reads_back_what_the_hook_was_told(rig: Rig, path: Path) -> None:
    told: list[Step] = []
    rig.put(b"a", b"bad")
    with Recorder(path) as recorder:

        def both(step: Step) -> None:
            told.append(step)
            recorder(step)

        rig.runner(picky, replay=both).tick()
    assert list(read_steps(path)) == told


def test_the_same_handler_gives_the_same_results(rig: Rig, path: Path) -> None:
    record(rig, path, b"a", b"bad", b"busy")
    report = replay_file(path, picky)
    assert report.ok
    assert (report.attempts, report.matched) == (5, 5)
    assert (report.requeues, report.dead_letters) == (1, 1)
    assert report.unfinished == []


def test_another_result_is_reported_with_both_codes(rig: Rig, path: Path) -> None:
    record(rig, path, b"a", b"bad")
    report = replay_file(path, lambda work: None)
    assert not report.ok
    [mismatch] = report.mismatches
    assert (mismatch.attempt.frame, mismatch.recorded, mismatch.result) == (
        b"bad",
        "handler_error",
        "ok",
    )


def test_an_attempt_in_which_the_worker_died_is_run_and_reported(rig: Rig, path: Path) -> None:
    rig.put(b"a", b"b")
    with Recorder(path) as recorder, pytest.raises(Crash):
        rig.runner(Scripted(None, Crash()), replay=recorder).tick()
    report = replay_file(path, Scripted(None, ValueError()))
    assert report.ok
    [unfinished] = report.unfinished
    assert (unfinished.attempt.frame, unfinished.recorded, unfinished.result) == (
        b"b",
        None,
        "handler_error",
    )


def test_a_replayed_handler_sees_kind_attempt_and_may_extend(rig: Rig, path: Path) -> None:
    record(rig, path, b"busy")
    seen: list[tuple[str, int, int]] = []

    def handler(work: Work) -> None:
        assert work.extend() == work.deadline_ns
        seen.append((work.kind, work.seq, work.attempt))

    replay_file(path, handler)
    assert seen == [("queue", 1, 1), ("timer", 1, 1), ("queue", 1, 2)]


def test_steps_can_be_replayed_without_a_file() -> None:
    steps = [step(1), Step(StepKind.INBOX_RESULT, "w", 1, "ok", b"f", "q", 1, 1)]
    assert replay(steps, lambda work: None).matched == 1


def test_a_result_without_its_attempt_is_passed_over() -> None:
    assert replay([step(1, kind=StepKind.INBOX_RESULT)], lambda work: None).attempts == 0


def test_a_recording_goes_on_where_it_ended(path: Path) -> None:
    for seq in (1, 2):
        with Recorder(path) as recorder:
            recorder(step(seq))
    assert [found.seq for found in read_steps(path)] == [1, 2]


def test_wherever_a_file_is_cut_off_the_steps_before_are_there_and_the_offset_is_named(
    path: Path,
) -> None:
    ends = [len(HEADER)]
    with Recorder(path) as recorder:
        for seq in (1, 2, 3):
            recorder(step(seq))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        report = replay_file(path, lambda work: None)
        sound = [end for end in ends if end <= length]
        assert report.attempts == max(0, len(sound) - 1)
        if length in ends:
            assert report.damage is None
        else:
            assert report.damage is not None
            assert report.damage.offset == (sound[-1] if sound else 0)
            assert not report.ok


def test_any_changed_bit_is_noticed_at_its_record(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder(step(1))
        first_end = path.stat().st_size
        recorder(step(2))
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(Damaged) as damage:
                list(read_steps(path))
            starts = [0, len(HEADER), first_end]
            assert damage.value.offset == max(start for start in starts if start <= at)


def test_a_damaged_recording_is_not_appended_to(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder(step(1))
    path.write_bytes(path.read_bytes()[:-1])
    before = path.read_bytes()
    with pytest.raises(Damaged):
        Recorder(path)
    assert path.read_bytes() == before


def test_a_file_that_is_something_else_is_refused_and_untouched(path: Path) -> None:
    path.write_text("my thesis")
    with pytest.raises(Damaged) as damage:
        Recorder(path)
    assert damage.value.why == "not a recording"
    assert path.read_text() == "my thesis"


def test_two_recorders_do_not_share_a_file(path: Path) -> None:
    with Recorder(path), pytest.raises(Busy):
        Recorder(path)


def test_a_missing_recording_is_not_found_and_a_directory_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        list(read_steps(tmp_path / "none"))
    with pytest.raises(Invalid):
        list(read_steps(tmp_path))
    with pytest.raises(Invalid):
        Recorder(tmp_path / "no" / "such" / "directory")


def test_a_full_disk_costs_the_step_and_not_the_recording(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path) as recorder:
        recorder(step(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, hard))
        try:
            with pytest.raises(Exception, match="store_full"):
                recorder(step(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        recorder(step(3))
    assert [found.seq for found in read_steps(path)] == [1, 3]
