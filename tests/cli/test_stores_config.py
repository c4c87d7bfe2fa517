"""`holdfast.toml` in use: the store of a universe is found, and a universe is in one store only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.locating import CannotTell, UniverseElsewhere
from holdfast.app.runtime import Runtime
from holdfast.config import WriterLimits
from holdfast.store.mapping import NoStoreFor
from tests.cli.conftest import Run
from tests.postgres import fresh_url
from tests.process.mailing import Letter, Office, north, south

pytestmark = pytest.mark.timeout(60)

LIMITS = WriterLimits(linger_s=0.05, reader_check_s=0.05)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def write(default: str | None = None, **universes: str) -> None:
    lines = [] if default is None else ["[stores]", f'default = "{default}"']
    lines += ["[stores.universes]", *(f'"{name}" = "{url}"' for name, url in universes.items())]
    Path("holdfast.toml").write_text("\n".join(lines), encoding="utf-8")


def client(app: Any, **options: Any) -> Runtime:
    runtime: Runtime = app.open(roles=(), **options)
    return runtime


def test_an_app_is_opened_in_the_store_of_its_universe(tmp_path: Path) -> None:
    write(north="./n", south="./s")
    with client(north) as one, client(south) as other:
        assert one.store.url == f"lmdb:{tmp_path}/n"
        assert other.store.url == f"lmdb:{tmp_path}/s"


def test_an_app_is_opened_in_a_store_on_a_server(tmp_path: Path) -> None:
    url = fresh_url()
    write("./n", south=url)
    with client(south) as there:
        there.world(Office, "bob").create()
    with stores.open(url, bootstrap=False) as store:
        assert store.read(lambda txn: len(txn.scan(b"\x15\x0b", b"\x15\x0c"))) > 0


def test_a_world_of_another_universe_is_reached_in_its_store() -> None:
    write("./n", south="./s")
    with client(north) as runtime:
        runtime.world(Office, "bob", universe="south").send(Letter(7))
        runtime.world(Office, "eve", universe="other").create()
    with client(south) as there:
        assert there.world(Office, "bob").record().name == "bob"
    with client(north, universe="other") as beside:
        assert beside.world(Office, "eve").record().name == "eve"


def test_without_a_file_it_is_the_usual_directory(tmp_path: Path) -> None:
    with client(north) as runtime:
        assert runtime.store.url == f"lmdb:{tmp_path}/data"


def test_a_universe_without_a_store_is_refused() -> None:
    write(south="./s")
    with pytest.raises(NoStoreFor):
        client(north)


def test_a_universe_that_lives_elsewhere_is_refused_and_its_place_is_told() -> None:
    write(north="./n")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    write("./n", north="./other")
    with pytest.raises(UniverseElsewhere) as told:
        client(north)
    assert told.value.lives.endswith("/n")
    assert told.value.mapped.endswith("/other")


def test_a_universe_that_is_known_in_its_store_is_opened_whatever_others_hold() -> None:
    for place in ("./n", "./other"):
        write(north=place)
        with client(north) as runtime:
            runtime.world(Office, "ada").create()
    write("postgresql://127.0.0.1:1/x?connect_timeout=2", north="./other")
    client(north).close()


def test_a_new_universe_is_not_opened_while_a_store_that_may_have_it_is_away() -> None:
    write("postgresql://127.0.0.1:1/x?connect_timeout=2", north="./n")
    with pytest.raises(CannotTell) as told:
        client(north)
    assert told.value.retryable


def test_a_store_that_was_moved_has_no_universes(run: Run) -> None:
    write(north="./n")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    assert run("store", "copy", "./n", "./m").code == 0
    write("./n", north="./m")
    with client(north) as runtime:
        assert runtime.world(Office, "ada").record().name == "ada"


def test_a_command_takes_the_store_of_a_universe(run: Run) -> None:
    write(north="./n", south="./s")
    for app, name in ((north, "ada"), (south, "bob")):
        with client(app) as runtime:
            runtime.world(Office, name).create()
    for universe, name in (("north", "ada"), ("south", "bob")):
        found = run("worlds", "list", "--universe", universe, "--json").document
        assert [one["name"] for one in found["worlds"]] == [name]
    for command in ("dead", "effects", "timers", "runs"):
        assert run(command, "list", "--universe", "south").code == 0
    assert run("store", "info", "--universe", "south", "--json").document["url"].endswith("/s")


def test_without_a_universe_a_command_asks_which_store_is_meant(run: Run) -> None:
    write(north="./n", south="./s")
    assert run("worlds", "list").error.startswith("several_stores: ")


def test_readiness_is_told_of_every_store(run: Run) -> None:
    write("./nobody", north="./n", south="./s")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    told = run("ready", "--json")
    assert told.code == 1
    found = {one["universe"]: one["reasons"][0]["reason"] for one in told.document["universes"]}
    assert found == {"north": "authority_missing", "south": "store_failed"}


def test_where_nobody_has_run_anything_nothing_is_ready(run: Run) -> None:
    write("./nobody")
    assert run("ready").error.startswith("not_found: ")


def test_a_file_that_cannot_be_meant_is_one_line(run: Run) -> None:
    write(**{"*x*": "./n"})
    assert run("worlds", "list", "--universe", "x").error.startswith("bad_stores: ")
