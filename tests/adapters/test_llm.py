"""`llm.chat` against a fake OpenAI-compatible endpoint: requests, usage, cost bounds, secrets."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from holdfast.adapters import llm
from holdfast.adapters.errors import (
    BadResponse,
    NotConfigured,
    RejectedByServer,
    ResponseTooLarge,
    Unavailable,
)
from holdfast.adapters.llm import ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.errors import HoldfastError, Invalid, Timeout
from tests.adapters.rig import FakeHttpServer, ReceivedRequest, respond_with, run, run_http_server

MODULES = ("holdfast.adapters.llm",)

SECRET = "sk-very-secret"
HELLO = [{"role": "user", "content": "Hello"}]
PATH = "/v1/chat/completions"


def completion(text: str = "Hi", usage: tuple[int, int] | None = (7, 3), **fields: Any) -> bytes:
    usage_fields = (
        None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    )
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "c1", "model": "m-1", "choices": [choice], "usage": usage_fields, **fields}
    return msgspec.json.encode(body)


@pytest.fixture
def server() -> Iterator[FakeHttpServer]:
    with run_http_server() as server:
        server.routes[PATH] = respond_with(200, completion())
        yield server


def chat(server: FakeHttpServer, messages: Any = HELLO, **options: Any) -> Reply:
    endpoint = Endpoint(server.url("/v1"), SECRET)
    return run(llm.chat(endpoint, messages, "m", options, key="key-1"))


def test_chat_reply_has_text_finish_reason_and_usage(server: FakeHttpServer) -> None:
    assert chat(server) == Reply("Hi", "m-1", "stop", Usage(7, 3), [], "c1", False)


def test_chat_request_has_the_openai_format(server: FakeHttpServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat(server, max_tokens=50, temperature=0.5, tools=tools, extra={"seed": 7})
    [seen] = server.requests
    assert msgspec.json.decode(seen.body) == {
        "model": "m", "messages": HELLO, "max_tokens": 50, "temperature": 0.5, "tools": tools,
        "seed": 7,
    }  # fmt: skip
    assert seen.headers["authorization"] == f"Bearer {SECRET}"
    assert seen.headers["idempotency-key"] == "key-1"


def test_chat_tool_calls_are_returned_unchanged(server: FakeHttpServer) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    server.routes[PATH] = respond_with(200, completion(choices=[choice]))
    reply = chat(server)
    assert (reply.text, reply.tool_calls) == ("", [call])


def test_chat_reply_without_usage_is_estimated_at_its_bound(server: FakeHttpServer) -> None:
    server.routes[PATH] = respond_with(200, completion(usage=None))
    reply = chat(server, max_tokens=9)
    assert reply.estimated
    assert reply.usage == llm.usage_bound(HELLO, ChatOptions(max_tokens=9))


def test_chat_reply_with_partial_usage_is_estimated(server: FakeHttpServer) -> None:
    body = completion(usage=None).replace(b'"usage":null', b'"usage":{"completion_tokens":3}')
    server.routes[PATH] = respond_with(200, body)
    assert chat(server).estimated


def test_chat_reply_in_parts_is_joined_to_one_text(server: FakeHttpServer) -> None:
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    choice = {"message": {"content": parts}, "finish_reason": "stop"}
    server.routes[PATH] = respond_with(200, completion(choices=[choice]))
    assert chat(server).text == "Hello"


def test_input_tokens_max_does_not_lower_the_bound_of_text() -> None:
    long = [{"role": "user", "content": "x" * 1000}]
    assert llm.usage_bound(long, ChatOptions(input_tokens_max=1)).input_tokens > 1000


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_temporary_chat_status_is_unavailable_with_retry_after(
    server: FakeHttpServer, status: int
) -> None:
    server.routes[PATH] = respond_with(status, headers={"retry-after": "3"})
    with pytest.raises(Unavailable) as caught:
        chat(server)
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_other_chat_status_is_a_final_error(server: FakeHttpServer, status: int) -> None:
    server.routes[PATH] = respond_with(status, b"no")
    with pytest.raises(RejectedByServer) as caught:
        chat(server)
    assert (caught.value.status, caught.value.body) == (status, "no")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"junk", b"[]", b"null", b"\xff\xfe", b'{"choices": []}', b'{"choices": [{"message": 7}]}',
        b'{"choices": [{"message": {"content": ["text"]}}]}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"choices": [{"message": {"content": "\\ud800"}}]}', b"<html>Bad Gateway</html>",
        completion(usage=(-1, 2)), completion(usage=(1, 10**30)), completion(usage=(2**62, 1)),
        completion()[:-5], completion() + b"{}", b"data: " + completion(),
    ],
    ids=range(18),
)  # fmt: skip
def test_malformed_chat_reply_is_a_bad_response(server: FakeHttpServer, body: bytes) -> None:
    server.routes[PATH] = respond_with(200, body)
    with pytest.raises(BadResponse):
        chat(server)


def test_oversized_chat_reply_is_refused(server: FakeHttpServer) -> None:
    server.routes[PATH] = respond_with(200, completion("x" * (4 * 1024 * 1024)))
    with pytest.raises(ResponseTooLarge):
        chat(server)


def test_missing_chat_reply_is_a_timeout(server: FakeHttpServer) -> None:
    def hang(handler: Any, seen: ReceivedRequest) -> None:
        server.stopped.wait(30)

    server.routes[PATH] = hang
    with pytest.raises(Timeout):
        chat(server, timeout_s=0.2)


def test_trickling_chat_reply_is_a_timeout_of_the_whole_call(server: FakeHttpServer) -> None:
    def trickle(handler: Any, seen: ReceivedRequest) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not server.stopped.wait(0.02):
            handler.wfile.write(b" ")

    server.routes[PATH] = trickle
    with pytest.raises(Timeout):
        chat(server, timeout_s=0.3)


def test_chat_does_not_follow_redirects(server: FakeHttpServer) -> None:
    with run_http_server("127.0.0.2") as other:
        server.routes[PATH] = respond_with(307, headers={"location": other.url(PATH)})
        other.routes[PATH] = respond_with(200, completion())
        with pytest.raises(RejectedByServer):
            chat(server)
        assert other.requests == []


@pytest.mark.parametrize("odd", ["sk-1\n", "sk 1", "sk-1\r\nX-Evil: y", "sk-é", "\x00"])
def test_api_key_invalid_as_a_header_is_refused_without_quoting_it(
    server: FakeHttpServer, odd: str
) -> None:
    endpoint = Endpoint(server.url("/v1"), odd)
    with pytest.raises(NotConfigured) as caught:
        run(llm.chat(endpoint, HELLO, "m", None, key="k"))
    assert "sk" not in str(caught.value)
    assert server.requests == []


def test_api_key_from_the_environment_is_stripped() -> None:
    env = {"HOLDFAST_LLM_BASE_URL": "http://x/v1", "HOLDFAST_LLM_API_KEY": f"{SECRET}\n"}
    assert Endpoint.from_env(env).api_key == SECRET


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_invalid_price_is_refused(wrong: float) -> None:
    with pytest.raises(Invalid):
        Price(wrong, 1.0)
    with pytest.raises(Invalid):
        Price(1.0, wrong)


@pytest.mark.parametrize("status", [200, 401, 429])
def test_api_key_is_not_in_errors(server: FakeHttpServer, status: int) -> None:
    server.routes[PATH] = respond_with(status, f"bad key {SECRET}".encode())
    with pytest.raises(HoldfastError) as caught:
        chat(server)
    assert SECRET not in str(caught.value) + repr(caught.value)


def test_api_key_is_not_in_the_repr_of_the_endpoint() -> None:
    endpoint = Endpoint("https://llm.test/v1", SECRET, {"m": Price(1, 2)})
    assert SECRET not in repr(endpoint) + str(endpoint) + f"{endpoint}"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": 1 << 40}, {"timeout_s": 0}, {"unknown": 1},
        {"extra": {"n": 5}}, {"extra": {"best_of": 2}}, {"extra": {"stream": True}},
        {"extra": {"max_tokens": 9}}, {"extra": {"model": "dear"}}, {"input_tokens_max": 0},
    ],
)  # fmt: skip
def test_invalid_or_unbounded_chat_options_are_refused(
    server: FakeHttpServer, options: dict[str, Any]
) -> None:
    with pytest.raises(Invalid):
        chat(server, **options)
    assert server.requests == []


@pytest.mark.parametrize("messages", [[], "Hello", [{"content": "x"}], [7], {"role": "user"}])
def test_invalid_chat_messages_are_refused(server: FakeHttpServer, messages: Any) -> None:
    with pytest.raises(Invalid):
        chat(server, messages)


@pytest.mark.parametrize("text", ["", "Hello", "é" * 100, "\x00" * 50, "漢字" * 50, "a b " * 500])
def test_usage_bound_counts_every_byte_of_text(text: str) -> None:
    usage_max = llm.usage_bound([{"role": "user", "content": text}], ChatOptions(max_tokens=5))
    assert usage_max.input_tokens >= len(text.encode()) + 4
    assert usage_max.output_tokens == 5


def test_non_text_parts_need_input_tokens_max() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Invalid):
        llm.check_bounded(image, ChatOptions())
    bounded = ChatOptions(input_tokens_max=2000)
    llm.check_bounded(image, bounded)
    assert llm.usage_bound(image, bounded).input_tokens == 2000
    llm.check_bounded([{"role": "user", "content": [{"type": "text", "text": "x"}]}], ChatOptions())


def test_price_is_per_million_tokens_and_rounds_up() -> None:
    price = Price(input=2.5, output=10.0)
    assert price.micros(Usage(1_000_000, 100_000)) == 3_500_000
    assert price.micros(Usage(1, 0)) == 3
    assert price.micros(Usage(0, 0)) == 0


def test_endpoint_is_configured_from_the_environment() -> None:
    env = {
        "HOLDFAST_LLM_BASE_URL": "http://llm.test/v1",
        "HOLDFAST_LLM_API_KEY": SECRET,
        "HOLDFAST_LLM_PRICES": '{"m": {"input": 1, "output": 2}}',
    }
    assert Endpoint.from_env(env) == Endpoint("http://llm.test/v1", SECRET, {"m": Price(1.0, 2.0)})


@pytest.mark.parametrize(
    "env", [{}, {"HOLDFAST_LLM_BASE_URL": "http://x", "HOLDFAST_LLM_PRICES": '{"m": 1}'}]
)
def test_missing_or_invalid_llm_environment_raises_not_configured(env: dict[str, str]) -> None:
    with pytest.raises(NotConfigured):
        Endpoint.from_env(env)
