"""HTTP responses and error documents: maps each error to a status and an RFC 9457 problem body.

The body has the error's stable `code`, and `retryable`: whether the same request may succeed later.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    Held,
    HoldfastError,
    IllegalTransition,
    Invalid,
    KeyConflict,
    NoReply,
    NotFound,
    ReducerDied,
    ReducerMemory,
    ReducerTimeout,
    ReplayDiverged,
    StoreFull,
    StoreGone,
    Timeout,
    UnknownEvent,
    ValueTooLarge,
)
from holdfast.ops.api.call import NeedsApp, NoIndex
from holdfast.ops.api.universes import UniverseRequired
from holdfast.ops.http.request_rate import RateExceeded

RETRY_AFTER_S = 1
_NO_STORE = (("cache-control", "no-store"),)
# The reason phrases of RFC 9110. Python adopted them in 3.13; responses must not depend on the version.
REASON_PHRASES = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}


def reason_phrase(status: HTTPStatus) -> str:
    return REASON_PHRASES.get(status, status.phrase)


class HttpResponse(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    # Called if the response cannot be delivered to the client.
    undo: Callable[[], Awaitable[None]] | None = None
    # The parts of a body without a length. `body` is empty then.
    stream: AsyncGenerator[bytes, None] | None = None

    @property
    def all_headers(self) -> list[tuple[str, str]]:
        caching = () if any(name == "Cache-Control" for name, _ in self.headers) else _NO_STORE
        if self.status in (204, 304):
            return [*caching, *self.headers]
        length = [("content-length", str(len(self.body)))] if self.stream is None else []
        return [
            ("content-type", self.content_type),
            *length,
            *caching,
            ("x-content-type-options", "nosniff"),
            *self.headers,
        ]


class BadRequest(Invalid):
    code = "bad_request"
    hint = "the server cannot parse this request"


class LengthRequired(Invalid):
    code = "length_required"
    hint = "send Content-Length; chunked bodies are not supported"


class HeadTooLarge(Invalid):
    code = "head_too_large"


class BodyTooLarge(Invalid):
    code = "body_too_large"
    hint = "send smaller batches, and store large data elsewhere"


class NoRoute(NotFound):
    code = "no_route"
    hint = "docs/http-api.md and docs/tasks-http.md list the routes"


class WrongMethod(Invalid):
    code = "method_not_allowed"


class WrongContentType(Invalid):
    code = "unsupported_media_type"
    hint = "send JSON with the header Content-Type: application/json"


class Unauthorized(Invalid):
    code = "unauthorized"
    hint = "send the header Authorization: Bearer TOKEN with the server's token"


class Forbidden(Invalid):
    code = "forbidden"


class ScopeMissing(Invalid):
    code = "scope"
    hint = "use a token with the missing scope"


class CsrfMissing(Forbidden):
    code = "csrf"
    hint = "send the header X-Holdfast-CSRF with the value of GET /v1/session, or a token instead of a cookie"


class RequestTooSlow(Timeout):
    code = "too_slow"
    hint = "the request took too long to arrive"


class ServerOverloaded(Busy):
    code = "too_many"
    hint = "the server has reached its limit of connections or of bytes in flight"


class ServerStopping(Busy):
    code = "stopping"
    hint = "the server is stopping; use another server, or retry"


# The first matching class determines the status of an error.
_STATUS: tuple[tuple[type[HoldfastError], HTTPStatus], ...] = (
    (LengthRequired, HTTPStatus.LENGTH_REQUIRED),
    (HeadTooLarge, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    (BodyTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (ValueTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (WrongMethod, HTTPStatus.METHOD_NOT_ALLOWED),
    (WrongContentType, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (Unauthorized, HTTPStatus.UNAUTHORIZED),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (ScopeMissing, HTTPStatus.FORBIDDEN),
    (BadRequest, HTTPStatus.BAD_REQUEST),
    (NoIndex, HTTPStatus.BAD_REQUEST),
    (UniverseRequired, HTTPStatus.BAD_REQUEST),
    (KeyConflict, HTTPStatus.CONFLICT),
    (NeedsApp, HTTPStatus.CONFLICT),
    (Conflict, HTTPStatus.CONFLICT),
    (IllegalTransition, HTTPStatus.CONFLICT),
    (Fenced, HTTPStatus.CONFLICT),
    (Held, HTTPStatus.CONFLICT),
    (HeadMoved, HTTPStatus.CONFLICT),
    (ReplayDiverged, HTTPStatus.CONFLICT),
    (ReducerTimeout, HTTPStatus.CONFLICT),
    (ReducerDied, HTTPStatus.CONFLICT),
    (ReducerMemory, HTTPStatus.CONFLICT),
    (NoReply, HTTPStatus.CONFLICT),
    (UnknownEvent, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Invalid, HTTPStatus.UNPROCESSABLE_ENTITY),
    # StoreGone is a NotFound, but the store is missing, not the requested task or world.
    (StoreGone, HTTPStatus.INTERNAL_SERVER_ERROR),
    (NotFound, HTTPStatus.NOT_FOUND),
    (RequestTooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (Timeout, HTTPStatus.SERVICE_UNAVAILABLE),
    (RateExceeded, HTTPStatus.TOO_MANY_REQUESTS),
    (Busy, HTTPStatus.SERVICE_UNAVAILABLE),
    (CommitUnknown, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreFull, HTTPStatus.INSUFFICIENT_STORAGE),
)


def problem_response(error: HoldfastError) -> HttpResponse:
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), None)
    if status is None:
        status = (
            HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
        )
    document = {
        "type": "about:blank",
        "title": reason_phrase(status),
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
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        retry_after_s = max(error.fields.get("retry_after_s", RETRY_AFTER_S), RETRY_AFTER_S)
        headers.append(("Retry-After", str(math.ceil(retry_after_s))))
    return HttpResponse(
        int(status), encode_json(document), tuple(headers), "application/problem+json"
    )


def internal_error_response() -> HttpResponse:
    """Return a response for an internal error. The details are logged, not sent to the client."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    document = {
        "type": "about:blank",
        "title": reason_phrase(status),
        "status": int(status),
        "code": "internal",
        "retryable": False,
    }
    return HttpResponse(int(status), encode_json(document), (), "application/problem+json")


def encode_json(document: Any) -> bytes:
    return msgspec.json.encode(document)
