"""Store URLs: the scheme, and redaction of passwords."""

from __future__ import annotations

import pytest

from holdfast.errors import BadUrl
from holdfast.store.urls import redact, scheme_of

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
        ("postgresql://me:secret", "postgresql://me:…"),
        ("postgresql://me:secret/db", "postgresql://me:…"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://host:5432,other:5433/db", "postgresql://host:5432,other:5433/db"),
        (" postgresql://me:secret@host/db", " postgresql://me:…@host/db"),
        ("postgresql://h/db?options=-c%20app.token%3Dsecret", "postgresql://h/db?options=…"),
        ("postgresql://h/db?options=-c%20search_path%3Dbilling",
         "postgresql://h/db?options=-c%20search_path%3Dbilling"),
        ("host=db password=secret dbname=x", "host=db password=… dbname=x"),
        ("host=db sslpassword = 'se cr\\'et' dbname=x", "host=db sslpassword = … dbname=x"),
        ("lmdb:./data", "lmdb:./data"),
        ("lmdb:/a:b@c", "lmdb:/a:b@c"),
    ],
)  # fmt: skip
def test_redact_hides_passwords_in_a_url(url: str, expected: str) -> None:
    assert redact(url) == expected


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
def test_scheme_of_a_url_names_the_store_kind(url: str, expected: str) -> None:
    assert scheme_of(url) == expected


def test_connection_string_of_libpq_is_refused_without_its_password() -> None:
    with pytest.raises(BadUrl) as refused:
        scheme_of("host=db password=secret dbname=x")
    assert "secret" not in str(refused.value)
    assert "postgresql://" in str(refused.value)


@pytest.mark.parametrize("url", ["", "lmdb:"])
def test_url_without_a_location_raises_bad_url(url: str) -> None:
    with pytest.raises(BadUrl):
        scheme_of(url)
