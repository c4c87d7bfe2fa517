"""The endpoints of effects, timers and dead letters."""

from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.ops.api.call import NoIndex
from holdfast.ops.index_rebuild import rebuild_effect_tags
from holdfast.ops.verify import find_differences
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world import intents as world_intents
from holdfast.world.redrive import failed_events_queue
from tests.api.rig import ApiRig

MODULES = (
    "holdfast.ops.api.effects",
    "holdfast.ops.api.timers",
    "holdfast.ops.api.dead_letters",
    "holdfast.ops.dead_letter_documents",
    "holdfast.ops.pending_documents",
)
ADA = "/v1/worlds/ShopAccount/ada"
KIND = "fx.quote"


def request_quotes(rig: ApiRig, *names: str) -> list[str]:
    """Let accounts request quotes. Returns the hashes of the intents, oldest first."""
    for name in names:
        rig.post(f"/v1/worlds/ShopAccount/{name}/send", {"type": "QuoteWanted"})
        rig.run_worlds()
    found = rig.pages("/v1/effects", kind=KIND, state="ready")
    return [effect["intent"] for effect in found]


def bury(rig: ApiRig, name: str) -> None:
    """Claim and reject every ready item of a queue."""
    while claims := rig.store.transact(queue.claim, name, "owner", 10, 60 * S):
        for claim in claims:
            rig.store.transact(queue.fail, claim.token, "broken", "no quote", False)


# -- effects ---------------------------------------------------------------------------------------


def test_effects_are_listed_by_kind_and_state_in_pages(rig: ApiRig) -> None:
    intents = request_quotes(rig, "ada", "bob", "eve")
    assert len(set(intents)) == 3
    for limit in (1, 2, 3):
        found = rig.pages("/v1/effects", kind=KIND, state="ready", limit=limit)
        assert [effect["intent"] for effect in found] == intents
    assert [effect["world"] for effect in found] == [
        f"ShopAccount/{name}" for name in ("ada", "bob", "eve")
    ]
    assert rig.pages("/v1/effects", kind=KIND, state="dead") == []
    [counts] = rig.get("/v1/effects/counts")["items"]
    assert (counts["kind"], counts["ready"], counts["dead"]) == (KIND, 3, 0)


def test_dead_effects_are_listed_in_pages(rig: ApiRig) -> None:
    intents = request_quotes(rig, "ada", "bob", "eve")
    bury(rig, f"{rig.universe}/effects/{KIND}")
    for limit in (1, 2, 3):
        found = rig.pages("/v1/effects", kind=KIND, state="dead", limit=limit)
        assert [effect["intent"] for effect in found] == intents
    assert {effect["code"] for effect in found} == {"broken"}


@pytest.mark.parametrize(
    "query", [{}, {"kind": KIND}, {"state": "ready"}, {"world": "a"}, {"tag": "a", "kind": KIND}]
)
def test_effect_list_without_its_index_is_refused(rig: ApiRig, query: dict[str, str]) -> None:
    with pytest.raises(NoIndex):
        rig.get("/v1/effects", **query)


def test_effects_are_listed_by_tag_until_they_end(rig: ApiRig) -> None:
    wanted = set(request_quotes(rig, "ada", "bob", "eve"))
    for limit in (1, 2, 3):
        found = rig.pages("/v1/effects", tag="wanted", limit=limit)
        assert {effect["intent"] for effect in found} == wanted
    shown = {(effect["kind"], effect["state"], effect["tag"]) for effect in found}
    assert shown == {(KIND, "ready", "wanted")}
    assert rig.pages("/v1/effects", tag="other") == []
    [claim] = rig.store.transact(queue.claim, f"{rig.universe}/effects/{KIND}", "w", 1, 60 * S)
    rig.store.transact(queue.fail, claim.token, "broken", "no quote", False)
    [dead] = rig.pages("/v1/effects", tag="wanted", state="dead")
    assert (dead["code"], dead["seq"]) == ("broken", claim.seq)
    assert len(rig.pages("/v1/effects", tag="wanted", state="ready")) == 2
    redriven = rig.post(f"/v1/effects/{dead['intent']}/redrive")["redriven_as"]
    left = {effect["intent"] for effect in rig.pages("/v1/effects", tag="wanted")}
    assert left == wanted - {dead["intent"]} | {redriven}
    assert rig.store.read(find_differences) == []


def lose_tag_row(txn: Txn, universe: str) -> None:
    prefix = world_intents.tag_prefix(universe)
    [(key, _)] = txn.scan(prefix, tuples.prefix_end(prefix))
    txn.delete(key)


