"""Flows that worlds start with `cx.start`: one flow for each intent, and its end as a receipt."""

from typing import Any

import msgspec

import holdfast as hf
from tests.process.watch import until


class BuyItem(hf.Event):
    id: str
    cents: int
    key: str | None = None
    by_name: bool = False


class StopOrder(hf.Event):
    pass


class ChargePaid(hf.Event):
    pass


async def charge(cents: int) -> int:
    if cents < 0:
        raise ValueError("no negative amounts")
    return cents * 2


@hf.flow
async def order(id: str, cents: int) -> int:
    paid = await hf.step(charge, cents)
    if id == "slow":
        await hf.receive(ChargePaid)
    return paid


class FlowStarter(hf.World):
    intents: list[bytes] = msgspec.field(default_factory=list)
    ends: list[tuple[str, int | None, str]] = msgspec.field(default_factory=list)

    @hf.on(BuyItem)
    def buy(self, event: BuyItem, cx: hf.Context) -> None:
        wanted = order.options(key=event.key) if event.key else order
        if event.by_name:
            intent = cx.start(wanted, cents=event.cents, id=event.id)
        else:
            intent = cx.start(wanted, event.id, event.cents)
        self.intents.append(intent.intent_hash)

    @hf.on(StopOrder)
    def stop(self, event: StopOrder, cx: hf.Context) -> None:
        cx.cancel(self.intents[-1])

    @hf.on(order)
    def ended(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ends.append((receipt.status, receipt.value, receipt.code))


app = hf.App("shop", worlds=[FlowStarter], flows=[order], events=[ChargePaid])


def ends_of(shop: Any, n: int) -> Any:
    def enough() -> Any:
        state = shop.state()
        return state.ends if state is not None and len(state.ends) >= n else None

    return until(enough, "the receipts")


def test_end_of_a_flow_is_a_receipt_of_its_world() -> None:
    with app.open("memory:") as rt:
        shop = rt.world(FlowStarter, "a")
        shop.send(BuyItem("x", 3))
        assert ends_of(shop, 1) == [("ok", 6, "")]
        shop.send(BuyItem("y", -1))
        assert ends_of(shop, 2)[1] == ("error", None, "step_failed")


def test_intent_with_a_key_starts_one_flow() -> None:
    with app.open("memory:") as rt:
        shop = rt.world(FlowStarter, "a")
        for by_name in (False, True, False):
            shop.send(BuyItem("x", 3, "k", by_name))
        shop.send(BuyItem("x", 4, "k"))
        assert sorted(ends_of(shop, 2)) == [("error", None, "key_conflict"), ("ok", 6, "")]


def test_cancel_of_the_intent_cancels_the_flow() -> None:
    with app.open("memory:") as rt:
        shop = rt.world(FlowStarter, "a")
        shop.send(BuyItem("slow", 3))
        key = until(lambda: (shop.state() or FlowStarter()).intents, "the intent")[0].hex()
        shop.send(StopOrder())
        assert ends_of(shop, 1) == [("error", None, "cancelled")]
        run = rt.flow(order, key=key)
        until(lambda: run.status().state == "CANCELLED", "the end of the flow")
        assert shop.state().ends == [("error", None, "cancelled")]


def test_fork_reissues_an_open_flow_as_its_own() -> None:
    with app.open("memory:") as rt:
        shop = rt.world(FlowStarter, "a")
        shop.send(BuyItem("slow", 3))
        until(lambda: (shop.state() or FlowStarter()).intents, "the intent")
        again = shop.fork("b", effects="reissue")
        failed = shop.fork("c", effects="fail")
        assert ends_of(failed, 1) == [("error", None, "dropped_by_fork")]
        runs = [rt.flow(f"f1-{n}") for n in (1, 2)]
        runs[1].send(ChargePaid())
        assert ends_of(again, 1) == [("ok", 6, "")]
        assert runs[0].status().state == "WAITING"
        assert shop.state().ends == []


def test_redriven_flow_brings_no_second_receipt() -> None:
    with app.open("memory:") as rt:
        shop = rt.world(FlowStarter, "a")
        shop.send(BuyItem("y", -1))
        assert len(ends_of(shop, 1)) == 1
        run = rt.flow("f1-1")
        run.redrive()
        until(run.done, "the second end")
        shop.send(BuyItem("x", 1))
        assert [end[0] for end in ends_of(shop, 2)] == ["error", "ok"]
