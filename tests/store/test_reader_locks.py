"""Reader locks: a process that opens and closes files of its open store still counts as a reader."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.errors import LocksUnsupported
from holdfast.store.api import Txn
from holdfast.store.lmdb import backend, reader_locks, redo_log
from tests.process.watch import assert_no_process_left, lock_holders, until, writer_of

pytestmark = pytest.mark.timeout(90)

# `reader_check_s`: the interval of the writer's check for dead readers, which runs after commits only.
LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.02)
ROWS = 200
COMMITS = 150


def read_and_close_files(home: Path) -> None:
    """Open, read and close every file, like a backup tool in the same process."""
    for file in home.iterdir():
        if not file.is_socket():
            file.read_bytes()


def put_all_rows(txn: Txn, value: bytes) -> None:
    for n in range(ROWS):
        txn.put(("row", n), value * 600)


def get_all_rows(txn: Txn) -> set[bytes]:
    return {txn.get(("row", n)) or b"" for n in range(ROWS)}


def test_snapshot_stays_intact_after_the_process_closes_store_files(tmp_path: Path) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all_rows, b"a")

        def look(txn: Txn) -> list[set[bytes]]:
            before = get_all_rows(txn)
            read_and_close_files(home)
            with stores.open(home, limits=LIMITS) as other:
                for n in range(COMMITS):
                    other.transact(put_all_rows, b"bcd"[n % 3 : n % 3 + 1])
            return [before, get_all_rows(txn)]

        assert store.read(look) == [{b"a" * 600}] * 2
        for _ in range(3):
            read_and_close_files(home)
            store.transact(put_all_rows, b"e")
            assert store.read(get_all_rows) == {b"e" * 600}
    assert_no_process_left(home, LIMITS.idle_exit_s)


def test_reader_locks_survive_the_close_of_store_files(
    tmp_path: Path,
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all_rows, b"a")
        read_and_close_files(home)
        writer = writer_of(home)
        writer.kill()
        until(lambda: not lock_holders(home), "the writer is gone")
        with redo_log._exclusive_access(home, create=False) as alone:
            assert not alone
        store.transact(put_all_rows, b"b")
        assert store.read(get_all_rows) == {b"b" * 600}
    assert_no_process_left(home, LIMITS.idle_exit_s)
    with redo_log._exclusive_access(home, create=False) as alone:
        assert alone


def test_forked_child_does_not_keep_the_reader_locks_of_its_parent(tmp_path: Path) -> None:
    home = tmp_path / "store"
    go, wake = os.pipe()
    forked, report_fork = os.pipe()
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all_rows, b"a")
        pid = os.fork()
        if not pid:
            os.close(wake)
            os.write(report_fork, b"f")
            os.read(go, 1)
            os._exit(0)
    try:
        # The child closes its copies of the files right after the fork, before it runs this code.
        assert os.read(forked, 1) == b"f"
        assert_no_process_left(home, LIMITS.idle_exit_s)
        with redo_log._exclusive_access(home, create=False) as alone:
            assert alone
    finally:
        for fd in (wake, go, forked, report_fork):
            os.close(fd)
        _, status = os.waitpid(pid, 0)
    assert status == 0


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("fuse.unheard-of", True), ("fuse", True), ("fuse.sshfs", True), ("fuseblk", False)],
)
def test_fuse_mount_raises_network_filesystem_unless_known_to_be_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    mounts = f"1 0 0:1 / {tmp_path} rw - {kind} some rw\n"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(mounts)
    monkeypatch.setattr(backend, "MOUNTINFO", str(mountinfo))
    if refused:
        with pytest.raises(backend.NetworkFilesystem):
            backend.prepare_directory(tmp_path / "store")
        assert not (tmp_path / "store").exists()
    else:
        backend.prepare_directory(tmp_path / "store")


# An invalid fcntl command: a kernel without open file description locks returns the same error for theirs.
NO_COMMAND = 9_999


def test_kernel_without_ofd_locks_raises_locks_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all_rows, b"a")
    monkeypatch.setattr(reader_locks, "_SETLK", NO_COMMAND)
    with pytest.raises(LocksUnsupported) as raised:
        stores.open(home, limits=LIMITS)
    assert raised.value.fields["path"] == str(home)
    assert "kernel" in str(raised.value.hint)
    assert_no_process_left(home, LIMITS.idle_exit_s)


def test_file_system_without_ofd_locks_raises_network_filesystem(
    tmp_path: Path,
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all_rows, b"a")

    def refuse(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(home)):
            raise OSError(errno.ENOLCK, "no locks available")

    with (
        failpoints.on("lmdb.lock_reader", calls=refuse),
        pytest.raises(backend.NetworkFilesystem, match="open file description"),
    ):
        stores.open(home, limits=LIMITS)
    assert_no_process_left(home, LIMITS.idle_exit_s)
