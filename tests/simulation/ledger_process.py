"""Process of a ledger service in the simulator: the shipped core and log, and connections to them.

`RunService` and `GroupLog` are those of `ledger.service`. As in the Spark service, a request is
decided in the thread of the task that sends it, while the writer may be in the middle of a commit.
The reply is sent when the request's ticket is settled. Decisions contain no yield point, so no lock
is needed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from holdfast.ledger import runs
from holdfast.ledger.log import RunLog
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.runs import RunRecord
from holdfast.ledger.service import group_log
from holdfast.ledger.service.group_log import GroupLog, LogCommit
from holdfast.ledger.service.handlers import RunService
from holdfast.ledger.service.messages import Exchange
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.waiting_claims import PendingReply
from holdfast.sim.actor import Incarnation
from holdfast.sim.run_parameters import RowBehaviour, RunParameters
from holdfast.sim.scheduler import SimThread
from holdfast.store.api import Txn

# Interval at which a task that waits for a reply checks that the service process is alive.
LIVENESS_CHECK_NS = 400_000_000


class ConnectionLost(Exception):
    """The connection broke. The request may or may not have been processed."""


class SimTicket(group_log.DecisionTicket):
    """Wakes the task that waits for the commit of its decision."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting_thread: SimThread | None = None

    def wake(self) -> None:
        if self.waiting_thread is not None:
            self.waiting_thread.wake_ns = 0


