"""HTTP/1.1 as far as we speak it, without any IO: the head of a request in, the bytes of an answer out.

- A body has a length that is told beforehand. Chunks are refused, and so is whatever could be read in
  two ways (two lengths, two hosts, a folded line, a bare line feed): nobody gets to slip a second
  request into the first.
- What goes wrong is a problem body (RFC 9457) with the error's `code`, and `retryable`, which says
  whether the same request may succeed later.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from holdfast.errors import (
    Busy,
    Conflict,
    HoldfastError,
    Invalid,
    KeyConflict,
    NotFound,
    StoreFull,
    Timeout,
    ValueTooLarge,
)

HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
TARGET_BYTES_MAX = 4096
# A batch of tasks, as text. What is stored of each is bounded on its own.
BODY_BYTES_MAX = 16 * 1024 * 1024
RETRY_AFTER_S = 1

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_VERSION = re.compile(r"HTTP/1\.[01]")
_LENGTH = re.compile(r"[0-9]{1,12}")


class BadRequest(Invalid):
    code = "bad_request"
    hint = "this is not a request that we understand"


class LengthRequired(Invalid):
    code = "length_required"
    hint = "send Content-Length; chunks are not taken"


class HeadTooLarge(Invalid):
    code = "head_too_large"


class BodyTooLarge(Invalid):
    code = "body_too_large"
    hint = "send smaller batches, and keep large data outside"


class NoRoute(NotFound):
    code = "no_route"
    hint = "docs/tasks-http.md lists the routes"


class WrongMethod(Invalid):
    code = "method_not_allowed"


class WrongType(Invalid):
    code = "unsupported_media_type"
    hint = "send JSON, and say so: Content-Type: application/json"


class Unauthorized(Invalid):
    code = "unauthorized"
    hint = "send Authorization: Bearer with the token that the server was started with"


class Forbidden(Invalid):
    code = "forbidden"


class TooSlow(Timeout):
    code = "too_slow"
    hint = "the request took too long to arrive"


class TooMany(Busy):
    code = "too_many"
    hint = "the server has as many connections, or bytes in flight, as it takes"


class Stopping(Busy):
    code = "stopping"
    hint = "the server is on its way out; ask another one, or again"


# The first line that fits says which status an error has.
_STATUS: tuple[tuple[type[HoldfastError], HTTPStatus], ...] = (
    (LengthRequired, HTTPStatus.LENGTH_REQUIRED),
    (HeadTooLarge, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    (BodyTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (ValueTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (WrongMethod, HTTPStatus.METHOD_NOT_ALLOWED),
    (WrongType, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (Unauthorized, HTTPStatus.UNAUTHORIZED),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (BadRequest, HTTPStatus.BAD_REQUEST),
    (KeyConflict, HTTPStatus.CONFLICT),
    (Conflict, HTTPStatus.CONFLICT),
    (Invalid, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFound, HTTPStatus.NOT_FOUND),
    (TooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (Timeout, HTTPStatus.GATEWAY_TIMEOUT),
    (Busy, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreFull, HTTPStatus.INSUFFICIENT_STORAGE),
)


class Request(NamedTuple):
    """The head of a request. Header names are in lower case; each is there once."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    length: int
    keep_alive: bool


