"""What tasks should be, stated once more: a model of document 003 that knows no product code.

It is fed with the operations that were applied, each with its time, its arguments and its answer, and
says what is wrong with the answer. What the answer leaves open (the jitter of a pause, when a task that
may be forgotten is) the model keeps open, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Plain = dict[str, Any]
Wrong = Iterator[tuple[str, str]]

WAITING, LEASED, COMPLETED, FAILED, DEAD = range(5)
OK, FAILURE, REFUSED, EXITED, RELEASED = range(5)
COMMITTED, CANCELLED, REJECTED = range(3)
# The kind that runs in processes of its own: it hurts nobody beside it.
PROCESS = 2


@dataclass(slots=True)
class Task:
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
    # It is granted no earlier than the first, and may be granted from the second on.
    not_before_ns: tuple[int, int] = (0, 0)
    ended_ns: int = 0
    redriven_by: int = 0
    leases: set[int] = field(default_factory=set)
    # Somebody asked who does not know its name: it may be put aside, for one who does.
    aside: bool = False

    @property
    def suspect(self) -> bool:
        last = 0 < self.expiries >= int(self.spec["expiries_max"]) - 1
        return last and self.spec["kind"] != PROCESS

    def live(self, lease: int, now_ns: int) -> bool:
        return self.state == LEASED and self.lease == lease and now_ns < self.expires_ns


class Model:
    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.limits: dict[str, Plain] = {}
        self.generation = 1
        self.seq = 0
        self.lease = 0
        # How often each (task, lease) was told that it is none.
        self.told: dict[tuple[int, int], int] = {}

    def may_be_gone(self, seq: int, now_ns: int) -> bool:
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

    def submit(self, now_ns: int, spec: Plain, new: list[Plain], seqs: list[int]) -> Wrong:
        for index, (one, seq) in enumerate(zip(new, seqs, strict=True)):
            place = (spec["name"], one["key"])
            known = self.keys.get(place) if one["key"] else None
            if known is not None and seq == known:
                if self.tasks[known].args != one["args"]:
                    yield "I5", f"task {seq}: the key {place} with other arguments"
                continue
            if known is not None and not self.may_be_gone(known, now_ns):
                yield "I4", f"the key {place} made task {seq} besides {known}"
            yield from self._numbered(seq)
            others = {other if other > 0 else seqs[-other - 1] for other in one["after"]}
            if any(-other - 1 >= index for other in one["after"] if other < 0):
                yield "S1", f"task {seq} waits for one that comes after it"
            task = self.tasks[seq] = Task(spec, one["args"], one["key"], one["limit"])
            due_ns = now_ns + one["delay_ns"] if one["delay_ns"] else 0
            task.not_before_ns = (due_ns, due_ns)
            if one["key"]:
                self.keys[place] = seq
            states = {other: self.tasks[other].state for other in others if other in self.tasks}
            task.waits = {other for other, state in states.items() if state < COMPLETED}
            if any(state in (FAILED, DEAD) for state in states.values()):
                task.waits = set()
                self._end(seq, DEAD, now_ns)

    def redrive(self, now_ns: int, olds: list[int], seqs: list[int]) -> Wrong:
        for old, seq in zip(olds, seqs, strict=True):
            was = self.tasks[old]
            if was.redriven_by:
                if seq != was.redriven_by:
                    yield "S2", f"task {old} was redriven twice"
                continue
            if was.state not in (FAILED, DEAD):
                yield "S1", f"task {old} was redriven, and had not failed"
            yield from self._numbered(seq)
            self.tasks[seq] = Task(was.spec, was.args, was.key, was.limit, redrive_of=old)
            was.redriven_by = seq
            if was.key:
                self.keys[was.spec["name"], was.key] = seq

    def _numbered(self, seq: int) -> Wrong:
        if seq != self.seq + 1:
            yield "D2", f"task {seq} after {self.seq}: a number given twice, or left out"
        self.seq = max(self.seq, seq)

    def sweep(self, now_ns: int) -> None:
        """Whatever is overdue expires, before anything else is decided."""
        for seq, task in list(self.tasks.items()):
            if task.state == LEASED and task.expires_ns <= now_ns:
                task.expiries += 1
                self._free(task)
                if task.expiries >= task.spec["expiries_max"]:
                    self._end(seq, DEAD, now_ns)

    def granted(self, now_ns: int, asked: Plain, grants: list[Plain]) -> Wrong:
        """Grants of one decision, after its sweep."""
        names = asked.get("names")
        for other in self.tasks.values():
            if names and other.spec["queue"] in asked["queues"] and other.spec["name"] not in names:
                other.aside = True
        wanted = self._next(now_ns, asked)
        first = self.lease
        for grant in grants:
            task = self.tasks.get(grant["seq"])
            if task is None:
                yield "S1", f"task {grant['seq']} was granted, and is none"
                continue
            yield from self._grant(now_ns, asked, grant, task, first)
        for queue in asked["queues"]:
            most = self.limits.get(queue, {}).get("concurrency", 0)
            if most and any(g["queue"] == queue for g in grants) and self.running(queue) > most:
                yield "A3", f"{self.running(queue)} of {queue} are leased, {most} may be"
        suspects = [grant for grant in grants if grant["suspect"]]
        if suspects and (len(grants) > 1 or not asked["alone"]):
            yield "L1", f"task {suspects[0]['seq']} was granted beside others, and may kill them"
        if wanted and not suspects:
            ranks = [self._rank(asked, grant["seq"]) for grant in grants]
            full = len(grants) >= asked["limit"]
            for seq in wanted:
                if self.tasks[seq].state == WAITING:
                    if not full or max(ranks) > self._rank(asked, seq):
                        yield "A4", f"task {seq} was the next to be granted, and was not"

    def _grant(self, now_ns: int, asked: Plain, grant: Plain, task: Task, first: int) -> Wrong:
        seq, lease = grant["seq"], grant["lease"]
        if task.state == LEASED:
            yield "L1", f"task {seq} was granted while lease {task.lease} held"
        elif task.state != WAITING or task.waits:
            yield "S1", f"task {seq} was granted, and did not wait for a worker"
        if asked.get("names") and grant["name"] not in asked["names"]:
            yield "S1", f"task {seq} was granted to one who does not know {grant['name']}"
        task.aside = False
        if now_ns < task.not_before_ns[0]:
            yield "T1", f"task {seq} was granted before its time"
        if lease <= first or lease in task.leases:
            yield "L2", f"task {seq} was granted lease {lease} after {first}"
        if grant["attempt"] != task.attempt + 1:
            yield "S3", f"task {seq}: attempt {grant['attempt']} after {task.attempt}"
        if (grant["args"], grant["queue"]) != (task.args, task.spec["queue"]):
            yield "J5", f"task {seq} was granted with other arguments than it was given"
        if grant["suspect"] != task.suspect:
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

    def _rank(self, asked: Plain, seq: int) -> tuple[int, int, int]:
        spec = self.tasks[seq].spec
        return asked["queues"].index(spec["queue"]), -spec["priority"], seq

    def _next(self, now_ns: int, asked: Plain) -> list[int]:
        """Those that must be granted now: nothing holds them back but their place in the queue."""
        found: list[int] = []
        for queue in asked["queues"] if asked["limit"] else []:
            if self.limits.get(queue, {}).get("concurrency"):
                return found
            ready = [
                (-task.spec["priority"], seq)
                for seq, task in self.tasks.items()
                if task.state == WAITING and task.spec["queue"] == queue
                if not task.waits and not task.suspect and task.not_before_ns[1] <= now_ns
            ]
            for _, seq in sorted(ready):
                if self.tasks[seq].limit or self.tasks[seq].aside:
                    return found
                found.append(seq)
                if len(found) == asked["limit"]:
                    return found
        return found

    def extend(self, now_ns: int, generation: int, holds: list[Plain], answers: list[int]) -> Wrong:
        for hold, answer in zip(holds, answers, strict=True):
            task = self.tasks.get(hold["seq"])
            live = generation == self.generation and task is not None
            if task is None or not live or not task.live(hold["lease"], now_ns):
                if answer:
                    yield "L4", f"lease {hold['lease']} of {hold['seq']} was extended, and was over"
                continue
            since_ns = now_ns if hold["progressed"] else task.progress_ns
            spec = task.spec
            right = min(now_ns + spec["lease_ns"], since_ns + spec["window_ns"])
            task.progress_ns = since_ns
            task.expires_ns = max(right, task.expires_ns)
            if answer != task.expires_ns:
                number = "L9" if answer > task.expires_ns else "L4"
                yield number, f"task {hold['seq']} has its lease until {answer}"

    def settle(
        self, now_ns: int, generation: int, reports: list[Plain], answers: list[int]
    ) -> Wrong:
        for report, answer in zip(reports, answers, strict=True):
            seq, lease = report["seq"], report["lease"]
            task = self.tasks.get(seq)
            mine = generation == self.generation
            if task is not None and mine and task.live(lease, now_ns):
                if answer != COMMITTED:
                    yield "S6", f"task {seq}: a report in time was answered {answer}"
                else:
                    self._settled(seq, task, report, now_ns)
                continue
            again = (
                task is not None
                and mine
                and (task.state, task.lease, report["end"]) == (COMPLETED, lease, OK)
            )
            if answer == COMMITTED:
                if not again:
                    yield "S6", f"task {seq}: a report under lease {lease} counted, which is none"
                continue
            if again and not self.may_be_gone(seq, now_ns):
                yield "S2", f"task {seq}: the same report again was answered {answer}"
            had = task is not None and lease in task.leases and not self.may_be_gone(seq, now_ns)
            if had and answer != CANCELLED:
                yield "S6", f"task {seq}: its former worker was told {answer}"
            if answer == CANCELLED and mine:
                self.told[seq, lease] = self.told.get((seq, lease), 0) + 1

    def _settled(self, seq: int, task: Task, report: Plain, now_ns: int) -> None:
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
        self._free(task)
        if end == EXITED and task.expiries >= spec["expiries_max"]:
            self._end(seq, DEAD, now_ns)
            return
        pause_ns = min(spec["backoff_ns"] * 2 ** min(tries - 1, 64), spec["backoff_ns_max"])
        if end in (FAILURE, EXITED):
            task.not_before_ns = (now_ns + max(pause_ns // 2, 1), now_ns + max(pause_ns, 1))

    def cancel(self, now_ns: int, seqs: list[int], answers: list[bool]) -> Wrong:
        open_ = {seq for seq in seqs if self.tasks[seq].state <= LEASED}
        for seq, answer in zip(seqs, answers, strict=True):
            if answer != (seq in open_):
                yield "S2", f"task {seq} in state {self.tasks[seq].state} was cancelled: {answer}"
            open_.discard(seq)
            # It may have died meanwhile, of one before it that it waits for.
            if answer and self.tasks[seq].state <= LEASED:
                self._end(seq, DEAD, now_ns)

    # -- what follows --------------------------------------------------------------------------

    def _free(self, task: Task) -> None:
        task.state, task.lease, task.worker, task.expires_ns = WAITING, 0, "", 0
        task.not_before_ns = (0, 0)

    def _end(self, seq: int, state: int, now_ns: int) -> None:
        """A task ends, and with it the waiting of others."""
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
