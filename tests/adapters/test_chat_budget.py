"""Budgets of `llm.chat`: the cost bound is reserved at the claim, settled with the receipt, and
never overspent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.adapters import llm
from holdfast.app.builtin_effects.llm import Chat
from holdfast.effects.budget import MONEY, TOKENS, BudgetAccount
from holdfast.errors import Invalid
from holdfast.store.api import Store
from tests.adapters.rig import FakeHttpServer, ReceivedRequest, respond_with, run_http_server
from tests.adapters.test_llm import HELLO, PATH, SECRET, completion

MODULES = (
    "holdfast.app.builtin_effects.llm",
    "holdfast.workers.effects.admission",
    "holdfast.effects.budget",
)

WAIT_S = 30.0
MAX_TOKENS = 100


class Say(hf.Event):
    model: str = "m"
    times: int = 1
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    messages: list[dict[str, Any]] = msgspec.field(default_factory=lambda: list(HELLO))


class ChatRig:
    """An app with agents that call `llm.chat` on a server, and its store."""

    def __init__(self, server: FakeHttpServer, store: Store, chat: Chat) -> None:
        self.store = store
        self.chat = chat

        class BudgetedChat(hf.World):
            told: list[str] = msgspec.field(default_factory=list)
            cost: float = 0.0

            @hf.on(Say)
            def say(self, event: Say, cx: hf.Context) -> None:
                options = {"max_tokens": MAX_TOKENS, **event.options}
                for _ in range(event.times):
                    cx.do(chat, event.messages, event.model, options)

            @hf.on(chat)
            def heard(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
                self.told.append(receipt.code or receipt.status)
                self.cost += receipt.cost

        self.app = hf.App("agents", worlds=[BudgetedChat])
        self.agent = BudgetedChat
        self.runtime: Any = None

    def send_chats(self, name: str = "ada", **event_fields: Any) -> list[str]:
        """Send a `Say` event to an agent and wait for its receipts. Return the outcomes of all
        receipts of the agent."""
        world = self.runtime.world(self.agent, name)
        world.create()
        expected_count = len(world.state().told) + event_fields.get("times", 1)
        world.send(Say(**event_fields))
        deadline = time.monotonic() + WAIT_S
        while len(world.state().told) < expected_count:
            assert time.monotonic() < deadline, f"told {world.state().told}"
            time.sleep(0.005)
        answers: list[str] = world.state().told
        return answers

    def account(self, unit: str, name: str = "") -> BudgetAccount:
        world = self.runtime.world(self.agent, name) if name else ""
        return hf.llm.account(self.store, universe="agents", unit=unit, world=world)

    def set_limit(self, **limits: Any) -> None:
        hf.llm.set_limit(self.store, universe="agents", **limits)

    def cost_bound(self) -> dict[str, int]:
        call = self.chat.call((HELLO, "m", {"max_tokens": MAX_TOKENS}), {})
        prices = codec.pack(self.chat.endpoint.prices)
        charges = self.store.read(llm.cost_bound.fn, call.params, prices)
        return {charge.unit: charge.amount for charge in charges}


@contextmanager
def run_chat_app(server: FakeHttpServer, **options: Any) -> Iterator[ChatRig]:
    prices = {"m": hf.llm.Price(input=1.0, output=10.0)}
    endpoint = hf.llm.Endpoint(server.url("/v1"), SECRET, prices)
    chat = hf.llm.declare(endpoint=endpoint, **{"attempts": 1, **options})
    with stores.open("memory:") as store:
        chat_rig = ChatRig(server, store, chat)
        with chat_rig.app.open(store) as runtime:
            chat_rig.runtime = runtime
            yield chat_rig


@pytest.fixture
def server() -> Iterator[FakeHttpServer]:
    with run_http_server() as server:
        server.routes[PATH] = respond_with(200, completion(usage=(7, 3)))
        yield server


@pytest.fixture
def chat_rig(server: FakeHttpServer) -> Iterator[ChatRig]:
    with run_chat_app(server) as chat_rig:
        yield chat_rig


def test_chat_cost_is_booked_for_its_world_and_universe(chat_rig: ChatRig) -> None:
    assert chat_rig.send_chats() == ["ok"]
    assert chat_rig.account(TOKENS) == chat_rig.account(TOKENS, "ada") == BudgetAccount(10, 0, None)
    assert chat_rig.account(MONEY) == chat_rig.account(MONEY, "ada") == BudgetAccount(37, 0, None)


def test_chat_receipt_carries_its_cost(chat_rig: ChatRig) -> None:
    chat_rig.send_chats(times=2)
    cost = chat_rig.runtime.world(chat_rig.agent, "ada").state().cost
    assert cost == pytest.approx(2 * 37e-6)


def test_chat_cost_bound_is_reserved_during_the_call(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    during: list[BudgetAccount] = []

    def look(handler: Any, seen: ReceivedRequest) -> None:
        during.append(chat_rig.account(TOKENS))
        respond_with(200, completion(usage=(7, 3)))(handler, seen)

    server.routes[PATH] = look
    chat_rig.send_chats()
    assert during == [BudgetAccount(0, chat_rig.cost_bound()[TOKENS], None)]
    assert chat_rig.account(TOKENS) == BudgetAccount(10, 0, None)


def test_chat_over_budget_sends_no_request(server: FakeHttpServer, chat_rig: ChatRig) -> None:
    chat_rig.set_limit(tokens=50)
    assert chat_rig.send_chats() == ["over_budget"]
    assert server.requests == []
    assert chat_rig.account(TOKENS) == BudgetAccount(0, 0, 50)


def test_money_limit_of_each_world_is_enforced(server: FakeHttpServer, chat_rig: ChatRig) -> None:
    server.routes[PATH] = respond_with(200, completion(usage=(100, 90)))
    chat_rig.set_limit(each_world=True, money=0.0015)
    assert chat_rig.send_chats("ada") == ["ok"]
    assert chat_rig.send_chats("ada") == ["ok", "over_budget"]
    assert chat_rig.send_chats("bob") == ["ok"]
    assert len(server.requests) == 2


def test_token_limit_of_one_world_does_not_bind_others(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    ada = chat_rig.runtime.world(chat_rig.agent, "ada")
    ada.create()
    chat_rig.set_limit(world=ada, tokens=1)
    assert (chat_rig.send_chats("ada"), chat_rig.send_chats("bob")) == (["over_budget"], ["ok"])


@pytest.mark.parametrize("status", [400, 401, 429, 503])
def test_chat_with_an_error_status_costs_nothing(
    server: FakeHttpServer, chat_rig: ChatRig, status: int
) -> None:
    server.routes[PATH] = respond_with(status)
    chat_rig.send_chats()
    assert chat_rig.account(TOKENS) == chat_rig.account(TOKENS, "ada") == BudgetAccount(0, 0, None)


@pytest.mark.parametrize("body", [b"junk", completion(usage=None)])
def test_chat_without_known_usage_is_booked_at_its_bound(
    server: FakeHttpServer, chat_rig: ChatRig, body: bytes
) -> None:
    server.routes[PATH] = respond_with(200, body)
    chat_rig.send_chats()
    assert chat_rig.account(TOKENS) == BudgetAccount(chat_rig.cost_bound()[TOKENS], 0, None)


def test_timed_out_chat_attempt_is_booked_at_its_bound(
    server: FakeHttpServer,
) -> None:
    def second_time(handler: Any, seen: ReceivedRequest) -> None:
        if len(server.requests) == 1:
            server.stopped.wait(30)
        else:
            respond_with(200, completion(usage=(7, 3)))(handler, seen)

    server.routes[PATH] = second_time
    with run_chat_app(server, attempts=2) as chat_rig:
        # Long enough for the second attempt, even on a busy machine.
        assert chat_rig.send_chats(options={"timeout_s": 1.0}) == ["ok"]
        assert chat_rig.account(TOKENS) == BudgetAccount(
            chat_rig.cost_bound()[TOKENS] + 10, 0, None
        )


def test_concurrent_chats_cannot_overspend_the_budget(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    most = chat_rig.cost_bound()[TOKENS]
    chat_rig.set_limit(tokens=3 * most)
    together = threading.Barrier(3)

    def all_at_once(handler: Any, seen: ReceivedRequest) -> None:
        together.wait(20)
        respond_with(200, completion(usage=(most - MAX_TOKENS, MAX_TOKENS)))(handler, seen)

    server.routes[PATH] = all_at_once
    outcomes = chat_rig.send_chats(times=10)
    assert (outcomes.count("ok"), outcomes.count("over_budget")) == (3, 7)
    assert len(server.requests) == 3
    assert chat_rig.account(TOKENS) == BudgetAccount(3 * most, 0, 3 * most)


def test_chat_waits_for_budget_reserved_by_others(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    chat_rig.set_limit(tokens=2 * chat_rig.cost_bound()[TOKENS])
    assert chat_rig.send_chats(times=6) == ["ok"] * 6
    assert chat_rig.account(TOKENS).spent == 60


def test_chat_without_a_price_is_refused_under_a_money_limit(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    chat_rig.set_limit(money=1.0)
    assert chat_rig.send_chats(model="unknown") == ["not_configured"]
    assert server.requests == []
    chat_rig.set_limit(money=None)
    assert chat_rig.send_chats(model="unknown") == ["not_configured", "ok"]


def test_chat_with_an_image_needs_input_tokens_max(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    assert chat_rig.send_chats(messages=image) == ["invalid"]
    assert server.requests == []
    assert chat_rig.send_chats(messages=image, options={"input_tokens_max": 50}) == [
        "invalid",
        "ok",
    ]


# Endpoint parameters that increase the number or length of answers, or the input.
UNKNOWN_COST = [
    {"extra": {"num_completions": 16}},
    {"extra": {"candidate_count": 16, "seed": 7}},
    {"extra": {"max_output_tokens": 320_000}},
    {"extra": {"max_new_tokens": 320_000}},
    {"extra": {"extra_body": {"n": 16}}},
    {"extra": {"N": 16}},
    {"extra": {"reasoning_effort": "high"}},
    {"extra": {"web_search_options": {}}},
    {"extra": {"plugins": [{"id": "web"}]}},
    {"extra": {"models": ["m", "dear"]}},
    {"extra": {"previous_response_id": "r"}},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"google_search": {}}]},
]
LIMITS = [{"tokens": 20_000}, {"money": 0.02}, {"each_world": True, "tokens": 20_000}]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("options", UNKNOWN_COST)
def test_chat_parameter_of_unknown_cost_is_refused_under_a_limit(
    server: FakeHttpServer, chat_rig: ChatRig, options: dict[str, Any], limit: dict[str, Any]
) -> None:
    server.routes[PATH] = respond_with(200, completion(usage=(160, 320_000)))
    chat_rig.set_limit(**limit)
    assert chat_rig.send_chats(options=options) == ["invalid"]
    assert server.requests == []
    assert chat_rig.account(TOKENS).spent == chat_rig.account(TOKENS).reserved == 0


def test_chat_message_part_of_unknown_cost_is_refused_under_a_limit(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    chat_rig.set_limit(tokens=20_000)
    part = {"type": "text", "text": "x", "image_url": {"url": "y"}}
    for message in (
        {"role": "assistant", "audio": {"id": "a"}},
        {"role": "user", "content": [part]},
        {"role": "user", "content": {"file": "f"}},
    ):
        assert chat_rig.send_chats(messages=[message])[-1] == "invalid"
    assert server.requests == []


@pytest.mark.parametrize("options", UNKNOWN_COST)
def test_chat_parameter_of_unknown_cost_is_booked_without_a_limit(
    server: FakeHttpServer, chat_rig: ChatRig, options: dict[str, Any]
) -> None:
    assert chat_rig.send_chats(options=options) == ["ok"]
    assert chat_rig.account(TOKENS) == BudgetAccount(10, 0, None)


def test_stated_bound_is_reserved_for_a_parameter_of_unknown_cost(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    during: list[int] = []

    def look(handler: Any, seen: ReceivedRequest) -> None:
        during.append(chat_rig.account(TOKENS).reserved)
        respond_with(200, completion(usage=(160, 16_000)))(handler, seen)

    server.routes[PATH] = look
    chat_rig.set_limit(tokens=20_000)
    bounds = {"input_tokens_max": 1_000, "output_tokens_max": 17_000}
    extra = {"extra": {"num_completions": 16}}
    for half in bounds:
        assert chat_rig.send_chats(options={**extra, half: bounds[half]})[-1] == "invalid"
    assert chat_rig.send_chats(options={**extra, **bounds})[-1] == "ok"
    assert during == [18_000]
    assert chat_rig.send_chats(options={**extra, **bounds})[-1] == "over_budget"
    assert chat_rig.account(TOKENS) == BudgetAccount(16_160, 0, 20_000)


def test_stated_bound_below_max_tokens_is_raised_to_max_tokens() -> None:
    stated = hf.llm.ChatOptions(max_tokens=MAX_TOKENS, input_tokens_max=1, output_tokens_max=1)
    most = llm.usage_bound(HELLO, stated)
    assert most.output_tokens == MAX_TOKENS
    assert most.input_tokens > len(HELLO[0]["content"])


def test_chat_parameters_of_known_cost_are_allowed_under_a_limit(
    server: FakeHttpServer, chat_rig: ChatRig
) -> None:
    chat_rig.set_limit(tokens=20_000)
    extra = {"seed": 7, "stop": ["x"], "top_p": 0.5, "response_format": {"type": "json_object"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_rig.send_chats(options={"extra": extra, "tools": tools}) == ["ok"]
    spoken: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    assert chat_rig.send_chats(messages=spoken) == ["ok", "ok"]
    assert len(server.requests) == 2


def test_set_limit_refuses_one_world_together_with_each_world(chat_rig: ChatRig) -> None:
    with pytest.raises(Invalid):
        chat_rig.set_limit(world="w", each_world=True, tokens=1)


def test_llm_api_key_is_not_stored(chat_rig: ChatRig) -> None:
    chat_rig.send_chats()
    rows = chat_rig.store.read(lambda txn: txn.scan(b"", b"\xff"))
    assert rows
    assert not any(SECRET.encode() in row for _, row in rows)


def test_limit_of_one_flow_binds_its_chats(server: FakeHttpServer) -> None:
    endpoint = hf.llm.Endpoint(server.url("/v1"), SECRET, {"m": hf.llm.Price(1.0, 10.0)})
    chat = hf.llm.declare(endpoint=endpoint, attempts=1)

    class StartChat(hf.Event):
        pass

    @hf.flow
    async def talk() -> str:
        await hf.receive(StartChat)
        return (await hf.step(chat, HELLO, "m", {"max_tokens": MAX_TOKENS})).text

    app = hf.App("agents", flows=[talk], effects=[chat], events=[StartChat])
    with stores.open("memory:") as store, app.open(store) as runtime:
        limited, free = runtime.start(talk), runtime.start(talk)
        hf.llm.set_limit(store, universe="agents", flow=limited, tokens=50)
        for flow in (limited, free):
            flow.send(StartChat())
        free.result(timeout=WAIT_S)
        with pytest.raises(hf.FlowFailed) as failure:
            limited.result(timeout=WAIT_S)
        assert (failure.value.step, failure.value.error_type) == ("llm.chat", "over_budget")
        accounts = [
            hf.llm.account(store, universe="agents", unit=TOKENS, flow=flow)
            for flow in (limited, free)
        ]
    assert accounts == [BudgetAccount(0, 0, 50), BudgetAccount(10, 0, None)]
    assert len(server.requests) == 1
