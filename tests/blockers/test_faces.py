"""The faces of `why`: Python, coroutines, the command line and the HTTP endpoint give the same answer."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import worker_registry
from holdfast.ops.api.call import invoke
from holdfast.ops.api.endpoint import match_path
from holdfast.ops.api.registry import endpoints
from holdfast.tasks import operations
from holdfast.tasks.ids import parse_task_id
from tests.blockers.test_blockers import PARSED
from tests.cli.conftest import RunCommand, run
from tests.workers.shop import Buyer, GoodsOrdered, Slept

__all__ = ["run"]


@hf.task
def pack(n: int) -> int:
    return n


@hf.flow
async def sell() -> None:
    await hf.sleep(60)


@pytest.fixture
def rt(tmp_path: Path) -> Iterator[Runtime]:
    app = hf.App("shop", worlds=[Buyer], tasks=[pack], flows=[sell])
    with app.open(str(tmp_path / "data"), roles=()) as rt:
        yield rt


def codes(answer: Any) -> list[str]:
    return [one["code"] for one in answer["blockers"]]


def get(rt: Runtime, path: str) -> Any:
    """Call the endpoint of a path."""
    parts = path.strip("/").split("/")
    for endpoint in endpoints():
        found = match_path(endpoint, parts) if endpoint.method == "GET" else None
        if found is not None:
            return invoke(endpoint, rt.store, rt.universe, path=found)
    raise AssertionError(f"no route for {path}")


def test_handles_and_ids_give_the_same_answer(rt: Runtime) -> None:
    ada, task, flow = rt.world(Buyer, "ada"), rt.submit(pack, 1), rt.start(sell)
    ada.send(GoodsOrdered())
    schedule = rt.schedule("night", pack, every="0 3 * * *", args=(1,))
    for handle, kind, id in (
        (ada, "world", "Buyer/ada"), (task, "task", task.id), (flow, "flow", flow.id),
        (schedule, "schedule", "night"),
    ):  # fmt: skip
        answer = rt.why(handle)
        assert answer["subject"] == f"{kind}/{id}"
        assert codes(answer) == codes(rt.why(kind, id)) == codes(asyncio.run(rt.aio.why(handle)))
        assert codes(get(rt, f"/v1/why/{kind}/{id}")) == codes(answer) != []


def test_unknown_subjects_are_not_found(rt: Runtime) -> None:
    rt.submit(pack, 1)
    for kind, id in (
        ("world", "Buyer/bob"), ("task", "1-99"), ("flow", "f1-99"), ("effect", "00ff"),
        ("timer", "Buyer/bob/nap"), ("run", "labels"), ("schedule", "night"), ("queue", "slow"),
        ("worker", "W"),
    ):  # fmt: skip
        with pytest.raises(NotFound):
            rt.why(kind, id)
    for arguments in (("planet", "x"), ("task",), (object(),), (3, "x")):
        with pytest.raises(Invalid):
            rt.why(*arguments)


def test_timers_and_queues_of_effects_have_routes(rt: Runtime) -> None:
    with hf.App("shop", worlds=[Buyer]).open(rt.store.url, roles=("world", "orchestrator")) as host:
        ada = host.world(Buyer, "ada")
        ada.send(Slept(600, key="nap"))
        ada.send(GoodsOrdered())
        ada.wait_for(lambda state: state.intents, timeout=30)
    assert codes(get(rt, "/v1/why/timer/Buyer/ada/nap")) == ["waits_for_due_time"]
    assert codes(get(rt, "/v1/why/queue/effects/pay")) == ["waits_in_queue"]
    assert get(rt, "/v1/why/universe/shop")["state"] == "not ready"


# -- the command line ------------------------------------------------------------------------------


def test_why_prints_text_and_json_and_its_exit_code(rt: Runtime, run: RunCommand) -> None:
    task = rt.submit(pack, 1)
    result = run("why", "task", task.id, "--store", rt.store.url)
    assert result.code == 1
    assert result.out.startswith("task/1-1 is ready\nno_live_worker: waits for a worker of queue")
    document = run("why", "task", task.id, "--json", "--store", rt.store.url).document
    assert (document["universe"], document["subject"]) == ("shop", "task/1-1")
    assert document["blockers"][0]["action"] == "start a worker with the role `task`"
    rt.store.transact(worker_registry.heartbeat, "shop", "T:task", "1", ("task",))
    rt.schedule("night", pack, every="0 3 * * *", args=(1,))
    assert run("why", "schedule", "night", "--store", rt.store.url).code == 0


def paused_world(rt: Runtime) -> tuple[str, str]:
    ada = rt.world(Buyer, "ada")
    ada.send(GoodsOrdered())
    ada.pause()
    return "world", "Buyer/ada"


def paused_schedule(rt: Runtime) -> tuple[str, str]:
    rt.schedule("night", pack, every="0 3 * * *", args=(1,)).pause()
    return "schedule", "night"


def cancelled_task(rt: Runtime) -> tuple[str, str]:
    task = rt.submit(pack, 1)
    rt.store.transact(operations.cancel, "shop", [parse_task_id(task.id).seq], "no")
    return "task", task.id


def drained_worker(rt: Runtime) -> tuple[str, str]:
    rt.store.transact(worker_registry.heartbeat, "shop", "A", "1", ("world",))
    rt.store.transact(worker_registry.set_draining, "shop", "A", True)
    return "worker", "A"


@pytest.mark.parametrize("cause", [paused_world, paused_schedule, cancelled_task, drained_worker])
def test_command_of_an_answer_mends_its_condition(rt: Runtime, run: RunCommand, cause: Any) -> None:
    kind, id = cause(rt)
    [blocker] = rt.why(kind, id)["blockers"]
    [command] = PARSED.findall(blocker["action"])
    assert run(*shlex.split(command)[1:], "--store", rt.store.url).code == 0
    assert blocker["code"] not in codes(rt.why(kind, id))


def test_memory_store_answers_without_a_file() -> None:
    with hf.App("shop", tasks=[pack]).open(stores.open("memory:"), roles=()) as rt:
        assert codes(rt.why(rt.submit(pack, 1))) == ["no_live_worker"]
