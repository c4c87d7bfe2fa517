"""Retry rules for exceptions: transient classes, statuses and codes, and the delay of Retry-After headers."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message
from typing import Any

import httpx
import pytest

from holdfast.ledger.run_policy import ErrorClass
from holdfast.spark.coercion import WrongSchema
from holdfast.spark.exception_rules import (
    RETRY_AFTER_S_MAX,
    RetryRules,
    http_status,
    retry_after_s,
    transient,
)
from holdfast.spark.stage import Stage
from tests.case_ids import stable_repr

NOW_S = 1_700_000_000.0
REQUEST = httpx.Request("GET", "http://127.0.0.1/")


class FakeResponse:
    def __init__(self, status: int, headers: Any = None) -> None:
        self.status_code = status
        self.headers = headers or {}


def make_error(dotted: str, *bases: type, **fields: Any) -> BaseException:
    """An exception of a class with the dotted name of another library's class."""
    module, _, name = dotted.rpartition(".")
    error_type = type(name, bases or (Exception,), {"__module__": module})
    error: BaseException = error_type("no")
    for field, value in fields.items():
        setattr(error, field, value)
    return error


def library_type(dotted: str) -> type:
    return type(make_error(dotted))


def aws_error(code: str, status: int = 400, headers: Any = None) -> BaseException:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    response = {"Error": {"Code": code}, "ResponseMetadata": metadata}
    return make_error("botocore.exceptions.ClientError", response=response)


def httpx_error(status: int, **headers: str) -> BaseException:
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx.Response(status, headers=header_fields, request=REQUEST)
    return httpx.HTTPStatusError("no", request=REQUEST, response=response)


