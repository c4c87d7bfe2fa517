"""Keys, `hf.again`, forks, retention, large values and long records."""

import asyncio
import gc
import time
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.errors import Invalid, KeyConflict, NotFound
from holdfast.flows import name_index, retention
from holdfast.flows.execution import FlowExecution
from holdfast.flows.model import keys_of
from holdfast.ops.verify import find_differences
from holdfast.store import schema, tuples
from tests.flows.test_events import Payment, app_with_events
from tests.flows.test_steps import app_of, double, failure


def test_start_with_a_key_returns_the_same_flow(make_rig: Any) -> None:
    @hf.flow
    async def order(n: int) -> int:
        return await hf.step(double, n)

    rig = make_rig(app_of(order))
    handle = rig.start(order.options(key="o-1"), 1)
    assert rig.start(order.options(key="o-1"), 1).id == handle.id
    rig.result(handle)
    assert rig.start(order.options(key="o-1"), 1).id == handle.id
    with pytest.raises(KeyConflict):
        rig.start(order.options(key="o-1"), 2)


def test_key_is_new_after_retain_s(make_rig: Any) -> None:
    @hf.flow(retain_s=60)
    async def order(n: int) -> int:
        return n

    rig = make_rig(app_of(order))
    handle = rig.start(order.options(key="o-1"), 1)
    rig.result(handle)
    rig.clock.advance(61 * S)
    rig.store.transact(retention.remove_ended, rig.universe, 100)
    again = rig.start(order.options(key="o-1"), 2)
    assert again.id != handle.id
    with pytest.raises(NotFound):
        handle.status()


def rows_of_flows(rig: Any) -> list[bytes]:
    """The rows of flows, without the two rows of the universe: the counter of their numbers and the mark of the index
    of names."""
    prefix = schema.key_prefix(schema.Space.FLOW, rig.universe)
    of_universe = {keys_of(rig.universe).seq_counter, name_index.mark_key(rig.universe)}
    rows = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    return [key for key, _ in rows if key not in of_universe]


def test_retention_removes_all_rows_of_a_flow(make_rig: Any) -> None:
    def refuse() -> None:
        raise ValueError("full")

    @hf.flow(retain_s=60)
    async def child() -> None:
        await hf.sleep(1)

    @hf.flow(retain_s=60, timeout_s=3600)
    async def order(run: int) -> None:
        hf.publish("run", run)
        hf.undo(double, 1)
        hf.now()
        await hf.receive(Payment)
        await hf.step(child)
        if run < 3:
            hf.again(run + 1)
        await asyncio.gather(hf.sleep(600), hf.step(refuse))

    rig = make_rig(app_with_events(order, child))
    handle = rig.start(order.options(key="o-1"), 1)
    for n in range(5):
        handle.send(Payment(n), key=f"p-{n}")
    failure(rig, handle)
    rig.clock.advance(61 * S)
    while rig.store.transact(retention.remove_ended, rig.universe, 100):
        pass
    assert rows_of_flows(rig) == []
    assert rig.store.read(find_differences) == []


@pytest.mark.parametrize("rows_max", [1, 2, 3, 4, 5])
def test_removal_in_small_commits_removes_all_rows_of_all_flows(
    make_rig: Any, rows_max: int
) -> None:
    """Each commit removes at most `rows_max` rows, and leaves no flow that a reader sees in part."""

    @hf.flow(retain_s=60)
    async def child() -> None:
        await hf.sleep(1)

    @hf.flow(retain_s=60)
    async def order(run: int) -> None:
        hf.publish("run", run)
        await hf.step(child)
        if run < 2:
            hf.again(run + 1)

    rig = make_rig(app_with_events(order, child))
    handles = [rig.start(order.options(key=f"o-{n}"), 1) for n in range(3)]
    for handle in handles:
        handle.send(Payment(1), key="kept")
        rig.result(handle)
    rig.clock.advance(61 * S)
    left = len(rows_of_flows(rig))
    commits = 0
    while removed := rig.store.transact(retention.remove_ended, rig.universe, 100, rows_max):
        assert 1 <= removed <= rows_max
        assert rig.store.read(find_differences) == []
        commits += 1
        assert commits <= left
    assert rows_of_flows(rig) == []
    assert rig.store.read(retention.next_due_ns, rig.universe) is None


def test_removal_continues_behind_a_retained_flow_without_rows(make_rig: Any) -> None:
    """A former release left the retention row of a flow that it had removed. Later flows are removed."""

    @hf.flow(retain_s=60)
    async def order() -> None:
        await hf.step(double, 1)

    rig = make_rig(app_of(order))
    removed, kept = rig.start(order), rig.start(order)
    rig.result(removed)
    rig.result(kept)
    retained = keys_of(rig.universe).retained
    left_over, _ = rig.store.read(lambda txn: txn.scan(retained, tuples.prefix_end(retained), 1)[0])
    rig.clock.advance(61 * S)
    assert rig.store.transact(retention.remove_ended, rig.universe, 1) > 0
    rig.store.transact(lambda txn: txn.put(left_over, b""))
    while rig.store.transact(retention.remove_ended, rig.universe, 100):
        pass
    with pytest.raises(NotFound):
        kept.status()
    assert rows_of_flows(rig) == []


