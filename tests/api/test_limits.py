"""The endpoints of load limits."""

from typing import Any

import pytest

from holdfast.errors import Invalid, KeyConflict, Overloaded
from holdfast.ops.limit_documents import CHANGES_MAX
from holdfast.workers.limit_settings import BadLimits
from tests.api.rig import ACTOR, ApiRig

MODULES = ("holdfast.ops.api.limits", "holdfast.ops.limit_documents")
PATH = "/v1/limits"


def set_limits(rig: ApiRig, key: str = "", **limits: int) -> Any:
    named = {name.replace("__", ":"): value for name, value in limits.items()}
    return rig.post(PATH, {"limits": named}, key=key)["limits"]


def submit(rig: ApiRig) -> None:
    rig.post("/v1/tasks", {"name": "print", "options": {"queue": "mail"}})


def test_limits_are_set_and_shown_with_their_figures(rig: ApiRig) -> None:
    assert rig.get(PATH) == {"universe": rig.universe, "limits": []}
    submit(rig)
    made = set_limits(rig, tasks=1, queue__mail=5, inbox=9)
    assert made == [
        {"limit": "tasks", "limit_max": 1, "now": 1},
        {"limit": "inbox", "limit_max": 9, "now": None},
        {"limit": "queue:mail", "limit_max": 5, "now": 1},
    ]
    assert rig.get(PATH)["limits"] == made


def test_set_limit_applies_at_once_and_zero_removes_it(rig: ApiRig) -> None:
    submit(rig)
    set_limits(rig, tasks=1, inbox=9)
    with pytest.raises(Overloaded):
        submit(rig)
    assert [one["limit"] for one in set_limits(rig, tasks=0)] == ["inbox"]
    submit(rig)


def test_change_of_limits_is_audited(rig: ApiRig) -> None:
    set_limits(rig, tasks=7, queue__mail=5)
    [entry] = rig.audit_entries()
    assert (entry.actor, entry.action) == (ACTOR, "set_limits")
    assert (entry.subject, entry.detail) == (f"universe/{rig.universe}", "tasks=7 queue:mail=5")


def test_repeated_change_with_its_key_changes_nothing(rig: ApiRig) -> None:
    first = set_limits(rig, "k", tasks=7)
    set_limits(rig, tasks=8)
    assert set_limits(rig, "k", tasks=7) == first
    assert rig.get(PATH)["limits"][0]["limit_max"] == 8
    with pytest.raises(KeyConflict):
        set_limits(rig, "k", tasks=9)


@pytest.mark.parametrize("limits", [{"tusks": 1}, {"tasks": -1}, {"queue:": 1}, {"tasks": 1 << 60}])
def test_bad_limit_is_refused(rig: ApiRig, limits: dict[str, int]) -> None:
    with pytest.raises(Invalid) as refused:
        rig.post(PATH, {"limits": limits})
    assert isinstance(refused.value, BadLimits) or "queue" in str(refused.value)
    assert rig.get(PATH)["limits"] == []
    assert rig.audit_entries() == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"limits": {}},
        {"limits": {"tasks": "1"}},
        {"limits": {"tasks": 1.5}},
        {"limits": {f"queue:q{n}": 1 for n in range(CHANGES_MAX + 1)}},
    ],
)
def test_bad_body_is_refused(rig: ApiRig, body: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.post(PATH, body)
    assert rig.get(PATH)["limits"] == []
