"""A client under chaos: sends orders and submits tasks, and writes down what was acknowledged.

    python -m tests.chaos.client URL LOG NAME SEED RATE

Each line of its log is `[how, what, id, fields]`. It writes `intend` before it asks for anything, and then
exactly one of these, unless it is killed before:

    acked      it is durable, whatever happens to the server
    unknown    it may be, or not
    refused    it is not, and never will be

Half of what it asks for has a key; that is asked for again and again until it is acknowledged. It ends when
its stdin does, or says so.
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
from tests.chaos.app import Desk, Ordered, app, desk_of, work

ASK_S = 20.0
# What is asked for again is so after this long.
AGAIN_S = 0.1
END_TRIES_S = 60.0


class Client:
    def __init__(self, runtime: Runtime, log: Path, name: str, seed: str) -> None:
        self._runtime = runtime
        self._fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._name = name
        self._random = random.Random(seed)
        self._no = 0

    def step(self) -> None:
        self._no += 1
        id = f"{self._name}.{self._no}"
        keyed = self._random.random() < 0.5
        what = self._random.choices(("order", "task", "ask"), (6, 3, 1))[0]
        if what == "ask":
            keyed = True
        delay_s = self._random.choice((0.0, 0.2, 1.0, 3.0))
        fails = self._random.random() < 0.1
        number = self._random.randrange(1 << 20)
        self._write("intend", what, id, desk=desk_of(number), keyed=keyed)
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            try:
                self._do(what, id, number, delay_s, fails, keyed)
            except HoldfastError as error:
                if not error.retryable and not isinstance(error, CommitUnknown):
                    raise
                if keyed and time.monotonic() - began < END_TRIES_S:
                    self._write("retry", what, id, code=error.code)
                    time.sleep(AGAIN_S)
                    continue
                self._write(_how(error, what, keyed), what, id, code=error.code, why=str(error))
            else:
                self._write("acked", what, id, tries=tries, took_s=time.monotonic() - began)
            return

    def _do(
        self, what: str, id: str, number: int, delay_s: float, fails: bool, keyed: bool
    ) -> None:
        key = id if keyed else None
        if what == "task":
            wanted: Any = work.options(key=id) if keyed else work
            self._runtime.submit(wanted, id, delay_s / 10, fails)
            return
        desk = self._runtime.world(Desk, desk_of(number))
        if what == "ask":
            reply = desk.ask(Ordered(id, delay_s), timeout=ASK_S, key=key)
            assert isinstance(reply, int), reply
        else:
            desk.send(Ordered(id, delay_s), key=key)

    def _write(self, how: str, what: str, id: str, **fields: Any) -> None:
        os.write(self._fd, (json.dumps([how, what, id, fields]) + "\n").encode())


def _how(error: HoldfastError, what: str, keyed: bool) -> str:
    """What an error says about whether it happened. Where something is read after the commit, the error
    may be of that; and a key may have been used by a try before."""
    sure = what in ("order", "task") and not keyed
    return "refused" if sure and not isinstance(error, CommitUnknown | Timeout) else "unknown"


def opened(url: str) -> Runtime:
    """A server that is away comes back."""
    while True:
        try:
            runtime: Runtime = app.open(url, roles=())
            return runtime
        except HoldfastError as error:
            if not error.retryable:
                raise
            print("waits", error, flush=True)
            time.sleep(AGAIN_S)


def main(argv: list[str]) -> int:
    url, log, name, seed, rate = argv
    with opened(url) as runtime:
        client = Client(runtime, Path(log), name, seed)
        print("ready", flush=True)
        pace = random.Random(f"{seed} pace")
        while not select.select([sys.stdin], [], [], pace.expovariate(float(rate)))[0]:
            client.step()
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
