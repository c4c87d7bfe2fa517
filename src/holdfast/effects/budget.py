"""Budgets: what effects may spend, in money or tokens, in a universe and in each of its worlds.

    limit      set, or lift, the limit of an account
    reserve    set aside the most that a call can cost, in every account it concerns, or in none
    settle     replace a reservation by what the call did cost (0: it was never made)
    close      settle without a number, by whoever holds the claim it was made for
    book_late  settle by whoever has lost that claim
    await_room stand in line for what others have set aside
    lapse      take reservations that nobody settled for long as spent: nobody knows better

- spent + reserved never exceeds a limit by a reservation, whoever asks at the same time: both are
  judged and changed where commits are applied. A call that costs more than its reservation is still
  booked in full; then nothing more is granted.
- A reservation has the key of its intent, and is for one call. Asked for again while it is open, for a
  claim that was given back, it is the same one. If a claim has expired since, the call may have been
  made by whoever died with it: then it is booked in full, and another is made. Once settled it is
  gone, and the key may reserve again: a repeated call is another bill.
- Each has a number that is never used again, and the number of the claim that it is for, and settling
  needs one of them, so a late answer cannot settle its successor's.
- Whoever ends a reservation wakes the first of those that stand in line for its accounts, by priority
  and turn, in the same commit. They are asked anew, before anybody who comes later.
- An account is (universe, scope, unit): the scope is a world's id, or empty for the whole universe.
  A world without a limit of its own has that of `EACH`. Without a limit all is granted and counted.

Amounts are whole numbers: tokens, or millionths of the currency. Floats would not add up.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import queue as queues
from holdfast.durable.bounds import check_limit, check_name, check_time
from holdfast.errors import Invalid
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

UNIVERSE = ""
EACH = "*"
MONEY = "money"
TOKENS = "tokens"
UNITS = (MONEY, TOKENS)

AMOUNT_MAX = 1 << 60
# Why an effect is put off that stands in line.
WAITS = "budget_reserved"
# Of a line so many are woken at a time, and so many looked at: some have left it.
WOKEN = 4
WOKEN_LOOKS = 32


class Charge(Record, frozen=True):
    """An amount of one unit."""

    unit: str
    amount: int


class Account(Record, frozen=True):
    """How an account stands."""

    spent: int = 0
    reserved: int = 0
    limit: int | None = None

    def room(self) -> int | None:
        return None if self.limit is None else self.limit - self.spent - self.reserved


class Answer(Record, frozen=True):
    """`granted`, or the account that stands against it; `later` if settlements could make room."""

    granted: bool
    number: int = 0
    scope: str = ""
    unit: str = ""
    account: Account = Account()
    later: bool = False


class Place(NamedTuple):
    """An item of a queue, and its place in line."""

    queue: str
    seq: int
    priority: int
    turn: int


class Reservation(Record, frozen=True):
    """What a key has set aside."""

    number: int
    world: str
    charges: list[Charge]
    reserved_ns: int
    # The claim that it is for, and how many claims had expired before that.
    claim: int = 0
    expiries: int = 0


@operation
def limit(txn: Txn, universe: str, scope: str, unit: str, amount: int | None) -> Account:
    """Set a limit; None lifts it. It may be below what is spent: then nothing more is granted."""
    if amount is not None:
        _check_charges([Charge(unit, amount)])
    key = _limit_key(universe, scope, unit)
    if amount is None:
        txn.delete(key)
    else:
        txn.put(key, schema.int_bytes(amount))
    if scope != EACH:
        _wake(txn, universe, scope)
    return account(txn, universe, scope, unit)


@operation
def reserve(
    txn: Txn,
    universe: str,
    world: str,
    key: str,
    charges: list[Charge],
    claim: int = 0,
    expiries: int = 0,
) -> Answer:
    """Set all charges aside, for the world and the universe, or none."""
    check_name("world", world)
    _check_charges(charges)
    found = reservation(txn, universe, key)
    if found is not None and found.expiries >= expiries:
        if found.claim != claim:
            txn.put(_key(universe, "k", key), codec.pack(replace(found, claim=claim)))
        return Answer(True, found.number)
    if found is not None:
        _close(txn, universe, key, found, found.charges)
    for charge in charges:
        for scope in (world, UNIVERSE):
            standing = account(txn, universe, scope, charge.unit)
            room = standing.room()
            if room is not None and charge.amount > room:
                later = charge.amount <= room + standing.reserved
                return Answer(False, 0, scope, charge.unit, standing, later)
    counter = _key(universe, "n")
    number = txn.count(counter) + 1
    txn.add(counter, 1)
    kept = Reservation(number, world, charges, txn.now_ns, claim, expiries)
    txn.put(_key(universe, "k", key), codec.pack(kept))
    txn.put(_key(universe, "t", kept.reserved_ns, key), b"")
    _move(txn, universe, kept, "r", {charge.unit: charge.amount for charge in charges})
    return Answer(True, number)


@operation
def settle(txn: Txn, universe: str, key: str, number: int, charges: list[Charge]) -> bool:
    """Book what it cost instead of what was set aside; False if that was done before."""
    _check_charges(charges)
    found = reservation(txn, universe, key)
    if found is None or found.number != number:
        return False
    _close(txn, universe, key, found, charges)
    return True


@operation
def close(txn: Txn, universe: str, key: str, charges: list[Charge] | None) -> bool:
    """`settle` by whoever has the claim that the reservation was made for, so without its number;
    without charges it is booked in full."""
    found = reservation(txn, universe, key)
    if found is None:
        return False
    _close(txn, universe, key, found, found.charges if charges is None else charges)
    return True


@operation
def book_late(txn: Txn, universe: str, key: str, claim: int, charges: list[Charge] | None) -> bool:
    """`close` by whoever has lost the claim. What is open for another claim is another call's: then
    this one has been booked, at its most."""
    found = reservation(txn, universe, key)
    if found is None or found.claim != claim:
        return False
    _close(txn, universe, key, found, found.charges if charges is None else charges)
    return True


def await_room(txn: Txn, universe: str, scope: str, place: Place) -> None:
    """Stand in line for room in a scope's accounts."""
    # Two queues may have given the same number and turn.
    which = codec.digest(place.queue.encode())[:8]
    order = (-place.priority, place.turn, place.seq, which)
    txn.put(_key(universe, "q", scope, *order), place.queue.encode())


