"""Checkers of tasks: L1 L2 L4 L5 L9 L10 S1 S2 S3 S4 S6 J2 J4 J5 D2 D3 T1 I4 I5 A3 A4, by a model
and a fold.

The model (`model_tasks`) follows the operations, and each audit compares the rows with it. The fold
(`task_log_fold`) reads the log independently, from its checkpoint on, and must arrive at the same
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder_tasks import UNIVERSE, empty_universe
from tests.simulation.model_tasks import LEASED, WAITING, TaskModel, TasksModel
from tests.simulation.task_log_fold import TaskLogFold, stored_status
from tests.simulation.violation import Violation

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]

SUBJECT = f"tasks/{UNIVERSE}"
WAIT_STATES = ("ready", "suspect", "parked", "stray", "delayed")
STATES = ("leased", "completed", "failed", "dead")


class _TaskReplay:
    """Replays the task operations of one life of the store."""

    def __init__(self) -> None:
        self.model = TasksModel()
        self.found: list[Violation] = []
        self.results: dict[int, bytes] = {}

    def step(self, event: HistoryEvent) -> None:
        if event.op == "restore":
            self.model.generation = event.args["generation"]
        elif event.op == "audit":
            tasks = event.value.get("tasks", {}).get(UNIVERSE, empty_universe())
            log = event.value["journals"].get(SUBJECT, {"head": None, "entries": {}})
            self._add_violations(event, self._check_rows(event.at_ns, tasks))
            self._add_violations(event, self._check_indexes(event.at_ns, tasks))
            self._add_violations(event, TaskLogFold(tasks, log).check(self.model))
        elif event.applied and is_task_event(event):
            self._add_violations(
                event, _STEPS[event.op](self, event.at_ns, event.args, event.value)
            )

    def _add_violations(self, event: HistoryEvent, wrong: Findings) -> None:
        self.found += [Violation(number, what, event) for number, what in wrong]

    # -- operations ----------------------------------------------------------------------------

    def _submit(self, now_ns: int, args: Plain, seqs: list[int]) -> Findings:
        return self.model.submit(now_ns, args["spec"], args["new"], seqs)

    def _lease(self, now_ns: int, args: Plain, leased: Plain) -> Findings:
        self.model.expire_overdue(now_ns)
        return self.model.check_grants(now_ns, args["request"], leased["grants"])

    def _report_and_lease(self, now_ns: int, args: Plain, result: Plain) -> Findings:
        yield from self._report(now_ns, args, result["answers"])
        yield from self._lease(now_ns, args, result["leased"])

    def _report(self, now_ns: int, args: Plain, answers: list[int]) -> Findings:
        before = {r["seq"]: self.model.tasks.get(r["seq"]) for r in args["reports"]}
        open_ = {seq for seq, task in before.items() if task is not None and task.state == LEASED}
        yield from self.model.report(now_ns, args["generation"], args["reports"], answers)
        for report, answer in zip(args["reports"], answers, strict=True):
            if report["seq"] in open_ and answer == 0 and report["end"] == 0:
                self.results.setdefault(report["seq"], report["result"])

    def _extend(self, now_ns: int, args: Plain, answers: list[int]) -> Findings:
        return self.model.extend(now_ns, args["generation"], args["holds"], answers)

    def _cancel(self, now_ns: int, args: Plain, answers: list[bool]) -> Findings:
        return self.model.cancel(now_ns, args["seqs"], answers)

    def _redrive(self, now_ns: int, args: Plain, seqs: list[int]) -> Findings:
        return self.model.redrive(now_ns, args["seqs"], seqs)

    def _limit(self, now_ns: int, args: Plain, _: None) -> Findings:
        self.model.limits[args["queue"]] = args["limits"]
        return iter(())

    def _maintain(self, now_ns: int, args: Plain, _: int) -> Findings:
        self.model.expire_overdue(now_ns)
        return iter(())

    # -- rows ----------------------------------------------------------------------------------

    def _check_rows(self, now_ns: int, tasks: Plain) -> Findings:
        model = self.model
        for seq in tasks["bodies"].keys() | tasks["statuses"].keys():
            if seq not in model.tasks or seq not in tasks["bodies"]:
                yield "D2", f"task {seq} has rows, but was never created or was deleted"
        for seq, task in model.tasks.items():
            body = tasks["bodies"].get(seq)
            if body is None:
                if not model.may_be_deleted(seq, now_ns):
                    yield "D2", f"task {seq} is gone, in state {task.state}"
                continue
            if not body["blob"] and body["args"] != task.args:
                yield "J5", f"task {seq} has other arguments than it was given"
            yield from self._check_row(seq, task, stored_status(tasks, seq))

    def _check_row(self, seq: int, task: TaskModel, row: Plain) -> Findings:
        if row["state"] != task.state:
            yield "S1", f"task {seq} is in state {row['state']}, and should be in {task.state}"
            return
        for field in ("attempt", "failures", "expiries"):
            if row[field] != getattr(task, field):
                yield "S3", f"task {seq}: {field} {row[field]}, not {getattr(task, field)}"
        if row["failures"] > task.spec["attempts"] or row["expiries"] > task.spec["expiries_max"]:
            yield "S3", f"task {seq}: over its budget"
        if (row["state"] == LEASED) != bool(row["expires_ns"]):
            yield (
                "L10",
                f"task {seq} in state {row['state']} with a lease until {row['expires_ns']}",
            )
        if row["state"] == WAITING and (row["lease"] or row["worker"]):
            yield "L10", f"task {seq} waits, and has lease {row['lease']}"
        for field in ("lease", "worker", "expires_ns"):
            if row[field] != getattr(task, field):
                yield "L10", f"task {seq}: {field} {row[field]}, not {getattr(task, field)}"
        if task.state == LEASED and row["progress_ns"] != task.progress_ns:
            yield "L9", f"task {seq} has progress time {row['progress_ns']}"
        if row["ended_ns"] != task.ended_ns:
            yield "S2", f"task {seq} ended at {row['ended_ns']}, not at {task.ended_ns}"
        if row["redriven_by"] != task.redriven_by:
            yield "S2", f"task {seq} redriven by {row['redriven_by']}, not {task.redriven_by}"
        if row["waits"] != len(task.waits):
            yield "S1", f"task {seq} waits for {row['waits']} others, not for {task.waits}"
        if not row["blob"] and row["result"] != self.results.get(seq, b""):
            yield "S2", f"task {seq} has another result than it was completed with"
        lo, hi = task.not_before_ns
        if task.state == WAITING and task.attempt and not lo <= row["not_before_ns"] <= hi:
            yield "T1", f"task {seq} waits until {row['not_before_ns']}, not {lo} to {hi}"

    def _check_indexes(self, now_ns: int, tasks: Plain) -> Findings:
        places = Counter((path[-1], place) for place in WAIT_STATES for path in tasks[place])
        expiries = _expiry_times(tasks)
        retained = Counter((seq, until) for until, _, seqs in tasks["retained"] for seq in seqs)
        recount = _TaskRecount()
        yield from _check_row_ranges(tasks)
        for seq in tasks["bodies"]:
            task = self.model.tasks.get(seq)
            if task is None:
                continue
            found = [place for place in WAIT_STATES for _ in range(places.pop((seq, place), 0))]
            recount.add(task, found)
            yield from _check_place(seq, task, found)
            if (
                task.state == LEASED
                and expiries.get((seq, task.lease), now_ns + (1 << 60)) > task.expires_ns
            ):
                yield "D2", f"task {seq} is leased, but in no expiry batch in time"
            if task.state > LEASED:
                until = task.ended_ns + task.spec["retain_ns"]
                # A batch that is deleted in parts is listed again under the time of its first part.
                listed = sum(n for (one, at), n in retained.items() if one == seq and at >= until)
                if listed != 1:
                    yield "D2", f"task {seq} ended, but is listed {listed} times for deletion"
        for seq, place in places:
            yield "D2", f"task {seq} is in {place}, but does not exist"
        yield from self._check_keys(tasks)
        yield from self._check_throttled(tasks, recount)
        yield from recount.compare(tasks)

    def _check_keys(self, tasks: Plain) -> Findings:
        for seq in tasks["bodies"]:
            task = self.model.tasks.get(seq)
            if task is None or not task.key:
                continue
            name = task.spec["name"]
            if (
                self.model.keys.get((name, task.key)) == seq
                and [name, task.key, seq] not in tasks["keys"]
            ):
                yield "D3", f"task {seq} exists, but its key {task.key} does not"
        for name, key, seq in tasks["keys"]:
            if seq not in tasks["bodies"]:
                yield "D3", f"the key {name} {key} is of task {seq}, which was deleted"

    def _check_throttled(self, tasks: Plain, recount: _TaskRecount) -> Findings:
        active_limits = {
            (task.spec["queue"], task.limit)
            for place in ("ready", "suspect")
            for task in [self.model.tasks.get(path[-1]) for path in tasks[place]]
            if task is not None
        }
        for queue, limit, *_, seq in tasks["parked"]:
            if not recount.leased[queue, limit] and (queue, limit) not in active_limits:
                yield "R3", f"task {seq} is throttled by {limit}, but no task of it runs"


class _TaskRecount:
    """Recount of the maintained counters: tasks by queue and place, leases by queue and limit."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.leased: Counter[tuple[str, str]] = Counter()

    def add(self, task: TaskModel, places: list[str]) -> None:
        place = "blocked" if task.state == WAITING else STATES[task.state - 1]
        self.counts.setdefault(task.spec["queue"], Counter())[places[0] if places else place] += 1
        if task.state == LEASED:
            self.leased[task.spec["queue"], task.limit] += 1

    def compare(self, tasks: Plain) -> Findings:
        for queue in tasks["counts"].keys() | self.counts.keys():
            stored = {what: n for what, n in tasks["counts"].get(queue, {}).items() if n}
            found = dict(self.counts.get(queue, {}))
            if stored != found:
                yield "S4", f"{queue}: counted {stored}, there are {found}"
        stored_running = {(queue, limit): n for queue, limit, n in tasks["running"]}
        expected = {pair: n for pair, n in self.leased.items() if pair[1]}
        if stored_running != expected:
            yield "S4", f"leases by limit: counted {stored_running}, there are {expected}"


