"""Faulty effects of every kind: each has one receipt, and other effects are not affected.

Each fault runs in a real pool in three ways: inline, on a thread executor, and as a coroutine.
`tests/process` has the faults that kill the whole process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.config import ERROR_TEXT_CHARS_MAX, MESSAGE_BYTES_MAX
from holdfast.errors import (
    ClaimLost,
    CommitUnknown,
    Conflict,
    Fenced,
    HoldfastError,
    Invalid,
    NotFound,
    StoreClosed,
)
from holdfast.messages import Intent, IntentReceipt, ReceiptStatus, receipt_ingress
from holdfast.ops import world_operations
from holdfast.runner.error_policy import Refused
from holdfast.store import schema
from holdfast.store.api import Row, Txn
from holdfast.workers.effects import receipts
from tests.workers.rig import WorkerRig
from tests.workers.shop import Dropped, Ordered

MODULES = (
    "holdfast.workers.effects.pool",
    "holdfast.workers.effects.receipts",
    "holdfast.app.definitions",
)

ATTEMPTS = 2
WAIT_S = 30.0

# Set at the end of a test. Hanging calls wait for it.
release_hangs = threading.Event()


# -- faults --------------------------------------------------------------------------------------


class ErrorWithRaisingText(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    def __repr__(self) -> str:
        raise ValueError("none at all")


class ErrorWithRecursiveText(Exception):
    def __str__(self) -> str:
        return str(self)


class HoldfastErrorWithoutText(HoldfastError):
    code = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise KeyError("fields")


class ErrorWithSuccessCode(HoldfastError):
    """An error with a success code and a retry delay of NaN."""

    code = "ok"
    retryable = True

    def __init__(self) -> None:
        super().__init__(retry_after_s=float("nan"))


class CustomBaseException(BaseException):
    """Neither an `Exception` nor a built-in base exception."""


def nested_list(depth: int) -> Any:
    made: Any = "core"
    for _ in range(depth):
        made = [made]
    return made


def circular_list() -> Any:
    made: list[Any] = []
    made.append(made)
    return made


def self_caused_error() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


class Unpackable(msgspec.Struct):
    inside: Any


class FaultCase(NamedTuple):
    """An action, the expected code of its receipt ("" for any), and the expected number of calls."""

    action: Callable[[], Any]
    code: str = ""
    calls: int = ATTEMPTS


def raise_action(error: BaseException) -> Callable[[], Any]:
    def do() -> Any:
        raise error

    return do


# Unusable results. The call was made and may have cost something, so it is not retried.
BAD_RESULTS: dict[str, Callable[[], Any]] = {
    "another type": lambda: 7,
    "nothing": lambda: None,
    "bytes for text": lambda: b"text",
    "a list for text": lambda: ["text"],
    "50 MB": lambda: "x" * 50_000_000,
    "a little too much": lambda: "x" * (MESSAGE_BYTES_MAX + 1),
    "a lone surrogate": lambda: "\ud800",
    "an object": lambda: object(),
    "a class": lambda: HoldfastError,
    "a function": lambda: print,
    "a generator": lambda: (n for n in range(3)),
    "a lock": lambda: threading.Lock(),
    "an exception": lambda: ValueError("returned, not raised"),
    "a number beyond 64 bits": lambda: 2**70,
    "a list in itself": circular_list,
    "a list a thousand deep": lambda: nested_list(1_000),
    "a struct with an object": lambda: Unpackable(object()),
    "keys that are lists": lambda: {(1, 2): [datetime.max]},
    "a cost that is text": lambda: hf.Costed("text", cost="a lot"),  # type: ignore[arg-type]
    "a cost that is no number": lambda: hf.Costed("text", cost=float("nan")),
    "a cost without bound": lambda: hf.Costed("text", cost=float("inf")),
    "a costed wrong type": lambda: hf.Costed(7, cost=1.0),
}

RAISED: dict[str, Callable[[], Any]] = {
    "an error": raise_action(ValueError("no")),
    "no memory": raise_action(MemoryError()),
    "recursion": raise_action(RecursionError("too deep")),
    "stop iteration": raise_action(StopIteration("value")),
    "stop async iteration": raise_action(StopAsyncIteration()),
    "a broken pipe": raise_action(BrokenPipeError(32, "gone")),
    "an unspeakable error": raise_action(ErrorWithRaisingText()),
    "an error that never ends": raise_action(ErrorWithRecursiveText()),
    "an error of 50 MB": raise_action(ValueError("x" * 50_000_000)),
    "an error with a surrogate": raise_action(ValueError("\ud800 \x00 \x1b[31m")),
    "an error that caused itself": raise_action(self_caused_error()),
    "a group of errors": raise_action(
        ExceptionGroup("many", [ValueError(str(n)) for n in range(1000)])
    ),
    "an error of ours that lies": raise_action(ErrorWithSuccessCode()),
    "a conflict of the store": raise_action(Conflict()),
    "an unknown commit": raise_action(CommitUnknown()),
    "an import that fails": lambda: __import__("no_such_module_anywhere"),
    "a syntax error": lambda: compile("def", "x", "exec"),
}

# Errors of the runtime that are not retryable.
NOT_RETRIED: dict[str, Callable[[], Any]] = {
    "an error of ours that is mute": raise_action(HoldfastErrorWithoutText()),
    "a lost claim": raise_action(ClaimLost(queue="q", seq=1, number=1)),
    "a fence": raise_action(Fenced(resource="r", held=1, current=2)),
    "a closed store": raise_action(StoreClosed()),
    "a refusal": raise_action(Refused(why="never")),
}

# Errors that would end a thread, an event loop or the process if they propagated.
EXIT_ERRORS: dict[str, Callable[[], Any]] = {
    "an exit": raise_action(SystemExit(3)),
    "an exit with an object": raise_action(SystemExit(object())),
    "an exit that is unspeakable": raise_action(SystemExit(ErrorWithRaisingText())),
    "an interrupt": raise_action(KeyboardInterrupt()),
    "a generator's end": raise_action(GeneratorExit()),
    "a cancellation of its own": raise_action(asyncio.CancelledError()),
    "something worse": raise_action(CustomBaseException("x")),
    "a group of worse things": raise_action(
        BaseExceptionGroup("many", [CustomBaseException("x"), SystemExit(1)])
    ),
}

FAULT_CASES = {
    **{name: FaultCase(do, "bad_result", 1) for name, do in BAD_RESULTS.items()},
    **{name: FaultCase(do) for name, do in RAISED.items()},
    **{name: FaultCase(do) for name, do in EXIT_ERRORS.items()},
    **{name: FaultCase(do, calls=1) for name, do in NOT_RETRIED.items()},
    "a hang": FaultCase(lambda: release_hangs.wait(WAIT_S) and "late", "timeout"),
}


# -- the application -----------------------------------------------------------------------------

FAST_OPTIONS = {"attempts": ATTEMPTS, "timeout_s": 20.0}


@hf.effect("in line", concurrency=1, **FAST_OPTIONS)
def in_line(call: hf.Call, what: str) -> str:
    return perform(what)


@hf.effect("crew", concurrency=4, **FAST_OPTIONS)
def crew(call: hf.Call, what: str) -> str:
    return perform(what)


@hf.effect("looped", concurrency=4, **FAST_OPTIONS)
async def looped(call: hf.Call, what: str) -> str:
    await asyncio.sleep(0)
    return perform(what)


@hf.effect("slow", attempts=ATTEMPTS, timeout_s=0.3, concurrency=1)
def slow(call: hf.Call, what: str) -> str:
    return perform(what)


@hf.effect("slow crew", attempts=ATTEMPTS, timeout_s=0.3, concurrency=2)
def slow_crew(call: hf.Call, what: str) -> str:
    return perform(what)


@hf.effect("slow loop", attempts=ATTEMPTS, timeout_s=0.3, concurrency=2)
async def slow_loop(call: hf.Call, what: str) -> str:
    while what == "a hang":
        await asyncio.sleep(0.05)
    return perform(what)


@hf.effect("evil loop", attempts=1, timeout_s=0.5, concurrency=2)
async def evil_loop(call: hf.Call, what: str) -> str:
    loop = asyncio.get_running_loop()
    if what == "stop":
        loop.stop()
    elif what == "cancel":
        for task in asyncio.all_tasks():
            task.cancel()
    elif what == "will not be cancelled":
        while not release_hangs.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0)
    return what


@hf.effect("yields", attempts=1, timeout_s=5, concurrency=2)
def yields(call: hf.Call, what: str) -> str:
    yield what  # type: ignore[misc]


@hf.effect("async yields", attempts=1, timeout_s=5, concurrency=2)
async def async_yields(call: hf.Call, what: str) -> str:  # type: ignore[misc]
    yield what


EFFECTS: dict[str, Any] = {
    effect.kind: effect
    for effect in (
        in_line, crew, looped, slow, slow_crew, slow_loop, evil_loop, yields, async_yields,
    )
}  # fmt: skip

calls: list[str] = []


def perform(what: str) -> Any:
    calls.append(what)
    return FAULT_CASES[what].action() if what in FAULT_CASES else f"{what} done"


class Ask(hf.Event):
    kind: str
    what: str


class Asker(hf.World):
    told: list[tuple[str, str, str, int, int]] = msgspec.field(default_factory=list)

    @hf.on(Ask)
    def ask(self, event: Ask, cx: hf.Context) -> None:
        cx.do(EFFECTS[event.kind], event.what, tag=event.what)

    @hf.on(*EFFECTS.values())
    def answered(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        said = (receipt.status, receipt.code, receipt.attempts, len(receipt.error))
        self.told.append((receipt.tag, *said))


app = hf.App("trouble", worlds=[Asker])


class ObservedReceipt(NamedTuple):
    what: str
    status: str
    code: str
    attempts: int
    error_chars: int


@pytest.fixture(autouse=True)
def reset_calls() -> Iterator[None]:
    release_hangs.clear()
    calls.clear()
    yield
    release_hangs.set()


@contextmanager
def open_asker() -> Iterator[Callable[..., list[ObservedReceipt]]]:
    """Yield a function that requests effects of one kind and waits for their receipts."""
    with app.open("memory:") as runtime:
        asker = runtime.world(Asker, "ada")
        asked = 0

        def ask(kind: str, *whats: str) -> list[ObservedReceipt]:
            nonlocal asked
            runtime.send_many((asker, Ask(kind, what)) for what in whats)
            before, asked = asked, asked + len(whats)
            deadline = time.monotonic() + WAIT_S
            while len(asker.state().told) < asked:
                missing = {*whats} - {told[0] for told in asker.state().told[before:]}
                assert time.monotonic() < deadline, f"no receipt for {missing}"
                release_hangs.wait(0.01)
            return [ObservedReceipt(*told) for told in asker.state().told[before:]]

        try:
            yield ask
        finally:
            release_hangs.set()


# -- one receipt each ----------------------------------------------------------------------------

KINDS = ("in line", "crew", "looped")
CONTAINED_FAULTS = {**BAD_RESULTS, **RAISED, **NOT_RETRIED}


@pytest.fixture(scope="module", params=KINDS)
def settled(request: pytest.FixtureRequest) -> list[ObservedReceipt]:
    """The receipts of all contained faults, requested at once between valid calls."""
    calls.clear()
    with open_asker() as ask:
        told = ask(request.param, "first", *CONTAINED_FAULTS, "last")
        return told + ask(request.param, "after all")


@pytest.mark.parametrize("what", CONTAINED_FAULTS)
def test_faulty_effect_has_one_error_receipt(settled: list[ObservedReceipt], what: str) -> None:
    [receipt] = [one for one in settled if one.what == what]
    misdeed = FAULT_CASES[what]
    assert receipt.status == "error"
    assert receipt.code == (misdeed.code or receipt.code) != ""
    assert receipt.attempts == misdeed.calls
    assert 0 < receipt.error_chars <= ERROR_TEXT_CHARS_MAX


def test_valid_calls_among_faulty_effects_run_once(settled: list[ObservedReceipt]) -> None:
    good = [told for told in settled if told.what not in FAULT_CASES]
    assert sorted((told.what, told.status, told.attempts) for told in good) == [
        ("after all", "ok", 1), ("first", "ok", 1), ("last", "ok", 1),
    ]  # fmt: skip


# -- faults that would end a thread, a loop or a process -----------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", EXIT_ERRORS)
def test_exit_error_in_an_effect_ends_only_its_attempt(kind: str, what: str) -> None:
    with open_asker() as ask:
        [told] = ask(kind, what)
        assert (told.status, told.attempts) == ("error", ATTEMPTS)
        assert told.code
        assert calls == [what] * ATTEMPTS
        for neighbour in KINDS:
            [after] = ask(neighbour, "after it")
            assert after.status == "ok", neighbour


@pytest.mark.parametrize("kind", ["slow", "slow crew", "slow loop"])
def test_hanging_effect_gets_a_timeout_and_the_next_effect_runs(kind: str) -> None:
    with open_asker() as ask:
        told = ask(kind, "a hang", "good")
        assert {one.what: one.status for one in told} == {"a hang": "timeout", "good": "ok"}
        assert [one.attempts for one in told if one.what == "a hang"] == [ATTEMPTS]


@pytest.mark.parametrize("kind", ["slow", "slow crew", "slow loop"])
def test_more_hanging_effects_than_threads_do_not_block_the_queue(kind: str) -> None:
    with open_asker() as ask:
        told = ask(kind, *["a hang"] * 6, "good")
        assert sorted(one.status for one in told) == ["ok", *["timeout"] * 6]


@pytest.mark.parametrize("what", ["stop", "cancel", "will not be cancelled"])
def test_coroutine_that_disrupts_its_event_loop_fails_no_other_effect(what: str) -> None:
    with open_asker() as ask:
        [told] = ask("evil loop", what)
        assert told.what == what
        assert [one.status for one in ask("looped", "a", "b", "c")] == ["ok"] * 3


@pytest.mark.parametrize("kind", ["yields", "async yields"])
def test_generator_effect_has_a_bad_result(kind: str) -> None:
    with open_asker() as ask:
        [told] = ask(kind, "x")
        assert (told.status, told.code) == ("error", "bad_result")


def test_receipt_counts_the_attempts_of_a_faulty_effect() -> None:
    with open_asker() as ask:
        told = ask("crew", "an error", "another type", "a refusal", "good")
    assert {one.what: one.attempts for one in told} == {
        what: calls.count(what) for what in ("an error", "another type", "a refusal", "good")
    }


# -- unexpected receipts -------------------------------------------------------------------------


def rows(rig: WorkerRig) -> list[Row]:
    """All stored rows except the metadata of the store."""

    def look(txn: Txn) -> list[Row]:
        own = (schema.META_KEY, schema.MARKER_KEY)
        kept = [row for row in txn.scan(b"", b"\xff") if row[0] not in own]
        return [row for row in kept if not row[0].startswith(schema.OUTCOME)]

    return rig.store.read(look)


def make_receipt(intent: Intent, value: str = "forged", **fields: Any) -> IntentReceipt:
    made = IntentReceipt(intent.intent_hash, "pay", ReceiptStatus.OK, codec.pack(value))
    return msgspec.structs.replace(made, **fields)


def unknown(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada = rig.buyer("ada", Ordered())
    return ada, make_receipt(rig.next_intent(), intent_hash=b"\x07" * 32)


def finished(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.next_intent()
    rig.run_until_idle(rig.pool())
    return ada, make_receipt(intent)


def dead(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.next_intent()
    rig.fake_service.answers += [OSError("down")] * 9
    rig.run_until_idle(rig.pool(), seconds=60)
    assert len(rig.dead_letters()) == 1
    return ada, make_receipt(intent)


def cancelled(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.next_intent()
    ada.send(Dropped())
    rig.run_worlds()
    return ada, make_receipt(intent)


def redriven(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada, receipt = dead(rig)
    [dead_letter] = rig.dead_letters()
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    return ada, receipt


def foreign(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    rig.buyer("bob", Ordered())
    return rig.buyer("ada"), make_receipt(rig.next_intent())


def inherited(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    parent = rig.buyer("parent", Ordered())
    intent = rig.next_intent()
    child = parent.fork("child", at=parent.height())
    return child, make_receipt(intent)


def of_another_kind(rig: WorkerRig) -> tuple[Any, IntentReceipt]:
    ada = rig.buyer("ada", Ordered())
    return ada, make_receipt(rig.next_intent(), effect_kind="ship")


UNEXPECTED_RECEIPTS = (
    unknown,
    finished,
    dead,
    cancelled,
    redriven,
    foreign,
    inherited,
    of_another_kind,
)


@pytest.mark.parametrize("case", UNEXPECTED_RECEIPTS, ids=lambda case: case.__name__)
def test_inject_of_an_unexpected_receipt_is_rejected_and_changes_nothing(
    rig: WorkerRig, case: Callable[[WorkerRig], tuple[Any, IntentReceipt]]
) -> None:
    world, receipt = case(rig)
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        world_operations.receipt_inject(rig.store, "shop", rig.id(world), receipt)
    assert rows(rig) == before


@pytest.mark.parametrize("case", UNEXPECTED_RECEIPTS, ids=lambda case: case.__name__)
def test_unexpected_receipt_as_plain_ingress_is_rejected(
    rig: WorkerRig, case: Callable[[WorkerRig], tuple[Any, IntentReceipt]]
) -> None:
    world, receipt = case(rig)
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        world_operations.enqueue_ingress(rig.store, "shop", rig.id(world), receipt_ingress(receipt))
    assert rows(rig) == before


@pytest.mark.parametrize("case", [finished, dead, cancelled], ids=lambda case: case.__name__)
def test_late_receipt_of_a_pool_is_dropped(
    rig: WorkerRig, case: Callable[[WorkerRig], tuple[Any, IntentReceipt]]
) -> None:
    """`deliver_receipt` joins an ack. It must neither raise nor deliver."""
    world, receipt = case(rig)
    told = list(world.state().told)
    intent = Intent(
        universe_id="shop",
        world_id=rig.id(world),
        intent_hash=receipt.intent_hash,
        effect_kind="pay",
        params=b"",
        origin_name="ada",
        policy_context_hash=b"",
        enqueued_at_ns=0,
    )
    before = rows(rig)
    rig.store.transact(receipts.deliver_receipt, intent, receipt)
    assert rows(rig) == before
    rig.run_worlds()
    assert world.state().told == told


@pytest.mark.parametrize(
    "wrong",
    [{"intent_hash": b""}, {"intent_hash": b"short"}, {"effect_kind": ""}, {"effect_kind": "no"}],
    ids=str,
)
def test_malformed_receipt_is_rejected(rig: WorkerRig, wrong: dict[str, Any]) -> None:
    ada = rig.buyer("ada", Ordered())
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        world_operations.receipt_inject(
            rig.store, "shop", rig.id(ada), make_receipt(rig.next_intent(), **wrong)
        )
    assert rows(rig) == before


def test_receipt_value_of_the_wrong_type_fails_only_its_event(
    rig: WorkerRig,
) -> None:
    ada = rig.buyer("ada", Ordered())
    forged = make_receipt(rig.next_intent(), value=codec.pack({"not": "text"}))
    world_operations.receipt_inject(rig.store, "shop", rig.id(ada), forged)
    rig.run_worlds()
    ada.send(Ordered("tea"))
    rig.run_until_idle(rig.pool())
    assert [entry.outcome for entry in ada.journal()] == ["ok", "failed", "ok", "ok"]
    assert rig.blocker_code(ada) == ""


def test_injected_receipt_is_the_only_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered())
    world_operations.receipt_inject(
        rig.store, "shop", rig.id(ada), make_receipt(rig.next_intent(), "by hand")
    )
    rig.run_until_idle(rig.pool())
    assert [told.split()[:2] for told in ada.state().told] == [["ok", "by"]]


def test_fault_tables_have_no_common_names() -> None:
    assert len(FAULT_CASES) == len(CONTAINED_FAULTS) + len(EXIT_ERRORS) + 1
    assert not inspect.iscoroutinefunction(in_line.fn)
