"""The application of `test_dispatch_killed`.

With `HOLDFAST_TEST_BARRIER`, a process blocks once for each request, after it typed the text and before
it records that. A file beside the store marks requests that were blocked before. The test kills the
blocked process.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import msgspec

import holdfast as hf
from holdfast import failpoints
from holdfast.adapters import pane_prompter as agents
from holdfast.dispatch import notifications
from holdfast.dispatch.outcomes import QueueTransition

BARRIER = "HOLDFAST_TEST_BARRIER"
SOCKET = "HOLDFAST_TEST_SOCKET"

# On a busy machine an agent displays typed text late. Only in the processes that the test starts: the test process also
# runs other tests.
if os.environ.get(SOCKET):
    agents.CONFIRM_TIMEOUT_S = 20.0

dispatch = hf.agent.declare(socket=os.environ.get(SOCKET, ""), concurrency=1)


class PromptRequested(hf.Event):
    n: int
    target: str
    cli: str = "claude"


class Foreman(hf.World):
    ended: list[str] = msgspec.field(default_factory=list)

    @hf.on(PromptRequested)
    def told(self, event: PromptRequested, cx: hf.Context) -> None:
        cx.do(dispatch, event.target, f"do number {event.n}", event.cli, tag=str(event.n))

    @hf.on(dispatch)
    def done(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None:
        told = receipt.value.status if receipt.ok else receipt.code
        self.ended.append(f"{receipt.tag} {told}")


app = hf.App("crew", worlds=[Foreman])


def wait_at_barrier_once(name: str) -> None:
    """Block the first process that reaches this barrier."""
    try:
        os.close(os.open(f"{os.environ[BARRIER]}-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    print(f"typed {name}", flush=True)
    os.read(0, 1)


if os.environ.get(BARRIER):
    # Armed until the process ends.
    armed = ExitStack()

    def wait_at_outcome(request_id: str, transition: QueueTransition) -> None:
        if transition is not QueueTransition.TRIED:
            wait_at_barrier_once(request_id)

    def wait_at_cursor(done: list[notifications.LoggedEvent]) -> None:
        wait_at_barrier_once(done[-1].event.event_id.replace("/", "-"))

    armed.enter_context(failpoints.on("dispatch.log_transition", calls=wait_at_outcome))
    armed.enter_context(failpoints.on("dispatcher.advance_cursor", calls=wait_at_cursor))
