"""Invalid calls of the public API: each raises a typed one-line error at once and changes no
row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import journal, lease, snapshot
from holdfast.durable.lease import Lease
from holdfast.errors import (
    Fenced,
    HoldfastError,
    Invalid,
    KeyConflict,
    KeyTooLarge,
    NotFound,
    ValueTooLarge,
)
from holdfast.world.host import Budgets, SnapshotPolicy, WorldHost
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = (
    "holdfast.app.world_handle",
    "holdfast.app.app",
    "holdfast.app.definitions",
    "holdfast.world.catalog",
)

AccountHandle = hf.WorldHandle[bank.BankAccount]


@pytest.fixture
def ada(rig: WorldRig) -> AccountHandle:
    """A world with 25 entries, snapshots at 10 and 20, and a journal truncated below 20."""
    handle = rig.world()
    rig.runtime.send_many([(handle, bank.DepositMade(n)) for n in range(1, 26)])
    rig.run(rig.worker(snapshots=SnapshotPolicy(10, keep=1), budgets=Budgets(max_inbox_batch=5)))
    while rig.store.transact(journal.truncate, rig.subject(handle), 100):
        pass
    handle.send(bank.DepositMade(1), key="used")
    return handle


class Stranger(hf.World):
    pass


class Alien(hf.Event):
    pass


@dataclass
class UnhandledDataclass:
    n: int


InvalidCall = Callable[[WorldRig, AccountHandle], object]

INVALID_CALLS: dict[str, tuple[type[HoldfastError], InvalidCall]] = {
    # Unknown worlds and events.
    "unknown world type": (Invalid, lambda rig, ada: rig.runtime.world(Stranger, "x")),
    "a type that is no world": (Invalid, lambda rig, ada: rig.runtime.world(int, "x")),  # type: ignore[type-var]
    "unknown event type": (Invalid, lambda rig, ada: ada.send(Alien())),
    "a dataclass nobody handles": (Invalid, lambda rig, ada: ada.send(UnhandledDataclass(1))),
    "an event class, not an event": (Invalid, lambda rig, ada: ada.send(bank.DepositMade)),
    "no event at all": (Invalid, lambda rig, ada: ada.send(None)),
    "unknown event asked": (Invalid, lambda rig, ada: ada.ask(Alien())),
    "unknown among many": (
        Invalid,
        lambda rig, ada: rig.runtime.send_many([(ada, bank.DepositMade(1)), (ada, Alien())]),
    ),
    "state of a world that is not there": (
        NotFound,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "nobody").state(),
    ),
    "journal of a world that is not there": (
        NotFound,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "nobody").journal(),
    ),
    "pausing a world that is not there": (
        NotFound,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "nobody").pause(),
    ),
    "deleting a world that is not there": (
        NotFound,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "nobody").delete(),
    ),
    # Fields.
    "text for a number": (Invalid, lambda rig, ada: ada.send(bank.DepositMade("5"))),  # type: ignore[arg-type]
    "none for a number": (Invalid, lambda rig, ada: ada.send(bank.DepositMade(None))),  # type: ignore[arg-type]
    "a number of 80 bits": (Invalid, lambda rig, ada: ada.send(bank.DepositMade(1 << 80))),
    "a list of the wrong things": (
        Invalid,
        lambda rig, ada: ada.send(bank.Noted("a", [1])),  # type: ignore[list-item]
    ),
    "text that is not UTF-8": (Invalid, lambda rig, ada: ada.send(bank.Noted("\ud800", []))),
    # Names.
    "an empty name": (Invalid, lambda rig, ada: rig.runtime.world(bank.BankAccount, "")),
    "a name with NUL": (Invalid, lambda rig, ada: rig.runtime.world(bank.BankAccount, "a\x00")),
    "a name that is not UTF-8": (
        Invalid,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "a\udcff"),
    ),
    "a name that is too long": (
        Invalid,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "x" * 201),
    ),
    "a name that is no text": (
        Invalid,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, ["x"]),
    ),  # type: ignore[arg-type]
    "a fork with NUL in its name": (Invalid, lambda rig, ada: ada.fork("a\x00b")),
    "a fork whose name is not UTF-8": (Invalid, lambda rig, ada: ada.fork("\ud800")),
    "a fork whose name is too long": (Invalid, lambda rig, ada: ada.fork("x" * 201)),
    # Keys.
    "an empty key": (Invalid, lambda rig, ada: ada.send(bank.DepositMade(1), key="")),
    "a key that is not UTF-8": (
        Invalid,
        lambda rig, ada: ada.send(bank.DepositMade(1), key="\ud800"),
    ),
    "a key that is too long": (
        Invalid,
        lambda rig, ada: ada.send(bank.DepositMade(1), key="k" * 500),
    ),
    "a key that is no text": (
        Invalid,
        lambda rig, ada: ada.send(bank.DepositMade(1), key=7),  # type: ignore[arg-type]
    ),
    "a key for another body": (
        KeyConflict,
        lambda rig, ada: ada.send(bank.DepositMade(2), key="used"),
    ),
    "a correlation id that is not UTF-8": (
        Invalid,
        lambda rig, ada: ada.send(bank.DepositMade(1), correlation_id="\ud800"),
    ),
    # Sizes.
    "an event of 50 MB": (
        ValueTooLarge,
        lambda rig, ada: ada.send(bank.Noted("x" * 50_000_000, [])),
    ),
    "an event of 50 MB among many": (
        ValueTooLarge,
        lambda rig, ada: rig.runtime.send_many(
            [(ada, bank.DepositMade(1)), (ada, bank.Noted("x" * 50_000_000, []))]
        ),
    ),
    # Heights.
    "a state above the head": (NotFound, lambda rig, ada: ada.state(at=26)),
    "a state at a negative height": (NotFound, lambda rig, ada: ada.state(at=-1)),
    "a state that was cut off": (NotFound, lambda rig, ada: ada.state(at=5)),
    "entries that were cut off": (NotFound, lambda rig, ada: ada.journal(lo=5)),
    "entries below the first": (Invalid, lambda rig, ada: ada.journal(lo=0)),
    # Forks.
    "a fork of what is not there yet": (NotFound, lambda rig, ada: ada.fork("c", at=26)),
    "a fork of what was cut off": (NotFound, lambda rig, ada: ada.fork("c", at=5)),
    "a fork of a world that is not there": (
        NotFound,
        lambda rig, ada: rig.runtime.world(bank.BankAccount, "nobody").fork("c"),
    ),
    "a fork over another world": (Invalid, lambda rig, ada: ada.fork("ada")),
    "a fork with an unknown policy": (Invalid, lambda rig, ada: ada.fork("c", effects="maybe")),
    # `App.open`.
    "a role that is none": (Invalid, lambda rig, ada: rig.app.open(rig.store, roles=["king"])),
    "a universe with a slash": (
        Invalid,
        lambda rig, ada: rig.app.open(rig.store, roles=(), universe="a/b"),
    ),
    "a worker with NUL": (
        Invalid,
        lambda rig, ada: rig.app.open(rig.store, roles=(), worker="a\x00"),
    ),
}


@pytest.mark.parametrize(("kind", "wrong"), INVALID_CALLS.values(), ids=INVALID_CALLS.keys())
def test_invalid_call_raises_a_one_line_error_and_changes_nothing(
    rig: WorldRig, ada: AccountHandle, kind: type[HoldfastError], wrong: InvalidCall
) -> None:
    before = rig.rows()
    with pytest.raises(HoldfastError) as raised:
        wrong(rig, ada)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert not raised.value.retryable
    assert rig.rows() == before


def test_fork_at_a_height_only_another_world_has_is_not_found(
    rig: WorldRig, ada: AccountHandle
) -> None:
    """Only the other world has a snapshot at this height."""
    bob = rig.world(name="bob")
    bob.send(bank.DepositMade(1))
    rig.run(rig.worker("A", "2"))
    assert 20 in rig.store.read(snapshot.heights, rig.subject(ada), 10)
    before = rig.rows()
    with pytest.raises(NotFound):
        bob.fork("child", at=20)
    assert rig.rows() == before


# -- epochs --------------------------------------------------------------------------------------


def host_with_epoch(rig: WorldRig, handle: AccountHandle, epoch: int) -> WorldHost:
    """Make a host whose lease has this epoch."""
    status = rig.store.read(lease.current_status, rig.subject(handle))
    lease_with_epoch = Lease(
        rig.subject(handle), status.worker, status.incarnation, status.generation, epoch, 1 << 62
    )
    return WorldHost(
        rig.world_spec(handle),
        lease_with_epoch,
        clock=rig.clock,
        budgets=Budgets(),
        policy=SnapshotPolicy(),
    )


@pytest.mark.parametrize("offset", [-1, 1, 1000])
def test_cycle_under_a_stale_or_future_epoch_is_fenced(
    rig: WorldRig, ada: AccountHandle, offset: int
) -> None:
    status = rig.store.read(lease.current_status, rig.subject(ada))
    host = host_with_epoch(rig, ada, status.epoch + offset)
    cycle = host.prepare(rig.store)
    assert cycle is not None
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(host.commit, cycle)
    with pytest.raises(Fenced):
        rig.store.transact(lease.release, host.lease)
    assert rig.store.transact(lease.renew, [host.lease], 10 * S) == [None]
    assert rig.rows() == before


def test_cycle_under_the_current_epoch_commits(rig: WorldRig, ada: AccountHandle) -> None:
    status = rig.store.read(lease.current_status, rig.subject(ada))
    host = host_with_epoch(rig, ada, status.epoch)
    cycle = host.prepare(rig.store)
    assert cycle is not None
    rig.store.transact(host.commit, cycle)
    assert ada.height() == 26


# -- invalid app definitions ---------------------------------------------------------------------


def no_default() -> object:
    class Needy(hf.World):
        balance: int

    return hf.App("a", worlds=[Needy])


def asynchronous() -> object:
    class Async(hf.World):
        @hf.on(bank.Seen)  # type: ignore[type-var]
        async def seen(self, event: bank.Seen, cx: hf.Context) -> None: ...

    return hf.App("a", worlds=[Async])


def yielding() -> object:
    class Yielding(hf.World):
        @hf.on(bank.Seen)  # type: ignore[type-var]
        def seen(self, event: bank.Seen, cx: hf.Context) -> Any:
            yield

    return hf.App("a", worlds=[Yielding])


def two_handlers() -> object:
    class Torn(hf.World):
        @hf.on(bank.Seen)
        def one(self, event: bank.Seen, cx: hf.Context) -> None: ...

        @hf.on(bank.Seen)
        def other(self, event: bank.Seen, cx: hf.Context) -> None: ...

    return hf.App("a", worlds=[Torn])


def too_few_arguments() -> object:
    class Short(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen) -> None: ...

    return hf.App("a", worlds=[Short])


def two_events_of_a_name() -> object:
    other = type("Seen", (hf.Event,), {})
    return hf.App("a", worlds=[bank.Audit], events=[other])


def two_effects_of_a_kind() -> object:
    @hf.effect("fx.quote")
    def another(call: hf.Call) -> None: ...

    return hf.App("a", worlds=[bank.BankAccount], effects=[another])


INVALID_APPS: dict[str, Callable[[], object]] = {
    "a state without a default": no_default,
    "an async reducer": asynchronous,
    "a reducer that yields": yielding,
    "two handlers for one event": two_handlers,
    "a reducer without cx": too_few_arguments,
    "two events of one name": two_events_of_a_name,
    "two effects of one kind": two_effects_of_a_kind,
    "a world twice": lambda: hf.App("a", worlds=[bank.Audit, bank.Audit]),
    "a world that is none": lambda: hf.App("a", worlds=[int]),  # type: ignore[list-item]
    "a world that is no class": lambda: hf.App("a", worlds=["BankAccount"]),  # type: ignore[list-item]
    "an event that is none": lambda: hf.App("a", events=[int]),
    "a handler of nothing": lambda: hf.on(),
    "a handler of what is no event": lambda: hf.on(int),
    "a handler of what cannot be hashed": lambda: hf.on([1]),
    "an app without a name": lambda: hf.App(""),
    "an app with NUL": lambda: hf.App("a\x00"),
    "an app that is not UTF-8": lambda: hf.App("\ud800"),
    "an app with a slash": lambda: hf.App("a/b"),
    "an effect without a kind": lambda: hf.effect(""),
    "an effect with a slash": lambda: hf.effect("a/b"),
    "an effect that is not UTF-8": lambda: hf.effect("\ud800"),
    "an effect with a long name": lambda: hf.effect("x" * 81),
}


@pytest.mark.parametrize("make", INVALID_APPS.values(), ids=INVALID_APPS.keys())
def test_invalid_app_definition_is_refused_at_declaration(
    make: Callable[[], object],
) -> None:
    with pytest.raises(Invalid) as raised:
        make()
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, KeyTooLarge)


def test_effect_without_a_kind_names_the_declaration() -> None:
    def quote(call: hf.Call, currency: str) -> int:
        return len(currency)

    with pytest.raises(Invalid, match=r'@hf.effect\("kind"\)'):
        hf.effect(quote)  # type: ignore[arg-type]
