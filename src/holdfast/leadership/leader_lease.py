"""The leader lease: the single lease that makes a process the leader of a universe (document 000).

It is a durable lease on the resource `<universe>/authority`: live while `now < until` in store
time, granted to one (owner, incarnation), and fenced by an epoch that never decreases. In addition,
each of its decisions is a logged command:

- A command appends its `LeaderLeaseEvent`s to the universe's authority journal in the transaction
  that changes the lease. `LeaderLease` is the pure fold of these events and equals the stored
  lease: `rebuild(txn, u) == read(txn, u)`, always.
- A command that changes nothing logs no event: an owner that acquires its own lease again gets it
  unextended, and a lease that is not overdue is not marked stale.
- Every command first records an expiry. So an overdue lease is marked stale before the next grant,
  and a dead leader blocks its successor for the time to live at most.
- The log is bounded: every `LOG_BASELINE_EVERY` events the state is saved as the new baseline, and
  entries below the previous baseline are removed.

Only this module writes the rows of this lease. A `durable.lease` call on the same resource would
change them without an event. A leader's own writes check the lease: `txn.require_live(lease)`.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.config import BATCH_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import journal, snapshot
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import AlreadyHeldByOther, Invalid, NotHeld, OwnerMismatch
from holdfast.leadership.leader_lease_state import (
    LeaderEventKind,
    LeaderLease,
    LeaderLeaseEvent,
    LeaderState,
)
from holdfast.store.api import Txn, operation

# The number of events between two baselines. The log holds at least this many, and about twice as
# many at most.
LOG_BASELINE_EVERY = 500


# -- commands ------------------------------------------------------------------------------------


@operation("leader_lease.acquire")
def acquire(txn: Txn, universe: str, owner: str, incarnation: str, ttl_ns: int) -> Lease:
    """Acquire the lease, or raise AlreadyHeldByOther. The current leader gets its lease again, not
    extended.

    A new incarnation of the same owner counts as another owner: it waits, and the new epoch fences
    the former incarnation.
    """
    was = read(txn, universe)
    if was.live(txn.now_ns, txn.generation):
        if (was.owner, was.incarnation) != (owner, incarnation):
            raise AlreadyHeldByOther(
                universe=universe,
                owner=was.owner,
                incarnation=was.incarnation,
                until_ns=was.leased_until_ns,
            )
        return leases.acquire.fn(txn, resource(universe), owner, incarnation, ttl_ns)
    _mark_overdue(txn, universe)
    granted = leases.acquire.fn(txn, resource(universe), owner, incarnation, ttl_ns)
    _log(txn, universe, LeaderEventKind.ACQUIRED, read(txn, universe))
    return granted


@operation("leader_lease.renew")
def renew(txn: Txn, universe: str, lease: Lease, ttl_ns: int) -> Lease:
    """Extend the lease to `ttl_ns` from now, and never shorten it. Only the current leader may."""
    was = _require_own(txn, universe, lease)
    if not was.live(txn.now_ns, txn.generation):
        raise NotHeld(
            universe=universe,
            lease_id=lease.lease_id,
            why="the lease ended",
            at_ns=was.leased_until_ns,
        )
    [renewed] = leases.renew.fn(txn, [lease], ttl_ns)
    assert renewed is not None, "held, live and ours, all seen in this transaction"
    _log(txn, universe, LeaderEventKind.RENEWED, read(txn, universe))
    return renewed


@operation("leader_lease.release")
def release(txn: Txn, universe: str, lease: Lease) -> None:
    """Release the lease, so that the next leader need not wait. An expired lease can be released
    too."""
    _require_own(txn, universe, lease)
    _mark_overdue(txn, universe)
    was = read(txn, universe)
    leases.release.fn(txn, lease)
    _log(txn, universe, LeaderEventKind.RELEASED, was)


@operation("leader_lease.mark_stale")
def mark_stale(txn: Txn, universe: str) -> bool:
    """Record that the lease has expired, if it has. Return whether that is new."""
    return _mark_overdue(txn, universe)


@operation("leader_lease.force_release")
def force_release(txn: Txn, universe: str, reason: str) -> int:
    """Release the lease of any owner, live, stale or free. Return the epoch, which does not
    change."""
    _mark_overdue(txn, universe)
    was = read(txn, universe)
    if was.epoch:
        leases.force_release.fn(txn, resource(universe), reason)
    _log(txn, universe, LeaderEventKind.FORCE_RELEASED, was, reason)
    return was.epoch


# -- queries -------------------------------------------------------------------------------------


def resource(universe: str) -> str:
    """The name of the lease, the journal and its baseline."""
    check_name("universe", universe)
    return f"{universe}/authority"


def topic(universe: str) -> str:
    """The topic that is notified when leadership changes or becomes free, but not on renewal."""
    return f"authority/{universe}"


def read(txn: Txn, universe: str) -> LeaderLease:
    """Return the stored lease, free or not."""
    found = leases.current_status(txn, resource(universe))
    if found is None:
        return LeaderLease()
    state = LeaderState(found.state.value)
    if state is LeaderState.FREE:
        return LeaderLease(state, generation=found.generation, epoch=found.epoch)
    lease = Lease(
        resource(universe),
        found.worker,
        found.incarnation,
        found.generation,
        found.epoch,
        found.expires_ns,
    )
    return LeaderLease(
        state,
        lease.worker,
        lease.incarnation,
        lease.lease_id,
        lease.generation,
        lease.epoch,
        lease.expires_ns,
    )


def current(txn: Txn, universe: str) -> LeaderLease | None:
    """Return the stored lease if it is held or stale, else None. Call `live` to check the
    expiry."""
    found = read(txn, universe)
    return None if found.state is LeaderState.FREE else found


def epoch(txn: Txn, universe: str) -> int:
    """Return the epoch of the last grant; 0 before the first."""
    return read(txn, universe).epoch


def events(txn: Txn, universe: str, after: int = 0, limit: int = 100) -> list[LeaderLeaseEvent]:
    """Return the kept log entries above a height, in the order of decisions."""
    check_limit(limit)
    subject = resource(universe)
    head = journal.head(txn, subject)
    entries = journal.read(txn, subject, max(after + 1, head.floor), head.height + 1, limit)
    return [codec.unpack_as(LeaderLeaseEvent, entry.body) for entry in entries]


def rebuild(txn: Txn, universe: str) -> LeaderLease:
    """Rebuild the lease from the log: the baseline and every event after it."""
    subject = resource(universe)
    base = snapshot.baseline(txn, subject)
    state, height = LeaderLease(), 0
    if base is not None:
        height = base.height
        state = codec.unpack_as(LeaderLease, snapshot.load(txn, subject, height))
    for event in events(txn, universe, height, BATCH_MAX):
        state = state.apply(event)
    return state


# -- inside --------------------------------------------------------------------------------------


def _require_own(txn: Txn, universe: str, lease: Lease) -> LeaderLease:
    if lease.resource != resource(universe):
        raise Invalid(what="lease", why="the lease is for another resource", found=lease.resource)
    was = read(txn, universe)
    if was.state is LeaderState.FREE:
        raise NotHeld(universe=universe, lease_id=lease.lease_id, why="the lease was released")
    if (was.owner, was.incarnation) != (lease.worker, lease.incarnation):
        raise OwnerMismatch(universe=universe, lease_id=lease.lease_id, current=was.lease_id)
    if was.lease_id != lease.lease_id or was.generation != txn.generation:
        raise NotHeld(
            universe=universe, lease_id=lease.lease_id, why="a later grant replaced the lease"
        )
    return was


def _mark_overdue(txn: Txn, universe: str) -> bool:
    was = read(txn, universe)
    if not leases.mark_stale.fn(txn, resource(universe)):
        return False
    _log(txn, universe, LeaderEventKind.MARKED_STALE, was)
    return True


def _log(
    txn: Txn, universe: str, kind: LeaderEventKind, about: LeaderLease, reason: str = ""
) -> None:
    subject = resource(universe)
    event = LeaderLeaseEvent(
        kind=kind,
        owner=about.owner,
        incarnation=about.incarnation,
        lease_id=about.lease_id,
        generation=about.generation,
        epoch=about.epoch,
        decided_ns=txn.now_ns,
        leased_until_ns=about.leased_until_ns,
        reason=reason[:ERROR_TEXT_CHARS_MAX],
    )
    was = journal.head(txn, subject)
    head = journal.append(txn, subject, [codec.pack(event)], expected_head=was.height)
    _truncate_log(txn, universe, head.height)
    if kind is not LeaderEventKind.RENEWED:
        txn.notify(topic(universe))


def _truncate_log(txn: Txn, universe: str, height: int) -> None:
    """Save the state as the new baseline every `LOG_BASELINE_EVERY` events, and truncate the log
    below the previous one."""
    subject = resource(universe)
    base = snapshot.baseline(txn, subject)
    baseline_height = 0 if base is None else base.height
    if height - baseline_height < LOG_BASELINE_EVERY:
        return
    snapshot.save(txn, subject, height, codec.pack(read(txn, universe)))
    snapshot.set_baseline(txn, subject, height)
    snapshot.prune(txn, subject, 1)
    if baseline_height:
        journal.checkpoint(txn, subject, baseline_height)
        journal.truncate(txn, subject, 2 * LOG_BASELINE_EVERY)
