"""Effects under `hf.simulate`: user functions are called, and called again after a crash, in simulated time."""

import asyncio
from collections import Counter
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec, messages
from holdfast.errors import Invalid

SEEDS = range(8)


class EffectRecorder:
    """Counts effect calls by idempotency key and records attempt numbers."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.attempts: list[int] = []


recorder = EffectRecorder()


@hf.effect("bank.charge", attempts=3)
def charge(call: hf.Call, amount: int) -> int:
    recorder.calls[call.idempotency_key] += 1
    recorder.attempts.append(call.attempt)
    return amount * 100


@hf.effect("bank.rate", timeout_s=30)
async def rate(call: hf.Call, currency: str) -> float:
    recorder.calls[call.idempotency_key] += 1
    await asyncio.gather(asyncio.sleep(5), asyncio.sleep(9))
    return 1.25


@hf.effect("bank.never", attempts=2)
def never(call: hf.Call) -> int:
    recorder.calls[call.idempotency_key] += 1
    raise RuntimeError("the bank is closed")


@hf.effect("bank.slow", attempts=2, timeout_s=3)
async def slow(call: hf.Call) -> int:
    recorder.calls[call.idempotency_key] += 1
    await asyncio.sleep(3600)
    return 1


class Bought(hf.Event):
    amount: int


class PriceAsked(hf.Event):
    pass


class Tried(hf.Event):
    pass


class Waited(hf.Event):
    pass


class CornerShop(hf.World):
    paid: int = 0
    quoted: float = 0.0
    ends: list[str] = []  # noqa: RUF012

    @hf.on(Bought)
    def bought(self, event: Bought, cx: hf.Context) -> None:
        cx.do(charge, event.amount)

    @hf.on(charge)
    def charged(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.paid += receipt.value
        self.ends = [*self.ends, receipt.status]

    @hf.on(PriceAsked)
    def asked(self, event: PriceAsked, cx: hf.Context) -> None:
        cx.do(rate, "EUR")

    @hf.on(rate)
    def rated(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.quoted = receipt.value

    @hf.on(Tried)
    def tried(self, event: Tried, cx: hf.Context) -> None:
        cx.do(never)

    @hf.on(Waited)
    def waited(self, event: Waited, cx: hf.Context) -> None:
        cx.do(slow)

    @hf.on(never, slow)
    def ended(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ends = [*self.ends, f"{receipt.status} {receipt.attempts}"]


app = hf.App("shops", worlds=[CornerShop])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    recorder.calls.clear()
    recorder.attempts.clear()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_effect_ends_once_despite_crashes(seed: int) -> None:
    with hf.simulate(app, seed=seed) as s:
        shop = s.world(CornerShop, "corner")
        for amount in (1, 2, 3):
            shop.send(Bought(amount))
        s.run_until_quiet()
        assert shop.state() == CornerShop(paid=600, ends=["ok"] * 3)
        s.assert_parity()
    assert len(recorder.calls) == 3


def test_effect_calls_are_repeated_with_their_key_only_under_faults() -> None:
    def count_repeated_calls(**options: Any) -> int:
        times = 0
        for seed in SEEDS:
            recorder.calls.clear()
            with hf.simulate(app, seed=seed, **options) as s:
                shop = s.world(CornerShop, "corner")
                for amount in (1, 2, 3):
                    shop.send(Bought(amount))
                s.run_until_quiet()
            assert len(recorder.calls) == 3
            times += sum(recorder.calls.values()) - 3
        return times

    assert count_repeated_calls() > 0
    assert count_repeated_calls(crashes=False) == 0


def test_crash_during_an_effect_call_uses_no_attempt() -> None:
    for seed in SEEDS:
        recorder.calls.clear()
        with hf.simulate(app, seed=seed) as s:
            shop = s.world(CornerShop, "corner")
            shop.send(Tried())
            s.run_until_quiet()
            [end] = shop.state().ends
        assert end.startswith("error")
        # The function raises twice. More calls come only from repeated calls and crashed processes.
        assert min(recorder.calls.values()) >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_coroutine_effect_takes_simulated_time(seed: int) -> None:
    with hf.simulate(app, seed=seed, effect_faults=False) as s:
        shop = s.world(CornerShop, "corner")
        before = s.now_s
        shop.send(PriceAsked())
        s.run_until_quiet()
        assert shop.state().quoted == 1.25
        assert s.now_s - before >= 9


def test_coroutine_effect_ends_as_timeout_after_timeout_s() -> None:
    with hf.simulate(app, seed=1, crashes=False) as s:
        shop = s.world(CornerShop, "corner")
        shop.send(Waited())
        s.run_until_quiet()
        assert shop.state().ends == ["timeout 2"]


def test_effect_stub_replaces_the_effect() -> None:
    async def stub(call: hf.Call, amount: int) -> int:
        await asyncio.sleep(1)
        return 7

    with hf.simulate(app, seed=4, effects={"bank.charge": stub}) as s:
        shop = s.world(CornerShop, "corner")
        shop.send(Bought(1))
        s.run_until_quiet()
        assert shop.state().paid == 7
    assert not recorder.calls


def test_effect_stub_with_a_wrong_result_type_is_bad_result() -> None:
    with hf.simulate(app, seed=4, effects={"bank.charge": lambda call, amount: "seven"}) as s:
        shop = s.world(CornerShop, "corner")
        shop.send(Bought(1))
        s.run_until_quiet()
        [entry] = [
            journal_entry for journal_entry in shop.journal() if journal_entry.type == "bank.charge"
        ]
        assert codec.unpack_as(messages.IntentReceipt, entry.event.value).code == "bad_result"


def test_effect_stub_for_an_unknown_effect_is_invalid() -> None:
    with pytest.raises(Invalid):
        hf.simulate(app, effects={"bank.robbery": lambda call: 1})


def test_effect_calls_are_deterministic_per_seed() -> None:
    def calls(seed: int) -> tuple[str, int]:
        recorder.calls.clear()
        with hf.simulate(app, seed=seed) as s:
            shop = s.world(CornerShop, "corner")
            for amount in (1, 2, 3):
                shop.send(Bought(amount))
            shop.send(PriceAsked())
            s.run_until_quiet()
            return s.history_hash, sum(recorder.calls.values())

    assert calls(3) == calls(3)
    assert calls(3)[0] != calls(4)[0]


def test_effects_wait_from_crash_until_restart() -> None:
    with hf.simulate(app, seed=6) as s:
        shop = s.world(CornerShop, "corner")
        s.crash()
        shop.send(Bought(1))
        s.advance(3600)
        assert not recorder.calls
        s.restart()
        s.run_until_quiet()
        assert shop.state().paid == 100
