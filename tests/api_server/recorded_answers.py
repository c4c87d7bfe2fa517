"""The answers of routes that had two implementations, recorded before one of them was removed.

`python -m tests.api_server.recorded_answers` writes them to `tests/data/recorded_answers.json`. Times and random ids are
replaced. The order of the members of an object has no meaning.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from holdfast.ops.http.server import HttpServer
from tests.api_server.served_rig import ServedRig
from tests.ops.app import app
from tests.ops.http_rig import JsonClient

FILE = Path(__file__).parents[1] / "data" / "recorded_answers.json"
DEPOSIT = {"type": "QuotedDeposit", "event": {"amount": 5}}

LISTS = (
    "", "?limit=0", "?limit=1", "?limit=1000", "?limit=1001", "?limit=-1", "?limit=x", "?limit=", "?limit=1.5",
    "?limit=%D9%A1", "?limit=5&limit=6", "?state=ready", "?state=READY", "?state=failed", "?state=dead", "?state=leased",
    "?state=completed", "?state=nonsense", "?queue=paper", "?queue=none", "?queue=", "?queue=a%00b", "?name=add",
    "?name=none", "?tag=eu", "?tag=eu&state=ready", "?tag=eu&name=scan", "?tag=%F0%9F%92%A5", "?cursor=!!", "?cursor=AAAA",
    "?cursor=", "?color=red", "?limit=1&color=red", "?universe=bank", "?universe=bank&limit=1", "?universe=none",
    "?wait_s=1",
)  # fmt: skip
SHOWN = (
    "1-1", "1-2", "1-3", "1-4", "1-1?wait_s=0", "1-3?wait_s=0", "1-1?wait_s=0.01", "1-3?wait_s=5", "1-1?wait_s=61",
    "1-1?wait_s=-1", "1-1?wait_s=x", "1-1?wait_s=nan", "1-1?wait_s=", "1-1?wait_s=1e999", "1-1?color=red",
    "1-999?wait_s=0.01", "1-999", "9-1", "x", "%00", "1-1%2F2", "1-1?universe=bank", "1-1?universe=none", "1-1?limit=1",
)  # fmt: skip
QUEUES = ("", "?limit=1", "?color=red", "?universe=bank", "?universe=none")
EVENTS: tuple[dict[str, Any], ...] = (
    DEPOSIT,
    {**DEPOSIT, "key": "k"},
    {**DEPOSIT, "key": "k"},
    {**DEPOSIT, "event": {"amount": 6}, "key": "k"},
    {**DEPOSIT, "key": "with-correlation", "correlation_id": "c"},
    {**DEPOSIT, "key": "x" * 5_000},
    {**DEPOSIT, "key": "a\x00b"},
    {**DEPOSIT, "correlation_id": "a\x00b"},
    {**DEPOSIT, "event": {"amount": "five"}},
    {**DEPOSIT, "event": {}},
    {**DEPOSIT, "event": {"amount": 5, "color": "red"}},
    {**DEPOSIT, "event": 5},
    {"type": "Nope", "event": {}},
    {"event": {}},
    {**DEPOSIT, "color": "red"},
)
ADDRESSES = (
    "QuotedAccount/ada",
    "QuotedAccount/",
    "Nope/x",
    "QuotedAccount/" + "n" * 3_000,
    "QuotedAccount/a b",
)


def prepare(client: JsonClient) -> None:
    """Submit the tasks that the requests name: one waits, one fails, one completes, and one is on another queue."""
    client.submit("add", 1, 2, tag="eu", priority=3)
    client.submit("scan", 3, queue="paper", delay_s=3_600.0, key="one")
    client.submit("add", 5, 6, queue="done")
    client.submit("add", 7, queue="done", attempts=1)
    [done] = client.lease(queues=["done"])
    client.complete(done["lease"], [11, None, "x"])
    [failed] = client.lease(queues=["done"])
    client.fail(failed["lease"], reason="broken", error="no paper")


def requests() -> list[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = [("GET", f"/v1/tasks{query}", None) for query in LISTS]
    found += [("GET", f"/v1/tasks/{text}", None) for text in SHOWN]
    found += [("HEAD", "/v1/tasks", None), ("HEAD", "/v1/tasks/1-1", None)]
    found += [("GET", f"/v1/queues{query}", None) for query in QUEUES]
    for address in ADDRESSES:
        type, _, name = address.partition("/")
        path = f"/v1/worlds/{type}/{name.replace(' ', '%20')}/send"
        for event in EVENTS if address == ADDRESSES[0] else EVENTS[:1]:
            found.append(("POST", path, event))
            found.append(("POST", "/v1/operations/event_send", {"world": address, **event}))
    found.append(("POST", "/v1/operations/event_send", {"world": "no-such-id", **DEPOSIT}))
    return found


def answers(client: JsonClient) -> list[dict[str, Any]]:
    prepare(client)
    found = []
    for method, path, body in requests():
        response = client.call(method, path, body)
        found.append(
            {
                "request": f"{method} {path[:80]}" + (f" {json.dumps(body)[:160]}" if body else ""),
                "status": response.status,
                "type": response.headers["content-type"],
                "answer": _normal(response.document),
            }
        )
    return found


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "NS" if key.endswith("_ns") and isinstance(one, int) else _normal(one)
            for key, one in sorted(value.items())
        }
    if isinstance(value, list):
        return [_normal(one) for one in value]
    return re.sub(r"\b[0-9a-f]{32}\b", "ID", value) if isinstance(value, str) else value


def serve(served: ServedRig) -> HttpServer:
    return served.serve(apps={"bank": app}, default="bank")


def main() -> None:
    from holdfast import store as stores

    with stores.open("memory:") as store:
        served = ServedRig(store)
        try:
            document = answers(served.client(serve(served)))
        finally:
            served.close()
    lines = ",\n".join(json.dumps(one, ensure_ascii=True) for one in document)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(document)} answers")


if __name__ == "__main__":
    main()
