"""Store routing after `holdfast.toml` changes or a store in it breaks.

A universe never exists in two stores, mail is not lost, and the other stores stay usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.universe_location import UniverseElsewhere, exists_in
from holdfast.durable import queue
from holdfast.store.admin.routing import NoStoreFor
from holdfast.world.messaging import outbox
from tests.cli.conftest import RunCommand
from tests.cli.test_store_routing import LIMITS, client, here, write
from tests.process.mail_app import Letter, Office, Write, north, south
from tests.process.watch import until

__all__ = ["here"]

pytestmark = pytest.mark.timeout(60)

UNREACHABLE_URL = "postgresql://127.0.0.1:1/x?connect_timeout=2"


def run_north_once(place: str = "./n") -> None:
    """Run the orchestrator of north once. It leaves no data except its leader lease."""
    write(north=place)
    with north.open(roles=("orchestrator",)) as runtime:
        until(lambda: runtime.roles[0].rounds, "it leads")


def create(app: object, name: str) -> None:
    with client(app) as runtime:
        runtime.world(Office, name).create()


@pytest.fixture
def left_behind() -> Iterator[None]:
    """The data of south is in ./s, but its route points to the existing store ./t."""
    write(south="./s")
    create(south, "bob")
    stores.open("./t", limits=LIMITS).close()
    write("./s", north="./n", south="./t")
    yield
    with stores.open("./t", limits=LIMITS) as store:
        assert not store.read(exists_in, "south"), "it is in two stores"


def north_runtime() -> Runtime:
    runtime: Runtime = north.open(roles=("orchestrator", "world", "adapter"))
    return runtime


# -- one universe, one store -----------------------------------------------------------------------


@pytest.mark.usefixtures("left_behind")
def test_send_to_a_universe_left_in_another_store_raises_universe_elsewhere() -> None:
    with client(north) as runtime, pytest.raises(UniverseElsewhere):
        runtime.world(Office, "bob", universe="south").send(Letter(1))


@pytest.mark.usefixtures("left_behind")
def test_mail_to_a_universe_left_in_another_store_waits_until_routed() -> None:
    with north_runtime() as runtime:
        ada = runtime.world(Office, "ada")
        ada.send(Write(1))
        lane = outbox.peer_queue_name("north", "south")
        until(lambda: runtime.store.read(queue.counts, lane).delayed, "it was tried")
        assert ada.state().answers == 0
    write("./others", north="./n", south="./s")
    with north_runtime() as runtime:
        ada = runtime.world(Office, "ada")
        until(lambda: ada.state().answers == 1, "it is delivered where the south lives")


def test_send_to_an_unrouted_universe_raises_no_store_for() -> None:
    write(north="./n")
    with client(north) as runtime, pytest.raises(NoStoreFor):
        runtime.world(Office, "bob", universe="suoth").send(Letter(1))


def test_known_universe_opens_while_another_store_is_unreachable() -> None:
    run_north_once()
    write(UNREACHABLE_URL, north="./n")
    client(north).close()


def test_universe_without_data_may_be_routed_to_another_store() -> None:
    run_north_once()
    write("./n", north="./other")
    client(north).close()


# -- mail ------------------------------------------------------------------------------------------


def test_mail_to_a_universe_routed_to_the_senders_store_is_delivered() -> None:
    write(north="./n", south="./nowhere")
    with north_runtime() as runtime:
        runtime.world(Office, "ada").send(Write(1))
        lane = outbox.peer_queue_name("north", "south")
        until(lambda: runtime.store.read(queue.counts, lane).delayed, "it was tried")
    write(north="./n", south="./n")
    with north_runtime() as runtime:
        ada, bob = runtime.world(Office, "ada"), runtime.world(Office, "bob", universe="south")
        ada.send(Write(2))
        bob.create()
        until(lambda: ada.state().answers == 2, "both receipts")
        assert set(ada.state().told.values()) == {"ok"}


# -- readiness -------------------------------------------------------------------------------------


def test_ready_reports_other_stores_when_one_is_corrupt(run: RunCommand) -> None:
    write(north="./n", south="./s")
    create(north, "ada")
    Path("s").mkdir()
    Path("s/data.mdb").write_bytes(b"junk" * 5_000)
    result = run("ready", "--json")
    assert result.code == 1
    codes = {
        universe["universe"]: universe["reasons"][0]["code"]
        for universe in result.document["universes"]
    }
    assert codes == {"north": "authority_missing", "south": "store_corrupt"}


def test_ready_warns_of_a_universe_in_two_stores(run: RunCommand) -> None:
    for place in ("./n", "./old"):
        write(north=place)
        create(north, "ada")
    write("./old", north="./n")
    [universe] = run("ready", "--json").document["universes"]
    assert universe["warnings"][-1]["code"] == "universe_elsewhere"
    assert "/old" in universe["warnings"][-1]["text"]


def test_ready_is_false_for_a_universe_only_in_an_unrouted_store(run: RunCommand) -> None:
    write(north="./old")
    create(north, "ada")
    write("./old", north="./n")
    result = run("ready", "--json")
    assert result.code == 1
    [universe] = result.document["universes"]
    assert [universe["ready"], universe["universe"]] == [False, "north"]
    assert "universe_elsewhere" in str(universe)
