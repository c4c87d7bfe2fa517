"""Exception rules: the error class of an exception raised by a stage's function, and its Retry-
After delay.

Pure functions of an exception, the rules of `retry_on` and the time. Client libraries are recognized by
class name, so none of them is imported or required.

- MemoryError is `resource`. A result that does not fit the schema is `schema`.
- An exception that matches a rule of `retry_on` is `transient`. A rule is an exception class, a name
  ("openai.RateLimitError" for a class of that module, its submodules, or a base class; "RateLimitError"
  for a class of any module), or a predicate, `fn(error) -> bool`. A predicate that raises does not match.
- An exception group is `transient` if all of its exceptions are `transient` or `resource`. It is
  `resource` if one of these is.
- Any other exception is `input`.

`transient` is the default predicate: temporary errors of HTTP clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from holdfast.ledger.run_policy import ErrorClass
from holdfast.spark.coercion import WrongSchema

RetryRule = type[BaseException] | str | Callable[[BaseException], Any]

# Retryable HTTP statuses. 529 is "overloaded" of Anthropic.
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# A conflict is retryable only for client libraries that retry it themselves.
CONFLICT_STATUS = 409
CONFLICT_RETRIED = frozenset({"openai", "anthropic"})
# Upper bound of a requested delay.
RETRY_AFTER_S_MAX = 3600.0

# Retryable classes, subclasses included, by top-level module.
_TRANSIENT_CLASSES: dict[str, frozenset[str]] = {
    "openai": frozenset({"RateLimitError", "APIConnectionError", "APITimeoutError"}),
    "anthropic": frozenset({"RateLimitError", "APIConnectionError", "APITimeoutError"}),
    "httpx": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "httpcore": frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"}),
    "requests": frozenset({"Timeout", "ConnectionError", "ChunkedEncodingError"}),
    "urllib3": frozenset({"TimeoutError", "ProtocolError", "NewConnectionError"}),
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"}),
    "botocore": frozenset(
        {
            "ConnectTimeoutError", "ReadTimeoutError", "EndpointConnectionError",
            "ConnectionClosedError", "ConnectionError", "ResponseStreamingError",
        }
    ),
    "google": frozenset({"RetryError"}),
}  # fmt: skip
# Permanent errors among their subclasses.
_PERMANENT_CLASSES = frozenset({"SSLError", "ClientSSLError", "ClientConnectorSSLError", "InvalidURL",
                      "ClientConnectorCertificateError", "UnsupportedProtocol"})  # fmt: skip
_THROTTLING_CODES = frozenset(
    {
        "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
        "RequestThrottled", "RequestThrottledException", "RequestLimitExceeded", "SlowDown",
        "ProvisionedThroughputExceededException", "ServiceUnavailable", "InternalServerException",
        "ModelTimeoutException", "ModelNotReadyException", "RequestTimeout", "RequestTimeoutException",
    }
)  # fmt: skip
_GRPC_TRANSIENT_CODES = frozenset(
    {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED"}
)


class RetryRules:
    """The compiled rules of `retry_on`."""

    def __init__(self, retry_on: tuple[RetryRule, ...]) -> None:
        self._types = tuple(
            one for one in retry_on if isinstance(one, type) and issubclass(one, BaseException)
        )
        self._names = [one for one in retry_on if isinstance(one, str)]
        self._predicates: list[Callable[[BaseException], Any]] = [
            one for one in retry_on if not isinstance(one, str | type) and callable(one)
        ]

    def class_of(self, error: BaseException) -> ErrorClass:
        if isinstance(error, WrongSchema):
            return ErrorClass.SCHEMA
        if isinstance(error, MemoryError):
            return ErrorClass.RESOURCE
        if self._matches(error):
            return ErrorClass.TRANSIENT
        if isinstance(error, BaseExceptionGroup):
            return _class_of_group({self.class_of(one) for one in error.exceptions})
        return ErrorClass.INPUT

    def _matches(self, error: BaseException) -> bool:
        if isinstance(error, self._types):
            return True
        if any(_is_named(error, name) for name in self._names):
            return True
        return any(_predicate_matches(ask, error) for ask in self._predicates)


def transient(error: BaseException) -> bool:
    """Whether an error of a client library is temporary, by its HTTP status or its class."""
    if _safe_getattr(error, "code") == "insufficient_quota":
        return False
    status = http_status(error)
    if status is not None:
        root = type(error).__module__.partition(".")[0]
        return status in RETRYABLE_STATUSES or (
            status == CONFLICT_STATUS and root in CONFLICT_RETRIED
        )
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _PERMANENT_CLASSES:
        return False
    for kind in type(error).__mro__:
        if kind.__name__ in _TRANSIENT_CLASSES.get(kind.__module__.partition(".")[0], ()):
            return True
    return _is_throttled(error) or _is_grpc(error) or _is_urllib_connection_error(error)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an exception, from any of the attributes that client libraries use."""
    response = _safe_getattr(error, "response")
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        candidates = [metadata.get("HTTPStatusCode")] if isinstance(metadata, Mapping) else []
    else:
        candidates = [
            _safe_getattr(error, "status_code"), _safe_getattr(error, "status"), _safe_getattr(response, "status_code"),
            _safe_getattr(response, "status"), _safe_getattr(error, "code"),
        ]  # fmt: skip
    for one in candidates:
        if isinstance(one, int) and not isinstance(one, bool) and 100 <= one <= 599:
            return int(one)
    return None


