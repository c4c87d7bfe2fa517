"""One HTTP request, guarded: resolved once, checked, pinned, bounded in size and time.

- Every redirect is checked like the first request. Only headers that describe the request
  (`_FORWARDED_HEADERS`) and headers listed in `follow` are sent to another origin, because any
  other header may contain a secret. A redirect from https to http is refused.
- The intent's idempotency key is sent as `Idempotency-Key`, the same for every attempt.
- 429, 502, 503, 504 and broken connections are raised as retryable errors. Any other status is the
  result, or an error from 400 on with `errors="raise"`.

Each request has a separate connection: an address that was checked for one call is never used by
another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast import __version__, codec
from holdfast.adapters.address_guard import AddressGuard, Reach
from holdfast.adapters.errors import (
    BadResponse,
    ForbiddenAddress,
    NotInstalled,
    RejectedByServer,
    Unavailable,
)
from holdfast.clock import SYSTEM, S
from holdfast.errors import HoldfastError, Invalid, ValueTooLarge

if TYPE_CHECKING:
    import ssl

    import httpcore
    import httpx

    from holdfast.adapters.pinned_connection import Resolve

# A receipt with a body of this size still fits into a message (config.MESSAGE_BYTES_MAX).
BODY_BYTES_MAX = 3 * 1024 * 1024
TIMEOUT_S_MAX = 3600.0
REDIRECTS_MAX = 20
URL_CHARS_MAX = 8192
RETRY_AFTER_S_MAX = 24 * 3600.0
ERROR_BODY_CHARS = 500

RETRIED_STATUSES = (429, 502, 503, 504)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_METHOD = re.compile(r"[A-Z]{1,20}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
# Printable ASCII. Other text has no defined encoding in a header, and outer spaces are stripped.
_HEADER_VALUE = re.compile(r"([\x21-\x7e]([\t\x20-\x7e]{0,8190}[\x21-\x7e])?)?")
# Headers that the connection or this adapter sets.
_RESERVED_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer",
     "keep-alive", "accept-encoding", "expect", "idempotency-key"}
)  # fmt: skip
# Headers that follow a redirect to another origin. A header of any other name may contain an API
# key.
_FORWARDED_HEADERS = frozenset(
    {"accept", "accept-encoding", "accept-language", "cache-control", "content-language",
     "content-type", "idempotency-key", "if-modified-since", "if-none-match", "range", "user-agent"}
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The options of a request besides method and URL. A dict with these keys is accepted too."""

    headers: dict[str, str] = {}
    # Bytes or text. Alternatively `json`, any value that JSON can represent. Both are optional.
    body: Any = None
    json: Any = None
    timeout_s: float = 30.0
    bytes_max: int = 1024 * 1024
    redirects_max: int = 5
    # Names of additional headers that follow a redirect to another origin. They must not contain
    # secrets.
    follow: tuple[str, ...] = ()
    errors: Literal["result", "raise"] = "result"
    retried: tuple[int, ...] = RETRIED_STATUSES


