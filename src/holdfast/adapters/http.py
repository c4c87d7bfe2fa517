"""One HTTP request, guarded: resolved once, checked, pinned, bounded in size and time.

- Every hop of a redirect is judged like the first request. Of the caller's headers only those that
  describe the request (`_DESCRIBING`), and those that `follow` names, go along to another origin:
  any other header may carry a secret. Nothing goes from https to http.
- The intent's idempotency key is sent as `Idempotency-Key`, the same for every attempt.
- 429, 502, 503, 504 and broken connections are raised to be tried again; any other status is the
  result, or with `errors="raise"` an error from 400 on.

Each request has a connection of its own: what was checked for one call is never used by another.
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
from holdfast.adapters.errors import Answered, BadAnswer, Forbidden, NotInstalled, Unavailable
from holdfast.adapters.guard import Guard, Reach
from holdfast.clock import SYSTEM, S
from holdfast.errors import HoldfastError, Invalid, ValueTooLarge

if TYPE_CHECKING:
    import ssl

    import httpcore
    import httpx

    from holdfast.adapters.connection import Resolve

# A receipt with such a body still fits into a message (config.MESSAGE_BYTES_MAX).
BODY_BYTES_MAX = 3 * 1024 * 1024
TIMEOUT_S_MAX = 3600.0
REDIRECTS_MAX = 20
URL_CHARS_MAX = 8192
RETRY_AFTER_S_MAX = 24 * 3600.0
ERROR_BODY_CHARS = 500

RETRIED = (429, 502, 503, 504)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_METHOD = re.compile(r"[A-Z]{1,20}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
# What goes over the line as it is: other text has no one encoding there, and spaces at the ends are lost.
_HEADER_VALUE = re.compile(r"([\x21-\x7e]([\t\x20-\x7e]{0,8190}[\x21-\x7e])?)?")
# The connection's own, and ours.
_NOT_YOURS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer",
     "keep-alive", "accept-encoding", "expect", "idempotency-key"}
)  # fmt: skip
# These follow a redirect to another origin. An API key may be in a header of any other name.
_DESCRIBING = frozenset(
    {"accept", "accept-encoding", "accept-language", "cache-control", "content-language",
     "content-type", "idempotency-key", "if-modified-since", "if-none-match", "range", "user-agent"}
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request may say besides method and URL. Plain data: a dict with these keys will do."""

    headers: dict[str, str] = {}
    # Bytes or text; or json, anything that JSON can hold; or neither.
    body: Any = None
    json: Any = None
    timeout_s: float = 30.0
    bytes_max: int = 1024 * 1024
    redirects_max: int = 5
    # Names of headers that go along when a redirect leads to another origin. Nothing secret.
    follow: tuple[str, ...] = ()
    errors: Literal["result", "raise"] = "result"
    retried: tuple[int, ...] = RETRIED


class Response(msgspec.Struct, frozen=True):
    """What came back. Names of headers are in lower case; repeated ones are joined by a comma."""

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


