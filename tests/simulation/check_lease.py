"""Checkers of leases: L1 to L9, and the lease part of S1.

`Model` is the sequential lease that L8 compares with. The other checkers use it to determine the
holder at a point in time. This module uses no product code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from tests.simulation.lease_events import expand
from tests.simulation.violation import Violation

Plain = dict[str, Any]

# Legal successors of each record kind in a lease log.
LEASE_MOVES = {
    "": {"granted"},
    "granted": {"expired", "released", "forced"},
    "expired": {"granted", "released", "forced"},
    "released": {"granted", "forced"},
    "forced": {"granted", "forced"},
}
# Operations that end a lease.
LEASE_ENDS = ("lease.release", "lease.force_release", "lease.evict", "lease.burn")
SWEEPS = frozenset(
    {"truncate_journal", "compact_journal", "prune_snapshots", "compact", "_cut", "_run_guarded"}
)
# Operations on a lease are not writes guarded by it.
LEASE_OP_PREFIXES = ("lease.", "leader_lease.")


@dataclass
class LeaseModel:
    """Sequential model of one lease: its holder, fence and expiry."""

    holder: tuple[str, str] | None = None
    fence: tuple[int, int] = (0, 0)  # generation, epoch
    expires_ns: int = 0
    stale: bool = False
    is_outdated: bool = False  # an older backup was restored since the grant

    def is_live(self, now: int) -> bool:
        return self.holder is not None and not self.is_outdated and now < self.expires_ns

    def holds(self, lease: Plain) -> bool:
        return self.holder == _holder(lease) and self.fence == _fence(lease)

    def apply(self, event: HistoryEvent, resource: str) -> None:
        """Apply a committed operation, whether or not it should have been allowed."""
        if event.op == "lease.acquire":
            self.holder, self.fence = _holder(event.value), _fence(event.value)
            self.expires_ns, self.stale, self.is_outdated = event.value["expires_ns"], False, False
        elif event.op == "lease.renew":
            for lease in event.value:
                if lease is not None and lease["resource"] == resource:
                    self.expires_ns = lease["expires_ns"]
        elif event.op == "lease.leave":
            if self.holds(event.args["lease"]) and not self.is_outdated:
                self.holder, self.stale = None, False
        elif event.op in LEASE_ENDS:
            self.holder, self.stale = None, False
            if event.op == "lease.burn":
                self.fence = (self.fence[0], self.fence[1] + 1)
        elif event.op == "lease.mark_stale" and event.value:
            self.stale = True


class LeaseModels(dict[str, LeaseModel]):
    """All leases of one life of the store."""

    def __missing__(self, resource: str) -> LeaseModel:
        self[resource] = LeaseModel()
        return self[resource]

    def step(self, event: HistoryEvent) -> None:
        if event.op == "restore":
            for model in self.values():
                model.is_outdated = True
        elif event.applied and event.op.startswith("lease."):
            for resource in _resources(event):
                self[resource].apply(event, resource)


def check_l1(history: History) -> Iterator[Violation]:
    """Validity intervals of different holders are disjoint."""
    for life in _expanded_lives(history):
        models = LeaseModels()
        for event in life:
            if event.op == "lease.acquire" and event.applied:
                model, holder = models[event.args["resource"]], _holder(event.value)
                if model.is_live(event.at_ns) and model.holder != holder:
                    what = (
                        f"{event.args['resource']}: {holder} granted while {model.holder} is valid"
                    )
                    yield Violation("L1", what, event)
            models.step(event)


def check_l2(history: History) -> Iterator[Violation]:
    """Fences strictly increase per grant over the whole history, restores included."""
    last: dict[str, tuple[tuple[int, int], tuple[str, str], bool]] = {}
    for event in expand(history):
        if not event.applied:
            continue
        if event.op == "lease.acquire":
            resource, fence, holder = (
                event.args["resource"],
                _fence(event.value),
                _holder(event.value),
            )
            before = last.get(resource)
            if before is not None:
                again = before[:2] == (fence, holder) and before[2]
                if not again and fence <= before[0]:
                    yield Violation("L2", f"{resource}: {fence} granted after {before[0]}", event)
            last[resource] = (max(fence, before[0] if before else fence), holder, True)
        elif event.op in LEASE_ENDS or event.op == "lease.leave":
            [resource] = _resources(event)
            if resource in last and _is_ended(event, last[resource]):
                last[resource] = (*last[resource][:2], False)


def _is_ended(event: HistoryEvent, last: tuple[tuple[int, int], tuple[str, str], bool]) -> bool:
    """Whether the lease ended. A holder may release a lease that it no longer has."""
    if event.op != "lease.leave":
        return True
    lease = event.args["lease"]
    return (_fence(lease), _holder(lease)) == last[:2]


def check_l3(history: History) -> Iterator[Violation]:
    """Every applied guarded write has the current fence and holder, and is in time."""
    for life in _expanded_lives(history):
        yield from _check_guarded(life, "L3", lambda op: op not in SWEEPS)


def check_l4(history: History) -> Iterator[Violation]:
    """A successful renewal keeps holder and fence, and precedes the expiry."""
    for life in _expanded_lives(history):
        models = LeaseModels()
        for event in life:
            if event.op == "lease.renew" and event.applied:
                for asked, given in zip(event.args["leases"], event.value, strict=True):
                    if given is None:
                        continue
                    model = models[asked["resource"]]
                    if not model.holds(asked) or not model.is_live(event.at_ns):
                        yield Violation(
                            "L4", f"{asked['resource']}: renewed a lease not live", event
                        )
                    elif (_holder(given), _fence(given)) != (_holder(asked), _fence(asked)):
                        yield Violation(
                            "L4", f"{asked['resource']}: renewal changed the lease", event
                        )
            models.step(event)


def check_l5(history: History) -> Iterator[Violation]:
    """The record of an expiry precedes a grant that follows it."""
    for life in _expanded_lives(history):
        for audit in _last_audit(life):
            yield from _check_log(audit, "L5", only_expiry=True)


def check_s1(history: History) -> Iterator[Violation]:
    """The lease log contains only legal transitions, each under its own fence."""
    for life in _expanded_lives(history):
        for audit in _last_audit(life):
            yield from _check_log(audit, "S1", only_expiry=False)


def check_l6(history: History) -> Iterator[Violation]:
    """After its first fence failure an incarnation commits nothing for that resource."""
    for life in _expanded_lives(history):
        fenced: dict[tuple[str, str, str], HistoryEvent] = {}
        for event in life:
            if event.op == "lease.acquire" and event.applied:
                # From now on it acts under a new lease.
                fenced.pop((event.actor, event.incarnation, event.args["resource"]), None)
            resource = _lease_of(event).get("resource")
            if resource is None or event.op.startswith(LEASE_OP_PREFIXES):
                continue
            process = (event.actor, event.incarnation, resource)
            if event.code == "fenced":
                fenced.setdefault(process, event)
            elif event.applied and process in fenced:
                yield Violation(
                    "L6", f"{resource}: committed after it was fenced", event, fenced[process]
                )


def check_l7(history: History) -> Iterator[Violation]:
    """Deletes by a holder obey L3. (`check_queue` checks claims, the other token.)"""
    for life in _expanded_lives(history):
        yield from _check_guarded(life, "L7", lambda op: op in SWEEPS)
        yield from _check_purges(life)


def check_l8(history: History) -> Iterator[Violation]:
    """Every lease operation, also a failed one, returns what the sequential model returns."""
    for life in _expanded_lives(history):
        models = LeaseModels()
        for event in life:
            if event.op.startswith("lease.") and event.result != "unknown":
                for resource in _resources(event):
                    why = _disagreement(models[resource], event, resource)
                    if why:
                        yield Violation("L8", f"{resource}: {why}", event)
            models.step(event)


def check_l9(history: History) -> Iterator[Violation]:
    """No renewal happens later than the limit after the loop's last progress."""
    bound = history.config("progress_ns", 0)
    progress: dict[tuple[str, str], int] = {}
    for event in history:
        process = (event.actor, event.incarnation)
        if event.op == "progress":
            progress[process] = event.args["boot_ns"]
        elif event.op == "renewing":
            idle = event.args["boot_ns"] - progress.get(process, event.args["boot_ns"])
            if idle > bound:
                yield Violation("L9", f"renewed after {idle / 1e9:.3f} s without progress", event)


