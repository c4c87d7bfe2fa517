"""Budgets: spending limits of effects, in money or tokens, per universe and per world.

    set_limit          set or remove the limit of an account
    reserve            reserve the maximum cost of a call in all its accounts, or in none
    settle             replace a reservation by the actual cost (0: the call was not made)
    settle_by_claim    settle without a reservation number, by the holder of its claim
    settle_after_loss  settle by a worker that has lost that claim
    wait_for_capacity  queue an item until reservations of other calls are settled
    write_off          book old unsettled reservations in full, because their real cost is unknown

- A reservation never raises spent + reserved above a limit, even with concurrent callers: the check and
  the change run when the commit is applied. A call that costs more than its reservation is booked in
  full. Then no further reservation is granted.
- A reservation has the key of its intent and covers one call. A repeated request, for a claim that was
  released, gets the open reservation. If a claim has expired since, the crashed worker may have made the
  call. Then the old reservation is booked in full and a new one is made. After settlement the key may
  reserve again: a repeated call is another cost.
- A reservation has a number that is never reused, and the number of its claim. Settling requires one of
  them, so a late settlement cannot settle a newer reservation.
- The commit that ends a reservation wakes the first waiting items of its accounts, by priority and fair
  rank. They are admitted before items that arrive later.
- An account is (universe, scope, unit). The scope is a world's id, or empty for the whole universe. A
  world without a limit uses the limit of `DEFAULT_SCOPE`. Without any limit, every reservation is granted
  and counted.

Amounts are whole numbers: tokens, or millionths of the currency. Floats would not add up.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec, failpoints
from holdfast.codec import Record
from holdfast.durable import queue as queues
from holdfast.durable.validation import check_limit, check_name, check_time
from holdfast.effects import daily_costs
from holdfast.errors import Invalid
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

UNIVERSE_SCOPE = ""
DEFAULT_SCOPE = "*"
MONEY = "money"
TOKENS = "tokens"
UNITS = (MONEY, TOKENS)

AMOUNT_MAX = 1 << 60
# The delay code of an effect that waits for capacity.
BUDGET_RESERVED = "budget_reserved"
# Maximum waiting items to wake and to scan at a time. Some have left the queue meanwhile.
WAKE_MAX = 4
WAKE_SCAN_MAX = 32


class Cost(Record, frozen=True):
    """An amount of one unit, and the model that was called, if any."""

    unit: str
    amount: int
    model: str = ""


class BudgetAccount(Record, frozen=True):
    """The balance of an account."""

    spent: int = 0
    reserved: int = 0
    limit: int | None = None

    def remaining(self) -> int | None:
        return None if self.limit is None else self.limit - self.spent - self.reserved


class ReservationResult(Record, frozen=True):
    """The result of `reserve`: `granted`, or the account without capacity. With `retry_later`, settlements
    of other reservations may free enough."""

    granted: bool
    number: int = 0
    scope: str = ""
    unit: str = ""
    account: BudgetAccount = BudgetAccount()
    retry_later: bool = False


class WaitingItem(NamedTuple):
    """A queue item that waits for capacity, with its order."""

    queue: str
    seq: int
    priority: int
    fair_rank: int


class Reservation(Record, frozen=True):
    """The open reservation of a key."""

    number: int
    world: str
    charges: list[Cost]
    reserved_ns: int
    # The number of its claim, and the number of claims that had expired before.
    claim: int = 0
    expiries: int = 0


@operation("budget.set_limit")
def set_limit(txn: Txn, universe: str, scope: str, unit: str, amount: int | None) -> BudgetAccount:
    """Set a limit, or remove it with None. Below the spent amount, no further reservation is granted."""
    if amount is not None:
        _check_charges([Cost(unit, amount)])
    key = _limit_key(universe, scope, unit)
    if amount is None:
        txn.delete(key)
    else:
        txn.put(key, schema.encode_int(amount))
    if scope != DEFAULT_SCOPE:
        _wake_waiting(txn, universe, scope)
    return account(txn, universe, scope, unit)


@operation("budget.reserve")
def reserve(
    txn: Txn,
    universe: str,
    world: str,
    key: str,
    charges: list[Cost],
    claim: int = 0,
    expiries: int = 0,
) -> ReservationResult:
    """Reserve all costs in the accounts of the world and the universe, or none."""
    if failpoints.armed:
        failpoints.hit("budget.reserve", world)
    check_name("world", world)
    _check_charges(charges)
    open_reservation = reservation(txn, universe, key)
    if open_reservation is not None and open_reservation.expiries >= expiries:
        if open_reservation.claim != claim:
            txn.put(_key(universe, "k", key), codec.pack(replace(open_reservation, claim=claim)))
        return ReservationResult(True, open_reservation.number)
    if open_reservation is not None:
        _settle(txn, universe, key, open_reservation, open_reservation.charges)
    for charge in charges:
        for scope in (world, UNIVERSE_SCOPE):
            balance = account(txn, universe, scope, charge.unit)
            remaining = balance.remaining()
            if remaining is not None and charge.amount > remaining:
                may_fit_later = charge.amount <= remaining + balance.reserved
                return ReservationResult(False, 0, scope, charge.unit, balance, may_fit_later)
    counter = _key(universe, "n")
    number = txn.count(counter) + 1
    txn.add(counter, 1)
    new_reservation = Reservation(number, world, charges, txn.now_ns, claim, expiries)
    txn.put(_key(universe, "k", key), codec.pack(new_reservation))
    txn.put(_key(universe, "t", new_reservation.reserved_ns, key), b"")
    _add_to_accounts(
        txn, universe, new_reservation, "r", {charge.unit: charge.amount for charge in charges}
    )
    return ReservationResult(True, number)


@operation("budget.settle")
def settle(txn: Txn, universe: str, key: str, number: int, charges: list[Cost]) -> bool:
    """Replace the reservation by the actual cost. Return False if it was settled before."""
    _check_charges(charges)
    open_reservation = reservation(txn, universe, key)
    if open_reservation is None or open_reservation.number != number:
        return False
    _settle(txn, universe, key, open_reservation, charges)
    return True


@operation("budget.settle_by_claim")
def settle_by_claim(txn: Txn, universe: str, key: str, charges: list[Cost] | None) -> bool:
    """Settle by the holder of the reservation's claim, which needs no reservation number. Without
    charges the reservation is booked in full."""
    open_reservation = reservation(txn, universe, key)
    if open_reservation is None:
        return False
    _settle(
        txn,
        universe,
        key,
        open_reservation,
        open_reservation.charges if charges is None else charges,
    )
    return True


@operation("budget.settle_after_loss")
def settle_after_loss(
    txn: Txn, universe: str, key: str, claim: int, charges: list[Cost] | None
) -> bool:
    """Settle by a worker that has lost the claim. An open reservation of another claim belongs to another
    call. In that case this call is booked in full already."""
    open_reservation = reservation(txn, universe, key)
    if open_reservation is None or open_reservation.claim != claim:
        return False
    _settle(
        txn,
        universe,
        key,
        open_reservation,
        open_reservation.charges if charges is None else charges,
    )
    return True


def wait_for_capacity(txn: Txn, universe: str, scope: str, waiting: WaitingItem) -> None:
    """Queue an item for capacity in the accounts of a scope."""
    txn.put(_waiting_key(universe, scope, waiting), waiting.queue.encode())


def is_waiting(txn: Txn, universe: str, scope: str, waiting: WaitingItem) -> bool:
    """Whether an item waits for capacity in the accounts of a scope."""
    return txn.get(_waiting_key(universe, scope, waiting)) is not None


def waiting_delay_ns(txn: Txn, universe: str, world: str, each_ns: int) -> int:
    """Add a call to a world's waiting calls, spaced by `each_ns`, and return the delay of the new one."""
    key = _key(universe, "w", world)
    last_ns = max(txn.count(key), txn.now_ns) + each_ns
    txn.put(key, schema.encode_int(last_ns))
    return last_ns - txn.now_ns


