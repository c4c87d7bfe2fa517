"""Proc: spawn, signals, output, time-outs, and the removal of descendants."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import Proc, ProcFailed, python_proc

ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
"""

# Prints the pid of a child that sleeps; with "setsid" the child leaves the session.
PARENT = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"],
    start_new_session="setsid" in sys.argv,
)
print("ready", child.pid, flush=True)
child.wait()
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


def test_spawn_returns_at_the_ready_line() -> None:
    with python_proc(ECHO) as proc:
        assert proc.lines == ["ready"]
        assert proc.running
        proc.send("one")
        proc.send("two")
        assert proc.expect("got") == "got one"
        assert proc.expect("got") == "got two"


def test_python_proc_spawns_a_module_with_arguments() -> None:
    with python_proc("json.tool", "--help", ready=None) as proc:
        assert proc.wait() == 0
        assert any("usage" in line for line in proc.lines)


def test_python_proc_adds_to_the_environment() -> None:
    code = "import os; print('ready', os.environ['COLOUR'], 'PATH' in os.environ)"
    with python_proc(code, env={"COLOUR": "green"}) as proc:
        assert proc.lines == ["ready green True"]


def test_spawn_of_a_process_that_exits_early_raises_with_its_stderr() -> None:
    with pytest.raises(ProcFailed, match="no such luck"):
        python_proc("raise SystemExit('no such luck')")


def test_spawn_ignores_a_word_that_only_starts_with_ready() -> None:
    with pytest.raises(ProcFailed, match="printed no 'ready'"):
        python_proc("print('readying'); print('not ready')")


def test_spawn_kills_a_process_without_ready_line_after_the_timeout() -> None:
    # A shell prints its pid long before the time-out.
    with pytest.raises(ProcFailed, match=r"in 1\.0 s") as caught:
        Proc.spawn(["sh", "-c", "echo pid $$; exec sleep 600"], timeout_s=1.0)
    pid = int(str(caught.value).partition("--- stdout\npid ")[2].split()[0])
    assert not is_alive(pid)


def test_expect_raises_when_the_process_exits_without_the_line() -> None:
    code = "print('ready'); print('other')"
    with python_proc(code) as proc, pytest.raises(ProcFailed, match="before it ended"):
        proc.expect("never")


def test_wait_returns_the_exit_code_after_all_output() -> None:
    with python_proc("print('ready'); print('bye'); raise SystemExit(3)") as proc:
        assert proc.wait() == 3
        assert proc.wait() == 3
        assert proc.lines == ["ready", "bye"]


def test_output_is_complete_when_wait_returns() -> None:
    code = "import sys; print('ready'); print('x\\n' * 200_000); sys.stdout.write('no newline')"
    with python_proc(code) as proc:
        assert proc.wait() == 0
        assert proc.lines.count("x") == 200_000
        assert proc.lines[-1] == "no newline"


def test_wait_on_a_running_process_raises_at_its_timeout() -> None:
    with python_proc(ECHO) as proc, pytest.raises(ProcFailed, match="still runs"):
        proc.wait(timeout_s=0.05)


def test_kill_ends_the_process_but_not_its_child() -> None:
    with python_proc(PARENT, "x") as proc:
        child = int(proc.lines[0].split()[1])
        assert proc.kill() == -signal.SIGKILL
        assert not proc.running
        assert proc.survivors() == [child]
        assert is_alive(child)
    assert not is_alive(child)


@pytest.mark.parametrize("how", ["same session", "setsid"])
def test_exit_of_the_block_reaps_every_descendant(how: str) -> None:
    with python_proc(PARENT, how) as proc:
        child = int(proc.lines[0].split()[1])
        assert proc.survivors() == [child]
    assert not is_alive(proc.pid)
    assert not is_alive(child)


def test_exit_of_the_block_reaps_a_stopped_process() -> None:
    with python_proc(PARENT, "x") as proc:
        child = int(proc.lines[0].split()[1])
        os.kill(child, signal.SIGSTOP)
        proc.stop()
    assert not is_alive(proc.pid)
    assert not is_alive(child)


def test_stopped_process_prints_no_line_until_cont() -> None:
    with python_proc(ECHO) as proc:
        for _ in range(3):
            proc.stop()
            assert proc.running
            proc.send("hello")
            with pytest.raises(ProcFailed):
                proc.expect("got hello", timeout_s=0.05)
            proc.cont()
            assert proc.expect("got hello") == "got hello"