class Response(msgspec.Struct, frozen=True):
    """The response. Header names are in lower case. Repeated headers are joined by a comma."""

    status: int
    url: str
    headers: dict[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def text(self) -> str:
        charset = re.search(r"charset=\"?([\w.:-]+)", self.headers.get("content-type", ""))
        try:
            return self.body.decode(charset[1] if charset else "utf-8", errors="replace")
        except LookupError:
            return self.body.decode(errors="replace")

    def json(self) -> Any:
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Invalid(what="json", why=str(error)) from None


class HttpClient:
    """An HTTP client within one `Reach`. The resolver and the connector can be injected."""

    def __init__(
        self,
        reach: Reach,
        *,
        resolve: Resolve | None = None,
        connector: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._guard = AddressGuard(reach)
        self._resolve = resolve
        self._connector = connector

    async def request(
        self, method: str, url: str, options: Options | Mapping[str, Any] | None, *, key: str
    ) -> Response:
        parsed = parse_options(options)
        content = _content(parsed)
        headers = _headers(parsed, key, content)
        forwarded = _FORWARDED_HEADERS.union(name.lower() for name in parsed.follow)
        if not _METHOD.fullmatch(method) or method in ("CONNECT", "TRACE"):
            raise Invalid(what="method", found=method[:40])
        try:
            from holdfast.adapters import pinned_connection
        except ImportError as error:
            raise NotInstalled(what="httpx", why=str(error)) from None
        host = ""
        try:
            async with asyncio.timeout(parsed.timeout_s):
                target = self._check_url(url)
                host = target.host
                for _ in range(parsed.redirects_max + 1):
                    backend = pinned_connection.PinnedBackend(
                        self._guard, self._resolve, self._connector
                    )
                    trusted = _tls_context_for(target.scheme, self._guard.reach.ca_file)
                    async with (
                        pinned_connection.client(trusted, backend) as client,
                        client.stream(method, target, headers=headers, content=content) as response,
                    ):
                        redirect = (
                            self._redirect_target(response, target)
                            if parsed.redirects_max
                            else None
                        )
                        if redirect is None:
                            return _check_status(
                                await self._response(response, target, parsed), parsed
                            )
                    if response.status_code == 303 or (
                        response.status_code in (301, 302) and method == "POST"
                    ):
                        method, content = "HEAD" if method == "HEAD" else "GET", None
                        headers.pop("content-type", None)
                    if _origin(redirect) != _origin(target):
                        headers = {n: v for n, v in headers.items() if n in forwarded}
                    target, host = redirect, redirect.host
        except HoldfastError:
            raise
        except Exception as error:
            raise pinned_connection.to_adapter_error(error, host, parsed.timeout_s) from error
        raise BadResponse(why="too many redirects", max=parsed.redirects_max)

    def _check_url(self, url: str | httpx.URL) -> httpx.URL:
        import httpx

        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise ForbiddenAddress(url=str(url)[:100], why=str(error)) from None
        if len(str(target)) > URL_CHARS_MAX:
            raise ForbiddenAddress(url=str(url)[:100], why="too long")
        self._guard.admit(
            target.scheme,
            target.raw_host.decode("ascii"),
            target.port,
            userinfo=bool(target.userinfo),
        )
        return target

    def _redirect_target(self, answer: httpx.Response, target: httpx.URL) -> httpx.URL | None:
        location = answer.headers.get("location")
        if answer.status_code not in _REDIRECTS or location is None:
            return None
        import httpx

        try:
            redirect = target.join(location)
        except (httpx.InvalidURL, ValueError) as error:
            raise ForbiddenAddress(url=location[:100], why=str(error)) from None
        if target.scheme == "https" and redirect.scheme != "https":
            raise ForbiddenAddress(
                url=str(redirect)[:100], why="a redirect from https to another scheme"
            )
        return self._check_url(redirect)

    async def _response(
        self, answer: httpx.Response, target: httpx.URL, wanted: Options
    ) -> Response:
        from holdfast.adapters import pinned_connection

        body = await pinned_connection.read_body(answer, wanted.bytes_max)
        return Response(answer.status_code, str(target), dict(answer.headers), body)


def parse_options(options: Options | Mapping[str, Any] | None) -> Options:
    try:
        wanted = (
            options
            if isinstance(options, Options)
            else codec.convert({} if options is None else options, Options)
        )
    except msgspec.ValidationError as error:
        raise Invalid(what="options of http.request", why=str(error)) from None
    for name, most in (("timeout_s", TIMEOUT_S_MAX), ("bytes_max", BODY_BYTES_MAX)):
        if not 0 < getattr(wanted, name) <= most:
            raise Invalid(what=name, found=getattr(wanted, name), max=most)
    if not 0 <= wanted.redirects_max <= REDIRECTS_MAX:
        raise Invalid(what="redirects_max", found=wanted.redirects_max, max=REDIRECTS_MAX)
    if wanted.body is not None and wanted.json is not None:
        raise Invalid(what="body", why="body and json are mutually exclusive")
    return wanted


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the delay in a Retry-After header, given as seconds or a date."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        return min(float(value[:12]), RETRY_AFTER_S_MAX)
    try:
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return min(max((when - now).total_seconds(), 0.0), RETRY_AFTER_S_MAX)


def unavailable_error(status: int, host: str, headers: Mapping[str, str]) -> Unavailable:
    wait_s = retry_after_s(headers, datetime.fromtimestamp(SYSTEM.wall_ns() / S, UTC))
    retry_fields = {} if wait_s is None else {"retry_after_s": wait_s}
    return Unavailable(status=status, host=host, **retry_fields)


# -- inside --------------------------------------------------------------------------------------


def _check_status(response: Response, wanted: Options) -> Response:
    if response.status in wanted.retried:
        raise unavailable_error(response.status, response.url.partition("?")[0], response.headers)
    if wanted.errors == "raise" and not response.ok:
        raise RejectedByServer(
            status=response.status,
            url=response.url.partition("?")[0],
            body=response.text[:ERROR_BODY_CHARS],
        )
    return response


def _content(wanted: Options) -> bytes | None:
    sent = wanted.body.encode() if isinstance(wanted.body, str) else wanted.body
    if wanted.json is not None:
        sent = msgspec.json.encode(wanted.json)
    if not isinstance(sent, bytes | None):
        raise Invalid(what="body", found=type(sent).__name__, expected="bytes or text")
    if sent is not None and len(sent) > BODY_BYTES_MAX:
        raise ValueTooLarge(what="body", bytes=len(sent), bytes_max=BODY_BYTES_MAX)
    return sent


def _headers(wanted: Options, key: str, sent: bytes | None) -> dict[str, str]:
    headers = {"user-agent": f"holdfast/{__version__}", "accept": "*/*"}
    if wanted.json is not None:
        headers["content-type"] = "application/json"
    for name, value in wanted.headers.items():
        low = name.lower()
        if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
            raise Invalid(what="header", name=name[:100], why="invalid characters for a header")
        if low in _RESERVED_HEADERS or low.startswith("proxy-"):
            raise Invalid(what="header", name=low, why="the adapter sets this header")
        headers[low] = value
    if not _HEADER_VALUE.fullmatch(key):
        raise Invalid(what="idempotency key", why="invalid characters for a header")
    # Decompression is bounded, but an uncompressed body needs none.
    return {**headers, "accept-encoding": "identity", "idempotency-key": key}


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _tls_context_for(scheme: str, ca_file: str | None) -> ssl.SSLContext | None:
    if scheme != "https":
        return None
    from holdfast.adapters import pinned_connection

    return pinned_connection.tls_context(ca_file)
