"""The endpoint of the space that a store uses."""

from holdfast.workers import space_census
from holdfast.workers.space_census import take_census
from tests.api.rig import ApiRig

MODULES = ("holdfast.ops.api.usage", "holdfast.ops.usage_documents")
PATH = "/v1/store/usage"


def test_usage_is_empty_before_the_first_census(rig: ApiRig) -> None:
    # Other tests use the same store.
    rig.store.transact(lambda txn: txn.delete(space_census.RESULT_KEY))
    document = rig.get(PATH)
    assert (document["census"], document["counted_rows"], document["figures"]) == (None, None, [])


def test_usage_has_the_figures_and_the_age_of_the_last_census(rig: ApiRig) -> None:
    rig.post("/v1/tasks", {"name": "print"})
    census = take_census(rig.store, "test")
    document = rig.get(PATH)
    found = document["census"]
    assert (found["started_ns"], found["ended_ns"]) == (census.started_ns, census.ended_ns)
    assert found["rows"] == sum(one["rows"] for one in document["figures"])
    assert found["bytes"] == sum(one["bytes"] for one in document["figures"])
    assert found["age_s"] >= 0
    # Other tests share the store, each with its universe.
    own = [one for one in document["figures"] if one["universe"] == rig.universe]
    assert [one["type"] for one in own if one["kind"] == "tasks"] == ["print"]


def test_usage_of_one_universe(rig: ApiRig) -> None:
    take_census(rig.store, "test")
    figures = rig.get(PATH, figures_of=rig.universe)["figures"]
    assert {one["universe"] for one in figures} <= {rig.universe}
    assert rig.get(PATH, figures_of="unknown")["figures"] == []
