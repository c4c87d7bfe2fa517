"""File permissions of a store: only its owner has access, unless `HOLDFAST_STORE_MODE` shares it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.errors import Invalid
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.backup import restore_backup
from holdfast.store.lmdb.writer_address import LOG_FILE
from tests.process.conftest import LIMITS
from tests.process.refusal_checks import refused
from tests.process.watch import assert_no_process_left, writer_of
from tests.processes import python_proc

pytestmark = pytest.mark.timeout(60)

MODULES = ("holdfast.store.lmdb.permissions",)

NOBODY_UID = 65534

# Switches to an unprivileged user in a given group. All imports come first: that user cannot read the sources.
AS_NOBODY = """
import os, sys
import holdfast.store.lmdb.store, holdfast.store.lmdb.writer, holdfast.cli.verify, holdfast.store.lmdb.backup
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.errors import HoldfastError
from holdfast.cli import main
b"x".decode("unicode_escape")
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
"""


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A directory that every user can reach."""
    if os.geteuid() != 0:
        pytest.fail("these tests change their user, as root only: sudo make test")
    made = Path(tempfile.mkdtemp(prefix="holdfast-access-", dir="/tmp"))
    os.chmod(made, 0o755)
    yield made / "store"
    assert_no_process_left(made / "store", LIMITS.idle_exit_s, slack_s=10)
    shutil.rmtree(made)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def modes(home: Path) -> dict[str, int]:
    return {one.name: mode_of(one) for one in home.iterdir()}


def fill(home: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"secret"))


def test_new_store_has_mode_0700_and_files_0600(home: Path) -> None:
    before = os.umask(0o000)
    try:
        with stores.open(home, limits=LIMITS) as store:
            store.transact(lambda txn: txn.put(("a",), b"1"))
            assert mode_of(home) == 0o700
            found = modes(home)
    finally:
        os.umask(before)
    assert set(found) == set(permissions.STORE_FILES)
    assert set(found.values()) == {0o600}


def test_open_tightens_permissions_of_an_existing_store(home: Path) -> None:
    fill(home)
    assert_no_process_left(home, LIMITS.idle_exit_s)
    os.chmod(home, 0o755)
    for one in home.iterdir():
        os.chmod(one, 0o644)
    with stores.open(home, limits=LIMITS) as store:
        assert mode_of(home) == 0o700
        assert set(modes(home).values()) == {0o600}
        assert store.read(lambda txn: txn.get(("a",))) == b"secret"


def test_store_directory_with_foreign_files_keeps_its_mode(home: Path) -> None:
    home.mkdir()
    os.chmod(home, 0o755)
    (home / "notes.txt").write_text("mine")
    os.chmod(home / "notes.txt", 0o644)
    with stores.open(home, limits=LIMITS):
        found = modes(home)
    assert (mode_of(home), found.pop("notes.txt")) == (0o755, 0o644)
    assert set(found.values()) == {0o600}


