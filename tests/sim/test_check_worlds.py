"""Every checker of worlds fails on a history that is wrong in its way, and not on one that is right."""

import hashlib
from collections.abc import Callable

import pytest

from holdfast.clock import S
from holdfast.sim import check_app, check_worlds
from holdfast.sim.checkers import CHECKERS, check_all
from tests.sim.universe import (
    SUBJECT,
    Universe,
    W,
    came,
    event,
    intent,
    lease,
    pack,
    paid,
    queue_of,
    receipt,
    record,
    renewed,
    row,
)

BOX = ("inboxes", SUBJECT)
JOURNAL = ("journals", SUBJECT)
CATALOG = ("worlds", "u")


def told() -> Universe:
    """Two payments sent and journaled, a third that waits."""
    u = Universe().granted(1)
    u.sent(2, 1, paid("p1", 5), "k1").sent(3, 2, paid("p2", 7), "k2")
    u.cycle(4, paid("p1", 5), paid("p2", 7))
    return u.sent(5, 3, paid("p3", 1), "k3")


def moved() -> Universe:
    """Money moved to another account; it waits in that inbox."""
    u = Universe().granted(1).sent(2, 1, event("Moved", id="m", amount=2, to="w2"))
    u.cycle(3, event("Moved", id="m", amount=2, to="w2"))
    [want] = u.wants
    mail = came("fabric", "Paid", paid("m>", 2)[2], want.hash, from_world=W, from_height=1)
    rows = {1: row(f"fabric:{want.hash.hex()}", mail)}
    u.arrived(receipt(want))
    u.rows["inboxes"]["u/w2"] = {"rows": rows, "cursor": 0, "last_seq": 1}
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["w2"] = record("w2")
    catalog["names"]["Account/w2"] = "w2"
    catalog["counts"]["active"] = 2
    catalog["hints"].append(["", "w2"])
    return u


def ordered() -> Universe:
    """An effect wanted, and in its queue."""
    u = Universe().granted(1).sent(2, 1, event("Ordered", id="o", what="a", key=None))
    u.cycle(3, event("Ordered", id="o", what="a", key=None))
    return u.waits(u.wants[0], "u/effects/fx.quote")


def forked(**lineage: object) -> Universe:
    """A fork of the account after its first entry."""
    u = told()
    state = u.state_bytes(1)
    made = record(
        "c1",
        lineage={
            "parent_world_id": W,
            "parent_snapshot_hash": hashlib.sha256(state).digest(),
            "forked_at_height": 1,
            **lineage,
        },
    )
    u.did(6, "plant", {"name": "c1", "child_id": "c1"}, made)
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["c1"] = made
    catalog["names"]["Account/c1"] = "c1"
    catalog["counts"]["active"] = 2
    hash = u.rows["journals"][SUBJECT]["entries"][1]["hash"]
    head = {
        "height": 1,
        "hash": hash,
        "checkpoint": 1,
        "floor": 2,
        "below": hash,
        "packed": 0,
    }
    u.rows["journals"]["u/c1"] = {"head": head, "entries": {}, "doubled": []}
    saved = {"hash": b"", "at_ns": 0, "bytes": 0, "state": state}
    u.rows["snapshots"]["u/c1"] = {"states": {1: saved}, "baseline": {"height": 1, "hash": b""}}
    return u


def failing() -> Universe:
    """A reducer that raised, and its dead letter."""
    botched = event("Botched", id="b")
    u = Universe().granted(1).sent(2, 1, botched).cycle(3, botched)
    letter = pack([W, 1, pack(botched)])
    rows = queue_of()
    rows["dead"] = {1: {"payload": letter, "blob": b""}}
    rows["died"] = [[9, 1]]
    u.rows["queues"]["u/failed-events"] = rows
    return u


def moody() -> Universe:
    """A reducer that saw what nothing but the digest of its cycle tells."""
    u = Universe().granted(1)
    ingress = [event("Moody", id="m"), paid("p", 5)]
    for seq, one in enumerate(ingress, 1):
        u.sent(2, seq, one)
    return u.cycle(3, *ingress)


def parked(u: Universe, height: int) -> Universe:
    blocker = {"code": "replay_diverged", "text": "", "height": height}
    args = {"universe": "u", "world_id": W, "held": lease("a", 1), "blocker": blocker}
    return u.did(6, "tenure.park", args)


