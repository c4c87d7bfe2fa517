"""Chats within budgets: set aside when they are claimed, settled with their receipt, never overspent."""

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
from holdfast.app.shipped.llm import Chat
from holdfast.effects.budget import MONEY, TOKENS, Account
from holdfast.errors import Invalid
from holdfast.store.api import Store
from tests.adapters.rig import Seen, Server, answer, serving
from tests.adapters.test_llm import HELLO, PATH, SECRET, completion

MODULES = ("holdfast.app.shipped.llm", "holdfast.roles.admission", "holdfast.effects.budget")

WAIT_S = 30.0
MAX_TOKENS = 100


class Say(hf.Event):
    model: str = "m"
    times: int = 1
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    messages: list[dict[str, Any]] = msgspec.field(default_factory=lambda: list(HELLO))


class Talk:
    """An app whose agents chat at a server, and the store it runs on."""

    def __init__(self, server: Server, store: Store, chat: Chat) -> None:
        self.store = store
        self.chat = chat

        class Agent(hf.World):
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

        self.app = hf.App("agents", worlds=[Agent])
        self.agent = Agent
        self.runtime: Any = None

    def say(self, name: str = "ada", **said: Any) -> list[str]:
        """Have an agent say something; what it was told, all in all, once it was answered."""
        world = self.runtime.world(self.agent, name)
        world.create()
        told = len(world.state().told) + said.get("times", 1)
        world.send(Say(**said))
        deadline = time.monotonic() + WAIT_S
        while len(world.state().told) < told:
            assert time.monotonic() < deadline, f"told {world.state().told}"
            time.sleep(0.005)
        answers: list[str] = world.state().told
        return answers

    def spent(self, unit: str, name: str = "") -> Account:
        world = self.runtime.world(self.agent, name) if name else ""
        return hf.llm.account(self.store, universe="agents", unit=unit, world=world)

    def limit(self, **limits: Any) -> None:
        hf.llm.set_limit(self.store, universe="agents", **limits)

    def most(self) -> dict[str, int]:
        call = self.chat.call((HELLO, "m", {"max_tokens": MAX_TOKENS}), {})
        prices = codec.pack(self.chat.endpoint.prices)
        charges = self.store.read(llm.most.fn, call.params, prices)
        return {charge.unit: charge.amount for charge in charges}


@contextmanager
def talking(server: Server, **options: Any) -> Iterator[Talk]:
    prices = {"m": hf.llm.Price(input=1.0, output=10.0)}
    endpoint = hf.llm.Endpoint(server.url("/v1"), SECRET, prices)
    chat = hf.llm.declare(endpoint=endpoint, **{"attempts": 1, **options})
    with stores.open("memory:") as store:
        talk = Talk(server, store, chat)
        with talk.app.open(store) as runtime:
            talk.runtime = runtime
            yield talk


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.routes[PATH] = answer(200, completion(usage=(7, 3)))
        yield server


@pytest.fixture
def talk(server: Server) -> Iterator[Talk]:
    with talking(server) as talk:
        yield talk


def test_a_chat_is_booked_in_its_world_and_its_universe(talk: Talk) -> None:
    assert talk.say() == ["ok"]
    assert talk.spent(TOKENS) == talk.spent(TOKENS, "ada") == Account(10, 0, None)
    assert talk.spent(MONEY) == talk.spent(MONEY, "ada") == Account(37, 0, None)


def test_the_world_sees_what_it_spent(talk: Talk) -> None:
    talk.say(times=2)
    cost = talk.runtime.world(talk.agent, "ada").state().cost
    assert cost == pytest.approx(2 * 37e-6)


def test_the_most_is_set_aside_while_the_call_is_made(server: Server, talk: Talk) -> None:
    during: list[Account] = []

    def look(handler: Any, seen: Seen) -> None:
        during.append(talk.spent(TOKENS))
        answer(200, completion(usage=(7, 3)))(handler, seen)

    server.routes[PATH] = look
    talk.say()
    assert during == [Account(0, talk.most()[TOKENS], None)]
    assert talk.spent(TOKENS) == Account(10, 0, None)


