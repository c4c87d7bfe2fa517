"""Store routing by `holdfast.toml`: the store of a universe is found, and a universe is in one store only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.universe_location import LocationUnknown, UniverseElsewhere
from holdfast.config import WriterLimits
from holdfast.store.admin.routing import NoStoreFor
from tests.cli.conftest import RunCommand
from tests.postgres import fresh_url
from tests.process.mail_app import Letter, Office, north, south

pytestmark = pytest.mark.timeout(60)

LIMITS = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)


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


def test_app_opens_the_store_routed_to_its_universe(tmp_path: Path) -> None:
    write(north="./n", south="./s")
    with client(north) as north_runtime, client(south) as south_runtime:
        assert north_runtime.store.url == f"lmdb:{tmp_path}/n"
        assert south_runtime.store.url == f"lmdb:{tmp_path}/s"


def test_app_opens_a_postgresql_store_routed_to_its_universe(tmp_path: Path) -> None:
    url = fresh_url()
    write("./n", south=url)
    with client(south) as runtime:
        runtime.world(Office, "bob").create()
    with stores.open(url, bootstrap=False) as store:
        assert store.read(lambda txn: len(txn.scan(b"\x15\x0b", b"\x15\x0c"))) > 0


def test_world_of_another_universe_is_reached_in_its_routed_store() -> None:
    write("./n", south="./s")
    with client(north) as runtime:
        runtime.world(Office, "bob", universe="south").send(Letter(7))
        runtime.world(Office, "eve", universe="other").create()
    with client(south) as south_runtime:
        assert south_runtime.world(Office, "bob").record().name == "bob"
    with client(north, universe="other") as other_runtime:
        assert other_runtime.world(Office, "eve").record().name == "eve"


def test_app_opens_the_default_directory_without_a_config_file(tmp_path: Path) -> None:
    with client(north) as runtime:
        assert runtime.store.url == f"lmdb:{tmp_path}/data"


def test_app_open_without_a_routed_store_raises_no_store_for() -> None:
    write(south="./s")
    with pytest.raises(NoStoreFor):
        client(north)


def test_app_open_of_a_universe_in_another_store_raises_universe_elsewhere() -> None:
    write(north="./n")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    write("./n", north="./other")
    with pytest.raises(UniverseElsewhere) as raised:
        client(north)
    assert raised.value.lives.endswith("/n")
    assert raised.value.mapped.endswith("/other")


def test_app_opens_a_universe_known_in_its_routed_store() -> None:
    for place in ("./n", "./other"):
        write(north=place)
        with client(north) as runtime:
            runtime.world(Office, "ada").create()
    write("postgresql://127.0.0.1:1/x?connect_timeout=2", north="./other")
    client(north).close()


def test_app_open_of_a_new_universe_raises_while_another_store_is_unreachable() -> None:
    write("postgresql://127.0.0.1:1/x?connect_timeout=2", north="./n")
    with pytest.raises(LocationUnknown) as raised:
        client(north)
    assert raised.value.retryable


@pytest.mark.usefixtures("short_linger")
def test_moved_store_is_ignored_by_routing(run: RunCommand) -> None:
    write(north="./n")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    assert run("store", "copy", "./n", "./m").code == 0
    write("./n", north="./m")
    with client(north) as runtime:
        assert runtime.world(Office, "ada").record().name == "ada"


def test_universe_option_selects_the_routed_store(run: RunCommand) -> None:
    write(north="./n", south="./s")
    for app, name in ((north, "ada"), (south, "bob")):
        with client(app) as runtime:
            runtime.world(Office, name).create()
    for universe, name in (("north", "ada"), ("south", "bob")):
        document = run("worlds", "list", "--universe", universe, "--json").document
        assert [world["name"] for world in document["worlds"]] == [name]
    for command in ("dead", "effects", "timers", "runs"):
        assert run(command, "list", "--universe", "south").code == 0
    assert run("store", "info", "--universe", "south", "--json").document["url"].endswith("/s")


def test_command_without_a_universe_raises_several_stores(run: RunCommand) -> None:
    write(north="./n", south="./s")
    assert run("worlds", "list").error.startswith("several_stores: ")


def test_ready_reports_every_routed_store(run: RunCommand) -> None:
    write("./nobody", north="./n", south="./s")
    with client(north) as runtime:
        runtime.world(Office, "ada").create()
    result = run("ready", "--json")
    assert result.code == 1
    reasons = {
        universe["universe"]: universe["reasons"][0]["reason"]
        for universe in result.document["universes"]
    }
    assert reasons == {"north": "authority_missing", "south": "store_failed"}


def test_ready_without_any_store_is_not_found(run: RunCommand) -> None:
    write("./nobody")
    assert run("ready").error.startswith("not_found: ")


def test_invalid_config_file_is_a_bad_stores_error(run: RunCommand) -> None:
    write(**{"*x*": "./n"})
    assert run("worlds", "list", "--universe", "x").error.startswith("bad_stores: ")
