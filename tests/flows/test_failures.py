"""Failures of steps and flows, compensations, lost workers and stale workers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli import main
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.flows import (
    compensation_dead_letters,
    compensation_redrive,
    consistency,
    name_index,
)
from holdfast.ops import index_rebuild
from holdfast.ops.verify import find_differences
from holdfast.store import tuples
from holdfast.store.schema import encode_int
from tests.flows.test_steps import app_of, double, failure
from tests.process.watch import until


def refuse(text: str) -> None:
    raise ValueError(text)


def test_step_failed_has_type_text_and_attempts(make_rig: Any) -> None:
    seen: list[tuple[Any, ...]] = []

    @hf.flow
    async def order() -> str:
        try:
            await hf.step(hf.options(refuse, attempts=2, backoff_s=0.001), "full")
        except hf.StepFailed as error:
            seen.append((error.step, error.error_type, error.error, error.attempts))
        await hf.sleep(60)
        return "caught"

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "caught"
    assert seen == [("refuse#1", "ValueError", "full", 2)] * 2


def test_uncaught_step_failed_ends_the_flow_at_once(make_rig: Any) -> None:
    @hf.flow(attempts=5)
    async def order() -> None:
        await hf.step(refuse, "full")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert (error.state, error.code, error.step) == ("FAILED", "step_failed", "refuse")
    assert (error.error_type, error.error) == ("ValueError", "full")
    assert handle.status().failures == 0


def test_flow_attempts_repeat_its_own_errors_with_backoff(make_rig: Any) -> None:
    runs: list[int] = []
    steps: list[int] = []

    def counted() -> None:
        steps.append(1)

    @hf.flow(attempts=3)
    async def order() -> str:
        await hf.step(counted)
        runs.append(rig.clock.mono_ns())
        if len(runs) < 3:
            raise KeyError("own")
        return "third"

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "third"
    assert len(runs) == 3
    assert runs[0] < runs[1] < runs[2]
    assert steps == [1]


def test_flow_fails_after_its_attempts_with_code_raised(make_rig: Any) -> None:
    @hf.flow(attempts=2)
    async def order() -> None:
        raise KeyError("own")

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.state, error.code, error.error_type) == ("FAILED", "raised", "KeyError")


def test_undo_runs_in_reverse_order_of_registration(make_rig: Any) -> None:
    undone: list[str] = []

    def take_back(name: str) -> None:
        undone.append(name)

    @hf.flow
    async def order() -> None:
        for name in ("a", "b", "c"):
            hf.undo(take_back, name)
            await hf.step(double, 1)
        await hf.step(refuse, "full")

    rig = make_rig(app_of(order))
    assert failure(rig, rig.start(order)).state == "FAILED"
    assert undone == ["c", "b", "a"]


def test_undo_does_not_run_after_completion(make_rig: Any) -> None:
    undone: list[str] = []

    @hf.flow
    async def order() -> None:
        hf.undo(undone.append, "a")

    rig = make_rig(app_of(order))
    rig.result(rig.start(order))
    assert undone == []


def test_undo_that_fails_is_recorded_and_earlier_ones_run(make_rig: Any) -> None:
    undone: list[str] = []
    calls: list[str] = []

    def take_back(name: str) -> None:
        undone.append(name)

    def refuse_back(name: str) -> None:
        calls.append(name)
        raise OSError("gone")

    @hf.flow
    async def order() -> None:
        hf.undo(take_back, "a")
        hf.undo(hf.options(refuse_back, backoff_s=0.001), "b")
        hf.undo(take_back, "c")
        await hf.step(refuse, "full")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).code == "step_failed"
    assert undone == ["c", "a"]
    assert len(calls) == 5
    [failed] = [step for step in handle.steps() if step.code == "undo_failed"]
    assert failed.name.startswith("undo:")
    assert (failed.error_type, failed.error, failed.attempts) == ("OSError", "gone", 5)


def test_undo_by_a_task_runs_the_task(make_rig: Any) -> None:
    undone: list[int] = []

    @hf.task
    def refund(cents: int) -> None:
        undone.append(cents)

    @hf.flow
    async def order() -> None:
        hf.undo(refund, 5)
        await hf.step(refuse, "full")

    rig = make_rig(app_of(order, tasks=[refund]))
    assert failure(rig, rig.start(order)).state == "FAILED"
    assert undone == [5]


def test_undo_after_a_foreign_wait_runs_after_a_crash(make_rig: Any) -> None:
    undone: list[str] = []

    def take_back(name: str) -> None:
        undone.append(name)

    @hf.flow
    async def order() -> None:
        await asyncio.sleep(0.001)
        hf.undo(take_back, "a")
        await hf.step(refuse, "full")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    # The worker dies after the commit that starts the compensations.
    rig.plan["flows.commit", 2] = "after"
    assert failure(rig, handle).state == "FAILED"
    assert undone == ["a"]


def test_open_steps_are_cancelled_before_compensations(make_rig: Any) -> None:
    log: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            log.append("cleaned up")

    def take_back() -> None:
        log.append("undone")

    @hf.flow
    async def order() -> None:
        hf.undo(take_back)
        await asyncio.gather(hf.step(long), hf.step(refuse, "full"), hf.sleep(3600))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).step == "refuse"
    assert log == ["cleaned up", "undone"]
    assert [step for step in handle.steps() if step.state == "open"] == []


def test_step_in_a_thread_ends_before_compensations(make_rig: Any) -> None:
    import threading

    log: list[str] = []
    began = threading.Event()

    def long() -> None:
        began.set()
        step = hf.current_step()
        pause = threading.Event()
        while not step.cancelled:
            pause.wait(0.001)
        log.append("ended")

    def refuse_late() -> None:
        began.wait()
        raise ValueError("full")

    def take_back() -> None:
        log.append("undone")

    @hf.flow
    async def order() -> None:
        hf.undo(take_back)
        await asyncio.gather(hf.step(long), hf.step(refuse_late))

    rig = make_rig(app_of(order))
    assert failure(rig, rig.start(order)).state == "FAILED"
    assert log == ["ended", "undone"]


def test_child_flow_ends_before_the_compensations_of_its_parent(make_rig: Any) -> None:
    log: list[str] = []

    def note(text: str) -> None:
        log.append(text)

    @hf.flow
    async def child() -> None:
        hf.undo(note, "child undone")
        await hf.sleep(3600)

    @hf.flow
    async def order() -> None:
        hf.undo(note, "parent undone")

        async def fail_later() -> None:
            await hf.sleep(1)
            await hf.step(refuse, "full")

        await asyncio.gather(hf.step(child), fail_later())

    rig = make_rig(app_of(order, child))
    error = failure(rig, rig.start(order))
    assert (error.code, error.step) == ("step_failed", "refuse")
    assert log == ["child undone", "parent undone"]
    assert rig.store.read(find_differences) == []


def test_lost_workers_end_the_flow_as_dead(make_rig: Any) -> None:
    @hf.flow(expiries_max=2)
    async def order() -> None:
        await hf.step(double, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.plan.update({("flows.commit", n): "before" for n in (1, 2)})
    error = failure(rig, handle)
    assert (error.state, error.code) == ("DEAD", "worker_lost")
    assert rig.store.read(find_differences) == []


def test_recorded_step_resets_the_count_of_lost_workers(make_rig: Any) -> None:
    @hf.flow(expiries_max=2)
    async def order() -> int:
        total = 0
        for n in range(4):
            total += await hf.step(double, n)
        return total

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.plan.update({("flows.commit", n): "before" for n in (1, 3, 6)})
    assert rig.result(handle) == 12


def test_flow_that_kills_its_worker_is_leased_alone_before_it_is_dead(make_rig: Any) -> None:
    from holdfast.tasks import operations as task_operations
    from holdfast.tasks.operations import GrantRequest

    @hf.flow(expiries_max=2)
    async def killer() -> None:
        await hf.sleep(1)

    @hf.flow(expiries_max=2)
    async def order() -> int:
        return await hf.step(double, 1)

    rig = make_rig(app_of(killer, order))
    killing, other = rig.start(killer), rig.start(order)

    def lease(alone: bool) -> list[str]:
        request = GrantRequest("worker", ["default"], 10, alone)
        leased = rig.store.transact(task_operations.lease, rig.universe, request)
        return [grant.name for grant in leased.grants]

    assert sorted(lease(True)) == ["flow:killer", "flow:order"]
    rig.clock.advance(3600 * S)
    # Both lost their worker once. Each of them is now leased alone.
    granted = next(filter(None, (lease(True) for _ in range(5))))
    assert granted == ["flow:killer"]
    rig.clock.advance(3600 * S)
    assert rig.result(other) == 2
    assert killing.status().state == "DEAD"


def test_stale_worker_records_nothing(make_rig: Any) -> None:
    calls: list[int] = []

    async def paused() -> int:
        calls.append(1)
        if len(calls) == 1:
            # The worker stands still past its lease, and another worker gets the flow.
            rig.clock.advance(3600 * S)
            await asyncio.to_thread(finish_elsewhere)
        return len(calls)

    def finish_elsewhere() -> None:
        rig.run(lambda: handle.done())

    @hf.flow
    async def order() -> int:
        return await hf.step(paused)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 2
    assert [step.value for step in handle.steps()] == [2]
    assert len(calls) == 2
    assert rig.store.read(find_differences) == []


def test_redrive_without_compensations_runs_the_failed_step_again(make_rig: Any) -> None:
    calls: list[str] = []

    def charge() -> str:
        calls.append(hf.current_step().idempotency_key)
        if len(calls) == 1:
            raise ValueError("declined")
        return "charged"

    @hf.flow
    async def order() -> list[Any]:
        return [await hf.step(double, 1), await hf.step(charge)]

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).step.endswith("charge")
    again = handle.redrive()
    assert again.id == handle.id
    assert rig.result(again) == [2, "charged"]
    assert len(set(calls)) == 1
    assert rig.store.read(find_differences) == []


def test_redrive_after_compensations_is_a_new_flow(make_rig: Any) -> None:
    calls: list[int] = []

    def charge() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("declined")
        return "charged"

    @hf.flow
    async def order() -> str:
        hf.undo(double, 1)
        return await hf.step(charge)

    rig = make_rig(app_of(order))
    handle = rig.start(order.options(key="o-1"))
    failure(rig, handle)
    again = handle.redrive()
    assert again.id != handle.id
    assert handle.redrive().id == again.id
    assert rig.result(again) == "charged"
    assert again.key == "o-1"
    assert rig.store.read(find_differences) == []


def test_redrive_refuses_a_flow_that_did_not_fail(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        return await hf.step(double, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    with pytest.raises(Invalid, match="only FAILED and DEAD flows are redriven"):
        handle.redrive()


def test_redrive_of_a_dead_flow_continues_at_its_record(make_rig: Any) -> None:
    calls: list[int] = []

    def once() -> int:
        calls.append(1)
        return 1

    @hf.flow(expiries_max=1)
    async def order() -> int:
        first = await hf.step(once)
        await hf.sleep(1)
        return first + await hf.step(double, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    commits = rig.crashing_store.operations.count("flows.commit")
    rig.plan["flows.commit", commits + 2] = "before"
    assert failure(rig, handle).state == "DEAD"
    assert rig.result(handle.redrive()) == 3
    assert calls == [1]


def failing_undo(calls: list[str], broken: list[bool]) -> Any:
    def take_back(name: str) -> None:
        calls.append(f"take_back {name}")

    def refund(name: str) -> None:
        calls.append(hf.current_step().idempotency_key)
        if broken:
            raise OSError("gone")

    @hf.flow
    async def order() -> None:
        hf.undo(take_back, "a")
        hf.undo(hf.options(refund, name="refund", backoff_s=0.001), "b")
        hf.undo(take_back, "c")
        await hf.step(refuse, "full")

    return order


def refunds(handle: Any) -> list[str]:
    return [step.state for step in handle.steps() if step.name == "undo:refund"]


def dead_undos(rig: Any) -> list[Any]:
    return list(rig.store.read(queue.list_dead, compensation_dead_letters.queue_of(rig.universe)))


def test_failed_undo_is_a_dead_letter_whose_redrive_runs_it_again(make_rig: Any) -> None:
    calls: list[str] = []
    broken = [True]
    order = failing_undo(calls, broken)
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    ended = failure(rig, handle)
    [letter] = dead_undos(rig)
    assert (letter.code, letter.error) == ("undo_failed", "OSError: gone")
    assert compensation_dead_letters.decode_payload(letter.payload).step == "undo:refund"
    [key] = set(calls) - {"take_back a", "take_back c"}

    # The compensation fails again: a second letter replaces the first.
    rig.store.transact(compensation_redrive.redrive_compensations, rig.universe, [letter.seq])
    assert (handle.status().state, dead_undos(rig)) == ("COMPENSATING", [])
    assert failure(rig, handle).code == ended.code
    [second] = dead_undos(rig)
    assert second.seq > letter.seq
    assert flow_differences(rig) == []

    broken.clear()
    calls.clear()
    rig.store.transact(compensation_redrive.redrive_compensations, rig.universe, [second.seq])
    with pytest.raises(Invalid, match="ended flow"):
        rig.store.transact(
            compensation_redrive.redrive_compensations, rig.universe, [add_letter(rig, second)]
        )
    assert failure(rig, handle).step == ended.step
    assert calls == [key]
    assert refunds(handle) == ["failed", "failed", "completed"]
    with pytest.raises(NotFound):
        rig.store.transact(compensation_redrive.redrive_compensations, rig.universe, [second.seq])
    wrong = flow_differences(rig)
    assert [one.what for one in wrong] == ["dead letter of a compensation", "dead letter 3"]
    rig.store.transact(queue.discard_dead, letter.queue, [dead_undos(rig)[0].seq])


def test_letters_of_an_older_version_have_no_rows_until_a_rebuild(make_rig: Any) -> None:
    rig = make_rig(app_of(order := failing_undo([], [True])))
    failure(rig, rig.start(order))
    rows = letter_rows(rig)

    def forget(txn: Any) -> None:
        txn.delete(name_index.mark_key(rig.universe))
        for key, _ in rows:
            txn.delete(key)

    rig.store.transact(forget)
    assert flow_differences(rig) == []
    rig.store.transact(lambda txn: txn.put(rows[0][0], encode_int(9)))
    assert [one.what for one in flow_differences(rig)] == ["dead letter of a compensation"]
    rig.store.transact(index_rebuild.rebuild_flow_names, rig.universe)
    assert letter_rows(rig) == rows
    assert len(rows) == 1
    rig.store.transact(lambda txn: txn.delete(rows[0][0]))
    assert [one.what for one in flow_differences(rig)] == ["dead letter of a compensation"]
    rig.store.transact(index_rebuild.rebuild_flow_names, rig.universe)


def letter_rows(rig: Any) -> list[tuple[bytes, bytes]]:
    prefix = compensation_dead_letters.letter_prefix(rig.universe)
    return list(rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))


def flow_differences(rig: Any) -> list[Any]:
    found: list[Any] = rig.store.read(
        lambda txn: list(consistency.find_differences(txn, rig.universe))
    )
    return found


def add_letter(rig: Any, letter: Any) -> int:
    """Write a dead letter that belongs to no failure."""
    seq: int = rig.store.transact(
        queue.add_dead_letter, letter.queue, letter.payload, letter.code, letter.error
    )
    return seq


def test_commands_list_redrive_and_drop_failed_undos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [True]
    order = failing_undo([], broken)
    url = str(tmp_path)
    with app_of(order).open(url) as rt:
        handles = [rt.start(order) for _ in range(2)]
        for handle in handles:
            with pytest.raises(hf.FlowFailed):
                handle.result(timeout=60)
        assert main(["dead", "list", "flows/undo-failed", "--store", url]) == 0
        listed = capsys.readouterr().out
        assert listed.count("undo_failed") == 2
        broken.clear()
        assert main(["dead", "redrive", "flows/undo-failed", "1", "--store", url]) == 0
        assert "1 → f1-" in capsys.readouterr().out
        assert main(["dead", "drop", "flows/undo-failed", "2", "--store", url]) == 0
        capsys.readouterr()
        assert main(["dead", "list", "flows/undo-failed", "--store", url]) == 0
        assert "no dead letters" in capsys.readouterr().out
        until(
            lambda: sorted(map(refunds, handles)) == [["failed"], ["failed", "completed"]],
            "the compensation has run",
        )
