"""What must hold after the chaos, from the workers' logs and the store alone.

Each check is a generator of breaches, one line each; none means that it held. The logs say what the
store acknowledged, the store says what is there; nothing here asks the code under test to judge
itself, except for the hash chain, which `journal.verify` walks.
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
from tests.process import worker

PAGE = 1000
SHOWN = 5


class Line(NamedTuple):
    how: str
    what: str
    id: str
    fields: dict[str, Any]


@dataclass
class Logs:
    """Every worker's lines, in the order each wrote them."""

    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Logs:
        logs = cls()
        for path in sorted(folder.glob("*.log")):
            for text in path.read_text().splitlines():
                logs.lines.append(Line(*json.loads(text)))
        return logs

    def of(self, what: str, how: str = "acked") -> list[Line]:
        return [line for line in self.lines if line.what == what and line.how == how]

    def ids(self, what: str, how: str) -> set[str]:
        return {line.id for line in self.of(what, how)}

    def count(self, how: str) -> int:
        return sum(1 for line in self.lines if line.how == how)


def breaches(store: Store, logs: Logs) -> list[str]:
    """All that did not hold."""
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


def drain(store: Store, queue_name: str = worker.QUEUE) -> None:
    """Do every item that is left, as a worker would, so that all are done or dead."""
    while (due_ns := store.read(queue.next_due_ns, queue_name)) is not None:
        claims = store.transact(queue.claim, queue_name, "parent", 100, 10**10, worker.BUDGET)
        for claim in claims:
            store.transact(worker.acked, "parent", claim)
        if not claims:
            wait_s = max(due_ns - store.now_ns(), 0) / 1e9
            store.wait(queue.topic(queue_name), 0, min(wait_s, 0.1))


# -- counters, appends -----------------------------------------------------------------------------


def counters_equal_their_marks(store: Store, logs: Logs) -> Iterator[str]:
    """A transaction that was applied twice leaves one mark and counts two."""
    marked = set()
    for counter in range(worker.COUNTERS):
        total = store.read(lambda txn, counter=counter: txn.count((*worker.COUNT, counter)))
        prefix = tuples.pack((*worker.MARK, counter))
        marks = {str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows(store, prefix)}
        if total != len(marks):
            yield f"counter {counter} is {total}, its transactions are {len(marks)}"
        marked |= marks
    yield from _each_as_told(logs, "count", Counter(marked))


def appends_are_there_once_and_in_sequence(store: Store, logs: Logs) -> Iterator[str]:
    log = _appended(store, worker.LOG)
    if list(log) != list(range(1, len(log) + 1)):
        yield f"{len(log)} appends have the numbers up to {max(log, default=0)}"
    yield from _each_as_told(logs, "append", Counter(value.decode() for value in log.values()))
    for line in logs.of("append"):
        if log.get(line.fields["seq"], b"").decode() != line.id:
            yield f"{line.id} was told {line.fields['seq']}, where something else is"


def _appended(store: Store, space: tuples.Key) -> dict[int, bytes]:
    prefix = tuples.pack(space)
    return {tuples.unpack_last_int(key, len(prefix)): value for key, value in rows(store, prefix)}


# -- journals --------------------------------------------------------------------------------------


def shared_journal_holds_each_entry_once(store: Store, logs: Logs) -> Iterator[str]:
    yield from _sound(store, worker.SHARED)
    entries = _entries(store, worker.SHARED)
    yield from _each_as_told(logs, "shared", Counter(entry.body.decode() for entry in entries))
    for line in logs.of("shared"):
        if entries[line.fields["height"] - 1].body.decode() != line.id:
            yield f"{line.id} was told height {line.fields['height']}, where something else is"


def guarded_journals_hold_each_entry_once(store: Store, logs: Logs) -> Iterator[str]:
    found: Counter[str] = Counter()
    for resource in worker.RESOURCES:
        yield from _sound(store, resource)
        bodies = [json.loads(entry.body) for entry in _entries(store, resource)]
        found.update(id for id, *_ in bodies)
        epochs = [epoch for _, epoch, *_ in bodies]
        if epochs != sorted(epochs):
            yield f"{resource}: a later entry has a lower epoch"
        for line in logs.of("guarded"):
            if line.fields["resource"] == resource:
                if bodies[line.fields["height"] - 1][0] != line.id:
                    yield f"{line.id} was told height {line.fields['height']}, not what is there"
    yield from _each_as_told(logs, "guarded", found)


def _sound(store: Store, subject: str) -> Iterator[str]:
    try:
        store.read(journal.verify, subject)
    except StoreCorrupt as error:
        yield str(error)


