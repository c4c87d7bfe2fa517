"""A program that forks while its store is open: neither the program nor its children hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.forks import WAYS
from tests.processes import python_proc

FORKS = {"fork": 120, "fork_and_exit": 12, "pty": 12, "preexec": 12, "process": 40, "pool": 40}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS)
def test_forked_children_exit_and_the_parent_store_keeps_working(home: Path, way: str) -> None:
    count = FORKS[way]
    with python_proc("tests.process.forks", str(home), way, str(count)) as forker:
        assert forker.expect("o", 110) == f"done {count}"
        assert forker.wait() == 0


# A program that forks while a runtime runs all roles of its app.
FORKING_PROGRAM = """
import os, sys, threading
import holdfast as hf
from holdfast.errors import HoldfastError
from tests.process.forks import awaited

@hf.task
def fork_and_exit(status: int) -> int:
    # A task whose child leaves as a program does.
    pid = os.fork()
    if pid == 0:
        sys.exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

@hf.task
def fork_and_return() -> int:
    pid = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0

@hf.task
def add(a: int, b: int) -> int:
    return a + b

app = hf.App("forks", tasks=[fork_and_exit, fork_and_return, add])
rt = app.open(sys.argv[1], stop_grace_s=10)
stop = threading.Event()

def submit_all_the_time():
    while not stop.is_set():
        rt.submit(add, 1, 2).result(timeout=30)

threads = [threading.Thread(target=submit_all_the_time) for _ in range(4)]
for thread in threads:
    thread.start()

def tell(what, fn):
    try:
        said = fn()
    except HoldfastError as error:
        said = error.code
    sys.stdout.write(f"child {what} {said}\\n")

print("ready", flush=True)
waiting = rt.submit(add, 3, 4)
for round in range(3):
    pid = os.fork()
    if pid == 0:
        if round == 0:
            others = [
                threading.Thread(target=tell, args=("submit", lambda: rt.submit(add, 1, 2)))
                for _ in range(3)
            ]
            for other in others:
                other.start()
            for other in others:
                other.join()
            tell("result", lambda: waiting.result(timeout=30))
            tell("close", rt.close)
        if round == 1:
            with rt:
                sys.exit(0)
        # Without a word: exit hooks end it.
        sys.exit(0)
    print("ended", round, awaited(pid), flush=True)
stop.set()
for thread in threads:
    thread.join()
print("exit", rt.submit(fork_and_exit, 3).result(timeout=60), flush=True)
print("return", rt.submit(fork_and_return).result(timeout=60), flush=True)
print("parent", waiting.result(timeout=60), rt.submit(add, 2, 2).result(timeout=60), flush=True)
rt.close()
"""


@pytest.mark.timeout(180)
def test_runtime_in_a_forked_child_raises_store_forked_and_exits(home: Path) -> None:
    with python_proc(FORKING_PROGRAM, str(home)) as program:
        for _ in range(3):
            assert program.expect("child submit", 60).endswith("store_forked")
        assert program.expect("child result").endswith("store_forked")
        assert program.expect("child close").endswith("None")
        for round in range(3):
            assert program.expect(f"ended {round}", 60).endswith("True")
        assert program.expect("exit ", 60) == "exit 3"
        assert program.expect("return ", 60) == "return 0"
        assert program.expect("parent ", 60) == "parent 7 4"
        assert program.wait() == 0