def test_large_values_are_blobs_released_after_removal(make_rig: Any) -> None:
    def large(n: int) -> bytes:
        return bytes([n]) * 100_000

    class Scan(hf.Event):
        data: bytes

    @hf.flow(retain_s=60)
    async def order(data: bytes) -> bytes:
        first = await hf.receive(Scan)
        second = await hf.receive(Scan)
        part = await hf.step(large, 7)
        return data + first.data + second.data + part

    rig = make_rig(app_of(order, events=[Scan]))
    handle = rig.start(order, b"a" * 100_000)
    handle.send(Scan(b"b" * 100_000))
    rig.run(rig.is_idle)
    handle.send(Scan(b"c" * 100_000))
    result = rig.result(handle)
    assert result == b"a" * 100_000 + b"b" * 100_000 + b"c" * 100_000 + b"\x07" * 100_000
    assert rig.blob_count() > 0
    rig.clock.advance(61 * S)
    while rig.store.transact(retention.remove_ended, rig.universe, 100):
        pass
    assert rig.blob_count() == 0


def test_again_starts_the_next_run_under_the_same_id(make_rig: Any) -> None:
    undone: list[int] = []

    @hf.flow
    async def order(n: int, total: int) -> int:
        hf.undo(undone.append, n)
        total += await hf.step(double, n)
        hf.publish(f"run{n}", total)
        if n < 3:
            hf.again(n + 1, total)
        return total

    rig = make_rig(app_of(order))
    handle = rig.start(order, 1, 0)
    assert rig.result(handle) == 12
    assert handle.status().run == 3
    assert handle.published() == {"run1": 2, "run2": 6, "run3": 12}
    assert [step.value for step in handle.steps(run=2) if step.name == "double"] == [4]
    assert rig.store.read(find_differences) == []


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_again_in_a_task_group_starts_the_next_run(make_rig: Any, depth: int) -> None:
    """At depth 0 the body of the group calls it, else a task of the group or of a group inside it."""

    async def call_again(n: int, depth: int) -> None:
        if depth == 0:
            hf.again(n + 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(call_again(n, depth - 1))
            group.create_task(hf_sleep())

    async def hf_sleep() -> None:
        await hf.sleep(3600)

    @hf.flow
    async def order(n: int) -> int:
        await hf.step(double, n)
        if n < 3:
            async with asyncio.TaskGroup() as group:
                if depth == 0:
                    hf.again(n + 1)
                group.create_task(call_again(n, depth - 1))
        return n

    rig = make_rig(app_of(order))
    handle = rig.start(order, 1)
    assert rig.result(handle) == 3
    assert handle.status().run == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (hf.StepFailed(step="x", code="failed", error_type="E", error="e", attempts=1), "E"),
        (ValueError("no"), "ExceptionGroup"),
        (SystemExit(1), "FlowExited"),
    ],
)
def test_error_beside_again_in_a_task_group_fails_the_flow(
    make_rig: Any, error: BaseException, expected: str
) -> None:
    async def fail() -> None:
        raise error

    async def call_again() -> None:
        hf.again()

    @hf.flow
    async def order() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call_again())
            group.create_task(fail())

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failed = failure(rig, handle)
    assert (failed.state, failed.error_type) == ("FAILED", expected)
    assert handle.status().run == 1


def test_again_keeps_the_inbox_and_drops_compensations(make_rig: Any) -> None:
    undone: list[int] = []

    def take_back(n: int) -> None:
        undone.append(n)

    def refuse() -> None:
        raise ValueError("full")

    @hf.flow
    async def order(n: int) -> None:
        hf.undo(take_back, (await hf.receive(Payment)).cents)
        if n < 2:
            hf.again(n + 1)
        await hf.step(refuse)

    rig = make_rig(app_with_events(order))
    handle = rig.start(order, 1)
    handle.send(Payment(1))
    handle.send(Payment(2))
    failure(rig, handle)
    assert undone == [2]


def test_again_restarts_the_timeout(make_rig: Any) -> None:
    @hf.flow(timeout_s=100)
    async def order(n: int) -> int:
        await hf.sleep(60)
        if n < 3:
            hf.again(n + 1)
        return n

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order, 1)) == 3


def test_again_removes_former_runs_after_retain_s(make_rig: Any) -> None:
    @hf.flow(retain_s=86_400)
    async def order(n: int) -> int:
        await hf.step(double, n)
        await hf.sleep(3600)
        hf.again(n + 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order, 1)
    rig.run(lambda: handle.status().run == 3)
    assert handle.steps(run=1) != []
    rig.clock.advance(86_401 * S)
    rig.store.transact(retention.remove_ended, rig.universe, 100)
    assert handle.steps(run=1) == []
    assert handle.steps(run=2) == []


