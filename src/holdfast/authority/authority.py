"""Authority: the one lease that makes a process the leader of a universe (document 000).

It is a lease like any other, on the resource `<universe>/authority`: live while `now < until` by
store time, granted to one (owner, incarnation), fenced by an epoch that never falls. What is added
is that each of its decisions is a logged command:

- A command appends its `AuthorityEvent`s to the universe's authority journal in the transaction in
  which it changes the lease. `AuthorityLease` is the pure fold of those events, and the fold of the
  log is what is stored: `rebuilt(txn, u) == read(txn, u)`, always.
- What changes nothing is not a decision and leaves no event: the owner that acquires again and gets
  the lease it has, not extended; marking stale what is not overdue.
- Every command first writes down what time has done. So an overdue lease is marked stale before
  anybody is granted the next one, and a dead leader blocks for its time to live and no longer.
- The log is bounded: its state is kept as the baseline every `LOG_BASELINE_EVERY` events, and
  what lies below the baseline before that one is removed.

The rows of this lease are written here alone; a `durable.lease` call on the same resource would
change them behind the log. A leader's own writes carry the lease: `txn.require_live(lease)`.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.authority.lease import AuthorityEvent, AuthorityLease, Kind, State
from holdfast.config import BATCH_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import journal, snapshot
from holdfast.durable import lease as leases
from holdfast.durable.bounds import check_limit, check_name
from holdfast.durable.lease import Lease
from holdfast.errors import AlreadyHeldByOther, Invalid, NotHeld, OwnerMismatch
from holdfast.store.api import Txn, operation

# Events between two baselines. The log holds this many at least, and about twice as many at most.
LOG_BASELINE_EVERY = 500


# -- commands ------------------------------------------------------------------------------------


@operation
def acquire(txn: Txn, universe: str, owner: str, incarnation: str, ttl_ns: int) -> Lease:
    """Lead, or AlreadyHeldByOther. Again by who leads: the same lease, not extended.

    A new incarnation of the same owner is another: it waits, and the epoch fences its former self.
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
    _log(txn, universe, Kind.ACQUIRED, read(txn, universe))
    return granted


@operation
def renew(txn: Txn, universe: str, lease: Lease, ttl_ns: int) -> Lease:
    """Lead for `ttl_ns` from now, never for less than before. Only who leads may."""
    was = _require_own(txn, universe, lease)
    if not was.live(txn.now_ns, txn.generation):
        raise NotHeld(
            universe=universe, lease_id=lease.lease_id, why="it ended", at_ns=was.leased_until_ns
        )
    [renewed] = leases.renew.fn(txn, [lease], ttl_ns)
    assert renewed is not None, "held, live and ours, all seen in this transaction"
    _log(txn, universe, Kind.RENEWED, read(txn, universe))
    return renewed


@operation
def release(txn: Txn, universe: str, lease: Lease) -> None:
    """Step down, so that the next leader need not wait. A lease that ran out is released too."""
    _require_own(txn, universe, lease)
    _mark_overdue(txn, universe)
    was = read(txn, universe)
    leases.release.fn(txn, lease)
    _log(txn, universe, Kind.RELEASED, was)


@operation
def mark_stale(txn: Txn, universe: str) -> bool:
    """Write down that the lease ran out, if it did; whether that was news."""
    return _mark_overdue(txn, universe)


@operation
def force_release(txn: Txn, universe: str, reason: str) -> int:
    """Take authority from whoever has it, live or stale or nobody; the epoch, which stands."""
    _mark_overdue(txn, universe)
    was = read(txn, universe)
    if was.epoch:
        leases.force_release.fn(txn, resource(universe), reason)
    _log(txn, universe, Kind.FORCE_RELEASED, was, reason)
    return was.epoch


# -- reading -------------------------------------------------------------------------------------


def resource(universe: str) -> str:
    """What the lease, the journal and its baseline are called."""
    check_name("universe", universe)
    return f"{universe}/authority"


def topic(universe: str) -> str:
    """Notified when authority changes hands or gets free; not when it is renewed."""
    return f"authority/{universe}"