def test_dead_process_can_be_signalled_and_closed() -> None:
    with python_proc("print('ready')") as proc:
        assert proc.wait() == 0
        assert proc.kill() == 0
        proc.stop()
        proc.cont()
    proc.close()


def test_block_that_raises_keeps_its_error_and_reaps() -> None:
    with pytest.raises(ZeroDivisionError), python_proc(PARENT, "x") as proc:
        raise ZeroDivisionError
    assert not is_alive(proc.pid)


def test_close_raises_when_a_process_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.processes._kill_and_await", lambda pid: None)
    monkeypatch.setattr("tests.processes.REAP_TIMEOUT_S", 0.1)
    proc = python_proc(PARENT, "setsid")
    child = int(proc.lines[0].split()[1])
    try:
        with pytest.raises(ProcFailed, match="left processes behind"):
            proc.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_survivors_of_two_processes_are_separate() -> None:
    with python_proc(PARENT, "x") as one, python_proc(PARENT, "x") as two:
        assert one.survivors() == [int(one.lines[0].split()[1])]
        assert two.survivors() == [int(two.lines[0].split()[1])]


def test_spawn_runs_any_command() -> None:
    with Proc.spawn(["sh", "-c", "echo ready; exec cat"]) as proc:
        proc.send("x")
        assert proc.expect("x") == "x"


# -- processes of the fork server ------------------------------------------------------------------

# The directory, umask, limit of open files, parent, session and modules of the process at its start.
CIRCUMSTANCES = """
import sys
loaded = sorted(sys.modules)
import os, resource
umask = os.umask(0)
print("ready", os.getcwd(), umask, resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.getppid(),
      os.getsid(0) == os.getpid(), "holdfast.cli.up" in loaded, flush=True)
"""


def test_forked_process_has_the_circumstances_of_a_spawned_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    before = os.umask(0o027)
    try:
        with (
            python_proc(CIRCUMSTANCES, cwd=tmp_path) as forked,
            Proc.spawn([sys.executable, "-c", CIRCUMSTANCES], cwd=tmp_path, fresh=True) as spawned,
        ):
            circumstances = f"ready {tmp_path} {0o027} {soft - 1} {os.getpid()} True"
            assert spawned.lines == [f"{circumstances} False"]
            assert forked.lines == [f"{circumstances} True"]
    finally:
        os.umask(before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_forked_process_has_the_arguments_and_main_module_of_its_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nprint('ready', __name__, __file__, sys.argv, sys.path[0])"
    )
    path = tmp_path / "program.py"
    with python_proc("program", "one", cwd=tmp_path) as proc:
        assert proc.lines == [f"ready __main__ {path} {[str(path), 'one']} {tmp_path}"]


def test_process_with_a_variable_of_the_interpreter_is_not_forked() -> None:
    code = "import sys; print('ready', 'holdfast' in sys.modules, hash('a'))"
    env = {"PYTHONHASHSEED": "1"}
    with python_proc(code, env=env) as one, python_proc(code, env=env) as other:
        assert one.lines == other.lines
        assert one.lines[0].startswith("ready False ")


def test_forked_processes_have_different_random_numbers() -> None:
    code = "import random; print('ready', random.random())"
    with python_proc(code) as one, python_proc(code) as other:
        assert one.lines != other.lines


def test_forked_process_reports_its_exit_code_and_its_signal() -> None:
    with python_proc("raise SystemExit(7)", ready=None) as proc:
        assert proc.wait() == 7
    with python_proc("import os; os.abort()", ready=None) as proc:
        assert proc.wait() == -signal.SIGABRT


# A process that ignores SIGINT, like one in the background of a shell.
BACKGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tests.processes import Proc
code = "print('ready', flush=True); import time; time.sleep(600)"
with Proc.spawn([sys.executable, "-c", code], fresh=sys.argv[1] == "fresh") as proc:
    os.kill(proc.pid, signal.SIGINT)
    print("ended", proc.wait(), flush=True)
"""


@pytest.mark.parametrize("start", ["fresh", "forked"])
def test_process_of_a_background_test_run_handles_sigint(start: str) -> None:
    with python_proc(BACKGROUND, start, ready=None) as background:
        assert background.expect("ended") == f"ended {-signal.SIGINT}"
