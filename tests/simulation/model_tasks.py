"""Model of tasks: an implementation of document 003 without product code.

It receives the applied operations with their times, arguments and answers, and reports wrong
answers. Facts that an answer does not determine (the jitter of a backoff, the moment of deletion
after retention) stay open in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]

WAITING, LEASED, COMPLETED, FAILED, DEAD = range(5)
OK, FAILURE, REFUSED, EXITED, RELEASED = range(5)
COMMITTED, CANCELLED, REJECTED = range(3)
# The kind that runs in its own process, so that its crash affects no other task.
PROCESS = 2


@dataclass(slots=True)
class TaskModel:
    spec: Plain
    args: bytes
    key: str = ""
    limit: str = ""
    waits: set[int] = field(default_factory=set)
    redrive_of: int = 0
    state: int = WAITING
    attempt: int = 0
    failures: int = 0
    expiries: int = 0
    lease: int = 0
    worker: str = ""
    expires_ns: int = 0
    progress_ns: int = 0
    # Earliest and latest time at which the backoff may end.
    not_before_ns: tuple[int, int] = (0, 0)
    ended_ns: int = 0
    redriven_by: int = 0
    leases: set[int] = field(default_factory=set)
    # A worker without this task name asked for work, so the task may have become unroutable.
    may_be_unroutable: bool = False

    @property
    def is_suspect(self) -> bool:
        last = 0 < self.expiries >= int(self.spec["expiries_max"]) - 1
        return last and self.spec["kind"] != PROCESS

    def has_live_lease(self, lease: int, now_ns: int) -> bool:
        return self.state == LEASED and self.lease == lease and now_ns < self.expires_ns


class TasksModel:
    def __init__(self) -> None:
        self.tasks: dict[int, TaskModel] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.limits: dict[str, Plain] = {}
        self.generation = 1
        self.seq = 0
        self.lease = 0
        # Number of rejected reports for each (task, lease).
        self.rejected_reports: dict[tuple[int, int], int] = {}

    def may_be_deleted(self, seq: int, now_ns: int) -> bool:
        task = self.tasks.get(seq)
        if task is None:
            return True
        return task.state > LEASED and now_ns >= task.ended_ns + task.spec["retain_ns"]

    def running(self, queue: str, limit: str | None = None) -> int:
        return sum(
            task.state == LEASED
            and task.spec["queue"] == queue
            and (limit is None or task.limit == limit)
            for task in self.tasks.values()
        )

    # -- operations ----------------------------------------------------------------------------

    def submit(self, now_ns: int, spec: Plain, new: list[Plain], seqs: list[int]) -> Findings:
        for index, (new_task, seq) in enumerate(zip(new, seqs, strict=True)):
            key = (spec["name"], new_task["key"])
            known = self.keys.get(key) if new_task["key"] else None
            if known is not None and seq == known:
                if self.tasks[known].args != new_task["args"]:
                    yield "I5", f"task {seq}: the key {key} with other arguments"
                continue
            if known is not None and not self.may_be_deleted(known, now_ns):
                yield "I4", f"the key {key} made task {seq} besides {known}"
            yield from self._check_number(seq)
            others = {other if other > 0 else seqs[-other - 1] for other in new_task["after"]}
            if any(-other - 1 >= index for other in new_task["after"] if other < 0):
                yield "S1", f"task {seq} waits for one that comes after it"
            task = self.tasks[seq] = TaskModel(
                spec, new_task["args"], new_task["key"], new_task["limit"]
            )
            due_ns = now_ns + new_task["delay_ns"] if new_task["delay_ns"] else 0
            task.not_before_ns = (due_ns, due_ns)
            if new_task["key"]:
                self.keys[key] = seq
            states = {other: self.tasks[other].state for other in others if other in self.tasks}
            task.waits = {other for other, state in states.items() if state < COMPLETED}
            if any(state in (FAILED, DEAD) for state in states.values()):
                task.waits = set()
                self._end(seq, DEAD, now_ns)

    def redrive(self, now_ns: int, olds: list[int], seqs: list[int]) -> Findings:
        for old, seq in zip(olds, seqs, strict=True):
            old_task = self.tasks[old]
            if old_task.redriven_by:
                if seq != old_task.redriven_by:
                    yield "S2", f"task {old} was redriven twice"
                continue
            if old_task.state not in (FAILED, DEAD):
                yield "S1", f"task {old} was redriven, but had not failed"
            yield from self._check_number(seq)
            self.tasks[seq] = TaskModel(
                old_task.spec, old_task.args, old_task.key, old_task.limit, redrive_of=old
            )
            old_task.redriven_by = seq
            if old_task.key:
                self.keys[old_task.spec["name"], old_task.key] = seq

    def _check_number(self, seq: int) -> Findings:
        if seq != self.seq + 1:
            yield "D2", f"task {seq} after {self.seq}: a number assigned twice or skipped"
        self.seq = max(self.seq, seq)

    def expire_overdue(self, now_ns: int) -> None:
        """Expire all overdue leases. Every decision does this first."""
        for seq, task in list(self.tasks.items()):
            if task.state == LEASED and task.expires_ns <= now_ns:
                task.expiries += 1
                self._set_waiting(task)
                if task.expiries >= task.spec["expiries_max"]:
                    self._end(seq, DEAD, now_ns)

    def check_grants(self, now_ns: int, asked: Plain, grants: list[Plain]) -> Findings:
        """Check the grants of one decision, after its sweep."""
        names = asked.get("names")
        for other in self.tasks.values():
            if names and other.spec["queue"] in asked["queues"] and other.spec["name"] not in names:
                other.may_be_unroutable = True
        must_grant = self._must_be_granted(now_ns, asked)
        first = self.lease
        for grant in grants:
            task = self.tasks.get(grant["seq"])
            if task is None:
                yield "S1", f"task {grant['seq']} was granted, but does not exist"
                continue
            yield from self._check_grant(now_ns, asked, grant, task, first)
        for queue in asked["queues"]:
            most = self.limits.get(queue, {}).get("concurrency", 0)
            if most and any(g["queue"] == queue for g in grants) and self.running(queue) > most:
                yield "A3", f"{self.running(queue)} of {queue} are leased, {most} may be"
        suspects = [grant for grant in grants if grant["suspect"]]
        if suspects and (len(grants) > 1 or not asked["alone"]):
            yield "L1", f"task {suspects[0]['seq']} is suspect, but was granted beside others"
        if must_grant and not suspects:
            ranks = [self._queue_rank(asked, grant["seq"]) for grant in grants]
            full = len(grants) >= asked["limit"]
            for seq in must_grant:
                if self.tasks[seq].state == WAITING:
                    if not full or max(ranks) > self._queue_rank(asked, seq):
                        yield "A4", f"task {seq} was next to be granted, but was not"

    def _check_grant(
        self, now_ns: int, asked: Plain, grant: Plain, task: TaskModel, first: int
    ) -> Findings:
        seq, lease = grant["seq"], grant["lease"]
        if task.state == LEASED:
            yield "L1", f"task {seq} was granted while lease {task.lease} held"
        elif task.state != WAITING or task.waits:
            yield "S1", f"task {seq} was granted, but was not waiting"
        if asked.get("names") and grant["name"] not in asked["names"]:
            yield "S1", f"task {seq} was granted to a worker without {grant['name']}"
        task.may_be_unroutable = False
        if now_ns < task.not_before_ns[0]:
            yield "T1", f"task {seq} was granted before its time"
        if lease <= first or lease in task.leases:
            yield "L2", f"task {seq} was granted lease {lease} after {first}"
        if grant["attempt"] != task.attempt + 1:
            yield "S3", f"task {seq}: attempt {grant['attempt']} after {task.attempt}"
        if (grant["args"], grant["queue"]) != (task.args, task.spec["queue"]):
            yield "J5", f"task {seq} was granted with other arguments than it was given"
        if grant["suspect"] != task.is_suspect:
            yield "L1", f"task {seq} was granted as suspect: {grant['suspect']}"
        task.state, task.attempt, task.lease = LEASED, task.attempt + 1, lease
        task.leases.add(lease)
        task.worker, task.progress_ns = asked["worker"], now_ns
        task.expires_ns = now_ns + task.spec["lease_ns"]
        task.not_before_ns = (0, 0)
        if grant["expires_ns"] != task.expires_ns:
            yield "L4", f"task {seq}: its lease ends at {grant['expires_ns']}"
        self.lease = max(self.lease, lease)
        most = self.limits.get(task.spec["queue"], {}).get("per_key", 0)
        if task.limit and most and self.running(task.spec["queue"], task.limit) > most:
            yield "A3", f"more than {most} of {task.limit} are leased: {seq}"

    def _queue_rank(self, asked: Plain, seq: int) -> tuple[int, int, int]:
        spec = self.tasks[seq].spec
        return asked["queues"].index(spec["queue"]), -spec["priority"], seq

    def _must_be_granted(self, now_ns: int, asked: Plain) -> list[int]:
        """Tasks that must be granted now, because only their place in the queue delays them."""
        found: list[int] = []
        for queue in asked["queues"] if asked["limit"] else []:
            if self.limits.get(queue, {}).get("concurrency"):
                return found
            ready = [
                (-task.spec["priority"], seq)
                for seq, task in self.tasks.items()
                if task.state == WAITING and task.spec["queue"] == queue
                if not task.waits and not task.is_suspect and task.not_before_ns[1] <= now_ns
            ]
            for _, seq in sorted(ready):
                if self.tasks[seq].limit or self.tasks[seq].may_be_unroutable:
                    return found
                found.append(seq)
                if len(found) == asked["limit"]:
                    return found
        return found

    def extend(
        self, now_ns: int, generation: int, holds: list[Plain], answers: list[int]
    ) -> Findings:
        for hold, answer in zip(holds, answers, strict=True):
            task = self.tasks.get(hold["seq"])
            live = generation == self.generation and task is not None
            if task is None or not live or not task.has_live_lease(hold["lease"], now_ns):
                if answer:
                    yield "L4", f"lease {hold['lease']} of {hold['seq']} was extended, and was over"
                continue
            since_ns = now_ns if hold["progressed"] else task.progress_ns
            spec = task.spec
            expected_ns = min(now_ns + spec["lease_ns"], since_ns + spec["window_ns"])
            task.progress_ns = since_ns
            task.expires_ns = max(expected_ns, task.expires_ns)
            if answer != task.expires_ns:
                number = "L9" if answer > task.expires_ns else "L4"
                yield number, f"task {hold['seq']} has its lease until {answer}"

    def report(
        self, now_ns: int, generation: int, reports: list[Plain], answers: list[int]
    ) -> Findings:
        for report, answer in zip(reports, answers, strict=True):
            seq, lease = report["seq"], report["lease"]
            task = self.tasks.get(seq)
            same_generation = generation == self.generation
            if task is not None and same_generation and task.has_live_lease(lease, now_ns):
                if answer != COMMITTED:
                    yield "S6", f"task {seq}: a report in time was answered {answer}"
                else:
                    self._apply_report(seq, task, report, now_ns)
                continue
            again = (
                task is not None
                and same_generation
                and (task.state, task.lease, report["end"]) == (COMPLETED, lease, OK)
            )
            if answer == COMMITTED:
                if not again:
                    yield "S6", f"task {seq}: a report under lease {lease} counted, but is not live"
                continue
            if again and not self.may_be_deleted(seq, now_ns):
                yield "S2", f"task {seq}: the same report again was answered {answer}"
            had_lease = (
                task is not None and lease in task.leases and not self.may_be_deleted(seq, now_ns)
            )
            if had_lease and answer != CANCELLED:
                yield "S6", f"task {seq}: its former worker got the answer {answer}"
            if answer == CANCELLED and same_generation:
                self.rejected_reports[seq, lease] = self.rejected_reports.get((seq, lease), 0) + 1

    def _apply_report(self, seq: int, task: TaskModel, report: Plain, now_ns: int) -> None:
        end, spec = report["end"], task.spec
        if end == OK:
            self._end(seq, COMPLETED, now_ns)
            return
        task.failures += end in (FAILURE, REFUSED)
        task.expiries += end == EXITED
        tries = max(task.expiries if end == EXITED else task.failures, 1)
        if end == REFUSED or (end == FAILURE and task.failures >= spec["attempts"]):
            self._end(seq, FAILED, now_ns)
            return
        self._set_waiting(task)
        if end == EXITED and task.expiries >= spec["expiries_max"]:
            self._end(seq, DEAD, now_ns)
            return
        pause_ns = min(spec["backoff_ns"] * 2 ** min(tries - 1, 64), spec["backoff_ns_max"])
        if end in (FAILURE, EXITED):
            task.not_before_ns = (now_ns + max(pause_ns // 2, 1), now_ns + max(pause_ns, 1))

    def cancel(self, now_ns: int, seqs: list[int], answers: list[bool]) -> Findings:
        open_ = {seq for seq in seqs if self.tasks[seq].state <= LEASED}
        for seq, answer in zip(seqs, answers, strict=True):
            if answer != (seq in open_):
                yield "S2", f"task {seq} in state {self.tasks[seq].state} was cancelled: {answer}"
            open_.discard(seq)
            # A cancelled dependency may have killed it meanwhile.
            if answer and self.tasks[seq].state <= LEASED:
                self._end(seq, DEAD, now_ns)

    # -- transitions
    # ---------------------------------------------------------------------------------

    def _set_waiting(self, task: TaskModel) -> None:
        task.state, task.lease, task.worker, task.expires_ns = WAITING, 0, "", 0
        task.not_before_ns = (0, 0)

    def _end(self, seq: int, state: int, now_ns: int) -> None:
        """End a task, and resolve or kill its dependents."""
        ending = [(seq, state)]
        while ending:
            one, how = ending.pop()
            task = self.tasks[one]
            task.state, task.ended_ns, task.expires_ns = how, now_ns, 0
            task.waits = set()
            for other, waiting in self.tasks.items():
                if one in waiting.waits:
                    waiting.waits.discard(one)
                    if how != COMPLETED:
                        ending.append((other, DEAD))
