"""The shipped effects as a user has them: wanted by worlds, done by a pool, within budgets."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.adapters.errors import (
    Answered,
    BudgetReserved,
    NotConfigured,
    OverBudget,
    Unavailable,
)
from holdfast.app.shipped.llm import Chat
from holdfast.effects.budget import MONEY, TOKENS, Account
from holdfast.errors import Invalid, Timeout
from holdfast.messages import Intent
from holdfast.store.api import Store
from holdfast.world.catalog import subject_of
from holdfast.world.cycle import entries_topic
from tests.adapters.rig import LOOPBACK, Seen, Server, answer, run, serving
from tests.adapters.test_llm import HELLO, PATH, SECRET, completion

MODULES = ("holdfast.app.shipped.http", "holdfast.app.shipped.llm", "holdfast.app.shipped.email")

request = hf.http.declare("http.request", LOOPBACK, attempts=2)


class Fetch(hf.Event):
    url: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Fetcher(hf.World):
    told: list[str] = msgspec.field(default_factory=list)

    @hf.on(Fetch)
    def fetch(self, event: Fetch, cx: hf.Context) -> None:
        cx.do(request, "POST", event.url, event.options)

    @hf.on(request)
    def fetched(self, receipt: hf.Receipt[hf.http.Response], cx: hf.Context) -> None:
        said = receipt.value.text if receipt.ok else receipt.code
        self.told = [*self.told, f"{receipt.status} {said}"]


app = hf.App("fetching", worlds=[Fetcher])


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:") as store:
        yield store


def told(runtime: hf.Runtime, url: str) -> str:
    """What a world is told of a request."""
    world = runtime.world(Fetcher, "ada")
    world.send(Fetch(url))
    return str(state_after(runtime, world, 2).told[-1])


def state_after(runtime: hf.Runtime, world: Any, height: int) -> Any:
    """The state once so much is journaled: an event, then a receipt, then the next."""
    topic = entries_topic(subject_of(runtime.universe, world.record().world_id))
    since = runtime.store.wait(topic, 0, 0.0)
    deadline = time.monotonic() + 30
    while world.height() < height:
        assert time.monotonic() < deadline, "no receipt came"
        since = runtime.store.wait(topic, since, 1.0)
    return world.state(at=height)


def test_a_world_fetches_and_is_told(server: Server) -> None:
    server.routes["/"] = answer(200, b"hello")
    with app.open("memory:") as runtime:
        assert told(runtime, server.url()) == "ok hello"
    [seen] = server.seen
    assert seen.headers["idempotency-key"]


def test_a_forbidden_address_is_one_error_and_no_retry() -> None:
    with app.open("memory:") as runtime:
        assert told(runtime, "http://169.254.169.254/") == "error forbidden_address"


def test_a_retried_request_has_the_same_key(server: Server) -> None:
    def second_time_lucky(handler: Any, seen: Seen) -> None:
        answer(503 if len(server.seen) == 1 else 200, b"at last")(handler, seen)

    server.routes["/"] = second_time_lucky
    with app.open("memory:") as runtime:
        assert told(runtime, server.url()) == "ok at last"
    first, second = server.seen
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_options_may_be_given_as_a_struct_or_as_plain_data() -> None:
    plain = request.call(("GET", "http://x.test/", {"timeout_s": 5.0}), {})
    typed = request.call(("GET", "http://x.test/", hf.http.Options(timeout_s=5.0)), {})
    assert plain.params == typed.params


@pytest.mark.parametrize(
    ("effect", "args"),
    [
        (hf.http.request, ("GET",)),
        (hf.http.request, ("GET", "http://x.test/", {"unknown": 1})),
        (hf.http.request, ("GET", 7)),
        (hf.llm.chat, ("Hello", "m")),
        (hf.llm.chat, (HELLO, "m", {"max_tokens": "many"})),
        (hf.email.send, ("a@x.org", "subject")),
        (hf.email.send, ("a@x.org", "subject", "body", {"unknown": 1})),
    ],
)
def test_arguments_that_do_not_fit_are_refused_where_they_are_wanted(
    effect: Any, args: tuple[Any, ...]
) -> None:
    with pytest.raises(Invalid):
        effect.call(args, {})


def test_the_effects_of_the_package_have_their_kinds() -> None:
    assert (hf.http.request.kind, hf.llm.chat.kind, hf.email.send.kind) == (
        "http.request", "llm.chat", "email.send",
    )  # fmt: skip
    hf.App("all", effects=[hf.http.request, hf.llm.chat, hf.email.send])


def test_importing_them_loads_no_extra() -> None:
    code = (
        "import sys, holdfast as hf; hf.http.request, hf.llm.chat, hf.email.send;"
        "sys.exit(any(name in sys.modules for name in ('httpx', 'httpcore', 'anyio')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_extra_is_named_with_its_cure() -> None:
    code = (
        "import sys, asyncio; sys.modules['httpx'] = None\n"
        "from holdfast.adapters.http import Http\n"
        "from holdfast.adapters.guard import Reach\n"
        "try: asyncio.run(Http(Reach()).request('GET', 'http://x.test/', None, key='k'))\n"
        "except Exception as error: print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not_installed" in done.stdout
    assert "pip install 'holdfast[ops]'" in done.stdout


def test_a_world_chats_within_its_budget_and_sees_what_it_spent(
    server: Server, store: Store
) -> None:
    server.routes[PATH] = answer(200, completion("Hi", usage=(7, 3)))
    chat = chatting(server, store)

    class Say(hf.Event):
        text: str

    class Agent(hf.World):
        said: str = ""
        spent: float = 0.0
        code: str = ""

        @hf.on(Say)
        def say(self, event: Say, cx: hf.Context) -> None:
            messages = [{"role": "user", "content": event.text}]
            cx.do(chat, messages, "m", hf.llm.ChatOptions(max_tokens=20))

        @hf.on(chat)
        def heard(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
            self.code = receipt.code
            if receipt.ok:
                self.said, self.spent = receipt.value.text, self.spent + receipt.cost

    with hf.App("agents", worlds=[Agent]).open(store) as runtime:
        agent = runtime.world(Agent, "ada")
        agent.send(Say("Hello"))
        first = state_after(runtime, agent, 2)
        assert (first.said, first.spent) == ("Hi", pytest.approx(37e-6))
        hf.llm.set_limit(store, universe="agents", each_world=True, tokens=30)
        agent.send(Say("Hello again"))
        second = state_after(runtime, agent, 4)
        assert (second.code, second.spent) == ("over_budget", first.spent)
        assert len(server.seen) == 1


# -- chat, within budgets ------------------------------------------------------------------------


def chatting(server: Server, store: Store | None = None) -> Chat:
    prices = {"m": hf.llm.Price(input=1.0, output=10.0)}
    chat = hf.llm.declare(endpoint=hf.llm.Endpoint(server.url("/v1"), SECRET, prices))
    chat.charge_to(store)
    return chat


def wanted(chat: Chat, n: int = 0, model: str = "m", world: str = "w", **options: Any) -> Intent:
    call = chat.call((HELLO, model, {"max_tokens": 100, **options}), {})
    return Intent("u", world, codec.digest(bytes([n])), call.kind, call.params, "ada", b"", 0)


async def perform(chat: Chat, intent: Intent) -> Any:
    return await chat.perform(intent, 1, 0)


def spent(store: Store, unit: str, world: str = "") -> Account:
    return hf.llm.account(store, universe="u", unit=unit, world=world)


def test_the_receipt_of_a_chat_says_what_it_cost(server: Server) -> None:
    server.routes[PATH] = answer(200, completion(usage=(7, 3)))
    chat = chatting(server)
    result = run(perform(chat, wanted(chat)))
    assert chat.cost_of(result) == pytest.approx(37e-6)
    assert msgspec.convert(codec.unpack(chat.dump(result)), hf.llm.Reply).text == "Hi"


def test_the_key_of_the_endpoint_is_not_in_what_is_stored(server: Server) -> None:
    chat = chatting(server)
    assert SECRET.encode() not in codec.pack(wanted(chat))


def test_a_chat_is_reserved_before_and_settled_after(server: Server, store: Store) -> None:
    chat = chatting(server, store)
    during: list[Account] = []

    def look(handler: Any, seen: Seen) -> None:
        during.append(spent(store, TOKENS))
        answer(200, completion(usage=(7, 3)))(handler, seen)

    server.routes[PATH] = look
    run(perform(chat, wanted(chat)))
    assert during[0].reserved >= 100 + len(b"Hello")
    assert spent(store, TOKENS) == spent(store, TOKENS, "w") == Account(10, 0, None)
    assert spent(store, MONEY) == spent(store, MONEY, "w") == Account(37, 0, None)


def test_over_budget_nothing_is_asked(server: Server, store: Store) -> None:
    chat = chatting(server, store)
    hf.llm.set_limit(store, universe="u", tokens=50)
    with pytest.raises(OverBudget):
        run(perform(chat, wanted(chat)))
    assert server.seen == []
    assert spent(store, TOKENS) == Account(0, 0, 50)


def test_a_budget_in_money_of_each_world_holds(server: Server, store: Store) -> None:
    server.routes[PATH] = answer(200, completion(usage=(100, 90)))
    chat = chatting(server, store)
    hf.llm.set_limit(store, universe="u", each_world=True, money=0.0015)
    run(perform(chat, wanted(chat, 1)))
    with pytest.raises(OverBudget) as caught:
        run(perform(chat, wanted(chat, 2)))
    assert (caught.value.scope, caught.value.unit) == ("w", MONEY)
    run(perform(chat, wanted(chat, 3, world="another")))


def test_what_was_refused_gives_its_reservation_back(server: Server, store: Store) -> None:
    chat = chatting(server, store)
    for status in (400, 429):
        server.routes[PATH] = answer(status)
        with pytest.raises((Unavailable, Answered)):
            run(perform(chat, wanted(chat)))
        assert spent(store, TOKENS) == Account(0, 0, None)


def test_a_call_of_unknown_outcome_keeps_its_reservation_for_the_next_attempt(
    server: Server, store: Store
) -> None:
    def hang(handler: Any, seen: Seen) -> None:
        server.over.wait(30)

    chat = chatting(server, store)
    intent = wanted(chat, timeout_s=0.2)
    server.routes[PATH] = hang
    with pytest.raises(Timeout):
        run(perform(chat, intent))
    held = spent(store, TOKENS).reserved
    assert held > 0
    server.routes[PATH] = answer(200, completion(usage=(7, 3)))
    run(perform(chat, intent))
    assert spent(store, TOKENS) == Account(10, 0, None)


def test_chats_at_the_same_time_cannot_overspend(server: Server, store: Store) -> None:
    chat = chatting(server, store)
    most = {charge.unit: charge.amount for charge in chat.most(wanted(chat).params)}
    hf.llm.set_limit(store, universe="u", tokens=3 * most[TOKENS])
    together = threading.Barrier(3)

    def all_at_once(handler: Any, seen: Seen) -> None:
        together.wait(10)
        answer(200, completion(usage=(most[TOKENS] - 100, 100)))(handler, seen)

    server.routes[PATH] = all_at_once

    async def all_of_them() -> list[Any]:
        import asyncio

        calls = [perform(chat, wanted(chat, n)) for n in range(10)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run(all_of_them())
    done = [result for result in results if isinstance(result, hf.Costed)]
    refused = [result for result in results if isinstance(result, BudgetReserved | OverBudget)]
    assert (len(done), len(refused), len(server.seen)) == (3, 7, 3)
    account = spent(store, TOKENS)
    assert (account.spent, account.reserved) == (3 * most[TOKENS], 0)


def test_a_model_without_a_price_is_not_asked_within_a_budget(server: Server, store: Store) -> None:
    chat = chatting(server, store)
    with pytest.raises(NotConfigured):
        run(perform(chat, wanted(chat, model="unknown")))
    assert server.seen == []


def test_an_image_without_a_bound_is_not_asked_within_a_budget(
    server: Server, store: Store
) -> None:
    chat = chatting(server, store)
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    call = chat.call((image, "m"), {})
    intent = Intent("u", "w", codec.digest(b"i"), call.kind, call.params, "ada", b"", 0)
    with pytest.raises(Invalid):
        run(perform(chat, intent))
    assert server.seen == []
