"""A program with an open store that forks while its threads read and commit: `forks.py URL WAY COUNT`.

It prints `done COUNT` when every child exited in time with exit code 0, or `hung …` with the number of
children that did not. It kills hanging children, so no process outlives the program.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.store.api import Store, Txn

# A child that does nothing ends within milliseconds.
CHILD_TIMEOUT_S = 20.0
LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)
ROWS = 2_000


def start_load(store: Store) -> Callable[[], None]:
    """Start threads that read and commit. Returns a function that stops them."""
    stop = threading.Event()
    store.transact(lambda txn: [txn.put(("row", n), bytes(400)) for n in range(ROWS)])

    def scan(txn: Txn) -> int:
        return len(txn.scan(b"", b"\xff"))

    def read() -> None:
        while not stop.is_set():
            assert store.read(scan) >= ROWS

    def commit() -> None:
        while not stop.is_set():
            store.transact(lambda txn: txn.put(("row", 0), os.urandom(400)))

    threads = [threading.Thread(target=work, daemon=True) for work in (read, read, commit)]
    for thread in threads:
        thread.start()

    def end() -> None:
        stop.set()
        for thread in threads:
            thread.join()

    return end


def awaited(pid: int) -> bool:
    """Whether a child exited in time with exit code 0. A late child is killed."""
    fd = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([fd], [], [], CHILD_TIMEOUT_S)[0])
    finally:
        os.close(fd)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == 0 and in_time


def fork_and_leave(leave: Callable[[], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        leave()
    return awaited(pid)


def by_fork(count: int) -> int:
    """Fork children that call `_exit` immediately."""
    return sum(fork_and_leave(lambda: os._exit(0)) for _ in range(count))


def by_fork_and_exit(count: int) -> int:
    """Fork children that exit with exit hooks, finalizers and interpreter shutdown."""
    return sum(fork_and_leave(lambda: sys.exit(0)) for _ in range(count))


def by_pty(count: int) -> int:
    done = 0
    for _ in range(count):
        pid, fd = pty.fork()
        if pid == 0:
            os._exit(0)
        done += awaited(pid)
        os.close(fd)
    return done


def by_preexec(count: int) -> int:
    """`Popen` itself waits for a child with a `preexec_fn`, so an alarm ends the wait."""
    done = 0
    for _ in range(count):
        signal.setitimer(signal.ITIMER_REAL, CHILD_TIMEOUT_S)
        try:
            child = subprocess.Popen(["true"], preexec_fn=os.setsid)
        except TimeoutError:
            _kill_children()
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        done += awaited(child.pid)
    return done


def _do_nothing(n: int) -> int:
    return n


def by_process(count: int) -> int:
    done = 0
    for n in range(count):
        child = get_context("fork").Process(target=_do_nothing, args=(n,))
        child.start()
        child.join(CHILD_TIMEOUT_S)
        done += child.exitcode == 0
        child.kill()
        child.join()
    return done


def by_pool(count: int) -> int:
    done = 0
    # The pool forks its workers on demand.
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        try:
            for future in [pool.submit(_do_nothing, n) for n in range(count)]:
                future.result(CHILD_TIMEOUT_S)
                done += 1
        except (TimeoutError, BrokenProcessPool):
            _kill_children()
    return done


def _kill_children() -> None:
    me = os.getpid()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
            with open(f"/proc/{entry}/cmdline", "rb") as text:
                forked = b"tests.process.forks" in text.read()
        except OSError:
            continue
        if parent == me and forked:
            os.kill(int(entry), signal.SIGKILL)


def _expire(*_: object) -> None:
    raise TimeoutError


WAYS: dict[str, Callable[[int], int]] = {
    "fork": by_fork,
    "fork_and_exit": by_fork_and_exit,
    "pty": by_pty,
    "preexec": by_preexec,
    "process": by_process,
    "pool": by_pool,
}


def open_store(url: str) -> Store:
    if url.startswith("postgresql"):
        return stores.open(url)
    return stores.open(url, limits=LIMITS)


def main(url: str, way: str, count: int) -> None:
    signal.signal(signal.SIGALRM, _expire)
    with open_store(url) as store:
        stop_threads = start_load(store)
        print("ready", flush=True)
        done = WAYS[way](count)
        stop_threads()
        # The parent's store still works: a commit after the last fork is readable.
        store.transact(lambda txn: txn.put(("after",), b"1"))
        assert store.read(lambda txn: txn.get(("after",))) == b"1"
        hung = count - done
        print(f"hung {hung} of {count}" if hung else f"done {count}", flush=True)
        # On PostgreSQL a session closed by a child would count as a retry.
        print("retries", getattr(store, "retries", 0), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
