"""Tasks in processes of their own: who is hurt when one dies, and how it is reached."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import MS
from holdfast.errors import Invalid
from holdfast.roles.task_child import find
from tests.process.watch import seen
from tests.roles import task_jobs as jobs
from tests.roles.task_rig import shift

MODULES = ("holdfast.roles.task_child", "holdfast.roles.task_worker")


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def all_in(handles: list[hf.TaskHandle[Any]], wanted: str) -> bool:
    return all(state(handle) == wanted for handle in handles)


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_an_isolated_task_runs_in_another_process() -> None:
    with shift(jobs.pid) as rig:
        handle = rig.rt.submit(jobs.pid)
        rig.until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) != os.getpid()


def test_a_process_is_kept_for_the_next_task() -> None:
    with shift(jobs.pid) as rig:
        handles = rig.rt.submit_many(jobs.pid, [(n,) for n in range(20)])
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(processes=1))
        assert len({handle.result(0) for handle in handles}) == 1


def test_as_many_processes_run_as_the_worker_may_have(tmp_path: Path) -> None:
    with shift(jobs.meet) as rig:
        handles = rig.rt.submit_many(jobs.meet, [(str(tmp_path), n, 3) for n in range(3)])
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(processes=3))
        assert len({handle.result(0) for handle in handles}) == 3


def test_an_isolated_task_knows_itself() -> None:
    with shift(jobs.asks) as rig:
        handle = rig.rt.submit(jobs.asks)
        rig.until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) == [handle.id, 1, f"task-{handle.id}", False]


@pytest.mark.parametrize("how", ["SIGKILL", "forked"])
def test_a_task_that_kills_its_process_is_dead_in_the_end_and_takes_no_other_with_it(
    tmp_path: Path, how: str
) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    with shift(jobs.die, jobs.wait_for, jobs.pid) as rig:
        beside = rig.rt.submit(jobs.wait_for, str(go), str(here))
        worker = rig.worker(processes=2)
        rig.until(lambda: said(here), "the one beside it", worker)
        deadly = rig.rt.submit(jobs.die, how)
        others = rig.rt.submit_many(jobs.pid, [(n,) for n in range(10)])
        rig.until(lambda: deadly.status().expiries == 2, "two deaths", worker, tick_ns=10 * MS)
        # Its last lease is granted when nothing else runs.
        go.touch()
        rig.until(lambda: state(deadly) == "DEAD", "its death", worker, tick_ns=10 * MS)
        rig.until(lambda: all_in([beside, *others], "COMPLETED"), "the others", worker, tick_ns=MS)
        status = deadly.status()
        assert (status.expiries, status.failures, status.attempt) == (3, 0, 3)
        assert status.reason == "expiries_exhausted"
        assert "exit_code" in status.error
        assert {handle.status().attempt for handle in [beside, *others]} == {1}


@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt"])
def test_a_task_that_would_end_its_process_by_raising_has_only_failed(how: str) -> None:
    with shift(jobs.leave, jobs.pid) as rig:
        worker = rig.worker(processes=1)
        before, handle, after = (
            rig.rt.submit(jobs.pid),
            rig.rt.submit(jobs.leave, how),
            rig.rt.submit(jobs.pid),
        )
        rig.until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert (state(handle), handle.status().reason) == ("FAILED", "exited")
        assert before.result(0) == after.result(0)


def test_an_error_in_a_child_is_told_with_its_text() -> None:
    with shift(jobs.fail) as rig:
        handle = rig.rt.submit(jobs.fail, "no luck")
        worker = rig.worker()
        rig.until(lambda: state(handle) == "FAILED", "its end", worker, tick_ns=10 * MS)
        assert (handle.status().error, handle.status().failures) == ("ValueError: no luck", 2)


@pytest.mark.parametrize("what", ["object", "large"])
def test_a_result_that_cannot_be_stored_is_refused_in_the_child(what: str) -> None:
    with shift(jobs.returned) as rig:
        handle = rig.rt.submit(jobs.returned, what)
        rig.until(lambda: state(handle) == "FAILED", "its end", rig.worker())
        assert handle.status().reason == "bad_result"


def test_a_lease_is_extended_while_the_child_works(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with shift(jobs.obey) as rig:
        handle = rig.rt.submit(jobs.obey, str(path))
        worker = rig.worker()
        rig.until(lambda: said(path), "its beginning", worker)
        rig.pass_time(60, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        handle.cancel()
        rig.until(lambda: said(path) == "cancelled", "its end", worker)


def test_a_cancelled_child_sees_the_flag_and_lives_on(tmp_path: Path) -> None:
    children: set[str] = set()
    with shift(jobs.obey) as rig:
        worker = rig.worker(processes=1)
        for n in range(6):
            path = tmp_path / str(n)
            handle = rig.rt.submit(jobs.obey, str(path))
            rig.until(lambda path=path: said(path), "its beginning", worker)
            children.add(said(path))
            assert handle.cancel()
            rig.until(lambda path=path: said(path) == "cancelled", "the flag", worker)
            assert state(handle) == "DEAD"
    # Each hand was given up, its process was not: the next had it, unless it asked too soon.
    assert len(children) <= 2


def test_a_cancelled_child_that_does_not_come_back_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with shift(jobs.stubborn, jobs.pid) as rig:
        handle = rig.rt.submit(jobs.stubborn, str(path))
        worker = rig.worker(processes=1)
        rig.until(lambda: said(path), "its beginning", worker)
        child = seen(int(said(path)))
        assert handle.cancel()
        rig.until(lambda: not child.alive, "its death", worker)
        after = rig.rt.submit(jobs.pid)
        rig.until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert (state(handle), handle.status().expiries) == ("DEAD", 0)


def test_progress_of_a_child_is_shown_and_threads_of_it_do_not_garble_it(tmp_path: Path) -> None:
    values = [f"{n}" * 2_000 for n in range(10)]
    with shift(jobs.report) as rig:
        handle = rig.rt.submit(jobs.report, values)
        worker = rig.worker()
        rig.until(
            lambda: handle.status().progress == values[-1], "progress", worker, tick_ns=100 * MS
        )
        handle.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_no_task_of_a_child(
    tmp_path: Path, number: signal.Signals
) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    with shift(jobs.wait_for) as rig:
        handle = rig.rt.submit(jobs.wait_for, str(go), str(here))
        worker = rig.worker()
        rig.until(lambda: said(here), "its beginning", worker)
        seen(int(said(here))).send(number)
        go.touch()
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert handle.status().attempt == 1


def test_what_a_task_starts_can_be_ended_by_a_signal() -> None:
    with shift(jobs.ends_what_it_starts) as rig:
        handle = rig.rt.submit(jobs.ends_what_it_starts)
        rig.until(lambda: state(handle) == "COMPLETED", "its end", rig.worker())
        assert handle.result(0) == -signal.SIGTERM


def test_no_child_outlives_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "told"
    with shift(jobs.stubborn) as rig:
        handle = rig.rt.submit(jobs.stubborn, str(path))
        worker = rig.worker()
        rig.until(lambda: said(path), "its beginning", worker)
        child = seen(int(said(path)))
        rig.stop(worker)
        rig.until(lambda: not child.alive, "its end")
        status = handle.status()
        assert (status.state, status.expiries, status.failures) == ("WAITING", 0, 0)


def test_only_what_is_declared_as_a_task_is_ever_run() -> None:
    with pytest.raises(Invalid):
        find("os", "getpid")
    with pytest.raises(Invalid):
        find("tests.roles.task_jobs", "no_such_task")
    with pytest.raises(ImportError):
        find("tests.roles.no_such_module", "pid")