@operation("budget.write_off")
def write_off(txn: Txn, universe: str, older_than_ns: int, limit: int) -> int:
    """Book unsettled reservations older than this in full, and return their number."""
    check_time("older_than_ns", older_than_ns)
    check_limit(limit)
    by_time = _key(universe, "t")
    rows = txn.scan(by_time, by_time + tuples.pack_int(txn.now_ns - older_than_ns), limit)
    for row, _ in rows:
        _, key = tuples.unpack(row[len(by_time) :])
        assert isinstance(key, str)
        open_reservation = reservation(txn, universe, key)
        assert open_reservation is not None, "the index follows the reservations"
        _settle(txn, universe, key, open_reservation, open_reservation.charges)
    return len(rows)


def account(txn: Txn, universe: str, scope: str, unit: str) -> BudgetAccount:
    """Return the current balance of an account."""
    return BudgetAccount(
        txn.count(_key(universe, "s", scope, unit)),
        txn.count(_key(universe, "r", scope, unit)),
        limit_of(txn, universe, scope, unit),
    )


def list_accounts(
    txn: Txn, universe: str, after: tuple[str, str] | None, limit: int
) -> list[tuple[str, str]]:
    """Return (scope, unit) of the accounts that have a limit or had a call, in order, after an account."""
    check_limit(limit)
    found: set[tuple[str, str]] = set()
    for kind in ("l", "s", "r"):
        prefix = _key(universe, kind)
        lo = prefix + tuples.pack(after) + b"\x00" if after else prefix
        for key, _ in txn.scan(lo, tuples.prefix_end(prefix), limit):
            scope, unit = tuples.unpack(key)[-2:]
            found.add((str(scope), str(unit)))
    return sorted(found)[:limit]


