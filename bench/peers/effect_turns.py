"""The systems of the effect workload. Each starts with an empty state and runs chains, steps and timers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from bench.peers.dbos_turn import Dbos
from bench.peers.effect_app import STEPS
from bench.peers.effect_workload import IN_FLIGHT, SHARES, STEPS_PER_S, EffectAmount
from bench.peers.process import Load, Up
from bench.peers.processors import used_by_side
from bench.peers.restate_turn import Restate
from bench.peers.suite import percentile
from bench.place import Place, writer_pid
from holdfast import __version__

APP = "bench.peers.effect_app:app"
# Assignment of roles to processes. All roles in one process is the default.
LAYOUTS: dict[str, Sequence[Sequence[str]]] = {
    "one": [()],
    "split": [("orchestrator", "world", "timer"), ("adapter",)],
}
# Maximum time of the extra parts, as shares of the time of the compared parts.
NEW_WORLDS_PER_S = 100
FEW_WORLDS = 100


class HoldfastEffects:
    name = "holdfast"
    amount = EffectAmount()
    layout = "one"
    # Creates the store.
    place = Place

    def settings(self) -> dict[str, str]:
        engine = ".".join(str(part) for part in lmdb.version())
        return {
            "version": f"holdfast {__version__}, py-lmdb {lmdb.__version__}, LMDB {engine}",
            "durability": "embedded store, fsync on (a redo log, one fdatasync a group commit)",
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        roles = [" ".join(names) or "all roles" for names in LAYOUTS[self.layout]]
        return {
            "processes": f"`holdfast up`, one process each: {'; '.join(roles)}. "
            "Besides them the store's writer, and the client",
            "chains": "existing worlds: an event requests an effect, and each receipt requests the next "
            "effect; `def` effects with the default concurrency. The client polls the journals and "
            "sends the next event to a world when its chain ends",
            "chains_new": "a new world for each chain, all sent at once",
            "steps": "from the transaction of the entry that requests the effect until the client reads "
            "the durable entry with its receipt; read every 0.2 ms. whole: from before the send",
            "timers": "one `cx.at` per world, timed by the wall clock of the reducer",
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
        # Warm-up: every role and every effect runs once before anything is timed.
        self._worlds: list[str] = client.ask("worlds", count=worlds)["names"]

    def chains(self, amount: EffectAmount) -> dict[str, float]:
        measures: dict[str, float] = {}
        for count in IN_FLIGHT:
            rated = self.rated(count, seconds=amount.chain_s)
            measures |= {f"{name}_{count}": value for name, value in rated.items()}
            again = self.rated(count, seconds=amount.chain_s / 2, is_async=True)
            measures[f"chains_{count}_async"] = again["chains"]
        count = max(int(amount.chain_s * NEW_WORLDS_PER_S), 50)
        measures["chains_new"] = self._ask("fresh", count=count, batch=500)["rate"]
        return measures

    def steps(self, amount: EffectAmount) -> dict[str, float]:
        names = self._worlds[:100]
        times = self._ask("steps", names=names, count=amount.steps, per_s=STEPS_PER_S)
        return {
            **shares("step", times["journaled"]),
            "whole_p95": percentile(times["whole"], 0.95),
        }

    def timers(self, amount: EffectAmount) -> dict[str, float]:
        parameters = {"count": amount.timers, "spread_s": amount.spread_s, "lead_s": amount.lead_s}
        late = self._ask("timers", worlds=amount.timers, **parameters)["late"]
        few = self._ask("timers", worlds=min(FEW_WORLDS, amount.timers), **parameters)["late"]
        return {**shares("timer", late), "few_worlds_p95": percentile(few, 0.95)}

    def rated(self, count: int, *, seconds: float, is_async: bool = False) -> dict[str, float]:
        """Run `count` chains at once: the rate, and the processor time per step of client, roles and writer."""
        groups = {
            "client_us": [self._client.pid],
            "roles_us": [role.pid for role in self._roles],
            "writer_us": [self._writer],
        }
        before = used_by_side(groups)
        names = self._worlds[:count]
        answer = self._ask("chains", names=names, seconds=seconds, is_async=is_async)
        used = {name: ns - before[name] for name, ns in used_by_side(groups).items()}
        steps = answer["steps"]
        return {"chains": answer["rate"], **{name: ns / 1000 / steps for name, ns in used.items()}}

    def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        answer = self._client.ask(what, **parameters)
        for role in self._roles:
            role.require_running()
        return answer


class RestateEffects(Restate):
    amount = EffectAmount()  # type: ignore[assignment]
    service = "restate_effects.py"
    load = "restate_effect_load.py"

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
        # Warm-up: use every partition and every connection before anything is timed.
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
    # The start of two thousand workflows takes this long.
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
        script = Path(__file__).with_name("dbos_effects.py")
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
        for at, names in enumerate(LAYOUTS[layout]):
            roles.append(Up(APP, path, *names, worker=f"worker-{at}"))
            stack.enter_context(roles[-1])
        yield client, roles, path


def spawn(role: str, path: Path) -> Load:
    arguments = json.dumps({"path": str(path)})
    return Load([sys.executable, "-m", "bench.peers.effect_load", role, arguments])


def shares(measure: str, values: list[float]) -> dict[str, float]:
    return {f"{measure}_{name}": percentile(values, share) for name, share in SHARES.items()}
