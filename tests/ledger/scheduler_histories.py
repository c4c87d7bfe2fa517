"""Random histories of a run scheduler: the actions of workers, a clock, a driver and a committer.

A step is a small tuple of numbers. Its meaning depends on the state of the scheduler, so every list of steps is a
valid history and hypothesis can shrink it. `InvariantChecker` checks the invariants of the scheduler after each
step against its own simple model.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from holdfast.clock import S
from holdfast.errors import Fenced
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.replies import AllRowsFinal, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_scheduler import RunScheduler
from tests.ledger.scheduler_rig import LEASE_NS, SchedulerRig

CLASSES = [1, 2, 3, 4, 5, 6]
OWNERS = ["a", "b", "c"]

HistoryStep = tuple[str, int, int]

# A cancellation rules out most of the later steps, so it is rare.
STEP_KINDS = (
    ["claim"] * 6 + ["begin"] * 4 + ["done"] * 8 + ["sleep"] * 2 + ["commit"] * 2 + ["repeat"]
    + ["expire", "drop", "give_back", "heartbeat", "stale", "crash", "restart"]
)  # fmt: skip
STEPS: st.SearchStrategy[list[HistoryStep]] = st.lists(
    st.tuples(st.sampled_from(STEP_KINDS), st.integers(0, 1000), st.integers(0, 1000)),
    max_size=60,
)
ENDINGS: st.SearchStrategy[list[HistoryStep]] = st.lists(
    st.tuples(
        st.sampled_from(["cancel", "claim", "begin", "done", "sleep", "end_grace", "expire"]),
        st.integers(0, 1000),
        st.integers(0, 1000),
    ),
    max_size=12,
)
POLICIES = st.fixed_dictionaries(
    {
        "attempts_max": st.integers(1, 4),
        "retries_max": st.sampled_from([0, 0, 3, 10]),
        "page_rows": st.sampled_from([4, 8, 64]),
        "batch_rows": st.sampled_from([0, 0, 4]),
        "ahead_rows_max": st.sampled_from([0, 0, 6]),
        "backoff_first_ns": st.sampled_from([0, S]),
    }
)
SIZES = st.integers(0, 30)


class SchedulerHistory(SchedulerRig):
    """A scheduler rig that executes steps. `dumps_by_height` maps each log height to the dump at that height."""

    def __init__(self, size: int, **policy: Any) -> None:
        super().__init__(size, **policy)
        self.dumps_by_height: dict[int, bytes] = {}
        self._last_report: tuple[int, int, bytes, list[FinishedRange], Any] | None = None
        self._checker = InvariantChecker(size)

    def run(self, steps: list[HistoryStep]) -> None:
        for kind, a, b in steps:
            getattr(self, f"_{kind}")(a, b)
            self.dumps_by_height[len(self.log)] = self.scheduler.dump()
            self._checker.check(self.scheduler)

    def finish_all(self, rounds: int = 400) -> None:
        """Run steady workers until the run is finished."""
        for _ in range(rounds):
            self.log_decision(self.scheduler.expire(self.now_ns))
            self.log_decision(self.scheduler.end_cancel_grace(self.now_ns))
            answer = self.claim("steady", 8, begin=8)
            match answer:
                case AllRowsFinal():
                    break
                case NoMoreRows():
                    if self.scheduler.finished:
                        break
                    self.now_ns = self.scheduler.next_due_ns() or self.now_ns
                case NoRowsYet():
                    self.commit()
                    self.now_ns = max(self.now_ns, self.scheduler.next_due_ns() or 0)
                case RowGrant():
                    if answer.isolated:
                        self.report(answer, begin=[(p.lo, p.hi) for p in answer.ranges])
                    self.finish(answer)
        self.commit()
        self.dumps_by_height[len(self.log)] = self.scheduler.dump()
        self._checker.check(self.scheduler)

    def recover(self, scheduler: RunScheduler, height: int) -> None:
        """Continue from a restored scheduler. The crashed process may have had unlogged entries."""
        scheduler.renew_all_grants(self.now_ns)
        self.scheduler, self.log = scheduler, self.log[:height]
        self._report_numbers = {
            epoch: grant.last_report_no for epoch, grant in scheduler.grants.items()
        }
        self._last_report = None
        self._checker = InvariantChecker(scheduler.size)

    # -- steps ---------------------------------------------------------------------------------

    def _claim(self, a: int, b: int) -> None:
        lo, hi = 0, self.scheduler.size
        if a % 5 == 0 and hi:
            lo = b % hi
            hi = min(hi, lo + 1 + a % 7)
        self.claim(OWNERS[a % 3], 1 + b % 7, begin=b % 4, lo=lo, hi=hi)

    def _begin(self, a: int, b: int) -> None:
        grant = self._pick_grant(a)
        if grant is None or not grant.idle.rows:
            return
        lo, hi = list(grant.idle)[b % len(grant.idle)]
        self._send_report(grant.epoch, [], [(lo, min(hi, lo + 1 + b % 3))])

    def _done(self, a: int, b: int) -> None:
        grant = self._pick_grant(a)
        if grant is None or not grant.begun.rows:
            return
        lo, hi = list(grant.begun)[b % len(grant.begun)]
        code = (3, 3, 4, 5, 5)[b % 5]
        kind = CLASSES[a % len(CLASSES)] if code == 5 else 0
        delay_ns = S if a % 11 == 0 else 0
        done = [FinishedRange(lo, min(hi, lo + 1 + b % 3), code, kind, delay_ns)]
        begin = [next(iter(grant.idle))] if b % 7 == 0 and grant.idle.rows else []
        self._send_report(grant.epoch, done, begin)

    def _repeat(self, a: int, b: int) -> None:
        if self._last_report is None:
            return
        epoch, report_no, digest, done, accepted = self._last_report
        if epoch in self.scheduler.grants or epoch in self.scheduler.finished_grants:
            answer = self.scheduler.report(epoch, report_no, digest, done=done, now_ns=self.now_ns)
            assert answer == (accepted, [])

    def _stale(self, a: int, b: int) -> None:
        ended_epochs = [
            e for e in range(1, self.scheduler.epoch + 1) if e not in self.scheduler.grants
        ]
        ended_epochs = [
            epoch for epoch in ended_epochs if epoch not in self.scheduler.finished_grants
        ]
        if not ended_epochs:
            return
        try:
            self.scheduler.report(
                ended_epochs[a % len(ended_epochs)],
                1,
                b"stale",
                done=[FinishedRange(0, 1, 3)],
                now_ns=self.now_ns,
            )
        except Fenced:
            return
        raise AssertionError("a grant that is gone was heard")

    def _heartbeat(self, a: int, b: int) -> None:
        if (grant := self._pick_grant(a)) is not None:
            self.scheduler.heartbeat(grant.epoch, self.now_ns)

    def _sleep(self, a: int, b: int) -> None:
        self.now_ns += (a % 4) * S + (LEASE_NS if b % 5 == 0 else 0)

    def _expire(self, a: int, b: int) -> None:
        self.log_decision(self.scheduler.expire(self.now_ns))

    def _drop(self, a: int, b: int) -> None:
        self.log_decision(self.scheduler.reclaim_owner(OWNERS[a % 3], self.now_ns))

    def _give_back(self, a: int, b: int) -> None:
        if (grant := self._pick_grant(a)) is not None:
            self.log_decision(self.scheduler.reclaim_grant(grant.epoch, self.now_ns))

    def _commit(self, a: int, b: int) -> None:
        upto = self.scheduler.terminal_prefix()
        upto = max(upto - a % 3, 0)
        self.log_decision(self.scheduler.commit(upto, upto - 1, self.now_ns))

    def _cancel(self, a: int, b: int) -> None:
        self.log_decision(self.scheduler.cancel(self.now_ns))

    def _end_grace(self, a: int, b: int) -> None:
        self.log_decision(self.scheduler.end_cancel_grace(self.now_ns))

    def _crash(self, a: int, b: int) -> None:
        """Restart from the checkpoint or from the log, at a later time."""
        before = self.scheduler.dump()
        self.now_ns += b * S
        self.scheduler = RunScheduler.load(before) if a % 2 else RunScheduler.replay(self.log)
        self.scheduler.renew_all_grants(self.now_ns)
        assert self.scheduler.dump() == before

    def _restart(self, a: int, b: int) -> None:
        self.log_decision(self.scheduler.reclaim_all(self.now_ns))

    # -- inside --------------------------------------------------------------------------------

    def _pick_grant(self, a: int) -> Any:
        grants = list(self.scheduler.grants.values())
        return grants[a % len(grants)] if grants else None

    def _send_report(
        self, epoch: int, done: list[FinishedRange], begin: list[tuple[int, int]]
    ) -> None:
        accepted = self.report(epoch, *done, begin=begin)
        report_no = self._report_numbers[epoch]
        self._last_report = (epoch, report_no, b"%d" % report_no, done, accepted)


class InvariantChecker:
    def __init__(self, size: int) -> None:
        self._final = [False] * size
        self._ends = [-1] * size

    def check(self, scheduler: RunScheduler) -> None:
        ledger = scheduler.ledger
        states, attempts = ledger.state.tolist(), ledger.attempts.tolist()
        assert ledger.counts() == [states.count(code) for code in range(8)]
        # Every row is in exactly one set or grant.
        places = [""] * len(states)
        for name, ranges in (
            ("unseen", scheduler.unseen),
            ("free", scheduler.free),
            ("suspect", scheduler.suspects),
            ("resting", [(lo, hi) for _, lo, hi in scheduler.backoff_heap]),
        ):
            for lo, hi in ranges:
                for seq in range(lo, hi):
                    assert not places[seq], (seq, places[seq], name)
                    places[seq] = name
                    assert states[seq] == (0 if name == "unseen" else 1)
                    assert ledger.owner_epoch_of(seq) == 0
        for grant in scheduler.grants.values():
            assert grant.rows
            for code, ranges in ((1, grant.idle), (2, grant.begun)):
                for lo, hi in ranges:
                    for seq in range(lo, hi):
                        assert not places[seq], (seq, places[seq], grant.epoch)
                        places[seq] = "grant"
                        assert states[seq] == code
                        assert ledger.owner_epoch_of(seq) == grant.epoch
        # A final row keeps its end state. Rows are committed in order.
        for seq, state in enumerate(states):
            assert bool(places[seq]) == (state < 3)
            if self._final[seq]:
                assert state in (self._ends[seq], 7)
            elif state >= 3:
                self._final[seq], self._ends[seq] = True, state
            assert attempts[seq] < scheduler.policy.attempts_max
            assert (state == 7) == (seq < scheduler.next_commit)
        assert scheduler.terminal_prefix() == next(
            (seq for seq, state in enumerate(states) if state < 3), len(states)
        )
        assert sum(scheduler.ended) == sum(self._final) == ledger.final_count
        assert sum(attempts) == scheduler.retries
        if scheduler.policy.retries_max:
            assert scheduler.retries <= scheduler.policy.retries_max
