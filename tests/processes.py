"""Real processes for tests: spawn, wait for the ready line, kill, stop, continue, reap.

    with Proc.spawn([sys.executable, "-m", "tests.process.load_worker"]) as worker:
        worker.expect("claimed 7")
        worker.kill()

- A process starts in a new session, so its descendants share its group. A tag in its environment identifies
  descendants that left the session.
- Leaving the `with` block kills the remaining processes and fails if one survives.
- Waits do not sleep: one thread watches the output and, through a pidfd, the exit. A stop is awaited by the kernel's
  report. The exit is published after all output of the process.
- The dead leader stays a zombie until the block ends, so the kernel cannot reuse its pid and group id.
- A process handles SIGINT, even if the tests were started in the background of a shell, which ignores it there.

Linux only, like the fault injection that uses it.
"""

import contextlib
import os
import re
import select
import selectors
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from tests.fork_server import ForkedChild, ForkServer, can_fork

ROOT = Path(__file__).resolve().parent.parent
TAG = "HOLDFAST_TEST_PROC"

# A factor for time limits on slow machines.
_SLOWNESS = float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1)
TIMEOUT_S = 30.0 * _SLOWNESS
REAP_TIMEOUT_S = 10.0 * _SLOWNESS
READ_BYTES = 65536
DRAIN_READS_MAX = 64  # a full pipe is read in fewer; a descendant may write without end
TAIL_LINES = 30
# Reads of an empty environment, a millisecond apart; the parent of the kernel threads.
_EXEC_TRIES = 20
_KTHREADD = 2
_FORK_SERVER = ForkServer()


