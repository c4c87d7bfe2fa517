"""Forked ledger services: a fork server starts the services of a test process.

A ledger service imports modules for 0.4 s of processor time. The fork server imports them once per test process. The
service has the command line, the environment and the limits of a spawned one, and is a child of the test process.
`HOLDFAST_TEST_FRESH=1` starts every service in a new interpreter. Tests of the start and the reuse of services spawn
them (`spawned_services`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from holdfast.spark import service_supervisor
from holdfast.spark.service_supervisor import ServiceProcess
from tests.fork_server import ForkServer, can_fork

MODULES = (
    "holdfast.spark.service",
    "holdfast.store.lmdb.store",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.postgres.store",
)
COMMAND = [sys.executable, "-m", "holdfast.spark.service"]
POLL_S = 0.002

_server = ForkServer(MODULES)


class ForkedPopen:
    """The part of `subprocess.Popen` that the owner of a service uses."""

    def __init__(self) -> None:
        stdin, stdout = os.pipe(), os.pipe()
        streams = [stdin[0], stdout[1], 2]
        self.pid = _server.fork_with(COMMAND, os.environ, os.getcwd(), streams, is_renamed=True)
        os.close(stdin[0])
        os.close(stdout[1])
        self.stdin = os.fdopen(stdin[1], "wb")
        self.stdout = os.fdopen(stdout[0], "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedService(ServiceProcess):
    def __init__(self) -> None:
        if can_fork(COMMAND, {}):
            self.process = ForkedPopen()  # type: ignore[assignment]
            self._is_ending = False
        else:
            super().__init__()


@contextlib.contextmanager
def forked_services() -> Iterator[None]:
    """The services that this process starts are forked."""
    with _services_start_as(ForkedService):
        yield


@contextlib.contextmanager
def spawned_services() -> Iterator[None]:
    """The services that this process starts are spawned, as by the product."""
    with _services_start_as(ServiceProcess):
        yield


@contextlib.contextmanager
def _services_start_as(start: type[ServiceProcess]) -> Iterator[None]:
    pool = service_supervisor._services
    before = pool._start
    pool.discard_idle()
    pool._start = start
    try:
        yield
    finally:
        pool.discard_idle()
        pool._start = before