def _expiry_times(tasks: Plain) -> dict[tuple[int, int], int]:
    """The time at which an expiry batch lists each task, by task and lease."""
    listed = {(seq, batch[0]): at for at, _, batch in tasks["expiries"] for seq in batch[2]}
    batches = {(batch[0], at) for at, _, batch in tasks["expiries"]}
    for seq, row in tasks["held"].items():
        if (row["lease"], row["expires_ns"]) in batches:
            listed[seq, row["lease"]] = row["expires_ns"]
    return listed


def _check_row_ranges(tasks: Plain) -> Findings:
    for seq, row in tasks["held"].items():
        named = max((first for first in tasks["held_at"] if first <= seq), default=0)
        if tasks["held_at"].get(named) != row["lease"]:
            yield "D2", f"task {seq} has range lease {row['lease']}, but the index does not find it"
    for seq in (*tasks["held"], *tasks["runs"]):
        if seq in tasks["statuses"]:
            yield "D2", f"task {seq} is in a row range, but has a status row"


def _check_place(seq: int, task: TaskModel, places: list[str]) -> Findings:
    """A waiting task is in one index, and only a suspect is in the index of suspects."""
    waits = task.state == WAITING and not task.waits
    if len(places) != waits:
        yield "D2", f"task {seq} in state {task.state} is in {places}"
    elif waits and places[0] in ("ready", "suspect"):
        if task.is_suspect != (places[0] == "suspect"):
            yield "D2", f"task {seq} is in {places}, suspect: {task.is_suspect}"


_STEPS: dict[str, Any] = {
    "tasks.submit": _TaskReplay._submit,
    "tasks.lease": _TaskReplay._lease,
    "tasks.report_and_lease": _TaskReplay._report_and_lease,
    "tasks.apply_reports": _TaskReplay._report,
    "tasks.extend": _TaskReplay._extend,
    "tasks.cancel": _TaskReplay._cancel,
    "tasks.redrive": _TaskReplay._redrive,
    "tasks.set_limits": _TaskReplay._limit,
    "tasks.maintain": _TaskReplay._maintain,
}


def is_task_event(event: HistoryEvent) -> bool:
    """Whether the event is an operation on the modelled tasks. Flows have tasks in another universe."""
    return event.op in _STEPS and event.args.get("universe", UNIVERSE) == UNIVERSE


def findings(history: History) -> list[Violation]:
    """Return all violations that the replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.store_lives():
        if any(is_task_event(event) for event in life):
            replay = _TaskReplay()
            for event in life:
                replay.step(event)
            found += replay.found
    return found