def limit_of(txn: Txn, universe: str, scope: str, unit: str) -> int | None:
    """Return the limit of an account. A world without a limit uses that of `DEFAULT_SCOPE`."""
    row = txn.get(_limit_key(universe, scope, unit))
    if row is None and scope not in (UNIVERSE_SCOPE, DEFAULT_SCOPE):
        row = txn.get(_limit_key(universe, DEFAULT_SCOPE, unit))
    return None if row is None else schema.decode_int(row)


def reservation(txn: Txn, universe: str, key: str) -> Reservation | None:
    check_name("key", key)
    row = txn.get(_key(universe, "k", key))
    return None if row is None else codec.unpack_as(Reservation, row)


def open_reservations(txn: Txn, universe: str, limit: int) -> list[Reservation]:
    """Return open reservations, the oldest first."""
    check_limit(limit)
    by_time = _key(universe, "t")
    rows = txn.scan(by_time, tuples.prefix_end(by_time), limit)
    found = [reservation(txn, universe, str(tuples.unpack(key)[-1])) for key, _ in rows]
    return [one for one in found if one is not None]


# -- inside --------------------------------------------------------------------------------------


def _waiting_key(universe: str, scope: str, waiting: WaitingItem) -> bytes:
    # Items of two queues may have equal seqs and ranks.
    queue_digest = codec.digest(waiting.queue.encode())[:8]
    order = (-waiting.priority, waiting.fair_rank, waiting.seq, queue_digest)
    return _key(universe, "q", scope, *order)


def _settle(
    txn: Txn, universe: str, key: str, open_reservation: Reservation, charges: list[Cost]
) -> None:
    txn.delete(_key(universe, "t", open_reservation.reserved_ns, key))
    txn.delete(_key(universe, "k", key))
    _add_to_accounts(
        txn,
        universe,
        open_reservation,
        "r",
        {charge.unit: -charge.amount for charge in open_reservation.charges},
    )
    _add_to_days(txn, universe, open_reservation, charges)
    _add_to_accounts(txn, universe, open_reservation, "s", _amounts(charges))
    for scope in (open_reservation.world, UNIVERSE_SCOPE):
        _wake_waiting(txn, universe, scope)


def _add_to_days(txn: Txn, universe: str, owner: Reservation, charges: list[Cost]) -> None:
    """Add charges to the spending of the day, before they are added to the accounts."""
    for charge in charges:
        if charge.amount:
            for scope in (owner.world, UNIVERSE_SCOPE):
                spent = txn.count(_key(universe, "s", scope, charge.unit))
                daily_costs.add(
                    txn, universe, scope, charge.unit, charge.model, charge.amount, spent
                )


def _wake_waiting(txn: Txn, universe: str, scope: str) -> None:
    """Make the first waiting items of a scope ready, because capacity may be free."""
    prefix = _key(universe, "q", scope)
    woken = 0
    for key, queue in txn.scan(prefix, tuples.prefix_end(prefix), WAKE_SCAN_MAX):
        if woken == WAKE_MAX:
            return
        txn.delete(key)
        seq = tuples.unpack(key[len(prefix) :])[2]
        assert isinstance(seq, int)
        woken += queues.make_ready(txn, queue.decode(), seq, BUDGET_RESERVED)


def _amounts(charges: list[Cost]) -> dict[str, int]:
    return {charge.unit: charge.amount for charge in charges}


def _add_to_accounts(
    txn: Txn, universe: str, owner: Reservation, column: str, amounts: dict[str, int]
) -> None:
    for unit, amount in amounts.items():
        for scope in (owner.world, UNIVERSE_SCOPE):
            txn.add(_key(universe, column, scope, unit), amount)


def _check_charges(charges: list[Cost]) -> None:
    units = [charge.unit for charge in charges]
    if not set(units) <= set(UNITS) or len(units) != len(set(units)) or not units:
        raise Invalid(what="charges", found=units, expected=UNITS)
    for charge in charges:
        if not 0 <= charge.amount <= AMOUNT_MAX:
            raise Invalid(what=charge.unit, found=charge.amount, min=0, max=AMOUNT_MAX)


def _limit_key(universe: str, scope: str, unit: str) -> bytes:
    if unit not in UNITS:
        raise Invalid(what="unit", found=unit, expected=UNITS)
    if scope not in (UNIVERSE_SCOPE, DEFAULT_SCOPE):
        check_name("scope", scope)
    return _key(universe, "l", scope, unit)


def _key(universe: str, *path: tuples.Element) -> bytes:
    """Return a key below the app state prefix "budget" <universe>, followed by one of

    "l" <scope> <unit>       limits
    "s" <scope> <unit>       spent
    "r" <scope> <unit>       reserved
    "n"                      the number of the last reservation
    "m", "mb"                spending by day and model (`daily_costs`)
    "k" <key>                open reservations
    "t" <reserved_ns> <key>  the same, by time
    "w" <world>              when the last waiting call of a world is retried
    "q" <scope> <-priority> <fair rank> <seq> <hash of queue>   items that wait for capacity
    """
    check_name("universe", universe)
    return schema.key_prefix(schema.Space.APP_STATE, "budget", universe, *path)
