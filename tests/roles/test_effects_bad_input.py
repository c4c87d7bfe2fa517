"""Effects that misbehave in every way we could think of: one receipt each, and nobody else is harmed.

Each runs in a real pool, three times over: in line, on a crew of threads, and as a coroutine. What
kills its whole process is in `tests/process`.
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
from holdfast.messages import Intent, Receipt, Status, receipt_ingress
from holdfast.ops import service
from holdfast.roles import receipts
from holdfast.runner.faults import Refused
from holdfast.store import schema
from holdfast.store.api import Row, Txn
from tests.roles.rig import Rig
from tests.roles.shop import Dropped, Ordered

MODULES = ("holdfast.roles.adapter", "holdfast.roles.receipts", "holdfast.app.declare")

ATTEMPTS = 2
WAIT_S = 30.0

# Set when a test is over: whatever hangs waits for it.
over = threading.Event()


# -- misdeeds ------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    def __repr__(self) -> str:
        raise ValueError("none at all")


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Mute(HoldfastError):
    code = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise KeyError("fields")


class Lying(HoldfastError):
    """Its code is that of a success, and it asks for an endless wait."""

    code = "ok"
    retryable = True

    def __init__(self) -> None:
        super().__init__(retry_after_s=float("nan"))


class Worse(BaseException):
    """Not an Exception, and not one of Python's own either."""


def nested(depth: int) -> Any:
    made: Any = "core"
    for _ in range(depth):
        made = [made]
    return made


def circular() -> Any:
    made: list[Any] = []
    made.append(made)
    return made


def caused_by_itself() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


class Unpackable(msgspec.Struct):
    inside: Any


class Misdeed(NamedTuple):
    """What is done, the code of its receipt ("" for any), and how often it is called for that."""

    do: Callable[[], Any]
    code: str = ""
    calls: int = ATTEMPTS


def raising(error: BaseException) -> Callable[[], Any]:
    def do() -> Any:
        raise error

    return do


# What a call brings back cannot be used: the call was made and may have cost something, so it is not
# made again.
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
    "a list in itself": circular,
    "a list a thousand deep": lambda: nested(1_000),
    "a struct with an object": lambda: Unpackable(object()),
    "keys that are lists": lambda: {(1, 2): [datetime.max]},
    "a cost that is text": lambda: hf.Costed("text", cost="a lot"),  # type: ignore[arg-type]
    "a cost that is no number": lambda: hf.Costed("text", cost=float("nan")),
    "a cost without bound": lambda: hf.Costed("text", cost=float("inf")),
    "a costed wrong type": lambda: hf.Costed(7, cost=1.0),
}

RAISED: dict[str, Callable[[], Any]] = {
    "an error": raising(ValueError("no")),
    "no memory": raising(MemoryError()),
    "recursion": raising(RecursionError("too deep")),
    "stop iteration": raising(StopIteration("value")),
    "stop async iteration": raising(StopAsyncIteration()),
    "a broken pipe": raising(BrokenPipeError(32, "gone")),
    "an unspeakable error": raising(Unspeakable()),
    "an error that never ends": raising(Endless()),
    "an error of 50 MB": raising(ValueError("x" * 50_000_000)),
    "an error with a surrogate": raising(ValueError("\ud800 \x00 \x1b[31m")),
    "an error that caused itself": raising(caused_by_itself()),
    "a group of errors": raising(ExceptionGroup("many", [ValueError(str(n)) for n in range(1000)])),
    "an error of ours that lies": raising(Lying()),
    "a conflict of the store": raising(Conflict()),
    "an unknown commit": raising(CommitUnknown()),
    "an import that fails": lambda: __import__("no_such_module_anywhere"),
    "a syntax error": lambda: compile("def", "x", "exec"),
}

# Errors of ours that say themselves that nothing is to be tried again.
FINAL: dict[str, Callable[[], Any]] = {
    "an error of ours that is mute": raising(Mute()),
    "a lost claim": raising(ClaimLost(queue="q", seq=1, number=1)),
    "a fence": raising(Fenced(resource="r", held=1, current=2)),
    "a closed store": raising(StoreClosed()),
    "a refusal": raising(Refused(why="never")),
}

