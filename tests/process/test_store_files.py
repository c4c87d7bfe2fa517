"""Damaged store files, full and read-only disks, backup and restore: a typed error and unchanged files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lmdb
import pytest

from holdfast import store as stores
from holdfast.config import MAP_BYTES, WriterLimits
from holdfast.durable import lease
from holdfast.errors import (
    Fenced,
    Invalid,
    NetworkFilesystem,
    NotFound,
    SchemaMismatch,
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreFull,
    StoreReadOnly,
    StoreReplaced,
)
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.lmdb import backend
from holdfast.store.lmdb.backup import restore_backup
from holdfast.store.lmdb.writer import try_lock
from tests.process.conftest import LIMITS
from tests.process.refusal_checks import refused, untouched
from tests.process.watch import assert_no_process_left, until, writer_of
from tests.processes import python_proc

MODULES = (
    "holdfast.store.lmdb.backend",
    "holdfast.store.lmdb.backup",
    "holdfast.store.engine",
    "holdfast.store.lmdb.store",
)

PAGE = 4096
ROWS = 400
DISK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The data file of a closed store with some rows."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with stores.open(path, limits=LIMITS) as store:
        for n in range(ROWS):
            store.transact(lambda txn, n=n: txn.put(("row", n), bytes([n % 256]) * 500))
    assert_no_process_left(path, LIMITS.idle_exit_s)
    return (path / "data.mdb").read_bytes()


def write_data_file(home: Path, data: bytes) -> Path:
    home.mkdir(exist_ok=True)
    (home / "data.mdb").write_bytes(data)
    return home / "data.mdb"


def test_empty_data_file_is_not_corrupt_while_its_writer_holds_the_lock(home: Path) -> None:
    home.mkdir(exist_ok=True)
    write_data_file(home, b"")
    with pytest.raises(StoreCorrupt):
        backend.prepare_directory(home)
    lock = try_lock(home)
    assert lock is not None
    backend.prepare_directory(home)
    lock.close()
    with pytest.raises(StoreCorrupt):
        backend.prepare_directory(home)


def has_all_rows(store: Store) -> bool:
    return all(store.read(lambda txn, n=n: txn.get(("row", n))) for n in range(ROWS))


# -- damaged files ---------------------------------------------------------------------------------

NOISE = random.Random(7).randbytes(1 << 20)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage over the first pages": lambda data: NOISE[: 2 * PAGE] + data[2 * PAGE :],
    "zeros over the first pages": lambda data: bytes(2 * PAGE) + data[2 * PAGE :],
    "garbage over the first page": lambda data: NOISE[:PAGE] + data[PAGE:],
    "garbage over the second page": lambda data: data[:PAGE] + NOISE[:PAGE] + data[2 * PAGE :],
    "garbage over everything else": lambda data: data[: 2 * PAGE] + NOISE[: len(data) - 2 * PAGE],
    "zeros over everything else": lambda data: data[: 2 * PAGE] + bytes(len(data) - 2 * PAGE),
    "nothing but garbage": lambda data: NOISE,
    "another kind of file": lambda data: b"#!/bin/sh\nexit 0\n",
    "one byte": lambda data: data[:1],
    "no byte": lambda data: b"",
    "cut off after one page": lambda data: data[:PAGE],
    "cut off inside the second page": lambda data: data[: PAGE + 1],
    "cut off after the header": lambda data: data[: 2 * PAGE],
    "cut off inside the third page": lambda data: data[: 2 * PAGE + 1],
    "cut off in the middle": lambda data: data[: len(data) // 2],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_file_raises_store_corrupt_and_stays_unchanged(
    home: Path, sound: bytes, damage: str
) -> None:
    data = write_data_file(home, DAMAGE[damage](sound))
    with untouched(data), refused(StoreCorrupt):
        stores.open(home, limits=LIMITS)


@pytest.mark.timeout(60)
def test_store_without_its_last_page_is_corrupt_or_complete(home: Path, sound: bytes) -> None:
    """The last page may be a free page. In that case the store opens with every row."""
    data = write_data_file(home, sound[:-PAGE])
    with ExitStack() as leaving:
        try:
            store = leaving.enter_context(stores.open(home, limits=LIMITS))
        except StoreCorrupt:
            assert data.read_bytes() == sound[:-PAGE]
        else:
            assert has_all_rows(store)
            store.transact(lambda txn: txn.put(("row", 0), b"again"))


@pytest.mark.timeout(60)
def test_read_of_a_damaged_page_raises_store_corrupt(home: Path, sound: bytes) -> None:
    write_data_file(home, sound[: 2 * PAGE] + b"".join(_damaged_pages(sound)))
    script = """
    import sys
    from holdfast import store as stores
    from holdfast.config import WriterLimits
    from holdfast.errors import StoreCorrupt
    try:
        with stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2)) as store:
            for n in range(int(sys.argv[2])):
                store.read(lambda txn: txn.get(("row", n)))
    except StoreCorrupt as error:
        print("refused", error, flush=True)
    """
    with python_proc(script, str(home), str(ROWS), ready=None) as reader:
        assert "holdfast restore" in reader.expect("refused")


def _damaged_pages(data: bytes) -> Iterator[bytes]:
    """The pages after the header. Leaf pages with rows of this test get a zeroed page header."""
    for at in range(2 * PAGE, len(data), PAGE):
        page = data[at : at + PAGE]
        has_test_rows = page.count(bytes([200]) * 500) > 0
        yield bytes(64) + page[64:] if has_test_rows else page


# -- the schema marker -----------------------------------------------------------------------------


def rewrite_marker(home: Path, value: bytes | None) -> None:
    env = lmdb.open(str(home), map_size=MAP_BYTES)
    with env.begin(write=True) as txn:
        if value is None:
            txn.delete(schema.MARKER_KEY)
        else:
            txn.put(schema.MARKER_KEY, value)
    env.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "marker",
    [
        schema.encode_marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1),
        schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0),
        schema.encode_marker(0, 0),
        b"RSV1" + schema.encode_marker()[4:],
        schema.encode_marker() + b"\x00",
        schema.encode_marker()[:7],
        b"",
    ],
)
@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "a store whose marker is invalid or from another version is refused and stays unchanged",
)
def test_other_schema_marker_raises_schema_mismatch_and_stays_unchanged(
    home: Path, sound: bytes, marker: bytes
) -> None:
    data = write_data_file(home, sound)
    rewrite_marker(home, marker)
    with untouched(data), refused(SchemaMismatch):
        stores.open(home, limits=LIMITS)


@pytest.mark.timeout(60)
@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "an open of a store without a marker raises NotFound, unless bootstrap is on",
)
def test_store_without_marker_is_not_found_unless_bootstrap_is_on(home: Path, sound: bytes) -> None:
    data = write_data_file(home, sound)
    rewrite_marker(home, None)
    with untouched(data), refused(NotFound):
        stores.open(home, bootstrap=False, limits=LIMITS)
    with stores.open(home, limits=LIMITS) as store:
        assert has_all_rows(store)
    with stores.open(home, bootstrap=False, limits=LIMITS) as store:
        assert has_all_rows(store)


@pytest.mark.timeout(60)
def test_open_without_bootstrap_creates_no_store(home: Path) -> None:
    with refused(NotFound):
        stores.open(home, bootstrap=False, limits=LIMITS)
    assert not home.exists()


# -- the disk --------------------------------------------------------------------------------------


@contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """A separate tmpfs of DISK_BYTES."""
    if os.geteuid() != 0:
        pytest.fail("these tests mount a small disk, as root only: sudo make test")
    at.mkdir()
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=True)
    try:
        yield at
        assert_no_process_left(at, LIMITS.idle_exit_s)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def remount(at: Path, mode: str) -> None:
    """Remount, with retries: an exiting process may hold its files for a moment."""
    command = ["mount", "-o", f"remount,{mode}", str(at)]
    until(lambda: subprocess.run(command, capture_output=True).returncode == 0, "the remount")


def fill(disk: Path, bytes_free: int = 0) -> Path:
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(max(free - bytes_free, 0)))
    return filler


@pytest.mark.timeout(60)
def test_read_only_disk_raises_store_read_only_and_stays_unchanged(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with stores.open(disk / "store", limits=LIMITS) as store:
            store.transact(lambda txn: txn.put(("a",), b"1"))
        assert_no_process_left(disk, LIMITS.idle_exit_s)
        remount(disk, "ro")
        with untouched(disk / "store" / "data.mdb"):
            with refused(StoreReadOnly):
                stores.open(disk / "store", limits=LIMITS)
            with refused(StoreReadOnly):
                stores.open(disk / "new", limits=LIMITS)
        remount(disk, "rw")
        with stores.open(disk / "store", limits=LIMITS) as store:
            assert store.read(lambda txn: txn.get(("a",))) == b"1"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value_bytes", [3_000, 50_000, 300_000])
def test_full_disk_raises_store_full_until_space_is_free(tmp_path: Path, value_bytes: int) -> None:
    """A large value matters: the kernel then returns a short write instead of ENOSPC."""
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "store"
        with stores.open(path, limits=LIMITS) as store:
            store.transact(lambda txn: txn.put(("first",), b"1"))
            filler = fill(disk, bytes_free=700_000)
            writer = writer_of(path)
            acked = 0
            with refused(StoreFull):
                while True:
                    store.transact(put_value, acked, value_bytes)
                    acked += 1
            assert store.read(holds_values, acked, value_bytes)
            assert store.read(lambda txn: txn.get(("value", acked))) is None
            filler.unlink()
            store.transact(put_value, acked, value_bytes)
            assert store.read(holds_values, acked + 1, value_bytes)
            assert writer.alive, "a full disk is no reason for the writer to leave"


def put_value(txn: Txn, n: int, value_bytes: int) -> None:
    txn.put(("value", n), bytes([n % 256]) * value_bytes)


def holds_values(txn: Txn, count: int, value_bytes: int) -> bool:
    return (
        all(txn.get(("value", n)) == bytes([n % 256]) * value_bytes for n in range(count))
        and txn.get(("first",)) == b"1"
    )


@pytest.mark.timeout(60)
def test_open_on_a_full_disk_raises_store_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = fill(disk)
        with refused(StoreFull):
            stores.open(disk / "store", limits=LIMITS)
        filler.unlink()
        with stores.open(disk / "store", limits=LIMITS) as store:
            store.transact(lambda txn: txn.put(("a",), b"1"))


@pytest.mark.timeout(60)
def test_many_readers_start_on_a_full_disk(tmp_path: Path) -> None:
    """The reader table is a mapped file: a write to a page without disk space raises SIGBUS."""
    script = """
    import sys, threading
    from holdfast import store as stores
    from holdfast.config import WriterLimits
    store = stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2))
    store.transact(lambda txn: txn.put(("a",), b"1"))
    print("ready", flush=True)
    sys.stdin.readline()
    together = threading.Barrier(200)
    def look(txn):
        together.wait()
        assert txn.get(("a",)) == b"1"
    threads = [threading.Thread(target=store.read, args=(look,)) for _ in range(200)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    store.close()
    print("read", flush=True)
    """
    with (
        small_disk(tmp_path / "disk") as disk,
        python_proc(script, str(disk / "store")) as reader,
    ):
        fill(disk)
        reader.send("go")
        reader.expect("read")
        assert reader.wait() == 0


@pytest.mark.timeout(60)
def test_commit_that_kills_every_writer_raises_commit_unknown(home: Path) -> None:
    """A writer does not survive a write beyond the file size limit (SIGXFSZ)."""
    script = """
    import resource, sys
    from holdfast import store as stores
    from holdfast.config import WriterLimits
    from holdfast.errors import CommitUnknown
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, 3 << 19))
    with stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2)) as store:
        store.transact(lambda txn: txn.put(("small",), b"1"))
        try:
            store.transact(lambda txn: txn.put(("large",), bytes(2 << 20)))
        except CommitUnknown as error:
            print("gave up:", error, flush=True)
        store.transact(lambda txn: txn.put(("small",), b"2"))
        print("large", store.read(lambda txn: txn.get(("large",))), flush=True)
        print("small", store.read(lambda txn: txn.get(("small",))), flush=True)
    """
    with python_proc(script, str(home), ready=None) as limited:
        assert "see writer.log" in limited.expect("gave up")
        assert limited.expect("large") == "large None"
        assert limited.expect("small") == "small b'2'"
        assert limited.wait() == 0


MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /net rw,relatime shared:2 - nfs4 host:/export rw,vers=4.2
23 22 8:2 / /net/local rw,relatime - xfs /dev/sdb1 rw
24 21 0:21 / /network rw - tmpfs tmpfs rw
25 21 0:22 / /with\\040space rw - cifs //host/share rw
26 21 0:23 / /d\u00e4nemark rw master:4 - fuse.sshfs host: rw
27 21 0:24 / /over rw - ext4 /dev/sdc1 rw
28 27 0:25 / /over rw - 9p share rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/net/x", "nfs4"),
        ("/net", "nfs4"),
        ("/net/local/x", "xfs"),
        ("/network/x", "tmpfs"),
        ("/with space/x", "cifs"),
        ("/d\u00e4nemark/x", "fuse.sshfs"),
        ("/over/x", "9p"),
    ],
)
def test_filesystem_of_uses_the_innermost_mount(path: str, kind: str) -> None:
    assert backend.filesystem_of(Path(path), MOUNTS) == kind


def test_filesystem_of_is_empty_without_a_mount() -> None:
    assert backend.filesystem_of(Path("/home"), "") == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_network_filesystem_is_refused(
    home: Path, sound: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data_file(home, sound)
    mounts = f"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:20 / {home} rw - {kind} host:/ rw\n"
    # Another file, since a test cannot mount a network file system.
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(mounts)
    monkeypatch.setattr(backend, "MOUNTINFO", str(mountinfo))
    with untouched(data), refused(NetworkFilesystem, says=kind):
        stores.open(home, limits=LIMITS)


# -- backup and restore ----------------------------------------------------------------------------


def put_pair(txn: Txn, n: int) -> None:
    """Write two rows in one transaction, and append to a log."""
    txn.put(("left",), str(n).encode())
    txn.put(("right",), str(n).encode())
    txn.append(("log",), str(n).encode())


def test_backup_under_load_is_a_consistent_prefix_of_commits(
    home: Path, tmp_path: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store:
        ending = threading.Event()
        acked = [0]

        def write() -> None:
            while not ending.is_set():
                store.transact(put_pair, acked[0] + 1)
                acked[0] += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            until(lambda: acked[0] > 50, "some commits")
            bounds = []
            for n in range(3):
                before = acked[0]
                store.backup(str(tmp_path / f"backup-{n}"))
                bounds.append((before, acked[0] + 1))
        finally:
            ending.set()
            thread.join()
    for n, (before, after) in enumerate(bounds):
        target = tmp_path / f"restored-{n}"
        restore_backup(tmp_path / f"backup-{n}", target)
        with stores.open(target, bootstrap=False, limits=limits) as copy:
            left, right = (copy.read(lambda txn, k=k: txn.get((k,))) for k in ("left", "right"))
            log = copy.read(lambda txn: txn.scan(("log",), ("log\x00",)))
            assert left == right
            assert left is not None
            assert before <= int(left) <= after
            assert [value for _, value in log] == [
                str(entry).encode() for entry in range(1, int(left) + 1)
            ]
        assert_no_process_left(target, limits.idle_exit_s)


@pytest.mark.parametrize("there", ["a file inside", "a file"])
def test_backup_does_not_overwrite_its_target(
    home: Path, tmp_path: Path, limits: WriterLimits, there: str
) -> None:
    target = tmp_path / "backup"
    if there == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "precious").write_text("mine")
    mine = target if there == "a file" else target / "precious"
    with stores.open(home, limits=limits) as store:
        store.transact(put_pair, 1)
        with untouched(mine), refused(Invalid, says="the target is"):
            store.backup(str(target))


def test_backup_to_a_full_disk_leaves_no_partial_files(
    home: Path, tmp_path: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store, small_disk(tmp_path / "disk") as disk:
        for n in range(20):
            store.transact(put_value, n, 100_000)
        fill(disk, bytes_free=500_000)
        with refused(StoreFull):
            store.backup(str(disk / "backup"))
        assert [entry.name for entry in disk.iterdir()] == ["filler"]


def test_restore_onto_an_open_store_raises_store_busy(
    home: Path, tmp_path: Path, limits: WriterLimits
) -> None:
    with stores.open(home, limits=limits) as store:
        store.transact(put_pair, 1)
        store.backup(str(tmp_path / "backup"))
        store.transact(put_pair, 2)
        with refused(StoreBusy):
            restore_backup(tmp_path / "backup", home)
        assert store.read(lambda txn: txn.get(("left",))) == b"2"
        store.transact(put_pair, 3)


def test_commit_after_a_restore_raises_store_replaced(
    home: Path, tmp_path: Path, limits: WriterLimits
) -> None:
    store = stores.open(home, limits=limits)
    store.transact(put_pair, 1)
    store.backup(str(tmp_path / "backup"))
    store.transact(put_pair, 2)
    writer_of(home).kill()
    restore_backup(tmp_path / "backup", home)
    # The first call may already have been sent. Either call raises StoreReplaced or StoreClosed.
    with pytest.raises(StoreReplaced):
        store.transact(put_pair, 3)
    with pytest.raises((StoreReplaced, StoreClosed), match=r"open it again|open the store again"):
        store.transact(put_pair, 3)
    store.close()
    with stores.open(home, limits=limits) as again:
        assert again.read(lambda txn: txn.get(("left",))) == b"1"
        again.transact(put_pair, 4)


@pytest.mark.spec(
    "004",
    "Fencing and split-brain prevention",
    "a restore starts a new generation, which fences the leases of the backup",
)
def test_restore_raises_the_generation_and_fences_older_leases(
    home: Path, tmp_path: Path, limits: WriterLimits
) -> None:
    generations = []
    leases = []
    with stores.open(home, limits=limits) as store:
        leases.append(store.transact(lease.acquire, "r", "w", "1", 10**12))
        store.transact(lambda txn: txn.require_live(leases[-1]))
        store.backup(str(tmp_path / "backup"))
        generations.append(store.generation)
    for _ in range(3):
        assert_no_process_left(home, limits.idle_exit_s)
        generation = restore_backup(tmp_path / "backup", home)
        with stores.open(home, limits=limits) as store:
            assert store.generation == generation
            generations.append(generation)
            for old in leases:
                with pytest.raises(Fenced):
                    store.transact(
                        lambda txn, old=old: (txn.require_live(old), txn.put(("x",), b""))
                    )
            assert store.read(lambda txn: txn.get(("x",))) is None
            leases.append(store.transact(lease.acquire, "r", "w", "1", 10**12))
            store.transact(lambda txn: txn.require_live(leases[-1]))
    assert generations == sorted(set(generations))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: data[: len(data) // 2], StoreCorrupt),
        (lambda data: NOISE, StoreCorrupt),
        (lambda data: data[: 2 * PAGE] + NOISE[: len(data) - 2 * PAGE], StoreCorrupt),
        (None, NotFound),
    ],
    ids=["cut off", "garbage", "garbage inside", "not there"],
)
def test_restore_of_a_damaged_backup_leaves_the_store_unchanged(
    home: Path,
    tmp_path: Path,
    sound: bytes,
    damage: Callable[[bytes], bytes] | None,
    kind: type[StoreCorrupt] | type[NotFound],
) -> None:
    data = write_data_file(home, sound)
    backup = tmp_path / "backup"
    if damage is not None:
        write_data_file(backup, damage(sound))
    with untouched(data), pytest.raises(kind):
        restore_backup(backup, home)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry != backup) == ["store"]
    with stores.open(home, limits=LIMITS) as store:
        assert has_all_rows(store)


def test_restore_leaves_the_backup_unchanged(tmp_path: Path, sound: bytes) -> None:
    backup = tmp_path / "backup"
    data = write_data_file(backup, sound)
    with untouched(data):
        restore_backup(backup, tmp_path / "store")
    shutil.rmtree(backup)
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        assert has_all_rows(store)
    assert_no_process_left(tmp_path / "store", LIMITS.idle_exit_s)
