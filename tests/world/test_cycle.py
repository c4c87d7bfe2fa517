"""Many cycles in one commit: each is all or nothing, and none takes another along."""

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
from holdfast.roles.world_worker import WorldWorker, _batches
from holdfast.world import publish
from holdfast.world.cycle import Cycle, commit
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.cycle", "holdfast.roles.world_worker")

NEVER = 1e6
QUOTES = publish.effects("bank", "fx.quote")

Handle = hf.WorldHandle[bank.Account]


class Town:
    """Worlds that a worker hosts, and that have something to do each."""

    def __init__(self, rig: Rig, count: int) -> None:
        self.rig = rig
        self.handles: list[Handle] = [rig.world(name=f"w{n}") for n in range(count)]
        self.send(bank.Deposited(1))
        self.worker: WorldWorker = rig.run(rig.worker(idle_s=NEVER))

    def send(self, *events: Any) -> None:
        for event in events:
            self.rig.runtime.send_many([(handle, event) for handle in self.handles])

    def cycles(self) -> list[Cycle]:
        made = [self.host(handle).prepare(self.rig.store) for handle in self.handles]
        assert all(cycle is not None for cycle in made)
        return [cycle for cycle in made if cycle is not None]

    def host(self, handle: Handle) -> Any:
        return self.worker._hosted[self.rig.id(handle)].host

    def commit(self, cycles: list[Cycle]) -> list[HoldfastError | None]:
        told = self.rig.store.transact(commit, cycles)
        return [None if one is None else from_wire(one) for one in told]

    def heights(self) -> list[int]:
        return [handle.height() for handle in self.handles]

    def quotes(self) -> int:
        return self.rig.store.read(queue.counts, QUOTES).ready


def test_cycles_of_many_worlds_are_committed_by_one_call(any_rig: Rig) -> None:
    town = Town(any_rig, CYCLES_MAX)
    town.send(bank.Deposited(1), bank.Paid("EUR"))
    cycles = town.cycles()
    assert town.commit(cycles) == [None] * CYCLES_MAX
    assert town.heights() == [3] * CYCLES_MAX
    assert town.quotes() == CYCLES_MAX
    assert {handle.state().balance for handle in town.handles} == {2}


def test_no_cycles_are_no_trouble(rig: Rig) -> None:
    assert Town(rig, 1).commit([]) == []


# -- one that is bad -------------------------------------------------------------------------------


def fenced(town: Town, cycle: Cycle) -> Cycle:
    town.rig.store.transact(leases.force_release, town.rig.subject(town.handles[17]), "test")
    return cycle


def another_epoch(town: Town, cycle: Cycle) -> Cycle:
    held: Lease = cycle.lease
    return replace(cycle, lease=replace(held, epoch=held.epoch + 1))


def head_moved(town: Town, cycle: Cycle) -> Cycle:
    return replace(cycle, expected_head=cycle.expected_head + 1)


def head_behind(town: Town, cycle: Cycle) -> Cycle:
    return replace(cycle, expected_head=0)


def bad_intent(town: Town, cycle: Cycle) -> Cycle:
    """It is found out when most of the cycle, and of the others, is written."""
    last = cycle.intents[-1]
    bad = replace(last, intent_hash=b"x" * 32, priority=QUEUE_PRIORITY_MAX + 1)
    return replace(cycle, intents=[*cycle.intents, bad])


def bad_cancel(town: Town, cycle: Cycle) -> Cycle:
    """What raises something that is no error of ours."""
    last = cycle.intents[-1]
    return replace(cycle, intents=[replace(last, effect_kind="x" * 5000), *cycle.intents])


BAD: dict[str, tuple[Callable[[Town, Cycle], Cycle], type[HoldfastError]]] = {
    "fenced": (fenced, Fenced),
    "a lease of another time": (another_epoch, Fenced),
    "a head that moved": (head_moved, HeadMoved),
    "a head that was passed": (head_behind, HeadMoved),
    "an intent that cannot be put": (bad_intent, Invalid),
    "an effect of no name": (bad_cancel, Invalid),
}


def rows_about(rig: Rig, handle: Handle) -> dict[bytes, bytes]:
    """Journal, inbox and cursor, and all else that has the world's name in its key."""
    world_id = rig.id(handle).encode()
    return {key: row for key, row in rig.rows().items() if world_id in key}


@pytest.mark.parametrize("name", BAD)
def test_of_a_full_batch_with_one_bad_cycle_all_others_are_committed(rig: Rig, name: str) -> None:
    town = Town(rig, CYCLES_MAX)
    town.send(bank.Deposited(1), bank.Paid("EUR"))
    cycles = town.cycles()
    spoil, error = BAD[name]
    cycles[17] = spoil(town, cycles[17])
    before = rows_about(rig, town.handles[17])
    answers = town.commit(cycles)
    assert isinstance(answers.pop(17), error)
    assert answers == [None] * (CYCLES_MAX - 1)
    assert rows_about(rig, town.handles[17]) == before, "nothing of it is left behind"
    heights = town.heights()
    assert (heights.pop(17), set(heights)) == (1, {3})
    assert town.quotes() == CYCLES_MAX - 1


