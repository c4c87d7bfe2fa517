"""LongPoller: the listener of long polls shares the event loop with all requests and survives errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.ops.http import long_poll
from holdfast.ops.http.long_poll import NO_GRANTS, LongPoller
from holdfast.ops.http.routes import ClientDisconnect
from holdfast.store.api import Store
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import LeaseResult

pytestmark = pytest.mark.timeout(60)

UNIVERSE = "shop"
WAIT_S = 20.0


def run_with_poller(use: Callable[[Store, LongPoller], Awaitable[None]]) -> list[str]:
    """Run the coroutine with a poller over a store in memory. Return the reads that a thread ran."""
    in_thread: list[str] = []

    async def run_in_thread(read: Callable[..., Any], fn: Callable[..., Any], *args: Any) -> Any:
        in_thread.append(fn.__name__)
        return await asyncio.to_thread(read, fn, *args)

    async def run(store: Store) -> None:
        poller = LongPoller(store, UNIVERSE, asyncio.get_running_loop(), run_in_thread)
        try:
            await asyncio.wait_for(use(store, poller), WAIT_S)
        finally:
            poller.close()

    with stores.open("memory:") as store:
        asyncio.run(run(store))
    return in_thread


def lease(poller: LongPoller, queue: str) -> asyncio.Future[LeaseResult]:
    """Start a long poll that is granted nothing."""

    async def attempt() -> LeaseResult:
        return NO_GRANTS

    return asyncio.ensure_future(poller.lease([queue], [], WAIT_S * 2, attempt, ClientDisconnect()))


def test_listener_notified_during_each_read_does_not_starve_the_event_loop() -> None:
    topic = keys_of(UNIVERSE).queue_topic("mail")
    reads = 0

    async def use(store: Store, poller: LongPoller) -> None:
        def notify() -> None:
            nonlocal reads
            reads += 1
            # Without a turn of this test's coroutine the listener would never end.
            assert reads < 10_000, "the event loop is starved"
            store.transact(lambda txn: txn.notify(topic))

        with failpoints.on("http.long_poll.read", calls=notify):
            waiting = lease(poller, "mail")
            while reads < 100:
                await asyncio.sleep(0)
        waiting.cancel()

    run_with_poller(use)
    assert 100 <= reads < 200


def test_error_of_subscribe_leaves_the_long_polls_of_other_queues() -> None:
    async def use(store: Store, poller: LongPoller) -> None:
        waiting = lease(poller, "mail")
        await asyncio.sleep(0.05)
        former = poller._subscription
        no_files = OSError("no more files")
        with (
            failpoints.on("http.long_poll.subscribe", raises=no_files),
            pytest.raises(OSError, match="no more files"),
        ):
            await lease(poller, "other")
        assert former is not None
        assert poller._subscription is former
        assert not former.is_cancelled
        # The failed request left no topic that a later request would take for subscribed.
        again = lease(poller, "other")
        await asyncio.sleep(0.05)
        assert poller._subscription is not former
        assert keys_of(UNIVERSE).queue_topic("other") in poller._subscription.topics
        for request in (waiting, again):
            request.cancel()

    run_with_poller(use)


def test_listener_continues_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "LISTEN_S", 0.05)
    failures: list[dict[str, Any]] = []

    async def use(store: Store, poller: LongPoller) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        has_ended = False

        async def ended() -> bool:
            return has_ended

        with failpoints.on("http.long_poll.wait", raises=RuntimeError("no more threads")):
            waiting = asyncio.ensure_future(
                poller.until_ended(1, WAIT_S * 2, ended, ClientDisconnect())
            )
            while not failures:
                await asyncio.sleep(0.01)
        # The store has no such task: the listener reports it as ended at its next iteration.
        has_ended = True
        await waiting

    run_with_poller(use)
    assert isinstance(failures[0]["exception"], RuntimeError)


@pytest.mark.parametrize("bound", [2, 1])
def test_states_of_many_waiting_tasks_are_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(long_poll, "LISTEN_S", 0.05)
    monkeypatch.setattr(long_poll, "READS_IN_LOOP_MAX", bound)

    async def use(store: Store, poller: LongPoller) -> None:
        answers = {1: False, 2: False}

        async def ended(seq: int) -> bool:
            was_asked, answers[seq] = answers[seq], True
            return was_asked

        await asyncio.gather(
            *(
                poller.until_ended(seq, WAIT_S * 2, lambda seq=seq: ended(seq), ClientDisconnect())
                for seq in answers
            )
        )

    assert ("finished_among" in run_with_poller(use)) == (bound < 2)
