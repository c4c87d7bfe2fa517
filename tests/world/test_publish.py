"""Out of a world: effects, timers, mail and cancellations, in the commit of their entry."""

from __future__ import annotations

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.messages import FABRIC_SEND, Intent, TimerSet, WorldName
from holdfast.world import fabric
from holdfast.world.publish import effects
from holdfast.world.timers import delays, slots_of
from tests.world import bank
from tests.world.rig import UNKNOWN_AFTER, UNKNOWN_BEFORE, Rig
from tests.world.test_ingress import fill

MODULES = ("holdfast.world.publish",)

QUOTES = effects("bank", "fx.quote")


def intents(rig: Rig, name: str) -> list[Intent]:
    return [codec.unpack_as(Intent, payload) for payload in rig.queued(name)]


# -- effects -------------------------------------------------------------------------------------


def test_an_effect_becomes_an_item_of_the_queue_of_its_kind(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR", tag="t"), correlation_id="c")
    rig.run()
    [intent] = intents(rig, QUOTES)
    assert (intent.world_id, intent.effect_kind, intent.tag) == (rig.id(ada), "fx.quote", "t")
    assert (intent.from_height, intent.correlation_id) == (1, "c")
    assert ada.journal()[0].step.emitted == [intent.content()]


def test_each_emission_is_an_intent_of_its_own(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR", times=3))
    ada.send(bank.Paid("EUR"))
    rig.run()
    assert len({intent.intent_hash for intent in intents(rig, QUOTES)}) == 4


def test_an_intent_of_a_commit_of_unknown_outcome_is_dispatched_once() -> None:
    for fault in (UNKNOWN_BEFORE, UNKNOWN_AFTER):
        rig = Rig()
        ada = rig.world()
        worker = rig.worker()
        ada.send(bank.Deposited(1))
        rig.run(worker)
        ada.send(bank.Paid("EUR"))
        rig.backend.arm({1: fault})
        rig.run(worker)
        assert len(intents(rig, QUOTES)) == 1, fault
        assert ada.height() == 2


def test_priority_orders_the_queue_of_a_kind() -> None:
    class Hurried(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            for priority in (0, 9, 5):
                cx.do(bank.quote.options(priority=priority), "EUR")

    rig = Rig(hf.App("bank", worlds=[Hurried], effects=[bank.quote]))
    rig.world(Hurried, "h").send(bank.Seen())
    rig.run()
    assert [intent.priority for intent in intents(rig, QUOTES)] == [9, 5, 0]


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_that_was_used_for_the_same_is_not_dispatched_again(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR", key="k"))
    ada.send(bank.Paid("EUR", key="k", times=2))
    rig.run()
    assert len(intents(rig, QUOTES)) == 1
    assert ada.state().receipts == []


def test_who_asked_and_under_which_tag_is_no_part_of_what_a_key_stands_for(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR", key="k", tag="first"), correlation_id="c-1")
    ada.send(bank.Paid("EUR", key="k", tag="again"), correlation_id="c-2")
    rig.run()
    assert len(intents(rig, QUOTES)) == 1
    assert ada.state().receipts == []


def test_a_key_that_was_used_for_something_else_is_answered_with_an_error(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR", key="k"))
    ada.send(bank.Paid("USD", key="k", tag="t"), correlation_id="c")
    rig.run()
    assert [codec.unpack(intent.params) for intent in intents(rig, QUOTES)] == [["EUR"]]
    assert ada.state().receipts == ["error key_conflict t"]
    assert ada.journal()[2].step.ingress.correlation_id == "c"


def test_keys_of_different_worlds_have_nothing_to_do_with_each_other(rig: Rig) -> None:
    for name in ("ada", "bob"):
        rig.world(name=name).send(bank.Paid("EUR" if name == "ada" else "USD", key="k"))
    rig.run()
    assert len(intents(rig, QUOTES)) == 2


# -- timers --------------------------------------------------------------------------------------


def test_a_timer_waits_in_the_queue_until_its_time(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Waited(60, key="nudge"))
    rig.run()
    assert rig.queued(delays("bank")) == []
    assert rig.store.read(queue.counts, delays("bank")).delayed == 1
    due_ns = rig.store.read(queue.next_due_ns, delays("bank"))
    assert abs(due_ns - rig.store.now_ns() - 60 * S) < S
    rig.clock.advance(61 * S)
    [claim] = rig.store.transact(queue.claim, delays("bank"), "timer", 10, S)
    timer = codec.unpack_as(TimerSet, codec.unpack_as(Intent, claim.payload).params)
    assert (timer.key, timer.type) == ("nudge", "Seen")


class Fickle(hf.World):
    told: str = ""
    rung: int = 0

    @hf.on(bank.Seen)
    def seen(self, event: bank.Seen, cx: hf.Context) -> None:
        cx.cancel(cx.do(bank.quote, "EUR"))
        cx.after(60, bank.Seen(), key="k")
        cx.cancel_timer("k")
        cx.cancel_timer("never set")

    @hf.on(bank.quote)
    def quoted(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.told = f"{receipt.status} {receipt.code}"


def test_a_cancelled_effect_leaves_its_queue_and_its_receipt_says_so() -> None:
    rig = Rig(hf.App("bank", worlds=[Fickle]))
    fickle = rig.world(Fickle, "f")
    fickle.send(bank.Seen())
    rig.run()
    assert intents(rig, QUOTES) == []
    assert fickle.state().told == "error cancelled"


def test_a_cancelled_timer_leaves_its_queue_and_its_slot() -> None:
    rig = Rig(hf.App("bank", worlds=[Fickle]))
    rig.world(Fickle, "f").send(bank.Seen())
    rig.run()
    assert rig.store.read(queue.counts, delays("bank")).delayed == 0


def test_a_timer_set_again_under_its_key_replaces_the_pending_one() -> None:
    class Patient(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            cx.after(60, bank.Seen(), key="k")
            cx.after(90, bank.Seen(), key="k")
            cx.after(5, bank.Seen())

    rig = Rig(hf.App("bank", worlds=[Patient]))
    patient = rig.world(Patient, "p")
    patient.send(bank.Seen())
    rig.run()
    assert rig.store.read(queue.counts, delays("bank")).delayed == 2
    slots = rig.store.read(slots_of, "bank", patient.record().world_id, 10)
    assert sorted(slot for slot, _ in slots) == ["@1.2", "k"]


# -- mail ----------------------------------------------------------------------------------------


def test_mail_is_in_the_other_inbox_with_the_senders_commit(rig: Rig) -> None:
    ada, main = rig.world(), rig.world(bank.Audit, "main")
    ada.send(bank.Told("main", 5))
    worker = rig.worker()
    worker.tick()
    assert rig.depth(main) == 1
    rig.run(worker)
    assert main.state().total == 5
    mail = main.journal()[0].step.ingress
    assert (mail.from_world, mail.from_height) == (rig.id(ada), 1)
    assert mail.intent_hash is not None


def test_mail_makes_a_world_that_is_not_there_under_an_id_that_a_replay_would_give(
    rig: Rig,
) -> None:
    ada = rig.world()
    for _ in range(2):
        ada.send(bank.Told("new", 1))
    rig.run()
    audit = rig.runtime.world(bank.Audit, "new")
    first = ada.journal()[0].step
    assert audit.record().world_id == codec.digest(b"world", _identity(rig, ada))[:16].hex()
    assert first.outcome.value == "ok"
    assert rig.hints("") == [audit.record().world_id]


def _identity(rig: Rig, ada: hf.WorldHandle[bank.Account]) -> bytes:
    from holdfast.messages import intent_hash

    return intent_hash(rig.store.generation, rig.id(ada), (1, 0))


def test_a_world_may_write_to_itself(rig: Rig) -> None:
    class Looping(hf.World):
        n: int = 0

        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            self.n += 1
            if self.n < 5:
                cx.send(Looping, cx.name, bank.Seen())

    rig = Rig(hf.App("bank", worlds=[Looping]))
    world = rig.world(Looping, "l")
    world.send(bank.Seen())
    rig.run()
    assert world.state().n == 5
    assert rig.hints() == []


def test_mail_to_a_full_inbox_waits_in_the_queue_and_the_sender_goes_on(rig: Rig) -> None:
    ada, main = rig.world(), rig.world(bank.Audit, "main")
    main.pause()
    fill(rig, main)
    ada.send(bank.Told("main", 5))
    ada.send(bank.Deposited(1))
    rig.run()
    assert ada.state().balance == 1
    [intent] = intents(rig, effects("bank", FABRIC_SEND))
    assert fabric.read(intent).dest_world == WorldName("Audit", "main")


def test_a_failed_event_sends_nothing(rig: Rig) -> None:
    rig.world().send(bank.Failing())
    rig.run()
    assert intents(rig, QUOTES) == []
