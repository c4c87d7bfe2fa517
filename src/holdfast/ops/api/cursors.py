"""Cursors of lists: the position of the last item, as opaque text."""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

import msgspec

from holdfast.errors import Invalid
from holdfast.ops.api.endpoint import LIMIT_MAX, PageQuery

T = TypeVar("T")


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
    if not 1 <= query.limit <= LIMIT_MAX:
        raise Invalid(what="limit", found=query.limit, min=1, max=LIMIT_MAX)
    return query.limit
