"""What became of intents, by the rows of an audit: each in exactly one place, E1 E3 T1 F1 K1 J1.

    an effect   is in its queue, or its world has its one receipt
    mail        is in its queue, or its destination has it; then its sender has its receipt
    a timer     waits in its slot's queue, or its world has its event; replaced, neither
    a fork      has what it was given of its parent's wishes, and nothing else

What a deleted world wanted is the only exception: it may end without a receipt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim import check_app
from holdfast.sim.check_app import Want
from holdfast.sim.check_world_rows import Rows
from holdfast.sim.history import Event
from holdfast.sim.model_intents import Timer
from holdfast.sim.model_worlds import FAILURES, Model
from holdfast.sim.violation import Violation

Plain = dict[str, Any]
Place = tuple[str, bytes]

# Codes of receipts that nobody gets who is not owed one.
UNCALLED = ("key_conflict", "dropped_by_fork")
# Of the ways not to be done, those where nobody knows whether it was.
TIMEOUTS = ("timeout", "expiries_exhausted")


class Compared:
    """One audit against what worlds want."""

    def __init__(self, model: Model, event: Event) -> None:
        self.model = model
        self.event = event
        self._found: list[Violation] = []
        self._queued: Counter[bytes] = Counter()
        self._mail: Counter[bytes] = Counter()
        self._fired: Counter[Place] = Counter()
        self._receipts: dict[Place, list[Plain]] = {}
        self._deleted: set[str] = set()
        # Worlds whose rows may be gone, by subject and by name.
        self._erased: set[str] = set()
        self._pending: set[bytes] = set()
        self._slots: Counter[bytes] = Counter()

    def found(self) -> list[Violation]:
        universes = self.event.value.get("worlds", {})
        for subject, world in self.model.worlds.items():
            if world.erasable(self.event.at_ns):
                self._deleted.add(subject)
                self._erased |= {subject, world.name}
        for universe, found in universes.items():
            rows = Rows(universe, self.event.value)
            for world_id, record in found["records"].items():
                if record["status"] == "deleted":
                    self._deleted.add(f"{universe}/{world_id}")
                    self._closed(f"{universe}/{world_id}", rows)
            for row in found.get("slots", ()):
                if f"{universe}/{row['world_id']}" not in self._deleted:
                    self._slots[row["intent_hash"]] += 1
            for name, row in found.get("pending", {}).items():
                if not row["dead"] and f"{universe}/{row['world_id']}" not in self._deleted:
                    self._pending.add(bytes.fromhex(name))
            self._look_in_queues(universe)
            self._look_in_inboxes(universe, rows)
        if universes:
            given_up = []
            for subject, world in self.model.worlds.items():
                for step in world.steps:
                    if step["outcome"] == "unknown":
                        given_up.append((subject, step["ingress"]))
                    else:
                        self._came(subject, step["ingress"])
            for subject, ingress in given_up:
                # Redriven, it is there a second time: that is the one that counts.
                if not self._there(subject, ingress):
                    self._came(subject, ingress)
            self._wants()
            self._timers()
            self._strangers()
            self._told()
        return self._found

    def _bad(self, number: str, what: str) -> None:
        self._found.append(Violation(number, what, self.event))

    def _closed(self, subject: str, rows: Rows) -> None:
        """Into a deleted world nothing comes any more."""
        last = rows.inbox(subject)["last_seq"]
        known = self.model.closed.setdefault(subject, last)
        if last > known:
            self._bad("E1", f"{subject}: deleted, and {last - known} came in since")

    # -- looking ---------------------------------------------------------------------------------

    def _look_in_queues(self, universe: str) -> None:
        for name, queue in self.event.value["queues"].items():
            if name.startswith(f"{universe}/") and not name.endswith(FAILURES):
                rows = Rows(universe, self.event.value)
                for seq, row in queue["items"].items():
                    intent = check_app.read(check_app.INTENT, rows.body(row, "payload"))
                    self._queued[intent["intent_hash"]] += 1
                    self._shape(f"{name}/{seq}", name.partition("/")[2], intent)

    def _look_in_inboxes(self, universe: str, rows: Rows) -> None:
        for subject, inbox in self.event.value["inboxes"].items():
            if subject.startswith(f"{universe}/"):
                for row in inbox["rows"].values():
                    self._came(
                        subject, dict(zip(check_app.INGRESS, rows.ingress(row), strict=True))
                    )

    def _came(self, subject: str, ingress: Plain) -> None:
        hash, kind = ingress["intent_hash"], ingress["kind"]
        if kind == "fabric":
            self._mail[hash] += 1
        elif kind == "timer":
            self._fired[subject, hash] += 1
        elif kind == "receipt":
            receipt = check_app.receipt_of(ingress)
            self._receipts.setdefault((subject, hash), []).append(receipt)

    def _there(self, subject: str, ingress: Plain) -> bool:
        hash, kind = ingress["intent_hash"], ingress["kind"]
        return bool(self._mail[hash] if kind == "fabric" else self._fired[subject, hash])

    def _shape(self, where: str, queue: str, intent: Plain) -> None:
        """An item is what was wanted, in the queue where it is looked for."""
        kind, hash = intent["effect_kind"], intent["intent_hash"]
        known = self.model.intents.wants.get(hash)
        if known is not None:
            want = known[1]
            lane = f"effects/{want.kind}>{check_app.ABROAD}"
            if (kind, intent["params"]) != (want.kind, want.params) or (
                queue not in (f"effects/{want.kind}", lane)
            ):
                self._bad("E1", f"{where}: an intent in the wrong place or shape")
        timer = self.model.intents.timers.get(hash)
        if timer is not None:
            right = "timers/calendar" if timer.calendar else "timers"
            if kind != "timer.set" or queue != right:
                self._bad("T1", f"{where}: a timer in the wrong place")

    # -- judging ---------------------------------------------------------------------------------

    def _wants(self) -> None:
        for hash, (subject, want) in self.model.intents.wants.items():
            receipts = len(self._receipts.get((subject, hash), ()))
            if (hash in self._pending) != bool(self._queued[hash]) and subject not in self._deleted:
                self._bad("E1", f"{subject}: a {want.kind} is pending here, and not there")
            if want.kind == check_app.MAIL:
                self._sent(subject, want, receipts)
                continue
            places = self._queued[hash] + receipts
            lost = places == 0 and subject not in self._deleted
            if places > 1 or lost:
                self._bad("E1", f"{subject}: a {want.kind} is in {places} places")

    def _sent(self, subject: str, want: Want, receipts: int) -> None:
        if check_app.leaves(want):
            self._sent_abroad(subject, want, receipts)
            return
        places = self._queued[want.hash] + self._mail[want.hash]
        if not self._mail[want.hash] and {subject, check_app.target_of(want)} & self._erased:
            # It went with the world that sent it, or unread with the one that got it.
            if places > 1 or receipts > 1:
                self._bad("F1", f"{subject}: mail is in {places} places, receipts {receipts}")
            return
        if places != 1:
            self._bad("F1", f"{subject}: mail is in {places} places")
        elif receipts > 1 or (receipts != self._mail[want.hash] and subject not in self._deleted):
            self._bad("E1", f"{subject}: mail delivered, {receipts} receipts")

    def _sent_abroad(self, subject: str, want: Want, receipts: int) -> None:
        """Delivered there and told here are two commits: between them it is there, and waits."""
        waits, there = self._queued[want.hash], self._mail[want.hash]
        told = self._receipts.get((subject, want.hash), [])
        lost = any(one["status"] == "ok" for one in told) and not there
        if there > 1 or lost:
            self._bad("F1", f"{subject}: mail abroad is there {there} times, receipts {receipts}")
        elif waits + receipts != 1 and (waits + receipts or subject not in self._deleted):
            self._bad("E1", f"{subject}: mail abroad waits {waits} times, receipts {receipts}")

    def _timers(self) -> None:
        timers = {id(timer): timer for timer in self.model.intents.timers.values()}
        for timer in timers.values():
            queued = sum(self._queued[name] for name in timer.due_ns)
            fired = {name: self._fired[timer.subject, name] for name in timer.due_ns}
            for name, times in fired.items():
                if times > 1:
                    self._bad("T1", f"{timer.subject}: a timer fired {times} times")
                elif times and not self._rightly(timer, name):
                    self._bad("T1", f"{timer.subject}: a timer fired that was not due, or gone")
            if timer.subject in self._deleted:
                continue
            for name in timer.told(crowded=self.model.crowded):
                if not fired[name]:
                    self._bad("T1", f"{timer.subject}: an occurrence is over, and nobody told")
            if sum(self._slots[name] for name in timer.due_ns) != queued:
                self._bad("T1", f"{timer.subject}: slot {timer.slot} and what waits differ")
            if timer.repeats and not all(name in timer.open for name in self._waits(timer)):
                self._bad("T1", f"{timer.subject}: an occurrence waits that is over")
            over = timer.gone is not None or (not timer.repeats and any(fired.values()))
            if queued != (0 if over else 1):
                self._bad("T1", f"{timer.subject}: a timer waits {queued} times, fired {fired}")

    def _waits(self, timer: Timer) -> list[bytes]:
        return [name for name in timer.due_ns if self._queued[name]]

    def _rightly(self, timer: Timer, name: bytes) -> bool:
        """Whether somebody fired it while it was in its slot, and due by the clock that counts."""
        fires = timer.fires.get(name, ())
        # In the commit in which it was replaced it had rung before.
        in_time = any(timer.gone is None or fire.i <= timer.gone for fire in fires)
        return in_time and name not in timer.skipped

    def _strangers(self) -> None:
        """Nothing is anywhere before its entry, and nobody has what is another's."""
        intents = self.model.intents
        for hash in {*self._queued, *self._mail}:
            if hash not in intents.wants and hash not in intents.timers:
                self._bad("J1", f"an intent {hash.hex()[:8]} of no entry")
        for subject, hash in self._fired:
            if hash not in intents.timers or intents.timers[hash].subject != subject:
                self._bad("J1", f"{subject}: a timer {hash.hex()[:8]} of no entry")
        for subject, hash in self._receipts:
            if intents.wants.get(hash, ("",))[0] != subject and (subject, hash) not in intents.owed:
                forked = subject in self.model.worlds and self.model.worlds[subject].forked
                text = f"{subject}: a receipt of {hash.hex()[:8]}, which it did not want"
                self._bad("K1" if forked else "J1", text)

    def _told(self) -> None:
        intents = self.model.intents
        for (subject, hash), receipts in self._receipts.items():
            for receipt in receipts:
                self._says(subject, hash, receipt)
        for (subject, hash), code in intents.owed.items():
            if subject not in self._erased and len(self._receipts.get((subject, hash), ())) != 1:
                self._bad(self._line(subject), f"{subject}: it was not told of {code} once")
        for hash in intents.cancelled:
            if self._queued[hash] and intents.wants[hash][0] not in self._deleted:
                self._bad("E1", f"{intents.wants[hash][0]}: cancelled, and still to be done")

    def _line(self, subject: str) -> str:
        """What is broken if a world is told something wrong: a fork may have got its parent's."""
        world = self.model.worlds.get(subject)
        return "K1" if world is not None and world.forked else "E1"

    def _says(self, subject: str, hash: bytes, receipt: Plain) -> None:
        """A receipt says what happened."""
        intents, code = self.model.intents, receipt["code"]
        owed = intents.owed.get((subject, hash))
        if owed != (code if owed or code in UNCALLED else None):
            self._bad(self._line(subject), f"{subject}: a receipt says {code}, not {owed}")
        elif code == "cancelled" and not owed and hash not in intents.cancelled:
            self._bad("E1", f"{subject}: cancelled, but nobody asked for it")
        elif (receipt["status"] == "ok") == bool(code):
            self._bad("E1", f"{subject}: a receipt {receipt['status']} with the code {code!r}")
        elif (receipt["status"] == "timeout") != (code in TIMEOUTS):
            self._bad("E1", f"{subject}: a receipt {receipt['status']} for {code}")
        elif receipt["status"] == "ok" and receipt["effect_kind"] in check_app.EFFECTS:
            self._of_a_call(subject, hash, receipt)

    def _of_a_call(self, subject: str, hash: bytes, receipt: Plain) -> None:
        """What an effect answers is the number of the call: it must have been one of this intent."""
        want = intents_want(self.model, hash)
        if want is None:
            return
        number = int(check_app.unpacked(receipt["value"]))
        call = self.model.calls.get(number)
        if call is None:
            self._bad("E3", f"{subject}: a receipt of call {number}, which nobody made")
        elif (call["kind"], call["args"]) != (want.kind, check_app.unpacked(want.params)):
            self._bad("E3", f"{subject}: a receipt of another intent's call {number}")


def intents_want(model: Model, hash: bytes) -> Want | None:
    found = model.intents.wants.get(hash)
    return None if found is None else found[1]


def calls(model: Model) -> Iterator[Violation]:
    """E3: all calls of an intent carry one key, and no other intent's calls carry it."""
    by_key: dict[str, tuple[str, str, list[str]]] = {}
    # An order without a key of its own is one intent, and one more for each redrive and fork.
    intents: Counter[tuple[str, str]] = Counter()
    for _, want in model.intents.wants.values():
        if want.kind in check_app.EFFECTS:
            intents[want.kind, check_app.unpacked(want.params)[1]] += 1
    keys: dict[tuple[str, str], set[str]] = {}
    for number, call in sorted(model.calls.items()):
        what = (call["kind"], call["world"], call["args"])
        if not call["key"]:
            yield Violation("E3", f"call {number} has no key")
        elif by_key.setdefault(call["key"], what) != what:
            yield Violation("E3", f"call {number} has the key of another intent")
        order = (call["kind"], call["args"][1])
        seen = keys.setdefault(order, set())
        seen.add(call["key"])
        if order[1] and len(seen) > intents[order]:
            yield Violation("E3", f"call {number}: {len(seen)} keys of {intents[order]} intents")
