"""A writer that dies or stands still is replaced; a client that does so holds up nobody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.config import REDO_BYTES_MAX, WriterLimits
from holdfast.durable import journal, lease
from holdfast.errors import CommitUnknown, Held, StoreClosed
from holdfast.store.address import SOCKET, directory_of
from holdfast.store.api import Store, Txn
from tests.process.watch import Seen, lock_holders, until, writer_of, writers_of
from tests.processes import python_proc

MODULES = (
    "holdfast.store.writer",
    "holdfast.store.link",
    "holdfast.store.reach",
    "holdfast.store.engine",
    "holdfast.durable.lease",
)

THREADS = 8
KILLS = 8
STOPS = 3
# At a moment that most tries hit.
TRIES_MAX = 50
JOIN_S = 60.0
# Long enough for a few commits on a busy machine, short enough to wait for.
TTL_NS = 2 * S

# A client that commits without a pause and tells how long its longest commit took.
COMMITTER = """
import sys, threading, time
from holdfast import store as stores

ending = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ending.set()), daemon=True).start()
with stores.open(sys.argv[1]) as store:
    print("ready", flush=True)
    done, longest_s = 0, 0.0
    while not ending.is_set():
        began = time.perf_counter()
        store.transact(lambda txn: txn.add(("other",), 1))
        longest_s = max(longest_s, time.perf_counter() - began)
        done += 1
print("done", done, f"{longest_s:.3f}", flush=True)
"""

# A client that takes a lease and appends under it whenever it is told to.
HOLDER = """
import sys
from holdfast import store as stores
from holdfast.durable import journal, lease
from holdfast.errors import HoldfastError

def append(txn, held):
    txn.require_live(held)
    height = journal.head(txn, "r").height
    journal.append(txn, "r", [b"holder"], expected_head=height)

with stores.open(sys.argv[1]) as store:
    held = store.transact(lease.acquire, "r", "holder", "1", int(sys.argv[2]))
    store.transact(append, held)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            store.transact(append, held)
            print("committed", flush=True)
        except HoldfastError as error:
            print("refused", error.code, flush=True)
"""

# A client that holds a snapshot open, inside a read that never ends.
READER = """
import sys
from holdfast import store as stores

def linger(txn):
    txn.get(("row", 0))
    print("ready", flush=True)
    sys.stdin.readline()

stores.open(sys.argv[1]).read(linger)
"""

# A client whose frame is cut in two: it says that a megabyte follows, and sends a little of it.
HALF_A_FRAME = """
import sys
from holdfast import store as stores

