"""`hf.llm.chat`: ask a model, from inside a world, within a budget.

    cx.do(hf.llm.chat, [{"role": "user", "content": "Hello"}], "small-model", {"max_tokens": 200})

    @hf.on(hf.llm.chat)
    def answered(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
        self.spent += receipt.cost

The endpoint, its key and its prices are the operator's: `HOLDFAST_LLM_BASE_URL`, `_API_KEY`,
`_PRICES`, or an `Endpoint` in `declare`.

Budgets hold where the effect was given the store that keeps them:

    chat.charge_to(store)
    hf.llm.set_limit(store, universe="bank", tokens=1_000_000)
    hf.llm.set_limit(store, universe="bank", money=0.50, each_world=True)

Then the most that a call can cost is set aside before it, in its world's account and the universe's,
and replaced by what it did cost. Of a call that broke off nobody knows the bill: its reservation
stands until a repeated attempt settles it, or `budget.lapse` books it in full.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from holdfast import codec
from holdfast.adapters import llm
from holdfast.adapters.errors import (
    Answered,
    BudgetReserved,
    NotConfigured,
    NotInstalled,
    OverBudget,
    Unavailable,
)
from holdfast.adapters.llm import MICRO, ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.app.declare import Call, Costed, Effect
from holdfast.effects import budget
from holdfast.effects.budget import EACH, MONEY, TOKENS, UNIVERSE, Account, Charge
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.store.api import Store

__all__ = [
    "Account", "Chat", "ChatOptions", "Endpoint", "Price", "Reply", "Usage", "account", "chat",
    "declare", "set_limit",
]  # fmt: skip

KIND = "llm.chat"

# After these nothing was answered, so nothing is billed.
_UNBILLED = (Answered, Invalid, NotConfigured, NotInstalled, Unavailable)


class Chat(Effect[[list[dict[str, Any]], str, Any], Reply]):
    """The effect, with an endpoint and perhaps a store that keeps its budgets."""

    def __init__(self, kind: str, endpoint: Endpoint | None, **options: Any) -> None:
        self._endpoint = endpoint
        self._budgets: Store | None = None
        super().__init__(kind, self._chat, **options)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.from_env(os.environ) if self._endpoint is None else self._endpoint

    def charge_to(self, store: Store | None) -> None:
        """Hold calls to the budgets in this store; None: to none."""
        self._budgets = store

    def perform(self, intent: Intent, attempt: int, deadline_ns: int) -> Any:
        result = super().perform(intent, attempt, deadline_ns)
        if self._budgets is None:
            return result
        return self._charged(self._budgets, intent, result)

    def most(self, params: bytes) -> list[Charge]:
        """What a call with these parameters can cost at most."""
        messages, model, *rest = codec.unpack(params)
        llm.check_messages(messages)
        options = llm.options_of(rest[0] if rest else None)
        llm.check_bounded(messages, options)
        return self._charges(model, llm.bound(messages, options))

    async def _chat(
        self,
        call: Call,
        messages: list[dict[str, Any]],
        model: str,
        options: ChatOptions | None = None,
    ) -> Costed[Reply]:
        endpoint = self.endpoint
        reply = await llm.chat(endpoint, messages, model, options, key=call.idempotency_key)
        price = endpoint.price(model)
        return Costed(reply, 0.0 if price is None else price.micros(reply.usage) / MICRO)

    async def _charged(self, store: Store, intent: Intent, calling: Any) -> Any:
        universe, key = intent.universe_id, intent.intent_hash.hex()
        try:
            model = codec.unpack(intent.params)[1]
            most = self.most(intent.params)
            answer = await store.submit(budget.reserve, universe, intent.world_id, key, most)
            if not answer.granted:
                raise _refusal(answer)
        except BaseException:
            if inspect.iscoroutine(calling):
                calling.close()
            raise
        nothing = [Charge(charge.unit, 0) for charge in most]
        try:
            result = await calling
        except _UNBILLED:
            await store.submit(budget.settle, universe, key, answer.number, nothing)
            raise
        spent = self._charges(model, result.value.usage)
        await store.submit(budget.settle, universe, key, answer.number, spent)
        return result

    def _charges(self, model: str, usage: Usage) -> list[Charge]:
        price = self.endpoint.price(model)
        if price is None:
            raise NotConfigured(what="price", model=model, why="a budget needs it; it may be 0")
        return [Charge(MONEY, price.micros(usage)), Charge(TOKENS, usage.tokens)]


def declare(kind: str = KIND, endpoint: Endpoint | None = None, **options: Any) -> Chat:
    """The effect at this endpoint; without one, the environment's. Options as in `@hf.effect`."""
    return Chat(kind, endpoint, **{"timeout_s": 180.0, **options})


def set_limit(
    store: Store,
    *,
    universe: str,
    world: str = UNIVERSE,
    each_world: bool = False,
    money: float | None = None,
    tokens: int | None = None,
) -> None:
    """Limit a universe, one world (by id), or each world; None lifts that limit."""
    if each_world and world:
        raise Invalid(what="limit", why="of one world, or of each")
    scope = EACH if each_world else world
    micros = None if money is None else round(money * MICRO)
    store.transact(budget.limit, universe, scope, MONEY, micros)
    store.transact(budget.limit, universe, scope, TOKENS, tokens)


def account(store: Store, *, universe: str, unit: str, world: str = UNIVERSE) -> Account:
    """How a budget stands: spent, reserved, limit; money in millionths."""
    return store.read(budget.account, universe, world, unit)


def _refusal(answer: budget.Answer) -> OverBudget | BudgetReserved:
    told = {
        "scope": answer.scope or "universe",
        "unit": answer.unit,
        "spent": answer.account.spent,
        "reserved": answer.account.reserved,
        "limit": answer.account.limit,
    }
    return BudgetReserved(**told) if answer.later else OverBudget(**told)


chat = declare()
