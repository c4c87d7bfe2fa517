"""Random histories of all task operations, in an order drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from holdfast.clock import S
from holdfast.tasks.operations import AttemptOutcome, HeldLease, TaskGrant, TaskReport, TaskToSubmit
from tests.tasks.rig import LEASE_NS, TaskOperationsRig

QUEUES = ("default", "mail")
NAMES = ("work", "play")
PAUSES_NS = (0, S // 10, S, 2 * S, LEASE_NS // 3, LEASE_NS // 2, LEASE_NS, 3 * LEASE_NS)


class RandomTaskHistory:
    """A random history. Its steps depend on the seed and on earlier results, not on a clock."""

    def __init__(self, rig: TaskOperationsRig, seed: int) -> None:
        self.rig = rig
        self.random = Random(seed)
        self.grants: list[TaskGrant] = []
        self.seqs: list[int] = []

    def run(self, steps: int) -> Iterator[str]:
        """Run steps and yield the name of each one."""
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
                existing = [seq for seq in self.seqs[-9:] if self.rig.exists(seq)]
                after = tuple(random.sample(existing, min(len(existing), random.randint(1, 2))))
            if random.random() < 0.2 and n:
                after += (-random.randint(1, n),)
            new.append(
                TaskToSubmit(
                    b"args",
                    delay_ns=random.choice((0, 0, 0, S, LEASE_NS)),
                    key=random.choice(("", "", "", "k1", "k2", "k3")),
                    limit=random.choice(("", "", "a", "b")),
                    after=after,
                    # Without a draw, so that the seeds keep their histories.
                    tag=("", "", "eu")[len(self.seqs) % 3],
                )
            )
        self.seqs += self.rig.submit(
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
        self.grants += self.rig.lease(count, alone=alone, queues=queues, names=names)

    def settle(self) -> None:
        """Report some current and some old grants, sometimes under a wrong lease."""
        random = self.random
        reports = []
        candidates = self.grants[-6:] if random.random() < 0.8 else self.grants
        for grant in random.sample(candidates, min(len(candidates), random.randint(1, 4))):
            lease = grant.lease + random.choice((0, 0, 0, 0, 1, -1))
            reports.append(
                TaskReport(grant.seq, lease, random.choice((0, 0, 0, *AttemptOutcome)), b"result")
            )
            if random.random() < 0.1:
                reports.append(reports[-1])
        self.rig.report(*reports)

    def extend(self) -> None:
        random = self.random
        candidates = random.sample(self.grants[-12:], min(len(self.grants), 3))
        held_leases = [
            HeldLease(grant.seq, grant.lease, random.random() < 0.5) for grant in candidates
        ]
        self.rig.extend(*held_leases)

    def pause(self) -> None:
        self.rig.clock.advance(self.random.choice(PAUSES_NS))

    def cancel(self) -> None:
        existing = [seq for seq in self.seqs if self.rig.exists(seq)]
        if existing and self.random.random() < 0.5:
            self.rig.cancel(self.random.choice(existing))

    def redrive(self) -> None:
        redrivable = [
            seq
            for seq in self.seqs
            if self.rig.exists(seq) and self.rig.state(seq).name in ("FAILED", "DEAD")
        ]
        if redrivable:
            self.seqs += self.rig.redrive(self.random.choice(redrivable))

    def limit(self) -> None:
        if self.random.random() < 0.3:
            random = self.random
            concurrency, per_key = random.choice((0, 2)), random.choice((0, 1, 2))
            self.rig.set_limits(random.choice(QUEUES), concurrency=concurrency, per_key=per_key)

    def maintain(self) -> None:
        self.rig.maintain(self.random.randint(1, 20))

    def run_to_completion(self) -> None:
        """Complete every task without further failures."""
        rig = self.rig
        for _ in range(1000):
            grants = rig.lease(100, queues=QUEUES) or rig.lease(100, queues=QUEUES, alone=True)
            if grants:
                rig.report(*(TaskReport(grant.seq, grant.lease) for grant in grants))
                continue
            if not any(rig.counts(queue).waiting + rig.counts(queue).leased for queue in QUEUES):
                return
            rig.clock.advance(LEASE_NS)
        raise AssertionError([rig.counts(queue) for queue in QUEUES])
