"""The process helper does what the suites built on it rely on."""

import os
import signal

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


def test_spawn_returns_when_the_ready_line_is_there() -> None:
    with python_proc(ECHO) as proc:
        assert proc.lines == ["ready"]
        assert proc.running
        proc.send("one")
        proc.send("two")
        assert proc.expect("got") == "got one"
        assert proc.expect("got") == "got two"


def test_a_module_can_be_spawned_with_arguments() -> None:
    with python_proc("json.tool", "--help", ready=None) as proc:
        assert proc.wait() == 0
        assert any("usage" in line for line in proc.lines)


def test_the_environment_is_added_to() -> None:
    code = "import os; print('ready', os.environ['COLOUR'], 'PATH' in os.environ)"
    with python_proc(code, env={"COLOUR": "green"}) as proc:
        assert proc.lines == ["ready green True"]


def test_a_process_that_dies_before_it_is_ready_fails_with_its_stderr() -> None:
    with pytest.raises(ProcFailed, match="no such luck"):
        python_proc("raise SystemExit('no such luck')")


def test_a_word_that_only_begins_like_ready_is_not_the_ready_line() -> None:
    with pytest.raises(ProcFailed, match="printed no 'ready'"):
        python_proc("print('readying'); print('not ready')")


def test_a_process_that_is_never_ready_is_killed_after_the_timeout() -> None:
    # A shell: it has said its pid long before the time is up.
    with pytest.raises(ProcFailed, match=r"in 1\.0 s") as caught:
        Proc.spawn(["sh", "-c", "echo pid $$; exec sleep 600"], timeout_s=1.0)
    pid = int(str(caught.value).partition("--- stdout\npid ")[2].split()[0])
    assert not is_alive(pid)


def test_expect_fails_when_the_process_ends_without_saying_it() -> None:
    code = "print('ready'); print('other')"
    with python_proc(code) as proc, pytest.raises(ProcFailed, match="before it ended"):
        proc.expect("never")


def test_wait_gives_the_exit_code_and_all_output() -> None:
    with python_proc("print('ready'); print('bye'); raise SystemExit(3)") as proc:
        assert proc.wait() == 3
        assert proc.wait() == 3
        assert proc.lines == ["ready", "bye"]


def test_output_is_complete_when_the_exit_is_told() -> None:
    code = "import sys; print('ready'); print('x\\n' * 200_000); sys.stdout.write('no newline')"
    with python_proc(code) as proc:
        assert proc.wait() == 0
        assert proc.lines.count("x") == 200_000
        assert proc.lines[-1] == "no newline"


def test_wait_on_a_running_process_times_out() -> None:
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
def test_leaving_the_block_reaps_every_descendant(how: str) -> None:
    with python_proc(PARENT, how) as proc:
        child = int(proc.lines[0].split()[1])
        assert proc.survivors() == [child]
    assert not is_alive(proc.pid)
    assert not is_alive(child)


def test_leaving_the_block_reaps_a_stopped_process() -> None:
    with python_proc(PARENT, "x") as proc:
        child = int(proc.lines[0].split()[1])
        os.kill(child, signal.SIGSTOP)
        proc.stop()
    assert not is_alive(proc.pid)
    assert not is_alive(child)


def test_a_stopped_process_does_nothing_until_it_continues() -> None:
    with python_proc(ECHO) as proc:
        for _ in range(3):
            proc.stop()
            assert proc.running
            proc.send("hello")
            with pytest.raises(ProcFailed):
                proc.expect("got hello", timeout_s=0.05)
            proc.cont()
            assert proc.expect("got hello") == "got hello"


def test_a_process_that_was_already_dead_can_be_signalled_and_closed() -> None:
    with python_proc("print('ready')") as proc:
        assert proc.wait() == 0
        assert proc.kill() == 0
        proc.stop()
        proc.cont()
    proc.close()


def test_a_failing_block_keeps_its_own_error_and_still_reaps() -> None:
    with pytest.raises(ZeroDivisionError), python_proc(PARENT, "x") as proc:
        raise ZeroDivisionError
    assert not is_alive(proc.pid)


def test_what_cannot_be_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.processes._kill_and_await", lambda pid: None)
    monkeypatch.setattr("tests.processes.REAP_TIMEOUT_S", 0.1)
    proc = python_proc(PARENT, "setsid")
    child = int(proc.lines[0].split()[1])
    try:
        with pytest.raises(ProcFailed, match="left processes behind"):
            proc.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_processes_of_two_blocks_are_kept_apart() -> None:
    with python_proc(PARENT, "x") as one, python_proc(PARENT, "x") as two:
        assert one.survivors() == [int(one.lines[0].split()[1])]
        assert two.survivors() == [int(two.lines[0].split()[1])]


def test_spawn_takes_any_command() -> None:
    with Proc.spawn(["sh", "-c", "echo ready; exec cat"]) as proc:
        proc.send("x")
        assert proc.expect("x") == "x"
