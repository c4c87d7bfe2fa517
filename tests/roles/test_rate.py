"""Rates: over any second, all pools together begin no more than an effect allows."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import msgspec
import pytest

import holdfast as hf
from holdfast.clock import MS, S
from holdfast.effects.rate import AHEAD_NS, Block, Tokens, grant
from holdfast.errors import Invalid
from holdfast.roles.adapter import AdapterPool
from tests.roles.rig import Rig

MODULES = ("holdfast.effects.rate", "holdfast.roles.adapter")


class Asked(hf.Event):
    times: int = 1


began: list[tuple[int, str]] = []
clock: list[Rig] = []


def limited(rate_per_s: float) -> Rig:
    """An app with one effect of this rate, which notes when it is begun and for whom."""
    began.clear()

    @hf.effect("call", rate_per_s=rate_per_s, concurrency=1)
    def call(call: hf.Call) -> None:
        began.append((clock[0].clock.boot_ns(), call.world))

    class Asker(hf.World):
        done: list[str] = msgspec.field(default_factory=list)

        @hf.on(Asked)
        def asked(self, event: Asked, cx: hf.Context) -> None:
            for _ in range(event.times):
                cx.do(call)

        @hf.on(call)
        def answered(self, receipt: hf.Receipt[None], cx: hf.Context) -> None:
            self.done.append(receipt.status)

    rig = Rig(hf.App("shop", worlds=[Asker]))
    clock[:] = [rig]
    return rig


def ask(rig: Rig, name: str, times: int) -> None:
    [kind] = rig.app._world_types
    rig.world(kind, name).send(Asked(times))
    rig.think()


def run(rig: Rig, pools: Sequence[AdapterPool], seconds: float, step_ns: int) -> None:
    until_ns = rig.clock.boot_ns() + int(seconds * S)
    while rig.clock.boot_ns() < until_ns:
        for pool in pools:
            for runner in pool.runners:
                runner.tick()
        rig.clock.advance(step_ns)


def most_in_a_second(late_ns: int = 0) -> int:
    """The most that began within a second. A thread may note a beginning so much late: the clock of the
    test does not wait for it."""
    times = [at for at, _ in began]
    return max(bisect.bisect_left(times, at + S - late_ns) - n for n, at in enumerate(times))


@pytest.mark.parametrize("rate_per_s", [1, 3.5, 20, 200])
@pytest.mark.parametrize("step_ns", [MS, 7 * MS, 45 * MS])
def test_two_pools_together_never_exceed_the_rate_over_any_second(
    rate_per_s: float, step_ns: int
) -> None:
    rig = limited(rate_per_s)
    ask(rig, "ada", 1000)
    run(rig, [rig.pool("one"), rig.pool("two")], 4, step_ns)
    assert most_in_a_second(late_ns=5 * MS) <= math.ceil(rate_per_s)


@pytest.mark.parametrize("rate_per_s", [1, 20, 200])
def test_two_pools_together_come_near_the_rate(rate_per_s: float) -> None:
    rig = limited(rate_per_s)
    ask(rig, "ada", 1000)
    run(rig, [rig.pool("one"), rig.pool("two")], 4, MS)
    assert len(began) >= 0.8 * 4 * rate_per_s


def test_both_pools_get_their_share() -> None:
    rig = limited(50)
    ask(rig, "ada", 1000)
    one, two = rig.pool("one"), rig.pool("two")
    run(rig, [one, two], 4, MS)
    shares = [pool.runners[0].counters.snapshot().successes for pool in (one, two)]
    assert min(shares) > 0.25 * sum(shares)


def test_a_slow_rate_starves_no_world() -> None:
    rig = limited(10)
    ask(rig, "crowd", 500)
    ask(rig, "ada", 1)
    run(rig, [rig.pool("one"), rig.pool("two")], 1, MS)
    assert "ada" in [name for _, name in began]


def test_after_a_pause_there_is_no_burst() -> None:
    rig = limited(10)
    pools = [rig.pool("one"), rig.pool("two")]
    ask(rig, "ada", 5)
    run(rig, pools, 2, MS)
    rig.clock.advance(3600 * S)
    ask(rig, "ada", 100)
    run(rig, pools, 2, MS)
    assert most_in_a_second() <= 10


def test_a_pool_that_dies_with_tokens_in_hand_holds_nobody_up_for_long() -> None:
    rig = limited(100)
    for _ in range(5):
        rig.store.transact(grant, "shop/effects/call", 100.0, 1000)
    ask(rig, "ada", 10)
    run(rig, [rig.pool()], 6 * AHEAD_NS / S, MS)
    assert began


def test_an_idle_pool_asks_for_no_tokens() -> None:
    rig = limited(10)
    pool = rig.pool()
    run(rig, [pool], 1, 10 * MS)
    before = rig.rows()
    run(rig, [pool], 1, 10 * MS)
    assert rig.rows() == before


def test_the_next_block_is_there_before_the_last_is_used_up(rig: Rig) -> None:
    tokens = Tokens(rig.store, "q", 100.0)
    had = tokens.stock(1000)
    taken = 0
    for _ in range(7):
        rig.clock.advance(10 * MS)
        taken += tokens.take(1)
    tokens.stock(1000)
    before = rig.backend.last_id()
    for _ in range(5):
        rig.clock.advance(11 * MS)
        taken += tokens.take(1)
    assert taken > had, "some of them are of the next block"
    assert rig.backend.last_id() == before


def test_blocks_never_overlap(rig: Rig) -> None:
    blocks: list[Block] = []
    for n in range(50):
        blocks.append(rig.store.transact(grant, "q", 30.0, 1 + n % 7))
        rig.clock.advance((n % 3) * 20 * MS)
    for before, after in itertools.pairwise(blocks):
        assert after.from_ns >= before.from_ns + before.tokens * before.slot_ns


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, 1), (-1.0, 1), (1.0, 0), (1e12, 1), (1.0, 10**9)])  # fmt: skip
def test_a_rate_out_of_bounds_is_refused(rig: Rig, rate: float, wanted: int) -> None:
    with pytest.raises(Invalid):
        rig.store.transact(grant, "q", rate, wanted)