def urllib_error(status: int, **headers: str) -> BaseException:
    header_fields = Message()
    for name, value in headers.items():
        header_fields[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://127.0.0.1/", status, "no", header_fields, io.BytesIO())


TRANSIENT = [
    make_error("openai.RateLimitError", status_code=429),
    make_error("openai.APITimeoutError", library_type("openai.APIConnectionError")),
    make_error("openai.InternalServerError", status_code=500),
    make_error("openai.ConflictError", status_code=409),
    make_error("anthropic.RateLimitError", status_code=429),
    make_error("anthropic._exceptions.OverloadedError", status_code=529),
    make_error("anthropic.APIConnectionError"),
    httpx.ConnectError("no"),
    httpx.ReadTimeout("no"),
    httpx.RemoteProtocolError("no"),
    httpx_error(503),
    make_error("requests.exceptions.ConnectTimeout", library_type("requests.exceptions.Timeout")),
    make_error("requests.exceptions.ConnectionError"),
    make_error("requests.exceptions.HTTPError", response=FakeResponse(502)),
    make_error("urllib3.exceptions.ReadTimeoutError", library_type("urllib3.exceptions.TimeoutError")),
    make_error("urllib3.exceptions.MaxRetryError", reason=make_error("urllib3.exceptions.ProtocolError")),
    make_error("aiohttp.client_exceptions.ServerDisconnectedError",
         library_type("aiohttp.client_exceptions.ClientConnectionError")),
    make_error("aiohttp.client_exceptions.ClientResponseError", status=429),
    make_error("botocore.exceptions.ReadTimeoutError"),
    aws_error("ThrottlingException", 429),
    aws_error("SlowDown", 503),
    make_error("google.api_core.exceptions.TooManyRequests", code=429),
    make_error("some.client.HttpError", status_code=408),
    make_error("some.client.HttpError", response=FakeResponse(425)),
    urllib_error(504),
    urllib.error.URLError(ConnectionRefusedError("no")),
    make_error("grpc.RpcError", code=lambda: type("Code", (), {"name": "UNAVAILABLE"})()),
]  # fmt: skip

PERMANENT = [
    ValueError("no"),
    make_error("openai.AuthenticationError", status_code=401),
    make_error("openai.RateLimitError", status_code=429, code="insufficient_quota"),
    make_error("openai.BadRequestError", status_code=400),
    httpx_error(409),
    httpx_error(404),
    httpx.UnsupportedProtocol("no"),
    make_error("requests.exceptions.SSLError", library_type("requests.exceptions.ConnectionError")),
    make_error("requests.exceptions.HTTPError", response=FakeResponse(403)),
    make_error("aiohttp.client_exceptions.ClientConnectorCertificateError",
         library_type("aiohttp.client_exceptions.ClientConnectionError")),
    aws_error("AccessDenied", 403),
    urllib_error(410),
    urllib.error.URLError("unknown url type"),
    make_error("grpc.RpcError", code=lambda: type("Code", (), {"name": "INVALID_ARGUMENT"})()),
    make_error("mine.RateLimitError"),
    make_error("some.client.HttpError", status_code=True),
    make_error("some.client.HttpError", status_code=5000),
]  # fmt: skip


def error_id(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__name__} {http_status(error) or ''}"


@pytest.mark.parametrize("error", TRANSIENT, ids=error_id)
def test_transient_error_is_retried_by_default(error: BaseException) -> None:
    assert transient(error)
    stage = Stage("s", lambda row: {"y": 1}, key="id", schema="y int")
    assert RetryRules(stage.retry_on).class_of(error) is ErrorClass.TRANSIENT


@pytest.mark.parametrize("error", PERMANENT, ids=error_id)
def test_permanent_error_is_not_transient(error: BaseException) -> None:
    assert not transient(error)


RULES = [
    ((TimeoutError,), TimeoutError(), ErrorClass.TRANSIENT),
    ((), TimeoutError(), ErrorClass.INPUT),
    ((OSError,), ConnectionResetError(), ErrorClass.TRANSIENT),
    (("openai.RateLimitError",), make_error("openai.RateLimitError"), ErrorClass.TRANSIENT),
    (
        ("openai.RateLimitError",),
        make_error("openai._exceptions.RateLimitError"),
        ErrorClass.TRANSIENT,
    ),
    (("openai.RateLimitError",), make_error("openaily.RateLimitError"), ErrorClass.INPUT),
    (
        ("openai.APIError",),
        make_error("openai.Other", library_type("openai.APIError")),
        ErrorClass.TRANSIENT,
    ),
    (("RateLimitError",), make_error("any.RateLimitError"), ErrorClass.TRANSIENT),
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


@pytest.mark.parametrize(("rules", "error", "kind"), RULES, ids=stable_repr)
def test_retry_rule_is_a_class_a_name_or_a_predicate(
    rules: Any, error: BaseException, kind: ErrorClass
) -> None:
    assert RetryRules(rules).class_of(error) is kind


@pytest.mark.parametrize("rules", [5, "no name", (int,), ("a..b",), (None,)], ids=stable_repr)
def test_invalid_retry_on_is_refused(rules: Any) -> None:
    with pytest.raises(Exception, match="retry_on"):
        Stage("s", lambda row: {"y": 1}, key="id", schema="y int", retry_on=rules)


RETRY_AFTER = [
    (httpx_error(429, retry_after="7"), 7.0),
    (httpx_error(429, Retry_After="0.5"), 0.5),
    (httpx_error(429, retry_after="7", retry_after_ms="250"), 0.25),
    (httpx_error(429, retry_after="Tue, 14 Nov 2023 22:14:20 GMT"), 60.0),
    (httpx_error(429, retry_after="Tue, 14 Nov 2022 22:14:20 GMT"), 0.0),
    (httpx_error(429, retry_after="-5"), 0.0),
    (httpx_error(429, retry_after="999999"), RETRY_AFTER_S_MAX),
    (httpx_error(429, retry_after="nan"), None),
    (httpx_error(429, retry_after="soon"), None),
    (httpx_error(429), None),
    (urllib_error(503, retry_after="3"), 3.0),
    (make_error("openai.RateLimitError", response=FakeResponse(429, {"Retry-After": "2"})), 2.0),
    (make_error("some.Error", headers=5), None),
    (aws_error("SlowDown", 503, {"retry-after": "4"}), 4.0),
    (
        ExceptionGroup("g", [httpx_error(429, retry_after="1"), httpx_error(429, retry_after="2")]),
        2.0,
    ),
    (ValueError("no"), None),
]


@pytest.mark.parametrize(("error", "seconds"), RETRY_AFTER)
def test_retry_after_s_reads_the_headers_of_an_error(
    error: BaseException, seconds: float | None
) -> None:
    assert retry_after_s(error, NOW_S) == seconds


def test_error_whose_attributes_raise_is_classified() -> None:
    class Hostile(Exception):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert not transient(Hostile("no"))
    assert retry_after_s(Hostile("no"), NOW_S) is None
