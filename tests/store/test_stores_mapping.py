"""`[stores]` in `holdfast.toml`: which universe lives where, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store import mapping
from holdfast.store.mapping import BadStores, NoStoreFor, SeveralStores, StoreMap

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
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (mapping.VARIABLE, mapping.STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "holdfast.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, text: str) -> StoreMap:
    found = mapping.load(written(tmp_path, text))
    assert found is not None
    return found


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
def test_a_name_goes_before_a_pattern_and_the_longer_pattern_before_the_shorter(
    tmp_path: Path, universe: str, store: str
) -> None:
    assert load(tmp_path, BOTH).url_of(universe) == store


def test_directories_are_meant_from_where_the_file_is(tmp_path: Path) -> None:
    found = load(tmp_path, BOTH)
    assert found.url_of("anything") == str(tmp_path / "data")
    assert found.url_of("eu-south") == str(tmp_path / "south")


def test_without_a_default_an_unknown_universe_has_no_store(tmp_path: Path) -> None:
    found = load(tmp_path, '[stores.universes]\nbilling = "./b"\n')
    with pytest.raises(NoStoreFor) as told:
        found.url_of("shop")
    assert told.value.universe == "shop"


def test_of_several_stores_one_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(SeveralStores) as told:
        load(tmp_path, BOTH).only()
    assert len(told.value.stores) == 5


def test_one_store_for_all_need_not_be_said(tmp_path: Path) -> None:
    found = load(tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "./d"\n')
    assert found.only() == str(tmp_path / "d")


def test_universes_elsewhere_are_those_named_with_another_store(tmp_path: Path) -> None:
    found = load(
        tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "./d"\nb = "./e"\nc = "./e"\n'
    )
    assert set(found.elsewhere("a")) == {"b", "c"}
    assert set(found.elsewhere("b")) == {"a"}
    assert set(found.elsewhere("other")) == {"b", "c"}
    assert found.route("b", "whatever") == str(tmp_path / "d")
    assert found.route("a", "whatever") is None


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
def test_what_cannot_be_meant_is_refused_and_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadStores) as told:
        mapping.load(written(tmp_path, text))
    assert told.value.file.endswith("holdfast.toml")


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
def test_different_stores_are_different(one: str, other: str) -> None:
    assert mapping.identity(one) != mapping.identity(other)


def test_a_scheme_and_a_slash_more_make_no_other_directory(tmp_path: Path) -> None:
    found = load(tmp_path, '[stores]\ndefault = "./d"\n[stores.universes]\na = "lmdb:d/"')
    assert found.urls() == [str(tmp_path / "d")]


def test_a_password_is_not_shown_by_what_is_refused(tmp_path: Path) -> None:
    text = (
        '[stores.universes]\na = "postgresql://u:secret@h/x"\nb = "postgresql://u:secret@h:5432/x"'
    )
    with pytest.raises(BadStores) as told:
        mapping.load(written(tmp_path, text))
    assert "secret" not in str(told.value)


def test_a_file_that_says_nothing_of_stores_maps_nothing(tmp_path: Path) -> None:
    assert mapping.load(written(tmp_path, "[other]\nx = 1\n")) is None


def test_what_is_given_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mapping.locate("a").url == "./data"
    written(tmp_path, BOTH)
    assert mapping.locate("billing").url == "postgresql://db.example/billing"
    monkeypatch.setenv(mapping.STORE_VARIABLE, "./env")
    assert mapping.locate("billing") == mapping.Located("./env")
    assert mapping.locate("billing", "./given") == mapping.Located("./given")


def test_the_file_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "etc"
    other.mkdir()
    written(other, '[stores]\ndefault = "./d"\n')
    monkeypatch.setenv(mapping.VARIABLE, str(other / "holdfast.toml"))
    assert mapping.locate("a").url == str(other / "d")


def test_a_file_that_was_named_and_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mapping.VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(BadStores):
        mapping.locate("a")
