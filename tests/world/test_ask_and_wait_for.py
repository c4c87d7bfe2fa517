"""`ask` delivers an event and returns the handler's reply from the journal. `wait_for` waits for a
state."""

from __future__ import annotations

import threading

import pytest

import holdfast as hf
from holdfast.errors import KeyConflict, NoReply, NotFound, Timeout
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.app.world_handle",)


@pytest.fixture
def rig(any_rig: WorldRig) -> WorldRig:
    return any_rig


def test_ask_returns_the_handlers_reply(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5), key="k")
    rig.run()
    assert ada.ask(bank.DepositMade(5), key="k", timeout=0) == 5


def test_ask_is_woken_by_the_journal_entry() -> None:
    rig = WorldRig()
    ada = rig.world()
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(ada.ask(bank.DepositMade(7))))
    asking.start()
    worker = rig.worker()
    while asking.is_alive():
        worker.tick()
        asking.join(0.001)
    assert answers == [7]


def test_ask_with_a_repeated_key_returns_the_first_reply(rig: WorldRig) -> None:
    ada = rig.world()
    with pytest.raises(Timeout):
        ada.ask(bank.DepositMade(5), key="k", timeout=0)
    ada.send(bank.DepositMade(1))
    worker = rig.run()
    assert ada.ask(bank.DepositMade(5), key="k", timeout=0) == 5
    rig.run(worker)
    assert ada.ask(bank.DepositMade(5), key="k", timeout=0) == 5
    assert ada.state().balance == 6


def test_ask_with_a_key_of_another_event_is_a_conflict(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5), key="k")
    with pytest.raises(KeyConflict):
        ada.ask(bank.DepositMade(6), key="k", timeout=0)


def test_ask_raises_no_reply_when_the_handler_does_not_reply(rig: WorldRig) -> None:
    ada = rig.world()
    for event in (bank.Noted("a", []), bank.UnhandledEvent()):
        ada.send(event, key=type(event).__name__)
    rig.run()
    for event in (bank.Noted("a", []), bank.UnhandledEvent()):
        with pytest.raises(NoReply) as raised:
            ada.ask(event, key=type(event).__name__, timeout=0)
        assert raised.value.error == ""


def test_ask_raises_no_reply_with_the_error_of_a_failed_handler(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Failing("no luck"), key="k")
    rig.run()
    with pytest.raises(NoReply) as raised:
        ada.ask(bank.Failing("no luck"), key="k", timeout=0)
    assert "no luck" in raised.value.error


def test_ask_raises_timeout_and_the_event_stays_queued(rig: WorldRig) -> None:
    ada = rig.world()
    with pytest.raises(Timeout) as raised:
        ada.ask(bank.DepositMade(5), timeout=0)
    assert raised.value.retryable
    rig.run()
    assert ada.state().balance == 5


def test_ask_returns_none_as_a_reply(rig: WorldRig) -> None:
    class Nothing(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            cx.reply(None)

    rig = WorldRig(hf.App("bank", worlds=[Nothing]))
    world = rig.world(Nothing, "n")
    world.send(bank.Seen(), key="k")
    rig.run()
    assert world.ask(bank.Seen(), key="k", timeout=0) is None


def test_ask_on_a_fork_reads_the_forks_journal(rig: WorldRig) -> None:
    ada = rig.world()
    for _ in range(3):
        ada.send(bank.DepositMade(1))
    worker = rig.run()
    child = ada.fork("child", at=2)
    rig.assign(child)
    child.send(bank.DepositMade(10), key="k")
    rig.run(worker)
    assert child.ask(bank.DepositMade(10), key="k", timeout=0) == 12


def test_ask_with_a_handled_key_writes_nothing(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1), key="k")
    rig.run()
    before = rig.rows()
    ada.ask(bank.DepositMade(1), key="k", timeout=0)
    assert rig.rows() == before


# -- wait_for ------------------------------------------------------------------------------------


def test_wait_for_returns_the_state_when_it_matches(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5))
    rig.run()
    assert ada.wait_for(lambda account: account.balance == 5, timeout=0).balance == 5


def test_wait_for_is_woken_by_the_matching_entry() -> None:
    rig = WorldRig()
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    found: list[bank.BankAccount] = []
    waiting = threading.Thread(
        target=lambda: found.append(ada.wait_for(lambda account: account.balance >= 3))
    )
    waiting.start()
    worker = rig.worker()
    ada.send(bank.DepositMade(2))
    while waiting.is_alive():
        worker.tick()
        waiting.join(0.001)
    assert [account.balance for account in found] == [3]


def test_wait_for_raises_timeout(rig: WorldRig) -> None:
    ada = rig.world()
    ada.create()
    with pytest.raises(Timeout) as raised:
        ada.wait_for(lambda account: account.balance > 0, timeout=0)
    assert raised.value.world == "ada"


def test_wait_for_a_missing_world_is_not_found(rig: WorldRig) -> None:
    with pytest.raises(NotFound):
        rig.runtime.world(bank.BankAccount, "nobody").wait_for(lambda account: True, timeout=0)
