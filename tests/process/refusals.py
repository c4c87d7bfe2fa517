"""How a refusal must look, and what it must leave alone."""

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
    """Exactly this class, in one line that says what is wrong and what to do."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    text = str(error)
    assert "\n" not in text
    assert text.startswith(kind.code)
    assert kind.hint in text
    # What to do stands in the hint, or, where it depends, in the field that says why.
    assert kind.hint or error.fields.get("why"), f"{text!r} does not say what to do"
    assert says in text


@contextmanager
def untouched(*paths: Path) -> Iterator[None]:
    """Every byte and every mode is the same afterwards: of these files, of the directories among them, and of
    all that lies beside a file of a store. No file has come and none has gone."""
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