def test_over_budget_nothing_is_asked(server: Server, talk: Talk) -> None:
    talk.limit(tokens=50)
    assert talk.say() == ["over_budget"]
    assert server.seen == []
    assert talk.spent(TOKENS) == Account(0, 0, 50)


def test_a_budget_in_money_of_each_world_holds(server: Server, talk: Talk) -> None:
    server.routes[PATH] = answer(200, completion(usage=(100, 90)))
    talk.limit(each_world=True, money=0.0015)
    assert talk.say("ada") == ["ok"]
    assert talk.say("ada") == ["ok", "over_budget"]
    assert talk.say("bob") == ["ok"]
    assert len(server.seen) == 2


def test_the_budget_of_one_world_binds_no_other(server: Server, talk: Talk) -> None:
    ada = talk.runtime.world(talk.agent, "ada")
    ada.create()
    talk.limit(world=ada, tokens=1)
    assert (talk.say("ada"), talk.say("bob")) == (["over_budget"], ["ok"])


@pytest.mark.parametrize("status", [400, 401, 429, 503])
def test_what_was_not_answered_costs_nothing(server: Server, talk: Talk, status: int) -> None:
    server.routes[PATH] = answer(status)
    talk.say()
    assert talk.spent(TOKENS) == talk.spent(TOKENS, "ada") == Account(0, 0, None)


@pytest.mark.parametrize("body", [b"junk", completion(usage=None)])
def test_an_answer_whose_bill_is_not_known_is_booked_at_its_most(
    server: Server, talk: Talk, body: bytes
) -> None:
    server.routes[PATH] = answer(200, body)
    talk.say()
    assert talk.spent(TOKENS) == Account(talk.most()[TOKENS], 0, None)


def test_a_call_that_broke_off_is_booked_at_its_most_and_the_next_as_it_is(
    server: Server,
) -> None:
    def second_time(handler: Any, seen: Seen) -> None:
        if len(server.seen) == 1:
            server.over.wait(30)
        else:
            answer(200, completion(usage=(7, 3)))(handler, seen)

    server.routes[PATH] = second_time
    with talking(server, attempts=2) as talk:
        # So long that the second one is answered within it, on a busy machine too.
        assert talk.say(options={"timeout_s": 1.0}) == ["ok"]
        assert talk.spent(TOKENS) == Account(talk.most()[TOKENS] + 10, 0, None)


def test_chats_at_the_same_time_cannot_overspend(server: Server, talk: Talk) -> None:
    most = talk.most()[TOKENS]
    talk.limit(tokens=3 * most)
    together = threading.Barrier(3)

    def all_at_once(handler: Any, seen: Seen) -> None:
        together.wait(20)
        answer(200, completion(usage=(most - MAX_TOKENS, MAX_TOKENS)))(handler, seen)

    server.routes[PATH] = all_at_once
    told = talk.say(times=10)
    assert (told.count("ok"), told.count("over_budget")) == (3, 7)
    assert len(server.seen) == 3
    assert talk.spent(TOKENS) == Account(3 * most, 0, 3 * most)


def test_what_others_have_set_aside_is_waited_for(server: Server, talk: Talk) -> None:
    talk.limit(tokens=2 * talk.most()[TOKENS])
    assert talk.say(times=6) == ["ok"] * 6
    assert talk.spent(TOKENS).spent == 60


def test_where_money_is_limited_a_model_without_a_price_is_not_asked(
    server: Server, talk: Talk
) -> None:
    talk.limit(money=1.0)
    assert talk.say(model="unknown") == ["not_configured"]
    assert server.seen == []
    talk.limit(money=None)
    assert talk.say(model="unknown") == ["not_configured", "ok"]


