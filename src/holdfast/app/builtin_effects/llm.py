"""`hf.llm.chat`: an effect that calls a language model within a budget.

    cx.do(hf.llm.chat, [{"role": "user", "content": "Hello"}], "small-model", {"max_tokens": 200})

    @hf.on(hf.llm.chat)
    def answered(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
        self.spent += receipt.cost

The operator configures the endpoint, its key and its prices with `HOLDFAST_LLM_BASE_URL`, `_API_KEY`,
`_PRICES`, or an `Endpoint` in `declare`.

Budgets are stored in the store of the requesting world or flow:

    hf.llm.set_limit(store, universe="bank", tokens=1_000_000)
    hf.llm.set_limit(store, universe="bank", money=0.50, each_world=True)

The commit that claims a call reserves its maximum cost in the accounts of its world or flow and its universe. The
commit of its receipt replaces the reservation with the actual cost. Therefore concurrent calls cannot
overspend. A call that exceeds the remaining budget waits for reservations of running calls to be released.
If that could not free enough, it ends with the receipt `over_budget`. A call whose outcome is unknown is
charged at its maximum cost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from holdfast import codec
from holdfast.adapters import llm
from holdfast.adapters.errors import NotConfigured, NotInstalled, RejectedByServer, Unavailable
from holdfast.adapters.llm import MICRO, ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.app.definitions import Call, Costed, Effect, typed_as
from holdfast.effects import budget
from holdfast.effects.budget import (
    DEFAULT_SCOPE,
    MONEY,
    TOKENS,
    UNIVERSE_SCOPE,
    BudgetAccount,
    Cost,
)
from holdfast.errors import Invalid
from holdfast.flows.model import parse_flow_id
from holdfast.messages import FLOW_WORLD_PREFIX, Intent
from holdfast.store.api import Store
from holdfast.workers.effects.handler import CostEstimator

if TYPE_CHECKING:
    from holdfast.app.flow_handle import FlowHandle
    from holdfast.app.world_handle import WorldHandle

__all__ = [
    "BudgetAccount", "Chat", "ChatOptions", "Endpoint", "Price", "Reply", "Usage", "account", "chat",
    "declare", "set_limit",
]  # fmt: skip

KIND = "llm.chat"

# After these errors the model was not called, so nothing is billed ...
_UNBILLED = (RejectedByServer, Invalid, NotConfigured, NotInstalled)
# ... nor after these statuses: unreachable, too many requests, no capacity.
_UNBILLED_STATUS = (None, 429, 503)


class Chat(Effect[..., Reply]):
    """The chat effect with its endpoint."""

    def __init__(self, kind: str, endpoint: Endpoint | None, **options: Any) -> None:
        self._endpoint = endpoint
        super().__init__(kind, self._chat, **options)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.from_env(os.environ) if self._endpoint is None else self._endpoint

    def billing(self) -> CostEstimator | None:
        """Charge calls to budgets at the endpoint's prices."""
        try:
            prices = self.endpoint.prices
        except NotConfigured:
            prices = {}  # the call itself raises NotConfigured
        return CostEstimator(llm.cost_bound.name, codec.pack(prices))

    def bill(self, intent: Intent, result: Any) -> list[Cost]:
        model = codec.unpack(intent.params)[1]
        return llm.charges_of(self.endpoint.price(model), result.value.usage, str(model))

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
    """Create the effect for an endpoint; by default from the environment. Options as in `@hf.effect`."""
    return Chat(kind, endpoint, **{"timeout_s": 180.0, **options})


def set_limit(
    store: Store,
    *,
    universe: str,
    world: str | WorldHandle[Any] = UNIVERSE_SCOPE,
    flow: FlowHandle[Any] | None = None,
    each_world: bool = False,
    money: float | UnsetType | None = UNSET,
    tokens: int | UnsetType | None = UNSET,
) -> None:
    """Set the budget of a universe, of one world (a handle or an id), of one flow, or of each world and each flow.

    None removes a limit. An omitted limit stays unchanged.
    """
    if (world != UNIVERSE_SCOPE) + (flow is not None) + each_world > 1:
        raise Invalid(what="limit", why="give only one of world=, flow=, each_world=True")
    if flow is not None:
        scope = _flow_scope(flow)
    else:
        scope = DEFAULT_SCOPE if each_world else world if isinstance(world, str) else world.create()
    if money is not UNSET:
        micros = None if money is None else round(money * MICRO)
        store.transact(budget.set_limit, universe, scope, MONEY, micros)
    if tokens is not UNSET:
        store.transact(budget.set_limit, universe, scope, TOKENS, tokens)


def account(
    store: Store,
    *,
    universe: str,
    unit: str,
    world: str | WorldHandle[Any] = UNIVERSE_SCOPE,
    flow: FlowHandle[Any] | None = None,
) -> BudgetAccount:
    """Return a budget account: spent, reserved, limit; money in millionths."""
    if flow is not None:
        scope = _flow_scope(flow)
    else:
        scope = world if isinstance(world, str) else world.record().world_id
    return store.read(budget.account, universe, scope, unit)


def _flow_scope(flow: FlowHandle[Any]) -> str:
    return f"{FLOW_WORLD_PREFIX}{parse_flow_id(flow.id).seq}"


def _arguments(
    messages: list[dict[str, Any]],
    model: str,
    options: ChatOptions | Mapping[str, Any] | None = None,
) -> Reply:
    raise NotImplementedError("it only declares types")


chat = typed_as(_arguments, declare())
