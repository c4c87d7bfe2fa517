"""The demo's fourth act: an agent that pays for each question, and whose host is killed in mid-question.

The model that it asks is a process of its own, and counts what comes by idempotency key. It stalls on
the second question; then the process that hosts the agent is SIGKILLed, so that the call was made and
no receipt is there. Started again, the agent decides. Then it is forked before that decision, with a
hint, and decides otherwise, while the original stays as it was. Another one has no money for a decision.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.app.shipped import llm
from holdfast.cli.demo_buyer import MODEL, Agent, GoalGiven, Hinted, app
from holdfast.cli.demo_worlds import Up
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout

APP = "holdfast.cli.demo_buyer:app"
GOAL = "We need 40 chairs for the new office. Who should get the order?"
HINT = "The office opens next week: they have to be there by then."
DOLLARS = 1_000_000  # budgets are kept in millionths
PRICE = {"input": 2, "output": 8}  # of a million tokens
STALLED = 2
BUDGET = 0.05
# Enough for a first question, and not for a second one.
SMALL_BUDGET = 0.004
PHASE_S_MAX = 60.0
LOOK_S = 0.02

Tell = Callable[[str], None]
Claim = Callable[[str, object, object], None]
Handle = WorldHandle[Agent]


def play(path: Path, tell: Tell, claim: Claim) -> None:
    if importlib.util.find_spec("httpx") is None:
        tell("The fourth act is left out: it needs httpx. pip install 'holdfast[ops]'")
        return
    with _outside() as url, app.open(str(path), roles=()) as rt, contextlib.ExitStack() as hosts:
        llm.set_limit(rt.store, universe=rt.universe, each_world=True, money=BUDGET)

        def host(name: str) -> Up:
            up = Up(path, name, APP, _environment(url))
            hosts.callback(up.leave)
            return up

        ada = _survive(rt, url, host, tell, claim)
        _fork(rt, ada, tell, claim)
        _run_dry(rt, url, tell, claim)


def _survive(rt: Runtime, url: str, host: Callable[[str], Up], tell: Tell, claim: Claim) -> Handle:
    ada = rt.world(Agent, "ada")
    ada.send(GoalGiven(GOAL, url))
    tell(f"Fourth act: ada, an agent, is a world, and asks a model that charges. Her goal: {GOAL}")
    doomed = host("fay")
    _wait(lambda: len(_questions(url)) == STALLED, "the second question")
    doomed.kill()
    tell("SIGKILL her host: the model has her second question, the store has no receipt for it.")
    host("gus")
    state = _settled(ada)
    asked = _questions(url)
    calls = sum(line["calls"] for line in asked)
    tell(f"Her next host asks it again, with the same idempotency key. She decides: {state.answer}")
    claim("what the agent decided", state.answer, "Order from cedar: 4100 in 21 days.")
    claim("questions, each under one idempotency key", len(asked), state.turn)
    claim("calls for them, the interrupted one repeated", calls, calls > len(asked))
    claim("millionths of a dollar spent, as in the model's bill", _micros(state), _bill(asked))
    return ada


def _fork(rt: Runtime, ada: Handle, tell: Tell, claim: Claim) -> None:
    before = (ada.height(), ada.state())
    last = max(entry.height for entry in ada.journal() if entry.type == llm.chat.kind)
    hasty = ada.fork("ada-in-a-hurry", at=last - 1)
    hasty.send(Hinted(HINT))
    state = _settled(hasty)
    own = _account(rt, hasty).spent
    tell(
        f"She is forked before that decision, with a hint: {HINT} The fork decides: {state.answer} "
        f"The way there cost ${state.spent:.6f}, of which it paid ${own / DOLLARS:.6f} itself."
    )
    claim("what its fork decided", state.answer, "Order from birch: 5200 in 4 days.")
    claim("of what that cost, paid before the fork", _micros(state) - own,
          _micros(ada.state(at=last - 1)))  # fmt: skip
    claim("the original is as it was", before[1].answer, (ada.height(), ada.state()) == before)


def _run_dry(rt: Runtime, url: str, tell: Tell, claim: Claim) -> None:
    bob = rt.world(Agent, "bob")
    llm.set_limit(rt.store, universe=rt.universe, world=bob, money=SMALL_BUDGET)
    bob.send(GoalGiven(GOAL, url))
    state = _settled(bob)
    account = _account(rt, bob)
    tell(
        f"bob may spend ${SMALL_BUDGET}. After ${state.spent:.6f} his next question could cost more "
        "than is left: it is not asked, and he stops."
    )
    claim("an agent whose budget does not last is", state.status, "stopped")
    claim("because it is", state.answer.partition(":")[0], "over_budget")
    claim("and spent, of 4,000 millionths", account.spent, 0 < account.spent == _micros(state))


# -- looking -------------------------------------------------------------------------------------


def _settled(agent: Handle) -> Agent:
    return agent.wait_for(lambda state: state.status in ("decided", "stopped"), timeout=PHASE_S_MAX)


def _micros(state: Agent) -> int:
    return round(state.spent * DOLLARS)


def _bill(asked: list[dict[str, Any]]) -> int:
    """What the model charges: each key once, however often it came."""
    return sum(
        line["usage"]["prompt_tokens"] * PRICE["input"]
        + line["usage"]["completion_tokens"] * PRICE["output"]
        for line in asked
    )


def _account(rt: Runtime, agent: Handle) -> llm.Account:
    return llm.account(rt.store, universe=rt.universe, world=agent, unit="money")


def _questions(url: str) -> list[dict[str, Any]]:
    with urlopen(f"{url}/calls", timeout=PHASE_S_MAX) as answer:
        return [line for line in json.load(answer).values() if line["what"] == "chat"]


def _environment(url: str) -> Mapping[str, str]:
    return {
        "HOLDFAST_LLM_BASE_URL": f"{url}/v1",
        "HOLDFAST_LLM_PRICES": json.dumps({MODEL: PRICE}),
        "HOLDFAST_HTTP_CIDRS": "127.0.0.0/8",
        "HOLDFAST_HTTP_PORTS": url.rpartition(":")[2],
    }


@contextlib.contextmanager
def _outside() -> Iterator[str]:
    """The model, in a process of its own; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.demo_outside", "--stall", str(STALLED)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _wait(reached: Callable[[], bool], what: str) -> None:
    deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
    while not reached():
        if SYSTEM.mono_ns() > deadline_ns:
            raise Timeout(what=what, seconds=PHASE_S_MAX)
        SYSTEM.sleep(LOOK_S)
