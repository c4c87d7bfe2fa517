"""The class of an exception that a stage's function raised, and how long its server asked to wait.

Pure: an exception, the rules of `retry_on` and the time are all that is looked at. Client libraries
are known by the names of their classes, so none of them is imported, or needed.

- MemoryError is `resource`; a result of another schema is `schema`.
- What a rule of `retry_on` names is `transient`: an exception class, a name ("openai.RateLimitError",
  for a class of that module or below it, or of a base class; "RateLimitError" for one of any module),
  or a predicate, `fn(error) -> bool`. A predicate that raises names nothing.
- A group is what all of its exceptions are: `transient`, or `resource` when one of them is.
- Anything else is `input`.

`transient` is the predicate of the default: errors of HTTP clients that may pass by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from holdfast.ledger.classes import ErrorClass
from holdfast.spark.coercion import WrongSchema

Rule = type[BaseException] | str | Callable[[BaseException], Any]

# Answers of a server that another try may change. 529 is "overloaded", of Anthropic's.
STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# A conflict is one only where the client library itself repeats it.
CONFLICT = 409
CONFLICT_RETRIED = frozenset({"openai", "anthropic"})
# A server that asks for more is asked again after this long.
RETRY_AFTER_S_MAX = 3600.0

# By the first part of the module: classes, their subclasses included.
_TRANSIENT: dict[str, frozenset[str]] = {
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
# Subclasses of those that no other try changes.
_LASTING = frozenset({"SSLError", "ClientSSLError", "ClientConnectorSSLError", "InvalidURL",
                      "ClientConnectorCertificateError", "UnsupportedProtocol"})  # fmt: skip
_THROTTLED = frozenset(
    {
        "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
        "RequestThrottled", "RequestThrottledException", "RequestLimitExceeded", "SlowDown",
        "ProvisionedThroughputExceededException", "ServiceUnavailable", "InternalServerException",
        "ModelTimeoutException", "ModelNotReadyException", "RequestTimeout", "RequestTimeoutException",
    }
)  # fmt: skip
_GRPC = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED"})


class Rules:
    """What `retry_on` says, ready to be asked."""

    def __init__(self, retry_on: tuple[Rule, ...]) -> None:
        self._kinds = tuple(
            one for one in retry_on if isinstance(one, type) and issubclass(one, BaseException)
        )
        self._names = [one for one in retry_on if isinstance(one, str)]
        self._asked: list[Callable[[BaseException], Any]] = [
            one for one in retry_on if not isinstance(one, str | type) and callable(one)
        ]

    def class_of(self, error: BaseException) -> ErrorClass:
        if isinstance(error, WrongSchema):
            return ErrorClass.SCHEMA
        if isinstance(error, MemoryError):
            return ErrorClass.RESOURCE
        if self._names_it(error):
            return ErrorClass.TRANSIENT
        if isinstance(error, BaseExceptionGroup):
            return _of_all({self.class_of(one) for one in error.exceptions})
        return ErrorClass.INPUT

    def _names_it(self, error: BaseException) -> bool:
        if isinstance(error, self._kinds):
            return True
        if any(_is_named(error, name) for name in self._names):
            return True
        return any(_says(ask, error) for ask in self._asked)


def transient(error: BaseException) -> bool:
    """Whether an error of a client library may pass: by its HTTP status, or by its class."""
    if _field(error, "code") == "insufficient_quota":
        return False
    status = status_of(error)
    if status is not None:
        root = type(error).__module__.partition(".")[0]
        return status in STATUSES or (status == CONFLICT and root in CONFLICT_RETRIED)
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _LASTING:
        return False
    for kind in type(error).__mro__:
        if kind.__name__ in _TRANSIENT.get(kind.__module__.partition(".")[0], ()):
            return True
    return _is_throttled(error) or _is_grpc(error) or _is_of_urllib(error)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception tells of, wherever its library keeps it."""
    response = _field(error, "response")
    if isinstance(response, Mapping):
        told = response.get("ResponseMetadata")
        found = [told.get("HTTPStatusCode")] if isinstance(told, Mapping) else []
    else:
        found = [
            _field(error, "status_code"), _field(error, "status"), _field(response, "status_code"),
            _field(response, "status"), _field(error, "code"),
        ]  # fmt: skip
    for one in found:
        if isinstance(one, int) and not isinstance(one, bool) and 100 <= one <= 599:
            return int(one)
    return None


def retry_after_s(error: BaseException, now_s: float) -> float | None:
    """How long the server asked to wait, in seconds from now, bounded; None when it did not say."""
    if isinstance(error, BaseExceptionGroup):
        found = [retry_after_s(one, now_s) for one in error.exceptions]
        return max((one for one in found if one is not None), default=None)
    for name, value in _headers(error):
        if name == "retry-after-ms":
            seconds = _number(value, 1000.0)
        elif name == "retry-after":
            seconds = _number(value, 1.0)
            if seconds is None:
                seconds = _until(value, now_s)
        else:
            continue
        if seconds is not None:
            return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
    return None


# -- inside ----------------------------------------------------------------------------------------


def _of_all(kinds: set[ErrorClass]) -> ErrorClass:
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


def _says(ask: Callable[[BaseException], Any], error: BaseException) -> bool:
    try:
        return bool(ask(error))
    except Exception:
        return False


def _field(found: Any, name: str) -> Any:
    """A field of an object of another library; some of them raise."""
    try:
        return getattr(found, name, None)
    except Exception:
        return None


def _is_throttled(error: BaseException) -> bool:
    response = _field(error, "response")
    told = response.get("Error") if isinstance(response, Mapping) else None
    return isinstance(told, Mapping) and told.get("Code") in _THROTTLED


def _is_grpc(error: BaseException) -> bool:
    if not any(kind.__module__.partition(".")[0] == "grpc" for kind in type(error).__mro__):
        return False
    code = _field(error, "code")
    try:
        found = code() if callable(code) else code
    except Exception:
        return False
    return _field(found, "name") in _GRPC


def _is_of_urllib(error: BaseException) -> bool:
    """A broken connection that urllib, or a retry of urllib3, has wrapped."""
    root = type(error).__module__.partition(".")[0]
    reason = _field(error, "reason")
    if root not in ("urllib", "urllib3") or not isinstance(reason, BaseException):
        return False
    return isinstance(reason, TimeoutError | ConnectionError) or transient(reason)


def _headers(error: BaseException) -> Iterator[tuple[str, Any]]:
    response = _field(error, "response")
    if isinstance(response, Mapping):
        told = response.get("ResponseMetadata")
        places = [told.get("HTTPHeaders") if isinstance(told, Mapping) else None]
    else:
        places = [_field(response, "headers"), _field(error, "headers")]
    for headers in places:
        try:
            found = list(headers.items()) if headers is not None else []
        except Exception:
            continue
        # Milliseconds first: who says both means those.
        for name, value in sorted(((str(one).lower(), two) for one, two in found), reverse=True):
            if name.startswith("retry-after"):
                yield name, value


def _number(value: Any, each_s: float) -> float | None:
    try:
        found = float(value) / each_s
    except (TypeError, ValueError):
        return None
    return found if found == found else None


def _until(value: Any, now_s: float) -> float | None:
    """Seconds until an HTTP date."""
    try:
        return parsedate_to_datetime(str(value)).timestamp() - now_s
    except (TypeError, ValueError, OverflowError):
        return None
