from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from holdfast.errors import Busy, Invalid, NotFound
from holdfast.runner import (
    RecordedStep,
    Recorder,
    RecordingDamaged,
    StepKind,
    WorkItem,
    read_steps,
    replay,
    replay_file,
)
from holdfast.runner.recorder import HEADER
from tests.runner.rig import RunnerRig, ScriptedHandler, SimulatedCrash

MODULES = ("holdfast.runner.recorder", "holdfast.runner.replay")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps"


def picky(work: WorkItem) -> None:
    if work.payload == b"bad":
        raise ValueError
    if work.payload == b"busy" and work.attempt == 1:
        raise Busy()


def record(rig: RunnerRig, path: Path, *payloads: bytes) -> None:
    rig.put(*payloads)
    rig.put_timer(b"timer")
    with Recorder(path) as recorder:
        rig.run_until_idle(rig.runner(picky, replay=recorder))


def step(seq: int, frame: bytes = b"f", kind: StepKind = StepKind.INBOX_ATTEMPT) -> RecordedStep:
    return RecordedStep(kind, "w", seq, "", frame, queue="q", number=1, attempt=1)


def test_recording_reads_back_the_steps_of_the_replay_hook(rig: RunnerRig, path: Path) -> None:
    hook_steps: list[RecordedStep] = []
    rig.put(b"a", b"bad")
    with Recorder(path) as recorder:

        def both(step: RecordedStep) -> None:
            hook_steps.append(step)
            recorder(step)

        rig.runner(picky, replay=both).tick()
    assert list(read_steps(path)) == hook_steps


def test_replay_with_the_same_handler_matches_all_attempts(rig: RunnerRig, path: Path) -> None:
    record(rig, path, b"a", b"bad", b"busy")
    report = replay_file(path, picky)
    assert report.ok
    assert (report.attempts, report.matched) == (5, 5)
    assert (report.requeues, report.dead_letters) == (1, 1)
    assert report.unfinished == []


def test_replay_reports_a_mismatch_with_both_codes(rig: RunnerRig, path: Path) -> None:
    record(rig, path, b"a", b"bad")
    report = replay_file(path, lambda work: None)
    assert not report.ok
    [mismatch] = report.mismatches
    assert (mismatch.attempt.frame, mismatch.recorded, mismatch.result) == (
        b"bad",
        "handler_error",
        "ok",
    )


def test_replay_runs_and_reports_an_attempt_without_a_result(rig: RunnerRig, path: Path) -> None:
    rig.put(b"a", b"b")
    with Recorder(path) as recorder, pytest.raises(SimulatedCrash):
        rig.runner(ScriptedHandler(None, SimulatedCrash()), replay=recorder).tick()
    report = replay_file(path, ScriptedHandler(None, ValueError()))
    assert report.ok
    [unfinished] = report.unfinished
    assert (unfinished.attempt.frame, unfinished.recorded, unfinished.result) == (
        b"b",
        None,
        "handler_error",
    )


def test_replayed_handler_sees_kind_and_attempt_and_may_extend(rig: RunnerRig, path: Path) -> None:
    record(rig, path, b"busy")
    seen: list[tuple[str, int, int]] = []

    def handler(work: WorkItem) -> None:
        assert work.extend() == work.expires_ns
        seen.append((work.kind, work.seq, work.attempt))

    replay_file(path, handler)
    assert seen == [("queue", 1, 1), ("timer", 1, 1), ("queue", 1, 2)]


def test_replay_of_steps_without_a_file() -> None:
    steps = [
        step(1),
        RecordedStep(StepKind.INBOX_RESULT, "w", 1, "ok", b"f", queue="q", number=1, attempt=1),
    ]
    assert replay(steps, lambda work: None).matched == 1


def test_replay_skips_a_result_without_an_attempt() -> None:
    assert replay([step(1, kind=StepKind.INBOX_RESULT)], lambda work: None).attempts == 0


def test_reopened_recording_is_appended_to(path: Path) -> None:
    for seq in (1, 2):
        with Recorder(path) as recorder:
            recorder(step(seq))
    assert [read_step.seq for read_step in read_steps(path)] == [1, 2]


def test_replay_of_a_truncated_recording_reads_intact_steps_and_reports_the_offset(
    path: Path,
) -> None:
    ends = [len(HEADER)]
    with Recorder(path) as recorder:
        for seq in (1, 2, 3):
            recorder(step(seq))
            ends.append(path.stat().st_size)
    complete_bytes = path.read_bytes()
    for length in range(len(complete_bytes)):
        path.write_bytes(complete_bytes[:length])
        report = replay_file(path, lambda work: None)
        intact_ends = [end for end in ends if end <= length]
        assert report.attempts == max(0, len(intact_ends) - 1)
        if length in ends:
            assert report.damage is None
        else:
            assert report.damage is not None
            assert report.damage.offset == (intact_ends[-1] if intact_ends else 0)
            assert not report.ok


def test_recording_with_a_flipped_bit_is_reported_damaged_at_its_record(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder(step(1))
        first_end = path.stat().st_size
        recorder(step(2))
    complete_bytes = path.read_bytes()
    for at in range(len(complete_bytes)):
        for bit in (1, 128):
            path.write_bytes(
                complete_bytes[:at] + bytes([complete_bytes[at] ^ bit]) + complete_bytes[at + 1 :]
            )
            with pytest.raises(RecordingDamaged) as damage:
                list(read_steps(path))
            starts = [0, len(HEADER), first_end]
            assert damage.value.offset == max(start for start in starts if start <= at)


def test_damaged_recording_is_not_appended_to(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder(step(1))
    path.write_bytes(path.read_bytes()[:-1])
    before = path.read_bytes()
    with pytest.raises(RecordingDamaged):
        Recorder(path)
    assert path.read_bytes() == before


def test_recorder_rejects_and_keeps_a_file_that_is_not_a_recording(path: Path) -> None:
    path.write_text("my thesis")
    with pytest.raises(RecordingDamaged) as damage:
        Recorder(path)
    assert damage.value.why == "not a recording"
    assert path.read_text() == "my thesis"


def test_second_recorder_of_a_file_raises_busy(path: Path) -> None:
    with Recorder(path), pytest.raises(Busy):
        Recorder(path)


def test_missing_recording_is_not_found_and_a_directory_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        list(read_steps(tmp_path / "none"))
    with pytest.raises(Invalid):
        list(read_steps(tmp_path))
    with pytest.raises(Invalid):
        Recorder(tmp_path / "no" / "such" / "directory")


def test_recording_on_a_full_disk_loses_only_that_step(path: Path) -> None:
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
    assert [read_step.seq for read_step in read_steps(path)] == [1, 3]