def test_lost_row_of_the_tag_of_an_effect_is_found_and_rebuilt(rig: ApiRig) -> None:
    [intent] = request_quotes(rig, "ada")
    rig.store.transact(lose_tag_row, rig.universe)
    assert "listed by its tag" in {one.what for one in rig.store.read(find_differences)}
    rig.store.transact(rebuild_effect_tags, rig.universe)
    assert rig.store.read(find_differences) == []
    assert [one["intent"] for one in rig.pages("/v1/effects", tag="wanted")] == [intent]


def test_effect_of_an_older_version_is_listed_by_its_tag_after_a_rebuild(rig: ApiRig) -> None:
    [intent] = request_quotes(rig, "ada")
    pending_key = schema.key_prefix(Space.WORLD, rig.universe, "i") + tuples.pack(
        (bytes.fromhex(intent),)
    )

    def age(txn: Txn) -> None:
        """Make the rows that the version before wrote."""
        pending = codec.unpack_as(world_intents.PendingEffect, txn.get(pending_key) or b"")
        txn.put(pending_key, codec.pack(replace(pending, listed=False)))
        lose_tag_row(txn, rig.universe)

    rig.store.transact(age)
    assert rig.store.read(find_differences) == []
    assert rig.pages("/v1/effects", tag="wanted") == []
    rig.store.transact(rebuild_effect_tags, rig.universe)
    assert [one["intent"] for one in rig.pages("/v1/effects", tag="wanted")] == [intent]


def test_effect_list_refuses_a_bad_state_and_the_cursor_of_another_list(rig: ApiRig) -> None:
    request_quotes(rig, "ada", "bob")
    with pytest.raises(Invalid):
        rig.get("/v1/effects", kind=KIND, state="lost")
    cursor = rig.get("/v1/effects", kind=KIND, state="ready", limit=1)["next"]
    with pytest.raises(Invalid):
        rig.get("/v1/effects", kind=KIND, state="dead", cursor=cursor)


def test_effect_is_shown_with_its_attempts(rig: ApiRig) -> None:
    [intent] = request_quotes(rig, "ada")
    shown = rig.get(f"/v1/effects/{intent}")
    assert (shown["state"], shown["world"], shown["tag"]) == ("ready", "ShopAccount/ada", "wanted")
    assert shown["attempts"] == []
    bury(rig, f"{rig.universe}/effects/{KIND}")
    shown = rig.get(f"/v1/effects/{intent}")
    assert (shown["state"], shown["code"]) == ("dead", "broken")
    assert [attempt["code"] for attempt in shown["attempts"]] == ["broken"]


def test_dead_effect_is_redriven_as_a_new_intent(rig: ApiRig) -> None:
    [intent] = request_quotes(rig, "ada")
    with pytest.raises(Invalid):
        rig.post(f"/v1/effects/{intent}/redrive")
    bury(rig, f"{rig.universe}/effects/{KIND}")
    made = rig.post(f"/v1/effects/{intent}/redrive", key="k")
    assert made == rig.post(f"/v1/effects/{intent}/redrive", key="k")
    shown = rig.get(f"/v1/effects/{made['redriven_as']}")
    assert (shown["state"], shown["redrive_of"]) == ("ready", intent)
    assert [entry.subject for entry in rig.audit_entries()] == [f"effect/{intent}"]