# -- the model against one event -----------------------------------------------------------------


def _disagreement(model: LeaseModel, event: HistoryEvent, resource: str) -> str | None:
    now, args, value = event.at_ns, event.args, event.value
    failed = event.code
    if failed and failed not in ("held", "fenced", "not_found"):
        return None  # an error of the store, not an answer about the lease
    if event.op == "lease.acquire":
        me = (args["worker"], args["incarnation"])
        if model.is_live(now) and model.holder != me:
            return None if failed == "held" else "granted although held"
        if failed:
            return "refused although free"
        if model.is_live(now):
            same = model.holds(value) and value["expires_ns"] == model.expires_ns
            return None if same else "the same incarnation got another lease"
        if _fence(value)[1] != model.fence[1] + 1:
            return f"epoch {_fence(value)[1]} follows {model.fence[1]}"
        return None if value["expires_ns"] == now + args["ttl_ns"] else "a wrong expiry"
    if event.op == "lease.renew":
        for asked, given in zip(args["leases"], value if not failed else [], strict=not failed):
            if asked["resource"] == resource:
                should = model.holds(asked) and model.is_live(now)
                if should != (given is not None):
                    return "renewed a lease not live" if given else "refused a live lease"
                if given and given["expires_ns"] != max(model.expires_ns, now + args["ttl_ns"]):
                    return "a wrong expiry"
        return None
    if event.op == "lease.release":
        should = model.holds(args["lease"]) and not model.is_outdated
        return (
            None if should == (not failed) else "released by another" if not failed else "refused"
        )
    if event.op == "lease.force_release":
        if not model.fence[1]:
            return None if failed == "not_found" else "released a lease that was never granted"
        return None if not failed and value == model.fence[1] else "another epoch was forced"
    if event.op == "lease.mark_stale":
        overdue = model.holder is not None and not model.is_live(now) and not model.stale
        return None if failed or bool(value) == overdue else "stale and overdue differ"
    return None


