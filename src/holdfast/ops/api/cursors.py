"""Cursors of lists: the position of the last item, as opaque text."""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

import msgspec

from holdfast.errors import Invalid
from holdfast.ops.api.endpoint import LIMIT_MAX, PageQuery

T = TypeVar("T")

# Python refuses to convert texts with thousands of digits.
LIMIT_DIGITS_MAX = 9


def encode(position: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(position)).decode().rstrip("=")


def decode(text: str, kind: type[T]) -> T | None:
    """Return the position of a cursor; None for the first page."""
    if not text:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.msgpack.decode(raw, type=kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise Invalid(what="cursor", found=text[:64], why="malformed cursor") from None


def page_limit(query: PageQuery) -> int:
    """Return the number of items of a page."""
    check_limit_text(str(query.limit), query.limit_min)
    return query.limit


def check_limit_text(text: str, limit_min: int) -> None:
    is_number = text.isascii() and text.isdigit()
    if not (is_number and len(text) <= LIMIT_DIGITS_MAX and limit_min <= int(text) <= LIMIT_MAX):
        raise Invalid(what="limit", found=text[:64], min=limit_min, max=LIMIT_MAX)