def test_a_batch_in_which_all_are_bad_changes_nothing(rig: Rig) -> None:
    town = Town(rig, len(BAD))
    town.send(bank.Paid("EUR"))
    spoilers = [spoil for spoil, _ in BAD.values() if spoil is not fenced]
    cycles = [spoil(town, one) for spoil, one in zip(spoilers, town.cycles(), strict=False)]
    before = rig.rows()
    assert all(answer is not None for answer in town.commit(cycles))
    assert rig.rows() == before


def test_an_intent_that_cannot_be_put_takes_its_entry_with_it(rig: Rig) -> None:
    town = Town(rig, 1)
    town.send(bank.Paid("EUR"))
    [cycle] = town.cycles()
    before = rig.rows()
    [answer] = town.commit([bad_intent(town, cycle)])
    assert isinstance(answer, Invalid)
    assert rig.rows() == before
    assert town.commit([cycle]) == [None]


def test_of_two_cycles_of_one_world_the_first_counts(rig: Rig) -> None:
    town = Town(rig, 2)
    town.send(bank.Paid("EUR"))
    one, two = town.cycles()
    first, second, other = town.commit([one, one, two])
    assert first is None
    assert isinstance(second, HeadMoved)
    assert other is None
    assert (town.heights(), town.quotes()) == ([2, 2], 2)


def test_a_lease_is_judged_by_the_time_of_the_commit(rig: Rig) -> None:
    town = Town(rig, 3)
    town.send(bank.Deposited(1))
    cycles = town.cycles()
    rig.expire()
    assert all(isinstance(answer, Fenced) for answer in town.commit(cycles))
    assert town.heights() == [1, 1, 1]


def test_more_cycles_than_a_batch_may_hold_are_refused(rig: Rig) -> None:
    town = Town(rig, 1)
    town.send(bank.Deposited(1))
    with pytest.raises(Invalid):
        town.commit(town.cycles() * (BATCH_MAX + 1))


# -- hints -----------------------------------------------------------------------------------------


def test_a_world_whose_inbox_is_drained_leaves_no_hint(rig: Rig) -> None:
    town = Town(rig, 2)
    town.send(bank.Deposited(1))
    town.commit(town.cycles())
    assert rig.hints() == []


@pytest.mark.parametrize("sender_first", [True, False])
def test_mail_from_another_cycle_of_the_same_commit_leaves_a_hint(
    rig: Rig, sender_first: bool
) -> None:
    """The one to whom it is sent was drained in the same commit."""
    main = rig.world(bank.Audit, "main")
    town = Town(rig, 1)
    main.send(bank.Seen(1))
    rig.run(town.worker)
    main.send(bank.Seen(1))
    town.send(bank.Told("main", 5))
    cycles = [*town.cycles(), town.host(main).prepare(rig.store)]
    assert town.commit(cycles if sender_first else cycles[::-1]) == [None, None]
    assert rig.hints() == [rig.id(main)]
    town.host(main).settle(cycles[1])
    rig.run(town.worker)
    assert main.state().total == 7


def test_what_came_between_the_look_and_the_commit_keeps_its_hint(rig: Rig) -> None:
    town = Town(rig, 1)
    town.send(bank.Deposited(1))
    cycles = town.cycles()
    town.send(bank.Deposited(1))
    assert town.commit(cycles) == [None]
    assert rig.hints() == [rig.id(town.handles[0])]


# -- how many to a commit --------------------------------------------------------------------------


def sized(world_id: str, size: int) -> tuple[str, Cycle]:
    held: Any = None
    return world_id, Cycle("bank", world_id, held, 0, 1, [bytes(size)], [], [], None, 2, False)


def test_the_size_of_a_cycle_is_that_of_its_entries_parameters_and_snapshot(rig: Rig) -> None:
    town = Town(rig, 1)
    town.send(bank.Paid("EUR", times=3))
    [cycle] = town.cycles()
    entries = sum(len(body) for body in cycle.bodies)
    wanted = sum(len(intent.params) for intent in cycle.intents)
    assert replace(cycle, snapshot=b"12345").size == entries + wanted + 5


def test_a_batch_holds_so_many_cycles_at_most() -> None:
    cycles = [sized(str(n), 1) for n in range(2 * CYCLES_MAX + 1)]
    assert [len(some) for some in _batches(cycles)] == [CYCLES_MAX, CYCLES_MAX, 1]


def test_a_cycle_that_is_larger_than_a_batch_goes_by_itself() -> None:
    small, large = sized("small", 10), sized("large", CYCLES_BYTES_MAX + 1)
    assert list(_batches([small, large, small])) == [[small], [large], [small]]


@given(
    st.lists(
        st.sampled_from([1, CYCLES_BYTES_MAX // 3, CYCLES_BYTES_MAX // 2, CYCLES_BYTES_MAX]),
        max_size=12,
    )
)
def test_batches_keep_every_cycle_in_order_and_their_bound(sizes: list[int]) -> None:
    cycles = [sized(str(n), size) for n, size in enumerate(sizes)]
    batches = list(_batches(cycles))
    assert [one for some in batches for one in some] == cycles
    for some in batches:
        assert len(some) == 1 or sum(cycle.size for _, cycle in some) <= CYCLES_BYTES_MAX