def _handle_sigint() -> None:
    """Handle SIGINT in this process if it was started with SIGINT ignored. A child inherits an ignored signal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_handle_sigint()


def require_programs(*programs: str) -> None:
    """Fail with the installation command if a program is missing."""
    for program in programs:
        assert shutil.which(program), f"{program} is missing: apt-get install -y {program}"


class ProcFailed(AssertionError):
    """The process did not reach the awaited state. The text holds its output."""


class Proc:
    """One process and its group. `lines` is its stdout so far, `errors` its stderr."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        fresh: bool = False,
    ) -> None:
        self.args = list(args)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._token = uuid4().hex
        self._lines_passed = 0  # lines that `expect` has passed
        self._exit_code: int | None = None
        self._changed = threading.Condition()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
            TAG: self._environment_tags(),
        }
        self._popen: subprocess.Popen[bytes] | ForkedChild
        if not fresh and can_fork(self.args, env):
            self._popen = _FORK_SERVER.fork(self.args, environment, os.path.abspath(cwd or "."))
        else:
            self._popen = subprocess.Popen(
                self.args,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._closing, self._close = os.pipe()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @classmethod
    def spawn(
        cls,
        args: Sequence[str],
        *,
        ready: str | None = "ready",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        fresh: bool = False,
    ) -> Self:
        """Start `args` and return once it printed a line that begins with the word `ready`.

        `env` is added to this process's environment. With `ready=None` it returns immediately. With `fresh` a Python
        program starts in a new interpreter, which imports Holdfast. Otherwise the fork server starts it.
        """
        proc = cls(args, env=env, cwd=cwd, fresh=fresh)
        if ready is not None:
            try:
                proc._await_line(re.compile(re.escape(ready) + r"(?!\w)").match, ready, timeout_s)
            except BaseException:
                proc.close()
                raise
        return proc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- signals ----------------------------------------------------------------------------

    def kill(self) -> int:
        """SIGKILL this process, not its descendants, and wait for its exit."""
        self._signal(signal.SIGKILL)
        return self.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP, and return once the process is stopped."""
        self._signal(signal.SIGSTOP)
        self._await_report(os.WSTOPPED)

    def cont(self) -> None:
        """SIGCONT a process that `stop` stopped, and return once it runs again."""
        self._signal(signal.SIGCONT)
        self._await_report(os.WCONTINUED)

    def send(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._popen.stdin
        self._popen.stdin.write(f"{line}\n".encode())

    # --- waiting ----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """False once it has exited; a stopped process is still running."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit code, negative for a signal. All output is then in `lines` and `errors`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._exit_code is not None, timeout_s):
                raise self._failure(f"still runs after {timeout_s} s")
        assert self._exit_code is not None
        return self._exit_code

    def expect(self, text: str, timeout_s: float = TIMEOUT_S) -> str:
        """Return the next stdout line that contains `text`, after the last match."""
        return self._await_line(lambda line: text in line, text, timeout_s)

    # --- the group --------------------------------------------------------------------------

    def survivors(self) -> list[int]:
        """List live descendants: processes of its group, of its session, or with its tag."""
        return [
            pid
            for pid, stat in _live_processes()
            if pid != self.pid and self._is_descendant(pid, stat)
        ]

    def close(self) -> None:
        """Kill and reap the process and its descendants. Fail if one is still alive."""
        if self._popen.returncode is not None:
            return
        deadline = time.monotonic() + REAP_TIMEOUT_S
        self._signal(signal.SIGKILL)
        while survivors := self.survivors():
            for pid in survivors:
                _kill_and_await(pid)
            if time.monotonic() > deadline:
                break
        self.wait(TIMEOUT_S)
        self._popen.wait()
        os.close(self._close)
        self._watcher.join()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert stream
            stream.close()
        os.close(self._closing)
        os.close(self._pidfd)
        if survivors:
            raise self._failure(f"left processes behind: {survivors}")

    def _is_descendant(self, pid: int, stat: list[bytes]) -> bool:
        if self.pid in (int(stat[2]), int(stat[3])):
            return True
        try:
            environ = _read_proc(pid, "environ")
            # The environment is empty during exec; that of a kernel thread is always empty.
            for _ in range(_EXEC_TRIES if int(stat[1]) not in (0, _KTHREADD) else 0):
                if environ:
                    break
                time.sleep(0.001)
                environ = _read_proc(pid, "environ")
        except OSError:  # gone, or another user's
            return False
        return self._token.encode() in environ

    def _environment_tags(self) -> str:
        """Return the tags of the ancestors, which own the process too, and its own tag."""
        return ":".join(filter(None, (os.environ.get(TAG), self._token)))

    # --- plumbing ---------------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        # Only `close` reaps the zombie, so the pid is valid even after the exit.
        if self._popen.returncode is None:
            os.kill(self.pid, number)

    def _await_report(self, event: int) -> None:
        """Wait until the kernel reports a stop, a continue or an exit."""
        report = os.waitid(os.P_PID, self.pid, event | os.WEXITED | os.WNOWAIT)
        if report is not None and report.si_code in (os.CLD_STOPPED, os.CLD_CONTINUED):
            os.waitid(os.P_PID, self.pid, event | os.WNOHANG)  # consume the report

    def _watch(self) -> None:
        """Run the watcher thread: collect lines, then the exit, then lines of descendants."""
        assert self._popen.stdout
        assert self._popen.stderr
        streams = {
            self._popen.stdout.fileno(): _LineSplitter(self.lines),
            self._popen.stderr.fileno(): _LineSplitter(self.errors),
        }
        exit_pending = False  # the process has exited, and its output is still being read
        reads_left = DRAIN_READS_MAX
        with selectors.DefaultSelector() as selector:
            for fd in (*streams, self._pidfd, self._closing):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(0 if exit_pending else None)}
                readable = ready & streams.keys()
                for fd in readable:
                    data = os.read(fd, READ_BYTES)
                    if not data:
                        selector.unregister(fd)
                    with self._changed:
                        streams[fd].feed(data)
                        self._changed.notify_all()
                if exit_pending:
                    reads_left -= 1
                    if not readable or not reads_left:
                        self._publish_exit()
                        exit_pending = False
                elif self._pidfd in ready:
                    selector.unregister(self._pidfd)
                    exit_pending = True
                elif self._closing in ready:
                    return

    def _publish_exit(self) -> None:
        report = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert report is not None
        with self._changed:
            exited = report.si_code == os.CLD_EXITED
            self._exit_code = report.si_status if exited else -report.si_status
            self._changed.notify_all()

    def _await_line(self, matches: Callable[[str], object], text: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                while self._lines_passed < len(self.lines):
                    self._lines_passed += 1
                    if matches(self.lines[self._lines_passed - 1]):
                        return self.lines[self._lines_passed - 1]
                if self._exit_code is not None:
                    raise self._failure(f"printed no {text!r} before it ended")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise self._failure(f"printed no {text!r} in {timeout_s} s")

    def _failure(self, what: str) -> ProcFailed:
        state = "running" if self._exit_code is None else f"exit code {self._exit_code}"
        out, err = ("\n".join(lines[-TAIL_LINES:]) for lines in (self.lines, self.errors))
        command = " ".join(self.args)
        return ProcFailed(
            f"{what}: pid {self.pid} ({state}) of {command}\n--- stdout\n{out}\n--- stderr\n{err}"
        )


class _LineSplitter:
    """Splits a byte stream into lines. An unfinished last line counts at the end of the stream."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            whole, self._rest = [self._rest], b""
        self._lines += (line.decode("utf-8", "replace") for line in whole)


def python_proc(
    module_or_code: str,
    *args: str,
    ready: str | None = "ready",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Proc:
    """Spawn this Python on a dotted module name, or on code (any other string)."""
    if re.fullmatch(r"\w+(\.\w+)*", module_or_code):
        options = ["-m", module_or_code]
    else:
        options = ["-c", textwrap.dedent(module_or_code)]
    command = [sys.executable, *options, *args]
    return Proc.spawn(command, ready=ready, env=env, cwd=cwd or ROOT, timeout_s=timeout_s)


def _live_processes() -> list[tuple[int, list[bytes]]]:
    """List every process that is not a zombie, with its fields in /proc: a zombie holds no resources."""
    live = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The command name may hold spaces and brackets: fields count from its last bracket.
                stat = _read_proc(int(entry), "stat").rpartition(b")")[2].split()
                if stat[0] not in (b"Z", b"X"):
                    live.append((int(entry), stat))
    return live


def _read_proc(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _kill_and_await(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], REAP_TIMEOUT_S)
    finally:
        os.close(pidfd)
