"""Access rights: a store is its owner's, unless `HOLDFAST_STORE_MODE` shares it with a group."""

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
from holdfast.store import access
from holdfast.store.address import LOG
from holdfast.store.backup import restore
from tests.process.conftest import LIMITS
from tests.process.refusals import refused
from tests.process.watch import assert_nobody_is_left, writer_of
from tests.processes import python_proc

pytestmark = pytest.mark.timeout(60)

MODULES = ("holdfast.store.access",)

NOBODY = 65534

# Another user, in the group that is given: everything is imported before, for it may not read our sources.
AS_NOBODY = """
import os, sys
import holdfast.store.lmdb, holdfast.store.writer, holdfast.cli.verify, holdfast.store.backup
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
    assert_nobody_is_left(made / "store", LIMITS.linger_s, slack_s=10)
    shutil.rmtree(made)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def modes(home: Path) -> dict[str, int]:
    return {one.name: mode_of(one) for one in home.iterdir()}


def fill(home: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"secret"))


def test_a_new_store_is_its_owners_alone(home: Path) -> None:
    before = os.umask(0o000)
    try:
        with stores.open(home, limits=LIMITS) as store:
            store.transact(lambda txn: txn.put(("a",), b"1"))
            assert mode_of(home) == 0o700
            found = modes(home)
    finally:
        os.umask(before)
    assert set(found) == set(access.NAMES)
    assert set(found.values()) == {0o600}


def test_rights_of_an_existing_store_are_tightened(home: Path) -> None:
    fill(home)
    assert_nobody_is_left(home, LIMITS.linger_s)
    os.chmod(home, 0o755)
    for one in home.iterdir():
        os.chmod(one, 0o644)
    with stores.open(home, limits=LIMITS) as store:
        assert mode_of(home) == 0o700
        assert set(modes(home).values()) == {0o600}
        assert store.read(lambda txn: txn.get(("a",))) == b"secret"


def test_a_directory_with_other_files_keeps_its_mode(home: Path) -> None:
    home.mkdir()
    os.chmod(home, 0o755)
    (home / "notes.txt").write_text("mine")
    os.chmod(home / "notes.txt", 0o644)
    with stores.open(home, limits=LIMITS):
        found = modes(home)
    assert (mode_of(home), found.pop("notes.txt")) == (0o755, 0o644)
    assert set(found.values()) == {0o600}


def test_a_backup_and_a_restored_store_are_their_owners(home: Path, tmp_path: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
        store.backup(str(tmp_path / "backup"))
    restore(tmp_path / "backup", tmp_path / "again")
    for path in (tmp_path / "backup", tmp_path / "again"):
        assert mode_of(path) == 0o700
        assert set(modes(path).values()) == {0o600}


def test_the_mode_is_set_by_the_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home)
    assert_nobody_is_left(home, LIMITS.linger_s)
    monkeypatch.setenv(access.VARIABLE, "0770")
    with stores.open(home, limits=LIMITS) as store:
        store.backup(str(home.parent / "backup"))
        assert mode_of(home) & 0o777 == 0o770
        assert set(modes(home).values()) == {0o660}
    assert mode_of(home.parent / "backup") & 0o777 == 0o770
    assert_nobody_is_left(home, LIMITS.linger_s)
    monkeypatch.delenv(access.VARIABLE)
    fill(home)
    assert mode_of(home) & 0o777 == 0o700


@pytest.mark.parametrize("mode", ["rwx", "9", "0070", "0600", "70000", "-0100"])
def test_a_mode_that_locks_the_owner_out_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(access.VARIABLE, mode)
    with refused(Invalid, says=access.VARIABLE):
        stores.open(home, limits=LIMITS)
    assert not home.exists()


DENIED = (
    AS_NOBODY
    + """
try:
    stores.open(sys.argv[1], limits=WriterLimits(linger_s=0.2))
except HoldfastError as error:
    print("refused", error, flush=True)
code = main(["verify", "--store", sys.argv[1]])
print("code", code, flush=True)
"""
)


@pytest.mark.parametrize("what", ["the directory", "a file", "a directory above", "the socket"])
def test_another_user_is_told_path_owner_and_mode(open_home: Path, what: str) -> None:
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
    with python_proc(DENIED, str(open_home), str(NOBODY), ready=None) as other:
        line = other.expect("refused")
        assert f"store_denied: path='{path}' owner='root' mode='{mode}' user='nobody'" in line
        assert access.VARIABLE in line
        assert other.expect("code") == "code 1"
        assert other.wait() == 0


SHARED = (
    AS_NOBODY
    + """
