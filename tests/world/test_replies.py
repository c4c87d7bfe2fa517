"""Ask: deliver, wait, and get what the handler replied, from the journal."""

from __future__ import annotations

import threading

import pytest

import holdfast as hf
from holdfast.errors import KeyConflict, NoReply, NotFound, Timeout
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.app.handle",)


@pytest.fixture
def rig(any_rig: Rig) -> Rig:
    return any_rig


def test_whoever_asks_gets_what_the_handler_replied(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5), key="k")
    rig.run()
    assert ada.ask(bank.Deposited(5), key="k", timeout=0) == 5


def test_an_asker_that_waits_is_woken_by_the_entry() -> None:
    rig = Rig()
    ada = rig.world()
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(ada.ask(bank.Deposited(7))))
    asking.start()
    worker = rig.worker()
    while asking.is_alive():
        worker.tick()
        asking.join(0.001)
    assert answers == [7]


def test_asking_again_with_the_same_key_gets_the_first_answer(rig: Rig) -> None:
    ada = rig.world()
    with pytest.raises(Timeout):
        ada.ask(bank.Deposited(5), key="k", timeout=0)
    ada.send(bank.Deposited(1))
    worker = rig.run()
    assert ada.ask(bank.Deposited(5), key="k", timeout=0) == 5
    rig.run(worker)
    assert ada.ask(bank.Deposited(5), key="k", timeout=0) == 5
    assert ada.state().balance == 6


def test_asking_with_a_key_that_stands_for_another_event_is_a_conflict(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5), key="k")
    with pytest.raises(KeyConflict):
        ada.ask(bank.Deposited(6), key="k", timeout=0)


def test_a_handler_that_replies_nothing_is_no_reply(rig: Rig) -> None:
    ada = rig.world()
    for event in (bank.Noted("a", []), bank.Unheard()):
        ada.send(event, key=type(event).__name__)
    rig.run()
    for event in (bank.Noted("a", []), bank.Unheard()):
        with pytest.raises(NoReply) as raised:
            ada.ask(event, key=type(event).__name__, timeout=0)
        assert raised.value.error == ""


def test_a_handler_that_failed_is_no_reply_and_says_why(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Failing("no luck"), key="k")
    rig.run()
    with pytest.raises(NoReply) as raised:
        ada.ask(bank.Failing("no luck"), key="k", timeout=0)
    assert "no luck" in raised.value.error


def test_an_answer_that_does_not_come_is_a_timeout_and_the_event_stays(rig: Rig) -> None:
    ada = rig.world()
    with pytest.raises(Timeout) as raised:
        ada.ask(bank.Deposited(5), timeout=0)
    assert raised.value.retryable
    rig.run()
    assert ada.state().balance == 5


def test_none_is_a_reply(rig: Rig) -> None:
    class Nothing(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            cx.reply(None)

    rig = Rig(hf.App("bank", worlds=[Nothing]))
    world = rig.world(Nothing, "n")
    world.send(bank.Seen(), key="k")
    rig.run()
    assert world.ask(bank.Seen(), key="k", timeout=0) is None


def test_a_forked_world_answers_from_its_own_journal(rig: Rig) -> None:
    ada = rig.world()
    for _ in range(3):
        ada.send(bank.Deposited(1))
    worker = rig.run()
    child = ada.fork("child", at=2)
    rig.assign(child)
    child.send(bank.Deposited(10), key="k")
    rig.run(worker)
    assert child.ask(bank.Deposited(10), key="k", timeout=0) == 12


def test_asking_leaves_nothing_behind(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1), key="k")
    rig.run()
    before = rig.rows()
    ada.ask(bank.Deposited(1), key="k", timeout=0)
    assert rig.rows() == before


# -- wait_for ------------------------------------------------------------------------------------


def test_whoever_waits_for_a_state_gets_it_when_it_is_there(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5))
    rig.run()
    assert ada.wait_for(lambda account: account.balance == 5, timeout=0).balance == 5


def test_whoever_waits_for_a_state_is_woken_by_the_entry_that_brings_it() -> None:
    rig = Rig()
    ada = rig.world()
    ada.send(bank.Deposited(1))
    found: list[bank.Account] = []
    waiting = threading.Thread(
        target=lambda: found.append(ada.wait_for(lambda account: account.balance >= 3))
    )
    waiting.start()
    worker = rig.worker()
    ada.send(bank.Deposited(2))
    while waiting.is_alive():
        worker.tick()
        waiting.join(0.001)
    assert [account.balance for account in found] == [3]


def test_a_state_that_does_not_come_is_a_timeout(rig: Rig) -> None:
    ada = rig.world()
    ada.create()
    with pytest.raises(Timeout) as raised:
        ada.wait_for(lambda account: account.balance > 0, timeout=0)
    assert raised.value.world == "ada"


def test_nobody_waits_for_a_world_that_is_not_there(rig: Rig) -> None:
    with pytest.raises(NotFound):
        rig.runtime.world(bank.Account, "nobody").wait_for(lambda account: True, timeout=0)