def test_backup_and_restored_store_have_mode_0700(home: Path, tmp_path: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
        store.backup(str(tmp_path / "backup"))
    restore_backup(tmp_path / "backup", tmp_path / "again")
    for path in (tmp_path / "backup", tmp_path / "again"):
        assert mode_of(path) == 0o700
        assert set(modes(path).values()) == {0o600}


def test_store_mode_variable_sets_the_mode_of_store_and_backup(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home)
    assert_no_process_left(home, LIMITS.idle_exit_s)
    monkeypatch.setenv(permissions.MODE_VARIABLE, "0770")
    with stores.open(home, limits=LIMITS) as store:
        store.backup(str(home.parent / "backup"))
        assert mode_of(home) & 0o777 == 0o770
        assert set(modes(home).values()) == {0o660}
    assert mode_of(home.parent / "backup") & 0o777 == 0o770
    assert_no_process_left(home, LIMITS.idle_exit_s)
    monkeypatch.delenv(permissions.MODE_VARIABLE)
    fill(home)
    assert mode_of(home) & 0o777 == 0o700


@pytest.mark.parametrize("mode", ["rwx", "9", "0070", "0600", "70000", "-0100"])
def test_store_mode_without_owner_access_is_invalid(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(permissions.MODE_VARIABLE, mode)
    with refused(Invalid, says=permissions.MODE_VARIABLE):
        stores.open(home, limits=LIMITS)
    assert not home.exists()


DENIED_SCRIPT = (
    AS_NOBODY
    + """
try:
    stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2))
except HoldfastError as error:
    print("refused", error, flush=True)
code = main(["verify", "--store", sys.argv[1]])
print("code", code, flush=True)
"""
)


@pytest.mark.parametrize("what", ["the directory", "a file", "a directory above", "the socket"])
def test_store_denied_error_names_path_owner_mode_and_user(open_home: Path, what: str) -> None:
    fill(open_home)
    path = open_home
    if what == "a directory above":
        os.chmod(open_home.parent, 0o700)
        path = open_home.parent
    if what in ("a file", "the socket"):
        os.chmod(open_home, 0o777)
        for one in open_home.iterdir():
            os.chmod(one, 0o666)
        path = open_home / ("redo.0" if what == "a file" else "writer.lock")
        os.chmod(path, 0o600)
    mode = f"{mode_of(path):04o}"
    with python_proc(DENIED_SCRIPT, str(open_home), str(NOBODY_UID), ready=None) as other:
        line = other.expect("refused")
        assert f"store_denied: path='{path}' owner='root' mode='{mode}' user='nobody'" in line
        assert permissions.MODE_VARIABLE in line
        assert other.expect("code") == "code 1"
        assert other.wait() == 0


SHARED_SCRIPT = (
    AS_NOBODY
    + """
store = stores.open(sys.argv[1], limits=WriterLimits(idle_exit_s=0.2))
print("found", store.read(lambda txn: txn.get(("a",))), flush=True)
store.transact(lambda txn: txn.put(("b",), b"theirs"))
store.close()
print("done", flush=True)
"""
)

# A writer for a store owned by another account of the group. It runs in this process, since a new process
# of that user cannot read the sources.
GROUP_WRITER_SCRIPT = (
    AS_NOBODY
    + """
from pathlib import Path
from holdfast.store.requests import CommitRequest
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.writer_address import redirect_stderr_to_log
from holdfast.store.lmdb.writer import Writer, listen, open_engine, try_lock
path = Path(sys.argv[1])
lock = try_lock(path)
backend, engine = open_engine(path, bootstrap=False)
writer = Writer(path, backend, engine, WriterLimits())
redirect_stderr_to_log(path, permissions.file_mode(path))
print("modes", sorted({oct(one.stat().st_mode & 0o777) for one in path.iterdir()}), flush=True)
writer.close()
print("done", flush=True)
"""
)


def test_group_members_read_and_write_a_shared_store(
    open_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(permissions.MODE_VARIABLE, "0770")
    open_home.mkdir()
    os.chown(open_home, 0, NOBODY_UID)
    with stores.open(open_home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"ours"))
        monkeypatch.delenv(permissions.MODE_VARIABLE)
        with python_proc(SHARED_SCRIPT, str(open_home), str(NOBODY_UID), ready=None) as other:
            assert other.expect("found") == "found b'ours'"
            other.expect("done")
            assert other.wait() == 0
        assert store.read(lambda txn: txn.get(("b",))) == b"theirs"
    assert_no_process_left(open_home, LIMITS.idle_exit_s)
    (open_home / LOG_FILE).unlink()  # a restored store has no log
    with python_proc(GROUP_WRITER_SCRIPT, str(open_home), str(NOBODY_UID), ready=None) as other:
        assert other.expect("modes") == "modes ['0o660']"
        other.expect("done")
        assert other.wait() == 0
    monkeypatch.setenv(permissions.MODE_VARIABLE, "0770")
    with stores.open(open_home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("b",))) == b"theirs"


def test_another_user_cannot_open_the_lmdb_lock_file(open_home: Path) -> None:
    """A shared lock on `lock.mdb` would block the recovery of the base."""
    fill(open_home)
    script = (
        AS_NOBODY
        + """
try:
    os.open(sys.argv[1] + "/lock.mdb", os.O_RDONLY)
except PermissionError:
    print("refused", flush=True)
"""
    )
    with python_proc(script, str(open_home), str(NOBODY_UID), ready=None) as other:
        other.expect("refused")
        assert other.wait() == 0


# Creates every file of a writer. A killed writer leaves its socket.
AS_ROOT = """
import sys
from holdfast import store as stores
with stores.open(sys.argv[1]) as store:
    store.transact(lambda txn: txn.put(("a",), b"of root"))
    print("ready", flush=True)
    sys.stdin.readline()
"""
AS_OWNER = (
    AS_NOBODY
    + """
from pathlib import Path
from holdfast.store.lmdb import permissions
from holdfast.store.requests import CommitRequest
from holdfast.store.lmdb.writer import Writer, open_engine, try_lock
path = Path(sys.argv[1])
permissions.check_access(path)
lock = try_lock(path)
backend, engine = open_engine(path, bootstrap=False)
writer = Writer(path, backend, engine, WriterLimits())
[answer] = engine.commit([CommitRequest(1, b"client", backend.last_id(), puts={b"of": b"the owner"})])
print("error", answer.error, flush=True)
writer.close()
print("done", flush=True)
"""
)


def test_files_created_by_root_belong_to_the_store_owner(open_home: Path) -> None:
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY_UID, NOBODY_UID)
    with python_proc(AS_ROOT, str(open_home)) as root:
        owners = {one.name: os.stat(one).st_uid for one in open_home.iterdir()}
        assert set(owners) == set(permissions.STORE_FILES)
        assert set(owners.values()) == {NOBODY_UID}
        writer_of(open_home).kill()
        root.kill()
    assert (open_home / "writer.sock").exists()
    with python_proc(AS_OWNER, str(open_home), str(NOBODY_UID), ready="error None") as owner:
        owner.expect("done")
        assert owner.wait() == 0
    with stores.open(open_home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"of root"


def test_restore_by_root_keeps_the_store_owner(open_home: Path, tmp_path: Path) -> None:
    fill(tmp_path / "own")
    with stores.open(tmp_path / "own", limits=LIMITS) as store:
        store.backup(str(tmp_path / "backup"))
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY_UID, NOBODY_UID)
    restore_backup(tmp_path / "backup", open_home)
    assert {os.stat(one).st_uid for one in open_home.iterdir()} == {NOBODY_UID}


@pytest.mark.parametrize("link", ["hard link", "symbolic link"])
def test_root_does_not_chown_a_linked_file(open_home: Path, link: str) -> None:
    """The owner of the directory controls the targets of its links."""
    root_file = open_home.parent / "of-root"
    root_file.write_text("secret")
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY_UID, NOBODY_UID)
    if link == "hard link":
        (open_home / LOG_FILE).hardlink_to(root_file)
    else:
        (open_home / LOG_FILE).symlink_to(root_file)
    permissions.chown_to_directory_owner(open_home, LOG_FILE)
    permissions.apply_permissions(open_home)
    assert os.stat(root_file).st_uid == 0
