"""Rows that cannot be decoded: for a command that checks a store they are a finding, not a crash."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from holdfast.errors import Invalid, NotFound, StoreCorrupt

# What our own decoders raise on bytes that they did not write.
ERRORS: tuple[type[Exception], ...] = (
    msgspec.MsgspecError, struct.error, ValueError, TypeError, LookupError, ArithmeticError,
    AssertionError, RecursionError, Invalid, NotFound, StoreCorrupt,
)  # fmt: skip
_TEXT_MAX = 200


def told(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_TEXT_MAX]


@contextmanager
def as_corrupt(what: str) -> Iterator[None]:
    """Raise StoreCorrupt for what cannot be decoded inside."""
    try:
        yield
    except StoreCorrupt:
        raise
    except ERRORS as error:
        raise StoreCorrupt(what=what, why=told(error)) from error
