"""The rules for the records of one run of a flow, as an audit shows them (X1, X2).

Each rule takes the records in order and yields the violated invariant with a text. `check_flows` calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]
StepName = tuple[str, int]

UNDO = "undo:"
RUNNING, WAITING, PARKED, COMPENSATING, COMPLETED, FAILED, CANCELLED, DEAD = range(8)
# The steps whose arguments differ between the releases are in this flow. Its result is a list of equal numbers.
PRICED = "priced"
_UNDO = ("name", "occurrence", "position")
# The code of this flow returns the texts of all events that it got.
RACE = "race"


def is_outcome(record: Plain) -> bool:
    return record["kind"] in ("completed", "failure")


def identity_of(record: Plain) -> StepName:
    return record["name"], record["occurrence"]


def outcomes_after_redrives(records: Iterable[Plain]) -> list[Plain]:
    """The outcomes without the failures that a redrive repeats: the failed step with the failures after it, or one
    compensation."""
    found: list[Plain] = []
    for record in records:
        if is_outcome(record):
            found.append(record)
        elif record["kind"] == "redriven":
            found = _before_redrive(found, identity_of(record))
        elif record["kind"] == "undo_redriven":
            found = [one for one in found if identity_of(one) != identity_of(record)]
    return found


def _before_redrive(outcomes: list[Plain], failed: StepName) -> list[Plain]:
    kept: list[Plain] = []
    is_reached = False
    for record in outcomes:
        is_failure = record["kind"] == "failure"
        is_reached = is_reached or (is_failure and identity_of(record) == failed)
        if not (is_reached and is_failure):
            kept.append(record)
    return kept


def copied_records(body: Plain, run: int, records: list[Plain]) -> int:
    """The number of records that a fork took over: those of the commit that made it, in its first run."""
    if not body.get("fork_of") or run != 1 or not records or records[0]["kind"] != "forked":
        return 0
    count = 0
    for record in records:
        is_copy = record["decided_ns"] == records[0]["decided_ns"]
        if not is_copy or record["kind"] not in ("forked", "completed", "failure", "published"):
            break
        count += 1
    return count


def check_outcomes(path: str, records: list[Plain]) -> Findings:
    """Each step has one outcome, except after a redrive, and nothing follows the end."""
    ended = False
    for record in records:
        if record["kind"] in ("redriven", "undo_redriven"):
            ended = False
            continue
        if ended:
            yield "X1", f"run {path} has a record after its end: {record['kind']}"
        ended |= record["kind"] == "ended"
    seen: set[StepName] = set()
    for record in outcomes_after_redrives(records):
        if identity_of(record) in seen:
            yield "X1", f"run {path} has two outcomes of {identity_of(record)}"
        seen.add(identity_of(record))


def check_compensations(path: str, records: list[Plain]) -> Findings:
    """Compensations run after their start, once each, in the reverse order of their registration. A flow that is
    cancelled while it is parked runs none."""
    registered: list[StepName] = []
    expected: list[StepName] | None = None
    parked = False
    for record in records:
        if record["kind"] == "undo":
            if expected is not None:
                yield "X2", f"run {path} registers a compensation after they started"
            registered.append(identity_of(record))
        elif record["kind"] == "compensation":
            if expected is not None:
                yield "X2", f"run {path} starts its compensations twice"
            expected = list(reversed(registered))
        elif record["kind"] == "redriven":
            expected = None
        elif record["kind"] == "undo_redriven":
            expected = [*(expected or []), _compensated(record)]
        elif record["kind"] in ("parked", "resumed"):
            parked = record["kind"] == "parked"
        elif is_outcome(record) and record["name"].startswith(UNDO):
            identity = _compensated(record)
            if not expected or identity != expected[0]:
                yield "X2", f"run {path} compensates {identity}, not {(expected or [None])[0]}"
            else:
                del expected[0]
        elif record["kind"] == "ended" and record["state"] not in (COMPLETED, DEAD) and not parked:
            if expected is None and registered:
                yield "X2", f"run {path} ends without its compensations"
            elif expected:
                yield "X2", f"run {path} ends before its compensations {expected}"


def _compensated(record: Plain) -> StepName:
    """The registration of a compensation."""
    return record["name"].removeprefix(UNDO), record["occurrence"]


def check_cause(path: str, records: list[Plain], *, is_last: bool) -> Findings:
    """A recorded cancellation or timeout decides the end. None is recorded after the start of the compensations, and
    the flow ends as CANCELLED only after its cancellation."""
    causes: set[str] = set()
    compensating = parked = False
    for record in records:
        kind = record["kind"]
        if kind == "redriven":
            causes, compensating = set(), False
        elif kind in ("parked", "resumed"):
            parked = kind == "parked"
        elif kind in ("cancel", "timed_out"):
            is_late = compensating or "cancel" in causes or kind in causes
            if is_late and not (parked and kind == "cancel"):
                yield "X2", f"run {path} has a {kind} record after {sorted(causes)}"
            causes.add(kind)
        elif kind in ("compensation", "ended"):
            compensating = compensating or kind == "compensation"
            allowed = [(CANCELLED, "cancelled")] if "cancel" in causes else []
            allowed += [(FAILED, "timeout")] if "timed_out" in causes else []
            end = (record["state"], record["code"])
            if causes and record["state"] != DEAD and end not in allowed:
                yield "X2", f"run {path} ends as {end} after {sorted(causes)}"
            if record["state"] == CANCELLED and "cancel" not in causes:
                yield "X2", f"run {path} is cancelled without a cancellation"
    if causes and not is_last:
        yield "X2", f"run {path} continues as the next run after {sorted(causes)}"


def check_fork(
    path: str, copied: list[Plain], own: list[Plain], parent_runs: list[list[Plain]]
) -> Findings:
    """A fork takes over outcomes of its parent, as they are, with lower positions than the step of the fork. It
    compensates its own steps only."""
    position = copied[0]["position"]
    known = [_content(record) for run in parent_runs for record in run if is_outcome(record)]
    yield from _check_undos_of_parent(path, copied, own, parent_runs)
    if copied[0]["taken"] != len(copied) - 1:
        yield "X1", f"run {path} counts {copied[0]['taken']} records of its parent"
    for record in copied:
        if is_outcome(record) and _content(record) not in known:
            yield "X1", f"run {path} took over {identity_of(record)}, which its parent has not"
        if is_outcome(record) and record["position"] >= position:
            yield "X1", f"run {path} took over {identity_of(record)} from behind its fork"


def _check_undos_of_parent(
    path: str, copied: list[Plain], own: list[Plain], parent_runs: list[list[Plain]]
) -> Findings:
    """A fork registers no compensation that its parent had registered behind the first step that the fork took over."""
    position, forked_ns = copied[0]["position"], copied[0]["decided_ns"]
    steps = [one for one in copied if is_outcome(one) and not one["name"].startswith("hf.")]
    first = min((record["position"] for record in steps), default=position)
    required: set[StepName] = set()
    allowed: set[StepName] = set()
    # The last run of the parent at the time of the fork.
    before = [run for run in parent_runs if run and run[0]["decided_ns"] <= forked_ns]
    for record in before[-1] if before else []:
        undos = [record] if record["kind"] == "undo" else []
        if record["kind"] == "forked":
            undos = [dict(zip(_UNDO, undo, strict=True)) for undo in record["undos"]]
        found = {identity_of(one) for one in undos if first < one["position"] < position}
        # Two commits may have one time.
        allowed |= found if record["decided_ns"] <= forked_ns else set()
        required |= found if record["decided_ns"] < forked_ns else set()
    stated = {(name, occurrence) for name, occurrence, _ in copied[0]["undos"]}
    if not required <= stated <= allowed:
        yield "X2", f"run {path} states {sorted(stated)} as compensations of its parent"
    for record in own:
        if record["kind"] == "undo" and identity_of(record) in required:
            yield "X2", f"run {path} registers {identity_of(record)} of its parent"


def _content(record: Plain) -> Plain:
    return {name: value for name, value in record.items() if name != "decided_ns"}


def check_divergence(path: str, name: str, records: list[Plain]) -> Findings:
    """A flow is parked only if a release asks for its steps with other arguments."""
    if name != PRICED and any(record["kind"] == "parked" for record in records):
        yield "X1", f"run {path} of {name} is parked, and no release changed it"
