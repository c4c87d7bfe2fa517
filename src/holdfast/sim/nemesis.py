"""Actors that stand for people and fate: an operator, and a nemesis for what no commit shows.

The operator uses the commands an operator has (force-release, sweeps, collections). The nemesis
kills processes, steps the wall clock by hours, takes the writer's place, reboots the machine,
restores an old backup, and tries to open the store with a version it must refuse.
"""

from __future__ import annotations

from holdfast.clock import MS, S
from holdfast.durable import dedupe, inbox, lease
from holdfast.errors import CommitUnknown, Conflict, NotFound, StoreFull, StoreReplaced
from holdfast.sim.actor import Actor, Life
from holdfast.sim.settings import RETENTION_NS, Nemesis
from holdfast.store import blobs

STEPS_NS = tuple(hours * 3600 * S for hours in (1, -1, 5, -5, 30, -30))
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


class Operator(Actor):
    def live(self, life: Life) -> None:
        while True:
            world = f"w{life.tape.draw(life.settings.worlds)}"
            choice = life.tape.draw(8)
            try:
                if choice < 3:
                    life.store.transact(lease.mark_stale, world)
                elif choice == 3 and not life.calm:
                    life.store.transact(lease.force_release, world, "an operator wants it")
                elif choice in (4, 5):
                    life.store.transact(dedupe.collect, inbox.SCOPE, RETENTION_NS, 5)
                elif choice == 6:
                    life.store.transact(blobs.collect, BLOB_GRACE_NS, 5)
                elif choice == 7:
                    before_ns = life.store.now_ns() - LOG_KEPT_NS
                    life.store.transact(lease.truncate_events, before_ns, 3)
            except (CommitUnknown, Conflict, StoreFull):
                pass
            except NotFound:
                life.seen("force-release of what was never granted")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=500)


class Fate(Actor):
    """Not a process: it is never killed, and its own steps never fail."""

    def live(self, life: Life) -> None:
        backups = 0
        while True:
            life.rest(ms=1200)
            if life.calm or not life.settings.nemesis:
                continue
            choice = life.tape.pick(life.settings.nemesis)
            if choice == Nemesis.KILL:
                life.simulation.kill_one()
            elif choice == Nemesis.CLOCK:
                step_ns = life.tape.pick(STEPS_NS)
                life.simulation.clock.step_wall(step_ns)
                life.shared.note("clock", {"step_ns": step_ns})
            elif choice == Nemesis.REBOOT and life.tape.chance(400):
                life.shared.reboot(wall_step_ns=life.tape.pick((0, *STEPS_NS)))
                life.simulation.kill_all()
            elif choice == Nemesis.TAKEOVER:
                life.shared.takeover()
            elif choice == Nemesis.RESTORE:
                if not backups or life.tape.chance(500):
                    backups = life.shared.backup()
                    # Now and then it is put back at once, with leases in it that are still young.
                    life.sleep(life.tape.draw(4) * 400 * MS)
                if life.tape.chance(500):
                    life.shared.restore(backups - life.tape.draw(backups))
            elif choice == Nemesis.MARKER:
                marker = life.tape.pick(MARKERS)
                life.shared.try_boot(marker, bootstrap=life.tape.chance(500))
            life.sleep(life.tape.draw(5) * 200 * MS)
