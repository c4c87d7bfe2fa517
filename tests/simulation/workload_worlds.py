"""Actors of worlds: world workers, orchestrators, effect pools, timer workers, senders, and an
operator.

The roles are in `processes`, the external service is in `external_service`, the operator in
`workload_operator`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.clock import S
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    KeyConflict,
    NotFound,
    StoreReplaced,
)
from holdfast.messages import Ingress, event_ingress
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.processes import (
    EffectPoolProcess,
    OrchestratorProcess,
    TimerWorkerProcess,
    WorldWorkerProcess,
)
from holdfast.sim.settings import (
    LEASE_NS,
    RESEND_HORIZON_NS,
    STUCK_MAX,
    UNKNOWN_EVENT_NS,
    SimulationSettings,
    Workload,
)
from holdfast.workers.service import TickService
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import WorldAddress, deliver, deliver_many
from tests.simulation import sample_app
from tests.simulation.colocated_process import ColocatedProcess
from tests.simulation.external_service import ExternalService
from tests.simulation.sample_app import OTHER_UNIVERSE, UNIVERSE, app
from tests.simulation.workload_operator import FORK_NAMES, WorldOperator, existing_worlds

# All limits are small, so that a run reaches each of them many times.
POLICY = WorldWorkerPolicy(
    lease_ttl_s=LEASE_NS / S,
    idle_s=0.8,
    worlds_per_tick=3,
    tick_s=0.4,
    stuck_max=STUCK_MAX,
    heartbeat_s=0.5,
    compacted_per_tick=1,
    retry_s=0.2,
    budgets=Budgets(max_inbox_batch=3, max_effects_per_cycle=2, max_cycle_wall_ms=100),
    snapshots=SnapshotPolicy(entries=3, keep=2),
)
# Long cycles, so that receipts fit in beside waiting messages.
COLOCATED_POLICY = replace(
    POLICY,
    idle_s=6.0,
    budgets=Budgets(max_inbox_batch=12, max_effects_per_cycle=6, max_cycle_wall_ms=100),
)
LEADER_TTL_S = 1.5
# Pause of a sender. Fused commits need an empty inbox, so senders pause longer in co-located runs.
SENDS_MS = 150
SPARSE_MS = 900
# Per mille of events about timers, in runs with a co-located process.
TIMERS_MILLE = 500
LARGE = "." * 5000
# Per mille of worker starts with the earlier code version.
EARLIER_MILLE = 800
# Per mille of events that the earlier code version does not know.
RENEWED_MILLE = 300
# Number of keys that a sender may resend later, and per mille of late resends.
PAST_KEPT = 8
LATE_MILLE = 500


class AccountWorkerProcess(WorldWorkerProcess):
    """Process of a world worker for the simulated accounts. Their reducers may kill it or be
    non-deterministic.

    With two code versions, each start may switch the version. The first worker always runs the
    later version, so that worlds that need it finish in the end.
    """

    def build_role(self, incarnation: Incarnation) -> TickService:
        if incarnation.settings.mixed_versions:
            back = self.name != "world0" and incarnation.tape.chance(EARLIER_MILLE)
            self.app = sample_app.app_version(incarnation.settings.history_bound, former=back)
            version = sample_app.FORMER if back else sample_app.LATEST
            incarnation.record(
                "code", unknown=list(sample_app.LATER_EVENTS if back else ()), version=version
            )

        def strike() -> None:
            if not incarnation.faults_stopped:
                incarnation.count_coverage("reducer killed its process")
                current = incarnation.scheduler.current
                assert current is not None
                incarnation.scheduler.kill(current)

        sample_app.set_hooks(
            kill_process=strike, unrecorded_value=lambda: incarnation.scheduler.steps
        )
        return super().build_role(incarnation)


# Short claims and small budgets, so that both run out many times in a run.
CLAIM_MS = 2_600
IDLE_MS = 2_000


def world_actors(settings: SimulationSettings) -> list[Actor]:
    """Create the actors of a world run and their clients."""
    external_service = ExternalService()
    remote_universes = (
        (OTHER_UNIVERSE,) if settings.peer_queues else ()
    )  # in one pool: other pools read the route that it announces
    policy_overrides = {
        "lease_ttl_ms": CLAIM_MS,
        "expiries_max": settings.expiries_max,
        "idle_sleep_max_ms": IDLE_MS,
    }
    code = sample_app.app_version(settings.history_bound)
    hosts: list[Actor] = [
        AccountWorkerProcess(f"world{n}", code, POLICY) for n in range(settings.world_workers)
    ]
    if settings.colocated:
        world_worker = AccountWorkerProcess("world0", code, COLOCATED_POLICY)
        hosts[0] = ColocatedProcess(world_worker, code, external_service.effects, policy_overrides)
    return [
        *hosts,
        *(
            OrchestratorProcess(
                f"leader{n}",
                code,
                LEADER_TTL_S,
                UNKNOWN_EVENT_NS / S,
                settings.deleted_retention_ns / S,
            )
            for n in range(settings.orchestrators)
        ),
        *(
            EffectPoolProcess(
                f"pool{n}",
                app,
                external_service.effects,
                policy_overrides,
                remote_universes=remote_universes if n == 0 else (),
            )
            for n in range(settings.pools)
        ),
        *(TimerWorkerProcess(f"timer{n}", app) for n in range(settings.timer_workers)),
        *(EventSender(f"sender{n}") for n in range(settings.senders)),
        WorldOperator("keeper"),
    ]


class EventSender(Actor):
    """Sends keyed events, resends until it knows the outcome, and remembers pending events across
    crashes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.pending: tuple[str, str, Ingress, int] | None = None
        # Recent acknowledged events that only the later code version knows.
        self.resendable: list[tuple[str, str, Ingress, int]] = []

    def is_idle(self) -> bool:
        return self.pending is None

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            if self.pending is None:
                if incarnation.faults_stopped:
                    incarnation.sleep(S)
                    continue
                self.pending = self._draw_event(incarnation)
            to, key, ingress, since_ns = self.pending
            if incarnation.store.now_ns() - since_ns > RESEND_HORIZON_NS:
                incarnation.count_coverage("sender gave up")
                self.pending = None
                continue
            try:
                self._send(incarnation, to, key, ingress)
            except StoreReplaced:
                incarnation.store.reopen()
                self.pending = None
                continue
            except HoldfastError as error:
                if not error.retryable and not isinstance(error, CommitUnknown):
                    raise
                incarnation.pause(ms=100)
                continue
            self.pending = None
            # Within the retention of the key. Later, the event would be new.
            if (
                incarnation.tape.chance(200)
                and incarnation.store.now_ns() - since_ns <= RESEND_HORIZON_NS
            ):
                other = event_ingress(*app.encode_event(sample_app.Rolled(f"{key}!")))
                self._send_duplicate(
                    incarnation, to, key, other if incarnation.tape.chance(300) else ingress
                )
            if ingress.type in sample_app.LATER_EVENTS:
                self.resendable = [*self.resendable, (to, key, ingress, since_ns)][-PAST_KEPT:]
            if self.resendable:
                self._resend_late(incarnation)
            incarnation.pause(ms=SPARSE_MS if incarnation.settings.colocated else SENDS_MS)

    def _send(self, incarnation: Incarnation, to: str, key: str, ingress: Ingress) -> None:
        try:
            if incarnation.tape.chance(150):
                # Twice in one transaction: the second finds the first.
                item = (_address(incarnation, to), key, ingress)
                incarnation.store.transact(deliver_many, [item, item])
            else:
                incarnation.store.transact(deliver, _address(incarnation, to), key, ingress)
        except NotFound:
            incarnation.count_coverage("sent to a fork that is not there")

    def _send_duplicate(
        self, incarnation: Incarnation, to: str, key: str, ingress: Ingress
    ) -> None:
        """Send a duplicate, or reuse the key for another event by mistake."""
        try:
            incarnation.store.transact(deliver, _address(incarnation, to), key, ingress)
        except KeyConflict:
            incarnation.count_coverage("sender's key refused")
        except StoreReplaced:
            incarnation.store.reopen()
        except HoldfastError as error:
            if not isinstance(error, CommitUnknown | NotFound) and not error.retryable:
                raise

    def _resend_late(self, incarnation: Incarnation) -> None:
        """Resend late: the first event may be handled, waiting for other code, or dead by now."""
        to, key, ingress, since_ns = incarnation.tape.pick(self.resendable)
        if (
            incarnation.tape.chance(LATE_MILLE)
            and incarnation.store.now_ns() - since_ns <= RESEND_HORIZON_NS
        ):
            self._send_duplicate(incarnation, to, key, ingress)

    def _draw_event(self, incarnation: Incarnation) -> tuple[str, str, Ingress, int]:
        self.sent += 1
        id = f"{self.name}-{self.sent}"
        accounts = [f"a{n}" for n in range(incarnation.settings.accounts)]
        to = incarnation.tape.pick(accounts)
        wanting = incarnation.settings.workload == Workload.EFFECTS
        if incarnation.tape.chance(200):
            to = f"{to}.f{incarnation.tape.draw(FORK_NAMES)}"
            to = _existing_fork(incarnation, to) if wanting else to
        event = (
            _draw_intent_event(incarnation, id, accounts)
            if wanting
            else _draw_basic_event(incarnation, id, accounts)
        )
        if wanting and "." in to and incarnation.tape.chance(400):
            # A fork knows the purchases of its parent and must not cancel them.
            event = sample_app.Regretted(id, incarnation.tape.draw(3))
        name, value = app.encode_event(event)
        return to, id, event_ingress(name, value), incarnation.store.now_ns()


