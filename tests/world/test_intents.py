"""Intents of a world: effects, timers, mail and cancellations, written in the commit of their
entry."""

from __future__ import annotations

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.messages import FABRIC_SEND, Intent, TimerSet, WorldName
from holdfast.world.intents import effect_queue
from holdfast.world.messaging import delivery
from holdfast.world.timers import delay_queue, list_slots
from tests.world import bank
from tests.world.rig import UNKNOWN_AFTER, UNKNOWN_BEFORE, WorldRig
from tests.world.test_ingress import fill_inbox

MODULES = ("holdfast.world.intents",)

QUOTES = effect_queue("bank", "fx.quote")


def queued_intents(rig: WorldRig, name: str) -> list[Intent]:
    return [codec.unpack_as(Intent, payload) for payload in rig.queued(name)]


# -- effects -------------------------------------------------------------------------------------


def test_effect_is_queued_by_its_kind(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", tag="t"), correlation_id="c")
    rig.run()
    [intent] = queued_intents(rig, QUOTES)
    assert (intent.world_id, intent.effect_kind, intent.tag) == (rig.id(ada), "fx.quote", "t")
    assert (intent.from_height, intent.correlation_id) == (1, "c")
    assert ada.journal()[0].step.emitted == [intent.replay_digest()]


def test_each_emission_has_its_own_intent_hash(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", times=3))
    ada.send(bank.PaymentOrdered("EUR"))
    rig.run()
    assert len({intent.intent_hash for intent in queued_intents(rig, QUOTES)}) == 4


def test_intent_of_an_in_doubt_commit_is_dispatched_once() -> None:
    for fault in (UNKNOWN_BEFORE, UNKNOWN_AFTER):
        rig = WorldRig()
        ada = rig.world()
        worker = rig.worker()
        ada.send(bank.DepositMade(1))
        rig.run(worker)
        ada.send(bank.PaymentOrdered("EUR"))
        rig.backend.arm({1: fault})
        rig.run(worker)
        assert len(queued_intents(rig, QUOTES)) == 1, fault
        assert ada.height() == 2


def test_effect_priority_orders_its_queue() -> None:
    class Hurried(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            for priority in (0, 9, 5):
                cx.do(bank.quote.options(priority=priority), "EUR")

    rig = WorldRig(hf.App("bank", worlds=[Hurried], effects=[bank.quote]))
    rig.world(Hurried, "h").send(bank.Seen())
    rig.run()
    assert [intent.priority for intent in queued_intents(rig, QUOTES)] == [9, 5, 0]


# -- keys ----------------------------------------------------------------------------------------


def test_effect_key_reused_with_same_parameters_is_not_dispatched_again(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", key="k"))
    ada.send(bank.PaymentOrdered("EUR", key="k", times=2))
    rig.run()
    assert len(queued_intents(rig, QUOTES)) == 1
    assert ada.state().receipts == []


def test_effect_key_ignores_tag_and_correlation_id(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", key="k", tag="first"), correlation_id="c-1")
    ada.send(bank.PaymentOrdered("EUR", key="k", tag="again"), correlation_id="c-2")
    rig.run()
    assert len(queued_intents(rig, QUOTES)) == 1
    assert ada.state().receipts == []


def test_effect_key_reused_with_other_parameters_gets_an_error_receipt(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", key="k"))
    ada.send(bank.PaymentOrdered("USD", key="k", tag="t"), correlation_id="c")
    rig.run()
    assert [codec.unpack(intent.params) for intent in queued_intents(rig, QUOTES)] == [["EUR"]]
    assert ada.state().receipts == ["error key_conflict t"]
    assert ada.journal()[2].step.ingress.correlation_id == "c"


def test_effect_keys_of_different_worlds_are_independent(rig: WorldRig) -> None:
    for name in ("ada", "bob"):
        rig.world(name=name).send(bank.PaymentOrdered("EUR" if name == "ada" else "USD", key="k"))
    rig.run()
    assert len(queued_intents(rig, QUOTES)) == 2


# -- timers --------------------------------------------------------------------------------------


def test_timer_waits_in_the_delay_queue_until_due(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Waited(60, key="nudge"))
    rig.run()
    assert rig.queued(delay_queue("bank")) == []
    assert rig.store.read(queue.counts, delay_queue("bank")).delayed == 1
    due_ns = rig.store.read(queue.next_due_ns, delay_queue("bank"))
    assert abs(due_ns - rig.store.now_ns() - 60 * S) < S
    rig.clock.advance(61 * S)
    [claim] = rig.store.transact(queue.claim, delay_queue("bank"), "timer", 10, S)
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


def test_cancelled_effect_leaves_its_queue_and_gets_an_error_receipt() -> None:
    rig = WorldRig(hf.App("bank", worlds=[Fickle]))
    fickle = rig.world(Fickle, "f")
    fickle.send(bank.Seen())
    rig.run()
    assert queued_intents(rig, QUOTES) == []
    assert fickle.state().told == "error cancelled"


def test_cancelled_timer_leaves_its_queue_and_its_slot() -> None:
    rig = WorldRig(hf.App("bank", worlds=[Fickle]))
    rig.world(Fickle, "f").send(bank.Seen())
    rig.run()
    assert rig.store.read(queue.counts, delay_queue("bank")).delayed == 0


def test_timer_set_again_under_its_key_replaces_the_pending_one() -> None:
    class Patient(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            cx.after(60, bank.Seen(), key="k")
            cx.after(90, bank.Seen(), key="k")
            cx.after(5, bank.Seen())

    rig = WorldRig(hf.App("bank", worlds=[Patient]))
    patient = rig.world(Patient, "p")
    patient.send(bank.Seen())
    rig.run()
    assert rig.store.read(queue.counts, delay_queue("bank")).delayed == 2
    slots = rig.store.read(list_slots, "bank", patient.record().world_id, 10)
    assert sorted(slot for slot, _ in slots) == ["@1.2", "k"]


# -- mail ----------------------------------------------------------------------------------------


def test_mail_is_delivered_in_the_senders_commit(rig: WorldRig) -> None:
    ada, main = rig.world(), rig.world(bank.Audit, "main")
    ada.send(bank.TransferOrdered("main", 5))
    worker = rig.worker()
    worker.tick()
    assert rig.inbox_depth(main) == 1
    rig.run(worker)
    assert main.state().total == 5
    mail = main.journal()[0].step.ingress
    assert (mail.from_world, mail.from_height) == (rig.id(ada), 1)
    assert mail.intent_hash is not None


def test_mail_to_a_missing_world_creates_it_under_a_deterministic_id(
    rig: WorldRig,
) -> None:
    ada = rig.world()
    for _ in range(2):
        ada.send(bank.TransferOrdered("new", 1))
    rig.run()
    audit = rig.runtime.world(bank.Audit, "new")
    first = ada.journal()[0].step
    assert (
        audit.record().world_id == codec.digest(b"world", _first_intent_hash(rig, ada))[:16].hex()
    )
    assert first.outcome.value == "ok"
    assert rig.runnable("") == [audit.record().world_id]


def _first_intent_hash(rig: WorldRig, ada: hf.WorldHandle[bank.BankAccount]) -> bytes:
    from holdfast.messages import intent_hash

    return intent_hash(rig.store.generation, rig.id(ada), (1, 0))


def test_world_can_send_mail_to_itself(rig: WorldRig) -> None:
    class Looping(hf.World):
        n: int = 0

        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            self.n += 1
            if self.n < 5:
                cx.send(Looping, cx.name, bank.Seen())

    rig = WorldRig(hf.App("bank", worlds=[Looping]))
    world = rig.world(Looping, "l")
    world.send(bank.Seen())
    rig.run()
    assert world.state().n == 5
    assert rig.runnable() == []


def test_mail_to_a_full_inbox_waits_in_the_outbox_queue(rig: WorldRig) -> None:
    ada, main = rig.world(), rig.world(bank.Audit, "main")
    main.pause()
    fill_inbox(rig, main)
    ada.send(bank.TransferOrdered("main", 5))
    ada.send(bank.DepositMade(1))
    rig.run()
    assert ada.state().balance == 1
    [intent] = queued_intents(rig, effect_queue("bank", FABRIC_SEND))
    assert delivery.mail_of(intent).dest_world == WorldName("Audit", "main")


def test_failed_event_emits_nothing(rig: WorldRig) -> None:
    rig.world().send(bank.Failing())
    rig.run()
    assert queued_intents(rig, QUOTES) == []
