"""Model of intents: the effects, mail and timers of worlds, and their possible states.

    an effect    waits in its queue until its world has one receipt for it
    mail         waits in its queue, or is in the inbox or journal of its destination
    a timer      waits in its slot until its world has its event; a replaced timer is gone
    a recurring  is a chain: each firing determines the next occurrence, from the rule and the
    timer        worker's clock
    a synthetic  is owed once, with the code of its reason: a key used for something else, an
    receipt      effect that a fork drops, an effect that the parent had cancelled

Identities are computed from the specification, not by product code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation import model_app
from tests.simulation.model_app import ExpectedIntent, digest

Plain = dict[str, Any]

MINUTE_NS = 60_000_000_000
# Rules of recurring timers in the simulated worlds, and their periods. All start at midnight.
PERIODS_NS = {
    "*/1 * * * *": MINUTE_NS,
    "*/5 * * * *": 5 * MINUTE_NS,
    "0 */6 * * *": 360 * MINUTE_NS,
}
# A later occurrence counts as missed.
LATE_NS = MINUTE_NS
OCCURRENCES_MAX = 100


@dataclass(slots=True)
class TimerFiring:
    """A worker fired due timers: when, by its clock."""

    i: int
    at_ns: int
    wall_ns: int


@dataclass(slots=True)
class TimerModel:
    """A timer in its slot. A recurring timer has one occurrence per due time."""

    subject: str
    slot: str
    set_ns: int
    delay_ns: int | None
    wall_ns: int | None
    period_ns: int
    missed: str
    # Due times of the possible occurrences, by hash. A single timer has one.
    due_ns: dict[bytes, int] = field(default_factory=dict)
    skipped: set[bytes] = field(default_factory=set)
    fires: dict[bytes, list[TimerFiring]] = field(default_factory=dict)
    # Occurrences that may be the waiting one.
    may_be_waiting: list[bytes] = field(default_factory=list)
    # Index of the event that replaced or cancelled it.
    removed_by: int | None = None
    # Set in a fork: the parent's occurrence from which it continues is unknown. If none of them is
    # waiting, the timer restarts under one of these hashes at this time.
    is_inherited: bool = False
    restart_hashes: tuple[bytes, ...] = ()
    restart_ns: int = 0
    # Possible hashes of the first occurrence in its slot.
    first_hashes: tuple[bytes, ...] = ()

    def must_be_delivered(self, *, small_inboxes: bool) -> set[bytes]:
        """Occurrences that must have been delivered by now, unless full inboxes delay them."""
        if not self.is_recurring or small_inboxes or self.is_inherited:
            return set()
        return self.fires.keys() - self.skipped - set(self.may_be_waiting)

    @property
    def is_recurring(self) -> bool:
        return self.period_ns > 0

    @property
    def is_calendar(self) -> bool:
        return self.wall_ns is not None or self.is_recurring

    def apply_firing(self, fire: TimerFiring, *, small_inboxes: bool) -> list[bytes]:
        """Apply a firing. Return the hashes of possible next occurrences.

        A full inbox prevents delivery without a trace, so with small inboxes both outcomes stay
        possible.
        """
        if not self.is_recurring:
            [(name, due_ns)] = self.due_ns.items()
            if (fire.wall_ns if self.is_calendar else fire.at_ns) >= due_ns:
                self.fires.setdefault(name, []).append(fire)
            return []
        following: list[bytes] = []
        for name in self.may_be_waiting:
            following += self._fire_occurrences(name, self.due_ns[name], fire)
        for name in self.restart_hashes:
            following += self._fire_occurrences(name, self.restart_ns, fire)
        if following:
            several = small_inboxes or self.is_inherited
            self.may_be_waiting = (
                list(dict.fromkeys([*self.may_be_waiting, *following]))
                if several
                else following[-1:]
            )
        return following

    def _fire_occurrences(self, name: bytes, due_ns: int, fire: TimerFiring) -> list[bytes]:
        following: list[bytes] = []
        for _ in range(OCCURRENCES_MAX):
            if fire.wall_ns < due_ns:
                break
            self.fires.setdefault(name, []).append(fire)
            missed = fire.wall_ns - due_ns > LATE_NS
            if missed and self.missed == "skip":
                self.skipped.add(name)
            after_ns = fire.wall_ns if missed and self.missed != "all" else due_ns
            due_ns = (after_ns // self.period_ns + 1) * self.period_ns
            name = digest(b"every", name, due_ns.to_bytes(8, "big"))
            self.due_ns[name] = due_ns
            following.append(name)
        return following


def build_timer(subject: str, want: ExpectedIntent, set_ns: int) -> TimerModel:
    fields = model_app.timer_of(want.params)
    period_ns = PERIODS_NS[fields["cron"]] if fields["cron"] else 0
    timer = TimerModel(
        subject,
        fields["slot"],
        set_ns,
        fields["delay_ns"],
        fields["wall_ns"],
        period_ns,
        fields["missed"],
    )
    if period_ns:
        timer.due_ns[want.hash] = (want.wall_ns // period_ns + 1) * period_ns
    else:
        due_ns = set_ns + (fields["delay_ns"] or 0)
        timer.due_ns[want.hash] = due_ns if fields["wall_ns"] is None else fields["wall_ns"]
    timer.may_be_waiting.append(want.hash)
    timer.first_hashes = (want.hash,)
    return timer


@dataclass(slots=True)
class PendingIntents:
    """Pending state of a world: effects, timers by slot, and owed receipts."""

    effects: dict[bytes, ExpectedIntent] = field(default_factory=dict)
    timers: dict[str, TimerModel] = field(default_factory=dict)
    owed: dict[bytes, str] = field(default_factory=dict)
    # Idempotency digests of used keys.
    keys: dict[bytes, bytes] = field(default_factory=dict)
    # In a fork: hashes of the parent's intents that were reissued → new hashes.
    reissued: dict[bytes, bytes] = field(default_factory=dict)

    def copy(self) -> PendingIntents:
        return PendingIntents(
            dict(self.effects), dict(self.timers), dict(self.owed), dict(self.keys), self.reissued
        )

    def apply_ingress(self, ingress: Plain) -> None:
        name = ingress["intent_hash"]
        if ingress["kind"] == "receipt":
            self.effects.pop(name, None)
            self.owed.pop(name, None)
        elif ingress["kind"] == "timer":
            for slot, timer in list(self.timers.items()):
                if name in timer.due_ns and not timer.is_recurring:
                    del self.timers[slot]

    def add(self, intent: ExpectedIntent, timers: dict[bytes, TimerModel]) -> None:
        slot = model_app.slot_of(intent)
        if intent.kind == "timer.set" and slot is not None:
            self.timers[slot] = timers[intent.hash]
        elif intent.kind == "timer.cancel" and slot is not None:
            self.timers.pop(slot, None)
        elif intent.kind == "effect.cancel":
            for name in (intent.params, self.reissued.get(intent.params, b"")):
                if self.effects.pop(name, None) is not None:
                    self.owed[name] = "cancelled"
        elif intent.kind in model_app.EFFECTS and self.is_new(intent):
            self.effects[intent.hash] = intent

    def is_new(self, want: ExpectedIntent) -> bool:
        """Whether an intent is new. A used key is not new. If its use differs, it is refused."""
        if want.key is None:
            return True
        first = self.keys.get(want.hash)
        if first is None:
            self.keys[want.hash] = want.idempotency_digest()
        elif first != want.idempotency_digest():
            self.owed[want.positional_id] = "key_conflict"
        return first is None


@dataclass(slots=True)
class IntentModel:
    """All intents of all worlds, by hash."""

    # Effects and mail, with their world.
    by_hash: dict[bytes, tuple[str, ExpectedIntent]] = field(default_factory=dict)
    timers: dict[bytes, TimerModel] = field(default_factory=dict)
    slots: dict[tuple[str, str], TimerModel] = field(default_factory=dict)
    # Effects cancelled by their world.
    cancelled: set[bytes] = field(default_factory=set)
    # Codes of synthetic receipts, by world and hash.
    owed: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def add(self, subject: str, intent: ExpectedIntent) -> None:
        self.by_hash.setdefault(intent.hash, (subject, intent))

    def cancel(self, subject: str, hash: bytes, names: dict[bytes, bytes]) -> None:
        """Cancel an effect of the world itself, by its hash or by the hash it had in the parent."""
        for name in (hash, names.get(hash, b"")):
            found = self.by_hash.get(name)
            if found is not None and found[0] == subject:
                self.cancelled.add(name)

    def set_timer(self, timer: TimerModel, i: int) -> None:
        self.clear_slot(timer.subject, timer.slot, i)
        self.slots[timer.subject, timer.slot] = timer
        for name in timer.due_ns:
            self.timers[name] = timer

    def clear_slot(self, subject: str, slot: str, i: int) -> None:
        """Remove the timer of a slot, unless it has fired before."""
        timer = self.slots.pop((subject, slot), None)
        if timer is not None:
            timer.removed_by = i

    def fire(self, fire: TimerFiring, *, small_inboxes: bool) -> None:
        """Fire due timers, by store time and by the worker's wall clock."""
        for timer in list(self.slots.values()):
            for name in timer.apply_firing(fire, small_inboxes=small_inboxes):
                self.timers[name] = timer

    def redrive(self, subject: str, old: ExpectedIntent, seq: int) -> bytes:
        """Redrive a dead effect: a new intent with a new hash."""
        again = replace(old, hash=digest(b"redrive", old.hash, seq.to_bytes(8, "big")))
        self.add(subject, again)
        return again.hash

    # -- forks -----------------------------------------------------------------------------------

    def inherit(
        self, child: str, child_id: str, pending: PendingIntents, policy: str, *, i: int, at_ns: int
    ) -> PendingIntents:
        """Return the initial pending state of a fork, derived from the parent's."""
        inherited = PendingIntents()
        for want in pending.effects.values():
            if policy == "reissue":
                name = digest(b"fork", child_id.encode(), want.hash)
                if want.key is not None:
                    name = model_app.keyed_hash(child_id, want.key)
                again = replace(want, hash=name)
                self.add(child, again)
                inherited.add(again, self.timers)
                known = [one for one, named in pending.reissued.items() if named == want.hash]
                inherited.reissued |= dict.fromkeys([want.hash, *known], name)
            elif policy == "fail":
                inherited.owed[want.hash] = "dropped_by_fork"
        if policy != "drop":
            inherited.owed |= pending.owed
        for hash, code in inherited.owed.items():
            self.owed[child, hash] = code
        for slot, timer in pending.timers.items():
            inherited.timers[slot] = self._inherit_timer(child, child_id, timer, i=i, at_ns=at_ns)
        return inherited

    def _inherit_timer(
        self, child: str, child_id: str, timer: TimerModel, *, i: int, at_ns: int
    ) -> TimerModel:
        inherited = TimerModel(
            child, timer.slot, 0, timer.delay_ns, timer.wall_ns, timer.period_ns, timer.missed,
            is_inherited=True,
        )  # fmt: skip
        names = {name: digest(b"fork", child_id.encode(), name) for name in timer.due_ns}
        if timer.is_recurring:
            inherited.restart_hashes = tuple(names[name] for name in timer.first_hashes)
            inherited.restart_ns = (at_ns // timer.period_ns + 1) * timer.period_ns
        # Any occurrence of the parent may be the waiting one.
        for name, due_ns in timer.due_ns.items():
            inherited.due_ns[names[name]] = due_ns
            inherited.may_be_waiting.append(names[name])
        inherited.first_hashes = tuple(inherited.may_be_waiting)
        self.set_timer(inherited, i)
        return inherited

    def pending_at(
        self,
        initial: PendingIntents,
        steps: list[Plain],
        wants: list[list[ExpectedIntent]],
        entries: int,
    ) -> PendingIntents:
        """Return the pending state of a world after `entries` of its entries."""
        pending = initial.copy()
        for step, wanted in zip(steps[:entries], wants[:entries], strict=True):
            pending.apply_ingress(step["ingress"])
            for want in wanted:
                pending.add(want, self.timers)
        return pending
