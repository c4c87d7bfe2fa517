"""The agent of `examples/agent`: tool calls, hints, turn limits, model errors, and its printed output."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast as hf
from tests.adapters.rig import FakeHttpServer, ReceivedRequest, respond_with, run_http_server
from tests.process.test_tutorial import blocks_of, pattern_of
from tests.process.watch import assert_no_client_left, until
from tests.processes import ROOT, Proc

EXAMPLE = ROOT / "examples" / "agent"

SHOW_S = 100
WAIT_S = 30.0
CHAT = "/v1/chat/completions"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"holdfast_example_{name}", EXAMPLE / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("agent")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, example: ModuleType) -> Iterator[FakeHttpServer]:
    """A fake server for the model and the shop. The test sets its routes."""
    with run_http_server() as server:
        prices = {example.MODEL: {"input": 1, "output": 1}}
        monkeypatch.setenv("HOLDFAST_LLM_BASE_URL", server.url("/v1"))
        monkeypatch.setenv("HOLDFAST_LLM_PRICES", json.dumps(prices))
        monkeypatch.setenv("HOLDFAST_HTTP_CIDRS", "127.0.0.0/8")
        monkeypatch.setenv("HOLDFAST_HTTP_PORTS", str(server.port))
        yield server


@contextmanager
def agent_with_a_goal(example: ModuleType, server: FakeHttpServer) -> Iterator[Any]:
    """An agent with a goal, run by a worker in this process."""
    # The HTTP effect reads its address rules from the environment, which differs for every test.
    request = hf.http.declare(attempts=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.http.request, "fn", request.fn)
        with example.app.open("memory:") as runtime:
            shop = server.url("").rstrip("/")
            yield runtime.start(example.buy.options(key="ada"), "Chairs, please.", shop)


def completion(text: str = "", *calls: dict[str, Any]) -> bytes:
    message = {"role": "assistant", "content": text or None, "tool_calls": list(calls)}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return json.dumps({"choices": [{"message": message}], "usage": usage}).encode()


def tool_call(call_id: str, arguments: str, name: str = "get_quote") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def replies_in_order(*bodies: bytes) -> Callable[[BaseHTTPRequestHandler, ReceivedRequest], None]:
    """A route that replies to its n-th call with the n-th body, and repeats the last body."""
    left = list(bodies)

    def route(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        respond_with(body=left.pop(0) if len(left) > 1 else left[0])(handler, seen)

    return route


def proposal_of(agent: Any) -> str:
    """Wait until the agent waits for an approval. Return its proposal."""
    until(lambda: any(it["code"] == "waits_for_event" for it in agent.why()), "the approval")
    proposal: str = agent.published("proposal")
    return proposal


def failure_of(agent: Any) -> hf.FlowFailed:
    with pytest.raises(hf.FlowFailed) as failure:
        agent.result(timeout=WAIT_S)
    return failure.value


def messages_of(seen: ReceivedRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(seen.body)["messages"]
    return found


# -- the example as a program --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(SHOW_S + 20)
def test_example_output_matches_its_readme(tmp_path: Path) -> None:
    store = tmp_path / "data"
    command = [sys.executable, str(EXAMPLE / "show.py"), str(store)]
    with Proc.spawn(command, ready=None) as process:
        assert process.wait(SHOW_S) == 0, "\n".join(process.errors)
        printed = "\n".join(process.lines)
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    [code, output] = blocks_of(readme)
    assert code.text in (EXAMPLE / "agent.py").read_text(encoding="utf-8")
    assert re.fullmatch(pattern_of(output.text), printed), printed
    commands = re.findall(r"^    (holdfast .*)$", readme, re.MULTILINE)
    script = "\n".join(commands).replace("--store data", f"--store {store}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        ["bash", "-euc", script], ready=None, cwd=EXAMPLE, env={"PATH": path}
    ) as process:
        assert process.wait(SHOW_S) == 0, "\n".join(process.errors)
        printed = "\n".join(process.lines)
    assert "0 would be parked" in printed
    assert_no_client_left(store)


# -- the agent -----------------------------------------------------------------------------------


def test_parallel_tool_calls_all_return_before_the_next_model_request(
    example: ModuleType, server: FakeHttpServer
) -> None:
    two = completion(
        "", tool_call("1", '{"supplier": "ash"}'), tool_call("2", '{"supplier": "elm"}')
    )
    server.routes |= {
        CHAT: replies_in_order(two, completion("elm")),
        "/quotes/ash": respond_with(body=b"9"),
        "/quotes/elm": respond_with(body=b"7"),
    }
    with agent_with_a_goal(example, server) as agent:
        assert proposal_of(agent) == "elm"
    [*_, last] = [seen for seen in server.requests if seen.path == CHAT]
    tool_results = {one["tool_call_id"]: one["content"] for one in messages_of(last)[3:]}
    assert tool_results == {"1": "9", "2": "7"}


def test_invalid_tool_call_returns_an_error_to_the_model(
    example: ModuleType, server: FakeHttpServer
) -> None:
    bad = [
        tool_call("1", "{"),
        tool_call("2", "[]"),
        tool_call("3", '{"supplier": 7}'),
        tool_call("4", '{"supplier": "elm"}', name="drop_table"),
    ]
    server.routes[CHAT] = replies_in_order(completion("", *bad), completion("nobody"))
    with agent_with_a_goal(example, server) as agent:
        assert proposal_of(agent) == "nobody"
    tool_results = messages_of(server.requests[-1])[3:]
    assert [one["tool_call_id"] for one in tool_results] == ["1", "2", "3", "4"]
    assert all(one["content"].startswith("failed: ") for one in tool_results)


def test_tool_argument_cannot_escape_the_url_path(
    example: ModuleType, server: FakeHttpServer
) -> None:
    escape = tool_call("1", json.dumps({"supplier": "../../admin?all=1#"}))
    server.routes |= {
        CHAT: replies_in_order(completion("", escape), completion("done")),
        "/quotes/..%2F..%2Fadmin%3Fall%3D1%23": respond_with(body=b"unknown"),
    }
    with agent_with_a_goal(example, server) as agent:
        assert proposal_of(agent) == "done"
    assert messages_of(server.requests[-1])[-1]["content"] == "unknown"


def test_hint_makes_the_agent_think_again_and_an_approval_orders_once(
    example: ModuleType, server: FakeHttpServer
) -> None:
    server.routes |= {
        CHAT: replies_in_order(completion("elm"), completion("ash")),
        "/orders": respond_with(body=b"ordered"),
    }
    with agent_with_a_goal(example, server) as agent:
        assert proposal_of(agent) == "elm"
        agent.send(example.Hinted("Not elm."))
        agent.send(example.Approval("eve"))
        assert agent.result(timeout=WAIT_S) == "ordered"
    [_, second, order] = server.requests
    assert [it["content"] for it in messages_of(second)[2:]] == ["elm", "Not elm."]
    assert json.loads(order.body) == {"order": "ash", "by": "eve"}


def test_agent_stops_after_its_maximum_of_turns(
    example: ModuleType, server: FakeHttpServer
) -> None:
    server.routes[CHAT] = respond_with(body=completion("", tool_call("1", "{")))
    with agent_with_a_goal(example, server) as agent:
        assert "no approval in 20 turns" in failure_of(agent).error
    assert len(server.requests) == example.TURNS_MAX


def test_agent_stops_when_the_model_fails_and_continues_on_a_redrive(
    example: ModuleType, server: FakeHttpServer
) -> None:
    server.routes[CHAT] = respond_with(400, b"no such model")
    with agent_with_a_goal(example, server) as agent:
        error = failure_of(agent)
        assert (error.step, "no such model" in error.error) == ("llm.chat", True)
        server.routes[CHAT] = respond_with(body=completion("elm"))
        agent.redrive()
        assert proposal_of(agent) == "elm"


def test_stand_in_repeats_the_answer_of_a_key_and_counts_calls() -> None:
    outside = load_example("standin").Outside(stall=1)
    try:
        question = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        first, reached = outside.answer("k", "chat", question)
        assert not reached
        assert outside.answer("k", "chat", question) == (first, True)
        assert outside.calls["k"]["calls"] == 2
        assert outside.answer("o", "order", {"by": "eve"}) == (b'{"number": 1, "by": "eve"}', True)
    finally:
        outside.server_close()