def led(*decisions: list[object], **row: object) -> Universe:
    """An authority log, and the lease it should lead to."""
    u = told()
    kept = {
        n: {"hash": b"", "at_ns": 0, "body": pack(one), "blob": b""}
        for n, one in enumerate(decisions, 1)
    }
    u.rows["journals"]["u/authority"] = {"head": {}, "entries": kept, "doubled": []}
    base = {"state": "held", "worker": "l", "incarnation": "1", "generation": 1, "epoch": 1}
    u.rows["leases"]["u/authority"] = {**base, "expires_ns": 9, "by": ["l"], **row}
    return u


ACQUIRED = ["acquired", "l", "1", "id", 1, 1, 3, 9, ""]
RELEASED = ["released", "l", "1", "id", 1, 1, 5, 9, ""]

RIGHT: dict[str, Callable[[], Universe]] = {
    "an account": told,
    "a key that may be forgotten by now": lambda: told().sent(16, 4, paid("p3", 1), "k3"),
    "mail": moved,
    "an effect": ordered,
    "a fork": forked,
    "a failure": failing,
    "a leader": lambda: led(ACQUIRED),
    "a moody account": moody,
    "a moody account is parked at the end of the cycle": lambda: parked(moody(), 2),
    "a history is cut within its bound": lambda: trimmed(6, 2),
    "a purged account is erased": lambda: erased(purged()),
    "a deleted account is erased after its time": lambda: erased(deleted(41)),
}


def snapshot_of(state: bytes) -> dict[str, object]:
    saved = {"hash": b"", "at_ns": 0, "bytes": 0, "state": state}
    return {"states": {2: saved}, "baseline": {"height": 2, "hash": b""}}


def trimmed(at_s: float, floor: int, *, told_of: bool = True) -> Universe:
    """Two entries from second 4, cut at a time to begin at a floor; one of them is to be kept, and
    both for two seconds."""
    u = told()
    if told_of:
        u.did(at_s, "history.trim", {"universe": "u", "limit": 3}, False)
    kept = u.rows["journals"][SUBJECT]
    kept["head"] = {**kept["head"], "floor": floor, "below": kept["entries"][floor - 1]["hash"]}
    for height in range(1, floor):
        del kept["entries"][height]
    states = {
        at: {"hash": b"", "at_ns": 0, "bytes": 0, "state": u.state_bytes(at)} for at in (1, 2)
    }
    u.rows["snapshots"][SUBJECT] = {"states": states, "baseline": {"height": 2, "hash": b""}}
    return u


def purged(*, force: bool = True) -> Universe:
    args = {"universe": "u", "world_id": W, "head": 2, "force": force}
    return told().did(6, "purge.begin", args, record(W, status="deleted"), actor="keeper")


def erased(u: Universe, *left: str) -> Universe:
    """Its rows are gone, but for some."""
    for space in {"journals", "inboxes", "snapshots"} - {*left}:
        u.rows[space] = {}
    catalog = u.rows["worlds"]["u"]
    catalog["records"], catalog["names"], catalog["counts"], catalog["hints"] = {}, {}, {}, []
    return u


def deleted(at_s: float) -> Universe:
    """It was deleted, by which its host is fenced; its rows stay for nine seconds."""
    args = {"universe": "u", "world_id": W, "event": "delete"}
    return told().did(at_s, "catalog.change", args, record(W, status="deleted"), actor="keeper")


# As the configuration of these histories says.
UNKNOWN_S = 2


def given_up() -> Universe:
    """An item that its code did not know, and that was given up in time."""
    return (
        Universe()
        .runs("a", "Renewed")
        .granted(1)
        .sent(2, 1, renewed("p"), "k")
        .stopped(3, 1)
        .granted(4, epoch=2)
        .cycle(4 + UNKNOWN_S, renewed("p"), epoch=2, outcome="unknown")
    )


def test_an_item_that_is_given_up_in_time_breaks_nothing() -> None:
    good = given_up().sent(9, 1, renewed("p"), "k", already=True, item={"state": "dead", "seq": 1})
    assert [one for one in check_worlds.findings(good.history) if one.number == "I7"] == []


def given_up_behind(sent_s: float, at_s: float) -> Universe:
    """Another of its type, that was sent later and given up after it."""
    return (
        given_up()
        .sent(sent_s, 2, renewed("q"))
        .stopped(8, 2, epoch=2)
        .granted(8.1, epoch=3)
        .cycle(at_s, renewed("q"), epoch=3, outcome="unknown")
    )


