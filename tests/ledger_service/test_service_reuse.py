"""The process of a ledger service after its run: it serves the next run of the driver, or it exits."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.child_process import SpawnedChild
from holdfast.durable import lease as leases
from holdfast.ledger import runs
from holdfast.spark import process_state, service_supervisor
from holdfast.spark.process_state import ProcessState
from holdfast.spark.sinks.parquet import ParquetSink, read_parts
from tests.ledger_service.service_rig import ServiceRig, running_service
from tests.process.watch import until


@pytest.fixture(autouse=True)
def _no_idle_service() -> None:
    """Each test starts a process. The processes of other tests are not used."""
    service_supervisor._services.discard_idle()


class UserSink(ParquetSink):
    def spec(self) -> Any:
        return {**super().spec(), "kind": f"{__name__}:{type(self).__name__}"}


def finish(service: ServiceRig, rows: int) -> int:
    """Finish the run. Return the pid of the service."""
    line, done = service.connect(), 0
    while done < rows:
        grant = line.claim(rows, begin=rows)
        line.report(grant, done=grant.ranges)
        done += len(grant.seqs)
    assert service.wait_over().status == "finished"
    return service.supervisor.pid


def test_process_of_a_finished_run_serves_the_next_run(tmp_path: Path) -> None:
    pids = set()
    for n in (5, 7):
        out = tmp_path / f"out-{n}"
        with running_service(tmp_path / f"data-{n}", n, sink=ParquetSink(out).spec()) as service:
            pids.add(finish(service, n))
        assert read_parts(out).rows == n
    assert len(pids) == 1


def test_kept_process_has_released_the_lease_and_the_store_of_its_run(tmp_path: Path) -> None:
    with running_service(tmp_path / "first", 5) as first:
        pid = finish(first, 5)
    with running_service(tmp_path / "second", 5) as second:
        assert second.supervisor.pid == pid
        files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        assert any(file.startswith(str(tmp_path / "second")) for file in files)
        assert not any(file.startswith(str(tmp_path / "first")) for file in files)
    with running_service(tmp_path / "first") as first:
        # The new holder did not wait for a lease to expire.
        lease = first.store.read(leases.current_status, runs.lease_resource("job"))
        assert lease.worker == f"ledger-{first.supervisor.pid}"


def test_process_with_the_module_of_a_user_sink_is_not_kept(tmp_path: Path) -> None:
    sink = UserSink(tmp_path / "out").spec()
    with running_service(tmp_path / "data", 5, sink=sink) as service:
        pid = finish(service, 5)
    with running_service(tmp_path / "other", 5) as service:
        assert service.supervisor.pid != pid


def test_process_of_an_unfinished_run_is_not_kept(tmp_path: Path) -> None:
    with running_service(tmp_path / "data", 5) as service:
        pid = service.supervisor.pid
    with running_service(tmp_path / "other", 5) as service:
        assert service.supervisor.pid != pid


def test_process_of_a_failed_driver_has_released_its_lease(tmp_path: Path) -> None:
    with pytest.raises(ValueError), running_service(tmp_path / "data", 5) as service:  # noqa: PT012
        pid = service.supervisor.pid
        raise ValueError("the driver failed")
    with running_service(tmp_path / "data", name="other") as service:
        lease = service.store.read(leases.current_status, runs.lease_resource("job"))
        assert lease.worker == ""
        assert service.supervisor.pid == pid


def test_kept_process_that_died_is_replaced(tmp_path: Path) -> None:
    with running_service(tmp_path / "data", 5) as service:
        pid = finish(service, 5)
    [idle] = service_supervisor._services._idle
    assert idle.wait_idle()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not idle.is_alive(), "the exit of the process")
    with running_service(tmp_path / "other", 5) as service:
        assert finish(service, 5) != pid


class EndingProcess(service_supervisor.ServiceProcess):
    """An idle process that ends in the moment in which it gets its configuration."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
        SpawnedChild.__init__(self, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._is_ending = False


def test_kept_process_whose_idle_time_ends_at_the_start_of_a_run_is_replaced(
    tmp_path: Path,
) -> None:
    ending = EndingProcess()
    service_supervisor._services.put(ending)
    with running_service(tmp_path / "data", 5) as service:
        assert finish(service, 5) != ending.pid
    assert ending.process.returncode == 0


def test_kept_process_exits_with_its_driver(tmp_path: Path) -> None:
    with running_service(tmp_path / "data", 5) as service:
        finish(service, 5)
    [idle] = service_supervisor._services._idle
    idle.discard()
    assert idle.process.returncode == 0


def test_service_starts_with_an_environment_that_is_not_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATIN_1", os.fsdecode(b"caf\xe9"))
    with running_service(tmp_path / "data", 5) as service:
        finish(service, 5)


def test_environment_of_a_service_becomes_that_of_its_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THE_LAST_RUN", "1")
    monkeypatch.setenv("CHANGED", "before")
    wanted = {**os.environb, b"CHANGED": b"caf\xe9"}
    del wanted[b"OF_THE_LAST_RUN"]
    process_state.set_environment(wanted)
    assert dict(os.environb) == wanted


def test_process_is_kept_by_a_driver_with_many_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with running_service(tmp_path / "data", 5) as service:
            pid = finish(service, 5)
        with running_service(tmp_path / "other", 5) as service:
            assert service.supervisor.pid == pid
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_process_with_a_library_that_keeps_its_configuration_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyIceberg reads the addresses and credentials of catalogs from the environment when it is imported."""
    monkeypatch.setattr(process_state, "MEMORY_KIB_MAX", sys.maxsize)
    before = ProcessState.now()
    monkeypatch.delitem(sys.modules, "pyiceberg", raising=False)
    assert before.restore()
    monkeypatch.setitem(sys.modules, "pyiceberg", os)
    assert not before.restore()


def test_process_waits_for_threads_that_threads_of_its_run_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_state, "MEMORY_KIB_MAX", sys.maxsize)
    # Other tests of this process may have loaded such a library.
    monkeypatch.setattr(process_state, "CONFIGURED_ONCE", ())
    before = ProcessState.now()
    may_start, may_end = threading.Event(), threading.Event()
    last = threading.Thread(target=may_end.wait, args=(30,), daemon=True)

    def start_another() -> None:
        may_start.wait(30)
        last.start()

    threading.Thread(target=start_another, daemon=True).start()
    threading.Timer(0.1, may_start.set).start()
    assert not before.restore()
    may_end.set()
    last.join()
    assert before.restore()


def test_process_waits_for_threads_that_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "MEMORY_KIB_MAX", sys.maxsize)
    monkeypatch.setattr(process_state, "CONFIGURED_ONCE", ())
    before = ProcessState.now()
    may_start = threading.Event()

    class StartingThread(threading.Thread):
        def _bootstrap(self) -> None:
            may_start.wait(30)
            super()._bootstrap()  # type: ignore[misc]

    starting = StartingThread(target=int, daemon=True)
    threading.Thread(target=starting.start, daemon=True).start()
    while starting not in threading.enumerate():
        pass
    threading.Timer(0.1, may_start.set).start()
    assert before.restore()
    assert not starting.is_alive()
