"""One step of a world: the same inputs give the same bytes; a reducer that raises has done nothing."""

from __future__ import annotations

import msgspec
import pytest

import holdfast as hf
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.durable import queue
from holdfast.errors import Invalid, ReplayDiverged
from holdfast.messages import Ingress, event_ingress
from holdfast.world import entry, kernel
from holdfast.world.entry import Outcome, Step
from holdfast.world.kernel import Stepped, World
from holdfast.world.redrive import failures
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.kernel", "holdfast.world.redrive")

WORLD = World("bank", "w1", "ada", bank.app.programs["Account"], bank.app)


def ingress(event: object, world: World = WORLD) -> Ingress:
    return event_ingress(*world.vocabulary.encode_event(event))


def advance(state: object, event: object, world: World = WORLD, **changed: object) -> Stepped:
    given = {"seq": 1, "height": 1, "wall_ns": 10, "entropy": b"e" * 16, "generation": 1, **changed}
    return kernel.advance(world, state, ingress(event, world), **given)  # type: ignore[arg-type]


def of(world: type[hf.World]) -> World:
    app = hf.App("other", worlds=[world], events=[])
    return World("bank", "w1", "ada", app.programs[world.__name__], app)


# -- determinism ---------------------------------------------------------------------------------

EVENTS = [
    bank.Deposited(5),
    bank.Noted("a", ["b"]),
    bank.Rolled(),
    bank.Paid("EUR", times=3),
    bank.Waited(),
    bank.Told("main"),
    bank.Failing(),
    bank.Unheard(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_same_ingress_time_and_entropy_give_the_same_bytes(event: object) -> None:
    first, second = bank.Account(), bank.Account()
    assert entry.pack(advance(first, event).step) == entry.pack(advance(second, event).step)
    assert first == second


@pytest.mark.parametrize(
    "changed",
    [{"wall_ns": 11}, {"entropy": b"f" * 16}],
    ids=["time", "entropy"],
)
def test_another_time_or_entropy_gives_another_state(changed: dict[str, object]) -> None:
    first, second = bank.Account(), bank.Account()
    advance(first, bank.Rolled(), wall_ns=10_000_000_000)
    advance(second, bank.Rolled(), **{"wall_ns": 10_000_000_000, **changed, **_later(changed)})
    assert first.notes != second.notes


def _later(changed: dict[str, object]) -> dict[str, object]:
    return {"wall_ns": 20_000_000_000} if "wall_ns" in changed else {}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_repeated_step_comes_out_as_it_was(event: object) -> None:
    live = WORLD.program.initial()
    step = advance(live, event).step
    if step.outcome is Outcome.FAILED:
        live = WORLD.program.initial()
    again = kernel.repeat(WORLD, WORLD.program.initial(), step, height=1)
    assert WORLD.program.dump(again) == WORLD.program.dump(live)


# -- divergence ----------------------------------------------------------------------------------


def diverged(step: Step) -> ReplayDiverged:
    with pytest.raises(ReplayDiverged) as raised:
        kernel.repeat(WORLD, WORLD.program.initial(), step, height=7)
    return raised.value


def changed(step: Step, **fields: object) -> Step:
    return msgspec.structs.replace(step, **fields)


def test_an_emission_that_is_missing_diverges_at_its_height() -> None:
    step = advance(bank.Account(), bank.Paid("EUR", times=2)).step
    error = diverged(changed(step, emitted=step.emitted[:1]))
    assert (error.height, error.what, error.why) == (7, "emitted", "1 intents became 2 intents")


def test_another_reply_diverges() -> None:
    step = advance(bank.Account(), bank.Deposited(1)).step
    assert diverged(changed(step, reply=b"\x02")).what == "reply"


def test_a_reducer_that_raises_where_it_did_not_diverges_and_says_why() -> None:
    step = advance(bank.Account(), bank.Failing("disk on fire")).step
    error = diverged(changed(step, outcome=Outcome.OK, error=""))
    assert error.what == "outcome"
    assert "disk on fire" in error.why


def test_an_event_that_nobody_handles_any_more_diverges() -> None:
    step = advance(bank.Account(), bank.Unheard()).step
    assert diverged(changed(step, outcome=Outcome.OK)).what == "outcome"


def test_a_step_that_was_ignored_stays_ignored_though_the_code_handles_it_now() -> None:
    step = advance(bank.Account(), bank.Deposited(1)).step
    state = WORLD.program.initial()
    kernel.repeat(WORLD, state, changed(step, outcome=Outcome.IGNORED, reply=None), height=1)
    assert state.balance == 0


# -- a reducer that raises -----------------------------------------------------------------------


def test_an_event_that_nobody_handles_is_journaled_and_ignored(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Unheard())
    rig.run()
    assert [(one.type, one.outcome) for one in ada.journal()] == [("Unheard", "ignored")]
    assert ada.state() == bank.Account()


def test_a_raising_reducer_leaves_the_state_as_it_was_and_is_journaled(rig: Rig) -> None:
    ada = rig.world()
    for event in (bank.Deposited(5), bank.Failing(), bank.Deposited(2)):
        ada.send(event)
    rig.run()
    assert ada.state() == bank.Account(balance=7)
    assert [one.outcome for one in ada.journal()] == ["ok", "failed", "ok"]
    assert "RuntimeError: as told" in ada.journal()[1].error
    assert ada.journal()[1].step.emitted == []
    assert rig.queued("bank/effects/fx.quote") == []


def test_many_failures_in_one_cycle_leave_what_the_others_did(rig: Rig) -> None:
    ada = rig.world()
    for n in range(1, 8):
        ada.send(bank.Deposited(n))
        ada.send(bank.Failing())
    rig.run()
    assert ada.state().balance == 28
    assert ada.state() == ada.state(at=14)
    rig.expire()
    rig.run(rig.worker("A", "2"))
    assert rig.blocker(ada) == ""


def test_the_error_of_a_reducer_does_not_show_our_frames(rig: Rig) -> None:
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
def test_whatever_a_reducer_raises_is_journaled_as_text(error: BaseException) -> None:
    world = of(raising(error))
    stepped = advance(world.program.initial(), Sent(), world)
    assert stepped.spoiled
    assert stepped.step.outcome is Outcome.FAILED
    assert 0 < len(stepped.step.error) <= ERROR_TEXT_CHARS_MAX * 10
    assert entry.decode(entry.pack(stepped.step)) == stepped.step


def test_a_keyboard_interrupt_is_not_a_reducers_failure() -> None:
    world = of(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        advance(world.program.initial(), Sent(), world)


@pytest.mark.parametrize("wrap", ["coroutine", "generator"])
def test_a_reducer_that_only_looks_plain_fails_instead_of_doing_nothing(wrap: str) -> None:
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

    world = of(Hidden)
    assert advance(world.program.initial(), Sent(), world).spoiled


# -- dead letters --------------------------------------------------------------------------------


def test_a_failed_event_sits_in_the_dead_letters_with_its_error(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    ada.send(bank.Failing("no"))
    rig.run()
    [letter] = rig.dead()
    assert letter.code == "reducer_failed"
    assert "RuntimeError: no" in letter.error


def test_a_redriven_event_is_delivered_again_at_the_end_of_the_inbox(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    worker = rig.run()
    [letter] = rig.dead()
    rig.store.transact(queue.redrive, failures("bank"), [letter.seq])
    rig.run(worker)
    assert [one.outcome for one in ada.journal()] == ["failed", "failed"]
    assert ada.journal()[1].step.ingress == ada.journal()[0].step.ingress
    [again] = rig.dead()
    assert again.seq > letter.seq
    assert rig.store.read(queue.counts, failures("bank")).done == 1


def test_a_redriven_event_succeeds_once_the_code_is_mended(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    rig.run()
    rig.expire()
    [letter] = rig.dead()
    rig.store.transact(queue.redrive, failures("bank"), [letter.seq])

    class Account(hf.World):
        balance: int = 0
        rate: float = 0.0
        notes: list[str] = msgspec.field(default_factory=list)
        receipts: list[str] = msgspec.field(default_factory=list)

        @hf.on(bank.Failing)
        def mended(self, event: bank.Failing, cx: hf.Context) -> None:
            self.notes.append("at last")

    mended = hf.App("bank", worlds=[Account])
    rig.run(rig.worker("A", "2", app=mended))
    assert [one.outcome for one in ada.journal()] == ["failed", "ok"]
    assert mended.open(rig.store, roles=(), clock=rig.clock).world(Account, "ada").state() == (
        Account(notes=["at last"])
    )
    assert rig.dead() == []


def test_a_redriven_event_of_a_deleted_world_is_buried_again_with_a_code(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Failing())
    worker = rig.run()
    ada.delete()
    rig.store.transact(queue.redrive, failures("bank"), [rig.dead()[0].seq])
    rig.run(worker)
    assert [letter.code for letter in rig.dead()] == ["not_found"]


def test_an_item_of_the_failures_that_is_no_letter_is_buried(rig: Rig) -> None:
    rig.store.transact(queue.put, failures("bank"), b"junk")
    rig.run()
    assert [(letter.code, letter.payload) for letter in rig.dead()] == [("invalid", b"junk")]
