"""A forked ledger service (`tests/forked_services.py`) is like a spawned one."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.spark.service_supervisor import ServiceProcess
from tests.forked_services import COMMAND, ForkedService
from tests.process.watch import until


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")


@pytest.mark.parametrize("start", [ServiceProcess, ForkedService])
def test_service_has_its_command_line_directory_streams_and_parent(
    start: type[ServiceProcess],
) -> None:
    service = start()
    try:
        until(lambda: arguments_of(service.pid) == COMMAND, "the command line")
        process = Path(f"/proc/{service.pid}")
        assert os.readlink(process / "cwd") == os.getcwd()
        assert int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        assert os.readlink(process / "fd" / "2") == os.readlink("/proc/self/fd/2")
    finally:
        service.discard()
    assert service.process.returncode == 0


def test_killed_forked_service_reports_its_signal() -> None:
    service = ForkedService()
    service.kill()
    assert service.end(timeout_s=30.0) == -signal.SIGKILL
    assert not service.is_alive()
