"""Checkers of leases: L1 to L9, and the lease's part of S1.

`Model` is the ten-line sequential lease that L8 compares with; the others use it to know who held
what when. Nothing here is the product's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.sim.history import Event, History
from holdfast.sim.lease_events import expanded
from holdfast.sim.violation import Violation

Plain = dict[str, Any]

# The legal moves of a lease's log: after which record may which other one come?
LEASE_MOVES = {
    "": {"granted"},
    "granted": {"expired", "released", "forced"},
    "expired": {"granted", "released", "forced"},
    "released": {"granted", "forced"},
    "forced": {"granted", "forced"},
}
# What a holder deletes needs its lease just as what it writes.
ENDS = ("lease.release", "lease.force_release", "lease.evict", "lease.burn")
SWEEPS = frozenset(
    {"truncate_journal", "compact_journal", "prune_snapshots", "compact", "_cut", "_guarded"}
)
# What is about a lease is no write under it.
ABOUT = ("lease.", "authority.")


@dataclass
class Model:
    """One lease, sequentially: who holds it, under which fence, until when."""

    holder: tuple[str, str] | None = None
    fence: tuple[int, int] = (0, 0)  # generation, epoch
    expires_ns: int = 0
    stale: bool = False
    outdated: bool = False  # a backup from before was restored since the grant

    def live(self, now: int) -> bool:
        return self.holder is not None and not self.outdated and now < self.expires_ns

    def holds(self, lease: Plain) -> bool:
        return self.holder == _holder(lease) and self.fence == _fence(lease)

    def apply(self, event: Event, resource: str) -> None:
        """What a committed operation does, whether or not it should have been allowed."""
        if event.op == "lease.acquire":
            self.holder, self.fence = _holder(event.value), _fence(event.value)
            self.expires_ns, self.stale, self.outdated = event.value["expires_ns"], False, False
        elif event.op == "lease.renew":
            for lease in event.value:
                if lease is not None and lease["resource"] == resource:
                    self.expires_ns = lease["expires_ns"]
        elif event.op == "lease.leave":
            if self.holds(event.args["lease"]) and not self.outdated:
                self.holder, self.stale = None, False
        elif event.op in ENDS:
            self.holder, self.stale = None, False
            if event.op == "lease.burn":
                self.fence = (self.fence[0], self.fence[1] + 1)
        elif event.op == "lease.mark_stale" and event.value:
            self.stale = True


class Models(dict[str, Model]):
    """Every lease of one life of the store."""

    def __missing__(self, resource: str) -> Model:
        self[resource] = Model()
        return self[resource]

    def step(self, event: Event) -> None:
        if event.op == "restore":
            for model in self.values():
                model.outdated = True
        elif event.applied and event.op.startswith("lease."):
            for resource in _resources(event):
                self[resource].apply(event, resource)


def check_l1(history: History) -> Iterator[Violation]:
    """Intervals of different holders are disjoint."""
    for life in _lives(history):
        models = Models()
        for event in life:
            if event.op == "lease.acquire" and event.applied:
                model, holder = models[event.args["resource"]], _holder(event.value)
                if model.live(event.at_ns) and model.holder != holder:
                    what = (
                        f"{event.args['resource']}: {holder} granted while {model.holder} is valid"
                    )
                    yield Violation("L1", what, event)
            models.step(event)


def check_l2(history: History) -> Iterator[Violation]:
    """Fences strictly increase per grant, over all that ever happened, restores included."""
    last: dict[str, tuple[tuple[int, int], tuple[str, str], bool]] = {}
    for event in expanded(history):
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
        elif event.op in ENDS or event.op == "lease.leave":
            [resource] = _resources(event)
            if resource in last and _ended(event, last[resource]):
                last[resource] = (*last[resource][:2], False)


def _ended(event: Event, last: tuple[tuple[int, int], tuple[str, str], bool]) -> bool:
    """Whether the lease is over: somebody may have left one that he had no more."""
    if event.op != "lease.leave":
        return True
    lease = event.args["lease"]
    return (_fence(lease), _holder(lease)) == last[:2]


def check_l3(history: History) -> Iterator[Violation]:
    """Every guarded write that was applied: current fence, its holder, and in time."""
    for life in _lives(history):
        yield from _guarded(life, "L3", lambda op: op not in SWEEPS)


def check_l4(history: History) -> Iterator[Violation]:
    """A renewal that succeeded: same holder, same fence, not yet expired."""
    for life in _lives(history):
        models = Models()
        for event in life:
            if event.op == "lease.renew" and event.applied:
                for asked, given in zip(event.args["leases"], event.value, strict=True):
                    if given is None:
                        continue
                    model = models[asked["resource"]]
                    if not model.holds(asked) or not model.live(event.at_ns):
                        yield Violation(
                            "L4", f"{asked['resource']}: renewed a lease not live", event
                        )
                    elif (_holder(given), _fence(given)) != (_holder(asked), _fence(asked)):
                        yield Violation(
                            "L4", f"{asked['resource']}: renewal changed the lease", event
                        )
            models.step(event)


def check_l5(history: History) -> Iterator[Violation]:
    """A grant that follows an expiry is preceded by the record of it."""
    for life in _lives(history):
        for audit in _audits(life):
            yield from _log_moves(audit, "L5", only_expiry=True)


def check_s1(history: History) -> Iterator[Violation]:
    """The lease log makes only legal moves, each under the fence it speaks of."""
    for life in _lives(history):
        for audit in _audits(life):
            yield from _log_moves(audit, "S1", only_expiry=False)


def check_l6(history: History) -> Iterator[Violation]:
    """After its first fence failure an incarnation commits nothing more for that resource."""
    for life in _lives(history):
        fenced: dict[tuple[str, str, str], Event] = {}
        for event in life:
            if event.op == "lease.acquire" and event.applied:
                # What it does from now on it does under another lease.
                fenced.pop((event.actor, event.incarnation, event.args["resource"]), None)
            resource = _lease_of(event).get("resource")
            if resource is None or event.op.startswith(ABOUT):
                continue
            who = (event.actor, event.incarnation, resource)
            if event.code == "fenced":
                fenced.setdefault(who, event)
            elif event.applied and who in fenced:
                yield Violation(
                    "L6", f"{resource}: committed after it was fenced", event, fenced[who]
                )


def check_l7(history: History) -> Iterator[Violation]:
    """What a holder deletes obeys L3. (Claims, the other token, are judged in check_queue.)"""
    for life in _lives(history):
        yield from _guarded(life, "L7", lambda op: op in SWEEPS)
        yield from _purged(life)


def check_l8(history: History) -> Iterator[Violation]:
    """Every lease operation, failed ones too, answers as the sequential model does."""
    for life in _lives(history):
        models = Models()
        for event in life:
            if event.op.startswith("lease.") and event.result != "unknown":
                for resource in _resources(event):
                    why = _disagrees(models[resource], event, resource)
                    if why:
                        yield Violation("L8", f"{resource}: {why}", event)
            models.step(event)


def check_l9(history: History) -> Iterator[Violation]:
    """No renewal later than the bound after the loop's last progress."""
    bound = history.config("progress_ns", 0)
    progress: dict[tuple[str, str], int] = {}
    for event in history:
        who = (event.actor, event.incarnation)
        if event.op == "progress":
            progress[who] = event.args["boot_ns"]
        elif event.op == "renewing":
            idle = event.args["boot_ns"] - progress.get(who, event.args["boot_ns"])
            if idle > bound:
                yield Violation("L9", f"renewed after {idle / 1e9:.3f} s without progress", event)