class LedgerProcess:
    """One process of the service, from acquiring the run to its end."""

    def __init__(
        self,
        incarnation: Incarnation,
        parameters: RunParameters,
        record: RunRecord,
        log: RunLog,
        scheduler: RunScheduler,
    ) -> None:
        self.incarnation = incarnation
        self.record = record
        self.log = log
        self.alive = True
        group = GroupLog(
            log.append, log.next_height - 1, self._enqueued, parameters.checkpoint_entries
        )
        self.service = RunService(
            record.run_id, scheduler, group, RunMetrics(incarnation.store.now_ns())
        )
        self._writer_thread = incarnation.scheduler.current
        self._commit: LogCommit | None = None
        # Tickets of tasks that wait for a reply.
        self._tickets: set[SimTicket] = set()

    @property
    def scheduler(self) -> RunScheduler:
        return self.service.scheduler

    @property
    def pending(self) -> bool:
        return self.service.log.pending > 0

    def close(self) -> None:
        """End the process. All connections to it break."""
        self.alive = False
        for ticket in self._tickets:
            ticket.wake()

    # -- for tasks -----------------------------------------------------------------------------

    def exchange(
        self, incarnation: Incarnation, owner: str, step: Exchange, data: bytes
    ) -> PendingReply:
        """Send a request and return its reply. ConnectionLost: the process or its log failed before the
        reply."""
        scheduler = self.scheduler
        if any(scheduler.is_report_known(move.epoch, move.report_no) for move in step.reports):
            incarnation.count_coverage("ledger: report sent again")
        self.service.connected_owners.add(owner)
        ticket = SimTicket()
        now_ns = self.incarnation.store.now_ns()
        waiting = len(self.service.waiting)
        decision = self.service.submit(owner, step, memoryview(data), now_ns, ticket)
        if len(self.service.waiting) > waiting:
            incarnation.count_coverage("ledger: claim waits at the service")
        self._wait(incarnation, ticket)
        if decision.failure is not None:
            raise decision.failure
        if any(moved.lost for moved in decision.reply.report_replies):
            incarnation.count_coverage("ledger: report fenced")
        return decision.reply

    def _wait(self, incarnation: Incarnation, ticket: SimTicket) -> None:
        self._tickets.add(ticket)
        try:
            while not ticket.settled:
                if not self.alive:
                    raise ConnectionLost
                ticket.waiting_thread = incarnation.scheduler.current
                incarnation.sleep(LIVENESS_CHECK_NS)
        finally:
            self._tickets.discard(ticket)
        if ticket.error is not None:
            raise ConnectionLost

    def heartbeat(self, incarnation: Incarnation, epoch: int) -> bool:
        """Send a heartbeat. False if the grant is lost."""
        now_ns = self.incarnation.store.now_ns()
        if self.service.heartbeat([epoch], now_ns):
            return False
        service = f"{self.incarnation.name}/{self.incarnation.incarnation_id}"
        incarnation.record("ledger.beat", run=self.record.run_id, epoch=epoch,
                  expires_ns=now_ns + self.scheduler.policy.lease_ns, service=service)  # fmt: skip
        return True

    def on_disconnect(self, owner: str) -> None:
        """Handle a closed connection."""
        if self.alive:
            self.service.on_disconnect(owner, self.incarnation.store.now_ns())

    # -- for the service
    # -----------------------------------------------------------------------------

    def start(self, *, same_driver: bool) -> None:
        now_ns = self.incarnation.store.now_ns()
        self.service.continue_from_log(self.record.policy, now_ns, same_driver=same_driver)

    def tick(self) -> None:
        self.service.tick(self.incarnation.store.now_ns())

    def cancel(self) -> None:
        if self.scheduler.halted is None:
            self.service.cancel(self.incarnation.store.now_ns())

    def record_committed(self, upto: int) -> None:
        """Record that rows below `upto` are in the sink."""
        self.service.mark_committed(upto, self.incarnation.store.now_ns())

    def flush(self) -> None:
        """Write until all decisions so far are durable."""
        while self.pending:
            self.write()

    def write(self) -> None:
        """Make one commit of the pending decisions. Raise the error that ends this process."""
        group, entries_max = self.service.log, None
        if (
            group.pending > 1
            and not self.incarnation.faults_stopped
            and self.incarnation.tape.chance(200)
        ):
            entries_max = 1 + self.incarnation.tape.draw(group.pending - 1)
        self._commit = commit = self.service.take_commit(entries_max)
        if commit.entries or commit.puts:
            # Only without other pending decisions does the run state equal the state after this
            # commit.
            dump = None if group.pending else self.scheduler.dump()
            self._record_state("ledger.live", self.log.next_height - 1 + len(commit.entries), dump)
        error = group.write_commit(commit)
        self._commit = None
        self.service.settle_commit(commit, error)
        if group.error is not None:
            raise group.error

    def record_opened(self) -> None:
        """Record the state rebuilt from the log."""
        self._record_state("ledger.opened", self.service.log.height, self.scheduler.dump())

    # -- internals
    # -----------------------------------------------------------------------------------

    def _enqueued(self, _: bool) -> None:
        if self._writer_thread is not None and self._commit is None:
            self._writer_thread.wake_ns = 0

    def _record_state(self, op: str, height: int, dump: bytes | None) -> None:
        if dump is None:
            self.incarnation.record(op, run=self.record.run_id, height=height)
            return
        ledger = self.scheduler.ledger
        self.incarnation.record(
            op,
            run=self.record.run_id,
            height=height,
            digest=hashlib.sha256(dump).hexdigest(),
            state=ledger.state.tobytes(),
            attempts=ledger.attempts.tobytes(),
            counts=ledger.counts(),
            counters=ledger.counters(),
            ended=list(ledger.ended),
            prefix=self.scheduler.terminal_prefix(),
        )


class LedgerEnvironment:
    """State outside the store that survives every process: the service address, the sink, the row
    behaviours."""

    def __init__(self, parameters: RunParameters) -> None:
        self.parameters = parameters
        self.processes: dict[str, LedgerProcess] = {}
        self.current_process: LedgerProcess | None = None
        self.behaviours: dict[str, list[RowBehaviour]] = {}
        self.versions: dict[str, int] = {}
        self.calls = 0
        self.runs = 0
        self.is_finished = False

    def version(self, run_id: str) -> int:
        """The last version in the sink. -1 if there is none."""
        return self.versions.get(run_id, -1)

    def behaviour(self, run_id: str, seq: int) -> RowBehaviour:
        behaviours = self.behaviours.get(run_id)
        return behaviours[seq] if behaviours else RowBehaviour.FINE


def results_between(
    txn: Txn, run_id: str, lo: int, hi: int, page_rows: int
) -> list[tuple[int, str]]:
    """Return the results of a final interval, in order, for the sink's commit."""
    results: list[Any] = []
    for page in range(lo // page_rows, (hi - 1) // page_rows + 1):
        for _, chunk in runs.list_chunks(txn, run_id, page):
            results += msgspec.msgpack.decode(chunk.batch) if chunk.batch else []
    return sorted((seq, value) for seq, value in results if lo <= seq < hi)
