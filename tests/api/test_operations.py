"""The operations of document 004 as endpoints, with the parameters of the document as JSON fields."""

import base64
from typing import Any

import pytest

from holdfast import codec
from holdfast.errors import Fenced, Held, Invalid, KeyConflict, NotFound
from holdfast.ops.api.call import NeedsApp
from holdfast.ops.api.registry import endpoints
from holdfast.ops.world_operations import NotActive, NotAssigned
from tests.api.rig import WORKER, ApiRig

MODULES = ("holdfast.ops.api.operations",)
ADA = "ShopAccount/ada"
SECTION = "9) Operational APIs (internal)"


def act(rig: ApiRig, name_: str, /, **body: Any) -> Any:
    return rig.post(f"/v1/operations/{name_}", body)


@pytest.fixture
def ada(rig: ApiRig) -> str:
    return str(rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"})["world_id"])


@pytest.mark.spec(
    "004", SECTION, "each operation of the control surface has an endpoint by its name"
)
def test_every_operation_of_the_document_has_an_endpoint() -> None:
    names = {
        endpoint.segments[2]
        for endpoint in endpoints()
        if endpoint.segments[:2] == ("v1", "operations")
    }
    assert names == {
        "assign_world", "unassign_world", "acquire_lease", "renew_lease", "release_lease",
        "enqueue_ingress", "list_worker_worlds", "world_fork", "world_create_from_seed",
        "event_send", "receipt_inject",
    }  # fmt: skip


def test_assigned_world_is_listed_for_its_worker(rig: ApiRig, ada: str) -> None:
    assigned = act(rig, "assign_world", world=ADA, worker=WORKER)
    assert assigned == {
        "world_id": ada,
        "desired_worker_id": WORKER,
        "priority": 0,
        "reason": "operator",
        "pinned": False,
    }
    assert act(rig, "assign_world", world=ada, worker=WORKER) == assigned
    listed = act(rig, "list_worker_worlds", worker=WORKER)
    assert listed == {"worker": WORKER, "worlds": [ada], "next": None}
    assert act(rig, "unassign_world", world=ADA) == {"world_id": ada, "unassigned": True}
    assert act(rig, "unassign_world", world=ADA) == {"world_id": ada, "unassigned": False}
    assert act(rig, "list_worker_worlds", worker=WORKER)["worlds"] == []
    assert [entry.action for entry in rig.audit_entries()] == [
        *["assign_world"] * 2,
        *["unassign_world"] * 2,
    ]


def test_worlds_of_a_worker_are_listed_in_pages(rig: ApiRig) -> None:
    ids = []
    for name in ("a", "b", "c"):
        made = rig.post("/v1/worlds", {"type": "ShopAccount", "name": name})
        ids.append(made["world_id"])
        act(rig, "assign_world", world=made["world_id"], worker=WORKER)
    first = act(rig, "list_worker_worlds", worker=WORKER, limit=2)
    rest = act(rig, "list_worker_worlds", worker=WORKER, limit=2, after=first["next"])
    assert first["worlds"] + rest["worlds"] == sorted(ids)
    with pytest.raises(Invalid):
        act(rig, "list_worker_worlds", worker=WORKER, limit=0)


def test_lease_is_acquired_renewed_and_released(rig: ApiRig, ada: str) -> None:
    lease = act(rig, "acquire_lease", world=ADA, worker="w-1")
    assert (lease["world_id"], lease["holder_worker_id"], lease["epoch"]) == (ada, "w-1", 1)
    assert act(rig, "acquire_lease", world=ADA, worker="w-1") == lease
    with pytest.raises(Held):
        act(rig, "acquire_lease", world=ADA, worker="w-2")
    renewed = act(rig, "renew_lease", world=ADA, worker="w-1", epoch=1, ttl_s=60)
    assert renewed["expires_at_ns"] > lease["expires_at_ns"]
    assert act(rig, "release_lease", world=ADA, worker="w-1", epoch=1)["released"]
    assert not act(rig, "release_lease", world=ADA, worker="w-1", epoch=1)["released"]
    assert act(rig, "acquire_lease", world=ADA, worker="w-2")["epoch"] == 2
    with pytest.raises(Fenced):
        act(rig, "renew_lease", world=ADA, worker="w-1", epoch=1)
    assert rig.audit_entries() == []


def test_lease_of_a_world_that_may_not_be_hosted_is_refused(rig: ApiRig, ada: str) -> None:
    act(rig, "assign_world", world=ADA, worker="w-1")
    with pytest.raises(NotAssigned):
        act(rig, "acquire_lease", world=ADA, worker="w-2")
    rig.post(f"/v1/worlds/{ADA}/pause")
    with pytest.raises(NotActive):
        act(rig, "acquire_lease", world=ADA, worker="w-1")
    for ttl_s in (0, -1, 1e30):
        with pytest.raises(Invalid):
            act(rig, "acquire_lease", world=ADA, worker="w-1", ttl_s=ttl_s)


def test_ingress_is_enqueued_once_per_key(rig: ApiRig, ada: str) -> None:
    item = {"kind": "event", "type": "Deposit", "value": {"amount": 3}}
    keyed = {"world": ADA, "item": item, "key": "k"}
    first = rig.post("/v1/operations/enqueue_ingress", keyed)
    assert first == {"world_id": ada, "seq": 1, "status": "accepted", "waits_for": None}
    again = rig.post("/v1/operations/enqueue_ingress", {"world": ada, "item": item}, key="k")
    assert again == {**first, "status": "waiting"}
    rig.run_worlds()
    assert rig.get(f"/v1/worlds/{ADA}/state")["state"]["balance"] == 3
    other = {**item, "value": {"amount": 4}}
    with pytest.raises(KeyConflict):
        rig.post("/v1/operations/enqueue_ingress", {"world": ADA, "item": other, "key": "k"})
    with pytest.raises(Invalid):
        rig.post("/v1/operations/enqueue_ingress", {"world": ADA, "item": item})


def test_ingress_in_its_stored_encoding_needs_no_app(rig: ApiRig, ada: str) -> None:
    assert rig.app is not None
    _, value = rig.app.encode_event(rig.app.events["Deposit"].kind(amount=9))
    stored = base64.b64encode(value).decode()
    rig.app = None
    item = {"kind": "event", "type": "Deposit"}
    with pytest.raises(NeedsApp):
        act(rig, "enqueue_ingress", world=ADA, key="k", item={**item, "value": {}})
    act(rig, "enqueue_ingress", world=ADA, key="k", item={**item, "value_base64": stored})
    rig.run_worlds()
    assert codec.unpack(value[1:]) == {"amount": 9}
    assert rig.get(f"/v1/worlds/{ADA}")["height"] == 1


@pytest.mark.parametrize(
    "item",
    [
        {"kind": "event", "type": "Deposit"},
        {"kind": "event", "type": "Deposit", "value": 3},
        {"kind": "event", "type": "Deposit", "value": {}, "value_base64": ""},
        {"kind": "event", "type": "Unheard", "value": {}},
        {"kind": "mail", "type": "Deposit", "value": {}},
        {"kind": "receipt", "type": "fx.quote", "value": {}},
        {"kind": "event", "type": "Deposit", "value_base64": "!"},
        {"kind": "event", "type": "Deposit", "value": {}, "intent_hash": "xyz"},
    ],
)
def test_bad_ingress_is_refused(rig: ApiRig, ada: str, item: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.post("/v1/operations/enqueue_ingress", {"world": ADA, "item": item, "key": "k"})
    assert rig.get(f"/v1/worlds/{ADA}")["depth"] == 0


def test_event_send_creates_the_world_once(rig: ApiRig) -> None:
    body = {"world": ADA, "type": "Deposit", "event": {"amount": 2}, "key": "k"}
    first = rig.post("/v1/operations/event_send", body)
    assert rig.post("/v1/operations/event_send", body)["seq"] == first["seq"]
    by_id = {**body, "world": first["world_id"]}
    assert rig.post("/v1/operations/event_send", by_id)["seq"] == first["seq"]
    rig.app = None
    with pytest.raises(NeedsApp):
        rig.post("/v1/operations/event_send", body)


def test_injected_receipt_is_final(rig: ApiRig, ada: str) -> None:
    rig.post(f"/v1/worlds/{ADA}/send", {"type": "QuoteWanted"})
    rig.run_worlds()
    [effect] = rig.get("/v1/effects", kind="fx.quote", state="ready")["items"]
    receipt = {
        "intent_hash": effect["intent"], "effect_kind": "fx.quote", "status": "ok", "value": 1.5,
    }  # fmt: skip
    with pytest.raises(Invalid):
        act(rig, "receipt_inject", world=ADA, receipt={**receipt, "effect_kind": "fx.other"})
    with pytest.raises(Invalid):
        act(rig, "receipt_inject", world=ADA, receipt={**receipt, "status": "fine"})
    first = act(rig, "receipt_inject", world=ADA, receipt=receipt)
    assert act(rig, "receipt_inject", world=ADA, receipt=receipt)["seq"] == first["seq"]
    rig.run_worlds()
    assert rig.get(f"/v1/worlds/{ADA}/state")["state"]["rate"] == 1.5
    assert {entry.action for entry in rig.audit_entries()} == {"receipt_inject"}


def test_fork_and_seed_by_the_names_of_the_document(rig: ApiRig, ada: str) -> None:
    rig.post(f"/v1/worlds/{ADA}/send", {"type": "Deposit", "event": {"amount": 2}})
    rig.run_worlds()
    fork = {"src_world": ADA, "src_snapshot": 1, "name": "fork"}
    child = act(rig, "world_fork", **fork)
    assert act(rig, "world_fork", **fork) == child
    seed = {"type": "ShopAccount", "name": "seed", "seed_snapshot": {"world_id": ada, "height": 1}}
    made = act(rig, "world_create_from_seed", **seed)
    assert act(rig, "world_create_from_seed", **seed) == made
    assert [world["lineage"][0]["forked_at_height"] for world in (child, made)] == [1, 1]
    actions = [entry.action for entry in rig.audit_entries()]
    assert actions == ["world_fork"] * 2 + ["world_create_from_seed"] * 2


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("assign_world", {"worker": WORKER}),
        ("unassign_world", {}),
        ("acquire_lease", {"worker": WORKER}),
        ("renew_lease", {"worker": WORKER, "epoch": 1}),
        ("release_lease", {"worker": WORKER, "epoch": 1}),
        ("enqueue_ingress", {"key": "k", "item": {"kind": "inbox", "type": "n", "value": 1}}),
        ("receipt_inject", {"receipt": {"intent_hash": "00", "effect_kind": "k", "status": "ok"}}),
    ],
)
def test_operation_on_an_unknown_world_is_not_found(
    rig: ApiRig, name: str, body: dict[str, Any]
) -> None:
    for world in (ADA, "0" * 32):
        with pytest.raises(NotFound):
            act(rig, name, world=world, **body)
    assert rig.audit_entries() == []


@pytest.mark.parametrize("name", ["assign_world", "renew_lease", "enqueue_ingress", "world_fork"])
def test_operation_without_its_parameters_is_refused(rig: ApiRig, name: str) -> None:
    with pytest.raises(Invalid):
        act(rig, name)
    with pytest.raises(Invalid):
        act(rig, name, world=7)
