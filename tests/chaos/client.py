"""A client of the chaos run: sends orders, submits tasks, and logs the acknowledgements.

    python -m tests.chaos.client URL LOG NAME SEED RATE

Each line of its log is `[outcome, operation, id, fields]`. It logs `intend` before each request, and then
exactly one of these, unless it is killed before:

    acked      the request is durable
    unknown    the request may be applied or not
    refused    the request is not applied

Half of the requests have a key. The client retries them until they are acknowledged. It exits when its stdin is
closed or has a line.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.app.runtime import Runtime
from holdfast.errors import CommitUnknown, HoldfastError, Timeout
from tests.chaos.app import OrderDesk, OrderPlaced, app, work, world_name

ASK_S = 20.0
# Pause before a retry.
RETRY_PAUSE_S = 0.1
RETRY_MAX_S = 60.0


class ChaosClient:
    def __init__(self, runtime: Runtime, log: Path, name: str, seed: str) -> None:
        self._runtime = runtime
        self._fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._name = name
        self._random = random.Random(seed)
        self._last_number = 0

    def step(self) -> None:
        self._last_number += 1
        id = f"{self._name}.{self._last_number}"
        keyed = self._random.random() < 0.5
        operation = self._random.choices(("order", "task", "ask"), (6, 3, 1))[0]
        if operation == "ask":
            keyed = True
        delay_s = self._random.choice((0.0, 0.2, 1.0, 3.0))
        fails = self._random.random() < 0.1
        number = self._random.randrange(1 << 20)
        self._write("intend", operation, id, desk=world_name(number), keyed=keyed)
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            try:
                self._do(operation, id, number, delay_s, fails, keyed)
            except HoldfastError as error:
                if not error.retryable and not isinstance(error, CommitUnknown):
                    raise
                if keyed and time.monotonic() - began < RETRY_MAX_S:
                    self._write("retry", operation, id, code=error.code)
                    time.sleep(RETRY_PAUSE_S)
                    continue
                self._write(
                    _outcome_of(error, operation, keyed),
                    operation,
                    id,
                    code=error.code,
                    why=str(error),
                )
            else:
                self._write("acked", operation, id, tries=tries, took_s=time.monotonic() - began)
            return

    def _do(
        self, operation: str, id: str, number: int, delay_s: float, fails: bool, keyed: bool
    ) -> None:
        key = id if keyed else None
        if operation == "task":
            submission: Any = work.options(key=id) if keyed else work
            self._runtime.submit(submission, id, delay_s / 10, fails)
            return
        desk = self._runtime.world(OrderDesk, world_name(number))
        if operation == "ask":
            reply = desk.ask(OrderPlaced(id, delay_s), timeout=ASK_S, key=key)
            assert isinstance(reply, int), reply
        else:
            desk.send(OrderPlaced(id, delay_s), key=key)

    def _write(self, outcome: str, operation: str, id: str, **fields: Any) -> None:
        os.write(self._fd, (json.dumps([outcome, operation, id, fields]) + "\n").encode())


def _outcome_of(error: HoldfastError, operation: str, keyed: bool) -> str:
    """The outcome that an error implies. An error is `unknown` if it may come from a read after the commit, or
    if an earlier try with the same key may have committed."""
    is_definite = operation in ("order", "task") and not keyed
    return (
        "refused" if is_definite and not isinstance(error, CommitUnknown | Timeout) else "unknown"
    )


def open_when_available(url: str) -> Runtime:
    """Open the app, with retries while the server is unavailable."""
    while True:
        try:
            runtime: Runtime = app.open(url, roles=())
            return runtime
        except HoldfastError as error:
            if not error.retryable:
                raise
            print("waits", error, flush=True)
            time.sleep(RETRY_PAUSE_S)


def main(argv: list[str]) -> int:
    url, log, name, seed, rate = argv
    with open_when_available(url) as runtime:
        client = ChaosClient(runtime, Path(log), name, seed)
        print("ready", flush=True)
        pace = random.Random(f"{seed} pace")
        while not select.select([sys.stdin], [], [], pace.expovariate(float(rate)))[0]:
            client.step()
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