# These would end a thread, a loop or the process, if they were let through.
UNSTOPPED: dict[str, Callable[[], Any]] = {
    "an exit": raising(SystemExit(3)),
    "an exit with an object": raising(SystemExit(object())),
    "an exit that is unspeakable": raising(SystemExit(Unspeakable())),
    "an interrupt": raising(KeyboardInterrupt()),
    "a generator's end": raising(GeneratorExit()),
    "a cancellation of its own": raising(asyncio.CancelledError()),
    "something worse": raising(Worse("x")),
    "a group of worse things": raising(BaseExceptionGroup("many", [Worse("x"), SystemExit(1)])),
}

MISDEEDS = {
    **{name: Misdeed(do, "bad_result", 1) for name, do in BAD_RESULTS.items()},
    **{name: Misdeed(do) for name, do in RAISED.items()},
    **{name: Misdeed(do) for name, do in UNSTOPPED.items()},
    **{name: Misdeed(do, calls=1) for name, do in FINAL.items()},
    "a hang": Misdeed(lambda: over.wait(WAIT_S) and "late", "timeout"),
}


# -- the application -----------------------------------------------------------------------------

SWIFT = {"attempts": ATTEMPTS, "timeout_s": 20.0}


@hf.effect("in line", concurrency=1, **SWIFT)
def in_line(call: hf.Call, what: str) -> str:
    return done(what)


@hf.effect("crew", concurrency=4, **SWIFT)
def crew(call: hf.Call, what: str) -> str:
    return done(what)


@hf.effect("looped", concurrency=4, **SWIFT)
async def looped(call: hf.Call, what: str) -> str:
    await asyncio.sleep(0)
    return done(what)


@hf.effect("slow", attempts=ATTEMPTS, timeout_s=0.3, concurrency=1)
def slow(call: hf.Call, what: str) -> str:
    return done(what)


@hf.effect("slow crew", attempts=ATTEMPTS, timeout_s=0.3, concurrency=2)
def slow_crew(call: hf.Call, what: str) -> str:
    return done(what)


@hf.effect("slow loop", attempts=ATTEMPTS, timeout_s=0.3, concurrency=2)
async def slow_loop(call: hf.Call, what: str) -> str:
    while what == "a hang":
        await asyncio.sleep(0.05)
    return done(what)


@hf.effect("evil loop", attempts=1, timeout_s=0.5, concurrency=2)
async def evil_loop(call: hf.Call, what: str) -> str:
    loop = asyncio.get_running_loop()
    if what == "stop":
        loop.stop()
    elif what == "cancel":
        for task in asyncio.all_tasks():
            task.cancel()
    elif what == "will not be cancelled":
        while not over.is_set():
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


def done(what: str) -> Any:
    calls.append(what)
    return MISDEEDS[what].do() if what in MISDEEDS else f"{what} done"


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


class Told(NamedTuple):
    what: str
    status: str
    code: str
    attempts: int
    error_chars: int


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    over.clear()
    calls.clear()
    yield
    over.set()


@contextmanager
def running() -> Iterator[Callable[..., list[Told]]]:
    """A way to ask for things of one kind and to wait until as many receipts are there."""
    with app.open("memory:") as runtime:
        asker = runtime.world(Asker, "ada")
        asked = 0

        def ask(kind: str, *whats: str) -> list[Told]:
            nonlocal asked
            runtime.send_many((asker, Ask(kind, what)) for what in whats)
            before, asked = asked, asked + len(whats)
            deadline = time.monotonic() + WAIT_S
            while len(asker.state().told) < asked:
                missing = {*whats} - {told[0] for told in asker.state().told[before:]}
                assert time.monotonic() < deadline, f"no receipt for {missing}"
                over.wait(0.01)
            return [Told(*told) for told in asker.state().told[before:]]

        try:
            yield ask
        finally:
            over.set()


# -- one receipt each ----------------------------------------------------------------------------

KINDS = ("in line", "crew", "looped")
TAME = {**BAD_RESULTS, **RAISED, **FINAL}


@pytest.fixture(scope="module", params=KINDS)
def settled(request: pytest.FixtureRequest) -> list[Told]:
    """Everything that returns or raises something odd, asked for at once, between good calls."""
    calls.clear()
    with running() as ask:
        told = ask(request.param, "first", *TAME, "last")
        return told + ask(request.param, "after all")


