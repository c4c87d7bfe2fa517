"""The judgement of a run of flows under faults, by the book of the outside server alone.

A *fault* is a SIGKILL or a SIGSTOP of a worker process, or an outage of the store (its writer was killed, its server was
restarted). A step is called again only if a fault hit its last call. The rules for two calls of one key, `before` and
`after`, in the order in which the server received them:

    kill    the process of `before` was killed before `after` began
    outage  the store was down at some time between the begin of `before` and the begin of `after`
    stop    the process of `before` was stopped, for longer than its lease, after `before` began and before `after` began
    stale   the process of one of the two calls was stopped earlier, while it had the lease of the flow. It calls the
            function once after it was continued, because it cannot know yet that its lease is over. The answer of this
            call is not recorded.

A fault explains at most one repetition of a step, so a step is called at most 1 + the faults that hit it. Beyond that:

- One step has one key, and one key has one step and one list of arguments.
- The recorded answer of a step is the answer of its last call that is not stale: a recorded step never runs again.
- No step is called after a step that follows it in the program, except once by a stale process: other processes
  finished the flow while it was stopped. The answer of this call is not recorded.
- The answer to a call that was in flight when its process was stopped for longer than a lease is never recorded.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.process.call_server import BookedCall
from tests.process.flow_calls_app import COMPENSATIONS, STAGE_OF

KILL, STOP, OUTAGE = "kill", "stop", "outage"


class FlowFault(NamedTuple):
    """An injected fault and its times on the monotonic clock, which all processes share. The store has pid 0."""

    kind: str
    pid: int
    # Before the signal was sent.
    began_ns: int
    # A process is certainly stopped from here on.
    stopped_ns: int
    # The process was continued, or the store answered again.
    ended_ns: int


class CallRepetition(NamedTuple):
    fault: FlowFault
    # The call of a process that had lost its lease.
    stale: BookedCall | None


class CallJudge:
    """Compares the calls that the call server saw (the book) with the answers that flows recorded. `problems` has
    the violations."""

    def __init__(
        self, book: Sequence[BookedCall], faults: Sequence[FlowFault], recorded: set[str]
    ) -> None:
        self.problems: list[str] = []
        self.repetitions: list[CallRepetition] = []
        self._faults = faults
        self._recorded = recorded
        self._by_key: defaultdict[str, list[BookedCall]] = defaultdict(list)
        for call in sorted(book, key=lambda call: call.began_ns):
            self._by_key[call.key].append(call)
        self._check_keys()
        for calls in self._by_key.values():
            self._explain_repetitions(calls)
        stale = {repeated.stale.token for repeated in self.repetitions if repeated.stale}
        self._live = {
            key: [call for call in calls if call.token not in stale]
            for key, calls in self._by_key.items()
        }
        self._remove_late_stale_calls()
        self._check_recorded(stale)
        self._check_order()
        self.in_flight_at_stops = self._check_stopped()

    def first_calls(self, flow: int) -> list[BookedCall]:
        """The first call of each step of a flow that is not stale, in order."""
        first = [calls[0] for calls in self._live.values() if calls and calls[0].flow == flow]
        return sorted(first, key=lambda call: call.began_ns)

    def _check_keys(self) -> None:
        key_of: dict[tuple[int, str], str] = {}
        for key, calls in self._by_key.items():
            if len({(call.flow, call.step, repr(call.detail)) for call in calls}) > 1:
                self.problems.append(f"{key} is the key of several steps: {calls}")
            step = calls[0].flow, calls[0].step
            if key_of.setdefault(step, key) != key:
                self.problems.append(f"{step} has the keys {key_of[step]} and {key}")

    def _explain_repetitions(self, calls: list[BookedCall]) -> None:
        used: set[FlowFault] = set()
        for before, after in itertools.pairwise(calls):
            found = self._find_fault(before, after, used)
            if found is None:
                pids = (0, before.pid, after.pid)
                faults = [fault for fault in self._faults if fault.pid in pids]
                self.problems.append(f"{after} repeats {before} without a fault: {faults}")
            else:
                used.add(found.fault)
                self.repetitions.append(found)

    def _find_fault(
        self, before: BookedCall, after: BookedCall, used: set[FlowFault]
    ) -> CallRepetition | None:
        unused = [
            fault
            for fault in self._faults
            if fault not in used and fault.began_ns <= after.began_ns
        ]
        # After a recorded call only a stale one may follow.
        is_recorded = before.token in self._recorded
        for fault in sorted(unused, key=lambda fault: fault.kind == OUTAGE):
            # A killed process begins no further call. A stop and an outage hit the calls until their end.
            is_hit = fault.kind == KILL or fault.ended_ns >= before.began_ns
            if fault.pid in (0, before.pid) and is_hit and not is_recorded:
                return CallRepetition(fault, None)
        for stale in (before, after):
            for fault in unused:
                is_stale = fault.kind == STOP and fault.ended_ns <= stale.began_ns
                if fault.pid == stale.pid and is_stale and stale.token not in self._recorded:
                    return CallRepetition(fault, stale)
        return None

    def _check_recorded(self, stale: set[str]) -> None:
        for calls in self._live.values():
            recorded = [call for call in calls if call.token in self._recorded]
            if recorded and recorded[0] is not calls[-1]:
                self.problems.append(f"{calls[-1]} came after the recorded {recorded[0]}")
        tokens = {call.token for calls in self._by_key.values() for call in calls}
        if unknown := self._recorded - tokens:
            self.problems.append(f"answers that the server never gave: {sorted(unknown)}")

    def _remove_late_stale_calls(self) -> None:
        """Remove the calls of stale processes after a later step of the flow. A fault explains one call of each step."""
        used = {(found.fault, found.stale.key) for found in self.repetitions if found.stale}
        for calls in self._live_by_flow():
            latest = 0
            for call in calls:
                stage = STAGE_OF[call.step]
                fault = self._find_stop_before(call) if stage < latest else None
                if fault is None or (fault, call.key) in used:
                    latest = max(latest, stage)
                else:
                    used.add((fault, call.key))
                    self._live[call.key].remove(call)

    def _find_stop_before(self, call: BookedCall) -> FlowFault | None:
        """Return a stop of the process of a call that is not recorded, if it was continued before the call."""
        if call.token in self._recorded:
            return None
        stops = [fault for fault in self._faults if fault.kind == STOP and fault.pid == call.pid]
        return next((fault for fault in stops if fault.ended_ns <= call.began_ns), None)

    def _live_by_flow(self) -> list[list[BookedCall]]:
        by_flow: defaultdict[int, list[BookedCall]] = defaultdict(list)
        for calls in self._live.values():
            for call in calls:
                by_flow[call.flow].append(call)
        return [sorted(calls, key=lambda call: call.began_ns) for calls in by_flow.values()]

    def _check_order(self) -> None:
        for calls in self._live_by_flow():
            for before, after in itertools.pairwise(calls):
                if STAGE_OF[after.step] < STAGE_OF[before.step]:
                    self.problems.append(f"{after} came after {before}")

    def _check_stopped(self) -> int:
        """Check the calls in flight at a stop, and return their number."""
        found = 0
        for fault in self._faults:
            if fault.kind != STOP:
                continue
            for calls in self._by_key.values():
                for call in calls:
                    was_in_flight = (
                        call.pid == fault.pid
                        and call.began_ns < fault.ended_ns
                        and call.ended_ns > fault.stopped_ns
                    )
                    found += was_in_flight
                    if was_in_flight and call.token in self._recorded:
                        self.problems.append(f"{call} was recorded after its lease: {fault}")
        return found


def check_compensations(
    steps: Mapping[str, BookedCall], recorded: Mapping[str, str], *, is_failed: bool
) -> list[str]:
    """Return the faults in the compensations of a flow that did not complete.

    `steps` has the first call of each step in the order of the calls, `recorded` the recorded answers by step. A
    compensation is recorded with the next commit after its registration. So a cancelled flow has it for certain when
    a step of a later commit was called, and it cannot have it when the step before it was not called.
    """
    problems: list[str] = []
    done = [step for step in steps if step in COMPENSATIONS]
    required = {"release": {"pack", "label"}, "unpack": {"carry", "bill"}}
    possible = {"release": {"reserve"}, "unpack": {"pack", "label"}}
    for step in COMPENSATIONS:
        if is_failed or required[step] & steps.keys():
            if step not in done:
                problems.append(f"{step} did not run: {list(steps)}")
        elif step in done and not possible[step] <= steps.keys():
            problems.append(f"{step} ran without its step: {list(steps)}")
    if done != [step for step in COMPENSATIONS if step in done]:
        problems.append(f"compensations in the order {done}")
    for step, of in (("release", ["reserve"]), ("unpack", ["pack", "label"])):
        if step in done:
            given = steps[step].detail
            if (given if isinstance(given, list) else [given]) != [
                recorded.get(name) for name in of
            ]:
                problems.append(f"{step} of {given}, recorded is {recorded}")
    return problems
