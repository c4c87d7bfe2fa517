"""What worlds want of others, and what may have become of it: the half of the model that is about intents.

    an effect    waits in its queue, until its world has one receipt for it
    mail         waits in its queue, or is in the inbox or journal of its destination
    a timer      waits in its slot, until its world has its event; replaced, it is gone
    one that     is a chain: each firing names the next, by the rule and the clock that the worker told
    repeats
    what needs   is owed one receipt, with the code that says why: a key that stands for something
    nobody       else, what a fork does not get, what its parent had cancelled
    outside

Identities are computed here from what the documents say about them, not by the product's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.sim import check_app
from holdfast.sim.check_app import Want, digest

Plain = dict[str, Any]

MINUTE_NS = 60_000_000_000
# Rules that simulated worlds repeat timers by, and their periods: all begin at midnight.
PERIODS_NS = {
    "*/1 * * * *": MINUTE_NS,
    "*/5 * * * *": 5 * MINUTE_NS,
    "0 */6 * * *": 360 * MINUTE_NS,
}
# Later than this an occurrence was missed.
LATE_NS = MINUTE_NS
OCCURRENCES_MAX = 100


@dataclass(slots=True)
class Fire:
    """A worker delivered a timer, or should have: when, by its word."""

    i: int
    at_ns: int
    wall_ns: int


@dataclass(slots=True)
class Timer:
    """A timer in its slot; one that repeats has an occurrence for each of its times."""

    subject: str
    slot: str
    set_ns: int
    delay_ns: int | None
    wall_ns: int | None
    period_ns: int
    missed: str
    # Which occurrences there may be, by name: when each is due. One that does not repeat has one.
    due_ns: dict[bytes, int] = field(default_factory=dict)
    skipped: set[bytes] = field(default_factory=set)
    fires: dict[bytes, list[Fire]] = field(default_factory=dict)
    # Occurrences that may be the one that waits.
    open: list[bytes] = field(default_factory=list)
    # The event that replaced or cancelled it.
    gone: int | None = None
    # A fork's: which of the parent's occurrences it goes on from, nobody tells. If none of them waits
    # any more, it begins anew, under one of these names, at this time.
    inherited: bool = False
    anew: tuple[bytes, ...] = ()
    anew_ns: int = 0
    # What it may be called that was first in its slot.
    first: tuple[bytes, ...] = ()

    def told(self, *, crowded: bool) -> set[bytes]:
        """Occurrences that must have been delivered by now, if a full inbox did not keep them."""
        if not self.repeats or crowded or self.inherited:
            return set()
        return self.fires.keys() - self.skipped - set(self.open)

    @property
    def repeats(self) -> bool:
        return self.period_ns > 0

    @property
    def calendar(self) -> bool:
        return self.wall_ns is not None or self.repeats

    def fired(self, fire: Fire, *, crowded: bool) -> list[bytes]:
        """Take a firing into account; the names of occurrences that may follow.

        A full inbox keeps it from being delivered, and nobody tells: then both may be so.
        """
        if not self.repeats:
            [(name, due_ns)] = self.due_ns.items()
            if (fire.wall_ns if self.calendar else fire.at_ns) >= due_ns:
                self.fires.setdefault(name, []).append(fire)
            return []
        made: list[bytes] = []
        for name in self.open:
            made += self._occurred(name, self.due_ns[name], fire)
        for name in self.anew:
            made += self._occurred(name, self.anew_ns, fire)
        if made:
            several = crowded or self.inherited
            self.open = list(dict.fromkeys([*self.open, *made])) if several else made[-1:]
        return made

    def _occurred(self, name: bytes, due_ns: int, fire: Fire) -> list[bytes]:
        made: list[bytes] = []
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
            made.append(name)
        return made


def timer_of(subject: str, want: Want, set_ns: int) -> Timer:
    told = check_app.timer_of(want.params)
    period_ns = PERIODS_NS[told["cron"]] if told["cron"] else 0
    timer = Timer(
        subject,
        told["slot"],
        set_ns,
        told["delay_ns"],
        told["wall_ns"],
        period_ns,
        told["missed"],
    )
    if period_ns:
        timer.due_ns[want.hash] = (want.wall_ns // period_ns + 1) * period_ns
    else:
        due_ns = set_ns + (told["delay_ns"] or 0)
        timer.due_ns[want.hash] = due_ns if told["wall_ns"] is None else told["wall_ns"]
    timer.open.append(want.hash)
    timer.first = (want.hash,)
    return timer


@dataclass(slots=True)
class Open:
    """What a world has wanted and not got: effects, timers by their slots, receipts that it is owed."""

    effects: dict[bytes, Want] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)
    owed: dict[bytes, str] = field(default_factory=dict)
    # What keys stand for.
    keys: dict[bytes, bytes] = field(default_factory=dict)
    # What a fork calls intents of its parent that were reissued for it.
    names: dict[bytes, bytes] = field(default_factory=dict)

    def copy(self) -> Open:
        return Open(
            dict(self.effects), dict(self.timers), dict(self.owed), dict(self.keys), self.names
        )

    def got(self, ingress: Plain) -> None:
        name = ingress["intent_hash"]
        if ingress["kind"] == "receipt":
            self.effects.pop(name, None)
            self.owed.pop(name, None)
        elif ingress["kind"] == "timer":
            for slot, timer in list(self.timers.items()):
                if name in timer.due_ns and not timer.repeats:
                    del self.timers[slot]

    def want(self, want: Want, timers: dict[bytes, Timer]) -> None:
        slot = check_app.slot_of(want)
        if want.kind == "timer.set" and slot is not None:
            self.timers[slot] = timers[want.hash]
        elif want.kind == "timer.cancel" and slot is not None:
            self.timers.pop(slot, None)
        elif want.kind == "effect.cancel":
            for name in (want.params, self.names.get(want.params, b"")):
                if self.effects.pop(name, None) is not None:
                    self.owed[name] = "cancelled"
        elif want.kind in check_app.EFFECTS and self.is_new(want):
            self.effects[want.hash] = want

    def is_new(self, want: Want) -> bool:
        """A key that was used before is no new wish; used for something else, it is refused."""
        if want.key is None:
            return True
        first = self.keys.get(want.hash)
        if first is None:
            self.keys[want.hash] = want.means()
        elif first != want.means():
            self.owed[want.place] = "key_conflict"
        return first is None


@dataclass(slots=True)
class Intents:
    """All that worlds want, by the names of the intents."""

    # Effects and mail: whose, and what.
    wants: dict[bytes, tuple[str, Want]] = field(default_factory=dict)
    timers: dict[bytes, Timer] = field(default_factory=dict)
    slots: dict[tuple[str, str], Timer] = field(default_factory=dict)
    # Effects that their world does not want any more.
    cancelled: set[bytes] = field(default_factory=set)
    # Receipts that need nobody outside, by whose they are and their names: the code that each says.
    owed: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def want(self, subject: str, want: Want) -> None:
        self.wants.setdefault(want.hash, (subject, want))

    def cancel(self, subject: str, hash: bytes, names: dict[bytes, bytes]) -> None:
        """A world takes back what is its own, by its name or by the one that its parent had for it."""
        for name in (hash, names.get(hash, b"")):
            found = self.wants.get(name)
            if found is not None and found[0] == subject:
                self.cancelled.add(name)

    def set_timer(self, timer: Timer, i: int) -> None:
        self.empty(timer.subject, timer.slot, i)
        self.slots[timer.subject, timer.slot] = timer
        for name in timer.due_ns:
            self.timers[name] = timer

    def empty(self, subject: str, slot: str, i: int) -> None:
        """Whoever was in a slot is gone, unless it has fired before."""
        held = self.slots.pop((subject, slot), None)
        if held is not None:
            held.gone = i

    def fire(self, fire: Fire, *, crowded: bool) -> None:
        """A worker fires what is due: by store time, and by the wall clock that it goes by."""
        for timer in list(self.slots.values()):
            for name in timer.fired(fire, crowded=crowded):
                self.timers[name] = timer

    def redrive(self, subject: str, old: Want, seq: int) -> bytes:
        """An operator wants a dead effect again: another intent, with a name of its own."""
        again = replace(old, hash=digest(b"redrive", old.hash, seq.to_bytes(8, "big")))
        self.want(subject, again)
        return again.hash

    # -- forks -----------------------------------------------------------------------------------

    def inherit(
        self, child: str, child_id: str, wishes: Open, policy: str, *, i: int, at_ns: int
    ) -> Open:
        """What a fork takes over of what its parent had open: what it has open itself, at first."""
        given = Open()
        for want in wishes.effects.values():
            if policy == "reissue":
                name = digest(b"fork", child_id.encode(), want.hash)
                if want.key is not None:
                    name = check_app.keyed_hash(child_id, want.key)
                again = replace(want, hash=name)
                self.want(child, again)
                given.want(again, self.timers)
                known = [one for one, named in wishes.names.items() if named == want.hash]
                given.names |= dict.fromkeys([want.hash, *known], name)
            elif policy == "fail":
                given.owed[want.hash] = "dropped_by_fork"
        if policy != "drop":
            given.owed |= wishes.owed
        for hash, code in given.owed.items():
            self.owed[child, hash] = code
        for slot, timer in wishes.timers.items():
            given.timers[slot] = self._keep(child, child_id, timer, i=i, at_ns=at_ns)
        return given

    def _keep(self, child: str, child_id: str, timer: Timer, *, i: int, at_ns: int) -> Timer:
        kept = Timer(
            child, timer.slot, 0, timer.delay_ns, timer.wall_ns, timer.period_ns, timer.missed,
            inherited=True,
        )  # fmt: skip
        names = {name: digest(b"fork", child_id.encode(), name) for name in timer.due_ns}
        if timer.repeats:
            kept.anew = tuple(names[name] for name in timer.first)
            kept.anew_ns = (at_ns // timer.period_ns + 1) * timer.period_ns
        # Any occurrence of the parent's may be the one that waits.
        for name, due_ns in timer.due_ns.items():
            kept.due_ns[names[name]] = due_ns
            kept.open.append(names[name])
        kept.first = tuple(kept.open)
        self.set_timer(kept, i)
        return kept

    def open_at(
        self, given: Open, steps: list[Plain], wants: list[list[Want]], entries: int
    ) -> Open:
        """What a world had open after so many of its entries, if this was what it began with."""
        found = given.copy()
        for step, wanted in zip(steps[:entries], wants[:entries], strict=True):
            found.got(step["ingress"])
            for want in wanted:
                found.want(want, self.timers)
        return found
