"""Looking at processes from outside: who serves a store, what state it is in, what it costs.

`until` is the only wait of this suite: it polls a condition and fails when the time is up.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

POLL_S = 0.005
# What the writer's command line holds beside the path of its store.
WRITER = b"holdfast.store.writer"
# The number of the system call by which LMDB makes a commit durable.
FDATASYNC = {"x86_64": "75", "aarch64": "83"}
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def until(
    condition: Callable[[], T], what: str, timeout_s: float = 30.0, *, poll_s: float = POLL_S
) -> T:
    """Poll until the condition holds; its value, which is true. Fails when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(poll_s)
    return found


class Seen(NamedTuple):
    """A process as it was found. With its start time it cannot be taken for another one."""

    pid: int
    born: str

    @property
    def state(self) -> str:
        """Its letter in /proc: R S D T; empty when it is gone, or a zombie."""
        letter, born = _stat(self.pid)
        return "" if born != self.born or letter in "ZX" else letter

    @property
    def alive(self) -> bool:
        return self.state != ""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def send(self, number: signal.Signals) -> bool:
        """Signal it, unless it is gone; whether that was done."""
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
        """SIGKILL it, and return once it is gone."""
        sent = self.send(signal.SIGKILL)
        until(lambda: not self.alive, f"the death of {self.pid}")
        return sent

    def stop(self) -> bool:
        """SIGSTOP it, and return once it stands still."""
        if not self.send(signal.SIGSTOP):
            return False
        return until(lambda: self.stopped or not self.alive, f"the stop of {self.pid}") and (
            self.stopped
        )

    def cont(self) -> bool:
        return self.send(signal.SIGCONT)

    def cpu_s(self) -> float:
        """User and system time it has used."""
        fields = _fields(self.pid)
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S

    def in_commit(self) -> bool:
        """Whether it is inside fdatasync just now: data is written, the commit is not done."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/syscall").read_text().split()[0]
            return text == FDATASYNC.get(platform.machine())
        return False

    def anonymous_bytes(self) -> int:
        """Resident memory of its own: mapped files are not in it."""
        return status_bytes(self.pid, "RssAnon")


def seen(pid: int) -> Seen:
    return Seen(pid, _stat(pid)[1])


def status_bytes(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no {name}")


def processes_of(path: Path) -> list[Seen]:
    """Every live process whose command line names this directory."""
    return [process for process, line in _command_lines() if os.fsencode(path) in line]


def writers_of(path: Path) -> list[Seen]:
    """Processes that serve this store, or are about to find out that another one does."""
    return [
        process
        for process, line in _command_lines()
        if WRITER in line and f'"{path}"'.encode() in line
    ]


def writer_of(path: Path, *, other_than: Seen | None = None) -> Seen:
    """The writer of this store, once there is exactly one."""

    def only() -> Seen | None:
        found = [writer for writer in writers_of(path) if writer != other_than]
        return found[0] if len(found) == 1 else None

    found = until(only, f"one writer of {path}")
    assert found is not None
    return found


def lock_holders(path: Path) -> list[Seen]:
    """Who has a lock on the writer's lock file, as the kernel says; also one about to be gone."""
    with contextlib.suppress(FileNotFoundError):
        inode = (path / "writer.lock").stat().st_ino
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 7: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
        return [
            seen(int(fields[4]))
            for fields in lines
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")
        ]
    return []


def assert_nobody_is_left(path: Path, linger_s: float, slack_s: float = 15.0) -> None:
    """Without clients the writer leaves by itself, and nothing else was left behind."""
    left = "nobody"

    def gone() -> bool:
        nonlocal left
        processes = [*processes_of(path), *lock_holders(path)]
        left = ", ".join(f"{pid} {_stat(pid)[0]}" for pid, _ in processes)
        return not processes

    try:
        until(gone, "the writer's leave", linger_s + slack_s)
    except AssertionError:
        raise AssertionError(f"{left} still serves {path} after {linger_s} + {slack_s} s") from None


def _command_lines() -> list[tuple[Seen, bytes]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                letter, born = _stat(int(name))
                # The command line of a zombie is empty; one that is forked but has not yet
                # begun its own program still shows that of its parent.
                if line and letter not in ("", "Z", "X"):
                    found.append((Seen(int(name), born), line))
    return found


def _stat(pid: int) -> tuple[str, str]:
    try:
        fields = _fields(pid)
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _fields(pid: int) -> list[str]:
    """What /proc says behind the name, which may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
