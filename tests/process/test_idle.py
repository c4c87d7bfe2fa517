"""A store costs little while nothing happens: it opens fast, holds little memory, burns no CPU.

HOLDFAST_IDLE_KEYS sets how many keys the large store has: 200,000 unless it says otherwise, and
5,000,000 is what is promised. Times are printed, not asserted: other work may share the machine.
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
from tests.process.watch import Seen, assert_nobody_is_left, seen, until, writer_of
from tests.processes import Proc, python_proc

MODULES = ("holdfast.store.lmdb", "holdfast.store.link", "holdfast.store.writer")

KEYS = int(os.environ.get("HOLDFAST_IDLE_KEYS", "200000"))
RESIDENT_BYTES_MAX = 100_000_000
MEASURED_S = 3.0
CPU_SHARE_MAX = 0.01
# Chunks in which the keys are written: through LMDB itself, nobody has the store open then.
CHUNK = 100_000

OPENER = """
import sys, time
from pathlib import Path
from holdfast import store as stores
from holdfast.config import WriterLimits

began = time.perf_counter()
store = stores.open(sys.argv[1], limits=WriterLimits(linger_s=0.2))
opened = time.perf_counter()
middle = store.read(lambda txn: txn.get(("key", int(sys.argv[2]) // 2)))
store.transact(lambda txn: txn.put(("one more",), b"1"))
print("ready", opened - began, middle.decode(), flush=True)
sys.stdin.readline()
store.close()
"""

# Waits for a topic for ever, and says when something came.
WAITER = """
import sys
from holdfast import store as stores
from holdfast.config import WriterLimits

store = stores.open(sys.argv[1], limits=WriterLimits(linger_s=0.2))
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
    assert_nobody_is_left(path, LIMITS.linger_s)
    env = lmdb.open(str(path), map_size=MAP_BYTES, sync=False)
    for start in range(0, KEYS, CHUNK):
        with env.begin(write=True) as txn, txn.cursor() as cursor:
            cursor.putmulti(
                (tuples.pack(("key", n)), b"%d" % n) for n in range(start, min(start + CHUNK, KEYS))
            )
    env.sync(True)
    env.close()
    yield path
    assert_nobody_is_left(path, LIMITS.linger_s)


@pytest.mark.slow
@pytest.mark.timeout(600 if KEYS > 1_000_000 else 120)
def test_a_store_of_many_keys_opens_fast_and_small(large: Path) -> None:
    with python_proc(OPENER, str(large), str(KEYS)) as client:
        _, opened_s, middle = client.lines[0].split()
        assert middle == str(KEYS // 2)
        sizes = {
            "client": seen(client.pid).anonymous_bytes(),
            "writer": writer_of(large).anonymous_bytes(),
        }
        client.send("end")
        assert client.wait() == 0
    print(f"{KEYS} keys: opened in {float(opened_s):.3f} s, writer included")
    for who, size in sizes.items():
        print(f"{who}: {size / 1e6:.1f} MB resident of its own")
        assert size < RESIDENT_BYTES_MAX, who


def at_rest(process: Seen) -> bool:
    """Whether it used no processor for a while."""
    was_s = process.cpu_s()
    time.sleep(0.2)
    return process.cpu_s() == was_s


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_idle_client_and_its_writer_use_no_cpu(home: Path) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        watched = {"client": seen(waiter.pid), "writer": writer_of(home)}
        for process in watched.values():
            until(lambda process=process: at_rest(process), "an end of what belongs to its start")
        began = time.monotonic()
        before = {who: process.cpu_s() for who, process in watched.items()}
        until(lambda: time.monotonic() - began > MEASURED_S, "the measured time")
        passed_s = time.monotonic() - began
        for who, process in watched.items():
            share = (process.cpu_s() - before[who]) / passed_s
            print(f"idle {who}: {100 * share:.2f} % of a core over {passed_s:.1f} s")
            assert share < CPU_SHARE_MAX, who


def ring(home: Path, limits: WriterLimits) -> int:
    """Notify from this process; how often that was done so far."""
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: (txn.add(("rung",), 1), txn.notify("bell")))
        return store.read(lambda txn: txn.count(("rung",)))


def assert_hears(waiter: Proc, rung: int) -> None:
    """It looks at least once after the bell: earlier wake-ups may show an older count."""
    while int(waiter.expect("heard").split()[1]) < rung:
        pass


@pytest.mark.timeout(60)
def test_a_waiting_process_is_woken_by_another_one(home: Path, limits: WriterLimits) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        for _ in range(5):
            assert_hears(waiter, ring(home, limits))


@pytest.mark.timeout(60)
def test_a_waiting_process_is_woken_after_the_writer_was_killed(
    home: Path, limits: WriterLimits
) -> None:
    with python_proc(WAITER, str(home)) as waiter:
        for _ in range(3):
            assert_hears(waiter, ring(home, limits))
            writer_of(home).kill()
            # The one who waits finds the connection broken, and another writer, by itself.
            writer_of(home)
            assert_hears(waiter, ring(home, limits))


@pytest.mark.timeout(60)
def test_several_waiting_processes_are_all_woken(home: Path, limits: WriterLimits) -> None:
    with (
        python_proc(WAITER, str(home)) as first,
        python_proc(WAITER, str(home)) as second,
        python_proc(WAITER, str(home)) as third,
    ):
        rung = ring(home, limits)
        for waiter in (first, second, third):
            assert_hears(waiter, rung)
