"""The systems of the effect workload: each started afresh, then asked for chains, steps and timers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from bench.peers.dbos_turn import Dbos
from bench.peers.effect_workload import IN_FLIGHT, SHARES, STEPS_PER_S, EffectAmount
from bench.peers.flows import STEPS
from bench.peers.process import Load, Up
from bench.peers.processors import used_ns
from bench.peers.restate_turn import Restate
from bench.peers.suite import percentile
from bench.place import Place, writer_pid
from holdfast import __version__

APP = "bench.peers.flows:app"
# How the roles are spread over processes. All in one is what users begin with, and the default.
LAYOUTS: dict[str, Sequence[Sequence[str]]] = {
    "one": [()],
    "split": [("orchestrator", "world", "timer"), ("adapter",)],
}
# The extra parts need no more than these shares of the time of the parts that are compared.
NEW_WORLDS_PER_S = 100
FEW_WORLDS = 100


class HoldfastEffects:
    name = "holdfast"
    amount = EffectAmount()
    layout = "one"
    # Where its store is made.
    place = Place

    def settings(self) -> dict[str, str]:
        engine = ".".join(str(part) for part in lmdb.version())
        return {
            "version": f"holdfast {__version__}, py-lmdb {lmdb.__version__}, LMDB {engine}",
            "durability": "embedded store, fsync on (a redo log, one fdatasync a group commit)",
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        roles = [" ".join(one) or "all roles" for one in LAYOUTS[self.layout]]
        return {
            "processes": f"`holdfast up`, one process each: {'; '.join(roles)}. "
            "Besides them the store's writer, and the client",
            "chains": "worlds that stand: an event, whose effect's receipt wants the next effect; "
            "`def` effects with the default concurrency. The client looks at journals and sends "
            "the next event to a world whose chain has ended",
            "chains_new": "a new world for each chain, all sent at once",
            "steps": "from the transaction of the entry that wants the effect until the entry with "
            "its receipt is durable and seen; looked at every 0.2 ms. whole: from before the send",
            "timers": "`cx.at` in one world each; the wall clock that the reducer saw",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with running(self.place(directory), self.layout) as (client, roles, path):
            yield HoldfastTurn(client, roles, path)


class HoldfastTurn:
    def __init__(
        self, client: Load, roles: Sequence[Up], path: Path, *, worlds: int = max(IN_FLIGHT)
    ) -> None:
        self._client = client
        self._roles = roles
        self._writer = writer_pid(path)
        # Every role has worked, and every effect was done once, before anything is timed.
        self._worlds: list[str] = client.ask("worlds", count=worlds)["names"]

    def chains(self, amount: EffectAmount) -> dict[str, float]:
        found: dict[str, float] = {}
        for count in IN_FLIGHT:
            rated = self.rated(count, seconds=amount.chain_s)
            found |= {f"{name}_{count}": value for name, value in rated.items()}
            again = self.rated(count, seconds=amount.chain_s / 2, is_async=True)
            found[f"chains_{count}_async"] = again["chains"]
        count = max(int(amount.chain_s * NEW_WORLDS_PER_S), 50)
        found["chains_new"] = self._ask("fresh", count=count, batch=500)["rate"]
        return found

    def steps(self, amount: EffectAmount) -> dict[str, float]:
        names = self._worlds[:100]
        found = self._ask("steps", names=names, count=amount.steps, per_s=STEPS_PER_S)
        return {
            **shares("step", found["journaled"]),
            "whole_p95": percentile(found["whole"], 0.95),
        }

    def timers(self, amount: EffectAmount) -> dict[str, float]:
        asked = {"count": amount.timers, "spread_s": amount.spread_s, "lead_s": amount.lead_s}
        late = self._ask("timers", worlds=amount.timers, **asked)["late"]
        few = self._ask("timers", worlds=min(FEW_WORLDS, amount.timers), **asked)["late"]
        return {**shares("timer", late), "few_worlds_p95": percentile(few, 0.95)}

    def rated(self, count: int, *, seconds: float, is_async: bool = False) -> dict[str, float]:
        """So many chains at once: the rate, and processor time per step of client, roles, writer."""
        groups = {
            "client_us": [self._client.pid],
            "roles_us": [role.pid for role in self._roles],
            "writer_us": [self._writer],
        }
        before = {name: used_ns(pids) for name, pids in groups.items()}
        names = self._worlds[:count]
        answer = self._ask("chains", names=names, seconds=seconds, is_async=is_async)
        used = {name: used_ns(pids) - before[name] for name, pids in groups.items()}
        steps = answer["steps"]
        return {"chains": answer["rate"], **{name: ns / 1000 / steps for name, ns in used.items()}}

    def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        answer = self._client.ask(what, **parameters)
        for role in self._roles:
            role.require_running()
        return answer


class RestateEffects(Restate):
    amount = EffectAmount()  # type: ignore[assignment]
    service = "restate_flows.py"
    load = "restate_flow_load.py"

    def ways(self) -> dict[str, str]:
        return {
            "handler": f"a service over HTTP/2, {self._services} hypercorn processes",
            "chains": f"{STEPS} `ctx.run` of an `async def` in one handler; as many connections "
            "(asyncio) as chains at once, each calls and waits for the answer",
            "steps": "one `ctx.run`, timed in the handler: until it returns. whole: the call",
            "timers": "`ctx.sleep` in one invocation each, timed in the handler; "
            "delayed: sends with a delay, timed in the handler that they call",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with self.running(directory, str(directory / "lateness")) as load:
            yield RestateTurn(load)


class RestateTurn:
    def __init__(self, load: Load) -> None:
        self._load = load
        # Every partition and every connection has been used before anything is timed.
        load.ask("chains", callers=64, seconds=1.0, steps=STEPS)

    def chains(self, amount: EffectAmount) -> dict[str, float]:
        return {
            f"chains_{count}": self._load.ask(
                "chains", callers=count, seconds=amount.chain_s, steps=STEPS
            )["rate"]
            for count in IN_FLIGHT
        }

    def steps(self, amount: EffectAmount) -> dict[str, float]:
        found = self._load.ask("steps", count=amount.steps, per_s=STEPS_PER_S)
        return {
            **shares("step", found["journaled"]),
            "whole_p95": percentile(found["whole"], 0.95),
        }

    def timers(self, amount: EffectAmount) -> dict[str, float]:
        asked = {"count": amount.timers, "spread_s": amount.spread_s, "lead_s": amount.lead_s}
        slept = self._load.ask("timers", delayed=False, **asked)["late"]
        sent = self._load.ask("timers", delayed=True, **asked)["late"]
        return {**shares("timer", slept), "delayed_p95": percentile(sent, 0.95)}


class DbosEffects(Dbos):
    # It takes that long to start two thousand workflows.
    amount = EffectAmount(lead_s=45.0)  # type: ignore[assignment]

    def ways(self) -> dict[str, str]:
        return {
            "handler": "workflows called in the process that runs them: no queue, no polling",
            "chains": f"{STEPS} steps in a workflow, as many threads as chains at once",
            "steps": "one step, timed in the workflow: until it returns. whole: the workflow",
            "timers": "`DBOS.sleep_async` in one async workflow each, timed in the workflow",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        script = Path(__file__).with_name("dbos_flows.py")
        with self.database(directory) as url, Load([self._python, script, url]) as load:
            yield DbosTurn(load)


class DbosTurn:
    def __init__(self, load: Load) -> None:
        self._load = load
        load.ask("chains", callers=8, seconds=0.5, steps=STEPS)

    def chains(self, amount: EffectAmount) -> dict[str, float]:
        return {
            f"chains_{count}": self._load.ask(
                "chains", callers=count, seconds=amount.chain_s, steps=STEPS
            )["rate"]
            for count in IN_FLIGHT
        }

    def steps(self, amount: EffectAmount) -> dict[str, float]:
        found = self._load.ask("steps", count=amount.steps, per_s=STEPS_PER_S)
        return {
            **shares("step", found["journaled"]),
            "whole_p95": percentile(found["whole"], 0.95),
        }

    def timers(self, amount: EffectAmount) -> dict[str, float]:
        asked = {"count": amount.timers, "spread_s": amount.spread_s, "lead_s": amount.lead_s}
        return shares("timer", self._load.ask("timers", **asked)["late"])


@contextlib.contextmanager
def running(
    place: Place, layout: str, name: str = "flows"
) -> Iterator[tuple[Load, list[Up], Path]]:
    """A new store, a client of it, and the roles in the processes of a layout."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(place.store(name))
        client = spawn("client", path)
        stack.enter_context(client)
        roles = []
        for at, one in enumerate(LAYOUTS[layout]):
            roles.append(Up(APP, path, *one, worker=f"worker-{at}"))
            stack.enter_context(roles[-1])
        yield client, roles, path


def spawn(role: str, path: Path) -> Load:
    arguments = json.dumps({"path": str(path)})
    return Load([sys.executable, "-m", "bench.peers.flow_load", role, arguments])


def shares(measure: str, values: list[float]) -> dict[str, float]:
    return {f"{measure}_{name}": percentile(values, share) for name, share in SHARES.items()}
