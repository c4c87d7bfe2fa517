"""A process that opens and closes files of its own open store: others still know that it reads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.errors import LocksUnsupported
from holdfast.store import liveness, redo, rows
from holdfast.store.api import Txn
from tests.process.watch import assert_nobody_is_left, lock_holders, until, writer_of

pytestmark = pytest.mark.timeout(90)

# The writer looks for dead readers this often, and only after commits.
LIMITS = WriterLimits(linger_s=0.2, reader_check_s=0.02)
ROWS = 200
COMMITS = 150


def close_files(home: Path) -> None:
    """What a backup tool in the same process does."""
    for file in home.iterdir():
        if not file.is_socket():
            file.read_bytes()


def put_all(txn: Txn, value: bytes) -> None:
    for n in range(ROWS):
        txn.put(("row", n), value * 600)


def get_all(txn: Txn) -> set[bytes]:
    return {txn.get(("row", n)) or b"" for n in range(ROWS)}


def test_a_snapshot_stays_whole_after_files_of_the_store_were_closed(tmp_path: Path) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all, b"a")

        def look(txn: Txn) -> list[set[bytes]]:
            before = get_all(txn)
            close_files(home)
            with stores.open(home, limits=LIMITS) as other:
                for n in range(COMMITS):
                    other.transact(put_all, b"bcd"[n % 3 : n % 3 + 1])
            return [before, get_all(txn)]

        assert store.read(look) == [{b"a" * 600}] * 2
        for _ in range(3):
            close_files(home)
            store.transact(put_all, b"e")
            assert store.read(get_all) == {b"e" * 600}
    assert_nobody_is_left(home, LIMITS.linger_s)


def test_a_store_whose_files_were_closed_by_its_client_is_not_taken_for_unused(
    tmp_path: Path,
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all, b"a")
        close_files(home)
        writer = writer_of(home)
        writer.kill()
        until(lambda: not lock_holders(home), "the writer is gone")
        with redo._alone(home, create=False) as alone:
            assert not alone
        store.transact(put_all, b"b")
        assert store.read(get_all) == {b"b" * 600}
    assert_nobody_is_left(home, LIMITS.linger_s)
    with redo._alone(home, create=False) as alone:
        assert alone


def test_a_forked_child_does_not_keep_its_parents_locks(tmp_path: Path) -> None:
    home = tmp_path / "store"
    go, wake = os.pipe()
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all, b"a")
        pid = os.fork()
        if not pid:
            os.close(wake)
            os.read(go, 1)
            os._exit(0)
    assert_nobody_is_left(home, LIMITS.linger_s)
    with redo._alone(home, create=False) as alone:
        assert alone
    os.close(wake)
    os.close(go)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("fuse.unheard-of", True), ("fuse", True), ("fuse.sshfs", True), ("fuseblk", False)],
)
def test_a_fuse_mount_is_refused_unless_it_is_known_to_be_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    mounts = f"1 0 0:1 / {tmp_path} rw - {kind} some rw\n"
    monkeypatch.setattr(rows, "_mountinfo", lambda: mounts)
    if refused:
        with pytest.raises(rows.NetworkFilesystem):
            rows.prepare(tmp_path / "store")
        assert not (tmp_path / "store").exists()
    else:
        rows.prepare(tmp_path / "store")


# No command of fcntl: a kernel without open file description locks says the same to theirs.
NO_COMMAND = 9_999


def test_a_kernel_without_open_file_description_locks_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all, b"a")
    monkeypatch.setattr(liveness, "_SETLK", NO_COMMAND)
    with pytest.raises(LocksUnsupported) as raised:
        stores.open(home, limits=LIMITS)
    assert raised.value.fields["path"] == str(home)
    assert "kernel" in str(raised.value.hint)
    assert_nobody_is_left(home, LIMITS.linger_s)


def test_a_file_system_without_such_locks_is_refused_as_one_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(put_all, b"a")
    lock = liveness._lock

    def refusing(fd: int, kind: int, start: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(home)):
            raise OSError(errno.ENOLCK, "no locks available")
        lock(fd, kind, start)

    monkeypatch.setattr(liveness, "_lock", refusing)
    with pytest.raises(rows.NetworkFilesystem, match="open file description"):
        stores.open(home, limits=LIMITS)
    assert_nobody_is_left(home, LIMITS.linger_s)
