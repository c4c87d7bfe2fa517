"""Answers over HTTP, and what goes wrong: which status an error has, and the body that tells of it.

A problem is an RFC 9457 body with the error's `code`, which is stable text for machines, and `retryable`,
which says whether the same request may succeed later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import (
    Busy,
    Conflict,
    HoldfastError,
    Invalid,
    KeyConflict,
    NotFound,
    StoreFull,
    StoreGone,
    Timeout,
    ValueTooLarge,
)

RETRY_AFTER_S = 1
# As RFC 9110 has them. Python took these names over in 3.13, and an answer is the same with every version.
PHRASES = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}


def phrase_of(status: HTTPStatus) -> str:
    return PHRASES.get(status, status.phrase)


class Response(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"
    # What is to be done if whoever asked is gone and cannot be told.
    undo: Callable[[], Awaitable[None]] | None = None


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
    # The store is gone, which says nothing about the task or world that was asked for.
    (StoreGone, HTTPStatus.INTERNAL_SERVER_ERROR),
    (NotFound, HTTPStatus.NOT_FOUND),
    (TooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (Timeout, HTTPStatus.GATEWAY_TIMEOUT),
    (Busy, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreFull, HTTPStatus.INSUFFICIENT_STORAGE),
)


def problem(error: HoldfastError) -> Response:
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), None)
    if status is None:
        status = (
            HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
        )
    document = {
        "type": "about:blank",
        "title": phrase_of(status),
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
        "title": phrase_of(status),
        "status": int(status),
        "code": "internal",
        "retryable": False,
    }
    return Response(int(status), encode(document), (), "application/problem+json")


def encode(document: Any) -> bytes:
    return msgspec.json.encode(document)
