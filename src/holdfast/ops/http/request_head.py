"""The head of a request: the checks after httptools has parsed it.

llhttp, the parser of httptools, rejects malformed HTTP. This module rejects requests that two servers could read in
two ways: two hosts, two lengths, chunked bodies, a query field given twice. Errors are those of `problem`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from holdfast.errors import HoldfastError
from holdfast.ops.http.limits import BODY_BYTES_MAX, HEADERS_MAX, TARGET_BYTES_MAX
from holdfast.ops.http.problem import BadRequest, BodyTooLarge, HeadTooLarge, LengthRequired

_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,12}")
_TRANSFER_ENCODING = re.compile(rb"\ntransfer-encoding[ \t]*:([^\r\n]*)", re.IGNORECASE)
_ONLY_ONCE = frozenset(
    ("host", "content-length", "authorization", "origin", "content-type", "idempotency-key")
)


class HttpRequest(NamedTuple):
    """The head of a request. Header names are in lower case and unique."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    length: int
    keep_alive: bool


def check_head(
    *,
    method: str,
    target: bytes,
    version: str,
    headers: Sequence[tuple[bytes, bytes]],
    keep_alive: bool,
) -> HttpRequest:
    """Return the request of a parsed head."""
    if version not in ("1.0", "1.1"):
        raise BadRequest(what="version", found=version)
    path, query = _parse_target(target)
    fields = _unique_headers(headers)
    if version == "1.1" and "host" not in fields:
        raise BadRequest(what="host", why="missing")
    if "transfer-encoding" in fields:
        raise LengthRequired(what="body", found=fields["transfer-encoding"][:64])
    return HttpRequest(method, path, query, fields, _body_length(method, fields), keep_alive)


def rejected_head(head: bytes, why: str) -> HoldfastError:
    """Return the error of a head that the parser rejects."""
    coded = _TRANSFER_ENCODING.search(head)
    if coded is not None:
        return LengthRequired(what="body", found=coded[1].strip().decode("latin-1")[:64])
    return BadRequest(what="head", why=why)


def _parse_target(raw: bytes) -> tuple[tuple[str, ...], dict[str, str]]:
    target = raw.decode("latin-1")
    if len(target) > TARGET_BYTES_MAX:
        raise BadRequest(what="target", why="too long", bytes_max=TARGET_BYTES_MAX)
    if not target.startswith("/") or not target.isascii() or not target.isprintable():
        raise BadRequest(what="target", found=target[:64])
    # A path with two leading slashes is not a host name here. Clients must not send a fragment.
    if "#" in target:
        raise BadRequest(what="target", why="the target has a fragment", found=target[:64])
    raw_path, question_mark, raw_query = target.partition("?")
    path = tuple(raw_path[1:].split("/"))
    query: dict[str, str] = {}
    try:
        if "%" in raw_path:
            path = tuple(unquote(part, errors="strict") for part in path)
        if not question_mark:
            return path, query
        pairs = parse_qsl(
            raw_query, keep_blank_values=True, errors="strict", max_num_fields=HEADERS_MAX
        )
    except ValueError:
        raise BadRequest(
            what="target",
            why="not percent-encoded UTF-8, or too many query fields",
            found=target[:64],
        ) from None
    for name, value in pairs:
        if name in query:
            raise BadRequest(what="query", why="given twice", found=name[:64])
        query[name] = value
    return path, query


def _unique_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    if len(headers) > HEADERS_MAX:
        raise HeadTooLarge(what="headers", found=len(headers), max=HEADERS_MAX)
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1").strip(" \t")
        if not _HEADER_VALUE.fullmatch(value):
            raise BadRequest(what="header", found=f"{name}: {value}"[:64])
        if name in fields:
            if name in _ONLY_ONCE:
                raise BadRequest(what="header", why="given twice", found=name)
            value = f"{fields[name]}, {value}"
        fields[name] = value
    return fields


def _body_length(method: str, headers: Mapping[str, str]) -> int:
    value = headers.get("content-length")
    if value is None:
        if method in ("POST", "PUT", "PATCH"):
            raise LengthRequired(what="body")
        return 0
    if not _CONTENT_LENGTH.fullmatch(value):
        raise BadRequest(what="content-length", found=value[:64])
    if int(value) > BODY_BYTES_MAX:
        raise BodyTooLarge(what="body", bytes=int(value), bytes_max=BODY_BYTES_MAX)
    return int(value)
