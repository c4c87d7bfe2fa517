"""The application of `test_dispatch_killed`.

Where a test says so (`HOLDFAST_TEST_BARRIER`), a process stands still once for each request after its
text was typed and before that is written down. Whether it is the first time is known outside, by a
file; whoever stands there is to be killed.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

import holdfast as hf
from holdfast.adapters import agent as agents
from holdfast.authority import replay
from holdfast.authority.dispatch import DispatchRecord
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.roles.dispatcher import Dispatcher

BARRIER = "HOLDFAST_TEST_BARRIER"
SOCKET = "HOLDFAST_TEST_SOCKET"

# On a busy machine an agent shows late what it was given.
agents.TAKEN_S = 20.0

dispatch = hf.agent.declare(socket=os.environ.get(SOCKET, ""), concurrency=1)


class Told(hf.Event):
    n: int
    target: str
    cli: str = "claude"


class Foreman(hf.World):
    ended: list[str] = msgspec.field(default_factory=list)

    @hf.on(Told)
    def told(self, event: Told, cx: hf.Context) -> None:
        cx.do(dispatch, event.target, f"do number {event.n}", event.cli, tag=str(event.n))

    @hf.on(dispatch)
    def done(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None:
        told = receipt.value.status if receipt.ok else receipt.code
        self.ended.append(f"{receipt.tag} {told}")


app = hf.App("crew", worlds=[Foreman])


def stand_once(name: str) -> None:
    """The first who comes here stands still."""
    try:
        os.close(os.open(f"{os.environ[BARRIER]}-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    print(f"typed {name}", flush=True)
    os.read(0, 1)


if os.environ.get(BARRIER):
    _concluded, _advance = DispatchLog.concluded, Dispatcher._advance

    def concluded(self: DispatchLog, request_id: str, *args: Any, **kwargs: Any) -> DispatchRecord:
        stand_once(request_id)
        return _concluded(self, request_id, *args, **kwargs)

    def advance(self: Dispatcher, done: list[replay.Replayed]) -> None:
        if done:
            stand_once(done[-1].event.event_id.replace("/", "-"))
        _advance(self, done)

    DispatchLog.concluded = concluded  # type: ignore[method-assign]
    Dispatcher._advance = advance  # type: ignore[method-assign]