store = stores.open(sys.argv[1])
store._link._sock.sendall((1 << 20).to_bytes(4, "big") + b"the beginning")
print("ready", flush=True)
sys.stdin.readline()
"""


class Adders:
    """Threads that add one at a time, and remember what became of each."""

    def __init__(self, store: Store, threads: int = THREADS) -> None:
        self._store = store
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.acked: list[str] = []
        self.unknown: list[str] = []
        self.longest_s = 0.0
        self._threads = [
            threading.Thread(target=self._add, args=(n, n % 2 == 0), daemon=True)
            for n in range(threads)
        ]

    def __enter__(self) -> Adders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a transaction never ended"

    def more(self) -> None:
        """Return once some more were acknowledged."""
        goal = len(self.acked) + 2 * len(self._threads)
        until(lambda: len(self.acked) >= goal, "more acknowledgements", JOIN_S)

    def _add(self, thread: int, waits: bool) -> None:
        n = 0
        while not self._ending.is_set():
            n += 1
            id = f"{thread}.{n}"
            began = time.perf_counter()
            try:
                if waits:
                    self._store.transact(add_and_mark, id)
                else:
                    self._store.submit(add_and_mark, id).result()
            except CommitUnknown:
                into = self.unknown
            else:
                into = self.acked
            with self._lock:
                into.append(id)
                self.longest_s = max(self.longest_s, time.perf_counter() - began)


def add_and_mark(txn: Txn, id: str) -> None:
    txn.add(("total",), 1)
    txn.put(("mark", id), b"")


def assert_each_counted_once(store: Store, adders: Adders) -> None:
    marks = {key for key, _ in store.read(lambda txn: txn.scan(("mark",), ("mark\x00",)))}
    total = store.read(lambda txn: txn.count(("total",)))
    assert total == len(marks), "a transaction was applied twice"
    assert len(adders.acked) <= total <= len(adders.acked) + len(adders.unknown)
    lost = [
        id for id in adders.acked if store.read(lambda txn, id=id: txn.get(("mark", id))) is None
    ]
    assert not lost, "acknowledged and lost"


def kill_in_commit(writer: Seen) -> None:
    until(writer.in_commit, "a commit")
    writer.kill()


def in_thread(fn: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    return thread


def take_over(store: Store) -> lease.Lease:
    """The resource's lease, once its holder's has expired."""

    def acquire() -> lease.Lease | None:
        with suppress(Held):
            return store.transact(lease.acquire, "r", "heir", "1", 10**10)
        return None

    taken = until(acquire, "the expiry of the lease")
    assert taken is not None
    return taken


# -- the writer dies -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.spec(
    "004",
    "Chaos/failure injection matrix",
    "whatever was acknowledged survives the death of the process that committed it",
)
def test_every_increment_counts_once_when_writers_die_in_mid_commit(
    home: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store:
        with Adders(store) as adders:
            for _ in range(KILLS):
                adders.more()
                kill_in_commit(writer_of(home))
            adders.more()
        assert_each_counted_once(store, adders)
        print(
            f"{KILLS} writers killed in mid-commit: {len(adders.acked)} acknowledged, "
            f"{len(adders.unknown)} unknown, longest stall {adders.longest_s:.3f} s"
        )
        # Lost answers are looked up: only what cannot be found ends as unknown.
        assert not adders.unknown


@pytest.mark.timeout(60)
def test_a_writer_killed_while_it_starts_is_started_again(home: Path, limits: WriterLimits) -> None:
    with stores.open(home, limits=limits) as store, Adders(store, 2) as adders:
        for _ in range(KILLS):
            first = writer_of(home)
            first.kill()
            until(lambda first=first: set(writers_of(home)) - {first}, "the next writer")
            for starting in writers_of(home):
                starting.kill()
            adders.more()
    assert not adders.unknown


@pytest.mark.timeout(60)
def test_many_replaced_writers_leave_no_descriptors_open(home: Path, limits: WriterLimits) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with stores.open(home, limits=limits) as store:
        before = descriptors()
        for _ in range(KILLS):
            writer_of(home).kill()
            store.transact(lambda txn: txn.add(("n",), 1))
        assert descriptors() <= before


# -- the writer stands still -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", ["at any time", "in mid-commit"])
def test_a_stopped_writer_is_killed_and_replaced_within_a_bound(
    home: Path, limits: WriterLimits, moment: str
) -> None:
    with (
        stores.open(home, limits=limits) as store,
        python_proc(COMMITTER, str(home)) as other,
        Adders(store) as adders,
    ):
        for _ in range(STOPS):
            adders.more()
            writer = writer_of(home)
            if moment == "in mid-commit":
                until(writer.in_commit, "a commit")
            assert writer.stop()
            adders.more()
            assert not writer.alive, "the stopped writer was not replaced"
        other.send("end")
        _, _, longest_s = other.expect("done").split()
        other.wait()
    with stores.open(home, limits=limits) as store:
        assert_each_counted_once(store, adders)
    bound_s = limits.stopped_s + 1.0
    print(
        f"writer stopped {moment}: longest stall {adders.longest_s:.3f} s here, {longest_s} s in "
        f"another process; stated bound {bound_s:.1f} s (stopped_s, a look, the start of a writer)"
    )
    assert not adders.unknown


@pytest.mark.timeout(60)
def test_a_writer_stopped_while_it_starts_is_killed_and_replaced(
    home: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store:
        first = writer_of(home)
        first.kill()
        call = in_thread(lambda: store.transact(lambda txn: txn.add(("n",), 1)))
        starting = until(lambda: [one for one in writers_of(home) if one != first], "a writer")[0]
        assert starting.stop()
        call.join(JOIN_S)
        assert not call.is_alive()
        assert not starting.alive
        assert store.read(lambda txn: txn.count(("n",))) == 1


@pytest.mark.timeout(120)
def test_a_writer_stopped_between_its_lock_and_its_socket_is_replaced_by_others(
    home: Path, limits: WriterLimits
) -> None:
    """Its starter is dead, and it has said nothing yet: nobody knows it but by its lock."""
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
        writer_of(home).kill()
        for _ in range(TRIES_MAX):
            with python_proc(COMMITTER, str(home), ready=None) as starter:
                # Without a pause: the moment is a short one.
                [writer] = until(lambda: lock_holders(home), "a writer that has the lock", poll_s=0)
                writer.stop()
                starter.kill()
                if not listens(home):
                    call = in_thread(lambda: store.transact(lambda txn: txn.put(("a",), b"2")))
                    call.join(JOIN_S)
                    assert not call.is_alive()
                    assert not writer.alive
                    return
                writer.kill()
        pytest.fail("the moment between lock and socket was never hit")


def listens(home: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer, directory_of(home) as directory:
        return peer.connect_ex(f"{directory}/{SOCKET}") == 0


@pytest.mark.timeout(60)
def test_an_opening_client_replaces_a_stopped_writer(home: Path, limits: WriterLimits) -> None:
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
        writer = writer_of(home)
        assert writer.stop()
        with stores.open(home, limits=limits) as second:
            assert not writer.alive
            assert second.read(lambda txn: txn.get(("a",))) == b"1"


@pytest.mark.timeout(60)
def test_reading_needs_no_writer(home: Path, limits: WriterLimits) -> None:
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
        writer = writer_of(home)
        assert writer.stop()
        assert store.read(lambda txn: txn.get(("a",))) == b"1"
        assert writer.stopped, "a reader found the writer in its way"
        writer.cont()


@pytest.mark.timeout(60)
def test_closing_ends_every_call_that_is_under_way(home: Path, limits: WriterLimits) -> None:
    ended: list[str] = []

    def call() -> None:
        with suppress(CommitUnknown, StoreClosed):
            store.transact(lambda txn: txn.add(("n",), 1))
        ended.append("ended")

    store = stores.open(home, limits=limits)
    writer = writer_of(home)
    assert writer.stop()
    threads = [in_thread(call) for _ in range(THREADS)]
    until(lambda: all(thread.is_alive() for thread in threads), "the calls")
    store.close()
    for thread in threads:
        thread.join(JOIN_S)
    assert len(ended) == THREADS
    writer.cont()


# -- a client stands still, or dies ----------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_client_stopped_in_the_middle_of_a_frame_holds_up_nobody(
    home: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store, python_proc(HALF_A_FRAME, str(home)) as half:
        half.stop()
        with Adders(store) as adders:
            adders.more()
        assert_each_counted_once(store, adders)
        half.cont()


@pytest.mark.timeout(60)
@pytest.mark.spec(
    "004",
    "Fencing and split-brain prevention",
    "a write under an epoch that is no longer current is refused, whoever sends it and whenever",
)
def test_a_stopped_leaseholder_that_wakes_after_the_takeover_commits_nothing(
    home: Path, limits: WriterLimits
) -> None:
    with (
        stores.open(home, limits=limits) as store,
        python_proc(HOLDER, str(home), str(TTL_NS)) as holder,
    ):
        holder.stop()
        taken = take_over(store)
        assert taken.epoch == 2
        store.transact(
            lambda txn: (
                txn.require_live(taken),
                journal.append(txn, "r", [b"heir"], expected_head=1),
            )
        )
        holder.cont()
        for _ in range(3):
            holder.send("append")
            assert holder.expect("refused") == "refused fenced"
        bodies = [entry.body for entry in store.read(journal.read, "r", 1, 100, 100)]
        assert bodies == [b"holder", b"heir"]


@pytest.mark.timeout(60)
@pytest.mark.spec(
    "004",
    "Fencing and split-brain prevention",
    "once a worker is fenced, nothing of it reaches the journal any more",
)
def test_a_leaseholder_stopped_at_a_random_moment_of_its_work_is_fenced(
    home: Path, limits: WriterLimits
) -> None:
    with (
        stores.open(home, limits=limits) as store,
        python_proc(HOLDER, str(home), str(TTL_NS)) as holder,
    ):
        for _ in range(200):
            holder.send("append")
        holder.expect("committed")
        holder.stop()
        take_over(store)
        height = store.read(journal.head, "r").height
        holder.cont()
        holder.expect("refused fenced")
        assert store.read(journal.head, "r").height == height
        store.read(journal.verify, "r")


@pytest.mark.timeout(90)
def test_a_reader_that_was_killed_does_not_pin_pages(home: Path, limits: WriterLimits) -> None:
    def overwrite(times: int) -> int:
        for n in range(times):
            store.transact(lambda txn, n=n: txn.put(("row", 0), bytes([n % 256]) * 100_000))
        return (home / "data.mdb").stat().st_size

    def at_rest() -> int:
        """The size when it grows no more. The redo log keeps pages, too: a few, for a moment."""
        sizes = [overwrite(20)]

        def stays() -> bool:
            sizes.append(overwrite(20))
            return sizes[-1] == sizes[-2]

        until(stays, "the end of the growth", 60)
        return sizes[-1]

    with stores.open(home, limits=limits) as store:
        settled = at_rest()
        with python_proc(READER, str(home)) as reader:
            # Far more than the log could keep.
            pinned = overwrite(3 * REDO_BYTES_MAX // 100_000)
            assert pinned > settled + REDO_BYTES_MAX, "a snapshot keeps its pages"
            reader.kill()
            at_rest()
