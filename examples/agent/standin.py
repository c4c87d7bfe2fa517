"""A stand-in for external services: an OpenAI-compatible model, and a shop with quotes and orders. It prints its
address.

    python standin.py [--stall N] [--stall-order]

It handles idempotency keys as a good provider does: a repeated key gets the answer of the first call, and is
not charged again. `GET /calls` returns the number of calls and the usage of each key. With `--stall N` it
processes and charges the N-th question to the model, but never answers the first caller. That is the moment
to kill the client. `--stall-order` does the same with the first order.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUOTES = {
    "alder": {"supplier": "alder", "price": 4800, "days": 12},
    "birch": {"supplier": "birch", "price": 5200, "days": 4},
    "cedar": {"supplier": "cedar", "price": 4100, "days": 21},
}
FIRST = ("alder", "birch")


def think(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The next message of this model: two quotes, one more, then the decision. Always the same."""
    quotes = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    missing = (
        FIRST if not quotes else sorted(QUOTES.keys() - {quote["supplier"] for quote in quotes})
    )
    if missing:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [_tool(name) for name in missing],
        }
    prompt = " ".join(message["content"] for message in messages if message["role"] == "user")
    measure = "days" if "week" in prompt else "price"
    best = min(quotes, key=lambda quote: quote[measure])
    text = f"Order from {best['supplier']}: {best['price']} in {best['days']} days."
    return {"role": "assistant", "content": text}


def completion(request: dict[str, Any], number: int) -> dict[str, Any]:
    message = think(request["messages"])
    return {
        "id": f"answer-{number}",
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": _tokens(request["messages"]),
            "completion_tokens": _tokens(message),
        },
    }


def answer_to(what: str, request: dict[str, Any], number: int) -> dict[str, Any]:
    if what == "chat":
        return completion(request, number)
    if what == "order":
        return {"number": number, **request}
    return quoted(what)


def quoted(supplier: str) -> dict[str, Any]:
    return QUOTES.get(supplier) or {"supplier": supplier, "error": "nobody knows it"}


class Outside(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, stall: int, stall_order: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stalled = {("chat", stall), ("order", int(stall_order))}
        self.lock = threading.Lock()
        self.calls: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, bytes] = {}

    def answer(self, key: str, what: str, request: dict[str, Any]) -> tuple[bytes, bool]:
        """The answer under this key, and whether it is sent to the caller."""
        with self.lock:
            line = self.calls.setdefault(key, {"what": what, "calls": 0})
            line["calls"] += 1
            if key not in self.answers:
                number = sum(call["what"] == what for call in self.calls.values())
                reply = answer_to(what, request, number)
                line["usage"] = reply.get("usage")
                self.answers[key] = json.dumps(reply).encode()
                return self.answers[key], (what, number) not in self.stalled
            return self.answers[key], True

    def handle_error(self, *_: object) -> None:
        """Ignored: the caller closed the connection before the answer."""


class Handler(BaseHTTPRequestHandler):
    server: Outside

    def do_GET(self) -> None:
        if self.path == "/calls":
            with self.server.lock:
                return self._send(json.dumps(self.server.calls).encode())
        self._answer(self.path.rpartition("/")[2], {})

    def do_POST(self) -> None:
        what = "order" if self.path == "/orders" else "chat"
        self._answer(what, json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, what: str, request: dict[str, Any]) -> None:
        body, reaches = self.server.answer(self.headers["idempotency-key"], what, request)
        if reaches:
            self._send(body)
        else:
            self.rfile.read(1)  # returns when the caller closes the connection

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _tool(supplier: str) -> dict[str, Any]:
    arguments = json.dumps({"supplier": supplier})
    function = {"name": "get_quote", "arguments": arguments}
    return {"id": f"quote-{supplier}", "type": "function", "function": function}


def _tokens(content: object) -> int:
    return len(json.dumps(content)) // 4


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall", type=int, default=0)
    parser.add_argument("--stall-order", action="store_true")
    options = parser.parse_args()
    with Outside(options.stall, options.stall_order) as outside:
        print(f"http://127.0.0.1:{outside.server_port}", flush=True)
        outside.serve_forever()
