"""`holdfast store usage`."""

from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from tests.cli.conftest import RunCommand
from tests.postgres import reused_url

MODULES = ("holdfast.cli.store_usage", "holdfast.ops.usage_documents")


@hf.task
def pack(n: int) -> int:
    return n


@pytest.fixture(params=["lmdb", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = str(tmp_path / "data") if request.param == "lmdb" else reused_url()
    for universe in ("shop", "bank"):
        with hf.App(universe, tasks=[pack]).open(found, roles=()) as rt:
            rt.submit_many(pack, [(n,) for n in range(20)])
    return found


def test_usage_before_the_first_census_names_the_remedy(run: RunCommand, url: str) -> None:
    result = run("store", "usage", "--store", url)
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("no census yet")
    assert "--count" in result.out


@pytest.mark.spec(
    "DESIGN",
    "9. Operate",
    "the space of a store is shown by universe, kind and type without a scan",
)
def test_usage_shows_the_last_census(run: RunCommand, url: str) -> None:
    counted = run("store", "usage", "--count", "--json", "--store", url).document
    shown = run("store", "usage", "--json", "--store", url).document
    assert shown["figures"] == counted["figures"]
    assert shown["census"]["ended_ns"] == counted["census"]["ended_ns"]
    assert shown["census"]["age_s"] >= counted["census"]["age_s"]
    found = {(one["universe"], one["kind"], one["type"]): one["rows"] for one in shown["figures"]}
    assert (found["shop", "tasks", "pack"], found["bank", "tasks", "pack"]) == (20, 20)
    assert all(part["bytes"] > 0 for part in shown["parts"])
    assert shown["census"]["bytes"] < sum(part["bytes"] for part in shown["parts"])


def test_usage_of_one_universe_as_text(run: RunCommand, tmp_path: Path) -> None:
    path = tmp_path / "data"
    for universe in ("shop", "bank"):
        with hf.App(universe, tasks=[pack]).open(str(path), roles=()) as rt:
            rt.submit(pack, 1)
    out = run("store", "usage", "--count", "--universe", "bank", "--store", path).out
    head, table = out.split("\n\n")
    assert head.splitlines()[0].startswith("census ")
    assert "free in data.mdb" in head
    assert table.splitlines()[0].split() == ["universe", "kind", "type", "rows", "bytes"]
    assert {line.split()[0] for line in table.splitlines()[1:]} == {"bank"}


def test_rows_and_pages_of_an_embedded_store_are_exact(tmp_path: Path) -> None:
    with stores.open(tmp_path / "data") as store:
        from holdfast.store.lmdb.store import LmdbStore

        assert isinstance(store, LmdbStore)
        store.transact(lambda txn: [txn.put((0, "sim", n), b"x" * 10_000) for n in range(50)])
        full = store.page_usage()
        store.transact(lambda txn: [txn.delete((0, "sim", n)) for n in range(50)])
        empty = store.page_usage()
        rows = store.read(lambda txn: len(txn.scan(b"\x00", b"\xff" * 481)))
        # A commit has a row with its outcome.
        assert (full.rows - empty.rows, empty.rows) == (50 - 1, rows)
        assert full.used_bytes - empty.used_bytes >= 50 * 10_000
        assert empty.free_bytes - full.free_bytes >= 50 * 10_000
