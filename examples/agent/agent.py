"""An agent as a world: it asks a model, looks up quotes, and decides, within a budget.

    holdfast up agent:app                  # kill it at any time, and start it again

Each question to the model and each look-up is an effect. The commit that changes the transcript also
requests the effect, and the result arrives as one receipt. So a crash at any moment neither loses the
state of the agent nor repeats a question under another idempotency key.

The operator configures the address, the key and the prices of the model: `HOLDFAST_LLM_BASE_URL`,
`_API_KEY`, `_PRICES`. `HOLDFAST_HTTP_HOSTS` limits the look-ups: the model chooses the addresses, and it
must not reach internal machines.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import msgspec

import holdfast as hf

MODEL = "stand-in-1"
TURNS_MAX = 20

SYSTEM = "You buy for an office. Get quotes, then answer with the supplier to order from, and why."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_quote",
            "description": "What a supplier asks, and how soon it delivers.",
            "parameters": {
                "type": "object",
                "properties": {"supplier": {"type": "string"}},
                "required": ["supplier"],
            },
        },
    }
]


class GoalGiven(hf.Event):
    text: str
    shop: str  # base URL of the shop with the quotes


class Hinted(hf.Event):
    """A hint for the decision. It may arrive at any time, and the agent asks the model again."""

    text: str


class Agent(hf.World):
    shop: str = ""
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    hints: list[str] = msgspec.field(default_factory=list)
    # The open question, the questions left, and the tool calls without a result.
    turn: int = 0
    turns_left: int = TURNS_MAX
    looking_up: list[str] = msgspec.field(default_factory=list)
    status: str = "idle"  # thinking, decided or stopped
    answer: str = ""
    spent: float = 0.0

    @hf.on(GoalGiven)
    def goal_given(self, event: GoalGiven, cx: hf.Context) -> None:
        self.shop = event.shop
        self.messages = [_message("system", SYSTEM), _message("user", event.text)]
        self.looking_up = []
        self.turns_left = TURNS_MAX
        self._ask(cx)

    @hf.on(Hinted)
    def hinted(self, event: Hinted, cx: hf.Context) -> None:
        self.hints.append(event.text)
        self.turns_left = TURNS_MAX
        if not self.looking_up:
            self._ask(cx)

    @hf.on(hf.llm.chat)
    def answered(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
        self.spent += receipt.cost
        if receipt.tag != str(self.turn):
            return  # the answer to an older question: charged, but superseded by a hint
        if not receipt.ok:
            self._stop(f"{receipt.code}: {receipt.error}")
            return
        reply = receipt.value
        if not reply.tool_calls:
            self.messages.append(_message("assistant", reply.text))
            self.status, self.answer = "decided", reply.text
            return
        self.messages.append(_message("assistant", reply.text, tool_calls=reply.tool_calls))
        for call in reply.tool_calls:
            self._use(call, cx)
        if not self.looking_up:
            self._ask(cx)

    @hf.on(hf.http.request)
    def looked_up(self, receipt: hf.Receipt[hf.http.Response], cx: hf.Context) -> None:
        if receipt.tag not in self.looking_up:
            return  # requested for an earlier goal
        self.looking_up.remove(receipt.tag)
        self._add_result(
            receipt.tag, receipt.value.text if receipt.ok else f"failed: {receipt.error}"
        )
        if not self.looking_up:
            self._ask(cx)

    def _ask(self, cx: hf.Context) -> None:
        self.messages += [_message("user", hint) for hint in self.hints]
        self.hints = []
        self.turn += 1
        self.turns_left -= 1
        if self.turns_left < 0:
            self._stop(f"no decision in {TURNS_MAX} turns")
            return
        self.status, self.answer = "thinking", ""
        options = {"max_tokens": 200, "tools": TOOLS}
        cx.do(hf.llm.chat, self.messages, MODEL, options, tag=str(self.turn))

    def _use(self, call: dict[str, Any], cx: hf.Context) -> None:
        """Request the effect of a tool call. The model gets an invalid call as a failed result."""
        supplier = ""
        try:
            tool = call["function"]
            supplier = json.loads(tool["arguments"])["supplier"]
            valid = tool["name"] == "get_quote" and isinstance(supplier, str)
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            self._add_result(
                call["id"], "failed: there is no such tool, or not with these arguments"
            )
            return
        cx.do(hf.http.request, "GET", f"{self.shop}/quotes/{quote(supplier, '')}", tag=call["id"])
        self.looking_up.append(call["id"])

    def _add_result(self, call_id: str, text: str) -> None:
        self.messages.append(_message("tool", text, tool_call_id=call_id))

    def _stop(self, why: str) -> None:
        """Budget exceeded, rejected, or no turns left. A hint makes the agent try again."""
        self.status, self.answer = "stopped", why


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


app = hf.App("agents", worlds=[Agent])
