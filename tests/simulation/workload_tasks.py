"""Actors of tasks: misbehaving submitters, workers and operators.

A worker runs no code: it delays and then reports an outcome drawn from the tape, at times late,
twice, or under a lease it never had. After faults have stopped it completes every task it is
granted.
"""

from __future__ import annotations

from typing import Any

from holdfast.clock import MS, S
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Invalid,
    KeyConflict,
    NotFound,
    StoreFull,
    StoreReplaced,
)
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.row_decoder_tasks import UNIVERSE
from holdfast.sim.settings import LEASE_NS, SimulationSettings
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import checkpoint
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import QueueLimits, TaskSpec, keys_of
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    HeldLease,
    TaskGrant,
    TaskReport,
    TaskToSubmit,
)
from holdfast.tasks.row_ranges import decode_range, load_expiry_batch

STORE_ERRORS = (CommitUnknown, StoreFull, Conflict)
QUEUES = ("a", "b")
NAMES = ("work", "play")
LARGE = b"." * 5000
# More than there is ever to expire: the model assumes complete sweeps.
SWEEP = 1000
_KEYS = keys_of(UNIVERSE)


def task_actors(settings: SimulationSettings) -> list[Actor]:
    return [
        *(TaskSubmitter(f"submitter{n}") for n in range(settings.senders)),
        *(TaskWorkerActor(f"taskworker{n}") for n in range(1 + settings.workers)),
        *(TaskOperator(f"taskkeeper{n}") for n in range(settings.operators)),
    ]


