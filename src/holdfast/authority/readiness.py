"""Readiness: whether a universe can serve, or exactly why not (document 000).

`derive_readiness` is a pure function of facts and a time. It asks no clock and no store, stops at no
first blocker, and looks at every fact it is given:

    the universe is ready      ⇔  its authority is valid, nothing waits to be replayed,
                                  its store answers and has the right schema
    a subject is ready         ⇔  it has no blocker of its own

A parked world does not make its universe unready, nor an unready universe a world: each list tells
of its own. What is worth knowing and stops nobody is a warning.

Facts are read elsewhere (`roles.readiness`), for they lie in layers that this one may not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from holdfast.authority.dispatch import Backlog
from holdfast.authority.lease import AuthorityLease, State
from holdfast.authority.outcome import DispatchOutcomeReason
from holdfast.config import S


class Reason(Enum):
    """Why something is not ready. The value is stable text for machines."""

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

    # Of warnings.
    NO_LIVE_WORKER = "no_live_worker"
    MAIL_WAITING = "mail_waiting"
    STORE_TIME = "store_time"


# -- what is known -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trouble:
    """What somebody else found wrong, in its own code and words."""

    code: str
    text: str = ""
    since_ns: int = 0


class Blocker(msgspec.Struct, frozen=True):
    """Why something does not go on: our reason, and the code and words of whoever found it."""

    reason: Reason
    code: str
    text: str
    height: int = 0
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A world or a run, with everything that keeps it from going on."""

    subject: str
    name: str
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True, slots=True)
class Mail:
    """Messages that wait for a universe in another store, and whether some were tried in vain."""

    universe: str
    waiting: int
    held_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    universe: str
    generation: int
    # Held or stale, by what is written; None when nobody has it.
    authority: AuthorityLease | None
    replay_pending: int = 0
    # Why the leader was not told of what was replayed; None when nothing is held back.
    deferred: Trouble | None = None
    # Dispatches by state; those among them that wait for the leader's pane are held back, too.
    backlog: Backlog = field(default_factory=Backlog)
    store: Trouble | None = None
    schema: Trouble | None = None
    workers_live: int = 0
    worlds: Mapping[str, int] = field(default_factory=dict)
    mail: tuple[Mail, ...] = ()
    subjects: tuple[Subject, ...] = ()
    # How many more are not ready, beyond the bound on that list.
    subjects_omitted: int = 0
    # Whether any of this was read: of a store that does not answer only the trouble is known.
    observed: bool = True


def unread(universe: str, trouble: Trouble) -> Facts:
    """The facts about a universe whose store does not answer: that it does not."""
    return Facts(universe=universe, generation=0, authority=None, store=trouble, observed=False)


# -- what follows --------------------------------------------------------------------------------


class SubjectReadiness(msgspec.Struct, frozen=True):
    subject: str
    name: str
    ready: bool
    reasons: list[Blocker]


class ReadinessSnapshot(msgspec.Struct, frozen=True):
    universe: str
    at_ns: int
    ready: bool
    reasons: list[Blocker]
    subjects: list[SubjectReadiness]
    warnings: list[Blocker]
    leader: str
    epoch: int
    leased_until_ns: int
    replay_pending: int
    # Dispatches: pending, notified, delivered, failed; and, of the pending ones, deferred.
    backlog: dict[str, int]
    workers_live: int
    worlds: dict[str, int]
    subjects_blocked: int
    subjects_omitted: int
    # Messages that wait for universes in other stores.
    mail: dict[str, int] = {}


def derive_readiness(facts: Facts, now_ns: int) -> ReadinessSnapshot:
    reasons = list(_universe_blockers(facts, now_ns))
    subjects = _subjects(facts.subjects)
    blocked = sum(not subject.ready for subject in subjects)
    held = facts.authority
    return ReadinessSnapshot(
        universe=facts.universe,
        at_ns=now_ns,
        ready=not reasons,
        reasons=reasons,
        subjects=subjects,
        warnings=list(_warnings(facts)),
        leader="" if held is None else held.owner,
        epoch=0 if held is None else held.epoch,
        leased_until_ns=0 if held is None else held.leased_until_ns,
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


def _universe_blockers(facts: Facts, now_ns: int) -> Iterator[Blocker]:
    if facts.store is not None:
        yield _told(Reason.STORE_FAILED, facts.store)
    elif not facts.observed:
        yield _blocker(Reason.STORE_FAILED, "the store was not read")
    if facts.schema is not None:
        yield _told(Reason.SCHEMA_MISMATCH, facts.schema)
    if not facts.observed:
        return
    authority = _authority_blocker(facts.authority, facts.generation, now_ns)
    if authority is not None:
        yield authority
    if facts.replay_pending:
        yield _blocker(Reason.REPLAY_PENDING, f"{facts.replay_pending} events wait to be replayed")
    # Held back is still pending, also where nothing else is counted as such.
    if facts.deferred is not None:
        yield _told(Reason.NOTIFICATION_DEFERRED, facts.deferred)
    if facts.backlog.deferred:
        text = f"{facts.backlog.deferred} dispatches wait for the leader's pane"
        yield Blocker(Reason.NOTIFICATION_DEFERRED, LEADER_MISSING.value, text)


def _authority_blocker(held: AuthorityLease | None, generation: int, now_ns: int) -> Blocker | None:
    """The lease is valid, or is invalid in exactly one way."""
    if held is None or held.state is State.FREE:
        return _blocker(Reason.AUTHORITY_MISSING, "nobody holds the authority lease")
    ended = f"the lease of {held.lease_id}"
    since_ns = held.leased_until_ns
    if held.stale:
        return _blocker(Reason.AUTHORITY_STALE, f"{ended} ran out and is marked stale", since_ns)
    if held.generation != generation:
        return _blocker(
            Reason.AUTHORITY_RESTORED, f"{ended} was granted before the store was restored"
        )
    if not held.live(now_ns, generation):
        ago_s = (now_ns - since_ns) / S
        text = f"{ended} ran out {ago_s:.3f} s ago; nobody has marked it yet"
        return _blocker(Reason.AUTHORITY_EXPIRED, text, since_ns)
    return None


def _subjects(found: tuple[Subject, ...]) -> list[SubjectReadiness]:
    """Each subject once, with all of its blockers, in the order in which they are told."""
    names: dict[str, str] = {}
    blockers: dict[str, list[Blocker]] = {}
    for each in found:
        names.setdefault(each.subject, each.name)
        blockers.setdefault(each.subject, []).extend(each.blockers)
    return [
        SubjectReadiness(subject, names[subject], not reasons, reasons)
        for subject, reasons in blockers.items()
    ]


def _warnings(facts: Facts) -> Iterator[Blocker]:
    if facts.observed and not facts.workers_live:
        yield _blocker(Reason.NO_LIVE_WORKER, "no worker spoke lately under this authority")
    for mail in facts.mail:
        if mail.held_up:
            text = f"{mail.waiting} messages wait for {mail.universe}, which was not reached"
            yield _blocker(Reason.MAIL_WAITING, text)


def _told(reason: Reason, trouble: Trouble) -> Blocker:
    return Blocker(reason, trouble.code, trouble.text, since_ns=trouble.since_ns)


def _blocker(reason: Reason, text: str, since_ns: int = 0) -> Blocker:
    return Blocker(reason, reason.value, text, since_ns=since_ns)
