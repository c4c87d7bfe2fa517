"""The agent of `examples/agent`: killed in mid-question, forked, hinted, out of money, badly answered."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast as hf
from tests.adapters.rig import Seen, Server, answer, serving
from tests.process.test_tutorial import blocks_of, pattern_of
from tests.process.watch import assert_nobody_is_left, until
from tests.processes import ROOT, Proc

EXAMPLE = ROOT / "examples" / "agent"
PACKAGE = ROOT / "src" / "holdfast" / "cli"

SHOW_S = 100
LINGER_S = 3.0
WAIT_S = 30.0
CHAT = "/v1/chat/completions"


def load(name: str) -> ModuleType:
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
    return load("agent")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, example: ModuleType) -> Iterator[Server]:
    """A model, and a shop, that say what the test lets them say."""
    with serving() as server:
        prices = {example.MODEL: {"input": 1, "output": 1}}
        monkeypatch.setenv("HOLDFAST_LLM_BASE_URL", server.url("/v1"))
        monkeypatch.setenv("HOLDFAST_LLM_PRICES", json.dumps(prices))
        monkeypatch.setenv("HOLDFAST_HTTP_CIDRS", "127.0.0.0/8")
        monkeypatch.setenv("HOLDFAST_HTTP_PORTS", str(server.port))
        yield server


@contextmanager
def asked(example: ModuleType, server: Server) -> Iterator[Any]:
    """An agent that was given a goal."""
    # Its look-ups are judged by the environment, which is another one for every test.
    request = hf.http.declare(attempts=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.http.request, "fn", request.fn)
        with example.app.open("memory:") as runtime:
            agent = runtime.world(example.Agent, "ada")
            agent.send(example.GoalGiven("Chairs, please.", server.url("").rstrip("/")))
            yield agent


def reply(text: str = "", *calls: dict[str, Any]) -> bytes:
    message = {"role": "assistant", "content": text or None, "tool_calls": list(calls)}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return json.dumps({"choices": [{"message": message}], "usage": usage}).encode()


def tool(call_id: str, arguments: str, name: str = "get_quote") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def one_by_one(*bodies: bytes) -> Callable[[BaseHTTPRequestHandler, Seen], None]:
    """A route whose n-th call gets the n-th body; the last one stays."""
    left = list(bodies)

    def route(handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        answer(body=left.pop(0) if len(left) > 1 else left[0])(handler, seen)

    return route


def settled(agent: Any) -> Any:
    return agent.wait_for(lambda it: it.status in ("decided", "stopped"), timeout=WAIT_S)


def messages_of(seen: Seen) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(seen.body)["messages"]
    return found


# -- the whole of it -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(SHOW_S + 20)
def test_the_example_prints_what_its_readme_says(tmp_path: Path) -> None:
    store = tmp_path / "data"
    command = [sys.executable, str(EXAMPLE / "show.py"), str(store)]
    with Proc.spawn(command, ready=None) as process:
        assert process.wait(SHOW_S) == 0, "\n".join(process.errors)
        printed = "\n".join(process.lines)
    [block] = blocks_of((EXAMPLE / "README.md").read_text(encoding="utf-8"))
    assert re.fullmatch(pattern_of(block.text), printed), printed
    assert_nobody_is_left(store, LINGER_S)


def test_the_agent_of_the_demo_is_that_of_the_example() -> None:
    ours = (EXAMPLE / "agent.py").read_text(encoding="utf-8")
    for name in ("llm.", "http.", "Context", "App("):
        ours = ours.replace(f"hf.{name}", name)
    demos = (PACKAGE / "demo_buyer.py").read_text(encoding="utf-8")
    assert demos.partition("\nMODEL = ")[2] == ours.partition("\nMODEL = ")[2] != ""


def test_the_outside_of_the_demo_is_that_of_the_example() -> None:
    demos = (PACKAGE / "demo_outside.py").read_text(encoding="utf-8")
    assert demos == (EXAMPLE / "standin.py").read_text(encoding="utf-8")


# -- the agent -----------------------------------------------------------------------------------


def test_look_ups_wanted_together_all_come_back_before_the_next_question(
    example: ModuleType, server: Server
) -> None:
    two = reply("", tool("1", '{"supplier": "ash"}'), tool("2", '{"supplier": "elm"}'))
    server.routes |= {
        CHAT: one_by_one(two, reply("elm")),
        "/quotes/ash": answer(body=b"9"),
        "/quotes/elm": answer(body=b"7"),
    }
    with asked(example, server) as agent:
        assert settled(agent).answer == "elm"
    [*_, last] = [seen for seen in server.seen if seen.path == CHAT]
    told = {one["tool_call_id"]: one["content"] for one in messages_of(last)[3:]}
    assert told == {"1": "9", "2": "7"}


def test_a_tool_call_that_makes_no_sense_is_told_to_the_model(
    example: ModuleType, server: Server
) -> None:
    bad = [
        tool("1", "{"),
        tool("2", "[]"),
        tool("3", '{"supplier": 7}'),
        tool("4", '{"supplier": "elm"}', name="drop_table"),
    ]
    server.routes[CHAT] = one_by_one(reply("", *bad), reply("nobody"))
    with asked(example, server) as agent:
        assert settled(agent).answer == "nobody"
    told = messages_of(server.seen[-1])[3:]
    assert [one["tool_call_id"] for one in told] == ["1", "2", "3", "4"]
    assert all(one["content"].startswith("failed: ") for one in told)


def test_what_a_model_names_stays_below_the_shop(example: ModuleType, server: Server) -> None:
    escape = tool("1", json.dumps({"supplier": "../../admin?all=1#"}))
    server.routes |= {
        CHAT: one_by_one(reply("", escape), reply("done")),
        "/quotes/..%2F..%2Fadmin%3Fall%3D1%23": answer(body=b"unknown"),
    }
    with asked(example, server) as agent:
        assert settled(agent).answer == "done"
    assert messages_of(server.seen[-1])[-1]["content"] == "unknown"


def test_a_hint_overtakes_the_answer_that_was_on_its_way(
    example: ModuleType, server: Server
) -> None:
    hinted = threading.Event()

    def route(handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        late = len(messages_of(seen)) == 2
        if late:
            assert hinted.wait(WAIT_S)
        answer(body=reply("without the hint" if late else "with it"))(handler, seen)

    server.routes[CHAT] = route
    with asked(example, server) as agent:
        until(lambda: server.seen, "the first question")
        agent.send(example.Hinted("Not plastic."))
        assert settled(agent).answer == "with it"
        hinted.set()
        state = agent.wait_for(lambda it: it.spent > 0.00002, timeout=WAIT_S)
    assert state.answer == "with it"
    assert state.spent == pytest.approx(2 * 15e-6), "the overtaken answer is paid for, too"


def test_an_agent_that_never_decides_stops(example: ModuleType, server: Server) -> None:
    server.routes[CHAT] = answer(body=reply("", tool("1", "{")))
    with asked(example, server) as agent:
        state = settled(agent)
    assert state.status == "stopped"
    assert len(server.seen) == example.TURNS_MAX


def test_an_agent_whose_model_refuses_stops_and_a_hint_revives_it(
    example: ModuleType, server: Server
) -> None:
    server.routes[CHAT] = answer(400, b"no such model")
    with asked(example, server) as agent:
        assert "no such model" in settled(agent).answer
        server.routes[CHAT] = answer(body=reply("elm"))
        agent.send(example.Hinted("Try again."))
        assert agent.wait_for(lambda it: it.status == "decided", timeout=WAIT_S).answer == "elm"


def test_the_stand_in_answers_a_key_once_and_counts_the_rest() -> None:
    outside = load("standin").Outside(stall=1)
    try:
        question = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        first, reached = outside.answer("k", "chat", question)
        assert not reached
        assert outside.answer("k", "chat", question) == (first, True)
        assert outside.calls["k"]["calls"] == 2
    finally:
        outside.server_close()
