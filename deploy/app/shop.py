"""The application of the sample deployment. Replace it with yours.

A shipment is a world. An effect reserves its stock, and a task makes a packing list.
"""

from __future__ import annotations

import holdfast as hf


class ShipmentOrdered(hf.Event):
    item: str
    count: int


@hf.effect("stock.reserve", attempts=5)
def reserve(call: hf.Call, item: str, count: int) -> str:
    return f"{count} x {item}"


@hf.task(attempts=3)
def packing_list(item: str, count: int) -> str:
    return f"pack {count} x {item}"


class Shipment(hf.World):
    ordered: int = 0
    reserved: int = 0

    @hf.on(ShipmentOrdered)
    def handle_order(self, event: ShipmentOrdered, cx: hf.Context) -> None:
        self.ordered += event.count
        cx.do(reserve, event.item, event.count)

    @hf.on(reserve)
    def handle_reservation(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.reserved += 1


app = hf.App("shop", worlds=[Shipment], tasks=[packing_list])