def _existing_fork(incarnation: Incarnation, to: str) -> str:
    """Return the name of an existing fork, if there is one."""
    try:
        there = [one.name for one in incarnation.store.peek(existing_worlds) if "." in one.name]
    except StoreReplaced:
        return to
    return str(incarnation.tape.pick(there)) if there else to


RULES = ("0 */6 * * *", "*/1 * * * *", "*/5 * * * *")


def _draw_basic_event(incarnation: Incarnation, id: str, accounts: list[str]) -> Any:
    tape = incarnation.tape
    if incarnation.settings.mixed_versions and tape.chance(RENEWED_MILLE):
        return sample_app.Renewed(id, ("", "", "timer", "mail")[tape.draw(4)], tape.pick(accounts))
    choice = tape.draw(40) // 2
    if choice < 5:
        return sample_app.Paid(id, 1 + tape.draw(9), LARGE if choice == 1 else "")
    if choice < 9:
        return sample_app.Moved(id, 1 + tape.draw(5), tape.pick(accounts))
    if choice < 11:
        return sample_app.Rolled(id)
    if choice < 14:
        # Few keys and few contents, so that keys repeat with equal and with different contents.
        return sample_app.Ordered(id, "ab"[tape.draw(2)], (None, "k0", "k1")[tape.draw(3)])
    if choice < 16:
        return sample_app.Slept(id, tape.draw(30), (None, "t0")[tape.draw(2)])
    if choice == 16:
        return sample_app.Woken(id, "t0")
    if choice == 17:
        return sample_app.Unheard(id)
    if choice == 18:
        return sample_app.Botched(id)
    if tape.chance(500):
        return sample_app.Moody(id) if tape.chance(600) else sample_app.Fickle(id)
    return sample_app.Deadly(id)