def line_up(txn: Txn, universe: str, world: str, each_ns: int) -> int:
    """How long a world's calls that wait for room take, one after the other, with one more."""
    key = _key(universe, "w", world)
    last_ns = max(txn.count(key), txn.now_ns) + each_ns
    txn.put(key, schema.int_bytes(last_ns))
    return last_ns - txn.now_ns


@operation
def lapse(txn: Txn, universe: str, older_than_ns: int, limit: int) -> int:
    """Book in full what was reserved longer ago than this and never settled; how many."""
    check_time("older_than_ns", older_than_ns)
    check_limit(limit)
    by_time = _key(universe, "t")
    rows = txn.scan(by_time, by_time + tuples.pack_int(txn.now_ns - older_than_ns), limit)
    for row, _ in rows:
        _, key = tuples.unpack(row[len(by_time) :])
        assert isinstance(key, str)
        found = reservation(txn, universe, key)
        assert found is not None, "the index follows the reservations"
        _close(txn, universe, key, found, found.charges)
    return len(rows)


def account(txn: Txn, universe: str, scope: str, unit: str) -> Account:
    """How an account stands now."""
    return Account(
        txn.count(_key(universe, "s", scope, unit)),
        txn.count(_key(universe, "r", scope, unit)),
        limit_of(txn, universe, scope, unit),
    )


def limit_of(txn: Txn, universe: str, scope: str, unit: str) -> int | None:
    """The limit of an account: its own, or of a world without one that of each world."""
    told = txn.get(_limit_key(universe, scope, unit))
    if told is None and scope not in (UNIVERSE, EACH):
        told = txn.get(_limit_key(universe, EACH, unit))
    return None if told is None else schema.int_of(told)


def reservation(txn: Txn, universe: str, key: str) -> Reservation | None:
    check_name("key", key)
    row = txn.get(_key(universe, "k", key))
    return None if row is None else codec.unpack_as(Reservation, row)


# -- inside --------------------------------------------------------------------------------------


def _close(txn: Txn, universe: str, key: str, found: Reservation, charges: list[Charge]) -> None:
    txn.delete(_key(universe, "t", found.reserved_ns, key))
    txn.delete(_key(universe, "k", key))
    _move(txn, universe, found, "r", {charge.unit: -charge.amount for charge in found.charges})
    _move(txn, universe, found, "s", _amounts(charges))
    for scope in (found.world, UNIVERSE):
        _wake(txn, universe, scope)


def _wake(txn: Txn, universe: str, scope: str) -> None:
    """There may be room: let the first in line be asked."""
    line = _key(universe, "q", scope)
    woken = 0
    for key, queue in txn.scan(line, tuples.after(line), WOKEN_LOOKS):
        if woken == WOKEN:
            return
        txn.delete(key)
        seq = tuples.unpack(key[len(line) :])[2]
        assert isinstance(seq, int)
        woken += queues.call_up(txn, queue.decode(), seq, WAITS)


def _amounts(charges: list[Charge]) -> dict[str, int]:
    return {charge.unit: charge.amount for charge in charges}


def _move(txn: Txn, universe: str, of: Reservation, column: str, by: dict[str, int]) -> None:
    for unit, amount in by.items():
        for scope in (of.world, UNIVERSE):
            txn.add(_key(universe, column, scope, unit), amount)


def _check_charges(charges: list[Charge]) -> None:
    units = [charge.unit for charge in charges]
    if not set(units) <= set(UNITS) or len(units) != len(set(units)) or not units:
        raise Invalid(what="charges", found=units, expected=UNITS)
    for charge in charges:
        if not 0 <= charge.amount <= AMOUNT_MAX:
            raise Invalid(what=charge.unit, found=charge.amount, min=0, max=AMOUNT_MAX)


def _limit_key(universe: str, scope: str, unit: str) -> bytes:
    if unit not in UNITS:
        raise Invalid(what="unit", found=unit, expected=UNITS)
    if scope not in (UNIVERSE, EACH):
        check_name("scope", scope)
    return _key(universe, "l", scope, unit)


def _key(universe: str, *path: tuples.Element) -> bytes:
    """The space of app state has room for it: "budget" <u> and one of

    "l" <scope> <unit>       limits
    "s" <scope> <unit>       spent
    "r" <scope> <unit>       reserved
    "n"                      the number of the last reservation
    "k" <key>                open reservations
    "t" <reserved_ns> <key>  the same, by time
    "w" <world>              when the last of those that wait for room is asked again
    "q" <scope> <-priority> <turn> <seq> <hash of queue>   who stands in line for room
    """
    check_name("universe", universe)
    return schema.prefix(schema.Space.APP_STATE, "budget", universe, *path)