def _check_guarded(
    life: list[HistoryEvent], number: str, wanted: Callable[[str], bool]
) -> Iterator[Violation]:
    models = LeaseModels()
    for event in life:
        lease = _lease_of(event)
        if (
            lease
            and event.applied
            and not event.op.startswith(LEASE_OP_PREFIXES)
            and wanted(event.op)
        ):
            model = models[lease["resource"]]
            if not model.holds(lease) or model.stale or model.is_outdated:
                yield Violation(number, f"{event.op} under a fence that is not current", event)
            elif event.at_ns >= model.expires_ns:
                yield Violation(number, f"{event.op} after the lease expired", event)
        models.step(event)


def _check_purges(life: list[HistoryEvent]) -> Iterator[Violation]:
    """Check that a world held by a worker is purged only with `force`."""
    models = LeaseModels()
    for event in life:
        if event.op == "purge.begin_purge" and event.applied and not event.args["force"]:
            resource = f"{event.args['universe']}/{event.args['world_id']}"
            if models[resource].is_live(event.at_ns):
                yield Violation("L7", f"{resource}: purged while it is held", event)
        models.step(event)


def _check_log(audit: HistoryEvent, number: str, *, only_expiry: bool) -> Iterator[Violation]:
    last: dict[str, Plain] = {}
    log = audit.value.get("lease_log", [])
    whole = not log or log[0].get("n", 1) == 1
    for record in log:
        resource, kind = record["resource"], record["kind"]
        if resource not in last and not whole:
            last[resource] = record  # earlier records were truncated
            continue
        before = last.get(resource, {"kind": "", "generation": 0, "epoch": 0})
        if only_expiry:
            if before["kind"] == kind == "granted":
                yield Violation(
                    number, f"{resource}: granted over {before}, no expiry written", audit
                )
        elif kind not in LEASE_MOVES[before["kind"]]:
            yield Violation(
                number, f"{resource}: {kind} after {before['kind'] or 'nothing'}", audit
            )
        elif kind != "granted" and record["epoch"] != before["epoch"]:
            yield Violation(number, f"{resource}: {kind} of epoch {record['epoch']}", audit)
        elif (
            kind == "expired"
            and record["generation"] == audit.value.get("generation", record["generation"])
            and record["decided_ns"] < record["expires_ns"]
        ):
            yield Violation(number, f"{resource}: expired before its time", audit)
        last[resource] = record


def _expanded_lives(history: History) -> list[list[HistoryEvent]]:
    if history.lease_lives is None:
        history.lease_lives = [list(expand(life)) for life in history.store_lives()]
    return history.lease_lives


def _last_audit(life: list[HistoryEvent]) -> list[HistoryEvent]:
    """The last audit of a life. It holds the whole log, of which earlier audits hold prefixes."""
    return [event for event in life if event.op == "audit"][-1:]


def _lease_of(event: HistoryEvent) -> Plain:
    lease = event.args.get("lease") or event.args.get("held")
    return lease if isinstance(lease, dict) else {}


def _resources(event: HistoryEvent) -> list[str]:
    if "leases" in event.args:
        return [lease["resource"] for lease in event.args["leases"]]
    if "lease" in event.args:
        return [event.args["lease"]["resource"]]
    return [event.args["resource"]] if "resource" in event.args else []


def _holder(lease: Plain) -> tuple[str, str]:
    return (lease["worker"], lease["incarnation"])


def _fence(lease: Plain) -> tuple[int, int]:
    return (lease["generation"], lease["epoch"])
