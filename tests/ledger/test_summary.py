"""The tally, the rates and the texts of a run summary."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.clock import MS, S
from holdfast.ledger import summary
from holdfast.ledger.runs import RunLifecycle, RunProgress, RunRecord
from holdfast.ledger.summary import RowTally, SmoothedRate


def test_tally_rows_counts_outcomes_of_committed_rows() -> None:
    progress = RunProgress(counts=[0, 0, 0, 0, 0, 0, 0, 10], ended=[6, 1, 3, 0])
    assert summary.tally_rows(progress) == RowTally(6, 1, 3, 0, in_flight=0, committed=10)
    assert summary.tally_rows(progress).ended == 10


def test_tally_rows_falls_back_to_the_counts_by_state() -> None:
    progress = RunProgress(counts=[4, 3, 2, 6, 1, 3, 5, 0])
    assert summary.tally_rows(progress) == RowTally(6, 1, 3, 5, in_flight=2, committed=0)


def test_tally_and_rates_of_a_run_without_progress_are_empty() -> None:
    assert summary.tally_rows(RunProgress()) == RowTally(0, 0, 0, 0, 0, 0)
    assert summary.mean_rate(RunProgress()) is None
    assert summary.recent_rate([]) is None


def test_smoothed_rate_ignores_rows_of_the_first_sample() -> None:
    first = summary.smoothed(None, 1_000_000, 5 * S)
    assert first.per_s is None
    assert summary.smoothed(first, 1_000_010, 6 * S).per_s == 10


def test_smoothed_rate_decays_by_its_half_life() -> None:
    rate = SmoothedRate(0, 0, 100.0)
    half = summary.smoothed(rate, 0, summary.RATE_HALF_LIFE_NS)
    assert half.per_s == pytest.approx(50)
    assert summary.smoothed(half, 0, 20 * summary.RATE_HALF_LIFE_NS).per_s == pytest.approx(
        0, abs=0.01
    )


def test_smoothed_rate_does_not_depend_on_the_number_of_samples() -> None:
    fine = coarse = SmoothedRate(0, 0, 0.0)
    for at in range(1, 101):
        fine = summary.smoothed(fine, at * 10, at * 100 * MS)
    coarse = summary.smoothed(coarse, 1000, 10 * S)
    assert fine.per_s == pytest.approx(coarse.per_s)


def test_smoothed_rate_is_unchanged_when_the_clock_stands_still() -> None:
    rate = SmoothedRate(S, 10, 5.0)
    assert summary.smoothed(rate, 20, S) == rate


def test_smoothed_rate_restarts_when_the_row_count_decreases() -> None:
    assert summary.smoothed(SmoothedRate(S, 10, 5.0), 0, 2 * S) == SmoothedRate(2 * S, 0)


def test_mean_rate_excludes_rows_before_the_resume() -> None:
    progress = RunProgress(started_ns=0, updated_ns=10 * S, ended=[900, 60, 40, 0])
    assert summary.mean_rate(progress) == 100
    resumed = replace(progress, series=[(0, 700, 0, 0, 0, 0.0), (10_000, 900, 40, 60, 0, 0.0)])
    assert summary.mean_rate(resumed) == 30


def test_eta_is_unknown_without_a_rate_and_zero_at_the_end() -> None:
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
def test_phase_of_a_run_follows_from_its_counts(
    counts: list[int], ended: list[int], phase: str
) -> None:
    assert summary.phase_of(10, RunProgress(counts=counts, ended=ended)) == phase


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
def test_duration_text_has_two_units(ns: int, text: str) -> None:
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
def test_rate_text_uses_a_readable_unit(per_s: float | None, text: str) -> None:
    assert summary.rate_text(per_s) == text


def test_percent_text_is_100_only_for_all_rows() -> None:
    assert summary.percent_text(1999, 2000) == "99 %"
    assert summary.percent_text(2000, 2000) == "100 %"
    assert summary.percent_text(0, 0) == "-"


def test_one_line_text_shows_every_figure() -> None:
    progress = RunProgress(
        counts=[750, 0, 16, 0, 0, 0, 0, 1234],
        ended=[1200, 30, 4, 0],
        calls=1250,
        reused=10,
        retries=3,
        cost=0.42,
    )
    text = summary.one_line_text("labels", 2000, progress, phase="run", per_s=48.25)
    assert text == (
        "labels run 1,234/2,000 (61 %); 1,200 done, 4 failed, 30 skipped, 16 in flight; "
        "48.2/s, 15 s left; 1,250 calls, 10 reused, 3 retried, cost 0.4200"
    )


def test_calls_text_shows_the_cost_only_when_reported() -> None:
    assert "cost" not in summary.calls_text(RunProgress(calls=3))
    assert summary.calls_text(RunProgress(calls=1, cost=0.00021)) == "1 call, cost 0.00021"


def test_settings_omit_fields_shown_elsewhere() -> None:
    given = record(RunLifecycle.OPEN, config={"version": "1", "key": "id", "output": "82a46b"})
    assert summary.settings(given) == [("version", "1")]


# -- next steps ----------------------------------------------------------------------------------


def record(status: RunLifecycle, **more: object) -> RunRecord:
    return RunRecord(run_id="r1", name="two words", status=status, size=10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("status", list(RunLifecycle))
def test_next_steps_exist_for_every_status(status: RunLifecycle, live: bool) -> None:
    assert summary.next_steps(record(status), RunProgress(), live=live)


def test_next_steps_quote_commands_for_the_shell() -> None:
    progress = RunProgress(ended=[9, 0, 1, 0])
    failed_command, retry_command = summary.next_steps(
        record(RunLifecycle.FINISHED), progress, store="./my data"
    )
    assert failed_command.endswith("holdfast runs failed 'two words' --store './my data'")
    assert retry_command.endswith("holdfast runs retry 'two words' --store './my data'")


def test_next_steps_of_a_halted_run_show_the_reason() -> None:
    why, _ = summary.next_steps(record(RunLifecycle.HALTED, halted="seq 7"), RunProgress())
    assert "seq 7" in why


def test_next_steps_depend_on_whether_a_driver_is_running() -> None:
    [step] = summary.next_steps(record(RunLifecycle.OPEN), RunProgress())
    assert "run the stage again" in step
    [step] = summary.next_steps(record(RunLifecycle.OPEN), RunProgress(), live=True)
    assert "cancel" in step
