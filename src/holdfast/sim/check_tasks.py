"""Checkers of tasks: L1 L2 L4 L5 L9 L10 S1 S2 S3 S4 S6 J2 J4 J5 D2 D3 T1 I4 I5 A3 A4, by a model and a fold.

The model (`model_tasks`) follows the operations; each audit shows whether the rows are what it says. The
fold reads the log by itself, from the checkpoint it starts at, and must arrive at the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim.audit_tasks import UNIVERSE, new_universe
from holdfast.sim.fold_tasks import Fold, status_of
from holdfast.sim.history import Event, History
from holdfast.sim.model_tasks import LEASED, WAITING, Model, Task
from holdfast.sim.violation import Violation

Plain = dict[str, Any]
Found = Iterator[tuple[str, str]]

SUBJECT = f"tasks/{UNIVERSE}"
PLACES = ("ready", "suspect", "parked", "stray", "delayed")
STATES = ("leased", "completed", "failed", "dead")


class _Replay:
    """One life of the store, seen through its tasks."""

    def __init__(self) -> None:
        self.model = Model()
        self.found: list[Violation] = []
        self.results: dict[int, bytes] = {}

    def step(self, event: Event) -> None:
        if event.op == "restore":
            self.model.generation = event.args["generation"]
        elif event.op == "audit":
            tasks = event.value.get("tasks", {}).get(UNIVERSE, new_universe())
            log = event.value["journals"].get(SUBJECT, {"head": None, "entries": {}})
            self._note(event, self._rows(event.at_ns, tasks))
            self._note(event, self._indexes(event.at_ns, tasks))
            self._note(event, Fold(tasks, log).check(self.model))
        elif event.applied and event.op in _STEPS:
            self._note(event, _STEPS[event.op](self, event.at_ns, event.args, event.value))

    def _note(self, event: Event, wrong: Found) -> None:
        self.found += [Violation(number, what, event) for number, what in wrong]

    # -- operations ----------------------------------------------------------------------------

    def _submit(self, now_ns: int, args: Plain, seqs: list[int]) -> Found:
        return self.model.submit(now_ns, args["spec"], args["new"], seqs)

    def _lease(self, now_ns: int, args: Plain, leased: Plain) -> Found:
        self.model.sweep(now_ns)
        return self.model.granted(now_ns, args, leased["grants"])

    def _turn(self, now_ns: int, args: Plain, turned: Plain) -> Found:
        yield from self._settle(now_ns, args, turned["answers"])
        yield from self._lease(now_ns, args, turned["leased"])

    def _settle(self, now_ns: int, args: Plain, answers: list[int]) -> Found:
        before = {r["seq"]: self.model.tasks.get(r["seq"]) for r in args["reports"]}
        open_ = {seq for seq, task in before.items() if task is not None and task.state == LEASED}
        yield from self.model.settle(now_ns, args["generation"], args["reports"], answers)
        for report, answer in zip(args["reports"], answers, strict=True):
            if report["seq"] in open_ and answer == 0 and report["end"] == 0:
                self.results.setdefault(report["seq"], report["result"])

    def _extend(self, now_ns: int, args: Plain, answers: list[int]) -> Found:
        return self.model.extend(now_ns, args["generation"], args["holds"], answers)

    def _cancel(self, now_ns: int, args: Plain, answers: list[bool]) -> Found:
        return self.model.cancel(now_ns, args["seqs"], answers)

    def _redrive(self, now_ns: int, args: Plain, seqs: list[int]) -> Found:
        return self.model.redrive(now_ns, args["seqs"], seqs)

    def _limit(self, now_ns: int, args: Plain, _: None) -> Found:
        self.model.limits[args["queue"]] = args["limits"]
        return iter(())

    def _maintain(self, now_ns: int, args: Plain, _: int) -> Found:
        self.model.sweep(now_ns)
        return iter(())

    # -- rows ----------------------------------------------------------------------------------

    def _rows(self, now_ns: int, tasks: Plain) -> Found:
        model = self.model
        for seq in tasks["bodies"].keys() | tasks["statuses"].keys():
            if seq not in model.tasks or seq not in tasks["bodies"]:
                yield "D2", f"task {seq} has rows, and nobody created it, or it was forgotten"
        for seq, task in model.tasks.items():
            body = tasks["bodies"].get(seq)
            if body is None:
                if not model.may_be_gone(seq, now_ns):
                    yield "D2", f"task {seq} is gone, in state {task.state}"
                continue
            if not body["blob"] and body["args"] != task.args:
                yield "J5", f"task {seq} has other arguments than it was given"
            yield from self._row(seq, task, status_of(tasks, seq))

    def _row(self, seq: int, task: Task, row: Plain) -> Found:
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
            yield "L9", f"task {seq} is said to have gone on at {row['progress_ns']}"
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

    def _indexes(self, now_ns: int, tasks: Plain) -> Found:
        model, kept = self.model, tasks["bodies"]
        places = Counter((path[-1], place) for place in PLACES for path in tasks[place])
        counts: dict[str, Counter[str]] = {}
        leased: Counter[tuple[str, str]] = Counter()
        batches = {
            (seq, batch[0]): at for at, _, batch in tasks["expiries"] for seq in batch[2]
        }  # fmt: skip
        times = {(batch[0], at) for at, _, batch in tasks["expiries"]}
        for seq, row in tasks["held"].items():
            if (row["lease"], row["expires_ns"]) in times:
                batches[seq, row["lease"]] = row["expires_ns"]
            named = max((first for first in tasks["held_at"] if first <= seq), default=0)
            if tasks["held_at"].get(named) != row["lease"]:
                yield "D2", f"task {seq} is held by {row['lease']}, and is not found by its number"
        for seq in (*tasks["held"], *tasks["runs"]):
            if seq in tasks["statuses"]:
                yield "D2", f"task {seq} is in a run, and has a status"
        retained = Counter((seq, until) for until, _, seqs in tasks["retained"] for seq in seqs)
        for seq in kept:
            task = model.tasks.get(seq)
            if task is None:
                continue
            there = [place for place in PLACES for _ in range(places.pop((seq, place), 0))]
            waits = task.state == WAITING and not task.waits
            if len(there) != waits:
                yield "D2", f"task {seq} in state {task.state} is in {there}"
            elif (
                waits
                and there[0] in ("ready", "suspect")
                and task.suspect != (there[0] == "suspect")
            ):
                yield "D2", f"task {seq} is in {there}, suspect: {task.suspect}"
            where = (
                there[0]
                if there
                else "blocked"
                if task.state == WAITING
                else STATES[task.state - 1]
            )
            counts.setdefault(task.spec["queue"], Counter())[where] += 1
            if task.state == LEASED:
                leased[task.spec["queue"], task.limit] += 1
                if batches.get((seq, task.lease), now_ns + (1 << 60)) > task.expires_ns:
                    yield "D2", f"task {seq} is leased, and nobody looks when its time is up"
            if task.state > LEASED:
                until = task.ended_ns + task.spec["retain_ns"]
                # A batch that is forgotten in parts is listed again for the time of its first part.
                listed = sum(n for (one, at), n in retained.items() if one == seq and at >= until)
                if listed != 1:
                    yield "D2", f"task {seq} ended, and is listed {listed} times to be forgotten"
            if task.key and model.keys.get((task.spec["name"], task.key)) == seq:
                if [task.spec["name"], task.key, seq] not in tasks["keys"]:
                    yield "D3", f"task {seq} is kept, and its key {task.key} is not"
        for name, key, seq in tasks["keys"]:
            if seq not in kept:
                yield "D3", f"the key {name} {key} is of task {seq}, which is forgotten"
        going = {
            (task.spec["queue"], task.limit)
            for place in ("ready", "suspect")
            for task in [model.tasks.get(path[-1]) for path in tasks[place]]
            if task is not None
        }
        for queue, limit, *_, seq in tasks["parked"]:
            if not leased[queue, limit] and (queue, limit) not in going:
                yield "R3", f"task {seq} waits for others of {limit}, and there are none"
        for seq, place in places:
            yield "D2", f"task {seq} is in {place}, and is none"
        for queue in tasks["counts"].keys() | counts.keys():
            told = {what: n for what, n in tasks["counts"].get(queue, {}).items() if n}
            if told != dict(counts.get(queue, {})):
                yield "S4", f"{queue}: counted {told}, there are {dict(counts.get(queue, {}))}"
        told_running = {(queue, limit): n for queue, limit, n in tasks["running"]}
        right = {pair: n for pair, n in leased.items() if pair[1]}
        if told_running != right:
            yield "S4", f"leases by limit: counted {told_running}, there are {right}"


_STEPS: dict[str, Any] = {
    "tasks.submit": _Replay._submit,
    "tasks.lease": _Replay._lease,
    "tasks.turn": _Replay._turn,
    "tasks.settle": _Replay._settle,
    "tasks.extend": _Replay._extend,
    "tasks.cancel": _Replay._cancel,
    "tasks.redrive": _Replay._redrive,
    "tasks.limit": _Replay._limit,
    "tasks.maintain": _Replay._maintain,
}


def findings(history: History) -> list[Violation]:
    """Everything that a replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.lives():
        if any(event.op in _STEPS for event in life):
            replay = _Replay()
            for event in life:
                replay.step(event)
            found += replay.found
    return found
