"""An agent as a flow: it asks a model, uses tools, proposes an order, and waits for an approval.

    holdfast up agent:app                  # kill it at any time, and start it again

The agent is a `for` loop. Each question to the model and each call of a tool is a step. A recorded step never runs again,
and a step that was interrupted runs again with the same idempotency key.

The operator configures the address, the key and the prices of the model: `HOLDFAST_LLM_BASE_URL`,
`_API_KEY`, `_PRICES`. `HOLDFAST_HTTP_HOSTS` limits the look-ups: the model chooses the addresses, and it
must not reach internal machines.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import holdfast as hf

MODEL = "stand-in-1"
TURNS_MAX = 20
SYSTEM = "You buy for an office. Get quotes, then answer with the supplier to order from, and why."
SUPPLIER = {
    "type": "object",
    "properties": {"supplier": {"type": "string"}},
    "required": ["supplier"],
}
GET_QUOTE = {
    "name": "get_quote",
    "description": "What a supplier asks, and how soon it delivers.",
    "parameters": SUPPLIER,
}
OPTIONS = {"max_tokens": 200, "tools": [{"type": "function", "function": GET_QUOTE}]}


class Approval(hf.Event):
    by: str


class Hinted(hf.Event):
    """A hint instead of an approval. The agent thinks again."""

    text: str


@hf.flow(attempts=1)
async def buy(goal: str, shop: str) -> str:
    messages = [_message("system", SYSTEM), _message("user", goal)]
    for turn in range(1, TURNS_MAX + 1):
        hf.publish("status", f"turn {turn}: thinking")
        reply = await hf.step(hf.llm.chat, messages, MODEL, OPTIONS)
        if reply.tool_calls:
            hf.publish("status", f"turn {turn}: {len(reply.tool_calls)} tool calls")
            messages.append(_message("assistant", reply.text, tool_calls=reply.tool_calls))
            messages += await asyncio.gather(*[use_tool(shop, call) for call in reply.tool_calls])
            continue
        messages.append(_message("assistant", reply.text))
        hf.publish("proposal", reply.text)
        review = await hf.receive(Approval, Hinted)  # may take weeks: no process waits
        if isinstance(review, Approval):
            order = {"json": {"order": reply.text, "by": review.by}}
            placed = await hf.step(hf.http.request, "POST", f"{shop}/orders", order)
            return placed.text
        messages.append(_message("user", review.text))
    raise RuntimeError(f"no approval in {TURNS_MAX} turns")


async def use_tool(shop: str, call: dict[str, Any]) -> dict[str, Any]:
    """Run a tool call of the model. A failure is a result, too: the model reads it."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] != "get_quote" or not isinstance(arguments["supplier"], str):
            raise ValueError
        url = f"{shop}/quotes/{quote(arguments['supplier'], '')}"
        text = (await hf.step(hf.http.request, "GET", url)).text
    except hf.StepFailed as error:
        text = f"failed: {error.error}"
    except (KeyError, TypeError, ValueError):
        text = "failed: there is no such tool, or not with these arguments"
    return _message("tool", text, tool_call_id=call["id"])


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


app = hf.App(
    "agents", flows=[buy], events=[Approval, Hinted], effects=[hf.llm.chat, hf.http.request]
)