def read(txn: Txn, universe: str) -> AuthorityLease:
    """What is stored, free or not."""
    found = leases.current(txn, resource(universe))
    if found is None:
        return AuthorityLease()
    state = State(found.state.value)
    if state is State.FREE:
        return AuthorityLease(state, generation=found.generation, epoch=found.epoch)
    lease = Lease(
        resource(universe),
        found.worker,
        found.incarnation,
        found.generation,
        found.epoch,
        found.expires_ns,
    )
    return AuthorityLease(
        state,
        lease.worker,
        lease.incarnation,
        lease.lease_id,
        lease.generation,
        lease.epoch,
        lease.expires_ns,
    )


def current(txn: Txn, universe: str) -> AuthorityLease | None:
    """The lease that is held or stale, by what is written: ask `live`. None when there is none."""
    found = read(txn, universe)
    return None if found.state is State.FREE else found


def epoch(txn: Txn, universe: str) -> int:
    """The epoch of the last grant; 0 before the first."""
    return read(txn, universe).epoch


def events(txn: Txn, universe: str, after: int = 0, limit: int = 100) -> list[AuthorityEvent]:
    """The log above a height, as far down as it is kept, in the order of decisions."""
    check_limit(limit)
    subject = resource(universe)
    head = journal.head(txn, subject)
    entries = journal.read(txn, subject, max(after + 1, head.floor), head.height + 1, limit)
    return [codec.unpack_as(AuthorityEvent, entry.body) for entry in entries]


def rebuilt(txn: Txn, universe: str) -> AuthorityLease:
    """The state that the log alone tells: its baseline, and every event after that."""
    subject = resource(universe)
    base = snapshot.baseline(txn, subject)
    state, height = AuthorityLease(), 0
    if base is not None:
        height = base.height
        state = codec.unpack_as(AuthorityLease, snapshot.load(txn, subject, height))
    for event in events(txn, universe, height, BATCH_MAX):
        state = state.after(event)
    return state


# -- inside --------------------------------------------------------------------------------------


def _require_own(txn: Txn, universe: str, lease: Lease) -> AuthorityLease:
    if lease.resource != resource(universe):
        raise Invalid(what="lease", why="of another resource", found=lease.resource)
    was = read(txn, universe)
    if was.state is State.FREE:
        raise NotHeld(universe=universe, lease_id=lease.lease_id, why="it was given back or taken")
    if (was.owner, was.incarnation) != (lease.worker, lease.incarnation):
        raise OwnerMismatch(universe=universe, lease_id=lease.lease_id, current=was.lease_id)
    if was.lease_id != lease.lease_id or was.generation != txn.generation:
        raise NotHeld(universe=universe, lease_id=lease.lease_id, why="another grant followed")
    return was


def _mark_overdue(txn: Txn, universe: str) -> bool:
    was = read(txn, universe)
    if not leases.mark_stale.fn(txn, resource(universe)):
        return False
    _log(txn, universe, Kind.MARKED_STALE, was)
    return True


def _log(txn: Txn, universe: str, kind: Kind, about: AuthorityLease, reason: str = "") -> None:
    subject = resource(universe)
    event = AuthorityEvent(
        kind,
        about.owner,
        about.incarnation,
        about.lease_id,
        about.generation,
        about.epoch,
        txn.now_ns,
        about.leased_until_ns,
        reason[:ERROR_TEXT_CHARS_MAX],
    )
    was = journal.head(txn, subject)
    head = journal.append(txn, subject, [codec.pack(event)], expected_head=was.height)
    _bound(txn, universe, head.height)
    if kind is not Kind.RENEWED:
        txn.notify(topic(universe))


def _bound(txn: Txn, universe: str, height: int) -> None:
    """Every so many events: keep the state, and drop what lies below the baseline before it."""
    subject = resource(universe)
    base = snapshot.baseline(txn, subject)
    before = 0 if base is None else base.height
    if height - before < LOG_BASELINE_EVERY:
        return
    snapshot.save(txn, subject, height, codec.pack(read(txn, universe)))
    snapshot.set_baseline(txn, subject, height)
    snapshot.prune(txn, subject, 1)
    if before:
        journal.checkpoint(txn, subject, before)
        journal.truncate(txn, subject, 2 * LOG_BASELINE_EVERY)
