"""Run the agent, kill it during a question and during an order, fork it for an alternative decision, and limit its budget.

python show.py [DIRECTORY]             # the store directory (./data)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from agent import MODEL, Approval, Hinted, app, buy

import holdfast as hf

HERE = Path(__file__).resolve().parent
GOAL = "We need 40 chairs for the new office. Who should get the order?"
HINT = "The office opens next week: they have to be there by then."
PRICES = {MODEL: {"input": 2.0, "output": 8.0}}  # per million tokens
BUDGET = 0.05
WAIT_S = 60.0


def show(store: str) -> None:
    with running("standin.py", "--stall", "2", "--stall-order") as standin:
        outside = first_line(standin)
        os.environ["HOLDFAST_LLM_BASE_URL"] = f"{outside}/v1"
        os.environ["HOLDFAST_LLM_PRICES"] = json.dumps(PRICES)
        # Look-ups are limited to public addresses, unless the operator allows more.
        os.environ["HOLDFAST_HTTP_CIDRS"] = "127.0.0.0/8"
        os.environ["HOLDFAST_HTTP_PORTS"] = outside.rpartition(":")[2]
        with app.open(store, roles=()) as rt:
            # Each world and each flow has this budget.
            hf.llm.set_limit(rt.store, universe=rt.universe, each_world=True, money=BUDGET)
            survive_in_a_question(rt, outside, store)
            survive_in_an_order(rt, outside, store)
            fork(rt, store)
            run_dry(rt, outside, store)


def survive_in_a_question(rt: hf.Runtime, outside: str, store: str) -> None:
    ada = rt.start(buy.options(key="ada"), GOAL, outside)
    print(f"ada is asked: {GOAL}")
    with host(store) as process:
        wait(lambda: len(calls_of(outside, "chat")) == 2, "the second question")
        process.kill()
        process.wait()
    print("kill -9: the model has the second question, the store has no answer to it")
    with host(store):
        wait(lambda: ada.published("proposal"), "the proposal")
    questions = calls_of(outside, "chat")
    print(f"started again, ada proposes: {ada.published('proposal')}")
    print(f"{len(questions)} questions in {sum(questions)} calls: ", end="")
    print("the one under way was asked again, with the same idempotency key")


def survive_in_an_order(rt: hf.Runtime, outside: str, store: str) -> None:
    ada = rt.flow(buy, key="ada")
    print(f"\nno process runs, ada is {ada.status().state}: {ada.why()[0]['text']}")
    ada.send(Approval(by="eve"))
    with host(store) as process:
        wait(lambda: calls_of(outside, "order"), "the order")
        process.kill()
        process.wait()
    print("approved by eve. kill -9: the shop has the order, the store has no receipt for it")
    with host(store):
        print(f"started again, the shop answers: {ada.result(timeout=WAIT_S)}")
    orders = calls_of(outside, "order")
    print(f"{len(orders)} order in {sum(orders)} calls, with one idempotency key")


def fork(rt: hf.Runtime, store: str) -> None:
    ada = rt.flow(buy, key="ada")
    hasty = ada.fork("ada-in-a-hurry", at="hf.receive")
    hasty.send(Hinted(HINT))
    print(f"\nforked before the approval. Hint: {HINT}")
    with host(store):
        wait(lambda: proposals_differ(ada, hasty), "the proposal of the fork")
    for flow in (ada, hasty):
        account = hf.llm.account(rt.store, universe=rt.universe, flow=flow, unit="money")
        print(f"  {flow.key:15} {flow.published('proposal'):36} paid {account.spent / 1e6:.6f}")


def proposals_differ(one: hf.FlowHandle[str], other: hf.FlowHandle[str]) -> bool:
    return bool(one.published("proposal") != other.published("proposal"))


def run_dry(rt: hf.Runtime, outside: str, store: str) -> None:
    bob = rt.start(buy.options(key="bob"), GOAL, outside)
    hf.llm.set_limit(rt.store, universe=rt.universe, flow=bob, money=0.004)
    with host(store):
        try:
            bob.result(timeout=WAIT_S)
        except hf.FlowFailed as error:
            print(f"\nbob may spend 0.004. {error.step} stops him: {error.error_type}")
        hf.llm.set_limit(rt.store, universe=rt.universe, flow=bob, money=BUDGET)
        bob.redrive()
        wait(lambda: bob.published("proposal"), "the proposal of bob")
    print(f"with a higher limit, he continues where he stopped: {bob.published('proposal')}")


# -- processes -----------------------------------------------------------------------------------


@contextmanager
def host(store: str) -> Iterator[subprocess.Popen[str]]:
    """The process that hosts the agents: `holdfast up`."""
    options = ["--store", str(Path(store).resolve()), "--lease-s", "1.5"]
    with running("-m", "holdfast.cli", "up", "agent:app", *options) as process:
        first_line(process)
        yield process


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        sys.exit(f"{process.args!r} ended with {process.wait()}")
    return line


def calls_of(outside: str, what: str) -> list[int]:
    """The number of calls of each request to the model (`chat`) or of each `order`."""
    with urlopen(f"{outside}/calls") as answer:
        return [line["calls"] for line in json.load(answer).values() if line["what"] == what]


def wait(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {WAIT_S} s")
        time.sleep(0.02)


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "data"
    if Path(where).exists():
        sys.exit(f"{where} exists and ada has ordered: remove it, or choose another directory")
    show(where)
