"""Checkers of a run's ledger: S1 to S6, P1 and P2, and the ledger parts of J1, J2, J4, J5, E3 and
T1.

A commit of the service carries log entries and outcome chunks. `model_ledger` derives the state
from them. The checker compares that state with every call, every acknowledged report, every commit
of the sink, every run state of a service, and every checkpoint.

Events beside the commits (`_write`), all recorded by actors:

    ledger.live      entries that a service is about to append, and its run state after them
    ledger.opened    the run state that a service rebuilt from the log
    ledger.call      the effect of a row happens;  ledger.acked: a task received the reply to its report
    ledger.beat      a grant was extended;  sink.commit: rows became visible
    ledger.anew      a service of a new driver: its next commit voids all earlier grants
    ledger.careless  an actor is about to do something that must halt the run
    ledger.finished  a task received the reply that an interval has no rows left
    ledger.over      the final status in the run's record
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder import decode_key
from tests.simulation.model_ledger import COMMITTED, FAIL, SKIP, SUCCESS, LedgerModel
from tests.simulation.violation import Violation

Plain = dict[str, Any]
ProcessId = tuple[str, str]

# Positions in a checkpoint (next_commit, pages) and in an outcome chunk (batch, rows without a
# result).
NEXT_COMMIT, PAGES, BATCH, FINAL_STATES = 6, 15, 2, 3

_decode = msgspec.msgpack.Decoder().decode


class _RunEvents:
    """One run: its committed log, and its externally visible events."""

    def __init__(self, ledger: LedgerModel) -> None:
        self.ledger = ledger
        self.bodies: list[bytes] = []
        self.values: dict[int, str] = {}  # seq → durable result
        self.final_states: dict[int, int] = {}  # seq → final state without a result
        self.run_states: dict[int, HistoryEvent] = {}  # height → first recorded run state
        self.calls: set[tuple[int, int]] = set()  # (epoch, seq)
        self.acks: dict[tuple[int, int], Plain] = {}
        self.extensions: dict[int, tuple[str, int]] = {}  # epoch → service, lease end
        self.sink_end = 0
        self.checkpoints: dict[int, bytes] = {}
        # Grants up to this epoch belong to a former driver.
        self.former_driver_epoch = 0
        self.illegal_action = False


class _LedgerReplay:
    """Replays the ledger events of one life of the store."""

    def __init__(self, *, whole: bool) -> None:
        self.runs: dict[str, _RunEvents] = {}
        self._whole = whole
        self.found: list[Violation] = []
        self._now: HistoryEvent | None = None
        # The entries that each process is about to append.
        self._announced: dict[ProcessId, HistoryEvent] = {}
        self._new_driver_epochs: dict[ProcessId, int] = {}

    def step(self, event: HistoryEvent) -> None:
        self._now = event
        if event.op in _STEPS:
            _STEPS[event.op](self, event)
        elif event.op == "audit":
            self._audit(event)

    def add_violation(self, number: str, what: str) -> None:
        assert self._now is not None
        self.found.append(Violation(number, what, self._now))

    def _run(self, name: str) -> _RunEvents:
        if name not in self.runs:
            self.runs[name] = _RunEvents(
                LedgerModel(name, self.add_violation, claims_any_rows=self._whole)
            )
        return self.runs[name]

    # -- the log -------------------------------------------------------------------------------

    def _on_announced(self, event: HistoryEvent) -> None:
        self._announced[event.actor, event.incarnation] = event

    def _on_commit(self, event: HistoryEvent) -> None:
        if not event.applied:
            return
        process = (event.actor, event.incarnation)
        announced = self._announced[process]
        run = self._run(announced.args["run"])
        run.former_driver_epoch = max(
            run.former_driver_epoch, self._new_driver_epochs.pop(process, 0)
        )
        for key, value in event.args["puts"]:
            self._chunk(run, decode_key(key), value)
        for body in event.args["bodies"]:
            run.bodies.append(body)
            kind = run.ledger.apply(body)
            if kind == "reclaimed":
                self._check_expired_grant(run, _decode(body), f"{event.actor}/{event.incarnation}")
            elif kind == "advanced" and _decode(body)[2] <= run.former_driver_epoch:
                self.add_violation("S6", f"{run.ledger.run}: a report of a former driver")
            elif kind == "halted" and not run.illegal_action:
                self.add_violation("S2", f"{run.ledger.run}: halted without an illegal action")
            elif kind == "committed" and run.ledger.next_commit > run.sink_end:
                self.add_violation("P1", f"{run.ledger.run}: committed, but not in the sink")
        if announced.args["height"] != len(run.bodies):
            self.add_violation(
                "J2", f"{run.ledger.run}: {len(run.bodies)} is not {announced.args['height']}"
            )
        self._check_durable(run)
        self._check_run_state(run, announced)
        if event.args["checkpoint"] is not None:
            self._checkpoint(run, event.args["checkpoint"])

    def _chunk(self, run: _RunEvents, key: tuple[Any, ...], value: bytes) -> None:
        chunk = _decode(value)
        for seq, result in _decode(chunk[BATCH]) if chunk[BATCH] else []:
            if seq in run.values:
                self.add_violation("S2", f"{run.ledger.run}: {seq} has two results")
            run.values[seq] = result
        for seq, state, *_ in chunk[FINAL_STATES]:
            if seq in run.final_states:
                self.add_violation(
                    "S2", f"{run.ledger.run}: {seq} has two outcomes without a result"
                )
            run.final_states[seq] = state

    def _check_expired_grant(self, run: _RunEvents, entry: list[Any], service: str) -> None:
        """Check an expired grant. A service keeps its own extensions and cannot know those of
        another service."""
        _, decided_ns, epoch, why, *_ = entry
        by, until_ns = run.extensions.get(epoch, ("", 0))
        if why == "expired" and by == service and decided_ns < until_ns:
            self.add_violation(
                "S5", f"{run.ledger.run}: grant {epoch} expired before its extended lease end"
            )

    def _check_durable(self, run: _RunEvents) -> None:
        """Check that the end of a row and its outcome are durable together."""
        ended, skipped, failed, _ = run.ledger.ended
        if len(run.values) != ended:
            self.add_violation(
                "J1", f"{run.ledger.run}: {ended} successes, {len(run.values)} results"
            )
        kept = Counter(run.final_states.values())
        if (kept[SKIP], kept[FAIL]) != (skipped, failed):
            self.add_violation(
                "J1", f"{run.ledger.run}: {skipped} skipped, {failed} failed, stored {kept}"
            )

    # -- run states
    # ----------------------------------------------------------------------------------

    def _on_opened(self, event: HistoryEvent) -> None:
        run = self._run(event.args["run"])
        if event.args["height"] != len(run.bodies):
            self.add_violation("J2", f"{run.ledger.run}: opened at {event.args['height']}")
            return
        # No heartbeat was possible meanwhile, so all grants and their leases restart now.
        for held in run.ledger.grants.values():
            held.last_contact_ns = event.at_ns
        self._check_run_state(run, event)

    def _check_run_state(self, run: _RunEvents, event: HistoryEvent) -> None:
        """Check a run state, live or rebuilt, against the fold of the log."""
        args, ledger = event.args, run.ledger
        if "digest" not in args:
            return
        if list(args["state"]) != ledger.state or list(args["attempts"]) != ledger.attempts:
            self.add_violation(
                "J5", f"{ledger.run}: the run state at {args['height']} differs from the log"
            )
        before = run.run_states.setdefault(args["height"], event)
        if before.args["digest"] != args["digest"]:
            self.add_violation("J5", f"{ledger.run}: two run states at height {args['height']}")
        counts = ledger.counts()
        counters = {
            "terminalCount": sum(counts[SUCCESS:COMMITTED]),
            "inFlightCount": counts[2],
            "dispatchedCount": counts[1],
            "committedCount": counts[COMMITTED],
        }
        recount = (counts, counters, ledger.ended, ledger.terminal_prefix())
        if (args["counts"], args["counters"], args["ended"], args["prefix"]) != recount:
            self.add_violation("S4", f"{ledger.run}: counted {args['counts']}, recount {recount}")

    def _checkpoint(self, run: _RunEvents, dump: bytes) -> None:
        """Check that a checkpoint is the run state at its height."""
        run.checkpoints[len(run.bodies)] = dump
        checkpoint = _decode(dump)
        state: list[int] = []
        attempts: list[int] = []
        for runs, packed in checkpoint[PAGES]:
            assert not packed, "pages here are short"
            for rows, code, tries, _ in runs:
                state += [code] * rows
                attempts += [tries] * rows
        right = (run.ledger.state, run.ledger.attempts, run.ledger.next_commit)
        if (state, attempts, checkpoint[NEXT_COMMIT]) != right:
            self.add_violation("J5", f"{run.ledger.run}: the checkpoint differs from the log")

    def _audit(self, event: HistoryEvent) -> None:
        for name, run in self.runs.items():
            subject = f"run/{name}"
            journal = event.value["journals"].get(subject, {"head": None, "entries": {}})
            head, entries = journal["head"] or {"height": 0, "floor": 1}, journal["entries"]
            floor, height = head["floor"], head["height"]
            if height != len(run.bodies) or sorted(entries) != list(range(floor, height + 1)):
                self.add_violation("J2", f"{name}: heights {sorted(entries)}, head {height}")
            for at, entry in entries.items():
                if not entry["blob"] and run.bodies[at - 1 : at] != [entry["body"]]:
                    self.add_violation("J2", f"{name}: entry {at} differs from the committed one")
            snapshots = event.value["snapshots"].get(subject, {"states": {}, "baseline": None})
            for at, saved in snapshots["states"].items():
                made = run.checkpoints.get(at)
                if made is None or saved["state"] not in (made, None):
                    self.add_violation(
                        "J5", f"{name}: a checkpoint at {at} that is another height's"
                    )
            base = snapshots["baseline"]
            if base is not None and base["height"] not in snapshots["states"]:
                self.add_violation("J4", f"{name}: the baseline {base['height']} is gone")
            if floor > 1 and (base is None or floor > min(snapshots["states"], default=0) + 1):
                self.add_violation(
                    "J4", f"{name}: cut off at {floor}, kept {sorted(snapshots['states'])}"
                )

    # -- outside -------------------------------------------------------------------------------

    def _on_call(self, event: HistoryEvent) -> None:
        args, run = event.args, self._run(event.args["run"])
        place = (args["epoch"], args["seq"])
        if place not in run.ledger.begins:
            self.add_violation(
                "J1", f"{args['run']}: {args['seq']} called before its begin is durable"
            )
        if place in run.calls:
            self.add_violation(
                "P2", f"{args['run']}: {args['seq']} called twice by grant {args['epoch']}"
            )
        run.calls.add(place)
        if args["key"] != f"{args['run']}/{args['seq']}":
            self.add_violation("E3", f"{args['run']}: {args['seq']} called as {args['key']}")

    def _on_ack(self, event: HistoryEvent) -> None:
        args, run = event.args, self._run(event.args["run"])
        place = (args["epoch"], args["n"])
        if run.ledger.replies.get(place) != args["digest"]:
            self.add_violation(
                "J1", f"{args['run']}: report {place} acknowledged, but not in the log"
            )
        if run.acks.setdefault(place, args["told"]) != args["told"]:
            self.add_violation("S2", f"{args['run']}: report {place} has two different answers")

    def _on_new_driver(self, event: HistoryEvent) -> None:
        self._new_driver_epochs[event.actor, event.incarnation] = event.args["epoch"]

    def _on_illegal_action(self, event: HistoryEvent) -> None:
        """An actor is about to do something that must halt the run."""
        self._run(event.args["run"]).illegal_action = True

    def _on_finished(self, event: HistoryEvent) -> None:
        """Check that rows reported as finished to a task are durably final."""
        ledger = self._run(event.args["run"]).ledger
        if any(code < SUCCESS for code in ledger.state[event.args["lo"] : event.args["hi"]]):
            self.add_violation(
                "J1", f"{ledger.run}: reported as finished, but not final in the log"
            )

    def _on_heartbeat(self, event: HistoryEvent) -> None:
        run = self._run(event.args["run"])
        run.extensions[event.args["epoch"]] = (event.args["service"], event.args["expires_ns"])

    def _on_sink_commit(self, event: HistoryEvent) -> None:
        args, run = event.args, self._run(event.args["run"])
        lo, hi = args["lo"], args["hi"]
        if lo != run.sink_end:
            self.add_violation(
                "P1", f"{args['run']}: {lo} to {hi} in the sink after {run.sink_end}"
            )
        if any(code < SUCCESS for code in run.ledger.state[lo:hi]):
            self.add_violation(
                "J1", f"{args['run']}: {lo} to {hi} in the sink, but not final in the log"
            )
        right = [[seq, run.values[seq]] for seq in range(lo, hi) if seq in run.values]
        if args["rows"] != right:
            self.add_violation("P1", f"{args['run']}: the sink has {args['rows']}, not {right}")
        run.sink_end = hi

    def _on_run_end(self, event: HistoryEvent) -> None:
        run, status = self._run(event.args["run"]), event.args["status"]
        ledger = run.ledger
        right = ["halted"] if ledger.phase.halted else []
        # After the last commit, an illegal report may precede or follow the end.
        if not ledger.phase.halted or ledger.next_commit == len(ledger.state):
            right.append("cancelled" if ledger.phase.cancelling else "finished")
        if status not in right:
            self.add_violation("S1", f"{ledger.run}: {status} by its record, {right} by its log")
        if (
            not ledger.phase.halted
            and (run.sink_end, ledger.next_commit) != (len(ledger.state),) * 2
        ):
            self.add_violation(
                "P1", f"{ledger.run}: ended with {run.sink_end} of its rows in the sink"
            )


_STEPS = {
    "_write": _LedgerReplay._on_commit,
    "ledger.live": _LedgerReplay._on_announced,
    "ledger.opened": _LedgerReplay._on_opened,
    "ledger.call": _LedgerReplay._on_call,
    "ledger.acked": _LedgerReplay._on_ack,
    "ledger.anew": _LedgerReplay._on_new_driver,
    "ledger.careless": _LedgerReplay._on_illegal_action,
    "ledger.beat": _LedgerReplay._on_heartbeat,
    "ledger.finished": _LedgerReplay._on_finished,
    "ledger.over": _LedgerReplay._on_run_end,
    "sink.commit": _LedgerReplay._on_sink_commit,
}


def findings(history: History) -> list[Violation]:
    """Return all violations that the replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.store_lives():
        if any(event.op == "ledger.live" for event in life):
            replay = _LedgerReplay(whole=history.config("claims_whole", False))
            for event in life:
                replay.step(event)
            found += replay.found
    return found