class TaskSubmitter(Actor):
    """Submits tasks of every kind. It resends keyed submissions of unknown outcome."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.seqs: list[int] = []
        # A keyed submission without an answer. It must be resent until answered.
        self.unacknowledged: tuple[TaskSpec, list[TaskToSubmit]] | None = None

    def is_idle(self) -> bool:
        return self.unacknowledged is None

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                if self.unacknowledged is not None:
                    self._send(incarnation, *self.unacknowledged)
                elif not incarnation.faults_stopped:
                    self._send(incarnation, *self._draw_submission(incarnation))
            except STORE_ERRORS:
                incarnation.pause(ms=50)
            except KeyConflict:
                incarnation.count_coverage("task: key refused")
                self.unacknowledged = None
            except (NotFound, tasks.CyclicDependency):
                # The dependency was deleted or, after a restore, never existed.
                incarnation.count_coverage("task: after one that is none")
                self.unacknowledged = None
            except StoreReplaced:
                incarnation.store.reopen()
                # Its numbers may belong to the life of the store that the restore discarded.
                self.seqs, self.unacknowledged = [], None
            incarnation.pause(ms=400)

    def _send(self, incarnation: Incarnation, spec: TaskSpec, new: list[TaskToSubmit]) -> None:
        keyed = all(one.key for one in new)
        self.unacknowledged = (spec, new) if keyed else None
        found: list[int] = incarnation.store.transact(tasks.submit, UNIVERSE, spec, new)
        self.unacknowledged = None
        self.seqs = [*self.seqs, *found][-12:]

    def _draw_submission(self, incarnation: Incarnation) -> tuple[TaskSpec, list[TaskToSubmit]]:
        tape = incarnation.tape
        self.sent += 1
        spec = TaskSpec(
            NAMES[tape.draw(2)],
            queue=QUEUES[tape.draw(2)],
            priority=tape.draw(3),
            lease_ns=(LEASE_NS, LEASE_NS // 2)[tape.draw(2)],
            attempts=1 + tape.draw(3),
            expiries_max=1 + tape.draw(3),
            window_ns=(4 * LEASE_NS, LEASE_NS)[tape.draw(2)],
            retain_ns=(3600 * S, 2 * S, 0)[tape.draw(3)],
            backoff_ns=200 * MS,
            backoff_ns_max=S,
            kind=tape.draw(3),
        )
        if tape.chance(400):
            # Equal except for their arguments: stored as a row range.
            count = 1 + tape.draw(8)
            return spec, [
                TaskToSubmit(f"{self.name}/{self.sent}/{n}".encode()) for n in range(count)
            ]
        new = []
        keyed = tape.chance(300)
        for n in range(1 + tape.draw(4)):
            after: tuple[int, ...] = ()
            if self.seqs and tape.chance(250):
                after = (tape.pick(self.seqs),)
            if n and tape.chance(250):
                after += (-1 - tape.draw(n),)
            args = LARGE if tape.chance(50) else f"{self.name}/{self.sent}/{n}".encode()
            key = f"{self.name}/{self.sent}/{n}" if keyed else ""
            if tape.chance(100):
                key = f"shared{tape.draw(2)}"
            limit = ("", "", "x", "y")[tape.draw(4)]
            delay_ns = (0, 0, 0, 500 * MS, 2 * S)[tape.draw(5)]
            new.append(TaskToSubmit(args, delay_ns, key, limit, after))
        return spec, new


class TaskWorkerActor(Actor):
    """Leases and reports in turns. It may report forgotten grants too late."""

    def run_process(self, incarnation: Incarnation) -> None:
        me = f"{self.name}/{incarnation.incarnation_id}"
        grants: list[TaskGrant] = []
        late: list[tuple[int, TaskGrant]] = []
        reports: list[TaskReport] = []
        generation = incarnation.store.generation
        alone = False
        while True:
            tape = incarnation.tape
            queues = (
                list(QUEUES)
                if incarnation.faults_stopped or tape.chance(600)
                else [QUEUES[tape.draw(2)]]
            )
            try:
                if late and (tape.chance(200) or late[0][0] != generation):
                    self._report_late(incarnation, me, late)
                # At times it simulates another release that knows only one task name.
                known = (
                    () if incarnation.faults_stopped or tape.chance(700) else (NAMES[tape.draw(2)],)
                )
                request = GrantRequest(me, queues, 1 + tape.draw(5), alone, names=known)
                if reports and tape.chance(300):
                    incarnation.store.transact(
                        tasks.apply_reports, UNIVERSE, me, generation, reports
                    )
                    reports = []
                result = incarnation.store.transact(
                    tasks.report_and_lease, UNIVERSE, generation, reports, request
                )
                reports = []
                grants = result.leased.grants
                alone = result.leased.suspects or tape.chance(200)
                if grants:
                    reports, forgotten = self._work(incarnation, grants, generation)
                    late += [(generation, grant) for grant in forgotten]
            except CommitUnknown:
                # It may hold leases that it does not know. They expire.
                incarnation.count_coverage("task: turn of unknown outcome")
            except (StoreFull, Conflict):
                pass
            except StoreReplaced:
                incarnation.store.reopen()
                late += [(generation, grant) for grant in grants]
                generation, reports = incarnation.store.generation, []
            incarnation.pause(ms=150 if grants else 300)

    def _work(
        self, incarnation: Incarnation, grants: list[TaskGrant], generation: int
    ) -> tuple[list[TaskReport], list[TaskGrant]]:
        tape = incarnation.tape
        if incarnation.faults_stopped:
            return [
                TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, b"done") for grant in grants
            ], []
        reports: list[TaskReport] = []
        forgotten: list[TaskGrant] = []
        if tape.chance(200):
            incarnation.sleep((LEASE_NS // 4) * (1 + tape.draw(8)))
        if tape.chance(400):
            holds = [HeldLease(grant.seq, grant.lease, tape.chance(500)) for grant in grants]
            incarnation.store.transact(tasks.extend, UNIVERSE, generation, holds)
            incarnation.pause(ms=LEASE_NS // MS // 2)
        for grant in grants:
            end = (
                AttemptOutcome.OK,
                AttemptOutcome.OK,
                AttemptOutcome.OK,
                AttemptOutcome.FAILED,
                AttemptOutcome.FAILED,
                *AttemptOutcome,
            )[tape.draw(10)]
            result = b"" if end else b"done %d" % (grant.seq % 3)
            report = TaskReport(grant.seq, grant.lease, end, result, "", "no luck")
            fate = tape.draw(20)
            if fate == 19:
                forgotten.append(grant)
                continue
            if fate == 18:
                reports += [report, report]
            elif fate == 17:
                wrong = grant.lease + (1, -1)[tape.draw(2)]
                reports.append(TaskReport(grant.seq, wrong, end))
                forgotten.append(grant)
            elif fate == 16:
                reports += [
                    report,
                    TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, b"another"),
                ]
            else:
                reports.append(report)
        if tape.chance(60):
            reports.append(TaskReport(tape.draw(200), 1 + tape.draw(50)))
        return reports, forgotten

    def _report_late(
        self, incarnation: Incarnation, me: str, late: list[tuple[int, TaskGrant]]
    ) -> None:
        generation, grant = late.pop(0)
        if incarnation.tape.chance(500):
            hold = HeldLease(grant.seq, grant.lease, True)
            incarnation.store.transact(tasks.extend, UNIVERSE, generation, [hold])
        report = TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, b"late")
        [answer] = incarnation.store.transact(
            tasks.apply_reports, UNIVERSE, me, generation, [report]
        )
        if answer == tasks.ReportAnswer.CANCELLED:
            incarnation.count_coverage("task: late worker told")
        if generation != incarnation.store.generation:
            incarnation.count_coverage("task: worker of another generation")


class TaskOperator(Actor):
    """Cancels, redrives, limits, expires and checkpoints tasks."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                self._step(incarnation, incarnation.tape.draw(10))
            except STORE_ERRORS:
                pass
            except NotFound:
                incarnation.count_coverage("task: forgotten before it was cancelled")
            except Invalid:
                incarnation.count_coverage("task: not to be redriven")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=500)

    def _step(self, incarnation: Incarnation, choice: int) -> None:
        tape, store = incarnation.tape, incarnation.store
        if choice < 3:
            store.transact(tasks.maintain, UNIVERSE, SWEEP)
        elif choice == 3:
            if checkpoint.create(store, UNIVERSE):
                incarnation.count_coverage("task: checkpoint made")
        elif incarnation.faults_stopped:
            store.transact(tasks.maintain, UNIVERSE, SWEEP)
        elif choice < 6:
            seqs = (
                self._next_ready(incarnation)
                if tape.chance(400)
                else self._random_tasks(incarnation)
            )
            if seqs:
                store.transact(tasks.cancel, UNIVERSE, seqs)
        elif choice < 8:
            seqs = self._random_tasks(incarnation)
            if seqs:
                store.transact(tasks.redrive, UNIVERSE, seqs[:1])
        elif choice == 8:
            limits = QueueLimits((0, 0, 2, 1)[tape.draw(4)], (1, 1, 2, 0)[tape.draw(4)])
            store.transact(tasks.set_limits, UNIVERSE, QUEUES[tape.draw(2)], limits)
        else:
            # A lease that ends unthrottles a task. Cancel that task before a worker leases it.
            running = self._leased_tasks(incarnation)
            if running:
                store.transact(tasks.cancel, UNIVERSE, running)
            seqs = self._next_ready(incarnation)
            if seqs:
                store.transact(tasks.cancel, UNIVERSE, seqs)

    def _next_ready(self, incarnation: Incarnation) -> list[int]:
        """Some tasks that are next in the ready index."""
        rows: Any = incarnation.store.read(
            lambda txn: [
                *txn.scan(_KEYS.ready, _KEYS.ready + b"\xff", 20),
                *txn.scan(_KEYS.fair, _KEYS.fair + b"\xff", 20),
            ]
        )
        ready = sorted((tuples.unpack(key)[3:6], *decode_range(row)) for key, row in rows)
        found = [seq for _, first, last in ready[:20] for seq in range(first, last + 1)]
        return sorted(seq for seq in found[:20] if incarnation.tape.chance(300))

    def _leased_tasks(self, incarnation: Incarnation) -> list[int]:
        def read(txn: Txn) -> list[int]:
            rows = txn.scan(_KEYS.expiries, _KEYS.expiries + b"\xff", 20)
            return sorted(
                {seq for key, row in rows for seq in load_expiry_batch(txn, _KEYS, key, row)[1]}
            )

        found: Any = incarnation.store.read(read)
        return list(found[:3])

    def _random_tasks(self, incarnation: Incarnation) -> list[int]:
        last: Any = incarnation.store.read(lambda txn: txn.count(_KEYS.seq_counter))
        if not last:
            return []
        # Mostly recent tasks, which have not ended.
        first = max(0, last - 12) if incarnation.tape.chance(700) else 0
        count = 1 + incarnation.tape.draw(3)
        return sorted({first + 1 + incarnation.tape.draw(last - first) for _ in range(count)})