def test_an_item_may_wait_behind_another_of_its_type() -> None:
    good = given_up_behind(5, 8.2)
    assert [one for one in check_worlds.findings(good.history) if one.number == "I7"] == []
    early = given_up_behind(7, 8.2)
    assert [one.number for one in check_worlds.findings(early.history)] == ["I7"]


def by_other_code() -> Universe:
    """Other code made the entry, and the worker whose state lacks a field gives the world back."""
    made = Universe().runs("a").runs("b", version=check_app.FORMER).granted(1)
    return made.sent(2, 1, paid("p", 1)).cycle(3, paid("p", 1)).granted(4, "b", 2)


def park_at(u: Universe, at_s: float, height: int) -> Universe:
    blocker = {"code": "replay_diverged", "text": "", "height": height}
    args = {"universe": "u", "world_id": W, "event": "park", "blocker": blocker}
    return u.did(at_s, "catalog.change", args, {"status": "parked"}, actor="o")


def test_a_world_that_waits_for_the_code_of_an_entry_is_parked_after_its_time() -> None:
    good = by_other_code().stopped(5, 0, "b", 2, height=1)
    assert check_worlds.findings(good.history) == []
    assert check_worlds.findings(park_at(good, 5 + UNKNOWN_S, 1).history) == []


WRONG: list[tuple[str, str, Callable[[], Universe]]] = [
    (
        "J6",
        "code that lacks a field goes on from entries that have it",
        lambda: (
            by_other_code()
            .sent(5, 2, paid("q", 1))
            .cycle(6, paid("q", 1), worker="b", epoch=2, code=check_app.FORMER)
        ),
    ),
    (
        "J6",
        "a world waits for the code that hosted it",
        lambda: by_other_code().granted(20, "a", 3).stopped(21, 0, "a", 3, height=1),
    ),
    (
        "J6",
        "code that has all fields cannot repeat an entry",
        lambda: (
            Universe()
            .runs("a")
            .granted(1, "b", 1)
            .sent(2, 1, paid("p", 1))
            .cycle(3, paid("p", 1), worker="b", code=check_app.FORMER)
            .granted(20, "a", 2)
            .stopped(21, 0, "a", 2, height=1)
        ),
    ),
    (
        "J6",
        "a world that waits for code is parked before its time",
        lambda: park_at(by_other_code().stopped(5, 0, "b", 2, height=1), 5 + UNKNOWN_S - 0.5, 1),
    ),
    (
        "J6",
        "a world is parked for code that it does not wait for",
        lambda: park_at(by_other_code(), 9, 1),
    ),
    (
        "J3",
        "an entry replies what its state is not",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), reply=pack([1, 6, "5", []]))
        ),
    ),
    (
        "J3",
        "an entry emitted what its event does not ask for",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), emitted=[b"x" * 32])
        ),
    ),
    (
        "J3",
        "a snapshot is not the state at its height",
        lambda: told().audit("snapshots", SUBJECT, to=snapshot_of(b"\x80")),
    ),
    (
        "J6",
        "the last entry of a cycle has no digest",
        lambda: Universe().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 5), state=b""),
    ),
    (
        "J6",
        "the digest is that of another state",
        lambda: (
            Universe().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 5), state=b"x" * 32)
        ),
    ),
    (
        "J6",
        "a digest is not the last entry's alone",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .sent(2, 2, paid("q", 5))
            .cycle(
                3,
                paid("p", 5),
                paid("q", 5),
                state=check_app.digest_of(
                    {**check_app.initial(), "balance": 10, "rate": 5, "seen": 2}
                ),
            )
        ),
    ),
    (
        "J3",
        "a sound world is parked",
        lambda: parked(told(), 2),
    ),
    (
        "J3",
        "a moody account is parked at another height than the end of its cycle",
        lambda: parked(moody(), 1),
    ),
    (
        "J2",
        "a cycle on another head",
        lambda: (
            Universe().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 5), expected_head=4)
        ),
    ),
    ("J2", "an entry is missing", lambda: told().audit(*JOURNAL, "entries", 1)),
    (
        "J2",
        "an entry was changed",
        lambda: told().audit(*JOURNAL, "entries", 1, "body", to=b"other"),
    ),
    (
        "J4",
        "the baseline's snapshot is gone",
        lambda: told().audit(
            "snapshots", SUBJECT, to={"states": {}, "baseline": {"height": 2, "hash": b""}}
        ),
    ),
    (
        "J4",
        "a journal begins where there is no state",
        lambda: trimmed(6, 2).audit("snapshots", SUBJECT, "states", 1),
    ),
    ("J4", "a journal was cut above its bound", lambda: trimmed(7, 3).audit()),
    ("J4", "a journal was cut before its time", lambda: trimmed(5.9, 2).audit()),
    ("J4", "a journal was cut by nothing", lambda: trimmed(6, 2, told_of=False).audit()),
    (
        "J4",
        "a journal was cut above its baseline",
        lambda: trimmed(6, 3).audit("snapshots", SUBJECT, "baseline", "height", to=1),
    ),
    (
        "A1",
        "a purged world goes on",
        lambda: purged().cycle(7, paid("p3", 1)),
    ),
    (
        "L3",
        "the host of a purged world is not fenced",
        lambda: purged().cycle(7, paid("p3", 1)),
    ),
    (
        "A1",
        "a world was purged, and not deleted",
        lambda: told().did(
            6, "purge.begin", {"universe": "u", "world_id": W, "force": True}, record(W)
        ),
    ),
    ("L7", "a held world was purged without force", lambda: purged(force=False)),
    ("S4", "a purged world left its journal", lambda: erased(purged(), "journals").audit()),
    ("J2", "a world is gone that is not deleted", lambda: erased(told()).audit()),
    ("J2", "a deleted world is gone before its time", lambda: erased(deleted(42)).audit()),
    (
        "I1",
        "the inbox of a deleted world is gone before its time",
        lambda: deleted(42).audit(*BOX, "rows", 3),
    ),
    (
        "J2",
        "a journal was swept above its floor",
        lambda: trimmed(6, 2).audit(*JOURNAL, "entries", 2),
    ),
    (
        "L7",
        "a history was cut by a leader that leads no more",
        lambda: (
            told()
            .did(5, "authority.acquire", authority("l"), leading("l", 1), actor="l")
            .did(17, "_cut", {"lease": leading("l", 1)}, actor="l")
        ),
    ),
    (
        "J5",
        "the log of authority says another leader",
        lambda: led(ACQUIRED, worker="m", by=["m"]).audit(),
    ),
    ("J5", "authority was granted over a leader", lambda: led(ACQUIRED, ACQUIRED).audit()),
    (
        "J5",
        "authority was given back, and is held",
        lambda: led(ACQUIRED, RELEASED).audit(),
    ),
    ("I1", "what was acknowledged is nowhere", lambda: told().audit(*BOX, "rows", 3)),
    (
        "I1",
        "a message is there twice under two numbers",
        lambda: told().sent(6, 4, paid("p3", 1), "k4").audit(),
    ),
    (
        "I1",
        "a message was journaled with another body",
        lambda: Universe().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 6)),
    ),
    (
        "I2",
        "ingress was passed over",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, paid("p1", 5))
            .sent(2, 2, paid("p2", 5))
            .cycle(3, paid("p2", 5), seq=2)
        ),
    ),
    ("I2", "the cursor is behind the journal", lambda: told().audit(*BOX, "cursor", to=1)),
    (
        "I3",
        "a row below the cursor was not journaled",
        lambda: told().audit(*BOX, to={"rows": {}, "cursor": 3, "last_seq": 3}),
    ),
    (
        "I4",
        "a message of unknown outcome is lost",
        lambda: told().sent(6, 4, paid("p4", 1), "k4", result="unknown").audit(*BOX, "rows", 4),
    ),
    (
        "I4",
        "a row that nobody delivered",
        lambda: told().audit(*BOX, "rows", 4, to=row("k9", paid("p9", 1))),
    ),
    (
        "I4",
        "an entry of what nobody delivered",
        lambda: Universe().granted(1).cycle(3, paid("p", 5)),
    ),
    (
        "I4",
        "a retry under its key was delivered again",
        lambda: told().sent(6, 4, paid("p3", 1), "k3"),
    ),
    (
        "I5",
        "the key of one message was taken for another",
        lambda: told().sent(6, 3, paid("other", 1), "k3", already=True),
    ),
    (
        "I7",
        "code consumes an event that it does not know",
        lambda: (
            Universe()
            .runs("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .cycle(3, renewed("p"))
        ),
    ),
    (
        "I7",
        "an item is given up before its time",
        lambda: (
            Universe()
            .runs("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .stopped(3, 1)
            .granted(4, epoch=2)
            .cycle(3 + UNKNOWN_S - 0.5, renewed("p"), epoch=2, outcome="unknown")
        ),
    ),
    (
        "I7",
        "an item is given up without having waited",
        lambda: (
            Universe()
            .runs("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .cycle(9, renewed("p"), outcome="unknown")
        ),
    ),
    (
        "I7",
        "a key is answered as handled while its item waits",
        lambda: (
            Universe()
            .sent(2, 1, paid("p", 1), "k")
            .sent(3, 1, paid("p", 1), "k", already=True, item={"state": "handled", "seq": 1})
        ),
    ),
    (
        "I7",
        "a key is answered as handled while its item is dead",
        lambda: given_up().sent(
            9, 1, renewed("p"), "k", already=True, item={"state": "handled", "seq": 1}
        ),
    ),
    (
        "L3",
        "a host commits under a lease that another has",
        lambda: (
            Universe()
            .granted(1, "a", 1)
            .sent(2, 1, paid("p", 5))
            .granted(20, "b", 2)
            .cycle(21, paid("p", 5), worker="a", epoch=1)
        ),
    ),
    (
        "L3",
        "a host commits after its world was taken from it",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .did(
                3,
                "catalog.change",
                {"universe": "u", "world_id": W, "event": "pause"},
                record(W, status="paused"),
            )
            .cycle(4, paid("p", 5))
        ),
    ),
    (
        "L3",
        "a former leader places worlds",
        lambda: (
            told()
            .did(6, "authority.acquire", authority("l"), leading("l", 1))
            .did(7, "authority.force_release", {"universe": "u", "reason": ""}, 1)
            .did(8, "place", {"lease": leading("l", 1)})
        ),
    ),
    (
        "L1",
        "two lead at once",
        lambda: (
            told()
            .did(6, "authority.acquire", authority("l"), leading("l", 1))
            .did(7, "authority.acquire", authority("m"), leading("m", 2))
        ),
    ),
    (
        "L6",
        "a host that was fenced commits after all",
        lambda: (
            told()
            .failed(6, "commit", {"lease": lease("a", 1), "cycle": {}}, "fenced")
            .cycle(7, paid("p3", 1))
        ),
    ),
    (
        "A1",
        "a worker gets a world that is another's",
        lambda: (
            Universe()
            .did(1, "catalog.assign", {"universe": "u", "world_id": W, "worker": "b"})
            .granted(2, "a")
        ),
    ),
    (
        "A1",
        "a worker gets a world that is paused",
        lambda: (
            Universe()
            .did(
                1,
                "catalog.change",
                {"universe": "u", "world_id": W, "event": "pause"},
                record(W, status="paused"),
            )
            .granted(2, "a")
        ),
    ),
    (
        "S3",
        "a world is parked as stuck after one loss",
        lambda: told().granted(
            20,
            "b",
            lease=None,
            refusal="parked",
            record=record(
                W,
                status="parked",
                blocker={
                    "code": "reducer_stuck",
                    "text": "",
                    "height": 0,
                    "since_ns": 20 * S,
                },
            ),
        ),
    ),
    (
        "S3",
        "a reducer kills its worker, alone, for the third time, and its world is not parked",
        lambda: (
            told()
            .granted(20, "a", 2)
            .granted(40, "a", 3)
            .did(41, "tenure.try_alone", {"universe": "u", "world_id": W, "held": lease("a", 3)})
            .granted(60, "a", 4)
        ),
    ),
    ("S4", "worlds are counted wrong", lambda: told().audit(*CATALOG, "counts", to={"active": 2})),
    (
        "S4",
        "the worlds of a worker are not those assigned to it",
        lambda: told().audit(*CATALOG, "by_worker", to=[["b", W]]),
    ),
    ("R3", "a world has work, and no hint", lambda: told().audit(*CATALOG, "hints", to=[])),
    (
        "R3",
        "a world still waits when all should be at rest",
        lambda: told().did(60, "quiet", {"waiting": [f"{SUBJECT}/3"]}, False),
    ),
    ("E1", "an effect is nowhere", lambda: ordered().audit("queues", to={})),
    (
        "E1",
        "an effect is in its queue twice",
        lambda: (u := ordered()).audit(
            "queues",
            "u/effects/fx.quote",
            to=queue_of((1, intent(u.wants[0])), (2, intent(u.wants[0]))),
        ),
    ),
    (
        "E1",
        "an effect is in the queue of another kind",
        lambda: (u := ordered()).audit(
            "queues", to={"u/timers": queue_of((1, intent(u.wants[0])))}
        ),
    ),
    ("F1", "mail did not arrive", lambda: moved().audit("inboxes", "u/w2")),
    (
        "J1",
        "an effect that no entry wants",
        lambda: told().audit(
            "queues",
            "u/effects/fx.quote",
            to=queue_of((1, intent(check_app.Want(b"h" * 32, "fx.quote", b"")))),
        ),
    ),
    (
        "K1",
        "a fork has another state than its parent had",
        lambda: forked(parent_snapshot_hash=b"other"),
    ),
    (
        "K1",
        "a fork at a height that its parent never had",
        lambda: forked(forked_at_height=9),
    ),
    (
        "K1",
        "a fork inherited its parent's inbox",
        lambda: forked().audit(
            "inboxes",
            "u/c1",
            to={"rows": {1: row("k3", paid("p3", 1))}, "cursor": 0, "last_seq": 1},
        ),
    ),
    (
        "K1",
        "a fork does not know its parent",
        lambda: forked().audit(*CATALOG, "records", "c1", "lineage", to=None),
    ),
    ("D1", "a failed event is no dead letter", lambda: failing().audit("queues", to={})),
    (
        "D1",
        "a reducer raised, and nothing was kept",
        lambda: (
            Universe()
            .granted(1)
            .sent(2, 1, event("Botched", id="b"))
            .cycle(3, event("Botched", id="b"))
            .audit()
        ),
    ),
]


def authority(owner: str) -> dict[str, object]:
    return {"universe": "u", "owner": owner, "incarnation": "1", "ttl_ns": 10 * S}


def leading(owner: str, epoch: int) -> dict[str, object]:
    return lease(owner, epoch, until_s=16, resource="u/authority")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_is_right(name: str) -> None:
    assert check_all(RIGHT[name]().audit().history) == []


@pytest.mark.parametrize(("number", "what", "make"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_a_wrong_history_is_found_out(number: str, what: str, make: Callable[[], Universe]) -> None:
    found = CHECKERS[number](make().history)
    assert [violation.number for violation in found][:1] == [number]


def test_a_fickle_reducer_may_be_parked_and_no_other() -> None:
    fickle = event("Fickle", id="f")
    u = Universe().granted(1).sent(2, 1, fickle)
    park = {"universe": "u", "world_id": W, "held": lease("a", 1)}
    u.did(
        3, "tenure.park", {**park, "blocker": {"code": "replay_diverged", "text": "", "height": 1}}
    )
    assert CHECKERS["J3"](u.history) == []


def test_a_lease_that_is_granted_again_may_be_used_again() -> None:
    u = told().failed(6, "commit", {"lease": lease("a", 1), "cycle": {}}, "fenced")
    u.granted(20, "a", 2).cycle(21, paid("p3", 1), epoch=2)
    assert CHECKERS["L6"](u.history) == []


# -- the reducers, stated once more ----------------------------------------------------------------


def test_the_model_of_an_account_counts_as_a_person_would() -> None:
    u = Universe().cycle(1, paid("p1", 5), paid("p2", 7), event("Moved", id="m", amount=2, to="x"))
    right = {"balance": 10, "seen": 3, "rate": 7, "marks": [], "orders": [], "whim": 0, "news": 0}
    assert u.states[-1] == right
    rest = b"\xa4rate\xcb\x40\x1c\x00\x00\x00\x00\x00\x00\xa4seen\x03\xa4whim\x00"
    assert check_app.stored(u.states[-1]) == (
        b"\x87\xa7balance\x0a\xa5marks\x90\xa4news\x00\xa6orders\x90" + rest
    )
    assert check_app.stored(u.states[-1], check_app.FORMER) == (
        b"\x86\xa7balance\x0a\xa5marks\x90\xa6orders\x90" + rest
    )


def test_the_former_code_drops_the_news_where_it_goes_on_from_stored_bytes() -> None:
    u = Universe().cycle(1, renewed("p")).cycle(2, paid("q", 1), code=check_app.FORMER, base=1)
    assert [state["news"] for state in u.states] == [0, 1, 0]


def test_a_state_that_was_stored_has_a_float_where_one_belongs() -> None:
    assert isinstance(check_app.fresh({**check_app.initial(), "rate": 7})["rate"], float)
