"""The figures of a run and the words for them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.clock import MS, S
from holdfast.ledger import summary
from holdfast.ledger.runs import Progress, RunRecord, Status
from holdfast.ledger.summary import Pace, Tally


def test_how_rows_ended_is_known_after_they_are_committed() -> None:
    progress = Progress(counts=[0, 0, 0, 0, 0, 0, 0, 10], ended=[6, 1, 3, 0])
    assert summary.tally(progress) == Tally(6, 1, 3, 0, in_flight=0, committed=10)
    assert summary.tally(progress).ended == 10


def test_without_totals_the_counts_by_state_are_taken() -> None:
    progress = Progress(counts=[4, 3, 2, 6, 1, 3, 5, 0])
    assert summary.tally(progress) == Tally(6, 1, 3, 5, in_flight=2, committed=0)


def test_a_run_without_figures_has_none() -> None:
    assert summary.tally(Progress()) == Tally(0, 0, 0, 0, 0, 0)
    assert summary.mean_rate(Progress()) is None
    assert summary.pace_of([]) is None


def test_what_was_there_at_the_first_look_is_no_speed() -> None:
    first = summary.paced(None, 1_000_000, 5 * S)
    assert first.per_s is None
    assert summary.paced(first, 1_000_010, 6 * S).per_s == 10


def test_the_pace_follows_what_happens_now() -> None:
    pace = Pace(0, 0, 100.0)
    half = summary.paced(pace, 0, summary.PACE_HALF_LIFE_NS)
    assert half.per_s == pytest.approx(50)
    assert summary.paced(half, 0, 20 * summary.PACE_HALF_LIFE_NS).per_s == pytest.approx(
        0, abs=0.01
    )


def test_many_small_looks_come_to_the_same_as_few_large_ones() -> None:
    fine = coarse = Pace(0, 0, 0.0)
    for at in range(1, 101):
        fine = summary.paced(fine, at * 10, at * 100 * MS)
    coarse = summary.paced(coarse, 1000, 10 * S)
    assert fine.per_s == pytest.approx(coarse.per_s)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    pace = Pace(S, 10, 5.0)
    assert summary.paced(pace, 20, S) == pace


def test_fewer_rows_than_before_begin_a_new_count() -> None:
    assert summary.paced(Pace(S, 10, 5.0), 0, 2 * S) == Pace(2 * S, 0)


def test_the_mean_leaves_out_what_was_there_when_the_run_was_resumed() -> None:
    told = Progress(started_ns=0, updated_ns=10 * S, ended=[900, 60, 40, 0])
    assert summary.mean_rate(told) == 100
    resumed = replace(told, series=[(0, 700, 0, 0, 0, 0.0), (10_000, 900, 40, 60, 0, 0.0)])
    assert summary.mean_rate(resumed) == 30


def test_time_left_is_unknown_without_a_pace_and_none_at_the_end() -> None:
    assert summary.eta_ns(10, None) is None
    assert summary.eta_ns(10, 0.0) is None
    assert summary.eta_ns(10, 0.0001) is None
    assert summary.eta_ns(10, 2.5) == 4 * S
    assert summary.eta_ns(0, None) == 0


@pytest.mark.parametrize(
    ("counts", "ended", "phase"),
    [
        ([], [], "ingest"),
        ([0] * 8, [], "ingest"),
        ([10, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0], "run"),
        ([0, 0, 1, 9, 0, 0, 0, 0], [9, 0, 0, 0], "run"),
        ([0, 0, 0, 5, 0, 0, 0, 5], [10, 0, 0, 0], "commit"),
    ],
)
def test_the_phase_follows_from_the_counts(counts: list[int], ended: list[int], phase: str) -> None:
    assert summary.phase_of(10, Progress(counts=counts, ended=ended)) == phase


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (-5, "0 ms"),
        (850 * MS, "850 ms"),
        (12 * S, "12 s"),
        (200 * S, "3 min 20 s"),
        (7_500 * S, "2 h 05 min"),
        (273_600 * S, "3 d 4 h"),
    ],
)
def test_durations_in_two_units(ns: int, text: str) -> None:
    assert summary.duration_text(ns) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (None, "-"),
        (0.0, "0/s"),
        (12_345.6, "12,346/s"),
        (48.25, "48.2/s"),
        (0.5, "30.0/min"),
        (0.001, "3.6/h"),
        (0.0001, "0/s"),
    ],
)
def test_a_rate_is_a_figure_that_can_be_read(per_s: float | None, text: str) -> None:
    assert summary.rate_text(per_s) == text


def test_a_hundred_percent_means_all_of_them() -> None:
    assert summary.percent_text(1999, 2000) == "99 %"
    assert summary.percent_text(2000, 2000) == "100 %"
    assert summary.percent_text(0, 0) == "-"


def test_a_line_tells_everything() -> None:
    progress = Progress(
        counts=[750, 0, 16, 0, 0, 0, 0, 1234],
        ended=[1200, 30, 4, 0],
        calls=1250,
        reused=10,
        retries=3,
        cost=0.42,
    )
    told = summary.line("labels", 2000, progress, phase="run", per_s=48.25)
    assert told == (
        "labels run 1,234/2,000 (61 %); 1,200 done, 4 failed, 30 skipped, 16 in flight; "
        "48.2/s, 15 s left; 1,250 calls, 10 reused, 3 retried, cost 0.4200"
    )


def test_money_is_told_only_when_some_was_reported() -> None:
    assert "cost" not in summary.calls_text(Progress(calls=3))
    assert summary.calls_text(Progress(calls=1, cost=0.00021)) == "1 call, cost 0.00021"


def test_settings_leave_out_what_the_record_tells() -> None:
    given = record(Status.OPEN, config={"version": "1", "key": "id", "output": "82a46b"})
    assert summary.settings(given) == [("version", "1")]


# -- what to do next -----------------------------------------------------------------------------


def record(status: Status, **more: object) -> RunRecord:
    return RunRecord(run_id="r1", name="two words", status=status, size=10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_a_next_step(status: Status, live: bool) -> None:
    assert summary.next_steps(record(status), Progress(), live=live)


def test_failed_rows_are_named_with_commands_that_a_shell_takes() -> None:
    progress = Progress(ended=[9, 0, 1, 0])
    look, again = summary.next_steps(record(Status.FINISHED), progress, store="./my data")
    assert look.endswith("holdfast runs failed 'two words' --store './my data'")
    assert again.endswith("holdfast runs retry 'two words' --store './my data'")


def test_a_halted_run_says_why() -> None:
    why, _ = summary.next_steps(record(Status.HALTED, halted="seq 7"), Progress())
    assert "seq 7" in why


def test_a_run_without_a_driver_is_run_again() -> None:
    [step] = summary.next_steps(record(Status.OPEN), Progress())
    assert "run the stage again" in step
    [step] = summary.next_steps(record(Status.OPEN), Progress(), live=True)
    assert "cancel" in step