@pytest.mark.parametrize("what", TAME)
def test_an_effect_that_misbehaves_has_one_receipt_that_says_so(
    settled: list[Told], what: str
) -> None:
    [told] = [one for one in settled if one.what == what]
    misdeed = MISDEEDS[what]
    assert told.status == "error"
    assert told.code == (misdeed.code or told.code) != ""
    assert told.attempts == misdeed.calls
    assert 0 < told.error_chars <= ERROR_TEXT_CHARS_MAX


def test_good_calls_before_among_and_after_them_are_done_once(settled: list[Told]) -> None:
    good = [told for told in settled if told.what not in MISDEEDS]
    assert sorted((told.what, told.status, told.attempts) for told in good) == [
        ("after all", "ok", 1), ("first", "ok", 1), ("last", "ok", 1),
    ]  # fmt: skip


# -- what would end a thread, a loop, a process --------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", UNSTOPPED)
def test_an_effect_that_wants_to_end_everything_ends_its_attempt(kind: str, what: str) -> None:
    with running() as ask:
        [told] = ask(kind, what)
        assert (told.status, told.attempts) == ("error", ATTEMPTS)
        assert told.code
        assert calls == [what] * ATTEMPTS
        for neighbour in KINDS:
            [after] = ask(neighbour, "after it")
            assert after.status == "ok", neighbour


@pytest.mark.parametrize("kind", ["slow", "slow crew", "slow loop"])
def test_an_effect_that_hangs_ends_in_a_timeout_and_the_next_one_is_done(kind: str) -> None:
    with running() as ask:
        told = ask(kind, "a hang", "good")
        assert {one.what: one.status for one in told} == {"a hang": "timeout", "good": "ok"}
        assert [one.attempts for one in told if one.what == "a hang"] == [ATTEMPTS]


@pytest.mark.parametrize("kind", ["slow", "slow crew", "slow loop"])
def test_more_hangs_than_there_are_hands_keep_nobody_waiting(kind: str) -> None:
    with running() as ask:
        told = ask(kind, *["a hang"] * 6, "good")
        assert sorted(one.status for one in told) == ["ok", *["timeout"] * 6]


@pytest.mark.parametrize("what", ["stop", "cancel", "will not be cancelled"])
def test_a_coroutine_that_fights_its_loop_harms_no_other(what: str) -> None:
    with running() as ask:
        [told] = ask("evil loop", what)
        assert told.what == what
        assert [one.status for one in ask("looped", "a", "b", "c")] == ["ok"] * 3


@pytest.mark.parametrize("kind", ["yields", "async yields"])
def test_a_function_that_yields_instead_of_returning_has_a_bad_result(kind: str) -> None:
    with running() as ask:
        [told] = ask(kind, "x")
        assert (told.status, told.code) == ("error", "bad_result")


def test_what_misbehaves_is_called_as_often_as_its_receipt_says() -> None:
    with running() as ask:
        told = ask("crew", "an error", "another type", "a refusal", "good")
    assert {one.what: one.attempts for one in told} == {
        what: calls.count(what) for what in ("an error", "another type", "a refusal", "good")
    }


# -- receipts that nobody waits for --------------------------------------------------------------


def rows(rig: Rig) -> list[Row]:
    """Everything that is stored, but what the store says of itself."""

    def look(txn: Txn) -> list[Row]:
        own = (schema.META_KEY, schema.MARKER_KEY)
        kept = [row for row in txn.scan(b"", b"\xff") if row[0] not in own]
        return [row for row in kept if not row[0].startswith(schema.OUTCOME)]

    return rig.store.read(look)


def receipt_of(intent: Intent, value: str = "forged", **fields: Any) -> Receipt:
    made = Receipt(intent.intent_hash, "pay", Status.OK, codec.pack(value))
    return msgspec.structs.replace(made, **fields)


def unknown(rig: Rig) -> tuple[Any, Receipt]:
    ada = rig.buyer("ada", Ordered())
    return ada, receipt_of(rig.intent(), intent_hash=b"\x07" * 32)


