"""The cost of an idle store: it opens fast, holds little memory and uses no CPU.

HOLDFAST_IDLE_KEYS sets the number of keys of the large store (default 200,000; the documented size is
5,000,000). Times are printed and not asserted, since other work may share the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from holdfast import store as stores
from holdfast.config import MAP_BYTES, WriterLimits
from holdfast.store import tuples
from tests.process.conftest import LIMITS
from tests.process.watch import OsProcess, assert_no_process_left, os_process, until, writer_of
from tests.processes import Proc, python_proc

MODULES = (
    "holdfast.store.lmdb.store",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.lmdb.writer",
)

KEYS = int(os.environ.get("HOLDFAST_IDLE_KEYS", "200000"))
RESIDENT_BYTES_MAX = 100_000_000
MEASURED_S = 3.0
CPU_SHARE_MAX = 0.01
# Keys per LMDB transaction. They are written directly to LMDB while no process has the store open.
CHUNK = 100_000

OPENER = """
import sys, time
from pathlib import Path
from holdfast import store as stores
from holdfast.config import WriterLimits

began = time.perf_counter()
store = stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2))
opened = time.perf_counter()
middle = store.read(lambda txn: txn.get(("key", int(sys.argv[2]) // 2)))
store.transact(lambda txn: txn.put(("one more",), b"1"))
print("ready", opened - began, middle.decode(), flush=True)
sys.stdin.readline()
store.close()
"""

# Waits for a topic in a loop, and prints a line after each wake-up.
WAITER = """
import sys
from holdfast import store as stores
from holdfast.config import WriterLimits

store = stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2))
heard = store.wait("bell", 0, 0)
store.transact(lambda txn: txn.add(("waiters",), 1))
print("ready", flush=True)
while True:
    now = store.wait("bell", heard, 3600.0)
    rung = store.read(lambda txn: txn.count(("rung",)))
    heard = now
    print("heard", rung, flush=True)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("large") / "store"
    stores.open(path, limits=LIMITS).close()
    assert_no_process_left(path, LIMITS.idle_exit_s)
    env = lmdb.open(str(path), map_size=MAP_BYTES, sync=False)
    for start in range(0, KEYS, CHUNK):
        with env.begin(write=True) as txn, txn.cursor() as cursor:
            cursor.putmulti(
                (tuples.pack(("key", n)), b"%d" % n) for n in range(start, min(start + CHUNK, KEYS))
            )
    env.sync(True)
    env.close()
    yield path
    assert_no_process_left(path, LIMITS.idle_exit_s)


@pytest.mark.slow
@pytest.mark.timeout(600 if KEYS > 1_000_000 else 120)
def test_store_with_many_keys_opens_within_its_memory_limit(large: Path) -> None:
    with python_proc(OPENER, str(large), str(KEYS)) as client:
        _, opened_s, middle = client.lines[0].split()
        assert middle == str(KEYS // 2)
        sizes = {
            "client": os_process(client.pid).anonymous_bytes(),
            "writer": writer_of(large).anonymous_bytes(),
        }
        client.send("end")
        assert client.wait() == 0
    print(f"{KEYS} keys: opened in {float(opened_s):.3f} s, writer included")
    for process_name, size in sizes.items():
        print(f"{process_name}: {size / 1e6:.1f} MB resident of its own")
        assert size < RESIDENT_BYTES_MAX, process_name


def uses_no_cpu(process: OsProcess) -> bool:
    """Whether the process used no CPU time for 0.2 s."""
    was_s = process.cpu_s()
    time.sleep(0.2)
    return process.cpu_s() == was_s


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_idle_client_and_its_writer_use_no_cpu(home: Path) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        watched = {"client": os_process(waiter.pid), "writer": writer_of(home)}
        for process in watched.values():
            until(
                lambda process=process: uses_no_cpu(process), "an end of what belongs to its start"
            )
        began = time.monotonic()
        before = {name: process.cpu_s() for name, process in watched.items()}
        until(lambda: time.monotonic() - began > MEASURED_S, "the measured time")
        passed_s = time.monotonic() - began
        for name, process in watched.items():
            share = (process.cpu_s() - before[name]) / passed_s
            print(f"idle {name}: {100 * share:.2f} % of a core over {passed_s:.1f} s")
            assert share < CPU_SHARE_MAX, name


def notify_topic(home: Path, limits: WriterLimits) -> int:
    """Notify the topic from this process. Returns the number of notifications so far."""
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: (txn.add(("rung",), 1), txn.notify("bell")))
        return store.read(lambda txn: txn.count(("rung",)))


def assert_woken(waiter: Proc, notify_count: int) -> None:
    """Assert that the waiter reads this count. Earlier wake-ups may print an older count."""
    while int(waiter.expect("heard").split()[1]) < notify_count:
        pass


@pytest.mark.timeout(60)
def test_wait_is_woken_by_a_notify_of_another_process(home: Path, limits: WriterLimits) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        for _ in range(5):
            assert_woken(waiter, notify_topic(home, limits))


@pytest.mark.timeout(60)
def test_wait_is_woken_by_a_notify_after_the_writer_was_killed(
    home: Path, limits: WriterLimits
) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        for _ in range(3):
            assert_woken(waiter, notify_topic(home, limits))
            writer_of(home).kill()
            # The waiting client detects the broken connection and connects to a new writer.
            writer_of(home)
            assert_woken(waiter, notify_topic(home, limits))


@pytest.mark.timeout(60)
def test_notify_wakes_every_waiting_process(home: Path, limits: WriterLimits) -> None:
    with (
        python_proc(WAITER, str(home)) as first,
        python_proc(WAITER, str(home)) as second,
        python_proc(WAITER, str(home)) as third,
    ):
        notify_count = notify_topic(home, limits)
        for waiter in (first, second, third):
            assert_woken(waiter, notify_count)
