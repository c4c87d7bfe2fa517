"""URLs of stores: which kind one names, and that no password is shown."""

from __future__ import annotations

import pytest

from holdfast.errors import BadUrl
from holdfast.store.urls import scheme_of, shown

MODULES = ("holdfast.store.urls",)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:…@host:5432/db"),
        ("postgresql://me:se/c@ret@host/db", "postgresql://me:…@host/db"),
        ("postgresql://host/db?user=me&password=secret&sslmode=require",
         "postgresql://host/db?user=me&password=…&sslmode=require"),
        ("postgresql:///db?sslpassword=secret", "postgresql:///db?sslpassword=…"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql:me:secret@host/db", "postgresql:me:…@host/db"),
        ("postgresql:/me:secret@host/db", "postgresql:/me:…@host/db"),
        ("postgresql://host/db?pass%77ord=secret", "postgresql://host/db?pass%77ord=…"),
        ("postgresql://host/db?passwor=secret&host=h", "postgresql://host/db?passwor=…&host=h"),
        ("mysql://me:secret@host/db", "mysql://me:…@host/db"),
        ("lmdb:./data", "lmdb:./data"),
        ("lmdb:/a:b@c", "lmdb:/a:b@c"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_passwords(url: str, expected: str) -> None:
    assert shown(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("./data", "lmdb"),
        ("C:data", "lmdb"),
        ("./a:b", "lmdb"),
        ("lmdb:./data", "lmdb"),
        ("memory:", "memory"),
        ("postgresql://host/db", "postgresql"),
        ("postgres://host/db", "postgresql"),
        ("sqlite:x", "sqlite"),
    ],
)
def test_a_url_names_a_kind_of_store(url: str, expected: str) -> None:
    assert scheme_of(url) == expected


@pytest.mark.parametrize("url", ["", "lmdb:"])
def test_a_url_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        scheme_of(url)
