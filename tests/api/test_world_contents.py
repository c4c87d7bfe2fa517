"""The endpoints of the effects, timers, forks and event types of a world, and the event types of a flow."""

import pytest

from holdfast.errors import NotFound
from holdfast.ops.api import world_contents
from holdfast.ops.api.call import NeedsApp
from holdfast.store.api import Txn
from holdfast.world import catalog
from tests.api.rig import WORKER, ApiRig
from tests.api.test_flows import start
from tests.api.test_pending_work import bury

MODULES = ("holdfast.ops.api.world_contents", "holdfast.ops.event_documents")
ADA = "/v1/worlds/ShopAccount/ada"


def send(rig: ApiRig, name: str, type: str, **fields: object) -> None:
    body = {"type": type, "event": fields}
    rig.post(f"/v1/worlds/ShopAccount/{name}/send", body)
    rig.run_worlds()


def test_open_and_dead_effects_of_a_world_are_listed_in_pages(rig: ApiRig) -> None:
    send(rig, "ada", "QuoteWanted")
    bury(rig, f"{rig.universe}/effects/fx.quote")
    for name in ("bob", "ada", "bob", "ada"):
        send(rig, name, "QuoteWanted")
    for limit in (1, 2, 5):
        found = rig.pages(f"{ADA}/effects", limit=limit)
        assert {one["world"] for one in found} == {"ShopAccount/ada"}
        assert sorted(one["state"] for one in found) == ["dead", "ready", "ready"]
    assert len({one["intent"] for one in found}) == 3


def test_page_of_effects_may_be_short_and_continue(
    rig: ApiRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "bob", "carl", "ada"):
        send(rig, name, "QuoteWanted")
    monkeypatch.setattr(world_contents, "SCANNED_MAX", 1)
    assert len(rig.get(f"{ADA}/effects")["items"]) <= 1
    assert len(rig.pages(f"{ADA}/effects")) == 2


def test_timers_of_a_world_are_listed_in_pages(rig: ApiRig) -> None:
    for name in ("ada", "bob"):
        send(rig, name, "Nudge")
    found = rig.pages(f"{ADA}/timers", limit=1)
    assert [(one["world"], one["key"], one["event"]) for one in found] == [
        ("ShopAccount/ada", "nudge", "Deposit")
    ]


def test_direct_forks_of_a_world_are_listed(rig: ApiRig, monkeypatch: pytest.MonkeyPatch) -> None:
    send(rig, "ada", "Deposit", amount=5)
    for name in ("f-1", "f-2", "f-3"):
        rig.post(f"{ADA}/fork", {"name": name, "at": 1})
    rig.post("/v1/worlds/ShopAccount/f-1/fork", {"name": "grandchild"})
    rig.post("/v1/worlds/ShopAccount/f-3/delete")
    for limit in (1, 2, 5):
        found = rig.pages(f"{ADA}/forks", limit=limit)
        assert sorted(one["name"] for one in found) == ["f-1", "f-2"]
    assert {one["forked_at_height"] for one in found} == {1}
    monkeypatch.setattr(world_contents, "SCANNED_MAX", 1)
    assert sorted(one["name"] for one in rig.pages(f"{ADA}/forks")) == ["f-1", "f-2"]


def test_event_types_of_a_world_have_the_schema_of_their_fields(rig: ApiRig) -> None:
    send(rig, "ada", "Deposit", amount=5)
    found = {one["type"]: one for one in rig.get(f"{ADA}/event-types")["items"]}
    # The app also knows Review, which no handler of this world takes.
    assert sorted(found) == ["Deposit", "DepositRefused", "Nudge", "QuoteWanted"]
    schema = found["Deposit"]["fields"]
    fields = schema["$defs"]["Deposit"]["properties"]
    assert (found["Deposit"]["version"], fields["amount"]) == (1, {"type": "integer", "default": 1})
    rig.app = None
    with pytest.raises(NeedsApp):
        rig.get(f"{ADA}/event-types")


def test_event_types_of_a_flow_are_those_of_the_app(rig: ApiRig) -> None:
    flow = start(rig)
    assert "Review" in {one["type"] for one in rig.get(f"/v1/flows/{flow}/event-types")["items"]}
    with pytest.raises(NotFound):
        rig.get("/v1/flows/f1-999/event-types")


def test_lease_of_a_world_is_shown_with_its_epoch(rig: ApiRig) -> None:
    made = rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"})
    assert (made["epoch"], made["leased_until_ns"]) == (None, None)
    send(rig, "ada", "Deposit", amount=5)
    released = rig.get(ADA)
    assert released["epoch"] >= 1
    assert (released["holder"], released["leased_until_ns"]) == (None, None)

    def lease(txn: Txn) -> None:
        from holdfast.durable import lease as leases

        subject = catalog.subject_of(rig.universe, made["world_id"])
        leases.acquire.fn(txn, subject, WORKER, "first", 60 * 10**9)

    rig.store.transact(lease)
    held = rig.get(ADA)
    assert held["holder"] == WORKER
    assert held["epoch"] == released["epoch"] + 1
    assert held["leased_until_ns"] > rig.store.now_ns()


@pytest.mark.parametrize("part", ["effects", "timers", "forks", "event-types"])
def test_contents_of_an_unknown_world_are_not_found(rig: ApiRig, part: str) -> None:
    with pytest.raises(NotFound):
        rig.get(f"/v1/worlds/ShopAccount/nobody/{part}")
