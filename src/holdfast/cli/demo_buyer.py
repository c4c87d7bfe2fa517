"""The application of the demo's fourth act: the agent of `examples/agent`, which says more about it.

From `MODEL` on it is the same text; only the imports are those of the package. A test holds it to that.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import msgspec

import holdfast.app.declare as hf
from holdfast.app.app import App
from holdfast.app.shipped import http, llm
from holdfast.world.context import Context

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
    shop: str  # where quotes are to be had


class Hinted(hf.Event):
    """Something to be considered. It may come at any time; the agent thinks again."""

    text: str


class Agent(hf.World):
    shop: str = ""
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    hints: list[str] = msgspec.field(default_factory=list)
    # Which question is open, how many more it may take, and which tool calls have no result yet.
    turn: int = 0
    turns_left: int = TURNS_MAX
    looking_up: list[str] = msgspec.field(default_factory=list)
    status: str = "idle"  # thinking, decided or stopped
    answer: str = ""
    spent: float = 0.0

    @hf.on(GoalGiven)
    def goal_given(self, event: GoalGiven, cx: Context) -> None:
        self.shop = event.shop
        self.messages = [_said("system", SYSTEM), _said("user", event.text)]
        self.looking_up = []
        self.turns_left = TURNS_MAX
        self._ask(cx)

    @hf.on(Hinted)
    def hinted(self, event: Hinted, cx: Context) -> None:
        self.hints.append(event.text)
        self.turns_left = TURNS_MAX
        if not self.looking_up:
            self._ask(cx)

    @hf.on(llm.chat)
    def answered(self, receipt: hf.Receipt[llm.Reply], cx: Context) -> None:
        self.spent += receipt.cost
        if receipt.tag != str(self.turn):
            return  # the answer to an older question: paid for, and overtaken by a hint
        if not receipt.ok:
            self._stop(f"{receipt.code}: {receipt.error}")
            return
        reply = receipt.value
        if not reply.tool_calls:
            self.messages.append(_said("assistant", reply.text))
            self.status, self.answer = "decided", reply.text
            return
        self.messages.append(_said("assistant", reply.text, tool_calls=reply.tool_calls))
        for call in reply.tool_calls:
            self._use(call, cx)
        if not self.looking_up:
            self._ask(cx)

    @hf.on(http.request)
    def looked_up(self, receipt: hf.Receipt[http.Response], cx: Context) -> None:
        if receipt.tag not in self.looking_up:
            return  # wanted for an earlier goal
        self.looking_up.remove(receipt.tag)
        self._told(receipt.tag, receipt.value.text if receipt.ok else f"failed: {receipt.error}")
        if not self.looking_up:
            self._ask(cx)

    def _ask(self, cx: Context) -> None:
        self.messages += [_said("user", hint) for hint in self.hints]
        self.hints = []
        self.turn += 1
        self.turns_left -= 1
        if self.turns_left < 0:
            self._stop(f"no decision in {TURNS_MAX} turns")
            return
        self.status, self.answer = "thinking", ""
        options = {"max_tokens": 200, "tools": TOOLS}
        cx.do(llm.chat, self.messages, MODEL, options, tag=str(self.turn))

    def _use(self, call: dict[str, Any], cx: Context) -> None:
        """Want what a tool call is about. What makes no sense is told to the model, not raised."""
        try:
            tool = call["function"]
            supplier = json.loads(tool["arguments"])["supplier"]
            known = tool["name"] == "get_quote" and isinstance(supplier, str)
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            self._told(call["id"], "failed: there is no such tool, or not with these arguments")
            return
        cx.do(http.request, "GET", f"{self.shop}/quotes/{quote(supplier, '')}", tag=call["id"])
        self.looking_up.append(call["id"])

    def _told(self, call_id: str, text: str) -> None:
        self.messages.append(_said("tool", text, tool_call_id=call_id))

    def _stop(self, why: str) -> None:
        """Over budget, refused, out of turns. With a hint it tries again."""
        self.status, self.answer = "stopped", why


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


app = App("agents", worlds=[Agent])
