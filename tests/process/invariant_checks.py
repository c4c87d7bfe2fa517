"""The invariants after a chaos run, checked against the workers' logs and the store.

Each check is a generator of breaches, one line each. No line means that the invariant holds. The logs
record the store's acknowledgements, and the store holds the rows. The checks do not use the code under
test, except `journal.verify` for the hash chain.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.durable import item, journal, lease, queue
from holdfast.errors import StoreCorrupt
from holdfast.store import tuples
from holdfast.store.api import Row, Store, Txn
from tests.process import load_worker

PAGE = 1000
SHOWN = 5


class LogLine(NamedTuple):
    outcome: str
    operation: str
    id: str
    fields: dict[str, Any]


@dataclass
class WorkerLogs:
    """The log lines of all workers, in the order of each worker."""

    lines: list[LogLine] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> WorkerLogs:
        logs = cls()
        for path in sorted(folder.glob("*.log")):
            for text in path.read_text().splitlines():
                logs.lines.append(LogLine(*json.loads(text)))
        return logs

    def of(self, operation: str, outcome: str = "acked") -> list[LogLine]:
        return [
            line for line in self.lines if line.operation == operation and line.outcome == outcome
        ]

    def ids(self, operation: str, outcome: str) -> set[str]:
        return {line.id for line in self.of(operation, outcome)}

    def count(self, outcome: str) -> int:
        return sum(1 for line in self.lines if line.outcome == outcome)


def breaches(store: Store, logs: WorkerLogs) -> list[str]:
    """One line for each broken invariant."""
    checks = (
        counters_equal_their_marks,
        appends_are_there_once_and_in_sequence,
        shared_journal_holds_each_entry_once,
        guarded_journals_hold_each_entry_once,
        guarded_writes_carry_the_epoch_of_their_time,
        nothing_is_committed_after_a_fence,
        epochs_only_grow,
        items_are_done_once_or_still_there,
        queue_counts_equal_a_recount,
    )
    found = []
    for check in checks:
        lines = list(check(store, logs))
        found += [f"{check.__name__}: {line}" for line in lines[:SHOWN]]
        if len(lines) > SHOWN:
            found.append(f"{check.__name__}: and {len(lines) - SHOWN} more")
    return found


def drain(store: Store, queue_name: str = load_worker.QUEUE) -> None:
    """Claim and ack every remaining item, so that all items are done or dead."""
    while (due_ns := store.read(queue.next_due_ns, queue_name)) is not None:
        claims = store.transact(queue.claim, queue_name, "parent", 100, 10**10, load_worker.BUDGET)
        for claim in claims:
            store.transact(load_worker.acked, "parent", claim)
        if not claims:
            wait_s = max(due_ns - store.now_ns(), 0) / 1e9
            store.wait(queue.topic(queue_name), 0, min(wait_s, 0.1))


# -- counters, appends -----------------------------------------------------------------------------


def counters_equal_their_marks(store: Store, logs: WorkerLogs) -> Iterator[str]:
    """Each transaction adds one and writes one mark. A transaction applied twice adds two."""
    marked = set()
    for counter in range(load_worker.COUNTERS):
        total = store.read(lambda txn, counter=counter: txn.count((*load_worker.COUNT, counter)))
        prefix = tuples.pack((*load_worker.MARK, counter))
        marks = {str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows(store, prefix)}
        if total != len(marks):
            yield f"counter {counter} is {total}, its transactions are {len(marks)}"
        marked |= marks
    yield from _matches_logged_outcomes(logs, "count", Counter(marked))


def appends_are_there_once_and_in_sequence(store: Store, logs: WorkerLogs) -> Iterator[str]:
    log = _appended(store, load_worker.LOG)
    if list(log) != list(range(1, len(log) + 1)):
        yield f"{len(log)} appends have the numbers up to {max(log, default=0)}"
    yield from _matches_logged_outcomes(
        logs, "append", Counter(value.decode() for value in log.values())
    )
    for line in logs.of("append"):
        if log.get(line.fields["seq"], b"").decode() != line.id:
            yield f"{line.id} was told {line.fields['seq']}, where something else is"


def _appended(store: Store, space: tuples.Key) -> dict[int, bytes]:
    prefix = tuples.pack(space)
    return {tuples.unpack_last_int(key, len(prefix)): value for key, value in rows(store, prefix)}


# -- journals --------------------------------------------------------------------------------------


def shared_journal_holds_each_entry_once(store: Store, logs: WorkerLogs) -> Iterator[str]:
    yield from _verify_chain(store, load_worker.SHARED)
    entries = _entries(store, load_worker.SHARED)
    yield from _matches_logged_outcomes(
        logs, "shared", Counter(entry.body.decode() for entry in entries)
    )
    for line in logs.of("shared"):
        if entries[line.fields["height"] - 1].body.decode() != line.id:
            yield f"{line.id} was told height {line.fields['height']}, where something else is"


def guarded_journals_hold_each_entry_once(store: Store, logs: WorkerLogs) -> Iterator[str]:
    found: Counter[str] = Counter()
    for resource in load_worker.RESOURCES:
        yield from _verify_chain(store, resource)
        bodies = [json.loads(entry.body) for entry in _entries(store, resource)]
        found.update(id for id, *_ in bodies)
        epochs = [epoch for _, epoch, *_ in bodies]
        if epochs != sorted(epochs):
            yield f"{resource}: a later entry has a lower epoch"
        for line in logs.of("guarded"):
            if line.fields["resource"] == resource:
                if bodies[line.fields["height"] - 1][0] != line.id:
                    yield f"{line.id} was told height {line.fields['height']}, not what is there"
    yield from _matches_logged_outcomes(logs, "guarded", found)


def _verify_chain(store: Store, subject: str) -> Iterator[str]:
    try:
        store.read(journal.verify, subject)
    except StoreCorrupt as error:
        yield str(error)


def _entries(store: Store, subject: str) -> list[journal.ChainedEntry]:
    found: list[journal.ChainedEntry] = []
    while page := store.read(journal.read, subject, len(found) + 1, 1 << 60, PAGE):
        found += page
    return found


# -- leases ----------------------------------------------------------------------------------------


def epochs_only_grow(store: Store, logs: WorkerLogs) -> Iterator[str]:
    events = _lease_events(store)
    granted = {}
    for resource, of_resource in events.items():
        epochs = [event.epoch for event in of_resource if event.kind == "granted"]
        if epochs != list(range(1, len(epochs) + 1)):
            yield f"{resource}: epochs {epochs}"
        for event in of_resource:
            if event.kind == "granted":
                granted[resource, event.epoch] = (event.worker, event.incarnation)
    for line in logs.of("acquire"):
        resource, name, incarnation, _, epoch, _ = line.fields["lease"]
        if granted.get((resource, epoch)) != (name, incarnation):
            yield f"{line.id} was granted {resource} {epoch}, which the lease log does not know"


def guarded_writes_carry_the_epoch_of_their_time(store: Store, logs: WorkerLogs) -> Iterator[str]:
    """An acknowledged guarded write lies between the grant of its lease and the end of that lease."""
    begun: dict[tuple[str, int], lease.LeaseEvent] = {}
    ended_ns: dict[tuple[str, int], int] = {}
    for resource, of_resource in _lease_events(store).items():
        for event in of_resource:
            if event.kind == "granted":
                begun[resource, event.epoch] = event
            else:
                ended_ns[resource, event.epoch] = event.decided_ns
    for line in logs.of("guarded"):
        of = line.fields["resource"], line.fields["epoch"]
        at_ns = line.fields["at_ns"]
        if of not in begun or not begun[of].decided_ns < at_ns < ended_ns.get(of, at_ns + 1):
            yield f"{line.id} was committed at {at_ns} under {of}, which was not held then"
    for resource in load_worker.RESOURCES:
        for entry in _entries(store, resource):
            id, epoch, name, incarnation = json.loads(entry.body)
            grant = begun.get((resource, epoch))
            if grant is None or (grant.worker, grant.incarnation) != (name, incarnation):
                yield f"{id} carries {resource} {epoch} of {name}#{incarnation}, granted: {grant}"


def nothing_is_committed_after_a_fence(store: Store, logs: WorkerLogs) -> Iterator[str]:
    fenced: set[tuple[str, str, int]] = set()
    for line in logs.lines:
        if line.operation == "guarded" and line.outcome != "intend" and "resource" in line.fields:
            name = line.id.rpartition(".")[0]
            of = name, line.fields["resource"], line.fields["epoch"]
            if line.outcome == "acked" and of in fenced:
                yield f"{line.id} was committed under {of} after a fence"
            elif line.outcome == "refused" and line.fields["code"] == "fenced":
                fenced.add(of)


def _lease_events(store: Store) -> dict[str, list[lease.LeaseEvent]]:
    found: defaultdict[str, list[lease.LeaseEvent]] = defaultdict(list)
    last = 0
    while page := store.read(lease.events, last, PAGE):
        for event in page:
            found[event.resource].append(event)
        last = page[-1].n
    return found


# -- the queue -------------------------------------------------------------------------------------


def items_are_done_once_or_still_there(store: Store, logs: WorkerLogs) -> Iterator[str]:
    done = [json.loads(value) for value in _appended(store, load_worker.DONE).values()]
    for seq, times in Counter(seq for seq, *_ in done).items():
        if times > 1:
            yield f"item {seq} was done {times} times"
    left = {seq: left.payload.decode() for seq, left in _items(store).items()}
    dead = {letter.seq: letter.payload.decode() for letter in _dead(store)}
    payloads = {seq: payload for seq, payload, _ in done}
    for seqs, of in ((left.keys() & dead.keys(), "left and dead"),
                     (left.keys() & payloads.keys(), "left and done"),
                     (dead.keys() & payloads.keys(), "dead and done")):  # fmt: skip
        if seqs:
            yield f"items {sorted(seqs)[:SHOWN]} are {of}"
    whole = {**left, **dead, **payloads}
    yield from _matches_logged_outcomes(logs, "put", Counter(whole.values()))
    for line in logs.of("put"):
        if whole.get(line.fields["seq"]) != line.id:
            yield f"{line.id} was told {line.fields['seq']}, where something else is"
    by = Counter(by for _, _, by in done if by != "parent")
    yield from _matches_logged_outcomes(logs, "ack", by)


def queue_counts_equal_a_recount(store: Store, logs: WorkerLogs) -> Iterator[str]:
    def recount(txn: Txn) -> tuple[queue.QueueCounts, queue.QueueCounts]:
        keys = item.keys_of(load_worker.QUEUE)
        ready, delayed, claimed, owned, dead, items = (
            len(txn.scan(prefix, tuples.prefix_end(prefix)))
            for prefix in (
                keys.ready, keys.delayed, keys.by_expiry, keys.by_owner, keys.dead, keys.items,
            )
        )  # fmt: skip
        assert items == ready + delayed + claimed, "each item is in exactly one index"
        assert owned == claimed, "a claim has an owner"
        done = tuples.pack(load_worker.DONE)
        acked = len(txn.scan(done, tuples.prefix_end(done)))
        return queue.counts(txn, load_worker.QUEUE), queue.QueueCounts(
            ready, delayed, claimed, dead, acked
        )

    kept, counted = store.read(recount)
    if kept != counted:
        yield f"kept {kept}, counted {counted}"


def _items(store: Store) -> dict[int, item.QueueItem]:
    prefix = item.keys_of(load_worker.QUEUE).items
    return {
        tuples.unpack_last_int(key, len(prefix)): item.decode_item(value)
        for key, value in rows(store, prefix)
    }


def _dead(store: Store) -> list[queue.DeadLetter]:
    found: list[queue.DeadLetter] = []
    while page := store.read(
        queue.list_dead, load_worker.QUEUE, found[-1].seq if found else 0, PAGE
    ):
        found += page
    return found


# -- helpers ---------------------------------------------------------------------------------------


def _matches_logged_outcomes(
    logs: WorkerLogs, operation: str, found: Counter[str]
) -> Iterator[str]:
    """Acknowledged: applied once. Refused: never. Unknown, or killed before the reply: at most once."""
    for id, times in found.items():
        if times > 1:
            yield f"{id} is there {times} times"
    if lost := logs.ids(operation, "acked") - found.keys():
        yield f"{len(lost)} acknowledged are lost: {sorted(lost)[:SHOWN]}"
    if kept := logs.ids(operation, "refused") & found.keys():
        yield f"{len(kept)} refused are there all the same: {sorted(kept)[:SHOWN]}"
    if unlogged := found.keys() - logs.ids(operation, "intend"):
        yield f"no worker logged the write of {sorted(unlogged)[:SHOWN]}"


def rows(store: Store, prefix: bytes) -> list[Row]:
    """All rows with a prefix, one page per snapshot. The store has no more writes at this point."""
    found: list[Row] = []
    lo, hi = prefix, tuples.prefix_end(prefix)
    while page := store.read(lambda txn, lo=lo: txn.scan(lo, hi, PAGE)):
        found += page
        lo = page[-1][0] + b"\x00"
    return found
