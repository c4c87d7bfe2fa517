"""Unlimited scans: a small range is cached and read once, a large range is read on a server snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import failpoints
from holdfast.store.api import Txn
from holdfast.store.postgres import cached_snapshot
from holdfast.store.postgres.read_pool import ReadPool
from holdfast.store.postgres.rows import SCAN, SCAN_BACK
from holdfast.store.postgres.store import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

MAX = 5


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    monkeypatch.setattr(cached_snapshot, "SCANNED_MAX", MAX)
    url = fresh_url()
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


@pytest.fixture
def snapshots(two: tuple[PostgresStore, PostgresStore]) -> Iterator[list[None]]:
    """Record each snapshot that the first store reads on."""
    made: list[None] = []

    def record(store: PostgresStore) -> None:
        if store is two[0]:
            made.append(None)

    with failpoints.on("postgres.snapshot", calls=record):
        yield made


@pytest.fixture
def scans(two: tuple[PostgresStore, PostgresStore]) -> Iterator[list[str]]:
    """Record each scan that the first store sends to the server."""
    made: list[str] = []

    def record(pool: ReadPool, statement: str) -> None:
        if pool is two[0]._read_pool and statement in (SCAN, SCAN_BACK):
            made.append(statement)

    with failpoints.on("postgres.fetch", calls=record):
        yield made


def put_rows(txn: Txn, count: int) -> None:
    for n in range(count):
        txn.put(("row", n), b"%d" % n)


def scan_values(txn: Txn, limit: int | None = None, reverse: bool = False) -> list[bytes]:
    return [value for _, value in txn.scan(("row",), ("row", 1 << 20), limit, reverse)]


@pytest.mark.parametrize("limit", [None, MAX + 1, 10_000])
@pytest.mark.parametrize("reverse", [False, True])
def test_small_range_is_scanned_on_the_server_once(
    two: tuple[PostgresStore, PostgresStore],
    snapshots: list[None],
    scans: list[str],
    limit: int | None,
    reverse: bool,
) -> None:
    one, other = two
    other.transact(put_rows, MAX)
    for _ in range(3):
        values = one.read(scan_values, limit, reverse)
        assert sorted(values, reverse=reverse) == values
        assert len(values) == MAX
    assert (len(scans), snapshots) == (1, [])


@pytest.mark.parametrize("count", [MAX + 1, 3 * MAX])
def test_large_range_is_scanned_on_a_snapshot_and_remembered(
    two: tuple[PostgresStore, PostgresStore],
    snapshots: list[None],
    scans: list[str],
    count: int,
) -> None:
    one, other = two
    other.transact(put_rows, count)
    for _ in range(3):
        assert len(one.read(scan_values)) == count
    assert (len(scans), len(snapshots)) == (1, 3)


def test_scan_sees_rows_added_and_deleted_by_another_process(
    two: tuple[PostgresStore, PostgresStore], snapshots: list[None]
) -> None:
    one, other = two
    other.transact(put_rows, 2)
    assert one.read(scan_values) == [b"0", b"1"]
    other.transact(lambda txn: (txn.delete(("row", 0)), txn.put(("row", 7), b"7")))
    assert one.read(scan_values) == [b"1", b"7"]
    assert one.read(scan_values, None, True) == [b"7", b"1"]


def test_unlimited_scan_conflicts_with_an_insert_of_another_process(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """Otherwise two transactions that scan the range and insert would each miss the other's row (write skew)."""
    one, other = two
    runs: list[int] = []

    def sum_up(txn: Txn) -> None:
        values = scan_values(txn)
        runs.append(len(values))
        if len(runs) == 1:
            other.transact(lambda txn: txn.put(("row", 9), b"9"))
        txn.put(("sum",), b"%d" % len(values))

    one.transact(sum_up)
    assert runs == [0, 1]
    assert one.read(lambda txn: txn.get(("sum",))) == b"1"


def test_number_of_remembered_large_ranges_is_bounded(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    asking = two[0]._coalesced_reads
    for n in range(3_000):
        asking.note_large(b"%d" % n, b"z")
    assert len(asking._large_ranges) <= 1_000