class Response(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"
    # What is to be done if whoever asked is gone and cannot be told.
    undo: Callable[[], Awaitable[None]] | None = None


class Call(NamedTuple):
    """A request as a handler sees it."""

    request: Request
    # What the route's pattern left open, in order.
    names: tuple[str, ...]
    body: bytes
    # Whether it may be told everything; only routes that are open to all are asked otherwise.
    trusted: bool
    # Whether whoever asked has hung up.
    gone: Callable[[], bool]


Handler = Callable[[Call], Awaitable[Response]]


class Route(NamedTuple):
    """A method and a path; `*` stands for one part of it."""

    method: str
    path: tuple[str, ...]
    handler: Handler
    # For everybody, with or without a token.
    open: bool = False


class Api:
    """What a server serves. Made in its loop, closed there before the server ends."""

    routes: tuple[Route, ...] = ()

    def close(self) -> None: ...


# -- requests ------------------------------------------------------------------------------------


def parse(head: bytes) -> Request:
    """The head, up to and including its empty line."""
    text = head.decode("latin-1")
    if not text.endswith("\r\n\r\n"):
        raise BadRequest(what="head", why="it does not end")
    first, *lines = text[:-4].split("\r\n")
    method, path, query, version = _request_line(first)
    headers = _headers(lines)
    if version == "HTTP/1.1" and "host" not in headers:
        raise BadRequest(what="host", why="missing")
    if "transfer-encoding" in headers:
        raise LengthRequired(what="body", found=headers["transfer-encoding"][:64])
    words = {word.strip().lower() for word in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in words if version == "HTTP/1.0" else "close" not in words
    return Request(method, path, query, headers, _length(method, headers), keep_alive)


def _request_line(line: str) -> tuple[str, tuple[str, ...], dict[str, str], str]:
    parts = line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _VERSION.fullmatch(parts[2]):
        raise BadRequest(what="request line", found=line[:64])
    method, target, version = parts
    if len(target) > TARGET_BYTES_MAX:
        raise BadRequest(what="target", why="too long", bytes_max=TARGET_BYTES_MAX)
    if not target.startswith("/") or not target.isascii() or not target.isprintable():
        raise BadRequest(what="target", found=target[:64])
    split = urlsplit(target)
    query: dict[str, str] = {}
    try:
        path = tuple(unquote(part, errors="strict") for part in split.path[1:].split("/"))
        pairs = parse_qsl(
            split.query, keep_blank_values=True, errors="strict", max_num_fields=HEADERS_MAX
        )
    except ValueError:
        raise BadRequest(what="target", why="badly escaped", found=target[:64]) from None
    for name, value in pairs:
        if name in query:
            raise BadRequest(what="query", why="given twice", found=name[:64])
        query[name] = value
    return method, path, query, version


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > HEADERS_MAX:
        raise HeadTooLarge(what="headers", found=len(lines), max=HEADERS_MAX)
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _FIELD.fullmatch(value):
            raise BadRequest(what="header", found=line[:64])
        name = name.lower()
        if name in found:
            if name in ("host", "content-length", "authorization", "origin", "content-type"):
                raise BadRequest(what="header", why="given twice", found=name)
            value = f"{found[name]}, {value}"
        found[name] = value
    return found


def _length(method: str, headers: Mapping[str, str]) -> int:
    told = headers.get("content-length")
    if told is None:
        if method in ("POST", "PUT", "PATCH"):
            raise LengthRequired(what="body")
        return 0
    if not _LENGTH.fullmatch(told):
        raise BadRequest(what="content-length", found=told[:64])
    if int(told) > BODY_BYTES_MAX:
        raise BodyTooLarge(what="body", bytes=int(told), bytes_max=BODY_BYTES_MAX)
    return int(told)


# -- answers -------------------------------------------------------------------------------------


def problem(error: HoldfastError) -> Response:
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), None)
    if status is None:
        status = (
            HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
        )
    document = {
        "type": "about:blank",
        "title": status.phrase,
        "status": int(status),
        "detail": str(error),
        "code": error.code,
        "retryable": error.retryable,
    }
    headers: list[tuple[str, str]] = []
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", ", ".join(error.fields.get("allowed", ()))))
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append(("Retry-After", str(RETRY_AFTER_S)))
    return Response(int(status), encode(document), tuple(headers), "application/problem+json")


def internal() -> Response:
    """Our fault. What happened is told where we run, and not to whoever asked."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    document = {
        "type": "about:blank",
        "title": status.phrase,
        "status": int(status),
        "code": "internal",
        "retryable": False,
    }
    return Response(int(status), encode(document), (), "application/problem+json")


def encode(document: Any) -> bytes:
    return msgspec.json.encode(document)


def bytes_of(response: Response, *, keep_alive: bool, head_only: bool = False) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"Content-Type: {response.kind}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in response.headers),
        *([] if keep_alive else ["Connection: close"]),
        "\r\n",
    ]
    head = "\r\n".join(lines).encode("latin-1")
    return head if head_only else head + response.body
