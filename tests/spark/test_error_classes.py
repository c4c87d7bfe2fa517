"""Which exceptions are tried again, and after how long: one table of classes, statuses and headers."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message
from typing import Any

import httpx
import pytest

from holdfast.ledger.classes import ErrorClass
from holdfast.spark.coercion import WrongSchema
from holdfast.spark.error_classes import (
    RETRY_AFTER_S_MAX,
    Rules,
    retry_after_s,
    status_of,
    transient,
)
from holdfast.spark.stage import Stage
from tests.ids import stable

NOW_S = 1_700_000_000.0
REQUEST = httpx.Request("GET", "http://127.0.0.1/")


class Response:
    def __init__(self, status: int, headers: Any = None) -> None:
        self.status_code = status
        self.headers = headers or {}


def made(dotted: str, *bases: type, **fields: Any) -> BaseException:
    """An exception of a class that another library has, by its name."""
    module, _, name = dotted.rpartition(".")
    kind = type(name, bases or (Exception,), {"__module__": module})
    error: BaseException = kind("no")
    for field, value in fields.items():
        setattr(error, field, value)
    return error


def base(dotted: str) -> type:
    return type(made(dotted))


def aws(code: str, status: int = 400, headers: Any = None) -> BaseException:
    told = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    response = {"Error": {"Code": code}, "ResponseMetadata": told}
    return made("botocore.exceptions.ClientError", response=response)


def of_httpx(status: int, **headers: str) -> BaseException:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx.Response(status, headers=told, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


def of_urllib(status: int, **headers: str) -> BaseException:
    told = Message()
    for name, value in headers.items():
        told[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://127.0.0.1/", status, "no", told, io.BytesIO())


TRANSIENT = [
    made("openai.RateLimitError", status_code=429),
    made("openai.APITimeoutError", base("openai.APIConnectionError")),
    made("openai.InternalServerError", status_code=500),
    made("openai.ConflictError", status_code=409),
    made("anthropic.RateLimitError", status_code=429),
    made("anthropic._exceptions.OverloadedError", status_code=529),
    made("anthropic.APIConnectionError"),
    httpx.ConnectError("no"),
    httpx.ReadTimeout("no"),
    httpx.RemoteProtocolError("no"),
    of_httpx(503),
    made("requests.exceptions.ConnectTimeout", base("requests.exceptions.Timeout")),
    made("requests.exceptions.ConnectionError"),
    made("requests.exceptions.HTTPError", response=Response(502)),
    made("urllib3.exceptions.ReadTimeoutError", base("urllib3.exceptions.TimeoutError")),
    made("urllib3.exceptions.MaxRetryError", reason=made("urllib3.exceptions.ProtocolError")),
    made("aiohttp.client_exceptions.ServerDisconnectedError",
         base("aiohttp.client_exceptions.ClientConnectionError")),
    made("aiohttp.client_exceptions.ClientResponseError", status=429),
    made("botocore.exceptions.ReadTimeoutError"),
    aws("ThrottlingException", 429),
    aws("SlowDown", 503),
    made("google.api_core.exceptions.TooManyRequests", code=429),
    made("some.client.HttpError", status_code=408),
    made("some.client.HttpError", response=Response(425)),
    of_urllib(504),
    urllib.error.URLError(ConnectionRefusedError("no")),
    made("grpc.RpcError", code=lambda: type("Code", (), {"name": "UNAVAILABLE"})()),
]  # fmt: skip

LASTING = [
    ValueError("no"),
    made("openai.AuthenticationError", status_code=401),
    made("openai.RateLimitError", status_code=429, code="insufficient_quota"),
    made("openai.BadRequestError", status_code=400),
    of_httpx(409),
    of_httpx(404),
    httpx.UnsupportedProtocol("no"),
    made("requests.exceptions.SSLError", base("requests.exceptions.ConnectionError")),
    made("requests.exceptions.HTTPError", response=Response(403)),
    made("aiohttp.client_exceptions.ClientConnectorCertificateError",
         base("aiohttp.client_exceptions.ClientConnectionError")),
    aws("AccessDenied", 403),
    of_urllib(410),
    urllib.error.URLError("unknown url type"),
    made("grpc.RpcError", code=lambda: type("Code", (), {"name": "INVALID_ARGUMENT"})()),
    made("mine.RateLimitError"),
    made("some.client.HttpError", status_code=True),
    made("some.client.HttpError", status_code=5000),
]  # fmt: skip


def name_of(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__name__} {status_of(error) or ''}"


@pytest.mark.parametrize("error", TRANSIENT, ids=name_of)
def test_what_may_pass_is_tried_again_by_default(error: BaseException) -> None:
    assert transient(error)
    stage = Stage("s", lambda row: {"y": 1}, key="id", schema="y int")
    assert Rules(stage.retry_on).class_of(error) is ErrorClass.TRANSIENT


@pytest.mark.parametrize("error", LASTING, ids=name_of)
def test_what_stays_wrong_is_not(error: BaseException) -> None:
    assert not transient(error)


RULES = [
    ((TimeoutError,), TimeoutError(), ErrorClass.TRANSIENT),
    ((), TimeoutError(), ErrorClass.INPUT),
    ((OSError,), ConnectionResetError(), ErrorClass.TRANSIENT),
    (("openai.RateLimitError",), made("openai.RateLimitError"), ErrorClass.TRANSIENT),
    (("openai.RateLimitError",), made("openai._exceptions.RateLimitError"), ErrorClass.TRANSIENT),
    (("openai.RateLimitError",), made("openaily.RateLimitError"), ErrorClass.INPUT),
    (("openai.APIError",), made("openai.Other", base("openai.APIError")), ErrorClass.TRANSIENT),
    (("RateLimitError",), made("any.RateLimitError"), ErrorClass.TRANSIENT),
    (("TimeoutError",), TimeoutError(), ErrorClass.TRANSIENT),
    ((lambda error: "busy" in str(error),), ValueError("busy"), ErrorClass.TRANSIENT),
    ((lambda error: "busy" in str(error),), ValueError("bad"), ErrorClass.INPUT),
    ((lambda error: 1 / 0,), ValueError("bad"), ErrorClass.INPUT),
    ((), MemoryError(), ErrorClass.RESOURCE),
    ((TimeoutError,), WrongSchema("no"), ErrorClass.SCHEMA),
    ((TimeoutError,), ExceptionGroup("g", [TimeoutError(), TimeoutError()]), ErrorClass.TRANSIENT),
    ((TimeoutError,), ExceptionGroup("g", [TimeoutError(), ValueError()]), ErrorClass.INPUT),
    (
        (TimeoutError,),
        ExceptionGroup("g", [ExceptionGroup("h", [TimeoutError()]), MemoryError()]),
        ErrorClass.RESOURCE,
    ),
    ((ExceptionGroup,), ExceptionGroup("g", [ValueError()]), ErrorClass.TRANSIENT),
]


@pytest.mark.parametrize(("rules", "error", "kind"), RULES, ids=stable)
def test_a_rule_is_a_class_a_name_or_a_predicate(
    rules: Any, error: BaseException, kind: ErrorClass
) -> None:
    assert Rules(rules).class_of(error) is kind


@pytest.mark.parametrize("rules", [5, "no name", (int,), ("a..b",), (None,)], ids=stable)
def test_what_is_no_rule_is_refused(rules: Any) -> None:
    with pytest.raises(Exception, match="retry_on"):
        Stage("s", lambda row: {"y": 1}, key="id", schema="y int", retry_on=rules)


AFTER = [
    (of_httpx(429, retry_after="7"), 7.0),
    (of_httpx(429, Retry_After="0.5"), 0.5),
    (of_httpx(429, retry_after="7", retry_after_ms="250"), 0.25),
    (of_httpx(429, retry_after="Tue, 14 Nov 2023 22:14:20 GMT"), 60.0),
    (of_httpx(429, retry_after="Tue, 14 Nov 2022 22:14:20 GMT"), 0.0),
    (of_httpx(429, retry_after="-5"), 0.0),
    (of_httpx(429, retry_after="999999"), RETRY_AFTER_S_MAX),
    (of_httpx(429, retry_after="nan"), None),
    (of_httpx(429, retry_after="soon"), None),
    (of_httpx(429), None),
    (of_urllib(503, retry_after="3"), 3.0),
    (made("openai.RateLimitError", response=Response(429, {"Retry-After": "2"})), 2.0),
    (made("some.Error", headers=5), None),
    (aws("SlowDown", 503, {"retry-after": "4"}), 4.0),
    (ExceptionGroup("g", [of_httpx(429, retry_after="1"), of_httpx(429, retry_after="2")]), 2.0),
    (ValueError("no"), None),
]


@pytest.mark.parametrize(("error", "seconds"), AFTER)
def test_a_server_may_say_when_to_come_again(error: BaseException, seconds: float | None) -> None:
    assert retry_after_s(error, NOW_S) == seconds


def test_an_error_whose_fields_raise_is_looked_at_without_harm() -> None:
    class Hostile(Exception):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert not transient(Hostile("no"))
    assert retry_after_s(Hostile("no"), NOW_S) is None
