"""`llm.chat` against a stand-in for an OpenAI-compatible endpoint: requests, usage, bounds, secrets."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from holdfast.adapters import llm
from holdfast.adapters.errors import (
    Answered,
    AnswerTooLarge,
    BadAnswer,
    NotConfigured,
    Unavailable,
)
from holdfast.adapters.llm import ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.errors import HoldfastError, Invalid, Timeout
from tests.adapters.rig import Seen, Server, answer, run, serving

MODULES = ("holdfast.adapters.llm",)

SECRET = "sk-very-secret"
HELLO = [{"role": "user", "content": "Hello"}]
PATH = "/v1/chat/completions"


def completion(text: str = "Hi", usage: tuple[int, int] | None = (7, 3), **fields: Any) -> bytes:
    told = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "c1", "model": "m-1", "choices": [choice], "usage": told, **fields}
    return msgspec.json.encode(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.routes[PATH] = answer(200, completion())
        yield server


def chat(server: Server, messages: Any = HELLO, **options: Any) -> Reply:
    endpoint = Endpoint(server.url("/v1"), SECRET)
    return run(llm.chat(endpoint, messages, "m", options, key="key-1"))


def test_a_reply_has_text_reason_and_usage(server: Server) -> None:
    assert chat(server) == Reply("Hi", "m-1", "stop", Usage(7, 3), [], "c1", False)


def test_the_request_is_what_such_endpoints_expect(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat(server, max_tokens=50, temperature=0.5, tools=tools, extra={"seed": 7})
    [seen] = server.seen
    assert msgspec.json.decode(seen.body) == {
        "model": "m", "messages": HELLO, "max_tokens": 50, "temperature": 0.5, "tools": tools,
        "seed": 7,
    }  # fmt: skip
    assert seen.headers["authorization"] == f"Bearer {SECRET}"
    assert seen.headers["idempotency-key"] == "key-1"


def test_tool_calls_come_back_as_they_are(server: Server) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    server.routes[PATH] = answer(200, completion(choices=[choice]))
    reply = chat(server)
    assert (reply.text, reply.tool_calls) == ("", [call])


def test_an_answer_without_usage_is_booked_at_its_bound(server: Server) -> None:
    server.routes[PATH] = answer(200, completion(usage=None))
    reply = chat(server, max_tokens=9)
    assert reply.estimated
    assert reply.usage == llm.bound(HELLO, ChatOptions(max_tokens=9))


def test_half_a_usage_is_none(server: Server) -> None:
    told = completion(usage=None).replace(b'"usage":null', b'"usage":{"completion_tokens":3}')
    server.routes[PATH] = answer(200, told)
    assert chat(server).estimated


def test_an_answer_in_parts_is_one_text(server: Server) -> None:
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    choice = {"message": {"content": parts}, "finish_reason": "stop"}
    server.routes[PATH] = answer(200, completion(choices=[choice]))
    assert chat(server).text == "Hello"


def test_a_callers_bound_does_not_make_text_cheaper() -> None:
    long = [{"role": "user", "content": "x" * 1000}]
    assert llm.bound(long, ChatOptions(input_tokens_max=1)).input_tokens > 1000


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_a_status_that_passes_is_tried_again(server: Server, status: int) -> None:
    server.routes[PATH] = answer(status, headers={"retry-after": "3"})
    with pytest.raises(Unavailable) as caught:
        chat(server)
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_any_other_status_is_an_error_for_good(server: Server, status: int) -> None:
    server.routes[PATH] = answer(status, b"no")
    with pytest.raises(Answered) as caught:
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
def test_an_answer_that_is_none_is_a_bad_answer(server: Server, body: bytes) -> None:
    server.routes[PATH] = answer(200, body)
    with pytest.raises(BadAnswer):
        chat(server)


def test_an_answer_that_is_too_large_is_refused(server: Server) -> None:
    server.routes[PATH] = answer(200, completion("x" * (4 * 1024 * 1024)))
    with pytest.raises(AnswerTooLarge):
        chat(server)


def test_an_answer_that_does_not_come_is_a_timeout(server: Server) -> None:
    def hang(handler: Any, seen: Seen) -> None:
        server.over.wait(30)

    server.routes[PATH] = hang
    with pytest.raises(Timeout):
        chat(server, timeout_s=0.2)


def test_an_answer_that_trickles_is_a_timeout_of_the_whole(server: Server) -> None:
    def trickle(handler: Any, seen: Seen) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not server.over.wait(0.02):
            handler.wfile.write(b" ")

    server.routes[PATH] = trickle
    with pytest.raises(Timeout):
        chat(server, timeout_s=0.3)


def test_a_redirect_gets_neither_the_question_nor_the_key(server: Server) -> None:
    with serving("127.0.0.2") as other:
        server.routes[PATH] = answer(307, headers={"location": other.url(PATH)})
        other.routes[PATH] = answer(200, completion())
        with pytest.raises(Answered):
            chat(server)
        assert other.seen == []


@pytest.mark.parametrize("odd", ["sk-1\n", "sk 1", "sk-1\r\nX-Evil: y", "sk-é", "\x00"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_quoted(server: Server, odd: str) -> None:
    endpoint = Endpoint(server.url("/v1"), odd)
    with pytest.raises(NotConfigured) as caught:
        run(llm.chat(endpoint, HELLO, "m", None, key="k"))
    assert "sk" not in str(caught.value)
    assert server.seen == []


def test_a_key_from_a_file_may_end_in_a_line_break() -> None:
    env = {"HOLDFAST_LLM_BASE_URL": "http://x/v1", "HOLDFAST_LLM_API_KEY": f"{SECRET}\n"}
    assert Endpoint.from_env(env).api_key == SECRET


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_invalid(wrong: float) -> None:
    with pytest.raises(Invalid):
        Price(wrong, 1.0)
    with pytest.raises(Invalid):
        Price(1.0, wrong)


@pytest.mark.parametrize("status", [200, 401, 429])
def test_the_key_is_in_no_error(server: Server, status: int) -> None:
    server.routes[PATH] = answer(status, f"bad key {SECRET}".encode())
    with pytest.raises(HoldfastError) as caught:
        chat(server)
    assert SECRET not in str(caught.value) + repr(caught.value)


def test_the_key_is_in_no_text_of_the_endpoint() -> None:
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
def test_options_without_a_bound_are_invalid(server: Server, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        chat(server, **options)
    assert server.seen == []


@pytest.mark.parametrize("messages", [[], "Hello", [{"content": "x"}], [7], {"role": "user"}])
def test_messages_that_are_none_are_invalid(server: Server, messages: Any) -> None:
    with pytest.raises(Invalid):
        chat(server, messages)


@pytest.mark.parametrize("text", ["", "Hello", "é" * 100, "\x00" * 50, "漢字" * 50, "a b " * 500])
def test_the_bound_counts_at_least_every_byte_that_is_said(text: str) -> None:
    most = llm.bound([{"role": "user", "content": text}], ChatOptions(max_tokens=5))
    assert most.input_tokens >= len(text.encode()) + 4
    assert most.output_tokens == 5


def test_parts_that_are_not_text_need_a_bound_of_the_callers() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Invalid):
        llm.check_bounded(image, ChatOptions())
    told = ChatOptions(input_tokens_max=2000)
    llm.check_bounded(image, told)
    assert llm.bound(image, told).input_tokens == 2000
    llm.check_bounded([{"role": "user", "content": [{"type": "text", "text": "x"}]}], ChatOptions())


def test_a_price_is_per_million_tokens_and_rounds_up() -> None:
    price = Price(input=2.5, output=10.0)
    assert price.micros(Usage(1_000_000, 100_000)) == 3_500_000
    assert price.micros(Usage(1, 0)) == 3
    assert price.micros(Usage(0, 0)) == 0


def test_the_environment_configures_the_endpoint() -> None:
    env = {
        "HOLDFAST_LLM_BASE_URL": "http://llm.test/v1",
        "HOLDFAST_LLM_API_KEY": SECRET,
        "HOLDFAST_LLM_PRICES": '{"m": {"input": 1, "output": 2}}',
    }
    assert Endpoint.from_env(env) == Endpoint("http://llm.test/v1", SECRET, {"m": Price(1.0, 2.0)})


@pytest.mark.parametrize(
    "env", [{}, {"HOLDFAST_LLM_BASE_URL": "http://x", "HOLDFAST_LLM_PRICES": '{"m": 1}'}]
)
def test_an_endpoint_that_is_not_configured_says_so(env: dict[str, str]) -> None:
    with pytest.raises(NotConfigured):
        Endpoint.from_env(env)
