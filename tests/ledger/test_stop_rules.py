"""Stop rules: the counts that stop a run, and their replay from the log."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.events import FinishedRange, StopRuleReached
from holdfast.ledger.replies import NoMoreRows, RowGrant
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.run_state import RunCheckpoint
from holdfast.ledger.stop_rules import ERRORS_KEPT, StopRules, add_errors
from tests.ledger.scheduler_rig import FAILED, OK, SchedulerRig

INPUT, TRANSIENT = int(ErrorClass.INPUT), int(ErrorClass.TRANSIENT)


class StopRulesRig:
    """A scheduler rig with stop rules that ends rows one by one."""

    def __init__(self, size: int = 100, **rules: Any) -> None:
        self.scheduler_rig = SchedulerRig(size, stop_rules=StopRules(**rules))
        self.scheduler = self.scheduler_rig.scheduler

    def end_row(
        self, grant: RowGrant, seq: int, code: int, text: str = "", kind: int = INPUT
    ) -> Any:
        report_no = self.scheduler_rig._report_numbers.get(grant.epoch, 0) + 1
        self.scheduler_rig._report_numbers[grant.epoch] = report_no
        done = [FinishedRange(seq, seq + 1, code, 0 if code == OK else kind)]
        begin = [(seq + 50, seq + 51)] if seq + 50 < self.scheduler.size else []
        return self.scheduler_rig.log_decision(
            self.scheduler.report(
                grant.epoch, report_no, b"%d" % report_no, done=done, begin=begin, now_ns=self.scheduler_rig.now_ns,
                errors={seq: text},
            )
        )  # fmt: skip

    def check_replay(self) -> None:
        again = RunScheduler.replay(self.scheduler_rig.log)
        assert again.dump() == self.scheduler.dump()
        assert again.stopped == self.scheduler.stopped
        loaded = RunScheduler.load(self.scheduler.dump())
        assert loaded.dump() == self.scheduler.dump()
        assert loaded.stop_tally() == self.scheduler.stop_tally()


def test_failures_rule_stops_a_run_and_begun_rows_end() -> None:
    rig = StopRulesRig(failures=3)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    assert [rig.end_row(grant, at, FAILED).stop for at in range(2)] == ["", ""]
    accepted = rig.end_row(grant, 2, FAILED)
    # The report that reaches the bound begins no row.
    assert (accepted.stop, accepted.begun) == ("stopped", False)
    assert rig.scheduler.stopped is not None
    assert rig.scheduler.stopped.why == "3 rows failed (failures=3)"
    assert rig.scheduler_rig.claim("other") == NoMoreRows("stopped")
    # 50 rows by the claim, two by the earlier reports.
    assert rig.scheduler.ledger.in_flight_count == 49
    for at in range(3, 52):
        assert rig.end_row(grant, at, OK).stop == "stopped"
    assert rig.scheduler.ledger.in_flight_count == 0
    assert sum(isinstance(entry, StopRuleReached) for entry in rig.scheduler_rig.log) == 1
    rig.check_replay()


def test_resume_resets_the_stop_counts() -> None:
    rig = StopRulesRig(failures=3)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    for at in range(3):
        rig.end_row(grant, at, FAILED)
    rig.scheduler_rig.log += rig.scheduler.resume(rig.scheduler_rig.now_ns)
    assert rig.scheduler.stopped is None
    assert rig.scheduler.stop_tally() == (0, 0, 0.0)
    assert rig.end_row(grant, 3, FAILED).stop == ""
    assert rig.end_row(grant, 4, FAILED).stop == ""
    assert rig.end_row(grant, 5, FAILED).stop == "stopped"
    rig.check_replay()


def test_share_rule_applies_after_enough_rows_ended() -> None:
    rig = StopRulesRig(share=0.5, of=10)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    for at in range(9):
        assert rig.end_row(grant, at, FAILED if at < 5 else OK).stop == ""
    assert rig.end_row(grant, 9, OK).stop == "stopped"
    assert rig.scheduler.stopped is not None
    assert rig.scheduler.stopped.why == "5 of 10 rows failed, 50.0% (share=0.5, of=10)"
    rig.check_replay()


def test_retried_failure_does_not_count_for_a_stop_rule() -> None:
    rig = StopRulesRig(failures=1)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    assert rig.end_row(grant, 0, FAILED, kind=TRANSIENT).stop == ""
    assert rig.scheduler.stopped is None


def test_same_error_rule_counts_by_class_and_normalised_text() -> None:
    rig = StopRulesRig(same_error=3)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    for at in range(2):
        assert rig.end_row(grant, at, FAILED, f"Error: no user {at}").stop == ""
        assert rig.end_row(grant, 10 + at, FAILED, f"Error: no file '{at}'").stop == ""
    # Another class is another error.
    assert rig.end_row(grant, 20, FAILED, "Error: no user 7", int(ErrorClass.SCHEMA)).stop == ""
    rig.check_replay()
    assert rig.end_row(grant, 30, FAILED, "Error: no user 9").stop == "stopped"
    assert rig.scheduler.stopped is not None
    assert rig.scheduler.stopped.why == (
        "3 rows failed with the same error, input: Error: no user <n> (same_error=3)"
    )
    rig.check_replay()


def test_cost_rule_stops_a_run() -> None:
    rig = StopRulesRig(cost=1.0)
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    rig.scheduler_rig.log += rig.scheduler.add_cost(0.6, rig.scheduler_rig.now_ns)
    assert rig.end_row(grant, 0, OK).stop == ""
    rig.scheduler_rig.log += rig.scheduler.add_cost(0.5, rig.scheduler_rig.now_ns)
    assert rig.scheduler.stopped is not None
    assert rig.scheduler.stopped.why == "the calls cost 1.1 (cost=1)"
    assert rig.end_row(grant, 1, OK).stop == "stopped"
    rig.check_replay()


def test_rows_lost_by_expired_grants_count_for_a_stop_rule() -> None:
    rig = SchedulerRig(10, attempts_max=1, stop_rules=StopRules(same_error=3))
    rig.grant_begun(rows=5)
    rig.expire_leases()
    assert rig.scheduler.stopped is not None
    assert rig.scheduler.stopped.why.startswith("5 rows failed with the same error")
    assert RunScheduler.replay(rig.log).dump() == rig.scheduler.dump()


def test_last_row_of_a_run_triggers_no_stop_rule() -> None:
    rig = StopRulesRig(1, failures=1)
    grant = rig.scheduler_rig.grant(rows=1, begin=1)
    rig.end_row(grant, 0, FAILED)
    assert rig.scheduler.finished
    assert rig.scheduler.stopped is None


def test_run_without_stop_rules_logs_no_stop_entries() -> None:
    rig = StopRulesRig()
    grant = rig.scheduler_rig.grant(rows=100, begin=50)
    rig.end_row(grant, 0, FAILED, "x")
    assert rig.scheduler.add_cost(5.0, 1) == []
    assert rig.scheduler.resume(1) == []
    assert [type(entry).__name__ for entry in rig.scheduler_rig.log] == [
        "RunOpened",
        "RowsGranted",
        "RowsReported",
    ]


def test_add_errors_keeps_a_bounded_number_of_errors() -> None:
    counts: dict[int, int] = {-1: 5}
    for at in range(ERRORS_KEPT + 10):
        counts = add_errors(counts, [(at, 1)])
    assert len(counts) <= ERRORS_KEPT
    assert counts[-1] == 5


def test_checkpoint_of_an_older_version_can_be_loaded() -> None:
    rig = SchedulerRig(10)
    fields = codec.unpack(rig.scheduler.dump())
    older = codec.pack(fields[:17])
    assert RunScheduler.load(older).dump() == rig.scheduler.dump()
    assert codec.pack(codec.unpack_as(RunCheckpoint, older)) == rig.scheduler.dump()


@pytest.mark.parametrize("rules", [{"failures": -1}, {"share": 1.5}, {"cost": -0.1}])
def test_invalid_stop_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        StopRules(**rules)