def finished(rig: Rig) -> tuple[Any, Receipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.work(rig.pool())
    return ada, receipt_of(intent)


def dead(rig: Rig) -> tuple[Any, Receipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.outside.answers += [OSError("down")] * 9
    rig.work(rig.pool(), seconds=60)
    assert len(rig.letters()) == 1
    return ada, receipt_of(intent)


def cancelled(rig: Rig) -> tuple[Any, Receipt]:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    ada.send(Dropped())
    rig.think()
    return ada, receipt_of(intent)


def redriven(rig: Rig) -> tuple[Any, Receipt]:
    ada, receipt = dead(rig)
    [letter] = rig.letters()
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    return ada, receipt


def foreign(rig: Rig) -> tuple[Any, Receipt]:
    rig.buyer("bob", Ordered())
    return rig.buyer("ada"), receipt_of(rig.intent())


def inherited(rig: Rig) -> tuple[Any, Receipt]:
    parent = rig.buyer("parent", Ordered())
    intent = rig.intent()
    child = parent.fork("child", at=parent.height())
    return child, receipt_of(intent)


def of_another_kind(rig: Rig) -> tuple[Any, Receipt]:
    ada = rig.buyer("ada", Ordered())
    return ada, receipt_of(rig.intent(), effect_kind="ship")


NOBODYS = (unknown, finished, dead, cancelled, redriven, foreign, inherited, of_another_kind)


@pytest.mark.parametrize("case", NOBODYS, ids=lambda case: case.__name__)
def test_a_receipt_for_an_intent_that_waits_for_none_is_refused_and_changes_nothing(
    rig: Rig, case: Callable[[Rig], tuple[Any, Receipt]]
) -> None:
    world, receipt = case(rig)
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        service.receipt_inject(rig.store, "shop", rig.id(world), receipt)
    assert rows(rig) == before


@pytest.mark.parametrize("case", NOBODYS, ids=lambda case: case.__name__)
def test_such_a_receipt_that_comes_as_plain_ingress_is_refused_too(
    rig: Rig, case: Callable[[Rig], tuple[Any, Receipt]]
) -> None:
    world, receipt = case(rig)
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        service.enqueue_ingress(rig.store, "shop", rig.id(world), receipt_ingress(receipt))
    assert rows(rig) == before


@pytest.mark.parametrize("case", [finished, dead, cancelled], ids=lambda case: case.__name__)
def test_a_late_receipt_of_an_adapter_is_dropped(
    rig: Rig, case: Callable[[Rig], tuple[Any, Receipt]]
) -> None:
    """As `receive` has it, which joins an ack: it may not raise, and it must not deliver."""
    world, receipt = case(rig)
    told = list(world.state().told)
    intent = Intent("shop", rig.id(world), receipt.intent_hash, "pay", b"", "ada", b"", 0)
    before = rows(rig)
    rig.store.transact(receipts.receive, intent, receipt)
    assert rows(rig) == before
    rig.think()
    assert world.state().told == told


@pytest.mark.parametrize(
    "wrong",
    [{"intent_hash": b""}, {"intent_hash": b"short"}, {"effect_kind": ""}, {"effect_kind": "no"}],
    ids=str,
)
def test_a_receipt_that_is_none_is_refused(rig: Rig, wrong: dict[str, Any]) -> None:
    ada = rig.buyer("ada", Ordered())
    before = rows(rig)
    with pytest.raises((NotFound, Invalid)):
        service.receipt_inject(rig.store, "shop", rig.id(ada), receipt_of(rig.intent(), **wrong))
    assert rows(rig) == before


def test_a_receipt_whose_value_is_of_another_type_fails_its_event_and_not_the_world(
    rig: Rig,
) -> None:
    ada = rig.buyer("ada", Ordered())
    forged = receipt_of(rig.intent(), value=codec.pack({"not": "text"}))
    service.receipt_inject(rig.store, "shop", rig.id(ada), forged)
    rig.think()
    ada.send(Ordered("tea"))
    rig.work(rig.pool())
    assert [entry.outcome for entry in ada.journal()] == ["ok", "failed", "ok", "ok"]
    assert rig.blocker(ada) == ""


def test_a_receipt_that_an_operator_gave_is_the_only_one(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    service.receipt_inject(rig.store, "shop", rig.id(ada), receipt_of(rig.intent(), "by hand"))
    rig.work(rig.pool())
    assert [told.split()[:2] for told in ada.state().told] == [["ok", "by"]]


def test_no_misdeed_is_in_two_tables() -> None:
    assert len(MISDEEDS) == len(TAME) + len(UNSTOPPED) + 1
    assert not inspect.iscoroutinefunction(in_line.fn)
