"""Consistency checks of the durable data structures.

    queue      the counters and the indexes, from the items and the dead letters
    inbox      the rows, from the cursor and the last assigned seq
    lease      the index by worker, from the fences; the fences, from the lease log; the kinds in the log
    journal    the hash chain
    snapshot   the hash in a baseline, from the snapshot that it names
    blob       the hash in the key of a large value, from the value

The counter `done` of a queue has no second source. It is only checked against the last seq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, journal, snapshot
from holdfast.durable import item as items
from holdfast.durable import lease as leases
from holdfast.durable.difference import Difference
from holdfast.durable.lease import LeaseFence
from holdfast.errors import HoldfastError
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names, iter_rows
from holdfast.store.schema import Space

LEASE_KINDS = ("granted", "expired", "released", "forced")


def check_queue(txn: Txn, name: str) -> Iterator[Difference]:
    keys = items.keys_of(name)
    counts = items.counts_of(txn, keys)
    ready, delayed, by_expiry, by_owner, died = (
        {row for _, row in iter_rows(txn, prefix)}
        for prefix in (keys.ready, keys.delayed, keys.by_expiry, keys.by_owner, keys.dead_by_time)
    )
    dead = {key[len(keys.dead) :] for key, _ in iter_rows(txn, keys.dead)}
    claim_rows = {key[len(keys.claim_rows) :] for key, _ in iter_rows(txn, keys.claim_rows)}
    for state, rows in (
        ("ready", ready),
        ("delayed", delayed),
        ("claimed", by_expiry),
        ("dead", dead),
    ):
        if getattr(counts, state) != len(rows):
            yield Difference("queue", name, f"counter {state}", getattr(counts, state), len(rows))
    if by_owner != by_expiry:
        yield Difference("queue", name, "claims by owner", len(by_owner), len(by_expiry))
    if claim_rows != by_expiry:
        yield Difference("queue", name, "claims", len(claim_rows), len(by_expiry))
    if died != dead:
        yield Difference("queue", name, "dead letters by time", len(died), len(dead))
    total = counts.ready + counts.delayed + counts.claimed + counts.dead + counts.done
    last_seq = txn.count(keys.last_seq)
    if counts.done < 0 or total > last_seq:
        yield Difference("queue", name, "counter done", counts.done, f"{last_seq} items in all")
    stored = 0
    for key, _ in iter_rows(txn, keys.items):
        packed_seq = key[len(keys.items) :]
        claimed = packed_seq in claim_rows
        indexed_in = (packed_seq in ready, packed_seq in delayed, packed_seq in by_expiry)
        if sum(indexed_in) != 1 or indexed_in[2] != claimed:
            index = "the index of claims" if claimed else "one index of waiting items"
            where = ", ".join(
                state
                for state, is_there in zip(("ready", "delayed", "claimed"), indexed_in, strict=True)
                if is_there
            )
            seq = items.seq_of(packed_seq)
            yield Difference("queue", name, f"item {seq} is indexed", where or "nowhere", index)
        stored += 1
    indexed = len(ready) + len(delayed) + len(by_expiry)
    if stored != indexed:
        yield Difference("queue", name, "indexed items", indexed, stored)


def check_inbox(txn: Txn, subject: str, location: str) -> Iterator[Difference]:
    cursor, depth = inbox.cursor(txn, subject), inbox.depth(txn, subject)
    prefix = schema.key_prefix(Space.INBOX, subject, "e")
    rows = sum(1 for _ in iter_rows(txn, prefix))
    if rows != depth:
        yield Difference("inbox", location, f"rows after {cursor}", rows, depth)
    for seq, wrong in inbox.iter_damaged(txn, subject):
        yield Difference("inbox", location, f"ingress {seq}", wrong, "the acknowledged ingress")


# -- leases --------------------------------------------------------------------------------------


def iter_fences(txn: Txn) -> Iterator[tuple[str, LeaseFence]]:
    """Yield every resource that was ever leased, with its fence."""
    for key, row in iter_rows(txn, schema.key_prefix(Space.LEASE, "fence")):
        yield str(tuples.unpack(key)[-1]), codec.unpack_as(LeaseFence, row)


def check_leases(txn: Txn) -> Iterator[Difference]:
    index = worker_pairs(txn, schema.key_prefix(Space.LEASE, "by"))
    logged = {resource: logged_fence.fence for resource, logged_fence in logged_leases(txn).items()}
    expected = set()
    for resource, fence in iter_fences(txn):
        if fence.state is leases.LeaseState.HELD:
            expected.add((fence.worker, resource))
        logged_fence = logged.pop(resource, None)
        if logged_fence is not None and logged_fence != fence:
            yield Difference(
                "lease", resource, "fence", _fence_text(fence), _fence_text(logged_fence)
            )
    for worker, resource in sorted(index - expected):
        yield Difference("lease", resource, "indexed under", worker, "not held by it")
    for worker, resource in sorted(expected - index):
        yield Difference("lease", resource, "indexed under", None, worker)
    for resource, logged_fence in logged.items():
        if logged_fence.state is leases.LeaseState.FREE:
            # The purge of a world deletes its rows before its entries in the lease log.
            continue
        yield Difference("lease", resource, "fence", None, _fence_text(logged_fence))


class LoggedLease(NamedTuple):
    """The fence and expiry of a resource, from its last entry in the lease log."""

    fence: LeaseFence
    expires_ns: int


def logged_leases(txn: Txn) -> dict[str, LoggedLease]:
    """Return the last logged state of each resource, from the baselines and the retained part of the lease log."""
    last_logged = {event.resource: _logged_lease(event) for event in leases.baselines(txn)}
    after = 0
    while page := leases.events(txn, after, SCAN_PAGE):
        for event in page:
            after = event.n
            last_logged[event.resource] = _logged_lease(event)
    return last_logged


def _logged_lease(event: leases.LeaseEvent) -> LoggedLease:
    if event.kind in ("granted", "expired"):
        state = leases.LeaseState.HELD if event.kind == "granted" else leases.LeaseState.STALE
        worker, incarnation = event.worker, event.incarnation
    else:
        state, worker, incarnation = leases.LeaseState.FREE, "", ""
    fence = LeaseFence(state, worker, incarnation, event.generation, event.epoch)
    return LoggedLease(fence, 0 if state is leases.LeaseState.FREE else event.expires_ns)


def check_lease_log(txn: Txn) -> Iterator[Difference]:
    prefix = schema.key_prefix(Space.LEASE_LOG)
    for key, row in iter_rows(txn, prefix):
        n = tuples.unpack_last_int(key, len(prefix))
        event = codec.unpack_as(leases.LeaseEvent, row)
        if event.kind not in LEASE_KINDS:
            yield Difference(
                "lease", event.resource, f"kind of line {n}", event.kind, " or ".join(LEASE_KINDS)
            )


def worker_pairs(txn: Txn, prefix: bytes) -> set[tuple[str, str]]:
    """Return the (worker, resource) pairs of an index."""
    return {
        (str(worker), str(resource))
        for worker, resource in (tuples.unpack(key)[-2:] for key, _ in iter_rows(txn, prefix))
    }


def _fence_text(fence: LeaseFence) -> str:
    return f"{fence.state.value} {fence.worker or 'nobody'} {fence.generation}.{fence.epoch}"


# -- journals, snapshots, blobs -------------------------------------------------------------------


def check_journals(txn: Txn, is_checked_elsewhere: Callable[[str], bool]) -> Iterator[Difference]:
    """Check the hash chain of each journal that no other check reads."""
    for subject in iter_names(txn, (int(Space.JOURNAL),)):
        if is_checked_elsewhere(subject):
            continue
        try:
            journal.verify(txn, subject)
        except HoldfastError as error:
            height = error.fields.get("height", 0)
            yield Difference(
                "journal", subject, f"entry {height}", error.fields.get("why"), "an unbroken chain"
            )


def check_baselines(txn: Txn) -> Iterator[Difference]:
    for subject in iter_names(txn, (int(Space.SNAPSHOT),)):
        base = snapshot.baseline(txn, subject)
        if base is None:
            continue
        saved = snapshot.hash_at(txn, subject, base.height)
        if saved is None:
            yield Difference(
                "snapshot", subject, f"baseline at {base.height}", "no such snapshot", "a snapshot"
            )
        elif saved != base.hash:
            yield Difference(
                "snapshot", subject, "hash of the baseline", base.hash.hex(), saved.hex()
            )


def check_blobs(txn: Txn) -> Iterator[Difference]:
    for name in blobs.corrupt_blobs(txn):
        yield Difference("blob", name.hex(), "content", "another hash", "the hash that names it")
