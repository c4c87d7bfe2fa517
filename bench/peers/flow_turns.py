"""The systems of the flow workload. Each starts with an empty state and runs chains, single steps, and flows that wake."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb

from bench.peers import effect_turns, lateness
from bench.peers.effect_turns import DbosEffects, RestateEffects, shares
from bench.peers.effect_workload import IN_FLIGHT, STEPS_PER_S
from bench.peers.flow_app import STEPS
from bench.peers.flow_workload import FlowAmount
from bench.peers.process import Load, Up
from bench.peers.processors import used_by_side
from bench.peers.suite import percentile
from bench.place import Place, writer_pid
from holdfast import __version__

APP = "bench.peers.flow_app:app"


class HoldfastFlows:
    name = "holdfast"
    amount = FlowAmount()

    def settings(self) -> dict[str, str]:
        engine = ".".join(str(part) for part in lmdb.version())
        return {
            "version": f"holdfast {__version__}, py-lmdb {lmdb.__version__}, LMDB {engine}",
            "durability": "embedded store, fsync on (a redo log, one fdatasync a group commit)",
            "processes": "`holdfast up` with all roles, the store's writer, and the client",
            "chains": f"`@hf.flow` with {STEPS} `hf.step` of an `async def`; as many coroutines as chains "
            "at once, each calls `rt.aio.start` and awaits the handle",
            "steps": "one `hf.step`, timed in the flow: until it returns. first: from before `rt.start` "
            "until the function of the first step runs. whole: `rt.start` until `result`, two steps",
            "waking": "`hf.sleep` in one flow each, timed in the flow. tasks: `delay_s` of one task each, timed in "
            "the task",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[HoldfastFlowTurn]:
        with running(Place(directory)) as (client, worker, path):
            yield HoldfastFlowTurn(client, worker, path)


class HoldfastFlowTurn:
    def __init__(self, client: Load, worker: Up, path: Path) -> None:
        self._client = client
        self._worker = worker
        self._sides = {"client": [client.pid], "worker": [worker.pid], "writer": [writer_pid(path)]}
        # Warm-up: every role and every module runs once before anything is timed.
        self._ask("chains", callers=64, seconds=0.5, steps=STEPS)

    def chains(self, amount: FlowAmount) -> dict[str, float]:
        alone = self._ask("chains", callers=1, seconds=amount.chain_s / 8, steps=STEPS)
        measures = {"commits_1": alone["commits"] / alone["steps"]}
        for count in IN_FLIGHT:
            before = used_by_side(self._sides)
            answer = self._ask("chains", callers=count, seconds=amount.chain_s, steps=STEPS)
            measures[f"chains_{count}"] = answer["rate"]
            measures[f"commits_{count}"] = answer["commits"] / answer["steps"]
            for who, ns in used_by_side(self._sides).items():
                measures[f"{who}_us_{count}"] = (ns - before[who]) / 1000 / answer["steps"]
        return measures

    def steps(self, amount: FlowAmount) -> dict[str, float]:
        return _step_measures(self._ask("steps", count=amount.steps, per_s=STEPS_PER_S))

    def waking(self, amount: FlowAmount) -> dict[str, float]:
        flows = self._ask("wake_flows", count=amount.waking, lead_s=amount.lead_s)
        tasks = self._ask("wake_tasks", count=amount.waking, lead_s=amount.lead_s)
        return {
            "waking": rate_of(flows["late"]),
            "waking_ended": amount.waking / flows["ended_s"],
            "tasks": rate_of(tasks["late"]),
            "tasks_ended": amount.waking / tasks["ended_s"],
        }

    def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        answer = self._client.ask(what, **parameters)
        self._worker.require_running()
        return answer


class RestateFlows(RestateEffects):
    amount = FlowAmount()  # type: ignore[assignment]

    def ways(self) -> dict[str, str]:
        return {
            "handler": f"a service over HTTP/2, {self._services} hypercorn processes",
            "chains": f"{STEPS} `ctx.run` of an `async def` in one handler; as many connections "
            "(asyncio) as chains at once, each calls and waits for the answer",
            "steps": "one `ctx.run`, timed in the handler: until it returns. first: from before the call "
            "until the function of the first step runs. whole: the call, two steps",
            "waking": "`ctx.sleep` in one invocation each, timed in the handler",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with self.running(directory, str(directory / "lateness")) as load:
            yield PeerFlowTurn(load, warm_callers=64, delayed=False)


class DbosFlows(DbosEffects):
    # The start of five hundred sleeping workflows takes this long.
    amount = FlowAmount(waking=500, lead_s=15.0)  # type: ignore[assignment]

    def ways(self) -> dict[str, str]:
        return {
            "handler": "workflows called in the process that runs them: no queue, no polling",
            "chains": f"{STEPS} steps in a workflow, as many threads as chains at once",
            "steps": "one step, timed in the workflow: until it returns. first: from before the call until "
            "the function of the first step runs. whole: the workflow, two steps",
            "waking": "`DBOS.sleep_async` in one async workflow each, timed in the workflow",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        script = Path(effect_turns.__file__).with_name("dbos_effects.py")
        with self.database(directory) as url, Load([self._python, script, url]) as load:
            yield PeerFlowTurn(load, warm_callers=8)


class PeerFlowTurn:
    def __init__(self, load: Load, *, warm_callers: int, **timer_options: Any) -> None:
        self._load = load
        self._timer_options = timer_options
        # Warm-up: use every connection before anything is timed.
        load.ask("chains", callers=warm_callers, seconds=1.0, steps=STEPS)

    def chains(self, amount: FlowAmount) -> dict[str, float]:
        return {
            f"chains_{count}": self._load.ask(
                "chains", callers=count, seconds=amount.chain_s, steps=STEPS
            )["rate"]
            for count in IN_FLIGHT
        }

    def steps(self, amount: FlowAmount) -> dict[str, float]:
        return _step_measures(self._load.ask("singles", count=amount.steps, per_s=STEPS_PER_S))

    def waking(self, amount: FlowAmount) -> dict[str, float]:
        asked = {"count": amount.waking, "spread_s": 0.0, "lead_s": amount.lead_s}
        return {"waking": rate_of(self._load.ask("timers", **asked, **self._timer_options)["late"])}


def rate_of(late_ms: list[float]) -> float:
    """Flows per second, from their common due time until the code of the last one runs."""
    return len(late_ms) / max(max(late_ms) / 1000, 1e-3)


def _step_measures(times: dict[str, Any]) -> dict[str, float]:
    return {
        **shares("step", times["journaled"]),
        **shares("first", times["first"]),
        "whole_p95": percentile(times["whole"], 0.95),
    }


@contextlib.contextmanager
def running(place: Place, name: str = "flows") -> Iterator[tuple[Load, Up, Path]]:
    """A new store, a client of it, and a worker with all roles."""
    file = place.directory / f"{name}-lateness"
    with (
        place.store(name) as path,
        Load([sys.executable, "-m", "bench.peers.flow_load", path, file]) as client,
        Up(APP, path, worker="worker-1", env={lateness.VARIABLE: str(file)}) as worker,
    ):
        yield client, worker, path
    file.unlink(missing_ok=True)