def _entries(store: Store, subject: str) -> list[journal.Entry]:
    found: list[journal.Entry] = []
    while page := store.read(journal.read, subject, len(found) + 1, 1 << 60, PAGE):
        found += page
    return found


# -- leases ----------------------------------------------------------------------------------------


def epochs_only_grow(store: Store, logs: Logs) -> Iterator[str]:
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


def guarded_writes_carry_the_epoch_of_their_time(store: Store, logs: Logs) -> Iterator[str]:
    """Acknowledged guarded writes lie between their grant and whatever ended it."""
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
    for resource in worker.RESOURCES:
        for entry in _entries(store, resource):
            id, epoch, name, incarnation = json.loads(entry.body)
            grant = begun.get((resource, epoch))
            if grant is None or (grant.worker, grant.incarnation) != (name, incarnation):
                yield f"{id} carries {resource} {epoch} of {name}#{incarnation}, granted: {grant}"


def nothing_is_committed_after_a_fence(store: Store, logs: Logs) -> Iterator[str]:
    fenced: set[tuple[str, str, int]] = set()
    for line in logs.lines:
        if line.what == "guarded" and line.how != "intend" and "resource" in line.fields:
            name = line.id.rpartition(".")[0]
            of = name, line.fields["resource"], line.fields["epoch"]
            if line.how == "acked" and of in fenced:
                yield f"{line.id} was committed under {of} after a fence"
            elif line.how == "refused" and line.fields["code"] == "fenced":
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


def items_are_done_once_or_still_there(store: Store, logs: Logs) -> Iterator[str]:
    done = [json.loads(value) for value in _appended(store, worker.DONE).values()]
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
    yield from _each_as_told(logs, "put", Counter(whole.values()))
    for line in logs.of("put"):
        if whole.get(line.fields["seq"]) != line.id:
            yield f"{line.id} was told {line.fields['seq']}, where something else is"
    by = Counter(by for _, _, by in done if by != "parent")
    yield from _each_as_told(logs, "ack", by)


def queue_counts_equal_a_recount(store: Store, logs: Logs) -> Iterator[str]:
    def recount(txn: Txn) -> tuple[queue.Counts, queue.Counts]:
        keys = item.keys_of(worker.QUEUE)
        ready, delayed, claimed, owned, dead, items = (
            len(txn.scan(prefix, tuples.after(prefix)))
            for prefix in (
                keys.ready, keys.delayed, keys.claims, keys.owners, keys.dead, keys.items,
            )
        )  # fmt: skip
        assert items == ready + delayed + claimed, "each item is in exactly one index"
        assert owned == claimed, "a claim has an owner"
        done = tuples.pack(worker.DONE)
        acked = len(txn.scan(done, tuples.after(done)))
        return queue.counts(txn, worker.QUEUE), queue.Counts(ready, delayed, claimed, dead, acked)

    kept, counted = store.read(recount)
    if kept != counted:
        yield f"kept {kept}, counted {counted}"


def _items(store: Store) -> dict[int, item.Item]:
    prefix = item.keys_of(worker.QUEUE).items
    return {
        tuples.unpack_last_int(key, len(prefix)): item.decode(value)
        for key, value in rows(store, prefix)
    }


def _dead(store: Store) -> list[queue.Dead]:
    found: list[queue.Dead] = []
    while page := store.read(queue.dead, worker.QUEUE, found[-1].seq if found else 0, PAGE):
        found += page
    return found


# -- inside ----------------------------------------------------------------------------------------


def _each_as_told(logs: Logs, what: str, found: Counter[str]) -> Iterator[str]:
    """Acknowledged: once. Refused: never. Unknown, or killed before the answer: at most once."""
    for id, times in found.items():
        if times > 1:
            yield f"{id} is there {times} times"
    if lost := logs.ids(what, "acked") - found.keys():
        yield f"{len(lost)} acknowledged are lost: {sorted(lost)[:SHOWN]}"
    if kept := logs.ids(what, "refused") & found.keys():
        yield f"{len(kept)} refused are there all the same: {sorted(kept)[:SHOWN]}"
    if strange := found.keys() - logs.ids(what, "intend"):
        yield f"nobody meant to write {sorted(strange)[:SHOWN]}"


def rows(store: Store, prefix: bytes) -> list[Row]:
    """All rows below a prefix, a page a snapshot: nobody writes any more."""
    found: list[Row] = []
    lo, hi = prefix, tuples.after(prefix)
    while page := store.read(lambda txn, lo=lo: txn.scan(lo, hi, PAGE)):
        found += page
        lo = page[-1][0] + b"\x00"
    return found
