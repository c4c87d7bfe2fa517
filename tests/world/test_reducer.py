"""The reducer step: equal inputs give equal bytes, and a raising reducer leaves no change. Redrive
of failed events."""

from __future__ import annotations

import msgspec
import pytest

import holdfast as hf
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.durable import queue
from holdfast.errors import Invalid, ReplayDiverged
from holdfast.messages import Ingress, event_ingress
from holdfast.world import journal_entry, reducer
from holdfast.world.journal_entry import JournalStep, StepOutcome
from holdfast.world.redrive import failed_events_queue
from holdfast.world.reducer import StepResult, WorldSpec
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.reducer", "holdfast.world.redrive")

SPEC = WorldSpec("bank", "w1", "ada", bank.app.programs["BankAccount"], bank.app)


def ingress(event: object, world: WorldSpec = SPEC) -> Ingress:
    return event_ingress(*world.registry.encode_event(event))


def run_step(
    state: object, event: object, world: WorldSpec = SPEC, **changed: object
) -> StepResult:
    inputs = {
        "seq": 1,
        "height": 1,
        "wall_ns": 10,
        "entropy": b"e" * 16,
        "generation": 1,
        **changed,
    }
    return reducer.run_step(world, state, ingress(event, world), **inputs)  # type: ignore[arg-type]


def spec_of(world: type[hf.World]) -> WorldSpec:
    app = hf.App("other", worlds=[world], events=[])
    return WorldSpec("bank", "w1", "ada", app.programs[world.__name__], app)


# -- determinism ---------------------------------------------------------------------------------

