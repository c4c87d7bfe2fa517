"""Assertions for refused calls: the error's class and text, and files that stay unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError


@contextmanager
def refused(kind: type[HoldfastError], *, says: str = "") -> Iterator[None]:
    """Expect an error of exactly this class whose one-line text has its code, its hint and the given text."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    text = str(error)
    assert "\n" not in text
    assert text.startswith(kind.code)
    assert kind.hint in text
    # The remedy is in the class hint or in the field `why`.
    assert kind.hint or error.fields.get("why"), f"{text!r} does not say what to do"
    assert says in text


@contextmanager
def untouched(*paths: Path) -> Iterator[None]:
    """Assert that the block changes no byte and no mode of these files and directories, and that it adds
    and removes no file. A `data.mdb` stands for its whole directory."""
    before = fingerprints(*paths)
    yield
    assert fingerprints(*paths) == before


def fingerprints(*paths: Path) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        path = path.parent if path.name == "data.mdb" else path
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        for one in (path, *inside):
            mode = os.lstat(one).st_mode if one.exists() else 0
            found[str(one)] = mode, fingerprint(one)
    return found


def fingerprint(path: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return "a directory" if path.is_dir() else "not a file"
