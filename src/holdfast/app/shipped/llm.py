"""`hf.llm.chat`: ask a model, from inside a world, within a budget.

    cx.do(hf.llm.chat, [{"role": "user", "content": "Hello"}], "small-model", {"max_tokens": 200})

    @hf.on(hf.llm.chat)
    def answered(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
        self.spent += receipt.cost

The endpoint, its key and its prices are the operator's: `HOLDFAST_LLM_BASE_URL`, `_API_KEY`,
`_PRICES`, or an `Endpoint` in `declare`.

Budgets are kept in the store of whoever wants the effect:

    hf.llm.set_limit(store, universe="bank", tokens=1_000_000)
    hf.llm.set_limit(store, universe="bank", money=0.50, each_world=True)

The most that a call can cost is set aside in the commit of its claim, in its world's account and the
universe's, and replaced by what it did cost in the commit of its receipt. So calls that run at the
same time cannot overspend. A call that does not fit waits for what others have set aside, or, if that
could not help, ends with the receipt `over_budget`. A call that broke off is booked at its most.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from holdfast import codec
from holdfast.adapters import llm
from holdfast.adapters.errors import (
    Answered,
    NotConfigured,
    NotInstalled,
    Unavailable,
)
from holdfast.adapters.llm import MICRO, ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.app.declare import Call, Costed, Effect
from holdfast.effects import budget
from holdfast.effects.budget import EACH, MONEY, TOKENS, UNIVERSE, Account, Charge
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.roles.doing import Billing
from holdfast.store.api import Store

if TYPE_CHECKING:
    from holdfast.app.handle import WorldHandle

__all__ = [
    "Account", "Chat", "ChatOptions", "Endpoint", "Price", "Reply", "Usage", "account", "chat",
    "declare", "set_limit",
]  # fmt: skip

KIND = "llm.chat"

# After these the model was never asked, so nothing is billed ...
_UNBILLED = (Answered, Invalid, NotConfigured, NotInstalled)
# ... nor after these answers: not reached, too many requests, no capacity.
_UNBILLED_STATUS = (None, 429, 503)


class Chat(Effect[[list[dict[str, Any]], str, Any], Reply]):
    """The effect, with its endpoint."""

    def __init__(self, kind: str, endpoint: Endpoint | None, **options: Any) -> None:
        self._endpoint = endpoint
        super().__init__(kind, self._chat, **options)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.from_env(os.environ) if self._endpoint is None else self._endpoint

    def billing(self) -> Billing | None:
        """Its calls are charged to budgets, at the endpoint's prices."""
        try:
            prices = self.endpoint.prices
        except NotConfigured:
            prices = {}  # the call will say what is missing
        return Billing(llm.most.name, codec.pack(prices))

    def bill(self, intent: Intent, result: Any) -> list[Charge]:
        model = codec.unpack(intent.params)[1]
        return llm.charges(self.endpoint.price(model), result.value.usage)

    def unbilled(self, error: Exception) -> bool:
        if isinstance(error, Unavailable):
            return error.fields.get("status") in _UNBILLED_STATUS
        return isinstance(error, _UNBILLED)

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


def declare(kind: str = KIND, endpoint: Endpoint | None = None, **options: Any) -> Chat:
    """The effect at this endpoint; without one, the environment's. Options as in `@hf.effect`."""
    return Chat(kind, endpoint, **{"timeout_s": 180.0, **options})


def set_limit(
    store: Store,
    *,
    universe: str,
    world: str | WorldHandle[Any] = UNIVERSE,
    each_world: bool = False,
    money: float | UnsetType | None = UNSET,
    tokens: int | UnsetType | None = UNSET,
) -> None:
    """Limit a universe, one world (a handle, or an id), or each world.

    None lifts a limit; one that is not named stays as it is.
    """
    if each_world and world:
        raise Invalid(what="limit", why="of one world, or of each")
    scope = EACH if each_world else world if isinstance(world, str) else world.create()
    if money is not UNSET:
        micros = None if money is None else round(money * MICRO)
        store.transact(budget.limit, universe, scope, MONEY, micros)
    if tokens is not UNSET:
        store.transact(budget.limit, universe, scope, TOKENS, tokens)


def account(
    store: Store, *, universe: str, unit: str, world: str | WorldHandle[Any] = UNIVERSE
) -> Account:
    """How a budget stands: spent, reserved, limit; money in millionths."""
    scope = world if isinstance(world, str) else world.record().world_id
    return store.read(budget.account, universe, scope, unit)


chat = declare()
