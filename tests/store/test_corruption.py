"""Random damage to every file of a store ends in a typed error, or changes nothing that was acknowledged.

`corruption` says what a case is. The files of a refused store are as they were, byte by byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from holdfast import store as stores
from holdfast.cli import main
from holdfast.config import MAP_BYTES, WriterLimits
from holdfast.errors import StoreCorrupt
from holdfast.store.pages import Pages, newest
from holdfast.store.readback import read_back
from tests.process.watch import assert_nobody_is_left
from tests.store.corruption import PAGE, ROWS, Result, in_use, run, table, templates

MODULES = ("holdfast.store.pages", "holdfast.store.readback", "holdfast.ops.unreadable")

LIMITS = WriterLimits(linger_s=0.2, reader_check_s=0.2)
CASES = 60
KNOWN_GAPS = ("the user's", "no second source")
CASES_DEEP = 1000


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Path]]:
    with templates() as made:
        yield made


def check(results: list[Result]) -> None:
    told = table(results)
    assert [one for one in results if one.changed] == [], "a refusal has changed files"
    assert [one for one in results if one.outcome == "failed"] == [], told
    recovered = ("refused", "unchanged")
    logs = [one for one in results if one.damage.file != "data.mdb"]
    assert [one for one in logs if one.outcome not in recovered] == [], told
    # LMDB has no checksums: nothing finds damage to a value of the user, or to a field that is stored once.
    silent = [one for one in results if one.outcome == "nothing"]
    assert [one for one in silent if not one.why.startswith(KNOWN_GAPS)] == [], told
    assert len(silent) <= len(results) // 10, told


@pytest.mark.timeout(300)
def test_damage_ends_in_a_typed_error_or_changes_nothing(found: dict[str, Path]) -> None:
    results = run(CASES, 7, found)
    check(results)
    # Damage of each kind was done, and found.
    assert {one.outcome for one in results} >= {"refused", "unchanged", "verify"}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_damage_a_thousand_times(found: dict[str, Path]) -> None:
    results = run(CASES_DEEP, 1, found)
    print(table(results))
    check(results)


# -- through the processes that users have ---------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, found: dict[str, Path]) -> Iterator[Path]:
    path = tmp_path / "store"
    shutil.copytree(found["closed"], path, ignore=lambda *_: [ROWS])
    yield path
    assert_nobody_is_left(path, LIMITS.linger_s, slack_s=10)


def leaf_of(home: Path) -> int:
    """A page of the main tree that no open reads: it holds rows of the user."""
    pages = in_use(home / "data.mdb")
    data = (home / "data.mdb").read_bytes()
    return next(
        n for n in pages if b"a row of the user, number 7;" in data[n * PAGE : (n + 1) * PAGE]
    )


def zero(home: Path, page: int) -> None:
    with open(home / "data.mdb", "r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))


@pytest.mark.timeout(120)
def test_verify_reports_a_damaged_page_as_store_corrupt(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--store", str(home), "--jobs", "1"]) == 0
    zero(home, leaf_of(home))
    capsys.readouterr()
    assert main(["verify", "--store", str(home), "--jobs", "1"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("holdfast: store_corrupt: ")
    assert "page=" in line


@pytest.mark.timeout(120)
@pytest.mark.parametrize("structure", [True, False], ids=["pages first", "LMDB alone"])
def test_the_end_of_a_reader_is_reported_by_its_parent(home: Path, structure: bool) -> None:
    with stores.open(home, limits=LIMITS):
        zero(home, leaf_of(home))
        # LMDB alone is ended by a signal, and this process goes on.
        says = "page=" if structure else "ended by SIG"
        with pytest.raises(StoreCorrupt, match=says):
            read_back(home, structure=structure)


@pytest.mark.timeout(120)
def test_a_cut_off_file_ends_its_reader_by_a_bus_error(home: Path) -> None:
    with stores.open(home, limits=LIMITS):
        os.truncate(home / "data.mdb", 3 * PAGE)
        with pytest.raises(StoreCorrupt, match="ended by SIG"):
            read_back(home, structure=False)


@pytest.mark.timeout(120)
def test_verify_goes_on_beside_commits(home: Path) -> None:
    """Pages of its snapshot are not used again, however many commits follow."""
    with stores.open(home, limits=LIMITS) as store:
        ending = store.submit(lambda txn: txn.put(("n",), b"0"))
        for n in range(50):
            ending = store.submit(lambda txn, n=n: txn.put(("n",), b"%d" % n * 500))
        read_back(home)
        ending.result(30)


def test_the_reader_of_pages_sees_what_lmdb_sees(home: Path) -> None:
    env = lmdb.open(str(home), map_size=MAP_BYTES, readonly=True, lock=False)
    with env.begin() as txn, txn.cursor() as cursor:
        rows = [(bytes(key), bytes(value)) for key, value in cursor]
    env.close()
    fd = os.open(home / "data.mdb", os.O_RDONLY)
    try:
        pages = Pages(fd, newest(fd))
        assert pages.scan(b"\0", b"\xff" * 500, None, False) == rows
        assert pages.scan(b"\0", b"\xff" * 500, 5, True) == rows[:-6:-1]
        assert all(pages.get(key) == value for key, value in rows)
        assert pages.get(b"not there") is None
    finally:
        os.close(fd)