store = stores.open(sys.argv[1], limits=WriterLimits(linger_s=0.2))
print("found", store.read(lambda txn: txn.get(("a",))), flush=True)
store.transact(lambda txn: txn.put(("b",), b"theirs"))
store.close()
print("done", flush=True)
"""
)

# The writer of a store that another account of the group owns. A new process may not read our sources.
WRITES = (
    AS_NOBODY
    + """
from pathlib import Path
from holdfast.store.engine import Request
from holdfast.store import access
from holdfast.store.address import keep_log
from holdfast.store.writer import Writer, listen, open_engine, take_lock
path = Path(sys.argv[1])
lock = take_lock(path)
backend, engine = open_engine(path, bootstrap=False)
writer = Writer(path, backend, engine, WriterLimits())
keep_log(path, access.file_mode(path))
print("modes", sorted({oct(one.stat().st_mode & 0o777) for one in path.iterdir()}), flush=True)
writer.close()
print("done", flush=True)
"""
)


def test_the_group_of_a_shared_store_reads_and_writes_it(
    open_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.VARIABLE, "0770")
    open_home.mkdir()
    os.chown(open_home, 0, NOBODY)
    with stores.open(open_home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"ours"))
        monkeypatch.delenv(access.VARIABLE)
        with python_proc(SHARED, str(open_home), str(NOBODY), ready=None) as other:
            assert other.expect("found") == "found b'ours'"
            other.expect("done")
            assert other.wait() == 0
        assert store.read(lambda txn: txn.get(("b",))) == b"theirs"
    assert_nobody_is_left(open_home, LIMITS.linger_s)
    (open_home / LOG).unlink()  # as in a store that was restored
    with python_proc(WRITES, str(open_home), str(NOBODY), ready=None) as other:
        assert other.expect("modes") == "modes ['0o660']"
        other.expect("done")
        assert other.wait() == 0
    monkeypatch.setenv(access.VARIABLE, "0770")
    with stores.open(open_home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("b",))) == b"theirs"


def test_another_user_cannot_hold_the_lock_file(open_home: Path) -> None:
    """A shared lock on it would keep a recovery from putting the base back."""
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
    with python_proc(script, str(open_home), str(NOBODY), ready=None) as other:
        other.expect("refused")
        assert other.wait() == 0


# Everything that a writer makes, and a writer that is killed leaves its socket behind.
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
from holdfast.store import access
from holdfast.store.engine import Request
from holdfast.store.writer import Writer, open_engine, take_lock
path = Path(sys.argv[1])
access.check(path)
lock = take_lock(path)
backend, engine = open_engine(path, bootstrap=False)
writer = Writer(path, backend, engine, WriterLimits())
[answer] = engine.commit([Request(1, b"client", backend.last_id(), puts={b"of": b"the owner"})])
print("error", answer.error, flush=True)
writer.close()
print("done", flush=True)
"""
)


def test_root_leaves_the_files_of_another_accounts_store_to_that_account(open_home: Path) -> None:
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY, NOBODY)
    with python_proc(AS_ROOT, str(open_home)) as root:
        owners = {one.name: os.stat(one).st_uid for one in open_home.iterdir()}
        assert set(owners) == set(access.NAMES)
        assert set(owners.values()) == {NOBODY}
        writer_of(open_home).kill()
        root.kill()
    assert (open_home / "writer.sock").exists()
    with python_proc(AS_OWNER, str(open_home), str(NOBODY), ready="error None") as owner:
        owner.expect("done")
        assert owner.wait() == 0
    with stores.open(open_home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"of root"


def test_root_restores_a_store_of_another_account_to_that_account(
    open_home: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "own")
    with stores.open(tmp_path / "own", limits=LIMITS) as store:
        store.backup(str(tmp_path / "backup"))
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY, NOBODY)
    restore(tmp_path / "backup", open_home)
    assert {os.stat(one).st_uid for one in open_home.iterdir()} == {NOBODY}


@pytest.mark.parametrize("link", ["hard link", "symbolic link"])
def test_root_gives_no_file_away_that_has_another_name(open_home: Path, link: str) -> None:
    """The owner of the directory chooses what its names lead to."""
    mine = open_home.parent / "of-root"
    mine.write_text("secret")
    open_home.mkdir(mode=0o700)
    os.chown(open_home, NOBODY, NOBODY)
    if link == "hard link":
        (open_home / LOG).hardlink_to(mine)
    else:
        (open_home / LOG).symlink_to(mine)
    access.hand_over(open_home, LOG)
    access.tighten(open_home)
    assert os.stat(mine).st_uid == 0
