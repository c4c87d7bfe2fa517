"""One decision of the coordinator: what it writes, counts, logs and wakes, all in one commit.

`Decision` is open while an operation runs. It knows the places where a task can wait (see `rows`),
moves tasks between them, and keeps the counts true; what a record means for a status it leaves to
`board`. At the end it writes the log entry, the counts, and wakes whoever waits.
"""

from __future__ import annotations

from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks.records import Log
from holdfast.tasks.rows import (
    FRESH,
    Body,
    Keys,
    Limits,
    Spec,
    Status,
    Tally,
    after_int,
    body_of,
    decode_status,
    is_suspect,
    keys_of,
    lane,
    limits_of,
    missing,
    order,
    pack,
    pack_int,
    packed_text,
    spec_of,
)
from holdfast.tasks.runs import Leases, lift

# Dependents that one decision looks at; more are looked at by the next ones.
DEPENDENTS_MAX = 1_000


class Decision:
    def __init__(self, txn: Txn, universe: str) -> None:
        self.txn = txn
        self.keys: Keys = keys_of(universe)
        self.now_ns = txn.now_ns
        self.log = Log()
        self.leases = Leases(txn, self.keys)
        self.tally = Tally(txn, self.keys)
        # When tasks of one kind of retention ended here: what is kept until when.
        self._ended: dict[int, list[int]] = {}
        self._woken: set[str] = set()
        # Limits under which there may be room now.
        self._roomy: set[tuple[str, str]] = set()
        self._limits: dict[str, Limits] = {}
        # How many tasks were put aside because whoever asks may not have them.
        self.aside = 0

    def close(self) -> None:
        txn, keys = self.txn, self.keys
        self.admit()
        for retain_ns, seqs in self._ended.items():
            until = pack_int(self.now_ns + retain_ns)
            txn.put(keys.retained + until + pack_int(seqs[0]), pack(seqs))
        self.leases.save()
        self.log.save(txn, keys)
        self.tally.save()
        for queue in self._woken:
            txn.notify(keys.queue_topic(queue))

    # -- rows ----------------------------------------------------------------------------------

    def body(self, packed_seq: bytes) -> Body | None:
        return body_of(self.txn, self.keys, packed_seq)

    def known(self, packed_seq: bytes) -> tuple[Body, Spec]:
        body = body_of(self.txn, self.keys, packed_seq)
        if body is None:
            raise missing(packed_seq)
        return body, spec_of(self.txn, self.keys, body.spec)

    def resting(self, packed_seq: bytes) -> Status:
        """The status of a task that waits, by itself: it is not leased, so nobody need look for that."""
        row = self.txn.get(self.keys.statuses + packed_seq)
        return FRESH if row is None else decode_status(row)

    def status(self, packed_seq: bytes) -> Status:
        return self.leases.status(packed_seq)

    def write(self, packed_seq: bytes, status: Status) -> None:
        self.leases.leave(packed_seq, status)
        self.txn.put(self.keys.statuses + packed_seq, pack(status))

    def wake(self, queue: str) -> None:
        self._woken.add(queue)

    def limits(self, queue: str) -> Limits:
        found = self._limits.get(queue)
        if found is None:
            found = self._limits[queue] = limits_of(self.txn, self.keys, queue)
        return found

    # -- places --------------------------------------------------------------------------------

    def enter(self, packed_seq: bytes, body: Body, spec: Spec, status: Status) -> None:
        """Put a task that waits where it belongs."""
        place, key = self.place(packed_seq, body, spec, status)
        self.tally.add(spec.queue, place)
        if place == "delayed":
            at = self.keys.delayed + pack_int(_not_before(body, status)) + packed_seq
            self.txn.put(at, key)
            # Whoever sleeps until the first one may have slept too long.
            self.wake(spec.queue)
        elif place != "blocked":
            self.txn.put(key, packed_seq)
            self.wake(spec.queue)

    def place(self, packed_seq: bytes, body: Body, spec: Spec, status: Status) -> tuple[str, bytes]:
        """Where it belongs now; of a delayed one, the key it will have then."""
        suspect = is_suspect(spec, status)
        key = (self.keys.suspects if suspect else self.keys.ready) + order(spec, packed_seq)
        if status.waits:
            return "blocked", b""
        if _not_before(body, status) > self.now_ns:
            return "delayed", key
        return ("suspect" if suspect else "ready"), key

    def leave(self, packed_seq: bytes, body: Body, spec: Spec, status: Status) -> None:
        """Take a task that waits from wherever it is."""
        txn, keys = self.txn, self.keys
        here = order(spec, packed_seq)
        parked = keys.parked + _parking(spec.queue, body.limit) + here
        delayed = keys.delayed + pack_int(_not_before(body, status)) + packed_seq
        if lift(txn, keys.ready + lane(spec.queue, spec.kind, spec.priority), packed_seq):
            self._left(body, spec, "ready")
            return
        for place, key in (
            ("suspect", keys.suspects + here),
            ("parked", parked),
            ("stray", self.stray_key(spec, packed_seq)),
            ("delayed", delayed),
        ):
            if txn.get(key) is not None:
                txn.delete(key)
                self._left(body, spec, place)
                return
        self.tally.add(spec.queue, "blocked", -1)

    def _left(self, body: Body, spec: Spec, place: str) -> None:
        self.tally.add(spec.queue, place, -1)
        if body.limit and place in ("ready", "suspect"):
            # The place that it was let in for is for the next of those that wait.
            self.let_in(spec.queue, body.limit)

    def single_out(self, packed_seq: bytes, spec: Spec) -> None:
        """Let a task that is ready have a row of its own: it is not as fresh as the others of its run."""
        here = self.keys.ready + lane(spec.queue, spec.kind, spec.priority)
        if lift(self.txn, here, packed_seq):
            self.txn.put(here + packed_seq, packed_seq)

    def wake_due(self, limit: int) -> int:
        """Move tasks whose time has come to where they can be granted; how many."""
        txn, keys = self.txn, self.keys
        due = txn.scan(keys.delayed, keys.delayed + pack_int(self.now_ns + 1), limit)
        for key, place in due:
            packed_seq = key[after_int(key, len(keys.delayed)) :]
            txn.delete(key)
            txn.put(place, packed_seq)
            _, spec = self.known(packed_seq)
            self.tally.add(spec.queue, "delayed", -1)
            suspect = place.startswith(keys.suspects)
            self.tally.add(spec.queue, "suspect" if suspect else "ready")
            self.wake(spec.queue)
        return len(due)

    # -- strays ----------------------------------------------------------------------------------

    def stray_key(self, spec: Spec, packed_seq: bytes) -> bytes:
        return self.keys.strays + tuples.pack((spec.queue, spec.name)) + order(spec, packed_seq)

    def stray(self, packed_seq: bytes, body: Body, spec: Spec, place: str) -> None:
        """Put a task aside that whoever asks does not know, for one who does."""
        self.aside += 1
        self.txn.put(self.stray_key(spec, packed_seq), packed_seq)
        self.tally.add(spec.queue, place, -1)
        self.tally.add(spec.queue, "stray")
        self.wake(spec.queue)
        if body.limit:
            # Others of its limit, whose names are known, do not wait for it.
            self.let_in(spec.queue, body.limit)

    def recall(self, queue: str, names: frozenset[str], limit: int) -> None:
        """Bring back what was put aside and is known to whoever asks now."""
        if not self.tally.now(queue, "stray"):
            return
        txn, keys = self.txn, self.keys
        aside = keys.strays + packed_text(queue)
        lo = aside
        while limit > 0:
            found = txn.scan(lo, tuples.after(aside), limit)
            if not found:
                return
            _, spec = self.known(found[0][1])
            of_name = keys.strays + tuples.pack((queue, spec.name))
            lo = tuples.after(of_name)
            if names and spec.name not in names:
                continue
            for key, packed_seq in found:
                if not key.startswith(of_name):
                    break
                txn.delete(key)
                _, own = self.known(packed_seq)
                suspect = is_suspect(own, self.resting(packed_seq))
                places = keys.suspects if suspect else keys.ready
                txn.put(places + order(own, packed_seq), packed_seq)
                self.tally.add(queue, "stray", -1)
                self.tally.add(queue, "suspect" if suspect else "ready")
                limit -= 1

    # -- limits --------------------------------------------------------------------------------

    def running_key(self, queue: str, limit: str) -> bytes:
        return self.keys.running + tuples.pack((queue, limit))

    def begin_limited(self, spec: Spec, limit: str, most: int) -> bool:
        """Count one more of a limit, if there is room."""
        key = self.running_key(spec.queue, limit)
        if most and self.txn.count(key) >= most:
            return False
        self.txn.add(key, 1)
        return True

    def park(self, key: bytes, packed_seq: bytes, body: Body, spec: Spec, place: str) -> None:
        self.aside += 1
        txn = self.txn
        txn.delete(key)
        parking = self.keys.parked + _parking(spec.queue, body.limit)
        txn.put(parking + order(spec, packed_seq), packed_seq)
        self.tally.add(spec.queue, place, -1)
        self.tally.add(spec.queue, "parked")

    def end_limited(self, spec: Spec, limit: str) -> None:
        """Count one less, and let those in that have been waiting for it."""
        txn = self.txn
        key = self.running_key(spec.queue, limit)
        if txn.count(key) > 1:
            txn.add(key, -1)
        else:
            txn.delete(key)
        self.let_in(spec.queue, limit)

    def let_in(self, queue: str, limit: str) -> None:
        """There may be room under this limit: it is looked at once, however often it is said."""
        self._roomy.add((queue, limit))

    def admit(self) -> None:
        """Let those in that are parked, where there is room now."""
        for queue, limit in sorted(self._roomy):
            self._admit(queue, limit)
        self._roomy.clear()

    def _admit(self, queue: str, limit: str) -> None:
        txn = self.txn
        most = self.limits(queue).per_key
        parking = self.keys.parked + _parking(queue, limit)
        left = txn.count(self.running_key(queue, limit))
        room = max(most - left, 0) if most else DEPENDENTS_MAX
        for parked, packed_seq in txn.scan(parking, tuples.after(parking), room):
            txn.delete(parked)
            _, own = self.known(packed_seq)
            suspect = is_suspect(own, self.resting(packed_seq))
            places = self.keys.suspects if suspect else self.keys.ready
            txn.put(places + order(own, packed_seq), packed_seq)
            self.tally.add(queue, "parked", -1)
            self.tally.add(queue, "suspect" if suspect else "ready")
            self.wake(queue)

    # -- the end of a lease, the end of a task ---------------------------------------------------

    def unlease(self, spec: Spec, limit: str = "", count: int = 1) -> None:
        """Leases have ended, however they did."""
        self.tally.add(spec.queue, "leased", -count)
        if limit:
            self.end_limited(spec, limit)
        if self.limits(spec.queue).concurrency:
            self.wake(spec.queue)

    def end_all(self, seqs: list[int], spec: Spec, place: str) -> None:
        """Tasks have ended for good: count them, keep them for their time, tell those who look."""
        self.tally.add(spec.queue, place, len(seqs))
        kept = self._ended.get(spec.retain_ns)
        if kept is None:
            kept = self._ended[spec.retain_ns] = []
        kept += seqs
        topic = self.keys.task_topic
        for one in {topic(seq) for seq in seqs}:
            self.txn.notify(one)

    def ended(self, seq: int, spec: Spec, place: str, *, awaited: bool) -> None:
        """A task has ended for good, and others may wait for that."""
        self.end_all([seq], spec, place)
        if awaited:
            # Those who wait may be told when the task itself is forgotten already.
            self.txn.put(self.keys.ended + pack_int(seq), place.encode())


def _not_before(body: Body, status: Status) -> int:
    return status.not_before_ns or body.not_before_ns


def _parking(queue: str, limit: str) -> bytes:
    return packed_text(queue) + tuples.pack((limit,))
