"""The rules of `call_book` on books written by hand: each broken rule is reported."""

from __future__ import annotations

from tests.process.call_book import (
    KILL,
    OUTAGE,
    STOP,
    CallJudge,
    FlowFault,
    check_compensations,
)
from tests.process.call_server import BookedCall

# Two processes.
P, Q = 101, 102


def call(
    step: str, number: int, began: int, *, pid: int = P, ended: int = 0, key: str = ""
) -> BookedCall:
    return BookedCall(
        key=key or f"k-{step}",
        number=number,
        flow=7,
        step=step,
        detail=None,
        pid=pid,
        began_ns=began,
        ended_ns=ended or began + 5,
    )


def problems(
    book: list[BookedCall], faults: list[FlowFault] | None = None, recorded: str = ""
) -> list[str]:
    return CallJudge(book, faults or [], set(recorded.split())).problems


def kill(pid: int, at: int) -> FlowFault:
    return FlowFault(KILL, pid, at, 0, at + 1)


def stop(pid: int, at: int, until: int) -> FlowFault:
    return FlowFault(STOP, pid, at, at + 1, until)


def test_repeated_call_needs_a_fault_of_its_process() -> None:
    book = [call("pack", 1, 10), call("pack", 2, 50, pid=Q)]
    assert not problems(book, [kill(P, 12)])
    assert not problems(book, [FlowFault(OUTAGE, 0, 12, 12, 20)])
    assert not problems(book, [stop(P, 12, 60)])
    assert problems(book)
    assert problems(book, [kill(Q, 12)]), "another process was killed"
    assert problems(book, [kill(P, 60)]), "it was killed later"
    assert problems(book, [FlowFault(OUTAGE, 0, 2, 2, 9)]), "the outage was over"


def test_fault_explains_one_repetition_of_a_step() -> None:
    book = [call("pack", 1, 10), call("pack", 2, 50), call("pack", 3, 90)]
    assert not problems(book, [kill(P, 12), FlowFault(OUTAGE, 0, 60, 60, 61)])
    assert problems(book, [kill(P, 12)])


def test_stale_call_is_not_recorded() -> None:
    book = [call("pack", 1, 50, pid=Q), call("pack", 2, 90, pid=P)]
    assert not problems(book, [stop(P, 10, 80)], recorded="k-pack/1")
    assert problems(book, [stop(P, 10, 80)], recorded="k-pack/2")
    assert problems(book, [stop(P, 10, 95)], recorded="k-pack/1"), "it was still stopped"
    later_kill = [stop(P, 10, 80), kill(Q, 70)]
    assert not problems(book, later_kill, recorded="k-pack/1"), "the kill came after the record"


def test_call_in_flight_at_a_stop_is_not_recorded() -> None:
    book = [call("pack", 1, 10, ended=40), call("pack", 2, 60, pid=Q)]
    judged = CallJudge(book, [stop(P, 12, 80)], {"k-pack/2"})
    assert (judged.problems, judged.in_flight_at_stops) == ([], 1)
    assert problems(book[:1], [stop(P, 12, 80)], recorded="k-pack/1")


def test_recorded_step_is_not_called_again() -> None:
    book = [call("pack", 1, 10), call("pack", 2, 50, pid=Q)]
    assert not problems(book, [kill(P, 12)], recorded="k-pack/2")
    assert problems(book, [kill(P, 12)], recorded="k-pack/1")
    assert problems(book, [kill(P, 12)], recorded="k-pack/3"), "no such answer"


def test_step_is_not_called_after_a_later_step() -> None:
    book = [call("pack", 1, 10), call("bill", 1, 30), call("pack", 2, 50, pid=Q)]
    assert problems(book, [kill(P, 12)])
    assert not problems([call("label", 1, 10), call("pack", 1, 11)]), "they run at once"


def test_stale_process_may_call_an_unrecorded_step_once_after_a_later_step() -> None:
    later = call("pack", 1, 50, pid=Q)
    book = [later, call("reserve", 1, 90)]
    assert not problems(book, [stop(P, 12, 80)])
    assert problems(book), "its process was not stopped"
    assert problems(book, [stop(Q, 12, 80)]), "another process was stopped"
    assert problems(book, [stop(P, 12, 95)]), "it was called before its process was continued"
    assert problems(book, [stop(P, 12, 80)], recorded="k-reserve/1")
    twice = [*book, call("reserve", 2, 99, pid=P)]
    assert problems(twice, [stop(P, 12, 80)])


def test_step_has_one_key_and_a_key_one_step() -> None:
    assert problems([call("pack", 1, 10), call("pack", 1, 12, key="other")])
    assert problems([call("pack", 1, 10, key="k"), call("bill", 1, 12, key="k")])


def test_compensations_run_in_reverse_order_with_recorded_answers() -> None:
    names = ["reserve", "pack", "label", "carry", "unpack", "release"]
    steps = {name: call(name, 1, 10 * at) for at, name in enumerate(names)}
    recorded = {name: steps[name].token for name in names[:4]}
    steps["unpack"].detail = [recorded["pack"], recorded["label"]]
    steps["release"].detail = recorded["reserve"]

    def found(names: list[str], *, is_failed: bool = True) -> list[str]:
        return check_compensations(
            {name: steps[name] for name in names}, recorded, is_failed=is_failed
        )

    assert not found(names)
    assert found([*names[:4], "release", "unpack"]), "in the wrong order"
    assert found(names[:-1]), "release is missing"
    assert found(names[:4], is_failed=False), "both are missing"
    assert not found(names[:1], is_failed=False), "cancelled before the registration"
    assert not found(["reserve", "release"], is_failed=False)
    assert found(["reserve", "unpack", "release"], is_failed=False), "nothing was packed"
    steps["release"].detail = "another answer"
    assert found(names)
