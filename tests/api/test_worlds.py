"""The endpoints of worlds."""

from typing import Any

import pytest

from holdfast import codec
from holdfast.errors import IllegalTransition, Invalid, KeyConflict, NotFound
from holdfast.ops.api.call import NeedsApp, NoIndex
from holdfast.ops.world_operations import world_create
from holdfast.world.purge import WorldInUse
from tests.api.rig import ACTOR, WORKER, ApiRig

MODULES = ("holdfast.ops.api.worlds", "holdfast.ops.world_documents")
ADA = "/v1/worlds/ShopAccount/ada"


def deposit(rig: ApiRig, amount: int, name: str = "ada") -> Any:
    return rig.post(
        f"/v1/worlds/ShopAccount/{name}/send", {"type": "Deposit", "event": {"amount": amount}}
    )


@pytest.fixture
def ada(rig: ApiRig) -> str:
    """An account after two deposits, with a snapshot. Returns its id."""
    deposit(rig, 5)
    deposit(rig, 7)
    rig.run_worlds()
    return str(rig.get(ADA)["world_id"])


def test_created_world_is_shown(rig: ApiRig) -> None:
    made = rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"})
    assert (made["type"], made["name"], made["status"]) == ("ShopAccount", "ada", "active")
    assert (made["height"], made["lineage"]) == (0, [])
    assert rig.get(ADA) == made
    assert rig.get(f"/v1/worlds/by-id/{made['world_id']}") == made


def test_creating_a_world_again_returns_the_same_world(rig: ApiRig) -> None:
    made = rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"})
    assert rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"}) == made


def test_world_of_a_type_unknown_to_the_app_is_refused(rig: ApiRig) -> None:
    with pytest.raises(Invalid) as error:
        rig.post("/v1/worlds", {"type": "ShopAcount", "name": "ada"})
    assert error.value.fields["known"] == ["ShopAccount", "ShopAudit"]


@pytest.mark.parametrize("name", ["a/b", "a b", "ä", "a%2Fb"])
def test_world_name_with_special_characters_is_one_part_of_a_path(rig: ApiRig, name: str) -> None:
    from urllib.parse import quote

    rig.post("/v1/worlds", {"type": "ShopAccount", "name": name})
    assert rig.get(f"/v1/worlds/ShopAccount/{quote(name, safe='')}")["name"] == name


@pytest.mark.parametrize("verb", ["", "/journal", "/lineage", "/state"])
def test_reading_an_unknown_world_is_not_found(rig: ApiRig, verb: str) -> None:
    for world in ("ShopAccount/ada", "by-id/0000"):
        with pytest.raises(NotFound):
            rig.get(f"/v1/worlds/{world}{verb}")


@pytest.mark.parametrize("verb", ["fork", "pause", "resume", "delete", "purge", "pin", "unpin"])
def test_changing_an_unknown_world_is_not_found(rig: ApiRig, verb: str) -> None:
    bodies = {"fork": {"name": "b"}, "pin": {"worker": WORKER}}
    for world in ("ShopAccount/ada", "by-id/0000"):
        with pytest.raises(NotFound):
            rig.post(f"/v1/worlds/{world}/{verb}", bodies.get(verb))
    assert rig.audit_entries() == []


def test_worlds_are_listed_by_type_and_name_in_pages(rig: ApiRig) -> None:
    for type, name in (
        ("ShopAudit", "m"),
        ("ShopAccount", "b"),
        ("ShopAccount", "a"),
        ("ShopAudit", "k"),
    ):
        world_create(rig.store, rig.universe, type, name)
    expected = [("ShopAccount", "a"), ("ShopAccount", "b"), ("ShopAudit", "k"), ("ShopAudit", "m")]
    for limit in (1, 2, 3, 4, 10):
        found = rig.pages("/v1/worlds", limit=limit)
        assert [(world["type"], world["name"]) for world in found] == expected
    assert [world["name"] for world in rig.pages("/v1/worlds", limit=1, type="ShopAudit")] == [
        "k",
        "m",
    ]
    assert rig.pages("/v1/worlds", type="Other") == []


