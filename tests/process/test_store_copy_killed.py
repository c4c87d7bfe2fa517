"""`holdfast store copy` as a process: killed, interrupted, on a full disk, and with an open client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from holdfast import store as stores
from holdfast.errors import CopyUnfinished, StoreMoved
from tests.postgres import fresh_url
from tests.probe_operations import now
from tests.process.conftest import LIMITS
from tests.process.test_store_files import small_disk
from tests.process.watch import OsProcess, assert_no_process_left, until, writer_of
from tests.processes import Proc

pytestmark = pytest.mark.timeout(120)

COPY = [sys.executable, "-m", "holdfast.cli", "store", "copy"]
MIB = 1024 * 1024
VALUES = 12
VALUE_BYTES = 12 * MIB


@pytest.fixture(scope="module")
def closed_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store large enough that its copy takes a moment. No process uses it."""
    path = tmp_path_factory.mktemp("closed") / "store"
    with stores.open(path, limits=LIMITS) as store:
        for n in range(VALUES):
            store.transact(
                lambda txn, n=n: txn.put(("big", n), os.urandom(64) * (VALUE_BYTES // 64))
            )
    assert_no_process_left(path, LIMITS.idle_exit_s)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def here(closed_store: Path, home: Path) -> Path:
    shutil.copytree(closed_store, home)
    return home


@pytest.fixture(params=["lmdb", "postgres"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return fresh_url(empty=True) if request.param == "postgres" else str(tmp_path / "there")


def copy_has_begun(url: str) -> Callable[[], bool]:
    """A function that returns whether the target has copied rows."""

    def lmdb() -> bool:
        file = Path(url) / "data.mdb"
        # The first page is committed once the second page is being copied.
        return file.exists() and file.stat().st_size > 2 * VALUE_BYTES

    def postgres() -> bool:
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("SELECT to_regclass('holdfast_row')").fetchone()
            if row is None or row[0] is None:
                return False
            [(rows,)] = connection.execute("SELECT count(*) FROM holdfast_row").fetchall()
        return int(rows) > 1

    return postgres if url.startswith("postgres") else lmdb


def test_killed_copy_is_unfinished_and_the_next_copy_resumes_it(here: Path, there: str) -> None:
    with Proc.spawn([*COPY, str(here), there], ready=None) as copying:
        until(copy_has_begun(there), "the first rows")
        assert copying.kill() == -signal.SIGKILL
    with pytest.raises(CopyUnfinished):
        stores.open(there, limits=LIMITS)
    with stores.open(here, limits=LIMITS) as store:
        assert store.generation == 1
    with Proc.spawn([*COPY, str(here), there, "--json"], ready=None) as again:
        assert again.wait(60) == 0, again.errors
        report = json.loads("\n".join(again.lines))
    assert report["resumed"] is True
    assert report["rows"] == VALUES
    with stores.open(there, bootstrap=False, limits=LIMITS) as store:
        assert store.read(lambda txn: len(txn.get(("big", VALUES - 1)) or b"")) == VALUE_BYTES


def test_interrupted_copy_exits_130_and_prints_a_hint(here: Path, there: str) -> None:
    with Proc.spawn([*COPY, str(here), there], ready=None) as copying:
        until(copy_has_begun(there), "the first rows")
        os.kill(copying.pid, signal.SIGINT)
        assert copying.wait() == 130
    # A slow copy prints its progress before this line.
    assert copying.errors[-1].startswith("holdfast: interrupted: ")
    with stores.open(here, limits=LIMITS) as store:
        assert store.generation == 1


def test_full_disk_fails_the_copy_and_leaves_the_source_unchanged(
    here: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with Proc.spawn([*COPY, str(here), str(disk / "there")], ready=None) as copying:
            assert copying.wait(60) == 1
        assert copying.errors[-1].startswith("holdfast: store_full: ")
        with stores.open(here, limits=LIMITS) as store:
            assert store.generation == 1


@pytest.mark.usefixtures("probe_writers")
def test_commit_to_a_copied_store_raises_store_moved(home: Path, there: str) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(now)
        writer: OsProcess = writer_of(home)
        writer.kill()
        with Proc.spawn([*COPY, str(home), there], ready=None) as copying:
            assert copying.wait(60) == 0, copying.errors
        with pytest.raises(StoreMoved):
            store.transact(now)
