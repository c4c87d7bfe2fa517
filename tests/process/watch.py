"""Processes as /proc shows them: the writer of a store, its state, its CPU time and memory.

`until` is the only wait of this suite. It polls a condition and fails after a time-out.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

POLL_S = 0.005
# The kills of each kill loop. `make chaos` runs the loops again with more.
KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS") or 3)
# Part of the writer's command line.
WRITER = b"holdfast.store.lmdb.writer"
# The number of the system call with which LMDB makes a commit durable.
FDATASYNC = {"x86_64": "75", "aarch64": "83"}
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def until(
    condition: Callable[[], T], what: str, timeout_s: float = 30.0, *, poll_s: float = POLL_S
) -> T:
    """Poll until the condition returns a true value, and return it. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(poll_s)
    return found


class OsProcess(NamedTuple):
    """A process, identified by its pid and start time, so that a reused pid is not mistaken for it."""

    pid: int
    start_time: str

    @property
    def state(self) -> str:
        """The state letter in /proc (R S D T), or empty if the process ended or is a zombie."""
        letter, start_time = _stat(self.pid)
        return "" if start_time != self.start_time or letter in "ZX" else letter

    @property
    def alive(self) -> bool:
        return self.state != ""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(fd, number)
                    return True
            finally:
                os.close(fd)
        return False

    def kill(self) -> bool:
        """Send SIGKILL and wait until the process has ended."""
        sent = self.send(signal.SIGKILL)
        assert self.wait(30.0), f"the death of {self.pid}: not within 30 s"
        return sent

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended. Returns False after the time-out."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return not self.alive or bool(select.select([fd], [], [], max(timeout_s, 0))[0])
        finally:
            os.close(fd)

    def stop(self) -> bool:
        """Send SIGSTOP and wait until the process is stopped."""
        if not self.send(signal.SIGSTOP):
            return False
        return until(lambda: self.stopped or not self.alive, f"the stop of {self.pid}") and (
            self.stopped
        )

    def cont(self) -> bool:
        return self.send(signal.SIGCONT)

    def cpu_s(self) -> float:
        """The user and system time used by the process."""
        fields = _fields(self.pid)
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S

    def is_in_commit(self) -> bool:
        """Whether the process is in fdatasync: the data is written and the commit is not yet durable."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/syscall").read_text().split()[0]
            return text == FDATASYNC.get(platform.machine())
        return False

    def anonymous_bytes(self) -> int:
        """Resident anonymous memory, without mapped files."""
        return status_bytes(self.pid, "RssAnon")

    def connection_count(self) -> int:
        """The connections of a writer: its sockets without the listener. 0 if the process has ended."""
        sockets = 0
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    sockets += os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:")
        return max(sockets - 1, 0)


def os_process(pid: int) -> OsProcess:
    return OsProcess(pid, _stat(pid)[1])


def status_bytes(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no {name}")


def processes_of(path: Path) -> list[OsProcess]:
    """All live processes whose command line contains this directory."""
    return _processes_with(os.fsencode(path))


def writers_of(path: Path) -> list[OsProcess]:
    """The writer processes of this store, including starting ones that may still lose the lock."""
    return _processes_with(WRITER, f'"{path}"'.encode())


def writer_of(path: Path, *, other_than: OsProcess | None = None) -> OsProcess:
    """Wait until this store has exactly one writer, and return it."""

    def only() -> OsProcess | None:
        found = [writer for writer in writers_of(path) if writer != other_than]
        return found[0] if len(found) == 1 else None

    found = until(only, f"one writer of {path}")
    assert found is not None
    return found


def lock_holders(path: Path) -> list[OsProcess]:
    """Processes that /proc/locks lists for the writer's lock file, including exiting ones."""
    with contextlib.suppress(FileNotFoundError):
        inode = (path / "writer.lock").stat().st_ino
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 7: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
        return [
            os_process(int(fields[4]))
            for fields in lines
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")
        ]
    return []


def assert_no_process_left(path: Path, idle_exit_s: float, slack_s: float = 15.0) -> None:
    """Assert that the writer exits without clients and that no other process uses the store."""
    deadline = time.monotonic() + idle_exit_s + slack_s
    # A look at all processes costs more than a wait for one of them.
    while processes := [*processes_of(path), *lock_holders(path)]:
        for process in processes:
            process.wait(deadline - time.monotonic())
        if time.monotonic() > deadline:
            left = ", ".join(f"{pid} {_stat(pid)[0]}" for pid, _ in processes)
            raise AssertionError(f"{left} still serves {path} after {idle_exit_s} + {slack_s} s")
        time.sleep(POLL_S)


def assert_no_client_left(path: Path, slack_s: float = 15.0) -> None:
    """Assert that the writer has no clients, stop it, and assert that no other process uses the store.

    An idle writer exits after `WriterLimits.idle_exit_s`. `test_cold_start` waits for that, most tests need not.
    """
    for writer in writers_of(path):
        until(lambda: writer.connection_count() == 0, "the end of all clients", slack_s)  # noqa: B023
        writer.send(signal.SIGTERM)
    assert_no_process_left(path, 0, slack_s)


def _processes_with(*texts: bytes) -> list[OsProcess]:
    """The live processes whose command line contains all of these texts."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                # The command line of a zombie is empty. Between fork and exec a child shows the
                # command line of its parent.
                with open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                    line = file.read()
                if all(text in line for text in texts):
                    letter, start_time = _stat(int(name))
                    if letter not in ("", "Z", "X"):
                        found.append(OsProcess(int(name), start_time))
    return found


def _stat(pid: int) -> tuple[str, str]:
    try:
        fields = _fields(pid)
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain spaces and brackets."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read().decode(errors="replace").rpartition(")")[2].split()
