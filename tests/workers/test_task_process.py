"""Isolated task processes: crashes, cancellation, signals and progress."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import MS
from holdfast.errors import Invalid
from holdfast.workers.tasks.process import FRAMES, TaskProcess, find_task
from tests.process.watch import os_process
from tests.workers import task_jobs as jobs
from tests.workers.task_rig import open_task_rig

MODULES = ("holdfast.workers.tasks.process", "holdfast.workers.tasks.worker")

OVERSIZE_FRAME = FRAMES.header(FRAMES.bytes_max + 1)


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def all_in(handles: list[hf.TaskHandle[Any]], wanted: str) -> bool:
    return all(state(handle) == wanted for handle in handles)


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_an_isolated_task_runs_in_another_process() -> None:
    with open_task_rig(jobs.pid) as rig:
        handle = rig.rt.submit(jobs.pid)
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) != os.getpid()


def test_task_process_is_reused_for_the_next_task() -> None:
    with open_task_rig(jobs.pid) as rig:
        handles = rig.rt.submit_many(jobs.pid, [(n,) for n in range(20)])
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(processes=1))
        assert len({handle.result(0) for handle in handles}) == 1


def test_worker_runs_as_many_task_processes_as_configured(tmp_path: Path) -> None:
    with open_task_rig(jobs.meet) as rig:
        handles = rig.rt.submit_many(jobs.meet, [(str(tmp_path), n, 3) for n in range(3)])
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(processes=3))
        assert len({handle.result(0) for handle in handles}) == 3


def test_isolated_task_has_its_current_task() -> None:
    with open_task_rig(jobs.asks) as rig:
        handle = rig.rt.submit(jobs.asks)
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) == [handle.id, 1, f"task-{handle.id}", False]


@pytest.mark.parametrize("how", ["SIGKILL", "forked"])
def test_task_that_kills_its_process_dies_and_affects_no_other_task(
    tmp_path: Path, how: str
) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    with open_task_rig(jobs.die, jobs.wait_for, jobs.pid) as rig:
        beside = rig.rt.submit(jobs.wait_for, str(go), str(here))
        worker = rig.worker(processes=2)
        rig.step_until(lambda: read_text(here), "the one beside it", worker)
        killer = rig.rt.submit(jobs.die, how)
        others = rig.rt.submit_many(jobs.pid, [(n,) for n in range(10)])
        rig.step_until(lambda: killer.status().expiries == 2, "two deaths", worker, tick_ns=10 * MS)
        # Its last lease is granted in quarantine, when no other task runs.
        go.touch()
        rig.step_until(lambda: state(killer) == "DEAD", "its death", worker, tick_ns=10 * MS)
        rig.step_until(
            lambda: all_in([beside, *others], "COMPLETED"), "the others", worker, tick_ns=MS
        )
        status = killer.status()
        assert (status.expiries, status.failures, status.attempt) == (3, 0, 3)
        assert status.reason == "expiries_exhausted"
        assert "exit_code" in status.error
        assert {handle.status().attempt for handle in [beside, *others]} == {1}


@pytest.mark.parametrize(
    "data",
    [OVERSIZE_FRAME, FRAMES.encode(b"\xc1"), FRAMES.encode(b"\x90")],
    ids=["oversize", "no msgpack", "no message"],
)
def test_invalid_frame_of_a_task_process_ends_the_attempt_as_exited(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "pid"
    with open_task_rig(jobs.write_to_pipe, jobs.pid) as rig:
        worker = rig.worker(processes=1)
        handle = rig.rt.submit(jobs.write_to_pipe, data, str(path))
        rig.step_until(lambda: state(handle) == "DEAD", "its death", worker)
        status = handle.status()
        assert (status.expiries, status.failures, status.reason) == (1, 0, "expiries_exhausted")
        assert "exit_code" in status.error
        assert not os_process(int(read_text(path))).alive
        after = rig.rt.submit(jobs.pid)
        rig.step_until(lambda: state(after) == "COMPLETED", "the next", worker)


def test_invalid_frame_of_the_worker_ends_the_task_process() -> None:
    child = TaskProcess()
    try:
        child._pipe._sock.sendall(OVERSIZE_FRAME)
        assert child.process.wait(30) == 0
    finally:
        child.discard()


@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt"])
def test_exit_error_in_a_task_process_fails_only_the_task(how: str) -> None:
    with open_task_rig(jobs.leave, jobs.pid) as rig:
        worker = rig.worker(processes=1)
        before, handle, after = (
            rig.rt.submit(jobs.pid),
            rig.rt.submit(jobs.leave, how),
            rig.rt.submit(jobs.pid),
        )
        rig.step_until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert (state(handle), handle.status().reason) == ("FAILED", "exited")
        assert before.result(0) == after.result(0)


def test_error_in_a_task_process_is_reported_with_its_text() -> None:
    with open_task_rig(jobs.fail) as rig:
        handle = rig.rt.submit(jobs.fail, "no luck")
        worker = rig.worker()
        rig.step_until(lambda: state(handle) == "FAILED", "its end", worker, tick_ns=10 * MS)
        assert (handle.status().error, handle.status().failures) == ("ValueError: no luck", 2)


@pytest.mark.parametrize("what", ["object", "large"])
def test_unstorable_result_is_rejected_in_the_task_process(what: str) -> None:
    with open_task_rig(jobs.returned) as rig:
        handle = rig.rt.submit(jobs.returned, what)
        rig.step_until(lambda: state(handle) == "FAILED", "its end", rig.worker())
        assert handle.status().reason == "bad_result"


def test_lease_is_extended_while_the_task_process_runs(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with open_task_rig(jobs.obey) as rig:
        handle = rig.rt.submit(jobs.obey, str(path))
        worker = rig.worker()
        rig.step_until(lambda: read_text(path), "its beginning", worker)
        rig.pass_time(60, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        handle.cancel()
        rig.step_until(lambda: read_text(path) == "cancelled", "its end", worker)


def test_cancel_sets_the_flag_in_the_task_process_and_keeps_it_alive(tmp_path: Path) -> None:
    pids: set[str] = set()
    with open_task_rig(jobs.obey) as rig:
        worker = rig.worker(processes=1)
        for n in range(6):
            path = tmp_path / str(n)
            handle = rig.rt.submit(jobs.obey, str(path))
            rig.step_until(lambda path=path: read_text(path), "its beginning", worker)
            pids.add(read_text(path))
            assert handle.cancel()
            rig.step_until(lambda path=path: read_text(path) == "cancelled", "the flag", worker)
            assert state(handle) == "DEAD"
    # Each cancel abandons the thread but not its process. The next task reuses it unless it starts too early.
    assert len(pids) <= 2


def test_cancelled_task_process_that_does_not_return_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with open_task_rig(jobs.stubborn, jobs.pid) as rig:
        handle = rig.rt.submit(jobs.stubborn, str(path))
        worker = rig.worker(processes=1)
        rig.step_until(lambda: read_text(path), "its beginning", worker)
        child = os_process(int(read_text(path)))
        assert handle.cancel()
        rig.step_until(lambda: not child.alive, "its death", worker)
        after = rig.rt.submit(jobs.pid)
        rig.step_until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert (state(handle), handle.status().expiries) == ("DEAD", 0)


def test_progress_from_threads_of_a_task_process_is_not_corrupted(tmp_path: Path) -> None:
    values = [f"{n}" * 2_000 for n in range(10)]
    with open_task_rig(jobs.report) as rig:
        handle = rig.rt.submit(jobs.report, values)
        worker = rig.worker()
        rig.step_until(
            lambda: handle.status().progress == values[-1], "progress", worker, tick_ns=100 * MS
        )
        handle.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_process_group_ends_no_isolated_task(
    tmp_path: Path, number: signal.Signals
) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    with open_task_rig(jobs.wait_for) as rig:
        handle = rig.rt.submit(jobs.wait_for, str(go), str(here))
        worker = rig.worker()
        rig.step_until(lambda: read_text(here), "its beginning", worker)
        os_process(int(read_text(here))).send(number)
        go.touch()
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert handle.status().attempt == 1


def test_subprocess_of_an_isolated_task_can_be_terminated_by_a_signal() -> None:
    with open_task_rig(jobs.ends_what_it_starts) as rig:
        handle = rig.rt.submit(jobs.ends_what_it_starts)
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) == -signal.SIGTERM


def test_task_process_ends_with_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with open_task_rig(jobs.stubborn) as rig:
        handle = rig.rt.submit(jobs.stubborn, str(path))
        worker = rig.worker()
        rig.step_until(lambda: read_text(path), "its beginning", worker)
        child = os_process(int(read_text(path)))
        rig.stop(worker)
        rig.step_until(lambda: not child.alive, "its end")
        status = handle.status()
        assert (status.state, status.expiries, status.failures) == ("WAITING", 0, 0)


def test_find_task_rejects_functions_that_are_no_task() -> None:
    with pytest.raises(Invalid):
        find_task("os", "getpid")
    with pytest.raises(Invalid):
        find_task("tests.workers.task_jobs", "no_such_task")
    with pytest.raises(ImportError):
        find_task("tests.workers.no_such_module", "pid")
