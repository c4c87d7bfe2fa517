"""StoreRouting: `[stores]` in `holdfast.toml` maps universes to store URLs and rejects invalid tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store.admin import routing
from holdfast.store.admin.routing import BadStores, NoStoreFor, SeveralStores, StoreRouting

BOTH = """
[stores]
default = "./data"

[stores.universes]
billing = "postgresql://db.example/billing"
"eu-*" = "postgresql://eu.example/holdfast"
"eu-north*" = "postgresql://north.example/holdfast"
eu-south = "./south"
"""


@pytest.fixture(autouse=True)
def no_store_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (routing.CONFIG_VARIABLE, routing.STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "holdfast.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load_routing(tmp_path: Path, text: str) -> StoreRouting:
    loaded = routing.load_file(write_config(tmp_path, text))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("universe", "store"),
    [
        ("billing", "postgresql://db.example/billing"),
        ("eu-west", "postgresql://eu.example/holdfast"),
        ("eu-north-2", "postgresql://north.example/holdfast"),
        ("eu-north", "postgresql://north.example/holdfast"),
        ("eu-", "postgresql://eu.example/holdfast"),
    ],
)
def test_routing_prefers_names_over_patterns_and_longer_patterns_over_shorter(
    tmp_path: Path, universe: str, store: str
) -> None:
    assert load_routing(tmp_path, BOTH).url_of(universe) == store


def test_routing_resolves_directories_relative_to_the_config_file(tmp_path: Path) -> None:
    loaded = load_routing(tmp_path, BOTH)
    assert loaded.url_of("anything") == str(tmp_path / "data")
    assert loaded.url_of("eu-south") == str(tmp_path / "south")


def test_routing_without_default_raises_no_store_for_an_unknown_universe(tmp_path: Path) -> None:
    loaded = load_routing(tmp_path, '[stores.universes]\nbilling = "./b"\n')
    with pytest.raises(NoStoreFor) as raised:
        loaded.url_of("shop")
    assert raised.value.universe == "shop"


def test_single_url_raises_several_stores(tmp_path: Path) -> None:
    with pytest.raises(SeveralStores) as raised:
        load_routing(tmp_path, BOTH).single_url()
    assert len(raised.value.stores) == 5


def test_single_url_returns_the_only_store(tmp_path: Path) -> None:
    loaded = load_routing(tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "./d"\n')
    assert loaded.single_url() == str(tmp_path / "d")


def test_universes_of_other_stores_lists_universes_with_another_url(tmp_path: Path) -> None:
    loaded = load_routing(
        tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "./d"\nb = "./e"\nc = "./e"\n'
    )
    assert set(loaded.universes_of_other_stores("a")) == {"b", "c"}
    assert set(loaded.universes_of_other_stores("b")) == {"a"}
    assert set(loaded.universes_of_other_stores("other")) == {"b", "c"}
    assert loaded.remote_url("b", "whatever") == str(tmp_path / "d")
    assert loaded.remote_url("a", "whatever") is None


@pytest.mark.parametrize(
    "text",
    [
        "[stores",
        "stores = 3",
        "[stores]",
        "[stores]\ndefault = 7",
        '[stores]\ndefault = ""',
        '[stores]\ndefault = "memory:"',
        '[stores]\ndefault = "mysql://x/y"',
        '[stores]\ndefalt = "./d"',
        "[stores]\nuniverses = 4",
        '[stores.universes]\n"*-eu" = "./d"',
        '[stores.universes]\n"a*b*" = "./d"',
        '[stores.universes]\n"a?" = "./d"',
        '[stores.universes]\n"a/b" = "./d"',
        '[stores.universes]\n"" = "./d"',
        '[stores.universes]\na = "./d"\na = "./e"',
        '[stores]\ndefault = "./d"\n[stores.universes]\na = "./x/../d"',
        '[stores.universes]\na = "postgresql://h/x"\nb = "postgres://u:p@H:5432/x"',
        '[stores.universes]\na = "postgresql://localhost/x"\nb = "postgresql://127.0.0.1/x"',
        '[stores.universes]\na = "postgresql://h/x"\nb = "postgresql://h?dbname=x"',
        '[stores]\ndefault = "postgresql://[::1/x"',
        '[stores]\ndefault = " ./d"',
        '[stores.universes]\n"a\\u0000" = "./d"',
        '[stores]\ndefault = "a\\u0000b"',
    ],
)
def test_invalid_stores_table_raises_bad_stores_with_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadStores) as raised:
        routing.load_file(write_config(tmp_path, text))
    assert raised.value.file.endswith("holdfast.toml")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql://h/x", "postgresql://h/y"),
        ("postgresql://h/x", "postgresql://h:5433/x"),
        ("postgresql://h/x", "postgresql://i/x"),
        ("postgresql://h/x", "postgresql://h/x?options=-c%20search_path%3Ds"),
        ("./a", "./b"),
    ],
)
def test_store_identity_differs_for_different_stores(one: str, other: str) -> None:
    assert routing.store_identity(one) != routing.store_identity(other)


def test_scheme_and_trailing_slash_do_not_change_the_store_identity(tmp_path: Path) -> None:
    loaded = load_routing(tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "lmdb:d/"')
    assert loaded.urls() == [str(tmp_path / "d")]


def test_bad_stores_error_redacts_passwords(tmp_path: Path) -> None:
    text = (
        '[stores.universes]\na = "postgresql://u:secret@h/x"\nb = "postgresql://u:secret@h:5432/x"'
    )
    with pytest.raises(BadStores) as raised:
        routing.load_file(write_config(tmp_path, text))
    assert "secret" not in str(raised.value)


def test_config_file_without_stores_table_has_no_routing(tmp_path: Path) -> None:
    assert routing.load_file(write_config(tmp_path, "[other]\nx = 1\n")) is None


def test_locate_store_prefers_argument_then_environment_then_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert routing.locate_store("a").url == "./data"
    write_config(tmp_path, BOTH)
    assert routing.locate_store("billing").url == "postgresql://db.example/billing"
    monkeypatch.setenv(routing.STORE_VARIABLE, "./env")
    assert routing.locate_store("billing") == routing.StoreLocation("./env")
    assert routing.locate_store("billing", "./given") == routing.StoreLocation("./given")


def test_config_variable_names_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "etc"
    other.mkdir()
    write_config(other, '[stores]\ndefault = "./d"\n')
    monkeypatch.setenv(routing.CONFIG_VARIABLE, str(other / "holdfast.toml"))
    assert routing.locate_store("a").url == str(other / "d")


def test_missing_file_in_the_config_variable_raises_bad_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(routing.CONFIG_VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(BadStores):
        routing.locate_store("a")
