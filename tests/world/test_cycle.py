"""Commit of many cycles in one transaction: each cycle is atomic, and a failed cycle does not
affect others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import holdfast as hf
from holdfast.config import BATCH_MAX, CYCLES_BYTES_MAX, CYCLES_MAX, QUEUE_PRIORITY_MAX
from holdfast.durable import lease as leases
from holdfast.durable import queue
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, HeadMoved, HoldfastError, Invalid, from_wire
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import intents
from holdfast.world.cycle import Cycle, commit, commit_batches
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.cycle", "holdfast.workers.world.worker")

NEVER = 1e6
QUOTES = intents.effect_queue("bank", "fx.quote")

AccountHandle = hf.WorldHandle[bank.BankAccount]


class PreparedWorlds:
    """Worlds hosted by one worker, each with events in its inbox."""

    def __init__(self, rig: WorldRig, count: int) -> None:
        self.rig = rig
        self.handles: list[AccountHandle] = [rig.world(name=f"w{n}") for n in range(count)]
        self.send(bank.DepositMade(1))
        self.worker: WorldWorker = rig.run(rig.worker(idle_s=NEVER))

    def send(self, *events: Any) -> None:
        for event in events:
            self.rig.runtime.send_many([(handle, event) for handle in self.handles])

    def cycles(self) -> list[Cycle]:
        made = [self.host(handle).prepare(self.rig.store) for handle in self.handles]
        assert all(cycle is not None for cycle in made)
        return [cycle for cycle in made if cycle is not None]

    def host(self, handle: AccountHandle) -> Any:
        return self.worker._hosted[self.rig.id(handle)].host

    def commit(self, cycles: list[Cycle]) -> list[HoldfastError | None]:
        wire_errors = self.rig.store.transact(commit, cycles)
        return [None if one is None else from_wire(one) for one in wire_errors]

    def heights(self) -> list[int]:
        return [handle.height() for handle in self.handles]

    def quotes(self) -> int:
        return self.rig.store.read(queue.counts, QUOTES).ready


def test_cycles_of_many_worlds_commit_in_one_call(any_rig: WorldRig) -> None:
    hosted = PreparedWorlds(any_rig, CYCLES_MAX)
    hosted.send(bank.DepositMade(1), bank.PaymentOrdered("EUR"))
    cycles = hosted.cycles()
    assert hosted.commit(cycles) == [None] * CYCLES_MAX
    assert hosted.heights() == [3] * CYCLES_MAX
    assert hosted.quotes() == CYCLES_MAX
    assert {handle.state().balance for handle in hosted.handles} == {2}


def test_commit_of_no_cycles_returns_no_results(rig: WorldRig) -> None:
    assert PreparedWorlds(rig, 1).commit([]) == []


# -- bad cycles ------------------------------------------------------------------------------------


def fenced(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    hosted.rig.store.transact(leases.force_release, hosted.rig.subject(hosted.handles[17]), "test")
    return cycle


def another_epoch(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    held: Lease = cycle.lease
    return replace(cycle, lease=replace(held, epoch=held.epoch + 1))


def head_moved(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    return replace(cycle, expected_head=cycle.expected_head + 1)


def head_behind(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    return replace(cycle, expected_head=0)


def bad_intent(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    """The commit detects it after most rows of this and other cycles are written."""
    last = cycle.intents[-1]
    bad = replace(last, intent_hash=b"x" * 32, priority=QUEUE_PRIORITY_MAX + 1)
    return replace(cycle, intents=[*cycle.intents, bad])


def bad_cancel(hosted: PreparedWorlds, cycle: Cycle) -> Cycle:
    """The effect kind is too long for a store key, so the store raises the error."""
    last = cycle.intents[-1]
    return replace(cycle, intents=[replace(last, effect_kind="x" * 5000), *cycle.intents])


BAD_CYCLES: dict[str, tuple[Callable[[PreparedWorlds, Cycle], Cycle], type[HoldfastError]]] = {
    "fenced": (fenced, Fenced),
    "a lease of another time": (another_epoch, Fenced),
    "a head that moved": (head_moved, HeadMoved),
    "a head that was passed": (head_behind, HeadMoved),
    "an intent that cannot be put": (bad_intent, Invalid),
    "an effect of no name": (bad_cancel, Invalid),
}


def rows_of_world(rig: WorldRig, handle: AccountHandle) -> dict[bytes, bytes]:
    """Return journal, inbox, cursor and all other rows with the world id in their key."""
    world_id = rig.id(handle).encode()
    return {key: row for key, row in rig.rows().items() if world_id in key}


@pytest.mark.parametrize("name", BAD_CYCLES)
def test_bad_cycle_does_not_stop_other_cycles_of_its_commit(rig: WorldRig, name: str) -> None:
    hosted = PreparedWorlds(rig, CYCLES_MAX)
    hosted.send(bank.DepositMade(1), bank.PaymentOrdered("EUR"))
    cycles = hosted.cycles()
    spoil, error = BAD_CYCLES[name]
    cycles[17] = spoil(hosted, cycles[17])
    before = rows_of_world(rig, hosted.handles[17])
    answers = hosted.commit(cycles)
    assert isinstance(answers.pop(17), error)
    assert answers == [None] * (CYCLES_MAX - 1)
    assert rows_of_world(rig, hosted.handles[17]) == before, "nothing of it is left behind"
    heights = hosted.heights()
    assert (heights.pop(17), set(heights)) == (1, {3})
    assert hosted.quotes() == CYCLES_MAX - 1


def test_commit_of_only_bad_cycles_changes_nothing(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, len(BAD_CYCLES))
    hosted.send(bank.PaymentOrdered("EUR"))
    spoilers = [spoil for spoil, _ in BAD_CYCLES.values() if spoil is not fenced]
    cycles = [spoil(hosted, one) for spoil, one in zip(spoilers, hosted.cycles(), strict=False)]
    before = rig.rows()
    assert all(answer is not None for answer in hosted.commit(cycles))
    assert rig.rows() == before


def test_cycle_with_a_bad_intent_commits_nothing(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 1)
    hosted.send(bank.PaymentOrdered("EUR"))
    [cycle] = hosted.cycles()
    before = rig.rows()
    [answer] = hosted.commit([bad_intent(hosted, cycle)])
    assert isinstance(answer, Invalid)
    assert rig.rows() == before
    assert hosted.commit([cycle]) == [None]


def test_second_cycle_of_one_world_in_a_commit_fails_with_head_moved(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 2)
    hosted.send(bank.PaymentOrdered("EUR"))
    one, two = hosted.cycles()
    first, second, other = hosted.commit([one, one, two])
    assert first is None
    assert isinstance(second, HeadMoved)
    assert other is None
    assert (hosted.heights(), hosted.quotes()) == ([2, 2], 2)


def test_cycle_lease_is_checked_at_commit_time(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 3)
    hosted.send(bank.DepositMade(1))
    cycles = hosted.cycles()
    rig.advance_clock()
    assert all(isinstance(answer, Fenced) for answer in hosted.commit(cycles))
    assert hosted.heights() == [1, 1, 1]


def test_commit_refuses_more_cycles_than_a_batch_holds(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 1)
    hosted.send(bank.DepositMade(1))
    with pytest.raises(Invalid):
        hosted.commit(hosted.cycles() * (BATCH_MAX + 1))


# -- runnable marks --------------------------------------------------------------------------------


def test_drained_inbox_clears_the_runnable_mark(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 2)
    hosted.send(bank.DepositMade(1))
    hosted.commit(hosted.cycles())
    assert rig.runnable() == []


@pytest.mark.parametrize("sender_first", [True, False])
def test_mail_from_a_cycle_of_the_same_commit_sets_the_runnable_mark(
    rig: WorldRig, sender_first: bool
) -> None:
    """The inbox of the recipient is drained in the same commit."""
    main = rig.world(bank.Audit, "main")
    hosted = PreparedWorlds(rig, 1)
    main.send(bank.Seen(1))
    rig.run(hosted.worker)
    main.send(bank.Seen(1))
    hosted.send(bank.TransferOrdered("main", 5))
    cycles = [*hosted.cycles(), hosted.host(main).prepare(rig.store)]
    assert hosted.commit(cycles if sender_first else cycles[::-1]) == [None, None]
    assert rig.runnable() == [rig.id(main)]
    hosted.host(main).on_committed(cycles[1])
    rig.run(hosted.worker)
    assert main.state().total == 7


def test_message_between_prepare_and_commit_keeps_the_runnable_mark(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 1)
    hosted.send(bank.DepositMade(1))
    cycles = hosted.cycles()
    hosted.send(bank.DepositMade(1))
    assert hosted.commit(cycles) == [None]
    assert rig.runnable() == [rig.id(hosted.handles[0])]


# -- batch limits ----------------------------------------------------------------------------------


def cycle_of_size(world_id: str, size: int) -> tuple[str, Cycle]:
    held: Any = None
    return world_id, Cycle(
        "bank",
        world_id,
        held,
        expected_head=0,
        to_seq=1,
        bodies=[bytes(size)],
        intents=[],
        failed=[],
        snapshot=None,
        snapshots_kept=2,
        drained=False,
    )


def test_cycle_size_counts_entries_parameters_and_snapshot(rig: WorldRig) -> None:
    hosted = PreparedWorlds(rig, 1)
    hosted.send(bank.PaymentOrdered("EUR", times=3))
    [cycle] = hosted.cycles()
    entries = sum(len(body) for body in cycle.bodies)
    wanted = sum(len(intent.params) for intent in cycle.intents)
    assert replace(cycle, snapshot=b"12345").size == entries + wanted + 5


def test_cycle_batches_are_limited_in_number() -> None:
    cycles = [cycle_of_size(str(n), 1) for n in range(2 * CYCLES_MAX + 1)]
    assert [len(some) for some in commit_batches(cycles)] == [CYCLES_MAX, CYCLES_MAX, 1]


def test_cycle_above_the_batch_size_is_committed_alone() -> None:
    small, large = cycle_of_size("small", 10), cycle_of_size("large", CYCLES_BYTES_MAX + 1)
    assert list(commit_batches([small, large, small])) == [[small], [large], [small]]


@given(
    st.lists(
        st.sampled_from([1, CYCLES_BYTES_MAX // 3, CYCLES_BYTES_MAX // 2, CYCLES_BYTES_MAX]),
        max_size=12,
    )
)
def test_cycle_batches_keep_order_and_size_limit(sizes: list[int]) -> None:
    cycles = [cycle_of_size(str(n), size) for n, size in enumerate(sizes)]
    batches = list(commit_batches(cycles))
    assert [one for some in batches for one in some] == cycles
    for some in batches:
        assert len(some) == 1 or sum(cycle.size for _, cycle in some) <= CYCLES_BYTES_MAX