class Http:
    """Requests within one `Reach`. The resolver and the connector may be injected."""

    def __init__(
        self,
        reach: Reach,
        *,
        resolve: Resolve | None = None,
        connector: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._guard = Guard(reach)
        self._resolve = resolve
        self._connector = connector

    async def request(
        self, method: str, url: str, options: Options | Mapping[str, Any] | None, *, key: str
    ) -> Response:
        wanted = options_of(options)
        sent = _content(wanted)
        headers = _headers(wanted, key, sent)
        along = _DESCRIBING.union(name.lower() for name in wanted.follow)
        if not _METHOD.fullmatch(method) or method in ("CONNECT", "TRACE"):
            raise Invalid(what="method", found=method[:40])
        connection = _connection()
        host = ""
        try:
            async with asyncio.timeout(wanted.timeout_s):
                target = self._admitted(url)
                host = target.host
                for _ in range(wanted.redirects_max + 1):
                    backend = connection.PinnedBackend(self._guard, self._resolve, self._connector)
                    trusted = _trusted(target.scheme, self._guard.reach.ca_file)
                    async with (
                        connection.client(trusted, backend) as client,
                        client.stream(method, target, headers=headers, content=sent) as answer,
                    ):
                        onward = self._onward(answer, target) if wanted.redirects_max else None
                        if onward is None:
                            return _judged(await self._response(answer, target, wanted), wanted)
                    if answer.status_code == 303 or (
                        answer.status_code in (301, 302) and method == "POST"
                    ):
                        method, sent = "HEAD" if method == "HEAD" else "GET", None
                        headers.pop("content-type", None)
                    if _origin(onward) != _origin(target):
                        headers = {n: v for n, v in headers.items() if n in along}
                    target, host = onward, onward.host
        except HoldfastError:
            raise
        except Exception as error:
            raise connection.failure_of(error, host, wanted.timeout_s) from error
        raise BadAnswer(why="too many redirects", max=wanted.redirects_max)

    def _admitted(self, url: str | httpx.URL) -> httpx.URL:
        import httpx

        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise Forbidden(url=str(url)[:100], why=str(error)) from None
        if len(str(target)) > URL_CHARS_MAX:
            raise Forbidden(url=str(url)[:100], why="too long")
        self._guard.admit(
            target.scheme,
            target.raw_host.decode("ascii"),
            target.port,
            userinfo=bool(target.userinfo),
        )
        return target

    def _onward(self, answer: httpx.Response, target: httpx.URL) -> httpx.URL | None:
        where = answer.headers.get("location")
        if answer.status_code not in _REDIRECTS or where is None:
            return None
        import httpx

        try:
            onward = target.join(where)
        except (httpx.InvalidURL, ValueError) as error:
            raise Forbidden(url=where[:100], why=str(error)) from None
        if target.scheme == "https" and onward.scheme != "https":
            raise Forbidden(url=str(onward)[:100], why="a redirect from https to something else")
        return self._admitted(onward)

    async def _response(
        self, answer: httpx.Response, target: httpx.URL, wanted: Options
    ) -> Response:
        body = await _connection().read_within(answer, wanted.bytes_max)
        return Response(answer.status_code, str(target), dict(answer.headers), body)


def options_of(options: Options | Mapping[str, Any] | None) -> Options:
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
        raise Invalid(what="body", why="there is a json too")
    return wanted


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """How long the other side asks to wait: it says seconds, or a date."""
    told = headers.get("retry-after", "").strip()
    if told.isascii() and told.isdecimal():
        return min(float(told[:12]), RETRY_AFTER_S_MAX)
    try:
        when = parsedate_to_datetime(told)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return min(max((when - now).total_seconds(), 0.0), RETRY_AFTER_S_MAX)


def unavailable(status: int, host: str, headers: Mapping[str, str]) -> Unavailable:
    wait_s = retry_after_s(headers, datetime.fromtimestamp(SYSTEM.wall_ns() / S, UTC))
    told = {} if wait_s is None else {"retry_after_s": wait_s}
    return Unavailable(status=status, host=host, **told)


# -- inside --------------------------------------------------------------------------------------


def _judged(response: Response, wanted: Options) -> Response:
    if response.status in wanted.retried:
        raise unavailable(response.status, response.url.partition("?")[0], response.headers)
    if wanted.errors == "raise" and not response.ok:
        raise Answered(
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
            raise Invalid(what="header", name=name[:100], why="characters that do not belong there")
        if low in _NOT_YOURS or low.startswith("proxy-"):
            raise Invalid(what="header", name=low, why="it is set by the adapter")
        headers[low] = value
    if not _HEADER_VALUE.fullmatch(key):
        raise Invalid(what="idempotency key", why="characters that do not belong in a header")
    # Unpacking is bounded, but what was never packed needs no unpacking.
    return {**headers, "accept-encoding": "identity", "idempotency-key": key}


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _trusted(scheme: str, ca_file: str | None) -> ssl.SSLContext | None:
    context: ssl.SSLContext | None = None
    if scheme == "https":
        context = _connection().trusting(ca_file)
    return context


def _connection() -> Any:
    try:
        from holdfast.adapters import connection
    except ImportError as error:
        raise NotInstalled(what="httpx", why=str(error)) from None
    return connection
