"""The blocking calls and `rt.aio` do the same: one suite over both."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid, KeyConflict, NoReply, NotFound
from holdfast.flows.model import FlowEndedError, FlowId, parse_flow_id
from tests.aio import shop
from tests.aio.faces import LONG_S, Face
from tests.aio.shop import Balance, Converted, MoneyAdded, Wallet, add, fail, greet, twice
from tests.process.watch import until

MODULES = (
    "holdfast.app.aio",
    "holdfast.app.flow_handle",
    "holdfast.app.store_calls",
    "holdfast.app.submission",
    "holdfast.app.world_handle",
)


# -- tasks ---------------------------------------------------------------------------------------


def test_submit_returns_a_handle_with_the_result(face: Face) -> None:
    assert face.result(face.submit(add, 1, b=2)) == 3
    assert face.result(face.submit(greet, "ada")) == "hello ada"


def test_submit_with_a_key_returns_the_same_task(face: Face) -> None:
    first = face.submit(add.options(key="k"), 1)
    assert face.submit(add, 1, key="k").id == first.id
    with pytest.raises(KeyConflict):
        face.submit(add, 2, key="k")


def test_submit_of_wrong_arguments_raises_invalid(face: Face) -> None:
    for wrong in (("one",), (), (1, 2, 3)):
        with pytest.raises(Invalid):
            face.submit(add, *wrong)
    with pytest.raises(Invalid, match="not made by"):
        face.submit(add.fn, 1)


def test_submit_after_another_task(face: Face) -> None:
    first = face.submit(add, 1)
    assert face.result(face.submit(add.options(after=[first]), 2)) == 3


def test_submit_many_returns_handles_in_order(face: Face) -> None:
    handles = face.submit_many(add, [(n, n) for n in range(250)])
    assert [face.result(handle) for handle in handles] == [2 * n for n in range(250)]


def test_submit_many_checks_all_arguments_before_the_first_commit(
    face: Face, rt: hf.Runtime
) -> None:
    with pytest.raises(Invalid):
        face.submit_many(shop.unserved, [(), (), (1,)])
    with pytest.raises(Invalid, match="a key names one task"):
        face.submit_many(add.options(key="k"), [(1,)])
    with pytest.raises(NotFound):
        rt.task("1-1")


def test_map_returns_results_in_order(face: Face) -> None:
    assert face.map(greet, ["ada", "bob"]) == ["hello ada", "hello bob"]
    assert face.map(add, []) == []


def test_result_of_a_failed_task_raises_its_error(face: Face) -> None:
    with pytest.raises(hf.TaskFailedError) as caught:
        face.result(face.submit(fail, "no ink"))
    assert caught.value.error == "ValueError: no ink"


def test_result_raises_timeout_after_its_timeout(face: Face) -> None:
    handle = face.submit(shop.unserved)
    for timeout in (-1, 0, 0.01):
        with pytest.raises(hf.Timeout) as caught:
            face.result(handle, timeout)
        assert caught.value.fields == {"what": "task", "task": handle.id, "waited_s": timeout}
    with pytest.raises(Invalid):
        face.result(handle, "long")  # type: ignore[arg-type]


def test_result_of_an_ended_task_needs_no_time(face: Face) -> None:
    handle = face.submit(add, 1)
    face.result(handle)
    assert face.result(handle, 0) == 2


# -- flows ---------------------------------------------------------------------------------------


def test_start_returns_a_handle_with_the_result(face: Face) -> None:
    run = face.start(twice.options(key="k"), 4)
    assert face.result(run) == 8
    assert face.start(twice.options(key="k"), 4).id == run.id
    with pytest.raises(KeyConflict):
        face.start(twice.options(key="k"), 5)


SAME_ARGUMENTS = (
    (("book", 5), {}),
    (("book",), {}),
    (("book",), {"grams": 5.0}),
    ((), {"grams": 5, "item": "book"}),
    (("book", 5), {"gift": None}),
)
OTHER_ARGUMENTS = (
    (("book", 6), {}),
    (("pen",), {}),
    (("book", 5, 1), {}),
    (("book",), {"red": 1}),
    (("book",), {"gift": shop.GiftBox()}),
)


@pytest.mark.parametrize("call", ["start", "submit"])
def test_key_in_use_compares_arguments_by_value(face: Face, call: str) -> None:
    make, function = (face.start, shop.ship) if call == "start" else (face.submit, shop.pack)
    keyed = function.options(key="k")
    first = make(keyed, "book")
    for args, kwargs in SAME_ARGUMENTS:
        assert make(keyed, *args, **kwargs).id == first.id
    for args, kwargs in OTHER_ARGUMENTS:
        with pytest.raises(KeyConflict) as caught:
            make(keyed, *args, **kwargs)
        assert str(caught.value.fields["flow" if call == "start" else "task"]) in first.id
    again = function.options(key="k2")
    second = make(again, "book", 5, 1, 2, gift=shop.GiftBox(5), red=1, blue=2)
    assert make(again, "book", 5.0, 1, 2, blue=2, red=1, gift=shop.GiftBox()).id == second.id


def test_flow_is_found_by_id_and_by_key(face: Face) -> None:
    run = face.start(twice.options(key="k"), 4)
    assert face.result(face.flow(run.id)) == 8
    assert face.result(face.flow(twice, key="k")) == 8
    with pytest.raises(NotFound):
        face.flow(twice, key="other")
    with pytest.raises(NotFound):
        face.flow(run.id.rpartition("-")[0] + "-999")
    with pytest.raises(Invalid):
        face.flow(twice)


def test_result_of_a_failed_flow_raises_its_error(face: Face) -> None:
    with pytest.raises(hf.FlowFailed) as caught:
        face.result(face.start(shop.broken))
    assert caught.value.state == "FAILED"
    assert "no ink" in caught.value.error


def test_result_of_a_waiting_flow_raises_timeout(face: Face) -> None:
    run = face.start(shop.patient)
    for timeout in (0, 0.01):
        with pytest.raises(hf.Timeout) as caught:
            face.result(run, timeout)
        assert caught.value.fields == {"what": "flow", "flow": run.id, "waited_s": timeout}
    assert not face.done(run)
    assert face.send(run, MoneyAdded(3)) == 1
    assert face.result(run) == 3
    assert face.done(run)
    with pytest.raises(FlowEndedError):
        face.send(run, MoneyAdded(3))


def test_flow_gets_an_event_once_per_key(face: Face) -> None:
    run = face.start(shop.collecting.options(key="k"))
    for _ in range(2):
        assert face.send(run, MoneyAdded(3), key="first") == 1
    with pytest.raises(KeyConflict):
        face.send(run, MoneyAdded(4), key="first")
    with pytest.raises(Invalid, match="unknown to the app"):
        face.send(run, shop.Unknown())
    until(lambda: face.published(run) == {"total": 3}, "the event")
    assert face.published(run, "total") == 3
    assert face.published(run, "other", "none") == "none"
    assert face.send(run, Converted(7)) == 2
    assert face.events(run) == [("Converted", {"amount": 7})]
    status = face.status(run)
    assert (status.id, status.name, status.key, status.run) == (run.id, "collecting", "k", 1)


def test_flow_is_cancelled_once(face: Face) -> None:
    run = face.start(shop.patient)
    assert face.cancel(run)
    with pytest.raises(hf.FlowFailed):
        face.result(run)
    assert not face.cancel(run)
    assert face.status(run).state == "CANCELLED"


def test_steps_of_a_flow_are_read_in_pages(face: Face) -> None:
    run = face.start(shop.collecting)
    face.send(run, MoneyAdded(3))
    until(lambda: len(face.steps(run)) == 2, "two receives")
    first, second = face.steps(run)
    assert (first.state, second.state) == ("completed", "open")
    assert face.steps(run, limit=1) == [first]
    assert face.steps(run, after=first.position, limit=1) == [second]
    assert face.steps(run, 1) == [first, second]
    with pytest.raises(Invalid):
        face.steps(run, limit=0)


def test_fork_takes_over_the_steps_of_a_flow(face: Face) -> None:
    run = face.start(shop.patient)
    face.send(run, MoneyAdded(3))
    assert face.result(run) == 3
    whole = face.fork(run, "whole")
    assert face.result(whole) == 3
    before = face.fork(run, "before", at="hf.receive")
    face.send(before, MoneyAdded(4))
    assert face.result(before) == 4
    with pytest.raises(NotFound):
        face.fork(run, "none", at="absent")


def test_failed_flow_is_redriven_and_a_waiting_one_is_not(face: Face) -> None:
    run = face.start(shop.broken)
    with pytest.raises(hf.FlowFailed):
        face.result(run)
    assert face.redrive(run).id == run.id
    with pytest.raises(hf.FlowFailed):
        face.result(run)
    waiting = face.start(shop.patient)
    assert not face.resume(waiting)
    with pytest.raises(Invalid):
        face.redrive(waiting)


def test_calls_of_a_missing_flow_raise_not_found(face: Face, rt: hf.Runtime) -> None:
    run = face.start(twice, 4)
    missing = hf.FlowHandle(rt, FlowId(1, 999))
    other = hf.FlowHandle(rt, FlowId(999, parse_flow_id(run.id).seq))
    for flow in (missing, other):
        for call in (
            face.status,
            face.done,
            face.cancel,
            face.steps,
            face.events,
            face.published,
            face.resume,
            face.redrive,
        ):
            with pytest.raises(NotFound):
                call(flow)
        with pytest.raises(NotFound):
            face.send(flow, MoneyAdded(1))
        with pytest.raises(NotFound):
            face.fork(flow, "k")


# -- tasks and flows -----------------------------------------------------------------------------


def test_task_has_a_status_and_is_cancelled_once(face: Face) -> None:
    handle = face.submit(shop.unserved)
    assert (face.status(handle).state, face.done(handle)) == ("WAITING", False)
    assert face.cancel(handle)
    assert (face.status(handle).state, face.done(handle)) == ("DEAD", True)
    assert not face.cancel(handle)


# -- worlds --------------------------------------------------------------------------------------


@pytest.fixture
def ada(rt: hf.Runtime) -> hf.WorldHandle[Wallet]:
    return rt.world(Wallet, "ada")


def test_send_delivers_an_event_once_per_key(face: Face, ada: Any) -> None:
    first = face.send(ada, MoneyAdded(5), key="k")
    assert (int(first), first.status) == (1, "accepted")
    again = face.send(ada, MoneyAdded(5), key="k")
    assert int(again) == 1
    assert again.status in ("waiting", "handled")
    with pytest.raises(KeyConflict):
        face.send(ada, MoneyAdded(6), key="k")
    assert face.wait_for(ada, lambda state: state.balance == 5, timeout=LONG_S).balance == 5


def test_ask_returns_the_reply(face: Face, ada: Any) -> None:
    assert face.ask(ada, MoneyAdded(5), timeout=LONG_S) == 5
    assert face.ask(ada, MoneyAdded(5), timeout=LONG_S, key="k") == 10
    assert face.ask(ada, MoneyAdded(5), timeout=LONG_S, key="k") == 10


def test_ask_converts_the_reply_to_the_type_that_the_event_names(face: Face, ada: Any) -> None:
    assert face.ask(ada, Balance(), timeout=LONG_S) == (0, "EUR")


def test_ask_without_a_reply_raises_no_reply(face: Face, ada: Any) -> None:
    with pytest.raises(NoReply):
        face.ask(ada, shop.Ignored(), timeout=LONG_S)


def test_ask_of_a_paused_world_raises_timeout(face: Face, ada: Any) -> None:
    face.ask(ada, MoneyAdded(1), timeout=LONG_S)
    ada.pause()
    with pytest.raises(hf.Timeout) as caught:
        face.ask(ada, MoneyAdded(1), timeout=0.01)
    assert caught.value.fields == {"what": "reply", "world": "ada", "seq": 2, "waited_s": 0.01}


def test_undeclared_event_raises_invalid(face: Face, ada: Any) -> None:
    for call in (face.send, face.ask):
        with pytest.raises(Invalid, match="unknown to the app"):
            call(ada, shop.Unknown())


def test_state_at_an_entry(face: Face, ada: Any) -> None:
    for amount in (1, 2, 3):
        face.ask(ada, MoneyAdded(amount), timeout=LONG_S)
    assert face.state(ada).balance == 6
    assert face.state(ada, 2).balance == 3


def test_state_of_a_missing_world_raises_not_found(face: Face, ada: Any) -> None:
    with pytest.raises(NotFound):
        face.state(ada)
    with pytest.raises(NotFound):
        face.wait_for(ada, bool)


def test_wait_for_raises_timeout_after_its_timeout(face: Face, ada: Any) -> None:
    face.send(ada, MoneyAdded(1))
    with pytest.raises(hf.Timeout) as caught:
        face.wait_for(ada, lambda state: state.balance > 1, timeout=0.01)
    assert caught.value.fields == {"what": "state", "world": "ada", "waited_s": 0.01}


def test_error_of_the_condition_reaches_the_caller(face: Face, ada: Any) -> None:
    face.send(ada, MoneyAdded(1))
    with pytest.raises(ZeroDivisionError):
        face.wait_for(ada, lambda state: 1 / 0)


def test_effect_takes_named_arguments(face: Face, ada: Any) -> None:
    face.send(ada, Converted(5))
    assert face.wait_for(ada, lambda state: state.balance, timeout=LONG_S).balance == 11