def retry_after_s(error: BaseException, now_s: float) -> float | None:
    """Return the delay that the server requested, in seconds from now, bounded; None without a
    request.
    """
    if isinstance(error, BaseExceptionGroup):
        found = [retry_after_s(one, now_s) for one in error.exceptions]
        return max((one for one in found if one is not None), default=None)
    for name, value in _retry_headers(error):
        if name == "retry-after-ms":
            seconds = _seconds(value, 1000.0)
        elif name == "retry-after":
            seconds = _seconds(value, 1.0)
            if seconds is None:
                seconds = _seconds_until(value, now_s)
        else:
            continue
        if seconds is not None:
            return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
    return None


# -- internals -------------------------------------------------------------------------------------


def _class_of_group(kinds: set[ErrorClass]) -> ErrorClass:
    if kinds <= {ErrorClass.TRANSIENT, ErrorClass.RESOURCE}:
        return ErrorClass.RESOURCE if ErrorClass.RESOURCE in kinds else ErrorClass.TRANSIENT
    return ErrorClass.INPUT


def _is_named(error: BaseException, name: str) -> bool:
    module, _, last = name.rpartition(".")
    for kind in type(error).__mro__:
        if kind.__name__ == last and (
            not module or kind.__module__ == module or kind.__module__.startswith(f"{module}.")
        ):
            return True
    return False


def _predicate_matches(predicate: Callable[[BaseException], Any], error: BaseException) -> bool:
    try:
        return bool(predicate(error))
    except Exception:
        return False


def _safe_getattr(value: Any, name: str) -> Any:
    """Read an attribute of a foreign object. Some of them raise."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _is_throttled(error: BaseException) -> bool:
    response = _safe_getattr(error, "response")
    details = response.get("Error") if isinstance(response, Mapping) else None
    return isinstance(details, Mapping) and details.get("Code") in _THROTTLING_CODES


def _is_grpc(error: BaseException) -> bool:
    if not any(kind.__module__.partition(".")[0] == "grpc" for kind in type(error).__mro__):
        return False
    code = _safe_getattr(error, "code")
    try:
        found = code() if callable(code) else code
    except Exception:
        return False
    return _safe_getattr(found, "name") in _GRPC_TRANSIENT_CODES


def _is_urllib_connection_error(error: BaseException) -> bool:
    """Whether urllib, or a retry of urllib3, has wrapped a broken connection."""
    root = type(error).__module__.partition(".")[0]
    reason = _safe_getattr(error, "reason")
    if root not in ("urllib", "urllib3") or not isinstance(reason, BaseException):
        return False
    return isinstance(reason, TimeoutError | ConnectionError) or transient(reason)


def _retry_headers(error: BaseException) -> Iterator[tuple[str, Any]]:
    response = _safe_getattr(error, "response")
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        candidates = [metadata.get("HTTPHeaders") if isinstance(metadata, Mapping) else None]
    else:
        candidates = [_safe_getattr(response, "headers"), _safe_getattr(error, "headers")]
    for headers in candidates:
        try:
            found = list(headers.items()) if headers is not None else []
        except Exception:
            continue
        # Milliseconds first: a server that sends both headers means the precise one.
        for name, value in sorted(((str(one).lower(), two) for one, two in found), reverse=True):
            if name.startswith("retry-after"):
                yield name, value


def _seconds(value: Any, each_s: float) -> float | None:
    try:
        found = float(value) / each_s
    except (TypeError, ValueError):
        return None
    return found if found == found else None


def _seconds_until(value: Any, now_s: float) -> float | None:
    """Return the seconds until an HTTP date."""
    try:
        return parsedate_to_datetime(str(value)).timestamp() - now_s
    except (TypeError, ValueError, OverflowError):
        return None