def three_steps() -> tuple[Any, list[int]]:
    calls: list[int] = []

    def charge(n: int) -> int:
        calls.append(n)
        return n

    @hf.flow
    async def order() -> list[int]:
        first = [await hf.step(hf.options(charge, name="charge"), n) for n in (1, 2, 3)]
        return [*first, await hf.step(hf.options(double, name="last"), 10)]

    return order, calls


@pytest.mark.parametrize(
    ("at", "repeated"), [("charge", [1, 2, 3]), ("charge#3", [3]), ("last", []), (None, [])]
)
def test_fork_takes_over_the_steps_before(
    make_rig: Any, at: str | None, repeated: list[int]
) -> None:
    order, calls = three_steps()
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    calls.clear()
    fork = handle.fork("f-1", at=at)
    assert fork.id != handle.id
    assert handle.fork("f-1", at=at).id == fork.id
    assert rig.result(fork) == [1, 2, 3, 20]
    assert calls == repeated


def test_fork_at_an_unknown_step_is_refused(make_rig: Any) -> None:
    order, _ = three_steps()
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    with pytest.raises(NotFound):
        handle.fork("f-1", at="absent")
    with pytest.raises(Invalid, match="charge#3"):
        handle.fork("f-1", at="charge#x")


def test_fork_compensates_only_its_own_steps(make_rig: Any) -> None:
    undone: list[str] = []

    def take_back(name: str) -> None:
        undone.append(name)

    def refuse() -> None:
        raise ValueError("full")

    @hf.flow
    async def order() -> None:
        await hf.step(hf.options(double, name="first"), 1)
        hf.undo(take_back, "first")
        await hf.step(hf.options(double, name="second"), 1)
        hf.undo(take_back, "second")
        await hf.step(refuse)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    undone.clear()
    failure(rig, handle.fork("f-1", at="second"))
    assert undone == ["second"]


def test_fork_takes_over_received_events(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        cents = (await hf.receive(Payment)).cents
        return [cents, await hf.step(hf.options(double, name="last"), cents)]

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    handle.send(Payment(4))
    rig.result(handle)
    assert rig.result(handle.fork("f-1", at="last")) == [4, 8]


def test_ten_thousand_recorded_steps_replay(make_rig: Any, record_property: Any) -> None:
    began: list[float] = []

    async def count(n: int) -> int:
        return n

    @hf.flow(lease_s=3600)
    async def order() -> int:
        began.append(time.process_time())
        total = 0
        for page in range(100):
            steps = [hf.step(hf.options(count, name="count"), n) for n in range(100)]
            total += sum(await asyncio.gather(*steps)) + page
        began.append(time.process_time())
        await hf.sleep(60)
        return total

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 100 * 4950 + 4950
    # The second run replayed the record.
    assert len(began) == 4
    record_property("replay_cpu_s", began[3] - began[2])


def test_finally_block_records_nothing_while_its_flow_is_suspended(make_rig: Any) -> None:
    """DESIGN 12: a waiting flow is rows. Python closes its coroutine; the calls in its `finally` blocks have no effect."""
    log: list[str] = []

    def release() -> str:
        log.append("released")
        return "released"

    @hf.flow
    async def order() -> str:
        try:
            await hf.sleep(60)
        except Exception:
            log.append("error")
        finally:
            try:
                hf.publish("status", "releasing")
                await hf.step(release)
            except Exception:
                log.append("error")
        return "done"

    @hf.flow
    async def branches() -> list[str]:
        return list(await asyncio.gather(branch(), branch()))

    async def branch() -> str:
        try:
            await hf.sleep(60)
        finally:
            await hf.step(hf.options(release, name="release"))
        return "done"

    rig = make_rig(app_of(order, branches))
    for flow, result, calls in ((order, "done", 1), (branches, ["done", "done"], 2)):
        handle = rig.start(flow)
        rig.run(rig.is_idle)
        gc.collect()
        assert [step.name for step in handle.steps()].count("release") == 0
        assert handle.published() == {}
        assert log == []
        assert rig.result(handle) == result
        assert log == ["released"] * calls
        log.clear()


def test_executions_of_waiting_and_ended_flows_are_freed_without_the_garbage_collector(
    make_rig: Any,
) -> None:
    """A worker runs thousands of activations in a second. Cyclic garbage would make Python's collector visit them."""

    @hf.flow
    async def order() -> int:
        branches = asyncio.gather(hf.step(double, 1), hf.sleep(60))
        await hf.sleep(60)
        return len(await branches)

    def executions() -> list[FlowExecution]:
        return [one for one in gc.get_objects() if isinstance(one, FlowExecution)]

    rig = make_rig(app_of(order))
    handles = [rig.start(order) for _ in range(3)]
    gc.collect()
    former = executions()  # of other tests
    gc.disable()
    try:
        assert [rig.result(handle) for handle in handles] == [2, 2, 2]
        assert [one for one in executions() if one not in former] == []
    finally:
        gc.enable()
