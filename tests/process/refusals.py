"""How a refusal must look, and what it must leave alone."""

from __future__ import annotations

import hashlib
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
    """Every byte of these files is the same afterwards."""
    before = {path: fingerprint(path) for path in paths}
    yield
    assert {path: fingerprint(path) for path in paths} == before


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "not there"
