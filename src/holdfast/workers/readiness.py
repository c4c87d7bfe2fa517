"""Readiness: whether a universe can serve, with all blockers (document 000).

`derive_readiness` is a pure function of facts and a time. It uses no clock and no store, and
evaluates every fact, not only the first blocker:

    the universe is ready      ⇔  its leader lease is valid, no notification is pending,
                                  its store responds and has the right schema
    a subject is ready         ⇔  it has no blocker

A parked world does not make its universe unready, and an unready universe does not make a world
unready: the lists are independent. A condition that blocks nothing is a warning.

`workers.readiness_facts` reads the facts, because they are in layers that this module may not
import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from holdfast.config import S
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.dispatch.request import DispatchBacklog
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderState


class ReadinessReason(Enum):
    """The reason of a blocker or warning. The value is stable text for machines."""

    STORE_FAILED = "store_failed"
    SCHEMA_MISMATCH = "schema_mismatch"
    AUTHORITY_MISSING = "authority_missing"
    AUTHORITY_STALE = "authority_stale"
    AUTHORITY_EXPIRED = "authority_expired"
    AUTHORITY_RESTORED = "authority_restored"
    REPLAY_PENDING = "replay_pending"
    NOTIFICATION_DEFERRED = "notification_deferred"

    WORLD_PAUSED = "world_paused"
    WORLD_PARKED = "world_parked"
    UNKNOWN_EVENT = "unknown_event"
    CODE_MISSING = "code_missing"
    RUN_HALTED = "run_halted"

    # Reasons of warnings.
    NO_LIVE_WORKER = "no_live_worker"
    MAIL_WAITING = "mail_waiting"
    STORE_TIME = "store_time"


# -- facts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObservedProblem:
    """A problem that another component observed, with its code and text."""

    code: str
    text: str = ""
    since_ns: int = 0


class ReadinessBlocker(msgspec.Struct, frozen=True):
    """A blocker: a readiness reason, with the code and text of the component that reported it."""

    reason: ReadinessReason
    code: str
    text: str
    height: int = 0
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReadinessSubject:
    """A world or a run, with all of its blockers."""

    subject: str
    name: str
    blockers: tuple[ReadinessBlocker, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitingMail:
    """Messages that wait for a universe in another store, and whether deliveries of some have
    failed."""

    universe: str
    waiting: int
    delivery_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessFacts:
    """The facts about a universe at one time."""

    universe: str
    generation: int
    # The stored leader lease, held or stale; None if there is none.
    authority: LeaderLease | None
    replay_pending: int = 0
    # The reason why leader notifications are deferred; None if they are not.
    deferred: ObservedProblem | None = None
    # Dispatch requests by state. Requests that wait for the leader's pane are deferred as well.
    backlog: DispatchBacklog = field(default_factory=DispatchBacklog)
    store: ObservedProblem | None = None
    schema: ObservedProblem | None = None
    workers_live: int = 0
    worlds: Mapping[str, int] = field(default_factory=dict)
    mail: tuple[WaitingMail, ...] = ()
    subjects: tuple[ReadinessSubject, ...] = ()
    # The number of subjects that are not ready beyond the limit of the list.
    subjects_omitted: int = 0
    # Whether the store was read. If it did not respond, only the problem is known.
    observed: bool = True


def unreadable_facts(universe: str, problem: ObservedProblem) -> ReadinessFacts:
    """Make the facts about a universe whose store does not respond."""
    return ReadinessFacts(
        universe=universe, generation=0, authority=None, store=problem, observed=False
    )


# -- result --------------------------------------------------------------------------------------


class SubjectReadiness(msgspec.Struct, frozen=True):
    """The readiness of one world or run."""

    subject: str
    name: str
    ready: bool
    reasons: list[ReadinessBlocker]


class ReadinessSnapshot(msgspec.Struct, frozen=True):
    """The readiness of a universe at one time."""

    universe: str
    at_ns: int
    ready: bool
    reasons: list[ReadinessBlocker]
    subjects: list[SubjectReadiness]
    warnings: list[ReadinessBlocker]
    leader: str
    epoch: int
    leased_until_ns: int
    replay_pending: int
    # Dispatch requests: pending, notified, delivered, failed, and the deferred ones among the
    # pending.
    backlog: dict[str, int]
    workers_live: int
    worlds: dict[str, int]
    subjects_blocked: int
    subjects_omitted: int
    # The number of messages that wait, by universe in another store.
    mail: dict[str, int] = {}


def derive_readiness(facts: ReadinessFacts, now_ns: int) -> ReadinessSnapshot:
    """Derive the readiness of a universe from its facts."""
    reasons = list(_universe_blockers(facts, now_ns))
    subjects = _merge_subjects(facts.subjects)
    blocked = sum(not subject.ready for subject in subjects)
    lease = facts.authority
    return ReadinessSnapshot(
        universe=facts.universe,
        at_ns=now_ns,
        ready=not reasons,
        reasons=reasons,
        subjects=subjects,
        warnings=list(_warnings(facts)),
        leader="" if lease is None else lease.owner,
        epoch=0 if lease is None else lease.epoch,
        leased_until_ns=0 if lease is None else lease.leased_until_ns,
        replay_pending=facts.replay_pending,
        backlog=msgspec.structs.asdict(facts.backlog),
        workers_live=facts.workers_live,
        worlds=dict(facts.worlds),
        subjects_blocked=blocked + facts.subjects_omitted,
        subjects_omitted=facts.subjects_omitted,
        mail={one.universe: one.waiting for one in facts.mail},
    )


LEADER_MISSING = DispatchOutcomeReason.LEADER_MISSING


# -- inside --------------------------------------------------------------------------------------


def _universe_blockers(facts: ReadinessFacts, now_ns: int) -> Iterator[ReadinessBlocker]:
    if facts.store is not None:
        yield _blocker_from_problem(ReadinessReason.STORE_FAILED, facts.store)
    elif not facts.observed:
        yield _blocker(ReadinessReason.STORE_FAILED, "the store was not read")
    if facts.schema is not None:
        yield _blocker_from_problem(ReadinessReason.SCHEMA_MISMATCH, facts.schema)
    if not facts.observed:
        return
    authority = _leader_blocker(facts.authority, facts.generation, now_ns)
    if authority is not None:
        yield authority
    if facts.replay_pending:
        yield _blocker(
            ReadinessReason.REPLAY_PENDING, f"{facts.replay_pending} events wait to be replayed"
        )
    # A deferred notification is pending, even if no event waits for replay.
    if facts.deferred is not None:
        yield _blocker_from_problem(ReadinessReason.NOTIFICATION_DEFERRED, facts.deferred)
    if facts.backlog.deferred:
        text = f"{facts.backlog.deferred} dispatches wait for the leader's pane"
        yield ReadinessBlocker(ReadinessReason.NOTIFICATION_DEFERRED, LEADER_MISSING.value, text)


def _leader_blocker(
    lease: LeaderLease | None, generation: int, now_ns: int
) -> ReadinessBlocker | None:
    """Return the blocker of an invalid lease. The reasons are mutually exclusive."""
    if lease is None or lease.state is LeaderState.FREE:
        return _blocker(ReadinessReason.AUTHORITY_MISSING, "no worker holds the authority lease")
    ended = f"the lease of {lease.lease_id}"
    since_ns = lease.leased_until_ns
    if lease.stale:
        return _blocker(
            ReadinessReason.AUTHORITY_STALE, f"{ended} expired and is marked stale", since_ns
        )
    if lease.generation != generation:
        return _blocker(
            ReadinessReason.AUTHORITY_RESTORED, f"{ended} was granted before the store was restored"
        )
    if not lease.live(now_ns, generation):
        ago_s = (now_ns - since_ns) / S
        text = f"{ended} expired {ago_s:.3f} s ago and is not yet marked stale"
        return _blocker(ReadinessReason.AUTHORITY_EXPIRED, text, since_ns)
    return None


def _merge_subjects(found: tuple[ReadinessSubject, ...]) -> list[SubjectReadiness]:
    """Merge blockers by subject, in the order of the facts."""
    names: dict[str, str] = {}
    blockers: dict[str, list[ReadinessBlocker]] = {}
    for each in found:
        names.setdefault(each.subject, each.name)
        blockers.setdefault(each.subject, []).extend(each.blockers)
    return [
        SubjectReadiness(subject, names[subject], not reasons, reasons)
        for subject, reasons in blockers.items()
    ]


def _warnings(facts: ReadinessFacts) -> Iterator[ReadinessBlocker]:
    if facts.observed and not facts.workers_live:
        yield _blocker(
            ReadinessReason.NO_LIVE_WORKER, "no worker has a recent heartbeat under this authority"
        )
    for mail in facts.mail:
        if mail.delivery_failed:
            text = f"{mail.waiting} messages wait for {mail.universe}, whose store was not reached"
            yield _blocker(ReadinessReason.MAIL_WAITING, text)


def _blocker_from_problem(reason: ReadinessReason, problem: ObservedProblem) -> ReadinessBlocker:
    return ReadinessBlocker(reason, problem.code, problem.text, since_ns=problem.since_ns)


def _blocker(reason: ReadinessReason, text: str, since_ns: int = 0) -> ReadinessBlocker:
    return ReadinessBlocker(reason, reason.value, text, since_ns=since_ns)