EVENTS = [
    bank.DepositMade(5),
    bank.Noted("a", ["b"]),
    bank.Rolled(),
    bank.PaymentOrdered("EUR", times=3),
    bank.Waited(),
    bank.TransferOrdered("main"),
    bank.Failing(),
    bank.UnhandledEvent(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_step_is_deterministic_in_ingress_time_and_entropy(event: object) -> None:
    first, second = bank.BankAccount(), bank.BankAccount()
    assert journal_entry.pack(run_step(first, event).step) == journal_entry.pack(
        run_step(second, event).step
    )
    assert first == second


@pytest.mark.parametrize(
    "changed",
    [{"wall_ns": 11}, {"entropy": b"f" * 16}],
    ids=["time", "entropy"],
)
def test_step_depends_on_time_and_entropy(changed: dict[str, object]) -> None:
    first, second = bank.BankAccount(), bank.BankAccount()
    run_step(first, bank.Rolled(), wall_ns=10_000_000_000)
    run_step(second, bank.Rolled(), **{"wall_ns": 10_000_000_000, **changed, **_later(changed)})
    assert first.notes != second.notes


def _later(changed: dict[str, object]) -> dict[str, object]:
    return {"wall_ns": 20_000_000_000} if "wall_ns" in changed else {}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_replay_step_reproduces_the_recorded_step(event: object) -> None:
    live = SPEC.definition.initial_state()
    step = run_step(live, event).step
    if step.outcome is StepOutcome.FAILED:
        live = SPEC.definition.initial_state()
    again = reducer.replay_step(SPEC, SPEC.definition.initial_state(), step, height=1)
    assert SPEC.definition.dump_state(again) == SPEC.definition.dump_state(live)


# -- divergence ----------------------------------------------------------------------------------


def replay_error(step: JournalStep) -> ReplayDiverged:
    with pytest.raises(ReplayDiverged) as raised:
        reducer.replay_step(SPEC, SPEC.definition.initial_state(), step, height=7)
    return raised.value


def replace_fields(step: JournalStep, **fields: object) -> JournalStep:
    return msgspec.structs.replace(step, **fields)


def test_missing_emission_diverges_at_its_height() -> None:
    step = run_step(bank.BankAccount(), bank.PaymentOrdered("EUR", times=2)).step
    error = replay_error(replace_fields(step, emitted=step.emitted[:1]))
    assert (error.height, error.what, error.why) == (7, "emitted", "1 intents became 2 intents")


def test_changed_reply_diverges() -> None:
    step = run_step(bank.BankAccount(), bank.DepositMade(1)).step
    assert replay_error(replace_fields(step, reply=b"\x02")).what == "reply"


def test_reducer_that_newly_raises_diverges_with_the_error() -> None:
    step = run_step(bank.BankAccount(), bank.Failing("disk on fire")).step
    error = replay_error(replace_fields(step, outcome=StepOutcome.OK, error=""))
    assert error.what == "outcome"
    assert "disk on fire" in error.why


def test_event_that_lost_its_handler_diverges() -> None:
    step = run_step(bank.BankAccount(), bank.UnhandledEvent()).step
    assert replay_error(replace_fields(step, outcome=StepOutcome.OK)).what == "outcome"


def test_ignored_step_stays_ignored_in_replay_by_code_that_handles_it() -> None:
    step = run_step(bank.BankAccount(), bank.DepositMade(1)).step
    state = SPEC.definition.initial_state()
    reducer.replay_step(
        SPEC, state, replace_fields(step, outcome=StepOutcome.IGNORED, reply=None), height=1
    )
    assert state.balance == 0


# -- raising reducers ----------------------------------------------------------------------------


def test_unhandled_event_is_journaled_as_ignored(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.UnhandledEvent())
    rig.run()
    assert [(one.type, one.outcome) for one in ada.journal()] == [("UnhandledEvent", "ignored")]
    assert ada.state() == bank.BankAccount()


def test_raising_reducer_leaves_the_state_unchanged_and_is_journaled(rig: WorldRig) -> None:
    ada = rig.world()
    for event in (bank.DepositMade(5), bank.Failing(), bank.DepositMade(2)):
        ada.send(event)
    rig.run()
    assert ada.state() == bank.BankAccount(balance=7)
    assert [one.outcome for one in ada.journal()] == ["ok", "failed", "ok"]
    assert "RuntimeError: as told" in ada.journal()[1].error
    assert ada.journal()[1].step.emitted == []
    assert rig.queued("bank/effects/fx.quote") == []


def test_failed_events_do_not_undo_other_events_of_the_cycle(rig: WorldRig) -> None:
    ada = rig.world()
    for n in range(1, 8):
        ada.send(bank.DepositMade(n))
        ada.send(bank.Failing())
    rig.run()
    assert ada.state().balance == 28
    assert ada.state() == ada.state(at=14)
    rig.advance_clock()
    rig.run(rig.worker("A", "2"))
    assert rig.blocker_code(ada) == ""


def test_reducer_error_text_omits_runtime_frames(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    rig.run()
    assert "kernel.py" not in ada.journal()[0].error
    assert "bank.py" in ada.journal()[0].error


class Sent(hf.Event):
    pass


def raising(error: BaseException) -> type[hf.World]:
    class Raising(hf.World):
        n: int = 0

        @hf.on(Sent)
        def sent(self, event: Sent, cx: hf.Context) -> None:
            self.n += 1
            raise error

    return Raising


@pytest.mark.parametrize(
    "error",
    [
        ValueError("\ud800 is no text"),
        ValueError("x" * 100_000),
        SystemExit(3),
        RecursionError(),
        Invalid(what="amount", why="\udfff"),
    ],
    ids=["surrogate", "long", "exit", "recursion", "typed"],
)
def test_any_reducer_exception_is_journaled_as_text(error: BaseException) -> None:
    world = spec_of(raising(error))
    result = run_step(world.definition.initial_state(), Sent(), world)
    assert result.state_dirty
    assert result.step.outcome is StepOutcome.FAILED
    assert 0 < len(result.step.error) <= ERROR_TEXT_CHARS_MAX * 10
    assert journal_entry.decode(journal_entry.pack(result.step)) == result.step


def test_keyboard_interrupt_is_not_a_reducer_failure() -> None:
    world = spec_of(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_step(world.definition.initial_state(), Sent(), world)


@pytest.mark.parametrize("wrap", ["coroutine", "generator"])
def test_reducer_that_returns_a_coroutine_or_generator_fails(wrap: str) -> None:
    async def later() -> None: ...

    class Hidden(hf.World):
        @hf.on(Sent)
        def sent(self, event: Sent, cx: hf.Context) -> None:
            if wrap == "coroutine":
                self_made = later()
                try:
                    return self_made  # type: ignore[return-value]
                finally:
                    self_made.close()
            return (n for n in ())  # type: ignore[return-value]

    world = spec_of(Hidden)
    assert run_step(world.definition.initial_state(), Sent(), world).state_dirty


# -- dead letters --------------------------------------------------------------------------------


def test_failed_event_becomes_a_dead_letter_with_its_error(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    ada.send(bank.Failing("no"))
    rig.run()
    [letter] = rig.failed_events()
    assert letter.code == "reducer_failed"
    assert "RuntimeError: no" in letter.error


def test_redriven_event_is_delivered_at_the_end_of_the_inbox(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    worker = rig.run()
    [letter] = rig.failed_events()
    rig.store.transact(queue.redrive, failed_events_queue("bank"), [letter.seq])
    rig.run(worker)
    assert [one.outcome for one in ada.journal()] == ["failed", "failed"]
    assert ada.journal()[1].step.ingress == ada.journal()[0].step.ingress
    [again] = rig.failed_events()
    assert again.seq > letter.seq
    assert rig.store.read(queue.counts, failed_events_queue("bank")).done == 1


def test_redriven_event_succeeds_after_the_code_is_fixed(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    rig.run()
    rig.advance_clock()
    [letter] = rig.failed_events()
    rig.store.transact(queue.redrive, failed_events_queue("bank"), [letter.seq])

    class MendedAccount(hf.World):
        balance: int = 0
        rate: float = 0.0
        notes: list[str] = msgspec.field(default_factory=list)
        receipts: list[str] = msgspec.field(default_factory=list)

        @hf.on(bank.Failing)
        def mended(self, event: bank.Failing, cx: hf.Context) -> None:
            self.notes.append("at last")

    # The same stored type as `bank.BankAccount`, in other code.
    MendedAccount.__name__ = bank.BankAccount.__name__
    mended = hf.App("bank", worlds=[MendedAccount])
    rig.run(rig.worker("A", "2", app=mended))
    assert [one.outcome for one in ada.journal()] == ["failed", "ok"]
    assert mended.open(rig.store, roles=(), clock=rig.clock).world(
        MendedAccount, "ada"
    ).state() == (MendedAccount(notes=["at last"]))
    assert rig.failed_events() == []


def test_redriven_event_of_a_deleted_world_becomes_a_dead_letter_again(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    worker = rig.run()
    ada.delete()
    rig.store.transact(queue.redrive, failed_events_queue("bank"), [rig.failed_events()[0].seq])
    rig.run(worker)
    assert [letter.code for letter in rig.failed_events()] == ["not_found"]


def test_undecodable_failed_event_row_becomes_a_dead_letter(rig: WorldRig) -> None:
    rig.store.transact(queue.put, failed_events_queue("bank"), b"junk")
    rig.run()
    assert [(letter.code, letter.payload) for letter in rig.failed_events()] == [
        ("invalid", b"junk")
    ]
