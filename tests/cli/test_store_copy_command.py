"""`holdfast store copy`: its report, and its one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.config import WriterLimits
from holdfast.durable import lease, queue
from holdfast.leadership import worker_registry
from holdfast.store import schema
from holdfast.store.admin import raw_access
from tests.cli.conftest import RunCommand
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

LIMITS = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A store without open clients."""
    url = str(tmp_path / "here")
    with stores.open(url, limits=LIMITS) as store:
        store.transact(queue.put_many, "mail", [b"one", b"two"])
    return url


@pytest.fixture(params=["lmdb", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return fresh_url(empty=True) if request.param == "postgres" else str(tmp_path / "there")


def test_store_copy_prints_rows_and_hash_by_space(
    run: RunCommand, source: str, target: str
) -> None:
    result = run("store", "copy", source, target)
    assert result.code == 0
    assert result.err == ""
    assert "queue" in result.out
    assert "sha256" in result.out
    assert f"{source} is closed" in result.out
    info = run("store", "info", "--store", target, "--json").document
    assert info["queues"][0]["ready"] == 2


def test_store_copy_json_lists_every_space(run: RunCommand, source: str, target: str) -> None:
    document = run("store", "copy", source, target, "--json").document
    assert document["kept"] is False
    assert document["generation"] == 1
    assert document["rows"] == sum(space["rows"] for space in document["spaces"])
    assert {space["space"] for space in document["spaces"]} == {"queue", "sequence"}
    assert all(len(space["sha256"]) == 64 for space in document["spaces"])


def test_commands_on_a_moved_store_raise_store_moved(
    run: RunCommand, source: str, target: str
) -> None:
    run("store", "copy", source, target)
    refused = run("dead", "list", "--store", source)
    assert refused.code == 1
    assert refused.error.startswith("store_moved: ")


def test_store_copy_keep_leaves_the_source_usable(
    run: RunCommand, source: str, target: str
) -> None:
    document = run("store", "copy", source, target, "--keep", "--json").document
    assert document["generation"] > 1
    for url in (source, target):
        assert run("store", "info", "--store", url).code == 0


def test_store_copy_error_does_not_print_the_password(run: RunCommand, source: str) -> None:
    url = "postgresql://ada:secret@127.0.0.1:1/x?connect_timeout=2"
    for pair in ((source, url), (url, source)):
        refused = run("store", "copy", *pair)
        assert refused.code == 1
        assert refused.error.startswith("store_unreachable: ")
        assert "secret" not in refused.out + refused.err


def test_store_copy_to_the_same_directory_is_refused(run: RunCommand, source: str) -> None:
    for other in (source, f"lmdb:{source}/"):
        assert run("store", "copy", source, other).error.startswith("same_store: ")


def test_store_copy_to_the_same_database_under_another_url_is_refused(
    run: RunCommand, source: str
) -> None:
    url = fresh_url(empty=True)
    run("store", "copy", source, url)
    other = url + ("&" if "?" in url else "?") + "application_name=other"
    assert run("store", "copy", url, other).error.startswith("same_store: ")


def test_store_copy_of_a_missing_source_is_not_found(
    run: RunCommand, tmp_path: Path, target: str
) -> None:
    refused = run("store", "copy", tmp_path / "nowhere", target)
    assert refused.error.startswith("not_found: ")
    assert not (tmp_path / "nowhere").exists()


def test_store_copy_to_an_existing_store_is_refused(
    run: RunCommand, source: str, target: str
) -> None:
    stores.open(target, limits=LIMITS).close()
    assert run("store", "copy", source, target).error.startswith("target_taken: ")


def test_store_copy_of_a_newer_schema_is_refused(run: RunCommand, source: str, target: str) -> None:
    raw_store = raw_access.open_source(source, lock_wait_s=10)
    raw_store.write_marker(schema.encode_marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1))
    raw_store.close()
    assert run("store", "copy", source, target).error.startswith("schema_mismatch: ")


@pytest.mark.usefixtures("short_lock_waits")
def test_store_copy_of_an_open_store_is_refused_and_names_its_workers(
    run: RunCommand, source: str, target: str
) -> None:
    with stores.open(source, limits=LIMITS) as store:
        store.transact(worker_registry.heartbeat, "bank", "worker-7", "i", ("world",))
        refused = run("store", "copy", source, target).error
    assert refused.startswith("store_in_use: ")
    assert "bank/worker-7" in refused


@pytest.mark.usefixtures("short_lock_waits")
def test_store_copy_of_an_open_database_is_refused_and_names_its_sessions(
    run: RunCommand, source: str, tmp_path: Path
) -> None:
    url = fresh_url(empty=True)
    with stores.open(url):
        refused = run("store", "copy", url, tmp_path / "there").error
    assert refused.startswith("store_in_use: ")
    assert "holdfast from" in refused


def test_store_copy_with_a_live_lease_is_refused_unless_forced(
    run: RunCommand, source: str, target: str
) -> None:
    with stores.open(source, limits=LIMITS) as store:
        store.transact(lease.acquire, "world/ada", "worker-7", "i", 3600 * S)
    refused = run("store", "copy", source, target).error
    assert refused.startswith("leases_held: ")
    assert "worker-7" in refused
    assert "for_s=3" in refused
    assert run("store", "copy", source, target, "--force").code == 0


def test_store_copy_ignores_a_released_lease(run: RunCommand, source: str, target: str) -> None:
    with stores.open(source, limits=LIMITS) as store:
        store.transact(
            lease.release, store.transact(lease.acquire, "world/ada", "worker-7", "i", 3600 * S)
        )
    assert run("store", "copy", source, target).code == 0


@pytest.mark.parametrize("bad", ["memory:", "mysql://x/y", ""])
def test_store_copy_rejects_an_invalid_store_url(run: RunCommand, source: str, bad: str) -> None:
    for pair in ((source, bad), (bad, source)):
        refused = run("store", "copy", *pair)
        assert refused.code == 1
        assert refused.error
