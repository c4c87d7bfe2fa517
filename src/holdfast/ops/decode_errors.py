"""Decode errors as findings: a verification reports a row that cannot be decoded instead of crashing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from holdfast.errors import Invalid, NotFound, StoreCorrupt

# The exceptions that our decoders raise on corrupt bytes.
DECODE_ERRORS: tuple[type[Exception], ...] = (
    msgspec.MsgspecError, struct.error, ValueError, TypeError, LookupError, ArithmeticError,
    AssertionError, RecursionError, Invalid, NotFound, StoreCorrupt,
)  # fmt: skip
_TEXT_MAX = 200


def error_text(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_TEXT_MAX]


@contextmanager
def as_corrupt(what: str) -> Iterator[None]:
    """Convert decode errors inside the context to StoreCorrupt."""
    try:
        yield
    except StoreCorrupt:
        raise
    except DECODE_ERRORS as error:
        raise StoreCorrupt(what=what, why=error_text(error)) from error
