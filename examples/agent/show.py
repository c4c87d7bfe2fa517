"""Run the agent, kill it during a question, print the bill, and fork it for an alternative decision.

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

from agent import MODEL, Agent, GoalGiven, Hinted, app

import holdfast as hf

HERE = Path(__file__).resolve().parent
GOAL = "We need 40 chairs for the new office. Who should get the order?"
HINT = "The office opens next week: they have to be there by then."
PRICES = {MODEL: {"input": 2.0, "output": 8.0}}  # per million tokens
BUDGET = 0.05
WAIT_S = 60.0


def show(store: str) -> None:
    with running("standin.py", "--stall", "2") as standin:
        outside = first_line(standin)
        os.environ["HOLDFAST_LLM_BASE_URL"] = f"{outside}/v1"
        os.environ["HOLDFAST_LLM_PRICES"] = json.dumps(PRICES)
        # Look-ups are limited to public addresses, unless the operator allows more.
        os.environ["HOLDFAST_HTTP_CIDRS"] = "127.0.0.0/8"
        os.environ["HOLDFAST_HTTP_PORTS"] = outside.rpartition(":")[2]
        with app.open(store, roles=()) as rt:
            hf.llm.set_limit(rt.store, universe=rt.universe, each_world=True, money=BUDGET)
            survive(rt, outside, store)
            with host(store):
                fork(rt)
                run_dry(rt, outside)


def survive(rt: hf.Runtime, outside: str, store: str) -> None:
    ada = rt.world(Agent, "ada")
    ada.send(GoalGiven(GOAL, outside))
    print(f"ada is asked: {GOAL}")
    with host(store) as process:
        wait(lambda: len(questions(outside)) == 2, "the second question")
        process.kill()
        process.wait()
    print("kill -9: the model has her second question, the store has no receipt for it")
    with host(store):
        decided = ada.wait_for(lambda agent: agent.status == "decided", timeout=WAIT_S)
    calls = questions(outside)
    print(f"started again, she decides: {decided.answer}")
    print(f"{len(calls)} questions in {sum(calls)} calls: ", end="")
    print("the one under way was asked again, with the same idempotency key")
    print(f"she spent {decided.spent:.6f}")


def fork(rt: hf.Runtime) -> None:
    ada = rt.world(Agent, "ada")
    last = max(entry.height for entry in ada.journal() if entry.type == hf.llm.chat.kind)
    hasty = ada.fork("ada-in-a-hurry", at=last - 1)
    hasty.send(Hinted(HINT))
    hasty.wait_for(lambda agent: agent.status == "decided", timeout=WAIT_S)
    print(f"\nforked at height {last - 1}, before her last decision. Hint: {HINT}")
    for world in (ada, hasty):
        account = hf.llm.account(rt.store, universe=rt.universe, world=world, unit="money")
        state = world.state()
        print(f"  {world.name:15} {state.answer:36} ", end="")
        print(f"cost {state.spent:.6f}, booked for this world {account.spent / 1e6:.6f}")


def run_dry(rt: hf.Runtime, outside: str) -> None:
    bob = rt.world(Agent, "bob")
    hf.llm.set_limit(rt.store, universe=rt.universe, world=bob, money=0.004)
    bob.send(GoalGiven(GOAL, outside))
    stopped = bob.wait_for(lambda agent: agent.status == "stopped", timeout=WAIT_S)
    print(f"\nbob may spend 0.004. He stops at {stopped.spent:.6f}: {stopped.answer}")


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


def questions(outside: str) -> list[int]:
    """The number of calls of each question to the model."""
    with urlopen(f"{outside}/calls") as answer:
        return [line["calls"] for line in json.load(answer).values() if line["what"] == "chat"]


def wait(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {WAIT_S} s")
        time.sleep(0.02)


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "data"
    if Path(where).exists():
        sys.exit(f"{where} exists and ada has decided: remove it, or choose another directory")
    show(where)
