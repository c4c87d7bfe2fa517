"""Checkers of a run's ledger: S1 to S6, P1 and P2, and what J1, J2, J4, J5, E3 and T1 say of it.

A service's commit carries log entries and outcome chunks; `model_ledger` says what they come to. With
that at hand every call, every acknowledged report, every step of the sink, every board that a service
had or opened, and every checkpoint is compared.

Events besides the commits (`_write`), all noted by actors:

    ledger.live    what a service is about to append to which run, and its board after it
    ledger.opened  the board that a service found in the log
    ledger.call    a row's effect happens outside;  ledger.acked: a task was told of its report
    ledger.beat    a grant was promised to live on;  sink.commit: rows became visible
    ledger.anew    a service of another driver: grants so far are void with its next commit
    ledger.careless  somebody is about to do what must stop the run
    ledger.finished  a task was told that there is nothing left to do in an interval
    ledger.over    the run's record says how it ended
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from holdfast.sim.audit import decode_key
from holdfast.sim.history import Event, History
from holdfast.sim.model_ledger import COMMITTED, FAIL, SKIP, SUCCESS, Ledger
from holdfast.sim.violation import Violation

Plain = dict[str, Any]
Who = tuple[str, str]

# Positions in a checkpoint: next_commit, pages; in an outcome chunk: the batch, rows without a result.
NEXT_COMMIT, PAGES, BATCH, OTHERS = 6, 15, 2, 3

_decode = msgspec.msgpack.Decoder().decode


class _Run:
    """A run: its log as it was committed, and what was seen of it from outside."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.bodies: list[bytes] = []
        self.values: dict[int, str] = {}  # seq → the result that is durable
        self.others: dict[int, int] = {}  # seq → how it ended without one
        self.boards: dict[int, Event] = {}  # height → a board that was told of it
        self.calls: set[tuple[int, int]] = set()  # (epoch, seq)
        self.answers: dict[tuple[int, int], Plain] = {}
        self.promises: dict[int, tuple[str, int]] = {}  # epoch → by whom, until when
        self.sunk = 0
        self.checkpoints: dict[int, bytes] = {}
        # Grants up to this epoch belong to a driver that is gone.
        self.bygone = 0
        self.careless = False


