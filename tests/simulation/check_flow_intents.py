"""Checker of the flows that worlds start (X1): one flow for each intent, and its end as one receipt.

The cycles of the history have the intents and the journaled receipts. The audits have the flows.
"""

from __future__ import annotations

from typing import Any

from holdfast.sim.history import HistoryEvent
from tests.simulation import model_app
from tests.simulation.check_flow_records import CANCELLED, COMPLETED, Findings

Plain = dict[str, Any]
FLOW_PREFIX = "flow:"


class WorldStarts:
    """The intents of worlds that start flows, and their receipts, in one life of the store."""

    def __init__(self) -> None:
        # The kind of each intent by its hash.
        self.intents: dict[bytes, str] = {}
        self.receipts: dict[bytes, Plain] = {}

    def on_cycle(self, event: HistoryEvent) -> Findings:
        cycle = event.args["cycle"]
        for intent in cycle["intents"]:
            if intent["effect_kind"].startswith(FLOW_PREFIX):
                self.intents[intent["intent_hash"]] = intent["effect_kind"]
        for body in cycle["bodies"]:
            ingress = model_app.step_of(body)["ingress"]
            if ingress["kind"] != "receipt":
                continue
            receipt = model_app.receipt_of(ingress)
            if receipt["intent_hash"] not in self.intents:
                yield "X1", f"a receipt of {receipt['effect_kind']}, which no world started"
            if receipt["intent_hash"] in self.receipts:
                yield "X1", f"a second receipt of {receipt['effect_kind']}: {receipt}"
            self.receipts[receipt["intent_hash"]] = receipt

    def check_audit(self, flows: Plain) -> Findings:
        """Each intent has one flow, and a receipt has the end of its flow."""
        started: dict[str, list[int]] = {}
        for flow, body in flows["bodies"].items():
            if (body.get("parent") or {}).get("intent") and not body.get("redrive_of"):
                started.setdefault(body["key"], []).append(flow)
        expected = {intent_hash.hex() for intent_hash in self.intents}
        for key in started.keys() ^ expected:
            yield "X1", f"the intent {key[:8]} has the flows {started.get(key, [])}"
        for intent_hash, kind in self.intents.items():
            found = started.get(intent_hash.hex(), [])
            if len(found) > 1:
                yield "X1", f"the intent {intent_hash.hex()[:8]} started {kind} twice: {found}"
            receipt = self.receipts.get(intent_hash)
            if found and receipt is not None:
                yield from _check_receipt(flows, found[0], receipt)

    def without_receipt(self) -> list[str]:
        return [hash.hex()[:8] for hash in self.intents if hash not in self.receipts]


def _check_receipt(flows: Plain, flow: int, receipt: Plain) -> Findings:
    records = flows["records"].get(f"{flow}/1", {})
    # The first end: a redriven flow ends again.
    ends = [records[n] for n in sorted(records) if records[n]["kind"] == "ended"]
    if not ends:
        if receipt["code"] != "cancelled":
            yield "X1", f"flow {flow} has not ended, and its world has the receipt {receipt}"
    elif (receipt["status"] == "ok") != (ends[0]["state"] == COMPLETED):
        is_cancelled = receipt["code"] == "cancelled" and ends[0]["state"] == CANCELLED
        if not is_cancelled:
            yield "X1", f"flow {flow} ended as {ends[0]}, and its world has the receipt {receipt}"
    elif receipt["status"] == "ok" and receipt["value"] != flows["heads"][flow]["result"]:
        yield "X1", f"the world of flow {flow} has another result: {receipt}"
