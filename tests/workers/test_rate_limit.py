"""Rate limits: in any second, all pools together start at most as many calls as the effect allows."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import msgspec
import pytest

import holdfast as hf
from holdfast.clock import MS, S
from holdfast.effects.rate import PREFETCH_NS, RateTokens, TokenBlock, grant
from holdfast.errors import Invalid
from holdfast.workers.effects.pool import EffectWorkerPool
from tests.workers.rig import WorkerRig

MODULES = ("holdfast.effects.rate", "holdfast.workers.effects.pool")


class CallsRequested(hf.Event):
    times: int = 1


started_calls: list[tuple[int, str]] = []
current_rig: list[WorkerRig] = []


def rate_limited_rig(rate_per_s: float) -> WorkerRig:
    """Return the rig of an app with one effect of this rate. The effect records its start and world."""
    started_calls.clear()

    @hf.effect("call", rate_per_s=rate_per_s, concurrency=1)
    def call(call: hf.Call) -> None:
        started_calls.append((current_rig[0].clock.boot_ns(), call.world))

    class RateLimitedCaller(hf.World):
        done: list[str] = msgspec.field(default_factory=list)

        @hf.on(CallsRequested)
        def asked(self, event: CallsRequested, cx: hf.Context) -> None:
            for _ in range(event.times):
                cx.do(call)

        @hf.on(call)
        def answered(self, receipt: hf.Receipt[None], cx: hf.Context) -> None:
            self.done.append(receipt.status)

    rig = WorkerRig(hf.App("shop", worlds=[RateLimitedCaller]))
    current_rig[:] = [rig]
    return rig


def request_calls(rig: WorkerRig, name: str, times: int) -> None:
    [kind] = rig.app._world_types
    rig.world(kind, name).send(CallsRequested(times))
    rig.run_worlds()


def tick_pools(
    rig: WorkerRig, pools: Sequence[EffectWorkerPool], seconds: float, step_ns: int
) -> None:
    until_ns = rig.clock.boot_ns() + int(seconds * S)
    while rig.clock.boot_ns() < until_ns:
        for pool in pools:
            for runner in pool.runners:
                runner.tick()
        rig.clock.advance(step_ns)


def most_in_a_second(late_ns: int = 0) -> int:
    """The maximum number of starts within a second. A thread may record a start up to `late_ns` late,
    because the test clock does not wait for it."""
    times = [at for at, _ in started_calls]
    return max(bisect.bisect_left(times, at + S - late_ns) - n for n, at in enumerate(times))


@pytest.mark.parametrize("rate_per_s", [1, 3.5, 20, 200])
@pytest.mark.parametrize("step_ns", [MS, 7 * MS, 45 * MS])
def test_two_pools_never_exceed_the_rate_in_any_second(rate_per_s: float, step_ns: int) -> None:
    rig = rate_limited_rig(rate_per_s)
    request_calls(rig, "ada", 1000)
    tick_pools(rig, [rig.pool("one"), rig.pool("two")], 4, step_ns)
    assert most_in_a_second(late_ns=5 * MS) <= math.ceil(rate_per_s)


@pytest.mark.parametrize("rate_per_s", [1, 20, 200])
def test_two_pools_use_most_of_the_rate(rate_per_s: float) -> None:
    rig = rate_limited_rig(rate_per_s)
    request_calls(rig, "ada", 1000)
    tick_pools(rig, [rig.pool("one"), rig.pool("two")], 4, MS)
    assert len(started_calls) >= 0.8 * 4 * rate_per_s


def test_rate_is_shared_by_both_pools() -> None:
    rig = rate_limited_rig(50)
    request_calls(rig, "ada", 1000)
    one, two = rig.pool("one"), rig.pool("two")
    tick_pools(rig, [one, two], 4, MS)
    shares = [pool.runners[0].counters.snapshot().successes for pool in (one, two)]
    assert min(shares) > 0.25 * sum(shares)


def test_slow_rate_starves_no_world() -> None:
    rig = rate_limited_rig(10)
    request_calls(rig, "crowd", 500)
    request_calls(rig, "ada", 1)
    tick_pools(rig, [rig.pool("one"), rig.pool("two")], 1, MS)
    assert "ada" in [name for _, name in started_calls]


def test_rate_allows_no_burst_after_a_pause() -> None:
    rig = rate_limited_rig(10)
    pools = [rig.pool("one"), rig.pool("two")]
    request_calls(rig, "ada", 5)
    tick_pools(rig, pools, 2, MS)
    rig.clock.advance(3600 * S)
    request_calls(rig, "ada", 100)
    tick_pools(rig, pools, 2, MS)
    assert most_in_a_second() <= 10


def test_rate_tokens_of_a_crashed_pool_delay_calls_only_briefly() -> None:
    rig = rate_limited_rig(100)
    for _ in range(5):
        rig.store.transact(grant, "shop/effects/call", 100.0, 1000)
    request_calls(rig, "ada", 10)
    tick_pools(rig, [rig.pool()], 6 * PREFETCH_NS / S, MS)
    assert started_calls


def test_idle_pool_requests_no_rate_tokens() -> None:
    rig = rate_limited_rig(10)
    pool = rig.pool()
    tick_pools(rig, [pool], 1, 10 * MS)
    before = rig.rows()
    tick_pools(rig, [pool], 1, 10 * MS)
    assert rig.rows() == before


def test_next_token_block_is_prefetched(rig: WorkerRig) -> None:
    tokens = RateTokens(rig.store, "q", 100.0)
    first_block = tokens.available(1000)
    taken = 0
    for _ in range(7):
        rig.clock.advance(10 * MS)
        taken += tokens.acquire(1)
    tokens.available(1000)
    before = rig.backend.last_id()
    for _ in range(5):
        rig.clock.advance(11 * MS)
        taken += tokens.acquire(1)
    assert taken > first_block, "some of them are of the next block"
    assert rig.backend.last_id() == before


def test_token_blocks_never_overlap(rig: WorkerRig) -> None:
    blocks: list[TokenBlock] = []
    for n in range(50):
        blocks.append(rig.store.transact(grant, "q", 30.0, 1 + n % 7))
        rig.clock.advance((n % 3) * 20 * MS)
    for before, after in itertools.pairwise(blocks):
        assert after.from_ns >= before.from_ns + before.tokens * before.slot_ns


@pytest.mark.parametrize(("rate", "wanted"), [(0.0, 1), (-1.0, 1), (1.0, 0), (1e12, 1), (1.0, 10**9)])  # fmt: skip
def test_rate_out_of_bounds_is_invalid(rig: WorkerRig, rate: float, wanted: int) -> None:
    with pytest.raises(Invalid):
        rig.store.transact(grant, "q", rate, wanted)
