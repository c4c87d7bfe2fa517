"""Commands with `--store postgresql://…`: output, privileges, and no password in the output."""

from __future__ import annotations

import psycopg
import pytest

from holdfast.durable import queue
from holdfast.store.urls import redact
from tests.cli.conftest import TTL_NS, CommandResult, RunCommand
from tests.ops.account_rig import AccountRig
from tests.ops.app import Deposited
from tests.postgres import fresh_url, role_url
from tests.process.on_postgres import full_app

pytestmark = pytest.mark.timeout(60)

MODULES = ("holdfast.cli.store_option", "holdfast.cli.store")

SECRET = "sw0rdfish"

READ_COMMANDS = [
    ("store", "info"),
    ("ready",),
    ("worlds", "list"),
    ("worlds", "show", "Account/ada"),
    ("worlds", "journal", "Account/ada"),
    ("workers", "list"),
    ("effects", "list"),
    ("timers", "list"),
    ("dispatch", "list"),
    ("runs", "list"),
    ("dead", "list", "mail"),
    ("verify",),
]


@pytest.fixture(scope="module")
def url() -> str:
    """A store with an account and dead letters, owned by a role with a password."""
    database_url = role_url(fresh_url(lasting=True, empty=True), "guarded", SECRET)
    rig = AccountRig(_grant_schema_to_role(database_url))
    with rig.store as store:
        for amount in (1, 2, 3):
            rig.account("ada").send(Deposited(amount), correlation_id=f"c-{amount}")
        rig.run_worker()
        store.transact(queue.put_many, "mail", [b"first", b"second"])
        for claim in store.transact(queue.claim, "mail", "worker", 1, TTL_NS):
            store.transact(queue.dead_letter, claim, "no_such_user", "ValueError: no")
    return database_url


def _grant_schema_to_role(url: str) -> str:
    """Grant the schema to the role, as an administrator does once."""
    with psycopg.connect(
        url.replace(f"//guarded:{SECRET}@", "//postgres:@"), autocommit=True
    ) as it:
        it.execute("GRANT ALL ON SCHEMA public TO guarded")
    return url


def without_secret(result: CommandResult) -> CommandResult:
    assert SECRET not in result.out + result.err
    return result


@pytest.mark.parametrize("command", READ_COMMANDS, ids=" ".join)
def test_read_command_works_with_a_postgresql_url(
    run: RunCommand, url: str, command: tuple[str, ...]
) -> None:
    as_text, as_json = (
        without_secret(run(*command, "--store", url, *more)) for more in ((), ("--json",))
    )
    assert (as_text.err, as_json.err) == ("", "")
    assert as_text.code == as_json.code == (1 if command == ("ready",) else 0)
    assert as_text.out
    assert isinstance(as_json.document, dict)


def test_postgresql_url_is_read_from_the_environment(
    run: RunCommand, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("worlds", "list").code == 1
    monkeypatch.setenv("HOLDFAST_STORE", url)
    assert "ada" in without_secret(run("worlds", "list")).out


def test_password_is_read_from_the_environment(
    run: RunCommand, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", SECRET)
    assert run("worlds", "list", "--store", url.replace(f":{SECRET}@", "@")).code == 0


def test_store_info_prints_commit_number_and_sizes(run: RunCommand, url: str) -> None:
    document = without_secret(run("store", "info", "--store", url, "--json")).document
    assert document["url"] == redact(url)
    assert document["commit_no"] > 5
    assert document["disk_bytes"] >= document["bytes"] > 8192
    assert document["queues"][0]["queue"]


def test_verify_passes_the_password_to_its_worker_processes(run: RunCommand, url: str) -> None:
    result = without_secret(
        run("verify", "--app", "tests.ops.app:app", "--jobs", "2", "--store", url)
    )
    assert (result.code, result.err) == (0, "")
    assert "3 steps replayed, states compared for 3 entries: sound" in result.out


def test_dead_redrive_on_postgresql(run: RunCommand, url: str) -> None:
    [letter] = run("dead", "list", "mail", "--store", url, "--json").document["letters"]
    assert (
        without_secret(run("dead", "redrive", "mail", str(letter["seq"]), "--store", url)).code == 0
    )
    assert run("dead", "list", "mail", "--store", url, "--json").document["letters"] == []


def test_worlds_pause_resume_and_fork_on_postgresql(run: RunCommand, url: str) -> None:
    for action, status in (("pause", "paused"), ("resume", "active")):
        assert without_secret(run("worlds", action, "Account/ada", "--store", url)).code == 0
        document = run("worlds", "show", "Account/ada", "--store", url, "--json").document
        assert document["status"] == status
    assert without_secret(run("worlds", "fork", "Account/ada", "eve", "--store", url)).code == 0
    assert run("worlds", "show", "Account/eve", "--store", url).code == 0


def test_tasks_list_limit_cancel_and_redrive_on_postgresql(run: RunCommand, url: str) -> None:
    with full_app.app.open(url, roles=()) as runtime:
        ids = [runtime.submit(full_app.double, n).id for n in range(3)]
    options = ("--universe", "shop", "--store", url)
    assert without_secret(run("tasks", "list", *options)).code == 0
    assert (
        without_secret(run("tasks", "limit", "default", "--concurrency", "2", *options)).code == 0
    )
    assert without_secret(run("tasks", "cancel", ids[0], *options)).code == 0
    assert run("tasks", "show", ids[0], *options, "--json").document["state"] == "DEAD"
    assert without_secret(run("tasks", "redrive", ids[0], *options)).code == 0
    assert without_secret(run("verify", "--store", url)).code == 0


@pytest.mark.parametrize("command", [("backup", "copy"), ("restore", "copy")])
def test_backup_and_restore_refer_to_the_pg_tools(
    run: RunCommand, url: str, command: tuple[str, ...]
) -> None:
    result = without_secret(run(*command, "--store", url))
    assert (result.code, result.out) == (1, "")
    assert "pg_" in result.error


def test_commands_do_not_create_a_store_in_an_empty_database(run: RunCommand) -> None:
    empty = fresh_url(empty=True)
    result = run("worlds", "list", "--store", empty)
    assert result.code == 1
    assert result.error.startswith("not_found: ")
    assert "holdfast up" in result.error
    assert run("worlds", "list", "--store", empty).error == result.error


def test_demo_refuses_a_postgresql_url(run: RunCommand) -> None:
    result = run("demo", "--store", "postgresql://host/db")
    assert (result.code, result.out) == (1, "")
    assert "embedded" in result.error


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET[:4]}/{SECRET[4:]}@127.0.0.1:1/db",
        f"postgresql://me:{SECRET}%ZZ@127.0.0.1:1/db",
        f"postgresql://127.0.0.1:1/db?password={SECRET}&nonsense=1",
    ],
)
def test_invalid_url_is_refused_without_printing_its_password(run: RunCommand, url: str) -> None:
    result = run("worlds", "list", "--store", url)
    assert (result.code, result.error.split(":")[0]) == (1, "bad_url")
    assert SECRET[:4] not in result.err
    assert SECRET[4:] not in result.err
