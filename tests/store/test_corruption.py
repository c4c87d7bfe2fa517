"""Random corruption of any file of a store ends in a typed error or leaves acknowledged rows unchanged.

`corruption` defines a case. A refused open leaves the files byte-identical.
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
from holdfast.store.lmdb.integrity_check import check_integrity
from holdfast.store.lmdb.page_reader import PageReader, newest_meta
from tests.process.watch import assert_no_process_left
from tests.store.corruption import (
    PAGE,
    ROWS,
    CorruptionResult,
    create_templates,
    format_table,
    pages_in_use,
    run_cases,
)

MODULES = (
    "holdfast.store.lmdb.page_reader",
    "holdfast.store.lmdb.integrity_check",
    "holdfast.ops.decode_errors",
)

LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)
CASES = 60
KNOWN_GAPS = ("the user's", "no second source")
CASES_DEEP = 1000


@pytest.fixture(scope="module")
def template_stores() -> Iterator[dict[str, Path]]:
    with create_templates() as by_state:
        yield by_state


def check_results(results: list[CorruptionResult]) -> None:
    summary = format_table(results)
    assert [one for one in results if one.changed] == [], "a refusal has changed files"
    assert [one for one in results if one.outcome == "failed"] == [], summary
    recovered = ("refused", "unchanged")
    logs = [one for one in results if one.damage.file != "data.mdb"]
    assert [one for one in logs if one.outcome not in recovered] == [], summary
    # LMDB has no checksums: damage to a user's value, or to a field that is stored once, is undetectable.
    silent = [one for one in results if one.outcome == "nothing"]
    assert [one for one in silent if not one.why.startswith(KNOWN_GAPS)] == [], summary
    assert len(silent) <= len(results) // 10, summary


@pytest.mark.timeout(300)
def test_corruption_ends_in_a_typed_error_or_loses_no_rows(
    template_stores: dict[str, Path],
) -> None:
    results = run_cases(CASES, 7, template_stores)
    check_results(results)
    # The cases cover each outcome.
    assert {one.outcome for one in results} >= {"refused", "unchanged", "verify"}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_thousand_corruption_cases_end_in_a_typed_error_or_lose_no_rows(
    template_stores: dict[str, Path],
) -> None:
    results = run_cases(CASES_DEEP, 1, template_stores)
    print(format_table(results))
    check_results(results)


# -- through the CLI and client processes ----------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, template_stores: dict[str, Path]) -> Iterator[Path]:
    path = tmp_path / "store"
    shutil.copytree(template_stores["closed"], path, ignore=lambda *_: [ROWS])
    yield path
    assert_no_process_left(path, LIMITS.idle_exit_s, slack_s=10)


def user_leaf_page(home: Path) -> int:
    """Return a page of the main tree that opening does not read: it holds user rows."""
    pages = pages_in_use(home / "data.mdb")
    data = (home / "data.mdb").read_bytes()
    return next(
        n for n in pages if b"a row of the user, number 7;" in data[n * PAGE : (n + 1) * PAGE]
    )


def zero_page(home: Path, page: int) -> None:
    with open(home / "data.mdb", "r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))


@pytest.mark.timeout(120)
def test_verify_reports_a_damaged_page_as_store_corrupt(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--store", str(home), "--jobs", "1"]) == 0
    zero_page(home, user_leaf_page(home))
    capsys.readouterr()
    assert main(["verify", "--store", str(home), "--jobs", "1"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("holdfast: store_corrupt: ")
    assert "page=" in line


@pytest.mark.timeout(120)
@pytest.mark.parametrize("structure", [True, False], ids=["pages first", "LMDB alone"])
def test_check_integrity_reports_a_crashed_child_as_store_corrupt(
    home: Path, structure: bool
) -> None:
    with stores.open(home, limits=LIMITS):
        zero_page(home, user_leaf_page(home))
        # Without the structure check LMDB crashes its child process. This process survives.
        says = "page=" if structure else "crashed with SIG"
        with pytest.raises(StoreCorrupt, match=says):
            check_integrity(home, structure=structure)


@pytest.mark.timeout(120)
def test_check_integrity_reports_a_truncated_file_as_store_corrupt(home: Path) -> None:
    with stores.open(home, limits=LIMITS):
        os.truncate(home / "data.mdb", 3 * PAGE)
        with pytest.raises(StoreCorrupt, match="crashed with SIG"):
            check_integrity(home, structure=False)


@pytest.mark.timeout(120)
def test_check_integrity_passes_during_commits(home: Path) -> None:
    """Commits do not reuse the pages of the snapshot that the check reads."""
    with stores.open(home, limits=LIMITS) as store:
        last_commit = store.submit(lambda txn: txn.put(("n",), b"0"))
        for n in range(50):
            last_commit = store.submit(lambda txn, n=n: txn.put(("n",), b"%d" % n * 500))
        check_integrity(home)
        last_commit.result(30)


def test_page_reader_returns_the_same_rows_as_lmdb(home: Path) -> None:
    env = lmdb.open(str(home), map_size=MAP_BYTES, readonly=True, lock=False)
    with env.begin() as txn, txn.cursor() as cursor:
        rows = [(bytes(key), bytes(value)) for key, value in cursor]
    env.close()
    fd = os.open(home / "data.mdb", os.O_RDONLY)
    try:
        pages = PageReader(fd, newest_meta(fd))
        assert pages.scan(b"\0", b"\xff" * 500, None, False) == rows
        assert pages.scan(b"\0", b"\xff" * 500, 5, True) == rows[:-6:-1]
        assert all(pages.get(key) == value for key, value in rows)
        assert pages.get(b"not there") is None
    finally:
        os.close(fd)
