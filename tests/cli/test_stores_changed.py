"""`holdfast.toml` is changed between runs, or a store in it is broken: no universe becomes two, no mail is
stranded, and what goes well elsewhere goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.locating import UniverseElsewhere, lives
from holdfast.app.runtime import Runtime
from holdfast.durable import queue
from holdfast.store.mapping import NoStoreFor
from holdfast.world import outbox
from tests.cli.conftest import Run
from tests.cli.test_stores_config import LIMITS, client, here, write
from tests.process.mailing import Letter, Office, Write, north, south
from tests.process.watch import until

__all__ = ["here"]

pytestmark = pytest.mark.timeout(60)

AWAY = "postgresql://127.0.0.1:1/x?connect_timeout=2"


def run_once(place: str = "./n") -> None:
    """The north has run here, and has left nothing behind but that."""
    write(north=place)
    with north.open(roles=("orchestrator",)) as runtime:
        until(lambda: runtime.roles[0].rounds, "it leads")


def create(app: object, name: str) -> None:
    with client(app) as runtime:
        runtime.world(Office, name).create()


@pytest.fixture
def left_behind() -> Iterator[None]:
    """The south lives in ./s, and is mapped to ./t, where there is a store."""
    write(south="./s")
    create(south, "bob")
    stores.open("./t", limits=LIMITS).close()
    write("./s", north="./n", south="./t")
    yield
    with stores.open("./t", limits=LIMITS) as store:
        assert not store.read(lives, "south"), "it is in two stores"


def pool() -> Runtime:
    runtime: Runtime = north.open(roles=("orchestrator", "world", "adapter"))
    return runtime


# -- one universe, one store -----------------------------------------------------------------------


@pytest.mark.usefixtures("left_behind")
def test_a_universe_left_behind_is_not_made_anew_through_another_one() -> None:
    with client(north) as runtime, pytest.raises(UniverseElsewhere):
        runtime.world(Office, "bob", universe="south").send(Letter(1))


@pytest.mark.usefixtures("left_behind")
def test_a_universe_left_behind_is_not_made_anew_by_mail_which_waits() -> None:
    with pool() as runtime:
        ada = runtime.world(Office, "ada")
        ada.send(Write(1))
        lane = outbox.lane("north", "south")
        until(lambda: runtime.store.read(queue.counts, lane).delayed, "it was tried")
        assert ada.state().answers == 0
    write("./others", north="./n", south="./s")
    with pool() as runtime:
        ada = runtime.world(Office, "ada")
        until(lambda: ada.state().answers == 1, "it is delivered where the south lives")


def test_a_universe_that_nobody_maps_is_not_made_through_another_one() -> None:
    write(north="./n")
    with client(north) as runtime, pytest.raises(NoStoreFor):
        runtime.world(Office, "bob", universe="suoth").send(Letter(1))


def test_a_universe_that_was_run_before_starts_while_another_store_is_away() -> None:
    run_once()
    write(AWAY, north="./n")
    client(north).close()


def test_a_start_that_left_nothing_behind_is_no_second_home() -> None:
    run_once()
    write("./n", north="./other")
    client(north).close()


# -- mail ------------------------------------------------------------------------------------------


def test_mail_for_a_universe_that_has_come_into_the_senders_store_is_delivered_there() -> None:
    write(north="./n", south="./nowhere")
    with pool() as runtime:
        runtime.world(Office, "ada").send(Write(1))
        lane = outbox.lane("north", "south")
        until(lambda: runtime.store.read(queue.counts, lane).delayed, "it was tried")
    write(north="./n", south="./n")
    with pool() as runtime:
        ada, bob = runtime.world(Office, "ada"), runtime.world(Office, "bob", universe="south")
        ada.send(Write(2))
        bob.create()
        until(lambda: ada.state().answers == 2, "both receipts")
        assert set(ada.state().told.values()) == {"ok"}


# -- readiness -------------------------------------------------------------------------------------


def test_a_store_that_is_broken_does_not_keep_the_others_from_being_told_of(run: Run) -> None:
    write(north="./n", south="./s")
    create(north, "ada")
    Path("s").mkdir()
    Path("s/data.mdb").write_bytes(b"junk" * 5_000)
    told = run("ready", "--json")
    assert told.code == 1
    found = {one["universe"]: one["reasons"][0]["code"] for one in told.document["universes"]}
    assert found == {"north": "authority_missing", "south": "store_corrupt"}


def test_a_universe_that_is_in_two_stores_is_warned_of(run: Run) -> None:
    for place in ("./n", "./old"):
        write(north=place)
        create(north, "ada")
    write("./old", north="./n")
    [one] = run("ready", "--json").document["universes"]
    assert one["warnings"][-1]["code"] == "universe_elsewhere"
    assert "/old" in one["warnings"][-1]["text"]


def test_a_universe_that_is_only_where_it_is_not_mapped_to_is_not_ready(run: Run) -> None:
    write(north="./old")
    create(north, "ada")
    write("./old", north="./n")
    told = run("ready", "--json")
    assert told.code == 1
    [one] = told.document["universes"]
    assert [one["ready"], one["universe"]] == [False, "north"]
    assert "universe_elsewhere" in str(one)
