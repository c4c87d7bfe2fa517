"""The shape of one run: how big, which actors, which faults. Drawn first, from the same tape.

Swarm testing: each fault is on or off per seed, so that some seeds are calm enough for long stories
and others have one fault alone, often. All bounds of a run are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from holdfast.clock import S
from holdfast.config import DELETED_KEPT_NS
from holdfast.sim import ledger_shape
from holdfast.sim.faults import Fault
from holdfast.sim.ledger_shape import LedgerShape
from holdfast.sim.tape import Tape

LEASE_NS = 2 * S
CLAIM_NS = 2 * S
# A key may be forgotten after this; a producer stops sending it again well before.
RETENTION_NS = 5 * S
HORIZON_NS = 3 * S
# A host that made no progress for this long does not renew.
PROGRESS_NS = 1 * S
# After faults stop, all must come to rest within these.
REST_STEPS_MAX = 3000
REST_NS = 5 * S
FAULTS_UNTIL = 0.6
# Leases lost at one message, after which its world is parked.
STUCK_MAX = 3
# An item that no live worker knows is given up after this long.
UNKNOWN_NS = S * 4 // 5
# Of a thousand runs of worlds with several workers, those with two versions of their code.
VERSIONS_MILLE = 400
# Of a thousand runs of effects, those with a process that hosts worlds, does their effects and
# fires their timers.
HOUSEHOLD_MILLE = 500
# Bounds on the histories of accounts, (entries, ns), by two draws that only runs of the spine use: so the
# other seeds stay as they were.
KEEPS = {(3, 1): (3, 0), (3, 2): (2, 2 * S)}
# How long the rows of a deleted account are kept in those runs.
DELETED_NS = S
# Attempts that the effects of simulated worlds get.
ATTEMPTS = {"fx.quote": 3, "fx.pay": 2}
# Mail and timers are never given up.
CERTAIN = {
    name: {"failures_max": 1 << 31, "expiries_max": 1 << 31}
    for name in (
        "u/effects/fabric.send",
        "u/effects/fabric.send>v",
        "u/timers",
        "u/timers/calendar",
    )
}


class Workload:
    """What a run is about."""

    SPINE = "spine"  # leases, journals, inboxes, queues and the runner, each by itself
    WORLDS = "worlds"  # world workers and orchestrators, with all of that below them
    EFFECTS = "effects"  # the same, with worlds that want much of others, and pools of those
    BOTH = "both"
    TASKS = "tasks"  # submitters, workers and operators of tasks
    LEDGER = "ledger"  # services of a run's ledger, tasks that work its rows off, a sink


class Nemesis:
    """What the environment may do besides faults at commits, by name."""

    KILL = "kill"
    CLOCK = "clock"
    REBOOT = "reboot"
    TAKEOVER = "takeover"
    RESTORE = "restore"
    MARKER = "marker"

    ALL = (KILL, CLOCK, REBOOT, TAKEOVER, RESTORE, MARKER)


@dataclass
class Settings:
    steps: int = 500
    worlds: int = 1
    hosts: int = 2
    producers: int = 1
    putters: int = 1
    workers: int = 1
    runners: int = 1
    operators: int = 1
    clerks: int = 2
    workload: str = Workload.SPINE
    world_workers: int = 2
    orchestrators: int = 2
    senders: int = 1
    accounts: int = 2
    pools: int = 1
    timer_workers: int = 1
    # One process hosts worlds, does their effects and fires their timers, too.
    household: bool = False
    # Inboxes are so short that they are full at times.
    crowded: bool = False
    # Mail to another universe goes by a lane of its own, as to another store.
    lanes: bool = False
    # Workers run two versions of the code, and change it when they start anew.
    versions: bool = False
    # The history that an account keeps: a number of entries, and an age below which entries stay; None: all.
    keep: tuple[int, int] | None = None
    rates: dict[Fault, int] = field(default_factory=dict)
    nemesis: tuple[str, ...] = ()
    failures_max: int = 3
    expiries_max: int = 3
    # The engine remembers so few commits that snapshots and outcomes grow too old.
    short_memory: bool = False
    # Transactions of several actors share a commit.
    group: bool = False
    skew: bool = False
    audit_every: int = 150
    ledger: LedgerShape = field(default_factory=LedgerShape)

    @property
    def budget(self) -> dict[str, int]:
        return {"failures_max": self.failures_max, "expiries_max": self.expiries_max}

    @property
    def deleted_ns(self) -> int:
        """How long the rows of a deleted world stay."""
        return DELETED_KEPT_NS if self.keep is None else DELETED_NS

    def promises(self) -> dict[str, Any]:
        """What checkers need to know of the run: its `config` event."""
        effects = {
            f"u/effects/{kind}": {**self.budget, "failures_max": attempts}
            for kind, attempts in ATTEMPTS.items()
        }
        return {
            "budgets": {**dict.fromkeys(("q", "t", "fx"), self.budget), **effects, **CERTAIN},
            "crowded": self.crowded,
            "retention_ns": RETENTION_NS,
            "progress_ns": PROGRESS_NS,
            "rest_ns": REST_NS,
            "stuck_max": STUCK_MAX,
            "unknown_ns": UNKNOWN_NS,
            "deleted_ns": self.deleted_ns,
            "keep": dict(zip(("entries", "ns"), self.keep or (), strict=False)),
            "claims_whole": not self.ledger.partitions,
        }


# A ledger is arrays: where NumPy is not installed, runs are about the rest.
HAS_LEDGER = find_spec("numpy") is not None
# Seeds by what they are about: most are about one thing.
WORKLOADS = (
    *[Workload.SPINE] * 3,
    Workload.TASKS,
    *[Workload.WORLDS] * 5,
    *[Workload.EFFECTS] * 5,
    Workload.BOTH,
    *[Workload.LEDGER] * (3 if HAS_LEDGER else 0),
    *[Workload.TASKS] * 2,
)


def swarm(tape: Tape) -> Settings:
    """The settings that a seed draws."""
    rates = {fault: (8, 20, 50)[tape.draw(3)] for fault in Fault if tape.chance(500)}
    nemesis = tuple(name for name in Nemesis.ALL if tape.chance(400))
    runners = 1 + tape.draw(2)
    settings = Settings(
        steps=(500, 800, 1200)[tape.draw(3)],
        worlds=1 + tape.draw(2),
        hosts=1 + tape.draw(3),
        producers=1 + tape.draw(2),
        putters=1 + tape.draw(2),
        # One runner serves one queue; somebody must serve the other.
        workers=tape.draw(3) if runners > 1 else 1 + tape.draw(2),
        runners=runners,
        operators=1 + tape.draw(2),
        clerks=2 * tape.draw(2),
        workload=WORKLOADS[tape.draw(len(WORKLOADS))],
        world_workers=1 + tape.draw(3),
        orchestrators=1 + tape.draw(2),
        senders=1 + tape.draw(3),
        accounts=1 + tape.draw(3),
        rates=rates,
        nemesis=nemesis,
        failures_max=1 + tape.draw(4),
        expiries_max=1 + tape.draw(3),
        short_memory=tape.chance(200),
        group=tape.chance(400),
        skew=tape.chance(300),
    )
    if settings.workload in (Workload.WORLDS, Workload.EFFECTS):
        settings.keep = KEEPS.get((settings.hosts, settings.producers))
    if settings.workload == Workload.EFFECTS:
        settings.steps += 400
        settings.pools = settings.timer_workers = 2
        settings.crowded = tape.chance(200)
        settings.lanes = tape.chance(500)
        settings.household = tape.chance(HOUSEHOLD_MILLE)
        if settings.household:
            # What is carried is rare: these runs are about that alone.
            settings.keep = None
            # Few others: most of what its worlds want is done where they are.
            settings.pools = int(settings.lanes)
            settings.senders = settings.orchestrators = 1
            # A turn of a house has many steps.
            settings.steps += 1200
            settings.world_workers = 1 + tape.chance(300)
            # Besides its own: a timer worker of another process that fires the same timers, or none.
            settings.timer_workers = int(tape.chance(300))
    if settings.workload == Workload.WORLDS and settings.world_workers > 1:
        settings.versions = tape.chance(VERSIONS_MILLE)
    if settings.workload == Workload.TASKS:
        settings.audit_every = 50
    if settings.workload == Workload.LEDGER:
        settings.ledger = ledger_shape.drawn(tape)
        # What a restored backup means to a sink that went on is for a person to say.
        settings.nemesis = tuple(name for name in nemesis if name != Nemesis.RESTORE)
    return settings
