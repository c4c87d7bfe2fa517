"""Scans for as many rows as there are: few are kept, and not asked for again; many are read on a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.store.api import Row, Txn
from holdfast.store.pg import view
from holdfast.store.postgres import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

MAX = 5


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    monkeypatch.setattr(view, "SCANNED_MAX", MAX)
    url = fresh_url()
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


@pytest.fixture
def snapshots(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> list[None]:
    """One for each snapshot that the first of two has read on."""
    made: list[None] = []
    one, whole = two[0], two[0]._on_snapshot

    def on_snapshot(*args: Any) -> Any:
        made.append(None)
        return whole(*args)

    monkeypatch.setattr(one, "_on_snapshot", on_snapshot)
    return made


@pytest.fixture
def scans(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """What the first of two has asked the server to scan."""
    made: list[tuple[Any, ...]] = []
    one, whole = two[0], two[0]._asking.scan

    def scan(*args: Any) -> list[Row]:
        made.append(args)
        return whole(*args)

    monkeypatch.setattr(one._asking, "scan", scan)
    return made


def fill(txn: Txn, count: int) -> None:
    for n in range(count):
        txn.put(("row", n), b"%d" % n)


def everything(txn: Txn, limit: int | None = None, reverse: bool = False) -> list[bytes]:
    return [value for _, value in txn.scan(("row",), ("row", 1 << 20), limit, reverse)]


@pytest.mark.parametrize("limit", [None, MAX + 1, 10_000])
@pytest.mark.parametrize("reverse", [False, True])
def test_few_rows_are_asked_for_once(
    two: tuple[PostgresStore, PostgresStore],
    snapshots: list[None],
    scans: list[tuple[Any, ...]],
    limit: int | None,
    reverse: bool,
) -> None:
    one, other = two
    other.transact(fill, MAX)
    for _ in range(3):
        found = one.read(everything, limit, reverse)
        assert sorted(found, reverse=reverse) == found
        assert len(found) == MAX
    assert (len(scans), snapshots) == (1, [])


@pytest.mark.parametrize("count", [MAX + 1, 3 * MAX])
def test_many_rows_are_read_on_a_snapshot_and_the_range_is_remembered(
    two: tuple[PostgresStore, PostgresStore],
    snapshots: list[None],
    scans: list[tuple[Any, ...]],
    count: int,
) -> None:
    one, other = two
    other.transact(fill, count)
    for _ in range(3):
        assert len(one.read(everything)) == count
    assert (len(scans), len(snapshots)) == (1, 3)


def test_what_others_add_and_delete_is_seen(
    two: tuple[PostgresStore, PostgresStore], snapshots: list[None]
) -> None:
    one, other = two
    other.transact(fill, 2)
    assert one.read(everything) == [b"0", b"1"]
    other.transact(lambda txn: (txn.delete(("row", 0)), txn.put(("row", 7), b"7")))
    assert one.read(everything) == [b"1", b"7"]
    assert one.read(everything, None, True) == [b"7", b"1"]


def test_a_transaction_that_scanned_everything_conflicts_with_what_others_add(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """Else two that each look for all would each miss the other."""
    one, other = two
    runs: list[int] = []

    def sum_up(txn: Txn) -> None:
        found = everything(txn)
        runs.append(len(found))
        if len(runs) == 1:
            other.transact(lambda txn: txn.put(("row", 9), b"9"))
        txn.put(("sum",), b"%d" % len(found))

    one.transact(sum_up)
    assert runs == [0, 1]
    assert one.read(lambda txn: txn.get(("sum",))) == b"1"


def test_large_ranges_are_not_remembered_without_bound(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    asking = two[0]._asking
    for n in range(3_000):
        asking.note_large(b"%d" % n, b"z")
    assert len(asking._large) <= 1_000
