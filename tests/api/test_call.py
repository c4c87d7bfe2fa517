"""Calls of endpoints: idempotency keys, audit entries, filters of lists, and endpoints that need the app."""

import threading
from typing import Any

import pytest

from holdfast.durable import dedupe
from holdfast.errors import Invalid, KeyConflict
from holdfast.ops.api import call as calls
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    ApiAnswer,
    Endpoint,
    EndpointOptions,
    RequestModel,
    Scope,
)
from holdfast.ops.api.idempotency import AnswerPending
from holdfast.store.api import Txn
from tests.api.rig import ACTOR, ApiRig

MODULES = ("holdfast.ops.api.call", "holdfast.ops.api.idempotency")


class CountBody(RequestModel):
    by: int = 1
    fails: str = ""


def count_up(call: ApiCall) -> ApiAnswer:
    def add(txn: Txn) -> int:
        now = txn.count(("count", call.universe)) + call.body.by
        txn.put(("count", call.universe), now.to_bytes(8, "big"))
        return now

    if call.body.fails == "before":
        raise Invalid(what="count")
    now = call.transact(add, subject="count/1")
    if call.body.fails == "after":
        raise Invalid(what="count")
    call.transact(lambda txn: None)
    return ApiAnswer({"count": now}, 201, f'"{now}"', (("Location", "/count"),))


COUNT = Endpoint(
    "POST", "/v1/count", Scope.OPERATE, count_up, dict, "Count", EndpointOptions(body=CountBody)
)


def count(rig: ApiRig, key: str = "", by: int = 1, fails: str = "") -> ApiAnswer:
    body = CountBody(by=by, fails=fails)
    call = ApiCall(
        endpoint=COUNT, store=rig.store, universe=rig.universe, body=body, actor=ACTOR, key=key
    )
    return calls.run(call)


def value_of(answer: ApiAnswer) -> Any:
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(answer.value))


def test_request_without_a_key_is_run_each_time(rig: ApiRig) -> None:
    assert [value_of(count(rig))["count"] for _ in range(3)] == [1, 2, 3]
    assert len(rig.audit_entries()) == 3


def test_repeated_key_gets_the_first_answer(rig: ApiRig) -> None:
    first = count(rig, "k")
    again = count(rig, "k")
    assert value_of(again) == value_of(first) == {"count": 1}
    assert (again.status, again.etag, again.headers) == (201, '"1"', (("Location", "/count"),))
    assert value_of(count(rig, "other")) == {"count": 2}
    assert len(rig.audit_entries()) == 2


def test_key_of_another_request_is_a_conflict(rig: ApiRig) -> None:
    count(rig, "k")
    with pytest.raises(KeyConflict):
        count(rig, "k", by=2)
    assert value_of(count(rig)) == {"count": 2}


def test_request_that_failed_before_its_commit_does_not_use_its_key(rig: ApiRig) -> None:
    with pytest.raises(Invalid):
        count(rig, "k", fails="before")
    assert value_of(count(rig, "k")) == {"count": 1}


def test_repeat_of_a_request_whose_answer_was_lost_changes_nothing(rig: ApiRig) -> None:
    with pytest.raises(Invalid):
        count(rig, "k", fails="after")
    for _ in range(2):
        with pytest.raises(AnswerPending):
            count(rig, "k", fails="after")
    assert value_of(count(rig)) == {"count": 2}


def test_concurrent_requests_with_one_key_change_once(rig: ApiRig) -> None:
    answers: list[Any] = []

    def request() -> None:
        try:
            answers.append(value_of(count(rig, "k"))["count"])
        except AnswerPending:
            answers.append("pending")

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {1, "pending"}
    assert 1 in answers
    assert value_of(count(rig)) == {"count": 2}
    assert len(rig.audit_entries()) == 2


@pytest.mark.parametrize("key", ["x" * 256, "é", "a\n"])
def test_bad_key_is_refused(rig: ApiRig, key: str) -> None:
    with pytest.raises(Invalid):
        count(rig, key)
    assert value_of(count(rig)) == {"count": 1}


def test_audit_entry_names_actor_action_and_subject(rig: ApiRig) -> None:
    count(rig)
    [entry] = rig.audit_entries()
    assert (entry.actor, entry.action, entry.subject) == (ACTOR, "count_up", "count/1")


def test_keys_expire_after_their_retention(rig: ApiRig) -> None:
    count(rig, "k")
    scope = dedupe.request_scope(rig.universe)
    assert rig.store.read(dedupe.has_records, scope)
    rig.store.transact(dedupe.expire, scope, 0, 10)
    assert not rig.store.read(dedupe.has_records, scope)
    assert value_of(count(rig, "k")) == {"count": 2}