def test_an_image_without_a_bound_is_not_asked(server: Server, talk: Talk) -> None:
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    assert talk.say(messages=image) == ["invalid"]
    assert server.seen == []
    assert talk.say(messages=image, options={"input_tokens_max": 50}) == ["invalid", "ok"]


# Parameters of some endpoint that make more answers, longer ones, or more of their input.
UNKNOWN = [
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
@pytest.mark.parametrize("options", UNKNOWN)
def test_under_a_limit_a_parameter_of_unknown_cost_is_not_asked(
    server: Server, talk: Talk, options: dict[str, Any], limit: dict[str, Any]
) -> None:
    server.routes[PATH] = answer(200, completion(usage=(160, 320_000)))
    talk.limit(**limit)
    assert talk.say(options=options) == ["invalid"]
    assert server.seen == []
    assert talk.spent(TOKENS).spent == talk.spent(TOKENS).reserved == 0


def test_under_a_limit_a_message_that_points_at_more_than_text_is_not_asked(
    server: Server, talk: Talk
) -> None:
    talk.limit(tokens=20_000)
    part = {"type": "text", "text": "x", "image_url": {"url": "y"}}
    for message in (
        {"role": "assistant", "audio": {"id": "a"}},
        {"role": "user", "content": [part]},
        {"role": "user", "content": {"file": "f"}},
    ):
        assert talk.say(messages=[message])[-1] == "invalid"
    assert server.seen == []


@pytest.mark.parametrize("options", UNKNOWN)
def test_without_a_limit_any_parameter_is_asked_and_booked(
    server: Server, talk: Talk, options: dict[str, Any]
) -> None:
    assert talk.say(options=options) == ["ok"]
    assert talk.spent(TOKENS) == Account(10, 0, None)


def test_a_stated_bound_is_set_aside_for_a_parameter_of_unknown_cost(
    server: Server, talk: Talk
) -> None:
    during: list[int] = []

    def look(handler: Any, seen: Seen) -> None:
        during.append(talk.spent(TOKENS).reserved)
        answer(200, completion(usage=(160, 16_000)))(handler, seen)

    server.routes[PATH] = look
    talk.limit(tokens=20_000)
    bounds = {"input_tokens_max": 1_000, "output_tokens_max": 17_000}
    extra = {"extra": {"num_completions": 16}}
    for half in bounds:
        assert talk.say(options={**extra, half: bounds[half]})[-1] == "invalid"
    assert talk.say(options={**extra, **bounds})[-1] == "ok"
    assert during == [18_000]
    assert talk.say(options={**extra, **bounds})[-1] == "over_budget"
    assert talk.spent(TOKENS) == Account(16_160, 0, 20_000)


def test_a_stated_bound_below_max_tokens_counts_max_tokens() -> None:
    stated = hf.llm.ChatOptions(max_tokens=MAX_TOKENS, input_tokens_max=1, output_tokens_max=1)
    most = llm.bound(HELLO, stated)
    assert most.output_tokens == MAX_TOKENS
    assert most.input_tokens > len(HELLO[0]["content"])


def test_under_a_limit_parameters_of_known_cost_are_asked(server: Server, talk: Talk) -> None:
    talk.limit(tokens=20_000)
    extra = {"seed": 7, "stop": ["x"], "top_p": 0.5, "response_format": {"type": "json_object"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert talk.say(options={"extra": extra, "tools": tools}) == ["ok"]
    spoken: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    assert talk.say(messages=spoken) == ["ok", "ok"]
    assert len(server.seen) == 2


def test_a_limit_is_of_one_world_or_of_each(talk: Talk) -> None:
    with pytest.raises(Invalid):
        talk.limit(world="w", each_world=True, tokens=1)


def test_the_key_of_the_endpoint_is_in_nothing_that_is_stored(talk: Talk) -> None:
    talk.say()
    rows = talk.store.read(lambda txn: txn.scan(b"", b"\xff"))
    assert rows
    assert not any(SECRET.encode() in row for _, row in rows)
