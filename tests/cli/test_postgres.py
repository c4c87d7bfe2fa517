"""Commands with `--store postgresql://…`: what they say, what they need, and that no password is shown."""

from __future__ import annotations

import psycopg
import pytest

from holdfast.durable import queue
from holdfast.store.urls import shown
from tests.cli.conftest import TTL_NS, Ran, Run
from tests.ops.app import Deposited
from tests.ops.rig import Rig
from tests.postgres import fresh_url, role_url
from tests.process.on_postgres import whole

pytestmark = pytest.mark.timeout(60)

MODULES = ("holdfast.cli.target", "holdfast.cli.store")

SECRET = "sw0rdfish"

LOOKS = [
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
    """A store with an account and dead letters, of a role that needs its password."""
    made = role_url(fresh_url(lasting=True), "guarded", SECRET)
    rig = Rig(_owned(made))
    with rig.store as store:
        for amount in (1, 2, 3):
            rig.account("ada").send(Deposited(amount), correlation_id=f"c-{amount}")
        rig.work()
        store.transact(queue.put_many, "mail", [b"first", b"second"])
        for claim in store.transact(queue.claim, "mail", "worker", 1, TTL_NS):
            store.transact(queue.bury, claim, "no_such_user", "ValueError: no")
    return made


def _owned(url: str) -> str:
    """What an administrator does once, for the role that is to have the store."""
    with psycopg.connect(
        url.replace(f"//guarded:{SECRET}@", "//postgres:@"), autocommit=True
    ) as it:
        it.execute("GRANT ALL ON SCHEMA public TO guarded")
    return url


def told(ran: Ran) -> Ran:
    assert SECRET not in ran.out + ran.err
    return ran


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_a_command_looks_at_a_database(run: Run, url: str, command: tuple[str, ...]) -> None:
    as_text, as_json = (told(run(*command, "--store", url, *more)) for more in ((), ("--json",)))
    assert (as_text.err, as_json.err) == ("", "")
    assert as_text.code == as_json.code == (1 if command == ("ready",) else 0)
    assert as_text.out
    assert isinstance(as_json.document, dict)


def test_the_store_may_come_from_the_environment(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("worlds", "list").code == 1
    monkeypatch.setenv("HOLDFAST_STORE", url)
    assert "ada" in told(run("worlds", "list")).out


def test_a_password_may_come_from_the_environment(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", SECRET)
    assert run("worlds", "list", "--store", url.replace(f":{SECRET}@", "@")).code == 0


def test_info_tells_commits_and_size(run: Run, url: str) -> None:
    document = told(run("store", "info", "--store", url, "--json")).document
    assert document["url"] == shown(url)
    assert document["commit_no"] > 5
    assert document["disk_bytes"] >= document["bytes"] > 8192
    assert document["queues"][0]["queue"]


def test_processes_that_verify_are_given_the_password(run: Run, url: str) -> None:
    ran = told(run("verify", "--app", "tests.ops.app:app", "--jobs", "2", "--store", url))
    assert (ran.code, ran.err) == (0, "")
    assert "3 steps replayed, states compared for 3 entries: sound" in ran.out


def test_a_dead_letter_is_brought_back(run: Run, url: str) -> None:
    [letter] = run("dead", "list", "mail", "--store", url, "--json").document["letters"]
    assert told(run("dead", "redrive", "mail", str(letter["seq"]), "--store", url)).code == 0
    assert run("dead", "list", "mail", "--store", url, "--json").document["letters"] == []


def test_a_world_is_paused_resumed_and_forked(run: Run, url: str) -> None:
    for action, status in (("pause", "paused"), ("resume", "active")):
        assert told(run("worlds", action, "Account/ada", "--store", url)).code == 0
        shown_ = run("worlds", "show", "Account/ada", "--store", url, "--json").document
        assert shown_["status"] == status
    assert told(run("worlds", "fork", "Account/ada", "eve", "--store", url)).code == 0
    assert run("worlds", "show", "Account/eve", "--store", url).code == 0


def test_tasks_are_listed_limited_cancelled_and_brought_back(run: Run, url: str) -> None:
    with whole.app.open(url, roles=()) as runtime:
        ids = [runtime.submit(whole.double, n).id for n in range(3)]
    there = ("--universe", "shop", "--store", url)
    assert told(run("tasks", "list", *there)).code == 0
    assert told(run("tasks", "limit", "default", "--concurrency", "2", *there)).code == 0
    assert told(run("tasks", "cancel", ids[0], *there)).code == 0
    assert run("tasks", "show", ids[0], *there, "--json").document["state"] == "DEAD"
    assert told(run("tasks", "redrive", ids[0], *there)).code == 0
    assert told(run("verify", "--store", url)).code == 0


@pytest.mark.parametrize("command", [("backup", "copy"), ("restore", "copy")])
def test_backups_are_the_database_s(run: Run, url: str, command: tuple[str, ...]) -> None:
    ran = told(run(*command, "--store", url))
    assert (ran.code, ran.out) == (1, "")
    assert "pg_" in ran.error


def test_a_database_without_a_store_is_told_and_gets_none(run: Run) -> None:
    empty = fresh_url()
    ran = run("worlds", "list", "--store", empty)
    assert ran.code == 1
    assert ran.error.startswith("not_found: ")
    assert "holdfast up" in ran.error
    assert run("worlds", "list", "--store", empty).error == ran.error


def test_the_demo_needs_a_directory(run: Run) -> None:
    ran = run("demo", "--store", "postgresql://host/db")
    assert (ran.code, ran.out) == (1, "")
    assert "embedded" in ran.error


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET[:4]}/{SECRET[4:]}@127.0.0.1:1/db",
        f"postgresql://me:{SECRET}%ZZ@127.0.0.1:1/db",
        f"postgresql://127.0.0.1:1/db?password={SECRET}&nonsense=1",
    ],
)
def test_a_url_that_its_password_breaks_is_refused_without_a_piece_of_it(
    run: Run, url: str
) -> None:
    ran = run("worlds", "list", "--store", url)
    assert (ran.code, ran.error.split(":")[0]) == (1, "bad_url")
    assert SECRET[:4] not in ran.err
    assert SECRET[4:] not in ran.err
