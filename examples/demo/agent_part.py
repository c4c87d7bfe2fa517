"""Part 4 of the demo: an agent that pays per question and whose host is killed during a question.

The agent, a flow, and the model are those of `examples/agent`. The model is a separate process that counts calls by
idempotency key. It stalls on the second question. The worker of the flow is then killed with SIGKILL, so the call was
made and no receipt exists. After a restart the agent proposes an order. It is then forked before the approval, with a
hint, and the fork proposes another order while the original is unchanged. Another agent lacks the budget for a second
question.
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

from examples.agent.agent import MODEL, Approval, Hinted, app, buy
from examples.demo.child_process import environment
from examples.demo.up_process import UpProcess
from holdfast import llm
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout
from holdfast.flows.model import FlowFailed

APP = "examples.agent.agent:app"
GOAL = "We need 40 chairs for the new office. Who should get the order?"
HINT = "The office opens next week: they have to be there by then."
DOLLARS = 1_000_000  # budgets are stored in millionths
PRICE = {"input": 2, "output": 8}  # per million tokens
STALLED = 2
BUDGET = 0.05
# Enough for a first question, but not for a second one.
SMALL_BUDGET = 0.004
PHASE_S_MAX = 60.0
POLL_S = 0.02

PrintStep = Callable[[str], None]
CheckClaim = Callable[[str, object, object], None]
Handle = FlowHandle[str]


def run_part(path: Path, print_step: PrintStep, check_claim: CheckClaim) -> None:
    if importlib.util.find_spec("httpx") is None:
        print_step("Part 4 is skipped: it needs httpx. pip install 'holdfast[ops]'")
        return
    with (
        _model_process() as url,
        app.open(str(path), roles=()) as rt,
        contextlib.ExitStack() as hosts,
    ):
        llm.set_limit(rt.store, universe=rt.universe, each_world=True, money=BUDGET)

        def host(name: str) -> UpProcess:
            up = UpProcess(path, name, APP, _environment(url))
            hosts.callback(up.stop)
            return up

        ada = _kill_host(rt, url, host, print_step, check_claim)
        _fork(rt, url, ada, print_step, check_claim)
        _exhaust_budget(rt, url, print_step, check_claim)


def _kill_host(
    rt: Runtime,
    url: str,
    host: Callable[[str], UpProcess],
    print_step: PrintStep,
    check_claim: CheckClaim,
) -> Handle:
    ada = rt.start(buy.options(key="ada"), GOAL, url)
    print_step(
        f"Part 4: ada, an agent, is a flow and asks a model that charges per call. Goal: {GOAL}"
    )
    doomed = host("fay")
    _wait(lambda: len(_requests(url, "chat")) == STALLED, "the second question")
    doomed.kill()
    print_step(
        "SIGKILL ada's worker: the model has the second question, the store has no answer to it."
    )
    host("gus")
    _wait(lambda: ada.published("proposal"), "the proposal")
    asked = _requests(url, "chat")
    calls = sum(line["calls"] for line in asked)
    proposal = ada.published("proposal")
    print_step(
        f"The next worker repeats the call with the same idempotency key. ada proposes: {proposal}"
    )
    check_claim("proposal of the agent", proposal, "Order from cedar: 4100 in 21 days.")
    check_claim("questions, each with one idempotency key", len(asked), len(_answers(ada)))
    check_claim("calls made, including the repeated one", calls, calls > len(asked))
    check_claim(
        "millionths of a dollar spent, equal to the model's bill",
        _micros(ada),
        _model_charge(asked),
    )
    return ada


def _fork(
    rt: Runtime, url: str, ada: Handle, print_step: PrintStep, check_claim: CheckClaim
) -> None:
    before = (ada.steps(), ada.published())
    hasty = ada.fork("ada-in-a-hurry", at="hf.receive")
    hasty.send(Hinted(HINT))
    original = ada.published("proposal")
    _wait(lambda: hasty.published("proposal") not in (None, original), "the proposal of the fork")
    proposal = hasty.published("proposal")
    own = _account(rt, hasty).spent
    print_step(
        f"ada is forked before the approval, with a hint: {HINT} The fork proposes: {proposal} "
        f"The total cost is ${_micros(hasty) / DOLLARS:.6f}, of which the fork paid ${own / DOLLARS:.6f}."
    )
    check_claim("proposal of the fork", proposal, "Order from birch: 5200 in 4 days.")
    check_claim("part of its cost paid before the fork", _micros(hasty) - own, _micros(ada))
    check_claim(
        "the original agent is unchanged", original, (ada.steps(), ada.published()) == before
    )
    ada.send(Approval(by="eve"))
    order = json.loads(ada.result(timeout=PHASE_S_MAX))
    check_claim("orders after the approval", len(_requests(url, "order")), order["number"])


def _exhaust_budget(rt: Runtime, url: str, print_step: PrintStep, check_claim: CheckClaim) -> None:
    llm.set_limit(rt.store, universe=rt.universe, each_world=True, money=SMALL_BUDGET)
    bob = rt.start(buy.options(key="bob"), GOAL, url)
    reason = ""
    try:
        bob.result(timeout=PHASE_S_MAX)
    except FlowFailed as error:
        reason = error.error_type
    account = _account(rt, bob)
    print_step(
        f"bob has a budget of ${SMALL_BUDGET}. After ${_micros(bob) / DOLLARS:.6f} the next question "
        "could cost more than the rest, so the call is not made and bob stops."
    )
    check_claim("state of the agent without enough budget", bob.status().state, "FAILED")
    check_claim("reason of its stop", reason, "over_budget")
    check_claim(
        "spent by it, of 4,000 millionths", account.spent, 0 < account.spent == _micros(bob)
    )


# -- queries -------------------------------------------------------------------------------------


def _answers(agent: Handle) -> list[Any]:
    """The recorded answers of the model."""
    return [step.value for step in agent.steps() if step.name == "llm.chat" and step.value]


def _micros(agent: Handle) -> int:
    """The price of the recorded answers, in millionths of a dollar."""
    usages = [answer["usage"] for answer in _answers(agent)]
    tokens = {kind: sum(usage[f"{kind}_tokens"] for usage in usages) for kind in PRICE}
    return sum(tokens[kind] * price for kind, price in PRICE.items())


def _model_charge(asked: list[dict[str, Any]]) -> int:
    """The amount that the model charges: each key once, regardless of the number of calls."""
    return sum(
        line["usage"]["prompt_tokens"] * PRICE["input"]
        + line["usage"]["completion_tokens"] * PRICE["output"]
        for line in asked
    )


def _account(rt: Runtime, agent: Handle) -> llm.BudgetAccount:
    return llm.account(rt.store, universe=rt.universe, flow=agent, unit="money")


def _requests(url: str, what: str) -> list[dict[str, Any]]:
    with urlopen(f"{url}/calls", timeout=PHASE_S_MAX) as answer:
        return [line for line in json.load(answer).values() if line["what"] == what]


def _environment(url: str) -> Mapping[str, str]:
    return {
        "HOLDFAST_LLM_BASE_URL": f"{url}/v1",
        "HOLDFAST_LLM_PRICES": json.dumps({MODEL: PRICE}),
        "HOLDFAST_HTTP_CIDRS": "127.0.0.0/8",
        "HOLDFAST_HTTP_PORTS": url.rpartition(":")[2],
    }


@contextlib.contextmanager
def _model_process() -> Iterator[str]:
    """Run the model in its own process. Yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.agent.standin", "--stall", str(STALLED)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _wait(reached: Callable[[], object], what: str) -> None:
    deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
    while not reached():
        if SYSTEM.mono_ns() > deadline_ns:
            raise Timeout(what=what, seconds=PHASE_S_MAX)
        SYSTEM.sleep(POLL_S)