def test_world_list_refuses_a_filter_without_an_index(rig: ApiRig) -> None:
    with pytest.raises(NoIndex) as error:
        rig.get("/v1/worlds", status="parked")
    assert error.value.fields["indexed"] == ["cursor", "limit", "type"]


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"cursor": "!"}, {"limit": "x"}])
def test_world_list_refuses_a_bad_page(rig: ApiRig, query: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.get("/v1/worlds", **query)


# -- input -----------------------------------------------------------------------------------------


def test_sent_event_is_handled(rig: ApiRig, ada: str) -> None:
    sent = deposit(rig, 1)
    assert sent == {"world_id": ada, "seq": 3, "status": "accepted", "waits_for": None}
    rig.run_worlds()
    assert rig.get(f"{ADA}/state")["state"] == {"balance": 13, "rate": 0.0}


def test_event_with_a_key_is_sent_once(rig: ApiRig, ada: str) -> None:
    body = {"type": "Deposit", "event": {"amount": 1}, "key": "d-1"}
    first = rig.post(f"{ADA}/send", body)
    rig.run_worlds()
    assert rig.post(f"/v1/worlds/by-id/{ada}/send", body) == first | {"status": "handled"}
    with pytest.raises(KeyConflict):
        rig.post(f"{ADA}/send", {**body, "event": {"amount": 2}})
    assert rig.get(f"{ADA}/state")["state"]["balance"] == 13


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Unheard"},
        {"type": "Deposit", "event": {"amount": "much"}},
        {"type": "Deposit", "events": {}},
        {"type": "Deposit", "key": ""},
        {},
    ],
)
def test_bad_event_is_refused(rig: ApiRig, body: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.post(f"{ADA}/send", body)
    with pytest.raises(NotFound):
        rig.get(ADA)


def test_ask_returns_the_reply_of_the_handler(rig: ApiRig) -> None:
    rig.start("world", "orchestrator")
    body = {"type": "Deposit", "event": {"amount": 4}, "timeout_s": 30}
    assert rig.post(f"{ADA}/ask", body) == {"reply": 4}
    assert rig.post(f"{ADA}/ask", body, key="k-1") == {"reply": 8}
    assert rig.post(f"{ADA}/ask", body, key="k-1") == {"reply": 8}
    assert rig.get(f"{ADA}/state")["state"]["balance"] == 8


# -- state and journal -----------------------------------------------------------------------------


def test_state_at_a_height_is_the_state_after_that_entry(rig: ApiRig, ada: str) -> None:
    assert rig.get(f"{ADA}/state")["state"] == {"balance": 12, "rate": 0.0}
    shown = rig.get(f"{ADA}/state", at=1)
    assert (shown["world"], shown["at"], shown["raw_height"]) == ("ShopAccount/ada", 1, None)
    assert shown["state"] == {"balance": 5, "rate": 0.0}
    with pytest.raises(NotFound):
        rig.get(f"{ADA}/state", at=3)


def test_unchanged_state_is_not_sent_again(rig: ApiRig, ada: str) -> None:
    assert rig.app is not None
    code = rig.app.programs["ShopAccount"].version
    version = codec.digest(code.encode()).hex()[:12]
    assert rig.get(f"{ADA}/state", etag=f'"{ada}-2-{version}"') is None
    for stale in (f'"{ada}-1-{version}"', f'"{ada}-2-{version}x"'):
        assert rig.get(f"{ADA}/state", etag=stale)["state"]["balance"] == 12


def test_journal_is_listed_in_pages(rig: ApiRig, ada: str) -> None:
    deposit(rig, 1)
    rig.run_worlds()
    entries = rig.pages(f"{ADA}/journal", limit=2)
    assert [entry["height"] for entry in entries] == [1, 2, 3]
    assert entries[0]["shown"] == "Deposit(amount=5)"
    assert [entry["height"] for entry in rig.pages(f"{ADA}/journal", from_=2)] == [2, 3]
    rig.app = None
    assert rig.get(f"{ADA}/journal")["items"][0]["shown"] == "Deposit {'amount': 5}"


@pytest.mark.parametrize("verb", ["send", "ask"])
def test_event_without_the_code_needs_the_app(rig: ApiRig, verb: str) -> None:
    rig.app = None
    with pytest.raises(NeedsApp):
        rig.post(f"{ADA}/{verb}", {"type": "Deposit"})
    with pytest.raises(NotFound):
        rig.get(f"{ADA}/state")


# -- forks and seeds -------------------------------------------------------------------------------


def test_fork_has_the_state_and_the_lineage_of_its_parent(rig: ApiRig, ada: str) -> None:
    child = rig.post(f"{ADA}/fork", {"name": "what-if", "at": 1})
    assert child["name"] == "what-if"
    assert rig.get("/v1/worlds/ShopAccount/what-if/state")["state"]["balance"] == 5
    [parent] = rig.get("/v1/worlds/ShopAccount/what-if/lineage")["items"]
    assert (parent["parent"], parent["parent_world_id"]) == ("ShopAccount/ada", ada)
    assert parent["forked_at_height"] == 1
    assert rig.post(f"{ADA}/fork", {"name": "what-if", "at": 1}) == child


def test_fork_without_the_code_needs_a_snapshot(rig: ApiRig, ada: str) -> None:
    rig.app = None
    assert rig.post(f"{ADA}/fork", {"name": "now"})["height"] == 2
    for body in ({"name": "then", "at": 1}, {"name": "then", "effects": "fail"}):
        with pytest.raises(NeedsApp):
            rig.post(f"{ADA}/fork", body)


def test_world_is_created_from_a_seed(rig: ApiRig, ada: str) -> None:
    seed = {"world_id": ada, "height": 2}
    made = rig.post("/v1/worlds", {"type": "ShopAccount", "name": "copy", "seed": seed})
    assert made["lineage"][0]["parent_world_id"] == ada
    assert rig.get("/v1/worlds/ShopAccount/copy/state")["state"]["balance"] == 12
    again = {"type": "ShopAccount", "name": "copy", "seed": seed}
    assert rig.post("/v1/worlds", again)["world_id"] == made["world_id"]
    with pytest.raises(Invalid):
        rig.post("/v1/worlds", {"type": "ShopAudit", "name": "copy", "seed": seed})
    with pytest.raises(Invalid):
        rig.post("/v1/worlds", {"type": "ShopAccount", "name": "x", "seed": {**seed, "hash": "zz"}})


# -- changes ---------------------------------------------------------------------------------------


def test_world_is_paused_resumed_and_deleted(rig: ApiRig, ada: str) -> None:
    assert rig.post(f"{ADA}/pause")["status"] == "paused"
    assert rig.post(f"{ADA}/pause")["status"] == "paused"
    assert rig.post(f"{ADA}/resume")["status"] == "active"
    assert rig.post(f"{ADA}/delete")["status"] == "deleted"
    with pytest.raises(NotFound):
        rig.get(ADA)
    assert rig.get(f"/v1/worlds/by-id/{ada}")["status"] == "deleted"
    with pytest.raises(IllegalTransition):
        rig.post(f"/v1/worlds/by-id/{ada}/delete")
    entries = [(entry.action, entry.subject, entry.detail) for entry in rig.audit_entries()]
    verbs = ["pause_world", "pause_world", "resume_world", "delete_world"]
    assert entries == [(verb, "world/ShopAccount/ada", ada) for verb in verbs]
    assert {entry.actor for entry in rig.audit_entries()} == {ACTOR}


def test_purged_world_leaves_a_tombstone(rig: ApiRig, ada: str) -> None:
    rig.post(f"{ADA}/send", {"type": "QuoteWanted"})
    rig.run_worlds()
    with pytest.raises(WorldInUse):
        rig.post(f"{ADA}/purge")
    assert rig.audit_entries() == []
    purged = rig.post(f"{ADA}/purge", {"force": True})
    assert (purged["world_id"], purged["height"], purged["copies"]["forks"]) == (ada, 3, [])
    assert rig.post(f"/v1/worlds/by-id/{ada}/purge") == purged
    [entry] = rig.audit_entries()
    # Not by its name, which the purge erases.
    assert (entry.action, entry.subject) == ("purge_world", f"world/by-id/{ada}")
    with pytest.raises(NotFound):
        rig.get(f"/v1/worlds/by-id/{ada}")


def test_world_is_pinned_and_unpinned(rig: ApiRig, ada: str) -> None:
    pinned = rig.post(f"{ADA}/pin", {"worker": "w-9"})
    assert pinned == {"world_id": ada, "worker": "w-9", "pinned": True, "changed": True}
    assert not rig.post(f"{ADA}/pin", {"worker": "w-9"})["changed"]
    assert rig.get(ADA)["worker"] == "w-9"
    unpinned = rig.post(f"{ADA}/unpin")
    assert unpinned == {"world_id": ada, "worker": "w-9", "pinned": False, "changed": True}
    assert not rig.post(f"{ADA}/unpin")["changed"]
