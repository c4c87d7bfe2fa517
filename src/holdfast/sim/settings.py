"""Settings of one run: its size, actors and faults, drawn first from the same tape.

Swarm testing: each fault is on or off per seed. Some seeds are calm enough for long histories,
others have a single, frequent fault. All limits of a run are defined here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from holdfast.clock import S
from holdfast.config import DELETED_RETENTION_NS
from holdfast.sim import run_parameters
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faults import Fault
from holdfast.sim.run_parameters import RunParameters

LEASE_NS = 2 * S
CLAIM_NS = 2 * S
# The runtime may forget a key after this time. A producer stops resending well before.
RETENTION_NS = 5 * S
RESEND_HORIZON_NS = 3 * S
# A host without progress for this long does not renew its lease.
PROGRESS_NS = 1 * S
# After faults stop, all work must finish within these limits.
REST_STEPS_MAX = 3000
REST_NS = 5 * S
FAULTY_SHARE = 0.6
# Lost leases at one message, after which its world is parked.
STUCK_MAX = 3
# An event type unknown to all live workers is given up after this time.
UNKNOWN_EVENT_NS = S * 4 // 5
# Share (per mille) of world runs with several workers that mix two code versions.
MIXED_VERSIONS_MILLE = 400
# Share (per mille) of effect runs with a co-located process: one that hosts worlds, runs their
# effects and fires their timers.
COLOCATED_MILLE = 500
# History bounds of accounts (entries, ns), chosen by two draws that other workloads use for hosts
# and producers. This keeps the remaining draws of existing seeds unchanged.
HISTORY_BOUNDS = {(3, 1): (3, 0), (3, 2): (2, 2 * S)}
# Retention of the rows of a deleted account in those runs.
DELETED_NS = S
# Attempts per effect of the simulated worlds.
ATTEMPTS = {"fx.quote": 3, "fx.pay": 2}
# Mail and timers are never dead-lettered.
NEVER_DEAD = {
    name: {"failures_max": 1 << 31, "expiries_max": 1 << 31}
    for name in (
        "u/effects/fabric.send",
        "u/effects/fabric.send>v",
        "u/timers",
        "u/timers/calendar",
    )
}


class Workload:
    """The subject of a run."""

    SPINE = "spine"  # leases, journals, inboxes, queues and the runner, without worlds
    WORLDS = "worlds"  # world workers and orchestrators, on top of the above
    EFFECTS = "effects"  # worlds with many effects, timers and mail, and their workers
    BOTH = "both"
    TASKS = "tasks"  # submitters, workers and operators of tasks
    LEDGER = "ledger"  # ledger services, tasks that process rows, a sink
    FLOWS = "flows"  # workers of flows, timers, clients, schedules


class EnvironmentFault:
    """Faults of the environment, beside faults at commits, by name."""

    KILL = "kill"
    CLOCK = "clock"
    REBOOT = "reboot"
    TAKEOVER = "takeover"
    RESTORE = "restore"
    MARKER = "marker"

    ALL = (KILL, CLOCK, REBOOT, TAKEOVER, RESTORE, MARKER)


@dataclass
class SimulationSettings:
    steps: int = 500
    worlds: int = 1
    hosts: int = 2
    producers: int = 1
    putters: int = 1
    workers: int = 1
    runners: int = 1
    operators: int = 1
    kv_clients: int = 2
    workload: str = Workload.SPINE
    world_workers: int = 2
    orchestrators: int = 2
    senders: int = 1
    accounts: int = 2
    pools: int = 1
    timer_workers: int = 1
    # One process hosts worlds, runs their effects and fires their timers.
    colocated: bool = False
    # Inboxes are short, so that they are full at times.
    small_inboxes: bool = False
    # Mail to another universe uses a peer queue, as for another store.
    peer_queues: bool = False
    # Workers run two code versions and may change version at a restart.
    mixed_versions: bool = False
    # History bound of accounts: number of entries, and minimum age of removed entries. None:
    # unbounded.
    history_bound: tuple[int, int] | None = None
    rates: dict[Fault, int] = field(default_factory=dict)
    environment_faults: tuple[str, ...] = ()
    failures_max: int = 3
    expiries_max: int = 3
    # The engine keeps few commits, so that snapshots and outcomes become too old.
    short_memory: bool = False
    # Transactions of several actors share a commit.
    group_commit: bool = False
    skew: bool = False
    audit_every: int = 150
    ledger: RunParameters = field(default_factory=RunParameters)

    @property
    def budget(self) -> dict[str, int]:
        return {"failures_max": self.failures_max, "expiries_max": self.expiries_max}

    @property
    def deleted_retention_ns(self) -> int:
        """Retention of the rows of a deleted world."""
        return DELETED_RETENTION_NS if self.history_bound is None else DELETED_NS

    def config_arguments(self) -> dict[str, Any]:
        """Arguments of the `config` event: the parameters of the run that checkers need."""
        effects = {
            f"u/effects/{kind}": {**self.budget, "failures_max": attempts}
            for kind, attempts in ATTEMPTS.items()
        }
        return {
            "budgets": {**dict.fromkeys(("q", "t", "fx"), self.budget), **effects, **NEVER_DEAD},
            "crowded": self.small_inboxes,
            "retention_ns": RETENTION_NS,
            "progress_ns": PROGRESS_NS,
            "rest_ns": REST_NS,
            "stuck_max": STUCK_MAX,
            "unknown_ns": UNKNOWN_EVENT_NS,
            "deleted_ns": self.deleted_retention_ns,
            "keep": dict(zip(("entries", "ns"), self.history_bound or (), strict=False)),
            "claims_whole": not self.ledger.partitions,
        }


# The ledger needs NumPy. Without it, no seed draws a ledger run.
HAS_LEDGER = find_spec("numpy") is not None
# Workloads by weight. Most seeds have one subject.
WORKLOADS = (
    *[Workload.SPINE] * 3,
    Workload.TASKS,
    *[Workload.WORLDS] * 5,
    *[Workload.EFFECTS] * 5,
    Workload.BOTH,
    *[Workload.LEDGER] * (3 if HAS_LEDGER else 0),
    *[Workload.TASKS] * 2,
)


def draw_settings(tape: ChoiceTape) -> SimulationSettings:
    """Draw the settings of a seed."""
    rates = {fault: (8, 20, 50)[tape.draw(3)] for fault in Fault if tape.chance(500)}
    environment_faults = tuple(name for name in EnvironmentFault.ALL if tape.chance(400))
    runners = 1 + tape.draw(2)
    settings = SimulationSettings(
        steps=(500, 800, 1200)[tape.draw(3)],
        worlds=1 + tape.draw(2),
        hosts=1 + tape.draw(3),
        producers=1 + tape.draw(2),
        putters=1 + tape.draw(2),
        # A single runner serves one queue. A worker must serve the other.
        workers=tape.draw(3) if runners > 1 else 1 + tape.draw(2),
        runners=runners,
        operators=1 + tape.draw(2),
        kv_clients=2 * tape.draw(2),
        workload=WORKLOADS[tape.draw(len(WORKLOADS))],
        world_workers=1 + tape.draw(3),
        orchestrators=1 + tape.draw(2),
        senders=1 + tape.draw(3),
        accounts=1 + tape.draw(3),
        rates=rates,
        environment_faults=environment_faults,
        failures_max=1 + tape.draw(4),
        expiries_max=1 + tape.draw(3),
        short_memory=tape.chance(200),
        group_commit=tape.chance(400),
        skew=tape.chance(300),
    )
    if settings.workload in (Workload.WORLDS, Workload.EFFECTS):
        settings.history_bound = HISTORY_BOUNDS.get((settings.hosts, settings.producers))
    if settings.workload == Workload.EFFECTS:
        settings.steps += 400
        settings.pools = settings.timer_workers = 2
        settings.small_inboxes = tape.chance(200)
        settings.peer_queues = tape.chance(500)
        settings.colocated = tape.chance(COLOCATED_MILLE)
        if settings.colocated:
            # Fused commits are rare: these runs concentrate on them.
            settings.history_bound = None
            # Few other workers, so that most effects run in the process of their world.
            settings.pools = int(settings.peer_queues)
            settings.senders = settings.orchestrators = 1
            # One round of a co-located process takes many steps.
            settings.steps += 1200
            settings.world_workers = 1 + tape.chance(300)
            # At most one timer worker in another process, which competes for the same timers.
            settings.timer_workers = int(tape.chance(300))
    if settings.workload == Workload.WORLDS and settings.world_workers > 1:
        settings.mixed_versions = tape.chance(MIXED_VERSIONS_MILLE)
    if settings.workload == Workload.TASKS:
        settings.audit_every = 50
    if settings.workload == Workload.LEDGER:
        settings.ledger = run_parameters.draw_run_parameters(tape)
        # The sink outlives a restored backup. The meaning of that state is an operator's decision,
        # so it is not checked.
        settings.environment_faults = tuple(
            name for name in environment_faults if name != EnvironmentFault.RESTORE
        )
    return settings
