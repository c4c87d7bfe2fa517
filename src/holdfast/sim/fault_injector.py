"""Environment actors: an operator, and a fault injector (nemesis) for faults outside commits.

The operator uses operator commands (force-release, sweeps, collections). The fault injector kills
processes, steps the wall clock by hours, replaces the writer, reboots the machine, restores an old
backup, and opens the store with a schema version that it must refuse.
"""

from __future__ import annotations

from holdfast.clock import MS, S
from holdfast.durable import dedupe, inbox, lease
from holdfast.errors import CommitUnknown, Conflict, NotFound, StoreFull, StoreReplaced
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.settings import RETENTION_NS, EnvironmentFault
from holdfast.store import blobs

CLOCK_STEPS_NS = tuple(hours * 3600 * S for hours in (1, -1, 5, -5, 30, -30))
BLOB_GRACE_NS = 5 * S
LOG_KEPT_NS = 4 * S
MARKERS: tuple[bytes | None, ...] = (
    None,
    None,
    None,
    b"RSV0\x00\x00\x63\x00",
    b"RSV0\x63\x00\x00\x00",
    b"garbage!",
    b"RSV0",
    b"",
)


class MaintenanceOperator(Actor):
    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            world = f"w{incarnation.tape.draw(incarnation.settings.worlds)}"
            choice = incarnation.tape.draw(8)
            try:
                if choice < 3:
                    incarnation.store.transact(lease.mark_stale, world)
                elif choice == 3 and not incarnation.faults_stopped:
                    incarnation.store.transact(lease.force_release, world, "an operator wants it")
                elif choice in (4, 5):
                    incarnation.store.transact(dedupe.expire, inbox.DEDUPE_SCOPE, RETENTION_NS, 5)
                elif choice == 6:
                    incarnation.store.transact(blobs.collect, BLOB_GRACE_NS, 5)
                elif choice == 7:
                    before_ns = incarnation.store.now_ns() - LOG_KEPT_NS
                    incarnation.store.transact(lease.truncate_events, before_ns, 3)
            except (CommitUnknown, Conflict, StoreFull):
                pass
            except NotFound:
                incarnation.count_coverage("force-release without a grant")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=500)


class FaultInjector(Actor):
    """Injects environment faults. It is not a process: it is never killed, and its own steps never
    fail."""

    def run_process(self, incarnation: Incarnation) -> None:
        backups = 0
        while True:
            incarnation.pause(ms=1200)
            if incarnation.faults_stopped or not incarnation.settings.environment_faults:
                continue
            choice = incarnation.tape.pick(incarnation.settings.environment_faults)
            if choice == EnvironmentFault.KILL:
                incarnation.simulation.kill_random()
            elif choice == EnvironmentFault.CLOCK:
                step_ns = incarnation.tape.pick(CLOCK_STEPS_NS)
                incarnation.simulation.clock.step_wall(step_ns)
                incarnation.sim_store.record("clock", {"step_ns": step_ns})
            elif choice == EnvironmentFault.REBOOT and incarnation.tape.chance(400):
                incarnation.sim_store.reboot(
                    wall_step_ns=incarnation.tape.pick((0, *CLOCK_STEPS_NS))
                )
                incarnation.simulation.kill_all()
            elif choice == EnvironmentFault.TAKEOVER:
                incarnation.sim_store.takeover()
            elif choice == EnvironmentFault.RESTORE:
                if not backups or incarnation.tape.chance(500):
                    backups = incarnation.sim_store.backup()
                    # At times the backup is restored at once, with fresh leases in it.
                    incarnation.sleep(incarnation.tape.draw(4) * 400 * MS)
                if incarnation.tape.chance(500):
                    incarnation.sim_store.restore(backups - incarnation.tape.draw(backups))
            elif choice == EnvironmentFault.MARKER:
                marker = incarnation.tape.pick(MARKERS)
                incarnation.sim_store.try_marker(marker, bootstrap=incarnation.tape.chance(500))
            incarnation.sleep(incarnation.tape.draw(5) * 200 * MS)