class _Replay:
    """One life of the store, seen by its runs."""

    def __init__(self, *, whole: bool) -> None:
        self.runs: dict[str, _Run] = {}
        self._whole = whole
        self.found: list[Violation] = []
        self._now: Event | None = None
        # What a process is about to append, and to which run.
        self._about: dict[Who, Event] = {}
        self._anew: dict[Who, int] = {}

    def step(self, event: Event) -> None:
        self._now = event
        if event.op in _STEPS:
            _STEPS[event.op](self, event)
        elif event.op == "audit":
            self._audit(event)

    def bad(self, number: str, what: str) -> None:
        assert self._now is not None
        self.found.append(Violation(number, what, self._now))

    def _run(self, name: str) -> _Run:
        if name not in self.runs:
            self.runs[name] = _Run(Ledger(name, self.bad, whole=self._whole))
        return self.runs[name]

    # -- the log -------------------------------------------------------------------------------

    def _live(self, event: Event) -> None:
        self._about[event.actor, event.incarnation] = event

    def _write(self, event: Event) -> None:
        if not event.applied:
            return
        who = (event.actor, event.incarnation)
        about = self._about[who]
        run = self._run(about.args["run"])
        run.bygone = max(run.bygone, self._anew.pop(who, 0))
        for key, value in event.args["puts"]:
            self._chunk(run, decode_key(key), value)
        for body in event.args["bodies"]:
            run.bodies.append(body)
            kind = run.ledger.apply(body)
            if kind == "reclaimed":
                self._lost(run, _decode(body), f"{event.actor}/{event.incarnation}")
            elif kind == "advanced" and _decode(body)[2] <= run.bygone:
                self.bad("S6", f"{run.ledger.run}: a report of a driver that is gone")
            elif kind == "halted" and not run.careless:
                self.bad("S2", f"{run.ledger.run}: halted, and nobody was careless")
            elif kind == "committed" and run.ledger.next_commit > run.sunk:
                self.bad("P1", f"{run.ledger.run}: committed, and not in the sink")
        if about.args["height"] != len(run.bodies):
            self.bad("J2", f"{run.ledger.run}: {len(run.bodies)} is not {about.args['height']}")
        self._durable(run)
        self._board(run, about)
        if event.args["checkpoint"] is not None:
            self._checkpoint(run, event.args["checkpoint"])

    def _chunk(self, run: _Run, key: tuple[Any, ...], value: bytes) -> None:
        chunk = _decode(value)
        for seq, result in _decode(chunk[BATCH]) if chunk[BATCH] else []:
            if seq in run.values:
                self.bad("S2", f"{run.ledger.run}: {seq} has two results")
            run.values[seq] = result
        for seq, state, *_ in chunk[OTHERS]:
            if seq in run.others:
                self.bad("S2", f"{run.ledger.run}: {seq} has two outcomes without a result")
            run.others[seq] = state

    def _lost(self, run: _Run, entry: list[Any], service: str) -> None:
        """A service keeps its own promises; it cannot know those of another."""
        _, decided_ns, epoch, why, *_ = entry
        by, until_ns = run.promises.get(epoch, ("", 0))
        if why == "expired" and by == service and decided_ns < until_ns:
            self.bad("S5", f"{run.ledger.run}: grant {epoch} expired, and had been promised more")

    def _durable(self, run: _Run) -> None:
        """The end of a row and its outcome are durable together."""
        ended, skipped, failed, _ = run.ledger.ended
        if len(run.values) != ended:
            self.bad("J1", f"{run.ledger.run}: {ended} successes, {len(run.values)} results")
        kept = Counter(run.others.values())
        if (kept[SKIP], kept[FAIL]) != (skipped, failed):
            self.bad("J1", f"{run.ledger.run}: {skipped} skipped, {failed} failed, stored {kept}")

    # -- boards --------------------------------------------------------------------------------

    def _opened(self, event: Event) -> None:
        run = self._run(event.args["run"])
        if event.args["height"] != len(run.bodies):
            self.bad("J2", f"{run.ledger.run}: opened at {event.args['height']}")
            return
        # Nobody could beat meanwhile: promises begin anew, and so does every grant.
        for held in run.ledger.grants.values():
            held.heard_ns = event.at_ns
        self._board(run, event)

    def _board(self, run: _Run, told: Event) -> None:
        """A board is what the log comes to, whoever holds it: live, or found there later."""
        args, ledger = told.args, run.ledger
        if "digest" not in args:
            return
        if list(args["state"]) != ledger.state or list(args["attempts"]) != ledger.attempts:
            self.bad("J5", f"{ledger.run}: the board at {args['height']} is not what the log says")
        before = run.boards.setdefault(args["height"], told)
        if before.args["digest"] != args["digest"]:
            self.bad("J5", f"{ledger.run}: two boards at height {args['height']}")
        counts = ledger.counts()
        counters = {
            "terminalCount": sum(counts[SUCCESS:COMMITTED]),
            "inFlightCount": counts[2],
            "dispatchedCount": counts[1],
            "committedCount": counts[COMMITTED],
        }
        recount = (counts, counters, ledger.ended, ledger.prefix())
        if (args["counts"], args["counters"], args["ended"], args["prefix"]) != recount:
            self.bad("S4", f"{ledger.run}: counted {args['counts']}, recount {recount}")

    def _checkpoint(self, run: _Run, dump: bytes) -> None:
        """A checkpoint is the board at the height that it is kept at."""
        run.checkpoints[len(run.bodies)] = dump
        told = _decode(dump)
        state: list[int] = []
        attempts: list[int] = []
        for runs, packed in told[PAGES]:
            assert not packed, "pages here are short"
            for rows, code, tries, _ in runs:
                state += [code] * rows
                attempts += [tries] * rows
        right = (run.ledger.state, run.ledger.attempts, run.ledger.next_commit)
        if (state, attempts, told[NEXT_COMMIT]) != right:
            self.bad("J5", f"{run.ledger.run}: the checkpoint is not what the log says")

    def _audit(self, event: Event) -> None:
        for name, run in self.runs.items():
            subject = f"run/{name}"
            found = event.value["journals"].get(subject, {"head": None, "entries": {}})
            head, entries = found["head"] or {"height": 0, "floor": 1}, found["entries"]
            floor, height = head["floor"], head["height"]
            if height != len(run.bodies) or sorted(entries) != list(range(floor, height + 1)):
                self.bad("J2", f"{name}: heights {sorted(entries)}, head {height}")
            for at, entry in entries.items():
                if not entry["blob"] and run.bodies[at - 1 : at] != [entry["body"]]:
                    self.bad("J2", f"{name}: entry {at} is not what was committed")
            kept = event.value["snapshots"].get(subject, {"states": {}, "baseline": None})
            for at, saved in kept["states"].items():
                made = run.checkpoints.get(at)
                if made is None or saved["state"] not in (made, None):
                    self.bad("J5", f"{name}: a checkpoint at {at} that is another height's")
            base = kept["baseline"]
            if base is not None and base["height"] not in kept["states"]:
                self.bad("J4", f"{name}: the baseline {base['height']} is gone")
            if floor > 1 and (base is None or floor > min(kept["states"], default=0) + 1):
                self.bad("J4", f"{name}: cut off at {floor}, kept {sorted(kept['states'])}")

    # -- outside -------------------------------------------------------------------------------

    def _call(self, event: Event) -> None:
        args, run = event.args, self._run(event.args["run"])
        place = (args["epoch"], args["seq"])
        if place not in run.ledger.begins:
            self.bad("J1", f"{args['run']}: {args['seq']} called, and its begin is not durable")
        if place in run.calls:
            self.bad("P2", f"{args['run']}: {args['seq']} called twice by grant {args['epoch']}")
        run.calls.add(place)
        if args["key"] != f"{args['run']}/{args['seq']}":
            self.bad("E3", f"{args['run']}: {args['seq']} called as {args['key']}")

    def _acked(self, event: Event) -> None:
        args, run = event.args, self._run(event.args["run"])
        place = (args["epoch"], args["n"])
        if run.ledger.replies.get(place) != args["digest"]:
            self.bad("J1", f"{args['run']}: report {place} acknowledged, and not in the log")
        if run.answers.setdefault(place, args["told"]) != args["told"]:
            self.bad("S2", f"{args['run']}: report {place} was answered in two ways")

    def _opens_anew(self, event: Event) -> None:
        self._anew[event.actor, event.incarnation] = event.args["epoch"]

    def _careless(self, event: Event) -> None:
        """Somebody is about to do what must stop the run."""
        self._run(event.args["run"]).careless = True

    def _finished(self, event: Event) -> None:
        """Whoever is told that its rows are over may rely on it: it is durable."""
        ledger = self._run(event.args["run"]).ledger
        if any(code < SUCCESS for code in ledger.state[event.args["lo"] : event.args["hi"]]):
            self.bad("J1", f"{ledger.run}: told to be over, and not so in the log")

    def _beat(self, event: Event) -> None:
        run = self._run(event.args["run"])
        run.promises[event.args["epoch"]] = (event.args["service"], event.args["expires_ns"])

    def _sink(self, event: Event) -> None:
        args, run = event.args, self._run(event.args["run"])
        lo, hi = args["lo"], args["hi"]
        if lo != run.sunk:
            self.bad("P1", f"{args['run']}: {lo} to {hi} in the sink after {run.sunk}")
        if any(code < SUCCESS for code in run.ledger.state[lo:hi]):
            self.bad("J1", f"{args['run']}: {lo} to {hi} in the sink, and not final in the log")
        right = [[seq, run.values[seq]] for seq in range(lo, hi) if seq in run.values]
        if args["rows"] != right:
            self.bad("P1", f"{args['run']}: the sink has {args['rows']}, not {right}")
        run.sunk = hi

    def _over(self, event: Event) -> None:
        run, status = self._run(event.args["run"]), event.args["status"]
        ledger = run.ledger
        right = ["halted"] if ledger.halted else []
        # Once all is committed, an illegal report may come before or after the end.
        if not ledger.halted or ledger.next_commit == len(ledger.state):
            right.append("cancelled" if ledger.cancelling else "finished")
        if status not in right:
            self.bad("S1", f"{ledger.run}: {status} by its record, {right} by its log")
        if not ledger.halted and (run.sunk, ledger.next_commit) != (len(ledger.state),) * 2:
            self.bad("P1", f"{ledger.run}: over, with {run.sunk} of its rows in the sink")


_STEPS = {
    "_write": _Replay._write,
    "ledger.live": _Replay._live,
    "ledger.opened": _Replay._opened,
    "ledger.call": _Replay._call,
    "ledger.acked": _Replay._acked,
    "ledger.anew": _Replay._opens_anew,
    "ledger.careless": _Replay._careless,
    "ledger.beat": _Replay._beat,
    "ledger.finished": _Replay._finished,
    "ledger.over": _Replay._over,
    "sink.commit": _Replay._sink,
}


def findings(history: History) -> list[Violation]:
    """Everything that a replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.lives():
        if any(event.op == "ledger.live" for event in life):
            replay = _Replay(whole=history.config("claims_whole", False))
            for event in life:
                replay.step(event)
            found += replay.found
    return found