# -- the model against one event -----------------------------------------------------------------


def _disagrees(model: Model, event: Event, resource: str) -> str | None:
    now, args, value = event.at_ns, event.args, event.value
    failed = event.code
    if failed and failed not in ("held", "fenced", "not_found"):
        return None  # the store's own trouble, not an answer about the lease
    if event.op == "lease.acquire":
        me = (args["worker"], args["incarnation"])
        if model.live(now) and model.holder != me:
            return None if failed == "held" else "granted although held"
        if failed:
            return "refused although free"
        if model.live(now):
            same = model.holds(value) and value["expires_ns"] == model.expires_ns
            return None if same else "the same incarnation got another lease"
        if _fence(value)[1] != model.fence[1] + 1:
            return f"epoch {_fence(value)[1]} follows {model.fence[1]}"
        return None if value["expires_ns"] == now + args["ttl_ns"] else "a wrong expiry"
    if event.op == "lease.renew":
        for asked, given in zip(args["leases"], value if not failed else [], strict=not failed):
            if asked["resource"] == resource:
                should = model.holds(asked) and model.live(now)
                if should != (given is not None):
                    return "renewed a lease not live" if given else "refused a live lease"
                if given and given["expires_ns"] != max(model.expires_ns, now + args["ttl_ns"]):
                    return "a wrong expiry"
        return None
    if event.op == "lease.release":
        should = model.holds(args["lease"]) and not model.outdated
        return (
            None if should == (not failed) else "released by another" if not failed else "refused"
        )
    if event.op == "lease.force_release":
        if not model.fence[1]:
            return None if failed == "not_found" else "released what was never granted"
        return None if not failed and value == model.fence[1] else "another epoch was forced"
    if event.op == "lease.mark_stale":
        overdue = model.holder is not None and not model.live(now) and not model.stale
        return None if failed or bool(value) == overdue else "stale and overdue differ"
    return None


