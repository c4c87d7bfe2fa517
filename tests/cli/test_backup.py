"""`holdfast backup` and `holdfast restore`."""

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.durable import queue
from tests.cli.conftest import RunCommand


def fill(path: Path, name: str) -> int:
    with stores.open(path) as store:
        store.transact(queue.put, name, b"kept")
        return store.generation


def test_backup_of_an_open_store_succeeds(run: RunCommand, path: Path, tmp_path: Path) -> None:
    with stores.open(path) as store:
        store.transact(queue.put, "mail", b"kept")
        result = run("backup", tmp_path / "copy", "--store", path)
    assert result.code == 0
    assert f"holdfast restore {tmp_path / 'copy'}" in result.out
    assert (tmp_path / "copy" / "data.mdb").exists()


@pytest.mark.usefixtures("short_linger")
def test_restore_returns_the_rows_with_a_new_generation(
    run: RunCommand, path: Path, tmp_path: Path
) -> None:
    generation = fill(path, "mail")
    backup = run("backup", tmp_path / "copy", "--store", path, "--json").document
    assert backup["generation"] == generation
    assert backup["bytes"] > 0
    fill(path, "after the backup")

    # The writer process lingers. The restore waits until it exits.
    restored = run("restore", tmp_path / "copy", "--store", path, "--json").document
    assert restored["generation"] > generation
    with stores.open(path) as store:
        assert store.generation == restored["generation"]
        assert store.read(queue.counts, "mail").ready == 1
        assert store.read(queue.counts, "after the backup").ready == 0


def test_restore_to_a_new_directory(run: RunCommand, path: Path, tmp_path: Path) -> None:
    fill(path, "mail")
    run("backup", tmp_path / "copy", "--store", path)
    result = run("restore", tmp_path / "copy", "--store", tmp_path / "new")
    assert result.code == 0
    assert ": generation " in result.out
    assert run("store", "info", "--store", tmp_path / "new", "--json").document["queues"]


@pytest.mark.usefixtures("short_lock_waits")
def test_restore_of_an_open_store_raises_store_busy(
    run: RunCommand, path: Path, tmp_path: Path
) -> None:
    fill(path, "mail")
    run("backup", tmp_path / "copy", "--store", path)
    with stores.open(path) as store:
        result = run("restore", tmp_path / "copy", "--store", path)
        assert result.code == 1
        assert result.error.startswith("store_busy: ")
        assert result.error.endswith("stop it first)")
        assert store.read(queue.counts, "mail").ready == 1


def test_backup_does_not_overwrite_a_directory_that_is_not_empty(
    run: RunCommand, path: Path, tmp_path: Path
) -> None:
    fill(path, "mail")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "precious").touch()
    result = run("backup", tmp_path / "copy", "--store", path)
    assert result.code == 1
    assert "not empty" in result.error


def test_restore_of_a_missing_backup_is_not_found(
    run: RunCommand, path: Path, tmp_path: Path
) -> None:
    result = run("restore", tmp_path / "nothing", "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: ")
    assert not path.exists()
