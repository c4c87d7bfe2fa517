"""`holdfast backup` and `holdfast restore`."""

from pathlib import Path

from holdfast import store as stores
from holdfast.durable import queue
from tests.cli.conftest import Run


def fill(path: Path, name: str) -> int:
    with stores.open(path) as store:
        store.transact(queue.put, name, b"kept")
        return store.generation


def test_a_backup_is_taken_while_the_store_is_in_use(run: Run, path: Path, tmp_path: Path) -> None:
    with stores.open(path) as store:
        store.transact(queue.put, "mail", b"kept")
        ran = run("backup", tmp_path / "copy", "--store", path)
    assert ran.code == 0
    assert f"holdfast restore {tmp_path / 'copy'}" in ran.out
    assert (tmp_path / "copy" / "data.mdb").exists()


def test_a_restored_store_holds_the_rows_under_a_new_generation(
    run: Run, path: Path, tmp_path: Path
) -> None:
    generation = fill(path, "mail")
    told = run("backup", tmp_path / "copy", "--store", path, "--json").document
    assert told["generation"] == generation
    assert told["bytes"] > 0
    fill(path, "after the backup")

    # The writer lingers for some seconds: the restore waits for it to leave.
    restored = run("restore", tmp_path / "copy", "--store", path, "--json").document
    assert restored["generation"] > generation
    with stores.open(path) as store:
        assert store.generation == restored["generation"]
        assert store.read(queue.counts, "mail").ready == 1
        assert store.read(queue.counts, "after the backup").ready == 0


def test_restore_to_a_new_place(run: Run, path: Path, tmp_path: Path) -> None:
    fill(path, "mail")
    run("backup", tmp_path / "copy", "--store", path)
    ran = run("restore", tmp_path / "copy", "--store", tmp_path / "new")
    assert ran.code == 0
    assert ": generation " in ran.out
    assert run("store", "info", "--store", tmp_path / "new", "--json").document["queues"]


def test_restore_refuses_a_store_in_use(run: Run, path: Path, tmp_path: Path) -> None:
    fill(path, "mail")
    run("backup", tmp_path / "copy", "--store", path)
    with stores.open(path) as store:
        ran = run("restore", tmp_path / "copy", "--store", path)
        assert ran.code == 1
        assert ran.error.startswith("store_busy: ")
        assert ran.error.endswith("stop it first)")
        assert store.read(queue.counts, "mail").ready == 1


def test_backup_does_not_overwrite(run: Run, path: Path, tmp_path: Path) -> None:
    fill(path, "mail")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "precious").touch()
    ran = run("backup", tmp_path / "copy", "--store", path)
    assert ran.code == 1
    assert "not empty" in ran.error


def test_restore_of_nothing_is_not_found(run: Run, path: Path, tmp_path: Path) -> None:
    ran = run("restore", tmp_path / "nothing", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: ")
    assert not path.exists()