def _guarded(life: list[Event], number: str, wanted: Callable[[str], bool]) -> Iterator[Violation]:
    models = Models()
    for event in life:
        lease = _lease_of(event)
        if lease and event.applied and not event.op.startswith(ABOUT) and wanted(event.op):
            model = models[lease["resource"]]
            if not model.holds(lease) or model.stale or model.outdated:
                yield Violation(number, f"{event.op} under a fence that is not current", event)
            elif event.at_ns >= model.expires_ns:
                yield Violation(number, f"{event.op} after the lease expired", event)
        models.step(event)


def _purged(life: list[Event]) -> Iterator[Violation]:
    """A world that a worker holds is purged by force alone."""
    models = Models()
    for event in life:
        if event.op == "purge.begin" and event.applied and not event.args["force"]:
            resource = f"{event.args['universe']}/{event.args['world_id']}"
            if models[resource].live(event.at_ns):
                yield Violation("L7", f"{resource}: purged while it is held", event)
        models.step(event)


def _log_moves(audit: Event, number: str, *, only_expiry: bool) -> Iterator[Violation]:
    last: dict[str, Plain] = {}
    log = audit.value.get("lease_log", [])
    whole = not log or log[0].get("n", 1) == 1
    for record in log:
        resource, kind = record["resource"], record["kind"]
        if resource not in last and not whole:
            last[resource] = record  # what came before it was truncated
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


def _lives(history: History) -> list[list[Event]]:
    if history.lease_lives is None:
        history.lease_lives = [list(expanded(life)) for life in history.lives()]
    return history.lease_lives


def _audits(life: list[Event]) -> list[Event]:
    """The last audit of a life holds the whole log: the others are its beginnings."""
    return [event for event in life if event.op == "audit"][-1:]


def _lease_of(event: Event) -> Plain:
    lease = event.args.get("lease") or event.args.get("held")
    return lease if isinstance(lease, dict) else {}


def _resources(event: Event) -> list[str]:
    if "leases" in event.args:
        return [lease["resource"] for lease in event.args["leases"]]
    if "lease" in event.args:
        return [event.args["lease"]["resource"]]
    return [event.args["resource"]] if "resource" in event.args else []


def _holder(lease: Plain) -> tuple[str, str]:
    return (lease["worker"], lease["incarnation"])


def _fence(lease: Plain) -> tuple[int, int]:
    return (lease["generation"], lease["epoch"])
