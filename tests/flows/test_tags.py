"""Tags of flows, and of the tasks, effects and flows that their steps start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.flows import flow_list
from holdfast.flows.flow_list import FlowRow
from holdfast.flows.retention import remove_ended
from holdfast.store.api import Store
from holdfast.tasks import task_list
from holdfast.world import intents
from tests.flows.rig import FlowRig
from tests.process.watch import until

MODULES = ("holdfast.durable.tags", "holdfast.flows.new_flow")


@hf.task
def pack(n: int) -> int:
    return n


@hf.effect("quote")
def quote(call: hf.Call, n: int) -> int:
    return n


@hf.flow(retain_s=60)
async def child() -> None:
    await hf.sleep(3600)


@hf.flow
async def parent() -> None:
    steps = [
        hf.step(pack.options(tag="eu"), 1),
        hf.step(quote.options(tag="eu"), 1),
        hf.step(child.options(tag="eu")),
        hf.step(pack, 2),
    ]
    for step in steps:
        await step


app = hf.App("shop", tasks=[pack], effects=[quote], flows=[parent, child])


def flows_of(store: Store, universe: str, tag: str) -> list[FlowRow]:
    return store.read(flow_list.list_flows, universe, tag=tag).rows


def test_children_of_a_flow_have_the_tags_of_their_options(
    make_rig: Callable[[hf.App], FlowRig],
) -> None:
    rig = make_rig(app)
    rig.start(parent.options(tag="us"))
    while rig.run_one():
        pass
    store, universe = rig.store, rig.universe
    assert [row.body.spec.name for row in flows_of(store, universe, "eu")] == ["child"]
    assert [row.body.spec.name for row in flows_of(store, universe, "us")] == ["parent"]
    tagged = store.read(task_list.list_tasks, universe, tag="eu").rows
    assert [row.spec.name for row in tagged] == ["pack"]
    [(_, effect)] = store.read(intents.tagged_page, universe, "eu", b"", 10)
    assert (effect.effect_kind, effect.tag) == ("quote", "eu")


def test_removed_flow_leaves_the_list_of_its_tag(make_rig: Callable[[hf.App], FlowRig]) -> None:
    rig = make_rig(app)
    flow = rig.start(child.options(tag="eu"))
    again = rig.start(child.options(tag="eu", key="k"))
    flow.cancel()
    while rig.run_one():
        pass
    assert len(flows_of(rig.store, rig.universe, "eu")) == 2
    rig.clock.advance(120 * S)
    rig.store.transact(remove_ended, rig.universe, 10)
    assert [str(row.id) for row in flows_of(rig.store, rig.universe, "eu")] == [again.id]


def test_fork_keeps_the_tag(make_rig: Callable[[hf.App], FlowRig]) -> None:
    rig = make_rig(app)
    flow = rig.start(child.options(tag="eu"))
    while rig.run_one():
        pass
    fork = flow.fork("fork")
    assert [str(row.id) for row in flows_of(rig.store, rig.universe, "eu")] == [fork.id, flow.id]


def test_tag_of_a_task_and_a_flow_is_given_by_their_options() -> None:
    with app.open("memory:", roles=()) as rt:
        task = rt.submit(pack.options(tag="eu"), 1)
        flow = rt.start(child.options(tag="eu"))
        page = rt.store.read(task_list.list_tasks, "shop", tag="eu")
        assert [str(row.id) for row in page.rows] == [task.id]
        assert [str(row.id) for row in flows_of(rt.store, "shop", "eu")] == [flow.id]
        for tagged in (pack, child):
            with pytest.raises(Invalid):
                tagged.options(tag="x" * 201)
            with pytest.raises(Invalid):
                rt.schedule("nightly", tagged.options(tag="eu"), every="0 3 * * *")


class OrderWanted(hf.Event):
    pass


class TagShop(hf.World):
    @hf.on(OrderWanted)
    def wanted(self, event: OrderWanted, cx: hf.Context) -> None:
        cx.start(child.options(tag="eu"))

    @hf.on(child)
    def ended(self, receipt: hf.Receipt[None], cx: hf.Context) -> None:
        pass


def test_flow_that_a_world_starts_has_the_tag_of_its_options() -> None:
    shop = hf.App("shop", worlds=[TagShop], flows=[child])
    with shop.open("memory:") as rt:
        rt.world(TagShop, "a").send(OrderWanted())
        found = until(lambda: flows_of(rt.store, "shop", "eu"), "the flow")
        assert [row.body.spec.name for row in found] == ["child"]
