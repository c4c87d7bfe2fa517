"""`holdfast store copy`: what it tells, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.authority import workers
from holdfast.clock import S
from holdfast.config import WriterLimits
from holdfast.durable import lease, queue
from holdfast.store import places, schema
from tests.cli.conftest import Run
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

LIMITS = WriterLimits(linger_s=0.05, reader_check_s=0.05)


@pytest.fixture
def here(tmp_path: Path) -> str:
    """A store that nobody has open."""
    url = str(tmp_path / "here")
    with stores.open(url, limits=LIMITS) as store:
        store.transact(queue.put_many, "mail", [b"one", b"two"])
    return url


@pytest.fixture(params=["lmdb", "postgres"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return fresh_url() if request.param == "postgres" else str(tmp_path / "there")


def test_what_was_copied_is_told_by_space_with_its_hash(run: Run, here: str, there: str) -> None:
    done = run("store", "copy", here, there)
    assert done.code == 0
    assert done.err == ""
    assert "queue" in done.out
    assert "sha256" in done.out
    assert f"{here} is closed down" in done.out
    counted = run("store", "info", "--store", there, "--json").document
    assert counted["queues"][0]["ready"] == 2


def test_the_document_holds_every_space(run: Run, here: str, there: str) -> None:
    told = run("store", "copy", here, there, "--json").document
    assert told["kept"] is False
    assert told["generation"] == 1
    assert told["rows"] == sum(one["rows"] for one in told["spaces"])
    assert {one["space"] for one in told["spaces"]} == {"queue", "sequence"}
    assert all(len(one["sha256"]) == 64 for one in told["spaces"])


def test_every_command_says_where_a_moved_store_is(run: Run, here: str, there: str) -> None:
    run("store", "copy", here, there)
    refused = run("dead", "list", "--store", here)
    assert refused.code == 1
    assert refused.error.startswith("store_moved: ")


def test_with_keep_the_source_is_still_a_store(run: Run, here: str, there: str) -> None:
    told = run("store", "copy", here, there, "--keep", "--json").document
    assert told["generation"] > 1
    for url in (here, there):
        assert run("store", "info", "--store", url).code == 0


def test_a_password_is_shown_nowhere(run: Run, here: str) -> None:
    url = "postgresql://ada:secret@127.0.0.1:1/x?connect_timeout=2"
    for pair in ((here, url), (url, here)):
        refused = run("store", "copy", *pair)
        assert refused.code == 1
        assert refused.error.startswith("store_unreachable: ")
        assert "secret" not in refused.out + refused.err


def test_one_store_is_not_copied_to_itself(run: Run, here: str) -> None:
    for other in (here, f"lmdb:{here}/"):
        assert run("store", "copy", here, other).error.startswith("same_store: ")


def test_one_store_on_a_server_is_not_copied_to_itself_under_another_url(
    run: Run, here: str
) -> None:
    url = fresh_url()
    run("store", "copy", here, url)
    other = url + ("&" if "?" in url else "?") + "application_name=other"
    assert run("store", "copy", url, other).error.startswith("same_store: ")


def test_a_source_that_is_not_there_is_not_found(run: Run, tmp_path: Path, there: str) -> None:
    refused = run("store", "copy", tmp_path / "nowhere", there)
    assert refused.error.startswith("not_found: ")
    assert not (tmp_path / "nowhere").exists()


def test_a_place_with_a_store_is_refused(run: Run, here: str, there: str) -> None:
    stores.open(there, limits=LIMITS).close()
    assert run("store", "copy", here, there).error.startswith("target_taken: ")


def test_a_newer_store_is_refused(run: Run, here: str, there: str) -> None:
    opened = places.source(here, patience_s=10)
    opened.mark(schema.marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1))
    opened.close()
    assert run("store", "copy", here, there).error.startswith("schema_mismatch: ")


def test_a_store_in_use_is_refused_and_its_workers_are_named(
    run: Run, here: str, there: str
) -> None:
    with stores.open(here, limits=LIMITS) as store:
        store.transact(workers.heartbeat, "bank", "worker-7", "i", ("world",))
        refused = run("store", "copy", here, there).error
    assert refused.startswith("store_in_use: ")
    assert "bank/worker-7" in refused


def test_a_store_in_use_on_a_server_is_refused_and_its_sessions_are_named(
    run: Run, here: str, tmp_path: Path
) -> None:
    url = fresh_url()
    with stores.open(url):
        refused = run("store", "copy", url, tmp_path / "there").error
    assert refused.startswith("store_in_use: ")
    assert "holdfast from" in refused


def test_a_lease_that_has_not_run_out_is_refused_and_told_for_how_long(
    run: Run, here: str, there: str
) -> None:
    with stores.open(here, limits=LIMITS) as store:
        store.transact(lease.acquire, "world/ada", "worker-7", "i", 3600 * S)
    refused = run("store", "copy", here, there).error
    assert refused.startswith("leases_held: ")
    assert "worker-7" in refused
    assert "for_s=3" in refused
    assert run("store", "copy", here, there, "--force").code == 0


def test_a_lease_that_was_given_back_is_no_hindrance(run: Run, here: str, there: str) -> None:
    with stores.open(here, limits=LIMITS) as store:
        store.transact(
            lease.release, store.transact(lease.acquire, "world/ada", "worker-7", "i", 3600 * S)
        )
    assert run("store", "copy", here, there).code == 0


@pytest.mark.parametrize("bad", ["memory:", "mysql://x/y", ""])
def test_what_is_no_place_for_a_store_is_refused(run: Run, here: str, bad: str) -> None:
    for pair in ((here, bad), (bad, here)):
        refused = run("store", "copy", *pair)
        assert refused.code == 1
        assert refused.error