def _draw_intent_event(incarnation: Incarnation, id: str, accounts: list[str]) -> Any:
    """Draw an event of accounts with many intents."""
    tape = incarnation.tape
    if incarnation.settings.colocated and tape.chance(TIMERS_MILLE):
        return _draw_timer_event(incarnation, id)
    choice = tape.draw(24)
    # Few keys and few contents, so that keys repeat with equal and with different contents.
    key = (None, None, "k0", "k1")[tape.draw(4)]
    if choice < 7:
        return sample_app.Bought(id, "ab"[tape.draw(2)], key, tape.draw(3))
    if choice < 10:
        return sample_app.Ordered(id, "ab"[tape.draw(2)], key)
    if choice < 12:
        return sample_app.Regretted(id, tape.draw(3))
    slot = (None, "t0", "t1")[tape.draw(3)]
    if choice < 15:
        return sample_app.Slept(id, tape.draw(6), slot)
    if choice < 17:
        return sample_app.Dated(id, tape.draw(8) - 3, slot)
    if choice == 17:
        missed = tape.pick(("one", "skip", "all"))
        # A clock step of a day and a half must not create two thousand events.
        rule = RULES[0] if missed == "all" else tape.pick(RULES)
        return sample_app.Ticked(id, rule, missed, "t0")
    if choice == 18:
        return sample_app.Woken(id, tape.pick(("t0", "t1")))
    if choice in (19, 20) and not incarnation.settings.small_inboxes:
        return sample_app.Wrote(id, "b0")
    if choice < 22:
        return sample_app.Moved(id, 1 + tape.draw(5), tape.pick(accounts))
    return sample_app.Paid(id, 1 + tape.draw(9))


def _draw_timer_event(incarnation: Incarnation, id: str) -> Any:
    """Draw timer events: timers due soon by either clock, some simultaneous, some recurring, some
    cancelled."""
    tape = incarnation.tape
    slot = ("t0", "t0", "t1", None)[tape.draw(4)]
    choice = tape.draw(13)
    if choice < 5:
        return sample_app.Slept(id, tape.draw(3), slot)
    if choice < 8:
        return sample_app.Dated(id, tape.draw(3) - 1, slot)
    if choice == 8:
        return sample_app.Ticked(id, RULES[1], tape.pick(("one", "skip")), "t1")
    return sample_app.Woken(id, tape.pick(("t0", "t1")))


def _address(incarnation: Incarnation, to: str) -> WorldAddress:
    """Address an account, which its first message creates. A fork must exist."""
    mint = None if "." in to else incarnation.clock.entropy(16).hex()
    return WorldAddress(UNIVERSE, "Account", to, mint)
