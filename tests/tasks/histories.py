"""Histories: everything that can be asked of a coordinator, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from holdfast.clock import S
from holdfast.tasks.coordinator import End, Grant, Hold, New, Report
from tests.tasks.rig import LEASE_NS, Desk

QUEUES = ("default", "mail")
NAMES = ("work", "play")
PAUSES_NS = (0, S // 10, S, 2 * S, LEASE_NS // 3, LEASE_NS // 2, LEASE_NS, 3 * LEASE_NS)


class History:
    """A seed's own world: what it does depends on the seed and on what it was answered, and on no clock."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk = desk
        self.random = Random(seed)
        self.grants: list[Grant] = []
        self.seqs: list[int] = []

    def run(self, steps: int) -> Iterator[str]:
        """The name of each step, when it is done."""
        kinds = (
            self.submit, self.submit, self.lease, self.lease, self.settle, self.settle, self.extend,
            self.pause, self.cancel, self.redrive, self.limit, self.maintain,
        )  # fmt: skip
        for _ in range(steps):
            kind = self.random.choice(kinds)
            kind()
            yield kind.__name__

    def submit(self) -> None:
        random = self.random
        new = []
        for n in range(random.randint(1, 4)):
            after: tuple[int, ...] = ()
            if random.random() < 0.2 and self.seqs:
                kept = [seq for seq in self.seqs[-9:] if self.desk.kept(seq)]
                after = tuple(random.sample(kept, min(len(kept), random.randint(1, 2))))
            if random.random() < 0.2 and n:
                after += (-random.randint(1, n),)
            new.append(
                New(
                    b"args",
                    delay_ns=random.choice((0, 0, 0, S, LEASE_NS)),
                    key=random.choice(("", "", "", "k1", "k2", "k3")),
                    limit=random.choice(("", "", "a", "b")),
                    after=after,
                )
            )
        self.seqs += self.desk.submit(
            *new,
            name=random.choice(NAMES),
            kind=random.choice((0, 0, 1, 2)),
            queue=random.choice(QUEUES),
            priority=random.choice((0, 0, 1, -1)),
            attempts=random.randint(1, 3),
            expiries_max=random.randint(1, 3),
            lease_ns=random.choice((LEASE_NS, LEASE_NS // 2)),
            window_ns=random.choice((LEASE_NS, LEASE_NS * 4)),
            retain_ns=random.choice((S, 10 * LEASE_NS)),
            backoff_ns=S,
        )

    def lease(self) -> None:
        random = self.random
        alone = random.random() < 0.4
        queues = random.sample(QUEUES, random.randint(1, 2))
        names = random.choice(((), (), NAMES, NAMES[:1], NAMES[1:]))
        count = random.randint(0, 4)
        self.grants += self.desk.lease(count, alone=alone, queues=queues, names=names)

    def settle(self) -> None:
        """Some of what is held, and of what was held long ago; a wrong lease at times."""
        random = self.random
        reports = []
        some = self.grants[-6:] if random.random() < 0.8 else self.grants
        for grant in random.sample(some, min(len(some), random.randint(1, 4))):
            lease = grant.lease + random.choice((0, 0, 0, 0, 1, -1))
            reports.append(Report(grant.seq, lease, random.choice((0, 0, 0, *End)), b"result"))
            if random.random() < 0.1:
                reports.append(reports[-1])
        self.desk.settle(*reports)

    def extend(self) -> None:
        random = self.random
        some = random.sample(self.grants[-12:], min(len(self.grants), 3))
        holds = [Hold(grant.seq, grant.lease, random.random() < 0.5) for grant in some]
        self.desk.extend(*holds)

    def pause(self) -> None:
        self.desk.clock.advance(self.random.choice(PAUSES_NS))

    def cancel(self) -> None:
        kept = [seq for seq in self.seqs if self.desk.kept(seq)]
        if kept and self.random.random() < 0.5:
            self.desk.cancel(self.random.choice(kept))

    def redrive(self) -> None:
        over = [
            seq
            for seq in self.seqs
            if self.desk.kept(seq) and self.desk.state(seq).name in ("FAILED", "DEAD")
        ]
        if over:
            self.seqs += self.desk.redrive(self.random.choice(over))

    def limit(self) -> None:
        if self.random.random() < 0.3:
            random = self.random
            concurrency, per_key = random.choice((0, 2)), random.choice((0, 1, 2))
            self.desk.limit(random.choice(QUEUES), concurrency=concurrency, per_key=per_key)

    def maintain(self) -> None:
        self.desk.maintain(self.random.randint(1, 20))

    def finish(self) -> None:
        """Nothing fails any more: all that can run is run to its end."""
        desk = self.desk
        for _ in range(1000):
            grants = desk.lease(100, queues=QUEUES) or desk.lease(100, queues=QUEUES, alone=True)
            if grants:
                desk.settle(*(Report(grant.seq, grant.lease) for grant in grants))
                continue
            if not any(desk.counts(queue).waiting + desk.counts(queue).leased for queue in QUEUES):
                return
            desk.clock.advance(LEASE_NS)
        raise AssertionError([desk.counts(queue) for queue in QUEUES])
