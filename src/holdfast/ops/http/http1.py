"""A sans-IO HTTP/1.1 parser: parses the head of a request and formats a response.

- A body needs a Content-Length; chunked bodies are rejected. Ambiguous heads (two lengths, two hosts, a
  folded line, a bare line feed) are rejected to prevent request smuggling.
- Errors are raised as the exceptions of `problem`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from holdfast.ops.http.problem import (
    BadRequest,
    BodyTooLarge,
    HeadTooLarge,
    HttpResponse,
    LengthRequired,
    reason_phrase,
)

HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
TARGET_BYTES_MAX = 4096
# The limit of a whole batch; each stored value has its own limit.
BODY_BYTES_MAX = 16 * 1024 * 1024

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_HTTP_VERSION = re.compile(r"HTTP/1\.[01]")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,12}")


class HttpRequest(NamedTuple):
    """The head of a request. Header names are in lower case and unique."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    length: int
    keep_alive: bool


# -- requests ------------------------------------------------------------------------------------


def parse_head(head: bytes) -> HttpRequest:
    """Parse a head, up to and including its empty line."""
    text = head.decode("latin-1")
    if not text.endswith("\r\n\r\n"):
        raise BadRequest(what="head", why="incomplete")
    request_line, *lines = text[:-4].split("\r\n")
    method, path, query, version = _parse_request_line(request_line)
    headers = _parse_headers(lines)
    if version == "HTTP/1.1" and "host" not in headers:
        raise BadRequest(what="host", why="missing")
    if "transfer-encoding" in headers:
        raise LengthRequired(what="body", found=headers["transfer-encoding"][:64])
    words = {word.strip().lower() for word in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in words if version == "HTTP/1.0" else "close" not in words
    return HttpRequest(method, path, query, headers, _body_length(method, headers), keep_alive)


def _parse_request_line(line: str) -> tuple[str, tuple[str, ...], dict[str, str], str]:
    parts = line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _HTTP_VERSION.fullmatch(parts[2]):
        raise BadRequest(what="request line", found=line[:64])
    method, target, version = parts
    if len(target) > TARGET_BYTES_MAX:
        raise BadRequest(what="target", why="too long", bytes_max=TARGET_BYTES_MAX)
    if not target.startswith("/") or not target.isascii() or not target.isprintable():
        raise BadRequest(what="target", found=target[:64])
    # A path with two leading slashes is not a host name here. Clients must not send a fragment.
    if "#" in target:
        raise BadRequest(what="target", why="the target has a fragment", found=target[:64])
    raw_path, _, raw_query = target.partition("?")
    query: dict[str, str] = {}
    try:
        path = tuple(unquote(part, errors="strict") for part in raw_path[1:].split("/"))
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
    return method, path, query, version


def _parse_headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > HEADERS_MAX:
        raise HeadTooLarge(what="headers", found=len(lines), max=HEADERS_MAX)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise BadRequest(what="header", found=line[:64])
        name = name.lower()
        if name in headers:
            if name in ("host", "content-length", "authorization", "origin", "content-type"):
                raise BadRequest(what="header", why="given twice", found=name)
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


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


# -- responses -----------------------------------------------------------------------------------


def response_bytes(response: HttpResponse, *, keep_alive: bool, head_only: bool = False) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {reason_phrase(HTTPStatus(response.status))}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in response.headers),
        # Always explicit: an HTTP/1.0 client without this header waits for the connection to close.
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
        "\r\n",
    ]
    head = "\r\n".join(lines).encode("latin-1")
    return head if head_only else head + response.body