def test_unknown_effect_is_not_found(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get(f"/v1/effects/{'0' * 64}")
    with pytest.raises(NotFound):
        rig.post(f"/v1/effects/{'0' * 64}/redrive")
    with pytest.raises(Invalid):
        rig.get("/v1/effects/xyz")


# -- timers ----------------------------------------------------------------------------------------


def set_timer(rig: ApiRig, name: str, after_s: float) -> None:
    body = {"type": "Nudge", "event": {"after_s": after_s}}
    rig.post(f"/v1/worlds/ShopAccount/{name}/send", body)
    rig.run_worlds()


def test_timers_are_listed_by_time_in_pages(rig: ApiRig) -> None:
    for name, after_s in (("ada", 300.0), ("bob", 100.0), ("eve", 200.0)):
        set_timer(rig, name, after_s)
    for limit in (1, 2, 3):
        found = rig.pages("/v1/timers", limit=limit)
        assert [timer["world"].partition("/")[2] for timer in found] == ["bob", "eve", "ada"]
    with pytest.raises(Invalid):
        rig.get("/v1/timers", cursor=rig.get("/v1/worlds", limit=1)["next"])


def test_timer_is_shown_by_world_and_key(rig: ApiRig) -> None:
    set_timer(rig, "ada", 300.0)
    shown = rig.get("/v1/timers/ShopAccount/ada/nudge")
    assert (shown["event"], shown["key"], shown["clock"]) == ("Deposit", "nudge", "store")
    world_id = rig.get(ADA)["world_id"]
    assert rig.get(f"/v1/timers/by-id/{world_id}/nudge") == shown
    for path in ("ShopAccount/ada/other", "ShopAccount/bob/nudge", "by-id/0/nudge"):
        with pytest.raises(NotFound):
            rig.get(f"/v1/timers/{path}")


# -- dead letters ----------------------------------------------------------------------------------


def failed_events(rig: ApiRig, count: int) -> str:
    """Let events of ada fail. Returns the path of their dead letters."""
    for _ in range(count):
        rig.post(f"{ADA}/send", {"type": "DepositRefused"})
    rig.run_worlds()
    return f"/v1/dead/{quote(failed_events_queue(rig.universe), safe='')}"


def test_queues_with_dead_letters_are_listed(rig: ApiRig) -> None:
    assert rig.pages("/v1/dead") == []
    failed_events(rig, 2)
    request_quotes(rig, "bob")
    bury(rig, f"{rig.universe}/effects/{KIND}")
    expected = [
        {"queue": f"{rig.universe}/effects/{KIND}", "dead": 1},
        {"queue": failed_events_queue(rig.universe), "dead": 2},
    ]
    for limit in (1, 2):
        assert rig.pages("/v1/dead", limit=limit) == expected


def test_dead_letters_of_a_queue_are_listed_and_shown(rig: ApiRig) -> None:
    path = failed_events(rig, 3)
    for limit in (1, 2, 3):
        assert [letter["seq"] for letter in rig.pages(path, limit=limit)] == [1, 2, 3]
    shown = rig.get(f"{path}/2")
    assert shown["event"]["type"] == "DepositRefused"
    assert shown["event"]["world"] == "ShopAccount/ada"
    assert "this account refuses" in shown["error"]
    assert set(shown["payload"]) == {"encoding", "data"}
    for filter in ("code", "error", "world"):
        with pytest.raises(NoIndex):
            rig.get(path, **{filter: "x"})


def test_dead_letter_is_redriven_and_dropped(rig: ApiRig) -> None:
    path = failed_events(rig, 2)
    redriven = rig.post(f"{path}/1/redrive", key="k")
    assert (redriven["seq"], redriven["what"]) == (1, "item")
    assert rig.post(f"{path}/1/redrive", key="k") == redriven
    assert rig.post(f"{path}/2/drop")["dropped"] == 2
    assert rig.pages(path) == []
    for verb in ("redrive", "drop"):
        with pytest.raises(NotFound):
            rig.post(f"{path}/2/{verb}")
    assert [entry.action for entry in rig.audit_entries()] == [
        "redrive_dead_letter",
        "drop_dead_letter",
    ]


def test_dead_letter_of_an_effect_is_redriven_as_an_intent(rig: ApiRig) -> None:
    request_quotes(rig, "ada")
    name = f"{rig.universe}/effects/{KIND}"
    bury(rig, name)
    [letter] = rig.pages(f"/v1/dead/{quote(name, safe='')}")
    redriven = rig.post(f"/v1/dead/{quote(name, safe='')}/{letter['seq']}/redrive")
    assert redriven["what"] == "intent"
    assert rig.get(f"/v1/effects/{redriven['made']}")["state"] == "ready"


def test_dead_letters_of_another_universe_are_not_found(rig: ApiRig) -> None:
    path = failed_events(rig, 1)
    universe, rig.universe = rig.universe, "elsewhere"
    assert rig.pages("/v1/dead") == []
    for call in (lambda: rig.get(path), lambda: rig.get(f"{path}/1")):
        with pytest.raises(NotFound):
            call()
    for verb in ("redrive", "drop"):
        with pytest.raises(NotFound):
            rig.post(f"{path}/1/{verb}")
    rig.universe = universe
    assert len(rig.pages(path)) == 1


@pytest.mark.parametrize("seq", ["0", "9", "x", "-1", "9" * 30])
def test_unknown_dead_letter_is_refused(rig: ApiRig, seq: str) -> None:
    path = failed_events(rig, 1)
    calls: list[Any] = [lambda: rig.get(f"{path}/{seq}")]
    calls += [lambda verb=verb: rig.post(f"{path}/{seq}/{verb}") for verb in ("redrive", "drop")]
    for call in calls:
        with pytest.raises((NotFound, Invalid)):
            call()
    assert rig.audit_entries() == []
