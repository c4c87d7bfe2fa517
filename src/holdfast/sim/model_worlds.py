"""What a universe should be: the model that `check_worlds` moves and `check_world_rows` compares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from holdfast.sim import check_app
from holdfast.sim.check_app import Want
from holdfast.sim.model_intents import Intents, Open

Plain = dict[str, Any]

# The queue of events that a reducer raised on, in every universe.
FAILURES = "failed-events"


@dataclass(slots=True)
class World:
    world_id: str
    name: str = ""
    # A fork begins above its parent's height, with its state.
    base: int = 0
    forked: bool = False
    bodies: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # when each entry was committed
    steps: list[Plain] = field(default_factory=list)
    # What each entry wanted.
    wants: list[list[Want]] = field(default_factory=list)
    states: list[Plain] = field(default_factory=lambda: [check_app.initial()])
    delivered: dict[int, tuple[str | None, list[Any]]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)  # acknowledged: somebody relies on it
    # Keys of messages: the number of the first, what it said, and when.
    keys: dict[str, tuple[int, list[Any], int]] = field(default_factory=dict)
    # What a fork took over of its parent's wishes.
    given: Open = field(default_factory=Open)
    # What keys of effects stand for, by the names of their intents, in whatever generation.
    ordered: dict[bytes, bytes] = field(default_factory=dict)
    status: str = "active"
    worker: str | None = None
    held: bool = False
    epoch: int = 0
    losses: Counter[int] = field(default_factory=Counter)
    # Of these, the ones while that message was surely there.
    due_losses: Counter[int] = field(default_factory=Counter)
    # It is run by itself, so that nobody else is to blame for the next loss.
    alone: bool = False
    redriven: Counter[str] = field(default_factory=Counter)
    # When items were sent, by seq; since when it has stopped before one, by seq; and since when items
    # of a type were waited for that were given up.
    sent_ns: dict[int, int] = field(default_factory=dict)
    stopped_ns: dict[int, int] = field(default_factory=dict)
    missed_ns: dict[str, int] = field(default_factory=dict)

    # Since when it waits for the code that made an entry, by height.
    code_ns: dict[int, int] = field(default_factory=dict)

    # From when on its rows may go: it is deleted, or purged.
    erased_ns: int | None = None
    # Where it was, and when, as histories were cut the last time.
    trimmed: tuple[int, int] | None = None

    @property
    def height(self) -> int:
        return self.base + len(self.bodies)

    @property
    def cursor(self) -> int:
        return len(self.bodies)

    def erasable(self, now_ns: int) -> bool:
        """Whether its rows may be gone, or some of them."""
        return self.erased_ns is not None and now_ns >= self.erased_ns

    def code_at(self, height: int) -> str:
        """The version of the code that made an entry; empty where there is none."""
        at = height - self.base
        return str(self.steps[at - 1]["code"]) if 0 < at <= len(self.steps) else ""

    def state_at(self, height: int) -> Plain | None:
        at = height - self.base
        return self.states[at] if 0 <= at < len(self.states) else None


@dataclass(slots=True)
class Model:
    """All worlds of one life of the store, by subject, and what they want of others."""

    worlds: dict[str, World] = field(default_factory=dict)
    intents: Intents = field(default_factory=Intents)
    # When its present host got a world.
    granted_ns: dict[str, int] = field(default_factory=dict)
    # Whether inboxes are full at times.
    crowded: bool = False
    # What histories keep, `entries` and `ns`; empty: all; None: that is not known.
    keep: Plain | None = None
    # Deleted worlds: the last number that their inboxes gave.
    closed: dict[str, int] = field(default_factory=dict)
    # Messages to other stores, by intent: where they were accepted.
    accepted: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    # Calls to the world outside, by number.
    calls: dict[int, Plain] = field(default_factory=dict)
    # Failed events by their number in the queue of failures: (subject, seq, id).
    letters: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    letters_last: int = 0
    redriven: set[int] = field(default_factory=set)
    # By incarnation: the event types that its code does not know.
    unknown: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # ... and which version that is.
    versions: dict[tuple[str, str], str] = field(default_factory=dict)

    def world(self, subject: str) -> World:
        found = self.worlds.get(subject)
        if found is None:
            found = self.worlds[subject] = World(subject.partition("/")[2])
        return found


def id_of(ingress: Plain) -> str:
    """The name of a message, nobody else's: mail has its sender's, too, for an account that was deleted
    and made again may be sent the same once more, and moves the money once more. A timer has its own,
    for it may repeat."""
    if ingress["kind"] == "receipt":
        return ""
    id = str(check_app.event_of(ingress)["id"])
    if ingress["kind"] == "timer":
        return f"{ingress['intent_hash'].hex()}:{id}"
    return f"{ingress['from_world']}:{id}" if ingress["kind"] == "fabric" else id
